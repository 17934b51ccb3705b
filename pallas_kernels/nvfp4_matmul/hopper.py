"""The product for few rows of x (decoding) on Hopper, in Pallas Mosaic GPU.

W is the operand that `wgmma` takes from registers, 64 rows at a time, x^T the one from shared
memory: y^T = W x^T, with M in the place of an instruction's N. One kernel serves all shapes. Its
work is a list of units, a tile of `64 * warpgroups` rows by `step` columns each, ordered by tile,
then by column; every block takes an equal run of it (stream-K; Osama et al., 2023). With as many
blocks as the card has multiprocessors the run goes over several tiles, which suits wide matrices;
with a few times as many blocks as tiles it is a plain split along K, which suits narrow ones.

    block      all warpgroups share x; each decodes and multiplies its own 64 rows of W

      warpgroup 0    wait full | decode, wgmma | leave the last slot | ... | refill the last slot
      warpgroup 1    wait full | decode, wgmma | leave the last slot | ...
      ...

    slot       `step` columns of x [M, step] and of W [warpgroups, step / 64, 3, 192 words];
               `stages` of them, brought by bulk copies that warpgroup 0 starts

A product runs while the next tile is decoded, so a slot is left when the first product after it has
been issued, and refilled at the end of that unit, when the other warpgroups have most likely left
it too. There is no warpgroup for the copies alone: all registers go to those that multiply.

Sums over a part of K are written out in float32 and added up outside, where XLA fuses that with the
scaling and with what follows. Or, if `fused`, in the kernel: blocks take their units from the last
to the first, so the first thing a block does is the beginning of a tile whose end belongs to the
next block. It leaves that sum in memory and raises a semaphore; the next block comes to the tile's
end last of all, adds what it finds and writes bfloat16. A block waits only for blocks before it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4

MAX_M = 128
# What one block may use on compute capability 9.0, less a little for barriers.
SHARED_BYTES = 232448 - 1024
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      warpgroups: of a block, 64 rows of W each; 1 to 4.
      step: columns in one slot; 64, 128 or 256.
      stages: slots, 2 or more.
      blocks: among which the work is divided.
      fused: whether parts of a tile are added up in the kernel; worth it for few parts.
    """

    warpgroups: int
    step: int
    stages: int
    blocks: int
    fused: bool = False

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.step not in (64, 128, 256):
            raise ValueError(f"step must be 64, 128 or 256; got {self.step}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more; got {self.stages}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which block does what: `units` = tiles x steps, in equal runs.

    Block b takes units b * units // blocks up to (b + 1) * units // blocks. Its sum over a part of
    tile t goes to slot b - first_block(t) of the partial sums, unless they are added up in the kernel.
    """

    tiles: int
    steps: int
    blocks: int

    @property
    def units(self) -> int:
        return self.tiles * self.steps

    def start(self, block):
        """First unit of a block, a number or a traced integer."""
        return block * self.units // self.blocks

    def first_block(self, tile):
        """Block that has the first unit of a tile."""
        return ((tile * self.steps + 1) * self.blocks - 1) // self.units

    @functools.cached_property
    def parts(self) -> np.ndarray:
        """Number of blocks that share each tile: [tiles]."""
        tile = np.arange(self.tiles)
        last_block = ((tile + 1) * self.steps * self.blocks - 1) // self.units
        return last_block - self.first_block(tile) + 1


def supports(m: int, n: int, k: int, config: Config) -> str | None:
    """Why this kernel cannot run a problem with this configuration, or None."""
    if not 1 <= m <= MAX_M:
        return f"needs 1 <= M <= {MAX_M}; got M = {m}"
    row_tiles, columns = layout.tiles(n), layout.tiles(k) * TILE
    if row_tiles % config.warpgroups:
        return f"needs N of whole {TILE * config.warpgroups}-row tiles; got N = {n}"
    if columns % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    units = row_tiles // config.warpgroups * (columns // config.step)
    if config.blocks > units:
        return f"has {units} units of work for {config.blocks} blocks"
    if (used := shared_bytes(m, config)) > SHARED_BYTES:
        return f"needs {used} bytes of shared memory of {SHARED_BYTES}"
    return None


def most_parts(n: int, k: int, config: Config) -> int:
    """Into how many parts a sum over K is divided at most."""
    return int(_plan(n, k, config).parts.max())


def _plan(n: int, k: int, config: Config) -> Plan:
    columns = layout.tiles(k) * TILE
    return Plan(layout.tiles(n) // config.warpgroups, columns // config.step, config.blocks)


def matmul(x: jax.Array, w: HopperNVFP4, config: Config, *, interpret: bool = False) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16.

    Args:
      x: bfloat16 [M, K], M <= 128.
      w: an [N, K] weight without stacked axes.
      config: see `tuning.pick_config`.
      interpret: run on a CPU, and report data races; parts are then added up outside.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    m, k = x.shape
    n, _ = w.shape
    if reason := supports(m, n, k, config):
        raise NotImplementedError(reason)
    plan = _plan(n, k, config)
    # `wgmma` takes M in eights; K is padded as the weight is.
    x = jnp.pad(x, ((0, -m % 8), (0, -k % TILE)))
    if config.fused and not interpret:
        return _launch(x, w, config, plan, interpret=False)[:m, :n]
    config = dataclasses.replace(config, fused=False)
    partials = _launch(x, w, config, plan, interpret=interpret)
    with jax.named_scope("reduce"):
        used = np.repeat(plan.parts, TILE * config.warpgroups)[:, None]
        total = partials[0]
        for slot in range(1, plan.parts.max()):
            total += jnp.where(slot < used, partials[slot], 0)
        scale = w.multiplier / layout.DECODED_SCALE
        return (total.T[:m, :n] * scale).astype(x.dtype)


def shared_bytes(m: int, config: Config) -> int:
    """Bytes of shared memory that a block's slots take."""
    rows = m + -m % 8
    per_slot = config.step * rows * 2 + config.warpgroups * config.step // TILE * _TILE_BYTES
    return config.stages * per_slot


def _launch(
    x: jax.Array, w: HopperNVFP4, config: Config, plan: Plan, *, interpret: bool
) -> jax.Array:
    """The kernel's result.

    Returns:
      If fused, y in bfloat16 [M, N]. Otherwise unscaled y^T in parts, float32 [parts, N, M], of which
      a tile fills its `plan.parts`. N is padded to whole tiles.
    """
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.nvfp4_matmul import decoder, exchange

    m, n = x.shape[0], w.words.shape[0] * TILE
    warpgroups, step, stages = config.warpgroups, config.step, config.stages
    chunks = step // TILE
    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))

    def kernel(x_gmem, w_gmem, divisor_gmem, out_gmem, *refs):
        parts_gmem, refs = (refs[0], refs[1:]) if config.fused else (None, refs)
        x_smem, w_smem, full, empty, *decoded_smem = refs
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        start, stop = plan.start(block), plan.start(block + 1)

        def slot_of(unit):
            return lax.rem(stop - 1 - unit, stages)

        def fetch(unit):
            slot = slot_of(unit)
            tile, at = unit // plan.steps, lax.rem(unit, plan.steps)
            plgpu.copy_gmem_to_smem(
                w_gmem.at[pl.ds(tile * warpgroups, warpgroups), pl.ds(at * chunks, chunks)],
                w_smem.at[slot],
                full.at[slot],
            )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[:, pl.ds(at * step, step)], x_smem.at[slot], full.at[slot]
            )

        def decoded(tile, loaded):
            if not interpret:
                return decoder.convert(*loaded)
            # Interpreted `wgmma` takes no operand from registers.
            a = decoded_smem[0].at[group]
            a[...] = decoder.decode_words(tile[...])
            plgpu.commit_smem()
            return a

        def multiply(unit, acc):
            slot = slot_of(unit)
            # What goes into the slot of the unit before this one.
            ahead = unit + 1 - stages
            previous = empty.at[slot_of(ahead)]
            is_refilled = (unit < stop - 1) & (ahead >= start)
            tiles = [w_smem.at[slot, group, chunk] for chunk in range(chunks)]
            load = (lambda tile: None) if interpret else decoder.load
            with jax.named_scope("load"):
                plgpu.barrier_wait(full.at[slot])
                loaded = load(tiles[0])
            for chunk, tile in enumerate(tiles):
                # The next tile is on its way while this one is decoded.
                following = load(tiles[chunk + 1]) if chunk + 1 < chunks else None
                with jax.named_scope("decode"):
                    a = decoded(tile, loaded)
                with jax.named_scope("mma"):
                    plgpu.wgmma(acc, a, x_smem.at[slot, :, pl.ds(chunk * TILE, TILE)].T)
                    # One product runs while the next tile is decoded.
                    plgpu.wgmma_wait(0 if interpret else 1)
                loaded = following
                if chunk == 0:
                    pl.when(is_refilled)(lambda: plgpu.barrier_arrive(previous))

            @pl.when((group == 0) & is_refilled)
            def _refill():
                plgpu.barrier_wait(previous)
                fetch(ahead)

            # ptxas does not see across the loop's edge that registers are being read: without this
            # the next tile overwrote them (seen with steps of 64).
            plgpu.wgmma_wait(0)

        @pl.when(group == 0)
        def _fill():
            for stage in range(stages):
                unit = stop - 1 - stage
                pl.when(unit >= start)(lambda unit=unit: fetch(unit))

        def store(tile, total):
            rows = pl.ds((tile * warpgroups + group) * TILE, TILE)
            if not config.fused:
                out_gmem[block - plan.first_block(tile), rows, :] = total
                return
            semaphores = pl.get_global(plgpu.SemaphoreType.REGULAR((plan.blocks * warpgroups,)))
            has_end = stop >= (tile + 1) * plan.steps

            @pl.when(jnp.logical_not(has_end))
            def _leave():
                mine = block * warpgroups + group
                exchange.leave(total, parts_gmem.at[mine], semaphores.at[mine])

            @pl.when(has_end)
            def _finish():
                def add(i, total):
                    other = (block - 1 - i) * warpgroups + group
                    return exchange.join(total, parts_gmem.at[other], semaphores.at[other])

                y = lax.fori_loop(0, block - plan.first_block(tile), add, total)
                if divisor_gmem.shape == (1,):
                    scale = 1 / divisor_gmem[0]
                else:
                    of_rows = plgpu.Layout.WGMMA.reduce(1)
                    divisor = plgpu.load(divisor_gmem, rows, layout=of_rows, optimized=False)
                    scale = lax.broadcast_in_dim(1 / divisor, total.shape, (0,))
                y = y * (scale / layout.DECODED_SCALE)
                exchange.store_transposed(y.astype(jnp.bfloat16), out_gmem.at[:, rows])

        first_tile, last_tile = start // plan.steps, (stop - 1) // plan.steps

        @pl.loop(0, last_tile - first_tile + 1)
        def _tiles(back):
            tile = last_tile - back
            first = lax.max(start, tile * plan.steps)
            last = lax.min(stop, (tile + 1) * plan.steps)

            def sum_over_columns(acc):
                pl.loop(0, last - first)(lambda i: multiply(last - 1 - i, acc))
                return acc[...]

            total = pl.run_scoped(sum_over_columns, plgpu.ACC((TILE, m), jnp.float32))
            with jax.named_scope("store"):
                store(tile, total)

    if config.fused:
        parts = jax.ShapeDtypeStruct((plan.blocks * warpgroups, TILE * m), jnp.float32)
        out_type = (jax.ShapeDtypeStruct((m, n), jnp.bfloat16), parts)
    else:
        out_type = (jax.ShapeDtypeStruct((int(plan.parts.max()), n, m), jnp.float32),)
    divisor = w.global_scale
    if len(divisor) > 1:
        divisor = jnp.pad(divisor, (0, n - len(divisor)), constant_values=1)
    decoded_type = plgpu.SMEM((warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled)
    launched = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((stages, m, step), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, warpgroups, chunks, *layout.TILE_SHAPE), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *([decoded_type] if interpret else []),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=runtime.interpret_params() if interpret else None,
        kernel_name="nvfp4_matmul_sm90",
    )
    return launched(x, w.words, divisor)[0]
