"""The training loop of GRPO with adaptive quantization noise (QeRL, arXiv 2510.11696).

Sampler, scorer, reference and gradient share one base and one adapter in one process. `docs/differences.md` lists the
differences from the paper and from its published code.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from qerl_jax import config
from qerl_jax.compilation.early_programs import EarlyPrograms
from qerl_jax.data import datasets
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.rewards import stock
from qerl_jax.rl import update
from qerl_jax.system.checked import NotFinite
from qerl_jax.tools import environments
from qerl_jax.tracking import terminal
from qerl_jax.training import dose, guards, metrics, recorder, stopping
from qerl_jax.training.check import check
from qerl_jax.training.gather import gather
from qerl_jax.training.load import PreparedRun, load
from qerl_jax.training.random_streams import UPDATE, stream_key
from qerl_jax.training.run_folder import RunFolder


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
) -> update.TrainState | None:
    """Trains a LoRA adapter on a frozen base (or a dense base itself) by GRPO, with noise during sampling.

    Errors in the input are reported before the run folder is made, and the folder is made before the base is read. A
    run that is already in the folder is resumed, and continues as if it had never stopped. If it has ended, nothing is
    loaded.

    Args:
        cfg: The run.
        problems: Problems to train on, instead of those that `cfg.data` names; the same for a resumed run.
        reward_functions: Rewards by TRL's convention, instead of those that `cfg.rewards` names.
        tools: Functions that the policy may call, instead of those that `cfg.tools` names.
        environment_factory: An environment class, or several by name, instead of those that `cfg.tools` names.
        on_step: Called as on_step(step, metrics) with each row of `metrics.jsonl`, after it is written. If it returns
            False, the run ends after that step with a checkpoint, from which a later call continues, and with the
            trained adapter or model.
        row_lengths: For benchmarks: the lengths at which sampled rows end, see `generation.engine.Engine`.
        quiet: Show nothing in the terminal; files are still written.

    Returns:
        The final state; None if the run had ended before. The adapter is in `<output_dir>/adapter`, or a whole model in
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
    hosts = Hosts.all()
    with contextlib.ExitStack() as opened, hosts.farewell(), _named(cfg):
        folder = opened.enter_context(RunFolder(cfg.output_dir, leads=hosts.leads))
        stop = stopping.Stop(hosts)
        opened.enter_context(stop.listening())
        early = EarlyPrograms(patient=cfg.deterministic)
        opened.callback(early.end)
        checked = check(
            cfg,
            problems=problems,
            reward_functions=reward_functions,
            tools=tools,
            environment=environment_factory,
            stop=stop,
            early=early,
        )
        if checked.task.tools is not None:
            opened.callback(checked.task.tools.close)
        checked.notes.extend(folder.begin())
        terminal.say(checked.notes, quiet=quiet or not hosts.leads)
        if checked.has_ended:
            return None
        run = load(checked, row_lengths=row_lengths, quiet=quiet)
        stop.saves = True
        try:
            return _loop(run, on_step, quiet)
        except NotFinite:
            guards.require_finite_base(run.frozen)  # if the base is broken, that says more
            raise


def _loop(run: PreparedRun, on_step: recorder.Callback | None, quiet: bool) -> update.TrainState:
    """Runs the steps of a run, from its start to its end."""
    cfg = run.cfg
    with (
        contextlib.closing(recorder.open_log(run, quiet=quiet)) as logger,
        recorder.Recorder(run, logger, on_step) as record,
    ):
        position = record.begin()
        check_memory = guards.MemoryCheck(run.plan, run.early, run.earlier_peak)
        while record.goes_on and position.schedule_step < run.task.total_steps:
            run.stop.poll_together()
            trace = record.begin_step()
            step, schedule_step, state = position.step, position.schedule_step, position.state
            noise = run.aqn(step, schedule_step, position.sigma).on(run.replicas)
            try:
                groups = gather(run, position, noise, trace, logger.row_ended)
            except NotFinite:
                guards.require_finite(state)  # if weights are broken, that says more
                raise
            experience = groups.experience(cfg, noise.vectors)
            trace.lap("reward")

            logger.phase("update")
            position = dose.with_first_sigma(run, position, experience, logger.note)
            checked = guards.check_sampler(run, position, groups, noise.vectors)
            key = jax.random.fold_in(stream_key(cfg, UPDATE), step)
            state, learned = run.updater(
                state, run.frozen, experience, noise.of_updates, key, schedule_step
            )
            guards.check(run, state, experience, learned)
            trace.lap("update")
            check_memory(logger.note)

            learned |= checked | noise.metrics
            row = metrics.row(run, trace, position, groups, state, learned)
            position = position.after(run.aqn, groups, state, row)
            run.early.go_on()
            position = record(position, row, groups)
        record.end()
    return position.state


@contextlib.contextmanager
def _named(cfg: config.RunConfig) -> Iterator[None]:
    """Adds the run's folder to an error, for the command line to show."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        error.run_folder = cfg.output_dir
        if not hasattr(error, "__notes__"):
            error.add_note("in the preparation of the run")
        raise
