"""Prepares everything that the loop needs from a config, and reports errors in the input."""

import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.aqn import exploration
from qerl_jax.checkpoint import base_model, hf_folder, peft, run_state
from qerl_jax.checkpoint.policy import read_base
from qerl_jax.config import rules as config_rules
from qerl_jax.data import datasets
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.evaluation.evaluator import Evaluator
from qerl_jax.generation.sampler import Sampler
from qerl_jax.model import fused_decode, transformer
from qerl_jax.planning import memory
from qerl_jax.rewards import imports, scoring, stock
from qerl_jax.rl import dynamic_sampling, optimizer, rollouts, update
from qerl_jax.rl.entropy import EntropyControl
from qerl_jax.system import files
from qerl_jax.system.checked import require
from qerl_jax.tools import environments
from qerl_jax.tracking import trackers
from qerl_jax.training import replay, stopping
from qerl_jax.training.task import Task, make_task

# Independent random streams; each folds in the step.
SAMPLE, NOISE, UPDATE, EVAL, PARAMS = range(5)
# Settings that change only how much of a run is on a device at a time, and so its rounding. They may change when a
# run is resumed.
_OF_DEVICES = (
    ("model", "gradient_checkpointing"),
    ("optim", "max_tokens_per_microbatch"),
    ("rollout", "max_concurrent"),
    ("rollout", "kv_cache_tokens"),
    ("rollout", "kv_cache_fraction"),
)


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """The inputs of the training loop.

    Attributes:
        cfg: The config.
        model: The policy.
        replicas: The replicas of the policy, and their devices.
        frozen: The part of the policy that is not trained.
        problems: The problems whose prompts fit.
        functions: Names and functions of the rewards.
        weights: One weight per function.
        informative: Marks the groups of a scored rollout that dynamic sampling keeps, bool [P].
        total_steps: Optimizer steps of the whole run, and the length of its schedules; see `place`.
        sampler: Samples completions.
        updater: Updates the policy with a rollout.
        noise: The noise of the sampling policy.
        sigma: Initial or resumed value of an adaptive sigma; None for other schedules.
        evaluator: Measures held-out accuracy; None without evaluations.
        files: The checkpoints.
        state: Initial or resumed state; the first update donates its buffers.
        supply: Initial or resumed position in the data.
        progress: The run's progress from the checkpoint, as `Recorder` wrote it; empty for a new run.
        sources: Hashes of the user's files with rewards and tools when the run began, by the paths that the config
            names.
        stop: Tells whether a signal has asked the run to end.
        memory: The memory plan; None if the device does not report its memory.
        earlier_peak: Peak device memory of this process before the run, in bytes.
        notes: Lines that were shown, for the report.
        late_notes: Lines about the base, which are not shown yet.
        given_rows: Number of problems if the caller passed them instead of `cfg.data`; else None.
        began: Start of the preparation, in seconds of the monotonic clock.
    """

    cfg: config.RunConfig
    model: transformer.Transformer
    replicas: Replicas
    frozen: Any
    problems: Sequence[datasets.Problem]
    functions: list[scoring.Named]
    weights: list[float]
    informative: Callable[[rollouts.Scored], np.ndarray]
    total_steps: int
    sampler: Sampler
    updater: update.Updater
    noise: exploration.Exploration
    sigma: float | None
    evaluator: Evaluator | None
    files: run_state.StateFiles
    state: update.TrainState
    supply: dynamic_sampling.Supply
    progress: dict[str, Any]
    sources: dict[str, str]
    stop: stopping.Stop
    memory: memory.MemoryPlan | None
    earlier_peak: int
    notes: list[str]
    late_notes: list[str]
    given_rows: int | None
    began: float

    @property
    def hosts(self) -> Hosts:
        """The processes of the run."""
        return self.replicas.hosts

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes files, computes rewards, runs tools and prints."""
        return self.hosts.leads

    def place(self, step: int, supply: dynamic_sampling.Supply) -> int:
        """Returns the run's position on its schedules, in optimizer steps; the run ends at `total_steps`.

        With `max_steps` this is the step. With `num_train_epochs` it is the step that a run without dynamic
        sampling would have reached with the same number of problems.
        """
        return _place(self.cfg, step, supply.drawn)

    def max_rounds(self, place: int) -> int | None:
        """Returns the most rounds of dynamic sampling for the rollout at this position; None without it."""
        if not self.cfg.grpo.dynamic_sampling:
            return None
        most = self.cfg.grpo.dynamic_sampling.max_rounds
        if self.cfg.num_train_epochs is None:
            return most
        # The last epoch has only this many problems left.
        return min(most, (self.total_steps - place) // self.cfg.updates_per_rollout)


def _place(cfg: config.RunConfig, step: int, drawn: int) -> int:
    if cfg.num_train_epochs is None:
        return step
    return drawn // cfg.prompts_per_rollout * cfg.updates_per_rollout


def stream_key(cfg: config.RunConfig, stream: int) -> jax.Array:
    """Returns the random key of a stream: one of `SAMPLE`, `NOISE`, `UPDATE`, `EVAL` and `PARAMS`."""
    return jax.random.key(cfg.seed + 1000 * stream)


def setup(
    cfg: config.RunConfig,
    *,
    problems: Sequence[datasets.Problem] | None = None,
    reward_functions: Sequence[stock.RewardFunction] | None = None,
    tools: Sequence[environments.Tool] | None = None,
    environment: environments.Tool | Mapping[str, environments.Tool] | None = None,
    stop: stopping.Stop | None = None,
    row_lengths: Sequence[int] | None = None,
    checked: Callable[[list[str]], None] = lambda notes: None,
    quiet: bool = True,
) -> PreparedRun:
    """Loads everything that a config names, and resumes the run if its folder has a checkpoint.

    Errors in config, rewards and data are found before the weights of the base are read, which may take minutes.

    Args:
        cfg: The run.
        problems: Problems to train on, instead of those that `cfg.data` names.
        reward_functions: Rewards, instead of those that `cfg.rewards` names.
        tools: Tools, instead of those that `cfg.tools` names.
        environment: An environment class, or several by name, instead of those that `cfg.tools` names.
        stop: Tells whether a signal has asked the run to end; sampling checks it between chunks of tokens.
        row_lengths: For benchmarks: the lengths at which sampled rows end, see `Engine`.
        checked: Called with the notes so far when the input is checked, before the base is read.
        quiet: Do not show progress while the base is read.

    Returns:
        The run, with its state and the base on the device.

    Raises:
        ConfigError: If a field, the data or the folder's earlier run does not fit. It is a ValueError.
        RewardError: If a reward function fails on the first problems.
    """
    began, stop = time.monotonic(), stop or stopping.Stop()
    trackers.require(cfg.report_to)
    hosts = Hosts.all()
    earlier = hosts.told(lambda: (found := check_folder(cfg)) and config.to_table(found))
    replicas = _devices(cfg, hosts)
    memory_plan, earlier_peak = _plan_memory(cfg), peak_memory()
    planned = memory.planned(cfg, limit=memory.device_memory())
    start = _starting_adapter(cfg)
    task = make_task(
        cfg,
        hosts,
        problems=problems,
        reward_functions=reward_functions,
        tools=tools,
        environment=environment,
    )
    notes = [*_about_devices(cfg, replicas), *config_rules.advice(cfg)]
    notes += [f"update: {memory.about_update(cfg, planned)}", *task.notes]
    evaluator = Evaluator.of_run(
        cfg,
        task.model,
        task.tokenizer,
        stream_key(cfg, EVAL),
        notes.append,
        stop.poll,
        task.tools,
        replicas,
    )
    notes += _about_slow_sampling(cfg, task.model)

    noise = exploration.make_exploration(
        cfg.noise, task.model, stream_key(cfg, NOISE), task.total_steps
    )
    files = run_state.StateFiles(cfg.output_dir, cfg.save_total_limit)
    resumed = hosts.told(files.newest)
    stored: dict[str, Any] = {"drawn": 0}
    if resumed is not None:
        stored = hosts.told(lambda: files.supply(resumed))
    notes += files.notes
    progress, sources = (
        stored.get("progress", {}),
        hosts.told(lambda: _sources(cfg, reward_functions)),
    )
    began_with = progress.get("sources", sources)
    notes += _about_sources(cfg, began_with, sources)
    if resumed is not None and earlier is not None:
        notes += _about_resuming(cfg, task, resumed, stored["drawn"], earlier)
    checked(notes)

    late_notes: list[str] = []
    state, frozen = _policy(
        cfg, task.model, start, replicas, late_notes, quiet=quiet or not hosts.leads
    )
    if resumed is not None:
        like = run_state.placement(state)
        if hosts.leads:
            del state  # with full training the device cannot hold two states
            state = files.restore(like, resumed)
        state = replicas.of_first(state)
    return PreparedRun(
        cfg,
        task.model,
        replicas,
        frozen,
        task.problems,
        task.functions,
        task.weights,
        task.informative,
        task.total_steps,
        sampler=_sampler(cfg, task, replicas, stop, row_lengths),
        updater=_updater(planned, task, replicas, stop),
        noise=noise,
        sigma=stored.get("sigma", noise.first),
        evaluator=evaluator,
        files=files,
        state=state,
        supply=_supply(cfg, task, stored),
        progress=progress,
        sources=began_with,
        stop=stop,
        memory=memory_plan,
        earlier_peak=earlier_peak,
        notes=notes,
        late_notes=late_notes,
        given_rows=None if problems is None else len(task.problems),
        began=began,
    )


def _devices(cfg: config.RunConfig, hosts: Hosts) -> Replicas:
    """Sets the process's compiler and kernel options, and returns the replicas of the policy."""
    if cfg.deterministic:
        rule = (
            "needs a process that has not used the GPU yet: start a new one, or set "
            "XLA_FLAGS=--xla_gpu_deterministic_ops=true before"
        )
        require(runtime.use_deterministic_kernels(), "deterministic", True, rule)
    _require_alike(cfg, hosts)
    runtime.use_compilation_cache()
    base_model.choose_kernels(cfg.model)
    replicas = Replicas.of(cfg.mesh, cfg.generation_batch_size)
    if replicas.devices:
        runtime.use_several_devices()
    return replicas


def _policy(
    cfg: config.RunConfig,
    model: transformer.Transformer,
    start: pathlib.Path | None,
    replicas: Replicas,
    notes: list[str],
    *,
    quiet: bool,
) -> tuple[update.TrainState, Any]:
    """Returns the initial state, and the part that is not trained; adds lines about the noise to `notes`."""
    frozen = read_base(cfg.model, model, cfg.seed, replicas, quiet=quiet)
    params, frozen = transformer.trainable(model, frozen, stream_key(cfg, PARAMS))
    if start is not None:
        params = peft.import_adapter(start, model)
    if cfg.noise is not None:
        notes += exploration.describe(cfg.noise, model, params, frozen)
    entropy = cfg.grpo.entropy
    state = update.init_state(
        params,
        cfg.optim,
        keep_reference=cfg.keeps_reference,
        control=EntropyControl.begin(entropy) if entropy and entropy.adaptive else None,
    )
    return replicas.hold(state), replicas.hold(frozen)


def _sampler(
    cfg: config.RunConfig,
    task: Task,
    replicas: Replicas,
    stop: stopping.Stop,
    row_lengths: Sequence[int] | None = None,
) -> Sampler:
    return rollouts.make_sampler(
        task.model,
        task.tokenizer,
        dataclasses.replace(cfg.rollout, drafts=cfg.drafts),
        max_prompt_length=cfg.data.max_prompt_length,
        entropies=True,
        poll=stop.poll,
        tools=task.tools,
        replicas=replicas,
        row_lengths=row_lengths,
    )


def _updater(
    planned: config.RunConfig, task: Task, replicas: Replicas, stop: stopping.Stop
) -> update.Updater:
    keep_batch = functools.partial(replay.write, planned.output_dir)
    return update.make_updater(
        planned,
        task.model,
        task.tokenizer.num_tokens,
        task.total_steps,
        on_non_finite=keep_batch if replicas.hosts.leads else None,
        replicas=replicas,
        poll=stop.poll,
    )


def _supply(cfg: config.RunConfig, task: Task, stored: dict[str, Any]) -> dynamic_sampling.Supply:
    def problem(place: int) -> datasets.Problem:
        return datasets.batch(task.problems, place, batch_size=1, seed=cfg.seed)[0]

    return dynamic_sampling.Supply.from_table(stored, problem, task.tokenizer)


def _require_alike(cfg: config.RunConfig, hosts: Hosts) -> None:
    """Checks that all processes of a run have the same config, JAX version, and number and kind of devices."""
    devices = jax.local_devices()
    own = {
        "config": config.dump(dataclasses.replace(cfg, output_dir="any")),
        "version of jax": jax.__version__,
        "number and kind of devices": (len(devices), devices[0].device_kind),
    }
    for host, other in enumerate(hosts.gathered(own)):
        differs = [name for name, value in own.items() if other[name] != value]
        rule = f"{', '.join(differs)} of process {host} differs from that of process {hosts.index}"
        require(not differs, "hosts", hosts.count, f"{rule}: all processes need the same")


def _about_devices(cfg: config.RunConfig, replicas: Replicas) -> list[str]:
    """Returns lines about the devices of a run, if there are several, and a warning if results depend on timing."""
    seen, lines = jax.local_devices(), []
    if len(seen) * replicas.hosts.count > 1:
        used = max(1, len(replicas.devices))
        of_all = f" on each of {replicas.hosts.count} hosts" * (replicas.hosts.count > 1)
        how = "tensor" if cfg.mesh.tensor > 1 else "fsdp"
        each = f", each of {replicas.group} (mesh.{how})" * (replicas.group > 1)
        noun = "replica" if len(replicas) == 1 else "replicas"
        lines.append(
            f"devices: {used} of {len(seen)} ({seen[0].device_kind}){of_all}, {len(replicas)} {noun}{each}"
        )
    if cfg.deterministic and cfg.rollout.compact and len(replicas) > 1:
        lines.append(
            f"warning: deterministic: got true; with {len(replicas)} replicas the last bits of a row depend on the "
            "rows beside it, and these on timing: set rollout.compact = false, too"
        )
    return lines


def _about_slow_sampling(cfg: config.RunConfig, model: transformer.Transformer) -> list[str]:
    """Returns a line about why rollouts are slower on this GPU than they could be, if they are."""
    most = cfg.rollout.max_concurrent or fused_decode.MAX_ROWS
    rows = min(cfg.generation_batch_size, most)
    own_noise = cfg.noise is not None and cfg.noise.per != "rollout"
    slow = fused_decode.slow_because(model.own_part, rows, own_noise=own_noise)
    return [slow] if slow else []


def check_folder(cfg: config.RunConfig) -> config.RunConfig | None:
    """Checks that an earlier run in the folder has the same config, so that it can be resumed.

    The run may be made longer, and it may continue on other devices, or with other settings of `_OF_DEVICES`.

    Returns:
        The config of the run in the folder; None if there is none to resume.

    Raises:
        ConfigError: If the folder's run differs in anything else.
    """
    folder = pathlib.Path(cfg.output_dir)
    # A run that failed before its first checkpoint has nothing to resume: its config may change.
    made = [folder / "adapter", folder / "model", *folder.glob("checkpoints/[0-9]*")]
    if not (folder / "config.toml").exists() or not any(each.is_dir() for each in made):
        return None
    found = config.load_run(folder)
    before, now = config.to_table(found), config.to_table(cfg)
    free = {"output_dir", "report_to", "run_name", "mesh"}
    for table in (before, now):
        for section, field in _OF_DEVICES:
            table[section].pop(field, None)
    free |= {
        name
        for name in ("max_steps", "num_train_epochs")
        if name in before and name in now and before[name] < now[name]
    }
    changed = [name for name in files.changes(before, now) if name not in free]
    fields = [each for name in changed for each in _differences(name, before, now)]
    require(
        not changed,
        "output_dir",
        cfg.output_dir,
        f"it holds a run with another {', '.join(fields)}: choose another folder, or remove that one "
        "(in the same folder max_steps or num_train_epochs may only be raised; mesh, memory settings and report_to may "
        "change)",
    )
    return found


def _differences(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns the differences of two configs under a name: the field, or a section's fields, with their values."""
    pair = [table.get(name) for table in (before, now)]
    if not all(isinstance(each, Mapping) for each in pair):
        shown = ("a section" if isinstance(each, Mapping) else repr(each) for each in pair)
        return [f"{name} ({' there, '.join(shown)} here)"]
    return [
        f"{name}.{each}" for field in files.changes(*pair) for each in _differences(field, *pair)
    ]


def _sources(
    cfg: config.RunConfig, reward_functions: Sequence[stock.RewardFunction] | None
) -> dict[str, str]:
    """Returns hashes of the user's code of rewards and tools, by the paths that the config names.

    The code of a function in a file is the whole file; that of a function of a script or notebook is its own source.
    """
    paths = [*cfg.rewards.functions, *(cfg.tools.paths if cfg.tools else ())]
    found = {path: imports.source_hash(path) for path in paths}
    for path, function in zip(cfg.rewards.functions, reward_functions or (), strict=False):
        if path.startswith("__main__") or "<" in path:
            found[path] = imports.code_hash(function)
    return {path: each for path, each in found.items() if each is not None}


def _about_sources(
    cfg: config.RunConfig, before: Mapping[str, str], now: Mapping[str, str]
) -> list[str]:
    """Returns a warning if the code of a reward or tool has changed since the run in the folder began."""
    changed = [path for path in now if before.get(path, now[path]) != now[path]]
    if not changed:
        return []
    return [
        f"warning: the code of {', '.join(changed)} has changed since the run in {cfg.output_dir} began: its steps "
        "so far are kept as they are. To train with the new code from the start, choose another output_dir, or "
        f"remove {cfg.output_dir}"
    ]


def _about_resuming(
    cfg: config.RunConfig, task: Task, step: int, drawn: int, earlier: Mapping[str, Any]
) -> list[str]:
    """Returns lines about the step after which a run continues, and about its schedules if it was made longer."""
    place, total = _place(cfg, step, drawn), task.total_steps
    if place < total:
        lines = [f"resumed: the run in {cfg.output_dir} goes on after step {step} of {total}"]
    else:
        lines = [
            f"nothing left to do: the run in {cfg.output_dir} has ended after all of its {step} steps. Raise max_steps "
            "to continue it, or choose another output_dir"
        ]
    before = config.from_table(config.RunConfig, earlier).total_steps(len(task.problems))
    if before == total:
        return lines
    last = float(optimizer.learning_rate(cfg.optim, before)(max(0, place - 1)))
    rate = float(optimizer.learning_rate(cfg.optim, total)(place))
    schedules = (
        "learning rate and noise now follow" if cfg.noise else "the learning rate now follows"
    )
    lines.append(
        f"this run was planned for {before} optimizer steps, and now for {total}: {schedules} the schedule "
        f"of {total} steps (the next rate is {rate:.3g}, the last one was {last:.3g})"
    )
    return lines


def _plan_memory(cfg: config.RunConfig) -> memory.MemoryPlan | None:
    """Returns the memory plan, or None if the device does not report its memory.

    Raises:
        ConfigError: If the run does not fit.
    """
    memory.require_context(cfg)
    limit = memory.device_memory()
    if limit is None:
        fraction = cfg.rollout.kv_cache_fraction
        require(
            fraction is None,
            "rollout.kv_cache_fraction",
            fraction,
            "this device does not report its memory: give rollout.kv_cache_tokens",
        )
        return None
    plan = memory.estimate(cfg, limit=limit)
    plan.require(limit)
    return plan


def peak_memory() -> int:
    """Returns the peak device memory of this process, in bytes; 0 if the device does not report it."""
    return (runtime.memory_stats() or {}).get("peak_bytes_in_use", 0)


def _starting_adapter(cfg: config.RunConfig) -> pathlib.Path | None:
    """Returns the folder of the adapter to start from, or None.

    Raises:
        ConfigError: If the adapter's shape or scaling differs from the config.
    """
    if cfg.model.adapter_name_or_path is None:
        return None
    folder = hf_folder.local_folder(cfg.model.adapter_name_or_path)
    found = peft.read_lora(folder)
    for field in ("rank", "alpha", "train_norms", *peft.SHAPE_FIELDS):
        ours, theirs = getattr(cfg.lora, field), getattr(found, field)
        require(ours == theirs, f"lora.{field}", ours, f"the adapter in {folder} needs {theirs!r}")
    return folder
