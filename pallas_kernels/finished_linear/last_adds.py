"""A linear of a decoding step in one kernel: whoever stores the last part of a tile adds up its parts and finishes it.

The product is that of `nvfp4_matmul.decode`, with the same plan: a block takes an equal run of all units, and stores its
sums over a part of K in device memory. What `epilogue` does in a second kernel, the product's own warpgroups do here:

    a warpgroup     units of tile t | store the part, count | units of tile t + 1 | store, count | ...
    if it is last                                           | parts, x A, B; branch, norm, bias or residual; store

There is a counter for each 64 rows of W. The last warpgroup to be counted sees what the others have stored, and sets
the counter back to 0. It adds up the parts in their order, so the bits are those of the two kernels, and do not depend
on who is last. It finishes `columns` rows of x at a time, as many as registers hold.

The first blocks of the grid multiply x by A. In the same way, the last one of a tile of ranks adds up its sums, stores
x A in bfloat16, and signals. Whoever finishes a tile of W waits for the signals of all tiles of ranks. There is no
deadlock: blocks of A start first, and wait for no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.finished_linear import epilogue
from pallas_kernels.finished_linear.epilogue import Stream
from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.mosaic import fragments
from pallas_kernels.nvfp4_matmul import config as configs
from pallas_kernels.nvfp4_matmul import decode, layout
from pallas_kernels.nvfp4_matmul.config import Config
from pallas_kernels.nvfp4_matmul.decode import Sums, Upcoming
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device

# The first of the tiles' counters, those of A before those of W.
TILE_COUNTERS = 2
# Shared memory in which a warpgroup adds up the 64 rows of a tile, and its flags.
_OWN_BYTES = 2048 + 8
# Registers of a multiprocessor, the most of a thread, and those that a thread needs beside the parts.
_REGISTERS, _MOST_REGISTERS, _OTHER_REGISTERS = 65536, 255, 80


def counters_for(sizes: Sequence[int], rank: int) -> int:
    """Number of counters that a linear needs.

    Args:
      sizes: rows of W of each joined linear.
      rank: padded rank of one linear's branch (`lora.filled_rank`); 0 without LoRA.
    """
    return TILE_COUNTERS + layout.tiles(len(sizes) * rank) + layout.tiles(sum(sizes))


def parts_at_once(columns: int, config: Config, device: Device | None = None) -> int:
    """How many sums of [64, columns] the registers of a warpgroup hold, if all blocks run that two kernels would run."""
    resident = -(-config.blocks // (device or runtime.device()).processors)
    registers = min(_MOST_REGISTERS, _REGISTERS // (128 * config.warpgroups * resident))
    # A thread holds half a value of each column.
    return max(1, 2 * (registers - _OTHER_REGISTERS) // columns)


def columns(m: int, n: int, config: Config, device: Device | None = None) -> int:
    """Rows of x that a warpgroup finishes at a time: the most of 8, 16 and 32 whose parts its registers hold."""
    tiles = layout.tiles(n) // config.warpgroups
    parts = -(-config.blocks // tiles) + 1
    fits = lambda size: m % size == 0 and parts <= parts_at_once(size, config, device)
    return next((size for size in (32, 16) if fits(size)), 8)


def supports(
    m: int,
    sizes: Sequence[int],
    k: int,
    config: Config,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> str | None:
    """Why this kernel cannot run a linear, or None.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      config: how the product is divided; see `fitted`.
      rank: padded rank of one linear's branch (`lora.filled_rank`); 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    if m % 8:
        return f"needs M a multiple of 8; got M = {m}"
    if any(size % TILE for size in sizes[:-1]):
        return f"needs parts of whole tiles of 64 rows; got N = {tuple(sizes)}"
    asked = {"with_adapter": rank > 0, "device": device}
    if reason := configs.supports(m, sum(sizes), k, config, **asked):
        return reason
    used, most = (
        shared_bytes(m, sum(sizes), k, config, rank=rank, device=device),
        configs.most_shared_bytes(device),
    )
    if used > most:
        return (
            f"needs {used} bytes of shared memory of {most} for slots, and B and U of rank {rank}"
        )
    return None


def shared_bytes(
    m: int, n: int, k: int, config: Config, *, rank: int, device: Device | None = None
) -> int:
    """Bytes of shared memory that a block takes: slots, and what each warpgroup has for finishing a tile."""
    slots = configs.shared_bytes(m, config, adapter_k=k if rank else None)
    of_branch = 2 * max(rank, TILE) * (TILE + columns(m, n, config, device)) if rank else 0
    return slots + config.warpgroups * (of_branch + _OWN_BYTES)


def fitted(
    m: int,
    sizes: Sequence[int],
    k: int,
    config: Config,
    *,
    rank: int = 0,
    device: Device | None = None,
) -> Config | None:
    """The configuration of two kernels with as many slots as shared memory has room for.

    None if none fits, or if fewer blocks would run at the same time than in two kernels.

    Args:
      m: rows of x.
      sizes: rows of W of each joined linear.
      k: columns of x and W.
      config: the product's configuration in two kernels.
      rank: padded rank of one linear's branch; 0 without LoRA.
      device: the device that runs it; None for the current one.
    """
    resident = -(-config.blocks // (device or runtime.device()).processors)
    # The card reserves 1 KiB of a multiprocessor's shared memory for each block.
    each = configs.most_shared_bytes(device) // resident - (1024 if resident > 1 else 0)

    def fits(choice: Config) -> bool:
        asked = {"rank": rank, "device": device}
        is_supported = supports(m, sizes, k, choice, **asked) is None
        return is_supported and shared_bytes(m, sum(sizes), k, choice, **asked) <= each

    fewer = (dataclasses.replace(config, stages=s) for s in range(config.stages, 1, -1))
    return next(filter(fits, fewer), None)


def linear(
    x: jax.Array | Stream,
    w: HopperNVFP4,
    *,
    config: Config,
    divisor: jax.Array | None = None,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    eps: float | None = None,
    residual: tuple[Stream, jax.Array] | None = None,
    following: Upcoming | None = None,
    counters: jax.Array | None = None,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array | Stream:
    """y = x W^T + bias + LoRA's branches, with the norm before and the residual after; see `decode.linear`.

    Args:
      x: bfloat16 [M, K], or a residual stream, which is normalized first. K is plain or padded with zeros to whole
        tiles.
      w: [N, K].
      config: how to divide the product; see `fitted`.
      divisor: w's global scale, float32 [N], or of any other size, whose first value is used for all; None for
        `w.global_scale`.
      bias: [N]; or None.
      branch: from `lora.pack_branch`; None without LoRA.
      eps: epsilon of the norm, if x is a stream.
      residual: a stream to which y is added, and the scale of the next norm, float32 [N]; or None.
      following: the next product, whose first words are prefetched.
      counters: zeros, int32 [`counters_for` or more]; the kernel sets them back to 0. Pass the same array for all layers
        to save a kernel per layer; None makes a new one.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or the new stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
      ValueError: there are not enough counters.
    """
    # Imported here because the import takes half a second.
    from pallas_kernels.finished_linear import epilogue_kernel, last_adds_kernel

    values = x.scaled if isinstance(x, Stream) else x
    (n, k), m, rank = w.shape, len(values), 0 if branch is None else branch.rank
    sizes = (n,) if branch is None else branch.sizes
    if reason := supports(m, sizes, k, config, rank=rank, device=device):
        raise NotImplementedError(reason)
    wanted = counters_for(sizes, rank)
    counters = jnp.zeros((wanted,), jnp.int32) if counters is None else counters
    if len(counters) < wanted:
        raise ValueError(f"needs {wanted} counters for N = {n}; got {len(counters)}")
    norm = (x, eps) if isinstance(x, Stream) else None
    values_of = None if residual is None else (residual[0].values, residual[1])
    a = None if branch is None else branch.a
    operands, product = decode.described(
        values, w, config, a, following, device=device, interpret=interpret
    )
    whole = layout.whole(n)
    parts = (product.plan.most_parts, *fragments.shape(whole, m))
    result = epilogue_kernel.Problem(
        mode="plain" if residual is None else "residual",
        sums=Sums(
            jax.ShapeDtypeStruct(parts, jnp.float32), product.plan, TILE * config.warpgroups, None
        ),
        columns=columns(m, n, config, device),
        branch=branch,
        norm=norm,
        square_rows=epilogue.square_rows(whole),
        interpret=interpret,
    )
    divisor = w.global_scale if divisor is None else divisor
    fill = lambda of_rows, value=0: jnp.pad(of_rows, (0, whole - n), constant_values=value)
    around = epilogue.operands_around(
        whole,
        fill(divisor, 1) if len(divisor) == n else divisor,
        bias=None if bias is None else fill(bias),
        branch=branch,
        norm=norm,
        residual=values_of,
    )
    at_once = parts_at_once(result.columns, config, device)
    problem = last_adds_kernel.Problem(product, result, at_once)
    found = last_adds_kernel.launch(
        operands,
        {**around, "counters": counters},
        problem,
        name=f"nvfp4_last_adds_sm90_{whole}x{k}",
    )
    return found[0][:, :n] if residual is None else Stream(*found, len(residual[1]))
