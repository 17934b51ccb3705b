"""Loads all that the training loop needs: the policy's weights onto the devices, sampler, updater and position."""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from qerl_jax.aqn import exploration
from qerl_jax.checkpoint import peft, run_state
from qerl_jax.checkpoint.policy import read_base
from qerl_jax.compilation import early_programs
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.generation.sampler import Sampler
from qerl_jax.model import transformer
from qerl_jax.rl import dynamic_sampling, rollouts, update
from qerl_jax.tracking import terminal
from qerl_jax.training import program_list, replay
from qerl_jax.training.check import CheckedRun
from qerl_jax.training.position import Position, Progress
from qerl_jax.training.random_streams import PARAMS, stream_key


@dataclasses.dataclass(frozen=True)
class PreparedRun(CheckedRun):
    """The inputs of the training loop: a checked run, and what was loaded for it.

    Attributes:
        frozen: The part of the policy that is not trained.
        start: The position from which the run begins or continues; the first update donates its buffers.
        sampler: Samples completions.
        updater: Updates the policy with a rollout.
    """

    frozen: Any
    start: Position
    sampler: Sampler
    updater: update.Updater

    @property
    def hosts(self) -> Hosts:
        """The processes of the run."""
        return self.replicas.hosts

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files, computes rewards, runs tools and prints."""
        return self.hosts.leads

    def variables(self, params: Any) -> dict[str, Any]:
        """Returns the variables for sampling, with `params` in the dtype of the model."""
        params = transformer.as_computed(params, self.task.model.dtype)
        return {"params": params, "frozen": self.frozen}


def load(
    checked: CheckedRun, *, row_lengths: Sequence[int] | None = None, quiet: bool = True
) -> PreparedRun:
    """Loads the base and the initial or resumed state of a run that was checked onto the device.

    Args:
        checked: The result of `check`.
        row_lengths: For benchmarks: the lengths at which sampled rows end, see `Engine`.
        quiet: Do not show progress while the base is read.

    Raises:
        MemoryError: If the device runs out of memory; the message names the setting that helps.
    """
    cfg, task, replicas = checked.cfg, checked.task, checked.replicas
    model, tokenizer, early = task.model, task.tokenizer, checked.early
    shared = {"replicas": replicas, "poll": checked.stop.poll, "early": early}
    write_batch = functools.partial(replay.write, cfg.output_dir)
    sampler = rollouts.make_sampler(
        *(model, tokenizer, dataclasses.replace(cfg.rollout, drafts=cfg.drafts)),
        max_prompt_length=cfg.data.max_prompt_length,
        prompts=cfg.prompts_per_rollout,
        entropies=True,
        tools=task.tools,
        free=checked.plan.free,
        row_lengths=row_lengths,
        **shared,
    )
    updater = update.make_updater(
        *(checked.plan.cfg, model, tokenizer.num_tokens, task.total_steps),
        on_non_finite=write_batch if replicas.hosts.leads else None,
        **shared,
    )
    if not replicas.devices and early_programs.workers():
        early.begin(*program_list.programs(checked, sampler.engine, updater))
    try:
        state, frozen, aqn, lines = _policy(checked, quiet or not replicas.hosts.leads)
    except Exception as error:
        if exhausted := checked.plan.exhaustion(error, "always"):
            raise exhausted from error
        raise
    return PreparedRun(
        **vars(checked) | {"notes": [*checked.notes, *lines], "aqn": aqn},
        frozen=frozen,
        start=_start(checked, state),
        sampler=sampler,
        updater=updater,
    )


def _policy(
    checked: CheckedRun, quiet: bool
) -> tuple[update.TrainState, Any, exploration.Exploration, list[str]]:
    """Returns the initial or resumed state, the part that is not trained, the noise, and lines about it."""
    cfg, model, replicas = checked.cfg, checked.task.model, checked.replicas
    key, is_alone = stream_key(cfg, PARAMS), not replicas.devices
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        if is_alone and not model.full:
            # The call below then finds the compiled program.
            shapes = transformer.abstract_base(model)
            pool.submit(lambda: transformer.init_params.lower(model, shapes, key).compile())
        frozen = read_base(cfg.model, model, cfg.seed, replicas, quiet=quiet)
    params, frozen = transformer.trainable(model, frozen, key)
    if checked.adapter is not None:
        params = peft.import_adapter(checked.adapter, model)
    aqn, lines = checked.aqn, []
    if cfg.noise is not None:
        scales = exploration.norm_scales(cfg.noise, model, params, frozen)
        aqn = aqn.on_norms(scales)
        lines = exploration.describe(cfg.noise, model.dtype, aqn.fraction)
        terminal.say(lines, quiet=quiet)
    first_state = functools.partial(update.first_state, cfg)
    # One program. Of weights that several devices share, it would not divide the moments.
    state = (jax.jit(first_state) if is_alone else first_state)(params)
    del params
    state, frozen = replicas.hold(state), replicas.hold(frozen)
    if checked.resumed is not None:
        like = run_state.placement(state)
        if replicas.hosts.leads:
            del state  # with full training the device cannot hold two states
            state = checked.files.restore(like, checked.resumed)
        state = replicas.of_first(state)
    return state, frozen, aqn, lines


def _start(checked: CheckedRun, state: update.TrainState) -> Position:
    cfg, task, stored = checked.cfg, checked.task, checked.stored
    progress = {name: value for name, value in stored.get("progress", {}).items() if name != "ends"}
    progress = Progress(**progress | {"sources": checked.sources})
    supply = dynamic_sampling.Supply.from_table(
        {"drawn": 0} | stored, checked.problem, task.tokenizer
    )
    sigma = stored.get("sigma", checked.aqn.first)
    return Position(cfg, state, supply, sigma, progress, int(state.step))
