"""Determines which linears have a LoRA branch, and its rank and scaling. Names are matched by PEFT's rules."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.config import LoraConfig
from qerl_jax.model.architecture import Architecture
from qerl_jax.system.checked import require


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """The LoRA branches of a fused linear in all layers.

    The branches of all layers are stacked. If ranks differ, all are padded to the largest with zeros in A and in B.
    The gradient of each of the two is a product with the other, so both padded parts stay zero in training.

    Attributes:
        rank: The rank to which all branches are padded.
        ranks: [L][parts], rank of each branch; 0 if a linear has none.
        scalings: [L][parts], scaling of each branch; 0 if there is none.
    """

    rank: int
    ranks: tuple[tuple[int, ...], ...]
    scalings: tuple[tuple[float, ...], ...]

    @property
    def scaling(self) -> float | None:
        """The common scaling of all branches; None if they differ."""
        scalings = {s for layer in self.scalings for s in layer if s}
        return scalings.pop() if len(scalings) == 1 else None

    def rank_mask(self, part: int, index: jax.Array | int) -> jax.Array | None:
        """Returns which ranks a branch has in layer `index`, bool [rank]; None if it has all in every layer."""
        if all(layer[part] == self.rank for layer in self.ranks):
            return None
        return jnp.arange(self.rank) < jnp.asarray(np.array(self.ranks))[index, part]

    def scaled(self, b: jax.Array, part: int, index: jax.Array | int | None = None) -> jax.Array:
        """Multiplies B by the scaling of its branch if scalings differ; else returns B as it is.

        In both cases the result must still be multiplied by `factor`.

        Args:
            b: float32 [R, N] of layer `index`, or of all layers [L, R, N].
            part: Index of the linear among the parts of the fused linear.
            index: The layer; None for all.
        """
        if self.scaling is not None:
            return b
        factors = jnp.asarray(np.array(self.scalings, np.float32)[:, part])
        return b * (factors[:, None, None] if index is None else factors[index])

    @property
    def factor(self) -> float:
        """The factor that remains to be applied after `scaled`: the common scaling, or 1 if scalings differ."""
        return 1.0 if self.scaling is None else self.scaling


@functools.cache
def shapes(lora: LoraConfig, arch: Architecture) -> Mapping[str, LinearShape]:
    """Returns the branches of each fused linear, by its name; a linear without a branch has no entry.

    Raises:
        ConfigError: If a key of `rank_pattern` or `alpha_pattern` matches no linear that has a branch.
    """
    linears, used = {}, set()
    for linear in arch.linears():
        names = [arch.linear_names(linear, index) for index in range(arch.num_layers)]
        used |= {name for layer in names for name in layer if branch(lora, name)}
        pairs = [[branch(lora, name) or (0, 0.0) for name in layer] for layer in names]
        ranks, scalings = (tuple(tuple(p[i] for p in layer) for layer in pairs) for i in (0, 1))
        if any(map(any, ranks)):
            linears[linear] = LinearShape(max(map(max, ranks)), ranks, scalings)
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, field) or {}:
            names_one = any(matches(pattern, name) for name in used)
            require(names_one, f"lora.{field}", pattern, "names no linear that has a branch")
    return linears


def branch(lora: LoraConfig, name: str) -> tuple[int, float] | None:
    """Returns rank and scaling of the branch of a linear such as "model.layers.0.mlp.up_proj"; None if it has none.

    The scaling is alpha / rank, or alpha / sqrt(rank) with `use_rslora` (arXiv:2312.03732).
    """
    if lora.target_modules is not None and not is_named(lora.target_modules, name):
        return None
    rank = by_pattern(lora.rank_pattern, name, lora.rank)
    return rank, lora.factor(by_pattern(lora.alpha_pattern, name, lora.alpha), rank)


def is_named(modules: str | list[str] | tuple[str, ...], name: str) -> bool:
    """Whether PEFT's `target_modules` matches the full name of a linear.

    It is a regular expression for whole names, or a list of names or of their last parts.

    Raises:
        ValueError: If the string is not a regular expression.
    """
    if not isinstance(modules, str):
        return any(f".{name}".endswith(f".{module}") for module in modules)
    try:
        return re.fullmatch(modules, name) is not None
    except re.error as error:
        raise ValueError(
            f"adapter_config.json: {modules!r} is no regular expression: {error}"
        ) from error


def matches(pattern: str, name: str) -> bool:
    """Whether a key of PEFT's `rank_pattern` or `alpha_pattern` matches a linear's name."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def by_pattern(patterns: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """Returns the value of the first pattern that matches a linear's name, or the default."""
    return next((v for p, v in (patterns or {}).items() if matches(p, name)), default)
