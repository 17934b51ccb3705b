"""Adaptive Quantization Noise (AQN) over a run: the noise of each step, and its size relative to the norms."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from qerl_jax.aqn import schedule as aqn
from qerl_jax.aqn.draw import row_noise
from qerl_jax.config import NoiseConfig
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.model import transformer

# The metric that an adaptive sigma follows.
_SIGNALS = {"entropy": "entropy", "kl": "sampling/kl_k3", "reward": "reward"}


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
        draw: Maps step, sigma, `sizes` and `per` to the `noise` collection, or to `RowNoise`.
        sizes: What sigma is multiplied by for each norm, from `sizes_of`; None if sigma is absolute.
        fraction: The result of `median_fraction`.
    """

    cfg: NoiseConfig | None
    stage: Callable[[int], Any] = lambda schedule_step: 0
    scheduled: Callable[[int], jax.Array] | None = None
    draw: Callable[[int, Any, Any, str], Any] = lambda step, sigma, sizes, per: None
    sizes: Any = None
    fraction: float = math.nan

    @property
    def seeks(self) -> bool:
        """Whether the first sigma is to be found from samples, since sigma follows a divergence."""
        adaptive = self.cfg.adaptive if self.cfg is not None else None
        return adaptive is not None and adaptive.metric == "kl"

    @property
    def first(self) -> float | None:
        """The initial sigma of a schedule that follows entropy or reward; None for other schedules."""
        if self.cfg is None or self.cfg.adaptive is None or self.seeks:
            return None
        return self.cfg.sigma_start

    def on_norms(self, scales: Any) -> Self:
        """Returns the same noise with its size on norms of these scales, from `norm_scales`."""
        assert self.cfg is not None
        fraction = median_fraction(self.cfg, scales)
        return dataclasses.replace(self, sizes=sizes_of(self.cfg, scales), fraction=fraction)

    def of_all_rows(self, step: int, sigma: float) -> Any:
        """Returns noise of a step with another sigma, as one draw for all rows whatever `per` is."""
        return self.draw(step, jnp.float32(sigma), self.sizes, "rollout")

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
        now = (
            self.scheduled(schedule_step) if self.scheduled else jnp.float32(sigma if stage else 0)
        )
        metrics = {"aqn/sigma": float(now), "aqn/stage": stage}
        vectors = self.draw(step, now, self.sizes, self.cfg.per)
        return StepNoise(vectors, metrics, self.cfg.scope == "both")

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
    """Makes the noise of a run of `total_steps` optimizer steps; `key` is used only for the noise.

    A relative sigma also needs the norms: `Exploration.on_norms`.
    """
    if cfg is None:
        return Exploration(None)
    stages, sigma = {"num_stages": cfg.num_stages, "total_steps": total_steps}, None
    if cfg.adaptive is None:
        start, end, exponent = cfg.sigma_start, cfg.sigma_end, cfg.exponent
        sigma = aqn.sigma_schedule(
            cfg.schedule, sigma_start=start, sigma_end=end, exponent=exponent, **stages
        )
    drawn = functools.partial(_drawn, cfg, model)
    draw = jax.jit(
        lambda step, *sigma_and_per: drawn(aqn.step_key(key, step), *sigma_and_per),
        static_argnums=3,
    )
    return Exploration(cfg, lambda step: aqn.stage(step, **stages), sigma, draw)


def abstract_noise(cfg: NoiseConfig, model: transformer.Transformer) -> Any:
    """Returns shapes and dtypes of a run's noise."""
    shapes = transformer.noise_shapes(model.arch, cfg.final_norm)
    sizes = sizes_of(cfg, jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes))
    return jax.eval_shape(lambda: _drawn(cfg, model, jax.random.key(0), 0.0, sizes, cfg.per))


def _drawn(cfg, model, key, sigma, sizes, per):
    shapes = transformer.noise_shapes(model.arch, cfg.final_norm)
    if sizes is not None:
        sigma = jax.tree.map(lambda size: sigma * size, sizes)
    if per == "rollout":
        return aqn.norm_noise(key, sigma, shapes)
    return row_noise(key, sigma, shapes, per)


def norm_scales(cfg: NoiseConfig, model: transformer.Transformer, params: Any, frozen: Any) -> Any:
    """Returns the scales of the norms that have noise, on the host: a tree like that of the noise, float32.

    A norm in `params` replaces the frozen one.
    """
    variables = flatten_dict(frozen) | flatten_dict(params)
    paths = flatten_dict(transformer.noise_shapes(model.arch, cfg.final_norm))
    scales = jax.device_get({path: variables[path] for path in paths})
    return unflatten_dict({path: np.asarray(x, np.float32) for path, x in scales.items()})


def sizes_of(cfg: NoiseConfig, scales: Any) -> Any:
    """Returns what a relative sigma is multiplied by; None for an absolute one.

    It is the root mean square of each norm's scale: [L, 1] for the norms of L stacked layers, [1] for a single norm.
    """
    if cfg.unit == "absolute":
        return None
    return jax.tree.map(lambda x: np.sqrt(np.mean(np.square(x), -1, keepdims=True)), scales)


def median_fraction(cfg: NoiseConfig, scales: Any) -> float:
    """Returns how large noise of sigma = 1 is: the median of its standard deviation over |scale|, of all channels."""
    sizes = sizes_of(cfg, scales) or jax.tree.map(np.ones_like, scales)
    with np.errstate(divide="ignore"):  # a scale of 0
        fractions = jax.tree.map(lambda size, x: (size / np.abs(x)).ravel(), sizes, scales)
    return float(np.median(np.concatenate(jax.tree.leaves(fractions))))


def describe(cfg: NoiseConfig, dtype: Any, unit: float) -> list[str]:
    """Returns lines for the start of a run: sigma relative to the norms' scales, and whether rounding exceeds it.

    Args:
        cfg: The noise.
        dtype: That of the model.
        unit: The result of `median_fraction`.
    """
    first, last = cfg.sigma_start * unit, cfg.sigma_end * unit
    times = "" if cfg.unit == "absolute" else " times the root mean square of each norm's scale"
    lines = [
        f"noise: sigma from {cfg.sigma_start:.3g} to {cfg.sigma_end:.3g}{times} is {first:.2%} to {last:.3%} of a "
        "scale of the norms (median)"
    ]
    if (adaptive := cfg.adaptive) is not None:
        begin = (
            "where the stage without noise says"
            if adaptive.metric == "kl"
            else f"at {cfg.sigma_start:.3g}"
        )
        lines.append(
            f"noise: sigma begins {begin} and follows {_SIGNALS[adaptive.metric]}: up by a factor "
            f"of {adaptive.rate:g} after a rollout below {adaptive.target:g}, else down, within those bounds"
        )
    if dtype == jnp.bfloat16 and last < aqn.FLOOR:
        lines.append(
            f"noise: below sigma = {aqn.FLOOR / unit:.2g} ({aqn.FLOOR:.2%} of a scale) rounding to bfloat16 "
            f"adds more noise than AQN; at sigma_end rounding adds {aqn.flips_to_signal(last):.0f} times as much noise "
            "as AQN"
        )
    return lines
