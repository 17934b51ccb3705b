"""Tests of scripts/accuracy.py: the split, the time to a level, and paired differences."""

import json

import pytest

from scripts import accuracy

ROWS = [
    (20.0, {"step": 0, "eval/accuracy": 0.6, "perf/eval_time": 8.0}),
    (30.0, {"step": 4}),
    (45.0, {"step": 8, "eval/accuracy": 0.7, "perf/eval_time": 5.0}),
    (60.0, {"step": 16, "eval/accuracy": 0.65, "perf/eval_time": 5.0}),
    (75.0, {"step": 24, "eval/accuracy": 0.68, "perf/eval_time": 5.0}),
    (90.0, {"step": 32, "eval/accuracy": 0.69, "perf/eval_time": 5.0}),
]


def test_the_split_has_each_row_once(tmp_path):
    lines = [json.dumps({"prompt": str(number)}) + "\n" for number in range(500)]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    accuracy.main(["split", str(tmp_path / "train.jsonl"), str(tmp_path / "parts")])
    out, rows = (
        (tmp_path / f"parts/{name}.jsonl").read_text().splitlines(keepends=True)
        for name in ("asked", "rows")
    )
    assert len(out) == 400 and sorted(out + rows) == sorted(lines)
    assert out != lines[:400]


def test_only_the_first_evaluation_counts_and_a_level_is_met_twice():
    evaluated = accuracy.evaluations(ROWS)
    assert [at["seconds"] for at in evaluated] == [20.0, 40.0, 50.0, 60.0, 70.0]
    assert accuracy.seconds_to(0.68, evaluated) == 60.0
    assert accuracy.seconds_to(0.65, evaluated) == 40.0
    assert accuracy.seconds_to(0.69, evaluated) is None
    assert accuracy.seconds_to(0.68, evaluated[:4]) is None


def test_a_difference_is_paired_by_seed(tmp_path, capsys):
    ends = {"a": [0.60, 0.62, 0.64], "b": [0.61, 0.62, 0.66]}
    rows = [
        {"name": name, "seed": seed, "evaluations": [{"accuracy": 0.1}, {"accuracy": value}]}
        for name, values in ends.items()
        for seed, value in enumerate(values)
    ]
    rows.append({"name": "a", "seed": 9, "evaluations": [{"accuracy": 0.0}]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy.main(["report", str(tmp_path / "rows.jsonl"), "--pair", "a", "b"])
    result = json.loads(capsys.readouterr().out)
    # Differences of 1, 0 and 2 points: their standard error is 1 / 3**.5, Student's 95 % point of 2 degrees 2.91999.
    assert result["seeds"] == [0, 1, 2] and result["difference"] == 1.0
    assert result["interval_90"] == pytest.approx(
        [1 - 2.91999 / 3**0.5, 1 + 2.91999 / 3**0.5], abs=0.01
    )
    assert result["verdict"] == "not shown to be equal"
    with pytest.raises(SystemExit, match="1 seeds"):
        accuracy.difference([*rows[:1], *rows[3:]], ["a", "b"])


def test_a_median_counts_a_run_that_never_gets_there_as_the_slowest(tmp_path, capsys):
    evaluated = accuracy.evaluations(ROWS)
    rows = [{"name": "x", "seed": seed, "evaluations": evaluated[: 5 - seed]} for seed in (0, 1)]
    rows.append({"name": "x", "seed": 2, "evaluations": accuracy.evaluations(ROWS[3:])})
    rows.append({"name": "another", "seed": 3, "evaluations": evaluated})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracy.main(["report", str(tmp_path / "rows.jsonl"), "--level", "0.68", "--name", "x"])
    result = json.loads(capsys.readouterr().out)
    assert result["seconds"] == {"0": 60.0, "1": None, "2": 70.0} and result["median"] == 70.0
