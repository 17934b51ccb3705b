"""Tests that a full disk is reported in one line with path and remedy, and that no saved state is lost."""

import errno
import pathlib
import sys
import textwrap
from unittest import mock

import pytest

from qerl_jax import config
from qerl_jax.system import files
from qerl_jax.tracking import logger
from qerl_jax.training.trainer import train
from tests.faults import harness

pytestmark = pytest.mark.process
needs_mounts = pytest.mark.skipif(
    not harness.has_mounts(), reason="needs user namespaces, to mount a small file system"
)


def in_small_disk(size, code, folder, *others):
    """Runs a program on a folder, in which a file system of `size` is mounted, and returns what it printed."""
    script = f'mount -t tmpfs -o size={size} none {folder} && exec {sys.executable} -c "$0" "$@"'
    code = textwrap.dedent(code)
    ended = harness.run("unshare", "-rm", "sh", "-c", script, code, folder, *others)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


FREE = "free some space there, then start the command again"


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, f"No space left on device; {FREE}"),
        (errno.EROFS, "Read-only file system; make the file system writable, or choose another"),
        (errno.EIO, "Input/output error; check the disk"),
        (errno.EMFILE, "Too many open files; correct that, or choose another folder"),
    ],
)
def test_an_error_of_the_disk_names_path_reason_and_remedy(number, remedy, tmp_path, monkeypatch):
    failing = mock.Mock(side_effect=OSError(number, "text of the platform"))
    monkeypatch.setattr(pathlib.Path, "write_bytes", failing)
    with pytest.raises(files.DiskError) as error:
        files.write_whole(tmp_path / "page.html", "text")
    text, reason = str(error.value), remedy.split(";")[0]
    assert text.startswith(f"{tmp_path}/page.html: could not be written: ")
    assert text.replace("text of the platform", reason).split(": ", 2)[2].startswith(remedy)
    assert error.value.errno == number and "\n" not in text


@needs_mounts
def test_on_a_full_disk_a_row_is_there_as_a_whole_or_not_at_all(tmp_path):
    shown = in_small_disk(
        "64k",
        """
        import os, pathlib, sys
        from qerl_jax.system.files import DiskError
        from qerl_jax.tracking.logger import Logger, read_metrics
        folder = pathlib.Path(sys.argv[1])
        (folder / "ballast").write_bytes(bytes(20_000))
        log = Logger(folder, total_steps=10_000, quiet=True)
        row = {f"metric/{i}": i / 7 for i in range(100)}
        try:
            for step in range(1, 10_000):
                log.write(step, row)
        except DiskError as error:
            print(error)
        rows = read_metrics(folder)
        assert 5 < len(rows) == step - 1, (len(rows), step)
        assert (folder / "metrics.jsonl").read_bytes().endswith(b"}\\n")
        log.close()
        (folder / "ballast").unlink()
        again = Logger(folder, total_steps=10_000, step=3, quiet=True)
        again.write(4, row)
        again.close()
        assert read_metrics(folder) == rows[:4]
        """,
        tmp_path,
    )
    assert shown.startswith(f"{tmp_path}/metrics.jsonl: could not be written: No space left")


@pytest.mark.slow
@needs_mounts
def test_a_checkpoint_that_finds_no_room_is_one_line_and_leaves_those_before_it(tmp_path):
    shown = in_small_disk(
        "3m",
        """
        import dataclasses, pathlib, sys
        import jax, jax.numpy as jnp
        from qerl_jax.checkpoint.run_state import StateFiles
        from qerl_jax.system.files import DiskError

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class State:
            step: jax.Array
            params: jax.Array

        def state(step):
            values = jax.random.normal(jax.random.key(step), (300_000,))
            return State(jnp.int32(step), {"a": values})

        folder = pathlib.Path(sys.argv[1])
        files = StateFiles(folder, keep=10)
        files.save(state(1), {"drawn": 1})
        try:
            for step in (2, 3, 4):
                files.save(state(step))
        except DiskError as error:
            print(error)
        again = StateFiles(folder, keep=10)
        assert again.newest() == step - 1 and again.notes == [], again.notes
        restored = again.restore(state(1))
        assert (restored.params["a"] == state(step - 1).params["a"]).all()
        names = {path.name for path in (folder / "checkpoints").iterdir()}
        assert names == {str(each) for each in range(1, step)}, names
        """,
        tmp_path,
    )
    path = tmp_path / "checkpoints" / "3"
    assert shown.startswith(f"{path}: could not be written: No space left on device; free")
    assert shown.count("\n") == 1


@needs_mounts
def test_an_adapter_that_finds_no_room_is_one_line_too(tmp_path):
    """safetensors raises its own kind of error."""
    shown = in_small_disk(
        "64k",
        """
        import pathlib, sys
        import numpy as np
        import safetensors.numpy
        from qerl_jax.system.files import DiskError, writing
        path = pathlib.Path(sys.argv[1]) / "adapter"
        try:
            with writing(path):
                safetensors.numpy.save_file({"a": np.ones(100_000)}, path)
        except DiskError as error:
            print(error)
        """,
        tmp_path,
    )
    assert shown.startswith(f"{tmp_path}/adapter: could not be written: No space left")


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize("share", [0.002, 0.02, 0.3, 0.6, 0.9])
def test_a_run_on_a_full_disk_goes_on_once_there_is_room_as_if_nothing_had_been(share, tmp_path):
    """The disk holds only a part of what the whole run writes."""
    train(harness.tiny(tmp_path / "whole"), quiet=True)
    blocks = [path.stat().st_blocks for path in (tmp_path / "whole").rglob("*")]
    size = max(4096, round(share * 512 * sum(blocks)))
    disk, saved, path = (tmp_path / name for name in ("disk", "saved", "run.toml"))
    path.write_text(config.dump(harness.tiny(disk / "run")))
    disk.mkdir()
    shown = in_small_disk(
        str(size),
        """
        import shutil, subprocess, sys
        disk, config, kept = sys.argv[1:]
        command = [sys.executable, "-m", "qerl_jax", "train", config]
        first = subprocess.run(command, capture_output=True, text=True)
        assert first.returncode == 2, first
        sys.stdout.write(first.stderr)
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(disk + "/run", kept)
        """,
        *(disk, path, saved),
    )
    assert shown.startswith(f"qerl train: {disk}/run") and shown.count("\n") == 1, shown
    assert f"No space left on device; {FREE}" in shown
    assert harness.results(saved) == harness.results(tmp_path / "whole")
    assert logger.read_metrics(saved)[-1]["step"] == 6
