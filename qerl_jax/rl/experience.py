"""What the trainer learns from: rows of prompts and completions, padded to few widths."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import jax
import numpy as np

from qerl_jax.rl import microbatches, rollouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experience:
    """One rollout, or rows of it, as the trainer sees it: P prompts, g completions of each, B = P * g rows.

    The rows of a prompt are neighbours.

    Attributes:
        prompts: int32 [P, Tp], right-padded; what stands behind the end does not matter.
        prompt_lengths: int32 [P].
        completions: int32 [B, C], right-padded.
        mask: bool [B, C], the completion tokens that are learned from.
        behaviour_logps: float32 [B, C], the sampler's.
        advantages: float32 [B].
        judged: bool [B], False for rows that no reward function judged: no average counts them.
            None means that all were.
        noise: int32 [P], numbers of the noise under which each prompt and its completions act, where
            rows have their own; None where nothing asks.
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
        """int [P, g], the numbers of the rows of each prompt."""
        return np.arange(len(self.completions)).reshape(len(self.prompts), -1)

    @property
    def lengths(self) -> np.ndarray:
        """int [B], completion tokens of each row up to the last that is learned from."""
        return np.max(np.where(self.mask, np.arange(1, self.mask.shape[1] + 1), 0), axis=1)

    def take(self, batch: microbatches.MicroBatch) -> Self:
        """Those rows, on the host; places that no row takes teach nothing."""
        rows, real = batch.rows.reshape(-1), batch.rows.reshape(-1) >= 0
        prompts = batch.rows[:, 0] // self.rows.shape[1]
        width = slice(batch.width)
        return Experience(
            self.prompts[prompts],
            self.prompt_lengths[prompts],
            self.completions[rows, width],
            self.mask[rows, width] & real[:, None],
            self.behaviour_logps[rows, width],
            np.where(real, self.advantages[rows], 0),
            None if self.judged is None else self.judged[rows] & real,
            noise=None if self.noise is None else self.noise[prompts],
        )


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
    """Pads a rollout, once: to widths that hold the longest of its prompts and of its completions.

    The widths are among seven, from the bound down to an eighth of it: few programs are compiled,
    and little is computed on padding that all rows share.

    Args:
        rollout: P problems, B = P * G completions.
        advantages: [P, G].
        max_prompt_length: Bound on the tokens of all prompts of a run.
        max_completion_length: Bound on the tokens of all completions of a run.
        mask_truncated_completions: Whether completions that were cut are left out of the loss.
        share_prompts: Whether a prompt stands once for all of its completions; otherwise each row
            has its own.
        judged: bool [P, G], False for completions without a reward, which are left out of the
            loss and of what it is divided by; None means that all have one.
        noise: int32 [P, G], numbers of the rows' noise where they have their own. Completions that
            share a prompt act under the number of the first.
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
    return Experience(
        prompts=_pad(
            prompts, microbatches.round_up(int(prompt_lengths.max()), max_prompt_length), np.int32
        ),
        prompt_lengths=prompt_lengths,
        completions=_pad(rollout.completion_ids, width, np.int32),
        mask=mask,
        behaviour_logps=_pad(rollout.logps, width, np.float32),
        advantages=np.asarray(advantages, np.float32).reshape(-1),
        judged=judged,
        noise=None if noise is None else (noise[:, 0] if share_prompts else noise.reshape(-1)),
    )


def _pad(rows: Sequence[np.ndarray], width: int, dtype: type) -> np.ndarray:
    """[rows, width], with zeros behind the end of each row."""
    padded = np.zeros((len(rows), width), dtype)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded
