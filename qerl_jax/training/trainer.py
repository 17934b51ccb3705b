"""The loop. One process, one packed base, one adapter tree.

How this differs from the paper (arXiv 2510.11696) and from its published code:

1. Noise is drawn once per rollout from (seed, step) in float32 and given to the forward pass as a
   value; the paper draws per forward pass, its code adds it to 16-bit weights in place, where it
   accumulates or rounds away.
2. The ratio is taken against the sampler's own log-probabilities by default (`old_logprobs =
   "behaviour"`), noise included; the original recomputes them without noise, so that its ratio is 1
   and the noise goes uncorrected.
3. Sampler, scorer, reference and gradient are one model function over one base, so there is no
   weight to hand over.
4. A step without signal changes nothing, and is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
import types
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax import memory as plan
from qerl_jax.checkpoint import base_model, hf_folder, peft
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.config import RunConfig
from qerl_jax.data import datasets
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.evaluation.evaluator import Evaluator
from qerl_jax.files import write_whole
from qerl_jax.model import fused_decode
from qerl_jax.model.transformer import Transformer, as_computed, noise_shapes, trainable
from qerl_jax.rewards import scoring
from qerl_jax.rl import aqn, grpo, rollouts, update
from qerl_jax.rl.rollouts import Rollout, Scored, Supply
from qerl_jax.rl.update import TrainState
from qerl_jax.tracking import trackers
from qerl_jax.tracking.logger import Logger, read_metrics
from qerl_jax.training import replay

# Streams of randomness that must not meet; each folds in the step.
_SAMPLE, _NOISE, _UPDATE, _EVAL, _PARAMS = range(5)


def train(cfg: RunConfig, *, quiet: bool = False) -> TrainState:
    """Trains a LoRA adapter on a frozen base (or a dense base itself) by GRPO, sampling under noise.

    Everything that can be wrong with the input is found before the run folder is made. A run that
    is found there is resumed, and goes on as if it had never stopped.

    Args:
        cfg: The run.
        quiet: Show nothing in the terminal; files are written all the same.

    Returns:
        The final state; the adapter is in `<output_dir>/adapter`, or a whole model in
        `<output_dir>/model`; with evaluations on a schedule, the best one is in `<output_dir>/best`.
    """
    trackers.require(cfg.report_to)
    _check_folder(cfg)
    if cfg.deterministic:
        runtime.use_deterministic_kernels()
    runtime.use_compilation_cache()
    plan.require_context(cfg)
    limit = plan.device_memory()
    if limit is None and cfg.rollout.kv_cache_fraction is not None:
        raise config.ConfigError(
            f"rollout.kv_cache_fraction: got {cfg.rollout.kv_cache_fraction}; this device does not report "
            "its memory: give rollout.kv_cache_tokens"
        )
    memory = None if limit is None else plan.estimate(cfg, limit=limit)
    earlier_peak = _peak()
    if memory:
        memory.require(limit)
    start = _starting_adapter(cfg)
    model, frozen, tokenizer = base_model.load_base(cfg.model, cfg.lora, cfg.seed)
    plan.require_context(cfg, model.arch)
    functions, weights = _rewards(cfg)
    notes: list[str] = []
    problems = _problems(cfg, cfg.data, cfg.data.split, tokenizer, say=notes.append)
    total_steps = cfg.total_steps(len(problems))
    scoring.check(functions, problems[:2], _Trace(0, total_steps).extras)
    keys = [jax.random.key(cfg.seed + 1000 * stream) for stream in range(5)]
    held_out = Evaluator.of_run(cfg, model, tokenizer, keys[_EVAL], notes.append)

    state, frozen = _first_state(cfg, model, frozen, keys[_PARAMS], start)
    generate, improve, norm_noise = _phases(cfg, model, tokenizer, total_steps, keys[_NOISE])
    sample = _sampler(cfg, generate, tokenizer, problems, functions, weights)
    files = StateFiles(cfg.output_dir, cfg.save_total_limit)
    stored = files.supply()
    if stored is not None:
        like = jax.tree.map(_abstract, state)
        del state  # where everything trains, there is no room for two
        state = files.restore(like)
    supply = _supply(cfg, stored, problems, tokenizer)
    step = started = int(state.step)
    _write_config(cfg)
    logger = Logger(
        cfg.output_dir,
        total_steps=total_steps,
        step=step,
        quiet=quiet,
        log_completions=cfg.log_completions,
        report_to=cfg.report_to,
        run_name=cfg.run_name,
        settings=config.to_table(cfg),
    )
    keep_best = _keeper_of_the_best(cfg, model, frozen)
    slots = cfg.rollout.slots(cfg.generation_batch_size)
    if runtime.is_hopper() and (reason := fused_decode.supports(model, slots)):
        logger.note(f"rollouts run without the fused layers of decoding: {reason}")

    with contextlib.closing(files), contextlib.closing(logger):
        for text in notes:
            logger.note(text)
        if step >= total_steps:
            logger.note(
                f"nothing left to do: the run in {cfg.output_dir} has all of its {total_steps} steps"
            )
        if held_out and step == 0:
            metrics = held_out(_policy(model, state, frozen))
            logger.write(0, metrics)
            keep_best(0, metrics, state.params)
        while step < total_steps:
            trace = _Trace(step, total_steps)
            norms, noise_metrics = norm_noise(step)
            key = jax.random.fold_in(keys[_SAMPLE], step)
            batch, fresh, supply, metrics = rollouts.gather(
                functools.partial(sample, _policy(model, state, frozen) | norms, key, trace),
                supply,
                max_rounds=cfg.grpo.max_sampling_rounds if cfg.grpo.dynamic_sampling else None,
            )
            advantages = grpo.group_advantages(
                batch.rewards, scale=cfg.grpo.scale_rewards, estimator=cfg.grpo.advantage_estimator
            )
            experience = update.experience(
                batch.rollout,
                advantages,
                mask_truncated_completions=cfg.grpo.mask_truncated_completions,
                share_prompts=cfg.optim.share_prompts,
            )
            trace.lap("reward")
            trainer_noise = norms.get("noise") if cfg.noise and cfg.noise.scope == "both" else None
            state, learned = improve(
                state, frozen, experience, trainer_noise, jax.random.fold_in(keys[_UPDATE], step)
            )
            metrics |= learned
            trace.lap("update")
            if memory and trace.step == started:
                _compare(memory, limit, logger, earlier_peak)

            step = int(state.step)
            logger.num_tokens += _num_tokens(fresh.rollout)
            metrics |= noise_metrics | _rollout_metrics(fresh, functions)
            # First: what reward functions log hides nothing of the run's own.
            metrics = trace.metrics(fresh.rollout, batch.rollout) | metrics
            metrics |= {
                "num_tokens": logger.num_tokens,
                "updates/skipped": int(state.skipped),
            }
            if held_out and _crosses(
                step, cfg.updates_per_rollout, cfg.eval.eval_steps, total_steps
            ):
                metrics |= held_out(_policy(model, state, frozen))
            logger.write(step, metrics)
            keep_best(step, metrics, state.params)
            logger.write_completions(step, _completion_rows(fresh, batch, advantages, trace))
            if _crosses(step, cfg.updates_per_rollout, cfg.save_steps, total_steps):
                files.save(state, supply.to_table())
        what = "model" if cfg.model.trainable == "full" else "adapter"
        folder = pathlib.Path(cfg.output_dir) / what
        _export(cfg, folder, model, state.params, frozen)
        logger.note(f"{what} in {folder}")
    return state


def _compare(memory: plan.MemoryPlan, limit: int, logger: Logger, earlier_peak: int) -> None:
    """After the first step: the plan beside the measured peak, and one base only."""
    peak = _peak()
    for line in memory.lines(limit, peak):
        logger.note(line)
    # Of a peak that was there before, what came before this run is the cause.
    own_peak = peak if peak > earlier_peak else 0
    memory.require_one_base(runtime.memory_stats()["bytes_in_use"], own_peak)


def _peak() -> int:
    """Most bytes that this process ever had on the device; 0 where it does not say."""
    return (runtime.memory_stats() or {}).get("peak_bytes_in_use", 0)


def _phases(
    cfg: RunConfig, model: Transformer, tokenizer: Tokenizer, total_steps: int, noise_key: jax.Array
):
    """The jitted sampler and update, and the function from a step to the `noise` collection and its metrics."""
    generate = rollouts.make_generate(model, tokenizer, cfg.rollout)
    improve = update.make_update(
        model,
        grpo_cfg=cfg.grpo,
        optim_cfg=cfg.optim,
        total_steps=total_steps,
        temperature=cfg.rollout.temperature,
        num_tokens=tokenizer.num_tokens,
        remat=cfg.model.gradient_checkpointing,
        max_completion_length=cfg.rollout.max_completion_length,
        on_non_finite=functools.partial(replay.write, cfg.output_dir),
    )
    if cfg.noise is None:
        return generate, improve, lambda step: ({}, {})

    stages = {"num_stages": cfg.noise.num_stages, "total_steps": total_steps}
    sigma = aqn.sigma_schedule(
        cfg.noise.schedule,
        sigma_start=cfg.noise.sigma_start,
        sigma_end=cfg.noise.sigma_end,
        exponent=cfg.noise.exponent,
        **stages,
    )
    shapes = noise_shapes(model.arch, cfg.noise.final_norm)
    draw = jax.jit(lambda step: aqn.norm_noise(aqn.step_key(noise_key, step), sigma(step), shapes))

    def norm_noise(step: int) -> tuple[dict[str, Any], dict[str, float]]:
        metrics = {"aqn/sigma": float(sigma(step)), "aqn/stage": int(aqn.stage(step, **stages))}
        return {"noise": draw(step)}, metrics

    return generate, improve, norm_noise


def _starting_adapter(cfg: RunConfig) -> pathlib.Path | None:
    """The folder of the adapter to go on from; its shape is the run's."""
    if cfg.model.adapter_name_or_path is None:
        return None
    folder = hf_folder.local_folder(cfg.model.adapter_name_or_path)
    found = peft.read_lora(folder)
    for field in ("rank", "alpha", "train_norms"):
        ours, theirs = getattr(cfg.lora, field), getattr(found, field)
        if ours != theirs:
            raise config.ConfigError(
                f"lora.{field}: got {ours!r}; the adapter in {folder} needs {theirs!r}"
            )
    return folder


def _first_state(
    cfg: RunConfig, model: Transformer, frozen: Any, key: jax.Array, start: pathlib.Path | None
) -> tuple[TrainState, Any]:
    """The state before the first step, and what of the base stays frozen."""
    params, frozen = trainable(model, frozen, key)
    if start is not None:
        params = peft.import_adapter(start, model)
    return update.init_state(params, cfg.optim, keep_reference=cfg.grpo.sync_ref_model), frozen


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _policy(model: Transformer, state: TrainState, frozen: Any) -> dict[str, Any]:
    """The variables that sample."""
    return {"params": as_computed(state.params, model.dtype), "frozen": frozen}


def _rewards(cfg: RunConfig) -> tuple[list[scoring.Named], list[float]]:
    """The reward functions and their weights; the punishment of long completions comes last."""
    functions = scoring.resolve(cfg.rewards.functions, cfg.rewards.options)
    weights = list(cfg.rewards.weights or [1.0] * len(functions))
    cache = cfg.rewards.soft_punish_cache
    if cache is None:
        return functions, weights

    def punish(completion_ids, **_):
        return grpo.soft_overlong_punishment(
            np.array([len(ids) for ids in completion_ids]),
            max_completion_length=cfg.rollout.max_completion_length,
            soft_punish_cache=cache,
        ).tolist()

    named = ("soft_overlong_punishment_reward", punish)
    return [*functions, named], [*weights, cfg.rewards.soft_punish_weight]


def _sampler(cfg: RunConfig, generate, tokenizer: Tokenizer, problems, functions, weights):
    """The function that samples and scores one round; rounds of a step share its key."""
    count, group = cfg.prompts_per_rollout, cfg.rollout.num_generations

    def sample(variables, key: jax.Array, trace: _Trace, drawn: int, index: int) -> Scored:
        rollout = rollouts.collect(
            generate,
            variables,
            tokenizer,
            datasets.batch(problems, drawn // count, batch_size=count, seed=cfg.seed),
            key,
            num_generations=group,
            max_prompt_length=cfg.data.max_prompt_length,
            temperature=cfg.rollout.temperature,
            first_row=index * count * group,
        )
        trace.lap("rollout")
        record = scoring.Record(len(rollout.texts))
        combined, per_function = rollouts.score(rollout, functions, weights, trace.extras, record)
        trace.records.append(record)
        trace.lap("reward")
        places = np.arange(drawn, drawn + count, dtype=np.int32)
        return Scored(rollout, places, combined, per_function)

    return sample


def _supply(cfg: RunConfig, table: dict[str, Any] | None, problems, tokenizer: Tokenizer) -> Supply:
    """Where the data stands, by a checkpoint or at the start."""
    if table is None:
        return Supply()
    return Supply.from_table(
        table,
        lambda place: datasets.batch(problems, place, batch_size=1, seed=cfg.seed)[0],
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        max_completion_length=cfg.rollout.max_completion_length,
    )


def _export(
    cfg: RunConfig, folder: pathlib.Path, model: Transformer, params: Any, frozen: Any
) -> None:
    """Writes what was learned: a PEFT adapter, or a whole model."""
    if cfg.model.trainable == "full":
        source = hf_folder.local_folder(cfg.model.model_name_or_path, weights=False)
        hf_folder.export_model(folder, model, frozen | params, source)
    else:
        peft.export_adapter(folder, params, model.lora, cfg.model.model_name_or_path)


def _keeper_of_the_best(cfg: RunConfig, model: Transformer, frozen: Any):
    """The function that writes `best`, and `best.json` beside it, when held-out accuracy is the highest so far.

    What the highest was is read from the metrics, so a resumed run goes on with it.
    """
    folder = pathlib.Path(cfg.output_dir)
    seen = [row["eval/accuracy"] for row in read_metrics(folder) if "eval/accuracy" in row]
    best = max(seen, default=-1.0)

    def keep(step: int, metrics: dict[str, Any], params: Any) -> None:
        nonlocal best
        if cfg.eval is None or cfg.eval.eval_steps == 0:
            return
        if metrics.get("eval/accuracy", -1.0) > best:
            best = metrics["eval/accuracy"]
            _export(cfg, folder / "best", model, params, frozen)
            row = {"step": step} | {k: v for k, v in metrics.items() if k.startswith("eval/")}
            write_whole(folder / "best.json", json.dumps(row, indent=2) + "\n")

    return keep


def _problems(
    cfg: RunConfig,
    source: config.DataConfig,
    split: str,
    tokenizer: Tokenizer,
    num_problems: int | None = None,
    **options: Any,
):
    """The problems of a split whose prompts fit."""
    problems = datasets.from_config(source, split=split, seed=cfg.seed, num_problems=num_problems)
    limits = {
        "max_prompt_length": cfg.data.max_prompt_length,
        "overlong": cfg.data.overlong_prompts,
    }
    return rollouts.admit(problems, tokenizer, **limits, **options)


def _check_folder(cfg: RunConfig) -> None:
    """A run folder belongs to one config; resuming under another would be a different run under its name."""
    folder = pathlib.Path(cfg.output_dir)
    path = folder / "config.toml"
    # A run that failed before its first checkpoint left nothing to go on from: it may be mended.
    made = [folder / "adapter", folder / "model", *folder.glob("checkpoints/[0-9]*")]
    if not path.exists() or not any(each.is_dir() for each in made):
        return
    before, now = (config.to_table(c) for c in (config.load(path), cfg))
    names = sorted((before | now).keys() - {"output_dir", "report_to", "run_name"})
    changed = [name for name in names if before.get(name) != now.get(name)]
    if changed:
        raise config.ConfigError(
            f"output_dir: got {cfg.output_dir!r}; it holds a run whose {', '.join(changed)} differ: "
            "choose another folder, or remove that one"
        )


def _write_config(cfg: RunConfig) -> None:
    folder = pathlib.Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.toml", config.dump(cfg))


def _crosses(step: int, stride: int, every: int, total_steps: int) -> bool:
    """Whether one of the last `stride` steps was a multiple of `every`, or the run is over."""
    return step >= total_steps or (every > 0 and step // every > (step - stride) // every)


@dataclasses.dataclass
class _Trace:
    """What one iteration of the loop leaves for the log.

    Attributes:
        step: Optimizer steps done before it.
        total_steps: Of the run.
        records: What reward functions logged, a round of sampling each.
        started: Of the clock.
        laps: Seconds of its phases.
    """

    step: int
    total_steps: int
    records: list[scoring.Record] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)
    laps: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def extras(self) -> dict[str, Any]:
        """What reward functions are told beside the rows, as by TRL."""
        state = types.SimpleNamespace(global_step=self.step, max_steps=self.total_steps)
        return {"trainer_state": state}

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to a phase."""
        elapsed = time.perf_counter() - self.started - sum(self.laps.values())
        self.laps[phase] = self.laps.get(phase, 0.0) + elapsed

    def metrics(self, sampled: Rollout, seen: Rollout) -> dict[str, float]:
        """Times and rates: of the tokens that were sampled, and of those that were learned from."""
        stats = runtime.memory_stats() or {}
        peak = (
            {"perf/peak_memory_gb": stats["peak_bytes_in_use"] / 1e9}
            if "peak_bytes_in_use" in stats
            else {}
        )
        return {
            **self._logged(),
            "step_time": sum(self.laps.values()),
            **{f"perf/{phase}_time": seconds for phase, seconds in self.laps.items()},
            "perf/rollout_tokens_per_second": int(sampled.lengths.sum()) / self.laps["rollout"],
            "perf/update_tokens_per_second": _num_tokens(seen) / self.laps["update"],
            **peak,
        }

    def columns(self) -> dict[str, list]:
        """Columns that reward functions added to all that was sampled; None where one did not."""
        names = dict.fromkeys(name for record in self.records for name in record.columns)
        return {
            name: [
                value
                for record in self.records
                for value in record.columns.get(name, [None] * record.rows)
            ]
            for name in names
        }

    def _logged(self) -> dict[str, float]:
        names = dict.fromkeys(name for record in self.records for name in record.values)
        values = {
            n: [v for record in self.records for v in record.values.get(n, ())] for n in names
        }
        return {name: float(np.mean(each)) for name, each in values.items()}


def _num_tokens(rollout: Rollout) -> int:
    """Tokens of prompts and completions."""
    return int(rollout.prompt_lengths.sum() + rollout.lengths.sum())


def _rollout_metrics(scored: Scored, functions: Sequence[scoring.Named]) -> dict[str, float]:
    """Rewards and lengths under TRL's names."""
    rollout, combined = scored.rollout, scored.rewards
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
    for (name, _), column in zip(functions, scored.per_function.T, strict=True):
        given = column[~np.isnan(column)]
        metrics[f"rewards/{name}/mean"] = float(given.mean()) if given.size else 0.0
        metrics[f"rewards/{name}/std"] = float(given.std(ddof=1)) if given.size > 1 else 0.0
    return metrics


def _completion_rows(
    fresh: Scored, batch: Scored, advantages: np.ndarray, trace: _Trace
) -> list[dict[str, Any]]:
    """All that was sampled; the advantage is None where nothing was learned from a group in this step."""
    rollout, columns = fresh.rollout, trace.columns()
    prompts, _ = datasets.collate(rollout.problems)
    group = rollout.num_generations
    learned = dict(zip(batch.positions.tolist(), np.asarray(advantages).tolist(), strict=True))
    groups = [learned.get(place, [None] * group) for place in fresh.positions.tolist()]

    def own(row: int) -> tuple[Any, ...]:
        text, reward = rollout.texts[row], float(fresh.rewards.flat[row])
        advantage = groups[row // group][row % group]
        ending = (int(rollout.lengths[row]), bool(rollout.stopped[row]))
        return prompts[row // group], text, reward, advantage, *ending

    return [
        dict(zip(scoring.COMPLETION_COLUMNS, own(row), strict=True))
        | {name: column[row] for name, column in columns.items()}
        for row in range(len(rollout.texts))
    ]
