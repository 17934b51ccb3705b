"""Noise on the scales of the norms: one vector for all rows, or one for each row.

The model adds the `noise` collection to the scales of the norms. It holds for each norm one vector [D] for all rows,
or one for each row, [B, D]. Vectors per row are not stored: `RowNoise` holds a key and sigma, from which sampler and
trainer compute the same noise for their rows.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qerl_jax.system.checked import require

type Per = Literal["group", "sequence", "token"]


def norm_noise(key: Array, sigma: Any, shapes: Any) -> Any:
    """Samples the vectors that are added to the scales of the RMSNorms: a tree like `shapes` of float32 arrays.

    Each leaf has its own key, derived from its index in the tree (in JAX's order, which sorts the keys of a dict), so
    that no two norms get the same vector.

    Args:
        key: The key of the step; see `aqn.schedule.step_key`.
        sigma: Standard deviation; see `aqn.schedule.sigma_schedule`. 0 gives zeros. A scalar for all norms, or a tree
            like `shapes` of arrays that broadcast to them.
        shapes: A tree whose leaves have a `.shape`, such as `jax.ShapeDtypeStruct`: [L, D] for the
            norms of L stacked layers, [D] for a single norm.
    """
    leaves, treedef = jax.tree.flatten(shapes)
    keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
    pairs = zip(keys, leaves, strict=True)
    draws = [jax.random.normal(key, leaf.shape, jnp.float32) for key, leaf in pairs]
    # The barrier keeps XLA from folding sigma into a factor inside `normal`. That would change the last bit under
    # jit, and a replayed step would differ from the original.
    sigmas = jax.tree.leaves(jax.tree.broadcast(sigma, shapes))
    barred = jax.lax.optimization_barrier(draws)
    draws = [sigma * draw for sigma, draw in zip(sigmas, barred, strict=True)]
    return jax.tree.unflatten(treedef, draws)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowNoise:
    """Noise that differs between rows: a function of the key and of a row's number.

    Rows with the same number have the same noise, whatever other rows are in the batch. With "group" the number is
    that of the group: a prompt and its completions share one noisy policy. With "sequence" each completion has its
    own number, and its own noise in the prompt, too. With "token" the noise also depends on the index of the token; all
    tokens of a prompt but the last share one vector.

    Attributes:
        key: uint32 array, the data of the step's key (`jax.random.key_data`).
        sigma: The standard deviation: a float32 scalar, or a list with one array for each norm, which broadcasts to it.
        shapes: (path in the `noise` collection, shape) of each norm, in JAX's order.
        per: "group", "sequence" or "token".
    """

    key: Array
    sigma: Any
    shapes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = dataclasses.field(
        metadata={"static": True}
    )
    per: Per = dataclasses.field(metadata={"static": True})

    def numbers(self, groups: np.ndarray, size: int) -> np.ndarray:
        """Returns the number of each row, int32 [P, G], from distinct numbers of the groups [P] and their size G."""
        groups = np.asarray(groups, np.int32)[:, None]
        rows = np.arange(size, dtype=np.int32)
        return groups + 0 * rows if self.per == "group" else groups * size + rows

    def draw(self, numbers: Array, tokens: Array | None = None) -> dict[str, Any]:
        """Computes the `noise` collection for rows.

        Args:
            numbers: int32 [B], numbers of the rows.
            tokens: int32 [B], the index of the token that each row runs: 0 for all tokens of the prompt but the last,
                and t + 1 for the token that predicts completion token t, from 0. Used only if `per` is "token".

        Returns:
            float32 leaves, [L, B, D] for the norms of layers and [B, D] for the last norm.
        """
        key = jax.random.wrap_key_data(self.key)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        if self.per == "token":
            assert tokens is not None
            keys = jax.vmap(jax.random.fold_in)(keys, tokens)
        leaves = [jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in self.shapes]
        drawn = jax.vmap(lambda key: norm_noise(key, self.sigma, leaves))(keys)
        tree: dict[str, Any] = {}
        for (path, _), leaf in zip(self.shapes, drawn, strict=True):
            inner = tree
            for name in path[:-1]:
                inner = inner.setdefault(name, {})
            # From [B, L, D] to [L, B, D]: the scan over layers needs L first.
            inner[path[-1]] = jnp.moveaxis(leaf, 0, -2)
        return tree


def row_noise(key: Array, sigma: Any, shapes: Any, per: Per) -> RowNoise:
    """Makes noise that differs between groups, sequences or tokens.

    Args:
        key: As for `norm_noise`.
        sigma: As for `norm_noise`.
        shapes: A tree of shapes, from `transformer.noise_shapes`.
        per: "group", "sequence" or "token".

    Raises:
        ValueError: If `per` is something else.
    """
    rule = "must be 'group', 'sequence' or 'token'"
    require(per in ("group", "sequence", "token"), "per", per, rule)
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    named = tuple((tuple(step.key for step in path), tuple(x.shape)) for path, x in leaves)
    sigmas = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(sigma)]
    sigma = sigmas if len(sigmas) > 1 else sigmas[0]
    return RowNoise(jax.random.key_data(key), sigma, named, per)


def of_rows(
    variables: dict[str, Any], numbers: Array | None, tokens: Array | None = None
) -> dict[str, Any]:
    """Returns variables for applying the model to rows, with a `RowNoise` replaced by its `draw` for these rows."""
    if not has_own(variables):
        return variables
    return variables | {"noise": variables["noise"].draw(numbers, tokens)}


def has_own(variables: dict[str, Any]) -> bool:
    """Whether each row has its own noise (`RowNoise`)."""
    return isinstance(variables.get("noise"), RowNoise)
