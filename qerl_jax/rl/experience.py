"""Inputs of the update: rows of prompts and completions without padding, and packed micro-batches of them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np

from qerl_jax.model import packing
from qerl_jax.rl import microbatches, rollouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """A micro-batch on the device: tokens on one axis [T], and n rows, some of which may be empty.

    Attributes:
        packing: The positions of each row on the token axis.
        tokens: int32 [T].
        mask: bool [T], the completion tokens that are learned from.
        behaviour_logps: float32 [T], the sampler's log-probabilities in nats; 0 outside completions.
        advantages: float32 [n].
        fixed: Per-token values that do not change during the update, float32 [T], by name: see `update.anchors`.
        noise: int32 [n], numbers of the rows' noise; None if rows do not have their own.
    """

    packing: packing.Packing
    tokens: jax.Array
    mask: jax.Array
    behaviour_logps: jax.Array
    advantages: jax.Array
    fixed: dict[str, jax.Array]
    noise: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout, or some rows of it, on the host: P prompts, g completions of each, B = P * g rows.

    The N tokens of all completions are on one axis, without padding. The rows of a prompt are neighbours.

    Attributes:
        prompts: int32, the tokens of all prompts.
        prompt_offsets: int [P + 1]: prompt p has the tokens from `prompt_offsets[p]` to `prompt_offsets[p + 1]`.
        completions: int32 [N], the tokens of all completions.
        offsets: int [B + 1]: row b has the tokens from `offsets[b]` to `offsets[b + 1]`.
        mask: bool [N], the tokens that are learned from.
        behaviour_logps: float32 [N], the sampler's log-probabilities in nats.
        advantages: float32 [B].
        judged: bool [B], False for rows without a reward; the loss does not count them in its divisor. None means
            that all rows have one.
        noise: int32 [P], the number of the noise of each prompt and its completions; None if rows do not have their
            own.
        versions: int32 [N], the optimizer steps of the policy that sampled each token; None if one policy sampled all.
    """

    prompts: np.ndarray
    prompt_offsets: np.ndarray
    completions: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray
    behaviour_logps: np.ndarray
    advantages: np.ndarray
    judged: np.ndarray | None = None
    noise: np.ndarray | None = None
    versions: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The indices of the rows of each prompt, int [P, g]."""
        return np.arange(len(self.advantages)).reshape(len(self.prompt_offsets) - 1, -1)

    @functools.cached_property
    def row_of_token(self) -> np.ndarray:
        """The row of each completion token, int [N]."""
        return np.repeat(np.arange(len(self.advantages)), np.diff(self.offsets))

    @functools.cached_property
    def num_learned(self) -> np.ndarray:
        """The number of tokens of each row that are learned from, int [B]."""
        return np.bincount(self.row_of_token[self.mask], minlength=len(self.advantages))

    def rows_to_divide(self, numbers: np.ndarray) -> microbatches.Rows:
        """Returns the rows with indices int [k], in the form that is divided into micro-batches."""
        prompts = numbers // self.rows.shape[1]
        lengths, prompt_lengths = np.diff(self.offsets), np.diff(self.prompt_offsets)
        return microbatches.Rows(numbers, lengths[numbers], prompts, prompt_lengths[prompts])

    def tokens_of(self, rows: np.ndarray) -> np.ndarray:
        """Returns where the tokens of rows int [k] are among the N tokens, row after row; negative rows have none."""
        return _ranges(self.offsets, rows[rows >= 0])

    def take(self, rows: np.ndarray) -> Self:
        """Returns the rows with indices int [n, k], k rows of each of n prompts."""
        prompts, rows = rows[:, 0] // self.rows.shape[1], rows.reshape(-1)
        tokens = self.tokens_of(rows)
        return type(self)(
            self.prompts[_ranges(self.prompt_offsets, prompts)],
            _offsets(np.diff(self.prompt_offsets)[prompts]),
            self.completions[tokens],
            _offsets(np.diff(self.offsets)[rows]),
            self.mask[tokens],
            self.behaviour_logps[tokens],
            self.advantages[rows],
            None if self.judged is None else self.judged[rows],
            None if self.noise is None else self.noise[prompts],
            None if self.versions is None else self.versions[tokens],
        )

    def pack(self, batch: microbatches.MicroBatch, fixed: dict[str, np.ndarray]) -> PackedRows:
        """Copies the rows of a micro-batch to its token axis.

        Args:
            batch: Rows of this experience, and their layout.
            fixed: Per-token values float32 [N], by name.
        """
        layout, numbers, prompts = batch.packing, batch.rows.numbers, batch.rows.prompts
        index = self.tokens_of(numbers)

        def flat(x: np.ndarray) -> Any:
            return np.pad(x[index], (0, batch.shape.tokens - len(index)))

        tokens = flat(self.completions)
        # The tokens of prompts follow, then padding, which belongs to no row.
        rows, positions = layout.rows[len(index) :], layout.positions[len(index) :]
        rows = rows[rows < len(numbers)]
        index_of_prompts = self.prompt_offsets[prompts[rows]] + positions[: len(rows)]
        tokens[len(index) :][: len(rows)] = self.prompts[index_of_prompts]
        advantages: Any = np.where(numbers >= 0, self.advantages[numbers], 0)
        noise: Any = None if self.noise is None else self.noise[prompts]
        mask, logps = flat(self.mask), flat(self.behaviour_logps)
        per_token = {name: flat(x) for name, x in fixed.items()}
        return PackedRows(layout, tokens, mask, logps, advantages, per_token, noise)


def make_experience(
    rollout: rollouts.Rollout,
    advantages: np.ndarray,
    *,
    mask_truncated_completions: bool = False,
    share_prompts: bool = True,
    judged: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> Experience:
    """Joins the rows of a rollout, each up to its last token that is learned from.

    Tokens of a tool's answer are part of a row, but are not learned from. A row without a token to learn from is empty.

    Args:
        rollout: P problems, B = P * G completions.
        advantages: float [P, G].
        mask_truncated_completions: Whether truncated completions are left out of the loss.
        share_prompts: Whether a prompt is stored once for all of its completions; otherwise once for each.
        judged: bool [P, G], False for completions without a reward: they are left out of the loss and of its
            divisor. None means that all have one.
        noise: int32 [P, G], numbers of the rows' noise if they have their own. Completions that share a
            prompt get the number of the first.
    """
    prompts: Sequence[np.ndarray] = rollout.prompt_ids
    if not share_prompts:
        prompts = [ids for ids in prompts for _ in range(rollout.num_generations)]
    judged = np.ones(len(rollout.texts), bool) if judged is None else np.reshape(judged, -1)
    counts = judged & np.array(rollout.stopped) if mask_truncated_completions else judged
    masks = list(map(np.full, rollout.lengths, counts))
    if rollout.observation_mask is not None:
        masks = [mask & ~seen for mask, seen in zip(masks, rollout.observation_mask, strict=True)]
    ends = [int(np.max(np.flatnonzero(mask) + 1, initial=0)) for mask in masks]

    def joined(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
        rows = [row[:end] for row, end in zip(rows, ends, strict=True)]
        return np.concatenate(rows, dtype=dtype)

    return Experience(
        prompts=np.concatenate(prompts, dtype=np.int32),
        prompt_offsets=_offsets([len(ids) for ids in prompts]),
        completions=joined(rollout.completion_ids, np.int32),
        offsets=_offsets(ends),
        mask=joined(masks, bool),
        behaviour_logps=joined(rollout.behaviour_logps, np.float32),
        advantages=np.asarray(advantages, np.float32).reshape(-1),
        judged=judged,
        noise=None if noise is None else (noise[:, 0] if share_prompts else noise.reshape(-1)),
        versions=None if rollout.versions is None else joined(rollout.versions, np.int32),
    )


def empty_experience(*, has_noise: bool) -> Experience:
    """Returns one row without tokens; `has_noise` says whether rows have noise of their own."""
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    offsets = np.zeros(2, int)
    return Experience(
        *(none, offsets, none, offsets),
        mask=none.astype(bool),
        behaviour_logps=none.astype(np.float32),
        advantages=zero.astype(np.float32),
        noise=zero if has_noise else None,
    )


def _offsets(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns where rows of these lengths begin on a common axis, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=int)])


def _ranges(offsets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the indices from `offsets[row]` to `offsets[row + 1]` of each row, one after the other."""
    lengths = np.diff(offsets)[rows]
    begins = np.repeat(offsets[rows] - _offsets(lengths)[:-1], lengths)
    return begins + np.arange(len(begins))
