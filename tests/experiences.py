"""Makes experience for tests from right-padded arrays with a line for each row, and back."""

import numpy as np

from qerl_jax.rl import microbatches
from qerl_jax.rl.experience import Experience, PackedRows


def of_lines(
    prompts, prompt_lengths, completions, mask, behaviour_logps, advantages, **more
) -> Experience:
    """Joins prompts [P, Tp] and rows [B, C], each row up to its last token that `mask` has."""
    ends = np.max(np.where(mask, np.arange(1, mask.shape[1] + 1), 0), axis=1)
    real, offsets = np.arange(mask.shape[1]) < ends[:, None], lambda n: np.append(0, np.cumsum(n))
    return Experience(
        prompts[np.arange(prompts.shape[1]) < np.array(prompt_lengths)[:, None]],
        offsets(prompt_lengths),
        completions[real],
        offsets(ends),
        mask[real],
        np.asarray(behaviour_logps)[real],
        advantages,
        **more,
    )


def in_lines(experience: Experience, values: np.ndarray, width: int) -> np.ndarray:
    """Arranges values [N] of completion tokens as [B, width], with zeros after the end of a row."""
    rows = experience.row_of_token
    lines = np.zeros((len(experience.advantages), width), values.dtype)
    lines[rows, np.arange(len(rows)) - experience.offsets[rows]] = values
    return lines


def in_one_batch(experience: Experience) -> PackedRows:
    """Packs all rows, in order, as one micro-batch."""
    rows = experience.rows_to_divide(experience.rows.reshape(-1))
    longest = int(np.max(rows.lengths + rows.prompt_lengths))
    shape = microbatches.Shape(
        rows.tokens, ((len(rows.numbers), longest),), int(rows.prompt_lengths.max())
    )
    return experience.pack(microbatches.MicroBatch(shape, rows), {})
