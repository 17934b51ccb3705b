"""Noise on the scales of the norms: one vector for all rows, or vectors of each row's own.

The model adds what the `noise` collection holds to the norms' scales. Either that is one vector of each
norm, [D], under which all rows run, or one for each row, [B, D]. The latter are not kept: `RowNoise`
holds a key and sigma, of which sampler and trainer draw the rows that they have before them.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qerl_jax.checked import require


def norm_noise(key: Array, sigma: Array | float, shapes: Any) -> Any:
    """Draws the vectors that are added to the scales of the RMSNorms.

    Each leaf has a key of its own, made from its place in the tree (in JAX's order, which sorts the
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
    # Under jit XLA would fold sigma into a factor inside `normal` and so move the last bit, by
    # which a replayed step would differ from the one it replays.
    draws = [sigma * draw for draw in jax.lax.optimization_barrier(draws)]
    return jax.tree.unflatten(treedef, draws)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowNoise:
    """Noise of which rows have their own: a function of the key and of a row's number.

    Rows of one number run under the same noise, wherever and with whomever they run. Numbers are those
    of groups, in which a prompt and its completions share one policy; of sequences, each of which has a
    policy of its own for its prompt, too; or, where every token has its own, of sequences again, with
    the token's place as a second number, and one draw for all of a prompt but its last token.

    Attributes:
        key: uint32, data of the step's key.
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
        """The number of each row, int32 [P, G]; groups int [P] are numbers that differ, size is G."""
        groups = np.asarray(groups, np.int32)[:, None]
        rows = np.arange(size, dtype=np.int32)
        return groups + 0 * rows if self.per == "group" else groups * size + rows

    def draw(self, numbers: Array, tokens: Array | None = None) -> dict[str, Any]:
        """The `noise` collection of rows: leaves [L, B, D] in the layers, and [B, D] of the last norm.

        Args:
            numbers: int32 [B].
            tokens: int32 [B], what each row runs: 0 for its prompt, t + 1 for the token after t
                completion tokens. Read where every token has its own noise.
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
    """Noise of which groups, sequences or tokens have their own.

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
    """Variables that a model can be applied to: where rows have noise of their own, it is drawn.

    Args:
        variables: Collections; `noise`, if there, as vectors of all rows or as `RowNoise`.
        numbers: int32 [B], numbers of the rows; read where noise is theirs.
        tokens: int32 [B]; see `RowNoise.draw`.
    """
    if not has_own(variables):
        return variables
    return variables | {"noise": variables["noise"].draw(numbers, tokens)}


def has_own(variables: dict[str, Any]) -> bool:
    """Whether rows have noise of their own."""
    return isinstance(variables.get("noise"), RowNoise)
