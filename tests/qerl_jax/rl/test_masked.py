"""Tests masked reductions: what counts, what does not, and the result if nothing counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rl import masked

X = jnp.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]])
MASK = jnp.array([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
pytestmark = pytest.mark.usefixtures("no_silent_broadcasting")


@pytest.mark.parametrize(
    ("reduce", "axis", "expected"),
    [
        (masked.sum, None, 28.0),
        (masked.sum, 1, [4.0, 0.0, 24.0]),
        (masked.mean, None, 5.6),
        (masked.mean, 1, [2.0, 0.0, 8.0]),
        (masked.mean, 0, [4.0, 8.0, 6.0]),
        (masked.mean, (0, 1), 5.6),
        (masked.min, None, 1.0),
        (masked.min, 1, [1.0, 0.0, 7.0]),
        (masked.max, None, 9.0),
        (masked.max, 1, [3.0, 0.0, 9.0]),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.float32])
def test_only_what_the_mask_keeps_counts(reduce, axis, expected, dtype):
    actual = reduce(X, MASK.astype(dtype), axis)
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))


@pytest.mark.parametrize("reduce", [masked.sum, masked.mean, masked.min, masked.max])
def test_nothing_to_count_gives_zero_and_a_zero_gradient(reduce):
    value, grad = jax.value_and_grad(lambda x: reduce(x, jnp.zeros_like(MASK)))(X)
    assert value == 0 and not jnp.signbit(value)
    np.testing.assert_array_equal(grad, np.zeros_like(X))


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_what_lies_under_the_mask_reaches_neither_value_nor_gradient(poison):
    poisoned = jnp.where(MASK != 0, X, poison)
    value, grad = jax.value_and_grad(lambda x: masked.mean(x, MASK))(poisoned)
    assert value == masked.mean(X, MASK)
    np.testing.assert_array_equal(grad, np.asarray(MASK, np.float32) / np.float32(5))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"mask must have the shape of x, \(3, 3\); got \(3, 1\)"):
        masked.mean(X, MASK[:, :1])
