"""Who runs where: every row, in its own pages, and no prefill larger than planned."""

import numpy as np
import pytest

from qerl_jax.generation.scheduler import (
    QueuedPrompt,
    Schedule,
    Shapes,
    most_prefilled,
    prefilled_together,
)


@pytest.mark.parametrize("seed", range(20))
def test_every_row_ends_and_no_page_has_two_writers(seed):
    """The schedule alone, with as few pages as will do, and rows that end at random."""
    draw = np.random.default_rng(seed)
    size, limit, slots, width = 4, int(draw.integers(1, 14)), int(draw.integers(1, 7)), 20
    lengths, groups = draw.integers(1, width + 1, 9), draw.integers(1, 5, 9)
    queue = [
        QueuedPrompt(np.zeros(n, np.int32), np.zeros((g, 2), np.uint32), limit)
        for n, g in zip(lengths, groups, strict=True)
    ]
    table_width = -(-(width - 1 + limit) // size)
    shapes = Shapes(size, 5, table_width, 0, width - 1, min(slots, 9), (slots,))
    num_pages = int(draw.integers(2 + table_width, 2 + 3 * table_width))
    schedule, ended = Schedule(shapes, num_pages, queue), set()
    for _ in range(1000):
        if not schedule.unfinished():
            break
        while (fresh := schedule.next_prefill()) is not None:
            fresh_pages = fresh[1][fresh[1] > 0].tolist()
            assert len(set(fresh_pages)) == len(fresh_pages)
        schedule.copies()
        chunk = schedule.slots(with_history=False)
        # From a row's end on its pages are its own.
        own = [
            page
            for table, end, live in zip(chunk.tables, chunk.ends, chunk.live, strict=True)
            for page in table[end // size :]
            if live and page
        ]
        shared = {
            page
            for table, end, live in zip(chunk.tables, chunk.ends, chunk.live, strict=True)
            for page in table[: end // size]
            if live
        }
        assert chunk.live.any() and len(set(own)) == len(own)
        assert not shared & set(own) and 0 not in shared
        room = size * (chunk.tables > 0).sum(axis=1)
        assert (room >= chunk.ends + chunk.limit - chunk.step)[chunk.live].all()
        made = np.minimum(draw.integers(1, 5, slots), chunk.limit - chunk.step)
        live = chunk.live & (chunk.step + made < limit) & (draw.random(slots) < 0.8)
        blank = np.zeros((slots, 5), np.int32)
        pieces = schedule.harvest(blank, blank, made, live, np.array([0]), None)
        done = {piece.row for piece in pieces if piece.ended}
        assert not done & ended
        ended |= done
    assert ended == set(range(groups.sum()))
    assert schedule._pages.free == num_pages - 1


@pytest.mark.parametrize("prompts", [1, 3, 64, 500])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 500, 1025, 4097, 9000])
def test_no_prompts_make_a_larger_prefill_than_is_planned(prompts, length):
    shapes = Shapes(64, 32, 0, 0, length - 1, prompts, (8,))
    buckets = {shapes.bucket(filled) for filled in range(length)}
    most = max(prefilled_together(prompts, bucket) * bucket for bucket in buckets)
    assert most_prefilled(prompts, length) == most
