"""Tests that a damaged checkpoint is reported in one line and an older one is used."""

import dataclasses
import json
import random
import shutil

import jax
import jax.numpy as jnp
import pytest

from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.config import OptimConfig
from qerl_jax.rl import update
from tests.faults import harness
from tests.model_folders import assert_trees_equal, with_norms


@pytest.fixture(scope="module")
def states():
    """Makes states of steps 2 and 4 that differ in every leaf."""
    fresh = update.init_state(with_norms()[1], OptimConfig())
    moved = lambda add: jax.tree.map(lambda leaf: (leaf + add).astype(leaf.dtype), fresh)
    return [dataclasses.replace(moved(step), step=jnp.int32(step)) for step in (2, 4)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, states):
    folder = tmp_path_factory.mktemp("run")
    files = StateFiles(folder, keep=3)
    for state in states:
        files.save(state, {"drawn": 10 * int(state.step)})
    return folder


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def newest(run, states):
    """Returns the step that is restored, checks that its state is the saved one, and returns the lines about it."""
    files = StateFiles(run, keep=3)
    step = files.newest()
    assert_trees_equal(files.restore(states[0], step), states[step // 2 - 1])
    assert files.supply(step) == {"drawn": 10 * step}
    return step, files.notes


def assert_passed_over(run, states):
    step, notes = newest(run, states)
    assert step == 2
    (note,) = notes
    assert f"{run / 'checkpoints' / '4'} is damaged: " in note and "\n" not in note
    assert note.endswith("it is skipped, and the run goes on from checkpoint 2")


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[pytest.mark.slow] * (n > 5)) for n in range(25)]
)
def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_taken(seed, run, states):
    paths = harness.files_of(run / "checkpoints" / "4")
    rng = random.Random(seed)
    # Half of them in the small files, which say how the large ones are read.
    harness.flip_somewhere(paths if seed % 2 else [rng.choice(paths)], rng)
    assert_passed_over(run, states)


@pytest.mark.slow
def test_no_flipped_bit_of_a_thousand_is_read(run, states):
    rng, paths = random.Random(30), harness.files_of(run / "checkpoints" / "4")
    for _ in range(1000):
        some = paths if rng.random() < 0.5 else [rng.choice(paths)]
        path, bit = harness.flip_somewhere(some, rng)
        assert StateFiles(run, keep=3).newest() == 2, (path, bit)
        harness.flip(path, bit)
    assert newest(run, states) == (4, [])


@pytest.mark.slow
def test_a_truncated_emptied_or_missing_file_is_found(run, states):
    folder = run / "checkpoints" / "4"
    for path in harness.files_of(folder):
        whole = path.read_bytes()
        for part in (whole[: len(whole) // 2], whole[:-1], b""):
            if part != whole:
                path.write_bytes(part)
                assert_passed_over(run, states)
        path.unlink()
        assert_passed_over(run, states)
        path.write_bytes(whole)
    assert newest(run, states) == (4, [])


def test_a_file_that_was_added_is_found(run, states):
    (run / "checkpoints" / "4" / "state" / "more").write_text("?")
    assert_passed_over(run, states)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"supply.json": 3}', 100_000 * "["])
def test_checksums_that_are_no_checksums_are_damage(text, run, states):
    (run / "checkpoints" / "4" / "checksums.json").write_text(text)
    assert_passed_over(run, states)


def test_where_all_checkpoints_are_damaged_the_run_is_refused_in_one_line(run, states):
    for step in ("2", "4"):
        (run / "checkpoints" / step / "supply.json").write_text("{}")
    with pytest.raises(ValueError) as error:
        StateFiles(run, keep=3).restore(states[0])
    text = str(error.value)
    assert "no checkpoint in" in text and "restore one from a copy" in text
    assert text.count("supply.json is not as it was written") == 2 and "\n" not in text


def test_an_export_of_a_damaged_step_is_refused_and_the_newest_whole_one_is_taken(run, states):
    harness.flip(run / "checkpoints" / "4" / "supply.json", 3)
    with pytest.raises(ValueError, match="4 is damaged: supply.json is not as it was written"):
        StateFiles(run, keep=None).params(4)
    step, params = StateFiles(run, keep=None).params()
    assert step == 2
    assert_trees_equal(params, states[0].params)


def test_a_damaged_checkpoint_counts_for_none_that_is_kept_and_is_written_anew(run, states):
    (run / "checkpoints" / "4" / "supply.json").write_text("{}")
    files = StateFiles(run, keep=2)
    files.save(dataclasses.replace(states[0], step=jnp.int32(3)))
    assert files.steps() == [2, 3]
    files.save(states[1], {"drawn": 40})
    assert StateFiles(run, keep=2).newest() == 4


def test_a_state_that_cannot_be_read_is_one_line(run, states):
    for path in harness.files_of(run / "checkpoints" / "4" / "state"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read as the state of this run") as error:
        StateFiles(run, keep=2).restore(states[0], 4)
    assert "\n" not in str(error.value)


def test_the_checksums_are_of_the_bytes_in_the_files(run):
    """The oracle is the output of sha256sum, which shares no code with ours."""
    folder = run / "checkpoints" / "4"
    sealed = json.loads((folder / "checksums.json").read_text())
    assert len(sealed) == len(harness.files_of(folder)) - 1
    for name, entry in sealed.items():
        shown = harness.run("sha256sum", folder / name).stdout
        assert shown.split()[0] == entry["sha256"]
        assert (folder / name).stat().st_size == entry["bytes"]
    assert "supply.json" in sealed
