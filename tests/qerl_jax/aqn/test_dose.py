"""Tests the search for a dose against values that are computed in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import dose


@pytest.mark.parametrize("target", [1e-7, 3e-5, 2e-3, 1.0])
def test_bisection_reaches_the_target_or_the_nearer_bound(target):
    # As a divergence does, the function grows with the square.
    expected = np.clip((target / 20) ** 0.5, 1e-4, 1e-1)
    calls = []
    value_of = lambda sigma: calls.append(sigma) or 20 * sigma**2
    assert dose.bisected(value_of, target, 1e-4, 1e-1) == pytest.approx(expected, rel=0.01)
    assert len(calls) <= 10 and 1e-4 < min(calls) and max(calls) < 1e-1


def test_bisection_takes_a_divergence_that_is_no_number_for_too_high():
    value_of = lambda sigma: float("nan") if sigma > 0.01 else sigma
    assert dose.bisected(value_of, 1.0, 1e-4, 1.0) == pytest.approx(0.01, rel=0.01)
    assert dose.bisected(lambda sigma: float("nan"), 1.0, 1e-4, 1.0) == 1e-4


def mean_entropy(logits):
    logits = logits - logits.max(axis=-1, keepdims=True)
    logps = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return float(-(np.exp(logps) * logps).sum(axis=-1).mean())


def test_a_temperature_has_the_entropy_of_a_policy_with_rounded_weights():
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(50, 16)), rng.normal(size=(40, 16))
    rounded = np.round(head * 2) / 2
    # The tokenizer has 37 ids; the head's other rows are padding.
    logits, target = (hidden @ head.T)[:, :37], mean_entropy((hidden @ rounded.T)[:, :37])
    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    temperature = dose.equal_entropy_temperature(*arrays, target, num_tokens=37)
    assert mean_entropy(logits / temperature) == pytest.approx(target, rel=1e-3)
    assert temperature != pytest.approx(1, abs=1e-3)
    # What the policy itself has, it has at temperature 1; no temperature gives more than log 37.
    same = dose.equal_entropy_temperature(*arrays, mean_entropy(logits), num_tokens=37)
    assert same == pytest.approx(1, rel=3e-4)
    assert dose.equal_entropy_temperature(*arrays, 4.0, num_tokens=37) == 8.0
