"""Tests whole runs on the embedded base: they learn, survive a kill, and leave nothing behind after bad input."""

import dataclasses
import functools
import json
import pathlib
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.checkpoint import base_model, hf_folder, peft
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import LoraConfig
from qerl_jax.data.datasets import Problem
from qerl_jax.model import architecture
from qerl_jax.model.transformer import init_params
from qerl_jax.planning import memory
from qerl_jax.rewards import scoring, stock
from qerl_jax.rl import optimizer
from qerl_jax.rl.update import Updater
from qerl_jax.system.files import DiskError
from qerl_jax.tracking import logger
from qerl_jax.training.run_folder import earlier_run
from qerl_jax.training.trainer import train
from tests.faults import harness
from tests.faults.harness import json_lines, quickstart, without_times
from tests.golden_files import GOLDEN

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.toml"))
BATCH = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}


def small(folder, **sections):
    """Returns a config that runs in seconds: 8 prompts x 4, six steps, a checkpoint every two."""
    rollout = {"num_generations": 4, "max_completion_length": 32}
    defaults = {"data": {"num_problems": 200}, "rollout": rollout, "optim": BATCH}
    return harness.tiny(folder, **(defaults | sections))


def accuracies(folder):
    return [row["eval/accuracy"] for row in logger.read_metrics(folder) if "eval/accuracy" in row]


def completions_of(folder, step=1):
    return json_lines(folder / "completions" / f"step_{step:06d}.jsonl")


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    watched = {"eval": {"num_problems": 32, "eval_steps": 2}, "max_steps": 4}
    final = train(small(whole, **watched), quiet=True)

    process = harness.start(harness.written(small(killed, **watched)))
    harness.wait_for_step(process, killed, 3, timeout=600)
    process.kill()
    process.communicate()
    assert harness.last_step(killed) >= 3 and not (killed / "adapter").exists()

    resumed = train(small(killed, **watched), quiet=True)
    assert int(resumed.step) == 4
    assert harness.results(killed) == harness.results(whole)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, final.params)
    assert len(list((killed / "completions").iterdir())) == 4

    rows = logger.read_metrics(whole)
    assert rows[1]["aqn/sigma"] == 0.0 and rows[-1]["aqn/sigma"] > 0.0
    # Without noise sampler and trainer are one function of one base; float32 leaves rounding only.
    assert rows[1]["sampling/sampling_logp_difference/max"] < 1e-4
    # `update/entropy` is of the rows that learn, `entropy` of all.
    assert 0 < rows[1]["update/rows"] < 32 and rows[1]["update/entropy"] > 0
    assert abs(rows[1]["sampling/kl_k3"]) < 1e-9 < 1e-7 < rows[2]["sampling/kl_k3"]

    scores = accuracies(whole)
    best = json.loads((whole / "best.json").read_text())
    assert best["eval/accuracy"] == max(scores) and len(scores) == 3
    assert best["step"] == next(r["step"] for r in rows if r.get("eval/accuracy") == max(scores))
    assert best == json.loads((killed / "best.json").read_text())
    tensors = [(run / "best" / "adapter_model.safetensors").read_bytes() for run in (whole, killed)]
    assert tensors[0] == tensors[1]

    model = load_base(small(whole).model, small(whole).lora)[0]
    adapter = peft.import_adapter(whole / "adapter", model)
    jax.tree.map(np.testing.assert_array_equal, adapter, final.params)


@pytest.mark.slow
def test_several_updates_of_one_rollout_train_norms_and_reference_in_one_run(tmp_path):
    functions = ("correct_and_well_formed_reward", "format_reward")
    cfg = small(
        tmp_path / "run",
        max_steps=8,
        lora={"train_norms": True, "dropout": 0.1},
        grpo={"num_iterations": 2, "reference": {"beta": 0.04}}
        | {"old_logprobs": "recompute", "mismatch": {"correction": {}}},
        noise={"scope": "both", "final_norm": True},
        rollout={"num_generations": 4, "generation_batch_size": 64},
        rewards={"functions": functions, "weights": (1.0, 0.2)},
    )
    state = train(cfg, quiet=True)
    rows = logger.read_metrics(cfg.output_dir)
    assert [row["step"] for row in rows] == [4, 8]
    assert rows[0]["kl"] > 0 and rows[1]["clip_ratio/region_mean"] >= 0
    lora = peft.read_lora(tmp_path / "run" / "adapter")
    assert lora.train_norms
    model = load_base(cfg.model, lora)[0]
    assert model.lora == LoraConfig(16, 16.0, 0.0, True)
    trees = peft.import_adapter(tmp_path / "run" / "adapter", model), state.params
    trees += (load_base(cfg.model, lora)[1],)
    norms, learned, base = (tree["layers"]["input_layernorm"]["scale"] for tree in trees)
    np.testing.assert_array_equal(norms, learned)
    assert np.abs(np.asarray(norms) - np.asarray(base, np.float32)).max() > 0


@pytest.mark.slow
def test_all_that_a_run_remembers_survives_an_interruption(tmp_path):
    """This is the place in the data, groups left over by dynamic sampling, and a moving reference."""
    reference = {"beta": 0.02, "policy": "synced", "sync_steps": 2}
    options = {
        **{"max_steps": 4, "save_steps": 1},
        "grpo": {"dynamic_sampling": {"max_rounds": 3}, "reference": reference},
        "rewards": {"functions": ("accuracy_reward",), "soft_punish_cache": 30},
        "rollout": {"num_generations": 4, "generation_batch_size": None},
    }
    whole = train(small(tmp_path / "whole", **options), quiet=True)
    rows = logger.read_metrics(tmp_path / "whole")
    rounds = [int(row["dynamic_sampling/rounds"]) for row in rows]
    assert 1 < max(rounds) <= 3
    assert rows[1]["dynamic_sampling/groups_carried_over"] > 0  # so there is something to lose
    assert -1 < rows[0]["rewards/soft_overlong_punishment_reward/mean"] < 0
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-6

    resumed = small(tmp_path / "resumed", **options)
    train(resumed, quiet=True, on_step=lambda step, _: step < 2)
    state = train(resumed, quiet=True)
    assert harness.results(tmp_path / "resumed") == harness.results(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, state, whole)


@pytest.mark.slow
def test_a_dense_base_trains_whole_and_is_exported_as_a_model(tmp_path):
    cfg = small(
        tmp_path / "run",
        max_steps=2,
        model={"weights": "float32", "trainable": "full"},
        lora=config.LoraConfig(),
        grpo={"reference": {"beta": 0.02, "policy": "synced", "mixup_alpha": 0.0}},
        optim=BATCH | {"learning_rate": 1e-4},
    )
    state = train(cfg, quiet=True)
    rows = logger.read_metrics(cfg.output_dir)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[1]["kl"] > 1e-6
    assert rows[0]["sampling/sampling_logp_difference/max"] < 1e-4

    before = dataclasses.replace(cfg.model, trainable="lora")
    after = dataclasses.replace(before, model_name_or_path=str(tmp_path / "run" / "model"))
    (_, base, _), (_, trained, _) = load_base(before, None), load_base(after, None)
    assert jax.tree.structure(trained) == jax.tree.structure(base)
    jax.tree.map(np.testing.assert_array_equal, trained["layers"], state.params["layers"])
    moved = lambda new, old: np.abs(np.asarray(new) - np.asarray(old)).max() > 0
    assert all(jax.tree.leaves(jax.tree.map(moved, trained["layers"], base["layers"])))
    for name in set(base) - {"layers"}:
        jax.tree.map(np.testing.assert_array_equal, trained[name], base[name])
    # The reference is kept as it was.
    jax.tree.map(np.testing.assert_array_equal, state.reference["layers"], base["layers"])


@pytest.mark.slow
@pytest.mark.timeout(1200)  # 80 steps and four evaluations: minutes, more on a busy machine
def test_quickstart_learns_and_shuffled_rewards_do_not(tmp_path):
    train(quickstart(tmp_path / "right"), quiet=True)
    before, after = accuracies(tmp_path / "right")
    assert after - before >= 0.25
    control = {"functions": ("tests.reward_controls:shuffled",)}
    train(quickstart(tmp_path / "shuffled", rewards=control, max_steps=30), quiet=True)
    before_control, after_control = accuracies(tmp_path / "shuffled")
    assert before_control == before
    # Twice the standard error of 512 problems is 0.04.
    assert after_control - before_control < 0.08


@pytest.mark.slow
def test_a_short_run_learns(tmp_path):
    """Each step has four completions; two tokens of three are even at first, and almost all at the end."""
    optim = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    optim |= {"learning_rate": 0.03}
    cfg = harness.tiny(tmp_path / "run", max_steps=12, save_steps=50, optim=optim)
    share = lambda ids: np.mean([token % 2 == 0 for token in ids])
    even = lambda completion_ids, **_: [float(share(ids)) for ids in completion_ids]
    train(cfg, quiet=True, reward_functions=[even])
    rewards = [row["reward"] for row in logger.read_metrics(tmp_path / "run")]
    assert np.mean(rewards[:4]) < 0.8 < 0.9 < np.mean(rewards[-3:])


FILE = {"dataset": "/nowhere/data.jsonl"}
# The error of a change.
BAD_RUNS = {
    "/nowhere/model": {"model": {"model_name_or_path": "/nowhere/model"}},
    "lora.rank: got 16; the adapter in": {
        "model": {"adapter_name_or_path": str(GOLDEN / "lora/qwen2_untied_r8")}
    },
    "/nowhere/data.jsonl": {"data": FILE},
    "eval.dataset: got None; must name held-out problems: /nowhere/data.jsonl is a file": {
        **{"data": FILE, "eval": {"num_problems": 8}}
    },
    "acuracy_reward": {"rewards": {"functions": ("acuracy_reward",)}},
    "grpo.dynamic_sampling.metric: got 'acc'; must be \"reward\", or one of the rewards": {
        "grpo": {"dynamic_sampling": {"metric": "acc"}}
    },
    "rewards.shaping: got ('length_reward',); the rewards of this run are": {
        "rewards": {"shaping": ("length_reward",)}
    },
    "grpo.dynamic_sampling.metric: got None; all rewards of this run shape form or length": {
        **{"grpo": {"dynamic_sampling": {}}, "rewards": {"functions": ("format_reward",)}}
    },
    "KeyError": {"rewards": {"functions": ("tests.reward_controls:raising",)}},
    "got 1; must be one for each of 2 completions": {
        "rewards": {"functions": ("tests.reward_controls:one_short",)}
    },
    "rollout.kv_cache_fraction: got 0.5; this device does not report its memory": {
        "rollout": {"num_generations": 4, "kv_cache_fraction": 0.5}
    },
    "data.max_prompt_length": {"data": {"num_problems": 200, "max_prompt_length": 20}},
}


@pytest.mark.parametrize("named", BAD_RUNS)
def test_bad_input_is_one_error_before_the_base_is_read_and_a_run_folder_exists(
    named, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(base_model, "load_weights", lambda *_: pytest.fail("the base was read"))
    path = harness.written(small(tmp_path / "run", **BAD_RUNS[named]))
    assert named in harness.refused(capsys, "train", path)
    assert not (tmp_path / "run").exists()


def test_a_reward_that_expects_a_chat_and_gets_a_text_is_told_why(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "answer": {n + 1}}}\n' for n in range(8)))
    cfg = small(tmp_path / "run", data={"dataset": str(data), "name": None, "num_problems": None})

    def reward(completions, **_):
        return [float(len(completion[0]["content"])) for completion in completions]

    def other(completions, solution, **_):
        return [0.0] * len(completions)

    why = "TypeError.*completions are texts, because.*completion_text"
    with pytest.raises(ValueError, match=why):
        train(cfg, reward_functions=[reward], quiet=True)
    with pytest.raises(ValueError, match="have no column 'solution'") as error:
        train(cfg, reward_functions=[other], quiet=True)
    assert "completions are texts" not in str(error.value)


def test_faults_of_data_and_folder_are_told_before_the_base_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(base_model, "load_weights", mock.Mock(side_effect=EOFError))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": ""}\n')
    data = {"dataset": str(rows), "name": None, "num_problems": None}
    with pytest.raises(EOFError):
        train(small(tmp_path / "run", data=data))
    problems, base = "1 of 2 problems have no answer (problem 1,", "base: qerl-tiny"
    shown = capsys.readouterr().out
    assert 0 <= shown.index(problems) < shown.index(base)
    assert not (tmp_path / "run" / "config.toml").exists()
    # A file is where the folder should be.
    with pytest.raises(DiskError):
        train(small(rows / "run", data=data))


@pytest.mark.slow
@pytest.mark.parametrize("reference", [None, "adapter", "base"])
def test_a_run_goes_on_from_an_adapter_and_its_divergence_is_from_that_or_the_base(
    reference, tmp_path
):
    """With a vanishing learning rate it ends where the adapter was."""
    cfg = small(
        tmp_path / "run",
        max_steps=1,
        grpo={"reference": {"beta": 0.02, "policy": reference}},
        model={"adapter_name_or_path": str(tmp_path / "start")},
        optim=BATCH | {"learning_rate": 1e-12},
    )
    model, frozen, _ = load_base(cfg.model, cfg.lora)
    start = jax.tree.map(lambda x: x + 0.02, init_params(model, frozen, jax.random.key(5)))
    peft.export_adapter(tmp_path / "start", start, model.lora, "qerl-tiny")
    state = train(cfg, quiet=True)
    (row,) = logger.read_metrics(tmp_path / "run")
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-9), state.params, start)
    if reference == "base":
        assert state.reference is None and row["kl"] > 1e-3
    else:
        jax.tree.map(np.testing.assert_array_equal, state.reference, start)
        assert row["kl"] == pytest.approx(0, abs=1e-6)


def test_another_config_may_not_resume_a_run(tmp_path):
    cfg = small(tmp_path / "run")
    (tmp_path / "run").mkdir()
    config.write_run(tmp_path / "run", cfg)
    optim = dataclasses.replace(cfg.optim, learning_rate=1e-3)
    other = dataclasses.replace(cfg, seed=7, optim=optim)
    earlier_run(other)  # no checkpoint: nothing is resumed
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    names = r"optim.learning_rate \(0.003 there, 0.001 here\), seed \(0 there, 7 here\): "
    with pytest.raises(config.ConfigError, match=f"it holds a run with another {names}"):
        train(other)


def test_a_run_may_go_on_with_other_settings_of_what_is_on_a_device(tmp_path):
    cfg = small(tmp_path / "run", rollout={"num_generations": 4, "kv_cache_tokens": 4096})
    (tmp_path / "run" / "checkpoints" / "2").mkdir(parents=True)
    config.write_run(tmp_path / "run", cfg)
    # As where it goes on on devices that share a base, which refuses "none".
    rollout = {"num_generations": 4, "max_concurrent": 4}
    changes = {"model": {"gradient_checkpointing": "auto"}, "rollout": rollout}
    changes |= {"mesh": config.MeshConfig(data=1, fsdp=2)}
    changes |= {"optim": BATCH | {"max_tokens_per_microbatch": 512}}
    other = small(tmp_path / "run", **changes)
    assert earlier_run(other) == cfg
    changes["rollout"]["temperature"] = 0.5
    with pytest.raises(config.ConfigError, match="another rollout.temperature"):
        earlier_run(small(tmp_path / "run", **changes))


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer_and_follows_the_longer_schedules(tmp_path, capsys):
    folder = tmp_path / "run"
    short = small(folder, max_steps=2)
    train(short, quiet=True)
    before = logger.read_metrics(folder)
    longer = dataclasses.replace(short, max_steps=4)
    assert int(train(longer).step) == 4
    rows = logger.read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert without_times(rows[:2]) == without_times(before)
    old, new = (optimizer.learning_rate(short.optim, steps) for steps in (2, 4))
    rates = [float(old(0)), float(old(1)), float(new(2)), float(new(3))]
    assert [row["learning_rate"] for row in rows] == rates
    assert [row["aqn/stage"] for row in rows] == [0, 5, 5, 7]  # of ten
    shown = capsys.readouterr().out
    for text in (
        f"resumed: the run in {folder} goes on after step 2 of 4",
        "planned for 2 optimizer steps, and now for 4: learning rate and noise now follow",
        f"the next rate is {rates[2]:.3g}, the last one was {rates[1]:.3g}",
    ):
        assert shown.count(text) == 1
    assert config.load(folder / "config.toml") == longer
    adapter = (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    assert train(longer) is None
    said = capsys.readouterr().out
    assert "nothing left to do: the run in" in said and "base: qerl-tiny" not in said
    assert (folder / "adapter" / "adapter_model.safetensors").read_bytes() == adapter
    with pytest.raises(config.ConfigError, match="run with another max_steps .4 there, 2 here.: "):
        train(short, quiet=True)


def test_rows_are_held_against_the_context_of_the_base_that_was_loaded(tmp_path, monkeypatch):
    arch = architecture.load(hf_folder.TINY)
    cfg = small(tmp_path / "run", rollout={"num_generations": 4, "max_completion_length": 10**4})
    # As of a hub name: a shape, of whose bases some have a longer context than others.
    unsaid = {"qerl-tiny": dataclasses.replace(arch, context=None)}
    monkeypatch.setattr(architecture, "KNOWN", unsaid)
    assert memory.plan(cfg).peak
    with pytest.raises(ValueError, match=f"more than the {arch.context} that the model was made"):
        train(cfg, quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_runs_for_two_rollouts_on_the_tiny_base(path, tmp_path):
    """It keeps its algorithm, noise and adapter, with the quickstart's model, problems and sizes."""
    cfg, tiny, replace = config.load(path), small(tmp_path / "run"), dataclasses.replace
    updates = cfg.updates_per_rollout // cfg.grpo.num_iterations
    batch = BATCH | {"per_device_train_batch_size": 16 // updates}
    rows = {"generation_batch_size": 32, "max_concurrent": cfg.rollout.max_concurrent and 16}
    punishment = cfg.rewards.soft_punish_cache and 10
    # The template of the tiny base knows no calls; what an environment says makes prompts longer.
    tools, data = cfg.tools, tiny.data
    if tools:
        data = replace(data, max_prompt_length=128)
        if tools.call_pattern is None:
            tools = replace(tools, call_format="hermes")
    changes = {
        "model": replace(tiny.model, weights=cfg.model.weights, trainable=cfg.model.trainable),
        "rewards": replace(tiny.rewards, soft_punish_cache=punishment),
        "rollout": replace(tiny.rollout, **rows),
        "optim": replace(cfg.optim, **batch),
        "max_steps": 2 * cfg.updates_per_rollout,
        **{"tools": tools, "data": data, "eval": None, "num_train_epochs": None},
    }
    train(replace(cfg, output_dir=tiny.output_dir, **changes), quiet=True)
    rows = logger.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [cfg.updates_per_rollout, 2 * cfg.updates_per_rollout]
    assert np.isfinite([row["loss"] for row in rows]).all()


def test_completions_are_logged_with_their_rewards_and_what_rewards_log(tmp_path):
    functions = ("accuracy_reward", "tests.reward_controls:talkative")
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "What is 2+3?", "answer": "5"}\n' * 4)
    watched = {"dataset": str(held_out), "num_generations": 2}
    rewards = {"functions": functions}
    cfg = harness.tiny(tmp_path / "run", max_steps=1, rewards=rewards, eval=watched)
    train(cfg, quiet=True)
    rows = completions_of(tmp_path / "run")
    before, metrics = logger.read_metrics(tmp_path / "run")
    assert 0 <= before["eval/accuracy"] <= before["eval/pass@2"] <= 1
    assert np.isclose(np.mean([row["reward"] for row in rows]), metrics["reward"])
    assert [row["letters"] for row in rows] == [len(row["completion"]) for row in rows]
    assert len(rows) == 4 and metrics["steps_to_go"] == 1
    card = (tmp_path / "run" / "report.md").read_text()
    shown = ("of 1 steps had rewards that differ", "| evaluations | ", "1 x cpu")
    for text in (*shown, "| rewards | accuracy_reward, tests.reward_controls:talkative |"):
        assert text in card
    assert "accuracy_reward" in (tmp_path / "run" / "report" / "index.html").read_text()


@pytest.mark.slow
def test_a_reward_that_raises_costs_no_whole_step(tmp_path):
    cfg, broken = harness.tiny(tmp_path / "run", max_steps=3, save_steps=50), [True]

    def fragile(completion_ids, trainer_state, **_):
        if broken[0] and trainer_state.global_step == 2:
            raise OSError("the judge is away")
        return [-float(len(ids)) for ids in completion_ids]

    with pytest.raises(scoring.RewardError, match="the judge is away") as raised:
        train(cfg, reward_functions=[fragile], quiet=True)
    saved = "step 2 is saved: the same command goes on from there"
    assert {"in the rewards of step 3 of 3", saved} <= set(raised.value.__notes__)
    broken[0] = False
    assert int(train(cfg, reward_functions=[fragile], quiet=True).step) == 3
    assert [row["step"] for row in logger.read_metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.slow
def test_a_run_takes_problems_and_rewards_from_memory_and_reports_its_rows(tmp_path):
    problems = [Problem(f"{a}+1=", {"answer": str(a + 1)}) for a in range(12)]
    told, seen = [], {}

    def length_reward(completion_ids, answer, **_):
        told.extend(answer)
        return [-float(len(ids)) for ids in completion_ids]

    cfg = small(tmp_path / "run", max_steps=2, data={"dataset": "/nowhere/data.jsonl"})
    see = lambda step, row: seen.update({step: json.loads(json.dumps(row))})
    mine = {"problems": problems, "reward_functions": [length_reward], "on_step": see}
    assert int(train(cfg, **mine, quiet=True).step) == 2
    rows = logger.read_metrics(tmp_path / "run")
    assert [{"step": step} | row for step, row in seen.items()] == rows
    assert set(told) == {str(a + 1) for a in range(12)}


@pytest.mark.slow
def test_wrong_answers_learn_nothing_from_the_length_of_one_of_them(tmp_path):
    """Dynamic sampling keeps groups that differ in accuracy; the others fill up the batch and teach nothing."""

    def accuracy_reward(completions, answer, log_extra, **_):
        values = stock.accuracy_reward(completions, answer)
        log_extra("right", values)
        return values

    folder = tmp_path / "run"
    grpo, rewards = {"dynamic_sampling": {"max_rounds": 1}}, {"soft_punish_cache": 30}
    cfg = small(folder, max_steps=1, grpo=grpo, rewards=rewards)
    train(cfg, reward_functions=[accuracy_reward], quiet=True)
    (metrics,), rows = logger.read_metrics(folder), completions_of(folder)
    groups = [rows[first : first + 4] for first in range(0, 32, 4)]
    alike = [group for group in groups if len({row["right"] for row in group}) == 1]
    assert any(len({row["reward"] for row in group}) > 1 for group in alike)
    assert {row["advantage"] for group in alike for row in group} == {0.0}
    assert all(row["advantage"] for group in groups if group not in alike for row in group)
    assert metrics["dynamic_sampling/groups_filled"] == len(alike) < len(groups)


@pytest.mark.slow
def test_an_epoch_under_dynamic_sampling_ends_when_all_its_problems_were_met(tmp_path):
    """48 problems are six rounds of eight: a rollout of four rounds, and one of two in which none teaches."""
    problems = [Problem(f"{a}+1=", {"answer": str(a + 1)}) for a in range(48)]
    asked = []

    def silent_reward(completions, answer, **_):
        asked.extend(answer[::4])
        return [0.0] * len(completions)

    def run(name, **options):
        sampling = {"dynamic_sampling": {"max_rounds": 4}}
        cfg = small(tmp_path / name, max_steps=None, num_train_epochs=1.0, grpo=sampling)
        asked.clear()
        options |= {"reward_functions": [silent_reward], "quiet": True}
        return cfg, train(cfg, problems=problems, **options)

    cfg, whole = run("whole")
    assert sorted(asked[1:]) == sorted(str(a + 1) for a in range(48))  # one is of the check before
    rows = logger.read_metrics(tmp_path / "whole")
    assert int(whole.step) == 2
    assert [row["dynamic_sampling/rounds"] for row in rows] == [4, 2]
    assert [row["epoch"] for row in rows] == pytest.approx([4 / 6, 1.0])
    # Learning rate and noise stand where rollouts of one round would have brought them: at 0 and 4 of 6.
    rate = optimizer.learning_rate(cfg.optim, 6)
    assert [row["learning_rate"] for row in rows] == [float(rate(0)), float(rate(4))]
    assert [row["aqn/stage"] for row in rows] == [0, 6]

    run("resumed", on_step=lambda step, row: step < 1)
    _, resumed = run("resumed")
    assert int(resumed.step) == 2
    assert without_times(logger.read_metrics(tmp_path / "resumed")) == without_times(rows)


@pytest.mark.slow
def test_completions_without_a_reward_are_left_out_counted_and_warned_of_once(tmp_path, capsys):
    def second_abstains(completion_ids, **_):
        values = [-1.0 - len(ids) / 100 for ids in completion_ids]
        return [None if row % 4 == 1 else value for row, value in enumerate(values)]

    folder = tmp_path / "run"
    train(small(folder, max_steps=2), reward_functions=[second_abstains])
    assert capsys.readouterr().out.count("returned None for 8 of 32 completions") == 1
    warnings = (folder / "report.md").read_text().partition("## Warnings")[2]
    assert "returned None for 8 of 32 completions" in warnings
    for row in logger.read_metrics(folder):
        assert row["completions/without_reward"] == 8 and row["reward"] < -1
        assert np.isfinite([row["loss"], row["grad_norm"], row["reward_std"]]).all()
    lines = (folder / "completions" / "step_000001.jsonl").read_text().splitlines()
    logged = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    for first in range(0, 32, 4):
        group = logged[first : first + 4]
        assert group[1]["reward"] is None and group[1]["advantage"] == 0
        assert abs(sum(row["advantage"] for row in group)) < 1e-5  # a mean over the other three


@pytest.mark.slow
def test_a_device_that_reports_its_memory_has_the_plan_beside_the_peak(
    tmp_path, monkeypatch, capsys
):
    cfg, limit = small(tmp_path / "run", max_steps=1), 80_000_000_000
    planned = memory.plan(cfg, limit=limit)
    stats = {"bytes_in_use": planned.size("always"), "peak_bytes_in_use": planned.peak}
    stats["bytes_limit"] = limit
    monkeypatch.setattr(runtime, "memory_stats", lambda: stats)
    train(cfg)
    shown = capsys.readouterr().out
    assert "80.00" in shown and f"{planned.peak / 1e9:.2f}" in shown
    assert f"update: {planned.about_update}" in " ".join(shown.split())
    (row,) = logger.read_metrics(tmp_path / "run")
    assert row["perf/peak_memory_gb"] == planned.peak / 1e9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"problems": []}, "problems: got 0; there must be at least one"),
        ({"reward_functions": []}, "rewards.weights: got 0; must be one for each of 0"),
    ],
)
def test_nothing_in_memory_is_an_error_before_a_run_folder_exists(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(small(tmp_path / "run"), **given, quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_reads_nothing_of_a_state_whose_buffers_an_update_took(tmp_path, monkeypatch):
    update_of = Updater.__call__

    def donating(updater, state, *arguments):
        outcome = update_of(updater, state, *arguments)
        # As on a GPU: the buffers that an update gets are gone after it.
        for leaf in jax.tree.leaves(state):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        return outcome

    monkeypatch.setattr(Updater, "__call__", donating)
    cfg = harness.tiny(tmp_path / "run", max_steps=2, save_steps=1)
    unlike = lambda completion_ids, **_: [sum(ids) % 7 / 7 for ids in completion_ids]
    state = train(cfg, quiet=True, reward_functions=[unlike])
    assert state.step == 2 and state.skipped == 0
