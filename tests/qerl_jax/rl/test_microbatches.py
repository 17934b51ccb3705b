"""Rows into micro-batches."""

import numpy as np
import pytest

from qerl_jax.rl import microbatches

LIMITS = {"prompt_width": 88, "completion_width": 512, "group": 8, "max_rows": 256}


def rows_of(lengths, group=1, prompt_lengths=10):
    """Rows, so many of each prompt."""
    lengths = np.array(lengths)
    prompts = np.arange(len(lengths)) // group
    prompt_lengths = np.broadcast_to(prompt_lengths, len(lengths) // group)[prompts]
    return microbatches.Rows(np.arange(len(lengths)), lengths, prompts, prompt_lengths)


def named(batches):
    return [sorted(batch.rows[batch.rows >= 0].tolist()) for batch in batches]


def test_long_rows_meet_the_rows_of_their_prompt():
    """Prompts of 10 tokens: after 80 + 50 + 20 with theirs there is room in 200 tokens for 30 with another."""
    rows = rows_of([80, 20, 50, 5, 60, 30], group=3)
    shapes = microbatches.shapes(200, prompt_width=10, completion_width=90, group=3, max_rows=6)
    batches = microbatches.cut(rows, shapes)
    assert named(batches) == [[0, 1, 2, 5], [3, 4]]
    # The second prompt stands in both.
    assert rows.tokens == 245 + 2 * 10


def test_what_a_small_micro_batch_holds_is_a_small_one():
    shapes = microbatches.shapes(200, prompt_width=10, completion_width=90, group=3, max_rows=6)
    assert {shape.tokens for shape in shapes} == {50, 200}
    (batch,) = microbatches.cut(rows_of([20, 10]), shapes)
    assert batch.shape.tokens == 50
    (batch,) = microbatches.cut(rows_of([90]), shapes)  # it needs 100
    assert batch.shape.tokens == 200


def test_the_narrowest_rows_that_are_wide_enough_are_taken():
    shapes = microbatches.shapes(
        8192, prompt_width=256, completion_width=4096, group=8, max_rows=128
    )
    widths = [width for _, width in shapes[0].arrays]
    assert widths == [4352, 1536, 512]
    (batch,) = microbatches.cut(rows_of([4000, 1000, 300, 290]), shapes)
    places = np.flatnonzero(batch.rows >= 0)
    of_row = np.repeat(widths, [count for count, _ in batch.shape.arrays])
    assert dict(zip(batch.rows[places], of_row[places], strict=True)) == {
        **{0: 4352, 1: 1536},
        **{2: 512, 3: 512},
    }
    # Where no row is longer than 512 tokens, no wider rows are there.
    (batch,) = microbatches.cut(rows_of([300, 290]), shapes)
    assert [width for _, width in batch.shape.arrays] == [512]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [600, 1000, 5000, 10**6])
def test_every_row_is_in_one_micro_batch_within_its_shape(seed, budget):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4.5, 1.0, 256), 512).astype(int) + (rng.random(256) < 0.5)
    rows = rows_of(np.clip(lengths, 1, 512), group=8, prompt_lengths=rng.integers(1, 89, 32))
    shapes = microbatches.shapes(budget, **LIMITS)
    batches = microbatches.cut(rows, shapes)
    taken = np.concatenate([batch.rows for batch in batches])
    assert sorted(taken[taken >= 0]) == list(range(256))
    for batch in batches:
        assert batch.shape in shapes and batch.shape.tokens <= budget
        chosen = batch.rows[batch.rows >= 0]
        assert len(batch.rows) == batch.shape.num_rows
        assert rows.take(chosen).tokens <= batch.shape.tokens
        widths = np.repeat(*np.array(batch.shape.arrays).T[::-1])
        spans = (rows.lengths + rows.prompt_lengths)[chosen]
        assert np.all(spans <= widths[batch.rows >= 0])


@pytest.mark.parametrize("budget", [600, 1000, 5000, 10**6])
@pytest.mark.parametrize("limit", [8, 512, 4096, 32768])
def test_shapes_are_at_most_eight_whatever_the_limits(budget, limit):
    budget = max(budget, 88 + limit)
    shapes = microbatches.shapes(
        budget, prompt_width=88, completion_width=limit, group=8, max_rows=128
    )
    assert len(set(shapes)) == len(shapes) <= 8
    by_rows = microbatches.shapes_of_rows(8, prompts=2, prompt_width=88, completion_width=limit)
    assert len(by_rows) <= 6


def test_without_rows_there_is_one_empty_micro_batch():
    shapes = microbatches.shapes(600, **LIMITS)
    (batch,) = microbatches.cut(rows_of([5]).take(np.arange(0)), shapes)
    assert batch.shape.tokens == 150 and (batch.rows == -1).all()


def test_a_budget_below_one_row_is_an_error():
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch: got 99; .* 20 \+ 80 tokens"):
        microbatches.shapes(99, prompt_width=20, completion_width=80, group=8, max_rows=8)


def test_micro_batches_by_rows_are_cut_as_they_come_and_no_larger_than_needed():
    shapes = microbatches.shapes_of_rows(4, prompts=1, prompt_width=10, completion_width=90)
    assert {shape.tokens for shape in shapes} == {10 + 4 * 90, 92}
    rows = rows_of([90, 90, 90, 90, 20, 20, 20, 20], group=4)
    batches = microbatches.by_rows(rows, 4, shapes)
    assert named(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [batch.shape.tokens for batch in batches] == [370, 92]


@pytest.mark.parametrize(
    ("limit", "rows", "budget"), [(256, 128, 8192), (16000, 128, 16088), (64, 8, 2 * 88 + 8 * 64)]
)
def test_the_budget_that_nothing_else_bounds(limit, rows, budget):
    """8192 tokens; never less than a row may have, nor more than all rows."""
    asked = {"prompt_width": 88, "completion_width": limit, "rows": rows, "prompts": rows // 4}
    assert microbatches.default_budget(**asked) == budget


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("truncated", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("budget", [8192, 4352])
def test_less_than_a_tenth_is_padding_whatever_the_lengths(sigma, truncated, budget):
    """GSM8K's shape: 128 rows of a mean of 250 tokens, 8 of each prompt of 60 to 200; limit 4096.

    A prompt that stands in two micro-batches counts as padding the second time.
    """
    shapes = microbatches.shapes(
        budget, prompt_width=256, completion_width=4096, group=8, max_rows=128
    )
    rng, real, computed = np.random.default_rng(0), 0, 0
    for _ in range(20):
        lengths = rng.lognormal(np.log(250) - sigma**2 / 2, sigma, 128).astype(int)
        lengths[rng.random(128) < truncated] = 4096
        prompt_lengths = rng.integers(60, 201, 16)
        rows = rows_of(np.clip(lengths, 1, 4096), group=8, prompt_lengths=prompt_lengths)
        real += rows.tokens
        computed += sum(batch.shape.tokens for batch in microbatches.cut(rows, shapes))
    assert 0 < 1 - real / computed < 0.1
