"""Tests how a rollout becomes rows for the trainer."""

import numpy as np
import pytest

from qerl_jax.rl.experience import make_experience
from qerl_jax.rl.rollouts import Rollout


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
    ("mask_truncated", "mask"),
    [
        (False, [[True, True, False], [True, True, True]]),
        (True, [[True, True, False], [False, False, False]]),
    ],
)
def test_experience_is_learned_from_up_to_the_stop_token(mask_truncated, mask):
    advantages = np.array([[1.5, -1.5]])
    made = make_experience(
        rollout(),
        advantages,
        max_prompt_length=1,
        max_completion_length=3,
        mask_truncated_completions=mask_truncated,
        share_prompts=False,
    )
    assert made.mask.tolist() == mask
    assert made.advantages.tolist() == [1.5, -1.5] and made.advantages.dtype == np.float32
    assert made.prompts.tolist() == [[5], [5]] and made.prompt_lengths.tolist() == [1, 1]
    assert made.completions.tolist() == [[1, 2, 0], [3, 4, 5]]
    assert made.behaviour_logps.tolist() == [[-1, -2, 0], [-3, -4, -5]]
    assert made.completions.dtype == made.prompts.dtype == np.int32
    assert made.behaviour_logps.dtype == np.float32


def test_a_completion_that_nobody_judged_is_not_learned_from():
    made = make_experience(
        rollout(),
        np.zeros((1, 2)),
        max_prompt_length=1,
        max_completion_length=3,
        judged=np.array([[False, True]]),
    )
    assert made.mask.tolist() == [[False, False, False], [True, True, True]]
    assert made.judged.tolist() == [False, True]


@pytest.mark.parametrize(
    ("longest", "width"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 8), (8, 8)]
)
def test_rows_are_cut_behind_the_longest_prompt_and_the_longest_completion(longest, width):
    prompt = list(range(1, longest + 1))
    rows = Rollout(
        problems=(None,),
        prompt_ids=arrays(np.int32, prompt),
        texts=("a", "b"),
        completion_ids=arrays(np.int32, [9], prompt),
        behaviour_logps=arrays(np.float32, [0], [0] * longest),
        stopped=(True, True),
    )
    bounds = {"max_prompt_length": 8, "max_completion_length": 8}
    shared, apart = (
        make_experience(rows, np.zeros((1, 2)), **bounds, share_prompts=share)
        for share in (True, False)
    )
    padded = prompt + [0] * (width - longest)
    assert shared.prompts.tolist() == [padded]
    assert apart.prompts.tolist() == [padded, padded]
    assert shared.completions.tolist()[1] == padded
    assert shared.rows.tolist() == [[0, 1]] and apart.rows.tolist() == [[0], [1]]
    for made in (shared, apart):
        shapes = {made.completions.shape, made.mask.shape, made.behaviour_logps.shape}
        assert shapes == {(2, width)}
        assert made.lengths.tolist() == made.mask.sum(axis=1).tolist() == [1, longest]
