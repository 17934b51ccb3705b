import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.formats import mxfp4
from tests import golden_files
from tests.pallas_kernels.common import without_negative_zero

VECTORS = golden_files.load("mxfp4/vectors.safetensors")
CASES = sorted(name.removesuffix(".weight") for name in VECTORS if name.endswith(".weight"))
# Names of packed bytes, scales and values, by the rounding of the scales.
RECORDED = {
    "nearest": ("weight_packed", "weight_scale", "dequant_f32"),
    "floor": ("ocp_packed", "ocp_scale", "ocp_dequant_f32"),
}
# One program each: operation by operation, compilation takes longer than all tests.
quantize = jax.jit(mxfp4.quantize, static_argnames="rounding")
dequantize = jax.jit(mxfp4.dequantize, static_argnums=1)


@pytest.mark.parametrize("rounding", RECORDED)
@pytest.mark.parametrize("case", CASES)
def test_quantize_meets_the_recorded_bytes(case, rounding):
    packed, scales, values = (VECTORS[f"{case}.{name}"] for name in RECORDED[rounding])
    t = quantize(jnp.asarray(VECTORS[f"{case}.weight"]), rounding=rounding)
    assert t.codes.dtype == t.scales.dtype == jnp.uint8
    np.testing.assert_array_equal(t.scales, scales)
    np.testing.assert_array_equal(without_negative_zero(t.codes), without_negative_zero(packed))
    np.testing.assert_array_equal(dequantize(t), values)


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_values_are_exact(case):
    t = quantize(jnp.asarray(VECTORS[f"{case}.weight"]))
    values = dequantize(t, jnp.bfloat16)
    assert values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(values, VECTORS[f"{case}.dequant_bf16"])
    np.testing.assert_array_equal(values.astype(jnp.float32), dequantize(t))


def test_the_two_roundings_part_at_seven_quarters():
    maxima = [1.0, 1.5, 1.7421875, 1.75, 1.9921875, 2.0]
    w = jnp.zeros((len(maxima), 32)).at[:, 3].set(jnp.array(maxima))
    nearest, floor = (quantize(w, rounding=name).scales[:, 0] - 125 for name in RECORDED)
    np.testing.assert_array_equal(nearest, [0, 0, 0, 1, 1, 1])
    np.testing.assert_array_equal(floor, [0, 0, 0, 0, 0, 1])
    # Under "floor" such a maximum saturates: 1.75 becomes 6 / 4.
    assert dequantize(quantize(w, rounding="floor"))[3, 3] == 1.5


def test_blocks_of_zeros_and_extreme_values_stay_finite():
    w = jnp.zeros((3, 32)).at[1, 0].set(2e38).at[2, 0].set(1e-38)
    t = quantize(w)
    np.testing.assert_array_equal(t.scales[:, 0], [0, 252, 0])
    values = np.asarray(dequantize(t))
    assert np.isfinite(values).all() and not values[0].any()
    assert values[1, 0] == 2.0**127


def test_fused_parts_and_stacked_layers_hold_the_same_values():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((2, 12, 64)).astype(ml_dtypes.bfloat16)
    whole = quantize(jnp.asarray(w))
    parts = [quantize(jnp.asarray(w[:, :5])), quantize(jnp.asarray(w[:, 5:]))]
    fused = mxfp4.fuse(parts)
    assert fused.shape == (12, 64) and fused.codes.shape == (2, 12, 32)
    jax.tree.map(np.testing.assert_array_equal, fused, whole)
    layer = jax.tree.map(lambda leaf: leaf[1], whole)
    np.testing.assert_array_equal(dequantize(layer), dequantize(whole)[1])
    assert whole.nbytes == 2 * 12 * 64 * 4.25 / 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda zeros: mxfp4.quantize(zeros(4, 48)), r"32 values along K; got K = 48"),
        (lambda _: mxfp4.random(jax.random.key(0), (32,)), r"axes \[\.\.\., N, K\]"),
        (lambda zeros: mxfp4.quantize(zeros(4, 32).astype(int)), "got int32"),
        (lambda zeros: mxfp4.quantize(zeros(4, 32), rounding="up"), "got 'up'"),
        (
            lambda zeros: mxfp4.fuse([quantize(zeros(4, k)) for k in (32, 64)]),
            r"K = \[32, 64\]",
        ),
    ],
)
def test_what_cannot_be_packed_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(lambda *shape: jnp.zeros(shape))
