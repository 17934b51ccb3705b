import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4_matmul, packed_matmul
from pallas_kernels.formats import mxfp4, nf4, nvfp4
from tests.pallas_kernels import common
from tests.pallas_kernels.common import slow

# Compiled whole: operation by operation these tests take several times as long.
quantize_doubly = functools.partial(nf4.quantize, double=True)
QUANTIZE = {"mxfp4": mxfp4.quantize, "nf4": nf4.quantize, "nf4 doubly": quantize_doubly}
QUANTIZE = {name: jax.jit(quantize) for name, quantize in QUANTIZE.items()}
unpacked = {form: jax.jit(form.dequantize, static_argnums=1) for form in (mxfp4, nf4)}
DEQUANTIZE = {"mxfp4": unpacked[mxfp4], "nf4": unpacked[nf4], "nf4 doubly": unpacked[nf4]}
normal = functools.partial(common.normal, dtype=jnp.float32)


@pytest.mark.parametrize("name", DEQUANTIZE)
def test_random_weights_spread_as_asked(name):
    double = {"double": True} if name == "nf4 doubly" else {}
    make = mxfp4.random if name == "mxfp4" else nf4.random
    make = jax.jit(functools.partial(make, shape=(2, 128, 256), std=0.03, **double))
    dense = DEQUANTIZE[name](make(jax.random.key(0)))
    np.testing.assert_allclose(np.asarray(dense).std(axis=(1, 2)), 0.03, rtol=0.03)
    assert (dense[0] != dense[1]).mean() > 0.8


@pytest.mark.parametrize("dtype", [slow(jnp.float32), jnp.bfloat16])
@pytest.mark.parametrize("name", QUANTIZE)
def test_one_hot_inputs_return_the_unpacked_weight(name, dtype):
    w = QUANTIZE[name](normal(0, (24, 96)))
    y = packed_matmul(jnp.eye(96, dtype=dtype), w)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, DEQUANTIZE[name](w, dtype).T)


@pytest.mark.parametrize("name", QUANTIZE)
def test_values_and_derivatives_are_those_of_the_unpacked_weight(name):
    w, x, dy = QUANTIZE[name](normal(0, (24, 96))), normal(1, (2, 3, 96)), normal(2, (2, 3, 24))
    dense = DEQUANTIZE[name](w)
    y, pull = jax.vjp(lambda x: packed_matmul(x, w), x)
    product = lambda x: jnp.einsum("...k,nk->...n", x, dense, precision="highest")
    expected, expected_pull = jax.vjp(product, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(pull(dy)[0], expected_pull(dy)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantize", [*QUANTIZE.values(), jax.jit(nvfp4.quantize)])
def test_only_the_packed_weight_is_kept_for_the_derivative(quantize):
    w = quantize(normal(0, (64, 128)))
    _, pull = jax.vjp(lambda x: packed_matmul(x, w), normal(1, (4, 128)))
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(pull) if hasattr(leaf, "nbytes"))
    assert kept == w.nbytes


def test_nvfp4_goes_to_its_own_kernels():
    w, x = jax.jit(nvfp4.quantize)(normal(0, (16, 32))), normal(1, (3, 32))
    np.testing.assert_array_equal(packed_matmul(x, w), nvfp4_matmul(x, w))


def test_a_stack_of_layers_can_be_scanned():
    w, x = QUANTIZE["nf4 doubly"](normal(0, (3, 64, 64))), normal(1, (2, 64))
    y, _ = jax.lax.scan(lambda x, layer: (packed_matmul(x, layer), None), x, w)
    expected = x
    for layer in unpacked[nf4](w):
        expected = jnp.dot(expected, layer.T, precision="highest")
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "dtype", "shape", "message"),
    [
        ((2, 16), jnp.float32, (4, 32), "K = 32"),
        ((2, 32), jnp.float16, (4, 32), "float32 or bfloat16; got float16"),
        ((2, 32), jnp.float32, (3, 4, 32), r"one \[N, K\] matrix"),
    ],
)
def test_bad_arguments_are_named(rows, dtype, shape, message):
    with pytest.raises(ValueError, match=message):
        packed_matmul(jnp.ones(rows, dtype), mxfp4.quantize(jnp.ones(shape)))


def test_an_unpacked_weight_is_refused():
    with pytest.raises(ValueError, match="a packed weight; got"):
        packed_matmul(jnp.ones((2, 32)), jnp.ones((4, 32)))
