"""Tests the search of block scales in each format against an exhaustive search in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import mxfp4, nf4, nvfp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
# E4M3's positive values from 2^-9 to 448: byte b is entry b - 1.
E4M3 = np.arange(1, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)

# Compiled whole: operation by operation these tests take several times as long.
nvfp4_scales = jax.jit(nvfp4.search_scales)
nvfp4_search = jax.jit(nvfp4.search)
nvfp4_quantize = jax.jit(nvfp4.quantize)
nvfp4_dequantize = jax.jit(nvfp4.dequantize)
mxfp4_quantize = jax.jit(mxfp4.quantize, static_argnames="rounding")
mxfp4_scales = jax.jit(mxfp4.search_scales, static_argnames="rounding")
nf4_scales = jax.jit(nf4.search_scales)


def weights(seed, shape, kind="normal"):
    rng = np.random.default_rng(seed)
    drawn = {
        "normal": rng.standard_normal(shape),
        "heavy": rng.standard_t(3, shape),
        "even": rng.uniform(-1, 1, shape),
        # Blocks of very different sizes, some below what E4M3 can scale.
        "spread": rng.standard_normal(shape) * 10.0 ** rng.uniform(-6, 0, (shape[0], 1)),
    }
    return jnp.asarray(drawn[kind] * 0.02, jnp.float32)


def moments(seed, blocks, size):
    """Makes second moments of inputs that are correlated and differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((blocks, 4 * size, size)) @ rng.standard_normal((size, size))
    x *= 10 ** rng.uniform(-1, 1, size)
    return np.einsum("bti,btj->bij", x, x).astype(np.float32)


def rounded(x, grid):
    """Rounds each value to the nearest one of a grid, which has both signs."""
    return grid[np.abs(x[..., None] - grid).argmin(-1)]


def errors(blocks, steps, grid, own=None):
    """Computes the errors, float64 [N, B, candidates], of blocks [N, B, b] with steps [N, B, candidates]."""
    if own is None:
        own = np.tile(np.eye(blocks.shape[2]), (blocks.shape[1], 1, 1))
    wide = np.broadcast_to(steps, (*blocks.shape[:2], steps.shape[-1]))[..., None]
    off = rounded(blocks[:, :, None] / wide, grid) * wide - blocks[:, :, None]
    return np.einsum("nbci,bij,nbcj->nbc", off, own.astype(np.float64), off)


SIGNED = np.concatenate([-E2M1[:0:-1], E2M1])


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize("kind", ["normal", "heavy", "even", "spread"])
def test_nvfp4_takes_the_best_scale_from_seven_tenths_to_seven_quarters(kind, with_moments):
    w = weights(0, (12, 64), kind)
    own = moments(1, 4, 16) if with_moments else None
    divisor = nvfp4.global_scale(w)
    scales, _ = nvfp4_scales(w, divisor, None if own is None else jnp.asarray(own))
    blocks = np.asarray(w, np.float64).reshape(12, 4, 16)
    of_all = errors(blocks, E4M3 / float(divisor[0]), SIGNED, own)
    taken = np.asarray(scales).view(np.uint8).astype(int) - 1
    found = np.take_along_axis(of_all, taken[..., None], -1)[..., 0]

    of_maximum = np.abs(blocks).max(-1, keepdims=True) * float(divisor[0]) / 6
    within = (E4M3 >= 0.7 * of_maximum) & (E4M3 <= 1.75 * of_maximum)
    best = np.where(within, of_all, np.inf).min(-1)
    assert (found <= best * (1 + 1e-5) + 1e-20).all()
    if not with_moments:  # what lies further away is seldom better, and then by little
        assert found.sum() <= 1.01 * of_all.min(-1).sum()


@pytest.mark.parametrize("kind", ["normal", "heavy", "even", "spread"])
def test_no_searched_scale_is_worse_than_that_of_the_maximum(kind):
    w = weights(3, (16, 128), kind)
    divisor = nvfp4.global_scale(w)
    scales, total = nvfp4_scales(w, divisor)
    plain = nvfp4_quantize(w, divisor)
    off = lambda t: np.square(np.asarray(nvfp4_dequantize(t) - w).reshape(16, 8, 16)).sum(-1)
    searched = off(nvfp4_quantize(w, divisor, scales))
    assert (searched <= off(plain) * (1 + 1e-5) + 1e-20).all()
    np.testing.assert_allclose(total, searched.sum(), rtol=1e-4)


def test_blocks_of_zeros_and_ties_keep_the_scale_of_the_maximum():
    """A single entry is exact under many scales, and powers of two under two of them."""
    w = np.zeros((4, 16), np.float32)
    w[1, 3] = 6.0
    w[2, :4] = [6, -3, 1.5, 0.75]
    w[3] = np.resize([0.5, 1, 2, 4], 16)
    scales, _ = nvfp4_scales(jnp.asarray(w), jnp.array([8.0]))
    plain = nvfp4_quantize(jnp.asarray(w), jnp.array([8.0]))
    assert np.asarray(scales[0]).astype(np.float32) == 0.125
    assert np.asarray(scales[1]).tolist() == np.asarray(plain.scales[1]).tolist() == [8.0]
    # 6, 3, 1.5 are codes at 8, and 0.75 is none; at 12 these are 4, 2, 1 and 0.5.
    assert np.asarray(scales[2]).astype(np.float32) == 12.0
    # 4, 2, 1, 0.5 are codes themselves at 8; at the maximum's scale, 5.5, none is.
    assert np.asarray(plain.scales[3]).astype(np.float32) == 5.5
    assert np.asarray(scales[3]).astype(np.float32) == 8.0
    for t in (plain, nvfp4_quantize(jnp.asarray(w), jnp.array([8.0]), scales)):
        assert not np.asarray(t.codes[0]).any()


def test_the_global_scale_leaves_room_where_blocks_need_it():
    """If all blocks are as large as the largest, none could take a larger scale under 448, 4 instead of 6."""
    alike = np.resize(np.array([4, 2, 1, 0.5, -4, 3, -1.5, 1], np.float32), (16, 64))
    (t,) = nvfp4_search([jnp.asarray(alike)])
    np.testing.assert_allclose(nvfp4_dequantize(t), alike, rtol=1e-6)
    assert float(np.asarray(t.scales).astype(np.float32).max()) > 256
    plain = np.asarray(nvfp4_dequantize(nvfp4_quantize(jnp.asarray(alike))))
    assert np.abs(plain - alike).max() > 0.05
    # One block far above all others holds none of them back.
    lone = weights(5, (512, 64), "normal").at[0, 0].set(1.0)
    (t,) = nvfp4_search([lone])
    assert t.global_scale == nvfp4.global_scale(lone)


def test_weights_that_read_one_input_share_their_global_scale():
    parts = [weights(6, (16, 64)), 3 * weights(7, (32, 64))]
    found = nvfp4_search(parts)
    assert found[0].global_scale == found[1].global_scale
    fused = nvfp4.fuse(found, shared=True)
    apart = np.concatenate([nvfp4_dequantize(t) for t in found])
    np.testing.assert_array_equal(nvfp4_dequantize(fused), apart)


@pytest.mark.parametrize("with_moments", [False, True])
@pytest.mark.parametrize("rounding", ["nearest", "floor"])
def test_mxfp4_takes_the_best_of_three_powers_of_two(rounding, with_moments):
    w = weights(8, (24, 64), "heavy")
    own = moments(9, 2, 32) if with_moments else None
    scales = mxfp4_scales(w, None if own is None else jnp.asarray(own), rounding=rounding)
    blocks = np.asarray(w, np.float64).reshape(24, 2, 32)
    of_all = errors(blocks, 2.0 ** np.arange(-30, 10), SIGNED, own)
    at = lambda bytes_: np.take_along_axis(of_all, (bytes_ - 97)[..., None], -1)[..., 0]
    plain = np.asarray(mxfp4_quantize(w, rounding=rounding).scales).astype(int)
    best = np.minimum(at(plain), np.minimum(at(plain - 1), at(plain + 1)))
    np.testing.assert_allclose(at(np.asarray(scales).astype(int)), best, rtol=1e-5)
    if not with_moments:
        np.testing.assert_allclose(best, of_all.min(-1), rtol=1e-5)


@pytest.mark.parametrize("with_moments", [False, True])
def test_nf4_takes_the_best_share_of_the_maximum(with_moments):
    w = weights(10, (8, 128), "heavy")
    own = moments(11, 2, 64) if with_moments else None
    scales = np.asarray(nf4_scales(w, None if own is None else jnp.asarray(own)))
    blocks = np.asarray(w, np.float64).reshape(8, 2, 64)
    largest = np.abs(blocks).max(-1)
    shares = np.sort([1.0, *nf4.SEARCHED_SHARES])
    grid = nf4.CODE_VALUES.astype(np.float64)
    of_all = errors(blocks, largest[..., None] * shares, grid, own)
    found = errors(blocks, scales.reshape(8, 2, 1), grid, own)[..., 0]
    np.testing.assert_allclose(found, of_all.min(-1), rtol=1e-4)


@pytest.mark.parametrize("double", [False, True])
def test_nf4_rounds_weights_by_the_scales_that_are_kept(double):
    """Codes are the nearest ones for the searched scales that are stored, quantized or not."""
    w = weights(12, (8, 128))
    t = jax.jit(functools.partial(nf4.quantize, double=double))(w, absmax=nf4_scales(w))
    steps = np.asarray(jax.jit(nf4.steps)(t))
    ratios = np.asarray(w) / steps
    expected = rounded(ratios, nf4.CODE_VALUES) * steps
    np.testing.assert_allclose(jax.jit(nf4.dequantize)(t), expected, rtol=1e-6)
    again = jax.jit(nf4.recode)(w, t)
    np.testing.assert_array_equal(again.codes, t.codes)


@pytest.mark.parametrize(("module", "codes"), [(nvfp4, nvfp4), (mxfp4, nvfp4), (nf4, nf4)])
def test_steps_are_what_a_unit_of_a_code_is_worth(module, codes):
    t = jax.jit(module.quantize)(weights(13, (4, 128)))
    values = codes.CODE_VALUES[np.asarray(codes.unpack_codes(t.codes))].reshape(4, 128)
    np.testing.assert_allclose(
        jax.jit(module.steps)(t) * values, jax.jit(module.dequantize)(t), rtol=1e-6
    )
