"""Small arrays that travel between host and device as one: each transfer costs as much as many bytes."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree of arrays of bool or of 32 bits, in one array. It is packed and unpacked on the host, or in a program.

    Attributes:
        words: int32 [n], the arrays' bits one behind the other; a bool takes a word.
        form: The structure of the tree, and the shape and dtype of each array: static, as shapes of arrays are.
    """

    words: Any
    form: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> Self:
        """Packs a tree of arrays, all of NumPy or all of JAX; NumPy's scalars count as arrays."""
        leaves, structure = jax.tree.flatten(tree)
        joined = (np if isinstance(leaves[0], np.ndarray) else jnp).concatenate
        kinds = tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves)
        return cls(joined([_words(leaf) for leaf in leaves]), (structure, kinds))

    def tree(self) -> Any:
        """The tree again; of NumPy's arrays, which are views, if the words are NumPy's."""
        structure, kinds = self.form
        leaves, begin = [], 0
        for shape, dtype in kinds:
            end = begin + math.prod(shape)
            words = self.words[begin:end].reshape(shape)
            leaves.append(words != 0 if dtype.kind == "b" else words.view(dtype))
            begin = end
        return jax.tree.unflatten(structure, leaves)


def _words(array: Any) -> Any:
    """The bits of an array, int32 [n]."""
    flat = array.ravel()
    return flat.astype(np.int32) if flat.dtype.kind == "b" else flat.view(np.int32)
