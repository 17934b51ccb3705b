import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, nvfp4_matmul
from pallas_kernels.nvfp4_matmul import api, shapes
from tests.pallas_kernels.common import normal, random, slow
from tests.pallas_kernels.common import weight as of_deviation

DTYPES = [jnp.float32, jnp.bfloat16]
# Relative to the largest output: float32 sums of up to 704 terms; one bfloat16 ulp.
TOLERANCE = {jnp.float32: 2**-20, jnp.bfloat16: 2**-7}


# Compiled whole: operation by operation these tests take several times as long.
quantize = jax.jit(nvfp4.quantize)
dequantize = jax.jit(nvfp4.dequantize)
matmul = jax.jit(nvfp4_matmul)


def weight(seed, n, k):
    return of_deviation(seed, n, k, std=k**-0.5)


def weight_of_three_scales(seed, k):
    """Makes a fused weight whose rows have three global scales, and its parts."""
    parts = [
        quantize(normal(seed + i, (n, k), jnp.float32) * (scale * k**-0.5))
        for i, (n, scale) in enumerate(((32, 1.0), (16, 0.03), (16, 2.0)))
    ]
    return nvfp4.fuse(parts), parts


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    actual, expected = (np.asarray(a).astype(np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= np.abs(expected).max() * TOLERANCE[dtype]


def dense(w):
    return np.asarray(dequantize(w)).astype(np.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [slow(False), True])
def test_one_hot_inputs_return_scaled_codes_times_the_multiplier(dtype, per_row):
    w = weight_of_three_scales(0, 96)[0] if per_row else weight(0, 64, 96)
    actual = matmul(jnp.eye(96, dtype=dtype), w)
    multiplier = np.float32(1) / np.asarray(w.global_scale)
    expected = np.asarray(nvfp4.scaled_codes(w, jnp.float32)).T * multiplier
    np.testing.assert_array_equal(actual, expected.astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 256, 128),  # decoding one sequence
        slow(8, 96, 704),  # K a multiple of 16, not of 128
        (37, 40, 256),  # ragged M and N
        slow(128, 160, 64),  # wide M
    ],
)
def test_products_meet_a_float64_oracle(m, n, k, dtype):
    x, w = normal(m, (m, k), dtype), weight(m, n, k)
    assert_close(matmul(x, w), np.asarray(x).astype(np.float64) @ dense(w).T, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_row", [slow(False), True])
def test_the_derivative_is_that_of_the_dense_product(dtype, per_row):
    w = weight_of_three_scales(1, 96)[0] if per_row else weight(1, 64, 96)
    x, dy = normal(2, (5, 7, 96), dtype), normal(3, (5, 7, 64), dtype)
    (actual,) = jax.vjp(lambda x: matmul(x, w), x)[1](dy)
    (expected,) = jax.vjp(
        lambda x: jnp.dot(x, dequantize(w).T, precision="highest"), x.astype(jnp.float32)
    )[1](dy.astype(jnp.float32))
    assert_close(actual, expected, dtype)


def test_sums_are_rounded_before_the_global_scale_and_not_after_it():
    # As above, sums are exact: small integers times codes with scales that are not tiny.
    w = weight(9, 64, 128)
    assert w.scales.astype(jnp.float32).min() >= 16
    x = jnp.asarray(np.random.default_rng(9).integers(-4, 5, (6, 128)), jnp.bfloat16)
    codes = np.asarray(nvfp4.scaled_codes(w, jnp.float32), np.float64)
    sums = jnp.asarray(np.asarray(x, np.float64) @ codes.T, jnp.bfloat16)
    wide = jax.jit(lambda x: nvfp4_matmul(x, w, out_dtype=jnp.float32))(x)
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, sums.astype(jnp.float32) * w.multiplier)
    np.testing.assert_array_equal(nvfp4_matmul(x, w), wide.astype(jnp.bfloat16))


def test_the_weight_has_no_derivative():
    x, w = normal(0, (3, 32), jnp.float32), weight(0, 16, 32)
    grads = jax.grad(lambda w, x: nvfp4_matmul(x, w).sum(), allow_int=True)(w, x)
    assert grads.codes.dtype == jax.dtypes.float0
    assert not np.any(np.asarray(grads.scales).astype(np.float32))
    assert not np.any(grads.global_scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_fused_of_different_scales_equals_its_parts(dtype):
    fused, parts = weight_of_three_scales(4, 128)
    # Small integers times scaled codes, which are multiples of 2^-10 below 2688: float32 sums of
    # them are exact in any order as long as the blocks' scales are not tiny.
    x = jnp.asarray(np.random.default_rng(5).integers(-4, 5, (6, 128)), dtype)
    assert all(part.scales.astype(jnp.float32).min() >= 16 for part in parts)
    apart = jnp.concatenate([matmul(x, part) for part in parts], axis=-1)
    np.testing.assert_array_equal(matmul(x, fused), apart)


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_axes_are_rows_and_jit_and_vmap_change_nothing(dtype):
    x, w = normal(6, (2, 3, 64), dtype), weight(6, 48, 64)
    flat = nvfp4_matmul(x.reshape(6, 64), w).reshape(2, 3, 48)
    np.testing.assert_array_equal(nvfp4_matmul(x, w), flat)
    np.testing.assert_array_equal(matmul(x, w), flat)
    assert_close(jax.vmap(matmul, in_axes=(0, None))(x, w), flat, dtype)
    assert_close(nvfp4_matmul(x[0, 0], w), flat[0, 0], dtype)
    assert nvfp4_matmul(x[:, :0], w).shape == (2, 0, 48)


@pytest.mark.parametrize("per_row", [slow(False), True])
def test_stacked_weights_are_scanned_and_rematerialized(per_row):
    layers = [weight_of_three_scales(s, 64)[0] if per_row else weight(s, 64, 64) for s in (7, 17)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert stacked.shape == (64, 64)
    x = normal(8, (4, 64), jnp.float32)

    def scanned(x, stacked):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(nvfp4_matmul(x, w)), None))
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0] ** 2)

    def plain(x):
        for w in layers:
            x = jnp.tanh(jnp.dot(x, dequantize(w).T, precision="highest"))
        return jnp.sum(x**2)

    actual, grad = jax.jit(jax.value_and_grad(scanned))(x, stacked)
    expected, expected_grad = jax.value_and_grad(plain)(x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    # tanh of two layers multiplies the products' rounding errors a little.
    np.testing.assert_allclose(grad, expected_grad, atol=1e-5 * np.abs(expected_grad).max())


@pytest.mark.parametrize(
    ("x", "dtype", "w", "implementation", "message"),
    [
        ((2, 48), jnp.float32, (16, 32), None, r"K = 32.*\(16, 32\); got \(2, 48\)"),
        ((), jnp.float32, (16, 32), None, r"K = 32.*got \(\)"),
        ((2, 32), jnp.float16, (16, 32), None, "float32 or bfloat16; got float16"),
        ((2, 32), jnp.float32, (3, 16, 32), None, r"codes have shape \(3, 16, 16\)"),
        ((2, 32), jnp.float32, (16, 32), "cublas", r"\['reference'\] or None; got 'cublas'"),
    ],
)
def test_bad_input_is_named(x, dtype, w, implementation, message):
    x, w = jnp.ones(x, dtype), random(jax.random.key(0), w)
    with pytest.raises(ValueError, match=message):
        nvfp4_matmul(x, w, implementation=implementation)


def test_an_unpacked_weight_is_refused():
    message = "must be an NVFP4Tensor, or what prepare returned; got ArrayImpl"
    with pytest.raises(ValueError, match=message):
        nvfp4_matmul(jnp.ones((2, 32)), jnp.ones((16, 32)))


def test_an_implementation_that_cannot_is_an_error_if_named_and_passed_over_if_not(monkeypatch):
    picky = types.SimpleNamespace(supports=lambda m, n, k, dtype: f"needs N % 64 == 0; got {n=}")
    table = {"picky": picky, **api._IMPLEMENTATIONS}
    monkeypatch.setattr(api, "_IMPLEMENTATIONS", table)
    x, w = normal(9, (2, 32), jnp.float32), weight(9, 16, 32)
    with pytest.raises(NotImplementedError, match="'picky': needs N % 64 == 0; got n=16"):
        nvfp4_matmul(x, w, implementation="picky")
    plain = nvfp4_matmul(x, w, implementation="reference")
    np.testing.assert_array_equal(nvfp4_matmul(x, w), plain)


def test_every_problem_can_be_packed_and_those_of_qwen_7b_have_its_sizes():
    sizes = {p.layer: (p.n, p.k) for p in shapes.PROBLEMS if p.model == "qwen2.5-7b"}
    assert sizes == {
        "qkv": (4608, 3584),
        "o": (3584, 3584),
        "gate_up": (37888, 3584),
        "down": (3584, 18944),
        "lm_head": (152064, 3584),
    }
    assert len({dataclasses.astuple(p)[:2] for p in shapes.PROBLEMS}) == len(shapes.PROBLEMS) == 45
    assert all(p.k % nvfp4.BLOCK == 0 for p in shapes.PROBLEMS)
