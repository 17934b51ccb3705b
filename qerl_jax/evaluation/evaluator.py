"""Measures the accuracy of a policy on problems: all are sampled as one queue, and judged as they end.

Policies before and after training get the same prompts, the same sampler and the same reward function.
"""

import contextlib
import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from qerl_jax.config import RunConfig
from qerl_jax.data import answers, datasets, verl_answers
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.evaluation.protocols import Protocol
from qerl_jax.evaluation.summary import summarize
from qerl_jax.generation.prompts import admit, with_observations
from qerl_jax.generation.sampler import Completion, Sampler, row_keys
from qerl_jax.generation.sampling_params import EngineLimits, from_section
from qerl_jax.model.transformer import Transformer
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts
from qerl_jax.tools.conversations import Tools
from qerl_jax.tools.environments import Toolboxes

# The function with which each reward extracts the answer of a text; for other rewards `answers.stated`.
_ANSWER_READERS = {
    "accuracy_reward": answers.last_block,
    "correct_and_well_formed_reward": answers.last_block,
    "gsm8k_hash_reward": answers.after_hashes,
    "gsm8k_flexible_reward": answers.last_number,
    "boxed_reward": answers.last_boxed,
    "dapo_boxed_reward": answers.last_boxed,
    "dapo_reward": verl_answers.answer_line,
    "reasoning_accuracy_reward": lambda text: answers.stated(answers.after_reasoning(text)),
    "verl_aime_reward": verl_answers.answer_line,
    "verl_gsm8k_flexible_reward": verl_answers.flexible_number,
    "verl_gsm8k_reward": verl_answers.strict_number,
    "verl_math_reward": verl_answers.boxed,
}
# The form in which each reward compares answers; see `_votes` for other rewards, and for those with `votes`.
_VOTE_FORMS = {
    "dapo_reward": answers.minerva_form,
    "verl_aime_reward": answers.minerva_form,
    "verl_gsm8k_flexible_reward": str,
    "verl_gsm8k_reward": str,
    "verl_math_reward": verl_answers.hendrycks_vote,
}
# Seconds between two looks for signals while no row ends.
_LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A set of problems, a sampler of completions, and the reward function that judges them.

    Attributes:
        sampler: Samples N completions of each problem (`params.n`); temperature 0 is greedy.
        problems: The P problems, usually held out from training.
        reward: (name, function); a completion is right if the function gives at least 1.
        key: Random key. The random numbers of a sample depend only on this key and the index of the sample. So two
            policies are sampled with the same random numbers, whatever else is sampled at the same time.
    """

    sampler: Sampler
    problems: Sequence[datasets.Problem]
    reward: scoring.Named
    key: jax.Array

    @property
    def num_rows(self) -> int:
        """The number of all samples."""
        return len(self.problems) * self.sampler.params.n

    @classmethod
    def of_run(
        cls,
        cfg: RunConfig,
        model: Transformer,
        tokenizer: Tokenizer,
        key: jax.Array,
        log: Callable[[str], None],
        poll: Callable[[], None] | None = None,
        tools: Tools | None = None,
        replicas: Replicas = Replicas(),
        **engine: Any,
    ) -> Self | None:
        """Builds the evaluator of a run's `[eval]` section; None where there is none.

        Concurrent rows, cache, drafts and what ends a completion are those of a rollout. `log` is called with a line if
        problems are dropped; `poll` and further arguments are those of `Engine`.

        Raises:
            ValueError: If the problems or the reward function cannot be used.
        """
        if cfg.eval is None:
            return None
        problems = _held_out_problems(cfg, tokenizer, tools, log)
        boxes = tools and tools.toolboxes
        reward = reward_of(cfg.eval.reward, cfg.rewards.options, boxes)
        remedy = "rename one by data.columns, or name another reward by eval.reward"
        try_reward(reward, problems, boxes, remedy=remedy)
        if tools is not None:
            with_observations(tools, problems[:2], tokenizer, cfg.data.max_prompt_length)
        options = {
            "tools": tools,
            "replicas": replicas,
            "compact": cfg.rollout.compact,
            "poll": poll,
            **engine,
        }
        sampler = Sampler.of(
            *(model, tokenizer, protocol_of_run(cfg).sampling, EngineLimits.of(cfg.rollout)),
            max_prompt_length=cfg.data.max_prompt_length,
            **options,
        )
        return cls(sampler, problems, reward, key)

    def judge(
        self, numbers: Sequence[int], completions: Sequence[Completion]
    ) -> list[dict[str, Any]]:
        """Judges samples that have ended, and returns a row for each.

        Sample s of problem p has the number p * N + s. Its row has `problem` and `sample` (p and s), `prompt`, `right`,
        `judged` (False if the reward is None; then it counts as wrong), `answer` (as extracted; None if there is none),
        `length` in tokens, `stopped` and `completion`; with tools also `turns`, the messages of the completion.

        Args:
            numbers: The numbers of the samples.
            completions: Their completions.
        """
        rollout = rollouts.joined(completions, 1)
        values, lengths = rollouts.judge(rollout, [self.reward])[:, 0], rollout.sampled_lengths
        read = _ANSWER_READERS.get(self.reward[0], answers.stated)
        talks = rollout.conversations
        rows = []
        for i, (number, text) in enumerate(zip(numbers, rollout.texts, strict=True)):
            problem, sample = divmod(number, self.sampler.params.n)
            row = {
                "problem": problem,
                "sample": sample,
                "prompt": rollout.problems[i].prompt,
                "right": bool(values[i] >= 1),
                "judged": not np.isnan(values[i]),
                "answer": read(text),
                "length": int(lengths[i]),
                "stopped": rollout.stopped[i],
                "completion": text,
            }
            rows.append(row if talks is None else row | {"turns": list(talks[i].messages)})
        return rows

    def records(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Joins all rows of some problems, in any order, to a record for each problem, in the order of the problems.

        A record has `problem`, `prompt`, `gold`, and lists of N: `right`, `answers`, `lengths`, `stopped` and
        `completions`. `unjudged` is the number of samples that were not judged. With N > 1, `votes` are N texts that are
        equal if the reward counts the answers as the same. With tools, `turns` has N lists of messages.
        """
        ordered = sorted(rows, key=lambda row: (row["problem"], row["sample"]))
        records = []
        for of_problem in itertools.batched(ordered, self.sampler.params.n):
            first, column = of_problem[0], lambda name, rows=of_problem: [row[name] for row in rows]
            record = {
                "problem": first["problem"],
                "prompt": first["prompt"],
                "gold": self.problems[first["problem"]].columns.get("answer"),
                "right": column("right"),
                "answers": column("answer"),
                "lengths": column("length"),
                "stopped": column("stopped"),
                "unjudged": column("judged").count(False),
                "completions": column("completion"),
            }
            records.append(record | ({"turns": column("turns")} if "turns" in first else {}))
        if self.sampler.params.n > 1:
            votes = _votes(self.reward, [record["answers"] for record in records])
            records = [r | {"votes": texts} for r, texts in zip(records, votes, strict=True)]
        return records

    def __call__(
        self, variables: dict[str, Any], row_ended: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Evaluates the policy and returns metrics under `eval/`; calls `row_ended` for each row.

        These are `accuracy` (the mean over samples and problems), its standard error and, with several problems, its
        95 % interval over problems; the mean length in tokens; the fraction of truncated completions; and with N > 1
        samples pass@N and maj@N. With several hosts all must call this, and get the metrics of the first one.
        """
        rows = []
        with contextlib.closing(judged(variables, [self])) as pairs:
            for _, row in pairs:
                rows.append(row)
                row_ended()
        return self.sampler.hosts.told(lambda: self._metrics(self.records(rows)))

    def _metrics(self, records: Sequence[dict[str, Any]]) -> dict[str, float]:
        summary = summarize(records, (self.sampler.params.n,))
        (mean, *others) = summary["estimates"]
        right = np.array([record["right"] for record in records])
        # With only one problem there is no interval over problems.
        ends = ("eval/accuracy_low", "eval/accuracy_high") if mean["over_problems"] else ()
        return {
            "eval/accuracy": mean["value"],
            "eval/accuracy_stderr": float(right.mean(axis=1).std() / len(right) ** 0.5),
            **dict(zip(ends, mean["over_problems"] or (), strict=True)),
            "eval/mean_length": summary["mean_length"],
            "eval/clipped_ratio": summary["clipped_ratio"],
            **{f"eval/{estimate['name']}": estimate["value"] for estimate in others},
        }


def judged(
    variables: dict[str, Any],
    evaluators: Sequence[Evaluator],
    done: Sequence[Collection[int]] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Samples several sets as one queue, and judges samples as they end.

    Judged together is what has ended since the last call of a reward, while the device samples the others. Rewards are
    called in the caller's thread: some need the main one.

    Args:
        variables: The collections of the policy.
        evaluators: The sets. Their samplers have the same engine, and differ only in the number of samples.
        done: For each set the numbers of samples that are left out (see `Evaluator.judge`); None for none.

    Returns:
        An iterator over pairs: the index of a set, and the row of a sample. Of several hosts only the first one gets any;
        the others end when sampling has ended.
    """
    sampler, hosts = evaluators[0].sampler, evaluators[0].sampler.hosts
    problems, keys, numbers = [], [], []
    for index, evaluator in enumerate(evaluators):
        n, left_out = evaluator.sampler.params.n, done[index] if done else ()
        all_keys = row_keys(evaluator.key, len(evaluator.problems), n)
        for number, problem in enumerate(evaluator.problems):
            samples = [s for s in range(n) if number * n + s not in left_out]
            if samples:
                problems.append(problem)
                keys.append(all_keys[number, samples])
                numbers += [(index, number * n + sample) for sample in samples]
    if not problems:
        return
    begins = [
        scoring.beginner([e.reward] if hosts.leads else [], e.problems, e.sampler.params.n)
        for e in evaluators
    ]

    def on_text(row: int, text: str) -> None:
        index, number = numbers[row]
        if (begin := begins[index]) is not None:
            begin(number, text)

    rows = sum(evaluator.num_rows for evaluator in evaluators)
    sample = lambda: sampler.ask(variables, problems, keys, rows=rows, on_text=on_text)
    with contextlib.closing(_as_they_end(sample)) as batches:
        for completions in batches:
            of_sets: dict[int, list[Completion]] = {}
            for completion in completions if hosts.leads else ():
                of_sets.setdefault(numbers[completion.row.row][0], []).append(completion)
            for index, ended in of_sets.items():
                of_set = [numbers[completion.row.row][1] for completion in ended]
                for row in evaluators[index].judge(of_set, ended):
                    yield index, row


def _as_they_end(sample: Callable[[], Iterator[Completion]]) -> Iterator[list[Completion]]:
    """Iterates over completions in a thread, and yields lists of all that have ended since the last one."""
    results: queue.SimpleQueue[Completion | None] = queue.SimpleQueue()  # None comes last
    is_over = threading.Event()

    def drive() -> None:
        try:
            with contextlib.closing(sample()) as completions:
                for completion in completions:
                    if is_over.is_set():
                        return
                    results.put(completion)
        finally:
            results.put(None)

    with ThreadPoolExecutor(1, thread_name_prefix="evaluation") as thread:
        sampling, ended = thread.submit(drive), list[Completion | None]()
        try:
            while None not in ended:
                ended = []
                # With a time limit, because Python's handlers of signals do not run while this thread waits.
                with contextlib.suppress(queue.Empty):
                    ended.append(results.get(timeout=_LOOK_SECONDS))
                    while True:
                        ended.append(results.get_nowait())
                yield [one for one in ended if one is not None and not _is_abandoned(one)]
        finally:
            is_over.set()
        sampling.result()


def _is_abandoned(completion: Completion) -> bool:
    """Whether the conversation of a row was given up, because sampling has failed; waits for its end."""
    try:
        return completion.text is None
    except CancelledError:
        return True


def reward_of(
    name: str,
    options: Mapping[str, Mapping[str, Any]] | None,
    toolboxes: Toolboxes | None = None,
    *,
    field: str = "eval.reward",
) -> scoring.Named:
    """Returns a reward function by name, with the name: that of `scoring.resolve`, or of an environment's own reward.

    `field` is the name of the field that holds the name, for errors; the others, and errors, are as for `resolve`.
    """
    rewards = {} if toolboxes is None else dict(toolboxes.own_rewards())
    return (name, rewards[name]) if name in rewards else scoring.resolve([name], options, field)[0]


def try_reward(
    reward: scoring.Named,
    problems: Sequence[datasets.Problem],
    toolboxes: Toolboxes | None = None,
    **named: str,
) -> None:
    """Checks a reward function by calling it on the first two problems; see `scoring.check`."""
    trial = problems[:2]
    extras = {} if toolboxes is None else toolboxes.extras(len(trial))
    scoring.check([reward], trial, extras, **named)


def _votes(reward: scoring.Named, texts: Sequence[Sequence[str | None]]) -> list[list[str | None]]:
    """Returns the votes of [problems][N] answers, which are equal if the reward counts two answers as the same."""
    name, function = reward
    if hasattr(function, "votes"):
        return function.votes(texts)
    form = _VOTE_FORMS.get(name, answers.canonical)
    return [[None if text is None else form(text) for text in row] for row in texts]


def protocol_of_run(cfg: RunConfig) -> Protocol:
    """Returns the protocol of a run's `[eval]` section, with the prompt, the length and the tools of the run."""
    longest, stop = cfg.rollout.max_completion_length, cfg.rollout.stop or ()
    ends = {"stop": stop, "stop_token_ids": cfg.rollout.stop_token_ids or ()}
    sampling = from_section(cfg.eval, max_tokens=longest, **ends, drafts=cfg.drafts)
    prompt = datasets.system_prompt(cfg.data), cfg.data.prompt_template
    return Protocol(cfg.eval.reward, sampling, *prompt, cfg.tools)


def _held_out_problems(
    cfg: RunConfig, tokenizer: Tokenizer, tools: Tools | None, log: Callable[[str], None]
) -> Sequence[datasets.Problem]:
    """Loads the problems of the `[eval]` section whose prompts are short enough."""
    source, held_out = cfg.data, cfg.eval
    if held_out.dataset is not None:
        other = {"dataset": held_out.dataset, "path": held_out.path, "name": None, "columns": None}
        prompt = datasets.system_prompt(source)
        source = dataclasses.replace(
            source, **other, system_prompt=prompt, max_prompt_characters=None
        )
    how = {"split": held_out.split, "seed": cfg.seed, "num_problems": held_out.num_problems}
    limits = {"max_prompt_length": source.max_prompt_length, "overlong": source.overlong_prompts}
    problems = datasets.from_config(source, **how)
    return admit(problems, tokenizer, **limits, tools=tools, what="held-out prompts", log=log)
