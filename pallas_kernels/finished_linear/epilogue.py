"""The steps after a product of the decode kernel, in one small kernel: everything between two products except
attention.

    y = ([sum of parts] * scale + [[U] B]) * unit + bias       U = sum of the parts of x A
    plain       [y]
    residual    [r + y], with [it times the next norm's scale], and the sums of its squares
    swiglu      [silu([gate]) * [up]]

RMSNorm is spread over two kernels. The one that makes the residual stream r writes r * scale and,
of each 64 columns, the sum of r^2; the one after the next product multiplies by
unit = 1 / sqrt(mean r^2 + eps), which a product lets pass. So no kernel has to see a whole row.

What stands in brackets is rounded to bfloat16, and nothing else is. A layer in training rounds in the
same places, most of which are its products' outputs, because random weights make of a rounding that one
of them leaves out more than of an addition in another order (docs/design/model.md, "Where rounding
happens").

The residual stream lies transposed, [D, M], as sums of products do; x of a product [M, K].
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.config import most_shared_bytes
from pallas_kernels.nvfp4_matmul.decode import Sums
from pallas_kernels.nvfp4_matmul.layout import TILE
from pallas_kernels.runtime import Device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream of M rows, ready for a norm.

    Attributes:
      values: bfloat16 [D, M], D padded with zeros to whole tiles of 64.
      scaled: bfloat16 [M, D], likewise, values times the scale of the norm that comes next.
      squares: float32 [ceil(D / 64) up to a multiple of 64, M]; its first ceil(D / 64) rows sum up to
        each row's sum of squares.
      width: D.
    """

    values: jax.Array
    scaled: jax.Array
    squares: jax.Array
    width: int = dataclasses.field(metadata={"static": True})

    def unit(self, eps: float) -> jax.Array:
        """float32 [M], 1 / sqrt(mean of squares + eps)."""
        squares = self.squares[: layout.tiles(self.width)]
        return jax.lax.rsqrt(jnp.sum(squares, axis=0) / self.width + eps)


def stream(values: jax.Array, scale: jax.Array) -> Stream:
    """A stream from activations bfloat16 [M, D] and the float32 [D] scale of the first norm."""
    width = values.shape[1]
    more = -width % TILE
    values, scale = jnp.pad(values, ((0, 0), (0, more))), jnp.pad(scale, (0, more))
    wide = values.astype(jnp.float32)
    squares = jnp.zeros((_square_rows(width), len(values)), jnp.float32)
    squares = squares.at[0].set(jnp.sum(wide * wide, axis=1))
    return Stream(values.T, (wide * scale).astype(values.dtype), squares, width)


def added(stream_: Stream, y: jax.Array, scale: jax.Array) -> Stream:
    """The stream r + y, for a y [M, D] that no kernel adds: where devices sum it up first.

    Args:
      stream_: r.
      y: float32 [M, D].
      scale: float32 [D] of the norm that comes next.
    """
    values = stream_.values[: stream_.width].T
    return stream(rounded(values.astype(jnp.float32) + y, values.dtype), scale)


def supports(
    m: int, n: int, *, rank: int = 0, is_swiglu: bool = False, device: Device | None = None
) -> str | None:
    """Why this kernel cannot finish a product, or None.

    Args:
      m: rows of x.
      n: rows of W.
      rank: of one part of the branch of LoRA, as `lora.filled_rank` makes it; 0 without one.
      is_swiglu: whether N is gate and up of a SwiGLU.
      device: the device that runs it; None for the current one.
    """
    if m % _columns(m):
        return f"needs M in eights up to 32, then in 32s; got M = {m}"
    if n % (2 * TILE if is_swiglu else TILE):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    used, most = shared_bytes(m, rank, is_swiglu=is_swiglu), most_shared_bytes(device)
    if used > most:
        return (
            f"needs {used} bytes of shared memory of {most} to finish M = {m} rows of "
            f"LoRA of rank {rank}"
        )
    return None


def shared_bytes(m: int, rank: int, *, is_swiglu: bool) -> int:
    """Bytes of shared memory that a block takes: B of its rows, and x A of its rows of x."""
    halves = 2 if is_swiglu else 1
    # Of ranks below a tile a gate and what it lets through share one.
    distinct = halves if rank >= TILE else 1
    return 2 * max(rank, TILE) * (halves * TILE + distinct * _columns(m))


def finish(
    sums: Sums,
    divisor: jax.Array,
    *,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    norm: tuple[Stream, float] | None = None,
    residual: tuple[jax.Array, jax.Array] | None = None,
    is_swiglu: bool = False,
    interpret: bool = False,
) -> jax.Array | Stream:
    """Finishes a product of N columns and M rows.

    Args:
      sums: from `nvfp4_matmul.decode.product`.
      divisor: float32 [N], or fewer of which the first counts, the weight's global scale.
      bias: [N], as all that has an axis N with parts that are filled up to whole tiles.
      branch: LoRA's; given if and only if `sums` has an adapter.
      norm: the stream whose `scaled` was multiplied, and its norm's epsilon; the product is multiplied
        by its unit.
      residual: the stream's values [N, M], to which the product is added, and the float32 scale of the
        norm that comes next, which says how much of N is real.
      is_swiglu: whether the first half of N is the gate and the second half is up.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or [M, N / 2] of a `swiglu`; or the new Stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # This import takes half a second, so it is made only when needed.
    from pallas_kernels.finished_linear import epilogue_kernel

    _, n, m = sums.size
    rank = 0 if branch is None else branch.rank
    if reason := supports(m, n, rank=rank, is_swiglu=is_swiglu):
        raise NotImplementedError(reason)
    operands = {"partials": sums.partials, "divisor": divisor, "bias": bias}
    if branch is not None:
        operands |= {"b": branch.b, "u": sums.adapter}
    if norm is not None:
        operands["squares"] = norm[0].squares
    if residual is not None:
        scale = jnp.pad(residual[1], (0, n - len(residual[1])))
        operands |= {"residual": residual[0], "scale": scale}
    problem = epilogue_kernel.Problem(
        mode="swiglu" if is_swiglu else "plain" if residual is None else "residual",
        sums=sums,
        columns=_columns(m),
        branch=branch,
        norm=norm,
        square_rows=_square_rows(n),
        interpret=interpret,
    )
    results = epilogue_kernel.launch(operands, problem)
    return results[0] if residual is None else Stream(*results, len(residual[1]))


def _columns(m: int) -> int:
    """Rows of x that one block finishes; on an H200 the best of 8, 16 and 32 for a 7B layer."""
    return 8 if m <= 32 else 16 if m <= 64 else 32


def _square_rows(width: int) -> int:
    # `finish` reads them 64 at a time.
    return -(-width // (TILE * TILE)) * TILE
