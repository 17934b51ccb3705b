"""Tests the study of formats and methods: its rows, its intervals, its table."""

import json
import pathlib
import types

import numpy as np

from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.data import tokenizer
from scripts import study_quantization as study
from scripts.measure_quantization import Sums


def test_rows_to_compare_on_are_not_among_those_of_calibration_and_training(tmp_path):
    rows = [{"question": f"{i}+1?", "answer": str(i + 1), "other": 0} for i in range(50)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool, held_out = study.split(str(tmp_path / "rows.jsonl"), 10, tmp_path)
    kept = [json.loads(line) for line in pool.read_text().splitlines()]
    assert len(held_out) == 10 and len(kept) == 40
    assert {row["question"] for row in held_out}.isdisjoint(row["question"] for row in kept)


def test_the_tokens_of_answers_count_and_those_of_questions_and_padding_do_not():
    tokens = tokenizer.load(TINY)
    rows = study.of_chats(
        tokens, [{"question": "3+4?", "answer": "7"}, {"question": "1", "answer": "1+1"}], 64
    )
    for ids, live, answer in zip(rows.ids, rows.live, ("7", "1+1"), strict=True):
        assert tokens.decode(ids[live]) == answer


def test_sets_of_unlike_width_get_one_width_and_the_same_tokens():
    tokens = tokenizer.load(TINY)
    short = study.of_chats(tokens, [{"question": "3+4?", "answer": "7"}], 64)
    long = study.of_chats(tokens, [{"question": "3+4?" * 20, "answer": "7+1"}], 256)
    found = study.alike({"short": short, "long": long})
    assert found["short"].ids.shape == found["long"].ids.shape == long.ids.shape
    for before, after in zip((short, long), found.values(), strict=True):
        np.testing.assert_array_equal(before.ids[before.live], after.ids[after.live])


def test_means_are_over_tokens_and_intervals_hold_them():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 50, 40).astype(float)
    kl = tokens * rng.uniform(0.01, 0.03, 40)
    found = study.measured(
        Sums(tokens, kl, tokens * 1.5, tokens * 0.8), Sums(tokens, 0 * kl, tokens, tokens * 0.7)
    )
    assert found["tokens"] == tokens.sum() and found["rows"] == 40
    mean, low, high = found["kl"]
    assert low < mean < high and mean == kl.sum() / tokens.sum()
    np.testing.assert_allclose(found["perplexity"], 3 * [np.exp(1.5)])
    np.testing.assert_allclose(found["entropy_change"], 3 * [0.1])


def test_the_table_has_a_row_for_each_model_with_the_range_of_its_draws():
    def line(draw, name, kl):
        values = {
            field: [kl, kl, kl] for field in ("kl", "perplexity", "entropy", "entropy_change")
        }
        return {
            "base": "trained",
            "format": "nvfp4",
            "method": "gptq",
            "draw": draw,
            "set": name,
        } | values

    lines = [line(draw, name, 0.1 * (draw + 1)) for draw in (0, 1) for name in ("gsm8k", "own")]
    *_, row = study.table(lines).splitlines()
    assert row.startswith(
        "| trained, nvfp4, gptq | 0.1500 (0.1500 to 0.1500) | 0.1000 to 0.2000 | 0.15 | +0.150 |"
    )
    assert row.endswith("| +0.150 (+0.150 to +0.150) |")


def test_the_docs_have_the_table_of_the_recorded_lines():
    docs = pathlib.Path(__file__).parents[1] / "docs"
    recorded = (docs / "measured" / "quantization_smollm2.jsonl").read_text().splitlines()
    assert (
        study.table([json.loads(line) for line in recorded])
        in (docs / "quantization.md").read_text()
    )


def test_what_needs_no_calibration_has_one_draw():
    args = types.SimpleNamespace(formats=["nf4"], methods=["nearest", "gptq"], draws=2)
    assert list(study.runs(args)) == [("nf4", "nearest", 0), ("nf4", "gptq", 0), ("nf4", "gptq", 1)]
