import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import nvfp4
from tests import golden_files
from tests.pallas_kernels.common import assert_equal_bits, nvfp4_tensor, without_negative_zero

VECTORS = golden_files.load("nvfp4/vectors.safetensors")
CASES = sorted(name.removesuffix(".weight") for name in VECTORS if name.endswith(".weight"))
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
# Scale bytes 0x00 (zero) to 0x7E (448); 0x7F is NaN and the rest are negative.
SCALES = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)

# Compiled whole: operation by operation these tests take four times as long.
quantize = jax.jit(nvfp4.quantize)
dequantize = jax.jit(nvfp4.dequantize, static_argnums=1)


def recorded(case):
    packed, scales, global_scale = (
        jnp.asarray(VECTORS[f"{case}.weight_{part}"])
        for part in ("packed", "scale", "global_scale")
    )
    return nvfp4.NVFP4Tensor(packed, scales, global_scale, VECTORS[f"{case}.weight"].shape)


def normal(seed, shape, dtype=np.float32, scale=0.02):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


@pytest.mark.parametrize("case", CASES)
def test_quantize_meets_compressed_tensors_bytes(case):
    expected = recorded(case)
    actual = quantize(jnp.asarray(VECTORS[f"{case}.weight"]))
    # compressed-tensors has -0 where ours has 0.
    alike = lambda t: dataclasses.replace(t, codes=without_negative_zero(t.codes))
    assert_equal_bits(alike(actual), alike(expected))


@pytest.mark.parametrize("case", CASES)
def test_dequantize_meets_compressed_tensors_values(case):
    np.testing.assert_array_equal(dequantize(recorded(case)), VECTORS[f"{case}.dequant_f32"])
    bf16 = dequantize(recorded(case), jnp.bfloat16)
    assert bf16.dtype == jnp.bfloat16
    expected = VECTORS[f"{case}.dequant_bf16"].astype(np.float32)
    # A bfloat16 step is at most 2^-7 of the value.
    assert np.all(np.abs(np.asarray(bf16, np.float32) - expected) <= np.abs(expected) * 2**-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_code_times_scale_is_exact_for_every_code_and_scale(dtype):
    """Row r has the block scale SCALES[r], and all 16 codes in order."""
    t = nvfp4_tensor(np.tile(np.arange(16), (SCALES.size, 1)), SCALES[:, None])
    actual = np.asarray(nvfp4.scaled_codes(t, dtype)).astype(np.float64)
    np.testing.assert_array_equal(actual, SCALES.astype(np.float64)[:, None] * VALUES)


def test_the_even_column_is_the_low_nibble():
    codes = jnp.array([[1, 2, 15, 0]], jnp.uint8)
    np.testing.assert_array_equal(nvfp4.pack_codes(codes), [[0x21, 0x0F]])
    packed = jnp.arange(256, dtype=jnp.uint8).reshape(2, 4, 32)
    codes = nvfp4.unpack_codes(packed)
    assert codes.shape == (2, 4, 64) and codes.max() == 15
    np.testing.assert_array_equal(nvfp4.pack_codes(codes), packed)


def test_ties_go_to_the_even_code_and_large_values_saturate():
    # The global scale makes the block's step 448 / 448 = 1.
    halfway = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = jnp.array([[6.0, *halfway, *(-x for x in halfway), -6.0]])
    t = quantize(w)
    assert float(t.global_scale[0]) == 448 and float(t.scales[0, 0]) == 448
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    np.testing.assert_array_equal(dequantize(t), [[6.0, *rounded, *(-x for x in rounded), -6.0]])
    # A global scale that is too large leaves the block scale at 448 and the codes at 6.
    clipped = quantize(w, jnp.full((1,), 896.0))
    assert float(clipped.scales[0, 0]) == 448
    assert np.abs(dequantize(clipped)).max() == 3


@pytest.mark.slow
def test_jit_changes_no_byte():
    w = jnp.asarray(normal(0, (96, 272), jnp.bfloat16))
    eager = nvfp4.quantize(w)
    assert_equal_bits(quantize(w), eager)
    np.testing.assert_array_equal(dequantize(eager), nvfp4.dequantize(eager))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_quantize_equals_a_numpy_oracle_on_many_tensors(dtype):
    # numpy divides with correct rounding, which XLA does not; the tensors' maxima differ.
    def round_off(x):
        return x.astype(dtype).astype(np.float32)

    for seed in range(20):
        w = normal(seed, (32, 64), dtype, scale=10.0 ** (seed % 5 - 3))
        wide = w.astype(np.float32)
        blocks = wide.reshape(32, 4, 16)
        largest = np.abs(blocks).max(-1)
        g = round_off(round_off(np.float32(1) / largest.max()) * np.float32(2688))
        scale = np.minimum(round_off(largest / np.float32(6)) * g, np.float32(448))
        scale = scale.astype(ml_dtypes.float8_e4m3fn)
        step = scale.astype(np.float32) / g
        ratio = np.abs(blocks / step[..., None]).astype(ml_dtypes.float4_e2m1fn)

        t = quantize(jnp.asarray(w))
        assert float(t.global_scale[0]) == g
        np.testing.assert_array_equal(np.asarray(t.scales).view(np.uint8), scale.view(np.uint8))
        expected = np.copysign(ratio.astype(np.float32), blocks) * step[..., None]
        np.testing.assert_array_equal(dequantize(t), expected.reshape(32, 64))


def test_float16_counts_as_its_float32_values():
    w = jnp.asarray(normal(3, (16, 64), np.float16))
    assert_equal_bits(quantize(w), quantize(w.astype(jnp.float32)))


@pytest.mark.parametrize("value", [0.0, 1e-38])
def test_a_vanishing_tensor_has_finite_scales_and_dequantizes_to_zero(value):
    t = quantize(jnp.full((4, 32), value, jnp.float32))
    np.testing.assert_array_equal(t.global_scale, [1.0])
    np.testing.assert_array_equal(t.scales.astype(jnp.float32), np.full((4, 2), 0.125))
    np.testing.assert_array_equal(dequantize(t), np.zeros((4, 32)))


def test_a_nan_does_not_disappear():
    w = jnp.ones((2, 32)).at[1, 20].set(jnp.nan)
    nans = np.isnan(dequantize(quantize(w)))
    assert nans[1, 16:].all() and nans.sum() == 16


def test_a_stack_is_quantized_matrix_by_matrix():
    w = jnp.asarray(normal(4, (3, 16, 32)) * np.array([1, 10, 100], np.float32)[:, None, None])
    stacked = quantize(w)
    assert stacked.shape == (16, 32) and stacked.global_scale.shape == (3, 1)
    for i in range(3):
        assert_equal_bits(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), quantize(w[i]))


def test_fused_parts_may_share_the_smallest_global_scale():
    q, k = jnp.asarray(normal(5, (32, 64))), jnp.asarray(normal(6, (16, 64), scale=0.5))
    shared = jnp.minimum(nvfp4.global_scale(q), nvfp4.global_scale(k))
    parts = [quantize(q, shared), quantize(k, shared)]
    whole = quantize(jnp.concatenate([q, k]))
    assert_equal_bits(nvfp4.fuse(parts, shared=True), whole)
    for part, again in zip(parts, nvfp4.split(whole, (32, 16)), strict=True):
        assert_equal_bits(again, part)


def test_fused_parts_may_keep_their_own_global_scales():
    parts = [quantize(jnp.asarray(normal(7 + i, (16, 32), scale=10.0**i))) for i in range(3)]
    fused, unpacked = nvfp4.fuse(parts), np.concatenate([*map(dequantize, parts)])
    assert fused.shape == (48, 32) and fused.global_scale.shape == (48,)
    np.testing.assert_array_equal(dequantize(fused), unpacked)
    first, rest = nvfp4.split(fused, (16, 32))
    np.testing.assert_array_equal(dequantize(first), dequantize(parts[0]))
    assert_equal_bits(rest, nvfp4.fuse(parts[1:]))


def test_a_weight_takes_four_and_a_half_bits():
    t = quantize(jnp.ones((64, 128)))
    assert t.nbytes == 64 * 128 * 4.5 / 8 + 4
    assert jax.eval_shape(quantize, jnp.ones((64, 128))).nbytes == t.nbytes
    np.testing.assert_array_equal(t.multiplier, np.float32(1) / np.asarray(t.global_scale))


def test_random_weights_have_the_standard_deviation_asked_for():
    t = jax.jit(lambda key: nvfp4.random(key, (2, 128, 256), std=0.05))(jax.random.key(0))
    w = np.asarray(dequantize(t))
    assert t.shape == (128, 256) and w.shape == (2, 128, 256)
    # 65536 entries in 4096 blocks: the sample's deviation is off by about 0.4 %.
    np.testing.assert_allclose(w.std(), 0.05, rtol=0.02)
    assert abs(w.mean()) < 0.05 / 50
    scales = np.unique(np.asarray(t.scales).astype(np.float32))
    assert scales.size == 16 and scales.min() == 64 and scales.max() == 240
    assert not np.array_equal(w[0], w[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ones: nvfp4.quantize(ones(4, 40)), "16 values along K; got K = 40"),
        (lambda _: nvfp4.random(jax.random.key(0), (4, 40)), "16 values along K; got K = 40"),
        (lambda ones: nvfp4.quantize(ones(16)), r"axes \[..., N, K\]; got shape \(16,\)"),
        (lambda ones: nvfp4.quantize(ones(4, 16).astype(int)), "bfloat16 or float16; got int32"),
        (lambda ones: nvfp4.quantize(ones(4, 16), ones(3)), r"4 rows.*got shape \(3,\)"),
        (lambda ones: nvfp4.split(quantize(ones(4, 16)), (1, 2)), r"N = 4; got \[1, 2\], 3 in all"),
        (
            lambda ones: nvfp4.fuse([quantize(ones(1, k)) for k in (16, 32)]),
            r"one K; got K = \[16, 32\]",
        ),
        (
            lambda ones: nvfp4.fuse([quantize(ones(4, 16), ones(4))], shared=True),
            r"one global scale in each part; got \[4\]",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda *shape: jnp.ones(shape))
