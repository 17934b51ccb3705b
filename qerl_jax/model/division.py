"""How a policy is divided among devices that decode rows together (tensor parallel, arXiv:1909.08053).

Each device has some of the heads and some of the columns of the MLP: rows of the weights of qkv and gate_up, columns
of those of o and down. So it runs a policy of the same kind with fewer heads and a narrower MLP, and its products with
o and down are terms of a sum over all devices.

Where there are fewer key/value heads than devices, several devices hold the same one, each with some of its queries.
What does not divide evenly is filled up with zeros, which change no sum.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import parts
from qerl_jax import sharding
from qerl_jax.checked import require
from qerl_jax.model.architecture import Architecture

# Columns of the MLP that stay together: tiles of the kernels; in small models blocks that share a scale.
_TILE = 64
_BLOCKS = {"nvfp4": 16, "mxfp4": 32, "nf4": 64}


@dataclasses.dataclass(frozen=True)
class Division:
    """The parts of a policy, one for each device.

    Numbers of heads, rows and columns are those of the whole policy; -1 stands for one that is filled up with zeros.

    Attributes:
        arch: The shape of the whole policy.
        count: Number of devices.
        weights: Storage format of the linears.
    """

    arch: Architecture
    count: int
    weights: str

    def require(self) -> None:
        """Refuses a division that leaves a device without heads, or cuts blocks that share a scale.

        Raises:
            ConfigError: Names `mesh.tensor`.
        """
        arch, block = self.arch, _BLOCKS.get(self.weights, 1)
        rule = f"must not exceed the {arch.num_heads} heads of the model"
        require(self.count <= arch.num_heads, "mesh.tensor", self.count, rule)
        rule = f"NF4's blocks of {block} must not cross the ends of rows, and the model's width is {arch.width}"
        require(self.weights != "nf4" or arch.width % block == 0, "mesh.tensor", self.count, rule)
        width = self.part.query_width
        rule = (
            f"each device would have {width} inputs of o_proj, in heads of {arch.head_size}, and blocks of "
            f"{block} that share a scale ({self.weights}) would be cut"
        )
        require(_has_whole_blocks(self.inputs("o"), block), "mesh.tensor", self.count, rule)

    @functools.cached_property
    def part(self) -> Architecture:
        """The shape of one part; all parts have the same."""
        return dataclasses.replace(
            self.arch,
            num_heads=self._heads.shape[1],
            num_kv_heads=self._kv_heads.shape[1],
            ffn_width=self._columns.shape[1],
        )

    def inputs(self, linear: str) -> np.ndarray | None:
        """Columns [count, K'] of a linear's weight that each device has; None where each has all."""
        if linear == "o":
            return _times(self._heads, self.arch.head_size)
        return self._columns if linear == "down" else None

    def outputs(self, linear: str) -> tuple[np.ndarray, ...] | None:
        """Rows [count, N'] that each device has of each of the linears that are joined; None where each has all."""
        size = self.arch.head_size
        if linear == "qkv":
            kv = _times(self._kv_heads, size)
            return _times(self._heads, size), kv, kv
        return (self._columns, self._columns) if linear == "gate_up" else None

    def rows(self, linear: str) -> np.ndarray | None:
        """`outputs` as rows of the joined weight."""
        if (found := self.outputs(linear)) is None:
            return None
        sizes = [size for _, size in self.arch.linears()[linear]]
        starts = np.cumsum([0, *sizes[:-1]])
        moved = [np.where(x < 0, -1, x + start) for x, start in zip(found, starts, strict=True)]
        return np.concatenate(moved, axis=1)

    def split(self, linear: str, weight: parts.Weight, axis: int = 0) -> parts.Weight:
        """The parts of a weight along a new axis: the first, or of a stack [L, ...] of weights the second."""
        if self.count == 1:
            return weight
        places, of_matrix = self._places(linear)
        each = [parts.assembled([weight], _of_source(0, place), of_matrix) for place in places]
        return jax.tree.map(lambda *x: jnp.stack(x, axis), *each)

    def whole(self, linear: str, stack: parts.Weight) -> parts.Weight:
        """The weight whose parts lie along the first axis: the inverse of `split`."""
        if self.count == 1:
            return stack
        places, axis = self._places(linear)
        each = [jax.tree.map(lambda x, n=n: x[n], stack) for n in range(self.count)]
        found = np.full((places.max() + 1, 2), -1)
        # Of several devices with the same key/value head the first is asked.
        for device in reversed(range(self.count)):
            held = places[device] >= 0
            found[places[device][held]] = _of_source(device, np.flatnonzero(held))
        return parts.assembled(each, found, axis)

    def own(self, variables: dict[str, Any]) -> dict[str, Any]:
        """A device's part of a policy's variables, inside of `sharding.in_group`.

        Weights are parts already. Of what all devices hold, biases, adapters and dense weights of some layers, a
        device takes its part.
        """
        place = jax.lax.axis_index(sharding.GROUP)

        def taken(x: jax.Array, index: np.ndarray | None, axis: int) -> jax.Array:
            if index is None:
                return x
            # A negative index would count from the end.
            at = jnp.asarray(np.where(index < 0, x.shape[axis], index))[place]
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
                    return taken(x, self.inputs(linear), -2)
                case "b" if (found := self.outputs(linear)) is not None:
                    joined = [name for name, _ in self.arch.linears()[linear]]
                    return taken(x, found[joined.index(names[-2])], -1)
                case "bias":
                    return taken(x, self.rows(linear), -1)
                case name if name == linear:  # dense weights of some layers
                    return taken(taken(x, self.rows(linear), -2), self.inputs(linear), -1)
            return x

        is_part = lambda x: isinstance(x, sharding.Part)
        return {
            name: jax.tree_util.tree_map_with_path(part_of, tree, is_leaf=is_part)
            if name in ("frozen", "params")
            else tree
            for name, tree in variables.items()
        }

    def _places(self, linear: str) -> tuple[np.ndarray, parts.Axis]:
        """What each device has of a weight, and along which axis."""
        if (rows := self.rows(linear)) is not None:
            return rows, "rows"
        return self.inputs(linear), "columns"

    @functools.cached_property
    def _kv_heads(self) -> np.ndarray:
        """Key/value heads of each device."""
        count = self.arch.num_kv_heads
        if self.count > count:
            each = np.arange(self.count)[:, None] // (self.count // count)
        else:
            each = _dealt(count, self.count)
        return np.where(each < count, each, -1)

    @functools.cached_property
    def _heads(self) -> np.ndarray:
        """Query heads of each device: of each of its key/value heads as many."""
        heads, kv_heads = self.arch.num_heads, self.arch.num_kv_heads
        group, sharing = heads // kv_heads, max(1, self.count // kv_heads)
        shares = _dealt(group, sharing)[np.arange(self.count) % sharing]
        found = self._kv_heads[:, :, None] * group + shares[:, None]
        held = (self._kv_heads[:, :, None] >= 0) & (shares[:, None] >= 0)
        return np.where(held, found, -1).reshape(self.count, -1)

    @functools.cached_property
    def _columns(self) -> np.ndarray:
        """Columns of the MLP of each device."""
        width = self.arch.ffn_width
        unit = _TILE if width >= _TILE * self.count else _BLOCKS.get(self.weights, 1)
        return _times(_dealt(-(-width // unit), self.count), unit, most=width)


def _dealt(total: int, count: int) -> np.ndarray:
    """[count, n]: `total` numbers dealt out in turn, as many to each; -1 where there are no more."""
    found = np.arange(count * -(-total // count)).reshape(count, -1)
    return np.where(found < total, found, -1)


def _times(numbers: np.ndarray, size: int, most: int | None = None) -> np.ndarray:
    """[count, n] of things of `size` entries -> [count, n * size] of entries, of which there are `most`."""
    found = numbers[:, :, None] * size + np.arange(size)
    held = (numbers[:, :, None] >= 0) & (most is None or found < most)
    return np.where(held, found, -1).reshape(len(numbers), -1)


def _of_source(source: int, places: np.ndarray) -> np.ndarray:
    """Places in one source, for `parts.assembled`."""
    return np.stack([np.where(places < 0, -1, source), places], axis=-1)


def _has_whole_blocks(places: np.ndarray, block: int) -> bool:
    """Whether each device's places consist of whole blocks."""
    if places.shape[1] % block:
        return False
    blocks = places.reshape(-1, block)
    firsts = blocks[:, :1]
    wanted = np.where(firsts < 0, -1, firsts + np.arange(block))
    return bool(np.array_equal(blocks, wanted) and np.all(firsts[firsts >= 0] % block == 0))
