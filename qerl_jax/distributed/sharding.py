"""Sharding of a policy among the devices that share one base: a table of rules by axis name.

The devices of such a group run one program. Each holds a part of the base's weights, and a full copy of everything
else. A layer gathers its weights when it is computed, and drops them afterwards (fully sharded data parallel, ZeRO-3:
arXiv:1910.02054). If the group decodes rows together (tensor parallel), parts have other shapes (`model.division`),
and decoding gathers no weights.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

# The mesh axis of the devices of a group.
GROUP = "group"
# Maps each array axis to the mesh axis that divides it; None means that every device has all of it.
RULES = {
    "layers": None,
    # Outputs of a linear: whole blocks of 4-bit weights, and their scales. In tensor parallel, the parts into which a
    # weight was split before.
    "out": GROUP,
    "in": None,
    "any": None,  # axes of the embedding, norms, biases, and trained parameters
}


def axes(path: Sequence[Any], ndim: int) -> tuple[str, ...]:
    """Returns the names of an array's axes, from its path in a tree."""
    names = [getattr(key, "key", None) for key in path]
    if "layers" in names and "weight" in names and ndim > 1:
        return ("layers", "out", *("in",) * (ndim - 2))
    return ("any",) * ndim


def spec(path: Sequence[Any], shape: Sequence[int], count: int) -> P:
    """Returns the sharding of an array in a group of `count` devices; an axis that is no multiple stays whole."""
    pairs = zip(axes(path, len(shape)), shape, strict=True)
    mesh_axes = [RULES[name] if size % count == 0 else None for name, size in pairs]
    return P(*mesh_axes) if any(mesh_axes) else P()


def specs(tree: Any, count: int) -> Any:
    """Returns `spec` of each array of a tree."""
    return jax.tree_util.tree_map_with_path(lambda path, x: spec(path, x.shape, count), tree)


def part(tree: Any, count: int) -> int:
    """Returns the bytes of a tree of arrays on each device of a group."""
    whole = lambda x: math.prod(x.shape) * x.dtype.itemsize
    size = lambda x, at: whole(x) // (count if GROUP in at else 1)
    return sum(jax.tree.leaves(jax.tree.map(size, tree, specs(tree, count))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """A device's part of an array that is divided along its first axis, or its second in a stack of layers."""

    array: jax.Array


def gathered(tree: Any) -> Any:
    """Gathers the parts (`Part`) of a tree from all devices of the group; other arrays stay as they are."""
    is_part = lambda x: isinstance(x, Part)
    gather = lambda x: jax.lax.all_gather(x.array, GROUP, axis=0, tiled=True)
    return jax.tree.map(lambda x: gather(x) if is_part(x) else x, tree, is_leaf=is_part)


def in_group(
    count: int,
    function: Callable,
    *,
    own: Sequence[int] = (),
    gives_own: Any = False,
    places: Mapping[int, P] = MappingProxyType({}),
):
    """Makes a function of arrays on a group (a `shard_map`), in which each device computes on its own parts.

    Args:
        count: Number of devices of the group; for one device `function` is returned as it is.
        function: The computation of one device. Arrays that `RULES` divide are passed as `Part`.
        own: Indices of the arguments that differ between devices. They have a leading axis of size `count`, which the
            function does not see.
        gives_own: True if each device has its own result, which gets such an axis; False if results are the same on
            all devices; or a PartitionSpec by which results are joined. For a tuple, one value per member.
        places: Sharding of further arguments, by index, that `RULES` do not describe. The function sees parts with
            the same number of axes.
    """
    if count == 1:
        return function
    mesh = AbstractMesh((count,), (GROUP,), axis_types=(AxisType.Auto,))

    first = lambda tree: jax.tree.map(lambda x: x[0], tree)
    parted = lambda x, at: Part(x) if GROUP in at else x

    def seen_by_function(n, x, at):
        if n in places:
            return x
        return first(x) if n in own else jax.tree.map(parted, x, at)

    def with_axis(is_own, tree):
        return jax.tree.map(lambda x: x[None], tree) if is_own is True else tree

    def on_device(in_specs, *arguments):
        seen = map(seen_by_function, itertools.count(), arguments, in_specs)
        result = function(*seen)
        if type(gives_own) is tuple:
            return tuple(map(with_axis, gives_own, result))
        return with_axis(gives_own, result)

    def on_group(*arguments):
        in_specs = tuple(
            places[n] if n in places else P(GROUP) if n in own else specs(x, count)
            for n, x in enumerate(arguments)
        )
        as_spec = lambda is_own: {True: P(GROUP), False: P()}.get(is_own, is_own)
        out = jax.tree.map(as_spec, gives_own, is_leaf=lambda x: isinstance(x, P))
        # Results are equal on all devices because each device computes the same.
        options = {"in_specs": in_specs, "out_specs": out, "check_vma": False}
        mapped = jax.shard_map(functools.partial(on_device, in_specs), mesh=mesh, **options)
        return mapped(*arguments)

    return on_group
