"""Writes the structure of a JAX tree as JSON, and reads it; a file can name no other classes than those of trees."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import numpy as np

# Packages whose classes are part of the trees that programs return.
_PACKAGES = ("qerl_jax", "pallas_kernels", "optax")
_LEAF = object()


def to_json(structure: jax.tree_util.PyTreeDef) -> Any:
    """Returns a JSON value that describes the structure of a tree.

    Its nodes are None, tuples, lists, dicts with names, dataclasses, and named tuples. Static fields of dataclasses are
    None, numbers, texts, dtypes, structures, and tuples of them.

    Raises:
        TypeError: If something else is in it.
    """
    return _encoded(jax.tree.unflatten(structure, [_LEAF] * structure.num_leaves))


def from_json(value: Any) -> jax.tree_util.PyTreeDef:
    """Returns the structure that a JSON value describes.

    Raises:
        ValueError: If it describes none.
    """
    try:
        return jax.tree.structure(_decoded(value))
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        raise ValueError(f"no tree: {error}") from error


def _encoded(node: Any) -> Any:
    if node is _LEAF:
        return "*"
    if node is None:
        return None
    if isinstance(node, bool | int | float | str):
        return {"value": node}
    if isinstance(node, np.dtype):
        return {"dtype": node.name}
    if isinstance(node, jax.tree_util.PyTreeDef):
        return {"structure": to_json(node)}
    if isinstance(node, dict):
        if not all(isinstance(name, str) for name in node):
            raise TypeError(f"a dict of a tree has other keys than names: {[*node]}")
        return {"dict": {name: _encoded(member) for name, member in node.items()}}
    if dataclasses.is_dataclass(node):
        names = [field.name for field in dataclasses.fields(node)]
        return {_name(node): {name: _encoded(getattr(node, name)) for name in names}}
    if hasattr(node, "_fields"):
        return {_name(node): {name: _encoded(getattr(node, name)) for name in node._fields}}
    if isinstance(node, tuple | list):
        return {type(node).__name__: [_encoded(member) for member in node]}
    raise TypeError(f"no node of a tree: {type(node).__qualname__}")


def _decoded(value: Any) -> Any:
    if value == "*":
        return _LEAF
    if value is None:
        return None
    ((kind, content),) = value.items()
    match kind:
        case "value":
            return content
        case "dtype":
            return np.dtype(content)
        case "structure":
            return from_json(content)
        case "dict":
            return {name: _decoded(member) for name, member in content.items()}
        case "tuple" | "list":
            members = [_decoded(member) for member in content]
            return members if kind == "list" else tuple(members)
    return _class(kind)(**{name: _decoded(member) for name, member in content.items()})


def _name(node: Any) -> str:
    of = type(node)
    if of.__module__.partition(".")[0] not in _PACKAGES:
        raise TypeError(f"no node of a tree: {of.__module__}.{of.__qualname__}")
    return f"{of.__module__}:{of.__qualname__}"


def _class(name: str) -> Any:
    """Returns the class with a name that `_name` gave."""
    module, _, path = name.partition(":")
    if module.partition(".")[0] not in _PACKAGES:
        raise ValueError(f"no class of a tree: {name}")
    named = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    is_tuple = isinstance(named, type) and issubclass(named, tuple) and hasattr(named, "_fields")
    if not (is_tuple or (isinstance(named, type) and dataclasses.is_dataclass(named))):
        raise ValueError(f"no class of a tree: {name}")
    return named
