import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.nvfp4_matmul import layout
from tests.pallas_kernels.common import assert_equal_bits, nvfp4_tensor, slow
from tests.pallas_kernels.common import to_hopper as prepare

unprepare = jax.jit(layout.unprepare)


def any_tensor(seed, shape, *, per_row=False):
    """Makes a tensor of all codes and all block scales that are not negative, NaN included; zeros where it is zero."""
    *stack, n, k = shape
    rng = np.random.default_rng(seed)
    scale_bytes = rng.integers(0, 128, (*stack, n, k // 16), np.uint8)
    codes = rng.integers(0, 256, (*stack, n, k // 2), np.uint8)
    return NVFP4Tensor(
        codes=jnp.asarray(np.where(np.repeat(scale_bytes == 0, 8, axis=-1), np.uint8(0), codes)),
        scales=jnp.asarray(scale_bytes.view(jnp.float8_e4m3fn)),
        global_scale=jnp.asarray(rng.uniform(1, 1e4, (*stack, n if per_row else 1)), jnp.float32),
        shape=(n, k),
    )


@pytest.mark.parametrize(
    ("shape", "per_row"),
    [
        slow((64, 64), False),
        slow((1, 16), True),
        ((130, 80), True),
        ((2, 3, 96, 208), False),
        *(
            slow(shape, per_row)
            for shape in ((128, 192), (63, 1040), (3, 64, 128))
            for per_row in (False, True)
        ),
    ],
)
def test_unprepare_inverts_prepare_bit_for_bit(shape, per_row):
    t = any_tensor(0, shape, per_row=per_row)
    assert_equal_bits(unprepare(prepare(t)), t)


def test_words_take_four_and_a_half_bits_a_weight_and_padding_makes_whole_tiles():
    assert prepare(any_tensor(1, (128, 192))).words.nbytes * 8 == 128 * 192 * 4.5
    assert prepare(any_tensor(1, (65, 80))).words.shape == (2, 2, 3, 192)


def test_layers_of_a_prepared_stack_are_prepared_layers():
    t = any_tensor(2, (3, 96, 80))
    stacked = prepare(t)
    for i in range(3):
        at = functools.partial(jax.tree.map, lambda leaf, i=i: leaf[i])
        assert_equal_bits(at(stacked), prepare(at(t)))


def test_codes_whose_scale_is_zero_become_zeros():
    t = any_tensor(3, (64, 64))
    blank = dataclasses.replace(t, scales=jnp.zeros_like(t.scales))
    back = unprepare(prepare(blank))
    assert_equal_bits(back, dataclasses.replace(blank, codes=jnp.zeros_like(t.codes)))


def nonzero_words(codes, scales):
    """Returns the words that are not 0 of one tile, by index."""
    words = np.asarray(prepare(nvfp4_tensor(codes, scales)).words).view(np.uint32).ravel()
    assert words.shape == (576,)
    return {index: word for index, word in enumerate(words.tolist()) if word}


@pytest.mark.parametrize(
    # Thread 32 w + 4 g + t holds rows 16 w + g (+ 8); word 4 thread + i columns 16 i ...
    ("row", "column", "words"),
    [
        (0, 0, {0: 0b1000_0001_1100_0000}),
        (0, 1, {0: 0b1000_0001_1100_0000 << 16}),
        (8, 0, {0: 0b1000_0001_1100_0000 << 4}),
        (8, 1, {0: 0b0001_1100_0000_0000 << 16 | 0b1000}),  # the sign goes round
        (0, 8, {0: 0b1000_0001_1100_0000 >> 6}),
        (8, 8, {0: 1 << 21 | 0b0110_0000_0000_0000, 1: 0b0000_0100_0000_0000}),
        (0, 2, {4: 0b1000_0001_1100_0000}),
        (1, 0, {16: 0b1000_0001_1100_0000}),
        (0, 16, {1: 0b1000_0001_1100_0000}),
        (8, 16, {1: 0b1000_0001_1100_0000 << 6}),
        (0, 24, {1: 0b1000_0001_1100_0000 >> 4}),
        (8, 24, {0: 0b0000_0000_0001_0000, 1: 0b0000_0010_0000_0011}),
        (63, 39, {4 * 127 + 2: 0b0001_1100_0000_0000 << 16 | 0b1000}),
    ],
)
def test_a_code_is_where_its_thread_looks_for_it(row, column, words):
    codes = np.zeros((64, 64), np.uint8)
    codes[row, column] = 0b1111
    # The scale 2^-9 is the byte 0.
    assert nonzero_words(codes, np.full((64, 4), 2**-9)) == words


@pytest.mark.parametrize(
    # The scale 1 is the byte 0x48, in bits 11 ... 4 of a lane; blocks are of 16 columns.
    ("row", "block", "word", "bits"),
    [
        (0, 0, 512, 0x0480),
        (8, 0, 512, 0x0480 << 16),
        (0, 1, 512, 0x0480 << 8),
        (8, 1, 512, 0x8000_0004),  # it goes round
        (1, 0, 514, 0x0480),
        (0, 2, 513, 0x0480),
        (16, 0, 528, 0x0480),
    ],
)
def test_a_scale_is_where_its_thread_looks_for_it(row, block, word, bits):
    scales = np.full((64, 4), 2**-9, np.float32)  # the byte 0
    scales[row, block] = 1  # the byte 9 << 3
    assert nonzero_words(np.zeros((64, 64)), scales) == {word: bits}


def test_scale_bytes_hold_every_e4m3_value_in_five_exponent_bits():
    scales = np.arange(1, 127, dtype=np.uint8).view(jnp.float8_e4m3fn)
    t = nvfp4_tensor(np.zeros((126, 16)), scales[:, None])
    _, scale_bytes = jax.jit(layout.unpack_tiles)(prepare(t).words)
    exponent, mantissa = np.divmod(np.asarray(scale_bytes[:126, 0], np.int32), 8)
    np.testing.assert_array_equal((8 + mantissa) / 8 * 2.0 ** (exponent - 9), scales.astype(float))
