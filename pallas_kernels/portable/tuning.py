"""The launch configurations of products with few rows, from a table measured on the device or by a rule."""

import dataclasses
import functools
import json
import pathlib

from pallas_kernels import runtime
from pallas_kernels.portable.layout import CHUNK, whole

TABLES = pathlib.Path(__file__).parent / "tuned"
# The values of M in the tables. A problem uses the next larger one.
TUNED_M = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a product is divided among programs.

    Attributes:
      block_n: rows of W per program: 32, 64, 128 or 256.
      units: chunks of 64 columns per iteration of the loop: 1, 2 or 4.
      split: number of programs among which K is divided (split-K).
      warps: warps per program: 1, 2, 4 or 8.
      stages: pipeline stages of loads: one more than the number of iterations that are prefetched.
    """

    block_n: int = 64
    units: int = 1
    split: int = 1
    warps: int = 4
    stages: int = 3

    def __post_init__(self):
        for name, allowed in (
            ("block_n", (32, 64, 128, 256)),
            ("units", (1, 2, 4)),
            ("warps", (1, 2, 4, 8)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)}")
        if self.split < 1 or self.stages < 1:
            raise ValueError(f"split and stages must be 1 or more; got {self.split}, {self.stages}")


UNPACK = Config(block_n=64, warps=4, stages=1)


def block_m(m: int, config: Config) -> int:
    """Returns the rows of x per program: M rounded up to a power of two, or fewer if registers limit the sums.

    There are at least 4 * warps rows if registers allow it, so that each thread loads four bytes of a [rows, 16]
    block of x: Triton does not prefetch smaller loads.
    """
    most = 2048 * config.warps // config.block_n
    if runtime.tensor_core_type() == "float16":
        # For a T4, Triton multiplies without tensor cores and keeps both operands in registers.
        most = 16
    return min(max(4 * config.warps, 1 << (m - 1).bit_length(), 8), max(most, 8))


def prefetched(m: int, config: Config) -> int:
    """Returns the bytes of shared memory into which a program prefetches W and x; 0 on a T4 (no prefetch)."""
    if runtime.tensor_core_type() == "float16":
        return 0
    # A row of a chunk of W has 16 words of two bytes, and four bytes of scales.
    chunk = config.block_n * 36 + block_m(m, config) * CHUNK * 2
    return chunk * config.units * (config.stages - 1)


def rank_split(k: int) -> int:
    """Returns among how many programs K is divided for x A^T: eight chunks or more each, at most eight programs."""
    return min(8, max(1, -(-k // CHUNK) // 8))


def pick_config(m: int, n: int, k: int) -> Config:
    """Picks the configuration for x [M, K] and W [N, K]: from the device's table, otherwise by `heuristic`.

    If the device's table has no row for the problem, but the device is a Hopper with as many multiprocessors as an
    H200, then the H200's row is used.
    """
    card, problem = runtime.device(), (_bucket(m), n, k)
    config = table_of(runtime.device_kind()).get(problem)
    alike = lambda other: (other.compute_capability, other.processors)
    if config is None and alike(card) == alike(runtime.H200):
        config = table_of(runtime.H200.name).get(problem)
    return config or heuristic(m, n, k)


def heuristic(m: int, n: int, k: int) -> Config:
    """Picks the configuration for a problem that is in no table.

    Up to 32 rows: programs of two warps, about sixteen warps per multiprocessor. With two warps, Triton does not use
    the four-warp instructions of Hopper and Blackwell, which need the decoded weight in shared or tensor memory.
    Partial sums are written and read again, so K is cut into fewer parts if they would take more bytes than the
    weight.

    More than 32 rows: programs of four warps and 128 rows of W, at most three per multiprocessor. Each program reads
    all of x, and on an H200 that took most of the time of smaller programs. A T4 (too few registers) and a B200 (too
    little tensor memory) keep the first form.

    An iteration processes two chunks if three quarters of the programs of a multiprocessor fit into its shared memory
    (100 kB on an RTX 4090, 228 kB on an H200), otherwise one.
    """
    rows, chunks = whole(n), -(-k // CHUNK)
    is_small = runtime.tensor_core_type() == "float16" or _uses_tensor_memory()
    is_large = m > 32 and rows % 128 == 0 and not is_small
    programs, tile = (3, Config(128, 2)) if is_large else (8, Config(64, 2, warps=2))
    fits = 0.75 * programs * prefetched(m, tile) <= runtime.device().shared_bytes
    units = 2 if chunks % 2 == 0 and fits else 1
    if is_large:
        # No more programs than can run at once: a few programs in a second wave would take as long as the first wave.
        split = min(3 * runtime.device().processors // (rows // 128), chunks // units // 4)
        return Config(128, units, max(1, split), warps=4, stages=3)
    most = min(max(1, chunks // units // 2), max(2, int(0.07 * k / m)), 16)
    split = min(max(1, round(8 * runtime.device().processors / (rows // 64))), most)
    return Config(64, units, split, warps=2, stages=3)


def candidates(m: int, n: int, k: int) -> list[Config]:
    """Returns configurations worth timing that fit into the GPU's memories, the heuristic's first.

    There are only one or two dozen, because each takes seconds to compile.
    """
    rows, chunks = whole(n), -(-k // CHUNK)
    configs = [heuristic(m, n, k)]
    deep = [(u, s) for u, s in ((1, 4), (2, 3), (2, 4), (4, 3)) if chunks % u == 0]
    # Units and stages matter most with the heuristic's tile; other tiles are tried with one choice of them.
    large = m > 32 and rows % 128 == 0
    tiles = [((64, 2), deep[1:2] if large else deep[1:]), ((64, 4), deep[1:2])]
    tiles += [((128, 4), deep if large else deep[1:2])]
    tiles += [((32, 1), deep[1:2])] if m <= 16 else [((256, 8), deep[1:2])]
    for (block_n, warps), choices in tiles:
        for units, stages in choices if rows % block_n == 0 else ():
            for load in (6, 12) if m <= 16 else (3, 6, 9, 12):
                most = max(1, chunks // units // 2)
                programs = load * runtime.device().processors * 64 // block_n
                split = min(max(1, round(programs / (rows // block_n))), most, 16)
                configs.append(Config(block_n, units, split, warps, stages))
    fits = lambda c: prefetched(m, c) <= runtime.device().shared_bytes
    can_run = lambda c: fits(c) and not (_uses_tensor_memory() and c.warps >= 4)
    return list(dict.fromkeys(filter(can_run, configs)))


def path_of(device_kind: str) -> pathlib.Path:
    """Returns the path of a device's table, whether or not it exists."""
    return TABLES / f"{device_kind.lower().replace(' ', '_')}.json"


@functools.cache
def table_of(device_kind: str) -> dict[tuple[int, int, int], Config]:
    """Reads a device's table: (M, N, K) -> Config. It is empty if the device has none."""
    path = path_of(device_kind)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["m"], row["n"], row["k"]): Config(**row["config"]) for row in rows}


def _uses_tensor_memory() -> bool:
    # Compute capabilities 10.x (B200) and 11.x have tensor memory. An RTX 5090 (12.0) has none.
    return runtime.device().compute_capability.startswith(("10.", "11."))


def _bucket(m: int) -> int:
    return next((bucket for bucket in TUNED_M if m <= bucket), m)
