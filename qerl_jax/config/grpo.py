"""The section [grpo] of a run: the objective, and its tables. A table switches on what it describes; absent is off."""

import dataclasses
from typing import Annotated, Literal, get_args

from qerl_jax.config.rules import RENAMED
from qerl_jax.config.tiers import core, experimental, verified
from qerl_jax.system.checked import (
    Checked,
    Closed01,
    Count,
    NotEmpty,
    NotNegative,
    Open01,
    Positive,
    Rule,
)

# Dual clip's bound for negative advantages (arXiv 1912.09729); the value is verl's default.
_DUAL_CLIP = 3.0
# How token losses are made and averaged, see `rl.grpo.policy_loss`.
LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]
LOSS_TYPES = get_args(LossType)
# The loss types that clip the ratio from both sides.
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclasses.dataclass(frozen=True)
class SapoConfig(Checked, section="grpo.sapo."):
    """The gate of grpo.loss_type = "sapo" (arXiv 2511.20347); absent means these defaults.

    Attributes:
        temperature_pos: Temperature of the gate for tokens of a positive advantage. The higher it is, the faster the
            gradient of a token falls as its ratio moves away from 1.
        temperature_neg: Temperature of the gate for all other tokens.
    """

    temperature_pos: Positive = experimental(1.0)
    temperature_neg: Positive = experimental(1.05)


@dataclasses.dataclass(frozen=True)
class VespoConfig(Checked, section="grpo.vespo."):
    """The weights of rows of grpo.loss_type = "vespo" (arXiv 2602.10693); absent means these defaults.

    Attributes:
        k_pos: Exponent of the weight of rows whose advantage is not negative. The higher it is, the less a row with
            a ratio below 1 weighs.
        lambda_pos: Decay of that weight. The higher it is, the less a row with a ratio above 1 weighs.
        k_neg: The exponent for rows of a negative advantage.
        lambda_neg: The decay for rows of a negative advantage.
    """

    k_pos: NotNegative = experimental(2.0)
    lambda_pos: Positive = experimental(3.0)
    k_neg: NotNegative = experimental(3.0)
    lambda_neg: Positive = experimental(2.0)


@dataclasses.dataclass(frozen=True)
class ReferenceConfig(Checked, section="grpo.reference."):
    """A KL term that keeps the policy close to a reference policy.

    Attributes:
        beta: Weight of the KL to the reference policy. 0 only measures it, as the metric `kl`.
        policy: The reference policy: the "base" without an adapter; the "adapter" that
            model.adapter_name_or_path names, of which a copy is kept; or "synced", a copy of the policy that
            follows it (TRL's sync_ref_model). Absent means that adapter where there is one, as in TRL, else the
            base.
        kl_estimator: How the KL is estimated at each token: "k1" is -d, "k2" d^2 / 2 and "k3"
            exp(d) - d - 1, where d is the log-probability under the reference minus that under the policy
            (J. Schulman, "Approximating KL Divergence", 2020).
        bias_correction: Multiply the estimate by the importance ratio (TRL's use_bias_correction_kl).
        mixup_alpha: Share of the policy in an update of a "synced" copy: 1 replaces the copy by the policy, 0 leaves
            it as it is.
        sync_steps: Optimizer steps between two updates of that copy.
    """

    beta: NotNegative = verified(0.04)
    policy: Literal["base", "adapter", "synced"] | None = verified(None)
    kl_estimator: Literal["k1", "k2", "k3"] = experimental("k3")
    bias_correction: bool = experimental(False)
    mixup_alpha: Closed01 = experimental(0.6)
    sync_steps: Count = experimental(512)

    def _across(self):
        holds = self.kl_estimator != "k1" or self.bias_correction
        rule = "as a loss it is noise of mean 0 unless grpo.reference.bias_correction = true"
        yield holds, "kl_estimator", rule


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig(Checked, section="grpo.dynamic_sampling."):
    """Groups whose completions are all equally good are replaced by groups of further problems (DAPO).

    Attributes:
        metric: What says how good a completion is: the name of a reward function, which may have the weight 0, or
            "reward", the whole sum. Absent means the sum without `rewards.shaping`.
        max_rounds: The most rounds of sampling for one rollout. After them, groups of equally good completions,
            which teach nothing, fill the rollout up.
    """

    metric: NotEmpty | None = experimental(None)
    max_rounds: Count = experimental(10)


@dataclasses.dataclass(frozen=True)
class EntropyConfig(Checked, section="grpo.entropy."):
    """An entropy bonus: the loss is lowered by `coef` times the mean entropy per token.

    Attributes:
        coef: Coefficient of the bonus; the first one, if it adapts.
        adaptive: Change the coefficient after every optimizer step (Skywork-OR1, arXiv 2505.22312): up by
            `coef_delta` where the mean entropy was not above `target`, else down. It acts only in a step that follows
            one whose entropy was not above the target.
        coef_min: Lower bound of a coefficient that adapts.
        coef_max: Upper bound of a coefficient that adapts.
        coef_delta: How much an adaptive coefficient changes after a step.
        target: Entropy in nats per token, below which the bonus acts; best close to the metric `update/entropy`
            early in a run. It is compared with the mean over the tokens of `grpo.top_entropy_quantile`.
    """

    coef: NotNegative = experimental(0.0)
    adaptive: bool = experimental(False)
    coef_min: NotNegative = experimental(0.0)
    coef_max: Positive = experimental(1.0)
    coef_delta: Positive = experimental(0.005)
    target: Positive = experimental(0.2)

    def _across(self):
        rule = "must be positive, unless grpo.entropy.adaptive = true changes it"
        yield self.coef > 0 or self.adaptive, "coef", rule
        rule = f"must lie between coef_min = {self.coef_min} and coef_max = {self.coef_max}, because it begins there"
        yield not self.adaptive or self.coef_min <= self.coef <= self.coef_max, "coef", rule


@dataclasses.dataclass(frozen=True)
class CorrectionConfig(Checked, section="grpo.mismatch.correction."):
    """The loss is weighed by exp(old - behaviour), within thresholds; for grpo.old_logprobs = "recompute".

    Attributes:
        mode: "token_..." takes one weight per token, "sequence_..." the product over the row's tokens. A weight
            outside of the thresholds becomes the threshold ("..._truncate") or 0 ("..._mask").
        clip_max: Threshold above which that weight is truncated or masked.
        clip_min: Threshold below which that weight is truncated or masked; absent means none. IcePop is
            "token_mask" with 0.5 and 5.
    """

    mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        experimental("token_truncate")
    )
    clip_max: Positive = experimental(3.0)
    clip_min: Positive | None = experimental(None)

    def _across(self):
        holds = self.clip_min is None or self.clip_min < self.clip_max
        yield holds, "clip_min", f"must be below clip_max = {self.clip_max}"


@dataclasses.dataclass(frozen=True)
class MaskConfig(Checked, section="grpo.mismatch.mask."):
    """What sampler and trainer give too different probabilities is left out of the loss.

    With grpo.old_logprobs = "behaviour" the ratio is that of the policy as it learns, with "recompute" that of the
    policy before the update.

    Attributes:
        ratio_max: Largest ratio, trainer over sampler, that stays; above 1. Geometric means lie close to 1, so
            thresholds such as 1.01 are usual there.
        ratio_min: Smallest ratio that stays; absent means 1 / `ratio_max`.
        level: Whose ratio counts: that of a "token", or of a whole row, by the product ("sequence") or the geometric
            mean ("geometric") of its tokens' ratios.
    """

    ratio_max: Annotated[float, Rule(lambda x: x > 1, "must be above 1")] = experimental()
    ratio_min: Open01 | None = experimental(None)
    level: Literal["token", "sequence", "geometric"] = experimental("token")


@dataclasses.dataclass(frozen=True)
class MismatchConfig(Checked, section="grpo.mismatch."):
    """What is done where sampler and trainer, or an older and the present policy, differ.

    Attributes:
        off_policy_threshold: Leave out rows with a negative advantage from which the policy has moved away: rows
            whose mean difference of log-probabilities, sampler's minus policy's, is above this many nats per token
            (DeepSeek-V3.2, TRL's off_policy_mask_threshold; 0.5 is a start). Absent means none.
    """

    correction: CorrectionConfig | None = None
    mask: MaskConfig | None = None
    off_policy_threshold: Positive | None = experimental(None)

    def _across(self):
        parts = (self.correction, self.mask, self.off_policy_threshold)
        rule = "must be given where grpo.mismatch has neither a correction nor a mask"
        yield parts != (None, None, None), "off_policy_threshold", rule


@dataclasses.dataclass(frozen=True)
class GrpoConfig(Checked, section="grpo.", renamed=RENAMED):
    """The objective.

    Attributes:
        loss_type: What a token adds to the loss, and what the sum is divided by: a table in docs/losses.md
            has both, with the paper of each loss. "luspo" belongs to `importance_sampling_level = "sequence"`.
        epsilon: Lower clip range of the ratio. "cispo", "sapo" and "vespo" have none.
        epsilon_high: Upper clip range; absent means `epsilon` (DAPO: 0.28). For "cispo" it is the bound of the
            ratio itself and must be given; 5 is usual (arXiv 2510.13786).
        delta: Cap of the ratio for negative advantages, where clipping leaves it without an upper bound (TRL's
            name; verl's dual clip). 0 is none. Absent means none with `old_logprobs = "recompute"`; otherwise, where
            ratios hold the sampler's noise, 3, or 1 + `epsilon_high` where that is more.
        importance_sampling_level: Ratio per "token", or one per "sequence", the mean over its tokens. GSPO is
            "sequence" with `loss_type = "grpo"`: under the other loss types rows weigh by their length. Its
            clip range is 3e-4 and 4e-4, at which AQN's noise alone clips 39 to 56 % of the rows unless
            `old_logprobs = "recompute"`.
        advantage_estimator: What a reward is compared with: the mean of its group ("grpo"), or of the group's
            other completions ("rloo").
        scale_rewards: Standard deviation that divides advantages: of the "group", of the "batch",
            or "none".
        multi_objective_aggregation: How several reward functions become one advantage: their weighted sum is
            compared within the group ("sum_then_normalize"), or each function is, scaled by its own
            `scale_rewards`, and the sum of these is normalized over the batch ("normalize_then_sum": GDPO,
            arXiv 2601.05242).
        mask_truncated_completions: Leave completions without a stop token out of the loss.
        num_iterations: Passes over each rollout.
        old_logprobs: Which log-probabilities the ratio is taken against: the sampler's own ("behaviour"), or
            the clean policy's before the update ("recompute", as in QeRL's code). Absent means what
            `noise.estimator` chooses, and "behaviour" without it.
        top_entropy_quantile: Share of an optimizer batch's tokens, those of the highest entropy, from which the
            policy learns (arXiv 2506.01939; 0.2 there). 1 is all of them, and 0 the highest alone. It takes one
            more forward pass in each optimizer step.
    """

    loss_type: LossType = core(
        "dapo", experimental=("bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo")
    )
    epsilon: Open01 = core(0.2)
    epsilon_high: Annotated[float, Rule(lambda x: x > 0, "must be > 0")] | None = core(None)
    delta: float | None = experimental(None)
    importance_sampling_level: Literal["token", "sequence"] = experimental("token")
    advantage_estimator: Literal["grpo", "rloo"] = experimental("grpo")
    scale_rewards: Literal["group", "batch", "none"] = experimental("group")
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = experimental(
        "sum_then_normalize"
    )
    mask_truncated_completions: bool = core(False)
    num_iterations: Count = experimental(1)
    old_logprobs: Literal["behaviour", "recompute"] | None = experimental(None)
    top_entropy_quantile: Closed01 = experimental(1.0)
    reference: ReferenceConfig | None = None
    dynamic_sampling: DynamicSamplingConfig | None = None
    mismatch: MismatchConfig | None = None
    entropy: EntropyConfig | None = None
    sapo: SapoConfig | None = None
    vespo: VespoConfig | None = None

    @property
    def clips(self) -> bool:
        """Whether the loss clips the ratio from both sides."""
        return self.loss_type in _CLIPPED

    @property
    def correction(self) -> CorrectionConfig | None:
        """The table `mismatch.correction`."""
        return self.mismatch.correction if self.mismatch else None

    @property
    def ratio_cap(self) -> float | None:
        """The cap of the ratio for negative advantages; None for none. See `delta`."""
        if not self.clips:
            return None
        if self.delta is not None:
            return self.delta or None
        return None if self.old_logprobs == "recompute" else max(_DUAL_CLIP, self.highest)

    @property
    def highest(self) -> float:
        """The upper end of the clip range."""
        return 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)

    def _across(self):
        correction = self.correction
        by_row = correction is not None and correction.mode.startswith("sequence")
        rule = f"must exceed 1 + epsilon_high = {self.highest}, or be 0 for none"
        yield not self.delta or self.delta > self.highest, "delta", rule
        rule = f'must be absent with grpo.loss_type = "{self.loss_type}", which clips no ratio'
        yield self.clips or not self.delta, "delta", rule
        rule = 'must be given with grpo.loss_type = "cispo", whose ratios it bounds: 5 is usual'
        yield self.loss_type != "cispo" or self.epsilon_high is not None, "epsilon_high", rule
        rule = (
            'needs grpo.scale_rewards = "none" or "batch": with "group" it is grpo times a constant'
        )
        holds = self.advantage_estimator == "grpo" or self.scale_rewards != "group"
        yield holds, "advantage_estimator", rule
        rule = 'needs grpo.old_logprobs = "recompute": against the behaviour policy the weight is 1 by definition'
        yield self.old_logprobs == "recompute" or correction is None, "mismatch.correction", rule
        rule = (
            'must be "token_truncate" or "token_mask" with grpo.loss_type = "vespo", whose weight of a '
            "row is made of tokens"
        )
        yield self.loss_type != "vespo" or not by_row, "mismatch.correction.mode", rule
        for name in ("sapo", "vespo"):
            rule = f'needs grpo.loss_type = "{name}"'
            yield getattr(self, name) is None or self.loss_type == name, name, rule
