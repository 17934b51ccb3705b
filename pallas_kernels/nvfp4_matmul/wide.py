"""The product for many rows of x (prefill, training) on Hopper, in Pallas Mosaic GPU.

As in `hopper`, W is the operand that `wgmma` takes from registers and x^T the one from shared memory,
so that a weight is unpacked in the tile that needs it and nowhere else: y^T = W x^T. A block sums a
tile of `64 * warpgroups` rows of W by `rows` rows of x over all of K, scales it, and leaves it
transposed in shared memory, from where a bulk copy takes it to y while the next tile is summed.

    block      all warpgroups share x; each decodes and multiplies its own 64 rows of W

      warpgroup 0    issue wgmma | wait full, decode the next tile | wait for wgmma | leave the slot
      warpgroup 1    issue wgmma | wait full, decode the next tile | wait for wgmma | leave the slot
      producer       wait empty, refill | wait empty, refill | ...

    slot       64 columns of x [rows, 64] and of W [warpgroups, 3, 192 words]; `stages` of them

Where a tile of x is so large that the accumulators leave no registers for a producer, warpgroup 0
starts the copies: there the products take longer than all else. Two blocks may form a cluster that
shares a tile of x: each brings half of it to both.

Block b takes tiles b, b + blocks, ...: those in work at one time span up to `band` tiles of x and as many
of W as that leaves, and so find each other's operands in the L2.
"""

import dataclasses
from math import inf

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import hopper, layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4

MAX_ROWS = 256
# 168 registers a thread, of which a tile of 160 rows takes 80 for its sums and decoding about 70.
MOST_WITH_PRODUCER = 160
# Of an H200; other Hopper cards have as many or a few less.
_MULTIPROCESSORS = 132
# Most rows of a tile for eight slots.
_DEEP = 152
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      rows: of x in a tile; 8 to 256 in eights.
      warpgroups: of a block, 64 rows of W each; 1 to 3.
      stages: slots, 2 or more.
      band: most tiles of x that are in work at one time.
      cluster: blocks that share a tile of x, each with rows of W of its own; 1 or 2.
      producer: whether the copies have a warpgroup of their own.
    """

    rows: int
    warpgroups: int = 2
    stages: int = 4
    band: int = 12
    cluster: int = 1
    producer: bool = False

    def __post_init__(self):
        if self.rows % 8 or not 8 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be 8 to {MAX_ROWS} in eights; got {self.rows}")
        if not 1 <= self.warpgroups <= 3:
            raise ValueError(f"warpgroups must be 1 to 3; got {self.warpgroups}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more; got {self.stages}")
        if self.band < 1:
            raise ValueError(f"band must be 1 or more; got {self.band}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2; got {self.cluster}")
        if self.rows % (8 * self.cluster):
            raise ValueError(f"rows must be in sixteens for two blocks; got {self.rows}")
        if self.producer and (self.rows > MOST_WITH_PRODUCER or self.warpgroups > 2):
            raise ValueError(
                f"a producer leaves registers for {MOST_WITH_PRODUCER} rows and 2 warpgroups; "
                f"got {self.rows} and {self.warpgroups}"
            )


def supports(n: int, config: Config) -> str | None:
    """Why this kernel cannot run a problem of N rows of W with this configuration, or None."""
    rows = config.warpgroups * config.cluster
    if layout.tiles(n) % rows:
        return f"needs N of whole {TILE * rows}-row tiles; got N = {n}"
    if (used := shared_bytes(config)) > hopper.SHARED_BYTES:
        return f"needs {used} bytes of shared memory of {hopper.SHARED_BYTES}"
    return None


def pick_config(m: int, n: int) -> Config:
    """The tile whose waves of blocks take least time.

    All blocks wait for the last wave. Measured on an H200, 64 columns of a tile take 261, 297, 351 and
    399 ns at 64, 88, 128 and 152 rows with a producer, which is a line, and 612 ns at 256 rows
    without. Sizes between run no slower while a block has one tile, but did where it had several, and
    are left out there.
    """
    warpgroups = 2 - layout.tiles(n) % 2
    row_tiles = layout.tiles(n) // warpgroups

    def cost(rows):
        waves = -(-(-(-m // rows) * row_tiles) // _MULTIPROCESSORS)
        if rows <= _DEEP:
            return waves * (165 + 1.5 * rows)
        return waves * max(270 + 1.15 * rows, 2.4 * rows) if waves == 1 or rows == MAX_ROWS else inf

    most = min(MAX_ROWS, m + -m % 8)
    rows = min(range(most, min(most, 64) - 8, -8), key=cost)
    cluster = 2 if rows == MAX_ROWS and m >= 1024 and row_tiles % 2 == 0 else 1
    if rows <= _DEEP:
        return Config(rows, warpgroups, 8, producer=True)
    fits = lambda stages: shared_bytes(Config(rows, warpgroups, stages)) <= hopper.SHARED_BYTES
    return Config(rows, warpgroups, max(filter(fits, range(4, 8))), cluster=cluster)


def shared_bytes(config: Config) -> int:
    """Bytes of shared memory that a block's slots and its result take."""
    slot = config.rows * TILE * 2 + config.warpgroups * _TILE_BYTES
    return config.stages * slot + config.warpgroups * config.rows * TILE * 2


def matmul(
    x: jax.Array, w: HopperNVFP4, config: Config | None = None, *, interpret: bool = False
) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16.

    Args:
      x: bfloat16 [M, K].
      w: an [N, K] weight without stacked axes.
      config: by default that of `pick_config`.
      interpret: run on a CPU, and report data races.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    m, k = x.shape
    n, _ = w.shape
    config = config or pick_config(m, n)
    if reason := supports(n, config):
        raise NotImplementedError(reason)
    # Bulk copies leave out what lies beyond an array, but a tile must not be longer than that, and the
    # interpreter knows no such thing.
    rows = -m % 8 if m >= config.rows and not interpret else -m % config.rows
    x = jnp.pad(x, ((0, rows), (0, -k % TILE)))
    divisor = w.global_scale
    if len(divisor) > 1:
        divisor = jnp.pad(divisor, (0, -n % TILE), constant_values=1)
    return _matmul(x, w.words, divisor, config, interpret)[:m, :n]


def _matmul(
    x: jax.Array, words: jax.Array, divisor: jax.Array, config: Config, interpret: bool
) -> jax.Array:
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.nvfp4_matmul import decoder

    rows, warpgroups, stages = config.rows, config.warpgroups, config.stages
    cluster, producer, steps = config.cluster, config.producer, words.shape[1]
    x_tiles, w_tiles = -(-len(x) // rows), len(words) // (warpgroups * cluster)
    # Whole bands: in a kernel a division by what is not a constant takes a while.
    band = next(band for band in range(config.band, 0, -1) if x_tiles % band == 0)
    tiles = x_tiles * w_tiles
    blocks = min(_MULTIPROCESSORS // cluster, tiles)
    divide = lambda a, b: (lax.div(a, b), lax.rem(a, b))

    def kernel(x_gmem, w_gmem, divisor_gmem, out_gmem, x_smem, w_smem, out_smem, *rest):
        full, empty, *decoded_smem = rest
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        rank = lax.axis_index("rank")
        turns = lax.div(tiles - block + blocks - 1, blocks)
        units = turns * steps

        def place(turn):
            """Tiles of x and of W: down a band of x first, then on to the next rows of W."""
            w_tile, at = divide(block + turn * blocks, band)
            bands, w_tile = divide(w_tile, w_tiles)
            return bands * band + at, w_tile * cluster + rank

        def fetch(unit):
            turn, at = divide(unit, steps)
            (x_tile, w_tile), slot = place(turn), lax.rem(unit, stages)
            plgpu.copy_gmem_to_smem(
                w_gmem.at[pl.ds(w_tile * warpgroups, warpgroups), at],
                w_smem.at[slot],
                full.at[slot],
            )
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(x_tile * rows, rows), pl.ds(at * TILE, TILE)],
                x_smem.at[slot],
                full.at[slot],
                collective_axes=None if interpret or cluster == 1 else "rank",
            )

        def decoded(unit):
            """A unit's tile, once it has come."""
            slot = lax.rem(unit, stages)
            with jax.named_scope("load"):
                plgpu.barrier_wait(full.at[slot])
            with jax.named_scope("decode"):
                tile = w_smem.at[slot, group]
                return decoder.decode_words(tile[...]) if interpret else decoder.decode(tile)

        def multiply(unit, acc, a, meanwhile):
            slot, ahead = lax.rem(unit, stages), unit - 1 + stages
            with jax.named_scope("mma"):
                if interpret:
                    # Interpreted `wgmma` takes no operand from registers.
                    decoded_smem[0][group] = a
                    plgpu.commit_smem()
                    a = decoded_smem[0].at[group]
                plgpu.wgmma(acc, a, x_smem.at[slot].T)
            result = meanwhile()

            if not producer:

                @pl.when((group == 0) & (unit > 0) & (ahead < units))
                def _refill():
                    slot = lax.rem(ahead, stages)
                    plgpu.barrier_wait(empty.at[slot])
                    fetch(ahead)

            plgpu.wgmma_wait(0)
            if not interpret:
                _keep_until_here(a)
            pl.when(unit + stages < units)(lambda: plgpu.barrier_arrive(empty.at[slot]))
            return result

        def fill():
            for stage in range(stages):
                pl.when(stage < units)(lambda stage=stage: fetch(jnp.int32(stage)))

        def fetch_all():
            fill()

            @pl.loop(stages, lax.max(units, stages))
            def _refill(unit):
                plgpu.barrier_wait(empty.at[lax.rem(unit, stages)])
                fetch(unit)

        def one_tile(turn):
            x_tile, w_tile = place(turn)

            def sum_over_columns(acc):
                first, last = turn * steps, (turn + 1) * steps - 1
                step = lambda unit, a: multiply(unit, acc, a, lambda: decoded(unit + 1))
                # Two at a time, so that a tile's registers need not be moved for the next turn.
                pairs = (steps - 1) // 2
                two = lambda i, a: step(first + 2 * i + 1, step(first + 2 * i, a))
                a = lax.fori_loop(0, pairs, two, decoded(first))
                if steps % 2 == 0:
                    a = step(last - 1, a)
                multiply(last, acc, a, lambda: None)
                return acc[...]

            total = pl.run_scoped(sum_over_columns, plgpu.ACC((TILE, rows), jnp.float32))
            with jax.named_scope("store"):
                w_row = (w_tile * warpgroups + group) * TILE
                if divisor_gmem.shape == (1,):
                    total *= (1 / layout.DECODED_SCALE) * (1 / divisor_gmem[0])
                else:
                    of_rows = plgpu.load(
                        divisor_gmem.at[pl.ds(w_row, TILE)],
                        layout=plgpu.Layout.WGMMA.reduce(1),
                        optimized=False,
                    )
                    of_rows = (1 / layout.DECODED_SCALE) * (1 / of_rows)
                    total *= lax.broadcast_in_dim(of_rows, total.shape, (0,))
                result = out_smem.at[group]
                # The copy of the last tile has left it.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                result.T[...] = total.astype(jnp.bfloat16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    result, out_gmem.at[pl.ds(x_tile * rows, rows), pl.ds(w_row, TILE)]
                )

        def multiply_all():
            pl.loop(0, turns)(one_tile)
            plgpu.wait_smem_to_gmem(0)

        if producer:
            pl.when(group == warpgroups)(fetch_all)
            pl.when(group < warpgroups)(multiply_all)
        else:
            pl.when(group == 0)(fill)
            multiply_all()

    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    is_empty = plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)
    if cluster > 1 and not interpret:
        is_empty = plgpu.ClusterBarrier(
            collective_axes=("rank",), num_arrivals=warpgroups, num_barriers=stages
        )
    decoded_type = plgpu.SMEM((warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(x), len(words) * TILE), jnp.bfloat16),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(cluster,),
        cluster_names=("rank",),
        num_threads=warpgroups + producer,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((stages, rows, TILE), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, warpgroups, *layout.TILE_SHAPE), jnp.int32),
            plgpu.SMEM((warpgroups, rows, TILE), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            is_empty,
            *([decoded_type] if interpret else []),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=runtime.interpret_params() if interpret else None,
        kernel_name="nvfp4_wide_matmul_sm90",
    )(x, words, divisor)


def _keep_until_here(a: jax.Array) -> None:
    """Holds a warpgroup's registers up to this place in the program.

    To LLVM they are free once a `wgmma` that reads them has been issued, and what is decoded next may
    be put there.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.extend.mlir import ir

    def emit(_: mgpu.LaunchContext, a: mgpu.FragmentedArray) -> None:
        i32, llvm = ir.IntegerType.get_signless(32), mgpu.utils.llvm
        registers = [llvm.bitcast(i32, register) for register in a.registers.flat]
        constraints = ",".join("r" * len(registers))
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, registers, "", constraints, has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))(emit)(a)
