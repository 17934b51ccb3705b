"""The epilogue of a decoding step's products: all operations between two products except attention, in one kernel.

    y = ([sum of parts] * scale + [[U] B]) * unit + bias       U = sum of the parts of x A
    plain       [y]
    residual    r' = [r + y], [r' * scale of the next norm], and sums of r'^2
    swiglu      [silu([gate]) * [up]]

Values in brackets are rounded to bfloat16, as in training. docs/design/kernels.md, "The epilogue", says why RMSNorm is
divided between two kernels. The residual stream is stored transposed, [D, M], like sums of products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.finished_linear.lora import PackedLora
from pallas_kernels.finished_linear.residual_stream import Stream, square_rows
from pallas_kernels.nvfp4_matmul.decode import Sums
from pallas_kernels.nvfp4_matmul.decode_config import most_shared_bytes
from pallas_kernels.nvfp4_matmul.layout import TILE


def supports(m: int, n: int, *, rank: int = 0, is_swiglu: bool = False) -> str | None:
    """Returns why this kernel cannot run after a product, or None if it can.

    Args:
      m: rows of x.
      n: rows of W.
      rank: padded rank of one part of LoRA's branch (`lora.filled_rank`); 0 without LoRA.
      is_swiglu: whether N is gate and up of a SwiGLU.
    """
    if m % _columns(m):
        return f"needs M a multiple of {_columns(m)}; got M = {m}"
    if n % (2 * TILE if is_swiglu else TILE):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    used, most = shared_bytes(m, rank, is_swiglu=is_swiglu), most_shared_bytes()
    if used > most:
        return (
            f"needs {used} bytes of shared memory of {most} to finish M = {m} rows of "
            f"LoRA of rank {rank}"
        )
    return None


def shared_bytes(m: int, rank: int, *, is_swiglu: bool) -> int:
    """Returns the bytes of shared memory that a block takes: B for its rows of W, and x A for its rows of x."""
    halves = 2 if is_swiglu else 1
    # If the rank is less than a tile, gate and up share one tile of x A.
    distinct = halves if rank >= TILE else 1
    return 2 * max(rank, TILE) * (halves * TILE + distinct * _columns(m))


def finish(
    sums: Sums,
    divisor: jax.Array,
    *,
    bias: jax.Array | None = None,
    branch: PackedLora | None = None,
    norm: tuple[Stream, float] | None = None,
    residual: tuple[jax.Array, jax.Array] | None = None,
    is_swiglu: bool = False,
    interpret: bool = False,
) -> jax.Array | Stream:
    """Applies the operations after a product of M rows and N columns. Each part of N is padded to whole tiles.

    Args:
      sums: from `nvfp4_matmul.decode.product`.
      divisor: the weight's global scale, float32 [N]; or of any other size, then its first value is used for all
        rows.
      bias: [N]; or None.
      branch: LoRA's branch; given if and only if `sums` has an adapter.
      norm: the stream whose `scaled` is x of the product, and the epsilon of its norm; the product is multiplied by
        the stream's `unit`. None without a norm.
      residual: the stream's values [N, M], to which the product is added, and the scale of the next norm, float32;
        its length is N without padding. None without a residual.
      is_swiglu: whether the first half of N is the gate and the second half is up.
      interpret: whether to run on a CPU and report data races.

    Returns:
      bfloat16 [M, N], or [M, N / 2] for a SwiGLU; with a residual, the new `Stream`.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import epilogue_kernel

    _, n, m = sums.size
    rank = 0 if branch is None else branch.rank
    if reason := supports(m, n, rank=rank, is_swiglu=is_swiglu):
        raise NotImplementedError(reason)
    scale = None if residual is None else jnp.pad(residual[1], (0, n - len(residual[1])))
    operands = {
        "partials": sums.partials,
        "u": None if branch is None else sums.adapter,
        "divisor": divisor,
        "bias": bias,
        "b": None if branch is None else branch.b,
        "squares": None if norm is None else norm[0].squares,
        "residual": None if residual is None else residual[0],
        "scale": scale,
    }
    problem = epilogue_kernel.Problem(
        mode="swiglu" if is_swiglu else "plain" if residual is None else "residual",
        sums=sums,
        columns=_columns(m),
        branch=branch,
        norm=norm,
        square_rows=square_rows(n),
        interpret=interpret,
    )
    results = epilogue_kernel.launch(operands, problem)
    return results[0] if residual is None else Stream(*results, len(residual[1]))


def _columns(m: int) -> int:
    """Returns the rows of x per block: the fastest of 8, 16 and 32, measured on an H200 with a 7B layer."""
    return 8 if m <= 32 else 16 if m <= 64 else 32
