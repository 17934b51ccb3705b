import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import nf4
from tests import golden_files

VECTORS = golden_files.load("nf4/vectors.safetensors")
CASES = sorted(name.removesuffix(".weight") for name in VECTORS if name.endswith(".weight"))
# One program each: operation by operation, compilation takes longer than all tests.
quantize = jax.jit(nf4.quantize, static_argnames="double")
dequantize = jax.jit(nf4.dequantize, static_argnums=1)


def test_tables_are_those_of_bitsandbytes():
    np.testing.assert_array_equal(nf4.CODE_VALUES, VECTORS["nf4_code"])
    np.testing.assert_array_equal(nf4.SCALE_VALUES, VECTORS["dynamic_code"])


@pytest.mark.parametrize("case", CASES)
def test_quantize_meets_the_recorded_bytes(case):
    t = quantize(jnp.asarray(VECTORS[f"{case}.weight"]))
    np.testing.assert_array_equal(t.codes, VECTORS[f"{case}.packed"])
    np.testing.assert_array_equal(t.absmax, VECTORS[f"{case}.absmax"])
    np.testing.assert_array_equal(dequantize(t), VECTORS[f"{case}.dequant_f32"])


@pytest.mark.parametrize("case", CASES)
def test_double_quantization_meets_the_recorded_scales(case):
    w = VECTORS[f"{case}.weight"]
    t = quantize(jnp.asarray(w), double=True)
    np.testing.assert_array_equal(t.codes, VECTORS[f"{case}.packed"])
    np.testing.assert_array_equal(t.absmax2, VECTORS[f"{case}.dq.absmax2"])
    np.testing.assert_array_equal(t.offset, np.broadcast_to(t.offset[:1], t.absmax2.shape))
    np.testing.assert_array_equal(t.offset[0], VECTORS[f"{case}.dq.offset"][0])
    # Exactly between two entries a scale may fall either way.
    off = t.absmax.astype(jnp.int32) - VECTORS[f"{case}.dq.absmax_u8"]
    assert np.abs(off).max() <= 1 and np.count_nonzero(off) <= 1
    largest = np.abs(w.astype(np.float32)).max()
    expected = VECTORS[f"{case}.dq.dequant_f32"]
    np.testing.assert_allclose(dequantize(t), expected, atol=0.02 * largest, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_recorded_scales_decode_to_the_recorded_values(case):
    recorded = lambda name: VECTORS[f"{case}.{name}"]
    packed, indices, absmax2 = map(recorded, ("packed", "dq.absmax_u8", "dq.absmax2"))
    offset = jnp.broadcast_to(recorded("dq.offset"), absmax2.shape)
    arrays = map(jnp.asarray, (packed, indices, absmax2, offset))
    t = nf4.NF4Tensor(*arrays, recorded("weight").shape)
    np.testing.assert_allclose(nf4.scales(t), recorded("dq.absmax_f32"), rtol=1e-6)
    values = recorded("dq.dequant_f32")
    np.testing.assert_allclose(dequantize(t), values, atol=1e-6 * np.abs(values).max())


def test_the_even_entry_is_the_high_nibble():
    codes = jnp.array([[1, 2, 15, 0]], jnp.uint8)
    np.testing.assert_array_equal(nf4.pack_codes(codes), [[0x12, 0xF0]])
    packed = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_array_equal(nf4.pack_codes(nf4.unpack_codes(packed)), packed)


@pytest.mark.parametrize("double", [False, True])
def test_fused_parts_and_stacked_layers_hold_the_same_values(double):
    """128 rows of 128 fill one group of 256 blocks; 64 rows do not, and their scales are decoded."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((2, 192, 128)).astype(ml_dtypes.bfloat16))
    for rows in (128, 64):
        parts = [quantize(w[:, :rows], double=double), quantize(w[:, rows:], double=double)]
        fused = nf4.fuse(parts)
        assert (fused.absmax2 is not None) == (double and rows == 128)
        expected = jnp.concatenate([dequantize(part) for part in parts], axis=1)
        np.testing.assert_array_equal(dequantize(fused), expected)
        layer = jax.tree.map(lambda leaf: leaf[1], fused)
        np.testing.assert_array_equal(dequantize(layer), expected[1])


def test_double_quantization_takes_half_a_bit_off_and_zeros_stay_zeros():
    for double, bits in ((False, 4.5), (True, 4 + 8 / 64 + 64 / (64 * 256))):
        make = lambda double=double: nf4.random(jax.random.key(0), (1024, 1024), double=double)
        assert 8 * jax.eval_shape(make).nbytes == bits * 2**20
        assert not np.asarray(dequantize(quantize(jnp.zeros((4, 64)), double=double))).any()


def test_what_cannot_be_packed_is_named():
    with pytest.raises(ValueError, match=r"N \* K = 3 \* 5"):
        nf4.quantize(jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match="got int32"):
        nf4.quantize(jnp.zeros((4, 64), jnp.int32))
    half, whole = quantize(jnp.ones((1, 32))), quantize(jnp.ones((2, 32)))
    with pytest.raises(NotImplementedError, match="do not fill whole blocks of 64"):
        nf4.fuse([half, whole])
    with pytest.raises(ValueError, match="all or none"):
        nf4.fuse([whole, quantize(jnp.ones((2, 32)), double=True)])
