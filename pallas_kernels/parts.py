"""Assembles a weight from rows or columns of other weights, in any format and layout. Values do not change."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats import mxfp4, nf4, nvfp4
from pallas_kernels.formats.mxfp4 import MXFP4Tensor
from pallas_kernels.formats.nf4 import NF4Tensor
from pallas_kernels.formats.nvfp4 import NVFP4Tensor
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.packed_matmul import PackedWeight
from pallas_kernels.portable import layout as portable
from pallas_kernels.portable.layout import PortableWeight

type Axis = Literal["rows", "columns"]
type Weight = PackedWeight | jax.Array

_PREPARED = {HopperNVFP4: layout, PortableWeight: portable}


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Describes how an array may be cut along the rows, or along the columns, of its matrix.

    Attributes:
      axis: the axis of the array that runs along the rows or columns.
      unit: number of rows or columns that must stay together.
      entries: number of array entries along `axis` that hold one unit.
    """

    axis: int
    unit: int = 1
    entries: int = 1


_TILES = {"axis": -2, "unit": portable.TILE, "entries": portable.TILE}
_CUTS: dict[type, dict[Axis, dict[str, _Cut]]] = {
    NVFP4Tensor: {
        "rows": {"codes": _Cut(-2), "scales": _Cut(-2)},
        "columns": {"codes": _Cut(-1, 2), "scales": _Cut(-1, nvfp4.BLOCK)},
    },
    MXFP4Tensor: {
        "rows": {"codes": _Cut(-2), "scales": _Cut(-2)},
        "columns": {"codes": _Cut(-1, 2), "scales": _Cut(-1, mxfp4.BLOCK)},
    },
    # For the arrays that `_by_rows` returns.
    NF4Tensor: {
        "rows": {"codes": _Cut(-2), "absmax": _Cut(-2)},
        "columns": {"codes": _Cut(-1, 2), "absmax": _Cut(-1, nf4.BLOCK)},
    },
    HopperNVFP4: {
        "rows": {"words": _Cut(-4, layout.TILE)},
        "columns": {"words": _Cut(-3, layout.TILE)},
    },
    PortableWeight: {
        "rows": {"words": _Cut(**_TILES), "scales": _Cut(**_TILES | {"axis": -1})},
        "columns": {"words": _Cut(-3, portable.CHUNK), "scales": _Cut(-2, portable.CHUNK)},
    },
}


def assembled(sources: Sequence[Weight], places: np.ndarray, axis: Axis) -> Weight:
    """Assembles a weight from rows or columns of other weights.

    Args:
      sources: weights [N, K], or stacks of them, packed or dense, all of the same format, layout and shape. If a
        global scale is one per weight, it must be the same in all.
      places: int [n, 2]. For each row or column of the result: the index of its source, and its index in that
        source. A negative source gives zeros.
      axis: "rows" or "columns", whichever `places` lists.

    Returns:
      The weight in the format and layout of its sources, [n, K] or [N, n]. NF4's scales are decoded, which changes no
      value. Rows in pairs are put back in order if n is no multiple of 64.

    Raises:
      ValueError: a block of the format would be cut, or a block of NF4 crosses the end of a row.
    """
    first, places = sources[0], np.asarray(places)
    if isinstance(first, jax.Array | np.ndarray):
        return _joined(sources, places, _Cut(-2 if axis == "rows" else -1))
    n, k = first.shape
    size = n if axis == "rows" else k
    shape = (len(places), k) if axis == "rows" else (n, len(places))
    if isinstance(first, NF4Tensor):
        rows = [_by_rows(source) for source in sources]
        found = {
            name: _joined([arrays[name] for arrays in rows], places, cut, size)
            for name, cut in _CUTS[NF4Tensor][axis].items()
        }
        found = {name: x.reshape(*x.shape[:-2], -1) for name, x in found.items()}
        return NF4Tensor(absmax2=None, offset=None, shape=shape, **found)
    if getattr(first, "is_paired", False):
        return _assembled_in_pairs(sources, places, axis)
    joined = lambda name, cut, **fill: _joined(
        [getattr(source, name) for source in sources], places, cut, size, **fill
    )
    try:
        found = {name: joined(name, cut) for name, cut in _CUTS[type(first)][axis].items()}
    except ValueError:
        if (prepared := _PREPARED.get(type(first))) is None:
            raise
        # A tile of the layout would be cut. A block of the format may be smaller, so retry in the format.
        return prepared.prepare(assembled([prepared.unprepare(s) for s in sources], places, axis))
    divisor = getattr(first, "global_scale", None)
    if axis == "rows" and divisor is not None and divisor.shape[-1] > 1:
        found["global_scale"] = joined("global_scale", _Cut(-1), fill=1)
    return dataclasses.replace(first, shape=shape, **found)


def _assembled_in_pairs(
    sources: Sequence[HopperNVFP4], places: np.ndarray, axis: Axis
) -> HopperNVFP4:
    """Assembles weights whose rows are in pairs. `places` counts rows in their original order."""
    if axis == "rows":
        if not layout.can_pair(len(places)):
            return layout.prepare(assembled([layout.unprepare(s) for s in sources], places, axis))
        rows_of = lambda n: layout.paired_rows(np.arange(n), 0)
        lies_at = np.argsort(rows_of(sources[0].shape[0]))
        moved = np.where(places[:, :1] < 0, places, np.c_[places[:, 0], lies_at[places[:, 1]]])
        places = moved[rows_of(len(places))]
    whole = assembled([source.as_it_lies for source in sources], places, axis)
    return dataclasses.replace(whole, is_paired=True)


def _by_rows(t: NF4Tensor) -> dict[str, jax.Array]:
    """Returns codes [..., N, K / 2] and decoded scales [..., N, K / 64]."""
    n, k = t.shape
    if k % nf4.BLOCK:
        raise ValueError(f"NF4's blocks of {nf4.BLOCK} cross the ends of rows; got K = {k}")
    rows = lambda x: x.reshape(*x.shape[:-1], n, -1)
    return {"codes": rows(t.codes), "absmax": rows(nf4.scales(t))}


def _joined(
    arrays: Sequence[jax.Array], places: np.ndarray, cut: _Cut, size: int = 0, fill: float = 0
) -> jax.Array:
    """Joins slices of the sources' arrays, each of `size` rows or columns; puts `fill` where there is no source."""
    first, axis = arrays[0], cut.axis
    found = []
    for source, start, stop in _runs(_units(places, cut.unit, size)):
        start, stop = start * cut.entries, stop * cut.entries
        if source < 0:
            shape = list(first.shape)
            shape[axis] = stop - start
            found.append(jnp.full(shape, fill, first.dtype))
        else:
            found.append(jax.lax.slice_in_dim(arrays[source], start, stop, axis=axis % first.ndim))
    return jnp.concatenate(found, axis=axis)


def _units(places: np.ndarray, unit: int, size: int) -> list[tuple[int, int]]:
    """Converts places of rows or columns to places (source, index) of units; (-1, -1) for a unit of zeros."""
    if unit == 1:
        return [(s, i) if s >= 0 else (-1, -1) for s, i in places.tolist()]
    groups = np.pad(places, ((0, -len(places) % unit), (0, 0)), constant_values=-1)
    found = []
    for group in groups.reshape(-1, unit, 2):
        source, start = group[0].tolist()
        count = int((group[:, 0] >= 0).sum())
        if count == 0:
            found.append((-1, -1))
            continue
        neighbours = np.array_equal(group[:count], [(source, start + i) for i in range(count)])
        # The last unit of a source may be incomplete; the rest of it is zeros.
        if not neighbours or start % unit or (count < unit and start + count != size):
            raise ValueError(f"blocks of {unit} rows or columns would be cut")
        found.append((source, start // unit))
    return found


def _runs(units: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yields runs of units that are adjacent in their source too: the source's index, the first unit, the end."""

    def kept(at: int) -> tuple[int, int]:  # the same for all units of a run
        source, number = units[at]
        return source, number - at if source >= 0 else 0

    for (source, _), run in itertools.groupby(range(len(units)), kept):
        run = list(run)
        start = max(0, units[run[0]][1])
        yield source, start, start + len(run)
