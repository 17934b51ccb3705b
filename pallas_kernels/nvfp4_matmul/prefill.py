"""The products y and dX for many rows of x (prefill, training) on Hopper, in Pallas Mosaic GPU.

The kernel computes y^T = W x^T, a tile of `64 * warpgroups` rows of W by `rows` rows of x at a time. An `Epilogue` is
computed before a tile leaves the registers. dX = dY W is the same with the axes of W exchanged.
docs/design/kernels.md, "The product for many rows", describes the pipeline.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import linear
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.nvfp4_matmul.prefill_config import (
    Config,
    Tiling,
    pick_config,
    supports,
    tiling_of,
)
from pallas_kernels.nvfp4_matmul.prefill_epilogue import Epilogue


def matmul(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config | None = None,
    *,
    epilogue: Epilogue | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes x @ dequantize(w)^T, and the operations of the epilogue.

    Args:
      x: bfloat16 [M, K].
      w: one [N, K] weight.
      config: the configuration; None for that of `pick_config`.
      epilogue: the operations after the product; None for none.
      interpret: whether to run on a CPU and report data races.

    Returns:
      bfloat16 [M, N].

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    sizes = epilogue.sizes if epilogue else ()
    config = config or pick_config(len(x), *w.shape, sizes=sizes)
    how = {"epilogue": epilogue, "interpret": interpret}
    return _checked(x, w, w.global_scale, config, backward=False, **how)


def backward(
    dy: jax.Array, w: HopperNVFP4, config: Config | None = None, *, interpret: bool = False
) -> jax.Array:
    """Computes dX = dy @ dequantize(w), bfloat16 [M, K], for dy bfloat16 [M, N]; the rest is as for `matmul`."""
    n, k = w.shape
    config = config or pick_config(len(dy), k, n, backward=True)
    if w.is_paired:
        # Put the columns of dY in the order of the rows of W that they are multiplied by.
        dy, w = layout.paired_rows(dy, -1), w.as_it_lies
    divisor = w.global_scale
    if len(divisor) > 1:
        # The sum is over rows with different global scales, so the multiplier must be applied before it.
        dy = (dy.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
        divisor = jnp.ones(1, jnp.float32)
    return _checked(dy, w, divisor, config, backward=True, interpret=interpret)


def _checked(
    x: jax.Array,
    w: HopperNVFP4,
    divisor: jax.Array,
    config: Config,
    *,
    backward: bool,
    epilogue: Epilogue | None = None,
    interpret: bool,
) -> jax.Array:
    m, columns = x.shape
    outputs = w.shape[1] if backward else w.shape[0]
    sizes = epilogue.sizes if epilogue else ()
    reason = supports(outputs, columns, config, backward=backward, sizes=sizes)
    if reason is not None:
        raise NotImplementedError(reason)
    # A bulk copy skips rows beyond the end of an array, so M needs little padding. But a tile must not have more rows
    # than the array, and the interpreter does not skip rows.
    rows = -m % 8 if m >= config.rows and not interpret else -m % config.rows
    x = jnp.pad(x, ((0, rows), (0, -columns % TILE)))
    if len(divisor) > 1:
        divisor = jnp.pad(divisor, (0, -outputs % TILE), constant_values=1)
    if epilogue is not None:
        more, last = -outputs % TILE, epilogue.sizes[-1]
        epilogue = dataclasses.replace(
            epilogue,
            b=jnp.pad(epilogue.b, ((0, more), (0, 0))),
            bias=None if epilogue.bias is None else jnp.pad(epilogue.bias, (0, more)),
            sizes=(*epilogue.sizes[:-1], last + more),
            u=jnp.pad(epilogue.u, ((0, rows), (0, 0))),
            # The kernel reads `unit` for all rows of a tile, also beyond the end of x.
            unit=jnp.pad(epilogue.unit, (0, -m % config.rows)),
        )
    w_rows, steps = w.words.shape[:2][:: -1 if backward else 1]
    tiling = tiling_of(len(x), w_rows, steps, config)
    y = _multiply(x, w, divisor, config, tiling, backward, epilogue, interpret)
    return y[:m, :outputs]


def _multiply(
    x: jax.Array,
    w: HopperNVFP4,
    divisor: jax.Array,
    config: Config,
    tiling: Tiling,
    backward: bool,
    epilogue: Epilogue | None,
    interpret: bool,
) -> jax.Array:
    # Imported here because the import takes half a second.
    from pallas_kernels.nvfp4_matmul import prefill_kernel

    problem = prefill_kernel.Problem(config, tiling, backward, epilogue, w.is_paired, interpret)
    out, shares = prefill_kernel.launch(x, w.words, divisor, problem)
    if shares is None:
        return out
    with jax.named_scope("add_shares"):
        shared_rows = shares.shape[1]
        last, multiplier = shares.sum(0).T[: len(x)], 1 / divisor[-shared_rows:]
        last *= 1 / layout.DECODED_SCALE
        if epilogue is None:
            last = (last * multiplier).astype(jnp.bfloat16)
        else:
            last = _finished(rounded(last, jnp.bfloat16), multiplier, epilogue)
        if w.is_paired:
            return _with_both_ends(out, layout.joined_rows(last, -1))
        return last if out is None else out.at[:, -shared_rows:].set(last)


def _with_both_ends(out: jax.Array | None, last: jax.Array) -> jax.Array:
    """Writes the two halves of `last`'s columns to the ends of the two halves of `out`'s columns.

    Without `out`, returns `last`.
    """
    if out is None:
        return last
    columns, count = out.shape[1] // 2, last.shape[1] // 2
    out = out.at[:, columns - count : columns].set(last[:, :count])
    return out.at[:, -count:].set(last[:, count:])


def _finished(base: jax.Array, multiplier: jax.Array, epilogue: Epilogue) -> jax.Array:
    """Applies an `Epilogue` in XLA to the last columns of N, whose sums were split along K."""
    m, n = base.shape
    first, start, branches = len(epilogue.b) - n, 0, []
    for part, size in enumerate(epilogue.sizes):
        rows, start = slice(max(first, start), start + size), start + size
        if rows.start < rows.stop:
            u = epilogue.u[:, part * TILE : (part + 1) * TILE]
            branches.append((u, epilogue.b[rows].T))
    return linear.finish(
        base.astype(jnp.float32) * multiplier,
        branches,
        unit=epilogue.unit[:m, None],
        bias=None if epilogue.bias is None else epilogue.bias[first:],
        dtype=base.dtype,
    )
