"""The residual stream between the linears of a decoding step; `epilogue` says how it divides RMSNorm."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream of M rows, with the first half of the next RMSNorm.

    Attributes:
      values: bfloat16 [D, M]; D is padded with zeros to whole tiles of 64.
      scaled: bfloat16 [M, D], padded in the same way: values times the scale of the next norm.
      squares: float32 [R, M], R = ceil(D / 64) rounded up to a multiple of 64. The first ceil(D / 64) rows add up to
        the sum of squares of each of the M rows.
      width: D without padding.
    """

    values: jax.Array
    scaled: jax.Array
    squares: jax.Array
    width: int = dataclasses.field(metadata={"static": True})

    def unit(self, eps: float) -> jax.Array:
        """Returns 1 / sqrt(mean of squares + eps) of each row, float32 [M]."""
        squares = self.squares[: layout.tiles(self.width)]
        return jax.lax.rsqrt(jnp.sum(squares, axis=0) / self.width + eps)


def stream(values: jax.Array, scale: jax.Array) -> Stream:
    """Makes a stream from activations, bfloat16 [M, D], and the scale of the first norm, float32 [D]."""
    width = values.shape[1]
    more = -width % TILE
    values, scale = jnp.pad(values, ((0, 0), (0, more))), jnp.pad(scale, (0, more))
    wide = values.astype(jnp.float32)
    squares = jnp.zeros((square_rows(width), len(values)), jnp.float32)
    squares = squares.at[0].set(jnp.sum(wide * wide, axis=1))
    return Stream(values.T, (wide * scale).astype(values.dtype), squares, width)


def added(stream_: Stream, y: jax.Array, scale: jax.Array) -> Stream:
    """Adds y, float32 [M, D], to a stream without a kernel, for a y that is first summed over devices.

    `scale` is the scale of the next norm, float32 [D].
    """
    values = stream_.values[: stream_.width].T
    return stream(rounded(values.astype(jnp.float32) + y, values.dtype), scale)


def square_rows(width: int) -> int:
    """Returns the number of rows of `Stream.squares`: the kernel reads them in tiles of 64 rows."""
    return -(-width // (TILE * TILE)) * TILE
