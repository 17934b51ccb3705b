"""Rules across the sections of a run's config, and warnings about unusual choices."""

from collections.abc import Iterator
from typing import Any

from qerl_jax.system.checked import require

# What fields that older configs have are called now.
RENAMED = {
    "grpo.beta": "grpo.reference.beta",
    "grpo.reference": "grpo.reference.policy",
    "grpo.kl_estimator": "grpo.reference.kl_estimator",
    "grpo.use_bias_correction_kl": "grpo.reference.bias_correction",
    "grpo.sync_ref_model": 'grpo.reference.policy = "synced"',
    "grpo.ref_model_mixup_alpha": "grpo.reference.mixup_alpha",
    "grpo.ref_model_sync_steps": "grpo.reference.sync_steps",
    "grpo.dynamic_sampling": "a section, [grpo.dynamic_sampling], which switches it on",
    "grpo.dynamic_sampling_metric": "grpo.dynamic_sampling.metric",
    "grpo.max_sampling_rounds": "grpo.dynamic_sampling.max_rounds",
    "grpo.importance_sampling_correction": "a section, [grpo.mismatch.correction], which switches it on",
    "grpo.importance_sampling_mode": "grpo.mismatch.correction.mode",
    "grpo.importance_sampling_clip_max": "grpo.mismatch.correction.clip_max",
    "grpo.importance_sampling_clip_min": "grpo.mismatch.correction.clip_min",
    "grpo.sampling_mask": "grpo.mismatch.mask.level",
    "grpo.sampling_mask_max": "grpo.mismatch.mask.ratio_max",
    "grpo.sampling_mask_min": "grpo.mismatch.mask.ratio_min",
    "grpo.off_policy_mask_threshold": "grpo.mismatch.off_policy_threshold",
    "grpo.use_adaptive_entropy": "grpo.entropy.adaptive",
    "eval.batch_size": "rollout.max_concurrent, the completions at a time: all are sampled as one queue",
    "noise.adapt_to": "noise.adaptive.metric",
    "noise.adapt_target": "noise.adaptive.target",
    "noise.adapt_rate": "noise.adaptive.rate",
    **{
        f"grpo.{table}_{field}": f"grpo.{table}.{field}"
        for table, fields in {
            "entropy": ("coef", "coef_min", "coef_max", "coef_delta", "target"),
            "sapo": ("temperature_pos", "temperature_neg"),
            "vespo": ("k_pos", "lambda_pos", "k_neg", "lambda_neg"),
        }.items()
        for field in fields
    },
}
NOT_FUNCTIONS = "functions themselves are given to qerl_jax.train as reward_funcs"
# A larger rollout is most likely a typo.
_MOST_ROWS = 2**20


def across_sections(cfg: Any) -> Iterator[tuple[bool, str, str]]:
    """Yields rules across the sections of a `RunConfig`: whether each holds, the field (or several), the rule.

    Raises:
        ConfigError: For batch sizes that are no multiples of each other, or too large.
    """
    used = {*cfg.rewards.functions, *([cfg.eval.reward] if cfg.eval else [])}
    lora, grpo = cfg.model.trainable == "lora", cfg.grpo
    policy = grpo.reference and grpo.reference.policy
    rule = "at most one of the two must be set: the first sets the second"
    holds = cfg.noise is None or None in (cfg.noise.estimator, grpo.old_logprobs)
    yield holds, "noise.estimator, grpo.old_logprobs", rule
    rule = "exactly one of the two must be set"
    holds = (cfg.max_steps is None) != (cfg.num_train_epochs is None)
    yield holds, "max_steps, num_train_epochs", rule
    holds = bool(cfg.rewards.functions) or (cfg.tools is not None and cfg.tools.has_environment)
    yield holds, "rewards.functions", f"must name at least one function; {NOT_FUNCTIONS}"
    rule = f"must be of functions that are used: {', '.join(sorted(used))}"
    yield set(cfg.rewards.options or ()) <= used, "rewards.options", rule
    rule = (
        "is not in the log-probabilities that the sampler reports, so a ratio to them would be "
        'wrong: set grpo.old_logprobs = "recompute", or noise.estimator = "published" with noise, which do not '
        "correct for the penalty; or set it to 1 and reward less repetition by get_repetition_penalty_reward"
    )
    holds = cfg.rollout.repetition_penalty == 1 or _recomputes(cfg)
    yield holds, "rollout.repetition_penalty", rule
    rule = (
        'must be false with noise.per = "sequence" and noise.scope = "both": under noise of its own '
        "each completion has another prompt before it"
    )
    noise = cfg.noise and (cfg.noise.per, cfg.noise.scope)
    yield noise != ("sequence", "both") or not cfg.optim.share_prompts, "optim.share_prompts", rule
    rule = "must be true with data.system_prompt: only a chat has a system message"
    holds = cfg.data.apply_chat_template or not cfg.data.system_prompt
    yield holds, "data.apply_chat_template", rule
    yield from _across_tables(cfg)
    yield from _across_lengths(cfg)
    yield from _across_batches(cfg)
    yield from _across_rollouts(cfg)
    rule = "has no adapter for a [lora] section to describe: remove that section"
    yield lora or cfg.lora == type(cfg.lora)(), "model.trainable", rule
    rule = "needs model.adapter_name_or_path, which names the adapter"
    holds = policy != "adapter" or cfg.model.adapter_name_or_path is not None
    yield holds, "grpo.reference.policy", rule
    rule = (
        'must be "synced" with model.trainable = "full", where the reference needs a copy of the weights '
        "(grpo.reference.mixup_alpha = 0 keeps it as it was)"
    )
    yield lora or grpo.reference is None or policy == "synced", "grpo.reference.policy", rule


def _recomputes(cfg):
    return cfg.objective.old_logprobs == "recompute"


def _across_tables(cfg):
    """Returns rules for options of a user's own functions, which are also saved as TOML and JSON."""
    tables = {
        "model.chat_template_kwargs": cfg.model.chat_template_kwargs,
        "rewards.options": cfg.rewards.options,
        "tools.environment_options": cfg.tools and cfg.tools.environment_options,
    }
    rule = "must hold texts, numbers, true or false, and lists and tables of these, with texts as names"
    return [(_is_plain(table), name, rule) for name, table in tables.items() if table]


def _is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, str | bool | int | float)


def _across_lengths(cfg):
    rollout, longest = cfg.rollout, cfg.rollout.max_completion_length
    row = cfg.data.max_prompt_length + longest
    rule = f"must hold a row of data.max_prompt_length + rollout.max_completion_length = {row}"
    holds = rollout.kv_cache_tokens is None or rollout.kv_cache_tokens >= row
    yield holds, "rollout.kv_cache_tokens", rule
    limit = cfg.optim.max_tokens_per_microbatch
    yield limit is None or limit >= row, "optim.max_tokens_per_microbatch", rule
    rule = "must be false with rollout.ignore_eos = true, under which no completion ends: nothing would be learned"
    ends = rollout.stop or rollout.stop_token_ids or not rollout.ignore_eos
    yield ends or not cfg.grpo.mask_truncated_completions, "grpo.mask_truncated_completions", rule
    rule = f"must not exceed rollout.max_completion_length = {longest}"
    yield (cfg.rewards.soft_punish_cache or 0) <= longest, "rewards.soft_punish_cache", rule


def _across_batches(cfg):
    rows, batch = cfg.generation_batch_size, cfg.train_batch_size
    group, updates = cfg.rollout.num_generations, cfg.updates_per_rollout
    per_device = "optim.per_device_train_batch_size"
    optimizer_batch = f"{per_device} * optim.gradient_accumulation_steps"
    optimizer_rows = optimizer_batch
    if cfg.rollout.generation_batch_size is not None:
        optimizer_rows = "rollout.generation_batch_size"
    elif cfg.rollout.steps_per_generation is not None:
        optimizer_rows = f"{per_device} * rollout.steps_per_generation"
    for holds, rule in (
        (rows <= _MOST_ROWS, f"must be at most {_MOST_ROWS} rows a rollout"),
        (rows % group == 0, f"must be a multiple of rollout.num_generations = {group}"),
        (
            rows % batch == 0,
            f"must be a multiple of the optimizer batch, {optimizer_batch} = {batch}",
        ),
    ):
        require(holds, optimizer_rows, rows, rule)
    shared = "mesh.tensor" if cfg.mesh.tensor > 1 else "mesh.fsdp"
    yield (cfg.mesh.data or 1) <= rows, "mesh.data", f"must not exceed the {rows} rows of a rollout"
    rule = 'goes with an adapter: with model.trainable = "full" no weight is frozen'
    yield cfg.mesh.group == 1 or cfg.model.trainable != "full", shared, rule
    rule = f'with {shared} "none" would keep the weights that layers gather: take "auto"'
    holds = cfg.mesh.group == 1 or cfg.model.gradient_checkpointing != "none"
    yield holds, "model.gradient_checkpointing", rule
    rule = 'must be absent with grpo.loss_type = "bnpo", whose value depends on it: take "dapo"'
    holds = cfg.optim.max_tokens_per_microbatch is None or cfg.grpo.loss_type != "bnpo"
    yield holds, "optim.max_tokens_per_microbatch", rule
    rule = f"must be a multiple of the {updates} optimizer steps made from each rollout"
    yield cfg.max_steps is None or cfg.max_steps % updates == 0, "max_steps", rule


def _across_rollouts(cfg):
    """Returns what rows that go on in the next rollout, or are left unfinished, do not go with."""
    noise, carry, share = cfg.noise, cfg.rollout.carry, cfg.rollout.stop_share
    rows = cfg.generation_batch_size + carry * cfg.rollout.num_generations
    rule = f"makes a first rollout of {rows} rows; must make at most {_MOST_ROWS}"
    yield not carry or rows <= _MOST_ROWS, "rollout.carry", rule
    rule = 'must be 0 with noise.scope = "both": an update has the noise of one rollout, and these rows are of several'
    yield not carry or noise is None or noise.scope != "both", "rollout.carry", rule
    rule = 'must be 0 unless noise.per = "rollout": noise of a row would change between its tokens'
    yield not carry or not cfg.has_row_noise, "rollout.carry", rule
    rule = (
        'must be 0 with grpo.old_logprobs = "recompute" or noise.estimator = "published": only the sampler knows '
        "the probabilities of older policies"
    )
    yield not (carry and _recomputes(cfg)), "rollout.carry", rule
    rule = "must be 0 with a [tools] section: the turns of a row are not part of a checkpoint"
    yield not carry or cfg.tools is None, "rollout.carry", rule
    rule = "must be absent with a [tools] section: a row may wait for a reply"
    yield share is None or cfg.tools is None, "rollout.stop_share", rule


# Clip ranges below this are GSPO's, for ratios that are means over a sequence; its paper uses 3e-4 and 4e-4.
_NARROW_CLIP = 1e-2


def _about_truncation(rollout: Any) -> list[str]:
    """Returns a line about what the ratio is where the sampler leaves out unlikely tokens."""
    off = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}
    values = {name: value for name in off if (value := getattr(rollout, name)) not in off[name]}
    if not values:
        return []
    return [
        f"warning: {', '.join(f'rollout.{name}' for name in values)}: got {', '.join(map(str, values.values()))}; the "
        "ratio is that of the probabilities before truncation, so it is too large by a factor of "
        "1 / (sum of the remaining ones), and tokens that are left out teach nothing: switch it off for an exact ratio"
    ]


def advice(cfg: Any) -> list[str]:
    """Returns warnings about choices of a `RunConfig` that work but are unusual, with field, value and remedy."""
    grpo, noise, lines = cfg.grpo, cfg.noise, _about_truncation(cfg.rollout)
    got = f"warning: grpo.loss_type: got {grpo.loss_type!r}; "
    if grpo.importance_sampling_level != "sequence":
        if grpo.loss_type == "luspo":
            lines.append(
                f'{got}its paper uses ratios of whole rows: set grpo.importance_sampling_level = "sequence"'
            )
        return lines
    if grpo.loss_type == "vespo":
        lines.append(
            f"{got}it makes weights of whole rows by itself, and with grpo.importance_sampling_level = "
            '"sequence" only the divergence differs: leave that at "token"'
        )
    elif grpo.loss_type not in ("grpo", "sapo", "luspo"):
        lines.append(
            f'{got}with grpo.importance_sampling_level = "sequence" rows then weigh by their length (of '
            "rows of 2 and 10 tokens one weighs .17, the other .83), which is not GSPO: set "
            'grpo.loss_type = "grpo"'
        )
    acts_in_ratio = noise is not None and noise.scope == "rollout" and not _recomputes(cfg)
    if acts_in_ratio and grpo.epsilon < _NARROW_CLIP:
        lines.append(
            'warning: noise.estimator: got "corrected"; the noise of [noise] is part of these ratios '
            f"and alone puts 39 to 56 % of the rows outside a clip range of {grpo.epsilon:g}, before "
            'anything is learned: set noise.estimator = "published"'
        )
    return lines
