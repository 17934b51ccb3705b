"""A run as frozen dataclasses: TOML in, TOML out, checked once when built.

A TOML section is a dataclass, a key is a field; names are TRL's where TRL has one, QeRL's for AQN.
An unknown key, a wrong type or an impossible value is one `ConfigError` that names the field, the
value and the rule.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import tomllib
import types
import typing
from typing import Any, Literal

# How the linears are held.
Weights = Literal["nvfp4", "mxfp4", "nf4", "bfloat16", "float32"]
# The values of `Weights` that no format packs.
DENSE = ("bfloat16", "float32")
# Type of the activations.
Dtype = Literal["bfloat16", "float32"]
# What a backward pass recomputes, from nothing to a whole layer.
Remat = Literal["none", "products", "mlp", "layer"]


class ConfigError(ValueError):
    """A configuration that cannot be run."""


def _require(condition: bool, field: str, value: Any, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{field}: got {value!r}; {rule}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The base model.

    Attributes:
        model_name_or_path: A local folder or hub name (config.json and safetensors); "qerl-tiny" is
            the base that ships with the package. With `random_base`, a name of `architecture.KNOWN`
            will do.
        tokenizer_name_or_path: Where the tokenizer is, if not beside the model.
        weights: How the linears are held: "nvfp4", "mxfp4" and "nf4" (with quantized scales, as in
            QLoRA) pack a 16-bit checkpoint on load; a checkpoint in that format is read as it is.
        dtype: Of the activations.
        random_base: Make a packed random base of that architecture on the device instead of reading
            weights.
        gradient_checkpointing: What the backward pass recomputes instead of keeping it: each
            "layer", of a layer the "mlp" and all but attention's two products, all but these and the
            MLP's first ("products"), or "none". From the first to the last it takes more memory and
            less time.
        trainable: "lora" trains an adapter; "full" the layers of a dense base themselves (linears,
            biases and norms; not embedding, last norm and head), in float32, without an adapter.
        adapter_name_or_path: A PEFT adapter over that base, by folder or hub name, from which
            training goes on; `[lora]` has its shape. The optimizer starts anew, and the reference
            policy is still the base.
    """

    model_name_or_path: str
    tokenizer_name_or_path: str | None = None
    weights: Weights = "nvfp4"
    dtype: Dtype = "bfloat16"
    random_base: bool = False
    gradient_checkpointing: Remat = "layer"
    trainable: Literal["lora", "full"] = "lora"
    adapter_name_or_path: str | None = None

    def __post_init__(self):
        _require(
            self.adapter_name_or_path is None or self.trainable == "lora",
            "model.adapter_name_or_path",
            self.adapter_name_or_path,
            'needs model.trainable = "lora"',
        )
        _require(
            bool(self.model_name_or_path),
            "model.model_name_or_path",
            self.model_name_or_path,
            "must not be empty",
        )
        _require(
            self.trainable == "lora" or self.weights in DENSE,
            "model.trainable",
            self.trainable,
            'packed weights have no gradient: set model.weights to "bfloat16" or "float32"',
        )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The LoRA adapter, on all seven linears of every layer (arXiv 2106.09685).

    Attributes:
        rank: Rank R of A and B.
        alpha: The branch is scaled by alpha / rank.
        dropout: Probability of dropping an input of a branch while training.
        train_norms: Train the two norms of each layer too (QeRL's `ln`); they belong to the adapter then.
    """

    rank: int = 32
    alpha: float = 32.0
    dropout: float = 0.0
    train_norms: bool = False

    def __post_init__(self):
        _require(self.rank >= 1, "lora.rank", self.rank, "must be at least 1")
        _require(self.alpha > 0, "lora.alpha", self.alpha, "must be positive")
        _require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "must be in [0, 1)")

    @property
    def scaling(self) -> float:
        """The factor of the branch, alpha / rank."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The problems.

    Attributes:
        dataset: "arithmetic" (procedural), a set that `data.SETS` names, or rows of {"prompt": ...,
            other columns} by hub name or path.
        path: Where a named set lies if not on the hub: a folder that `datasets.load_dataset` reads,
            or a file.
        name: Its configuration, where it has several.
        split: Its split.
        columns: Which columns the rows call otherwise: `prompt` and `answer` by the set's names.
        system_prompt: The system message: a text, a name of `data.SYSTEM_PROMPTS`, "" for none, or
            absent for the named set's own.
        prompt_template: Text around the last message of a prompt: "{prompt}" and "{COLUMN}" are
            filled in from the row, other braces stay.
        max_prompt_characters: Longest text of a prompt's row, before any template; longer ones are
            left out. Absent means the named set's own limit, if it has one.
        max_prompt_length: Longest prompt in tokens, chat template included.
        overlong_prompts: What happens to a longer one: an "error" before training starts, or
            "drop".
        num_problems: How many problems to generate ("arithmetic") or keep, from the front; absent
            means all.
    """

    dataset: str
    path: str | None = None
    name: str | None = None
    split: str = "train"
    columns: dict[str, str] | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    max_prompt_characters: int | None = None
    max_prompt_length: int = 512
    overlong_prompts: Literal["error", "drop"] = "error"
    num_problems: int | None = None

    def __post_init__(self):
        _require(
            self.columns is None or self.columns.keys() <= {"prompt", "answer"},
            "data.columns",
            self.columns,
            'may say which column is "prompt" and which is "answer"',
        )
        _require(
            self.prompt_template is None or "{prompt}" in self.prompt_template,
            "data.prompt_template",
            self.prompt_template,
            'must contain "{prompt}"',
        )
        _require(
            self.max_prompt_characters is None or self.max_prompt_characters >= 1,
            "data.max_prompt_characters",
            self.max_prompt_characters,
            "must be at least 1",
        )
        _require(
            self.max_prompt_length >= 1,
            "data.max_prompt_length",
            self.max_prompt_length,
            "must be at least 1",
        )
        _require(
            self.num_problems is None or self.num_problems >= 1,
            "data.num_problems",
            self.num_problems,
            "must be at least 1",
        )


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """The rewards, summed with their weights.

    Attributes:
        functions: Stock names of `reward_functions.py`, or import paths "package.module:function".
        weights: One per function; absent means 1 each.
        options: By name of a function, the arguments of the factory that makes it; see
            `rewards.resolve`.
        soft_punish_cache: Width in tokens of the slope, at the end of the longest completion, down
            which DAPO's soft overlong punishment goes from 0 to -1; absent means no punishment.
        soft_punish_weight: Of that punishment.
    """

    functions: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    options: dict[str, dict[str, Any]] | None = None
    soft_punish_cache: int | None = None
    soft_punish_weight: float = 1.0

    def __post_init__(self):
        _require(
            len(self.functions) > 0,
            "rewards.functions",
            self.functions,
            "must name at least one function",
        )
        _require(
            self.weights is None or len(self.weights) == len(self.functions),
            "rewards.weights",
            self.weights,
            f"must have one entry per function ({len(self.functions)})",
        )
        _require(
            self.soft_punish_cache is None or self.soft_punish_cache >= 1,
            "rewards.soft_punish_cache",
            self.soft_punish_cache,
            "must be at least 1",
        )
        _require(
            self.soft_punish_weight > 0,
            "rewards.soft_punish_weight",
            self.soft_punish_weight,
            "must be positive",
        )


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled.

    Attributes:
        num_generations: G, completions per prompt.
        generation_batch_size: B = P * G, completions per rollout; absent means one optimizer batch.
        max_concurrent: Rows sampled at a time; the next row takes the place of one that ends.
            Absent means all of a rollout. On a Hopper GPU fused decoding takes up to 128 of them.
        kv_cache_tokens: Room for keys and values, in tokens; rows wait while there is none. Absent
            means what `max_concurrent` rows can need, or what the device has.
        kv_cache_fraction: The same as a fraction of the device memory that the weights leave; give
            one of the two.
        compact: Shrink the batch when rows end and none waits. Off keeps the last bits of a row's
            log-probabilities independent of the other rows, for which a prefill also has lines for
            as many prompts as there are slots.
        max_completion_length: Longest completion in tokens, the stop token included.
        temperature: Of the samples and of all log-probabilities.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens up to this mass; 1 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides positive scores of tokens that were there before, and multiplies
            negative ones; 1 is off.
        stop: Texts that end a completion with the token that completes one of them.
        ignore_eos: Run every completion to `max_completion_length`, or a text of `stop`.
        steps_per_generation: `generation_batch_size` as a number of micro-batches
            (optim.per_device_train_batch_size rows each); give one of the two.
    """

    num_generations: int = 8
    generation_batch_size: int | None = None
    max_concurrent: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None
    compact: bool = True
    max_completion_length: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] | None = None
    ignore_eos: bool = False
    steps_per_generation: int | None = None

    def __post_init__(self):
        _require(
            self.num_generations >= 2,
            "rollout.num_generations",
            self.num_generations,
            "must be at least 2, for an advantage compares the completions of one prompt",
        )
        _require(
            self.generation_batch_size is None or self.generation_batch_size >= 1,
            "rollout.generation_batch_size",
            self.generation_batch_size,
            "must be at least 1",
        )
        _require(
            self.steps_per_generation is None or self.steps_per_generation >= 1,
            "rollout.steps_per_generation",
            self.steps_per_generation,
            "must be at least 1",
        )
        _require(
            self.steps_per_generation is None or self.generation_batch_size is None,
            "rollout.steps_per_generation",
            self.steps_per_generation,
            "must be absent where generation_batch_size is given",
        )
        _require(
            self.max_concurrent is None or self.max_concurrent >= 1,
            "rollout.max_concurrent",
            self.max_concurrent,
            "must be at least 1",
        )
        _require(
            self.kv_cache_fraction is None or 0 < self.kv_cache_fraction < 1,
            "rollout.kv_cache_fraction",
            self.kv_cache_fraction,
            "must be in (0, 1)",
        )
        _require(
            self.kv_cache_fraction is None or self.kv_cache_tokens is None,
            "rollout.kv_cache_fraction",
            self.kv_cache_fraction,
            "must be absent where kv_cache_tokens is given",
        )
        _require(
            self.max_completion_length >= 1,
            "rollout.max_completion_length",
            self.max_completion_length,
            "must be >= 1",
        )
        _require(
            self.temperature > 0,
            "rollout.temperature",
            self.temperature,
            "must be positive: greedy completions of one prompt are equal and teach nothing",
        )
        _require(self.top_k >= 0, "rollout.top_k", self.top_k, "must not be negative (0 is off)")
        _require(0 < self.top_p <= 1, "rollout.top_p", self.top_p, "must be in (0, 1]")
        _require(0 <= self.min_p <= 1, "rollout.min_p", self.min_p, "must be in [0, 1]")
        _require(
            self.repetition_penalty > 0,
            "rollout.repetition_penalty",
            self.repetition_penalty,
            "must be positive (1 is off)",
        )
        _require(
            self.stop is None or (len(self.stop) > 0 and all(self.stop)),
            "rollout.stop",
            self.stop,
            "must be texts, none of them empty; leave it out for none",
        )

    def slots(self, rows: int) -> int:
        """How many of so many rows are sampled at a time."""
        return min(rows, self.max_concurrent or rows)


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """The objective.

    Attributes:
        loss_type: How token losses are averaged; see `grpo.policy_loss`.
        epsilon: Lower clip range of the ratio.
        epsilon_high: Upper clip range; absent means `epsilon` (DAPO: 0.28).
        delta: Cap of the unclipped ratio for negative advantages; absent means none.
        beta: Weight of the KL to the reference policy, which is the base without the adapter.
        kl_estimator: How that KL is estimated; see `grpo.token_kl`.
        use_bias_correction_kl: Multiply the estimate by the importance ratio.
        sync_ref_model: Make the reference a copy of what trains instead, and let it follow.
        ref_model_mixup_alpha: How far the copy moves each time: 1 is all the way, 0 nowhere.
        ref_model_sync_steps: Optimizer steps between its moves.
        importance_sampling_level: Ratio per "token", or one per "sequence" (GSPO).
        advantage_estimator: What a reward is compared with: the mean of its group ("grpo"), or of
            the group's other completions ("rloo").
        scale_rewards: Standard deviation that divides advantages: of the "group", of the "batch",
            or "none".
        dynamic_sampling: Sample again, with further problems, for groups of equal rewards (DAPO).
        max_sampling_rounds: After so many rounds a rollout is filled up with such groups.
        mask_truncated_completions: Leave completions without a stop token out of the loss.
        num_iterations: Passes over each rollout.
        old_logprobs: Against what the ratio is taken: the sampler's own log-probabilities
            ("behaviour"), or the clean policy's before the update ("recompute", the original's).
        importance_sampling_correction: With "recompute": weigh the loss by the truncated exp(old -
            behaviour).
        importance_sampling_mode: How that weight is truncated.
        importance_sampling_clip_max: Where it is truncated.
    """

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    use_bias_correction_kl: bool = False
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    importance_sampling_level: Literal["token", "sequence"] = "token"
    advantage_estimator: Literal["grpo", "rloo"] = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    dynamic_sampling: bool = False
    max_sampling_rounds: int = 10
    mask_truncated_completions: bool = False
    num_iterations: int = 1
    old_logprobs: Literal["behaviour", "recompute"] = "behaviour"
    importance_sampling_correction: bool = False
    importance_sampling_mode: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "token_truncate"
    importance_sampling_clip_max: float = 3.0

    def __post_init__(self):
        _require(0 < self.epsilon < 1, "grpo.epsilon", self.epsilon, "must be in (0, 1)")
        _require(
            self.epsilon_high is None or self.epsilon_high > 0,
            "grpo.epsilon_high",
            self.epsilon_high,
            "must be > 0",
        )
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        _require(
            self.delta is None or self.delta > 1 + high,
            "grpo.delta",
            self.delta,
            f"must exceed 1 + epsilon_high = {1 + high}",
        )
        _require(self.beta >= 0, "grpo.beta", self.beta, "must not be negative")
        _require(
            self.beta == 0 or self.kl_estimator != "k1" or self.use_bias_correction_kl,
            "grpo.kl_estimator",
            self.kl_estimator,
            "as a loss it is noise of mean 0 unless grpo.use_bias_correction_kl = true",
        )
        _require(
            self.beta > 0 or not self.sync_ref_model,
            "grpo.sync_ref_model",
            self.sync_ref_model,
            "needs grpo.beta > 0: without it no reference is read",
        )
        _require(
            0 <= self.ref_model_mixup_alpha <= 1,
            "grpo.ref_model_mixup_alpha",
            self.ref_model_mixup_alpha,
            "must be in [0, 1]",
        )
        _require(
            self.ref_model_sync_steps >= 1,
            "grpo.ref_model_sync_steps",
            self.ref_model_sync_steps,
            "must be at least 1",
        )
        _require(
            self.advantage_estimator == "grpo" or self.scale_rewards != "group",
            "grpo.advantage_estimator",
            self.advantage_estimator,
            'needs grpo.scale_rewards = "none" or "batch": over the deviation of its own group it is '
            "grpo times a constant",
        )
        _require(
            self.max_sampling_rounds >= 1,
            "grpo.max_sampling_rounds",
            self.max_sampling_rounds,
            "must be at least 1",
        )
        _require(
            self.num_iterations >= 1,
            "grpo.num_iterations",
            self.num_iterations,
            "must be at least 1",
        )
        _require(
            not (self.importance_sampling_correction and self.old_logprobs == "behaviour"),
            "grpo.importance_sampling_correction",
            True,
            'needs grpo.old_logprobs = "recompute": against the behaviour policy the weight is 1 by definition',
        )
        _require(
            self.importance_sampling_clip_max > 0,
            "grpo.importance_sampling_clip_max",
            self.importance_sampling_clip_max,
            "must be positive",
        )


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW and the geometry of its batches.

    Attributes:
        learning_rate: Peak.
        lr_scheduler_type: After the warm-up.
        warmup_ratio: Share of all steps in which the rate rises linearly to the peak.
        min_lr_ratio: What is left of the peak at the end.
        adam_beta1: Decay of the first moment.
        adam_beta2: Decay of the second moment.
        adam_epsilon: Added to the root of the second moment.
        weight_decay: Decoupled, on LoRA A and B; norms never decay.
        max_grad_norm: Global norm to which gradients are clipped.
        per_device_train_batch_size: Rows of one micro-batch.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        max_tokens_per_microbatch: Cut the rows of an optimizer step by their tokens instead: into as
            few micro-batches as hold no more than these, padding included. The result is the same.
        share_prompts: Compute a prompt once for all of its completions in a micro-batch.
        optimizer: AdamW with float32 moments, or with moments in 8 bits ("adamw_8bit").
    """

    learning_rate: float = 1e-5
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_ratio: float = 0.1
    min_lr_ratio: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.99
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 0.2
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_tokens_per_microbatch: int | None = None
    share_prompts: bool = True
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"

    def __post_init__(self):
        _require(
            self.learning_rate > 0, "optim.learning_rate", self.learning_rate, "must be positive"
        )
        _require(
            0 <= self.warmup_ratio < 1, "optim.warmup_ratio", self.warmup_ratio, "must be in [0, 1)"
        )
        _require(
            0 <= self.min_lr_ratio <= 1,
            "optim.min_lr_ratio",
            self.min_lr_ratio,
            "must be in [0, 1]",
        )
        _require(
            self.min_lr_ratio == 0 or self.lr_scheduler_type != "constant",
            "optim.min_lr_ratio",
            self.min_lr_ratio,
            'says where a rate ends that falls; with lr_scheduler_type = "constant" none does',
        )
        _require(0 <= self.adam_beta1 < 1, "optim.adam_beta1", self.adam_beta1, "must be in [0, 1)")
        _require(0 <= self.adam_beta2 < 1, "optim.adam_beta2", self.adam_beta2, "must be in [0, 1)")
        _require(self.adam_epsilon > 0, "optim.adam_epsilon", self.adam_epsilon, "must be positive")
        _require(
            self.weight_decay >= 0, "optim.weight_decay", self.weight_decay, "must not be negative"
        )
        _require(
            self.max_grad_norm > 0, "optim.max_grad_norm", self.max_grad_norm, "must be positive"
        )
        for field in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            _require(
                getattr(self, field) >= 1,
                f"optim.{field}",
                getattr(self, field),
                "must be at least 1",
            )


@dataclasses.dataclass(frozen=True)
class NoiseConfig:
    """Adaptive Quantization Noise; the section's presence switches it on, on any base.

    Attributes:
        sigma_start: Standard deviation in the first noisy stage.
        sigma_end: In the last.
        num_stages: Equal stages of the run; the first is silent.
        schedule: Shape of the decay.
        exponent: "code" reaches `sigma_end`, the paper's equation 8 under Algorithm 1 ("paper")
            stops short of it.
        scope: Who acts under noise: only the sampler ("rollout", the paper's Algorithm 1), or
            "both".
        final_norm: Whether the norm before the head is perturbed too.
    """

    sigma_start: float = 1e-2
    sigma_end: float = 1e-4
    num_stages: int = 10
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = "exponential"
    exponent: Literal["code", "paper"] = "code"
    scope: Literal["rollout", "both"] = "rollout"
    final_norm: bool = False

    def __post_init__(self):
        _require(self.sigma_start > 0, "noise.sigma_start", self.sigma_start, "must be positive")
        _require(
            0 < self.sigma_end <= self.sigma_start,
            "noise.sigma_end",
            self.sigma_end,
            f"must be in (0, sigma_start = {self.sigma_start}]",
        )
        _require(
            self.num_stages >= 3,
            "noise.num_stages",
            self.num_stages,
            "must be at least 3: one silent, two noisy",
        )


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out accuracy at the start and the end of a run, and on a schedule.

    It keeps to `rollout`'s concurrent rows, cache, length and stop strings; how tokens are drawn is said here.

    Attributes:
        split: Of the training set's source, or of `dataset` (AIME 2024's is called "train" on the hub).
        num_problems: How many, from the front.
        reward: The function whose share of 1s is the accuracy.
        temperature: Of the samples.
        top_p: Keep the likeliest tokens up to this mass; 1 is off.
        batch_size: Problems sampled together.
        eval_steps: Also every so many optimizer steps, and the best adapter is kept in `best`; 0
            means only at both ends.
        num_generations: Samples per problem.
        dataset: Another set than the training set, as `data.dataset`; it is asked by the training
            set's prompt.
        path: Where it lies if not on the hub, as `data.path`.
    """

    split: str = "test"
    num_problems: int = 512
    reward: str = "accuracy_reward"
    temperature: float = 1.0
    top_p: float = 1.0
    batch_size: int = 512
    eval_steps: int = 0
    num_generations: int = 1
    dataset: str | None = None
    path: str | None = None

    def __post_init__(self):
        _require(
            self.num_problems >= 1, "eval.num_problems", self.num_problems, "must be at least 1"
        )
        _require(self.batch_size >= 1, "eval.batch_size", self.batch_size, "must be at least 1")
        _require(
            self.temperature >= 0, "eval.temperature", self.temperature, "must not be negative"
        )
        _require(0 < self.top_p <= 1, "eval.top_p", self.top_p, "must be in (0, 1]")
        _require(self.eval_steps >= 0, "eval.eval_steps", self.eval_steps, "must not be negative")
        _require(
            self.num_generations == 1 or (self.num_generations > 1 and self.temperature > 0),
            "eval.num_generations",
            self.num_generations,
            "must be at least 1, and 1 at temperature 0, where all samples are equal",
        )
        _require(
            self.path is None or self.dataset is not None,
            "eval.path",
            self.path,
            "needs eval.dataset",
        )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        output_dir: The run folder; a run found there is resumed.
        max_steps: Optimizer steps; give this or `num_train_epochs`.
        num_train_epochs: Passes over the problems.
        seed: Of everything random.
        save_steps: Optimizer steps between checkpoints.
        save_total_limit: How many checkpoints are kept.
        log_completions: Write every completion with its rewards to `completions/`.
        deterministic: Ask the GPU's compiler for run-to-run identical results.
        report_to: Where metrics go beside `metrics.jsonl`: "tensorboard", "wandb", "trackio".
        run_name: The run's name there; absent means the run folder's.
    """

    output_dir: str
    model: ModelConfig
    data: DataConfig
    rewards: RewardConfig
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    grpo: GrpoConfig = GrpoConfig()
    optim: OptimConfig = OptimConfig()
    noise: NoiseConfig | None = None
    eval: EvalConfig | None = None
    max_steps: int | None = None
    num_train_epochs: float | None = None
    seed: int = 42
    save_steps: int = 50
    save_total_limit: int = 3
    log_completions: bool = True
    deterministic: bool = False
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    run_name: str | None = None

    def __post_init__(self):
        _require(bool(self.output_dir), "output_dir", self.output_dir, "must not be empty")
        _require(
            (self.max_steps is None) != (self.num_train_epochs is None),
            "max_steps, num_train_epochs",
            (self.max_steps, self.num_train_epochs),
            "exactly one of the two must be set",
        )
        _require(
            self.max_steps is None or self.max_steps >= 1,
            "max_steps",
            self.max_steps,
            "must be at least 1",
        )
        _require(
            self.num_train_epochs is None or self.num_train_epochs > 0,
            "num_train_epochs",
            self.num_train_epochs,
            "must be positive",
        )
        _require(self.save_steps >= 1, "save_steps", self.save_steps, "must be at least 1")
        _require(
            self.save_total_limit >= 1,
            "save_total_limit",
            self.save_total_limit,
            "must be at least 1",
        )
        asked = {*self.rewards.functions, *([self.eval.reward] if self.eval else [])}
        _require(
            set(self.rewards.options or ()) <= asked,
            "rewards.options",
            self.rewards.options,
            f"must be of functions that are used: {', '.join(sorted(asked))}",
        )
        # Orders of the data take no negative seed, and JAX's keys keep only the low 32 bits.
        _require(0 <= self.seed < 2**32, "seed", self.seed, "must be in [0, 2**32)")
        rows, group = self.generation_batch_size, self.rollout.num_generations
        says_rows = "rollout.generation_batch_size"
        if self.rollout.generation_batch_size is None:
            times = "optim.gradient_accumulation_steps"
            if self.rollout.steps_per_generation is not None:
                times = "rollout.steps_per_generation"
            says_rows = f"optim.per_device_train_batch_size * {times}"
        _require(
            rows % group == 0,
            says_rows,
            rows,
            f"must be a multiple of rollout.num_generations = {group}",
        )
        room = self.rollout.kv_cache_tokens
        longest_row = self.data.max_prompt_length + self.rollout.max_completion_length
        _require(
            room is None or room >= longest_row,
            "rollout.kv_cache_tokens",
            room,
            f"must hold a row of data.max_prompt_length + rollout.max_completion_length = {longest_row}",
        )
        _require(
            not (self.rollout.ignore_eos and self.grpo.mask_truncated_completions)
            or self.rollout.stop is not None,
            "grpo.mask_truncated_completions",
            self.grpo.mask_truncated_completions,
            "leaves nothing to learn from where rollout.ignore_eos lets no completion end",
        )
        cache, longest = self.rewards.soft_punish_cache, self.rollout.max_completion_length
        _require(
            cache is None or cache <= longest,
            "rewards.soft_punish_cache",
            cache,
            f"must not exceed rollout.max_completion_length = {longest}",
        )
        _require(
            self.model.trainable == "lora" or self.lora == LoraConfig(),
            "model.trainable",
            self.model.trainable,
            "leaves nothing for a [lora] section to say: remove it",
        )
        _require(
            self.model.trainable == "lora" or self.grpo.beta == 0 or self.grpo.sync_ref_model,
            "grpo.beta",
            self.grpo.beta,
            'with model.trainable = "full" the reference needs a copy of the weights: ask for it with '
            "grpo.sync_ref_model = true (ref_model_mixup_alpha = 0 keeps it as it was)",
        )
        _require(
            rows % self.train_batch_size == 0,
            says_rows,
            rows,
            "must be a multiple of the optimizer batch, optim.per_device_train_batch_size * "
            f"optim.gradient_accumulation_steps = {self.train_batch_size}",
        )
        tokens = self.optim.max_tokens_per_microbatch
        one_row = self.data.max_prompt_length + self.rollout.max_completion_length
        _require(
            tokens is None or tokens >= one_row,
            "optim.max_tokens_per_microbatch",
            tokens,
            "must hold one row, data.max_prompt_length + rollout.max_completion_length = "
            f"{one_row}",
        )
        _require(
            tokens is None or self.grpo.loss_type != "bnpo",
            "optim.max_tokens_per_microbatch",
            tokens,
            'goes with any grpo.loss_type but "bnpo", whose value depends on the cut: take "dapo"',
        )
        _require(
            self.max_steps is None or self.max_steps % self.updates_per_rollout == 0,
            "max_steps",
            self.max_steps,
            f"must be a multiple of the {self.updates_per_rollout} optimizer steps made from each rollout",
        )

    @property
    def train_batch_size(self) -> int:
        """Rows of one optimizer step."""
        return self.optim.per_device_train_batch_size * self.optim.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """B, rows of one rollout."""
        if self.rollout.steps_per_generation is not None:
            return self.optim.per_device_train_batch_size * self.rollout.steps_per_generation
        given = self.rollout.generation_batch_size
        return self.train_batch_size if given is None else given

    @property
    def prompts_per_rollout(self) -> int:
        """P."""
        return self.generation_batch_size // self.rollout.num_generations

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps made from one rollout."""
        return self.grpo.num_iterations * self.generation_batch_size // self.train_batch_size

    def total_steps(self, num_problems: int) -> int:
        """Optimizer steps of the whole run over `num_problems` problems: whole rollouts, to the nearest number."""
        if self.max_steps is not None:
            return self.max_steps
        rollouts = max(1, round(self.num_train_epochs * num_problems / self.prompts_per_rollout))
        return rollouts * self.updates_per_rollout


def load(path: str | pathlib.Path) -> RunConfig:
    """Reads and checks a TOML file."""
    path = pathlib.Path(path)
    if not path.is_file():
        raise ConfigError(f"config file: got {str(path)!r}; no such file")
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return from_table(RunConfig, table)


def from_table(cls: type, table: dict[str, Any], prefix: str = "") -> Any:
    """Builds a config dataclass from a TOML table, checking names and types."""
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise ConfigError(
                f"{prefix}{key}: unknown field; {_where(cls, prefix)} has {', '.join(fields)}"
            )
    required = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in table]
    if required:
        raise ConfigError(f"{prefix}{required[0]}: missing; {_where(cls, prefix)} needs it")
    return cls(**{key: _value(hints[key], value, prefix + key) for key, value in table.items()})


def to_table(cfg: Any) -> dict[str, Any]:
    """The TOML table of a config; `from_table` of it gives an equal config."""
    table = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            table[field.name] = to_table(value)
        elif value is not None:
            table[field.name] = list(value) if isinstance(value, tuple) else value
    return table


def dump(cfg: RunConfig) -> str:
    """The config as TOML text, every default written out."""
    import tomli_w

    return tomli_w.dumps(to_table(cfg))


def _where(cls: type, prefix: str) -> str:
    return f"[{prefix.rstrip('.')}]" if prefix else "the top level"


def _value(hint: Any, value: Any, name: str) -> Any:
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        (hint,) = [arg for arg in args if arg is not types.NoneType]
        return _value(hint, value, name)
    if origin is Literal:
        if value not in args:
            raise ConfigError(f"{name}: got {value!r}; must be one of {', '.join(map(repr, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{name}: got {value!r}; must be a list")
        return tuple(_value(args[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(hint) or origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: got {value!r}; must be a section")
        if origin is dict:
            return {key: _value(args[1], item, f"{name}.{key}") for key, item in value.items()}
        return from_table(hint, value, f"{name}.")
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ConfigError(f"{name}: got {value!r}; must be of type {hint.__name__}")
    if hint is float:
        _require(math.isfinite(value), name, value, "must be finite")
    return value
