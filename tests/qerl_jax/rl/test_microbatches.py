"""Rows into micro-batches."""

import numpy as np
import pytest

from qerl_jax.rl import microbatches


def shapes(batches):
    return {(*batch.rows.shape, batch.width) for batch in batches}


def test_rows_are_cut_as_they_come():
    rows = np.arange(8).reshape(2, 4)
    two, half = microbatches.by_rows(rows, 8, 6), microbatches.by_rows(rows, 2, 6)
    assert [batch.rows.tolist() for batch in two] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert [batch.rows.tolist() for batch in half] == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert shapes(half) == {(1, 2, 6)}


def test_long_rows_meet_long_rows():
    """Prompts of 10 tokens, completions of up to 80: at most 180 tokens let two rows of a prompt together."""
    lengths = np.array([80, 1, 10, 70, 20, 20, 10, 5])
    rows = np.arange(8).reshape(2, 4)
    batches = microbatches.by_tokens(rows, lengths, budget=180, prompt_width=10, max_length=80)
    assert [(batch.rows.tolist(), batch.width) for batch in batches] == [
        ([[0, 3]], 80),  # 10 + 2 * 80
        ([[4, 5], [2, 1], [6, 7]], 20),  # 3 * (10 + 2 * 20)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [600, 1000, 5000, 10**6])
def test_every_row_with_a_token_is_in_one_micro_batch_within_the_budget(seed, budget):
    rng = np.random.default_rng(seed)
    rows = rng.permutation(256).reshape(32, 8)
    lengths = np.minimum(rng.lognormal(4.5, 1.0, 256), 512).astype(int)
    lengths[rng.integers(0, 256, 40)] = 0
    batches = microbatches.by_tokens(rows, lengths, budget=budget, prompt_width=88, max_length=512)
    taken = np.concatenate([batch.rows.reshape(-1) for batch in batches])
    taken = taken[taken >= 0]
    assert len(set(taken)) == len(taken)
    assert set(np.flatnonzero(lengths)) <= set(taken)
    prompt_of = {row: prompt for prompt, group in enumerate(rows) for row in group}
    for batch in batches:
        prompts, size = batch.rows.shape
        assert prompts * (88 + size * batch.width) <= budget
        assert lengths[batch.rows].max(where=batch.rows >= 0, initial=0) <= batch.width
        for piece in batch.rows:
            assert len({prompt_of.get(row) for row in piece}) == 1
        # No more than half of the places are empty, and only at the end.
        assert (batch.rows >= 0).any(axis=1).mean() > 0.5
    assert all((batch.rows >= 0).all() for batch in batches[:-1])


def test_shapes_are_few_whatever_the_lengths():
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        lengths = rng.integers(1, 4097, 128)
        batches = microbatches.by_tokens(
            np.arange(128).reshape(16, 8), lengths, budget=16384, prompt_width=256, max_length=4096
        )
        seen |= shapes(batches)
    # Seven widths, and for the last micro-batch of a step halves, quarters ... of its prompts.
    assert len(seen) <= 7 * 4


def test_rows_without_a_token_cost_nothing():
    lengths = np.array([0, 0, 5, 0, 0, 0, 0, 0])
    batches = microbatches.by_tokens(
        np.arange(8).reshape(4, 2), lengths, budget=100, prompt_width=2, max_length=8
    )
    assert [batch.rows.tolist() for batch in batches] == [[[2, 3]]]
    nothing = microbatches.by_tokens(
        np.arange(8).reshape(4, 2), 0 * lengths, budget=100, prompt_width=2, max_length=8
    )
    assert [batch.rows.tolist() for batch in nothing] == [[[0, 1]]]


def test_a_budget_below_one_row_is_an_error():
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch: got 99; .* 20 \+ 80 tokens"):
        microbatches.chunk_size(8, budget=99, prompt_width=20, max_length=80)


@pytest.mark.parametrize(("budget", "size"), [(100, 1), (180, 2), (339, 2), (340, 4), (9999, 8)])
def test_a_piece_is_the_largest_divisor_of_a_group_that_fits(budget, size):
    assert microbatches.chunk_size(8, budget=budget, prompt_width=20, max_length=80) == size
