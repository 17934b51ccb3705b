"""Dynamic sampling: samples in rounds until enough groups are informative, and tracks the position in the data."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation.prompts import encode
from qerl_jax.rl import grpo, rollouts
from qerl_jax.tools.conversations import Conversation

# The fields of a rollout with one entry per problem; the others have one per completion.
_PER_PROBLEM = ("problems", "prompt_ids")


@dataclasses.dataclass(frozen=True)
class Supply:
    """The position of a run in its data, and left-over groups: state that cannot be computed from the step.

    Attributes:
        drawn: Number of problems sampled so far.
        surplus: Informative groups that the last rollout did not need, fewer than a rollout has; or None.
    """

    drawn: int = 0
    surplus: rollouts.Scored | None = None

    def to_table(self) -> dict[str, Any]:
        """Returns the data for a checkpoint, as plain JSON values; problems are stored as positions in the data."""
        if self.surplus is None:
            return {"drawn": self.drawn}
        rollout = self.surplus.rollout
        talks, masks = rollout.conversations, rollout.observation_mask
        rows: list[dict[str, Any]] = []
        for i, ids in enumerate(rollout.completion_ids):
            rows.append(
                {
                    "completion": ids.tolist(),
                    "logps": rollout.behaviour_logps[i].tolist(),
                    "stopped": rollout.stopped[i],
                    "per_function": _without_nan(self.surplus.per_function[i]),
                }
            )
            if rollout.entropies:
                rows[i]["entropy"] = rollout.entropies[i]
            if talks and masks:
                rows[i] |= {"given": masks[i].tolist(), "talk": dataclasses.asdict(talks[i])}
        # An environment's first observation is not part of the data, so prompts with tools are stored.
        prompts = {"prompts": [ids.tolist() for ids in rollout.prompt_ids]} if talks else {}
        return prompts | {
            "drawn": self.drawn,
            "positions": self.surplus.positions.tolist(),
            "rewards": _without_nan(self.surplus.rewards),
            "rows": rows,
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
        if "rows" not in table:
            return cls(table["drawn"])
        rows = table["rows"]
        problems = tuple(problem_at(position) for position in table["positions"])
        completions = tuple(np.array(row["completion"], np.int32) for row in rows)
        observation_mask = talks = None
        if "prompts" not in table:
            prompts = encode(problems, tokenizer)
            texts = tuple(tokenizer.decode(row["completion"]) for row in rows)
        else:
            prompts = tuple(np.array(ids, np.int32) for ids in table["prompts"])
            observation_mask = tuple(np.array(row["given"], bool) for row in rows)
            talks = tuple(
                Conversation(**row["talk"] | {"messages": tuple(row["talk"]["messages"])})
                for row in rows
            )
            texts = tuple(talk.text for talk in talks)
        rollout = rollouts.Rollout(
            problems=problems,
            prompt_ids=prompts,
            texts=texts,
            completion_ids=completions,
            behaviour_logps=tuple(np.array(row["logps"], np.float32) for row in rows),
            stopped=tuple(row["stopped"] for row in rows),
            entropies=tuple(row["entropy"] for row in rows) if "entropy" in rows[0] else None,
            observation_mask=observation_mask,
            conversations=talks,
        )
        return cls(
            table["drawn"],
            rollouts.Scored(
                rollout,
                np.array(table["positions"], np.int32),
                np.array(table["rewards"], np.float32),
                np.array([row["per_function"] for row in rows], np.float32),
            ),
        )


def by_reward(scored: rollouts.Scored) -> np.ndarray:
    """Marks the informative groups, bool [P]: those whose rewards are not all equal."""
    return np.asarray(grpo.informative(scored.rewards))


def by_functions(weights: Mapping[int, float]) -> Callable[[rollouts.Scored], np.ndarray]:
    """Makes a function that marks the informative groups, bool [P], by some of the rewards.

    A group is informative if the weighted sum of these rewards differs between its completions.
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
    sample: Callable[[int, int], rollouts.Scored],
    supply: Supply,
    *,
    max_rounds: int | None,
    informative: Callable[[rollouts.Scored], np.ndarray] = by_reward,
) -> tuple[rollouts.Scored, rollouts.Scored, Supply, dict[str, float]]:
    """Samples in rounds until there are enough informative groups for a rollout (DAPO, arXiv:2503.14476).

    Groups left over from the last rollout come first, and the surplus of this one is kept for the next. So no
    group waits for more than one rollout, and the surplus is smaller than a rollout. After `max_rounds` the
    batch is filled up with groups that are not informative. The caller must set their advantages to 0: their
    rewards may still differ, for example in form or length, but not in quality.

    Args:
        sample: sample(drawn, round) samples and scores the P problems from position `drawn` on.
        supply: The position in the data, and left-over groups.
        max_rounds: The most rounds, at least 1; None makes one round and keeps all of its groups.
        informative: Marks the groups of a rollout, bool [P], whose completions differ in quality. By default
            those whose rewards differ; see `by_functions`.

    Returns:
        The P groups to learn from; all groups that were sampled in this call (for metrics of the policy,
        since the batch is a selection); the new supply; and metrics under `dynamic_sampling/`.
    """
    if max_rounds is None:
        scored = sample(supply.drawn, 0)
        return scored, scored, Supply(supply.drawn + len(scored.positions)), {}
    fresh, drawn = [], supply.drawn
    waiting = [] if supply.surplus is None else [supply.surplus]
    for index in range(max_rounds):
        fresh.append(sample(drawn, index))
        wanted = len(fresh[0].positions)
        drawn += wanted
        pool = join(waiting + fresh)
        good = informative(pool)
        if good.sum() >= wanted:
            break
    # Informative groups first, otherwise in the order of sampling.
    order = np.argsort(~good, kind="stable")
    left = order[wanted : good.sum()]
    filled = max(0, wanted - int(good.sum()))
    metrics: dict[str, float] = {
        "dynamic_sampling/rounds": len(fresh),
        "dynamic_sampling/groups_discarded": int((~good).sum()) - filled,
        "dynamic_sampling/groups_filled": filled,
        "dynamic_sampling/groups_carried_over": len(left),
    }
    left_over = choose(pool, left) if len(left) else None
    return choose(pool, order[:wanted]), join(fresh), Supply(drawn, left_over), metrics


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
    return rollouts.Scored(
        rollouts.Rollout(**rollout),
        scored.positions[groups],
        scored.rewards[groups],
        scored.per_function[rows],
    )


def join(parts: Sequence[rollouts.Scored]) -> rollouts.Scored:
    """Concatenates the groups of several rollouts, in order."""
    columns: dict[str, Any] = {
        name: None if first is None else sum((getattr(part.rollout, name) for part in parts), ())
        for name, first in vars(parts[0].rollout).items()
    }
    return rollouts.Scored(
        rollouts.Rollout(**columns),
        *(
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("positions", "rewards", "per_function")
        ),
    )
