"""The configuration of the kernel for many rows (prefill, training): how it divides work, what it supports and costs."""

import dataclasses
import functools
from math import inf

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.decode_config import most_shared_bytes
from pallas_kernels.nvfp4_matmul.layout import TILE

# The most rows of x in a tile.
MAX_ROWS = 256
# The same beside a producer warpgroup. A thread then has 168 registers: with 160 rows, sums take 80 and decoding 70.
MOST_WITH_PRODUCER = 160
# The most rows of a tile that leave shared memory for eight pipeline stages. Up to here `pick_config` uses a
# producer.
_DEEP = 152
# The cost of adding up the partial sums of split tiles: ns to start a kernel, and bytes per ns to write or read them.
_SHARE_NS, _SHARE_RATE = 2000, 5000
_MOST_SPLIT = 8
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)
# Measured on an H200: cuBLAS's operations per ns on an unpacked weight, and ns per weight to unpack one. The second
# is limited by memory, so `unpack_ns` scales it by the bandwidth of other cards.
_CUBLAS_RATE, _UNPACK_NS = 750e3, 0.657e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      rows: rows of x per tile; 8 to 256, a multiple of 8, or of 16 with `cluster` 2.
      warpgroups: warpgroups per block that multiply, each with 64 rows of W; 1 to 3, with a producer at most 2.
      stages: pipeline stages, that is, slots in shared memory; at least 3, with a producer at least 2.
      band: the most tiles of x that are processed at one time.
      cluster: blocks that share a tile of x, each with its own rows of W; 1 or 2.
      producer: whether a separate warpgroup starts the copies.
      split: number of blocks among which K is split, for the tiles that would not fill a wave; 1 or more.
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
            raise ValueError(f"rows must be a multiple of 8 up to {MAX_ROWS}; got {self.rows}")
        if not 1 <= self.warpgroups <= 3:
            raise ValueError(f"warpgroups must be 1 to 3; got {self.warpgroups}")
        # Warpgroup 0 waits for the next tile before it refills the slot of the last one.
        if self.stages < (least := 3 - self.producer):
            raise ValueError(f"stages must be {least} or more; got {self.stages}")
        for name in ("band", "split"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2; got {self.cluster}")
        if self.rows % (8 * self.cluster):
            raise ValueError(f"rows must be in sixteens for two blocks; got {self.rows}")
        if self.producer and (self.rows > MOST_WITH_PRODUCER or self.warpgroups > 2):
            raise ValueError(
                f"a producer leaves registers for {MOST_WITH_PRODUCER} rows and 2 warpgroups; "
                f"got {self.rows} and {self.warpgroups}"
            )


def supports(
    outputs: int,
    summed: int,
    config: Config,
    *,
    backward: bool = False,
    sizes: tuple[int, ...] = (),
) -> str | None:
    """Returns why this kernel cannot run a problem with this configuration, or None if it can.

    Args:
      outputs: N, columns of the result; K for dX.
      summed: K, columns that are summed over; N for dX.
      config: see `pick_config`.
      backward: whether dX is computed.
      sizes: sizes of the parts of the `Epilogue`; empty without one.
    """
    rows = config.warpgroups * config.cluster
    names = "KN" if backward else "NK"
    if layout.tiles(outputs) % rows:
        return f"needs {names[0]} of whole {TILE * rows}-row tiles; got {names[0]} = {outputs}"
    if layout.tiles(summed) % config.split:
        return f"needs {names[1]} of whole {config.split * TILE}s; got {names[1]} = {summed}"
    if backward and config.rows % 16:
        return f"needs rows in sixteens for dX; got {config.rows}"
    # The last part includes the padding of N.
    if any(size % (TILE * rows) for size in sizes[:-1]):
        return f"needs parts of whole {TILE * rows}-row tiles but for the last; got {sizes}"
    # LoRA's B has only one buffer. K must have enough steps that B of the next tile is loaded only after B of this
    # tile was read.
    if sizes and layout.tiles(summed) < (least := config.stages - 1):
        return f"needs {names[1]} of {least * TILE} or more; got {names[1]} = {summed}"
    used = shared_bytes(config, backward=backward, has_epilogue=bool(sizes))
    if used > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def pick_config(
    m: int, outputs: int, summed: int, *, backward: bool = False, sizes: tuple[int, ...] = ()
) -> Config:
    """Picks the configuration with the least `cost`. The arguments are as for `supports`; m is the rows of x."""
    steps = layout.tiles(summed)
    # All rows of W in a block must belong to one part.
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
    # Clusters of two are 1 to 2 % faster for many rows, but 4 % slower for dX.
    is_large = best.rows == MAX_ROWS and m >= 1024 and best.split == 1 and not backward
    pairs = is_large and all(rows % (2 * TILE * warpgroups) == 0 for rows in (outputs, *sizes))
    bytes_of = functools.partial(shared_bytes, backward=backward, has_epilogue=bool(sizes))
    most_bytes = most_shared_bytes()
    fits = lambda stages: bytes_of(dataclasses.replace(best, stages=stages)) <= most_bytes
    most = 8 if best.producer else 7
    if sizes:
        most = max(3, min(most, steps + 1))  # the limit of `supports`
    return dataclasses.replace(
        best,
        stages=max(filter(fits, range(3, most + 1))),
        cluster=1 + pairs,
    )


def cost(m: int, outputs: int, summed: int, config: Config, *, backward: bool = False) -> float:
    """Estimates the time of a product in ns, on an H200 or a card that only has more or fewer multiprocessors.

    The time is that of the slowest block: the number of waves, times the steps of a tile, times the time of a step.
    A step of 64 columns was measured on an H200. With a producer it takes 261, 297, 351 and 399 ns at 64, 88, 128 and
    152 rows, nearly a straight line; without one, 612 ns at 256 rows. Without a producer, sizes below 256 rows are as
    fast if each block has one tile, but slower if a block has several; the estimate is then infinite. For dX a step
    takes 639 ns at 144 rows and 690 ns at 256, and 800 ns if all blocks work all the time, because the card lowers
    its clock. Long sums lower the clock by up to 5 % more.

    The arguments are as for `supports`; m is the rows of x.
    """
    rows, steps = config.rows, layout.tiles(summed)
    processors = runtime.device().processors
    x_tiles, w_tiles = -(-m // rows), layout.tiles(outputs) // config.warpgroups
    whole = x_tiles * _whole_tiles(x_tiles, w_tiles, config, processors)
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
    # If there are unsplit tiles too, one more kernel copies the added sums into the array of their results.
    adding = _SHARE_NS * (1 + bool(whole)) + 2 * share_bytes / _SHARE_RATE if shared else 0
    return waves * steps * unit + adding


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Describes which block does what. For dX, "rows" of W means its columns, and "columns" its rows.

    Attributes:
      x_tiles: number of tiles of x.
      w_tiles: number of tiles of rows of W; one cluster processes one tile.
      whole_w_tiles: how many of them, from the first, are summed over all columns by one cluster.
      steps: number of steps of 64 columns.
      split: number of clusters that share each of the other tiles (split-K).
      band: number of tiles of x that are processed at one time.
      blocks: number of clusters in the grid.
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
        """Number of tiles of the result that one cluster sums over all columns."""
        return self.x_tiles * self.whole_w_tiles

    @property
    def shared(self) -> int:
        """Number of tiles of the result that several clusters share."""
        return self.x_tiles * (self.w_tiles - self.whole_w_tiles)

    @property
    def run(self) -> int:
        """Number of steps in a share."""
        return self.steps // self.split


def tiling_of(m: int, w_rows: int, steps: int, config: Config) -> Tiling:
    """Divides the product of x, which has m rows, and W, which has `w_rows` x `steps` tiles of 64 x 64."""
    x_tiles, w_tiles = -(-m // config.rows), w_rows // (config.warpgroups * config.cluster)
    # All bands have the same size, so that the kernel divides by a constant, which is faster.
    band = next(band for band in range(config.band, 0, -1) if x_tiles % band == 0)
    processors = runtime.device().processors
    blocks = min(processors // config.cluster, x_tiles * w_tiles * config.split)
    whole_w_tiles = _whole_tiles(x_tiles, w_tiles, config, processors)
    return Tiling(x_tiles, w_tiles, whole_w_tiles, steps, config.split, band, blocks)


def _whole_tiles(x_tiles: int, w_tiles: int, config: Config, processors: int) -> int:
    """Returns how many tiles of W are summed over all columns by one cluster: as many as fill whole waves."""
    if config.split == 1:
        return w_tiles
    blocks = processors // config.cluster
    return x_tiles * w_tiles // blocks * blocks // x_tiles


def shared_bytes(config: Config, *, backward: bool = False, has_epilogue: bool = False) -> int:
    """Returns the bytes of shared memory that a block takes for its slots, its result and LoRA's B."""
    slot = config.rows * TILE * 2 + config.warpgroups * _TILE_BYTES
    result = config.warpgroups * config.rows * TILE * 2
    if backward:
        result = result // 2 + 2 * config.warpgroups * TILE * TILE * 2
    b = has_epilogue * config.warpgroups * TILE * TILE * 2
    return config.stages * slot + result + b


def unpacks_for_dx(m: int, n: int, k: int) -> bool:
    """Returns whether dX of m rows is estimated to be faster with `dequantize` and cuBLAS than with this kernel."""
    config = pick_config(m, k, n, backward=True)
    copied = 2 * m * n * k / _CUBLAS_RATE + n * k * unpack_ns()
    return copied < cost(m, k, n, config, backward=True)


def unpack_ns() -> float:
    """Returns the ns per weight that a device takes to unpack a matrix to bfloat16."""
    return _UNPACK_NS * runtime.H200.bandwidth / runtime.device().bandwidth
