"""Tests the study on Qwen2.5: its plan, the bases it makes, what it begins in which time, and two arms on the tiny base."""

import argparse
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w

from pallas_kernels import FORMATS
from qerl_jax import config
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.config import DataConfig
from qerl_jax.data import datasets
from qerl_jax.system.checked import ConfigError, NotFinite, from_table
from qerl_jax.tracking import logger
from qerl_jax.training import trainer
from scripts import cards, gsm8k_bases
from scripts import gsm8k_arms as arms
from scripts import gsm8k_study as study
from scripts.gsm8k_arms import ARMS, Piece
from tests import gguf_files

START = {"sigma": 0.05, "temperature": 1.03, "policies": dict.fromkeys(arms.MEASURED, {})}


def swept(arm, best, others=()):
    """Returns the records of an arm's sweep, in which one rate has the highest accuracy."""
    records = dict(others)
    while missing := [piece for piece in arms.sweep(records, arm) if piece.name not in records]:
        for piece in missing:
            accuracy = 0.7 if piece.rate == best else 0.6 - piece.rate
            record = {"accuracies": [0.5, accuracy], "wall": 200.0, "rollouts": {"reward": [0.5]}}
            records[piece.name] = record
    return records


def all_swept():
    records = {"start": START}
    for arm, best in {"A": 1e-4, "B": 1e-4, "C": 3e-4, "D": 3e-5, "J": 3e-5}.items():
        records = swept(arm, best, records)
    return records


def test_a_sweep_goes_on_with_the_best_two_rates_and_with_noise_with_the_best_three_without():
    assert len(list(arms.pieces(1, {}))) == 15
    assert not arms.sweep({}, "D") and not arms.sweep({}, "B")
    first = {piece.name: {"accuracies": [100 * piece.rate]} for piece in arms.sweep({}, "A")}
    more = arms.sweep(first, "A")
    assert [(piece.rate, piece.seed) for piece in more[5:]] == [(3e-4, 1), (1e-3, 1)]
    assert arms.best_rate(first, "A") is None and arms.best_rate(first, "E") is None
    first |= {
        Piece("A", rate, 1, arms.SWEEP_STEPS).name: {"accuracies": [x]}
        for rate, x in ((3e-4, 9), (1e-3, 0))
    }
    assert arms.best_rate(first, "A") == arms.best_rate(first, "E") == 3e-4
    # Both arms with noise are tuned, and alike.
    assert arms.best_rate(first, "B") is None
    assert [piece.rate for piece in arms.sweep(first, "B")] == [1e-4, 3e-4, 1e-3]
    records = swept("C", 1e-4, {})
    assert [piece.rate for piece in arms.sweep(records, "D")] == [1e-5, 3e-5, 1e-4]
    assert [arms.best_rate(all_swept(), arm) for arm in "GKL"] == [3e-4, 3e-5, 1e-4]


def test_stages_have_their_runs_seed_by_seed_and_wait_for_what_decides_about_them():
    records = all_swept()
    second = list(arms.pieces(2, records))
    assert [piece.arm for piece in second[:5]] == ["A", "B", "C", "D", "A"] and len(second) == 24
    assert len(list(arms.pieces(3, records))) == 34 and len(list(arms.pieces(4, records))) == 22
    assert {*(piece.seed for piece in second)} == {*range(2, 8)}
    assert not {*arms.SEEDS} & {*arms.SWEEP_SEEDS} and len(arms.SEEDS) == 8
    assert {piece.arm for piece in arms.pieces(1, records)} == {*"ABCDJ"}
    del records["start"]
    assert {piece.arm for piece in arms.pieces(1, records)} == {"A", "C", "J"}
    assert {piece.arm for piece in arms.pieces(2, records)} == {"A", "C"}
    assert {Piece.named(piece.name) for piece in second} == {*second}


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_config_that_differs_in_what_it_says(arm):
    table = config.read_table(study.CONFIG)
    piece = Piece(arm, 1e-4, 4, ARMS[arm].steps)
    cfg = from_table(config.RunConfig, arms.configured(piece, table, START, {}))
    assert (cfg.seed, cfg.max_steps, cfg.optim.learning_rate) == (4, ARMS[arm].steps, 1e-4)
    assert (cfg.model.dtype, cfg.model.block_scales) == ("bfloat16", "maximum")
    assert (cfg.rollout.carry, cfg.drafts, cfg.updates_per_rollout) == (0, "off", 4)
    assert cfg.model.weights == (
        "nvfp4" if arm in {"C", "D", "G", "L4", "D1", "C+", "D+"} else "bfloat16"
    )
    assert (cfg.model.trainable == "full") == (arm in {"J", "K"})
    assert cfg.rollout.temperature == {"F": 1.03, "F2": 1.2}.get(arm, 1.0)
    sigmas = dict.fromkeys(("B", "D", "L", "L4", "D+"), 0.05) | {"B1": 0.01, "D1": 0.01}
    assert (cfg.noise and cfg.noise.sigma_start) == sigmas.get(arm)
    if cfg.noise is not None:
        assert cfg.noise.sigma_end == pytest.approx(cfg.noise.sigma_start / 100)
    corrected = cfg.objective.old_logprobs == "behaviour"
    assert corrected == (arm in {"L", "L4"})
    assert (cfg.rewards.functions == ("boxed_reward",)) == (arm not in {"M", "N"})
    assert cfg.eval.reward == "boxed_reward" and cfg.eval.num_generations == 2


def test_a_base_that_is_drawn_has_the_seed_of_the_run():
    assert (Piece("E", 1e-4, 3, 160).base, Piece("K", 1e-5, 3, 160).base) == ("noise-3", "nvfp4-16")
    stored = [arms.weights(base) for base in ("16", "noise-3", "nvfp4-16", "nvfp4", "gptq")]
    assert stored == ["bfloat16"] * 3 + ["nvfp4"] * 2


def test_the_dose_is_the_lowest_that_does_a_tenth_of_what_rounding_does():
    divergences = {5e-2: 0.001, 1e-1: 0.004, 2e-1: 0.02}
    assert arms.chosen_sigma(divergences, 0.005) == 5e-2
    assert arms.chosen_sigma(divergences, 0.03) == 1e-1
    assert arms.chosen_sigma(divergences, 3.0) == 2e-1


def test_the_rewards_of_the_controls_know_no_answer():
    texts = ["so \\boxed{4}", "so 4", "\\boxed{}", "\\boxed{a"]
    assert arms.has_box(completions=texts) == [1, 0, 0, 0]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert arms.has_box(completions=chats) == [1, 0, 0, 0]
    many = [f"answer {number}" for number in range(2000)]
    rewards = arms.random_reward(["q"] * 2000, many)
    assert rewards == arms.random_reward(["q"] * 2000, many)
    assert {*rewards} == {0.0, 1.0} and abs(np.mean(rewards) - 0.5) < 0.05
    assert rewards != arms.random_reward(["r"] * 2000, many)


def test_static_noise_has_in_each_block_the_size_of_the_rounding_error():
    form = FORMATS["nvfp4"]
    weights = jax.random.normal(jax.random.key(0), (2, 96, 64), jnp.float32)
    weights = weights.at[:, :, :16].multiply(20.0)
    rounded = gsm8k_bases.changed(form, (64, 32), weights)
    for layer in range(2):  # the parts share a global scale
        parts = form.pack([weights[layer, :64], weights[layer, 64:]])
        expected = np.concatenate([np.asarray(form.unpack(part)) for part in parts])
        np.testing.assert_array_equal(rounded[layer], expected)
    draws = [gsm8k_bases.changed(form, (64, 32), weights, key=jax.random.key(s)) for s in (1, 2)]
    blocks = lambda x: np.square(np.asarray(x - weights)).reshape(2, 96, 4, 16).sum(axis=(0, 1, 3))
    for draw in draws:
        # 192 blocks of 16 numbers: their sum of squares has a relative deviation of about 3 %.
        np.testing.assert_allclose(blocks(draw), blocks(rounded), rtol=0.12)
        assert np.corrcoef(np.ravel(draw - weights), np.ravel(rounded - weights))[0, 1] < 0.05
    assert float(jnp.abs(draws[0] - draws[1]).max()) > 0
    with pytest.raises(ConfigError, match="relative error of layer 1: got nan"):
        gsm8k_bases.changed(form, (64, 32), weights.at[1, 0, 0].set(jnp.nan))


def test_gptq_reads_the_same_answers_on_each_machine(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        gsm8k_bases, "_answer", lambda source, asked, path, most: path.write_text("x")
    )
    monkeypatch.setattr(gsm8k_bases, "_calibrated", lambda *what: seen.append(what[2].read_text()))
    answers = tmp_path / "calibration.jsonl"
    ask = lambda work: gsm8k_bases.path_of("gptq", "base", tmp_path / work, [], answers)
    ask("one")
    answers.write_text("of the first machine")
    ask("two")
    assert seen == ["x", "of the first machine"]


def test_a_gguf_file_is_called_what_it_is(tmp_path):
    path = gguf_files.write(tmp_path / "base.gguf", {"general.file_type": 15}, {})
    about = gsm8k_bases.describe(str(path))
    assert about["what"] == "dequantized Q4_K_M" and len(about["base"]) == 16
    other = gguf_files.write(tmp_path / "other.gguf", {"general.file_type": 7}, {})
    other = gsm8k_bases.describe(str(other))
    assert other["what"] == "dequantized Q8_0" and other["base"] != about["base"]


def test_a_record_has_a_value_for_each_rollout_and_the_validations():
    rows = [{"step": 0, "eval/accuracy": 0.5, "perf/eval_time": 2.0}]
    for step in (4, 8):
        row = {"step": step, "loss": 0.0, "updates/skipped": 1, "reward": 0.1 * (step // 8)}
        rows.append(row | {"perf/rollout_time": 3.0})
    rows[-1] |= {"eval/accuracy": 0.61234, "perf/eval_time": 2.5}
    record = study.summed(rows)
    assert record["rollouts"]["reward"] == [0.0, 0.1] and record["skipped"] == 1
    assert (record["eval_steps"], record["accuracies"]) == ([0, 8], [0.5, 0.6123])
    assert record["time"] == {"rollout": 6.0, "update": 0, "evaluation": 4.5}


def test_a_rate_that_breaks_the_policy_counts_as_nothing_right(args, monkeypatch):
    def broken(cfg, quiet):
        raise NotFinite("sampling")

    row = {"step": 4, "loss": 0.0, "reward": 0.5, "updates/skipped": 0}
    monkeypatch.setattr(trainer, "train", broken)
    monkeypatch.setattr(
        logger, "read_metrics", lambda folder: [{"step": 0, "eval/accuracy": 0.5}, row]
    )
    monkeypatch.setattr(study, "_path_of", lambda args, base: args.base)
    args.config = study.CONFIG
    for steps in (arms.SWEEP_STEPS, arms.STEPS):
        piece = Piece("A", 1e-3, 9, steps)
        (args.work / piece.name).mkdir(parents=True)
        with pytest.raises(NotFinite):  # the first time it is begun again
            study.run(args, piece.name)
        if piece.is_swept:
            study.run(args, piece.name)
            record = study.read(args.out)[piece.name]
            assert (record["eval_steps"], record["accuracies"]) == ([0, 48], [0.5, 0.0])
            assert record["rollouts"]["reward"] == [0.5] + [0.0] * 11
            assert record["temperature"] == 1.0 and "sigma" not in record
        else:  # and a run that is compared is never taken for 0
            with pytest.raises(NotFinite):
                study.run(args, piece.name)


# What is begun in which time -----------------------------------------------------------------------


@pytest.fixture
def args(tmp_path):
    """Returns the arguments of a study whose rates are known."""
    paths = {"out": "out", "work": "work", "data": "data", "config": "tiny.toml"}
    (tmp_path / "out").mkdir()
    for name, record in all_swept().items():
        (tmp_path / f"out/{name}.json").write_text(json.dumps(record))
    return argparse.Namespace(
        base=str(TINY),
        **{option: tmp_path / name for option, name in paths.items()},
        **{"arms": list(ARMS), "stage": [2], "cards": 2, "machine": None, "commit": "abc"},
    )


def queue_of(args, seconds=1e9, running=()):
    queue = cards.Queue(args.work, args.cards, args.cards, seconds)
    queue.running.update(dict.fromkeys(running))
    return queue


def leave(args, piece, *parts, record=None):
    """Leaves what a run has written: parts of its folder, and a record."""
    for part in parts:
        (args.work / piece.name / part).mkdir(parents=True)
    if record is not None:
        (args.out / f"{piece.name}.json").write_text(json.dumps(record))


def test_a_run_begins_if_it_will_end_and_be_tested_while_the_machine_is_there(args):
    first = next(arms.pieces(2, study.read(args.out)))
    needed = 60 + 2.2 * 160 + 90 + 60
    args.machine = needed + 1
    assert study.choose(args, queue_of(args)).name == first.name == "A_0.0001_2_160"
    args.machine = needed - 5
    assert study.choose(args, queue_of(args)) is None
    assert study.choose(args, queue_of(args, seconds=100)) is None
    # A run that took less says how long others take, and one that goes on has less to do.
    leave(args, first, "adapter", record={"accuracies": [1], "wall": 300.0})
    (args.out / f"{first.name}.test.json").write_text("{}")
    second = Piece("B", 1e-4, 2, 160)
    assert study.choose(args, queue_of(args)).name == second.name
    third = Piece("C", 3e-4, 2, 160)
    leave(args, third, "checkpoints/128")
    args.machine = 60 + 240 / 5 + 150 + 5
    assert study.choose(args, queue_of(args)).name == third.name
    assert study.choose(args, queue_of(args, running=[third.name])) is None


def test_a_run_of_all_weights_begins_only_if_it_will_end_in_the_call(args):
    args.stage, args.arms = [3], ["J"]
    needed = 60 + 2.2 * 160
    assert study.choose(args, queue_of(args, seconds=needed - 5)) is None
    assert study.choose(args, queue_of(args, seconds=needed + 5)).name == "J_3e-05_2_160"
    args.arms = ["E"]
    assert study.choose(args, queue_of(args, seconds=needed - 5)).name == "E_0.0001_2_160"


def test_tests_are_made_together_and_before_the_machine_is_gone(args):
    pieces = [piece for piece in arms.pieces(2, study.read(args.out)) if piece.arm in "AB"][:6]
    for piece in pieces[:4]:
        leave(args, piece, "adapter", record={"accuracies": [1], "wall": 300.0})
    assert study.choose(args, queue_of(args)).name.startswith("C_")  # four are not many
    args.machine = 400.0  # no further run fits
    job = study.choose(args, queue_of(args, running=["x"]))
    assert job.name.split(",") == ["test", *sorted(piece.name for piece in pieces[:4])]
    assert study.choose(args, queue_of(args, running=[job.name])) is None
    # With both cards free each takes a half.
    assert len(study.choose(args, queue_of(args)).name.split(",")) == 3
    args.machine = 90 + 2 * 60 + 1
    assert len(study.choose(args, queue_of(args, running=["x"])).name.split(",")) == 3
    args.machine = None
    for piece in pieces[4:]:
        leave(args, piece, "adapter", record={"accuracies": [1], "wall": 300.0})
    assert study.choose(args, queue_of(args)).name.startswith("test,A")


def test_no_job_has_the_name_of_one_that_runs(args):
    args.stage, args.arms, args.machine = [4], ["A+"], 400.0
    leave(args, Piece("A+", 1e-4, 2, 320), "adapter", record={"accuracies": [1], "wall": 900.0})
    job = study.choose(args, queue_of(args))
    assert job.name == "test,A+_0.0001_2_320"
    assert study.choose(args, queue_of(args, running=[job.name])) is None


def test_a_model_with_all_weights_is_tested_at_once(args):
    args.stage = [3]
    first = Piece("J", 3e-5, 2, 160)
    leave(args, first, "model", record={"accuracies": [1], "wall": 300.0})
    assert study.choose(args, queue_of(args)).name == f"test,{first.name}"


def test_a_run_whose_adapter_was_lost_before_its_test_is_repeated(args):
    first = next(arms.pieces(2, study.read(args.out)))
    leave(args, first, record={"accuracies": [1], "wall": 300.0})
    assert study.choose(args, queue_of(args)).name == first.name
    (args.out / f"{first.name}.test.json").write_text("{}")
    assert study.choose(args, queue_of(args)).name == Piece("B", 1e-4, 2, 160).name


def test_stage_0_measures_the_start_beside_the_bases(args):
    args.stage = [0]
    partly = START | {"policies": {"16": {}, "nvfp4": {}}}
    (args.out / "start.json").write_text(json.dumps(partly))
    assert study.choose(args, queue_of(args)).name == "start"
    job = study.choose(args, queue_of(args, running=["start"]))
    assert job.name == "test,base_16,base_noise-0,base_noise-1,base_nf4,base_mxfp4"
    job = study.choose(args, queue_of(args, running=["start", job.name]))
    assert job.name == "test,base_nvfp4,base_gptq" and not study.is_done(args)
    assert "the start" in study.progress(args)


# Two arms on the tiny base -------------------------------------------------------------------------


@pytest.fixture
def tiny_study(args, monkeypatch):
    """Makes it a study of two arms of 8 steps on the tiny base, with arithmetic that it can do."""
    tiny, table = config.read_table("quickstart"), config.read_table(study.CONFIG)
    table |= {"save_steps": 4, "model": tiny["model"] | {"weights": "bfloat16"}}
    table |= {"lora": {"rank": 8, "alpha": 8.0}, "rewards": tiny["rewards"]}
    table["data"] |= {"system_prompt": "", "max_prompt_length": 48}
    table["rollout"] |= {"generation_batch_size": 32, "max_completion_length": 40}
    table["optim"] |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    table["eval"] |= {"num_problems": 8, "eval_steps": 4, "reward": "accuracy_reward"}
    args.config.write_text(tomli_w.dumps(table))
    problems = datasets.from_config(
        DataConfig("arithmetic"), split="train", seed=0, num_problems=88
    )
    rows = [
        json.dumps({"prompt": x.prompt[-1]["content"], "answer": str(x.columns["answer"])}) + "\n"
        for x in problems
    ]
    args.data.mkdir()
    for name, at in {"rows": 0, "val": 64, "test": 72, "math": 80}.items():
        (args.data / f"{name}.jsonl").write_text("".join(rows[at : 64 if at == 0 else at + 8]))
    plan = [Piece("A", 3e-3, 2, 8), Piece("E", 3e-3, 2, 8)]
    monkeypatch.setattr(arms, "pieces", lambda stage, records: iter(plan))
    args.cards, args.arms = 1, ["A", "E"]
    return plan


@pytest.mark.slow
@pytest.mark.process
def test_two_arms_that_were_stopped_go_on_and_are_tested_on_one_base(args, tiny_study):
    first, second = tiny_study
    checkpoints = args.work / first.name / "checkpoints"

    class Stopped(cards.Queue):
        """A queue whose time is over when the first run has a checkpoint."""

        def left(self):
            return 0.0 if (checkpoints / "4").is_dir() else 1e9

    choose = lambda queue: study.choose(args, queue)
    assert not Stopped(args.work, 1, 1, 1e9, patience=120).run(choose)
    assert first.name not in study.read(args.out) and not (args.work / second.name).exists()
    before = logger.read_metrics(args.work / first.name)
    assert [row["step"] for row in before] == [0, 4, 4][: len(before)]
    queue = queue_of(args)
    assert queue.run(choose) and not queue.failed
    records = study.read(args.out)
    rows = logger.read_metrics(args.work / first.name)
    # The first rollout was not made again: its row, with the time that it took, is the same.
    assert [row["step"] for row in rows if "loss" in row] == [4, 8] and rows[:2] == before[:2]
    for piece in tiny_study:
        record, tested = records[piece.name], records[f"{piece.name}.test"]
        assert record["eval_steps"] == [0, 4, 8] and len(record["rollouts"]["entropy"]) == 2
        assert (record["what"], record["commit"]) == ("16-bit folder", "abc")
        assert record.get("made") == tested.get("made")
        assert record.get("made", "none").startswith({"A": "none", "E": "noise-2 "}[piece.arm])
        assert len(tested["right"]) == 8 and tested["samples"] == 4
        assert (
            0 <= tested["flexible"] <= 1 and not (args.work / piece.name / "checkpoints").exists()
        )
    names = [path.name for path in (args.work / "bases").iterdir() if path.is_dir()]
    assert names == ["noise-2"] and study.is_done(args)
    again = queue_of(args)
    assert again.run(choose) and not again.took
