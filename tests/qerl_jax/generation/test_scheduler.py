"""Tests the scheduler: every row runs, in its own pages, and no prefill is larger than planned."""

import numpy as np
import pytest

from qerl_jax.generation import scheduler
from qerl_jax.generation.scheduler import (
    QueuedPrompt,
    Schedule,
    Shapes,
    batch_sizes,
    distribute,
    most_prefilled,
    prefilled_together,
)


def queued(rows, tokens=(1, 2, 3), limit=100, noise=None):
    """Makes a prompt with so many completions."""
    return QueuedPrompt(np.array(tokens, np.int32), np.zeros((rows, 2), np.uint32), limit, noise)


def prefilled(schedule):
    """Fills the slots."""
    while schedule.next_prefill() is not None:
        pass
    schedule.copies()
    return schedule


def begun(schedule):
    """Fills the slots, and gives rows all pages that there are for them."""
    prefilled(schedule).leaving()
    return schedule


@pytest.mark.parametrize("seed", range(20))
def test_every_row_ends_and_no_page_has_two_writers(seed):
    """The schedule runs alone, with as few pages as possible, and rows end at random."""
    draw = np.random.default_rng(seed)
    size, limit, slots, width = 4, int(draw.integers(1, 90)), int(draw.integers(1, 7)), 20
    lengths, groups = draw.integers(1, width + 1, 9), draw.integers(1, 5, 9)
    queue = [queued(g, np.zeros(n), limit) for n, g in zip(lengths, groups, strict=True)]
    table_width = -(-(width - 1 + limit) // size)
    prefills, least = (width - 1, min(slots, 9)), int(draw.integers(1, 4))
    shapes = Shapes(size, 5, table_width, 0, *prefills, (slots,), least_shared=least)
    num_pages = int(draw.integers(2 + table_width, 2 + 3 * table_width))
    schedule, ended = Schedule(shapes, num_pages, distribute(queue)), set()
    for _ in range(3000):
        if not schedule.unfinished():
            break
        for move in schedule.leaving():
            move.contents = list(move.pages)
        while (fresh := schedule.next_prefill()) is not None:
            fresh_pages = fresh[1][fresh[1] > 0].tolist()
            assert len(set(fresh_pages)) == len(fresh_pages)
        for move in schedule.returning():
            assert len(move.pages) == len(move.contents) - move.skipped
        schedule.copies()
        chunk = schedule.slots(with_history=False)
        # From a row's end on its pages are its own.
        rows = [*zip(chunk.tables[chunk.live], chunk.ends[chunk.live] // size, strict=True)]
        private = [page for table, end in rows for page in table[end:] if page]
        shared = {page for table, end in rows for page in table[:end]}
        assert rows and len(set(private)) == len(private)
        assert not shared & set(private) and 0 not in shared
        # What decode attention relies on: the first page tells which rows share all of these.
        assert np.all(chunk.shared * size <= chunk.ends)
        assert np.all((chunk.shared == 0) | (chunk.shared >= least))
        for row, other in np.argwhere(chunk.tables[:, :1] == chunk.tables[:, 0]):
            if chunk.live[row] and chunk.live[other]:
                assert (count := chunk.shared[row]) == chunk.shared[other]
                assert np.all(chunk.tables[row, :count] == chunk.tables[other, :count])
        room = size * (chunk.tables > 0).sum(axis=1)
        needed = chunk.ends + np.minimum(chunk.limit - chunk.step, shapes.chunk)
        assert (room >= needed)[chunk.live].all()
        made = np.minimum(draw.integers(1, 6, slots), chunk.limit - chunk.step)
        live = chunk.live & (chunk.step + made < limit) & (draw.random(slots) < 0.9)
        blank = np.ones((slots, 5), np.int32)
        pieces = schedule.harvest(blank, blank, made, live, np.array([0]), None)
        done = {piece.row for piece in pieces if piece.ended}
        assert not done & ended
        ended |= done
    assert ended == set(range(groups.sum()))
    assert schedule._pages.free == num_pages - 1


def test_rows_that_have_room_take_all_their_pages_once_nothing_waits():
    """So the device continues without the host."""
    schedule = Schedule(Shapes(4, 5, 26, 0, 2, 1, (2,)), 60, distribute([queued(2)]))
    assert schedule.leaving() == [] and schedule.next_prefill() is not None
    assert schedule.next_prefill() is None and schedule.copies() is not None
    assert (schedule.slots(False).tables > 0).sum(axis=1).tolist() == [6, 6]  # four chunks
    assert schedule.can_run_ahead() and schedule.leaving() == []
    assert (schedule.slots(False).tables > 0).sum(axis=1).tolist() == [26, 26]


def test_what_is_not_compiled_yet_is_done_by_what_is():
    """A larger batch and a longer prefill take the place of others, and only until these are compiled."""
    ready = {8, (1, 64), 2}
    shapes = Shapes(4, 5, 50, 200, 100, 1, (8, 4, 2))
    queues = distribute([queued(3, np.ones(20)), queued(1, np.ones(70))])
    schedule = Schedule(shapes, 200, queues, is_ready=ready.__contains__)
    lengths = [schedule.next_prefill()[0].shape[1]]  # nothing else could hold it
    ready.add((1, 112))
    schedule.leaving()
    lengths.append(schedule.next_prefill()[0].shape[1])
    assert lengths == [64, 112]
    begun(schedule)

    def harvest(live):
        made, blank = np.ones(len(live), np.int32), np.ones((len(live), 5), np.int32)
        schedule.harvest(blank, blank, made, np.array(live), np.array([0]), None)

    assert len(schedule.slots(False).live) == 8 and schedule.can_run_ahead()
    ready.add(4)
    assert not schedule.can_run_ahead()
    begun(schedule)
    assert len(schedule.slots(False).live) == 4
    harvest([True, False, False, False])
    begun(schedule)
    assert len(schedule.slots(False).live) == 2


def drafted(slots, **options):
    return Shapes(4, 5, 26, 103, 2, 1, (slots,), drafted=slots, ended=64, **options)


@pytest.mark.parametrize(("rows", "patience"), [(8, scheduler._NEVER), (9, 2)])
@pytest.mark.parametrize(("stop_strings", "span"), [(False, 20), (True, 5)])
def test_a_chunk_with_drafts_ends_early_where_a_row_waits_or_a_string_may_end_it(
    rows, patience, stop_strings, span
):
    shapes = drafted(8, stop_strings=stop_strings)
    slots = prefilled(Schedule(shapes, 300, distribute([queued(rows)]))).slots(False)
    assert (slots.patience, slots.span) == (patience, span)


def test_where_rows_that_end_hold_up_others_the_host_looks_after_each_chunk_with_drafts():
    """Another device takes the last prompt that waits while the first one's chunk is under way."""
    shapes, queues = drafted(2), distribute([queued(2)] * 3, 2)
    first, second = (Schedule(shapes, 300, queues, replica=replica) for replica in range(2))
    assert begun(first).slots(False).patience == 1 and queues.any()
    begun(second).slots(False)
    one, both = np.ones((2, 1), np.int32), np.ones(2, bool)
    second.harvest(one, np.zeros((2, 1)), both.astype(int), ~both, np.array([1]), None)
    begun(second)
    assert not queues.any()
    assert first.can_run_ahead() and not first.can_run_ahead(drafts=True)
    assert first.slots(False).patience == scheduler._NEVER
    assert first.can_run_ahead(drafts=True)


@pytest.mark.parametrize(("rows", "patience"), [(1, scheduler._NEVER), (2, 2)])
def test_with_turns_ended_rows_hold_up_others_if_there_are_others(rows, patience):
    queues = distribute([queued(rows)])
    schedule = begun(Schedule(drafted(8), 300, queues, lambda row, tokens: None))
    assert schedule.slots(False).patience == patience
    assert schedule.can_run_ahead() and schedule.can_run_ahead(drafts=True) == (rows == 1)


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (8, (8,)),
        (15, (15,)),
        (40, (40, 8)),
        (64, (64, 32, 8)),
        (128, (128, 32, 8)),
        (129, (129, 128, 32, 8)),
        (256, (256, 128, 32, 8)),
        (512, (512, 256, 128, 32, 8)),
    ],
)
def test_there_are_few_batch_sizes_and_128_for_any_more_slots(slots, sizes):
    assert batch_sizes(slots) == sizes


@pytest.mark.parametrize("prompts", [1, 3, 64, 500])
@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 500, 1025, 4097, 9000])
def test_no_prompts_make_a_larger_prefill_than_is_planned(prompts, length):
    shapes = Shapes(64, 32, 0, 0, length - 1, prompts, (8,))
    buckets = {shapes.bucket(filled) for filled in range(length)}
    most = max(prefilled_together(prompts, bucket) * bucket for bucket in buckets)
    assert most_prefilled(prompts, length) == most


@pytest.mark.parametrize(("longest", "history"), [(255, 1280), (47, 60), (1023, 9000), (0, 2)])
def test_a_row_that_goes_on_is_padded_to_one_of_four_lengths(longest, history):
    shapes = Shapes(64, 32, 0, history, longest, 8, (8,), carries=True)
    lengths = {tokens.shape[1] for tokens, *_ in shapes.prefills(False)}
    assert len(lengths) <= 4
    for length in range(history - 1):
        assert length <= shapes.bucket(length) and shapes.bucket(length) in lengths


def test_a_device_that_runs_dry_takes_rows_that_wait_for_another():
    """One of two devices takes ten times as long for a chunk, so it samples few of the rows."""
    queue = [
        QueuedPrompt(np.arange(3, dtype=np.int32), np.full((2, 2), n, np.uint32), 1)
        for n in range(40)
    ]
    shapes, queues = Shapes(4, 5, 1, 0, 2, 2, (2,)), distribute(queue, 2)
    schedules = [Schedule(shapes, 9, queues, replica=replica) for replica in range(2)]
    ended = [[], []]
    for turn in range(1000):
        replica, one = int(turn % 11 == 0), np.ones(2, int)
        if (schedule := prefilled(schedules[replica])).live:
            chunk = schedule.slots(with_history=False)
            arrays = chunk.tables, chunk.tables, one, one == 0, 9 * one
            done = schedule.harvest(*arrays, stop_strings=None)
            ended[replica] += [(row.row, *chunk.keys[slot]) for slot, row in enumerate(done)]
    assert not any(schedule.unfinished() for schedule in schedules)
    assert sorted(ended[0] + ended[1]) == [(row, row // 2, row // 2) for row in range(80)]
    assert 2 <= len(ended[1]) <= 10
    assert all(schedule._pages.free == 8 for schedule in schedules)


def test_noise_of_rows_keeps_a_group_together_on_one_device():
    split = lambda noise: [
        (piece.first_row, len(piece.prompt.keys))
        for part in distribute([queued(4, noise=noise)], 2)._queues
        for piece in part
    ]
    assert split(None) == split(np.full(4, 7)) == [(0, 2), (2, 2)]
    assert split(np.arange(4)) == [(0, 4)]


def test_few_rows_know_what_their_group_has_said():
    """Of completions that ended the last come last, cut to the room there is; other groups' are not there."""
    draw = np.random.default_rng(0)
    queue = [queued(n, draw.integers(1, 9, 5), limit=12) for n in (4, 1)]
    shapes = Shapes(4, 4, 5, 18, 4, 2, (8, 2), drafted=2, ended=20)
    schedule = Schedule(shapes, 40, distribute(queue))

    def chunk(made, live):
        slots = begun(schedule).slots(with_history=False)
        size = len(slots.live)
        tokens = np.array(made)[:size, None] + np.arange(4)
        live, lengths = np.array(live)[:size], np.full(size, 4)
        schedule.harvest(tokens, np.zeros((size, 4)), lengths, live, np.array([-5]), None)
        return slots

    first = chunk([10, 20, 30, 40, 50, 0, 0, 0], [True, False, False, True, False] + [False] * 3)
    assert first.texts is None and first.history is None
    second = chunk([60, 70], [True, True])
    assert second.texts.group.tolist() == [0, 0]
    # Each stands behind its prompt.
    begin = queue[0].tokens.tolist()
    texts = [*begin, 20, 21, 22, 23, -1, *begin, 30, 31, 32, 33, -1]
    assert second.texts.ended.tolist() == [texts] * 2
    assert second.history[1, 5:10].tolist() == [40, 41, 42, 43, -1]
    cut = schedule._slots[0].cached
    assert cut.ended_texts(18).tolist() == [*begin, 20, 21, -1, *texts[10:]]
    assert cut.ended_texts(7).tolist() == [*begin, 30, -1] and cut.ended_texts(0).tolist() == []
