"""Adaptive Quantization Noise over a run: what it is drawn from at each step, and how large that is."""

from typing import Any

import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from qerl_jax.config import NoiseConfig
from qerl_jax.model import transformer
from qerl_jax.rl import aqn


def mean_scales(
    model: transformer.Transformer, params: Any, frozen: Any, *, final_norm: bool = False
) -> dict[str, float]:
    """Means of |scale| over all channels and layers, by the name of each norm that is perturbed.

    Args:
        model: The policy.
        params: What trains; a norm in it takes the place of the frozen one.
        frozen: The rest of the policy.
        final_norm: Whether the norm before the head is perturbed.
    """
    held = flatten_dict(frozen) | flatten_dict(params)
    paths = flatten_dict(transformer.noise_shapes(model.arch, final_norm))
    return {path[-2]: float(jnp.mean(jnp.abs(held[path].astype(jnp.float32)))) for path in paths}


def describe(
    cfg: NoiseConfig, model: transformer.Transformer, params: Any, frozen: Any
) -> list[str]:
    """Lines for the start of a run: what sigma means in units of the norms' scales, and where rounding drowns it.

    Args:
        cfg: The noise.
        model: The policy.
        params: What trains.
        frozen: The rest of the policy.
    """
    means = mean_scales(model, params, frozen, final_norm=cfg.final_norm)
    middle = sum(means.values()) / len(means)
    named = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
    first, last = cfg.sigma_start / middle, cfg.sigma_end / middle
    lines = [
        f"noise: the mean |scale| of the norms is {middle:.3g} ({named}), so sigma from "
        f"{cfg.sigma_start:.3g} to {cfg.sigma_end:.3g} is {first:.2%} to {last:.3%} of a scale"
    ]
    if model.dtype == jnp.bfloat16 and last < aqn.FLOOR:
        lines.append(
            f"noise: below sigma = {aqn.FLOOR * middle:.2g} ({aqn.FLOOR:.2%} of a scale) rounding to bfloat16 "
            "adds more noise than it is given; at sigma_end rounding's is "
            f"{aqn.flips_to_signal(last):.0f} times the signal"
        )
    return lines
