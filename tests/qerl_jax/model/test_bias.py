"""Tests which estimates of a gradient are unbiased, with a policy over nine completions, enumerated exactly.

A completion is two tokens out of three, the second depending on the first. An expectation over
samples is a sum over the nine, so an estimate is unbiased if it equals the derivative of that sum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import GrpoConfig, ReferenceConfig
from qerl_jax.rl import grpo
from tests.pallas_kernels.common import slow

RNG = np.random.default_rng(0)
POLICY = {"first": RNG.normal(size=3), "second": RNG.normal(size=(3, 3))}
# What noise on the weights makes of it: ratios from 0.3 to 2.6, so that clipping would show.
NOISY = {name: value + RNG.normal(0, 0.7, value.shape) for name, value in POLICY.items()}
REWARDS = RNG.uniform(size=(3, 3))


def unclipped(**options):
    """Makes a config with wide bounds and options that a run may not have, because here the bias is measured."""
    return unchecked(GrpoConfig(), **{"epsilon": 1.0, "epsilon_high": 1e9} | options)


def unchecked(cfg, **options):
    for name, value in options.items():
        object.__setattr__(cfg, name, value)
    return cfg


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def logps(theta):
    """Computes [9, 2]: the log-probability of each token of each completion."""
    first = jnp.repeat(jax.nn.log_softmax(theta["first"]), 3)
    return jnp.stack([first, jax.nn.log_softmax(theta["second"]).reshape(-1)], axis=1)


def probabilities(theta, tokens):
    return jnp.exp(jnp.sum(logps(theta)[:, :tokens], axis=1))


def rewards(tokens):
    """Returns rewards [9], in which completions of one token count for all that could follow."""
    each = REWARDS if tokens == 2 else np.broadcast_to(REWARDS[:, :1], (3, 3)) / 3
    return each.reshape(-1)


def mask(tokens):
    return np.broadcast_to(np.arange(2) < tokens, (9, 2))


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def truth(tokens):
    return slope_of(lambda theta: probabilities(theta, tokens) @ rewards(tokens))


def estimate(
    tokens, *, behaviour=NOISY, old="behaviour", mode=None, clip_max=np.inf, sampled=1.0, **options
):
    """Computes the expected ascent direction of one step, over samples of `behaviour`.

    `sampled` [9] multiplies the probability of a sample.
    """
    # The loss is linear in the advantages, so they may carry the probability of their sample.
    advantages = probabilities(behaviour, tokens) * rewards(tokens) * sampled
    old_logps = logps(behaviour if old == "behaviour" else POLICY)
    weights = None
    if mode is not None:
        arrays = old_logps, logps(behaviour), mask(tokens)
        weights = grpo.truncated_importance_weights(*arrays, mode=mode, clip_max=clip_max)
    cfg = unclipped(loss_type="dr_grpo", **options)
    totals = grpo.BatchTotals(rows=1, max_completion_length=1)

    def loss(theta):
        arrays = logps(theta), old_logps, advantages, mask(tokens)
        return grpo.policy_loss(cfg, grpo.LossInputs(*arrays, sampling_weights=weights), totals)[0]

    return -flat(jax.jit(jax.grad(loss))(POLICY))


def error(found, tokens):
    exact = truth(tokens)
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def slope_of(function):
    return flat(jax.jit(jax.grad(function))(POLICY))


assert_equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-14)


def assert_unbiased(found, tokens):
    assert_equal(found, truth(tokens))


def test_the_ratio_to_the_behaviour_policy_is_unbiased_for_one_unclipped_step_of_one_token():
    assert_unbiased(estimate(1), 1)
    assert error(estimate(1, epsilon=0.2, epsilon_high=0.28), 1) > 0.1  # the price of clipping


def test_a_recomputed_ratio_is_biased_under_noise_and_only_there():
    for tokens in (1, 2):
        assert error(estimate(tokens, old="recompute"), tokens) > 0.1
        assert_unbiased(estimate(tokens, old="recompute", behaviour=POLICY), tokens)


@pytest.mark.parametrize("old", ["behaviour", "recompute"])
def test_truncated_sampling_learns_from_what_remains_times_one_over_its_probability(old):
    """The second token of three is never sampled; without noise, where both ratios are that of the whole policy."""
    remains = np.repeat([1.0, 0.0, 1.0], 3)
    mass = np.exp(POLICY["first"])[[0, 2]].sum() / np.exp(POLICY["first"]).sum()
    expected = slope_of(lambda theta: probabilities(theta, 1) @ (rewards(1) * remains)) / mass
    assert_equal(estimate(1, behaviour=POLICY, old=old, sampled=remains / mass), expected)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_untruncated_weights_make_a_recomputed_ratio_the_behaviour_ratio_in_its_first_step(mode):
    for tokens in (1, 2):
        assert_equal(estimate(tokens, old="recompute", mode=mode), estimate(tokens))
    assert_unbiased(estimate(1, old="recompute", mode=mode), 1)


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_over_several_tokens_only_the_weight_of_the_whole_sequence_is_unbiased(mode):
    assert_unbiased(estimate(2, old="recompute", mode=mode), 2)
    # A token's own ratio leaves out how likely its context is, and what follows.
    assert error(estimate(2), 2) > 0.05
    assert error(estimate(2, importance_sampling_level="sequence"), 2) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "action"), [(1, "truncate"), (2, "mask"), slow(1, "mask"), slow(2, "truncate")]
)
def test_the_bias_of_truncation_is_bounded_by_the_weight_it_takes_away(tokens, action):
    ratio = probabilities(POLICY, tokens) / probabilities(NOISY, tokens)
    slopes = jax.jacobian(lambda theta: jnp.sum(logps(theta)[:, :tokens], axis=1))(POLICY)
    slopes = np.concatenate([leaf.reshape(9, -1) for leaf in jax.tree.leaves(slopes)], axis=1)
    lengths = np.linalg.norm(slopes, axis=1)
    biases = []
    for clip_max in (0.5, 1.0, 1.5, float(ratio.max())):
        kept = np.where(ratio > clip_max, clip_max if action == "truncate" else 0, ratio)
        bound = np.sum(probabilities(NOISY, tokens) * (ratio - kept) * rewards(tokens) * lengths)
        found = estimate(tokens, old="recompute", mode=f"sequence_{action}", clip_max=clip_max)
        biases.append(np.linalg.norm(found - truth(tokens)))
        assert biases[-1] <= bound + 1e-14
    assert biases[0] > 0.05 and biases[-1] < 1e-14


@pytest.mark.parametrize(("estimator", "factor"), [("rloo", 1.0), ("grpo", 0.5)])
def test_leave_one_out_is_unbiased_where_the_mean_of_two_shrinks_the_gradient_by_half(
    estimator, factor
):
    """Over all 81 groups of two, E[(r - mean) slope] is (G - 1) / G of the gradient."""
    pairs = np.stack(np.meshgrid(np.arange(9), np.arange(9), indexing="ij"), -1).reshape(81, 2)
    advantages = grpo.group_advantages(rewards(2)[pairs], scale="none", estimator=estimator)
    chance = probabilities(POLICY, 2)[pairs].prod(axis=1, keepdims=True)

    def surrogate(theta):
        return jnp.sum(chance * advantages * jnp.sum(logps(theta), axis=1)[pairs]) / 2

    assert_equal(slope_of(surrogate), factor * truth(2))


def divergence(theta, other):
    """Computes the KL of the first tokens."""
    p, q = jax.nn.log_softmax(theta["first"]), jax.nn.log_softmax(other["first"])
    return jnp.sum(jnp.exp(p) * (p - q))


def expected_kl(kind, theta, *, corrected=False, sampler=POLICY):
    """Computes the expectation of the loss's KL term over the sampler's first tokens."""

    options = {"beta": 1.0, "kl_estimator": kind, "bias_correction": corrected}
    cfg = unclipped(loss_type="dapo", reference=unchecked(ReferenceConfig(), **options))

    def term(logp, old, ref):
        arrays = logp[None], old[None], jnp.zeros(1), mask(1)[:1]
        return grpo.policy_loss(cfg, grpo.LossInputs(*arrays, ref_logps=ref[None]))[0]

    terms = jax.vmap(term)(logps(theta), logps(sampler), logps(NOISY))
    return probabilities(sampler, 1) / 3 @ terms


@pytest.mark.parametrize(("kind", "unbiased"), [("k1", True), ("k2", False), ("k3", True)])
def test_k1_and_k3_estimate_the_divergence_without_bias(kind, unbiased):
    gap = abs(expected_kl(kind, POLICY) - divergence(POLICY, NOISY))
    assert gap < 1e-14 if unbiased else gap > 1e-3


@pytest.mark.parametrize(
    ("kind", "what_its_derivative_estimates"),
    [
        ("k1", lambda theta: 0.0 * jnp.sum(theta["first"])),
        ("k2", lambda theta: divergence(theta, NOISY)),
        ("k3", lambda theta: divergence(NOISY, theta)),
    ],
)
def test_as_a_loss_k1_is_noise_k2_the_divergence_and_k3_the_one_from_the_other_side(
    kind, what_its_derivative_estimates
):
    found = slope_of(functools.partial(expected_kl, kind))
    assert_equal(found, slope_of(what_its_derivative_estimates))


@pytest.mark.parametrize("sampler", [POLICY, NOISY], ids=["on policy", "off policy"])
@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_times_the_ratio_k1_and_k3_have_the_divergence_and_its_derivative(kind, sampler):
    corrected = functools.partial(expected_kl, kind, corrected=True, sampler=sampler)
    assert_equal(corrected(POLICY), divergence(POLICY, NOISY))
    assert_equal(slope_of(corrected), slope_of(lambda theta: divergence(theta, NOISY)))
