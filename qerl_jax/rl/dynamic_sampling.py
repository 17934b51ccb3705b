"""Dynamic sampling: samples in rounds until enough groups are informative, and tracks the position in the data.

Groups that wait for a later update are of two kinds, and in one `Supply`: scored ones that this update did not need, and
open ones, whose rows may go on (`open_groups`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation.prompts import encode
from qerl_jax.rl import grpo, rollouts
from qerl_jax.rl.open_groups import OpenGroup, version_runs, versions_of
from qerl_jax.tools.conversations import Conversation

# The fields of a rollout with one entry per problem; the others have one per completion.
_PER_PROBLEM = ("problems", "prompt_ids")


@dataclasses.dataclass(frozen=True)
class Supply:
    """The position of a run in its data, and left-over groups: state that cannot be computed from the step.

    Attributes:
        drawn: Number of problems sampled so far.
        surplus: Informative groups that the last rollout did not need, fewer than a rollout has; or None.
        open_groups: Groups that were not scored yet, because some rows go on or older groups came first.
    """

    drawn: int = 0
    surplus: rollouts.Scored | None = None
    open_groups: tuple[OpenGroup, ...] = ()

    @property
    def scored(self) -> int:
        """The number of problems whose groups were scored so far."""
        return self.drawn - len(self.open_groups)

    def to_table(self) -> dict[str, Any]:
        """Returns the data for a checkpoint, as plain JSON values; problems are stored as positions in the data."""
        table: dict[str, Any] = {"drawn": self.drawn}
        if self.open_groups:
            table["open_groups"] = [group.to_table() for group in self.open_groups]
        if self.surplus is None:
            return table
        rollout = self.surplus.rollout
        talks, masks = rollout.conversations, rollout.observation_mask
        columns: dict[str, list[Any]] = {
            "completion": [ids.tolist() for ids in rollout.completion_ids],
            "logps": [logps.tolist() for logps in rollout.behaviour_logps],
            "stopped": list(rollout.stopped),
            "per_function": _without_nan(self.surplus.per_function),
        }
        if rollout.entropies:
            columns["entropy"] = list(rollout.entropies)
        if rollout.versions:
            columns["versions"] = [version_runs(versions) for versions in rollout.versions]
        table["positions"] = self.surplus.positions.tolist()
        if talks and masks:
            columns |= {"given": [mask.tolist() for mask in masks]}
            columns |= {"talk": [dataclasses.asdict(talk) for talk in talks]}
            # An environment's first observation is not part of the data, so prompts with tools are stored.
            table["prompts"] = [ids.tolist() for ids in rollout.prompt_ids]
        rows = zip(*columns.values(), strict=True)
        rewards = _without_nan(self.surplus.rewards)
        return table | {
            "rewards": rewards,
            "rows": [dict(zip(columns, row, strict=True)) for row in rows],
        }

    @classmethod
    def from_table(
        cls, table: dict[str, Any], problem_at: Callable[[int], Problem], tokenizer: Tokenizer
    ) -> Self:
        """Restores what `to_table` returned, bit for bit.

        Args:
            table: The result of `to_table`.
            problem_at: Returns the problem at a position in the order of the data.
            tokenizer: The policy's tokenizer.
        """
        groups = table.get("open_groups", ())
        open_groups = tuple(OpenGroup.from_table(group, problem_at) for group in groups)
        if "rows" not in table:
            return cls(table["drawn"], None, open_groups)
        rows, masks, talks = table["rows"], None, None
        problems = tuple(problem_at(position) for position in table["positions"])
        arrays = lambda values, dtype: tuple(np.array(value, dtype) for value in values)
        column = lambda name: tuple(row[name] for row in rows)
        if "prompts" not in table:
            prompts = encode(problems, tokenizer)
            texts = tuple(map(tokenizer.decode, column("completion")))
        else:
            prompts = arrays(table["prompts"], np.int32)
            masks = arrays(column("given"), bool)
            talks = tuple(
                Conversation(**talk | {"messages": tuple(talk["messages"])})
                for talk in column("talk")
            )
            texts = tuple(talk.text for talk in talks)
        rollout = rollouts.Rollout(
            problems,
            prompts,
            texts,
            completion_ids=arrays(column("completion"), np.int32),
            behaviour_logps=arrays(column("logps"), np.float32),
            stopped=column("stopped"),
            entropies=column("entropy") if "entropy" in rows[0] else None,
            observation_mask=masks,
            conversations=talks,
            versions=tuple(map(versions_of, column("versions"))) if "versions" in rows[0] else None,
        )
        scored = (table["positions"], table["rewards"], column("per_function"))
        dtypes = (np.int32, np.float32, np.float32)
        surplus = rollouts.Scored(rollout, *map(np.array, scored, dtypes))
        return cls(table["drawn"], surplus, open_groups)


def by_reward(scored: rollouts.Scored) -> np.ndarray:
    """Marks the informative groups, bool [P]: those whose rewards are not all equal."""
    return np.asarray(grpo.informative(scored.rewards))


def by_functions(weights: Mapping[int, float]) -> Callable[[rollouts.Scored], np.ndarray]:
    """Makes a function that marks the groups, bool [P], whose completions differ in the weighted sum of some rewards.

    Completions for which all of these functions abstained are not compared.

    Args:
        weights: Weight of each reward function that is used, by its index among all functions.
    """
    columns, factors = list(weights), np.array(list(weights.values()), np.float32)

    def informative(scored: rollouts.Scored) -> np.ndarray:
        values = grpo.combine_rewards(scored.per_function[:, columns], factors)
        return np.asarray(grpo.informative(np.asarray(values).reshape(scored.rewards.shape)))

    return informative


def gather(
    sample: Callable[[Supply], tuple[rollouts.Scored, Supply]],
    supply: Supply,
    *,
    max_rounds: int | None,
    carries_over: bool = True,
    informative: Callable[[rollouts.Scored], np.ndarray] = by_reward,
) -> tuple[rollouts.Scored, rollouts.Scored, Supply, dict[str, float]]:
    """Samples in rounds until there are enough informative groups for a rollout (DAPO, arXiv:2503.14476).

    Groups left over from the last rollout come first, and the surplus of this one is kept for the next. So no group
    waits for more than one rollout. After `max_rounds` the batch is filled up with groups that are not informative. The
    caller must set their advantages to 0: their rewards may still differ, for example in form or length.

    Args:
        sample: sample(supply) samples and scores P groups, and returns the supply with its new position and open groups.
        supply: The position in the data, and left-over groups.
        max_rounds: The most rounds, at least 1; None makes one round and keeps all of its groups.
        carries_over: Whether a surplus is kept for the next rollout; else it is discarded.
        informative: Marks the groups of a rollout, bool [P], whose completions differ in quality; see `by_functions`.

    Returns:
        The P groups to learn from; all groups that were sampled in this call (for metrics of the policy,
        since the batch is a selection); the new supply; and metrics under `dynamic_sampling/`.
    """
    if max_rounds is None:
        scored, supply = sample(supply)
        return scored, scored, supply, {}
    fresh, waiting = [], [] if supply.surplus is None else [supply.surplus]
    for _ in range(max_rounds):
        scored, supply = sample(supply)
        fresh.append(scored)
        wanted = len(scored.positions)
        pool = join(waiting + fresh)
        good = informative(pool)
        if good.sum() >= wanted:
            break
    # Informative groups first, otherwise in the order of sampling.
    order = np.argsort(~good, kind="stable")
    surplus = order[wanted : good.sum()]
    left = surplus if carries_over else surplus[:0]
    filled = max(0, wanted - int(good.sum()))
    metrics: dict[str, float] = {
        "dynamic_sampling/rounds": len(fresh),
        "dynamic_sampling/groups_discarded": int((~good).sum()) - filled + len(surplus) - len(left),
        "dynamic_sampling/groups_filled": filled,
        "dynamic_sampling/groups_carried_over": len(left),
    }
    supply = dataclasses.replace(supply, surplus=choose(pool, left) if len(left) else None)
    return choose(pool, order[:wanted]), join(fresh), supply, metrics


def _without_nan(values: np.ndarray) -> list[Any]:
    """Returns the values as lists, with None for NaN, which JSON does not have."""
    objects = values.astype(object)
    objects[np.isnan(values)] = None
    return objects.tolist()


def choose(scored: rollouts.Scored, groups: Sequence[int] | np.ndarray) -> rollouts.Scored:
    """Returns the groups with the given indices, in that order."""
    groups, size = np.asarray(groups, int), scored.rollout.num_generations
    rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
    rollout = {
        name: tuple(values[i] for i in (groups if name in _PER_PROBLEM else rows))
        for name, values in vars(scored.rollout).items()
        if values is not None
    }
    per_function, positions = scored.per_function[rows], scored.positions[groups]
    return rollouts.Scored(
        rollouts.Rollout(**rollout), positions, scored.rewards[groups], per_function
    )


def join(parts: Sequence[rollouts.Scored]) -> rollouts.Scored:
    """Concatenates the groups of several rollouts, in order."""
    columns: dict[str, Any] = {
        name: None if first is None else sum((getattr(part.rollout, name) for part in parts), ())
        for name, first in vars(parts[0].rollout).items()
    }
    names = ("positions", "rewards", "per_function")
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    return rollouts.Scored(rollouts.Rollout(**columns), *arrays)
