"""GRPO, DAPO and their variants as equations on arrays.

In the order of a step: `combine_rewards` makes one number of the scores of several reward functions, `group_advantages`
compares it with the other completions of the prompt, and `policy_loss` weights log-probabilities with the result.
Formulas and option names are those of TRL's `GRPOTrainer`; the tests compare values and gradients with it. Shapes: P
prompts, G completions of each, B = P * G rows (the completions of a prompt are neighbours), T completion tokens.
"""

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from qerl_jax.config import LOSS_TYPES, GrpoConfig, SapoConfig, VespoConfig
from qerl_jax.rl import masked
from qerl_jax.system.checked import require

# Keeps the advantages of a nearly constant group small; the value is TRL's.
_STD_EPSILON = 1e-4
# Bounds of the logarithms of VESPO's ratios; the values are TRL's.
_LEAST_LOG_RATIO, _MOST_LOG_RATIO = math.log(1e-8), 20.0

type Scale = Literal["group", "batch", "none"]
type Estimator = Literal["grpo", "rloo"]


# Functions of a whole batch are jitted: without jit they would be about sixty programs, each of which takes a tenth
# of a second to compile on a GPU.
@jax.jit
def combine_rewards(per_function: Array, weights: Array) -> Array:
    """Adds up the weighted rewards of each row, skipping functions that abstained.

        r_i = sum over f of w_f r_{i,f}, taken over the functions f that gave row i a reward

    Args:
        per_function: [B, number of functions]; NaN where a function does not apply to a row.
        weights: [number of functions].

    Returns:
        The rewards [B]; NaN for a row for which every function abstained, because 0 would be better than a wrong
        answer that scores -1.
    """
    applies = ~jnp.isnan(per_function)
    rewards = masked.sum(per_function * weights[None, :], applies, axis=1)
    return jnp.where(jnp.any(applies, axis=1), rewards, jnp.nan)


@jax.jit
def informative(rewards: Array) -> Array:
    """Marks the groups whose rewards differ, bool [P]: only these give a gradient.

    Args:
        rewards: [P, G] rewards, or advantages computed from them; NaN for rows without one.
    """
    # The standard deviation is not used, because rounding can make it positive for equal rewards.
    judged = ~jnp.isnan(rewards)
    highest = jnp.max(rewards, axis=1, initial=-jnp.inf, where=judged)
    return highest > jnp.min(rewards, axis=1, initial=jnp.inf, where=judged)


@functools.partial(jax.jit, static_argnames=("scale", "estimator"))
def group_advantages(
    rewards: Array, *, scale: Scale = "group", estimator: Estimator = "grpo"
) -> Array:
    """Computes the advantages [P, G]: compares each completion with the others of its prompt.

        A = (r - b) / (s + 1e-4)

    The baseline b is the mean over the group ("grpo") or over the group's other completions ("rloo": leave-one-out,
    arXiv:2402.14740), with which the estimate of the gradient is unbiased. s is the standard deviation (with divisor
    n - 1) of the group (GRPO, arXiv:2402.03300) or of the whole batch (arXiv:2508.08221); with "none" there is no
    division (Dr. GRPO, arXiv:2503.20783). Equal rewards give advantages of exactly 0. A row without a reward has
    advantage 0, and counts in neither b nor s, as in TRL.

    Args:
        rewards: [P, G]; NaN for rows without one.
        scale: "group", "batch" or "none".
        estimator: "grpo" or "rloo".

    Raises:
        ValueError: for fewer than two completions per prompt, or an unknown scale or estimator.
    """
    num_generations = rewards.shape[1]
    require(num_generations >= 2, "num_generations", num_generations, "must be at least 2")
    require(estimator in ("grpo", "rloo"), "estimator", estimator, "must be 'grpo' or 'rloo'")
    known = scale in ("group", "batch", "none")
    require(known, "scale", scale, "must be 'group', 'batch' or 'none'")
    judged = ~jnp.isnan(rewards)
    learned = judged & informative(rewards)[:, None]
    centered = rewards - jnp.mean(rewards, axis=1, keepdims=True, where=judged)
    if estimator == "rloo":
        # r - mean of the others = (r - mean of all) n / (n - 1)
        count = jnp.sum(judged, axis=1, keepdims=True)
        centered = centered * (count / jnp.maximum(count - 1, 1))
    if scale != "none":
        axis = 1 if scale == "group" else None
        spread = jnp.std(rewards, axis=axis, ddof=1, keepdims=True, where=judged)
        centered = centered / (spread + _STD_EPSILON)
    return jnp.where(learned, centered, 0)


@functools.partial(jax.jit, static_argnames=("scale", "estimator"))
def decoupled_advantages(
    per_function: Array, weights: Array, *, scale: Scale = "group", estimator: Estimator = "grpo"
) -> Array:
    """Computes advantages [P, G] separately for each reward function, and adds them up.

        a_f = (r_f - mean of r_f over the group) / (s_f + 1e-4)
        A   = (a - mean of a) / (std of a + 1e-4),        a = sum over f of w_f a_f

    where s_f is the standard deviation of that function's rewards alone, and the second line is computed over the
    whole batch. So a function with widely spread rewards does not outweigh the others. This is GDPO (arXiv:2601.05242),
    TRL's `normalize_then_sum`, which only has the scale "group". A row without a reward has advantage 0, and so has a
    group whose completions get the same rewards from every function.

    Args:
        per_function: [P, G, number of functions]; NaN where a function does not apply to a row.
        weights: [number of functions].
        scale: As in `group_advantages`, for s_f.
        estimator: As in `group_advantages`.

    Raises:
        ValueError: As in `group_advantages`.
    """
    by_function = [
        group_advantages(rewards, scale=scale, estimator=estimator)
        for rewards in jnp.moveaxis(per_function, -1, 0)
    ]
    judged = ~jnp.all(jnp.isnan(per_function), axis=-1)
    # A function that abstained has advantage 0, and adds nothing to the sum.
    summed = jnp.tensordot(weights, jnp.stack(by_function), axes=1)
    # With fewer than two rewards the standard deviation is undefined.
    differ = jnp.sum(judged) > 1
    mean, spread = jnp.mean(summed, where=judged), jnp.std(summed, ddof=1, where=judged)
    normal = jnp.where(differ, (summed - mean) / (jnp.where(differ, spread, 0) + _STD_EPSILON), 0)
    tells = jnp.any(jnp.stack([informative(advantages) for advantages in by_function]), axis=0)
    return jnp.where(judged & tells[:, None], normal, 0)


def token_kl(logps: Array, ref_logps: Array, kind: Literal["k1", "k2", "k3"] = "k3") -> Array:
    """Estimates KL(policy || reference) at each sampled token.

        k1 = -d,   k2 = d^2 / 2,   k3 = exp(d) - d - 1,   d = ref_logp - logp

    For tokens that the policy sampled, k1 and k3 are unbiased, and k2 and k3 are never negative. In expectation, the
    gradient of k1 is 0, that of k2 is the gradient of KL(policy || reference), and that of k3 is the gradient of
    KL(reference || policy). Multiplied by the importance ratio (`reference.bias_correction`), k1 and k3 have the
    gradient of KL(policy || reference), too.

    Args:
        logps: log-probabilities under the policy, in nats, of any shape; so is the result.
        ref_logps: those under the reference.
        kind: "k1", "k2" or "k3".

    Raises:
        ValueError: for an unknown kind.

    Source: J. Schulman, "Approximating KL Divergence", 2020; for derivatives, arXiv:2506.09477.
    """
    d = ref_logps - logps
    estimates = {"k1": -d, "k2": d * d / 2, "k3": jnp.expm1(d) - d}
    require(kind in estimates, "kl_estimator", kind, "must be 'k1', 'k2' or 'k3'")
    return estimates[kind]


def log_importance_ratio(
    logps: Array, old_logps: Array, mask: Array, level: Literal["token", "sequence"] = "token"
) -> Array:
    """Returns log(policy / old policy) of tokens, or the mean over a row's tokens (GSPO, arXiv:2507.18071).

    Args:
        logps: [B, T] log-probabilities under the policy; gradients flow through them at both levels.
        old_logps: [B, T] log-probabilities under the old policy.
        mask: [B, T], nonzero at the tokens that count.
        level: "token" gives [B, T], 0 at masked-out tokens; "sequence" [B, 1], 0 for a row without tokens.

    Raises:
        ValueError: for an unknown level.
    """
    log_ratio = jnp.where(mask != 0, logps - old_logps, 0)
    ratios = {"token": log_ratio, "sequence": masked.mean(log_ratio, mask, axis=1)[:, None]}
    require(level in ratios, "importance_sampling_level", level, "must be 'token' or 'sequence'")
    return ratios[level]


def truncated_importance_weights(
    old_logps: Array,
    behaviour_logps: Array,
    mask: Array,
    *,
    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
    clip_max: float,
    clip_min: float | None = None,
) -> Array:
    """Computes weights that correct for sampling from a policy other than that of `old_logps`.

        w = old policy / behaviour policy, per token, or as the product over a row's tokens

    A weight above `clip_max` becomes `clip_max` ("..._truncate") or 0 ("..._mask"), and one below `clip_min` likewise.
    "token_mask" with both bounds is IcePop (arXiv:2510.18855, section 3.2).

    Args:
        old_logps: [B, T] log-probabilities under the old policy, the denominator of the ratio in `policy_loss`.
        behaviour_logps: [B, T] log-probabilities under the policy that sampled.
        mask: [B, T], nonzero at the tokens that count.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        clip_max: the largest weight that stays unchanged.
        clip_min: the smallest weight that stays unchanged; None for no bound.

    Returns:
        [B, T] (masked-out tokens have the weight of ratio 1) or [B, 1], without gradient.

    Raises:
        ValueError: for an unknown mode, a `clip_max` that is not positive, or a `clip_min` that is not below it.
    """
    require(clip_max > 0, "clip_max", clip_max, "must be positive")
    below = clip_min is None or clip_min < clip_max
    require(below, "clip_min", clip_min, f"must be below {clip_max=}")
    log_weight = jnp.where(mask != 0, old_logps - behaviour_logps, 0)
    level, _, action = mode.partition("_")
    require(
        level in ("token", "sequence") and action in ("truncate", "mask"),
        "mode",
        mode,
        "must be 'token_truncate', 'token_mask', 'sequence_truncate' or 'sequence_mask'",
    )
    if level == "sequence":
        log_weight = jnp.sum(log_weight, axis=1, keepdims=True)
    weight = jnp.exp(log_weight)
    outside = (weight > clip_max) | (weight < (clip_min or 0))
    bound = jnp.clip(weight, clip_min, clip_max) if action == "truncate" else 0
    return jax.lax.stop_gradient(jnp.where(outside, bound, weight))


def sampling_mask(
    logps: Array,
    behaviour_logps: Array,
    mask: Array,
    *,
    level: Literal["token", "sequence", "geometric"],
    highest: float,
    lowest: float | None = None,
) -> Array:
    """Masks tokens or rows for which trainer and sampler differ too much: 1 if the ratio is in bounds, else 0.

        lowest <= r <= highest,    r = policy / behaviour policy

    r is the ratio of each token, or of a row: the product ("sequence") or the geometric mean ("geometric") of its
    tokens' ratios, which does not grow with the length: it is exp(-k1), with k1 the row's mean estimate of
    KL(behaviour || policy).

    Args:
        logps: [B, T] log-probabilities under the policy of the trainer.
        behaviour_logps: [B, T] log-probabilities under the policy that sampled.
        mask: [B, T], nonzero at the tokens that count.
        level: "token", "sequence" or "geometric".
        highest: the largest ratio that is kept, above 1.
        lowest: the smallest ratio that is kept; None means 1 / `highest`.

    Returns:
        Zeros and ones in the dtype of `logps`, without gradient: [B, T] (1 at masked-out tokens) or [B, 1].

    Raises:
        ValueError: for an unknown level, or bounds without 1 between them.

    Source: verl's rollout rejection; for tokens arXiv:2510.18855.
    """
    require(highest > 1, "highest", highest, "must be above 1")
    lowest = 1 / highest if lowest is None else lowest
    require(0 < lowest < 1, "lowest", lowest, "must be in (0, 1)")
    log_ratio = jnp.where(mask != 0, logps - behaviour_logps, 0)
    levels = {
        "token": log_ratio,
        "sequence": jnp.sum(log_ratio, axis=1, keepdims=True),
        "geometric": masked.mean(log_ratio, mask, axis=1)[:, None],
    }
    known = level in levels
    require(known, "sampling_mask", level, "must be 'token', 'sequence' or 'geometric'")
    # Compared as logarithms: the product of a long row's ratios would overflow.
    within = (levels[level] >= math.log(lowest)) & (levels[level] <= math.log(highest))
    return jax.lax.stop_gradient(within.astype(logps.dtype))


def off_policy_mask(
    logps: Array, behaviour_logps: Array, mask: Array, advantages: Array, threshold: float
) -> Array:
    """Masks rows with a negative advantage from which the policy has moved away: 0 for these, else 1.

        1 if A >= 0 or mean over the row's tokens of (behaviour logp - logp) <= threshold, else 0

    Args:
        logps: [B, T] log-probabilities under the policy that learns.
        behaviour_logps: [B, T] log-probabilities under the policy that sampled.
        mask: [B, T], nonzero at the tokens that count.
        advantages: [B].
        threshold: the largest mean difference that is kept, in nats per token.

    Returns:
        [B, 1] zeros and ones in the dtype of `logps`, without gradient.

    Source: DeepSeek-V3.2 (arXiv:2512.02556), "off-policy sequence masking"; as in TRL.
    """
    away = masked.mean(jnp.where(mask != 0, behaviour_logps - logps, 0), mask, axis=1)
    stays = (advantages >= 0) | (away <= threshold)
    return jax.lax.stop_gradient(stays[:, None].astype(logps.dtype))


def sampling_weights(
    cfg: GrpoConfig,
    logps: Array,
    old_logps: Array | None,
    behaviour_logps: Array,
    advantages: Array,
    mask: Array,
) -> Array | None:
    """Computes the weights of the policy term of the loss, [B, T] or [B, 1], without gradient.

    They are the product of `truncated_importance_weights`, `sampling_mask` and `off_policy_mask`, as far as these are
    switched on. For VESPO the first is part of the row's own weight instead, see `LossInputs.correction`.

    Args:
        cfg: The objective.
        logps: [B, T] log-probabilities under the policy that learns.
        old_logps: [B, T] log-probabilities of the trainer's policy before the update; None means `logps`.
        behaviour_logps: [B, T] log-probabilities under the policy that sampled.
        advantages: [B].
        mask: [B, T], nonzero at the tokens that count.

    Returns:
        The weights; None if the config has none.
    """
    if cfg.mismatch is None:
        return None
    ours, theirs, weights = logps if old_logps is None else old_logps, behaviour_logps, []
    if cfg.loss_type != "vespo":
        weights.append(sampling_correction(cfg, ours, theirs, mask))
    if bounds := cfg.mismatch.mask:
        level, highest, lowest = bounds.level, bounds.ratio_max, bounds.ratio_min
        weights.append(
            sampling_mask(ours, theirs, mask, level=level, highest=highest, lowest=lowest)
        )
    if (threshold := cfg.mismatch.off_policy_threshold) is not None:
        weights.append(off_policy_mask(logps, theirs, mask, advantages, threshold))
    factors = [factor for factor in weights if factor is not None]
    return functools.reduce(jnp.multiply, factors) if factors else None


def sampling_correction(
    cfg: GrpoConfig, trainer_logps: Array, behaviour_logps: Array, mask: Array
) -> Array | None:
    """Computes `truncated_importance_weights` by the config; None if it has no correction."""
    if (correction := cfg.correction) is None:
        return None
    return truncated_importance_weights(
        trainer_logps, behaviour_logps, mask, **dataclasses.asdict(correction)
    )


class RowMetrics(NamedTuple):
    """Counts of `policy_loss` for each row, [B] each; None if the objective does not have that part.

    The rows of all micro-batches are concatenated or stacked (as by `jax.lax.scan`), and `summarize` computes
    the metrics of one large batch from them.
    """

    tokens: Array  # tokens that count
    ratios: Array  # importance ratios that count: one per token, or one per sequence
    low_clipped: Array | None  # ratios below 1 - epsilon, advantage negative
    high_clipped: Array | None  # ratios above 1 + epsilon_high, advantage positive
    kl: Array | None  # sum of the KL estimates
    capped: Array | None = None  # ratios above the cap whose advantage is negative
    dropped: Array | None = None  # tokens whose sampling weight is 0
    truncated: Array | None = None  # CISPO's ratios above its bound, advantage positive
    phi: Array | None = None  # VESPO's weight of the row
    entropy: Array | None = None  # sum of the entropies of the tokens of the bonus


def summarize(rows: RowMetrics) -> dict[str, Array]:
    """Turns counts per row into metrics under TRL's names.

    `clip_ratio/{low,high,delta,region}_mean` and `cispo_clip_ratio` are fractions of all ratios, `sampling/masked_mean`
    is a fraction of tokens, and `kl` a mean over tokens. `clip_ratio/low_min` and `clip_ratio/high_max` are extremes of
    the fractions of single rows, and `vespo/phi_seq_mean` is a mean over rows; rows without tokens are left out. A
    metric is absent if the objective does not have that part.

    Args:
        rows: counts of any shape, for example [B] or [micro-batches, B].

    Returns:
        Scalars by name.
    """
    counted = rows.ratios > 0
    per_row = jnp.maximum(rows.ratios, 1)
    total, tokens = (jnp.maximum(jnp.sum(x), 1) for x in (rows.ratios, rows.tokens))
    metrics: dict[str, Array] = {}
    if rows.low_clipped is not None and rows.high_clipped is not None:
        low, high = jnp.sum(rows.low_clipped) / total, jnp.sum(rows.high_clipped) / total
        metrics |= {
            "clip_ratio/low_mean": low,
            "clip_ratio/low_min": masked.min(rows.low_clipped / per_row, counted),
            "clip_ratio/high_mean": high,
            "clip_ratio/high_max": masked.max(rows.high_clipped / per_row, counted),
            "clip_ratio/region_mean": low + high,
        }
    if rows.truncated is not None:
        metrics["cispo_clip_ratio"] = jnp.sum(rows.truncated) / total
    if rows.phi is not None:
        metrics["vespo/phi_seq_mean"] = masked.mean(rows.phi, rows.tokens > 0)
    if rows.kl is not None:
        metrics["kl"] = jnp.sum(rows.kl) / tokens
    if rows.capped is not None:
        metrics["clip_ratio/delta_mean"] = jnp.sum(rows.capped) / total
    if rows.dropped is not None:
        metrics["sampling/masked_mean"] = jnp.sum(rows.dropped) / tokens
    return metrics


class LossInputs(NamedTuple):
    """The rows of a micro-batch: the inputs of `policy_loss`."""

    logps: Array  # [B, T] log-probabilities under the policy that learns
    old_logps: Array  # [B, T] log-probabilities under the old policy, the ratio's denominator
    advantages: Array  # [B]
    mask: Array  # [B, T], nonzero at the tokens that count
    ref_logps: Array | None = None  # [B, T] under the reference; needed for a KL term
    sampling_weights: Array | None = None  # [B, T] or [B, 1], see `sampling_weights`
    correction: Array | None = None  # [B, T] or [B, 1], see `sampling_correction`; used by VESPO
    entropies: Array | None = None  # [B, T], in nats; needed for an entropy bonus
    high_entropy: Array | None = None  # [B, T], nonzero at the tokens that the policy learns from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchTotals:
    """Sizes of the optimizer batch that a micro-batch belongs to; None means those of the micro-batch itself.

    Attributes:
        rows: Number of rows with a reward, those without tokens included.
        tokens: Number of tokens that count.
        max_completion_length: Divisor of dr_grpo, in tokens; required for it.
        num_micro_batches: Number of micro-batches; only bnpo uses it.
        entropy_tokens: Number of tokens of the entropy bonus: all that count, or those of high entropy among them.
        entropy_coef: Coefficient of the bonus; None means the config's.
    """

    rows: ArrayLike | None = None
    tokens: ArrayLike | None = None
    max_completion_length: ArrayLike | None = None
    num_micro_batches: int = dataclasses.field(default=1, metadata={"static": True})
    entropy_tokens: ArrayLike | None = None
    entropy_coef: ArrayLike | None = None


def policy_loss(
    cfg: GrpoConfig, batch: LossInputs, totals: BatchTotals = BatchTotals()
) -> tuple[Array, RowMetrics]:
    """Computes the policy-gradient loss that `loss_type` names.

        l_t = -w_t f_t + beta k_t,        rho_t = policy / old policy, per token or per sequence

    The policy term f_t depends on `loss_type`:

        grpo, dr_grpo, dapo, bnpo, luspo
               f_t = min(min(rho_t, delta) A, clip(rho_t, 1 - epsilon, 1 + epsilon_high) A)
        cispo  f_t = sg(min(rho_t, epsilon_high)) A log policy_t                arXiv:2506.13585
        sapo   f_t = sigmoid(tau (rho_t - 1)) 4 / tau A                         arXiv:2511.20347
        vespo  f_t = sg(phi(rho)) A log policy_t, see `vespo_weights`           arXiv:2602.10693

    sg stops the gradient. `delta` (`GrpoConfig.ratio_cap`) bounds the unclipped term, which otherwise has no bound for
    a negative advantage (dual clip, arXiv:1912.09729; two-sided clipping, arXiv:2505.07291). CISPO clips the weight and
    not the update, so each token keeps a gradient; its `epsilon_high` is the bound itself, as in TRL. SAPO's tau is
    `sapo.temperature_pos` if A > 0, else `sapo.temperature_neg`. A token whose sampling weight w is 0, or that is not
    of high entropy, still counts in the denominators below. With `reference.bias_correction` the KL estimate k_t is
    multiplied by rho_t, and gradients flow through that factor, too (arXiv:2512.02556).

    How token losses are averaged depends on `loss_type`; every sum runs over tokens that count:

        grpo, sapo          (sum over rows of the row's mean) / rows        arXiv:2402.03300
        luspo               sum / rows                                      arXiv:2602.05261
        dr_grpo             sum / (rows * max_completion_length)            arXiv:2503.20783
        dapo, cispo, vespo  sum / tokens                                    arXiv:2503.14476
        bnpo     sum / tokens of this micro-batch, / num_micro_batches      arXiv:2506.02864

    With an entropy bonus, the coefficient times the mean entropy over the tokens of the bonus is subtracted.

    An optimizer batch may be divided into micro-batches whose losses and gradients are summed: pass the `totals` of the
    whole batch, and the sum does not depend on the division, except for bnpo (this is its difference from dapo). A row
    or batch without tokens gives loss 0 and gradient 0.

    Args:
        cfg: The objective.
        batch: Rows of the micro-batch.
        totals: Sizes of the optimizer batch.

    Returns:
        The loss, a scalar, and counts for `summarize`.

    Raises:
        ValueError: for inconsistent shapes, an unknown option, or a missing `ref_logps`, `entropies` or
            `max_completion_length`.
    """
    _require_shapes(batch)
    mask, advantage = batch.mask, batch.advantages[:, None]
    ratio = jnp.exp(
        log_importance_ratio(batch.logps, batch.old_logps, mask, cfg.importance_sampling_level)
    )
    phi = vespo_weights(cfg, batch) if cfg.loss_type == "vespo" else None
    policy_term = _policy_terms(cfg, batch, ratio, phi)
    for factor in (batch.sampling_weights, batch.high_entropy):
        if factor is not None:
            policy_term = policy_term * factor
    token_loss = jnp.broadcast_to(-policy_term, batch.logps.shape)
    kl = _token_kls(cfg, batch, ratio)
    if cfg.reference is not None and kl is not None:
        token_loss = token_loss + cfg.reference.beta * kl

    tokens = jnp.sum(mask != 0, axis=1).astype(batch.logps.dtype)
    counted = mask if cfg.importance_sampling_level == "token" else (tokens > 0)[:, None]
    count = lambda which: masked.sum(which.astype(tokens.dtype), counted, axis=1)
    bound = cfg.epsilon_high if cfg.loss_type == "cispo" else None
    metrics = RowMetrics(
        tokens=tokens,
        ratios=jnp.sum(counted != 0, axis=1).astype(tokens.dtype),
        low_clipped=count((ratio < 1 - cfg.epsilon) & (advantage < 0)) if cfg.clips else None,
        high_clipped=count((ratio > cfg.highest) & (advantage > 0)) if cfg.clips else None,
        kl=None if kl is None else masked.sum(kl, mask, axis=1),
        capped=None if cfg.ratio_cap is None else count((ratio > cfg.ratio_cap) & (advantage < 0)),
        dropped=_dropped(batch),
        truncated=None if bound is None else count((ratio > bound) & (advantage > 0)),
        phi=None if phi is None else phi[:, 0],
        entropy=_bonus_entropies(cfg, batch),
    )
    loss = _averaged(cfg.loss_type, token_loss, mask, tokens, totals)
    if metrics.entropy is not None:
        loss = loss - _entropy_bonus(cfg, batch, metrics.entropy, totals)
    return loss, jax.lax.stop_gradient(metrics)


def vespo_weights(cfg: GrpoConfig, batch: LossInputs) -> Array:
    """Computes VESPO's weight of each row, a gamma-shaped function of the row's ratio with phi(1) = 1.

        phi(rho) = exp(lambda) rho^k exp(-lambda rho),     rho = product over the row's tokens of the
                                                           ratio and of its correction

    with `vespo.k_pos` and `vespo.lambda_pos` where A >= 0, else `vespo.k_neg` and `vespo.lambda_neg`. As in TRL the
    logarithm of a token's ratio is bounded by 20, that of the row's by log 1e-8 and 20.

    Returns:
        [B, 1], without gradient.

    Source: VESPO (arXiv:2602.10693).
    """
    log_ratio = jnp.where(batch.mask != 0, batch.logps - batch.old_logps, 0)
    total = jnp.sum(jnp.clip(log_ratio, -_MOST_LOG_RATIO, _MOST_LOG_RATIO), axis=1, keepdims=True)
    bounded = lambda x: jnp.clip(x, _LEAST_LOG_RATIO, _MOST_LOG_RATIO)
    if batch.correction is not None:
        total = total + jnp.sum(bounded(jnp.log(batch.correction)), axis=1, keepdims=True)
    total, is_good = bounded(total), batch.advantages[:, None] >= 0
    vespo = cfg.vespo or VespoConfig()
    k = jnp.where(is_good, vespo.k_pos, vespo.k_neg)
    decay = jnp.where(is_good, vespo.lambda_pos, vespo.lambda_neg)
    phi = jnp.exp(decay + k * total - decay * jnp.exp(total))
    return jax.lax.stop_gradient(phi)


def _policy_terms(cfg: GrpoConfig, batch: LossInputs, ratio: Array, phi: Array | None) -> Array:
    """Returns the policy terms f_t of tokens [B, T], or of rows [B, 1], before any weights."""
    advantage = batch.advantages[:, None]
    match cfg.loss_type:
        case "cispo":
            assert cfg.epsilon_high is not None
            bounded = jax.lax.stop_gradient(jnp.minimum(ratio, cfg.epsilon_high))
            return bounded * advantage * batch.logps
        case "vespo":
            assert phi is not None
            return phi * advantage * batch.logps
        case "sapo":
            sapo = cfg.sapo or SapoConfig()
            temperature = jnp.where(advantage > 0, sapo.temperature_pos, sapo.temperature_neg)
            return jax.nn.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
    capped = ratio if cfg.ratio_cap is None else jnp.minimum(ratio, cfg.ratio_cap)
    clipped = jnp.clip(ratio, 1 - cfg.epsilon, cfg.highest)
    return jnp.minimum(capped * advantage, clipped * advantage)


def _bonus_entropies(cfg: GrpoConfig, batch: LossInputs) -> Array | None:
    """Returns the sum [B] of each row's entropies over the tokens of the bonus; None without a bonus."""
    if cfg.entropy is None:
        return None
    require(batch.entropies is not None, "entropies", None, "an entropy bonus needs them")
    assert batch.entropies is not None
    return masked.sum(batch.entropies, _bonus_tokens(batch), axis=1)


def _bonus_tokens(batch: LossInputs) -> Array:
    if batch.high_entropy is None:
        return batch.mask
    return (batch.mask != 0) & (batch.high_entropy != 0)


def _entropy_bonus(
    cfg: GrpoConfig, batch: LossInputs, entropies: Array, totals: BatchTotals
) -> Array:
    """Returns this micro-batch's part of the entropy bonus: coefficient times mean entropy."""
    assert cfg.entropy is not None
    tokens, coef = totals.entropy_tokens, totals.entropy_coef
    if tokens is None:
        tokens = jnp.sum(_bonus_tokens(batch) != 0)
    coef = cfg.entropy.coef if coef is None else coef
    return jnp.multiply(coef, jnp.sum(entropies)) / jnp.maximum(tokens, 1)


def _dropped(batch: LossInputs) -> Array | None:
    """Returns the number [B] of each row's tokens with a sampling weight of 0; None without weights."""
    if batch.sampling_weights is None:
        return None
    zero = jnp.broadcast_to(batch.sampling_weights == 0, batch.logps.shape)
    return masked.sum(zero.astype(batch.logps.dtype), batch.mask, axis=1)


def _token_kls(cfg: GrpoConfig, batch: LossInputs, ratio: Array) -> Array | None:
    """Returns estimates [B, T] of the KL divergence from the reference; None without a reference."""
    if cfg.reference is None:
        return None
    require(batch.ref_logps is not None, "ref_logps", None, "a KL term needs them")
    assert batch.ref_logps is not None
    # Masked before the exponential, so that gradients stay finite even if padding is not.
    logps, ref_logps = (jnp.where(batch.mask != 0, x, 0) for x in (batch.logps, batch.ref_logps))
    kl = token_kl(logps, ref_logps, cfg.reference.kl_estimator)
    return kl * ratio if cfg.reference.bias_correction else kl


def _averaged(
    loss_type: str, token_loss: Array, mask: Array, tokens: Array, totals: BatchTotals
) -> Array:
    """Averages token losses [B, T] into the loss of a micro-batch; `tokens` [B] counts each row's tokens."""
    rows = len(mask) if totals.rows is None else totals.rows
    match loss_type:
        case "grpo" | "sapo":
            return jnp.sum(masked.mean(token_loss, mask, axis=1)) / rows
        case "dr_grpo":
            longest = totals.max_completion_length
            require(longest is not None, "max_completion_length", longest, "dr_grpo needs it")
            assert longest is not None
            return masked.sum(token_loss, mask) / jnp.multiply(rows, longest)
        case "luspo":
            return masked.sum(token_loss, mask) / rows
        case "dapo" | "cispo" | "vespo":
            total = jnp.sum(tokens) if totals.tokens is None else totals.tokens
            return masked.sum(token_loss, mask) / jnp.maximum(total, 1)
        case "bnpo":
            return masked.mean(token_loss, mask) / totals.num_micro_batches
    known = ", ".join(map(repr, LOSS_TYPES))
    raise ValueError(f"loss_type must be one of {known}; got {loss_type!r}")


def _require_shapes(batch: LossInputs) -> None:
    rows, length = batch.logps.shape
    of_tokens = [(rows, length)]
    others = {"advantages": [(rows,)]} | dict.fromkeys(
        ("sampling_weights", "correction"), [*of_tokens, (rows, 1)]
    )
    for name, value in batch._asdict().items():
        shape, shapes = getattr(value, "shape", None), others.get(name, of_tokens)
        allowed = " or ".join(map(str, shapes))
        require(shape in (None, *shapes), name, shape, f"must be {allowed} beside logps")
