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
scaling and with what follows.
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
    """

    warpgroups: int
    step: int
    stages: int
    blocks: int

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
    tile t goes to slot b - first_block(t) of the partial sums.
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


def matmul(x: jax.Array, w: HopperNVFP4, config: Config, *, interpret: bool = False) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16.

    Args:
      x: bfloat16 [M, K], M <= 128.
      w: an [N, K] weight without stacked axes.
      config: see `tuning.pick_config`.
      interpret: run on a CPU, and report data races.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    m, k = x.shape
    n, _ = w.shape
    if reason := supports(m, n, k, config):
        raise NotImplementedError(reason)
    row_tiles, column_tiles = w.words.shape[:2]
    plan = Plan(row_tiles // config.warpgroups, column_tiles * TILE // config.step, config.blocks)
    # `wgmma` takes M in eights; K is padded as the weight is.
    x = jnp.pad(x, ((0, -m % 8), (0, -k % TILE)))
    partials = _partial_sums(x, w.words, config, plan, interpret)
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


def _partial_sums(
    x: jax.Array, words: jax.Array, config: Config, plan: Plan, interpret: bool
) -> jax.Array:
    """Unscaled y^T in parts: float32 [parts, N, M], of which a tile fills its `plan.parts`."""
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.nvfp4_matmul import decoder

    m = x.shape[0]
    warpgroups, step, stages = config.warpgroups, config.step, config.stages
    chunks = step // TILE
    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))

    def kernel(x_gmem, w_gmem, out_gmem, x_smem, w_smem, full, empty, *decoded_smem):
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        start, stop = plan.start(block), plan.start(block + 1)

        def fetch(unit):
            slot = lax.rem(unit - start, stages)
            tile, at = unit // plan.steps, lax.rem(unit, plan.steps)
            plgpu.copy_gmem_to_smem(
                w_gmem.at[pl.ds(tile * warpgroups, warpgroups), pl.ds(at * chunks, chunks)],
                w_smem.at[slot],
                full.at[slot],
            )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[:, pl.ds(at * step, step)], x_smem.at[slot], full.at[slot]
            )

        def multiply(unit, acc):
            slot = lax.rem(unit - start, stages)
            # What goes into the slot of the unit before this one.
            ahead = unit - 1 + stages
            previous = empty.at[lax.rem(ahead - start, stages)]
            is_refilled = (unit > start) & (ahead < stop)
            with jax.named_scope("load"):
                plgpu.barrier_wait(full.at[slot])
            for chunk in range(chunks):
                tile = w_smem.at[slot, group, chunk]
                with jax.named_scope("decode"):
                    if interpret:
                        # Interpreted `wgmma` takes no operand from registers.
                        a = decoded_smem[0].at[group]
                        a[...] = decoder.decode_words(tile[...])
                        plgpu.commit_smem()
                    else:
                        a = decoder.decode(tile)
                with jax.named_scope("mma"):
                    plgpu.wgmma(acc, a, x_smem.at[slot, :, pl.ds(chunk * TILE, TILE)].T)
                    # One product runs while the next tile is decoded.
                    plgpu.wgmma_wait(0 if interpret else 1)
                if chunk == 0:
                    pl.when(is_refilled)(lambda: plgpu.barrier_arrive(previous))

            @pl.when((group == 0) & is_refilled)
            def _refill():
                plgpu.barrier_wait(previous)
                fetch(ahead)

        @pl.when(group == 0)
        def _fill():
            for stage in range(stages):
                pl.when(start + stage < stop)(lambda stage=stage: fetch(start + stage))

        @pl.loop(start // plan.steps, (stop - 1) // plan.steps + 1)
        def _tiles(tile):
            first = lax.max(start, tile * plan.steps)
            last = lax.min(stop, (tile + 1) * plan.steps)

            def sum_over_columns(acc):
                pl.loop(first, last)(lambda unit: multiply(unit, acc))
                return acc[...]

            total = pl.run_scoped(sum_over_columns, plgpu.ACC((TILE, m), jnp.float32))
            with jax.named_scope("store"):
                rows = pl.ds((tile * warpgroups + group) * TILE, TILE)
                out_gmem[block - plan.first_block(tile), rows, :] = total

    decoded = plgpu.SMEM((warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (int(plan.parts.max()), words.shape[0] * TILE, m), jnp.float32
        ),
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((stages, m, step), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, warpgroups, chunks, *layout.TILE_SHAPE), jnp.int32),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            *([decoded] if interpret else []),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=runtime.interpret_params() if interpret else None,
        kernel_name="nvfp4_matmul_sm90",
    )(x, words)
