"""Tests files and folders that are complete or absent, their fingerprints, and jobs that continue."""

import json
import os
import pathlib

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


def test_a_folder_of_something_else_is_not_replaced(tmp_path):
    (tmp_path / "mine").write_text("only copy")
    refused = pytest.raises(FileExistsError, match="but no cake; they would be deleted")
    with refused, files.whole_folder(tmp_path, "marker", "cake"):
        pytest.fail("the block was entered")
    assert names(tmp_path) == ["mine"]


@pytest.mark.parametrize(
    "text,what",
    [("{", "not JSON"), ("[" * 100_000, "not JSON"), ("[1]", "not a JSON object but a list")],
)
def test_a_file_without_a_json_object_is_named(text, what, tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert files.read_json(path) == {"a": 1}
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: {what}"):
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


def test_a_digest_changes_with_the_content_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("{}")
    before = files.digest(path)
    path.write_text("[]")
    assert files.digest(path) != before
    assert files.digest(tmp_path) is None


JOB = {"model": "tiny", "seed": 0}


def test_a_job_goes_on_after_its_last_whole_line(tmp_path):
    path = tmp_path / "out.partial"
    progress = files.Progress(path, JOB)
    progress.add([{"text": "ü"}, 2])
    progress.add(iter([None]))
    assert progress.values == [{"text": "ü"}, 2, None]
    with path.open("ab") as file:
        file.write('{"text": "ü'.encode()[:-1])  # a kill within a character
    again = files.Progress(path, JOB)
    assert again.values == progress.values
    assert files.whole_lines(path) == [JOB, *progress.values]


def test_values_of_other_settings_are_not_mixed_in(tmp_path):
    path, other = tmp_path / "out.partial", JOB | {"seed": 1}
    files.Progress(path, JOB)
    files.Progress(path, other).add([1])  # nothing was found yet: the first call was a mistake
    with pytest.raises(ValueError, match="a call with other settings .seed."):
        files.Progress(path, JOB)
    assert files.Progress(path, other).values == [1]


@pytest.mark.parametrize(
    "text", ["[1]\n", "\0\0\n", '{"mine": "only copy"}\n', '{"model": 1}\n"\n']
)
def test_a_file_of_something_else_stays(text, tmp_path):
    path = tmp_path / "out.partial"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"out\.partial: is not the file of an earlier call"):
        files.Progress(path, JOB)
    assert path.read_text() == text


def test_a_file_that_is_not_there_has_no_lines(tmp_path):
    assert files.whole_lines(tmp_path / "none") == []


IDENTITY = {"model": pathlib.Path("a/b"), "stop": ("x",), "seed": 0}


@pytest.mark.parametrize("settings", [None, "settings.json"])
def test_results_are_read_back_with_the_settings_they_depend_on(settings, tmp_path):
    settings = settings and tmp_path / "job" / settings
    open_again = lambda identity: Progress(
        tmp_path / "job" / "results.jsonl",
        identity,
        settings=settings,
        refusal="{folder} differs in {changed}",
    )
    progress = open_again(IDENTITY)
    progress.add([{"right": (1, None)}, 0.5])
    read = [{"right": [1, None]}, 0.5]
    assert progress.values == open_again(IDENTITY).values == read
    identity = {"model": "a/b", "stop": ["x"], "seed": 0}
    assert progress.identity == identity
    lines = [json.loads(line) for line in progress.path.read_text().splitlines()]
    assert lines == (read if settings else [identity, *read])
    if settings:
        assert json.loads(settings.read_text()) == identity
    with pytest.raises(ValueError, match=rf"^{tmp_path / 'job'} differs in seed, stop$"):
        open_again(IDENTITY | {"seed": 1, "stop": None})
    assert open_again(IDENTITY).values == read


def test_hashes_are_of_what_is_there_and_none_of_what_is_not(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}")
    (tmp_path / "adapter").mkdir()
    hashes = files.content_hashes(
        {"model": "Qwen/Qwen3-8B", "adapter": tmp_path / "adapter", "other": None},
        {"data": str(tmp_path / "rows.jsonl"), "more": tmp_path / "adapter"},
    )
    assert list(hashes) == [f"{n}.sha256" for n in ("model", "adapter", "other", "data", "more")]
    assert [name for name, value in hashes.items() if value] == ["adapter.sha256", "data.sha256"]
    assert hashes["data.sha256"] == files.digest(tmp_path / "rows.jsonl")
