"""AdamW: the learning-rate schedule, the optax transformation, and a step that can be skipped."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from qerl_jax.config import OptimConfig
from qerl_jax.rl import adam8bit


def learning_rate(cfg: OptimConfig, total_steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """Returns the learning rate as a function of the steps done: linear warm-up, then cosine, linear or constant.

    No update has the rate 0: the first has peak / warm-up steps, and a decay has not reached its end in the last.
    """
    peak, end = cfg.learning_rate, cfg.learning_rate * cfg.min_lr_ratio
    warmup = round(cfg.warmup_ratio * total_steps)
    rest = max(1, total_steps - warmup)
    decay = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(peak, end, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.lr_scheduler_type]()
    if warmup == 0:
        return decay
    return optax.join_schedules(
        [optax.linear_schedule(peak / warmup, peak, warmup - 1), decay], [warmup]
    )


def transformation(cfg: OptimConfig) -> optax.GradientTransformation:
    """Returns gradient clipping and AdamW (arXiv:1711.05101) without the learning rate, which `step` applies.

    Weight decay is applied to matrices, but not to norms (leaves called `scale`) and biases.
    """

    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("scale", "bias"), params
        )

    adam = {"adamw": optax.scale_by_adam, "adamw_8bit": adam8bit.scale_by_adam_8bit}[cfg.optimizer]
    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        adam(cfg.adam_beta1, cfg.adam_beta2, cfg.adam_epsilon),
        optax.add_decayed_weights(cfg.weight_decay, mask=decays),
    )


def step(
    tx: optax.GradientTransformation,
    rate: jax.Array | float,
    keep: jax.Array | bool,
    grads: Any,
    opt_state: Any,
    params: Any,
) -> tuple[Any, Any]:
    """Does one step of an optimizer, or none if `keep` is false; returns the parameters and the state of `tx`.

    This is a branch, not a selection between the new and the old state. So XLA updates the state in
    place, and a step needs no second copy of the moments.

    Args:
        tx: Any optax transformation; its updates are multiplied by the rate and subtracted.
        rate: Learning rate, a scalar.
        keep: Whether the step is made, a scalar.
        grads: Gradients, a tree like `params`.
        opt_state: State of `tx`.
        params: Float32 tree.
    """

    def moved(grads, opt_state, params):
        moves, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.map(lambda p, move: p - rate * move, params, moves), opt_state

    skipped = lambda _, opt_state, params: (params, opt_state)
    return jax.lax.cond(keep, moved, skipped, grads, opt_state, params)
