"""Noise on the scales of the norms: one vector for all rows, or one for each row.

The model adds what the `noise` collection holds to the norms' scales. That is either one vector per norm,
[D], for all rows, or one per row, [B, D]. Vectors per row are not stored: `RowNoise` holds a key and sigma,
from which sampler and trainer compute the noise of their rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qerl_jax.checked import require


def norm_noise(key: Array, sigma: Array | float, shapes: Any) -> Any:
    """Samples the vectors that are added to the scales of the RMSNorms.

    Each leaf has its own key, derived from its place in the tree (in JAX's order, which sorts the
    keys of a dict), so that no two norms see the same vector.

    Args:
        key: the step's key, see `step_key`.
        sigma: standard deviation, see `sigma_schedule`; 0 gives zeros.
        shapes: a tree of anything with a `.shape`, such as `jax.ShapeDtypeStruct`: [L, D] for the
            norms of L stacked layers, [D] for a single one.

    Returns:
        The same tree of float32 arrays.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    draws = [
        jax.random.normal(jax.random.fold_in(key, i), leaf.shape, jnp.float32)
        for i, leaf in enumerate(leaves)
    ]
    # Under jit XLA would fold sigma into a factor inside `normal` and change the last bit: a replayed step
    # would then differ from the original.
    draws = [sigma * draw for draw in jax.lax.optimization_barrier(draws)]
    return jax.tree.unflatten(treedef, draws)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowNoise:
    """Noise that differs between rows: a function of the key and of a row's number.

    Rows with the same number have the same noise, whichever rows run beside them. With "group" the number is
    that of the group: a prompt and its completions share one policy. With "sequence" each completion has its
    own number, and so its own policy for the prompt, too. With "token" the token's place is a second number;
    all tokens of a prompt but the last share one vector.

    Attributes:
        key: uint32, the data of the step's key.
        sigma: float32 scalar.
        shapes: The norms: (path in the `noise` collection, shape) of each, in JAX's order.
        per: "group", "sequence" or "token".
    """

    key: Array
    sigma: Array
    shapes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = dataclasses.field(
        metadata={"static": True}
    )
    per: Literal["group", "sequence", "token"] = dataclasses.field(metadata={"static": True})

    def numbers(self, groups: np.ndarray, size: int) -> np.ndarray:
        """The number of each row, int32 [P, G]; `groups`, int [P], are distinct numbers; `size` is G."""
        groups = np.asarray(groups, np.int32)[:, None]
        rows = np.arange(size, dtype=np.int32)
        return groups + 0 * rows if self.per == "group" else groups * size + rows

    def draw(self, numbers: Array, tokens: Array | None = None) -> dict[str, Any]:
        """The `noise` collection for rows: leaves [L, B, D] for the layers, and [B, D] for the last norm.

        Args:
            numbers: int32 [B].
            tokens: int32 [B], which token each row runs: 0 for its prompt, t + 1 for the token after t
                completion tokens. Used only where every token has its own noise.
        """
        key = jax.random.wrap_key_data(self.key)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        if self.per == "token":
            keys = jax.vmap(jax.random.fold_in)(keys, tokens)
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in self.shapes]
        drawn = jax.vmap(lambda key: norm_noise(key, self.sigma, leaves))(keys)
        tree: dict[str, Any] = {}
        for (path, _), leaf in zip(self.shapes, drawn, strict=True):
            inner = tree
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            # [B, L, D], where the scan over layers wants L first.
            inner[path[-1]] = jnp.moveaxis(leaf, 0, -2)
        return tree


def row_noise(key: Array, sigma: Array | float, shapes: Any, per: str) -> RowNoise:
    """Makes noise that differs between groups, sequences or tokens.

    Args:
        key: The step's key; `rl.aqn.step_key`.
        sigma: Standard deviation.
        shapes: A tree of shapes, `transformer.noise_shapes`.
        per: "group", "sequence" or "token".

    Raises:
        ValueError: For another `per`.
    """
    require(
        per in ("group", "sequence", "token"),
        "per",
        per,
        "must be 'group', 'sequence' or 'token'",
    )
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    named = tuple((tuple(step.key for step in path), tuple(x.shape)) for path, x in leaves)
    return RowNoise(jax.random.key_data(key), jnp.asarray(sigma, jnp.float32), named, per)


def of_rows(
    variables: dict[str, Any], numbers: Array | None, tokens: Array | None = None
) -> dict[str, Any]:
    """Variables for applying the model: where rows have their own noise, it is computed here.

    Args:
        variables: Collections; `noise`, if present, as vectors for all rows or as `RowNoise`.
        numbers: int32 [B], numbers of the rows; used where rows have their own noise.
        tokens: int32 [B]; see `RowNoise.draw`.
    """
    if not has_own(variables):
        return variables
    return variables | {"noise": variables["noise"].draw(numbers, tokens)}


def has_own(variables: dict[str, Any]) -> bool:
    """Whether rows have their own noise."""
    return isinstance(variables.get("noise"), RowNoise)
