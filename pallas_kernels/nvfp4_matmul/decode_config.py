"""The configuration of the kernel for few rows (decoding): how it divides its work, and which problems it supports.

A configuration comes from a table measured on the device, or from a rule (`heuristic`).
"""

import dataclasses
import functools
import itertools
import json
import pathlib

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.layout import TILE

# The most rows of x in a tile, and the most tiles. All tiles of an x have the same number of rows.
MAX_M, MOST_TILES = 128, 4
# What a tile's rows are a multiple of if there are several: the epilogue takes so many at a time.
GRAIN = 32

TABLES = pathlib.Path(__file__).parent / "tuned"
# Values of M in the tables. A problem uses the next larger one. None is below 16, because `wgmma` takes as long for 8
# columns as for 16 (13 cycles of a multiprocessor, measured on an H200).
TUNED_M = (16, 32, 64, 128)
# For `cost`: ns of 64 columns per row of x and warpgroup, and at least; ns of a unit of LoRA's A; bytes of partial sums
# that are written or read in a ns. The first is from an H200's 59 us for gate_up of 7B and 128 rows, the others are guesses.
_ROW_NS, _LEAST_NS, _A_NS, _SUM_RATE = 1.27, 250, 350, 5000
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      warpgroups: warpgroups per block, each with 64 rows of W; 1 to 4.
      step: columns of x and W per pipeline stage; 64, 128 or 256.
      stages: pipeline stages, that is, slots in shared memory; 2 or more.
      blocks: number of blocks that share the work.
      shares: number of blocks, beside these, that share each tile of LoRA's A for one tile of x. With 0, some of
        `blocks` do: as many as `dense_tile.shares` says.
    """

    warpgroups: int
    step: int
    stages: int
    blocks: int
    shares: int = 0

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.step not in (64, 128, 256):
            raise ValueError(f"step must be 64, 128 or 256; got {self.step}")
        if self.stages < 2:
            raise ValueError(f"stages must be 2 or more; got {self.stages}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")


def supports(m: int, n: int, k: int, config: Config, *, with_adapter: bool = False) -> str | None:
    """Returns why this kernel cannot run a problem with this configuration, or None if it can.

    Args:
      m: M, rows of x.
      n: N, rows of W.
      k: K, columns of x and W.
      config: the configuration.
      with_adapter: whether the kernel also multiplies x by LoRA's A.
    """
    if reason := unless_rows(m):
        return reason
    row_tiles, columns = layout.tiles(n), layout.tiles(k) * TILE
    if row_tiles % config.warpgroups:
        return f"needs N of whole {TILE * config.warpgroups}-row tiles; got N = {n}"
    if columns % config.step:
        return f"needs K of whole steps of {config.step}; got K = {k}"
    units = _units(m, n, k, config)
    if config.blocks > units:
        return f"has {units} units of work for {config.blocks} blocks"
    if with_adapter and (reason := dense_tile.supports(k, config.warpgroups, config.step)):
        return reason
    used = shared_bytes(m, config, adapter_k=k if with_adapter else None)
    if used > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def unless_rows(m: int) -> str | None:
    """Returns why kernels cannot take M rows, or None if they can."""
    if not 1 <= m <= MOST_TILES * MAX_M:
        return f"needs 1 <= M <= {MOST_TILES * MAX_M}; got M = {m}"
    if x_tiles(m) > 1 and m % (GRAIN * x_tiles(m)):
        return f"needs {x_tiles(m)} tiles of whole {GRAIN}s of M; got M = {m}"
    return None


def x_tiles(m: int) -> int:
    """Returns the number of tiles of x."""
    return -(-m // MAX_M)


def rows_of_tile(m: int) -> int:
    """Returns the rows of x in a tile: M, rounded up to a multiple of 8, if there is one."""
    return (m + -m % 8) // x_tiles(m)


def most_shared_bytes() -> int:
    """Returns the bytes of shared memory that a block may use; 1 KiB is reserved for barriers."""
    return runtime.device().shared_bytes - 1024


def shared_bytes(m: int, config: Config, *, adapter_k: int | None = None) -> int:
    """Returns the bytes of shared memory for a block's slots.

    `adapter_k` is K if LoRA's A uses the slots too, otherwise None.
    """
    rows, columns, depth = rows_of_tile(m), config.step, config.step // TILE
    if adapter_k is not None:
        of_a = adapter_k, config.warpgroups, config.step
        columns, depth = max(columns, dense_tile.width(*of_a)), max(depth, dense_tile.pieces(*of_a))
    return config.stages * (columns * rows * 2 + config.warpgroups * depth * _TILE_BYTES)


def pick_config(m: int, n: int, k: int, *, ranks: int = 0) -> Config:
    """Picks the configuration for a problem: from the device's table, otherwise by `heuristic`.

    If the device's table has no row for the problem, but the device has as many multiprocessors as an H200, then the
    H200's row is used, because its number of blocks fits. If x has several tiles, it is the one `estimated`.

    The arguments are as for `supports`; `ranks` are those of LoRA's A, of all parts together.
    """
    card, problem = runtime.device(), (_bucket(m), n, k)
    config = table_of(card.name).get(problem)
    if config is None and card.processors == runtime.H200.processors:
        config = table_of(runtime.H200.name).get(problem)
    if config is None and (m > MAX_M or (m > TUNED_M[-2] and runtime.decodes_in_tiles())):
        return estimated(m, n, k, ranks=ranks)
    return config or heuristic(m, n, k)


def heuristic(m: int, n: int, k: int) -> Config:
    """Picks the configuration for a problem that is in no table.

    If W has many rows, or x has more than 64, there is one block per multiprocessor, with as many warpgroups as
    divide the row tiles; they share x. Otherwise there are a few small blocks per multiprocessor, so that the whole
    matrix is loaded at once.
    """
    row_tiles, columns = layout.tiles(n), layout.tiles(k) * TILE
    processors = runtime.device().processors
    longest = 256 if m <= 32 else 128
    step = next(s for s in (256, 128, 64) if s <= longest and columns % s == 0)
    steps = columns // step
    # With so many row tiles and one block per multiprocessor, about two blocks share each tile of four warpgroups.
    if row_tiles >= 2 * processors or m > 64:
        warpgroups = next(w for w in (4, 3, 2, 1) if row_tiles % w == 0)
        blocks, depth = min(processors, row_tiles // warpgroups * steps), 4
    else:
        split = min(max(1, round(3 * processors / row_tiles)), steps)
        warpgroups, blocks, depth = 1, row_tiles * split, min(4, -(-steps // split))
    depth = max(2, min(depth, _deepest(m, warpgroups, step, blocks)))
    return Config(warpgroups, step, depth, blocks)


def cost(m: int, n: int, k: int, config: Config, *, ranks: int = 0) -> float:
    """Estimates the ns in which blocks multiply x, of at least 65 rows, and sums are written and read.

    The arguments are as for `pick_config`; with `ranks` the configuration must have `shares`.
    """
    units, tiles, rows = _units(m, n, k, config), _units(m, n, config.step, config), rows_of_tile(m)
    columns = -(-units // config.blocks) * config.step // TILE
    longest = columns * max(_LEAST_NS, _ROW_NS * config.warpgroups * rows)
    # A run that begins or ends within a tile leaves one part more.
    parts = config.blocks + (tiles if config.blocks % tiles else 0)
    moved = 2 * parts * config.warpgroups * TILE * rows * 4
    if ranks:
        width = dense_tile.width(k, config.warpgroups, config.step, dense_tile.height(k, ranks))
        units_of_a = layout.whole(k) // width
        longest = max(longest, -(-units_of_a // config.shares) * _A_NS)
        # A block of the epilogue has as many values of x A in each part as of the product.
        moved += config.shares * (width // TILE) * layout.whole(n) * m * 4
    return longest + moved / _SUM_RATE


def estimated(m: int, n: int, k: int, *, ranks: int = 0) -> Config:
    """Picks the configuration with the least `cost`: one block per multiprocessor, some of them for LoRA's A.

    The arguments are as for `pick_config`.
    """
    row_tiles, processors, choices = layout.tiles(n), runtime.device().processors, []
    tiles_of_a = dense_tile.tiles(k, ranks) if ranks else 0
    for warpgroups, step in itertools.product((4, 3, 2, 1), (128, 256, 64)):
        is_refused = ranks and dense_tile.supports(k, warpgroups, step)
        if row_tiles % warpgroups or layout.whole(k) % step or is_refused:
            continue
        one = Config(warpgroups, step, 2, 1)
        slot = shared_bytes(m, one, adapter_k=k if ranks else None) // 2
        if (stages := min(4, most_shared_bytes() // slot)) < 2:
            continue
        units, tiles = _units(m, n, k, one), _units(m, n, step, one)
        is_odd = bool(ranks) and not dense_tile.is_as_wide(warpgroups, step)
        for shares in range(1, 9) if ranks else (0,):
            free = max(1, min(units, processors - x_tiles(m) * tiles_of_a * shares))
            for blocks in (free, *range(tiles, free, tiles)):
                config = Config(warpgroups, step, stages, blocks, shares)
                choices.append(((is_odd, cost(m, n, k, config, ranks=ranks)), config))
    return min(choices, key=lambda choice: choice[0])[1]


def _units(m: int, n: int, k: int, config: Config) -> int:
    return x_tiles(m) * (layout.tiles(n) // config.warpgroups) * (layout.whole(k) // config.step)


def candidates(m: int, n: int, k: int) -> list[Config]:
    """Returns configurations worth timing. The first is the heuristic's, if it is supported."""
    row_tiles, processors = layout.tiles(n), runtime.device().processors
    configs = [heuristic(m, n, k)]
    fitting = [step for step in (256, 128, 64) if layout.whole(k) % step == 0]
    longest = [step for step in fitting if step >= (256 if m <= 32 else 128)] or fitting[:1]
    for warpgroups, loads in ((4, (1,)), (2, (1, 2)), (1, (2, 3, 4))):
        tiles = max(1, row_tiles // warpgroups)
        for load in loads:
            # Either equal runs of work for all blocks, or the same number of blocks for each tile.
            split = max(1, round(load * processors / tiles))
            for blocks in dict.fromkeys((load * processors, tiles * split)):
                if blocks * warpgroups > 6 * processors:
                    continue
                for step in sorted(longest):
                    most = tiles * (layout.whole(k) // step)
                    stages = min(4, _deepest(m, warpgroups, step, min(blocks, most)))
                    if stages > 1:
                        configs.append(Config(warpgroups, step, stages, min(blocks, most)))
    # A small matrix has few units. Try one, two and three of them per block: fewer parts are fewer sums to add up.
    for step in fitting:
        steps = layout.whole(k) // step
        for split in dict.fromkeys((steps, -(-steps // 2), -(-steps // 3))):
            if (blocks := row_tiles * split) <= 2 * processors:
                stages = max(2, min(4, -(-steps // split), _deepest(m, 1, step, blocks)))
                configs.append(Config(1, step, stages, blocks))
    return [c for c in dict.fromkeys(configs) if supports(m, n, k, c) is None]


def _deepest(m: int, warpgroups: int, step: int, blocks: int) -> int:
    """Returns the most stages with which all blocks can run at the same time."""
    resident = -(-blocks // runtime.device().processors)
    slot = shared_bytes(m, Config(warpgroups, step, 2, blocks)) // 2
    # The GPU reserves 1 KiB of a multiprocessor's shared memory for each block.
    return (most_shared_bytes() // resident - 1024) // slot


def path_of(device_kind: str) -> pathlib.Path:
    """Returns the path of a device's table, whether or not it exists."""
    return TABLES / f"{device_kind.lower().replace(' ', '_')}.json"


@functools.cache
def table_of(device_kind: str) -> dict[tuple[int, int, int], Config]:
    """Reads a device's table: (M, N, K) -> Config. It is empty if the device has none."""
    path = path_of(device_kind)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["m"], row["n"], row["k"]): Config(**row["config"]) for row in rows}


def _bucket(m: int) -> int:
    return next((bucket for bucket in TUNED_M if m <= bucket), m)
