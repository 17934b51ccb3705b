import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS
from pallas_kernels.formats import mxfp4, nf4
from pallas_kernels.portable import layout
from tests.pallas_kernels.common import RANDOM, nvfp4_tensor, slow, to_portable

unprepare = jax.jit(layout.unprepare)
decoded = jax.jit(layout.decoded, static_argnums=1)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *[("nvfp4", (2, 72, 192)), slow("nvfp4", (64, 96)), ("nvfp4", (1, 64))],
        *[slow("mxfp4", (2, 72, 192)), ("mxfp4", (64, 96)), slow("mxfp4", (1, 64))],
    ],
)
def test_preparing_has_an_inverse(kind, shape):
    t = RANDOM[kind](jax.random.key(0), shape)
    for leaf, again in zip(*map(jax.tree.leaves, (t, unprepare(to_portable(t)))), strict=True):
        np.testing.assert_array_equal(leaf, again, strict=True)


def test_of_nf4_the_inverse_has_the_values_of_its_scales():
    t = RANDOM["nf4"](jax.random.key(0), (2, 72, 192))
    again = unprepare(to_portable(t))
    np.testing.assert_array_equal(again.codes, t.codes)
    # Compiled too, since some processors then round a product and a sum once.
    np.testing.assert_array_equal(again.absmax, jax.jit(nf4.scales)(t))


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_decoded_over_the_global_scale_is_the_weight(kind):
    t = RANDOM[kind](jax.random.key(0), (40, 192))
    w = to_portable(t)
    actual = decoded(w, jnp.float32) / w.global_scale[..., None]
    np.testing.assert_allclose(actual, jax.jit(FORMATS[kind].unpack)(t), rtol=2**-22)


def test_a_word_has_a_code_of_each_block_and_a_scale_word_a_byte_of_each():
    codes = np.zeros((64, 64), np.uint8)
    # Row 3: 6 in column 5 of block 0, -0.5 in column 5 of block 3.
    codes[3, 5], codes[3, 16 * 3 + 5] = 7, 9
    scales = np.ones((64, 4), np.float32)
    scales[3] = [1, 2, 448, 2.0**-9]
    w = to_portable(nvfp4_tensor(codes, scales))
    assert w.words.shape == (1, 64, 16)
    # +6: exponent and mantissa at bits 8 to 6; -0.5: sign at 14, mantissa at 10.
    assert w.words[0, 3, 5] == 0b111 << 6 | 1 << 14 | 1 << 10
    assert np.count_nonzero(w.words) == 1
    bytes_ = [9 << 3, 10 << 3, 17 << 3 | 6, 0]  # exponent and mantissa
    assert list(np.asarray(w.scales).view(np.uint8).reshape(1, 64, 4)[0, 3]) == bytes_


def test_exponents_far_from_the_largest_are_decoded():
    scales = jnp.asarray([[120, 127], [1, 60]], jnp.uint8)
    t = mxfp4.MXFP4Tensor(jnp.full((2, 32), 0x22, jnp.uint8), scales, (2, 64))
    w = to_portable(t)
    actual = decoded(w, jnp.float32) / w.global_scale
    np.testing.assert_array_equal(actual, jax.jit(mxfp4.dequantize)(t))


def test_blocks_of_nf4_that_cross_rows_stay_as_they_are():
    t = RANDOM["nf4"](jax.random.key(0), (4, 96))
    with pytest.raises(NotImplementedError, match="within rows; got K = 96"):
        to_portable(t)


def test_a_stack_may_be_sliced():
    t = RANDOM["nvfp4"](jax.random.key(0), (3, 64, 64))
    w = to_portable(t)
    one = jax.tree.map(lambda leaf: leaf[1], w)
    assert dataclasses.replace(one) == one and one.shape == (64, 64)
    np.testing.assert_array_equal(decoded(w, jnp.float32)[1], decoded(one, jnp.float32))
