"""Tests the decoding of GGUF's blocks against the package `gguf`, bit for bit."""

import jax
import numpy as np
import pytest

from qerl_jax.checkpoint import gguf_blocks

package = pytest.importorskip("gguf")
# Zero of both signs, subnormal numbers of both signs, the smallest normal one, the largest, and ordinary ones.
HALVES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C01, 0xAE66, 0x2A3D]
# Where the halves begin in a block of each type.
STARTS = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 10: [80, 82]}
STARTS |= {11: [108], 12: [0, 2], 13: [0, 2], 14: [208]}


@pytest.mark.parametrize("kind", [0, 1, 30, *gguf_blocks.TYPES])
def test_random_blocks_are_decoded_to_the_bits_of_the_package(kind):
    """On the host and compiled for a device, with all pairs of extreme scales."""
    name = package.GGMLQuantizationType(kind)
    weights, nbytes = gguf_blocks.sizes(kind)
    assert (weights, nbytes) == package.GGML_QUANT_SIZES[name]
    rng = np.random.default_rng(kind)
    rows = rng.integers(0, 256, (200, nbytes), np.uint8)
    if kind in STARTS:
        for at, values in zip(STARTS[kind], np.meshgrid(HALVES, HALVES), strict=False):
            rows[:100, at : at + 2] = values.astype("<u2").reshape(-1, 1).view(np.uint8)
            rows[100:, at + 1] &= 0xBF  # finite
    else:
        rows[:, -1] &= 0xBF
    expected = package.dequantize(rows, name).reshape(50, 4 * weights)
    shape, data = expected.shape, rows.reshape(-1)
    compiled = jax.jit(lambda x: gguf_blocks.decode(x, kind, shape))(data)
    for values in (gguf_blocks.decode(data, kind, shape), compiled):
        np.testing.assert_array_equal(np.asarray(values).view(np.uint32), expected.view(np.uint32))
