"""Tests the definition of W4A8 against float64 and the casts of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import float8, nvfp4
from pallas_kernels.formats.rounding import float8_values
from tests.pallas_kernels.common import f32, normal, nvfp4_tensor, weight

E4M3 = ml_dtypes.float8_e4m3fn
SCALES = np.arange(1, 0x7F, dtype=np.uint8).view(E4M3)  # 2^-9 to 448
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])
search_scales = jax.jit(functools.partial(nvfp4.search_scales, as_float8=True))


def as_e4m3(x):
    """Rounds float64 by ml_dtypes."""
    return np.asarray(x).astype(np.float32).astype(E4M3).astype(np.float64)


def rows_in_float64(x):
    """Rounds rows as `float8.quantize_rows` says: values and scales in float64, the scales rounded to float32."""
    scales = (np.abs(f32(x)).max(-1, keepdims=True) / np.float32(448)).astype(np.float32)
    return as_e4m3((f32(x) / scales).clip(-448, 448)), scales.astype(np.float64)


def weight_in_float64(t):
    """Returns w8 and its multiplier."""
    products = np.asarray(nvfp4.scaled_codes(t, jnp.float32), np.float64)
    power = next(s for s in range(-20, 4) if np.abs(products).max() * 2.0**-s <= 448)
    return as_e4m3(products * 2.0**-power), 2.0**power / np.asarray(t.global_scale, np.float64)


def test_values_are_those_of_the_cast():
    ties = np.concatenate([(a + b) / 2 for a, b in [(f32(SCALES[:-1]), f32(SCALES[1:]))]])
    drawn = np.random.default_rng(0).standard_normal(4000) * np.exp2(np.arange(4000) % 20 - 12)
    x = np.concatenate([ties, -ties, [0, 448, 2**-10, 2**-20], drawn]).astype(np.float32)
    there_and_back = jax.jit(lambda x: float8_values(x).astype(E4M3).astype(jnp.float32))
    x = x[np.abs(x) <= 448]
    np.testing.assert_array_equal(there_and_back(x), as_e4m3(x))


@pytest.mark.parametrize(
    ("scale", "code", "power"),
    [(448, 7, 3), (256, 7, 2), (64, 7, 0), (112, 6, 0), (120, 6, 1), (2**-9, 1, -18)],
)
def test_the_exponent_is_the_smallest_with_which_nothing_exceeds_448(scale, code, power):
    """`code` 7 is 6, 6 is 4 and 1 is .5; 112 * 4 is 448, and .5 * 2^-9 is 2^-10 = 256 * 2^-18."""
    codes = np.zeros((2, 16), int)
    codes[1, 3] = code + 8
    assert int(float8.exponent(nvfp4_tensor(codes, np.full((2, 1), scale)))) == power


def test_a_weight_of_zeros_stays_zero():
    w8, multiplier = float8.weight(nvfp4_tensor(np.zeros((2, 16), int), np.ones((2, 1))))
    assert not f32(w8).any() and multiplier.tolist() == [1.0]


def test_every_code_and_scale_becomes_the_nearest_float8_value():
    """Products of scales below 2^-3 and codes are subnormal beside those of 448."""
    t = nvfp4_tensor(np.tile(np.arange(16), (SCALES.size, 1)), SCALES[:, None])
    w8, multiplier = jax.jit(float8.weight)(t)
    exact = SCALES.astype(np.float64)[:, None] * VALUES
    np.testing.assert_array_equal(f32(w8), as_e4m3(exact / 8))
    assert multiplier.tolist() == [8.0]
    off = np.abs(f32(w8) * 8.0 - exact)
    assert (off <= np.maximum(np.abs(exact) / 16, 2.0**-7)).all() and off.max() > 0


@pytest.mark.parametrize("scale_per_row", [False, True])
def test_products_equal_those_in_float64(scale_per_row):
    t = weight(1, 96, 160, scale_per_row=scale_per_row)
    x, dy = normal(2, (24, 160), jnp.float32), normal(3, (24, 96), jnp.float32)
    (w8, multiplier), (x8, row_scale) = weight_in_float64(t), rows_in_float64(x)
    expected = x8 @ w8.T * row_scale * multiplier
    np.testing.assert_allclose(jax.jit(float8.forward)(x, t), expected, rtol=1e-5, atol=1e-5)
    if scale_per_row:
        dy8, dy_scale = rows_in_float64(f32(dy) * f32(float8.weight(t)[1]))
        expected = dy8 @ w8 * dy_scale
    else:
        dy8, dy_scale = rows_in_float64(dy)
        expected = dy8 @ w8 * dy_scale * multiplier
    np.testing.assert_allclose(jax.jit(float8.backward)(dy, t), expected, rtol=1e-5, atol=1e-5)


def test_rows_take_the_whole_range_whatever_their_neighbours():
    x = normal(4, (8, 64), jnp.bfloat16) * jnp.exp2(jnp.arange(8.0) * 4 - 16)[:, None]
    x = x.at[3].set(0).astype(jnp.bfloat16)
    rounded = jax.jit(float8.quantize_rows)
    x8, scales = rounded(x)
    largest = np.abs(f32(x8)).max(-1)
    assert largest.tolist() == [448.0] * 3 + [0.0] + [448.0] * 4
    assert np.asarray(scales)[3] == 1
    alone = [np.asarray(rounded(row[None])[0])[0] for row in x]
    np.testing.assert_array_equal(np.asarray(x8), alone)


def test_scales_are_searched_for_the_rounded_weight():
    """Of the candidates no other scale has a smaller error in float64, subnormal products included."""
    rng = np.random.default_rng(5)
    size = 0.02 * 10 ** -rng.uniform(0, 5, (48, 1))
    w = jnp.asarray(rng.standard_normal((48, 128)) * size, jnp.float32)
    divisor = nvfp4.global_scale(w)
    scales, total = search_scales(w, divisor)
    exact = np.asarray(w, np.float64).reshape(48, 8, 16) * float(divisor[0])

    def errors(scale):
        worth = scale[..., None]
        codes = MAGNITUDES[
            np.abs(np.abs(exact)[..., None] / worth[..., None] - MAGNITUDES).argmin(-1)
        ]
        return np.square(as_e4m3(codes * worth / 8) * 8 - np.abs(exact)).sum(-1)

    best = errors(f32(scales).astype(np.float64))
    first = np.asarray(nvfp4.quantize(w, divisor).scales).view(np.uint8).astype(int)
    for step in (0, *nvfp4.SEARCHED_STEPS):
        bits = np.clip(first + step, 1, 126).astype(np.uint8)
        other = errors(bits.view(E4M3).astype(np.float64))
        # From a scale that rounded to zero, which `quantize` replaces, other candidates are tried.
        is_same_start = np.abs(exact).max(-1) / 6 > 0.125
        assert (best <= other * (1 + 1e-5))[is_same_start].all()
    np.testing.assert_allclose(total, best.sum() / float(divisor[0]) ** 2, rtol=1e-4)


def test_weights_that_are_packed_for_float8_take_these_scales():
    w = normal(6, (48, 128), jnp.float32)
    (t,) = jax.jit(lambda w: nvfp4.search([w], as_float8=True))(w)
    scales, _ = search_scales(w, t.global_scale)
    np.testing.assert_array_equal(np.asarray(t.scales), np.asarray(scales))
