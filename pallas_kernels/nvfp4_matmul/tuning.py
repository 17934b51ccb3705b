"""Which configuration a problem gets: measured on the device, or by rule."""

import functools
import json
import pathlib

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import decode, layout, prefill
from pallas_kernels.nvfp4_matmul.decode import Config
from pallas_kernels.nvfp4_matmul.layout import TILE

TABLES = pathlib.Path(__file__).parent / "tuned"
# M of the tables' rows; a problem takes the next one up. Below 16 nothing changes: `wgmma` takes as
# long for 8 columns as for 16 (13 cycles of a multiprocessor, measured on an H200).
TUNED_M = (16, 32, 64, 128)

# Of an H200, operations a nanosecond of cuBLAS with a copy of a weight, and what a weight's copy takes: that is
# a pass over memory, of which other cards have more or less.
_CUBLAS_RATE, _UNPACK_NS = 750e3, 0.657e-3


def pick_config(m: int, n: int, k: int) -> Config:
    """The configuration for a problem: from the device's table, else by `heuristic`.

    For a problem that it has no row of, a device takes the H200's if it has as many processors: blocks of a
    row are as many as those can hold.

    Args:
      m: rows of x, 1 to 128.
      n: rows of W.
      k: columns of both.
    """
    card, problem = runtime.device(), (_bucket(m), n, k)
    found = table_of(card.name).get(problem)
    if found is None and card.processors == runtime.H200.processors:
        found = table_of(runtime.H200.name).get(problem)
    return found or heuristic(m, n, k)


def heuristic(m: int, n: int, k: int) -> Config:
    """The configuration for a problem in no table.

    Wide matrices, and many rows of x, go to one block a multiprocessor of as many warpgroups as can
    share x; others to a few small blocks each, so that a matrix is on its way at once.
    """
    row_tiles, columns = layout.tiles(n), layout.tiles(k) * TILE
    processors = runtime.device().processors
    longest = 256 if m <= 32 else 128
    step = next(s for s in (256, 128, 64) if s <= longest and columns % s == 0)
    steps = columns // step
    # With so many row tiles a run of work for every processor ends about once in each tile of four.
    if row_tiles >= 2 * processors or m > 64:
        warpgroups = next(w for w in (4, 3, 2, 1) if row_tiles % w == 0)
        blocks, depth = min(processors, row_tiles // warpgroups * steps), 4
    else:
        split = min(max(1, round(3 * processors / row_tiles)), steps)
        warpgroups, blocks, depth = 1, row_tiles * split, min(4, -(-steps // split))
    depth = max(2, min(depth, _deepest(m, warpgroups, step, blocks)))
    return Config(warpgroups, step, depth, blocks)


def unpacks_for_dx(m: int, n: int, k: int) -> bool:
    """Whether dX of M rows should unpack its weight for cuBLAS, not in its own tiles."""
    config = prefill.pick_config(m, k, n, backward=True)
    copied = 2 * m * n * k / _CUBLAS_RATE + n * k * unpack_ns()
    return copied < prefill.cost(m, k, n, config, backward=True)


def unpack_ns() -> float:
    """Nanoseconds for each weight that this device takes to write a packed matrix out in bfloat16."""
    return _UNPACK_NS * runtime.H200.bandwidth / runtime.device().bandwidth


def candidates(m: int, n: int, k: int) -> list[Config]:
    """Configurations worth timing, the heuristic's first."""
    row_tiles, processors = layout.tiles(n), runtime.device().processors
    found = [heuristic(m, n, k)]
    fitting = [step for step in (256, 128, 64) if layout.whole(k) % step == 0]
    longest = [step for step in fitting if step >= (256 if m <= 32 else 128)] or fitting[:1]
    for warpgroups, loads in ((4, (1,)), (2, (1, 2)), (1, (2, 3, 4))):
        tiles = max(1, row_tiles // warpgroups)
        for load in loads:
            # Runs of equal length, or as many blocks for each tile.
            split = max(1, round(load * processors / tiles))
            for blocks in dict.fromkeys((load * processors, tiles * split)):
                if blocks * warpgroups > 6 * processors:
                    continue
                for step in sorted(longest):
                    most = tiles * (layout.whole(k) // step)
                    stages = min(4, _deepest(m, warpgroups, step, min(blocks, most)))
                    if stages > 1:
                        found.append(Config(warpgroups, step, stages, min(blocks, most)))
    return [c for c in dict.fromkeys(found) if decode.supports(m, n, k, c) is None]


def _deepest(m: int, warpgroups: int, step: int, blocks: int) -> int:
    """Stages with which all blocks find a multiprocessor at once."""
    resident = -(-blocks // runtime.device().processors)
    slot = decode.shared_bytes(m, Config(warpgroups, step, 2, blocks)) // 2
    # The card keeps 1 KiB of a multiprocessor's shared memory for each block.
    return (decode.most_shared_bytes() // resident - 1024) // slot


def path_of(device_kind: str) -> pathlib.Path:
    """Where a device's table is, or would be."""
    return TABLES / f"{device_kind.lower().replace(' ', '_')}.json"


@functools.cache
def table_of(device_kind: str) -> dict[tuple[int, int, int], Config]:
    """Rows of a device's table: (M, N, K) -> Config; empty for a device without one."""
    path = path_of(device_kind)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["m"], row["n"], row["k"]): Config(**row["config"]) for row in rows}


def _bucket(m: int) -> int:
    return next((bucket for bucket in TUNED_M if m <= bucket), m)
