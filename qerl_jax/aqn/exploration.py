"""Adaptive Quantization Noise (AQN) over a run: the noise of each step, and its size relative to the norms."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from qerl_jax.aqn import schedule as aqn
from qerl_jax.aqn.draw import row_noise
from qerl_jax.config import NoiseConfig
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.model import transformer

# The metric that an adaptive sigma follows.
_SIGNALS = {"entropy": "sampling/entropy", "kl": "sampling/kl_k3", "reward": "reward"}


@dataclasses.dataclass(frozen=True)
class StepNoise:
    """The noise of a step.

    Attributes:
        vectors: The `noise` collection, or `RowNoise`; None for no noise.
        metrics: Metrics under `aqn/`; empty without noise.
        in_updates: Whether updates have the same noise as sampling.
    """

    vectors: Any = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_updates: bool = False

    @property
    def variables(self) -> dict[str, Any]:
        """The noise as a collection of variables for sampling; empty without noise."""
        return {} if self.vectors is None else {"noise": self.vectors}

    @property
    def of_updates(self) -> Any:
        """The noise of updates; None if they have none."""
        return self.vectors if self.in_updates else None

    def on(self, replicas: Replicas) -> Self:
        """Returns the same noise on the devices of all replicas."""
        return dataclasses.replace(self, vectors=replicas.hold(self.vectors))


@dataclasses.dataclass(frozen=True)
class Exploration:
    """The noise of a run as a function of the step, and of sigma if sigma follows a metric.

    Attributes:
        cfg: The noise; None for no noise.
        stage: Maps a position on the schedule to the stage; stage 0 has no noise.
        scheduled: Maps a position on the schedule to sigma; None if sigma is adaptive.
        draw: Maps step and sigma to the `noise` collection, or to `RowNoise`.
    """

    cfg: NoiseConfig | None
    stage: Callable[[int], Any] = lambda schedule_step: 0
    scheduled: Callable[[int], jax.Array] | None = None
    draw: Callable[[int, Any], Any] = lambda step, sigma: None

    @property
    def first(self) -> float | None:
        """The initial sigma of an adaptive schedule; None for other schedules."""
        return self.cfg.sigma_start if self.cfg is not None and self.cfg.adaptive else None

    def __call__(self, step: int, schedule_step: int, sigma: float | None) -> StepNoise:
        """Returns the noise of a step.

        Args:
            step: Optimizer steps done; determines the random numbers.
            schedule_step: The run's position on the schedule.
            sigma: Sigma of an adaptive schedule, from `adapted`; other schedules do not use it.
        """
        if self.cfg is None:
            return StepNoise()
        stage = int(self.stage(schedule_step))
        now = self.scheduled(schedule_step) if self.scheduled else jnp.float32(stage and sigma)
        metrics = {"aqn/sigma": float(now), "aqn/stage": stage}
        return StepNoise(self.draw(step, now), metrics, self.cfg.scope == "both")

    def adapted(
        self, sigma: float | None, schedule_step: int, metrics: Mapping[str, float]
    ) -> float | None:
        """Returns the next sigma of an adaptive schedule, given the metrics of a step; others return `sigma`.

        It does not change in stage 0, where metrics do not depend on it.
        """
        adaptive = self.cfg.adaptive if self.cfg is not None else None
        if self.cfg is None or adaptive is None or sigma is None or not self.stage(schedule_step):
            return sigma
        return aqn.adapted_sigma(
            sigma,
            float(metrics[_SIGNALS[adaptive.metric]]),
            target=adaptive.target,
            rate=adaptive.rate,
            lowest=self.cfg.sigma_end,
            highest=self.cfg.sigma_start,
        )


def make_exploration(
    cfg: NoiseConfig | None, model: transformer.Transformer, key: jax.Array, total_steps: int
) -> Exploration:
    """Makes the noise of a run of `total_steps` optimizer steps; `key` is used only for the noise."""
    if cfg is None:
        return Exploration(None)
    stages, sigma = {"num_stages": cfg.num_stages, "total_steps": total_steps}, None
    if cfg.adaptive is None:
        start, end, exponent = cfg.sigma_start, cfg.sigma_end, cfg.exponent
        sigma = aqn.sigma_schedule(
            cfg.schedule, sigma_start=start, sigma_end=end, exponent=exponent, **stages
        )
    draw = jax.jit(lambda step, sigma: _drawn(cfg, model, aqn.step_key(key, step), sigma))
    return Exploration(cfg, lambda step: aqn.stage(step, **stages), sigma, draw)


def abstract_noise(cfg: NoiseConfig, model: transformer.Transformer) -> Any:
    """Returns shapes and dtypes of a run's noise."""
    return jax.eval_shape(lambda: _drawn(cfg, model, jax.random.key(0), 0.0))


def _drawn(cfg, model, key, sigma):
    shapes = transformer.noise_shapes(model.arch, cfg.final_norm)
    if cfg.per == "rollout":
        return aqn.norm_noise(key, sigma, shapes)
    return row_noise(key, sigma, shapes, cfg.per)


def mean_scales(
    model: transformer.Transformer, params: Any, frozen: Any, *, final_norm: bool = False
) -> dict[str, float]:
    """Returns the mean |scale| over all channels and layers, by the name of each norm that has noise.

    A norm in `params` replaces the frozen one; `final_norm` says whether the norm before the head has noise.
    """
    variables = flatten_dict(frozen) | flatten_dict(params)
    paths = flatten_dict(transformer.noise_shapes(model.arch, final_norm))
    mean_size = lambda x: jnp.mean(jnp.abs(x.astype(jnp.float32)))
    means = jax.jit(lambda arrays: [*map(mean_size, arrays)])([variables[path] for path in paths])
    return {path[-2]: float(mean) for path, mean in zip(paths, means, strict=True)}


def describe(
    cfg: NoiseConfig, model: transformer.Transformer, params: Any, frozen: Any
) -> list[str]:
    """Returns lines for the start of a run: sigma relative to the norms' scales, and whether rounding exceeds it."""
    means = mean_scales(model, params, frozen, final_norm=cfg.final_norm)
    middle = sum(means.values()) / len(means)
    named = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items())
    first, last = cfg.sigma_start / middle, cfg.sigma_end / middle
    lines = [
        f"noise: the mean |scale| of the norms is {middle:.3g} ({named}), so sigma from "
        f"{cfg.sigma_start:.3g} to {cfg.sigma_end:.3g} is {first:.2%} to {last:.3%} of a scale"
    ]
    if (adaptive := cfg.adaptive) is not None:
        lines.append(
            f"noise: sigma begins at {cfg.sigma_start:.3g} and follows {_SIGNALS[adaptive.metric]}: up by a factor "
            f"of {adaptive.rate:g} after a rollout below {adaptive.target:g}, else down, within those bounds"
        )
    if model.dtype == jnp.bfloat16 and last < aqn.FLOOR:
        lines.append(
            f"noise: below sigma = {aqn.FLOOR * middle:.2g} ({aqn.FLOOR:.2%} of a scale) rounding to bfloat16 "
            f"adds more noise than AQN; at sigma_end rounding adds {aqn.flips_to_signal(last):.0f} times as much noise "
            "as AQN"
        )
    return lines
