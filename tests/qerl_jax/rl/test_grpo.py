"""Tests GRPO's equations against TRL's own numbers, and properties that hold for all numbers."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import (
    LOSS_TYPES,
    CorrectionConfig,
    EntropyConfig,
    GrpoConfig,
    MaskConfig,
    MismatchConfig,
    ReferenceConfig,
)
from qerl_jax.rl import entropy, grpo
from scripts import compare_trl
from tests import golden_files
from tests.pallas_kernels.common import slow
from tests.programs import compiled

CASES = json.loads((golden_files.GOLDEN / "loss" / "cases.json").read_text())
VECTORS = golden_files.load("loss/vectors.safetensors")
# The recorded tolerances of TRL's numbers: relative, by the precision of the computation.
RTOL = {"float64": 1e-10, "float32": 2e-6}
CLIP = {"epsilon": 0.2, "epsilon_high": 0.28}
pytestmark = pytest.mark.usefixtures("no_silent_broadcasting")


def assert_close(actual, expected, rtol):
    """Compares relative to the largest entry, because small entries of a gradient are differences."""
    scale = np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * scale)


def random_batch(rows=8, length=7, seed=0):
    """Makes rows of every length, one of them empty, with ratios beyond both bounds."""
    rng = np.random.default_rng(seed)
    logps = -rng.uniform(0.1, 3.0, (rows, length))
    return {
        "logps": logps,
        "old_logps": logps + rng.normal(0, 0.4, (rows, length)),
        "ref_logps": logps + rng.normal(0, 0.4, (rows, length)),
        "advantages": rng.normal(0, 1, rows),
        "mask": np.arange(length) < rng.permutation(rows)[:, None],
    }


# Arrays of this size compile longer than they run, and code that is not optimized compiles sooner.
@functools.partial(
    jax.jit, static_argnames="cfg", compiler_options={"xla_backend_optimization_level": 0}
)
def _loss_and_grad(cfg, batch, totals):
    def loss(logps):
        return grpo.policy_loss(cfg, batch._replace(logps=logps), totals)

    (value, rows), grad = jax.value_and_grad(loss, has_aux=True)(batch.logps)
    return value, grad, rows


TOTALS = {field.name for field in dataclasses.fields(grpo.BatchTotals)}


def loss_and_grad(batch, **options):
    """Returns the loss, its gradient with respect to logps alone, and the row metrics."""
    totals = grpo.BatchTotals(**{k: v for k, v in options.items() if k in TOTALS})
    cfg = GrpoConfig(**{k: v for k, v in options.items() if k not in TOTALS})
    return _loss_and_grad(cfg, grpo.LossInputs(**jax.tree.map(jnp.asarray, batch)), totals)


def options_of(loss_type, level, tokens):
    """Returns the options of a loss of `random_batch` with a KL term, whole or in parts."""
    return CLIP | {
        **{"loss_type": loss_type, "importance_sampling_level": level, "rows": 8},
        **{"reference": ReferenceConfig(0.1), "max_completion_length": 7, "tokens": tokens},
    }


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, "float64") for case in CASES),
        *((case, "float32") if case in CASES[::8] else slow(case, "float32") for case in CASES),
    ],
    ids=lambda value: value["key"] if isinstance(value, dict) else value,
)
def test_loss_gradient_and_metrics_are_those_of_trl(case, dtype):
    with jax.enable_x64(dtype == "float64"):
        floats = ("logps", "old_logps", "ref_logps", "advantages")
        golden = lambda name: VECTORS[f"{case['inputs']}.{name}"]
        inputs = {name: jnp.asarray(golden(name), dtype) for name in floats}
        inputs["mask"] = jnp.asarray(golden("mask"))
        if case["old_logps"] != "given":
            inputs["old_logps"] = inputs["logps"]
        if not case["beta"]:
            inputs["ref_logps"] = None
        options = {k: case[k] for k in ("loss_type", "epsilon_high", "max_completion_length")}
        options |= {"epsilon": case["epsilon_low"], "tokens": case["num_items_in_batch"]}
        options["reference"] = ReferenceConfig(case["beta"]) if case["beta"] else None
        # TRL's default is no cap.
        value, grad, rows = loss_and_grad(inputs, delta=0, **options)
        assert value.dtype == grad.dtype == dtype
        assert_close(value, case["loss"], RTOL[dtype])
        assert_close(grad, VECTORS[case["key"] + ".grad"], RTOL[dtype])
        metrics = grpo.summarize(rows)
        assert metrics.keys() == case["metrics"].keys()
        for name, expected in case["metrics"].items():
            # TRL averages what was clipped in float32 even where the loss is float64.
            rtol = RTOL[dtype] if name == "kl" else 2e-7
            np.testing.assert_allclose(metrics[name], expected, rtol=rtol, atol=0, err_msg=name)


TRL = json.loads((golden_files.GOLDEN / "loss_trl" / "cases.json").read_text())
TRL_VECTORS = golden_files.load("loss_trl/vectors.safetensors")


# Each is a program: a third of them run always, and every loss is among these.
ALL_CASES = [
    pytest.param(
        i,
        id=",".join(map(str, [i, *case["options"].values()])),
        marks=[pytest.mark.slow] if i % 3 else [],
    )
    for i, case in enumerate(TRL["cases"])
]


def test_every_loss_has_a_recorded_gradient():
    assert {case["options"]["loss_type"] for case in TRL["cases"]} == {*LOSS_TYPES}


@pytest.mark.parametrize("number", ALL_CASES)
def test_every_loss_with_every_correction_is_that_of_trl(number):
    """Our code makes weights, masks and high-entropy tokens; the numbers are TRL 1.16's."""
    case = TRL["cases"][number]
    with jax.enable_x64(True):
        cfg = compare_trl.config_of(case["options"], TRL["clip_max"])
        batch = compare_trl.inputs_of(cfg, TRL_VECTORS)
        value, grad, rows = _loss_and_grad(cfg, batch, grpo.BatchTotals(max_completion_length=32))
        assert_close(value, case["loss"], 1e-10)
        assert_close(grad, TRL_VECTORS[f"{number}.grad"], 1e-10)
        metrics = grpo.summarize(rows)
        recorded = {k: v for k, v in case["metrics"].items() if k in metrics}
        own = {"sampling/masked_mean", "clip_ratio/delta_mean"}
        assert recorded.keys() == metrics.keys() - own
        for name, expected in recorded.items():
            if cfg.importance_sampling_level == "sequence" and name.startswith(("clip", "cispo")):
                expected *= 8 / 7  # TRL counts the row without tokens
            if name == "vespo/phi_seq_mean":
                expected = (8 * expected - 1) / 7  # of that row it is 1
            np.testing.assert_allclose(metrics[name], expected, rtol=2e-7, err_msg=name)


BONUS = [i for i, case in enumerate(TRL["cases"]) if case["options"].get("entropy_coef")]


@pytest.mark.parametrize("number", BONUS[:1] + BONUS[-1:])
def test_the_entropy_bonus_reaches_the_entropies_as_in_trl(number):
    cfg = compare_trl.config_of(TRL["cases"][number]["options"], TRL["clip_max"])
    mask = TRL_VECTORS["mask"] != 0
    marked = entropy.high_entropy(TRL_VECTORS["entropies"], mask, cfg.top_entropy_quantile)
    with jax.enable_x64(True):
        x = {name: jnp.asarray(TRL_VECTORS[name]) for name in TRL_VECTORS if "." not in name}

        def loss(entropies):
            names = ("logps", "old_logps", "advantages", "mask", "ref_logps")
            batch = grpo.LossInputs(*(x[name] for name in names), entropies=entropies)
            batch = batch._replace(high_entropy=jnp.asarray(marked))
            return grpo.policy_loss(cfg, batch, grpo.BatchTotals(max_completion_length=32))[0]

        grad = jax.grad(loss)(x["entropies"])
        assert_close(grad, TRL_VECTORS[f"{number}.entropy_grad"], 1e-12)


def at_both_levels(loss_types):
    """Returns (type, level) as cases: at the two levels the ratio alone differs, so one type is quick at both."""
    of_sequences = [(kind, "sequence") for kind in loss_types]
    quick = [(kind, "token") for kind in loss_types]
    return quick + [case if case[0] == "grpo" else slow(*case) for case in of_sequences]


@pytest.mark.parametrize(("loss_type", "level"), at_both_levels(sorted({*LOSS_TYPES} - {"bnpo"})))
def test_eight_micro_batches_of_one_row_sum_to_one_of_eight(loss_type, level):
    with jax.enable_x64(True):
        batch = random_batch()
        batch["entropies"] = np.random.default_rng(5).uniform(0, 2, (8, 7))
        tokens = int(batch["mask"].sum())
        options = options_of(loss_type, level, tokens)
        options |= {"entropy": EntropyConfig(0.3), "entropy_tokens": tokens}
        whole_loss, whole_grad, whole_rows = loss_and_grad(batch, **options)
        parts = [
            loss_and_grad({k: v[i : i + 1] for k, v in batch.items()}, **options) for i in range(8)
        ]
        assert_close(sum(loss for loss, _, _ in parts), whole_loss, 1e-12)
        assert_close(np.concatenate([grad for _, grad, _ in parts]), whole_grad, 1e-12)

        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *[rows for _, _, rows in parts])
        assert stacked.tokens.shape == (8, 1)
        whole, pieces = grpo.summarize(whole_rows), grpo.summarize(stacked)
        assert whole.keys() == pieces.keys()
        for name in whole:
            np.testing.assert_allclose(pieces[name], whole[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize(("loss_type", "level"), at_both_levels(LOSS_TYPES))
def test_a_batch_without_tokens_gives_loss_and_gradient_zero(loss_type, level):
    batch = random_batch() | {"mask": np.zeros((8, 7), bool)}
    loss, grad, rows = loss_and_grad(batch, **options_of(loss_type, level, tokens=0))
    assert loss == 0
    np.testing.assert_array_equal(grad, np.zeros((8, 7)))
    assert all(value == 0 for value in grpo.summarize(rows).values())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("padding", [-np.inf, np.nan])
def test_values_at_padding_reach_neither_loss_nor_gradient(padding, loss_type, level):
    batch = random_batch()
    poisoned = {
        k: np.where(batch["mask"], v, padding) if k.endswith("logps") else v
        for k, v in batch.items()
    }
    options = options_of(loss_type, level, tokens=int(batch["mask"].sum()))
    loss, grad, rows = loss_and_grad(batch, **options)
    poisoned_loss, poisoned_grad, poisoned_rows = loss_and_grad(poisoned, **options)
    assert poisoned_loss == loss
    np.testing.assert_array_equal(poisoned_grad, grad)
    jax.tree.map(np.testing.assert_array_equal, poisoned_rows, rows)


def test_low_min_and_high_max_are_fractions_of_single_rows_that_hold_tokens():
    # Tokens, ratios, low and high clipped ratios, and sums of the divergence.
    counts = ([4.0, 0, 2], [4.0, 0, 2], [1.0, 0, 1], [2.0, 0, 0], [3.0, 0, 3])
    rows = grpo.RowMetrics(*map(jnp.array, counts))
    expected = {
        "clip_ratio/low_mean": 2 / 6,
        "clip_ratio/low_min": 1 / 4,
        "clip_ratio/high_mean": 2 / 6,
        "clip_ratio/high_max": 2 / 4,
        "clip_ratio/region_mean": 4 / 6,
        "kl": 1.0,
    }
    assert grpo.summarize(rows) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        *[("k1", "sequence"), ("k2", "token"), ("k3", "token")],
        *[slow("k1", "token"), slow("k2", "sequence"), slow("k3", "sequence")],
    ],
)
def test_the_divergence_is_added_times_the_ratio_where_its_bias_is_corrected(kind, level):
    """The oracle is a loop over rows in NumPy; the ratio of a sequence is that of its mean."""
    with jax.enable_x64(True):
        batch = random_batch()
        options = CLIP | {"loss_type": "dapo", "importance_sampling_level": level}
        without, _, _ = loss_and_grad(batch, **options)
        options |= {"reference": ReferenceConfig(0.3, None, kind, True)}
        loss, _, rows = loss_and_grad(batch, **options)
        sums = []
        for row in range(8):
            kept = np.flatnonzero(batch["mask"][row])
            logps, old, ref = (batch[k][row, kept] for k in ("logps", "old_logps", "ref_logps"))
            d, log_ratio = ref - logps, logps - old
            if level == "sequence" and kept.size:
                log_ratio = log_ratio.mean()
            k = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}[kind]
            sums.append(np.sum(k * np.exp(log_ratio)))
        np.testing.assert_allclose(rows.kl, sums, rtol=1e-10, atol=1e-14)
        expected = 0.3 * sum(sums) / batch["mask"].sum()
        np.testing.assert_allclose(loss - without, expected, rtol=1e-10)


# Row 0 has the weights 2, 4 and (under the mask) 64; row 1 has 1/2 and 1/2; row 2 has none.
OLD = jnp.log(jnp.array([[2.0, 4.0, 64.0], [0.5, 0.5, 64.0], [64.0, 64.0, 64.0]]))
KEPT = jnp.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
NOUGHT = jnp.zeros((3, 3))


@pytest.mark.parametrize(
    ("mode", "clip_min", "expected"),
    [
        ("token_truncate", None, [[2.0, 3.0, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]]),
        ("token_mask", None, [[2.0, 0.0, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]]),
        ("sequence_truncate", None, [[3.0], [0.25], [1.0]]),
        ("sequence_mask", None, [[0.0], [0.25], [1.0]]),
        # With a bound below, IcePop's two sides and TRL's.
        ("token_truncate", 0.6, [[2.0, 3.0, 1.0], [0.6, 0.6, 1.0], [1.0, 1.0, 1.0]]),
        ("token_mask", 0.6, [[2.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0, 1.0, 1.0]]),
        ("token_mask", 0.5, [[2.0, 0.0, 1.0], [0.5, 0.5, 1.0], [1.0, 1.0, 1.0]]),
        ("sequence_truncate", 0.3, [[3.0], [0.3], [1.0]]),
        ("sequence_mask", 0.3, [[0.0], [0.0], [1.0]]),
    ],
)
def test_importance_weights_stop_at_both_bounds(mode, clip_min, expected):
    options = {"mode": mode, "clip_max": 3.0, "clip_min": clip_min}
    weights = lambda old: grpo.truncated_importance_weights(old, NOUGHT, KEPT, **options)

    np.testing.assert_allclose(weights(OLD), expected, rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda old: weights(old).sum())(OLD), NOUGHT)


@pytest.mark.parametrize(
    ("level", "highest", "lowest", "expected"),
    [
        # The ratios of the rows above by token; 64 stands under the mask.
        ("token", 3.0, None, [[1, 0, 1], [1, 1, 1], [1, 1, 1]]),
        ("token", 5.0, 0.6, [[1, 1, 1], [0, 0, 1], [1, 1, 1]]),
        # Their products are 8, 1/4 and, of no tokens, 1.
        ("sequence", 7.9, None, [[0], [1], [1]]),
        ("sequence", 8.1, 0.26, [[1], [0], [1]]),
        ("sequence", 3.9, None, [[0], [0], [1]]),
        # Their geometric means are 8 ** (1/2) = 2.83, 1/2 and 1.
        ("geometric", 2.8, None, [[0], [1], [1]]),
        ("geometric", 2.9, 0.51, [[1], [0], [1]]),
        ("geometric", 1.9, None, [[0], [0], [1]]),
    ],
)
def test_the_sampling_mask_keeps_ratios_between_its_bounds(level, highest, lowest, expected):
    options = {"level": level, "highest": highest, "lowest": lowest}
    kept = lambda policy: grpo.sampling_mask(policy, NOUGHT, KEPT, **options)

    np.testing.assert_array_equal(kept(OLD), expected)
    np.testing.assert_array_equal(jax.grad(lambda old: kept(old).sum())(OLD), NOUGHT)


def test_the_product_of_a_long_rows_ratios_is_compared_without_overflow():
    apart = jnp.full((1, 4096), 1.0)
    options = {"level": "sequence", "highest": 1e30, "lowest": 1e-30}
    for ratios in (apart, -apart):
        mask = grpo.sampling_mask(ratios, jnp.zeros_like(apart), jnp.ones_like(apart), **options)
        assert mask.tolist() == [[0.0]]


def test_rows_that_the_policy_left_are_dropped_where_their_advantage_is_negative():
    """By hand, the means of behaviour - policy over the rows' tokens are -1.04, .69 and 0."""
    for advantages, threshold, expected in (
        ([-1.0, -1.0, -1.0], 0.6, [[1], [0], [1]]),
        ([-1.0, -1.0, -1.0], 0.7, [[1], [1], [1]]),
        ([1.0, 0.0, 1.0], 0.1, [[1], [1], [1]]),
    ):
        kept = grpo.off_policy_mask(OLD, NOUGHT, KEPT, jnp.array(advantages), threshold)
        np.testing.assert_array_equal(kept, expected)


CORRECTION = CorrectionConfig("token_mask", clip_max=2.5, clip_min=0.5)


@pytest.mark.parametrize(
    ("mismatch", "parts"),
    [
        (MismatchConfig(CORRECTION), [0]),
        (MismatchConfig(mask=MaskConfig(1.5, 0.3, "sequence")), [1]),
        (MismatchConfig(off_policy_threshold=0.05), [2]),
        (MismatchConfig(CORRECTION, MaskConfig(1.5, 0.3, "sequence"), 0.05), [0, 1, 2]),
    ],
)
def test_the_weights_of_a_config_are_the_product_of_those_that_it_switches_on(mismatch, parts):
    """The trainer's policy is compared with the sampler's, and for the last mask the one that learns."""
    with jax.enable_x64(True):
        batch = random_batch(rows=16, seed=3)
        names = ("logps", "old_logps", "ref_logps", "advantages", "mask")
        logps, old, behaviour, advantages, mask = (jnp.asarray(batch[name]) for name in names)
        cfg = GrpoConfig(old_logprobs="recompute", mismatch=mismatch)
        weights = grpo.sampling_weights(cfg, logps, old, behaviour, advantages, mask)
        bounds, limits = {"clip_max": 2.5, "clip_min": 0.5}, {"highest": 1.5, "lowest": 0.3}
        of_parts = [
            grpo.truncated_importance_weights(old, behaviour, mask, mode="token_mask", **bounds),
            grpo.sampling_mask(old, behaviour, mask, level="sequence", **limits),
            grpo.off_policy_mask(logps, behaviour, mask, advantages, 0.05),
        ]
        of_parts = [jnp.broadcast_to(of_parts[part], mask.shape) for part in parts]
        assert len({tuple(np.ravel(x).tolist()) for x in of_parts}) == len(parts)
        expected = np.prod(of_parts, axis=0)
        np.testing.assert_array_equal(jnp.broadcast_to(weights, mask.shape), expected)
        live = expected[np.asarray(mask)]
        assert 0 < np.mean(live == 0) < 1
        rows = loss_and_grad(batch | {"sampling_weights": weights}, **CLIP)[2]
        dropped = grpo.summarize(rows)["sampling/masked_mean"]
        np.testing.assert_allclose(dropped, np.mean(live == 0))


def test_a_config_without_corrections_has_no_weights():
    batch = {k: jnp.asarray(v) for k, v in random_batch().items()}
    logps, old, advantages, mask = map(batch.get, ("logps", "old_logps", "advantages", "mask"))
    assert grpo.sampling_weights(GrpoConfig(), logps, None, old, advantages, mask) is None


@pytest.mark.parametrize(
    ("options", "cap"),
    [
        # Against the sampler's own log-probabilities nothing else bounds a negative advantage.
        ({}, 3.0),
        ({"epsilon_high": 4.0}, 5.0),
        ({"delta": 0}, None),
        ({"delta": 1.5}, 1.5),
        ({"old_logprobs": "recompute"}, None),
        ({"old_logprobs": "recompute", "delta": 10.0}, 10.0),
    ],
)
def test_behaviour_ratios_are_capped_unless_the_config_says_otherwise(options, cap):
    """A token has ratio 20 and advantage -1: its loss is the cap, and there is a gradient only without a cap."""
    cfg = GrpoConfig(**options)
    assert cfg.ratio_cap == cap
    batch = {"logps": np.log([[20.0]]), "old_logps": np.zeros((1, 1)), "mask": np.ones((1, 1))}
    loss, grad, rows = loss_and_grad(batch | {"advantages": np.array([-1.0])}, **options)
    np.testing.assert_allclose(loss, cap or 20.0, rtol=1e-6)
    np.testing.assert_allclose(grad, [[0.0 if cap else 20.0]], rtol=1e-6)
    metrics = grpo.summarize(rows)
    assert metrics.get("clip_ratio/delta_mean") == (1 if cap else None)


def test_sampling_weights_multiply_the_policy_term_but_not_the_divergence():
    batch, weight = random_batch(), np.arange(8.0)[:, None]
    options = CLIP | {"loss_type": "dapo", "reference": ReferenceConfig(0.1)}
    weighted_advantages = batch | {"advantages": batch["advantages"] * weight[:, 0]}
    expected, *_ = loss_and_grad(weighted_advantages, **options)
    for weights in (weight, np.broadcast_to(weight, (8, 7))):
        loss, *_ = loss_and_grad(batch | {"sampling_weights": weights}, **options)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("name", "group_size"), [("a", 4), ("b", 3)])
def test_advantages_are_those_of_trl(name, group_size, scale, dtype):
    with jax.enable_x64(dtype == "float64"):
        rewards = jnp.asarray(VECTORS[f"{name}.rewards"], dtype).reshape(-1, group_size)
        advantages = grpo.group_advantages(rewards, scale=scale)
        assert_close(advantages.ravel(), VECTORS[f"{name}.adv_scale_{scale}"], RTOL[dtype])


@pytest.mark.parametrize("name", ["rewards", "abstained"])
def test_advantages_of_one_function_at_a_time_are_those_of_trl(name):
    with jax.enable_x64(True):
        rewards = jnp.asarray(TRL_VECTORS[name]).reshape(2, 4, 3)
        found = grpo.decoupled_advantages(rewards, jnp.asarray(TRL_VECTORS["weights"]))
        assert_close(found.ravel(), TRL_VECTORS[f"{name}.advantages"], 1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_each_function_is_scaled_by_itself(scale):
    """A function counts alike in any unit, unless nothing is scaled, and counts 0 if all its values are equal."""
    rewards = np.random.default_rng(2).normal(size=(3, 4, 2)).astype(np.float32)
    rewards[2] = [0.1, 0.3]
    make = lambda x: grpo.decoupled_advantages(jnp.asarray(x), jnp.ones(2), scale=scale)
    found, larger = make(rewards), make(rewards * np.float32([1, 512]))
    assert np.allclose(found, larger, atol=2e-3) == (scale != "none")
    np.testing.assert_array_equal(found[2], 0)
    assert np.all(found[:2] != 0)
    np.testing.assert_array_equal(make(np.full((2, 4, 2), np.nan)), np.zeros((2, 4)))


ESTIMATORS = [("group", "grpo"), ("batch", "grpo"), ("none", "grpo"), ("none", "rloo")]


@pytest.mark.parametrize(("scale", "estimator"), ESTIMATORS)
def test_equal_rewards_give_zero_advantage_exactly(scale, estimator):
    # The float32 mean of seven times 0.1 is not 0.1.
    rewards = jnp.array([[0.1] * 7, [0.0] * 6 + [1.0], [1.1] * 7])
    advantages = grpo.group_advantages(rewards, scale=scale, estimator=estimator)
    np.testing.assert_array_equal(advantages[jnp.array([0, 2])], np.zeros((2, 7)))
    assert np.all(advantages[1] != 0)
    np.testing.assert_array_equal(grpo.informative(rewards), [False, True, False])
    np.testing.assert_array_equal(grpo.informative(advantages), [False, True, False])
    # Nor is it NaN where no reward of the batch differs.
    advantages = grpo.group_advantages(jnp.ones((2, 3)), scale=scale, estimator=estimator)
    np.testing.assert_array_equal(advantages, np.zeros((2, 3)))


@pytest.mark.parametrize(("scale", "estimator"), [*ESTIMATORS, ("batch", "rloo")])
def test_rows_without_a_reward_have_no_advantage_and_are_no_part_of_any_mean(scale, estimator):
    nan = np.nan
    rewards = np.array([[1, 1, 0, nan], [nan, -1, -1, nan], [nan, nan, nan, 5], [0, 2, 1, 4]])
    everything = rewards[~np.isnan(rewards)]
    expected = np.zeros_like(rewards)
    for row in (0, 3):  # in the others no two rewards differ
        given = ~np.isnan(rewards[row])
        group = rewards[row, given]
        others = [np.delete(group, i).mean() for i in range(len(group))]
        base = np.array(others) if estimator == "rloo" else group.mean()
        spread = {"group": group, "batch": everything}.get(scale)
        divisor = 1 if spread is None else spread.std(ddof=1) + 1e-4
        expected[row, given] = (group - base) / divisor
    with jax.enable_x64(True):
        found = grpo.group_advantages(jnp.asarray(rewards), scale=scale, estimator=estimator)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
        np.testing.assert_array_equal(found[np.isnan(rewards)], 0)
        assert grpo.informative(rewards).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be .* got 'ppo'"),
        ({"loss_type": "dr_grpo"}, "max_completion_length: got None; dr_grpo needs it"),
        ({"reference": ReferenceConfig(), "ref_logps": None}, "ref_logps: got None; a KL term"),
        ({"importance_sampling_level": "row"}, "importance_sampling_level: got 'row'; must"),
        ({"advantages": jnp.zeros((8, 7))}, r"advantages: got \(8, 7\); must be \(8,\)"),
        ({"mask": jnp.ones(8)}, r"mask: got \(8,\); must be \(8, 7\) beside logps"),
        ({"sampling_weights": jnp.ones(8)}, r"got \(8,\); must be \(8, 7\) or \(8, 1\) beside"),
    ],
)
def test_a_wrong_argument_of_the_loss_is_named(change, message):
    batch = random_batch() | {k: v for k, v in change.items() if k in grpo.LossInputs._fields}
    options = {k: v for k, v in change.items() if k not in batch}
    with pytest.raises(ValueError, match=message):
        loss_and_grad(batch, **options)


def advantages(num_generations, **options):
    return lambda: grpo.group_advantages(jnp.ones((4, num_generations)), **options)


def weights(mode="token_mask", **options):
    return lambda: grpo.truncated_importance_weights(OLD, OLD, KEPT, mode=mode, **options)


def mask(level, highest, **more):
    return lambda: grpo.sampling_mask(OLD, OLD, KEPT, level=level, highest=highest, **more)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (advantages(1), "num_generations: got 1; must be at least 2"),
        (advantages(2, scale="std"), "scale: got 'std'; must be 'group', 'batch' or 'none'"),
        (advantages(2, estimator="gae"), "estimator: got 'gae'; must be 'grpo' or 'rloo'"),
        (weights(mode="token", clip_max=3.0), "mode: got 'token'; must be"),
        (weights(clip_max=0.0), "clip_max: got 0.0; must be positive"),
        (weights(clip_max=2.0, clip_min=2.0), "clip_min: got 2.0; must be below clip_max=2.0"),
        (mask("row", 2.0), "sampling_mask: got 'row'; must be 'token', 'sequence' or 'geometric'"),
        (mask("token", 1.0), "highest: got 1.0; must be above 1"),
        (mask("token", 2.0, lowest=1.5), "lowest: got 1.5; must be in .0, 1."),
        (
            functools.partial(grpo.token_kl, OLD, OLD, "k4"),
            "kl_estimator: got 'k4'; must be 'k1', 'k2' or 'k3'",
        ),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_each_function_of_a_batch_is_one_program(caplog):
    """Operation by operation they would be sixty, and each takes a tenth of a second to compile on a GPU."""
    scores = np.random.default_rng(0).normal(size=(7, 5, 3)).astype(np.float32)
    rows, weights = scores.reshape(35, 3), np.ones(3, np.float32)
    calls = {
        "combine_rewards": lambda: grpo.combine_rewards(rows, weights),
        "informative": lambda: grpo.informative(scores[..., 0]),
        "group_advantages": lambda: grpo.group_advantages(scores[..., 0], estimator="rloo"),
        "decoupled_advantages": lambda: grpo.decoupled_advantages(scores, weights),
    }
    assert {name: compiled(caplog, call) for name, call in calls.items()} == {x: [x] for x in calls}
