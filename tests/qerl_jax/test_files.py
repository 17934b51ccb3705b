"""Jobs that may be killed: what a later call finds, and what it is refused."""

import json
import pathlib

import pytest

from qerl_jax import files
from qerl_jax.files import Progress

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
