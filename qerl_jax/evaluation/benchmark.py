"""Evaluates a policy on sets of problems; an interrupted evaluation can be continued."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from qerl_jax.checkpoint.policy import ALONE, LoadedPolicy, PolicySource, load_policy
from qerl_jax.config import DataConfig, EvalConfig, MeshConfig, RunConfig, ToolsConfig
from qerl_jax.data import datasets
from qerl_jax.evaluation import protocols
from qerl_jax.evaluation.evaluator import Evaluator, protocol_of_run, reward_of, try_reward
from qerl_jax.evaluation.options import EvalOptions
from qerl_jax.evaluation.protocols import Protocol
from qerl_jax.evaluation.results import Measurement, Results, measure
from qerl_jax.evaluation.summary import summarize
from qerl_jax.generation import kv_capacity
from qerl_jax.generation.prompts import encode
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.sampling_params import EngineLimits
from qerl_jax.model import fused_decode
from qerl_jax.rewards import scoring
from qerl_jax.system.checked import from_table, require, require_seed, to_table
from qerl_jax.system.files import content_hashes, write_whole
from qerl_jax.tools.conversations import Tools, observed
from qerl_jax.tools.environments import Toolboxes

# Prompts are padded to multiples of this, so that sets share compiled programs.
_WIDTH_STEP = 64
_REFUSAL = (
    "{folder} holds an evaluation with other settings ({changed}): choose another folder (--output-dir), or remove that "
    "one"
)
_REMEDY = "name yours by --columns answer COLUMN, or choose another reward by --reward"


@dataclasses.dataclass(frozen=True)
class _Set:
    """A set of problems, with its protocol, reward function, results and tools."""

    name: str
    protocol: Protocol
    problems: Sequence[datasets.Problem]
    reward: scoring.Named
    toolboxes: Toolboxes | None
    results: Results

    @property
    def num_rows(self) -> int:
        """The number of completions."""
        return len(self.problems) * self.protocol.sampling.n

    @property
    def is_complete(self) -> bool:
        """Whether all problems have a result."""
        return len(self.results.of_problems.values) == len(self.problems)

    @property
    def sampled_as(self) -> tuple[Any, ...]:
        """All but the problems that an engine is made for."""
        sampling = dataclasses.replace(self.protocol.sampling, n=1)
        date = self.results.identity.get("chat_template_date")
        return sampling, date, self.protocol.tools, self.toolboxes and id(self.toolboxes)

    def line(self, beginning: str) -> str:
        """Returns a line about the progress."""
        right = [
            verdict for record in self.results.of_problems.values for verdict in record["right"]
        ]
        right += [row["right"] for row in self.results.rows.values]
        return f"{self.name}: {beginning}, {np.mean(right):.3f} right so far"


def protocol_for(
    dataset: str,
    policy: PolicySource,
    options: EvalOptions = EvalOptions(),
    tools: ToolsConfig | None = None,
) -> Protocol:
    """Returns the protocol of a set of problems.

    Args:
        dataset: A data set, as in `DataConfig.dataset`.
        policy: The policy, which gives the run.
        options: The name of the protocol, and what replaces its fields.
        tools: Tools that replace those of the protocol; None leaves them.

    Raises:
        ValueError: For "run" if the policy has no run, or an invalid value.
    """
    name = options.protocol or ("paper" if policy.run is None else "run")
    if name == "run":
        require(policy.run is not None, "protocol", name, "needs --adapter with a run folder")
        run = policy.run
        protocol = protocol_of_run(dataclasses.replace(run, eval=run.eval or EvalConfig()))
    else:
        protocol = getattr(protocols, name)(dataset)
    changes = options.of_protocol() | ({} if tools is None else {"tools": tools})
    sampling = dataclasses.replace(protocol.sampling, **options.of_sampling())
    return dataclasses.replace(protocol, sampling=sampling, **changes)


def source_of(
    dataset: str, policy: PolicySource, options: EvalOptions = EvalOptions()
) -> DataConfig:
    """Returns the data config of a set: the run's held-out split if it is the run's set, else the usual split.

    A text passes the chat template if it did when the policy was trained. The arguments are as for `protocol_for`.

    Raises:
        ConfigError: For an invalid value.
    """
    changes, run = options.of_source(), policy.run
    if run is not None and dataset == run.data.dataset:
        fields = to_table(run.data) | {"num_problems": None, "split": "test"}
        if run.eval is not None and run.eval.dataset is None:
            fields |= {"split": run.eval.split, "num_problems": run.eval.num_problems}
    else:
        if run is not None and run.eval is not None and dataset == run.eval.dataset:
            changes = {"path": run.eval.path, "split": run.eval.split} | changes
        # A copy on disk is expected to have a split "test", even if the hub's data set has another name for it.
        is_on_disk = changes.get("path") is not None
        split = "test" if is_on_disk else protocols.SPLITS.get(dataset, "test")
        fields = {"dataset": dataset, "split": split}
        fields["apply_chat_template"] = policy.apply_chat_template
    table = {name: value for name, value in (fields | changes).items() if value is not None}
    return from_table(DataConfig, table, "data.")


def run(
    source: PolicySource,
    sets: Sequence[tuple[DataConfig, Protocol]],
    folder: str | pathlib.Path,
    *,
    seed: int = 0,
    max_concurrent: int | None = None,
    log: Callable[[str], None] = lambda text: None,
    policy: LoadedPolicy | None = None,
    toolboxes: Toolboxes | None = None,
    mesh: MeshConfig = ALONE,
    quiet: bool = True,
) -> dict[str, dict[str, Any]]:
    """Evaluates a policy on sets of problems, each in its own folder; continues an interrupted evaluation.

    Sets with the same sampling and tools are sampled as one queue.
    `<folder>/<set>/` holds `settings.json` (everything that a result depends on), `problems.jsonl` (one object per
    problem: see `Evaluator.records`) and `summary.json` (see `summarize`). Until all completions of the set have ended,
    those that have are in `problems.jsonl.partial` (see `Evaluator.judge`).

    Args:
        source: The policy to evaluate; it is loaded only if a set is unfinished.
        sets: Problems and protocol of each set.
        folder: The folder of the results; created if it does not exist.
        seed: Random seed for sampling, and for arithmetic problems if the policy has no run.
        max_concurrent: Maximum number of completions that each replica samples at a time; fewer if memory for their
            KV cache is short. None means the default of `EngineLimits`.
        log: Called with a line about every ten seconds, and with a line if sampling is slow on this GPU.
        policy: The policy of `source`, if it is already on the device.
        toolboxes: Tools that replace those of the protocols, for protocols with tools.
        mesh: The devices that the policy is loaded onto.
        quiet: Whether to show no progress bars.

    Returns:
        The content of `summary.json` of each set, by the set's name.

    Raises:
        Busy: If another process writes its results there.
        ValueError: If problems or rewards cannot be used, two sets have the same name, the seed is not in [0, 2**32),
            or the folder holds results with other settings.
    """
    require_seed(seed)
    names = [_set_name(data) for data, _ in sets]
    require(len(set(names)) == len(names), "sets", names, "must differ in name")
    for name, (data, protocol) in zip(names, sets, strict=True):
        for line in _differences(name, source, data, protocol):
            log(line)
    judged = [_judged(source.run, data, protocol, seed, toolboxes) for data, protocol in sets]
    summaries: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        opened = []
        for name, (data, protocol), judge in zip(names, sets, judged, strict=True):
            path = pathlib.Path(folder) / name / "problems.jsonl"
            identity, settings = (
                _identity(source, data, protocol, seed),
                path.with_name("settings.json"),
            )
            options = {"frozen": source.frozen_date(), "settings": settings}
            results = Results(path, identity, **options, refusal=_REFUSAL)
            opened.append(_Set(name, protocol, *judge, stack.enter_context(results)))
        most = max(sum(one.num_rows for one in sets_) for sets_ in _queues(opened))

        @functools.cache
        def on_device() -> LoadedPolicy:
            loaded = policy or load_policy(source, seed, mesh=mesh, rows=most, quiet=quiet)
            rows = max_concurrent or fused_decode.MAX_ROWS
            if slow := fused_decode.slow_because(loaded.model.own_part, rows):
                log(slow)
            return loaded

        for together in _queues(opened):
            if any(not one.is_complete for one in together):
                _measure(on_device(), together, seed, max_concurrent, log, quiet)
        for one in opened:
            records = one.results.of_problems
            what = {"name": one.name, "protocol": one.protocol.table()}
            summaries[one.name] = what | summarize(records.values)
            text = json.dumps(summaries[one.name], indent=2) + "\n"
            write_whole(records.path.with_name("summary.json"), text)
    return summaries


def _differences(
    name: str, policy: PolicySource, data: DataConfig, protocol: Protocol
) -> Iterator[str]:
    """Yields lines about what is otherwise than in the training of the policy, if it is that of a run."""
    if (run := policy.run) is None:
        return
    applies = data.apply_chat_template or bool(protocol.system_prompt)
    if applies != policy.apply_chat_template:
        how = "in" if applies else "without"
        yield (
            f"warning: {name}: texts are asked {how} the chat template, unlike in training. To ask as in training, "
            'choose the protocol "run", and give no system prompt and no apply_chat_template'
        )
    functions = run.rewards.functions
    is_users = any(":" in function for function in functions)
    if is_users and run.eval is None and protocol.reward not in functions:
        trained = f"the run was trained with {', '.join(functions)}"
        yield f"{name}: judged by {protocol.reward}, and {trained}; --reward names another"
    if protocol.tools is None and run.tools is not None:
        yield f'{name}: asked without the tools of the run; to use them, choose the protocol "run"'


def _judged(
    run: RunConfig | None,
    data: DataConfig,
    protocol: Protocol,
    seed: int,
    toolboxes: Toolboxes | None,
) -> tuple[Sequence[datasets.Problem], scoring.Named, Toolboxes | None]:
    """Loads the problems of a set, its reward function and its tools, and calls the reward once as a check."""
    prompts = {"system_prompt": protocol.system_prompt, "prompt_template": protocol.prompt_template}
    data, seed = dataclasses.replace(data, **prompts), run.seed if run else seed
    problems = datasets.from_config(data, split=data.split, seed=seed)
    if protocol.tools is not None and toolboxes is None:
        toolboxes = Toolboxes(protocol.tools)
    options = None if run is None else run.rewards.options
    reward = reward_of(protocol.reward, options, toolboxes, field="reward")
    try_reward(reward, problems, toolboxes, before="evaluating", remedy=_REMEDY)
    return problems, reward, toolboxes


def _queues(sets: Sequence[_Set]) -> list[list[_Set]]:
    """Divides sets into those that one engine can sample together."""
    queues: list[list[_Set]] = []
    for one in sets:
        fits = (together for together in queues if together[0].sampled_as == one.sampled_as)
        if (queue := next(fits, None)) is None:
            queues.append(queue := [])
        queue.append(one)
    return queues


def _measure(
    policy: LoadedPolicy,
    sets: Sequence[_Set],
    seed: int,
    max_concurrent: int | None,
    log: Callable[[str], None],
    quiet: bool,
) -> None:
    """Samples and judges the rows that sets of one queue lack."""
    first, tools, longest = sets[0], None, sets[0].protocol.sampling.max_tokens
    policy = policy.dated(first.results.identity)
    if first.toolboxes is not None:
        tools = Tools.of(first.protocol.tools, policy.tokenizer, first.toolboxes, log)
    # Of all sets, also of those that are complete: then shapes do not depend on what was done before.
    width = 0
    for one in sets:
        seen = one.problems if tools is None else observed(tools, one.problems)
        lengths = [len(ids) for ids in encode(seen, policy.tokenizer, tools)]
        if 0 in lengths:
            raise ValueError(f"prompt of problem {lengths.index(0)}: has no tokens")
        policy.model.arch.require_context(max(lengths), longest, "max_tokens")
        width = max(width, -(-max(lengths) // _WIDTH_STEP) * _WIDTH_STEP)
    memory = (runtime.memory_stats() or {}).get("bytes_limit")
    part, itemsize = policy.model.own_part.arch, jnp.dtype(policy.model.dtype).itemsize
    fit = kv_capacity.rows_that_fit(part, memory, width + longest, itemsize)
    wanted = EngineLimits(max_concurrent).on_this_device().max_concurrent
    options = {"max_prompt_length": width, "tools": tools, "replicas": policy.replicas}
    of = policy.model, policy.tokenizer, first.protocol.sampling
    sampler = Sampler.of(*of, EngineLimits(wanted and min(wanted, fit)), **options)
    measurements = []
    for one in sets:
        params = dataclasses.replace(sampler.params, n=one.protocol.sampling.n)
        of_set = dataclasses.replace(sampler, params=params)
        evaluator = Evaluator(of_set, one.problems, one.reward, jax.random.key(seed))
        measurements.append(Measurement(evaluator, one.results, evaluator.records, one.line))
    measure(policy.variables, measurements, log, quiet=quiet)


def _set_name(data: DataConfig) -> str:
    is_path = "/" in data.dataset or "." in data.dataset
    return pathlib.PurePath(data.dataset).stem if is_path else data.dataset


def _identity(
    policy: PolicySource, data: DataConfig, protocol: Protocol, seed: int
) -> dict[str, Any]:
    """Returns everything that a result depends on."""
    # The protocol determines the prompts, so these fields of the data config have no effect.
    unused = ("system_prompt", "prompt_template", "max_prompt_length", "overlong_prompts")
    tables = {
        "model": to_table(policy.model),
        "data": {k: v for k, v in to_table(data).items() if k not in unused},
        "protocol": protocol.table(),
    }
    options = policy.run and policy.run.rewards.options
    return {
        **{f"{section}.{k}": v for section, table in tables.items() for k, v in table.items()},
        **content_hashes(
            {"model": policy.model.model_name_or_path, "adapter": policy.adapter},
            {"data": data.path or data.dataset},
        ),
        "adapter": policy.adapter and os.fspath(policy.adapter.resolve()),
        # Arithmetic problems are those that the run itself is evaluated on.
        "data.seed": policy.run.seed if policy.run else seed,
        "rewards.options": (options or {}).get(protocol.reward),
        "seed": seed,
    }
