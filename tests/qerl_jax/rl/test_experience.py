"""Tests how a rollout becomes rows for the trainer."""

import dataclasses

import numpy as np
import pytest

from qerl_jax.rl import microbatches
from qerl_jax.rl.experience import make_experience
from qerl_jax.rl.rollouts import Rollout
from tests.experiences import of_lines


def arrays(dtype, *rows):
    return tuple(np.array(row, dtype) for row in rows)


def rollout():
    """Makes two rows: one ends with its stop token after 2 of 3 tokens, one is cut at 3."""
    return Rollout(
        problems=(None,),
        prompt_ids=arrays(np.int32, [5]),
        texts=("a", "b"),
        completion_ids=arrays(np.int32, [1, 2], [3, 4, 5]),
        behaviour_logps=arrays(np.float32, [-1, -2], [-3, -4, -5]),
        stopped=(True, False),
    )


@pytest.mark.parametrize(
    ("mask_truncated", "completions", "offsets"),
    [(False, [1, 2, 3, 4, 5], [0, 2, 5]), (True, [1, 2], [0, 2, 2])],
)
def test_rows_lie_one_behind_the_other(mask_truncated, completions, offsets):
    """A row that is not learned from has no tokens."""
    masked = {"mask_truncated_completions": mask_truncated}
    made = make_experience(rollout(), np.array([[1.5, -1.5]]), **masked)
    assert made.completions.tolist() == completions and made.mask.tolist() == [True] * offsets[-1]
    assert made.behaviour_logps.tolist() == [-x for x in completions]
    assert made.offsets.tolist() == offsets
    assert made.num_learned.tolist() == np.diff(offsets).tolist()
    assert made.advantages.tolist() == [1.5, -1.5] and made.judged.tolist() == [True, True]
    assert made.completions.dtype == made.prompts.dtype == np.int32
    assert made.behaviour_logps.dtype == made.advantages.dtype == np.float32


def test_a_completion_that_nobody_judged_is_not_learned_from():
    made = make_experience(rollout(), np.zeros((1, 2)), judged=np.array([[False, True]]))
    assert made.completions.tolist() == [3, 4, 5] and made.offsets.tolist() == [0, 0, 3]
    assert made.judged.tolist() == [False, True]


def test_a_row_ends_with_the_last_token_that_the_policy_sampled():
    answers = arrays(bool, [True, False], [False, True, True])
    with_tools = dataclasses.replace(rollout(), observation_mask=answers)
    made = make_experience(with_tools, np.zeros((1, 2)))
    assert made.completions.tolist() == [1, 2, 3] and made.mask.tolist() == [False, True, True]
    assert made.offsets.tolist() == [0, 2, 3] and made.num_learned.tolist() == [1, 1]


def test_nothing_is_learned_from_a_rollout_of_empty_completions():
    empty = arrays(np.int32, [], [])
    without = dataclasses.replace(rollout(), completion_ids=empty, behaviour_logps=empty)
    made = make_experience(without, np.zeros((1, 2)))
    assert made.offsets.tolist() == made.take(made.rows).offsets.tolist() == [0, 0, 0]
    assert made.num_learned.tolist() == [0, 0]


def several():
    """Makes three prompts of two rows each, of which two are empty; the first prompt and a row are long."""
    return of_lines(
        np.arange(12, dtype=np.int32).reshape(3, 4) + 100,
        np.array([4, 1, 2]),
        np.arange(36, dtype=np.int32).reshape(6, 6),
        np.arange(6) < np.array([2, 0, 6, 1, 0, 3])[:, None],
        -np.arange(36, dtype=np.float32).reshape(6, 6),
        np.arange(6, dtype=np.float32),
        noise=np.array([7, 8, 9], np.int32),
    )


def test_some_rows_are_taken_with_their_prompts():
    taken = several().take(np.array([[5], [2]]))
    assert taken.prompts.tolist() == [108, 109, 104] and taken.prompt_offsets.tolist() == [0, 2, 3]
    assert taken.completions.tolist() == [30, 31, 32, *range(12, 18)]
    assert taken.offsets.tolist() == [0, 3, 9] and taken.advantages.tolist() == [5, 2]
    assert taken.rows.tolist() == [[0], [1]] and taken.noise.tolist() == [9, 8]


@pytest.mark.parametrize("share", [True, False])
def test_a_prompt_is_stored_once_for_its_completions_or_once_for_each(share):
    made = make_experience(rollout(), np.zeros((1, 2)), share_prompts=share)
    assert made.prompts.tolist() == [5] * (1 if share else 2)
    assert made.rows.tolist() == ([[0, 1]] if share else [[0], [1]])


def test_a_micro_batch_has_its_completions_in_order_then_their_prompts_then_padding():
    rows = several()
    shape = microbatches.Shape(16, ((2, 7), (3, 5)), 4)
    # The longest row comes first, and a slot is empty in each array.
    slots = np.array([2, -1, 5, 3, -1])
    divided = rows.rows_to_divide(rows.rows.reshape(-1)).in_slots(slots)
    batch = microbatches.MicroBatch(shape, divided)
    packed = rows.pack(batch, {"ref_logps": rows.behaviour_logps * 2})
    logps = [*range(-12, -18, -1), -30, -31, -32, -18]
    assert packed.tokens.tolist() == [*(-x for x in logps), 104, 108, 109, 0, 0, 0]
    assert packed.behaviour_logps.tolist() == logps + [0] * 6
    assert packed.fixed["ref_logps"].tolist() == [2 * x for x in logps] + [0] * 6
    assert packed.mask.tolist() == [True] * 10 + [False] * 6
    assert packed.advantages.tolist() == [2, 0, 5, 3, 0]
    assert packed.noise[[0, 2, 3]].tolist() == [8, 9, 8]
    assert packed.packing is batch.packing
    assert packed.packing.lengths.tolist() == [6, 0, 3, 1, 0]
