"""Tests the benchmarks: each runs on a CPU with tiny values, in its own process a row is measured, killed, compared."""

import argparse
import dataclasses
import json
import types

import numpy as np
import pytest

from pallas_kernels import runtime
from scripts import bench, bench_kernels, bench_training
from tests.faults.harness import json_lines

BENCHMARKS = bench.benchmarks()
SLOW = "decode drafts evaluation scaling start step recipe quantize logps training_layer update".split()
ANY_SIGN = ("decode", "decode_layer", "logps", "product")


def measured(name, **options):
    """Measures a round of each tiny case in this process; returns the last rows."""
    benchmark, rows = BENCHMARKS[name], []
    for case in bench.cases(benchmark, options, tiny=True):
        told = []
        benchmark.prepare(types.SimpleNamespace(**case))(told.append)
        assert set(benchmark.shows) <= {*told[-1], *case} | {"ulp", "dx_ulp", "error"}
        # So little takes so little time that a difference of times may have any sign.
        assert told[-1][benchmark.metric] > 0 or name in ANY_SIGN
        json.dumps(told)
        rows.append(told[-1])
    return rows


OTHERS = BENCHMARKS.keys() - {"tune", "recipe", "decode_attention"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(OTHERS)]
)
def test_a_benchmark_runs_on_a_cpu(name):
    assert measured(name)


@pytest.mark.slow
def test_attention_is_timed_in_its_kernel_and_in_cudnns():
    theirs, apart, together = measured("decode_attention")
    assert "error" not in theirs and apart["error"] <= 1 and together["error"] <= 1


@pytest.mark.slow
def test_the_fastest_configuration_becomes_a_row_of_a_table(tmp_path):
    table = tmp_path / "tuned" / "card.json"
    with runtime.on(dataclasses.replace(runtime.H200, processors=4, platform="cpu")):
        (row,) = measured("tune", table=str(table))
    (written,) = json.loads(table.read_text())["rows"]
    assert written["config"] == row["config"] and (written["m"], written["n"]) == (16, 128)


def test_a_table_has_one_row_for_a_problem(tmp_path):
    table = tmp_path / "table.json"
    for m, value in ((8, "a"), (1, "b"), (8, "c")):
        table.write_text(bench_kernels.merged(table, {"m": m, "n": 64, "k": 32, "value": value}))
    rows = json.loads(table.read_text())["rows"]
    assert [(row["m"], row["value"]) for row in rows] == [(1, "b"), (8, "c")]
    assert len(table.read_text().splitlines()) == 4


@pytest.mark.slow
def test_a_recipe_ends_its_rows_at_the_recorded_lengths():
    (row,) = measured("recipe", sigma=1.0, truncated=0.0)
    lengths = np.array(bench_training.completion_lengths(1.0, 0.0, 24)[2 * 16 : 3 * 16])
    assert row["mean_length"] == lengths.mean() < 24
    assert row["truncated"] == np.mean(lengths == 24)
    phases = sum(row[f"{phase}_s"] for phase in bench_training.PHASES)
    assert row["step_s"] == pytest.approx(phases + row["other_s"])
    assert 0 <= row["padding"] < 1 and row["programs"] > 0 and row["rollouts"] == 1


def test_a_share_of_the_recorded_lengths_runs_into_the_limit():
    for sigma in (0.5, 1):
        free = bench_training.completion_lengths(sigma, 0.0, 4096)
        assert 230 < np.mean(free) < 270 and max(free) < 4096
        assert np.std(np.log(free)) == pytest.approx(sigma, rel=0.1)
        truncated = bench_training.completion_lengths(sigma, 0.01, 4096)
        assert truncated.count(4096) == 11 and len(truncated) == 1024
    assert max(bench_training.completion_lengths(1, 0.0, 300)) == 300


def test_rewards_are_drawn_with_the_chance_of_the_problem():
    texts = [str(n) for n in range(4000)]
    for chance in ("0", "0.3", "1"):
        rewards = bench_training.reward(texts, [chance] * len(texts))
        assert np.mean(rewards) == pytest.approx(float(chance), abs=0.03)


def test_a_random_base_takes_the_shape_of_a_model_on_the_hub():
    for name in ("7b", "qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct"):
        assert bench_training.known_name(name) == "qwen2.5-7b"


def test_a_field_of_a_recipe_can_be_changed():
    case = {"config": "quickstart", "model": "", "smollm2": "", "completions": 0}
    changed = ["rollout.max_concurrent=3", "model.weights=nf4", "eval=null", "mesh.data=2"]
    cfg = bench_training.recipe_config(types.SimpleNamespace(**case, set=changed))
    assert cfg.rollout.max_concurrent == 3 and cfg.model.weights == "nf4"
    assert cfg.eval is None and cfg.mesh.data == 2 and cfg.model.random_base


def test_a_pool_is_a_share_of_this_cards_memory(monkeypatch):
    # Of an H200 and an H100.
    for mebibytes, share in ((143771, 0.558), (81559, bench_training.MOST_SHARE)):
        shown = types.SimpleNamespace(stdout=f"{mebibytes}\n{mebibytes}\n")
        monkeypatch.setattr(bench_training.subprocess, "run", lambda *_, shown=shown, **__: shown)
        variables = bench_training.pool_of({"pool_gib": 78})
        assert float(variables["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == pytest.approx(share, abs=5e-4)
    assert bench_training.pool_of({"pool_gib": 0.0}) == {}


def test_a_case_sees_so_many_of_the_devices_that_are_offered(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    assert bench_training.devices_of({"devices": 2}) == {"CUDA_VISIBLE_DEVICES": "3,5"}
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "device_count=4" in bench_training.devices_of({"devices": 4})["XLA_FLAGS"]


def test_values_of_options_are_combined():
    chosen = bench.cases(BENCHMARKS["decode"], {"rows": [8, 64], "base": ["nf4"], "prompt": 99})
    values = [(case["rows"], case["base"], case["prompt"]) for case in chosen]
    assert values == [(8, "nf4", 99), (64, "nf4", 99)]


def test_what_is_unknown_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench.main(["decoding"])
    assert "must be all, or some of decode, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["evaluation", "--rollouts", "2"])
    assert "unrecognized arguments: --rollouts 2" in capsys.readouterr().err
    assert bench.main(["decode", "--list"]) == 0
    assert "--rows 8 64 128" in capsys.readouterr().out


def run_toy(monkeypatch, options, **how):
    """Runs a benchmark of a number."""
    monkeypatch.setattr(bench, "Child", FakeChild)
    benchmark = bench.Benchmark(None, {"n": [1, 2]}, {}, {}, ("ms",), "ms", "n")
    args = argparse.Namespace(**{"rounds": 1, "timeout": None, "together": 1, "out": None} | how)
    return bench.run("toy", benchmark, bench.cases(benchmark, options), args)


class FakeChild:
    """A process that measures its number in milliseconds; 3 fails to compile."""

    def __init__(self, name, case, variables, timeout):
        self.case, self.variables, self.log = case, variables, []

    wait_until_ready = lambda self: self.case["n"] != 3
    measure = lambda self: {"ms": float(self.case["n"])}
    has_ended = lambda self: False
    kill = lambda self: None


def test_cases_that_compile_together_are_measured_in_turn(monkeypatch, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert not run_toy(monkeypatch, {"n": [1, 3, 2]}, rounds=2, together=3, out=out)
    rows = json_lines(out)
    assert [(row["round"], row["n"]) for row in rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    shown = capsys.readouterr().out
    assert "| 3 | failed, or killed" in shown and "n 2: ms 2, 2.000 of 1" in shown


def test_the_environment_of_a_case_is_compared(monkeypatch, capsys):
    assert run_toy(monkeypatch, {"n": [1], "env": ["", "A=1"]})
    assert "env A=1: ms 1, 1.000 of no variable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, ""),
        ({"mismatch": 0.0149}, ""),
        ({"mismatch": 0.0151}, "trainer and sampler differ by 0.0151 nats instead of 0.01"),
        ({"sampled": 99}, "99 tokens in a step instead of 100"),
        ({"sampled": 99, "how": "weak"}, ""),
    ],
)
def test_scaling_fails_where_several_devices_sample_or_score_otherwise(
    monkeypatch, capsys, changes, error
):
    usual = {"tokens_per_s": 1.0, "sampled": 100, "mismatch": 0.01}
    measure = lambda child: usual | (changes if child.case["devices"] == 2 else {})
    monkeypatch.setattr(FakeChild, "wait_until_ready", lambda child: True)
    monkeypatch.setattr(FakeChild, "measure", measure)
    monkeypatch.setattr(bench, "Child", FakeChild)
    how = changes.get("how", "strong")
    assert bench.main(["scaling", "--devices", "2", "1", "--how", how]) == bool(error)
    shown = capsys.readouterr().out
    assert ("disagree" in shown) == bool(error) and error in shown


@pytest.mark.slow
@pytest.mark.process
def test_a_process_measures_a_case_and_one_that_takes_too_long_is_killed(tmp_path):
    out = tmp_path / "rows.jsonl"
    options = "product --tiny --layer o --direction forward --rounds 1 --base nvfp4".split()
    assert bench.main([*options, "--out", str(out)]) == 0
    (row,) = json_lines(out)
    assert row["benchmark"] == "product" and row["layer"] == "o" and row["device"] == "cpu"
    assert bench.main([*options, "--timeout", "0.2"]) == 1
