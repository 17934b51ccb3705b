"""The training loop. Sampler and trainer share one base and one adapter.

Differences from the paper (arXiv 2510.11696) and from its published code:

1. Noise is sampled once per rollout from (seed, step) in float32, and is an argument of the forward pass. The paper
   samples it per forward pass (`noise.per = "token"`); its code adds it to 16-bit weights in place, where it
   accumulates or is lost by rounding.
2. By default the denominator of the ratio is the sampler's own log-probabilities, noise included (`old_logprobs =
   "behaviour"`); the original recomputes them without noise, so that its ratio is 1 and the noise is not corrected
   for.
3. Sampler, scorer, reference and gradient read one base in one process, so no weights are copied between them. They
   share one model function; only a decoding step on a GPU may run the same arithmetic in fused kernels instead
   (`model.fused_decode`).
4. A step without a learning signal changes nothing, and is counted.
"""

import contextlib
import functools
import importlib.metadata
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.aqn.draw import RowNoise
from qerl_jax.data import datasets
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.planning import memory
from qerl_jax.rewards import scoring, stock
from qerl_jax.rl import dynamic_sampling, grpo, rollouts, update
from qerl_jax.rl.experience import Experience, make_experience
from qerl_jax.system import locks
from qerl_jax.system.checked import require
from qerl_jax.system.files import write_whole, writing
from qerl_jax.tools import environments
from qerl_jax.tracking import terminal
from qerl_jax.tracking.logger import Logger, Unheard
from qerl_jax.training import guards, metrics, recorder, stopping
from qerl_jax.training.setup import SAMPLE, UPDATE, PreparedRun, peak_memory, setup, stream_key

# Number of groups that must fail the check before a run ends because its sampler does not use the adapter.
_CHECKED_GROUPS = 3


def train(
    cfg: config.RunConfig,
    *,
    problems: Sequence[datasets.Problem] | None = None,
    reward_functions: Sequence[stock.RewardFunction] | None = None,
    tools: Sequence[environments.Tool] | None = None,
    environment_factory: environments.Tool | Mapping[str, environments.Tool] | None = None,
    on_step: Callable[[int, dict[str, Any]], bool | None] | None = None,
    row_lengths: Sequence[int] | None = None,
    quiet: bool = False,
) -> update.TrainState:
    """Trains a LoRA adapter on a frozen base (or a dense base itself) by GRPO, with noise during sampling.

    Errors in the input are found before the run folder is made, and the folder is made before the base is read. A run
    that is already in the folder is resumed, and continues as if it had never stopped.

    Args:
        cfg: The run.
        problems: Problems to train on, instead of those that `cfg.data` names; a resumed run must get the same
            problems.
        reward_functions: Rewards by TRL's convention, instead of those that `cfg.rewards` names.
        tools: Functions that the policy may call, instead of those that `cfg.tools` names.
        environment_factory: An environment class, or several by name, instead of those that `cfg.tools` names.
        on_step: Called as on_step(step, metrics) with each row of `metrics.jsonl`, after it is written.
            If it returns False, the run ends after that step. It then writes a checkpoint, from which a later call
            continues, and the trained adapter or model, as at the end of a run.
        row_lengths: For benchmarks: the lengths at which sampled rows end, see `generation.engine.Engine`.
        quiet: Show nothing in the terminal; files are still written.

    Returns:
        The final state. The adapter is in `<output_dir>/adapter`, or a whole model in
        `<output_dir>/model`; with scheduled evaluations, the best one is in `<output_dir>/best`.

    Raises:
        ConfigError: If an argument, a field or the data is invalid; nothing is written. It is a ValueError.
        RewardError: If a reward function fails; the message has its file and line.
        Busy: If another run uses the folder. It is an OSError.
        MemoryError: If the device runs out of memory; the message names the setting that helps.
        RuntimeError: If the sampler ignores the adapter, the base is in memory twice, or hosts differ.
        Stopped: If SIGINT or SIGTERM arrived during training; the last complete step is saved. It is a
            KeyboardInterrupt. Signals are handled in the main thread only.
    """
    folder, hosts = pathlib.Path(cfg.output_dir), Hosts.all()
    with contextlib.ExitStack() as owned, hosts.farewell(), _named(cfg):
        # Only the first process reads and writes the folder.
        is_new = hosts.leads and not folder.is_dir()
        # An existing folder is locked while it is read; a new folder is not made before the input is checked.
        is_there = hosts.leads and not is_new
        lock = owned.enter_context(locks.held(folder)) if is_there else None
        stop = stopping.Stop(hosts)
        owned.enter_context(stop.listening())

        def begin(notes: list[str]) -> None:
            nonlocal lock
            if is_new:
                with writing(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                lock = owned.enter_context(locks.held(folder))
                _require_unused(folder)
            if lock is not None:
                notes.append(lock)
            terminal.say(notes, quiet=quiet or not hosts.leads)

        run = setup(
            cfg,
            problems=problems,
            reward_functions=reward_functions,
            tools=tools,
            environment=environment_factory,
            stop=stop,
            row_lengths=row_lengths,
            checked=begin,
            quiet=quiet,
        )
        if run.sampler.tools is not None:
            owned.callback(run.sampler.tools.close)
        stop.saves = True
        return _loop(run, on_step, quiet)


@contextlib.contextmanager
def _named(cfg: config.RunConfig) -> Iterator[None]:
    """Adds the run's folder to an error, for the command line to show.

    Raises:
        MemoryError: If the device runs out of memory before the first step.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        is_exhausted, asked = memory.exhausted(error)
        if is_exhausted and not isinstance(error, OSError):
            text = memory.estimate(cfg).about_exhaustion("always", asked, memory.device_memory())
            raise MemoryError(text) from error
        error.run_folder = cfg.output_dir
        if not hasattr(error, "__notes__"):
            error.add_note("in the preparation of the run")
        raise


def _require_unused(folder: pathlib.Path) -> None:
    """Raises a ConfigError if another run has begun in the folder since the first check."""
    require(
        not (folder / "config.toml").exists(),
        "output_dir",
        str(folder),
        "another run has begun there in the meantime: start the command again to go on with it, or choose "
        "another folder",
    )


def _loop(
    run: PreparedRun, on_step: Callable[[int, dict[str, Any]], bool | None] | None, quiet: bool
) -> update.TrainState:
    """Runs the steps of a run, from its current position to its end."""
    cfg, state, supply, sigma = run.cfg, run.state, run.supply, run.sigma
    step = started = int(state.step)
    with (
        contextlib.closing(run.files),
        contextlib.closing(_logger(run, quiet)) as logger,
        recorder.Recorder(run, logger, on_step) as record,
    ):
        if run.place(step, supply) < run.total_steps:
            logger.note(
                "compiling: the first evaluation and the first step take longer than others"
            )
        goes_on, warned = record.begin(), False
        while goes_on and (place := run.place(step, supply)) < run.total_steps:
            run.stop.poll_together()
            trace = record.trace = metrics.Trace(step, run.total_steps)
            logger.begin_step(cfg.generation_batch_size)
            noise, noise_metrics = run.noise(step, place, sigma)
            noise = run.replicas.hold(noise)
            batch, fresh, supply, gathered = dynamic_sampling.gather(
                functools.partial(
                    _sample,
                    run,
                    recorder.variables(run, state.params) | noise,
                    trace,
                    logger.row_ended,
                ),
                supply,
                max_rounds=run.max_rounds(place),
                informative=run.informative,
            )
            advantages = _advantages(cfg.grpo, batch, run.weights)
            if cfg.grpo.dynamic_sampling:
                # Completions of a group that only fills the batch may still differ in form or length.
                advantages = np.where(run.informative(batch)[:, None], advantages, 0)
            experience = _experience(cfg, batch, advantages, noise.get("noise"))
            trace.lap("reward")
            logger.phase("update")
            checked = {}
            if run.model.lora and guards.is_due(step, cfg.updates_per_rollout):
                checked = _check_adapter(run, state.params, noise.get("noise"), fresh)
            state, learned = run.updater(
                state,
                run.frozen,
                experience,
                noise.get("noise") if cfg.noise and cfg.noise.scope == "both" else None,
                jax.random.fold_in(stream_key(cfg, UPDATE), step),
                place,
            )
            logps = experience.behaviour_logps[experience.mask]
            if learned["updates/non_finite"] or not np.isfinite(logps).all():
                guards.require_finite(recorder.learned_state(state), int(state.step))
            trace.lap("update")
            if run.memory and step == started:
                _compare(run.memory, memory.device_memory(), logger, run.earlier_peak)

            step = int(state.step)
            guards.require_same(run.hosts, state.params, step)
            logger.num_tokens += fresh.rollout.num_tokens
            # Metrics of reward functions come first, so that they cannot replace the run's own.
            row = {
                **trace.metrics(fresh.rollout, batch.rollout),
                **gathered,
                **learned,
                **checked,
                **noise_metrics,
                **metrics.of_rollout(fresh, run.functions),
                **metrics.of_turns(fresh.rollout),
                **metrics.truncation(batch, advantages, cfg.grpo.mask_truncated_completions),
                "epoch": supply.drawn / len(run.problems),
                "num_tokens": logger.num_tokens,
                "updates/skipped": int(state.skipped),
            }
            if row["completions/without_reward"] and not warned:
                warned = True
                run.notes.append(_about_unjudged(step, fresh))
                logger.note(run.notes[-1])
            sigma = run.noise.adapted(sigma, place, row)
            logger.write_completions(
                step, metrics.completion_rows(fresh, batch, advantages, trace.columns())
            )
            goes_on = record.record(state, supply, row, sigma)
        if not run.leads:
            return state
        folder = pathlib.Path(cfg.output_dir) / ("adapter" if run.model.lora else "model")
        recorder.export(run, folder, state.params)
        logger.note(f"{folder.name} in {folder}")
        if closing := record.health.closing():
            logger.note(closing)
        _note_card(run, state, logger)
    return state


def _note_card(run: PreparedRun, state: update.TrainState, logger: Logger) -> None:
    """Writes report.md and the page into the run folder, and prints a line about each."""
    from qerl_jax.tracking import card, report  # slow to import: the page draws charts

    devices = jax.tree.leaves(state.params)[0].sharding.device_set
    machine = card.Machine(
        next(iter(devices)).device_kind,
        len(devices) * run.hosts.count,
        {name: _version(name) for name in ("qerl-jax", "jax", "jaxlib")},
        time.monotonic() - run.began,
    )
    # A run whose metrics were removed has nothing to report.
    with contextlib.suppress(FileNotFoundError):
        path = card.write(
            run.cfg.output_dir, machine, [*run.notes, *run.late_notes], given_rows=run.given_rows
        )
        logger.note(f"report card in {path}")
        page = report.write([run.cfg.output_dir], with_pictures=False)
        logger.note(f"page in {page}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _logger(run: PreparedRun, quiet: bool) -> Logger | Unheard:
    """Writes the config into the run folder, and opens its log; only the first process does so."""
    if not run.leads:
        return Unheard()
    cfg, step = run.cfg, int(run.state.step)
    folder = pathlib.Path(cfg.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "config.toml", config.dump(cfg, run.given_rows))
    logger = Logger(
        folder,
        total_steps=run.total_steps,
        step=step,
        quiet=quiet,
        log_completions=cfg.log_completions,
        report_to=cfg.report_to,
        run_name=cfg.run_name,
        settings=config.to_table(cfg),
    )
    for text in run.late_notes:
        logger.note(text)
    return logger


def _about_unjudged(step: int, scored: rollouts.Scored) -> str:
    """Returns a warning about completions without a reward, which is shown once per run."""
    group, at = np.argwhere(np.isnan(scored.rewards))[0]
    text = scored.rollout.texts[group * scored.rollout.num_generations + at]
    return (
        f"warning: in step {step} every reward function returned None for "
        f"{np.isnan(scored.rewards).sum()} of {scored.rewards.size} completions. They are left out of "
        "baseline and loss; completions/without_reward counts them in every step. The first one "
        f"answers {terminal.asked(scored.rollout.problems[group].prompt)[:200]!r} with {text[:200]!r}."
    )


def _sample(
    run: PreparedRun,
    variables: dict[str, Any],
    trace: metrics.Trace,
    row_ended: Callable[[], None],
    drawn: int,
    sampling_round: int,
) -> rollouts.Scored:
    """Samples and scores the problems from position `drawn` on; the rounds of a step share its key."""
    cfg, count = run.cfg, run.cfg.prompts_per_rollout
    problems = datasets.batch(run.problems, drawn // count, batch_size=count, seed=cfg.seed)
    functions = run.functions if run.leads else []
    begin = scoring.beginner(functions, problems, cfg.rollout.num_generations)

    def on_text(row: int, text: str) -> None:
        row_ended()
        if begin is not None:
            begin(row, text)

    parked, drafted = run.sampler.engine.times_parked, run.sampler.engine.drafted
    rollout = rollouts.collect(
        run.sampler,
        variables,
        problems,
        jax.random.fold_in(stream_key(cfg, SAMPLE), trace.step),
        first_row=sampling_round * count * cfg.rollout.num_generations,
        groups=np.arange(drawn, drawn + count),
        on_text=on_text,
    )
    trace.parked += run.sampler.engine.times_parked - parked
    trace.drafted += run.sampler.engine.drafted - drafted
    run.stop.poll_together()
    trace.lap("rollout")
    record = scoring.Record(len(rollout.texts))
    combined, per_function = rollouts.score(
        rollout, run.functions, run.weights, trace.extras, record, run.hosts
    )
    run.stop.poll_together()
    trace.records.append(record)
    trace.lap("reward")
    return rollouts.Scored(
        rollout, np.arange(drawn, drawn + count, dtype=np.int32), combined, per_function
    )


def _advantages(
    cfg: config.GrpoConfig, scored: rollouts.Scored, weights: Sequence[float]
) -> jax.Array:
    """Computes the advantage of each completion [P, G] over the others of its prompt."""
    if cfg.multi_objective_aggregation == "sum_then_normalize":
        return grpo.group_advantages(
            scored.rewards, scale=cfg.scale_rewards, estimator=cfg.advantage_estimator
        )
    return grpo.decoupled_advantages(
        np.asarray(scored.per_function).reshape(*scored.rewards.shape, -1),
        np.asarray(weights, np.float32),
        scale=cfg.scale_rewards,
        estimator=cfg.advantage_estimator,
    )


def _noise_numbers(noise: Any, batch: rollouts.Scored) -> np.ndarray | None:
    """Returns the numbers [P, G] of the rows' noise, as in sampling; None if rows do not have their own."""
    if not isinstance(noise, RowNoise):
        return None
    return noise.numbers(batch.positions, batch.rollout.num_generations)


def _check_adapter(
    run: PreparedRun, params: Any, noise: Any, fresh: rollouts.Scored
) -> dict[str, float]:
    """Runs `guards.check_adapter` on groups of this step; left-over groups were sampled with an earlier adapter."""
    cfg = run.cfg
    if isinstance(noise, RowNoise) and noise.per != "group":
        # The trainer's rows cannot have noise per token, nor noise per row if rows share a prompt.
        if noise.per == "token" or cfg.optim.share_prompts:
            return {}
    groups = (
        dynamic_sampling.choose(fresh, [number])
        for number in range(min(_CHECKED_GROUPS, len(fresh.rewards)))
    )
    experiences = (_experience(cfg, each, np.zeros_like(each.rewards), noise) for each in groups)
    return guards.check_adapter(run.updater, params, run.frozen, noise, experiences)


def _experience(
    cfg: config.RunConfig, scored: rollouts.Scored, advantages: np.ndarray, noise: Any
) -> Experience:
    """Converts scored groups to the input of the updater."""
    return make_experience(
        scored.rollout,
        advantages,
        mask_truncated_completions=cfg.grpo.mask_truncated_completions,
        share_prompts=cfg.optim.share_prompts,
        judged=~np.isnan(scored.rewards),
        noise=_noise_numbers(noise, scored),
    )


def _compare(plan: memory.MemoryPlan, limit: int, logger: Logger, earlier_peak: int) -> None:
    """Compares the memory plan with the measured peak, and checks that there is only one copy of the base."""
    peak = peak_memory()
    for line in plan.lines(limit, peak):
        logger.note(line)
    # A peak from before the run was not caused by it.
    own_peak = peak if peak > earlier_peak else 0
    plan.require_one_base(runtime.memory_stats()["bytes_in_use"], own_peak)
