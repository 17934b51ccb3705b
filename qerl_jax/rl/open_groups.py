"""Groups of completions that no update has used yet: rows that have not ended go on in the next rollout.

This is `rollout.carry`. A row that goes on keeps its tokens, their log-probabilities and its key. Its keys and values are
computed anew under the policy of the next rollout, so each token has one policy: the one that sampled it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation.prompts import encode
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.scheduler import RowTokens
from qerl_jax.rl import rollouts


@dataclasses.dataclass(frozen=True, eq=False)
class OpenGroup:
    """A problem and its G completions so far.

    Attributes:
        position: The position of the problem in the order of the data.
        problem: The problem.
        keys: uint32 [G, ...], key data of the completions.
        rows: The completions, with entropies; at first without a token.
        versions: For each completion int32 [tokens]: how many optimizer steps the policy had done that sampled a token.
    """

    position: int
    problem: Problem
    keys: np.ndarray
    rows: tuple[RowTokens, ...]
    versions: tuple[np.ndarray, ...]

    @classmethod
    def new(cls, position: int, problem: Problem, keys: np.ndarray) -> Self:
        """Returns a group without tokens."""
        none, values = np.zeros(0, np.int32), np.zeros(0, np.float32)
        rows = tuple(RowTokens(row, none, values, None, values) for row in range(len(keys)))
        return cls(position, problem, keys, rows, (none,) * len(keys))

    @property
    def has_begun(self) -> bool:
        """Whether any completion has tokens."""
        return any(len(row.tokens) for row in self.rows)

    @property
    def unfinished(self) -> list[int]:
        """The indices of the completions that have not ended."""
        return [index for index, row in enumerate(self.rows) if row.ended is None]

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all completions."""
        return sum(len(row.tokens) for row in self.rows)

    def after(self, sampled: Mapping[int, RowTokens], version: int) -> Self:
        """Returns the group with the completions that were sampled further, by their indices, by policy `version`."""
        rows = tuple(sampled.get(index, row) for index, row in enumerate(self.rows))
        versions = tuple(
            np.pad(known, (0, len(row.tokens) - len(known)), constant_values=version)
            for known, row in zip(self.versions, rows, strict=True)
        )
        return dataclasses.replace(self, rows=rows, versions=versions)

    def to_table(self) -> dict[str, Any]:
        """Returns the group for a checkpoint, as plain JSON values; the problem is stored as its position."""
        rows = [
            {
                "tokens": row.tokens.tolist(),
                "logps": row.behaviour_logps.tolist(),
                "entropies": np.asarray(row.entropies).tolist(),
                "ended": row.ended,
                "versions": version_runs(versions),
            }
            for row, versions in zip(self.rows, self.versions, strict=True)
        ]
        return {"position": self.position, "keys": self.keys.tolist(), "rows": rows}

    @classmethod
    def from_table(cls, table: Mapping[str, Any], problem_at: Callable[[int], Problem]) -> Self:
        """Restores what `to_table` returned, bit for bit; `problem_at` returns the problem at a position."""
        rows = tuple(
            RowTokens(
                index,
                np.array(row["tokens"], np.int32),
                np.array(row["logps"], np.float32),
                row["ended"],
                np.array(row["entropies"], np.float32),
            )
            for index, row in enumerate(table["rows"])
        )
        versions = tuple(versions_of(row["versions"]) for row in table["rows"])
        keys = np.array(table["keys"], np.uint32)
        return cls(table["position"], problem_at(table["position"]), keys, rows, versions)


def version_runs(versions: np.ndarray) -> list[list[int]]:
    """Returns the versions of a completion's tokens, int32 [tokens], which only grow, as pairs (version, tokens)."""
    return np.stack(np.unique(versions, return_counts=True), axis=1).tolist()


def versions_of(runs: Sequence[Sequence[int]]) -> np.ndarray:
    """Returns what `version_runs` was called with."""
    values, counts = np.array(runs, np.int32).reshape(-1, 2).T
    return np.repeat(values, counts)


def sample(
    sampler: Sampler,
    variables: dict[str, Any],
    groups: Sequence[OpenGroup],
    version: int,
    *,
    on_text: Callable[[int, str], None] | None = None,
    **limits: Any,
) -> list[OpenGroup]:
    """Samples the completions of groups that have not ended, until few enough are left.

    Completions of a new group share the prefill of their prompt; one that has begun is prefilled with its tokens.

    Args:
        sampler: Samples them; it has entropies, and no tools.
        variables: `params`, `frozen` and, under AQN, `noise` vectors for all rows.
        groups: The groups; G completions each.
        version: The number of optimizer steps that the policy has done.
        on_text: Called as on_text(row, text) when a row has ended; row r is completion r % G of group r // G.
        **limits: See `Sampler.ask`; `leave` is how many rows may be left.

    Returns:
        The groups in the same order, with all tokens so far.
    """
    begun = [
        (i, [row]) for i, group in enumerate(groups) if group.has_begun for row in group.unfinished
    ]
    new = [(i, group.unfinished) for i, group in enumerate(groups) if not group.has_begun]
    parts = begun + new
    indices = [(i, row) for i, rows in parts for row in rows]
    numbers = [i * len(groups[i].rows) + row for i, row in indices]
    completions = sampler.ask(
        variables,
        [groups[i].problem for i, _ in parts],
        [groups[i].keys[rows] for i, rows in parts],
        begun=[*(groups[i].rows[row] for i, (row,) in begun), *[None] * len(new)],
        on_text=on_text and (lambda row, text: on_text(numbers[row], text)),
        **limits,
    )
    sampled: list[dict[int, RowTokens]] = [{} for _ in groups]
    for completion in completions:
        i, row = indices[completion.row.row]
        sampled[i][row] = dataclasses.replace(completion.row, row=row)
    return [group.after(rows, version) for group, rows in zip(groups, sampled, strict=True)]


def to_rollout(groups: Sequence[OpenGroup], tokenizer: Tokenizer) -> rollouts.Rollout:
    """Returns the completions of groups, of which those that have not ended count as truncated."""
    problems, rows = tuple(group.problem for group in groups), [r for g in groups for r in g.rows]
    return rollouts.Rollout(
        problems,
        encode(problems, tokenizer),
        tuple(tokenizer.decode(row.tokens.tolist()) for row in rows),
        **rollouts.columns(rows),
        versions=tuple(versions for group in groups for versions in group.versions),
    )


def metrics(
    groups: Sequence[OpenGroup], learned: rollouts.Rollout, version: int
) -> dict[str, float]:
    """Returns metrics under `carry/`: of groups that are left, and of the age of the tokens that are learned from.

    `version` is the number of optimizer steps that the policy has done.
    """
    rows = [group.rows[index] for group in groups for index in group.unfinished]
    ages = version - np.concatenate(learned.versions or [])
    return {
        "carry/rows": len(rows),
        "carry/tokens": sum(len(row.tokens) for row in rows),
        "carry/groups_waiting": sum(not group.unfinished for group in groups),
        "carry/age": float(ages.mean()),
        "carry/age_max": int(ages.max()),
    }
