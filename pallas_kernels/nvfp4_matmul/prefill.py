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
from math import inf

import jax
import jax.numpy as jnp

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


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which block does what; for dX "rows" of W are its columns, and "columns" its rows.

    Attributes:
      x_tiles: tiles of x.
      w_tiles: tiles of rows of W, each of a cluster.
      whole_w_tiles: the first of them, which are summed over all columns by one cluster each.
      steps: of 64 columns.
      split: blocks that share each of the other tiles.
      band: tiles of x that are in work at one time.
      blocks: clusters of the grid.
    """

    x_tiles: int
    w_tiles: int
    whole_w_tiles: int
    steps: int
    split: int
    band: int
    blocks: int

    @property
    def whole(self) -> int:
        """Tiles that are summed by one cluster each."""
        return self.x_tiles * self.whole_w_tiles

    @property
    def shared(self) -> int:
        """Tiles that several share."""
        return self.x_tiles * (self.w_tiles - self.whole_w_tiles)

    @property
    def run(self) -> int:
        """Steps of a share."""
        return self.steps // self.split


def _cut(m: int, w_rows: int, steps: int, config: Config) -> Cut:
    """How x of M rows meets W of so many tiles of 64 rows and of columns."""
    x_tiles, w_tiles = -(-m // config.rows), w_rows // (config.warpgroups * config.cluster)
    # Whole bands: in a kernel a division by what is not a constant takes a while.
    band = next(band for band in range(config.band, 0, -1) if x_tiles % band == 0)
    processors = runtime.device().processors
    blocks = min(processors // config.cluster, x_tiles * w_tiles * config.split)
    whole_w_tiles = _whole_tiles(x_tiles, w_tiles, config)
    return Cut(x_tiles, w_tiles, whole_w_tiles, steps, config.split, band, blocks)


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
    from pallas_kernels.nvfp4_matmul import prefill_kernel

    w_rows, steps = words.shape[:2][:: -1 if backward else 1]
    problem = prefill_kernel.Problem(
        config, _cut(len(x), w_rows, steps, config), backward, epilogue, interpret
    )
    out, shares = prefill_kernel.launch(x, words, divisor, problem)
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
        return last if out is None else out.at[:, -shared_rows:].set(last)


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
