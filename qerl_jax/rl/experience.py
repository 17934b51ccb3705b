"""Inputs of the update: rows of prompts and completions, padded to one of few widths, and packed micro-batches."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Self

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout, or some rows of it, for the trainer: P prompts, g completions of each, B = P * g rows.

    The rows of a prompt are neighbours.

    Attributes:
        prompts: int32 [P, Tp], right-padded; the padding may have any values.
        prompt_lengths: int32 [P], in tokens.
        completions: int32 [B, C], right-padded.
        mask: bool [B, C], the completion tokens that are learned from.
        behaviour_logps: float32 [B, C], the sampler's log-probabilities in nats.
        advantages: float32 [B].
        judged: bool [B], False for rows without a reward; the loss does not count them in its divisor. None means
            that all rows have one.
        noise: int32 [P], the number of the noise of each prompt and its completions; None if rows do not have their
            own.
    """

    prompts: jax.Array
    prompt_lengths: jax.Array
    completions: jax.Array
    mask: jax.Array
    behaviour_logps: jax.Array
    advantages: jax.Array
    judged: jax.Array | None = None
    noise: jax.Array | None = None

    @property
    def rows(self) -> np.ndarray:
        """The indices of the rows of each prompt, int [P, g]."""
        return np.arange(len(self.completions)).reshape(len(self.prompts), -1)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        """The number of completion tokens of each row up to the last that is learned from, int [B]."""
        return np.max(np.where(self.mask, np.arange(1, self.mask.shape[1] + 1), 0), axis=1)

    def rows_to_cut(self, numbers: np.ndarray) -> microbatches.Rows:
        """Returns the rows with indices int [N], in the form that is divided into micro-batches."""
        prompts = numbers // self.rows.shape[1]
        return microbatches.Rows(
            numbers, self.lengths[numbers], prompts, np.asarray(self.prompt_lengths)[prompts]
        )

    def take(self, rows: np.ndarray) -> Self:
        """Returns the rows with indices int [n, k], k rows of each of n prompts, on the host."""
        prompts, flat = rows[:, 0] // self.rows.shape[1], rows.reshape(-1)
        return Experience(
            self.prompts[prompts],
            self.prompt_lengths[prompts],
            self.completions[flat],
            self.mask[flat],
            self.behaviour_logps[flat],
            self.advantages[flat],
            None if self.judged is None else self.judged[flat],
            noise=None if self.noise is None else self.noise[prompts],
        )

    def pack(self, batch: microbatches.MicroBatch, fixed: dict[str, np.ndarray]) -> PackedRows:
        """Packs a micro-batch, on the host.

        Args:
            batch: Its rows and its shape.
            fixed: Per-token values float32 [B, C], by name.
        """
        shape, is_real = batch.shape, batch.rows >= 0
        chosen = self.rows_to_cut(np.where(is_real, batch.rows, 0))
        prompts = np.where(is_real, chosen.prompts, -1)
        layout = packing.pack(
            prompts,
            chosen.prompt_lengths,
            chosen.lengths,
            tokens=shape.tokens,
            arrays=shape.arrays,
            prompt_width=shape.prompt_width,
        )
        place = self._places(batch, layout)
        count = len(place[0])
        filled = lambda x: np.pad(x[place], (0, shape.tokens - count))
        tokens = filled(self.completions)
        rows, slots = layout.rows[count:], layout.positions[count:]
        shared = rows < len(batch.rows)
        tokens[count:][shared] = self.prompts[chosen.prompts[rows[shared]], slots[shared]]
        return PackedRows(
            layout,
            tokens,
            filled(self.mask),
            filled(self.behaviour_logps),
            np.where(is_real, self.advantages[chosen.numbers], 0),
            {name: filled(x) for name, x in fixed.items()},
            None if self.noise is None else self.noise[chosen.prompts],
        )

    def _places(
        self, batch: microbatches.MicroBatch, layout: packing.Packing
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns row and column in [B, C] of each completion token of a micro-batch, in flat order."""
        rows = layout.rows[: layout.lengths.sum()]
        return batch.rows[rows], layout.positions[: len(rows)] - layout.prompt_lengths[rows]

    def unpack(
        self,
        into: np.ndarray,
        batch: microbatches.MicroBatch,
        values: np.ndarray,
    ) -> None:
        """Writes the values [T] of a micro-batch's completion tokens to an array [B, C], in place."""
        place = self._places(batch, self.pack(batch, {}).packing)
        into[place] = values[: len(place[0])]


def make_experience(
    rollout: rollouts.Rollout,
    advantages: np.ndarray,
    *,
    max_prompt_length: int,
    max_completion_length: int,
    mask_truncated_completions: bool = False,
    share_prompts: bool = True,
    judged: np.ndarray | None = None,
    noise: np.ndarray | None = None,
) -> Experience:
    """Pads a rollout on the host, to widths that hold its longest prompt and its longest completion.

    There are seven widths, from the maximum down to an eighth of it. Tokens of a tool's answer are part of a row,
    but are not learned from. The device gets only the real tokens, see `Experience.pack`.

    Args:
        rollout: P problems, B = P * G completions.
        advantages: float [P, G].
        max_prompt_length: The most tokens of a prompt in this run.
        max_completion_length: The most tokens of a completion in this run.
        mask_truncated_completions: Whether truncated completions are left out of the loss.
        share_prompts: Whether a prompt is stored once for all of its completions; otherwise once for each.
        judged: bool [P, G], False for completions without a reward: they are left out of the loss and of its
            divisor. None means that all have one.
        noise: int32 [P, G], numbers of the rows' noise if they have their own. Completions that share a
            prompt get the number of the first.

    Returns:
        The experience, in NumPy arrays.
    """
    lengths, prompts = rollout.lengths, rollout.prompt_ids
    if not share_prompts:
        prompts = [ids for ids in prompts for _ in range(rollout.num_generations)]
    prompt_lengths = np.array([len(ids) for ids in prompts], np.int32)
    width = microbatches.round_up(int(lengths.max()), max_completion_length)
    mask = np.arange(width) < lengths[:, None]
    if mask_truncated_completions:
        mask &= np.array(rollout.stopped)[:, None]
    judged = np.ones(len(lengths), bool) if judged is None else np.reshape(judged, -1)
    mask &= judged[:, None]
    if rollout.given is not None:
        mask &= ~_pad(rollout.given, width, bool)
    return Experience(
        prompts=_pad(
            prompts, microbatches.round_up(int(prompt_lengths.max()), max_prompt_length), np.int32
        ),
        prompt_lengths=prompt_lengths,
        completions=_pad(rollout.completion_ids, width, np.int32),
        mask=mask,
        behaviour_logps=_pad(rollout.behaviour_logps, width, np.float32),
        advantages=np.asarray(advantages, np.float32).reshape(-1),
        judged=judged,
        noise=None if noise is None else (noise[:, 0] if share_prompts else noise.reshape(-1)),
    )


def _pad(rows: Sequence[np.ndarray], width: int, dtype: type) -> np.ndarray:
    """Right-pads rows with zeros to an array [rows, width]."""
    padded = np.zeros((len(rows), width), dtype)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
