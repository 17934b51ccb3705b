"""Tests that an unreadable line of a log costs only that line, with a warning."""

import json
import pathlib

import pytest

from qerl_jax.tracking import logger

ROWS = [{"step": step, "reward": step / 8, "num_tokens": 100 * step} for step in range(1, 13)]
BAD = {
    "cut short": b'{"step": 3, "rew',
    "a list": b"[1, 2]",
    "no step": b'{"a": 1}',
    "a step that is no number": b'{"step": "x"}',
    "a step that is true": b'{"step": true}',
    "a negative step": b'{"step": -1}',
    "tokens that are no number": b'{"step": 3, "num_tokens": "many"}',
    "not UTF-8": b'{"step": 3, "x": "\xff"}',
    "zeros, as a lost page leaves them": bytes(64),
    "empty": b"",
    "deeply nested": 100_000 * b"[",
}


def lines(rows):
    return [json.dumps(row).encode() for row in rows]


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_set_aside_and_all_rows_around_it_stay(case, tmp_path, capsys):
    path, whole = tmp_path / "metrics.jsonl", lines(ROWS)
    path.write_bytes(b"\n".join([*whole[:4], BAD[case], *whole[4:]]) + b"\n")
    assert logger.read_metrics(tmp_path) == ROWS
    logger.Logger(tmp_path, total_steps=16, step=12).close()
    assert path.read_bytes() == b"\n".join(whole) + b"\n"
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == BAD[case] + b"\n"
    # A long path is broken into lines.
    shown = "".join(capsys.readouterr().out.split())
    assert f"warning:{path}:1ofitslinesarenorowsofmetrics(line5)" in shown
    assert "movedtometrics.damaged.jsonl" in shown

    logger.Logger(tmp_path, total_steps=16, step=12).close()  # it is said once
    assert "warning" not in capsys.readouterr().out
    assert path.read_bytes() == b"\n".join(whole) + b"\n"


@pytest.mark.parametrize(
    ("count", "end"),
    [(3, b'\n{"step": 4, "rew'), (3, b""), (12, b"\n")],
    ids=["a kill cut the last line short", "only its end is lacking", "rows beyond the checkpoint"],
)
def test_rows_of_the_steps_that_are_saved_are_all_that_stays_and_nothing_is_said(
    count, end, tmp_path, capsys
):
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines(ROWS[:count])) + end)
    logger.Logger(tmp_path, total_steps=16, step=3).close()
    assert "warning" not in capsys.readouterr().out
    assert logger.read_metrics(tmp_path) == ROWS[:3]


def test_files_in_completions_that_are_no_steps_are_left_alone(tmp_path):
    folder = tmp_path / "completions"
    folder.mkdir()
    for name in ("step_000002", "step_abc", "step_", "step_²", "step_000009"):
        (folder / f"{name}.jsonl").write_text("{}\n")
    logger.Logger(tmp_path, total_steps=16, step=5).close()
    left = {path.stem for path in pathlib.Path(folder).iterdir()}
    assert left == {"step_000002", "step_abc", "step_", "step_²"}
    assert list(logger.completion_files(tmp_path)) == [2]


def test_a_reward_that_logs_a_step_of_its_own_does_not_replace_the_runs(tmp_path):
    log = logger.Logger(tmp_path, total_steps=16)
    log.write(1, {"step": 7.5, "reward": 1.0})
    log.close()
    assert logger.read_metrics(tmp_path) == [{"step": 1, "reward": 1.0}]


def test_half_a_character_in_a_completions_column_is_kept_as_an_escape(tmp_path):
    log = logger.Logger(tmp_path, total_steps=16)
    row = {"prompt": "p", "completion": "c", "reward": 1.0}
    row |= {"seen": "a\ud83d", "whole": "\N{SNOWMAN}"}
    log.write_completions(1, [row])
    log.close()
    (path,) = logger.completion_files(tmp_path).values()
    assert json.loads(path.read_bytes()) == row
