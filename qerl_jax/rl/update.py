"""Experience in, new adapters out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.config import GrpoConfig, OptimConfig, Remat
from qerl_jax.model import logprobs
from qerl_jax.model.prompt_sharing import SharedPrompts
from qerl_jax.model.transformer import Transformer, head
from qerl_jax.rl import grpo, masked, microbatches, optimizer
from qerl_jax.rl.microbatches import MicroBatch


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
    """One rollout, or rows of it, as the trainer sees it: P prompts, g completions of each, B = P * g rows.

    The rows of a prompt are neighbours.

    Attributes:
        prompts: int32 [P, Tp], right-padded; what stands behind the end does not matter.
        prompt_lengths: int32 [P].
        completions: int32 [B, C], right-padded.
        mask: bool [B, C], the completion tokens that are learned from.
        behaviour_logps: float32 [B, C], the sampler's.
        advantages: float32 [B].
    """

    prompts: jax.Array
    prompt_lengths: jax.Array
    completions: jax.Array
    mask: jax.Array
    behaviour_logps: jax.Array
    advantages: jax.Array

    @property
    def rows(self) -> np.ndarray:
        """int [P, g], the numbers of the rows of each prompt."""
        return np.arange(len(self.completions)).reshape(len(self.prompts), -1)

    @property
    def lengths(self) -> np.ndarray:
        """int [B], completion tokens of each row up to the last that is learned from."""
        return np.max(np.where(self.mask, np.arange(1, self.mask.shape[1] + 1), 0), axis=1)

    def take(self, batch: MicroBatch) -> Experience:
        """Those rows, on the host; places that no row takes teach nothing."""
        rows, real = batch.rows.reshape(-1), batch.rows.reshape(-1) >= 0
        prompts = batch.rows[:, 0] // self.rows.shape[1]
        width = slice(batch.width)
        return Experience(
            self.prompts[prompts],
            self.prompt_lengths[prompts],
            self.completions[rows, width],
            self.mask[rows, width] & real[:, None],
            self.behaviour_logps[rows, width],
            np.where(real, self.advantages[rows], 0),
        )


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """An optimizer step that was skipped, because its loss or its gradient was not finite.

    Attributes:
        step: Optimizer steps done before it.
        loss: float32.
        grads: As `params`.
        params: Under which that happened.
        experience: The rows of the step.
        fixed: Their log-probabilities under policies that stood still, as far as there were any.
        noise: The tree under which the policy acted, or None.
    """

    step: int
    loss: jax.Array
    grads: Any
    params: Any
    experience: Experience
    fixed: dict[str, np.ndarray]
    noise: Any


def init_state(params: Any, cfg: OptimConfig, *, keep_reference: bool = False) -> TrainState:
    """The state before the first step, with a copy of `params` as the reference if one is kept."""
    reference = jax.tree.map(jnp.copy, params) if keep_reference else None
    return TrainState(
        jnp.int32(0), params, optimizer.transformation(cfg).init(params), jnp.int32(0), reference
    )


def token_logps(
    model: Transformer,
    variables: dict[str, Any],
    experience: Experience,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    adapter: bool = True,
    remat: Remat = "none",
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every completion token and entropy of its distribution, float32 [B, C] each.

    Each prompt is computed once for all of its completions.
    """
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    rows, length = experience.completions.shape
    prompts, width = experience.prompts.shape
    shared = SharedPrompts(experience.prompt_lengths, width, rows // prompts)
    hidden, _ = model.apply(
        variables,
        shared.join(experience.prompts, experience.completions),
        shared=shared,
        adapter=adapter,
        remat=remat,
        rngs=rngs,
    )
    logps, entropy = logprobs.of_targets(
        shared.before(hidden).reshape(rows * length, -1),
        head(variables["frozen"]),
        experience.completions.reshape(-1),
        temperature=temperature,
        num_tokens=num_tokens,
    )
    return logps.reshape(rows, length), entropy.reshape(rows, length)


def make_gradient(
    model: Transformer,
    *,
    grpo_cfg: GrpoConfig,
    num_micro_batches: int,
    temperature: float,
    num_tokens: int,
    remat: Remat,
) -> Callable[..., tuple[tuple[jax.Array, Any], Any]]:
    """Builds the derivative of the loss of one micro-batch with respect to `params`.

    Returns:
        gradient(params, frozen, noise, batch, totals, key) -> ((loss, counts), grads). `batch` is an
        `Experience` and the `fixed` log-probabilities of its rows, `totals` says of the optimizer
        batch what `grpo.policy_loss` needs to know; `key` is of dropout.
    """
    epsilon_high = grpo_cfg.epsilon if grpo_cfg.epsilon_high is None else grpo_cfg.epsilon_high
    drops = model.lora is not None and model.lora.dropout

    def loss_fn(params, frozen, noise, batch, totals, key):
        experience, fixed = batch
        logps, entropy = token_logps(
            model,
            _variables(params, frozen, noise),
            experience,
            temperature=temperature,
            num_tokens=num_tokens,
            remat=remat,
            dropout_key=key if drops else None,
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
            num_micro_batches=num_micro_batches,
            **totals,
        )
        return loss, (counts, _drift(current, experience), masked.sum(entropy, experience.mask))

    return jax.value_and_grad(loss_fn, has_aux=True)


def make_update(
    model: Transformer,
    *,
    grpo_cfg: GrpoConfig,
    optim_cfg: OptimConfig,
    total_steps: int,
    temperature: float,
    num_tokens: int,
    remat: Remat,
    max_completion_length: int | None = None,
    on_non_finite: Callable[[NonFinite], None] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, Any]]]:
    """Builds the update, whose parts are jitted: scoring, the gradient of a micro-batch, the optimizer's step.

    A rollout is shuffled with the key, the rows of a prompt staying together as far as an optimizer
    batch holds them, and cut into optimizer batches of m * a rows. All `num_iterations` passes take
    them in that one order, as TRL's do. An optimizer batch is cut into micro-batches of m rows, or
    where `max_tokens_per_microbatch` is given into as few of like length as hold no more tokens;
    their gradients are summed, so memory is that of one. Each shape of a micro-batch is compiled.

    Args:
        model: The policy.
        grpo_cfg: The objective.
        optim_cfg: AdamW and the geometry of its batches.
        total_steps: Optimizer steps of the whole run, for the learning rate.
        temperature: Of all log-probabilities.
        num_tokens: Ids that the tokenizer has.
        remat: What the backward pass recomputes, see `model.Transformer`.
        max_completion_length: What `dr_grpo` divides by; None means the width of the rows.
        on_non_finite: Called with each step that was skipped for such a loss or gradient.

    Returns:
        update(state, frozen, experience, noise, key) -> (state, metrics). The experience lies on the
        host. `noise` is the tree under which the policy acts here too, or None; `state` is donated.
        `fixed` may hand in what a `NonFinite` holds under that name, instead of scoring; rows then stay in their order. Metrics are scalars: means over the optimizer steps, under TRL's names; `sampling/...`
        compare the policy before its first step with the sampler.
    """
    tx = optimizer.transformation(optim_cfg)
    rate = optimizer.learning_rate(optim_cfg, total_steps)
    micro_rows, accumulation = (
        optim_cfg.per_device_train_batch_size,
        optim_cfg.gradient_accumulation_steps,
    )
    batch_rows = micro_rows * accumulation
    gradient = make_gradient(
        model,
        grpo_cfg=grpo_cfg,
        num_micro_batches=accumulation,
        temperature=temperature,
        num_tokens=num_tokens,
        remat=remat,
    )

    def refreshed(reference, params, step):
        if reference is None:
            return None
        alpha, every = grpo_cfg.ref_model_mixup_alpha, grpo_cfg.ref_model_sync_steps
        mixed = jax.tree.map(lambda r, p: (1 - alpha) * r + alpha * p, reference, params)
        return _where(step % every == 0, mixed, reference)

    @jax.jit(static_argnames=("adapter",))
    def score(params, frozen, noise, experience, adapter):
        options = {"temperature": temperature, "num_tokens": num_tokens, "adapter": adapter}
        return token_logps(model, _variables(params, frozen, noise), experience, **options)[0]

    @jax.jit(donate_argnames=("sums",))
    def accumulate(sums, *micro_batch):
        (loss, counts), grads = gradient(*micro_batch)
        return jax.tree.map(jnp.add, sums, (loss, grads)), counts

    @jax.jit(donate_argnames=("state",))
    def step(state, sums, learns):
        loss, grads = sums
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        keep = learns & finite
        params, opt_state = optimizer.step(
            tx, rate(state.step), keep, grads, state.opt_state, state.params
        )
        new = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            skipped=state.skipped + ~keep,
            reference=refreshed(state.reference, params, state.step + 1),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": rate(state.step),
            "updates/empty": ~learns,
            "updates/non_finite": learns & ~finite,
        }
        return new, metrics

    @jax.jit
    def nothing(params):
        return jnp.float32(0), jax.tree.map(jnp.zeros_like, params)

    def cut(experience, rows, limit):
        budget = optim_cfg.max_tokens_per_microbatch
        if budget is None:
            return microbatches.by_rows(rows, micro_rows, experience.completions.shape[1])
        return microbatches.by_tokens(
            rows,
            experience.lengths,
            budget=budget,
            prompt_width=experience.prompts.shape[1],
            max_length=limit,
        )

    def scored(params, frozen, noise, experience, limit, *, adapter=True):
        logps = np.zeros(experience.completions.shape, np.float32)
        for batch in cut(experience, experience.rows, limit):
            values = score(params, frozen, noise, experience.take(batch), adapter)
            rows = batch.rows.reshape(-1)
            logps[rows[rows >= 0], : batch.width] = np.asarray(values)[rows >= 0]
        return logps

    def anchors(state, frozen, experience, noise, limit, steps):
        """Log-probabilities that stay as they are while the rollout is learned from."""
        fixed = {}
        # With a single step per rollout the policy that recomputes is the policy that learns.
        if grpo_cfg.old_logprobs == "recompute" and steps > 1:
            fixed["old_logps"] = scored(state.params, frozen, noise, experience, limit)
        if grpo_cfg.beta:
            kept = state.reference is not None
            reference = state.reference if kept else state.params
            fixed["ref_logps"] = scored(reference, frozen, None, experience, limit, adapter=kept)
        return fixed

    def update(state, frozen, experience, noise, key, fixed=None):
        rows = experience.rows
        steps = grpo_cfg.num_iterations * rows.size // batch_rows
        limit = max_completion_length or experience.completions.shape[1]

        # Within one optimizer step only bnpo can tell which rows share a micro-batch.
        shuffles = rows.size > batch_rows or (grpo_cfg.loss_type == "bnpo" and accumulation > 1)
        if fixed is not None:
            shuffles = False
        else:
            fixed = anchors(state, frozen, experience, noise, limit, steps)
        order_key, step_key = jax.random.split(key)
        units = rows.reshape(-1, math.gcd(batch_rows, rows.shape[1]))
        if shuffles:
            units = units[np.asarray(jax.random.permutation(order_key, len(units)))]
        batches = units.reshape(-1, batch_rows // units.shape[1], units.shape[1])

        records = []
        for index in range(steps):
            rows = batches[index % len(batches)]
            chosen = rows.reshape(-1)
            mask, advantages = experience.mask[chosen], experience.advantages[chosen]
            learns = np.any(mask.any(-1) & ((advantages != 0) | bool(grpo_cfg.beta)))
            totals = {
                "total_rows": chosen.size,
                "total_tokens": mask.sum(dtype=np.int32),
                "max_completion_length": limit,
            }
            sums, counts = nothing(state.params), []
            for number, batch in enumerate(cut(experience, rows, limit)):
                flat = batch.rows.reshape(-1)
                taken = {name: x[flat, : batch.width] for name, x in fixed.items()}
                micro_key = jax.random.fold_in(jax.random.fold_in(step_key, index), number)
                sums, count = accumulate(
                    sums,
                    state.params,
                    frozen,
                    noise,
                    (experience.take(batch), taken),
                    totals,
                    micro_key,
                )
                counts.append(count)
            state, metrics = step(state, sums, learns)
            metrics, counts = jax.device_get((metrics, counts))
            records.append((metrics, *_joined(counts, chosen.size), totals["total_tokens"]))
            if on_non_finite and metrics["updates/non_finite"]:
                whole = MicroBatch(rows, experience.completions.shape[1])
                held = {name: x[chosen] for name, x in fixed.items()}
                on_non_finite(
                    NonFinite(
                        int(state.step) - 1,
                        *sums,
                        params=state.params,
                        experience=experience.take(whole),
                        fixed=held,
                        noise=noise,
                    )
                )
        return state, _reduce(records) | _sampling_metrics(records[0][2])

    return update


def experience(
    rollout: Any,
    advantages: np.ndarray,
    *,
    mask_truncated_completions: bool,
    share_prompts: bool = True,
) -> Experience:
    """What the trainer needs of a `rollouts.Rollout`; advantages are [P, G].

    Prompts and completions are cut behind the longest of each, to one of the seven widths of
    `packing`: few programs, and little work on padding that all rows share. Where prompts are not
    shared, each row has its own.
    """
    limit = rollout.completions.shape[1]
    longest = rollout.tokens.shape[1] - limit
    width = microbatches.round_up(int(rollout.lengths.max()), limit)
    prompt_width = microbatches.round_up(int(rollout.prompt_lengths.max()), longest)
    live = np.arange(width) < rollout.lengths[:, None]
    if mask_truncated_completions:
        live &= rollout.stopped[:, None]
    every = rollout.num_generations if share_prompts else 1
    return Experience(
        prompts=rollout.tokens[::every, :prompt_width],
        prompt_lengths=rollout.prompt_lengths[::every],
        completions=rollout.completions[:, :width],
        mask=live,
        behaviour_logps=rollout.logps[:, :width],
        advantages=np.asarray(advantages, np.float32).reshape(-1),
    )


def _variables(params, frozen, noise):
    variables = {"params": params, "frozen": frozen}
    return variables if noise is None else variables | {"noise": noise}


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


def _joined(
    counts: list[Any], num_rows: int
) -> tuple[grpo.RowMetrics, dict[str, np.ndarray], float]:
    """What the micro-batches of one optimizer step counted: by row, by micro-batch, in all.

    Rows with tokens come first, then as many without as the step has in all: one shape for all
    steps.
    """
    rows, drifts, entropies = zip(*counts, strict=True)

    def of_rows(column):
        if column[0] is None:
            return None
        values = np.concatenate(column)[real]
        return np.pad(values, (0, num_rows - values.size))

    real = np.concatenate([row.tokens for row in rows]) > 0
    fields = [of_rows(column) for column in zip(*rows, strict=True)]
    drift = {name: np.array([each[name] for each in drifts]) for name in drifts[0]}
    return grpo.RowMetrics(*fields), drift, sum(entropies)


def _sampling_metrics(drift: dict[str, np.ndarray]) -> dict[str, Any]:
    """TRL's sampling metrics of an optimizer step before which nothing was learned."""
    tokens = max(drift["tokens"].sum(), 1)
    lowest = drift["ratio_min"].min()
    return {
        "sampling/sampling_logp_difference/mean": drift["difference_sum"].sum() / tokens,
        "sampling/sampling_logp_difference/max": drift["difference_max"].max(),
        "sampling/importance_sampling_ratio/mean": drift["ratio_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/min": lowest if np.isfinite(lowest) else 0.0,
        "sampling/importance_sampling_ratio/max": drift["ratio_max"].max(),
    }


_summarize = jax.jit(grpo.summarize)


def _reduce(records: list[Any]) -> dict[str, Any]:
    """One number per metric out of one per optimizer step."""
    steps = [
        metrics | {"entropy": entropy / max(tokens, 1)} | jax.device_get(_summarize(counts))
        for metrics, counts, _, entropy, tokens in records
    ]
    how = {
        "updates/empty": np.sum,
        "updates/non_finite": np.sum,
        "clip_ratio/low_min": np.min,
        "clip_ratio/high_max": np.max,
        "learning_rate": lambda x: x[-1],
    }
    return {
        name: how.get(name, np.mean)(np.array([each[name] for each in steps])) for name in steps[0]
    }
