"""Tensor parallelism: how a policy is divided among devices that decode rows together (arXiv:1909.08053).

Each device has some of the heads and of the MLP's channels: rows of the weights of qkv and gate_up, columns of those of
o and down. So it runs a smaller policy of the same kind, and its products with o and down are terms of a sum over all
devices. If there are fewer key/value heads than devices, several hold the same one, each with some of its query heads.
Uneven parts are padded with zeros, which change no sum.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import FORMATS, parts
from qerl_jax.config import DENSE
from qerl_jax.distributed import sharding
from qerl_jax.model.architecture import Architecture
from qerl_jax.system.checked import require

# MLP channels are divided in tiles of the kernels, or in small models in those of the number format.
_TILE = 64


@dataclasses.dataclass(frozen=True)
class Division:
    """The parts of a policy, one for each device.

    Indices of heads, rows and columns refer to the whole policy; -1 marks padding, which is zero.

    Attributes:
        arch: The shape of the whole policy.
        count: Number of devices.
        weights: Storage format of the linears.
    """

    arch: Architecture
    count: int
    weights: str

    def require(self) -> None:
        """Checks that every device gets a head and that no block of weights with a common scale is cut.

        Raises:
            ConfigError: If the policy cannot be divided so; the error names `mesh.tensor`.
        """
        arch, tile = self.arch, self._tile("columns")
        check = lambda holds, rule: require(holds, "mesh.tensor", self.count, rule)
        heads = arch.num_heads
        check(self.count <= heads, f"must not exceed the {heads} heads of the model")
        rule = f"blocks of {tile} must not cross the ends of rows ({self.weights}), and the model's width is {arch.width}"
        check(arch.width % tile == 0, rule)
        queries, keys, _ = self.outputs("qkv")
        inputs, outputs = (
            ("inputs of o_proj", queries, tile),
            ("outputs of k_proj", keys, self._tile("rows")),
        )
        for what, indices, size in (inputs, outputs):
            rule = (
                f"each device would have {indices.shape[1]} {what}, in heads of {arch.head_size}, and blocks of {size} "
                f"that share a scale ({self.weights}) would be divided"
            )
            check(_has_whole_tiles(indices, size), rule)

    def _tile(self, axis: parts.Axis) -> int:
        """Returns the number of rows or columns of a weight that must stay on one device."""
        return 1 if self.weights in DENSE else FORMATS[self.weights].tile(axis)

    @functools.cached_property
    def part(self) -> Architecture:
        """The architecture of one part, the same for all parts."""
        return dataclasses.replace(
            self.arch,
            num_heads=self._heads.shape[1],
            num_kv_heads=self._kv_heads.shape[1],
            ffn_width=self._columns.shape[1],
        )

    def inputs(self, linear: str) -> np.ndarray | None:
        """Returns the columns of a linear's weight that each device has, int [count, K']; None if each has all."""
        if linear == "o":
            return _entries(self._heads, self.arch.head_size)
        return self._columns if linear == "down" else None

    def outputs(self, linear: str) -> tuple[np.ndarray, ...] | None:
        """Returns each device's rows, int [count, N'], of each part of a fused linear; None if each has all."""
        size = self.arch.head_size
        if linear == "qkv":
            kv = _entries(self._kv_heads, size)
            return _entries(self._heads, size), kv, kv
        return (self._columns, self._columns) if linear == "gate_up" else None

    def rows(self, linear: str) -> np.ndarray | None:
        """Returns `outputs` as rows of the fused weight, int [count, sum of the N']; None if each device has all."""
        if (outputs := self.outputs(linear)) is None:
            return None
        sizes = [size for _, size in self.arch.linears()[linear]]
        starts = np.cumsum([0, *sizes[:-1]])
        rows = [np.where(x < 0, -1, x + start) for x, start in zip(outputs, starts, strict=True)]
        return np.concatenate(rows, axis=1)

    def split(self, linear: str, weight: parts.Weight, axis: int = 0) -> parts.Weight:
        """Splits a weight into its parts, stacked along a new axis: 0, or 1 for a stack [L, ...] of weights.

        With one device, the weight is returned as it is.
        """
        if self.count == 1:
            return weight
        indices, of_matrix = self._indices(linear)
        split = [parts.assembled([weight], _of_source(0, index), of_matrix) for index in indices]
        return jax.tree.map(lambda *x: jnp.stack(x, axis), *split)

    def whole(self, linear: str, stack: parts.Weight) -> parts.Weight:
        """Joins the parts of a weight, stacked along the first axis: the inverse of `split` with axis 0."""
        if self.count == 1:
            return stack
        indices, axis = self._indices(linear)
        split = [jax.tree.map(lambda x, n=n: x[n], stack) for n in range(self.count)]
        origins = np.full((indices.max() + 1, 2), -1)
        # If several devices have the same key/value head, the first one's copy is taken.
        for device in reversed(range(self.count)):
            mask = indices[device] >= 0
            origins[indices[device][mask]] = _of_source(device, np.flatnonzero(mask))
        return parts.assembled(split, origins, axis)

    def local(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Returns this device's part of a policy's variables; call it inside `sharding.in_group`.

        Weights are already divided (`sharding.Part`). Of biases, adapters and the dense weights of some layers, which
        every device holds whole, it takes its part.
        """
        device = jax.lax.axis_index(sharding.GROUP)

        def take(x: jax.Array, index: np.ndarray | None, axis: int) -> jax.Array:
            if index is None:
                return x
            # Negative indices would count from the end; an index past it gives zeros.
            at = jnp.asarray(np.where(index < 0, x.shape[axis], index))[device]
            return jnp.take(x, at, axis=axis, mode="fill", fill_value=0)

        def part_of(path: tuple[Any, ...], x: Any) -> Any:
            names = [getattr(key, "key", None) for key in path]
            linear = next((name for name in names if name in self.arch.linears()), None)
            if isinstance(x, sharding.Part):
                return x.array[:, 0]
            if linear is None:
                return x
            match names[-1]:
                case "a":
                    return take(x, self.inputs(linear), -2)
                case "b" if (outputs := self.outputs(linear)) is not None:
                    fused = [name for name, _ in self.arch.linears()[linear]]
                    return take(x, outputs[fused.index(names[-2])], -1)
                case "bias":
                    return take(x, self.rows(linear), -1)
                case name if name == linear:  # dense weights of some layers
                    return take(take(x, self.rows(linear), -2), self.inputs(linear), -1)
            return x

        is_part = lambda x: isinstance(x, sharding.Part)
        divided = {name: variables[name] for name in ("frozen", "params") if name in variables}
        return variables | jax.tree_util.tree_map_with_path(part_of, divided, is_leaf=is_part)

    def _indices(self, linear: str) -> tuple[np.ndarray, parts.Axis]:
        """Returns the indices [count, n] of a weight that each device has, and the axis along which they lie."""
        if (rows := self.rows(linear)) is not None:
            return rows, "rows"
        return self.inputs(linear), "columns"

    @functools.cached_property
    def _kv_heads(self) -> np.ndarray:
        """Key/value heads of each device, int [count, n]."""
        count = self.arch.num_kv_heads
        if self.count <= count:
            return _runs(count, self.count)
        heads = np.arange(self.count)[:, None] // (self.count // count)
        return np.where(heads < count, heads, -1)

    @functools.cached_property
    def _heads(self) -> np.ndarray:
        """Query heads of each device, int [count, n]: equally many for each of its key/value heads."""
        heads, kv_heads = self.arch.num_heads, self.arch.num_kv_heads
        group, sharing = heads // kv_heads, max(1, self.count // kv_heads)
        shares = _runs(group, sharing)[np.arange(self.count) % sharing]
        indices = self._kv_heads[:, :, None] * group + shares[:, None]
        mask = (self._kv_heads[:, :, None] >= 0) & (shares[:, None] >= 0)
        return np.where(mask, indices, -1).reshape(self.count, -1)

    @functools.cached_property
    def _columns(self) -> np.ndarray:
        """MLP channels of each device, int [count, n]."""
        width = self.arch.ffn_width
        # gate_up is divided along its rows, and down along its columns.
        tile = math.lcm(self._tile("rows"), self._tile("columns"))
        if width >= _TILE * self.count:
            tile = math.lcm(_TILE, tile)
        return _entries(_runs(-(-width // tile), self.count), tile, limit=width)


def _runs(total: int, count: int) -> np.ndarray:
    """Divides 0 ... total - 1 into `count` consecutive runs of equal length: [count, n], padded with -1."""
    indices = np.arange(count * -(-total // count)).reshape(count, -1)
    return np.where(indices < total, indices, -1)


def _entries(tiles: np.ndarray, size: int, limit: int | None = None) -> np.ndarray:
    """Expands indices [count, n] of tiles of `size` entries to indices [count, n * size] of entries, below `limit`."""
    indices = tiles[:, :, None] * size + np.arange(size)
    mask = (tiles[:, :, None] >= 0) & (limit is None or indices < limit)
    return np.where(mask, indices, -1).reshape(len(tiles), -1)


def _of_source(source: int, indices: np.ndarray) -> np.ndarray:
    """Returns (source, index) pairs [..., 2] for `parts.assembled`; -1 stays -1."""
    return np.stack([np.where(indices < 0, -1, source), indices], axis=-1)


def _has_whole_tiles(indices: np.ndarray, tile: int) -> bool:
    """Whether each device's indices consist of whole tiles."""
    if indices.shape[1] % tile:
        return False
    tiles = indices.reshape(-1, tile)
    firsts = tiles[:, :1]
    expected = np.where(firsts < 0, -1, firsts // tile * tile + np.arange(tile))
    return np.array_equal(tiles, expected)
