"""Accuracy of a policy on problems it was not trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from qerl_jax import rollouts
from qerl_jax.data import Problem
from qerl_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A set of problems, how completions are sampled and what counts as right.

    Attributes:
        generate: From `sampling.make_generate`, one generation per prompt.
        tokenizer: Of the policy.
        problems: Held out from training.
        reward: (name, function); a completion is right where it gives 1.
        batch_size: Problems sampled together.
        max_prompt_length: Width of the padded prompts.
        temperature: 0 is greedy.
        key: The same at every call, so that two policies meet the same luck.
    """

    generate: Callable[..., Any]
    tokenizer: Tokenizer
    problems: Sequence[Problem]
    reward: tuple[str, Callable[..., Any]]
    batch_size: int
    max_prompt_length: int
    temperature: float
    key: jax.Array

    def __call__(self, variables: dict[str, Any]) -> dict[str, float]:
        """Metrics `eval/accuracy`, its standard error, and the mean length of the completions."""
        scores, lengths = [], []
        for start in range(0, len(self.problems), self.batch_size):
            problems = list(self.problems[start : start + self.batch_size])
            wanted = len(problems)
            # The last batch is filled up with repeats: one shape, one compilation.
            problems += [problems[-1]] * (min(self.batch_size, len(self.problems)) - wanted)
            rollout = rollouts.collect(
                self.generate,
                variables,
                self.tokenizer,
                problems,
                jax.random.fold_in(self.key, start),
                num_generations=1,
                max_prompt_length=self.max_prompt_length,
                temperature=self.temperature,
            )
            rewards, _ = rollouts.score(rollout, [self.reward], None)
            scores.append(rewards[:wanted, 0])
            lengths.append(rollout.lengths[:wanted])
        right = np.concatenate(scores) == 1.0
        accuracy = float(right.mean())
        return {
            "eval/accuracy": accuracy,
            "eval/accuracy_stderr": (accuracy * (1 - accuracy) / len(right)) ** 0.5,
            "eval/mean_length": float(np.concatenate(lengths).mean()),
        }
