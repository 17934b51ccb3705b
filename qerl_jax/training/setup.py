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
from qerl_jax import config, config_rules, files, memory
from qerl_jax.checked import require
from qerl_jax.checkpoint import base_model, hf_folder, peft, run_state
from qerl_jax.data import datasets
from qerl_jax.evaluation.evaluator import Evaluator
from qerl_jax.generation.conversations import Tools
from qerl_jax.hosts import Hosts
from qerl_jax.mesh import Replicas
from qerl_jax.model import fused_decode, transformer
from qerl_jax.rewards import environments, scoring, stock
from qerl_jax.rewards.shared_tools import SharedToolboxes
from qerl_jax.rl import dynamic_sampling, grpo, optimizer, rollouts, update
from qerl_jax.rl.entropy import EntropyControl
from qerl_jax.tracking import terminal, trackers
from qerl_jax.training import exploration, metrics, replay, stopping

# Independent random streams; each folds in the step.
SAMPLE, NOISE, UPDATE, EVAL, PARAMS = range(5)


@dataclasses.dataclass(frozen=True)
class PreparedRun:
    """Everything that the loop needs.

    Attributes:
        cfg: The config.
        model: The policy.
        replicas: The replicas of the policy, and their devices.
        frozen: The part of the policy that does not train.
        problems: The problems whose prompts fit.
        functions: Names and functions of the rewards.
        weights: One for each function.
        informative: Maps a scored rollout to the groups that dynamic sampling keeps.
        total_steps: Optimizer steps of the whole run, and the length of its schedules; see `place`.
        sampler: How completions are sampled.
        updater: How a rollout is learned from.
        noise: The noise under which the policy samples.
        sigma: Initial or resumed value of an adaptive sigma; None for other schedules.
        evaluator: Measures held-out accuracy; or None.
        files: The checkpoints.
        state: Initial or resumed state; the first update donates its buffers.
        supply: Initial or resumed position in the data.
        progress: The run's progress beside its state, as `Recorder` wrote it; empty for a new run.
        stop: Tells whether a signal has asked the run to end.
        memory: The memory plan; None where the device does not report its memory.
        earlier_peak: Peak device memory of this process before the run, in bytes.
        notes: Lines to show.
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
    sampler: rollouts.Sampler
    updater: update.Updater
    noise: exploration.Exploration
    sigma: float | None
    evaluator: Evaluator | None
    files: run_state.StateFiles
    state: update.TrainState
    supply: dynamic_sampling.Supply
    progress: dict[str, Any]
    stop: stopping.Stop
    memory: memory.MemoryPlan | None
    earlier_peak: int
    notes: list[str]
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
        """The run's place on its schedules, in optimizer steps; the run ends at `total_steps`.

        With `max_steps` this is the step. With `num_train_epochs` it is the step that a run without dynamic
        sampling would have reached with the same number of problems.
        """
        if self.cfg.num_train_epochs is None:
            return step
        return supply.drawn // self.cfg.prompts_per_rollout * self.cfg.updates_per_rollout

    def max_rounds(self, place: int) -> int | None:
        """Most rounds of dynamic sampling in the rollout at this place; None without it."""
        if not self.cfg.grpo.dynamic_sampling:
            return None
        most = self.cfg.grpo.max_sampling_rounds
        if self.cfg.num_train_epochs is None:
            return most
        # The last epoch has only this many problems left.
        return min(most, (self.total_steps - place) // self.cfg.updates_per_rollout)


def stream_key(cfg: config.RunConfig, stream: int) -> jax.Array:
    """The key of a stream of randomness."""
    return jax.random.key(cfg.seed + 1000 * stream)


def setup(
    cfg: config.RunConfig,
    *,
    problems: Sequence[datasets.Problem] | None = None,
    reward_functions: Sequence[stock.RewardFunction] | None = None,
    tools: Sequence[environments.Tool] | None = None,
    environment: environments.Tool | Mapping[str, environments.Tool] | None = None,
    stop: stopping.Stop | None = None,
    quiet: bool = True,
) -> PreparedRun:
    """Loads everything that a config names. If the run's folder already has the run, it is resumed.

    All errors in the input are found before the run folder is made; errors in rewards and data before the weights
    of the base are read.

    Args:
        cfg: The run.
        problems: Problems to train on, instead of those that `cfg.data` names.
        reward_functions: Rewards, instead of those that `cfg.rewards` names.
        tools: Tools, instead of those that `cfg.tools` names.
        environment: A class, or several by name, instead of what `cfg.tools` names.
        stop: Tells whether a signal has asked the run to end; sampling checks it between chunks of tokens.
        quiet: Do not show progress while the base is read.
    """
    began, stop = time.monotonic(), stop or stopping.Stop()
    trackers.require(cfg.report_to)
    hosts = Hosts.all()
    earlier = hosts.told(lambda: (found := check_folder(cfg)) and config.to_table(found))
    if cfg.deterministic:
        runtime.use_deterministic_kernels()
    _require_alike(cfg, hosts)
    runtime.use_compilation_cache()
    base_model.choose_kernels(cfg.model)
    replicas = Replicas.of(cfg.mesh, cfg.generation_batch_size)
    if replicas.devices:
        runtime.use_several_devices()
    memory_plan, earlier_peak = _plan_memory(cfg), peak_memory()
    planned = memory.planned(cfg, limit=memory.device_memory())
    start = _starting_adapter(cfg)
    functions, weights = _rewards(cfg, reward_functions)
    is_named = problems is None
    if is_named:
        problems = datasets.from_config(cfg.data, split=cfg.data.split, seed=cfg.seed)
    model, tokenizer = base_model.describe_base(cfg.model, cfg.lora)
    model = model.clone(fsdp=cfg.mesh.fsdp, tensor=cfg.mesh.tensor)
    model.division.require()
    memory.require_context(cfg, model.arch)
    notes = [*config_rules.advice(cfg), f"update: {memory.about_update(cfg, planned)}"]
    talks = None
    if cfg.tools is not None:
        boxes = SharedToolboxes(cfg.tools, tools, environment, hosts)
        talks = Tools.of(cfg.tools, tokenizer, boxes, notes.append)
        _add_own_rewards(boxes, functions, weights)
    informative = informative_by(cfg, functions, weights, notes.append)
    notes += about_data(cfg, problems, is_named=is_named)
    problems = rollouts.admit(
        problems,
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        overlong=cfg.data.overlong_prompts,
        tools=talks,
        log=notes.append,
    )
    total_steps = cfg.total_steps(len(problems))
    notes += _about_epochs(cfg, total_steps)
    extras = metrics.Trace(0, total_steps).extras
    if talks is not None:
        # Check before the first step that environments can begin with such rows.
        rollouts.begun(talks, problems[:2], tokenizer, cfg.data.max_prompt_length)
        extras |= boxes.extras(len(problems[:2]))
    if hosts.leads:
        scoring.check(functions, problems[:2], extras)
    evaluator = Evaluator.of_run(
        cfg, model, tokenizer, stream_key(cfg, EVAL), notes.append, stop.poll, talks, replicas
    )
    notes += _about_slow_sampling(cfg, model)

    places = replicas.places_of if replicas.group > 1 else None
    frozen = _weights(cfg, model, quiet or not hosts.leads, places)
    params, frozen = transformer.trainable(model, frozen, stream_key(cfg, PARAMS))
    if start is not None:
        params = peft.import_adapter(start, model)
    noise = exploration.make_exploration(cfg.noise, model, stream_key(cfg, NOISE), total_steps)
    if cfg.noise is not None:
        notes += exploration.describe(cfg.noise, model, params, frozen)
    adapts = cfg.grpo.use_adaptive_entropy
    state = update.init_state(
        params,
        cfg.optim,
        keep_reference=cfg.keeps_reference,
        control=EntropyControl.begin(cfg.grpo) if adapts else None,
    )
    del params
    state, frozen = replicas.hold(state), replicas.hold(frozen)
    files = run_state.StateFiles(cfg.output_dir, cfg.save_total_limit)
    resumed = hosts.told(files.newest)
    stored: dict[str, Any] = {"drawn": 0}
    if resumed is not None:
        stored = hosts.told(lambda: files.supply(resumed))
    notes += files.notes
    if resumed is not None:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        if hosts.leads:
            del state  # with full training the device cannot hold two states
            state = files.restore(like, resumed)
        state = replicas.of_first(state)
    run = PreparedRun(
        cfg,
        model,
        replicas,
        frozen,
        problems,
        functions,
        weights,
        informative,
        total_steps,
        sampler=rollouts.make_sampler(
            model,
            tokenizer,
            cfg.rollout,
            max_prompt_length=cfg.data.max_prompt_length,
            entropies=True,
            poll=stop.poll,
            tools=talks,
            replicas=replicas,
        ),
        updater=update.make_updater(
            planned,
            model,
            tokenizer.num_tokens,
            total_steps,
            on_non_finite=functools.partial(replay.write, cfg.output_dir) if hosts.leads else None,
            replicas=replicas,
            poll=stop.poll,
        ),
        noise=noise,
        sigma=stored.get("sigma", noise.first),
        evaluator=evaluator,
        files=files,
        state=state,
        supply=dynamic_sampling.Supply.from_table(
            stored,
            lambda place: datasets.batch(problems, place, batch_size=1, seed=cfg.seed)[0],
            tokenizer,
        ),
        progress=stored.get("progress", {}),
        stop=stop,
        memory=memory_plan,
        earlier_peak=earlier_peak,
        notes=notes,
        began=began,
    )
    if earlier is not None and resumed is not None:
        if run.place(resumed, run.supply) < total_steps:
            run.notes.append(
                f"resumed: the run in {cfg.output_dir} goes on after step {resumed} of {total_steps}"
            )
        run.notes.extend(_about_length(run, config.from_table(config.RunConfig, earlier)))
    return run


def _weights(
    cfg: config.RunConfig,
    model: transformer.Transformer,
    quiet: bool,
    places: base_model.Placer | None,
) -> Any:
    """The base's weights; unless `quiet`, the terminal shows the progress."""
    load = functools.partial(base_model.load_weights, cfg.model, model, cfg.seed, places=places)
    if quiet:
        return load()
    with terminal.job("base") as (log, move):
        source = "random weights in the shape of " if cfg.model.random_base else ""
        log(f"base: {source}{cfg.model.model_name_or_path}, held in {cfg.model.weights}")
        return load(move)


def _require_alike(cfg: config.RunConfig, hosts: Hosts) -> None:
    """Refuses processes of one run that would compute different things."""
    devices = jax.local_devices()
    own = {
        "config": config.dump(dataclasses.replace(cfg, output_dir="any")),
        "version of jax": jax.__version__,
        "number and kind of devices": (len(devices), devices[0].device_kind),
    }
    for host, other in enumerate(hosts.gathered(own)):
        differs = [name for name, value in own.items() if other[name] != value]
        rule = f"{', '.join(differs)} of process {host} is another one than that of process {hosts.index}"
        require(not differs, "hosts", hosts.count, f"{rule}: all must be given the same")


def about_data(
    cfg: config.RunConfig, problems: Sequence[datasets.Problem], *, is_named: bool
) -> list[str]:
    """Warns of data that is probably a mistake, or would teach nothing.

    Args:
        cfg: The run.
        problems: Its problems.
        is_named: Whether the problems come from `cfg.data`.
    """
    if not problems:
        return []
    count, asked, notes = len(problems), cfg.prompts_per_rollout, []
    if count < asked:
        notes.append(
            f"warning: there {'is 1 problem' if count == 1 else f'are {count} problems'}, and a rollout asks {asked}: "
            "some are asked more than once in every step. Give more of them in data"
        )
    first = problems[0]
    if isinstance(first.prompt, str) and is_named:
        notes.append(
            "note: prompts are texts (column 'prompt'), which the policy is given as they are, without its chat "
            "template. If the base is a chat model, call the column 'question', or set data.system_prompt"
        )
    # Generated problems always have answers.
    if "answer" not in first.columns or cfg.data.dataset == "arithmetic":
        return notes
    lacking = [row for row, each in enumerate(problems) if each.columns.get("answer") in (None, "")]
    if lacking:
        named = ", ".join(map(str, lacking[:5])) + (", ..." if len(lacking) > 5 else "")
        notes.append(
            f"warning: {len(lacking)} of {count} problems have no answer (problem {named}, from 0 on): a reward that "
            "compares with it cannot be earned there"
        )
    return notes


def _about_epochs(cfg: config.RunConfig, total_steps: int) -> list[str]:
    """A line on what `num_train_epochs` means where rollouts may take several rounds."""
    if cfg.num_train_epochs is None or not cfg.grpo.dynamic_sampling:
        return []
    rounds = total_steps // cfg.updates_per_rollout
    return [
        f"{cfg.num_train_epochs:g} epochs are {rounds} rounds of {cfg.prompts_per_rollout} problems: "
        f"{total_steps} optimizer steps, or fewer where rollouts take several rounds"
    ]


def _about_slow_sampling(cfg: config.RunConfig, model: transformer.Transformer) -> list[str]:
    """A line on why rollouts are slower on this card than they could be."""
    rows = min(cfg.generation_batch_size, cfg.rollout.max_concurrent or cfg.generation_batch_size)
    own_noise = cfg.noise is not None and cfg.noise.per != "rollout"
    slow = fused_decode.slow_because(model.own_part, rows, own_noise=own_noise)
    return [slow] if slow else []


def check_folder(cfg: config.RunConfig) -> config.RunConfig | None:
    """Checks that the folder's run has this config: resuming with another one would be a different run under the
    same name.

    The run may be made longer, and may continue on other devices.

    Returns:
        The config of the run in the folder, or None.

    Raises:
        ConfigError: When the folder's run differs in anything else.
    """
    folder = pathlib.Path(cfg.output_dir)
    # A run that failed before its first checkpoint has nothing to resume: its config may change.
    made = [folder / "adapter", folder / "model", *folder.glob("checkpoints/[0-9]*")]
    if not (folder / "config.toml").exists() or not any(each.is_dir() for each in made):
        return None
    found = config.load_run(folder)
    before, now = config.to_table(found), config.to_table(cfg)
    free = {"output_dir", "report_to", "run_name", "mesh"}
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
        "(a run can be made longer, but nothing else of it changes)",
    )
    return found


def _differences(name: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two configs under a name: the field, or the fields of a section, with their values."""
    pair = [table.get(name) for table in (before, now)]
    if not all(isinstance(each, Mapping) for each in pair):
        shown = ("a section" if isinstance(each, Mapping) else repr(each) for each in pair)
        return [f"{name} ({' there, '.join(shown)} here)"]
    return [
        f"{name}.{each}" for field in files.changes(*pair) for each in _differences(field, *pair)
    ]


def _about_length(run: PreparedRun, earlier: config.RunConfig) -> list[str]:
    """Lines about a run that was made longer: its place on its schedules."""
    before, cfg = earlier.total_steps(len(run.problems)), run.cfg
    if before == run.total_steps:
        return []
    place = run.place(int(run.state.step), run.supply)
    last = float(optimizer.learning_rate(cfg.optim, before)(max(0, place - 1)))
    rate = float(optimizer.learning_rate(cfg.optim, run.total_steps)(place))
    noise = " and noise" if cfg.noise else ""
    return [
        f"this run had {before} optimizer steps and has {run.total_steps} now: learning rate{noise} go on as in a "
        f"run of {run.total_steps} steps (the next rate is {rate:.3g}, the last one was {last:.3g})"
    ]


def _plan_memory(cfg: config.RunConfig) -> memory.MemoryPlan | None:
    """The memory plan; refuses a run that cannot fit. None where the device does not report its memory."""
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
    """Peak device memory of this process, in bytes; 0 where the device does not report it."""
    return (runtime.memory_stats() or {}).get("peak_bytes_in_use", 0)


def _starting_adapter(cfg: config.RunConfig) -> pathlib.Path | None:
    """The folder of the adapter to start from; it must have the run's shape."""
    if cfg.model.adapter_name_or_path is None:
        return None
    folder = hf_folder.local_folder(cfg.model.adapter_name_or_path)
    found = peft.read_lora(folder)
    for field in ("rank", "alpha", "train_norms", *peft.SHAPE_FIELDS):
        ours, theirs = getattr(cfg.lora, field), getattr(found, field)
        require(ours == theirs, f"lora.{field}", ours, f"the adapter in {folder} needs {theirs!r}")
    return folder


def _rewards(
    cfg: config.RunConfig, given: Sequence[stock.RewardFunction] | None
) -> tuple[list[scoring.Named], list[float]]:
    """The reward functions and their weights; the penalty for long completions comes last."""
    functions = scoring.resolve(
        cfg.rewards.functions if given is None else given, cfg.rewards.options
    )
    weights = list(cfg.rewards.weights or [1.0] * len(functions))
    require(
        len(functions) == len(weights) and (bool(functions) or cfg.tools is not None),
        "rewards.weights",
        len(weights),
        f"must be one for each of {len(functions)} reward functions, of which there must be at "
        "least one",
    )
    cache = cfg.rewards.soft_punish_cache
    if cache is None:
        return functions, weights

    def punish(completion_ids, **_):
        return grpo.soft_overlong_punishment(
            np.array([len(ids) for ids in completion_ids]),
            max_completion_length=cfg.rollout.max_completion_length,
            soft_punish_cache=cache,
        ).tolist()

    functions.append(("soft_overlong_punishment_reward", punish))
    return functions, [*weights, cfg.rewards.soft_punish_weight]


def _add_own_rewards(
    boxes: environments.Toolboxes, functions: list[scoring.Named], weights: list[float]
) -> None:
    """Adds the rewards that environments compute for their rows, each with weight 1."""
    silent = [box.environment_name or "tools" for box in boxes if not box.owns_reward]
    rule = f"must name one at least: {', '.join(silent)} has no get_reward"
    require(bool(functions) or not silent, "rewards.functions", (), rule)
    own, names = boxes.own_rewards(), [name for name, _ in functions]
    both = [name for name, _ in own if name in names]
    require(not both, "rewards.functions", both, "must differ in name from the environments")
    functions += own
    weights += [1.0] * len(own)


def informative_by(
    cfg: config.RunConfig,
    functions: Sequence[scoring.Named],
    weights: Sequence[float],
    note: Callable[[str], None],
) -> Callable[[rollouts.Scored], np.ndarray]:
    """Makes the function that maps a scored rollout to the groups that dynamic sampling keeps, bool [P].

    Args:
        cfg: The run.
        functions: Names and functions of the rewards.
        weights: One for each function.
        note: Called with a line that names the rewards by which groups are compared.

    Raises:
        ConfigError: For the name of a reward that the run does not have, and where all of its rewards judge only
            form or length.
    """
    names, metric = [name for name, _ in functions], cfg.grpo.dynamic_sampling_metric
    given, field = cfg.rewards.shaping, "grpo.dynamic_sampling_metric"
    known = ", ".join(names)
    require(
        set(given or ()) <= {*names},
        "rewards.shaping",
        given,
        f"the rewards of this run are {known}",
    )
    rule = f'must be "reward", or one of the rewards of this run: {known}'
    require(metric in (None, "reward", *names), field, metric, rule)
    shaping = stock.SHAPING if given is None else given
    chosen = {i: w for i, w in enumerate(weights) if names[i] not in shaping and w}
    if metric == "reward" or not cfg.grpo.dynamic_sampling:
        return dynamic_sampling.by_reward
    if metric is not None:
        chosen = {names.index(metric): 1.0}
    rule = (
        f"all rewards of this run shape form or length ({known}), so no group is better than another: name "
        f'one of them by {field}, or set it to "reward"'
    )
    require(bool(chosen), "grpo.dynamic_sampling", True, rule)
    judges = ", ".join(names[i] for i in chosen)
    note(f"dynamic sampling keeps groups whose completions differ in {judges}")
    return dynamic_sampling.by_functions(chosen)
