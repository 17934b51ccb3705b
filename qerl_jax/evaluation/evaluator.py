"""Measures the accuracy of a policy on problems, which are sampled and judged in batches of one shape.

Policies before and after training get the same prompts, the same sampler and the same reward function.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from qerl_jax.generation.sampler import Sampler
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


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A set of problems, a sampler of completions, and the reward function that judges them.

    Attributes:
        sampler: Samples completions; temperature 0 is greedy.
        problems: The P problems, usually held out from training.
        reward: (name, function); a completion is right if the function gives at least 1.
        batch_size: Number of problems sampled together.
        key: Random key. The random numbers of a sample depend only on this key and the index of the sample. So two
            policies are sampled with the same random numbers, with any batch size.
    """

    sampler: Sampler
    problems: Sequence[datasets.Problem]
    reward: scoring.Named
    batch_size: int
    key: jax.Array

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
    ) -> Self | None:
        """Builds the evaluator of a run's `[eval]` section; None where there is none.

        Batches, cache, drafts and what ends a completion are those of a rollout. `log` is called with a line if problems
        are dropped; `poll` is that of `Engine`.

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
        }
        sampler = Sampler.of(
            *(model, tokenizer, protocol_of_run(cfg).sampling, EngineLimits.of(cfg.rollout)),
            max_prompt_length=cfg.data.max_prompt_length,
            **options,
        )
        return cls(sampler, problems, reward, cfg.eval.batch_size, key)

    def records(
        self, variables: dict[str, Any], start: int = 0, *, voting: bool = True
    ) -> Iterator[list[dict[str, Any]]]:
        """Samples and judges problems from number `start` on; yields a list of records for each batch.

        The record of a problem with N samples has `problem` (its index), `prompt`, `gold`, and lists of N: `right`,
        `answers` (as extracted; None if there is none), `lengths` in tokens, `stopped` and `completions`. `unjudged`
        is the number of samples for which the reward is None; they count as wrong. With `voting` and N > 1, `votes`
        are N texts that are equal if the reward counts the answers as the same. With tools, `turns` are the messages
        of each completion.

        Args:
            variables: The collections of the policy.
            start: Index of the first problem.
            voting: Whether to compute `votes`.
        """
        size, group = min(self.batch_size, len(self.problems)), self.sampler.params.n
        hosts = self.sampler.hosts
        for first in range(start, len(self.problems), size):
            problems = self.problems[first : first + size]
            # The last batch is padded with repeated problems, so that only one shape is compiled.
            repeats = [problems[-1]] * (size - len(problems))
            rollout = rollouts.collect(
                self.sampler,
                variables,
                filled := [*problems, *repeats],
                self.key,
                first_row=first * group,
                on_text=scoring.beginner([self.reward] if hosts.leads else [], filled, group),
            )
            _, values = rollouts.score(rollout, [self.reward], None, hosts=hosts)
            records = [self._record(first, i, rollout, values[:, 0]) for i in range(len(problems))]
            if voting and group > 1:
                votes = _votes(self.reward, [record["answers"] for record in records])
                records = [r | {"votes": texts} for r, texts in zip(records, votes, strict=True)]
            yield records

    def _record(self, first: int, index: int, rollout: rollouts.Rollout, values: np.ndarray):
        """Makes the record of problem `index` of a batch that begins with problem `first`; `values`: rewards [B]."""
        group = self.sampler.params.n
        rows = slice(index * group, (index + 1) * group)
        read = _ANSWER_READERS.get(self.reward[0], answers.stated)
        problem, talks = rollout.problems[index], rollout.conversations
        turns = {} if talks is None else {"turns": [list(talk.messages) for talk in talks[rows]]}
        return {
            "problem": first + index,
            "prompt": problem.prompt,
            "gold": problem.columns.get("answer"),
            "right": (values[rows] >= 1).tolist(),
            "answers": [read(text) for text in rollout.texts[rows]],
            "lengths": rollout.sampled_lengths[rows].tolist(),
            "stopped": list(rollout.stopped[rows]),
            "unjudged": int(np.isnan(values[rows]).sum()),
            "completions": list(rollout.texts[rows]),
            **turns,
        }

    def __call__(self, variables: dict[str, Any]) -> dict[str, float]:
        """Evaluates the policy and returns metrics under `eval/`.

        These are `accuracy` (the mean over samples and problems), its standard error and, with several problems, its
        95 % interval over problems; the mean length in tokens; the fraction of truncated completions; and with N > 1
        samples pass@N and maj@N.
        """
        records = [record for batch in self.records(variables) for record in batch]
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
