"""The products for many rows of x (prefill, training) on Hopper, y and dX, in Pallas Mosaic GPU.

As in `decode`, W is the operand that `wgmma` takes from registers and x^T the one from shared memory,
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
of W as that leaves, and so find each other's operands in the L2. Tiles that would not fill a wave are
split along K: each block takes a share of one, and leaves a float32 sum that XLA adds to the others, in
the same order every time.

An `Epilogue` is done before a tile leaves its registers. LoRA's B comes last, as if
it were 64 more columns of W, and x A as 64 more of x:

    y = ([W x] / global scale + [B U]) * unit + bias       U = x A; brackets are rounded to bfloat16

which rounds where the decode kernels' does (`epilogue`).

dX = dY W is the same with the axes of W exchanged: dX^T = W^T dY^T. As rows of W are summed over, its
layout does not serve `wgmma`'s registers, and decoded tiles go through shared memory, where `wgmma` takes
either orientation. While it multiplies one, the next is written beside it.
"""

import dataclasses
import functools
import itertools
from math import inf

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import linear, runtime
from pallas_kernels.formats.rounding import rounded
from pallas_kernels.nvfp4_matmul import decode, layout
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4

MAX_ROWS = 256
# 168 registers a thread, of which a tile of 160 rows takes 80 for its sums and decoding about 70.
MOST_WITH_PRODUCER = 160
# Most rows of a tile for eight slots.
_DEEP = 152
# To add up shares of K: a kernel's start, and bytes a nanosecond to write and to read them.
_SHARE_NS, _SHARE_RATE = 2000, 5000
_MOST_SPLIT = 8
# Rows of x whose epilogue finds room at once, also in the registers that a producer leaves.
_MOST_AT_ONCE = 96
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      rows: of x in a tile; 8 to 256 in eights.
      warpgroups: of a block, 64 rows of W each; 1 to 3.
      stages: slots, 3 or more; with a producer 2.
      band: most tiles of x that are in work at one time.
      cluster: blocks that share a tile of x, each with rows of W of its own; 1 or 2.
      producer: whether the copies have a warpgroup of their own.
      split: blocks that share the columns of a tile, where the tiles left do not fill a wave.
    """

    rows: int
    warpgroups: int = 2
    stages: int = 4
    band: int = 12
    cluster: int = 1
    producer: bool = False
    split: int = 1

    def __post_init__(self):
        if self.rows % 8 or not 8 <= self.rows <= MAX_ROWS:
            raise ValueError(f"rows must be 8 to {MAX_ROWS} in eights; got {self.rows}")
        if not 1 <= self.warpgroups <= 3:
            raise ValueError(f"warpgroups must be 1 to 3; got {self.warpgroups}")
        # Warpgroup 0 waits for the next tile before it refills the slot of the last one.
        if self.stages < (least := 3 - self.producer):
            raise ValueError(f"stages must be {least} or more; got {self.stages}")
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
        if self.split < 1:
            raise ValueError(f"split must be 1 or more; got {self.split}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What is made of a product of M rows, with at most 64 ranks of LoRA for each part of N.

    Attributes:
      u: bfloat16 [M, 64 * parts], x A of each part, filled up with zeros.
      b: bfloat16 [N, 64], scaled; a row has the ranks of its own part, and zeros.
      unit: float32 [M], that of the norm before.
      bias: float32 [N], or None.
      sizes: rows of W that belong to each part.
    """

    u: jax.Array
    b: jax.Array
    unit: jax.Array
    bias: jax.Array | None
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def supports(
    outputs: int,
    summed: int,
    config: Config,
    *,
    backward: bool = False,
    sizes: tuple[int, ...] = (),
) -> str | None:
    """Why this kernel cannot run a problem with this configuration, or None.

    Args:
      outputs: N, or K backward.
      summed: K, or N backward.
      config: see `pick_config`.
      backward: whether dX is asked for.
      sizes: of the parts of an `Epilogue`, if it has one.
    """
    rows = config.warpgroups * config.cluster
    names = "KN" if backward else "NK"
    if layout.tiles(outputs) % rows:
        return f"needs {names[0]} of whole {TILE * rows}-row tiles; got {names[0]} = {outputs}"
    if layout.tiles(summed) % config.split:
        return f"needs {names[1]} of whole {config.split * TILE}s; got {names[1]} = {summed}"
    if backward and config.rows % 16:
        return f"needs rows in sixteens for dX; got {config.rows}"
    # The last part has what fills N up.
    if any(size % (TILE * rows) for size in sizes[:-1]):
        return f"needs parts of whole {TILE * rows}-row tiles but for the last; got {sizes}"
    # B has one place, which the next tile's may take once this one's slot does.
    if sizes and layout.tiles(summed) < (least := config.stages - 1):
        return f"needs {names[1]} of {least * TILE} or more; got {names[1]} = {summed}"
    used = shared_bytes(config, backward=backward, has_epilogue=bool(sizes))
    if used > (most := decode.most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def pick_config(
    m: int, outputs: int, summed: int, *, backward: bool = False, sizes: tuple[int, ...] = ()
) -> Config:
    """The tile, and the split of what does not fill a wave, that take least time; see `supports`."""
    steps = layout.tiles(summed)
    # A block's rows of W belong to one part.
    is_odd = any(layout.tiles(size) % 2 for size in (outputs, *sizes[:-1]))
    warpgroups = 2 - is_odd
    grain = 16 if backward else 8
    most = min(MAX_ROWS, m + -m % grain)
    choices = [
        Config(rows, warpgroups, producer=rows <= _DEEP, split=split)
        for split in range(1, _MOST_SPLIT + 1)
        if steps % split == 0
        for rows in range(most, min(most, 64) - grain, -grain)
    ]
    best = min(choices, key=lambda c: cost(m, outputs, summed, c, backward=backward))
    # Two blocks that share x gain 1 to 2 % for many rows, but lose 4 % backward.
    is_large = best.rows == MAX_ROWS and m >= 1024 and best.split == 1 and not backward
    pairs = is_large and all(rows % (2 * TILE * warpgroups) == 0 for rows in (outputs, *sizes))
    bytes_of = functools.partial(shared_bytes, backward=backward, has_epilogue=bool(sizes))
    most_bytes = decode.most_shared_bytes()
    fits = lambda stages: bytes_of(dataclasses.replace(best, stages=stages)) <= most_bytes
    most = 8 if best.producer else 7
    if sizes:
        most = max(3, min(most, steps + 1))  # B comes through the slots after K, see `supports`
    return dataclasses.replace(
        best,
        stages=max(filter(fits, range(3, most + 1))),
        cluster=1 + pairs,
    )


def cost(m: int, outputs: int, summed: int, config: Config, *, backward: bool = False) -> float:
    """Nanoseconds that a problem takes on an H200, about, or on a card with other processors of that kind; see `supports`.

    All blocks wait for the last wave. 64 columns of a tile were measured to take 261, 297, 351 and
    399 ns at 64, 88, 128 and 152 rows with a producer, which is a line, and 612 ns at 256 rows
    without. Sizes between run no slower while a block has one tile, but did where it had several, and
    are left out there. Backward it is 639 ns at 144 rows and 690 at 256, and 800 where all blocks are at work
    all the time: the card then lowers its clock. So it does by up to 5 % where sums are long.
    """
    rows, steps = config.rows, layout.tiles(summed)
    processors = runtime.device().processors
    x_tiles, w_tiles = -(-m // rows), layout.tiles(outputs) // config.warpgroups
    whole = x_tiles * _whole_tiles(x_tiles, w_tiles, config)
    shared = x_tiles * w_tiles - whole
    waves = -(-whole // processors)
    waves += -(-shared * config.split // processors) / config.split
    if not config.producer and waves > 1 and rows < MAX_ROWS:
        return inf
    if backward:
        most_at_work = x_tiles * w_tiles / processors / waves
        unit = (574 + 0.453 * rows) * max(1, 1.16 * most_at_work)
        unit *= 1 + 0.05 * min(1, summed / 32768)
    elif config.producer:
        unit = 165 + 1.5 * rows
    else:
        unit = max(270 + 1.15 * rows, 2.4 * rows)
    share_bytes = shared * config.split * rows * config.warpgroups * TILE * 4
    # Whole tiles beside them: what was added up is copied to where those are.
    adding = _SHARE_NS * (1 + bool(whole)) + 2 * share_bytes / _SHARE_RATE if shared else 0
    return waves * steps * unit + adding


def _whole_tiles(x_tiles: int, w_tiles: int, config: Config) -> int:
    """Of the tiles of W, how many a block sums over all columns: as many as fill whole waves."""
    if config.split == 1:
        return w_tiles
    blocks = runtime.device().processors // config.cluster
    return x_tiles * w_tiles // blocks * blocks // x_tiles


def shared_bytes(config: Config, *, backward: bool = False, has_epilogue: bool = False) -> int:
    """Bytes of shared memory that a block's slots and its result take, and B."""
    slot = config.rows * TILE * 2 + config.warpgroups * _TILE_BYTES
    result = config.warpgroups * config.rows * TILE * 2
    if backward:
        result = result // 2 + 2 * config.warpgroups * TILE * TILE * 2
    b = has_epilogue * config.warpgroups * TILE * TILE * 2
    return config.stages * slot + result + b


def matmul(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config | None = None,
    *,
    epilogue: Epilogue | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16.

    Args:
      x: bfloat16 [M, K].
      w: an [N, K] weight without stacked axes.
      config: by default that of `pick_config`.
      epilogue: what is made of the product.
      interpret: run on a CPU, and report data races.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    config = config or pick_config(len(x), *w.shape, sizes=epilogue.sizes if epilogue else ())
    return _checked(
        x, w, w.global_scale, config, backward=False, epilogue=epilogue, interpret=interpret
    )


def backward(
    dy: jax.Array, w: HopperNVFP4, config: Config | None = None, *, interpret: bool = False
) -> jax.Array:
    """dy [M, N] -> dy @ dequantize(w) [M, K], both bfloat16; see `matmul`."""
    n, k = w.shape
    config = config or pick_config(len(dy), k, n, backward=True)
    divisor = w.global_scale
    if len(divisor) > 1:
        # Rows of different global scales are summed over, so the multiplier has to come first.
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
    if reason := supports(outputs, columns, config, backward=backward, sizes=sizes):
        raise NotImplementedError(reason)
    # Bulk copies leave out what lies beyond an array, but a tile must not be longer than that, and the
    # interpreter knows no such thing.
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
            # All of a tile's are read, also where x ends before.
            unit=jnp.pad(epilogue.unit, (0, -m % config.rows)),
        )
    return _multiply(x, w.words, divisor, config, backward, epilogue, interpret)[:m, :outputs]


def _multiply(
    x: jax.Array,
    words: jax.Array,
    divisor: jax.Array,
    config: Config,
    backward: bool,
    epilogue: Epilogue | None,
    interpret: bool,
) -> jax.Array:
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import launch, registers
    from pallas_kernels.nvfp4_matmul import packed_tile

    rows, warpgroups, stages = config.rows, config.warpgroups, config.stages
    cluster, producer = config.cluster, config.producer
    # "Rows" of W are those of what is multiplied: for dX its columns.
    w_rows, steps = words.shape[:2][:: -1 if backward else 1]
    x_tiles, w_tiles = -(-len(x) // rows), w_rows // (warpgroups * cluster)
    # Whole bands: in a kernel a division by what is not a constant takes a while.
    band = next(band for band in range(config.band, 0, -1) if x_tiles % band == 0)
    blocks = min(runtime.device().processors // cluster, x_tiles * w_tiles * config.split)
    whole_w_tiles = _whole_tiles(x_tiles, w_tiles, config)
    whole, shared = x_tiles * whole_w_tiles, x_tiles * (w_tiles - whole_w_tiles)
    run = steps // config.split
    # Of a whole tile: the last one multiplies B.
    units_of_tile = steps + (epilogue is not None)
    # Interpreted `wgmma` takes no operand from registers.
    in_memory = backward or interpret
    halves = 2 if backward else 1
    divide = lambda a, b: (lax.div(a, b), lax.rem(a, b))
    operands = {"x": x, "w": words, "divisor": divisor}
    if epilogue is not None:
        b = epilogue.b.reshape(w_rows, TILE, TILE)
        operands |= {"u": epilogue.u, "b": b, "unit": epilogue.unit}
        if epilogue.bias is not None:
            operands["bias"] = epilogue.bias

    def kernel(*refs):
        gmem = dict(zip(operands, refs, strict=False))
        x_gmem, w_gmem, divisor_gmem, *_ = refs
        refs = refs[len(operands) :]
        out_gmem = refs[0] if whole else None
        sums_gmem = refs[bool(whole)] if shared else None
        x_smem, w_smem, out_smem, full, empty, *rest = refs[bool(whole) + bool(shared) :]
        decoded_smem = rest.pop(0) if in_memory else None
        b_smem = rest.pop(0) if epilogue is not None else None
        block, group = lax.axis_index("block"), lax.axis_index("warpgroup")
        rank = lax.axis_index("rank")
        turns = lax.div(whole + shared * config.split - block + blocks - 1, blocks)
        whole_turns = lax.div(whole - block + blocks - 1, blocks)
        whole_units = whole_turns * units_of_tile
        units = whole_units + (turns - whole_turns) * run

        def place(turn):
            """Tiles of x and of W: down a band of x first, then on to the next rows of W."""
            w_tile, at = divide(block + turn * blocks, band)
            bands, w_tile = divide(w_tile, whole_w_tiles)
            return bands * band + at, w_tile * cluster + rank

        def place_of_share(turn):
            """Tiles of x and of W, and which share of K."""
            share, tile = divide(block + turn * blocks - whole, shared)
            w_tile, x_tile = divide(tile, x_tiles)
            return x_tile, (whole_w_tiles + w_tile) * cluster + rank, share

        def locate(unit):
            """Tiles of x and of W, and the step along K."""
            found = []
            if whole:
                turn, at = divide(unit, units_of_tile)
                found.append((*place(turn), at))
            if shared:
                turn, at = divide(unit - whole_units, run)
                x_tile, w_tile, share = place_of_share(whole_turns + turn)
                found.append((x_tile, w_tile, share * run + at))
            if len(found) == 1:
                return found[0]
            return tuple(jnp.where(unit < whole_units, a, b) for a, b in zip(*found, strict=True))

        def fetch(unit):
            (x_tile, w_tile, at), slot = locate(unit), lax.rem(unit, stages)
            of_group = pl.ds(w_tile * warpgroups, warpgroups)

            def copy(own, own_smem, common, column):
                plgpu.copy_gmem_to_smem(own, own_smem, full.at[slot])
                plgpu.copy_gmem_to_smem(
                    common.at[pl.ds(x_tile * rows, rows), pl.ds(column * TILE, TILE)],
                    x_smem.at[slot],
                    full.at[slot],
                    collective_axes=None if interpret or cluster == 1 else "rank",
                )

            def columns():
                own = w_gmem.at[at, of_group] if backward else w_gmem.at[of_group, at]
                copy(own, w_smem.at[slot], x_gmem, at)

            def branch():
                row = w_tile * warpgroups * TILE
                ends = itertools.accumulate(epilogue.sizes[:-1])
                part = sum((row >= end).astype(jnp.int32) for end in ends)
                copy(gmem["b"].at[of_group], b_smem, gmem["u"], part)

            if epilogue is None:
                columns()
            else:
                pl.when(at < steps)(columns)
                # What was in its place is no longer read: the slot was emptied after that.
                pl.when(at == steps)(branch)

        def decoded(unit):
            """A unit's tile, once it has come: in registers, or else where `operand` finds it."""
            slot = lax.rem(unit, stages)
            with jax.named_scope("load"):
                plgpu.barrier_wait(full.at[slot])
            with jax.named_scope("decode"):
                tile = w_smem.at[slot, group]
                a = packed_tile.decode_words(tile[...]) if interpret else packed_tile.decode(tile)
                if not in_memory:
                    return a
                # All warps have come back from the product that read it last.
                plgpu.commit_smem()
                decoded_smem[lax.rem(unit, 2), group] = a
                plgpu.commit_smem()
                return None

        def operand(unit, a):
            if not in_memory:
                return a
            a = decoded_smem.at[lax.rem(unit, 2), group]
            return a.T if backward else a

        def multiply(unit, acc, a, meanwhile):
            with jax.named_scope("mma"):
                plgpu.wgmma(acc, operand(unit, a), x_smem.at[lax.rem(unit, stages)].T)
            result = meanwhile()
            refill_last(unit)
            plgpu.wgmma_wait(0)
            if not in_memory:
                _keep_until_here(a)
            leave(unit)
            return result

        def refill_last(unit):
            """Brings what comes next into the slot before this unit's."""
            if producer:
                return
            ahead = unit - 1 + stages

            @pl.when((group == 0) & (unit > 0) & (ahead < units))
            def _refill():
                plgpu.barrier_wait(empty.at[lax.rem(ahead, stages)])
                fetch(ahead)

        def leave(unit):
            slot = lax.rem(unit, stages)
            pl.when(unit + stages < units)(lambda: plgpu.barrier_arrive(empty.at[slot]))

        def fill():
            for stage in range(stages):
                pl.when(stage < units)(lambda stage=stage: fetch(jnp.int32(stage)))

        def fetch_all():
            fill()

            @pl.loop(stages, lax.max(units, stages))
            def _refill(unit):
                plgpu.barrier_wait(empty.at[lax.rem(unit, stages)])
                fetch(unit)

        def sum_of(first, count):
            """The sums of `count` units in float32, unscaled."""

            def sum_over_columns(acc):
                last = first + count - 1
                step = lambda unit, a: multiply(unit, acc, a, lambda: decoded(unit + 1))
                # Two at a time, so that a tile's registers need not be moved for the next turn.
                two = lambda i, a: step(first + 2 * i + 1, step(first + 2 * i, a))
                a = lax.fori_loop(0, (count - 1) // 2, two, decoded(first))
                if count % 2 == 0:
                    a = step(last - 1, a)
                multiply(last, acc, a, lambda: None)
                return acc[...]

            return pl.run_scoped(sum_over_columns, plgpu.ACC((TILE, rows), jnp.float32))

        def load(axis, ref):
            """A vector along the rows of W (0) or of x (1)."""
            kind = plgpu.Layout.WGMMA.reduce(1 - axis)
            return plgpu.load(ref, layout=kind, optimized=False)

        def multiplier(w_row):
            """What sums of the rows of W are multiplied by: a scalar, or [64]."""
            if divisor_gmem.shape == (1,):
                return (1 / layout.DECODED_SCALE) * (1 / divisor_gmem[0])
            return (1 / layout.DECODED_SCALE) * (1 / load(0, divisor_gmem.at[pl.ds(w_row, TILE)]))

        def spread(values, axis, shape):
            """A vector along an axis of a tile, or a scalar."""
            return lax.broadcast_in_dim(values, shape, (axis,)) if jnp.ndim(values) else values

        def one_tile(turn):
            x_tile, w_tile = place(turn)
            first_unit = turn * units_of_tile
            w_row = (w_tile * warpgroups + group) * TILE
            total = sum_of(first_unit, steps)
            with jax.named_scope("store"):
                out_at = lambda first, count: out_gmem.at[
                    pl.ds(x_tile * rows + first, count), pl.ds(w_row, TILE)
                ]
                if epilogue is not None:
                    finish(total, first_unit + steps, x_tile, w_row)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_smem.at[group], out_at(0, rows))
                    return
                total *= spread(multiplier(w_row), 0, total.shape)
                result, total = out_smem.at[group], total.astype(jnp.bfloat16)
                for half in range(halves):
                    first, count = half * (rows // halves), rows // halves
                    # The copy before this one has left it.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    result.T[...] = total[:, first : first + count] if halves > 1 else total
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(result, out_at(first, count))

        def finish(total, branch_unit, x_tile, w_row):
            """Leaves a tile in `out_smem`, after its epilogue."""
            slot = lax.rem(branch_unit, stages)
            # So many of x at a time that a second float32 tile finds room in the registers.
            cuts = (0, rows) if rows <= _MOST_AT_ONCE else (0, rows // 16 * 8, rows)
            # A power of two changes no rounding, and may follow it.
            base = registers.to_bfloat16(total, interpret=interpret)
            scale = multiplier(w_row)
            bias = load(0, gmem["bias"].at[pl.ds(w_row, TILE)]) if "bias" in gmem else None
            plgpu.barrier_wait(full.at[slot])
            for first, last in itertools.pairwise(cuts):
                count = last - first
                unit_of_x = load(1, gmem["unit"].at[pl.ds(x_tile * rows + first, count)])

                def multiply(acc, first=first, count=count):
                    u = x_smem.at[slot, pl.ds(first, count)]
                    plgpu.wgmma(acc, b_smem.at[group], u.T)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                added = pl.run_scoped(multiply, plgpu.ACC((TILE, count), jnp.float32))
                y = base[:, first:last] if count < rows else base
                y = y.astype(jnp.float32) * spread(scale, 0, y.shape)
                y += registers.rounded_to_bfloat16(added, interpret=interpret)
                y *= spread(unit_of_x, 1, y.shape)
                if bias is not None:
                    y += spread(bias, 0, y.shape)
                if not first:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_smem.at[group, pl.ds(first, count)].T[...] = y.astype(jnp.bfloat16)
            refill_last(branch_unit)
            leave(branch_unit)

        def one_share(turn):
            x_tile, w_tile, share = place_of_share(turn)
            total = sum_of(whole_units + (turn - whole_turns) * run, run)
            with jax.named_scope("store"):
                w_row = ((w_tile - whole_w_tiles * cluster) * warpgroups + group) * TILE
                sums_gmem[share, pl.ds(w_row, TILE), pl.ds(x_tile * rows, rows)] = total

        def multiply_all():
            if whole:
                pl.loop(0, whole_turns)(one_tile)
            if shared:
                pl.loop(whole_turns, turns)(one_share)
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
    decoded_type = plgpu.SMEM((2, warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled)
    b_type = plgpu.SMEM((warpgroups, TILE, TILE), jnp.bfloat16, transforms=swizzled)
    out_type = []
    if whole:
        out_type.append(jax.ShapeDtypeStruct((len(x), w_rows * TILE), jnp.bfloat16))
    shared_rows = (w_rows - whole_w_tiles * warpgroups * cluster) * TILE
    if shared:
        shape = (config.split, shared_rows, x_tiles * rows)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    out = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(blocks,),
        grid_names=("block",),
        cluster=(cluster,),
        cluster_names=("rank",),
        num_threads=warpgroups + producer,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((stages, rows, TILE), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, warpgroups, *layout.TILE_SHAPE), jnp.int32),
            plgpu.SMEM((warpgroups, rows // halves, TILE), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            is_empty,
            *([decoded_type] if in_memory else []),
            *([b_type] if epilogue is not None else []),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=launch.INTERPRETED if interpret else None,
        kernel_name="nvfp4_wide_dx_sm90" if backward else "nvfp4_wide_matmul_sm90",
    )(*operands.values())
    if not shared:
        return out[0]
    with jax.named_scope("add_shares"):
        last, multiplier = out[-1].sum(0).T[: len(x)], 1 / divisor[-shared_rows:]
        last *= 1 / layout.DECODED_SCALE
        if epilogue is None:
            last = (last * multiplier).astype(jnp.bfloat16)
        else:
            last = _finished(rounded(last, jnp.bfloat16), multiplier, epilogue)
        return last if not whole else out[0].at[:, -shared_rows:].set(last)


def _finished(base: jax.Array, multiplier: jax.Array, epilogue: Epilogue) -> jax.Array:
    """`Epilogue` in XLA, for the last columns of N."""
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
