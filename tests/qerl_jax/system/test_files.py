"""Tests files and folders that are complete or absent, their fingerprints, and jobs that continue."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from qerl_jax.checkpoint import safetensors
from qerl_jax.system import files
from qerl_jax.system.files import Progress


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_that_cannot_be_finished_is_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    files.write_whole(path, "süß\n")
    assert path.read_bytes() == "süß\n".encode() and names(tmp_path) == ["a.txt"]

    def fail(*_):
        raise OSError("no space")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(os, "replace", fail)
        files.write_whole(path, "half")
    assert path.read_text() == "süß\n"


def test_a_folder_takes_its_place_when_it_is_full_and_not_before(tmp_path):
    folder = tmp_path / "made"
    for text in ("old", "new"):
        with files.whole_folder(folder, "marker", "cake") as partial:
            assert partial.parent == tmp_path and names(partial) == []
            (partial / "marker").write_text(text)
            (partial / text).write_text(text)
    assert names(folder) == ["marker", "new"] and names(tmp_path) == ["made"]

    with pytest.raises(KeyError), files.whole_folder(folder, "marker", "cake") as partial:
        (partial / "marker").write_text("half")
        raise KeyError
    assert names(folder) == ["marker", "new"] and names(tmp_path) == ["made"]


def test_a_folder_is_put_back_after_a_kill_while_it_was_replaced(tmp_path, monkeypatch):
    folder, replace = tmp_path / "made", os.replace
    with files.whole_folder(folder, "marker", "cake") as partial:
        (partial / "marker").write_text("old")

    def once(source, target):
        replace(source, target)
        raise SystemExit

    monkeypatch.setattr(os, "replace", once)
    with pytest.raises(SystemExit), files.whole_folder(folder, "marker", "cake") as partial:
        (partial / "marker").write_text("new")
    assert names(tmp_path) == [".made.previous"]
    monkeypatch.undo()
    with pytest.raises(KeyError), files.whole_folder(folder, "marker", "cake"):
        raise KeyError
    assert names(tmp_path) == ["made"] and (folder / "marker").read_text() == "old"


MAKE = """
import sys, time
from qerl_jax.system import files
folder, first_wins, number = sys.argv[1], sys.argv[2] == "True", sys.argv[3]
sys.stdin.readline()
for _ in range(20):
    with files.whole_folder(folder, "marker", "cake", first_wins=first_wins) as partial:
        for name in ("a", "b", "marker"):
            (partial / name).write_text(number)
    if first_wins:
        print(open(folder + "/a").read())
"""


@pytest.mark.parametrize("first_wins", [True, False])
def test_four_processes_make_one_folder_at_once(first_wins, tmp_path):
    folder = tmp_path / "made"
    command = [sys.executable, "-c", MAKE, str(folder), str(first_wins)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    processes = [subprocess.Popen([*command, str(n)], **pipes, text=True) for n in range(4)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outcomes
    winners = {(folder / name).read_text() for name in ("a", "b", "marker")}
    assert len(winners) == 1
    assert (names(tmp_path), names(folder)) == (["made"], ["a", "b", "marker"])
    if first_wins:  # nobody saw another one
        assert {line for out, _ in outcomes for line in out.split()} == winners


def test_what_a_killed_process_left_beside_a_folder_is_removed(tmp_path):
    for name in (".made.partial", ".made.0123abcd.partial", ".made2.partial"):
        (tmp_path / name).mkdir()
    with (
        files.whole_folder(tmp_path / "made", "marker", "cake") as first,
        files.whole_folder(tmp_path / "made", "marker", "cake") as second,
    ):
        assert names(tmp_path) == sorted([".made2.partial", first.name, second.name])


def test_a_folder_is_made_within_one_that_is_being_made(tmp_path):
    with files.whole_folder(tmp_path / "pair", "marker", "cake") as outer:
        with files.whole_folder(outer / "adapter", "marker", "cake") as inner:
            (inner / "marker").write_text("inner")
        (outer / "marker").write_text("outer")
    assert (tmp_path / "pair" / "adapter" / "marker").read_text() == "inner"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pair"]


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("only copy")
    refused = pytest.raises(FileExistsError, match="but no cake; they would be deleted")
    with refused, files.whole_folder(tmp_path, "marker", "cake"):
        pytest.fail("the block was entered")
    assert names(tmp_path) == ["mine"]


def test_a_file_without_a_json_object_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert files.read_json(path) == {"a": 1}
    for text, what in (("{", ""), ("[" * 100_000, ""), ("[1]", " object but a list")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json: not (a )?JSON{what}"):
            files.read_json(path)


def test_a_fingerprint_changes_with_names_sizes_and_weights(tmp_path):
    def written(value, name="a", size=10**5):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        safetensors.write(folder / "model.safetensors", {name: np.full(size, value, np.float32)})
        return files.fingerprint(folder)

    assert written(1) == written(1)
    assert len({written(1), written(2), written(1, "b"), written(1, size=10**5 + 1)}) == 4
    assert files.fingerprint(tmp_path / "nowhere") is None
    prints = [files.fingerprint(tmp_path / "0")]
    for name in ("adapter_config.json", "chat_template.jinja"):
        for text in ("1", "2"):
            (tmp_path / "0" / name).write_text(text)
            prints.append(files.fingerprint(tmp_path / "0"))
    assert len(set(prints)) == 5


JOB = {"model": "tiny", "seed": 0}


def test_a_job_goes_on_after_its_last_whole_line(tmp_path):
    path = tmp_path / "out.partial"
    assert files.whole_lines(path) == []
    with files.Progress(path, JOB) as progress:
        progress.add([{"text": "ü"}, 2])
        progress.add(iter([None]))
        assert progress.values == [{"text": "ü"}, 2, None]
    with path.open("ab") as file:
        file.write('{"text": "ü'.encode()[:-1])  # a kill within a character
    with files.Progress(path, JOB) as again:
        assert again.values == progress.values
    assert files.whole_lines(path) == [JOB, *progress.values]


def test_values_of_other_settings_are_not_mixed_in(tmp_path):
    path, other = tmp_path / "out.partial", JOB | {"seed": 1}
    files.Progress(path, JOB).close()
    with files.Progress(path, other) as progress:
        progress.add([1])  # nothing was found yet: the first call was a mistake
    with pytest.raises(ValueError, match="a call with other settings .seed."):
        files.Progress(path, JOB)
    with files.Progress(path, other) as progress:
        assert progress.values == [1]


def test_a_later_call_takes_over_the_date_of_the_first(tmp_path):
    path, dates = tmp_path / "out.partial", [{"date": f"2026-03-0{day}"} for day in (1, 9)]
    files.Progress(path, JOB, frozen=dates[0]).close()
    with files.Progress(path, JOB, frozen=dates[1]) as progress:
        assert progress.identity == JOB | dates[1]  # there was no result
        progress.add([1])
    with files.Progress(path, JOB, frozen=dates[0]) as progress:
        assert progress.identity == JOB | dates[1] and progress.values == [1]


def test_a_second_process_is_refused_while_the_first_works_on_a_job(tmp_path):
    path = tmp_path / "out.partial"
    with files.Progress(path, JOB) as progress:
        progress.add([1])
        with pytest.raises(files.Busy, match=f"{path}: another process writes its results there"):
            files.Progress(path, JOB)
    with files.Progress(path, JOB) as progress:
        assert progress.values == [1]


@pytest.mark.parametrize(
    "text", ["[1]\n", "\0\0\n", '{"mine": "only copy"}\n', '{"model": 1}\n"\n']
)
def test_a_file_of_something_else_stays(text, tmp_path):
    path = tmp_path / "out.partial"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"out\.partial: is not the file of an earlier call"):
        files.Progress(path, JOB)
    assert path.read_text() == text


IDENTITY = {"model": pathlib.Path("a/b"), "stop": ("x",), "seed": 0}


@pytest.mark.parametrize("settings", [None, "settings.json"])
def test_results_are_read_back_with_the_settings_they_depend_on(settings, tmp_path):
    path, settings = tmp_path / "job/results.jsonl", settings and tmp_path / "job" / settings
    options = {"settings": settings, "refusal": "{folder} differs in {changed}"}
    open_again = lambda identity: Progress(path, identity, **options)
    read = [{"right": [1, None]}, 0.5]
    with open_again(IDENTITY) as progress:
        progress.add([{"right": (1, None)}, 0.5])
        assert progress.values == read
    identity = {"model": "a/b", "stop": ["x"], "seed": 0}
    assert progress.identity == identity
    lines = [json.loads(line) for line in progress.path.read_text().splitlines()]
    assert lines == (read if settings else [identity, *read])
    if settings:
        assert json.loads(settings.read_text()) == identity
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'job'} differs in seed, stop$"):
        open_again(IDENTITY | {"seed": 1, "stop": None})
    with open_again(IDENTITY) as again:
        assert again.values == read


def test_hashes_are_of_what_is_there_and_none_of_what_is_not(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "adapter").mkdir()
    folders = {"model": "Qwen/Qwen3-8B", "adapter": tmp_path / "adapter", "other": None}
    data = {"data": str(tmp_path / "rows.jsonl"), "more": tmp_path / "adapter"}
    hashes = files.content_hashes(folders, data)
    assert list(hashes) == [f"{n}.sha256" for n in ("model", "adapter", "other", "data", "more")]
    assert [name for name, value in hashes.items() if value] == ["adapter.sha256", "data.sha256"]
    assert hashes["data.sha256"].startswith("44136fa355b3678a1146ad16f7e8649e")  # of {}
    assert files.digest(tmp_path) is None
