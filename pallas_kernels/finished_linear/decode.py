"""A linear of a decoding step with the operations around it, in two kernels: the product and its epilogue.

The base weight may be packed or dense bfloat16. For a dense weight XLA computes the product; the epilogue is the
same. If the weight is gate and up with its rows in pairs, one kernel computes everything (`gated`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear import epilogue, gated, gated_config, lora
from pallas_kernels.finished_linear.lora import PackedLora
from pallas_kernels.finished_linear.residual_stream import Stream
from pallas_kernels.nvfp4_matmul import decode, decode_config, decode_plan, dense_tile, layout
from pallas_kernels.nvfp4_matmul.decode import Sums
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4

MAX_M = decode_config.MAX_M


def padded(m: int) -> int:
    """Rounds M up to a number of rows that the kernels support.

    These are 8, 16, 24, 32, 64, 96 or 128, or two to four times 96 or 128.
    """
    if (tiles := decode_config.x_tiles(m)) > 1:
        return m + -m % (decode_config.GRAIN * tiles)
    return m + -m % (8 if m <= 32 else 32)


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    *,
    is_packed: bool,
    rank: int,
    is_swiglu: bool = False,
) -> str | None:
    """Returns why these kernels cannot run a linear on this device, or None if they can.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      is_packed: whether W is packed.
      rank: LoRA's rank; 0 without LoRA.
      is_swiglu: whether the two linears are gate and up of a SwiGLU, which has one output.
    """
    if reason := runtime.unless_hopper():
        return reason
    most = MAX_M * (decode_config.MOST_TILES if is_packed and runtime.decodes_in_tiles() else 1)
    if not 1 <= m <= most:
        return f"needs 1 <= M <= {most}; got M = {m}"
    m, n = padded(m), sum(sizes)
    ranks = lora.filled_rank(rank) if rank else 0
    if is_packed and is_swiglu and runtime.pairs_gates() and layout.can_pair(n, rank):
        return gated_config.supports(m, n, k, rank=ranks)
    whole = sum(map(layout.whole, sizes))
    if reason := epilogue.supports(m, whole, rank=ranks, is_swiglu=is_swiglu):
        return reason
    if not is_packed:
        return None
    config = _config(m, n, k, len(sizes) * ranks)
    return decode_config.supports(m, n, k, config, with_adapter=rank > 0)


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4 | jax.Array,
    *,
    divisor: jax.Array | None = None,
    bias: jax.Array | None = None,
    branch: PackedLora | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    is_swiglu: bool = False,
    config: Config | gated_config.Config | None = None,
    following: tuple[HopperNVFP4 | jax.Array, PackedLora | None] | None = None,
    counters: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array | Stream:
    """Computes y = x W^T + bias + LoRA, with the norm before it and the operations after it (see `epilogue`).

    Args:
      x: bfloat16 [M, K], M as returned by `padded`, K plain or padded with zeros to whole tiles; or a residual
        stream, which is normalized first.
      w: [N, K], packed for Hopper or dense in bfloat16.
      divisor: a packed w's global scale after `sliceable`; None for `w.global_scale`.
      bias: [N]; must be None if the rows of w are in pairs.
      branch: from `lora.pack_lora`.
      eps: epsilon of the norm, if x is a stream.
      residual: a stream to which y is added, and the scale of the next norm, float32 [N]; must be None if the rows
        of w are in pairs.
      is_swiglu: whether y is gate and up, so that the result is silu(gate) * up.
      config: configuration of the packed product; None for the tuned one. For rows in pairs a `gated_config.Config`.
      following: weight and branch of the next linear, for prefetching (`nvfp4_matmul.decode_plan.NextProduct`).
      counters: see `gated.linear`; used only if the rows of w are in pairs.
      interpret: whether to run on a CPU and report data races.

    Returns:
      bfloat16 [M, N]; for a SwiGLU [M, N / 2], padded with zeros to whole tiles; with a residual the new stream.

    Raises:
      ValueError: K of x is not that of w.
      NotImplementedError: the reason that a kernel's `supports` gives, or arguments that rows in pairs do not allow.
    """
    n = w.shape[0]
    values = x.scaled if isinstance(x, Stream) else x
    next_product = None if following is None else _next_product(len(values), *following)
    if isinstance(w, HopperNVFP4) and w.is_paired:
        if bias is not None or residual is not None:
            raise NotImplementedError(
                "rows in pairs are gate and up, with neither bias nor residual"
            )
        if branch is not None and not branch.is_paired:
            raise NotImplementedError("the rows of w are in pairs, those of LoRA's B are not")
        options = {"divisor": divisor, "branch": branch, "eps": eps, "config": config}
        options |= {"following": next_product, "counters": counters, "interpret": interpret}
        return gated.linear(x, w, **options)
    if isinstance(w, HopperNVFP4):
        a = None if branch is None else branch.a
        config = config or _config(len(values), *w.shape, _ranks(branch))
        sums = decode.product(values, w, config, a, next_product, interpret=interpret)
        divisor = w.global_scale if divisor is None else divisor
    else:
        sums = _dense_product(values, w, branch)
        divisor = jnp.full((1,), 1 / layout.DECODED_SCALE)
    # All rows of a tile must belong to one part: to one linear's LoRA, or to one of gate and up.
    sizes = (n // 2, n // 2) if is_swiglu else (n,) if branch is None else branch.sizes
    fill = functools.partial(_filled, sizes=sizes)
    if any(size % TILE for size in sizes[:-1]):
        in_rows = sums.in_rows()
        sums = Sums.of_rows(fill(in_rows.partials[0, :n])[None], in_rows.adapter)
    y = epilogue.finish(
        sums,
        fill(divisor, value=1) if len(divisor) == n else divisor,
        bias=None if bias is None else fill(bias),
        branch=branch,
        norm=(x, eps) if isinstance(x, Stream) else None,
        residual=None if residual is None else (residual[0].values, residual[1]),
        is_swiglu=is_swiglu,
        interpret=interpret,
    )
    return y if is_swiglu or residual is not None else _unfilled(y, sizes)


def _filled(values: jax.Array, sizes: Sequence[int], value: float = 0) -> jax.Array:
    """Pads each part of axis 0 to whole tiles of rows, with `value`."""
    if all(size % TILE == 0 for size in sizes):
        return values
    parts, end = [], 0
    for size in sizes:
        widths = [(0, -size % TILE)] + [(0, 0)] * (values.ndim - 1)
        parts.append(jnp.pad(values[end : end + size], widths, constant_values=value))
        end += size
    return jnp.concatenate(parts)


def _unfilled(y: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """Removes the padding of `_filled` from axis 1."""
    if all(size % TILE == 0 for size in sizes):
        return y
    starts = itertools.accumulate((layout.whole(size) for size in sizes), initial=0)
    parts = [y[:, start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return jnp.concatenate(parts, axis=1)


def sliceable(global_scale: jax.Array) -> jax.Array:
    """Repeats global scales [L, 1] to [L, 64]; scales [L, N] stay as they are.

    A kernel can read a layer's slice in place only if it starts at a multiple of 256 bytes.
    """
    wanted = (len(global_scale), 64)
    return global_scale if global_scale.shape[1] > 1 else jnp.broadcast_to(global_scale, wanted)


def _dense_product(x: jax.Array, w: jax.Array, branch: PackedLora | None) -> Sums:
    x = x[:, : w.shape[1]]

    def times(matrix):
        return jnp.dot(matrix, x.T, preferred_element_type=jnp.float32)[None]

    rows = jnp.pad(times(w), ((0, 0), (0, -len(w) % TILE), (0, 0)))
    return Sums.of_rows(rows, None if branch is None else times(branch.a))


def _next_product(
    m: int, w: HopperNVFP4 | jax.Array, branch: PackedLora | None
) -> decode_plan.NextProduct | None:
    if not isinstance(w, HopperNVFP4):
        return None
    if w.is_paired:
        config = gated_config.pick_config(m, *w.shape, rank=0 if branch is None else branch.rank)
        return None if config is None else gated_config.next_product(w.words, config)
    a = None if branch is None else branch.a
    return decode.next_product(m, w, _config(m, *w.shape, _ranks(branch)), a)


def _ranks(branch: PackedLora | None) -> int:
    """Returns the ranks of all parts of a branch together."""
    return 0 if branch is None else branch.rank * len(branch.sizes)


def _config(m: int, n: int, k: int, ranks: int) -> Config:
    config = decode_config.pick_config(m, n, k, ranks=ranks)
    if not ranks or config.shares:
        return config
    fits = lambda c: decode_config.supports(m, n, k, c, with_adapter=True) is None
    # If one warpgroup's slot is too small for tiles of A, put two warpgroups in a block.
    two = dataclasses.replace(config, warpgroups=2, blocks=-(-config.blocks // 2))
    for choice in (config, two):
        if dense_tile.is_as_wide(choice.warpgroups, choice.step) and fits(choice):
            return choice
    # Otherwise slots are made larger, and fewer of them may fit.
    row_tiles, steps = layout.tiles(n), layout.whole(k) // config.step
    one = dataclasses.replace(config, warpgroups=1, blocks=min(config.blocks, row_tiles * steps))
    fewer = lambda c: (dataclasses.replace(c, stages=s) for s in range(c.stages, 1, -1))
    return next(filter(fits, itertools.chain(*map(fewer, (config, two, one)))), config)
