"""Tests the division of rows into micro-batches."""

import numpy as np
import pytest

from qerl_jax.config import OptimConfig
from qerl_jax.model.architecture import KNOWN, Architecture
from qerl_jax.rl import microbatches
from tests.pallas_kernels.common import slow

LIMITS = {"prompt_width": 88, "completion_width": 512, "group": 8, "max_rows": 256}


def rows_of(lengths, group=1, prompt_lengths=10):
    """Makes rows, so many of each prompt."""
    lengths = np.array(lengths)
    prompts = np.arange(len(lengths)) // group
    prompt_lengths = np.broadcast_to(prompt_lengths, len(lengths) // group)[prompts]
    return microbatches.Rows(np.arange(len(lengths)), lengths, prompts, prompt_lengths)


def numbers_of(batch):
    return batch.rows.numbers[batch.rows.numbers >= 0]


def named(batches):
    return [sorted(numbers_of(batch).tolist()) for batch in batches]


FEW = {"prompt_width": 100, "completion_width": 900, "group": 3, "max_rows": 6}
WIDE = {"prompt_width": 256, "completion_width": 4096, "group": 8, "max_rows": 128}


def test_long_rows_meet_the_rows_of_their_prompt():
    """Of 2000 tokens 800 + 500 + 200 and a prompt of 100 leave room for 300 and a prompt."""
    rows = rows_of([800, 200, 500, 50, 600, 300], group=3, prompt_lengths=100)
    batches = microbatches.divide(rows, microbatches.shapes(2000, **FEW))
    assert named(batches) == [[0, 1, 2, 5], [3, 4]]
    # The second prompt stands in both.
    assert rows.tokens == 2450 + 2 * 100


def test_what_a_small_micro_batch_holds_is_a_small_one():
    shapes = microbatches.shapes(3200, **FEW)
    assert {shape.tokens for shape in shapes} == {266, 1600, 3200}
    for lengths, tokens in (([60, 30], 266), ([300, 300, 300, 300], 1600), ([600], 3200)):
        (batch,) = microbatches.divide(rows_of(lengths), shapes)
        assert batch.shape.tokens == tokens


def test_the_narrowest_rows_that_are_wide_enough_are_taken():
    shapes = microbatches.shapes(8192, **WIDE)
    widths = [width for _, width in shapes[0].arrays]
    assert widths == [4352, 1536, 512]
    (batch,) = microbatches.divide(rows_of([4000, 1000, 300, 290]), shapes[:1])
    places = np.flatnonzero(batch.rows.numbers >= 0)
    of_row = np.repeat(widths, [count for count, _ in batch.shape.arrays])
    widths_of_rows = dict(zip(batch.rows.numbers[places], of_row[places], strict=True))
    assert widths_of_rows == {0: 4352, 1: 1536, 2: 512, 3: 512}
    # Where no row is longer than 1536 tokens, no wider rows are there.
    (batch,) = microbatches.divide(rows_of([1200, 1100]), shapes)
    assert [width for _, width in batch.shape.arrays] == [1536, 512]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [600, 1000, 5000, 10**6])
def test_every_row_is_in_one_micro_batch_within_its_shape(seed, budget):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(4.5, 1.0, 256), 512).astype(int) + (rng.random(256) < 0.5)
    rows = rows_of(np.clip(lengths, 1, 512), group=8, prompt_lengths=rng.integers(1, 89, 32))
    shapes = microbatches.shapes(budget, **LIMITS)
    batches = microbatches.divide(rows, shapes)
    taken = np.concatenate([batch.rows.numbers for batch in batches])
    assert sorted(taken[taken >= 0]) == list(range(256))
    for batch in batches:
        assert batch.shape in shapes and batch.shape.tokens <= budget
        chosen = numbers_of(batch)
        assert len(batch.rows.numbers) == batch.shape.num_rows
        assert rows.take(chosen).tokens <= batch.shape.tokens
        widths = np.repeat(*np.array(batch.shape.arrays).T[::-1])
        spans = (rows.lengths + rows.prompt_lengths)[chosen]
        assert np.all(spans <= widths[batch.rows.numbers >= 0])


@pytest.mark.parametrize("budget", [600, 1000, 5000, 10**6])
@pytest.mark.parametrize("limit", [8, 512, 4096, 32768])
def test_shapes_are_at_most_three_whatever_the_limits(budget, limit):
    widths = {"prompt_width": 88, "completion_width": limit}
    shapes = microbatches.shapes(max(budget, 88 + limit), **widths, group=8, max_rows=128)
    assert len(set(shapes)) == len(shapes) <= 3
    assert len(microbatches.shapes_of_rows(8, prompts=2, **widths)) <= 3


def test_without_rows_there_is_one_empty_micro_batch_and_a_budget_below_one_row_is_an_error():
    shapes = microbatches.shapes(600, **LIMITS)
    (batch,) = microbatches.divide(rows_of([5]).take(np.arange(0)), shapes)
    assert batch.shape.tokens == 300 and (batch.rows.numbers == -1).all()
    with pytest.raises(ValueError, match=r"max_tokens_per_microbatch: got 99; .* 20 \+ 80 tokens"):
        microbatches.shapes(99, prompt_width=20, completion_width=80, group=8, max_rows=8)


def test_micro_batches_by_rows_are_cut_as_they_come_and_no_larger_than_needed():
    shapes = microbatches.shapes_of_rows(4, prompts=1, prompt_width=100, completion_width=900)
    assert {shape.tokens for shape in shapes} == {3700, 1850, 925}
    rows = rows_of([900, 900, 900, 900, 200, 200, 200, 200], group=4, prompt_lengths=100)
    batches = microbatches.by_rows(rows, 4, shapes)
    assert named(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [batch.shape.tokens for batch in batches] == [3700, 1850]
    # Fewer rows than a micro-batch has: some places stay empty.
    batches = microbatches.by_rows(rows.take(np.arange(6)), 4, shapes)
    assert [batch.rows.numbers.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, -1, -1]]


@pytest.mark.parametrize(
    ("limit", "rows", "budget"),
    [(256, 128, 8192), (4096, 128, 8368), (16000, 128, 16088), (64, 8, 2 * 88 + 8 * 64)],
)
def test_the_budget_that_nothing_else_bounds(limit, rows, budget):
    """It is 8192 tokens or two rows, never less than a row may have, nor more than all rows."""
    optim = OptimConfig(per_device_train_batch_size=rows, gradient_accumulation_steps=1)
    sizes = {"prompt_width": 88, "completion_width": limit, "group": 4}
    assert microbatches.token_budget(optim, **sizes) == budget


def padding(shapes, *, rows, mean, sigma, limit, truncated=0.0, prompts=(60, 201), silent=0.0):
    """Computes the share of padding over 20 optimizer steps, with 8 rows per prompt, some of which do not learn."""
    rng, real, computed, count = np.random.default_rng(0), 0, 0, rows
    for _ in range(20):
        lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).astype(int)
        lengths[rng.random(count) < truncated] = limit
        prompt_lengths = rng.integers(*prompts, count // 8)
        rows = rows_of(np.clip(lengths, 1, limit), group=8, prompt_lengths=prompt_lengths)
        rows = rows.take(np.repeat(rng.random(count // 8) >= silent, 8))
        real += rows.tokens
        computed += sum(batch.shape.tokens for batch in microbatches.divide(rows, shapes))
    return 1 - real / computed


SEVEN_B = microbatches.overhead(KNOWN["qwen2.5-7b"])
SMOLLM2 = microbatches.overhead(
    Architecture("llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True, qkv_bias=False)
)
SMALL = {"prompt_width": 48, "completion_width": 160, "group": 8, "max_rows": 512}


@pytest.mark.parametrize("sigma", [0.5, 1.0])
@pytest.mark.parametrize("truncated", [0.0, slow(0.01), 0.05])
@pytest.mark.parametrize("silent", [slow(0.0), 0.6])
@pytest.mark.parametrize("budget", [4352, None])
def test_at_most_about_a_tenth_is_padding_whatever_the_lengths(sigma, truncated, silent, budget):
    """GSM8K's shape: a mean of 250 tokens behind prompts of 60 to 200, limit 4096; the default budget, and the least.

    A prompt that stands in two micro-batches counts as padding the second time.
    """
    sizes = {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 1}
    optim = OptimConfig(**sizes, max_tokens_per_microbatch=budget)
    widths = {"prompt_width": 256, "completion_width": 4096}
    shapes = microbatches.update_shapes(optim, "dapo", group=8, overhead=SEVEN_B, **widths)
    lengths = {"mean": 250, "sigma": sigma, "truncated": truncated, "silent": silent}
    assert 0 < padding(shapes, rows=128, limit=4096, **lengths) < 0.11


def test_a_small_model_ends_with_few_micro_batches_instead_of_many():
    """Launching a micro-batch of SmolLM2 costs as much as many tokens, so the rest is not cut into small ones."""
    assert SMOLLM2 == pytest.approx(1560, abs=100) and SEVEN_B == pytest.approx(250, abs=30)
    # 10000 tokens and prompts of 25 * 40.
    rows, tokens = rows_of(np.full(200, 50), group=8, prompt_lengths=40), []
    for overhead in (0.0, SMOLLM2):
        shapes = microbatches.shapes(8192, **SMALL, overhead=overhead)
        tokens.append([batch.shape.tokens for batch in microbatches.divide(rows, shapes)])
    cheap, dear = tokens
    assert len(dear) < len(cheap) and sum(dear) > sum(cheap)


@pytest.mark.parametrize("silent", [0.0, 0.5])
def test_less_than_a_tenth_is_padding_of_a_small_model(silent):
    """SmolLM2's recipe has 512 completions of up to 160 tokens, and the quickstart 256 of up to 44."""
    shapes = microbatches.shapes(8192, **SMALL, overhead=SMOLLM2)
    lengths = {"mean": 39, "sigma": 0.8, "limit": 160, "prompts": (36, 46)}
    assert 0 < padding(shapes, rows=512, silent=silent, **lengths) < 0.1
    shapes = microbatches.shapes(8192, **SMALL | {"completion_width": 44, "max_rows": 256})
    assert 0 < padding(shapes, rows=256, mean=20, sigma=0.5, limit=44, prompts=(10, 30)) < 0.1


def test_micro_batches_go_to_the_device_that_has_the_least_to_do():
    shapes = [microbatches.Shape(tokens, (), 1) for tokens in (200, 1600, 1700, 3200, 800)]
    batches = [microbatches.MicroBatch(shape, microbatches.empty_rows(0)) for shape in shapes]
    # The costliest comes first and goes to device 0, the next to 1 and 2, then 800 to 2 and 200 to 1.
    assert microbatches.assign(batches, 3) == [1, 2, 1, 0, 2]
    assert microbatches.assign(batches, 1) == [0] * 5


@pytest.mark.parametrize("places", [2, 3, 4, 8])
def test_several_devices_get_about_as_much_to_do(places):
    rng = np.random.default_rng(places)
    lengths = np.clip(rng.lognormal(5.4, 0.5, 48), 1, 900).astype(int)
    rows = rows_of(lengths, group=8, prompt_lengths=rng.integers(30, 200, 6))
    shapes = microbatches.shapes(8704, **WIDE)
    whole, found = microbatches.divide(rows, shapes), microbatches.divide_for(rows, shapes, places)
    assert microbatches.divide_for(rows, shapes, 1)[0].shape == whole[0].shape
    taken = np.concatenate([batch.rows.numbers for batch in found])
    assert sorted(taken[taken >= 0]) == list(range(48))

    def busiest(batches):
        costs = [batch.shape.cost for batch in batches]
        return np.bincount(microbatches.assign(batches, places), costs, minlength=places).max()

    alone = sum(batch.shape.cost for batch in whole)
    assert busiest(found) <= busiest(whole)
    assert busiest(found) <= (1.5 if places < 8 else 1.8) * alone / places


def test_micro_batches_of_one_shape_are_computed_together():
    small, large = microbatches.Shape(4, ((2, 4),), 1), microbatches.Shape(8, ((2, 8),), 1)
    made = [
        microbatches.MicroBatch(shape, rows_of(np.ones(5)).in_slots(np.array([number, -1])))
        for number, shape in enumerate((small, large, small, small, large))
    ]
    found = microbatches.sets_of_one_shape(made, 2)
    assert [numbers for numbers, _ in found] == [(0, 2), (3,), (1, 4)]
    for numbers, batches in found:
        assert len(batches) == 2 and len({batch.shape for batch in batches}) == 1
        assert named(batches) == [[n] for n in numbers] + [[]] * (2 - len(numbers))
        assert {len(batch.rows.numbers) for batch in batches} == {2}
    alone = [((n,), [batch]) for n, batch in enumerate(made)]
    assert microbatches.sets_of_one_shape(made, 1) == alone
