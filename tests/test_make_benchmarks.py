"""Tests the page that `scripts/make_benchmarks.py` makes from the measured lines."""

import json
import pathlib

import pytest

from scripts import make_benchmarks
from tests.faults.harness import json_lines

MEASURED = pathlib.Path(__file__).parents[1] / "docs" / "measured"
LINES = make_benchmarks.read(make_benchmarks.SOURCE)


def measured(**fields):
    """Makes a line of the JSONL file with every field."""
    line = dict.fromkeys(make_benchmarks.FIELDS) | {"more": {}, "note": "", "conditions": ""}
    line |= {"table": "decoding", "name": "7B, 8 rows", "value": 3586, "unit": "tokens/s"}
    line |= {"command": "python -m x", "date": "2026-11-22", "device": "A", "versions": "jax 1"}
    return line | fields


def close(shown, value):
    """Returns whether a printed number is a value rounded to the printed digits."""
    _, _, fraction = str(shown).partition(".")
    return float(shown) == pytest.approx(value, abs=0.51 * 10.0 ** -len(fraction))


def test_committed_page_is_what_the_script_makes():
    assert make_benchmarks.page(LINES) == make_benchmarks.PAGE.read_text()


def test_the_results_of_the_readme_are_what_the_script_makes():
    assert make_benchmarks.readme(LINES) == make_benchmarks.README.read_text()
    assert len(make_benchmarks.results(LINES).splitlines()) == 2 + 11


def test_two_devices_share_a_row_and_each_names_its_run():
    lines = [
        measured(baseline="vLLM", baseline_value=1728, ratio="2.08"),
        measured(value="2935.0", device="B"),
        measured(name="7B, 1 row", value=466, more={"rest": 1, "of bound": ".5"}),
    ]
    page = make_benchmarks.page(lines)
    assert "| what | A, tokens/s | B, tokens/s | vLLM | ratio | of bound | rest | run |" in page
    assert "| 7B, 8 rows | 3,586 | 2935.0 | 1,728 | 2.08 |  |  | 1, 2 |" in page
    assert "| 7B, 1 row | 466 |  |  |  | .5 | 1 | 1 |" in page
    assert "| 2 | `python -m x` | 2026-11-22 | B | jax 1 |" in page


def test_digits_stay_and_a_line_without_a_field_is_refused_by_its_number(tmp_path):
    path, line = tmp_path / "lines.jsonl", json.dumps(measured()).replace("3586", "0.70") + "\n"
    path.write_text(line)
    assert make_benchmarks.read(path)[0]["value"] == "0.70"
    path.write_text(line + json.dumps(measured(unti=1)) + "\n")
    with pytest.raises(ValueError, match=r"lines.jsonl, line 2: .*\['unti'\]"):
        make_benchmarks.read(path)


def test_a_number_that_comes_twice_and_a_table_that_the_page_lacks_are_refused():
    with pytest.raises(ValueError, match="'7B, 8 rows' comes twice for A"):
        make_benchmarks.page([measured(), measured()])
    with pytest.raises(ValueError, match=r"no table of the page is called \['speed'\]"):
        make_benchmarks.page([measured(table="speed")])


def test_ratios_are_those_of_their_numbers():
    compared = [line for line in LINES if line["ratio"] and line["table"] == "decoding"]
    assert len(compared) > 10
    for line in compared:
        assert close(line["ratio"], line["value"] / line["baseline_value"]), line["name"]


def test_training_steps_are_those_that_the_benchmark_wrote():
    steps = json_lines(MEASURED / "steps.jsonl")
    checked = [line for line in LINES if "row" in line["more"]]
    assert len(checked) > 10
    for line in checked:
        rows = [step for step in steps if step["row"] == line["more"]["row"]]
        seconds = [row["step"] if "step" in row else row["update"] for row in rows]
        assert any(close(line["value"], second) for second in seconds), line["name"]


@pytest.mark.parametrize(("model", "layers"), [("7B", 28), ("32B", 64)])
def test_sums_of_linears_are_those_of_the_kernels_that_were_timed(model, layers):
    timed = {}
    for row in json_lines(MEASURED / "decode_kernels.jsonl"):
        if row["model"] == f"qwen2.5-{model.lower()}":
            timed[row["layer"], row["m"]] = row["us"]["kernel"]
    sums = [x for x in LINES if x["table"] == "linears" and x["name"].startswith(model + ",")]
    assert len(sums) == 6
    for line in sums:
        rows = int(line["name"].split()[1])
        four = sum(timed[layer, rows] for layer in ("qkv", "o", "gate_up", "down"))
        assert float(line["more"]["four linears us"]) == pytest.approx(four, abs=0.15)
        assert float(line["value"]) == pytest.approx(four * layers / 1000, rel=0.006)
