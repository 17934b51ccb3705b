"""Tests what a run finds out about the size of its noise."""

import dataclasses
import itertools
import json
import re
import types

import numpy as np
import pytest

from qerl_jax.config import AdaptiveNoiseConfig, NoiseConfig
from qerl_jax.rl import update
from qerl_jax.tracking import logger
from qerl_jax.tracking.health import Health
from qerl_jax.training import dose
from qerl_jax.training.position import Position
from qerl_jax.training.trainer import train
from tests.faults import harness
from tests.test_tiny_run import small

FOLLOWS = NoiseConfig(
    sigma_start=0.1, sigma_end=1e-4, adaptive=AdaptiveNoiseConfig(0.01, "kl"), num_stages=4
)
ROWS = 70


def made(monkeypatch, cfg, spread=3.0, mask=None, sigma=None, step=0):
    """Makes a run whose noise number d moves token i by (d + 1) sigma slopes[i]; returns its position, slopes, lines."""
    rng = np.random.default_rng(0)
    logps, slopes = rng.normal(size=(2, ROWS * 5))
    slopes *= spread
    mask = np.ones(ROWS * 5, bool) if mask is None else mask
    row_of_token = np.repeat(np.arange(ROWS), 5)
    learned = np.bincount(row_of_token[mask], minlength=ROWS)
    experience = types.SimpleNamespace(
        mask=mask, row_of_token=row_of_token, behaviour_logps=logps, num_learned=learned
    )
    seeks = cfg.adaptive is not None and cfg.adaptive.metric == "kl"
    aqn = types.SimpleNamespace(
        seeks=seeks,
        fraction=2.0,
        stage=lambda step: step // 8,
        of_all_rows=lambda draw, sigma: (draw - step + 1) * sigma,
    )
    run = types.SimpleNamespace(
        aqn=aqn,
        cfg=types.SimpleNamespace(noise=cfg, updates_per_rollout=2),
        updater=None,
        frozen=None,
    )
    run.notes = []
    run.replicas = types.SimpleNamespace(hold=lambda noise: noise)

    def scores(updater, policy, of, rows):
        values = np.zeros(len(logps))
        chosen = np.isin(row_of_token, rows)
        values[chosen] = (logps + policy[2] * slopes)[chosen]
        return values

    monkeypatch.setattr(update, "scores", scores)
    plan = types.SimpleNamespace(num_train_epochs=None)
    state, supply = types.SimpleNamespace(params=None), types.SimpleNamespace(scored=0)
    position = Position(plan, state, supply, sigma, None, step)
    lines = []
    return dose.with_first_sigma(run, position, experience, lines.append), slopes, lines


def test_the_first_sigma_has_the_divergence_that_it_then_follows(monkeypatch):
    mask = np.arange(ROWS * 5) % 3 > 0
    mask[:10] = False  # the first two rows teach nothing
    position, slopes, lines = made(monkeypatch, FOLLOWS, mask=mask)
    # The 64 rows after them, 16 for each of four draws.
    counted = (slopes[10 : 66 * 5] * np.repeat([1, 2, 3, 4], 16 * 5))[mask[10 : 66 * 5]]
    # The k3 estimate of KL(sampler || with noise) from the ratios, at all sigmas at once.
    sigmas = np.geomspace(1e-4, 0.1, 20001)
    ratio = np.exp(np.outer(sigmas, counted))
    divergences = np.mean(ratio - 1 - np.log(ratio), axis=1)
    expected = sigmas[np.searchsorted(divergences, 0.01)]
    assert 1e-3 < expected < 0.09 and position.sigma == pytest.approx(expected, rel=0.01)
    assert lines == [
        f"noise: sigma begins at {position.sigma:.3g}, {2 * position.sigma:.2%} of a scale of the norms (median): "
        f"on {len(counted)} tokens of this rollout it moves the policy by KL = 0.01"
    ]


def test_a_first_sigma_is_sought_again_where_the_next_rollout_has_noise(monkeypatch):
    position, _, lines = made(monkeypatch, FOLLOWS)
    assert len(lines) == 1
    # Two steps a rollout, eight silent ones: the rollout of steps 6 and 7 is the last one without noise.
    for step, is_sought in ((2, False), (4, False), (6, True), (8, False)):
        later, _, lines = made(monkeypatch, FOLLOWS, sigma=0.05, step=step)
        assert later.sigma == (position.sigma if is_sought else 0.05)
        assert len(lines) == is_sought


def test_a_first_sigma_stays_within_its_bounds_and_needs_tokens(monkeypatch):
    for spread, bound, remedy in (
        (1e-3, 0.1, "raise noise.sigma_start"),
        (1e4, 1e-4, "lower noise.sigma_end"),
    ):
        position, _, (line,) = made(monkeypatch, FOLLOWS, spread=spread)
        assert position.sigma == bound and line.endswith(f"; {remedy} to reach 0.01")
    nothing = np.zeros(ROWS * 5, bool)
    assert made(monkeypatch, FOLLOWS, mask=nothing)[0].sigma == 1e-4
    # The last silent rollout does not replace what the first one gave, if it has no token.
    assert made(monkeypatch, FOLLOWS, mask=nothing, sigma=0.05, step=6)[0].sigma == 0.05
    for adaptive in (None, AdaptiveNoiseConfig(0.01, "reward")):
        cfg = dataclasses.replace(FOLLOWS, adaptive=adaptive)
        position, _, lines = made(monkeypatch, cfg)
        assert position.sigma is None and lines == []


def lines_of(cfg, *rows, learned=8):
    """Returns the lines after each row (stage, sigma, KL, entropy), from updates of this number of rows."""
    health, lines = Health(), []
    names = ("aqn/stage", "aqn/sigma", "sampling/kl_k3", "entropy")
    others = {"reward": 0.5, "update/rows": learned}
    rows = [dict(zip(names, row, strict=True)) | others for row in rows]
    for row in rows:
        health.see(row)
        lines.append(dose.acted(cfg, health))
    # A run that is resumed after these rows reports the same.
    assert dose.acted_before(cfg, rows) == [*itertools.chain(*lines)]
    return lines


def test_the_first_noisy_rollout_says_what_the_noise_did(tmp_path):
    rows = (0, 0.0, 2e-4, 0.31), (0, 0.0, 1e-4, 0.3), (1, 0.01, 5e-4, 0.32), (2, 5e-3, 1e-4, 0.3)
    cfg = harness.tiny(tmp_path)
    first, second, (line, warning), last = lines_of(cfg, *rows)
    assert first == second == last == []
    # What sampler and trainer differ by without noise does not count.
    assert "at sigma = 0.01 it moved the policy by KL = 0.0004 nats a token" in line
    assert "entropy is 0.32, and was 0.3 in the rollout before" in line
    assert "Rounding to nvfp4 moves it by 0.018 (of Qwen2.5-Coder-0.5B; not measured" in line
    assert warning.startswith("warning: the noise does less than a tenth of what rounding does")
    assert 'metric = "kl" and target = 0.018' in warning
    # Louder noise is not warned of, and in 16 bits nothing is rounded.
    loud = (*rows[:2], (1, 0.05, 3e-3, 0.3))
    assert len(lines_of(cfg, *loud)[2]) == 1
    wide = harness.tiny(tmp_path, model={"weights": "bfloat16"})
    assert "Rounding" not in lines_of(wide, *rows)[2][0] and len(lines_of(wide, *rows)[2]) == 1
    # Without a token to learn from nothing is measured, and 0 says nothing of the noise.
    assert lines_of(cfg, *rows, learned=0) == [[]] * 4
    # Where both have the noise, nothing shows it.
    both = harness.tiny(tmp_path, noise={"scope": "both"})
    assert lines_of(both, *rows) == [[]] * 4
    assert lines_of(harness.tiny(tmp_path, noise=None), *rows) == [[]] * 4


def test_what_qerl_quantize_measured_is_compared_with(tmp_path):
    (tmp_path / "quantization_report.json").write_text(json.dumps({"kl": 0.3}))
    cfg = harness.tiny(tmp_path / "run")
    model = dataclasses.replace(cfg.model, model_name_or_path=str(tmp_path))
    cfg = dataclasses.replace(cfg, model=model)
    line, warning = lines_of(cfg, (0, 0.0, 0.0, 0.3), (1, 0.01, 0.02, 0.3))[1]
    assert "moves it by 0.3 (measured by qerl quantize)" in line and "target = 0.3" in warning
    # A folder or hub that is gone meanwhile does not end a run.
    (tmp_path / "quantization_report.json").unlink()
    tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert "not measured" in lines_of(cfg, (0, 0.0, 0.0, 0.3), (1, 0.01, 0.02, 0.3))[1][0]


def test_the_lowest_divergences_of_the_docs_are_those_that_bases_are_compared_with():
    page = (harness.ROOT / "docs" / "design" / "noise.md").read_text()
    rows = re.findall(r"^\| (\S+) \| \w+ \| (\w+)\b[^|]*\| ([\d.]+) \|$", page, re.M)
    formats = {name for _, name, _ in rows} - {"16"}
    lowest = {
        name: min((float(kl), model) for model, of, kl in rows if of == name) for name in formats
    }
    assert lowest == dose.MEASURED


@pytest.mark.slow
def test_noise_begins_with_the_divergence_that_was_asked_for(tmp_path):
    adaptive = {"metric": "kl", "target": 0.01}
    noise = {"sigma_start": 0.5, "sigma_end": 1e-3, "num_stages": 3, "unit": "relative"}
    batch = {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
    sections = {"optim": batch, "noise": noise | {"adaptive": adaptive}}
    train(small(tmp_path, max_steps=3, **sections), quiet=True)
    silent, first, second = logger.read_metrics(tmp_path)
    assert silent["aqn/sigma"] == 0 and 1e-3 < first["aqn/sigma"] < 0.5
    # Another draw, other texts and a policy that has learned: the same size, but not the same number.
    assert 0.003 < first["sampling/kl_k3"] < 0.03
    rises = first["sampling/kl_k3"] < 0.01
    expected = first["aqn/sigma"] * (1.1 if rises else 1 / 1.1)
    assert second["aqn/sigma"] == pytest.approx(expected, rel=1e-5)
    report = (tmp_path / "report.md").read_text()
    assert "noise: sigma begins at " in report and "it moved the policy by KL = " in report
