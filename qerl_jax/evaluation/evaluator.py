"""How often a policy is right: held-out accuracy during a run, and benchmarks with per-problem files.

Base and adapter, before and after training, go through one prompt, one sampler and one judge.
"""

from __future__ import annotations

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
from qerl_jax import config, files
from qerl_jax.checkpoint import policy as policies
from qerl_jax.checkpoint.policy import Policy
from qerl_jax.config import DataConfig, RunConfig
from qerl_jax.data import answers, datasets
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.evaluation import intervals, protocols
from qerl_jax.evaluation.protocols import Protocol
from qerl_jax.files import digest, fingerprint, write_whole
from qerl_jax.generation import batch as sampling
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts

# What each reward takes for the answer of a text; others may take any form.
_READINGS = {
    "accuracy_reward": answers.last_block,
    "correct_and_well_formed_reward": answers.last_block,
    "gsm8k_hash_reward": answers.after_hashes,
    "gsm8k_flexible_reward": answers.last_number,
    "boxed_reward": answers.last_boxed,
    "dapo_boxed_reward": answers.last_boxed,
    "dapo_reward": answers.answer_line,
}
# Of the device's memory, for keys and values; where it does not say how much it has, of this many bytes.
_CACHE_SHARE, _MEMORY = 0.4, 16e9
# Completions of a batch for each that is sampled at a time.
_BATCHED = 4


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A set of problems, how completions are sampled and what counts as right.

    Attributes:
        generate: From `sampling.make_generate`, with the same number of generations.
        tokenizer: Of the policy.
        problems: P of them, held out from training.
        reward: (name, function); a completion is right where it gives at least 1.
        num_generations: N, samples per problem.
        batch_size: Problems sampled together.
        max_prompt_length: Width of the padded prompts.
        temperature: 0 is greedy.
        key: A sample's randomness is a function of it and of the sample's place alone, so that two
            policies meet the same luck, in batches of any size.
    """

    generate: Callable[..., Any]
    tokenizer: Tokenizer
    problems: Sequence[Problem]
    reward: scoring.Named
    num_generations: int
    batch_size: int
    max_prompt_length: int
    temperature: float
    key: jax.Array

    def records(self, variables: dict[str, Any], start: int = 0) -> Iterator[list[dict[str, Any]]]:
        """Samples and judges a batch at a time, from problem `start` on; an object per problem.

        Each has `problem` (its place), `prompt`, `gold`, and lists of N: `right`, `answers` (as
        parsed, None where there is none), `lengths` in tokens, `stopped`, `completions`; and `unjudged`,
        how many the reward abstained on: they count as wrong.
        """
        size = min(self.batch_size, len(self.problems))
        while start < len(self.problems):
            problems = list(self.problems[start : start + size])
            wanted = len(problems)
            # The last batch is filled up with repeats: one shape, one compilation.
            problems += [problems[-1]] * (size - wanted)
            rollout = rollouts.collect(
                self.generate,
                variables,
                self.tokenizer,
                problems,
                self.key,
                num_generations=self.num_generations,
                max_prompt_length=self.max_prompt_length,
                temperature=self.temperature,
                first_row=start * self.num_generations,
            )
            _, values = rollouts.score(rollout, [self.reward], None)
            right = values[:, 0] >= 1
            read = _READINGS.get(self.reward[0], answers.stated)
            rows = [
                slice(i, i + self.num_generations)
                for i in range(0, len(right), self.num_generations)
            ]
            yield [
                {
                    "problem": start + index,
                    "prompt": problems[index].prompt,
                    "gold": problems[index].columns.get("answer"),
                    "right": right[rows[index]].tolist(),
                    "answers": [read(text) for text in rollout.texts[rows[index]]],
                    "lengths": rollout.lengths[rows[index]].tolist(),
                    "stopped": rollout.stopped[rows[index]].tolist(),
                    "unjudged": int(np.isnan(values[rows[index], 0]).sum()),
                    "completions": list(rollout.texts[rows[index]]),
                }
                for index in range(wanted)
            ]
            start += wanted

    def __call__(self, variables: dict[str, Any]) -> dict[str, float]:
        """Metrics under `eval/`: accuracy (the mean over samples and problems) with its standard error and
        95 % interval over problems, mean length, the share of truncated completions, and where there are N > 1
        samples pass@N and maj@N."""
        records = [record for batch in self.records(variables) for record in batch]
        summary = summarize(records, (self.num_generations,))
        (mean, *others) = summary["estimates"]
        right = np.array([record["right"] for record in records])
        return {
            "eval/accuracy": mean["value"],
            "eval/accuracy_stderr": float(right.mean(axis=1).std() / len(right) ** 0.5),
            "eval/accuracy_low": mean["over_problems"][0],
            "eval/accuracy_high": mean["over_problems"][1],
            "eval/mean_length": summary["mean_length"],
            "eval/clipped_ratio": summary["clipped_ratio"],
            **{f"eval/{each['name']}": each["value"] for each in others},
        }


def summarize(records: Sequence[dict[str, Any]], ks: Sequence[int] | None = None) -> dict[str, Any]:
    """Estimates from the records of one set.

    Args:
        records: As `Evaluator.records` gives them, P of N samples each.
        ks: Of pass@k and maj@k; absent means the powers of two below N, and N.

    Returns:
        `problems` P, `samples` N, `mean_length`, `clipped_ratio`, `unjudged` (completions on which the
        reward abstained, for want of a gold answer that can be read), and `estimates`: mean@N first, then
        pass@k and maj@k for k > 1. Each has `name`, `value`, `over_problems` and `over_samples` (95 %
        intervals as two ends; None where too few problems or samples leave it unknown).
    """
    samples = len(records[0]["right"])
    estimates = []
    for (kind, k), statistic in _statistics(records, ks).items():
        name = f"{kind}@{samples if kind == 'mean' else k}"
        estimates.append(_estimate(name, statistic, samples, k))
    return {
        "problems": len(records),
        "samples": samples,
        "mean_length": float(np.mean([record["lengths"] for record in records])),
        "clipped_ratio": 1 - float(np.mean([record["stopped"] for record in records])),
        "unjudged": int(np.sum([record["unjudged"] for record in records])),
        "estimates": estimates,
    }


def _statistics(
    records: Sequence[dict[str, Any]], ks: Sequence[int] | None
) -> dict[tuple[str, int], Callable[[np.ndarray], np.ndarray]]:
    """By kind and k, the functions from places of samples to an estimate for each problem."""
    right = np.array([record["right"] for record in records], bool)
    votes = [
        [None if text is None else answers.canonical(text) for text in record["answers"]]
        for record in records
    ]
    samples = right.shape[1]
    ks = ks or sorted({*(2**i for i in range(samples.bit_length()) if 2**i < samples), samples})

    def mean(columns):
        return right[:, columns].mean(axis=1)

    def pass_at(k, columns):
        return intervals.pass_at_k(right[:, columns], k)

    def maj_at(k, columns):
        chosen = [[row[column] for column in columns] for row in votes]
        return intervals.maj_at_k(right[:, columns], chosen, k)

    several = {"pass": pass_at, "maj": maj_at}
    return {("mean", 1): mean} | {
        (kind, k): functools.partial(at, k) for kind, at in several.items() for k in ks if k > 1
    }


def _estimate(name: str, statistic: Callable, samples: int, k: int) -> dict[str, Any]:
    values = statistic(np.arange(samples))
    ends = lambda interval: None if interval is None else [interval.low, interval.high]
    known = len(values) > 1
    return {
        "name": name,
        "value": float(values.mean()),
        "over_problems": ends(intervals.over_problems(values, samples)) if known else None,
        "over_samples": ends(intervals.over_samples(statistic, samples, k)),
    }


def protocol_for(dataset: str, name: str | None, policy: Policy, **changed: Any) -> Protocol:
    """The protocol of that name for a set; without a name the run's if there is one, else the paper's.

    Args:
        dataset: As `data.load` takes it.
        name: "paper", "verl", or "run": the prompt, sampling, length and reward of the run.
        policy: Whose run.
        **changed: Fields that take another value; None leaves them.

    Raises:
        ValueError: For an unknown name, "run" without one, or an impossible value.
    """
    name = name or ("paper" if policy.run is None else "run")
    if name == "run":
        if policy.run is None:
            raise ValueError('protocol: got "run"; needs --adapter with a run folder')
        run, evaluation = policy.run, policy.run.eval or config.EvalConfig()
        protocol = Protocol(
            evaluation.reward,
            evaluation.num_generations,
            evaluation.temperature,
            evaluation.top_p,
            max_completion_length=run.rollout.max_completion_length,
            system_prompt=datasets.system_prompt(run.data),
            prompt_template=run.data.prompt_template,
            stop=run.rollout.stop,
        )
    elif name in ("paper", "verl"):
        protocol = getattr(protocols, name)(dataset)
    else:
        raise ValueError(f'protocol: got {name!r}; must be "paper", "verl" or "run"')
    return dataclasses.replace(protocol, **{k: v for k, v in changed.items() if v is not None})


def source_of(dataset: str, policy: Policy, **given: Any) -> DataConfig:
    """Where the problems of a set are: the run's own held-out split if it is the run's set, else the usual one.

    Args:
        dataset: As `data.load` takes it.
        policy: Whose run.
        **given: Fields of `DataConfig`; None leaves them.
    """
    given = {name: value for name, value in given.items() if value is not None}
    run = policy.run
    if run is not None and dataset == run.data.dataset:
        fields = config.to_table(run.data) | {"num_problems": None}
        if run.eval is not None and run.eval.dataset is None:
            fields |= {"split": run.eval.split, "num_problems": run.eval.num_problems}
        else:
            fields["split"] = "test"
        fields = {name: value for name, value in fields.items() if value is not None}
    else:
        if run is not None and run.eval is not None and dataset == run.eval.dataset:
            given = {"path": run.eval.path, "split": run.eval.split} | given
            given = {name: value for name, value in given.items() if value is not None}
        # A copy on disk calls it test, whatever the hub does.
        split = "test" if "path" in given else protocols.SPLITS.get(dataset, "test")
        fields = {"dataset": dataset, "split": split}
    return config.from_table(DataConfig, fields | given, "data.")


def run(
    policy: Policy,
    sources: Sequence[tuple[DataConfig, Protocol]],
    folder: str | pathlib.Path,
    *,
    seed: int = 0,
    max_concurrent: int = 128,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Any]]:
    """Evaluates a policy on sets, each into a folder of its own, and goes on where a killed call stopped.

    `<folder>/<set>/` holds `settings.json` (all that a result depends on), `problems.jsonl` (an object
    per problem: see `Evaluator.records`) and `summary.json` (see `summarize`).

    Args:
        policy: What is evaluated.
        sources: Problems and protocol of each set.
        folder: Made if it does not exist.
        seed: Of the samples, and of arithmetic problems.
        max_concurrent: Most completions sampled at a time; fewer where they are long.
        say: Told of every batch.

    Returns:
        Summaries by set.

    Raises:
        ValueError: For problems or rewards that cannot be used, two sets of one name, a seed that is not
            in [0, 2**32), or results of something else in the folder.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: got {seed}; must be in [0, 2**32)")
    names = [_set_name(source) for source, _ in sources]
    if len(set(names)) < len(names):
        raise ValueError(f"sets must differ in name; got {names}")
    functions = [scoring.resolve([p.reward], _options(policy.run)) for _, p in sources]
    problems = [
        datasets.from_config(
            dataclasses.replace(
                source, system_prompt=p.system_prompt, prompt_template=p.prompt_template
            ),
            split=source.split,
            seed=_data_seed(policy, seed),
        )
        for source, p in sources
    ]
    for function, each in zip(functions, problems, strict=True):
        scoring.check(function, each[:2])
    files = [
        _Files(pathlib.Path(folder) / name, _identity(policy, source, protocol, seed))
        for name, (source, protocol) in zip(names, sources, strict=True)
    ]
    if any(len(f.records) < len(each) for f, each in zip(files, problems, strict=True)):
        model, variables, tokenizer = policies.load(policy, seed)
    summaries = {}
    for name, file, each, (function,), (_, protocol) in zip(
        names, files, problems, functions, sources, strict=True
    ):
        if len(file.records) < len(each):
            if isinstance(each[0].prompt, str):
                say(f"{name}: prompts are texts, given to the model without its chat template")
            evaluator = _evaluator(model, tokenizer, each, function, protocol, seed, max_concurrent)
            for records in evaluator.records(variables, len(file.records)):
                file.add(records)
                mean = np.mean([record["right"] for record in file.records])
                say(f"{name}: {len(file.records)}/{len(each)} problems, {mean:.3f} right so far")
        asked = {"name": name, "protocol": dataclasses.asdict(protocol)}
        summaries[name] = asked | summarize(file.records)
        file.finish(summaries[name])
    return summaries


def _evaluator(
    model, tokenizer, problems, function, protocol: Protocol, seed: int, max_concurrent: int
) -> Evaluator:
    lengths = [len(ids) for ids in tokenizer.encode([problem.prompt for problem in problems])]
    if 0 in lengths:
        raise ValueError(f"prompt of problem {lengths.index(0)}: has no tokens")
    model.arch.require_context(max(lengths), protocol.max_completion_length, "max_tokens")
    # A few widths only, so that sets share compiled programs.
    width = -(-max(lengths) // 64) * 64
    slots = width + protocol.max_completion_length
    arch, memory = model.arch, runtime.memory_stats() or {}
    room = _CACHE_SHARE * memory.get("bytes_limit", _MEMORY)
    heads = 2 * arch.num_layers * arch.num_kv_heads * arch.head_size
    fitting = int(room / (slots * heads * jnp.dtype(model.dtype).itemsize))
    rows = max(1, min(max_concurrent, fitting))
    return Evaluator(
        sampling.make_generate(
            model,
            num_generations=protocol.num_generations,
            max_completion_length=protocol.max_completion_length,
            max_concurrent=rows,
            num_tokens=tokenizer.num_tokens,
            stop_tokens=tokenizer.stop_tokens,
            stop_strings=StopStrings(protocol.stop, tokenizer.decode) if protocol.stop else None,
            pad_token=tokenizer.pad_token,
            truncation=sampling.Truncation(protocol.top_k, protocol.top_p, protocol.min_p),
        ),
        tokenizer,
        problems,
        function,
        protocol.num_generations,
        # Several times what runs at a time, so that long rows seldom run alone; and few enough that a
        # stop loses little.
        max(1, _BATCHED * rows // protocol.num_generations),
        width,
        protocol.temperature,
        jax.random.key(seed),
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two policies on one set.

    Attributes:
        differences: By estimate ("mean", "pass@4", ...), the first policy's minus the second's.
        changed: Settings in which the two evaluations differ; the policy should be the only one.
    """

    differences: dict[str, intervals.Interval]
    changed: list[str]


def compare(ours: str | pathlib.Path, theirs: str | pathlib.Path) -> dict[str, Comparison]:
    """Paired differences of two evaluations, on every set that both have finished.

    Args:
        ours: A folder that `run` wrote, or that of one set in it.
        theirs: Another.

    Raises:
        FileNotFoundError: When a folder holds no finished evaluation.
        ValueError: When they have no set in common, or not the same problems.
    """
    first, second = _finished(ours), _finished(theirs)
    common = [name for name in first if name in second]
    if not common:
        raise ValueError(f"no set in common: {sorted(first)} and {sorted(second)}")
    return {name: _compare(name, first[name], second[name]) for name in common}


def _compare(name: str, ours: pathlib.Path, theirs: pathlib.Path) -> Comparison:
    settings = [json.loads((each / "settings.json").read_text()) for each in (ours, theirs)]
    records = [files.whole_lines(each / "problems.jsonl") for each in (ours, theirs)]
    golds = [[record["gold"] for record in each] for each in records]
    if golds[0] != golds[1]:
        raise ValueError(f"{name}: {ours} and {theirs} are not of the same problems")
    samples = [len(each[0]["right"]) for each in records]
    first, second = (_statistics(each, None) for each in records)
    differences = {
        kind if kind == "mean" else f"{kind}@{k}": intervals.paired_difference(
            first[kind, k](np.arange(samples[0])),
            second[kind, k](np.arange(samples[1])),
            samples=min(samples) // k,
        )
        for kind, k in first
        if (kind, k) in second
    }
    changed = [
        key
        for key in sorted(settings[0] | settings[1])
        if settings[0].get(key) != settings[1].get(key)
    ]
    return Comparison(differences, changed)


def _finished(folder: str | pathlib.Path) -> dict[str, pathlib.Path]:
    folder = pathlib.Path(folder)
    found = [path.parent for path in sorted(folder.glob("*/summary.json"))]
    if (folder / "summary.json").is_file():
        found = [folder]
    if not found:
        raise FileNotFoundError(f"no finished evaluation in {folder}")
    return {path.name: path for path in found}


def lines(summary: dict[str, Any]) -> list[str]:
    """A summary as text: a line of what was asked, then an estimate with its intervals a line."""
    how = summary["protocol"]
    shown = [
        f"{summary['name']}: {summary['problems']} problems, {summary['samples']} samples each at temperature "
        f"{how['temperature']:g} and top-p {how['top_p']:g}, judged by {how['reward']}; "
        f"{summary['mean_length']:.0f} tokens on average, {summary['clipped_ratio']:.1%} truncated"
    ]
    if summary["unjudged"]:
        shown.append(
            f"  {summary['unjudged']} completions could not be judged and count as wrong: their problems "
            "have no answer, or none that the reward can read"
        )
    for each in summary["estimates"]:
        text = f"  {each['name']:8} {each['value']:.3f}"
        for kind in ("over_problems", "over_samples"):
            if each[kind] is not None:
                low, high = each[kind]
                text += f"   [{low:.3f}, {high:.3f}] {kind.replace('_', ' ')}"
        shown.append(text)
    return shown


class _Files:
    """The folder of one set: settings first, then records as they come, the summary last."""

    def __init__(self, folder: pathlib.Path, identity: dict[str, Any]):
        self._folder = folder
        settings, self._path = folder / "settings.json", folder / "problems.jsonl"
        self.records = files.whole_lines(self._path)
        # Where there are none yet, the first call may have been a mistake.
        if settings.is_file() and self.records:
            before = json.loads(settings.read_text("utf-8"))
            if changed := files.changes(before, identity):
                raise ValueError(
                    f"{folder} holds an evaluation with other settings ({', '.join(changed)}): "
                    "choose another folder, or remove that one"
                )
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(settings, json.dumps(identity, indent=2, ensure_ascii=False) + "\n")
        write_whole(self._path, "".join(map(_line, self.records)))

    def add(self, records: list[dict[str, Any]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, records)))
        # As a later call will read them.
        self.records += [json.loads(_line(record)) for record in records]

    def finish(self, summary: dict[str, Any]) -> None:
        write_whole(self._folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, default=str) + "\n"


def _set_name(source: DataConfig) -> str:
    return (
        pathlib.PurePath(source.dataset).stem
        if "/" in source.dataset or "." in source.dataset
        else source.dataset
    )


def _data_seed(policy: Policy, seed: int) -> int:
    """Which arithmetic problems: those that the run is evaluated on itself."""
    return policy.run.seed if policy.run else seed


def _options(run: RunConfig | None) -> dict[str, dict[str, Any]] | None:
    return None if run is None else run.rewards.options


def _identity(policy: Policy, source: DataConfig, protocol: Protocol, seed: int) -> dict[str, Any]:
    """Everything that a result depends on, as plain JSON."""
    prompts = ("system_prompt", "prompt_template", "max_prompt_length", "overlong_prompts")
    data_table = {k: v for k, v in config.to_table(source).items() if k not in prompts}
    stop = protocol.stop and list(protocol.stop)
    protocol_table = dataclasses.asdict(protocol) | {"stop": stop}
    return {
        **{f"model.{name}": value for name, value in config.to_table(policy.model).items()},
        "model.sha256": fingerprint(pathlib.Path(policy.model.model_name_or_path)),
        "adapter": policy.adapter and os.fspath(policy.adapter.resolve()),
        "adapter.sha256": policy.adapter and fingerprint(policy.adapter),
        "data.sha256": digest(pathlib.Path(source.path or source.dataset)),
        **{f"data.{name}": value for name, value in data_table.items()},
        **{f"protocol.{name}": value for name, value in protocol_table.items()},
        "data.seed": _data_seed(policy, seed),
        "rewards.options": (_options(policy.run) or {}).get(protocol.reward),
        "seed": seed,
    }
