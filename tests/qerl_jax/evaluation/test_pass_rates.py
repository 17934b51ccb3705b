"""Tests pass rates: what counts, and that an interrupted measurement continues."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.cli import main
from qerl_jax.data import datasets
from qerl_jax.evaluation import pass_rates
from qerl_jax.rewards.scoring import RewardError

NAN = np.nan


def small(**sections):
    return settings.run_config("quickstart", {"data": {"num_problems": 10}} | sections)


def select(out, low=0.0, high=1.0, **changes):
    said = []
    changes = {"samples": 2, "log": said.append} | changes
    return pass_rates.select(small(), out, low=low, high=high, **changes), said


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_rate_is_the_share_of_what_was_judged():
    rewards = [[1, 0, 1, 2], [1, NAN, 0.9, NAN], [NAN] * 4, [0, 0, 0, 0]]
    rows = [
        {"problem": problem, "right": reward >= 1, "judged": not np.isnan(reward)}
        for problem, of_problem in enumerate(rewards)
        for reward in of_problem
    ]
    assert pass_rates.pass_rates(rows[::-1]) == [0.75, 0.5, None, 0.0]


def test_faults_of_data_and_reward_are_told_before_the_base_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(pass_rates, "load_policy", lambda *_, **__: pytest.fail("read the base"))
    (tmp_path / "rewards.py").write_text("def right(completions, solution, **_): return [1.0]\n")
    with pytest.raises(RewardError, match="have no column 'solution'.*tried before measuring"):
        select(tmp_path / "out.jsonl", reward=f"{tmp_path}/rewards.py:right")


@pytest.mark.slow
def test_a_band_is_kept_and_a_stopped_measurement_goes_on(tmp_path):
    whole, stopped = tmp_path / "whole.jsonl", tmp_path / "stopped.jsonl"
    (kept, total), said = select(whole, low=0.25, high=0.75)
    assert said[-1] == "20/20 completions judged" and total == 10
    identity, *rates = read(tmp_path / "whole.jsonl.measured")
    assert identity["samples"] == 2 and set(rates) <= {0.0, 0.5, 1.0}
    rows = read(whole)
    assert kept == len(rows) == rates.count(0.5) > 0

    problems = datasets.from_config(small().data, split="train", seed=small().seed)
    expected = [p for p, rate in zip(problems, rates, strict=True) if rate == 0.5]
    again = datasets.from_config(config.DataConfig(str(whole)), split="train", seed=0)
    assert [p.prompt for p in again] == [p.prompt for p in expected]
    assert again[0].columns == {"answer": expected[0].columns["answer"], "pass_rate": 0.5}

    # Killed in the middle of a line, after five problems and three completions of others.
    lines = (tmp_path / "whole.jsonl.measured").read_text().splitlines(keepends=True)
    (tmp_path / "stopped.jsonl.measured").write_text("".join(lines[:6]) + "0.")
    halves = [(8, 0, rates[8] > 0), (6, 1, rates[6] == 1), (6, 0, rates[6] > 0)]
    text = lines[0] + "".join(
        json.dumps({"problem": p, "sample": s, "right": right, "judged": True}) + "\n"
        for p, s, right in halves
        if p == 6 or rates[p] != 0.5
    )
    partial = tmp_path / "stopped.jsonl.measured.partial"
    partial.write_text(text + '{"problem": 9, "sam')
    (_, said) = select(stopped, low=0.25, high=0.75)
    assert said[-1] == "20/20 completions judged" and not partial.exists()
    assert stopped.read_text() == whole.read_text()
    assert read(tmp_path / "stopped.jsonl.measured") == [identity, *rates]

    # Another band of the same measurement samples nothing; other settings are refused.
    (kept, _), said = select(whole, low=0.0, high=0.0)
    assert said == [] and kept == rates.count(0.0) == len(read(whole))
    with pytest.raises(ValueError, match="other settings .reward, samples."):
        select(whole, samples=3, reward="format_reward")


@pytest.mark.slow
def test_rows_that_are_kept_make_the_same_prompts_with_the_same_config(tmp_path):
    texts = {"system_prompt": "Add.", "prompt_template": "{prompt} Think."}
    cfg = small(data={"num_problems": 2, "max_prompt_length": 80} | texts)
    out = tmp_path / "out.jsonl"
    pass_rates.select(cfg, out, low=0.0, high=1.0, samples=1, reward="format_reward")
    sources = dataclasses.replace(cfg.data, dataset=str(out)), cfg.data
    problems, expected = (datasets.from_config(d, split="train", seed=cfg.seed) for d in sources)
    assert [p.prompt for p in problems] == [p.prompt for p in expected]
    assert len(expected[0].prompt) == 2 and problems[0].is_from_text


def test_the_command_says_that_a_system_prompt_is_not_in_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pass_rates, "select", lambda *_, **__: (1, 2))
    note = "system prompt of bigmath is not in"
    for given, expected in (("None", True), ("think-answer", False)):
        fields = ["--data.dataset", "bigmath", "--data.system-prompt", given]
        arguments = ["gsm8k_qwen2.5_7b", str(tmp_path / "out.jsonl"), *fields]
        assert main.main(["filter", *arguments]) == 0
        assert (note in capsys.readouterr().out) == expected


@pytest.mark.slow
def test_a_config_that_trains_the_whole_base_measures_that_base(tmp_path):
    for trainable in ("lora", "full"):
        model = {"weights": "float32", "trainable": trainable}
        cfg, out = small(model=model, lora=config.LoraConfig()), tmp_path / f"{trainable}.jsonl"
        pass_rates.select(cfg, out, low=0.0, high=1.0, samples=2)
    assert read(tmp_path / "full.jsonl") == read(tmp_path / "lora.jsonl")


@pytest.mark.slow
def test_a_measurement_that_failed_before_its_first_rate_may_be_asked_otherwise(tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(ValueError, match="no_such_reward"):
        select(out, reward="no_such_reward")
    with pytest.raises(FileNotFoundError):
        select(out, adapter=str(tmp_path / "nowhere"))
    assert select(out, samples=1)[1]


@pytest.mark.slow
def test_the_command_reports_what_it_kept(tmp_path, capsys):
    path, out = tmp_path / "small.toml", tmp_path / "folder" / "out.jsonl"
    path.write_text(config.dump(small()))
    options = "--low 0 --high 1 --samples 1 --reward format_reward".split()
    assert main.main(["filter", str(path), str(out), *options]) == 0
    shown = capsys.readouterr().out
    assert f"10 of 10 problems have a pass rate in [0.0, 1.0]: {out}" in shown
    assert len(read(out)) == 10 and "warning" not in shown
    options = [*options[4:], "--low", "0.5", "--high", "0.5"]  # one sample gives 0 or 1
    assert main.main(["filter", str(path), str(out), *options]) == 3
    assert f"{out} is empty (exit status 3); choose other bounds" in capsys.readouterr().out
    assert read(out) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"low": 0.7, "high": 0.6}, r"low, high: got \(0.7, 0.6\); must be in order"),
        ({"high": 1.5}, r"low, high: got \(.*, 1.5\); must be in order, between 0 and 1"),
        ({"samples": 0}, "samples: got 0; must be at least 1"),
        ({"reward": "absent.py:f"}, "reward: got 'absent.py:f'; there is no file .*/absent.py"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_loaded(tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        select(tmp_path / "out.jsonl", **changes)
    with pytest.raises(ValueError, match="out: got .*out.txt'; must be a .jsonl file"):
        select(tmp_path / "out.txt")
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_names_its_adapter_but_not_its_whole_model(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(pass_rates, "load_policy", lambda source, *_, **__: found.append(source))
    for name, trainable in (("adapted", "lora"), ("whole", "full")):
        folder = tmp_path / name
        (folder / "adapter").mkdir(parents=True)
        (folder / "adapter" / "adapter_config.json").touch()
        model = {"weights": "float32", "trainable": trainable}
        config.write_run(folder, small(model=model, lora=config.LoraConfig()))
    with contextlib.suppress(AttributeError):  # nothing was loaded
        select(tmp_path / "out.jsonl", adapter=str(tmp_path / "adapted"))
    assert found[0].adapter == tmp_path / "adapted" / "adapter"
    assert found[0].model == dataclasses.replace(small().model, trainable="lora")
    with pytest.raises(ValueError, match="adapter: .*whole'; this run has trained the whole base"):
        select(tmp_path / "out.jsonl", adapter=str(tmp_path / "whole"))
