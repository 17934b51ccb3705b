"""Packs small arrays into one for transfers between host and device, since each transfer has a fixed cost."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree of bool and 32-bit arrays, stored in one array. It can be packed and unpacked on the host or under jit."""

    # int32 [n], the concatenated bits of the arrays; a bool takes a word.
    words: Any
    # The structure of the tree, and the shape and dtype of each array.
    form: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Packs a tree of arrays: all NumPy arrays or scalars, or all JAX arrays."""
        leaves, structure = jax.tree.flatten(tree)
        joined = (np if isinstance(leaves[0], np.ndarray) else jnp).concatenate
        kinds = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        return cls(joined([_words(leaf) for leaf in leaves]), (structure, kinds))

    def tree(self) -> Any:
        """Unpacks the tree; from NumPy words, its arrays are NumPy arrays, and views except for those of bool."""
        structure, kinds = self.form
        leaves, begin = [], 0
        for shape, dtype in kinds:
            end = begin + math.prod(shape)
            words = self.words[begin:end].reshape(shape)
            leaves.append(words != 0 if dtype.kind == "b" else words.view(dtype))
            begin = end
        return jax.tree.unflatten(structure, leaves)


def _words(array: Any) -> Any:
    """Returns the bits of an array, int32 [n]."""
    flat = array.ravel()
    return flat.astype(np.int32) if flat.dtype.kind == "b" else flat.view(np.int32)
