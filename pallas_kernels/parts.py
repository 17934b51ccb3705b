"""Assembles a weight from rows or columns of other weights, in any format and layout. Values do not change."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.number_format import Axis, PackedTensor, Tiling
from pallas_kernels.formats.registry import format_of
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.packed_matmul import PackedWeight
from pallas_kernels.portable import layout as portable
from pallas_kernels.portable.layout import PortableWeight

type Weight = PackedWeight | jax.Array

_LAYOUTS = {HopperNVFP4: layout, PortableWeight: portable}
_PORTABLE = {"axis": -2, "size": portable.TILE, "entries": portable.TILE}
# As `NumberFormat.tilings`, of the kernels' layouts.
_TILINGS: dict[type, dict[Axis, dict[str, Tiling]]] = {
    HopperNVFP4: {
        "rows": {"words": Tiling(-4, layout.TILE)},
        "columns": {"words": Tiling(-3, layout.TILE)},
    },
    PortableWeight: {
        "rows": {"words": Tiling(**_PORTABLE), "scales": Tiling(**_PORTABLE | {"axis": -1})},
        "columns": {"words": Tiling(-3, portable.CHUNK), "scales": Tiling(-2, portable.CHUNK)},
    },
}


def assembled(sources: Sequence[Weight], indices: np.ndarray, axis: Axis) -> Weight:
    """Assembles a weight from rows or columns of other weights.

    Args:
      sources: weights [N, K], or stacks of them, packed or dense, all of the same format, layout and shape. If a
        global scale is one per weight, it must be the same in all.
      indices: int [n, 2]. For each row or column of the result: the index of its source, and its index in that
        source. A negative source gives zeros.
      axis: "rows" or "columns", whichever `indices` lists.

    Returns:
      The weight in the format and layout of its sources, [n, K] or [N, n]. NF4's scales are decoded, which changes no
      value. Rows in pairs are put back in order if n is no multiple of 64.

    Raises:
      ValueError: a tile of the format would be divided, or a block of NF4 crosses the end of a row.
    """
    first, indices = sources[0], np.asarray(indices)
    if isinstance(first, jax.Array | np.ndarray):
        return _joined(sources, indices, Tiling(-2 if axis == "rows" else -1))
    n, k = first.shape
    size = n if axis == "rows" else k
    shape = (len(indices), k) if axis == "rows" else (n, len(indices))
    if getattr(first, "is_paired", False):
        return _assembled_in_pairs(sources, indices, axis)
    form = format_of(first) if isinstance(first, PackedTensor) else None
    if form is not None:
        sources = [form.by_rows(source) for source in sources]
    join = lambda name, tiling, **fill: _joined(
        [getattr(source, name) for source in sources], indices, tiling, size, **fill
    )
    tilings = _TILINGS[type(first)] if form is None else form.tilings
    try:
        arrays = {name: join(name, tiling) for name, tiling in tilings[axis].items()}
    except ValueError:
        if form is not None:
            raise
        # A tile of the layout would be divided. Tiles of the format may be smaller, so retry in the format.
        kind = _LAYOUTS[type(first)]
        return kind.prepare(assembled([kind.unprepare(s) for s in sources], indices, axis))
    divisor = getattr(first, "global_scale", None)
    if axis == "rows" and divisor is not None and divisor.shape[-1] > 1:
        arrays["global_scale"] = join("global_scale", Tiling(-1), fill=1)
    weight = dataclasses.replace(sources[0], shape=shape, **arrays)
    return weight if form is None else form.from_rows(weight)


def _assembled_in_pairs(
    sources: Sequence[HopperNVFP4], indices: np.ndarray, axis: Axis
) -> HopperNVFP4:
    """Assembles weights whose rows are in pairs. `indices` counts rows in their original order."""
    if axis == "rows":
        if not layout.can_pair(len(indices)):
            return layout.prepare(assembled([layout.unprepare(s) for s in sources], indices, axis))
        rows_of = lambda n: layout.paired_rows(np.arange(n), 0)
        positions = np.argsort(rows_of(sources[0].shape[0]))
        moved = np.where(
            indices[:, :1] < 0, indices, np.c_[indices[:, 0], positions[indices[:, 1]]]
        )
        indices = moved[rows_of(len(indices))]
    weight = assembled([source.as_it_lies for source in sources], indices, axis)
    return dataclasses.replace(weight, is_paired=True)


def _joined(
    arrays: Sequence[jax.Array],
    indices: np.ndarray,
    tiling: Tiling,
    size: int = 0,
    fill: float = 0,
) -> jax.Array:
    """Joins slices of the sources' arrays, each of `size` rows or columns; puts `fill` where there is no source."""
    first, axis = arrays[0], tiling.axis
    slices = []
    for source, start, stop in _runs(_tiles(indices, tiling.size, size)):
        start, stop = start * tiling.entries, stop * tiling.entries
        if source < 0:
            shape = list(first.shape)
            shape[axis] = stop - start
            slices.append(jnp.full(shape, fill, first.dtype))
        else:
            slices.append(jax.lax.slice_in_dim(arrays[source], start, stop, axis=axis % first.ndim))
    return jnp.concatenate(slices, axis=axis)


def _tiles(indices: np.ndarray, tile: int, size: int) -> list[tuple[int, int]]:
    """Converts indices of rows or columns to indices (source, tile) of tiles; (-1, -1) for a tile of zeros."""
    if tile == 1:
        return [(s, i) if s >= 0 else (-1, -1) for s, i in indices.tolist()]
    groups = np.pad(indices, ((0, -len(indices) % tile), (0, 0)), constant_values=-1)
    tiles = []
    for group in groups.reshape(-1, tile, 2):
        source, start = group[0].tolist()
        count = int((group[:, 0] >= 0).sum())
        if count == 0:
            tiles.append((-1, -1))
            continue
        adjacent = np.array_equal(group[:count], [(source, start + i) for i in range(count)])
        # The last tile of a source may be incomplete; the rest of it is zeros.
        if not adjacent or start % tile or (count < tile and start + count != size):
            raise ValueError(f"blocks of {tile} rows or columns would be divided")
        tiles.append((source, start // tile))
    return tiles


def _runs(tiles: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of tiles that are adjacent in their source too: the source's index, the first tile, the end."""

    def run_of(position: int) -> tuple[int, int]:  # the same for all tiles of a run
        source, tile = tiles[position]
        return source, tile - position if source >= 0 else 0

    for (source, _), run in itertools.groupby(range(len(tiles)), run_of):
        run = list(run)
        start = max(0, tiles[run[0]][1])
        yield source, start, start + len(run)
