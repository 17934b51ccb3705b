"""A run as frozen dataclasses, checked once when built.

A TOML section is a dataclass, a key is a field; names are TRL's where TRL has one, QeRL's for AQN.
A field's annotation says which values are allowed. `_across` yields the rules that concern several fields.
"""

import dataclasses
import datetime
import math
import re
from typing import Annotated, Any, Literal, get_args

from qerl_jax.config.grpo import GrpoConfig
from qerl_jax.config.rules import NOT_FUNCTIONS, RENAMED, across_sections
from qerl_jax.config.tiers import core, experimental, verified
from qerl_jax.system.checked import (
    Checked,
    Closed01,
    Count,
    HalfOpen01,
    NotEmpty,
    NotNegative,
    Open01,
    Positive,
    Rule,
    Seed,
    require,
)

# The packed number formats: those of `pallas_kernels.FORMATS`.
PackedFormat = Literal["nvfp4", "mxfp4", "nf4"]
# Storage format of the linears' weights.
Weights = Literal[PackedFormat, "bfloat16", "float32"]
# The values of `Weights` that are not packed.
DENSE = ("bfloat16", "float32")
# How the scale of each block of a packed weight is chosen: by its largest entry, as other libraries do, or as
# the one that rounds the block with the smallest squared error.
BlockScales = Literal["auto", "search", "maximum"]
# Data type of the activations.
Dtype = Literal["bfloat16", "float32"]
# Which kernels multiply packed weights and decode: those of `pallas_kernels.runtime.KERNELS`.
Kernels = Literal["auto", "hopper", "portable", "reference"]
# What a backward pass recomputes, from nothing to a whole layer; "auto" leaves the choice to the memory plan.
Remat = Literal["none", "products", "mlp", "layer"]
Checkpointing = Literal["auto", Remat]
# Sampling options, the same in every section that has them.
TopK = Annotated[int, Rule(lambda k: k >= -1, "must be at least -1 (0 and -1 are off)")]
TopP = Annotated[float, Rule(lambda p: 0 < p <= 1, "must be in (0, 1]")]
RepetitionPenalty = Annotated[float, Rule(lambda x: x > 0, "must be positive (1 is off)")]
PromptTemplate = Annotated[str, Rule(lambda text: "{prompt}" in text, 'must contain "{prompt}"')]
_STOP = Rule(lambda texts: texts and all(texts), "must be texts, none empty; leave it out for none")
_IDS = Rule(lambda ids: ids and min(ids) >= 0, "must be ids of tokens; leave it out for none")
_DATE = Rule(datetime.date.fromisoformat, 'must be a date, such as "2026-07-26"')
_NAMES = Rule(
    lambda names: all(isinstance(name, str) for name in names),
    f"must be a list of names; {NOT_FUNCTIONS}",
)
_COLUMNS = Rule(
    lambda names: names.keys() <= {"prompt", "answer"},
    'may say which column is "prompt" and which is "answer"',
)
_CALL = Rule(
    lambda text: "argument" in re.compile(text).groupindex,
    'must be a regular expression with a group "(?P<argument>...)"',
)
# Whether drafts are made.
Drafts = Literal["auto", "always", "off"]
# The linears of a layer, as Hugging Face names them.
Linear = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LINEARS = get_args(Linear)
# How a policy writes calls of tools.
CallFormat = Literal["hermes", "llama3_json"]
# The rows of a 72B model's narrow linears. A larger rank is most likely a typing error.
_MOST_RANK = 8192
_RANKS = f"must be at least 1 and at most {_MOST_RANK}"
_is_rank = lambda n: isinstance(n, int) and 1 <= n <= _MOST_RANK
_KEYS = Rule(lambda table: all(map(re.compile, table)), "must have regular expressions as keys")
_Ranks = Annotated[
    dict[str, int],
    Rule(lambda table: all(map(_is_rank, table.values())), f"ranks {_RANKS}"),
    _KEYS,
]
_Alphas = Annotated[
    dict[str, float], Rule(lambda table: min(table.values()) > 0, "alphas must be positive"), _KEYS
]


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked, section="model."):
    """The base model.

    Attributes:
        model_name_or_path: A local folder or hub name (config.json and safetensors); "qerl-tiny" is the base
            that ships with the package. With `random_base` also the name of a published shape:
            qwen2.5-SIZE (0.5b, 1.5b, 3b, 7b, 14b, 32b, 72b), qwen3-SIZE (0.6b, 1.7b, 4b, 8b, 14b, 32b),
            llama-3.2-SIZE (1b, 3b), llama-3.1-SIZE (8b, 70b) or mistral-7b-v0.3.
        tokenizer_name_or_path: Where the tokenizer is, if it is not beside the model.
        chat_template_kwargs: Extra arguments of the chat template, such as `enable_thinking = false` for
            Qwen3. They are used wherever the policy is asked.
        chat_template_date: The date that a chat template writes as today's. Absent means the day (in UTC); a run
            whose template writes it stays at the day on which it began, which its config.toml has.
        weights: Storage format of the linears' weights: "nvfp4", "mxfp4" and "nf4" (with quantized scales, as
            in QLoRA) pack a 16-bit checkpoint on load; a checkpoint in that format is read as it is.
        dtype: Data type of the activations.
        random_base: Make a packed random base of that architecture on the device instead of reading weights.
        gradient_checkpointing: What the backward pass computes again instead of keeping it. "layer" keeps
            only the input of each layer. "mlp" also keeps the products of the two linears of attention;
            "products" also the product of the first linear of the MLP; "none" keeps all of these and what
            lies between. In this order the update takes more memory and, up to "products", less time. "auto" takes
            the first of "products", "mlp" and "layer" with which the memory plan leaves a fifth of the device free;
            "layer" if the device does not report its memory; never "none".
        trainable: "lora" trains an adapter; "full" trains the layers of a dense base themselves (linears,
            biases and norms; not embedding, last norm and head), in float32, without an adapter.
        adapter_name_or_path: A PEFT adapter over that base, by folder or hub name, from which training goes
            on; `[lora]` must give the adapter's shape. The optimizer starts anew. With [grpo.reference]
            this adapter, as it is here, is the reference policy; see grpo.reference.policy.
        kernels: Which kernels multiply packed weights and decode. "auto" takes Hopper's own kernels where
            they apply, else the "portable" ones (Triton's, from compute capability 7.5 on) where jax-triton
            is installed, else the "reference", which unpacks all weights at every call. `qerl env` says which
            ones a machine gets.
        block_scales: How the scales of blocks are chosen where a 16-bit checkpoint is packed on load:
            "search" takes for each block the one that rounds it best, "maximum" puts its largest entry at the
            largest code, as other libraries do. "auto" searches for NVFP4 only: with MXFP4 and NF4 the search
            lowered the errors of a real model's weights, but raised those of its outputs.
    """

    model_name_or_path: NotEmpty = core()
    tokenizer_name_or_path: str | None = core(None)
    weights: Weights = core("nvfp4")
    dtype: Dtype = core("bfloat16")
    random_base: bool = core(False)
    gradient_checkpointing: Checkpointing = core("auto")
    trainable: Literal["lora", "full"] = core("lora")
    adapter_name_or_path: str | None = experimental(None)
    chat_template_kwargs: dict[str, Any] | None = experimental(None)
    chat_template_date: Annotated[str, _DATE] | None = experimental(None)
    kernels: Kernels = verified("auto")
    block_scales: BlockScales = core("auto")

    def _across(self):
        lora = self.trainable == "lora"
        rule = 'needs model.trainable = "lora"'
        yield lora or self.adapter_name_or_path is None, "adapter_name_or_path", rule
        rule = 'packed weights have no gradient: set model.weights to "bfloat16" or "float32"'
        yield lora or self.weights in DENSE, "trainable", rule


@dataclasses.dataclass(frozen=True)
class LoraConfig(Checked, section="lora."):
    """The LoRA adapter, on the seven linears of every layer or some of them (arXiv 2106.09685).

    Attributes:
        rank: Rank R of A and B.
        alpha: The branch is scaled by alpha / rank.
        dropout: Probability of dropping an input of a branch while training.
        train_norms: Train the two norms of each layer too (QeRL's `ln`); they belong to the adapter then.
        target_modules: Linears that have a branch, by the names q_proj, k_proj, v_proj, o_proj, gate_proj,
            up_proj and down_proj; absent means all seven.
        rank_pattern: Other ranks by name, as PEFT has it: the end of a linear's name ("down_proj",
            "layers.0.self_attn.q_proj") or a regular expression for that.
        alpha_pattern: Other alphas by name, likewise.
        use_rslora: Scale a branch by alpha / sqrt(rank), so that the size of its output does not shrink as
            the rank grows (arXiv 2312.03732).
    """

    rank: Annotated[int, Rule(_is_rank, _RANKS)] = core(32)
    alpha: Positive = core(32.0)
    dropout: HalfOpen01 = experimental(0.0)
    train_norms: bool = experimental(False)
    target_modules: tuple[Linear, ...] | None = experimental(None)
    rank_pattern: _Ranks | None = experimental(None)
    alpha_pattern: _Alphas | None = experimental(None)
    use_rslora: bool = experimental(False)

    def __post_init__(self):
        # Each shape has one spelling, so that equal shapes compare equal, and it can be hashed.
        names = self.target_modules
        if isinstance(names, list | tuple) and set(names) <= set(_LINEARS) and names:
            ordered = tuple(name for name in _LINEARS if name in names)
            object.__setattr__(self, "target_modules", None if ordered == _LINEARS else ordered)
        for field in ("rank_pattern", "alpha_pattern"):
            table = getattr(self, field)
            if isinstance(table, dict):
                object.__setattr__(self, field, _Patterns(table) if table else None)
        super().__post_init__()

    def _across(self):
        names, rule = self.target_modules, f"must name at least one of {', '.join(_LINEARS)}"
        yield names is None or (bool(names) and set(names) <= set(_LINEARS)), "target_modules", rule

    def factor(self, alpha: float, rank: int) -> float:
        """What a branch of that alpha and rank is multiplied by."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def scaling(self) -> float:
        """The factor of a branch that no pattern names."""
        return self.factor(self.alpha, self.rank)


class _Patterns(dict):
    """A table that can be hashed: compiled programs are looked up by the model's shape."""

    def __hash__(self):
        return hash(tuple(self.items()))

    def __eq__(self, other):
        # Order matters: the first pattern that matches a linear is used.
        return isinstance(other, dict) and list(self.items()) == list(other.items())


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked, section="data."):
    """The problems.

    Attributes:
        dataset: "arithmetic" (procedural), a set with a short name, such as "gsm8k"
            (docs/data.md#a-data-set-from-the-hub), or rows of {"prompt": ..., other columns} by hub name or
            path.
        path: Where a named set lies if not on the hub: a folder that Hugging Face's `load_dataset` reads,
            or a file.
        name: Name of the data set's configuration, where it has several; "one-step" makes
            "arithmetic" ask problems of one operation, "mixed" easy and hard ones in digits and words,
            "products" those of two-digit factors, and "secrets" games of guessing a number.
        split: Name of the split to train on.
        columns: Which columns of the rows to read as `prompt` and `answer`, where they have other names.
        system_prompt: The system message: a text, the name of one ("think-answer", "answer-line" or "think-code"),
            "" for none, or absent for the named set's own.
        prompt_template: Text around the last message of a prompt: "{prompt}" and "{COLUMN}" are filled in
            from the row, other braces stay.
        apply_chat_template: Whether a prompt that is a text becomes a message of the user, in the chat
            template. False gives texts to the policy as they are, for policies that continue texts. Prompts
            that are messages always pass the chat template, and so does a text after a named set's own system
            prompt.
        max_prompt_characters: Longest text of a prompt's row, before any template; longer ones are left out.
            Absent means the named set's own limit, if it has one.
        max_prompt_length: Longest prompt in tokens, chat template included.
        overlong_prompts: What happens to a longer prompt: an "error" before training starts, or "drop".
        num_problems: How many problems to generate ("arithmetic") or keep, from the front; absent means all.
    """

    dataset: str = core()
    path: str | None = verified(None)
    name: str | None = core(None)
    split: str = verified("train")
    columns: Annotated[dict[str, str], _COLUMNS] | None = verified(None)
    system_prompt: str | None = core(None)
    prompt_template: PromptTemplate | None = experimental(None)
    apply_chat_template: bool = experimental(True)
    max_prompt_characters: Count | None = experimental(None)
    max_prompt_length: Count = core(512)
    overlong_prompts: Literal["error", "drop"] = core("error")
    num_problems: Count | None = core(None)


@dataclasses.dataclass(frozen=True)
class RewardConfig(Checked, section="rewards."):
    """The rewards, summed with their weights.

    Attributes:
        functions: Names of stock rewards (docs/rewards.md#stock-rewards), or import paths
            "package.module:function" or "folder/file.py:function". The list may be empty only if `[tools]` names
            an environment, which then judges its rows itself.
        weights: One weight per function; absent means 1 each.
        options: Arguments of functions that make a reward, by their names in `functions`
            (docs/rewards.md#a-reward-with-settings).
        soft_punish_cache: The number of tokens, before the longest completion allowed, over which DAPO's soft
            overlong punishment falls from 0 to -1; absent means no punishment.
        soft_punish_weight: Weight of that punishment in the sum. In DAPO the largest punishment is half the
            difference between a right answer (1) and a wrong one (-1); where answers score 1 or 0, that is
            0.5.
        shaping: Names, as in `rewards/NAME/mean`, of the rewards that shape form or length and do not say
            which completion is better; dynamic sampling ignores them. Absent means format_reward,
            soft_format_reward, strict_format_reward, think_format_reward, think_reward, int_reward,
            xmlcount_reward, repetition_penalty_reward and the punishment of long completions.
    """

    functions: Annotated[tuple[str, ...], _NAMES] = core()
    weights: tuple[float, ...] | None = experimental(None)
    options: dict[str, dict[str, Any]] | None = experimental(None)
    soft_punish_cache: Count | None = experimental(None)
    soft_punish_weight: Positive = experimental(1.0)
    shaping: tuple[str, ...] | None = experimental(None)

    def _across(self):
        rule = f"must have one entry per function ({len(self.functions)})"
        holds = self.weights is None or len(self.weights) == len(self.functions)
        yield holds, "weights", rule


@dataclasses.dataclass(frozen=True)
class RolloutConfig(Checked, section="rollout."):
    """How completions are sampled.

    Attributes:
        num_generations: G, completions per prompt.
        generation_batch_size: B = P * G, completions per rollout; absent means one optimizer batch.
        max_concurrent: Rows sampled at a time on each device; the next row takes the place of one that ends.
            Absent means as many rows of a rollout as fit in the cache if each needs a quarter of its limit, at
            most 512; but 128 rather than 129 to 256 where fused layers decode, which take no more. Where rows
            need more, some of them wait on the host.
        kv_cache_tokens: Capacity of each device for keys and values, in tokens; rows wait while there is none
            left. Absent means as many tokens as `max_concurrent` rows can need, but at most nine tenths of the
            memory that weights, scores and prefill leave free.
        kv_cache_fraction: That capacity as a fraction of the device memory that the weights leave; give one
            of the two.
        compact: Shrink the batch when rows end and none waits. If this is off, a row's log-probabilities do
            not depend on the other rows, not even in their last bits; each prefill is then padded to as many
            prompts as there are slots.
        max_completion_length: Longest completion in tokens, the stop token included.
        temperature: Temperature of sampling and of all log-probabilities.
        top_k: Keep the k likeliest tokens; 0 is off, and so is -1, as in vLLM.
        top_p: Keep the likeliest tokens whose probabilities add up to this; 1 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides positive scores of tokens that were there before, and multiplies negative
            ones; 1 is off. Other values need grpo.old_logprobs = "recompute" or noise.estimator = "published".
        stop: Stop strings: a completion ends with the token that completes one of them. A text that is a special
            token is a stop token; no other may hold one.
        stop_token_ids: Ids of tokens that end a completion, besides those that tokenizer, configs and chat template
            name.
        ignore_eos: Run every completion to `max_completion_length`, or to `stop` or `stop_token_ids`.
        drafts: "auto" makes drafts where at most 32 rows are left and drafts are expected to pay: a step then
            checks tokens that were found in completions of the same rollout, or in the prompt's completions when it
            was last sampled, and keeps those that are right. No
            token's distribution changes. There are none without a Hopper GPU, without `compact`, with
            `deterministic`, or if `max_completion_length` is below 512. "always" makes them in
            every step and for every length, even where they do not pay, to check them. "off": none.
        steps_per_generation: `generation_batch_size` as a number of micro-batches
            (optim.per_device_train_batch_size rows each); give one of the two.
        carry: A rollout ends when at most this many rows have not ended: these go on in the next one, under the policy
            of that one. The first rollout begins as many groups more, so that every update has whole groups. 0 is off:
            a rollout waits for its last row.
        stop_share: A rollout ends when this share of its rows has ended; the others count as truncated. It is for runs
            whose tokens must all be of the policy that learns. Absent means that a rollout waits for its last row.
    """

    num_generations: Annotated[
        int, Rule(lambda n: n >= 2, "must be at least 2: an advantage compares completions")
    ] = core(8)
    generation_batch_size: Count | None = core(None)
    max_concurrent: Count | None = core(None)
    kv_cache_tokens: int | None = verified(None)
    kv_cache_fraction: Open01 | None = verified(None)
    compact: bool = verified(True)
    max_completion_length: Count = core(512)
    temperature: Annotated[
        float, Rule(lambda x: x > 0, "must be positive: equal (greedy) completions teach nothing")
    ] = core(1.0)
    top_k: TopK = experimental(0)
    top_p: TopP = experimental(1.0)
    min_p: Closed01 = experimental(0.0)
    repetition_penalty: RepetitionPenalty = experimental(1.0)
    stop: Annotated[tuple[str, ...], _STOP] | None = experimental(None)
    stop_token_ids: Annotated[tuple[int, ...], _IDS] | None = experimental(None)
    ignore_eos: bool = verified(False)
    drafts: Drafts = core("auto", experimental=("always",))
    steps_per_generation: Count | None = experimental(None)
    carry: Annotated[int, Rule(lambda n: n >= 0, "must be at least 0")] = experimental(0)
    stop_share: Open01 | None = experimental(None)

    def _across(self):
        rule = "must be absent with rollout.carry, which leaves no row unfinished"
        yield self.stop_share is None or not self.carry, "stop_share", rule
        rule = "must be absent where generation_batch_size is given"
        holds = None in (self.steps_per_generation, self.generation_batch_size)
        yield holds, "steps_per_generation", rule
        rule = "must be absent where kv_cache_tokens is given"
        yield None in (self.kv_cache_fraction, self.kv_cache_tokens), "kv_cache_fraction", rule


@dataclasses.dataclass(frozen=True)
class OptimConfig(Checked, section="optim."):
    """AdamW and the sizes of its batches.

    Attributes:
        learning_rate: Peak learning rate.
        lr_scheduler_type: Shape of the learning rate after the warm-up.
        warmup_ratio: Share of all steps in which the rate rises linearly to the peak.
        min_lr_ratio: Learning rate at the end, as a share of the peak.
        adam_beta1: Decay of the first moment.
        adam_beta2: Decay of the second moment.
        adam_epsilon: Added to the root of the second moment.
        weight_decay: Decoupled weight decay of LoRA A and B; norms never decay.
        max_grad_norm: Global norm to which gradients are clipped.
        per_device_train_batch_size: Rows of one micro-batch with grpo.loss_type = "bnpo"; with another loss
            only its product with the next field counts.
        gradient_accumulation_steps: Number of such micro-batches in an optimizer step: a step has the product
            of both fields as rows, on any number of devices.
        max_tokens_per_microbatch: The most tokens that are computed together in the update, padding included;
            the result does not depend on it. Absent means 8192, or the tokens of the longest row if they are
            more (of two such rows, if that is little more than 8192), or fewer where these do not fit on the
            device.
        share_prompts: Compute a prompt once for all of its completions in a micro-batch.
        optimizer: AdamW with float32 moments, or with moments in 8 bits ("adamw_8bit").
    """

    learning_rate: Annotated[
        float,
        Rule(lambda x: 0 < x <= 1, "must be positive and at most 1, AdamW's step of a weight"),
    ] = core(1e-5)
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = core("cosine")
    warmup_ratio: HalfOpen01 = core(0.1)
    min_lr_ratio: Closed01 = core(0.0)
    adam_beta1: HalfOpen01 = core(0.9)
    adam_beta2: HalfOpen01 = core(0.99)
    adam_epsilon: Positive = experimental(1e-8)
    weight_decay: NotNegative = core(0.1)
    max_grad_norm: Positive = core(0.2)
    per_device_train_batch_size: Count = core(8)
    gradient_accumulation_steps: Count = core(1)
    max_tokens_per_microbatch: int | None = verified(None)
    share_prompts: bool = verified(True)
    optimizer: Literal["adamw", "adamw_8bit"] = verified("adamw")

    def _across(self):
        holds = self.min_lr_ratio == 0 or self.lr_scheduler_type != "constant"
        rule = 'must be 0 with lr_scheduler_type = "constant", under which the rate does not fall'
        yield holds, "min_lr_ratio", rule


@dataclasses.dataclass(frozen=True)
class AdaptiveNoiseConfig(Checked, section="noise.adaptive."):
    """A sigma that follows a metric, in place of a schedule, after the stage without noise.

    It stays between noise.sigma_start and noise.sigma_end. It begins at noise.sigma_start; if it follows "kl", where
    completions of the stage without noise have the divergence `target`.

    Attributes:
        target: The value of `metric` to aim at.
        metric: What sigma follows: the "entropy" of the sampled tokens, the mean "kl" from sampler to
            trainer (`sampling/kl_k3`), or the mean "reward". Sigma is raised after a rollout in which this is below
            `target`, and lowered after any other.
        rate: Factor by which sigma is raised or lowered after a rollout.
    """

    target: float = experimental()
    metric: Literal["entropy", "kl", "reward"] = experimental("entropy")
    rate: Annotated[float, Rule(lambda x: x > 1, "must be above 1")] = experimental(1.1)


@dataclasses.dataclass(frozen=True)
class NoiseConfig(Checked, section="noise.", renamed=RENAMED):
    """Adaptive Quantization Noise; the section switches it on, on any base, and `--noise None` off.

    Attributes:
        sigma_start: Standard deviation of the noise in the first noisy stage.
        sigma_end: Standard deviation of the noise in the last stage. Below 0.22 % of the norms' scales, which a
            run prints at its start, rounding to bfloat16 adds more noise than this does; at 1e-4 of a
            scale seven times as much.
        num_stages: Number of equal stages of the run; the first has no noise.
        schedule: Shape of the decay from `sigma_start` to `sigma_end`; `noise.adaptive` takes its place.
        exponent: How the decay is spread over the stages: "code", as in the published code, reaches
            `sigma_end`; "paper", the paper's equation 8 under Algorithm 1, stops short of it.
        scope: Where noise is added: only in the sampler ("rollout", the paper's Algorithm 1), or in sampler and
            update ("both").
        final_norm: Whether the norm before the head is perturbed too.
        per: How often noise is sampled: once for each "rollout", as in the published code; for each "group", a
            prompt with its completions; for each "sequence", whose prompt is then computed once for each
            completion; or for each "token", in every forward pass, as in the paper. With all but "rollout",
            decoding cannot use the fused layers and is slower.
        unit: What sigma means: a number that is added to the scales ("absolute", as in the paper), or a multiple of
            the root mean square of each norm's scale at the start of the run ("relative"). Models differ in their
            scales, so only a relative sigma has about the same effect in all of them.
        estimator: What the ratio of the loss is taken against. "corrected": the noisy policy that sampled, so the
            ratio knows the noise (`grpo.old_logprobs = "behaviour"`). "published", as in QeRL's code: the clean
            policy, so the ratio is 1 in the first update of a rollout, whatever the noise did (`"recompute"`).
            Absent means what `grpo.old_logprobs` says, and "corrected" without it. With `scope = "both"` the policy that
            learns has the noise, too, and the estimator is "corrected" by construction.
    """

    sigma_start: Positive = core(1e-2)
    sigma_end: float = core(1e-4)
    num_stages: Annotated[
        int, Rule(lambda n: n >= 3, "must be at least 3: one without noise, two with noise")
    ] = core(10)
    schedule: Literal["exponential", "linear", "cosine", "logarithmic"] = core(
        "exponential", experimental=("linear", "cosine", "logarithmic")
    )
    exponent: Literal["code", "paper"] = experimental("code")
    scope: Literal["rollout", "both"] = core("rollout", experimental=("both",))
    final_norm: bool = experimental(False)
    per: Literal["rollout", "group", "sequence", "token"] = experimental("rollout")
    unit: Literal["absolute", "relative"] = experimental("absolute")
    estimator: Literal["corrected", "published"] | None = experimental(None)
    adaptive: AdaptiveNoiseConfig | None = None

    def _across(self):
        follows_kl = self.adaptive is not None and self.adaptive.metric == "kl"
        rule = f"must be in (0, sigma_start = {self.sigma_start}]"
        yield 0 < self.sigma_end <= self.sigma_start, "sigma_end", rule
        rule = 'needs noise.scope = "rollout": an update cannot hold the noise of every token'
        yield self.per != "token" or self.scope == "rollout", "per", rule
        rule = 'needs noise.scope = "rollout": with "both" no policy of the update is clean'
        yield self.estimator != "published" or self.scope == "rollout", "estimator", rule
        rule = 'needs noise.scope = "rollout": where both act under noise they do not differ'
        yield not follows_kl or self.scope == "rollout", "adaptive.metric", rule


@dataclasses.dataclass(frozen=True)
class EvalConfig(Checked, section="eval.", renamed=RENAMED):
    """Held-out accuracy at both ends of a run and on a schedule; `--eval None` switches it off.

    Concurrent rows, cache, drafts, length and stops are those of `rollout`. Temperature and top-p are given
    here. Top-k, min-p and repetition penalty are off.

    Attributes:
        split: Split of the training set's source, or of `dataset` (AIME 2024's is called "train" on the hub).
        num_problems: How many problems to ask, from the front.
        reward: The function whose share of 1s is the accuracy.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the likeliest tokens whose probabilities add up to this; 1 is off.
        eval_steps: Also evaluate every so many optimizer steps, and keep the best adapter in `best`; 0 means
            only at both ends.
        num_generations: Completions per problem.
        dataset: A set other than the training set, named as in `data.dataset`; its problems get the training set's
            system prompt and prompt template.
        path: Where that set lies if not on the hub, as `data.path`.
    """

    split: str = core("test")
    num_problems: Count = core(512)
    reward: str = core("accuracy_reward")
    temperature: NotNegative = core(1.0)
    top_p: TopP = core(1.0)
    eval_steps: Annotated[int, Rule(lambda n: n >= 0, "must not be negative")] = core(0)
    num_generations: int = core(1)
    dataset: str | None = core(None)
    path: str | None = verified(None)

    def _across(self):
        rule = "must be at least 1, and 1 at temperature 0, where all samples are equal"
        holds = self.num_generations == 1 or (self.num_generations > 1 and self.temperature > 0)
        yield holds, "num_generations", rule
        yield self.path is None or self.dataset is not None, "path", "needs eval.dataset"


@dataclasses.dataclass(frozen=True)
class ToolsConfig(Checked, section="tools."):
    """Tools that the policy may call while it answers, and an environment that it acts in (docs/environments.md).

    A turn that calls a tool is answered, and the policy goes on. All turns and answers of a row together have
    at most `rollout.max_completion_length` tokens; nothing is learned from those of answers.

    Attributes:
        functions: Tools: stock names ("calculator", "python"), or import paths "package.module:function" or
            "folder/file.py:function".
        environment: A class whose methods are tools, and that keeps a state for each row: a stock name
            ("guess_number"), or an import path.
        environments: Several such classes by names of your own; each row gives its name in the column
            "environment".
        environment_options: Arguments with which the class is called; with several classes, a table for each
            name.
        max_tool_calling_iterations: Most turns of a row that are answered; absent means no limit but that of
            tokens.
        max_reply_tokens: The most tokens of a call's result; a longer one is cut, and says so.
        seconds: Time limit of a call, in seconds of processor time. The limit by the clock is five times as long. A
            tool that a script or a notebook defines has this limit by the clock.
        workers: Calls that run at a time; absent means one for each processor.
        call_format: How calls are written: "hermes" (JSON between <tool_call> and </tool_call>: Qwen, Hermes)
            or "llama3_json" (a turn that is JSON: Llama 3.1). Absent means what the chat template asks for.
        call_pattern: A regular expression for calls in another form, instead of `call_format`: its group
            `argument` is the only argument of a tool, its group `name` the tool's name, which may be absent
            where there is one tool.
    """

    functions: tuple[str, ...] = experimental(())
    environment: NotEmpty | None = experimental(None)
    environments: Annotated[dict[str, str], Rule(bool, "must name at least one")] | None = (
        experimental(None)
    )
    environment_options: dict[str, Any] | None = experimental(None)
    max_tool_calling_iterations: Count | None = experimental(None)
    max_reply_tokens: Count = experimental(256)
    seconds: Positive = experimental(5.0)
    workers: Count | None = experimental(None)
    call_format: CallFormat | None = experimental(None)
    call_pattern: Annotated[str, _CALL] | None = experimental(None)

    @property
    def has_environment(self) -> bool:
        """Whether there is an environment, or several."""
        return self.environment is not None or self.environments is not None

    @property
    def paths(self) -> list[str]:
        """The names or import paths of all tools and environments."""
        one = filter(None, [self.environment])
        return [*self.functions, *one, *(self.environments or {}).values()]

    def _across(self):
        names, options = self.environments or {}, self.environment_options or {}
        rule = "must be absent where tools.call_format is given"
        yield self.call_pattern is None or self.call_format is None, "call_pattern", rule
        rule = "must name at least one tool where tools.environment is absent"
        yield bool(self.functions) or self.has_environment, "functions", rule
        rule = "must be absent where tools.environment is given"
        yield self.environment is None or self.environments is None, "environments", rule
        rule = "needs tools.environment"
        yield self.has_environment or self.environment_options is None, "environment_options", rule
        rule = f"must be a table for each name of tools.environments: {', '.join(names)}"
        holds = all(name in names and isinstance(options[name], dict) for name in options)
        yield self.environments is None or holds, "environment_options", rule


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked, section="mesh."):
    """The devices of a run (docs/scale.md).

    Attributes:
        data: Number of replicas on all hosts together. A replica is what samples rows and computes micro-batches on
            its own: one device, or the devices of `fsdp` or `tensor`. Absent means a run uses all devices;
            CUDA_VISIBLE_DEVICES chooses which.
        fsdp: Devices of a replica that share a base: each has a part of the weights of every linear, and each layer
            gathers its weights when it is computed. For a base that does not fit on one device. Sampling is not
            faster: a replica is as fast as one device that gathers all weights for every token.
        tensor: Devices of a replica that decode each row together: each has a part of the heads, with their cache,
            and a part of the MLP. For faster sampling, or if base or cache do not fit on one device. Updates are
            those of `fsdp`, so `fsdp` cannot be given too.
    """

    data: Count | None = experimental(None)
    fsdp: Count = experimental(1)
    tensor: Count = experimental(1)

    @property
    def group(self) -> int:
        """Devices of a replica."""
        return self.fsdp * self.tensor

    def _across(self):
        rule = f"must be absent with mesh.tensor = {self.tensor}, whose devices share the base in updates, too"
        yield self.fsdp == 1 or self.tensor == 1, "fsdp", rule


@dataclasses.dataclass(frozen=True)
class RunConfig(Checked):
    """One training run.

    Attributes:
        output_dir: The run folder; a run found there is resumed.
        max_steps: Number of optimizer steps; give this or `num_train_epochs`. A resumed run may have more
            than before, even if it had ended: learning rate and noise then go on as in a run that was that
            long from the start. A learning rate that had reached its end rises once more.
        num_train_epochs: Passes over the problems. Every problem that is asked counts. Under dynamic sampling
            a rollout may ask several rounds of problems: the run then has fewer steps, and learning rate and
            noise follow the number of problems.
        seed: Random seed of the whole run: adapter, data order, sampling, noise.
        save_steps: Optimizer steps between checkpoints.
        save_total_limit: How many checkpoints are kept.
        log_completions: Write every completion with its rewards to `completions/`.
        deterministic: Ask the GPU's compiler for run-to-run identical results. There are no drafts then
            (`rollout.drafts`).
        report_to: Where metrics go beside `metrics.jsonl`: "tensorboard", "wandb", "trackio".
        run_name: The run's name in those trackers; absent means the name of the run folder.
    """

    output_dir: NotEmpty = dataclasses.field(metadata={"tier": "core"})
    model: ModelConfig
    data: DataConfig
    rewards: RewardConfig
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    grpo: GrpoConfig = GrpoConfig()
    optim: OptimConfig = OptimConfig()
    noise: NoiseConfig | None = None
    eval: EvalConfig | None = None
    tools: ToolsConfig | None = None
    mesh: MeshConfig = MeshConfig()
    max_steps: Count | None = core(None)
    num_train_epochs: Positive | None = core(None)
    seed: Seed = core(42)
    save_steps: Count = core(50)
    save_total_limit: Count = core(3)
    log_completions: bool = core(True)
    deterministic: bool = verified(False)
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = verified(())
    run_name: str | None = verified(None)

    def _across(self):
        return across_sections(self)

    @property
    def objective(self) -> GrpoConfig:
        """The section `grpo` with the log-probabilities that `noise.estimator` chooses."""
        if self.noise is None or self.noise.estimator is None:
            return self.grpo
        if self.noise.estimator == "published":
            return dataclasses.replace(self.grpo, old_logprobs="recompute")
        return dataclasses.replace(self.grpo, old_logprobs="behaviour")

    @property
    def has_row_noise(self) -> bool:
        """Whether rows differ in their noise while completions are sampled."""
        return self.noise is not None and self.noise.per != "rollout"

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference policy is a copy of what trains, and not the base."""
        reference = self.grpo.reference
        if reference is None or reference.policy == "base":
            return False
        return reference.policy == "synced" or self.model.adapter_name_or_path is not None

    @property
    def drafts(self) -> Drafts:
        """`rollout.drafts`, but "off" with `deterministic`.

        How many drafts are made depends on what became of earlier ones, which a checkpoint does not hold; and a step
        with more tokens rounds differently.
        """
        return "off" if self.deterministic else self.rollout.drafts

    @property
    def train_batch_size(self) -> int:
        """Rows of one optimizer step."""
        return self.optim.per_device_train_batch_size * self.optim.gradient_accumulation_steps

    @property
    def generation_batch_size(self) -> int:
        """Rows B of one rollout."""
        if self.rollout.generation_batch_size is not None:
            return self.rollout.generation_batch_size
        steps = self.rollout.steps_per_generation or self.optim.gradient_accumulation_steps
        return self.optim.per_device_train_batch_size * steps

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts P of one rollout."""
        return self.generation_batch_size // self.rollout.num_generations

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps made from one rollout."""
        return self.grpo.num_iterations * self.generation_batch_size // self.train_batch_size

    def total_steps(self, num_problems: int) -> int:
        """Optimizer steps of the whole run over `num_problems` problems: whole rollouts, to the nearest number.

        With `num_train_epochs` under dynamic sampling these are the steps of a run whose rollouts all
        take one round; a run that needs more rounds ends earlier.
        """
        if self.max_steps is not None:
            return self.max_steps
        rollouts = max(
            1, round((self.num_train_epochs or 0) * num_problems / self.prompts_per_rollout)
        )
        steps = rollouts * self.updates_per_rollout
        rule = f"{num_problems} problems make {steps:.3g} steps of it; must be fewer than 2**31"
        require(steps < 2**31, "num_train_epochs", self.num_train_epochs, rule)
        return steps


def data_name(cfg: RunConfig, given_rows: int | None) -> str:
    """Returns what a run is trained on: a path, a data set, or "N rows from Python"."""
    if given_rows is not None:
        return f"{given_rows:,} rows from Python"
    return str(cfg.data.path or cfg.data.dataset)
