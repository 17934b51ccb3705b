"""Metrics of one iteration of the training loop: rewards, lengths and completions."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.rewards import scoring
from qerl_jax.rl import grpo, rollouts, update
from qerl_jax.tools.conversations import transcript
from qerl_jax.training.groups import Groups
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position
from qerl_jax.training.trace import Trace

# Turns up to this number have their own metrics.
_MOST_TURNS = 8


def row(
    run: PreparedRun,
    trace: Trace,
    position: Position,
    groups: Groups,
    state: update.TrainState,
    learned: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the metrics of a step: its row of metrics.jsonl, without those of an evaluation.

    `position` is that before the step, `state` that after it, and `learned` has the metrics of the update, of the
    checks and of the noise.
    """
    # Metrics of reward functions come first, so that they cannot replace the run's own.
    return {
        **trace.metrics(groups.chosen.rollout),
        **groups.metrics,
        **learned,
        **of_rollout(groups.sampled, run.task.functions),
        **of_turns(groups.sampled.rollout),
        **missed_ends(groups.sampled.rollout, run.task.tokenizer.unused_ends),
        **truncation(groups.chosen, groups.advantages, run.cfg.grpo.mask_truncated_completions),
        "epoch": groups.supply.scored / len(run.task.problems),
        "num_tokens": position.progress.num_tokens + groups.sampled.rollout.num_tokens,
        "updates/skipped": int(state.skipped),
    }


def of_rollout(scored: rollouts.Scored, functions: Sequence[scoring.Named]) -> dict[str, float]:
    """Computes metrics of rewards and lengths under TRL's names.

    Lengths are in tokens that the policy sampled. `entropy` is that of all sampled tokens, in nats per token.
    """
    lengths, rewards = scored.rollout.sampled_lengths, scored.rewards
    judged = ~np.isnan(rewards)
    spreads = [group[~np.isnan(group)].std(ddof=1) for group in rewards[judged.sum(axis=1) > 1]]
    stopped = np.array(scored.rollout.stopped)
    terminated = lengths[stopped] if stopped.any() else np.zeros(1)
    metrics = {
        "reward": float(rewards[judged].mean()) if judged.any() else 0.0,
        "reward_std": float(np.mean(spreads)) if spreads else 0.0,
        "frac_reward_zero_std": float(1 - np.asarray(grpo.informative(rewards)).mean()),
        "completions/without_reward": int((~judged).sum()),
        "completions/judged_ratio": float(judged.mean()),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": int(lengths.min()),
        "completions/max_length": int(lengths.max()),
        "completions/clipped_ratio": float(1 - stopped.mean()),
        "completions/mean_terminated_length": float(terminated.mean()),
        "completions/min_terminated_length": int(terminated.min()),
        "completions/max_terminated_length": int(terminated.max()),
    }
    if scored.rollout.entropies is not None:
        metrics["entropy"] = sum(scored.rollout.entropies) / max(1, int(lengths.sum()))
    for (name, _), column in zip(functions, scored.per_function.T, strict=True):
        values = column[~np.isnan(column)]
        metrics[f"rewards/{name}/mean"] = float(values.mean()) if values.size else 0.0
        metrics[f"rewards/{name}/std"] = float(values.std(ddof=1)) if values.size > 1 else 0.0
        if values.size < column.size:
            metrics[f"rewards/{name}/judged_ratio"] = values.size / column.size
    return metrics


def of_turns(rollout: rollouts.Rollout) -> dict[str, float]:
    """Computes the metrics of turns and tool calls that `docs/environments.md` lists; empty without tools."""
    talks = rollout.conversations
    if talks is None:
        return {}
    calls = sum(talk.calls for talk in talks)
    turns = [talk.turns for talk in talks]
    metrics = {
        "tools/call_frequency": calls / len(talks),
        "tools/failure_frequency": sum(talk.failures for talk in talks) / max(calls, 1),
        "tools/tokens": float(np.mean(rollout.lengths - rollout.sampled_lengths)),
        "turns/mean": float(np.mean(turns)),
        "turns/max": max(turns),
        "turns/limited": float(np.mean([talk.is_limited for talk in talks])),
    }
    lengths = [_turn_lengths(mask) for mask in rollout.observation_mask]
    for turn in range(min(max(map(len, lengths)), _MOST_TURNS)):
        of_turn = [row[turn] for row in lengths if len(row) > turn]
        metrics[f"turns/{turn + 1}/share"] = len(of_turn) / len(lengths)
        metrics[f"turns/{turn + 1}/mean_length"] = float(np.mean(of_turn))
    return metrics


def _turn_lengths(observation_mask: np.ndarray) -> list[int]:
    """Returns the number of tokens of each turn of the policy."""
    edges = np.flatnonzero(np.diff(observation_mask.astype(np.int8))) + 1
    return [len(part) for part in np.split(observation_mask, edges) if len(part) and not part[0]]


def truncation(
    learned: rollouts.Scored, advantages: np.ndarray, is_masked: bool
) -> dict[str, float]:
    """Computes the share of truncated completions in all tokens, and in the sum of all |advantages| [P, G].

    If `is_masked`, truncated completions are left out of the loss, and have no advantage.
    """
    lengths, truncated = learned.rollout.sampled_lengths, ~np.array(learned.rollout.stopped)
    weights = np.where(truncated & is_masked, 0, np.abs(np.asarray(advantages)).reshape(-1))
    whole = weights.sum()
    signal = weights[truncated].sum() / whole if 0 < whole < np.inf else 0.0
    return {
        "completions/truncated_tokens": float(lengths[truncated].sum() / max(1, lengths.sum())),
        "completions/truncated_signal": float(signal),
    }


def missed_ends(rollout: rollouts.Rollout, ends: Mapping[int, str]) -> dict[str, float]:
    """Returns the share of truncated completions that hold one of `ends`, and the commonest first one's id.

    `ends` are special tokens, by id, that are named as ends, and end no completion. Empty if no completion holds one.
    """
    masks = rollout.observation_mask or [None] * len(rollout.completion_ids)
    rows = zip(rollout.completion_ids, masks, rollout.stopped, strict=True)
    sampled = [ids if mask is None else ids[~mask] for ids, mask, stopped in rows if not stopped]
    firsts = (next((i for i in ids.tolist() if i in ends), None) for ids in sampled)
    counts = collections.Counter(first for first in firsts if first is not None)
    if not counts:
        return {}
    return {
        "completions/missed_end_ratio": counts.total() / len(sampled),
        "completions/missed_end": counts.most_common(1)[0][0],
    }


def completion_rows(
    sampled: rollouts.Scored,
    learned: rollouts.Scored,
    advantages: np.ndarray,
    columns: dict[str, list],
) -> list[dict[str, Any]]:
    """Returns one row of the log for each completion that was sampled.

    `advantages` [P, G] are those of the `learned` groups; None is logged for groups that were not used. `columns` are
    those that reward functions added, with one entry per completion.
    """
    rollout, group = sampled.rollout, sampled.rollout.num_generations
    texts = rollout.texts
    if (talks := rollout.conversations) is not None:
        texts = [transcript(talk.messages) for talk in talks]
        columns = columns | {"turns": [list(talk.messages) for talk in talks]}
    known = dict(zip(learned.positions.tolist(), np.asarray(advantages).tolist(), strict=True))
    rows = zip(
        [problem.prompt for problem in rollout.problems for _ in range(group)],
        texts,
        [None if np.isnan(reward) else float(reward) for reward in sampled.rewards.reshape(-1)],
        [a for p in sampled.positions.tolist() for a in known.get(p, [None] * group)],
        rollout.lengths.tolist(),
        rollout.stopped,
        *columns.values(),
        strict=True,
    )
    return [dict(zip((*scoring.COMPLETION_COLUMNS, *columns), row, strict=True)) for row in rows]
