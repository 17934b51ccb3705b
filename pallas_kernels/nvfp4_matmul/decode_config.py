"""The configuration of the kernel for few rows (decoding): how it divides its work, and which problems it supports.

A configuration comes from a table measured on the device, or from a rule (`heuristic`).
"""

import dataclasses
import functools
import json
import pathlib

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.layout import TILE

# The most rows of x.
MAX_M = 128

TABLES = pathlib.Path(__file__).parent / "tuned"
# Values of M in the tables. A problem uses the next larger one. None is below 16, because `wgmma` takes as long for 8
# columns as for 16 (13 cycles of a multiprocessor, measured on an H200).
TUNED_M = (16, 32, 64, 128)
_TILE_BYTES = 4 * (layout.CODE_WORDS + layout.SCALE_WORDS)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among blocks.

    Attributes:
      warpgroups: warpgroups per block, each with 64 rows of W; 1 to 4.
      step: columns of x and W per pipeline stage; 64, 128 or 256.
      stages: pipeline stages, that is, slots in shared memory; 2 or more.
      blocks: number of blocks that share the work.
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


def supports(m: int, n: int, k: int, config: Config, *, with_adapter: bool = False) -> str | None:
    """Returns why this kernel cannot run a problem with this configuration, or None if it can.

    Args:
      m: M, rows of x.
      n: N, rows of W.
      k: K, columns of x and W.
      config: the configuration.
      with_adapter: whether the kernel also multiplies x by LoRA's A.
    """
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
    if with_adapter and (reason := dense_tile.supports(k, config.warpgroups, config.step)):
        return reason
    used = shared_bytes(m, config, adapter_k=k if with_adapter else None)
    if used > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def most_shared_bytes() -> int:
    """Returns the bytes of shared memory that a block may use; 1 KiB is reserved for barriers."""
    return runtime.device().shared_bytes - 1024


def shared_bytes(m: int, config: Config, *, adapter_k: int | None = None) -> int:
    """Returns the bytes of shared memory for a block's slots.

    `adapter_k` is K if LoRA's A uses the slots too, otherwise None.
    """
    rows, columns, depth = m + -m % 8, config.step, config.step // TILE
    if adapter_k is not None:
        of_a = adapter_k, config.warpgroups, config.step
        columns, depth = max(columns, dense_tile.width(*of_a)), max(depth, dense_tile.pieces(*of_a))
    return config.stages * (columns * rows * 2 + config.warpgroups * depth * _TILE_BYTES)


def pick_config(m: int, n: int, k: int) -> Config:
    """Picks the configuration for a problem: from the device's table, otherwise by `heuristic`.

    If the device's table has no row for the problem, but the device has as many multiprocessors as an H200, then the
    H200's row is used, because its number of blocks fits. The arguments are as for `supports`.
    """
    card, problem = runtime.device(), (_bucket(m), n, k)
    config = table_of(card.name).get(problem)
    if config is None and card.processors == runtime.H200.processors:
        config = table_of(runtime.H200.name).get(problem)
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
