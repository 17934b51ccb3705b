"""Tests the arithmetic of scripts/bench_drafts.py, and that it runs."""

import concurrent.futures
import itertools
import json
import sys
import types

import numpy as np
import pytest

from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.checkpoint.policy import find_policy, load_policy
from qerl_jax.generation import engine
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.scheduler import RowTokens
from scripts import bench_drafts, bench_rollouts


def row(tokens, logps):
    return RowTokens(0, np.array(tokens), np.array(logps, np.float32), "stop")


def test_differences_are_counted_up_to_the_first_other_token():
    expected = {0: row([1, 2, 3], [-1, -2, -3]), 1: row([4, 5], [-1, -1]), 2: row([1], [-1])}
    found = {
        0: row([1, 2, 3], [-1, -2.5, -3]),
        1: row([4, 6], [-1.25, -9]),
        2: row([1, 2], [-1, -1]),
    }
    said = bench_drafts.differences(found, expected)
    assert said == {
        "rows_that_differ": 2 / 3,
        "equal_before": 1.0,
        "mean_difference": pytest.approx(0.15),  # .5 and .25 of five tokens
        "largest_difference": 0.5,
    }
    assert bench_drafts.differences(expected, expected)["rows_that_differ"] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.6, 20.0])  # the policy decides, or the noise
def test_what_was_sampled_leads_over_any_other_token(temperature):
    """This holds only if prompts, keys, places and the temperature are those of the draw."""
    policy = load_policy(find_policy(str(TINY), None, dtype="float32"))
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 100, size).tolist() for size in (5, 9)]
    args = types.SimpleNamespace(generations=2, limit=6)
    queue = bench_drafts.queue_of(ids, args, 3)
    engine = Engine(policy.model, EngineSpec(policy.tokenizer.num_tokens))
    _, expected = bench_drafts.sampled(engine, policy.variables, queue, 4, temperature, 16)
    for place in range(4):
        found = {}
        for number, each in expected.items():
            tokens = np.array(each.tokens)
            tokens[place:] = rng.integers(3, 100, len(tokens) - place)
            found[number] = row(tokens, each.behaviour_logps)
        leads = bench_drafts.leads(policy, queue, found, expected, temperature)
        differs = [any(found[n].tokens != expected[n].tokens) for n in expected]
        assert len(leads) == sum(differs) and min(leads) > 0
    assert len(bench_drafts.leads(policy, queue, expected, expected, temperature)) == 0


@pytest.mark.slow
def test_the_trial_runs_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench_drafts, "watchdog", lambda seconds: None)
    out = tmp_path / "rows.jsonl"
    options = "--least-limit 1 --limit 24 --rows 4 --groups 2 --generations 2 --repeats 1"
    command = ["bench_drafts", *options.split(), "--dtype", "float32", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    bench_drafts.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(each["rows"], each["arm"]) for each in rows] == [(4, arm) for arm in bench_drafts.ARMS]
    assert all(each["rows_that_differ"] == 0 and each["relative"] > 0 for each in rows)
    assert all(each["largest_lead"] is None for each in rows[1:])
    assert "| 4 | again |" in capsys.readouterr().out


@pytest.mark.parametrize(("calls", "expected"), [(None, 1.5 / 15), (5, 1.5 / 5)])
def test_a_step_is_a_call_of_the_model(monkeypatch, calls, expected):
    now = iter([70.0, 71.5])
    monkeypatch.setattr(bench_drafts.time, "perf_counter", lambda: next(now))
    outcome = calls and types.SimpleNamespace(calls=np.int32(calls))
    brought = None, None, np.array([15, 7]), None, None, outcome
    packed = types.SimpleNamespace(tree=lambda: brought)
    monkeypatch.setattr("jax.device_get", lambda tree: tree)
    monkeypatch.setattr("jax.block_until_ready", lambda tree: tree)
    decode = lambda *arguments, **traits: (None, packed, None)
    assert bench_drafts.step_seconds(decode, (), {}) == pytest.approx(expected)


def test_the_second_chunk_of_each_run_is_measured(monkeypatch):
    monkeypatch.setattr(engine, "decode", lambda number: number)
    made = types.SimpleNamespace(stream=lambda *args, **limits: map(engine.decode, range(9)))
    run = lambda _: bench_drafts.measured(made, {}, [types.SimpleNamespace(limit=4)], 2, 9)
    with bench_drafts.second_chunks(lambda decode, arguments, traits: decode(*arguments) + 10):
        assert [run(0), run(1)] == [11, 11]
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            assert list(threads.map(run, range(4))) == [11] * 4
    with pytest.raises(ValueError, match="one chunk only"):
        run(0)


@pytest.mark.parametrize(
    ("arms", "hasty", "done"),
    [
        (["off", "auto"], False, ["off", "auto"]),
        (["off", "auto"], True, ["off", "auto", "16", "32", "64"]),
        (["off", "again"], True, ["off", "again"]),
    ],
)
def test_what_auto_may_choose_is_compiled_first_in_haste(arms, hasty, done):
    args, seen = types.SimpleNamespace(arms=arms, hasty=hasty, repeats=1, profile=False), []
    bench_drafts.compile_all(seen.append, args, 16)
    assert sorted(seen) == sorted(done)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arms", "auto"], "first arm"),
        (["--arms", "off", "agian"], "no such arm"),
        (["--prices", "7b", "--arms", "off", "auto"], "no such arm"),
        (["--prices", "7b", "--limit", "128"], "raise --limit"),
        (["--profile"], "needs --prices"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    monkeypatch, capsys, options, message
):
    monkeypatch.setattr(bench_drafts, "watchdog", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["bench_drafts", *options])
    with pytest.raises(SystemExit):
        bench_drafts.main()
    assert message in capsys.readouterr().err


SMALL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("profile", [False, True])
def test_prices_and_kernels_are_measured_for_several_numbers_of_rows(
    monkeypatch, tmp_path, capsys, profile
):
    """The profiler, which needs a GPU, is left out: each chunk has 64 kernels of a millisecond."""

    def undonated(decode, *arguments, **traits):
        decode.of(traits["model"])
        return lambda: [("kernel", 1.0)] * 64

    monkeypatch.setattr(bench_drafts, "watchdog", lambda seconds: None)
    monkeypatch.setattr(bench_rollouts, "undonated", undonated)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    options = "--rows 2 4 --arms off 0 8 --limit 160 --rank 8 --repeats 1 --prices"
    command = ["bench_drafts", *options.split(), str(tmp_path), *["--profile"] * profile]
    monkeypatch.setattr(sys, "argv", command)
    bench_drafts.main()
    said = capsys.readouterr().out
    if profile:
        for rows, arm in itertools.product((2, 4), ("off", 0, 8)):
            # 32 steps of the second chunk.
            assert f"{rows} rows, positions: {arm}\n   2000.0 us x   2.0  kernel\n" in said
        return
    rows = [json.loads(line[4:]) for line in said.splitlines() if line.startswith("ROW ")]
    assert [(row["rows"], row["arm"]) for row in rows] == [
        *itertools.product((2, 4), ("off", "0", "8"))
    ]
    assert all(
        row["step_ms"] > 0 and row["tokens_per_call"] in (None, pytest.approx(1, abs=0.05))
        for row in rows
    )
