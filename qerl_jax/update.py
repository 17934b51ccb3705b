"""Experience in, new adapters out: one jitted call per rollout, whatever the number of optimizer steps in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax import grpo, logprobs, masked
from qerl_jax.config import GrpoConfig, OptimConfig
from qerl_jax.model import Transformer, head


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a run learns; all keys of its randomness follow from the step.

    Attributes:
        step: int32, optimizer steps done.
        params: The adapter, or with `trainable = "full"` the layers' own weights, float32.
        opt_state: Of the optax chain.
        skipped: int32, optimizer steps that changed nothing: no signal, or a gradient that was not finite.
        reference: A copy of `params` that follows them (`grpo.sync_ref_model`), or None where the
            reference is the base.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    skipped: jax.Array
    reference: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout as the trainer sees it; B rows, T = longest prompt + longest completion, C completion tokens.

    Attributes:
        tokens: int32 [B, T], prompt and completion without a gap, right-padded.
        prompt_lengths: int32 [B].
        completions: int32 [B, C].
        mask: bool [B, C], the completion tokens that are learned from.
        behaviour_logps: float32 [B, C], the sampler's.
        advantages: float32 [B].
    """

    tokens: jax.Array
    prompt_lengths: jax.Array
    completions: jax.Array
    mask: jax.Array
    behaviour_logps: jax.Array
    advantages: jax.Array


def learning_rate(cfg: OptimConfig, total_steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """Rate of the update made after `step` steps: linear warm-up, then cosine, linear or constant.

    The first update already learns, at peak / warm-up steps, and the last one still does.
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


def optimizer(cfg: OptimConfig) -> optax.GradientTransformation:
    """Clipping and AdamW without its learning rate, which `make_update` applies as a function of the step.

    Weight decay acts on matrices; norms (leaves called `scale`) and biases never decay.
    """

    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key not in ("scale", "bias"), params
        )

    return optax.chain(
        optax.clip_by_global_norm(cfg.max_grad_norm),
        optax.scale_by_adam(cfg.adam_beta1, cfg.adam_beta2, cfg.adam_epsilon),
        optax.add_decayed_weights(cfg.weight_decay, mask=decays),
    )


def init_state(params: Any, cfg: OptimConfig, *, keep_reference: bool = False) -> TrainState:
    """The state before the first step, with a copy of `params` as the reference if one is kept."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(jnp.int32(0), params, optimizer(cfg).init(params), jnp.int32(0), reference)


def token_logps(
    model: Transformer,
    variables: dict[str, Any],
    experience: Experience,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    adapter: bool = True,
    remat: bool = False,
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every completion token and entropy of its distribution, float32 [B, C] each."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    hidden, _ = model.apply(variables, experience.tokens, adapter=adapter, remat=remat, rngs=rngs)
    # The state at the token before predicts a token: the last of the prompt predicts the first of
    # the completion.
    rows, length = experience.completions.shape
    before = experience.prompt_lengths[:, None] - 1 + jnp.arange(length)
    states = jnp.take_along_axis(hidden, before[..., None], axis=1)
    logps, entropy = logprobs.of_targets(
        states.reshape(rows * length, -1),
        head(variables["frozen"]),
        experience.completions.reshape(-1),
        temperature=temperature,
        num_tokens=num_tokens,
    )
    return logps.reshape(rows, length), entropy.reshape(rows, length)


def make_update(
    model: Transformer,
    *,
    grpo_cfg: GrpoConfig,
    optim_cfg: OptimConfig,
    total_steps: int,
    temperature: float,
    num_tokens: int,
    remat: bool,
    max_completion_length: int | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Builds the jitted update.

    A rollout of B rows is shuffled with the key and cut into optimizer batches of m * a rows (m rows
    per micro-batch, a micro-batches). All `num_iterations` passes take them in that one order, as
    TRL's do. Gradients of micro-batches are summed by a scan, so memory is that of one.

    Args:
        model: The policy.
        grpo_cfg: The objective.
        optim_cfg: AdamW and the geometry of its batches.
        total_steps: Optimizer steps of the whole run, for the learning rate.
        temperature: Of all log-probabilities.
        num_tokens: Ids that the tokenizer has.
        remat: Whether the backward pass recomputes each layer.
        max_completion_length: What `dr_grpo` divides by; None means the width of the rows.

    Returns:
        update(state, frozen, experience, noise, key) -> (state, metrics). `noise` is the tree under
        which the policy acts here too, or None; `state` is donated. Metrics are scalars: means over
        the optimizer steps, under TRL's names; `sampling/...` compare the policy before its first
        step with the sampler.
    """
    tx = optimizer(optim_cfg)
    rate = learning_rate(optim_cfg, total_steps)
    micro_rows, accumulation = (
        optim_cfg.per_device_train_batch_size,
        optim_cfg.gradient_accumulation_steps,
    )
    epsilon_high = grpo_cfg.epsilon if grpo_cfg.epsilon_high is None else grpo_cfg.epsilon_high

    def logps_of(params, frozen, noise, batch, **options):
        variables = {"params": params, "frozen": frozen}
        if noise is not None:
            variables["noise"] = noise
        return token_logps(
            model, variables, batch, temperature=temperature, num_tokens=num_tokens, **options
        )

    def in_micro_batches(f, experience):
        rows = jax.tree.map(lambda x: x.reshape(-1, micro_rows, *x.shape[1:]), experience)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(f, rows))

    def loss_fn(params, frozen, noise, batch, totals, dropout_key):
        experience, fixed = batch
        logps, entropy = logps_of(
            params, frozen, noise, experience, remat=remat, dropout_key=dropout_key
        )
        current = jax.lax.stop_gradient(logps)
        old = fixed.get("old_logps", current)
        if grpo_cfg.old_logprobs == "behaviour":
            old = experience.behaviour_logps
        weights = None
        if grpo_cfg.importance_sampling_correction:
            weights = grpo.truncated_importance_weights(
                old,
                experience.behaviour_logps,
                experience.mask,
                mode=grpo_cfg.importance_sampling_mode,
                clip_max=grpo_cfg.importance_sampling_clip_max,
            )
        loss, counts = grpo.policy_loss(
            logps,
            old,
            experience.advantages,
            experience.mask,
            loss_type=grpo_cfg.loss_type,
            epsilon=grpo_cfg.epsilon,
            epsilon_high=epsilon_high,
            delta=grpo_cfg.delta,
            beta=grpo_cfg.beta,
            ref_logps=fixed.get("ref_logps"),
            kl_estimator=grpo_cfg.kl_estimator,
            use_bias_correction_kl=grpo_cfg.use_bias_correction_kl,
            importance_sampling_level=grpo_cfg.importance_sampling_level,
            sampling_weights=weights,
            max_completion_length=max_completion_length or logps.shape[1],
            num_micro_batches=accumulation,
            **totals,
        )
        return loss, (counts, _drift(current, experience), masked.sum(entropy, experience.mask))

    def refreshed(reference, params, step):
        if reference is None:
            return None
        alpha, every = grpo_cfg.ref_model_mixup_alpha, grpo_cfg.ref_model_sync_steps
        mixed = jax.tree.map(lambda r, p: (1 - alpha) * r + alpha * p, reference, params)
        return _where(step % every == 0, mixed, reference)

    def optimizer_step(frozen, noise, experience, fixed, state, inputs):
        rows, key = inputs
        batches = jax.tree.map(lambda x: x[rows], (experience, fixed))
        totals = {"total_rows": rows.size, "total_tokens": jnp.sum(batches[0].mask)}

        def accumulate(grads, inputs):
            batch, key = inputs
            dropout_key = key if model.lora is not None and model.lora.dropout else None
            (loss, aux), new = jax.value_and_grad(loss_fn, has_aux=True)(
                state.params, frozen, noise, batch, totals, dropout_key
            )
            return jax.tree.map(jnp.add, grads, new), (loss, aux)

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        grads, (losses, (counts, drift, entropy)) = jax.lax.scan(
            accumulate, zeros, (batches, jax.random.split(key, accumulation))
        )

        norm = optax.tree.norm(grads)
        taught = batches[0].mask.any(-1) & ((batches[0].advantages != 0) | bool(grpo_cfg.beta))
        learns, finite = jnp.any(taught), jnp.isfinite(norm)
        moves, opt_state = tx.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, move: p - rate(state.step) * move, state.params, moves)
        keep = learns & finite
        params = _where(keep, params, state.params)
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=_where(keep, opt_state, state.opt_state),
            skipped=state.skipped + ~keep,
            reference=refreshed(state.reference, params, state.step + 1),
        )
        metrics = {
            "loss": losses.sum(),
            "grad_norm": norm,
            "entropy": entropy.sum() / jnp.maximum(totals["total_tokens"], 1),
            "learning_rate": rate(state.step),
            "updates/empty": ~learns,
            "updates/non_finite": learns & ~finite,
            **grpo.summarize(counts),
        }
        return new, (metrics, drift)

    @jax.jit(donate_argnames=("state",))
    def update(state, frozen, experience, noise, key):
        rows = experience.tokens.shape[0]
        steps = grpo_cfg.num_iterations * rows // (micro_rows * accumulation)

        fixed = {}
        # With a single step per rollout the policy that recomputes is the policy that learns.
        if grpo_cfg.old_logprobs == "recompute" and steps > 1:
            fixed["old_logps"] = in_micro_batches(
                lambda batch: logps_of(state.params, frozen, noise, batch)[0], experience
            )
        if grpo_cfg.beta:
            kept = state.reference is not None
            reference = state.reference if kept else state.params
            fixed["ref_logps"] = in_micro_batches(
                lambda batch: logps_of(reference, frozen, None, batch, adapter=kept)[0], experience
            )

        order_key, step_key = jax.random.split(key)
        order = jnp.arange(rows)
        # Within one optimizer step only bnpo can tell which rows share a micro-batch.
        if rows > micro_rows * accumulation or (grpo_cfg.loss_type == "bnpo" and accumulation > 1):
            order = jax.random.permutation(order_key, order)
        order = jnp.tile(order, grpo_cfg.num_iterations).reshape(steps, accumulation, micro_rows)

        def step(state, inputs):
            return optimizer_step(frozen, noise, experience, fixed, state, inputs)

        state, (metrics, drift) = jax.lax.scan(
            step, state, (order, jax.random.split(step_key, steps))
        )
        return state, _reduce(metrics) | _sampling_metrics(drift)

    return update


def experience(
    rollout: Any, advantages: np.ndarray, *, mask_truncated_completions: bool
) -> Experience:
    """What the trainer needs of a `rollouts.Rollout`; advantages are [P, G].

    Rows are cut behind the longest completion, to a quarter, half, three quarters or all of the
    width that sampling had: at most four programs, and no work on padding that all rows share.
    """
    limit = rollout.completions.shape[1]
    quarter = -(-limit // 4)
    width = min(limit, quarter * -(-int(rollout.lengths.max()) // quarter))
    live = np.arange(width) < rollout.lengths[:, None]
    if mask_truncated_completions:
        live &= rollout.stopped[:, None]
    return Experience(
        tokens=rollout.tokens[:, : rollout.tokens.shape[1] - limit + width],
        prompt_lengths=rollout.prompt_lengths,
        completions=rollout.completions[:, :width],
        mask=live,
        behaviour_logps=rollout.logps[:, :width],
        advantages=np.asarray(advantages, np.float32).reshape(-1),
    )


def _where(keep, new, old):
    return jax.tree.map(lambda n, o: jnp.where(keep, n, o), new, old)


def _drift(logps: jax.Array, experience: Experience) -> dict[str, jax.Array]:
    """How far the policy is from the sampler, on the tokens of one micro-batch."""
    mask = experience.mask
    difference = jnp.where(mask, logps - experience.behaviour_logps, 0.0)
    ratio = jnp.exp(difference)
    return {
        "tokens": jnp.sum(mask),
        "difference_sum": jnp.sum(jnp.abs(difference)),
        "difference_max": jnp.max(jnp.abs(difference)),
        "ratio_sum": masked.sum(ratio, mask),
        "ratio_min": jnp.min(jnp.where(mask, ratio, jnp.inf)),
        "ratio_max": masked.max(ratio, mask),
    }


def _sampling_metrics(drift: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """TRL's sampling metrics of the first optimizer step, before anything was learned."""
    first = {name: value[0] for name, value in drift.items()}
    tokens = jnp.maximum(first["tokens"].sum(), 1)
    lowest = first["ratio_min"].min()
    return {
        "sampling/sampling_logp_difference/mean": first["difference_sum"].sum() / tokens,
        "sampling/sampling_logp_difference/max": first["difference_max"].max(),
        "sampling/importance_sampling_ratio/mean": first["ratio_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/min": jnp.where(jnp.isfinite(lowest), lowest, 0.0),
        "sampling/importance_sampling_ratio/max": first["ratio_max"].max(),
    }


def _reduce(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """One number per metric out of one per optimizer step."""
    how = {
        "updates/empty": jnp.sum,
        "updates/non_finite": jnp.sum,
        "clip_ratio/low_min": jnp.min,
        "clip_ratio/high_max": jnp.max,
        "learning_rate": lambda x: x[-1],
    }
    return {name: how.get(name, jnp.mean)(value) for name, value in metrics.items()}
