"""Tests the study: its plan, its runs on the tiny base, and the results that it keeps."""

import argparse
import json
import pathlib
import types

import pytest
import tomli_w

from qerl_jax import config
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.system.checked import from_table
from scripts import study
from scripts.study import ARMS, Piece


def result(rewards):
    return {"steps": {"reward": rewards}}


def write(args, name, done=None):
    (args.out / f"{name}.json").write_text(json.dumps(done or result([0.5, 0.5])))


def all_rates(arm, best):
    """Makes results of an arm's first runs, of which those at one rate end with the highest reward."""
    return {
        Piece(arm, rate, seed).name: result([0.9] * 80 + [0.6 if rate == best else 0.5] * 20)
        for rate in ARMS[arm].rates
        for seed in study.FIRST_SEEDS
    }


def test_the_plan_has_72_runs_whose_last_are_known_when_the_rates_are():
    first = list(study.pieces({}))
    assert len(first) == len(set(first)) == 48
    assert [Piece.named(piece.name) for piece in first] == first
    assert [piece.arm for piece in first[:8]] == list(ARMS)
    done = {}
    for arm in ARMS:
        done |= all_rates(arm, ARMS[arm].rates[1])
    whole = list(study.pieces(done))
    assert len(whole) == len({piece.name for piece in whole}) == 72
    assert {piece.rate for piece in whole[48:]} == {3e-4, 3e-5}
    full = [Piece("full", 3e-5, seed) for seed in (2, 3, 4)]
    assert [piece for piece in whole[48:] if piece.arm == "full"] == full
    assert all(max(arm.rates) / min(arm.rates) == pytest.approx(100) for arm in ARMS.values())


def test_the_best_rate_is_that_of_the_last_rewards_and_unknown_while_runs_are_missing():
    done = all_rates("nvfp4", 3e-3)
    assert study.best_rate(done, "nvfp4") == 3e-3
    done.popitem()
    assert study.best_rate(done, "nvfp4") is None
    assert not [piece for piece in study.pieces(done, ["nvfp4"], "seeds")]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_config_that_differs_in_what_it_says(arm, tmp_path):
    table = config.read_table(study.CONFIG)
    changed = study.configured(Piece(arm, 1e-3, 4), table, "base", tmp_path)
    cfg = from_table(config.RunConfig, changed)
    common = from_table(config.RunConfig, table)
    assert cfg.optim.learning_rate == 1e-3 and cfg.seed == 4
    assert (cfg.noise is not None) == arm.endswith("aqn")
    weights = arm.split("-")[0]
    assert cfg.model.weights == {"full": "bfloat16", "bf16": "bfloat16"}.get(weights, weights)
    assert cfg.model.trainable == ("full" if arm == "full" else "lora")
    assert (cfg.data, cfg.rollout, cfg.eval) == (common.data, common.rollout, common.eval)
    assert cfg.model.block_scales == "maximum" and cfg.grpo.reference.beta == 1e-6


@pytest.fixture
def two_steps(tmp_path):
    """Returns the arguments of a study of two steps on the tiny base, with problems that it can read."""
    tiny, table = config.read_table("quickstart"), config.read_table(study.CONFIG)
    table |= {"max_steps": 2, "model": tiny["model"], "rewards": tiny["rewards"]}
    table |= {
        "data": tiny["data"] | {"num_problems": 64},
        "rollout": {"num_generations": 4, "max_completion_length": 32},
        "eval": {"num_problems": 8, "num_generations": 2, "temperature": 1.0},
    }
    table["optim"] |= {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    (tmp_path / "two_steps.toml").write_text(tomli_w.dumps(table))
    (tmp_path / "out").mkdir()
    paths = {"out": "out", "work": "work", "config": "two_steps.toml"}
    return argparse.Namespace(
        base=str(TINY),
        **{option: tmp_path / name for option, name in paths.items()},
        **{"arms": ["bf16", "nvfp4-aqn"], "stage": "rates", "jobs": 1, "cards": 1},
        **{"seconds": 1e9, "timing": False, "piece": None},
    )


@pytest.mark.slow
def test_a_run_leaves_its_metrics_and_nothing_else(two_steps):
    args = two_steps
    args.piece = "nvfp4-aqn_0.0003_1"
    study.run_piece(args)
    assert [file.name for file in args.out.iterdir()] == [f"{args.piece}.json"]
    assert not (args.work / args.piece).exists()
    found = study.read(args.out)[args.piece]
    assert (found["arm"], found["rate"], found["seed"]) == ("nvfp4-aqn", 3e-4, 1)
    assert set(found["steps"]) == set(study.STEPS) and found["skipped"] == 0
    assert {len(values) for values in found["steps"].values()} == {2}
    assert min(found["steps"]["entropy"]) > 0 and found["steps"]["sigma"][0] == 0
    # Before the first update the policy is its reference.
    assert abs(found["steps"]["kl"][0]) < 1e-6 < found["steps"]["kl"][1]
    assert 0 <= found["start"]["accuracy"] <= found["start"]["pass@2"] <= 1
    assert len(found["base"]) == 16 and found["jobs"] == 1


def test_a_run_on_a_quantized_base_records_its_hash_too(two_steps):
    args = two_steps
    weights, seen = study.gptq_folder(args) / "model.safetensors", set()
    weights.parent.mkdir(parents=True)
    for content in (b"one", b"other"):
        weights.write_bytes(content)
        seen.add(study.surroundings(args, ARMS["nvfp4-gptq"])["quantized"])
    assert len(seen) == 2 and {len(digest) for digest in seen} == {16}
    plain, gptq = (study.surroundings(args, ARMS[arm]) for arm in ("nvfp4", "nvfp4-gptq"))
    assert "quantized" not in plain and plain["base"] == gptq["base"] not in seen


@pytest.mark.slow
def test_a_study_of_two_steps_is_done_in_pieces_by_several_processes(two_steps, capsys):
    args = two_steps
    args.jobs, args.seconds = 2, 0  # no time: nothing is begun
    assert not study.work_off(args) and not study.read(args.out)
    args.seconds = 1e9
    for arm in args.arms:  # but for one rate of one arm all is there
        for piece in study.pieces({}, [arm], "rates"):
            if piece.rate != 3e-3 or arm == "bf16":
                write(args, piece.name, result([0.5, 0.5]) | {"of": "before"})
    assert study.work_off(args)
    results = study.read(args.out)
    made = sorted(name for name, each in results.items() if "of" not in each)
    assert made == ["nvfp4-aqn_0.003_0", "nvfp4-aqn_0.003_1"]
    assert made[0] in capsys.readouterr().out and "best rate" in study.progress(args)
    args.timing = True
    assert study.time_arms(args)
    assert json.loads((args.out / "timing_bf16.json").read_text())["step"] > 0


def test_a_job_that_fails_is_tried_as_often_as_is_said(tmp_path, monkeypatch, capsys):
    def launch(queue, job, card):
        (tmp_path / f"{job.name}.log").write_text("OSError: chance\n")
        return types.SimpleNamespace(poll=lambda: 1, returncode=1)

    monkeypatch.setattr(study.cards.Queue, "launch", launch)
    monkeypatch.setattr(study.cards.time, "sleep", lambda seconds: None)
    job = study.cards.Job("job", [])
    for tries in (1, 3):
        queue = study.cards.Queue(tmp_path, 1, 1, 1e9, tries=tries)
        assert queue.run(lambda queue: None if job.name in queue.failed else job)
        assert capsys.readouterr().out.count("job FAILED: OSError: chance") == tries


def test_runs_are_divided_among_cards(two_steps, monkeypatch):
    args, cards = two_steps, []
    args.jobs, args.cards = 3, 2

    def launch(queue, job, card):
        write(args, job.name)
        cards.append(card)
        # The first run outlasts the next five, which therefore are not all on its card.
        is_first = len(cards) == 1
        poll = lambda: None if is_first and len(cards) < 6 else 0
        return types.SimpleNamespace(poll=poll, returncode=0)

    monkeypatch.setattr(study.cards.Queue, "launch", launch)
    assert study.work_off(args)
    assert len(cards) == 12 and cards[:3] == [0, 1, 0] and set(cards[3:]) == {0, 1}


@pytest.mark.parametrize("status", [0, 1])
def test_other_runs_begin_while_gptq_quantizes(two_steps, monkeypatch, capsys, status):
    args, began, looks = two_steps, [], iter([None] * 3 + [status] * 99)
    args.work.mkdir()
    args.arms, args.jobs = ["nvfp4-gptq", "bf16"], 12
    (args.work / "gptq.log").write_text("ValueError: too few rows\n")

    def poll():
        quantizing.returncode = next(looks)
        if quantizing.returncode == 0:
            study.gptq_folder(args).mkdir(exist_ok=True)
        return quantizing.returncode

    def launch(queue, job, card):
        if job.name == "gptq":
            return quantizing
        began.append(job.name)
        write(args, job.name)
        return types.SimpleNamespace(poll=lambda: 0, returncode=0)

    quantizing = types.SimpleNamespace(poll=poll, returncode=None)
    monkeypatch.setattr(study.cards.Queue, "launch", launch)
    assert study.work_off(args) == (status == 0)
    assert {Piece.named(name).arm for name in began[:6]} == {"bf16"}
    assert len(began) == (12 if status == 0 else 6)
    assert ("gptq FAILED: ValueError: too few rows" in capsys.readouterr().out) == bool(status)


@pytest.mark.slow
def test_a_run_that_fails_is_told_of_and_left(two_steps, capsys):
    args = two_steps
    args.arms, args.base = ["bf16"], str(pathlib.Path(args.base) / "nowhere")
    done = all_rates("bf16", 3e-4)
    done.pop("bf16_0.0003_1")
    for name, each in done.items():
        write(args, name, each)
    assert not study.work_off(args)
    said = capsys.readouterr().out
    assert "bf16_0.0003_1 FAILED" in said and "nowhere" in said
    assert len(study.read(args.out)) == 5
