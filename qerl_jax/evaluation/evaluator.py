"""The accuracy of a policy on problems: sampled and judged in batches of one shape.

Base and adapter, before and after training, get the same prompts, the same sampler and the same judge.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from qerl_jax.config import Drafts, RunConfig
from qerl_jax.data import answers, datasets, verl_answers
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.evaluation.protocols import Protocol
from qerl_jax.evaluation.summary import summarize
from qerl_jax.generation.conversations import Tools
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.fleet import engine_of
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.mesh import Replicas
from qerl_jax.model.transformer import Transformer
from qerl_jax.rewards import scoring
from qerl_jax.rewards.environments import Toolboxes
from qerl_jax.rl import rollouts

# How each reward finds the answer of a text; other rewards may read any form.
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
# The form in which each reward compares texts; for others, and where a reward says it itself, see `_votes`.
_VOTE_FORMS = {
    "dapo_reward": answers.minerva_form,
    "verl_aime_reward": answers.minerva_form,
    "verl_gsm8k_flexible_reward": str,
    "verl_gsm8k_reward": str,
    "verl_math_reward": verl_answers.hendrycks_vote,
}


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A set of problems, how completions are sampled and what counts as right.

    Attributes:
        sampler: How completions are sampled; temperature 0 is greedy.
        problems: P of them, held out from training.
        reward: (name, function); a completion is right where it gives at least 1.
        batch_size: Problems sampled together.
        key: The randomness of a sample depends only on this key and on the sample's index. So two policies
            are sampled with the same random numbers, in batches of any size.
    """

    sampler: rollouts.Sampler
    problems: Sequence[datasets.Problem]
    reward: scoring.Named
    batch_size: int
    key: jax.Array

    @classmethod
    def of_protocol(
        cls,
        model: Transformer,
        tokenizer: Tokenizer,
        problems: Sequence[datasets.Problem],
        reward: scoring.Named,
        protocol: Protocol,
        *,
        batch_size: int,
        max_prompt_length: int,
        key: jax.Array,
        max_concurrent: int | None,
        tools: Tools | None = None,
        replicas: Replicas = Replicas(),
        drafts: Drafts = "auto",
        **cache: Any,
    ) -> Self:
        """Builds an evaluator that samples as a protocol says.

        Args:
            model: The policy.
            tokenizer: See the attributes of the class, as for `problems`, `reward`, `batch_size`,
                `max_prompt_length` and `key`.
            problems: See above.
            reward: The protocol's reward function.
            protocol: How completions are sampled.
            batch_size: See above.
            max_prompt_length: See above.
            key: See above.
            max_concurrent: Rows sampled at a time; None means all of a batch.
            tools: What the policy may call.
            replicas: The devices that sample.
            drafts: See `RolloutConfig`.
            **cache: `compact`, `kv_cache_tokens`, `kv_cache_fraction` and `poll` of `Engine`.
        """
        how = SamplingParams(
            top_k=protocol.top_k,
            top_p=protocol.top_p,
            min_p=protocol.min_p,
            stop=protocol.stop or (),
            drafts=drafts,
        )
        sampler = rollouts.Sampler(
            engine_of(Engine.of(model, tokenizer, how, **cache), replicas),
            tokenizer,
            num_generations=protocol.num_generations,
            max_prompt_length=max_prompt_length,
            max_completion_length=protocol.max_completion_length,
            temperature=protocol.temperature,
            max_concurrent=max_concurrent,
            tools=tools,
            hosts=replicas.hosts,
        )
        return cls(sampler, problems, reward, batch_size, key)

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

        Batches, cache, drafts and stop strings are those of a rollout.

        Args:
            cfg: The run.
            model: The policy.
            tokenizer: The policy's tokenizer.
            key: See the attributes of the class.
            log: Is told how many problems are left out.
            poll: See `Engine`.
            tools: What the policy may call.
            replicas: The devices that sample.

        Raises:
            ValueError: For problems or a reward that cannot be used.
        """
        if cfg.eval is None:
            return None
        problems = _held_out_problems(cfg, tokenizer, tools, log)
        boxes = tools and tools.toolboxes
        reward = reward_of(cfg.eval.reward, cfg.rewards.options, boxes)
        try_reward(reward, problems, boxes)
        if tools is not None:
            rollouts.begun(tools, problems[:2], tokenizer, cfg.data.max_prompt_length)
        return cls.of_protocol(
            model,
            tokenizer,
            problems,
            reward,
            protocol_of_run(cfg),
            batch_size=cfg.eval.batch_size,
            max_prompt_length=cfg.data.max_prompt_length,
            key=key,
            max_concurrent=cfg.rollout.max_concurrent,
            tools=tools,
            replicas=replicas,
            drafts=cfg.drafts,
            compact=cfg.rollout.compact,
            kv_cache_tokens=cfg.rollout.kv_cache_tokens,
            kv_cache_fraction=cfg.rollout.kv_cache_fraction,
            poll=poll,
        )

    def records(
        self, variables: dict[str, Any], start: int = 0, *, voting: bool = True
    ) -> Iterator[list[dict[str, Any]]]:
        """Samples and judges a batch at a time, from problem `start` on; gives an object per problem.

        Each has `problem` (its index), `prompt`, `gold`, and lists of N: `right`, `answers` (as
        parsed, None where there is none), `lengths` in tokens, `stopped`, `completions`; and `unjudged`,
        how many the reward abstained on: they count as wrong. With `voting` and N > 1 it also has
        `votes`, N texts that are equal where the reward calls the answers the same; with tools `turns`,
        the messages of each completion.
        """
        size, group = min(self.batch_size, len(self.problems)), self.sampler.num_generations
        hosts = self.sampler.hosts
        for first in range(start, len(self.problems), size):
            problems = self.problems[first : first + size]
            # Repeats fill up the last batch, so that all have one shape and one compilation.
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
            found = [self._record(first, i, rollout, values[:, 0]) for i in range(len(problems))]
            if voting and group > 1:
                votes = _votes(self.reward, [record["answers"] for record in found])
                found = [r | {"votes": each} for r, each in zip(found, votes, strict=True)]
            yield found

    def _record(self, first: int, index: int, rollout: rollouts.Rollout, values: np.ndarray):
        """The record of a problem: its index in the batch, whose first problem is `first`; rewards [B]."""
        group = self.sampler.num_generations
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
        """Measures accuracy (the mean over samples and problems) as metrics under `eval/`.

        Beside it are its standard error and, of several problems, its 95 % interval over these, mean length,
        the share of truncated completions, and where there are N > 1 samples pass@N and maj@N.
        """
        records = [record for batch in self.records(variables) for record in batch]
        summary = summarize(records, (self.sampler.num_generations,))
        (mean, *others) = summary["estimates"]
        right = np.array([record["right"] for record in records])
        # One problem alone says nothing of others.
        ends = ("eval/accuracy_low", "eval/accuracy_high") if mean["over_problems"] else ()
        return {
            "eval/accuracy": mean["value"],
            "eval/accuracy_stderr": float(right.mean(axis=1).std() / len(right) ** 0.5),
            **dict(zip(ends, mean["over_problems"] or (), strict=True)),
            "eval/mean_length": summary["mean_length"],
            "eval/clipped_ratio": summary["clipped_ratio"],
            **{f"eval/{each['name']}": each["value"] for each in others},
        }


def reward_of(
    name: str,
    options: Mapping[str, Mapping[str, Any]] | None,
    toolboxes: Toolboxes | None = None,
    *,
    field: str = "eval.reward",
) -> scoring.Named:
    """The reward function of a name: one that `scoring.resolve` finds, or an environment's own by its class.

    `field` is what errors call the name.
    """
    own = {} if toolboxes is None else dict(toolboxes.own_rewards())
    return (name, own[name]) if name in own else scoring.resolve([name], options, field)[0]


def try_reward(
    reward: scoring.Named,
    problems: Sequence[datasets.Problem],
    toolboxes: Toolboxes | None = None,
) -> None:
    """Calls a reward function on the first problems, as `scoring.check` does."""
    trial = problems[:2]
    scoring.check([reward], trial, {} if toolboxes is None else toolboxes.extras(len(trial)))


def _votes(reward: scoring.Named, given: Sequence[Sequence[str | None]]) -> list[list[str | None]]:
    """Votes of [problems][N] answers, which are equal where the reward calls answers the same."""
    name, function = reward
    if hasattr(function, "votes"):
        return function.votes(given)
    form = _VOTE_FORMS.get(name, answers.canonical)
    return [[None if text is None else form(text) for text in row] for row in given]


def protocol_of_run(cfg: RunConfig) -> Protocol:
    """The protocol under which a run is evaluated: its own prompt, sampling, length and reward."""
    return Protocol(
        cfg.eval.reward,
        cfg.eval.num_generations,
        cfg.eval.temperature,
        cfg.eval.top_p,
        max_completion_length=cfg.rollout.max_completion_length,
        system_prompt=datasets.system_prompt(cfg.data),
        prompt_template=cfg.data.prompt_template,
        stop=cfg.rollout.stop,
        tools=cfg.tools,
    )


def _held_out_problems(
    cfg: RunConfig, tokenizer: Tokenizer, tools: Tools | None, log: Callable[[str], None]
) -> Sequence[datasets.Problem]:
    """The problems of the `[eval]` section whose prompts fit."""
    source = cfg.data
    if cfg.eval.dataset is not None:
        source = dataclasses.replace(
            cfg.data,
            dataset=cfg.eval.dataset,
            path=cfg.eval.path,
            name=None,
            columns=None,
            system_prompt=datasets.system_prompt(cfg.data),
            max_prompt_characters=None,
        )
    return rollouts.admit(
        datasets.from_config(
            source, split=cfg.eval.split, seed=cfg.seed, num_problems=cfg.eval.num_problems
        ),
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        overlong=cfg.data.overlong_prompts,
        tools=tools,
        what="held-out prompts",
        log=log,
    )
