import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rounded

# 1 + 2^-8 lies between two values of bfloat16 and goes to the even one, as does 1 + 3 * 2^-8.
TIES = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8], np.float32)
EVEN = np.array([1, 1 + 2**-6, -1], np.float32)


def test_a_conversion_back_does_not_undo_the_rounding():
    there_and_back = jax.jit(lambda x: rounded(x, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(there_and_back(TIES), EVEN)
    values = np.random.default_rng(0).standard_normal(1000, np.float32)
    expected = np.asarray(values.astype(jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(there_and_back(values), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_fits_stays_as_it_is(dtype):
    x = jnp.asarray(EVEN, dtype)
    assert rounded(x, jnp.float32).dtype == jnp.float32
    np.testing.assert_array_equal(rounded(x, jnp.float32), EVEN)
    np.testing.assert_array_equal(rounded(x, dtype), x)


def test_the_derivative_passes():
    slope = jax.grad(lambda x: rounded(x, jnp.bfloat16).astype(jnp.float32).sum())
    np.testing.assert_array_equal(slope(TIES), np.ones(3))
