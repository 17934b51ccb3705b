"""The loop. One process, one packed base, one adapter tree.

How this differs from the paper (arXiv 2510.11696) and from its published code:

1. Noise is drawn once per rollout from (seed, step) in float32 and given to the forward pass as a
value; the paper
   draws per forward pass, its code adds it to 16-bit weights in place, where it accumulates or
   rounds away.
2. The ratio is taken against the sampler's own log-probabilities by default (`old_logprobs =
"behaviour"`), noise
   included; the original recomputes them without noise, so that its ratio is 1 and the noise goes
   uncorrected.
3. Sampler, scorer, reference and gradient are one model function over one base, so there is no
weight to hand over. 4. A step without signal changes nothing, and is counted.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax import checkpoint, config, data, grpo, noise, rewards, rollouts, sampling, update
from qerl_jax.config import RunConfig
from qerl_jax.evaluate import Evaluator
from qerl_jax.log import Logger
from qerl_jax.model import Transformer, init_params, noise_shapes
from qerl_jax.rollouts import Rollout
from qerl_jax.tokenizer import Tokenizer
from qerl_jax.update import TrainState

# Streams of randomness that must not meet; each folds in the step.
_SAMPLE, _NOISE, _UPDATE, _EVAL, _PARAMS = range(5)


def train(cfg: RunConfig, *, quiet: bool = False) -> TrainState:
    """Trains a LoRA adapter on a frozen base by GRPO, sampling under scheduled noise.

    Everything that can be wrong with the input is found before the run folder is made. A run that
    is found there is resumed, and goes on as if it had never stopped.

    Args:
        cfg: The run.
        quiet: Show nothing in the terminal; files are written all the same.

    Returns:
        The final state; the adapter is in `<output_dir>/adapter`.
    """
    _check_folder(cfg)
    if cfg.deterministic:
        runtime.use_deterministic_kernels()
    runtime.use_compilation_cache()
    model, frozen, tokenizer = checkpoint.load_policy(cfg.model, cfg.lora, cfg.seed)
    functions = rewards.resolve(cfg.rewards.functions)
    problems = _problems(cfg, cfg.data.split, tokenizer)
    rewards.check(functions, problems[:2])
    held_out = _evaluator(cfg, model, tokenizer)
    total_steps = cfg.total_steps(len(problems))

    keys = [jax.random.key(cfg.seed + 1000 * stream) for stream in range(5)]
    params = init_params(model, frozen, keys[_PARAMS])
    generate, improve, norm_noise = _phases(cfg, model, tokenizer, total_steps, keys[_NOISE])
    files = checkpoint.StateFiles(cfg.output_dir, cfg.save_total_limit)
    state = update.init_state(params, cfg.optim)
    state = files.restore(state) or state
    step = int(state.step)
    _write_config(cfg)
    logger = Logger(cfg.output_dir, total_steps=total_steps, step=step, quiet=quiet)

    if step >= total_steps:
        logger.note(
            f"nothing left to do: the run in {cfg.output_dir} has all of its {total_steps} steps"
        )
    if held_out and step == 0:
        logger.write(0, held_out({"params": state.params, "frozen": frozen}))
    while step < total_steps:
        clock = _Clock()
        batch = data.batch(
            problems,
            step // cfg.updates_per_rollout,
            batch_size=cfg.prompts_per_rollout,
            seed=cfg.seed,
        )
        norms, noise_metrics = norm_noise(step)

        variables = {"params": state.params, "frozen": frozen} | norms
        rollout = rollouts.collect(
            generate,
            variables,
            tokenizer,
            batch,
            jax.random.fold_in(keys[_SAMPLE], step),
            num_generations=cfg.rollout.num_generations,
            max_prompt_length=cfg.data.max_prompt_length,
            temperature=cfg.rollout.temperature,
        )
        clock.lap("rollout")
        combined, per_function = rollouts.score(rollout, functions, cfg.rewards.weights)
        advantages = grpo.group_advantages(combined, scale=cfg.grpo.scale_rewards)
        clock.lap("reward")

        experience = update.experience(
            rollout, advantages, mask_truncated_completions=cfg.grpo.mask_truncated_completions
        )
        trainer_noise = norms.get("noise") if cfg.noise and cfg.noise.scope == "both" else None
        state, metrics = improve(
            state, frozen, experience, trainer_noise, jax.random.fold_in(keys[_UPDATE], step)
        )
        metrics = jax.device_get(metrics)
        clock.lap("update")

        step = int(state.step)
        logger.num_tokens += int(rollout.prompt_lengths.sum() + rollout.lengths.sum())
        metrics |= noise_metrics | _rollout_metrics(rollout, combined, per_function, functions)
        metrics |= clock.metrics(rollout) | {
            "num_tokens": logger.num_tokens,
            "updates/skipped": int(state.skipped),
        }
        if held_out and _crosses(step, cfg.updates_per_rollout, cfg.eval.eval_steps, total_steps):
            metrics |= held_out({"params": state.params, "frozen": frozen})
        logger.write(step, metrics)
        if cfg.log_completions:
            logger.write_completions(step, _completion_rows(rollout, combined, advantages))
        if _crosses(step, cfg.updates_per_rollout, cfg.save_steps, total_steps):
            files.save(state)

    files.close()
    adapter = pathlib.Path(cfg.output_dir) / "adapter"
    checkpoint.export_adapter(adapter, state.params, model.lora, cfg.model.model_name_or_path)
    logger.note(f"adapter in {adapter}")
    logger.close()
    return state


def _phases(
    cfg: RunConfig, model: Transformer, tokenizer: Tokenizer, total_steps: int, noise_key: jax.Array
):
    """The jitted sampler and update, and the function from a step to the `noise` collection and its metrics."""
    generate = sampling.make_generate(
        model,
        num_generations=cfg.rollout.num_generations,
        max_completion_length=cfg.rollout.max_completion_length,
        num_tokens=tokenizer.num_tokens,
        stop_tokens=tokenizer.stop_tokens,
        pad_token=tokenizer.pad_token,
        truncation=sampling.Truncation(cfg.rollout.top_k, cfg.rollout.top_p, cfg.rollout.min_p),
        max_concurrent=cfg.rollout.max_concurrent,
    )
    improve = update.make_update(
        model,
        grpo_cfg=cfg.grpo,
        optim_cfg=cfg.optim,
        total_steps=total_steps,
        temperature=cfg.rollout.temperature,
        num_tokens=tokenizer.num_tokens,
        remat=cfg.model.gradient_checkpointing,
    )
    if cfg.noise is None:
        return generate, improve, lambda step: ({}, {})

    stages = {"num_stages": cfg.noise.num_stages, "total_steps": total_steps}
    sigma = noise.sigma_schedule(
        cfg.noise.schedule,
        sigma_start=cfg.noise.sigma_start,
        sigma_end=cfg.noise.sigma_end,
        exponent=cfg.noise.exponent,
        **stages,
    )
    shapes = noise_shapes(model.arch, cfg.noise.final_norm)
    draw = jax.jit(
        lambda step: noise.norm_noise(noise.step_key(noise_key, step), sigma(step), shapes)
    )

    def norm_noise(step: int) -> tuple[dict[str, Any], dict[str, float]]:
        metrics = {"aqn/sigma": float(sigma(step)), "aqn/stage": int(noise.stage(step, **stages))}
        return {"noise": draw(step)}, metrics

    return generate, improve, norm_noise


def _problems(cfg: RunConfig, split: str, tokenizer: Tokenizer, num_problems: int | None = None):
    """The problems of a split whose prompts fit."""
    prompt = (
        data.THINK_ANSWER_PROMPT
        if cfg.data.system_prompt == "think-answer"
        else cfg.data.system_prompt
    )
    problems = data.load(
        cfg.data.path or cfg.data.dataset,
        config=cfg.data.name,
        split=split,
        system_prompt=prompt,
        seed=cfg.seed,
        num_problems=num_problems or cfg.data.num_problems,
    )
    limits = {
        "max_prompt_length": cfg.data.max_prompt_length,
        "overlong": cfg.data.overlong_prompts,
    }
    return rollouts.admit(problems, tokenizer, **limits)


def _evaluator(cfg: RunConfig, model: Transformer, tokenizer: Tokenizer) -> Evaluator | None:
    if cfg.eval is None:
        return None
    problems = _problems(cfg, cfg.eval.split, tokenizer, cfg.eval.num_problems)
    generate = sampling.make_generate(
        model,
        num_generations=1,
        max_completion_length=cfg.rollout.max_completion_length,
        num_tokens=tokenizer.num_tokens,
        stop_tokens=tokenizer.stop_tokens,
        pad_token=tokenizer.pad_token,
        truncation=sampling.Truncation(top_p=cfg.eval.top_p),
    )
    (reward,) = rewards.resolve([cfg.eval.reward])
    rewards.check([reward], problems[:2])
    key = jax.random.key(cfg.seed + 1000 * _EVAL)
    return Evaluator(
        generate,
        tokenizer,
        problems,
        reward,
        min(cfg.eval.batch_size, len(problems)),
        cfg.data.max_prompt_length,
        cfg.eval.temperature,
        key,
    )


def _check_folder(cfg: RunConfig) -> None:
    """A run folder belongs to one config; resuming under another would be a different run under its name."""
    path = pathlib.Path(cfg.output_dir) / "config.toml"
    if not path.exists():
        return
    before, now = (config.to_table(c) for c in (config.load(path), cfg))
    names = sorted((before | now).keys() - {"output_dir"})
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        raise config.ConfigError(
            f"output_dir: got {cfg.output_dir!r}; it holds a run whose {', '.join(changed)} differ: "
            "choose another folder, or remove that one"
        )


def _write_config(cfg: RunConfig) -> None:
    folder = pathlib.Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config.dump(cfg))


def _crosses(step: int, stride: int, every: int, total_steps: int) -> bool:
    """Whether one of the last `stride` steps was a multiple of `every`, or the run is over."""
    return step >= total_steps or (every > 0 and step // every > (step - stride) // every)


@dataclasses.dataclass
class _Clock:
    """Seconds of the phases of one iteration."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    laps: dict[str, float] = dataclasses.field(default_factory=dict)

    def lap(self, phase: str) -> None:
        self.laps[phase] = time.perf_counter() - self.started - sum(self.laps.values())

    def metrics(self, rollout: Rollout) -> dict[str, float]:
        sampled, seen = (
            int(rollout.lengths.sum()),
            int(rollout.prompt_lengths.sum() + rollout.lengths.sum()),
        )
        stats = jax.local_devices()[0].memory_stats() or {}
        peak = (
            {"perf/peak_memory_gb": stats["peak_bytes_in_use"] / 1e9}
            if "peak_bytes_in_use" in stats
            else {}
        )
        return {
            "step_time": sum(self.laps.values()),
            **{f"perf/{phase}_time": seconds for phase, seconds in self.laps.items()},
            "perf/rollout_tokens_per_second": sampled / self.laps["rollout"],
            "perf/update_tokens_per_second": seen / self.laps["update"],
            **peak,
        }


def _rollout_metrics(
    rollout: Rollout, combined: np.ndarray, per_function: np.ndarray, functions
) -> dict[str, float]:
    """Rewards and lengths under TRL's names."""
    terminated = rollout.lengths[rollout.stopped] if rollout.stopped.any() else np.zeros(1)
    metrics = {
        "reward": float(combined.mean()),
        "reward_std": float(combined.std(axis=1, ddof=1).mean()),
        "frac_reward_zero_std": float(1 - np.asarray(grpo.informative(combined)).mean()),
        "completions/mean_length": float(rollout.lengths.mean()),
        "completions/min_length": int(rollout.lengths.min()),
        "completions/max_length": int(rollout.lengths.max()),
        "completions/clipped_ratio": float(1 - rollout.stopped.mean()),
        "completions/mean_terminated_length": float(terminated.mean()),
        "completions/min_terminated_length": int(terminated.min()),
        "completions/max_terminated_length": int(terminated.max()),
    }
    for (name, _), column in zip(functions, per_function.T, strict=True):
        given = column[~np.isnan(column)]
        metrics[f"rewards/{name}/mean"] = float(given.mean()) if given.size else 0.0
        metrics[f"rewards/{name}/std"] = float(given.std(ddof=1)) if given.size > 1 else 0.0
    return metrics


def _completion_rows(
    rollout: Rollout, combined: np.ndarray, advantages: np.ndarray
) -> list[dict[str, Any]]:
    prompts, _ = data.collate(rollout.problems)
    group = rollout.num_generations
    return [
        {
            "prompt": prompts[row // group],
            "completion": text,
            "reward": float(combined.flat[row]),
            "advantage": float(np.asarray(advantages).flat[row]),
            "length": int(rollout.lengths[row]),
            "stopped": bool(rollout.stopped[row]),
        }
        for row, text in enumerate(rollout.texts)
    ]
