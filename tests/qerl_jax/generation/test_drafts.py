"""Tests that rows get the tokens with drafts that they get without."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from pallas_kernels import runtime
from qerl_jax.aqn import draw as noise
from qerl_jax.generation import draft_control, engine, recall
from qerl_jax.generation.draft_control import Drafting
from qerl_jax.generation.draft_search import KINDS, MOST
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model.transformer import noise_shapes
from tests.pallas_kernels.common import slow
from tests.qerl_jax.generation import test_draft_search as search_tests
from tests.qerl_jax.generation import test_engine as plain
from tests.qerl_jax.generation.test_engine import (
    assert_same,
    complete,
    prompts,
    run,
    tagged,
    values,
)


class Control:
    """A control that asks for these numbers of tokens in each step of one chunk after the other, again and again.

    It notes of each chunk its rows, the outcome of its drafts, its tokens, and how long ended rows were idle in it.
    """

    def __init__(self, *positions):
        self.record, self._positions = draft_control.Record(), itertools.cycle(positions)
        self.slots, self.outcomes, self.chunks = [], [], []

    def positions(self, slots, live):
        self.slots.append(slots)
        count = next(self._positions)
        return count and max(slots, count)

    def size(self, slots):
        return draft_control.Auto().size(slots)

    def odds(self):
        return np.linspace(0.2, 0.9, KINDS).astype(np.float32)

    def learn(self, slots, positions, outcome, tokens):
        self.record.add(slots, positions, outcome, tokens)
        self.outcomes.append(outcome)
        calls, rows = int(outcome.calls), int(outcome.rows)
        self.chunks.append((calls, slots * calls - rows, tokens))


def drafting(positions=24, **options):
    return Drafting(functools.partial(Control, positions), least_limit=1, **options)


@pytest.mark.parametrize(
    ("temperature", "positions"),
    [(1.0, 64), slow(0.0, 64), slow(0.0, 12), slow(0.3, 64), slow(1.0, 12)],
)
def test_tokens_are_those_without_drafts(temperature, positions):
    queue = prompts(limit=40)
    expected = run(queue, temperature)
    subject = plain.make(chunk=4, drafts=drafting(positions))
    assert_same(values(complete(subject, queue, temperature)), expected)
    drafted = subject.drafted
    assert drafted.tokens == 400 and drafted.rows < 400
    # At temperature 0 completions of one prompt are equal, and this policy repeats itself.
    assert drafted.accepted_per_call > (1.4 if temperature == 0 and positions == 64 else 1)


@pytest.mark.slow
def test_rows_that_wait_and_rows_that_stop_are_those_without_drafts():
    stops = plain.stops()
    how = {"max_concurrent": 4, "stop_tokens": stops, "chunk": 5}
    expected = run(prompts(limit=40), **how)
    assert {ended for _, _, ended in expected} == {"stop", "length"}
    assert_same(run(prompts(limit=40), drafts=drafting(), **how), expected)
    tight = how | {"kv_cache_tokens": 130}
    assert_same(run(prompts(limit=40), drafts=drafting(), **tight), expected)


def watched(queue, **options):
    control = Control(8)
    run(queue, drafts=Drafting(lambda: control, least_limit=1), **options)
    return control.chunks


@pytest.mark.slow
def test_a_chunk_ends_when_rows_wait_for_the_slots_of_ended_ones():
    how = {"stop_tokens": plain.stops(), "chunk": 16}
    # Ten rows in four slots: in the last chunk none waits.
    *while_rows_wait, last = watched(prompts(limit=40), max_concurrent=4, **how)
    assert len(while_rows_wait) > 3 and max(idle for _, idle, _ in while_rows_wait) <= 1
    assert last[1] > 20 and len(watched(prompts(limit=40), **how)) == 1


@pytest.mark.slow
def test_a_chunk_is_short_where_a_string_may_end_rows():
    how = {"chunk": 4, "temperature": 0.0}
    long = watched(prompts(limit=40), **how)
    short = watched(prompts(limit=40), stop_strings=StopStrings(("no such",), tagged), **how)
    assert max(tokens for _, _, tokens in short) <= 10 * (4 + MOST)
    assert len(short) > 2 * len(long)


def test_a_stop_string_ends_a_row_as_without_drafts_and_no_draft_is_what_followed():
    queue = prompts(limit=40)
    stops = StopStrings((tagged(run(queue)[0][0][5:7]),), tagged)
    subject = plain.make(stop_strings=stops, drafts=drafting(64))
    rows = values(complete(subject, queue))
    assert_same(rows, run(queue, stop_strings=stops))
    assert len(rows[0][0]) == 7
    known = [text.tolist() for text in subject._recall.completions(queue[0].tokens)]
    assert sorted(known) == sorted([rows[0][0], rows[1][0]])


@pytest.mark.parametrize("penalty", [0.7, 1.3])
@pytest.mark.slow
def test_a_penalty_sees_the_drafted_tokens_before_each_place(penalty):
    how = {"repetition_penalty": penalty, "temperature": 0.5, "chunk": 16}
    expected = run(prompts(limit=30), **how)
    assert_same(run(prompts(limit=30), drafts=drafting(64), **how), expected)


@pytest.mark.slow
def test_entropies_are_those_without_drafts():
    def entropies(drafts):
        spec = engine.EngineSpec(64, chunk=4 if drafts else 16, entropies=True)
        subject = Engine(plain.policy()[0], spec, page_size=8, drafts=drafts)
        rows = complete(subject, prompts(limit=30), 0.5)
        return np.concatenate([rows[number].entropies for number in sorted(rows)])

    np.testing.assert_allclose(entropies(drafting(64)), entropies(None), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("per", ["group", "sequence", "token"])
def test_noise_of_the_rows_own_is_that_without_drafts(per):
    model, variables = plain.policy()
    own = noise.row_noise(jax.random.key(3), 0.3, noise_shapes(model.arch), per)
    queue, numbers = [], itertools.count()
    for group, prompt in enumerate(prompts(limit=20)):
        of_rows = [group if per == "group" else next(numbers) for _ in prompt.keys]
        queue.append(dataclasses.replace(prompt, noise=np.array(of_rows, np.int32)))
    noisy, subjects = (
        variables | {"noise": own},
        (plain.make(drafts=d) for d in (drafting(64), None)),
    )
    assert_same(*(values(complete(subject, queue, 0.3, noisy)) for subject in subjects))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "compact"),
    [
        ({}, False),  # drafts would change the last bits of log-probabilities
        slow({"most_rows": 4}, True),
        ({"least_limit": 21}, True),
    ],
)
def test_short_and_many_rows_and_those_of_a_fixed_batch_have_no_drafts(options, compact):
    how = dataclasses.replace(drafting(), **options)
    subject = plain.make(drafts=how, compact=compact)
    assert complete(subject, prompts(limit=20), max_concurrent=10)
    assert subject.drafted.rows == 0


@pytest.mark.slow
def test_a_batch_that_grows_again_has_no_drafts():
    """Rows wait for pages, so few run at first; once some have ended there are more than may have drafts."""
    queue, control = prompts(0, (5, 9, 7, 6), (6, 6, 6, 6), limit=60), Control(24)

    texts = []
    for drafts in (None, Drafting(lambda: control, most_rows=8, least_limit=1)):
        subject = plain.make(chunk=4, drafts=drafts, kv_cache_tokens=400)
        rows = values(complete(subject, queue, 0.3, max_concurrent=16))
        texts.append([tokens for tokens, *_ in rows])
        assert subject.times_parked > 0
    assert texts[0] == texts[1] and set(control.slots) == {8}


def test_a_config_makes_drafts_on_a_hopper_gpu_only():
    model = plain.policy()[0]
    tokenizer = type("Tokenizer", (), {"num_tokens": 64, "stop_tokens": ()})
    made = lambda drafts: Engine.of(model, tokenizer, SamplingParams(drafts=drafts))._drafts
    assert made("auto") is None
    with runtime.on(runtime.H200):
        assert made("auto") == Drafting() and made("off") is None
        assert made("always").tokens_of_a_step(8) and made("always").control().positions(9, 1) == 18
    with runtime.on(dataclasses.replace(runtime.H200, compute_capability="8.9")):
        assert made("auto") is None


@pytest.mark.slow
def test_the_control_begins_by_itself_where_drafts_come_true():
    queue = prompts(0, (5, 9), (3, 2), limit=300)
    subject = plain.make(chunk=8, drafts=Drafting(least_limit=1))
    rows, drafted = values(complete(subject, queue, 0.0)), subject.drafted
    assert drafted.accepted_per_call > 1.5 and drafted.speedup > 1
    # It began without: some tokens came one by one.
    assert drafted.tokens < 5 * 300
    assert [tokens for tokens, *_ in rows] == [tokens for tokens, *_ in run(queue, 0.0)]


def test_a_prompt_that_comes_again_is_drafted_from_what_it_was_answered():
    """With the same keys and policy the second round says the same."""
    queue, subject = prompts(limit=40), plain.make(chunk=4, drafts=drafting(64))
    rounds = []
    for _ in range(2):
        before = subject.drafted
        tokens = [tokens for tokens, *_ in values(complete(subject, queue))]
        rounds.append((tokens, (subject.drafted - before).rows))
    (first, steps), (second, fewer) = rounds
    assert first == second and fewer < steps / 3


def test_a_recall_keeps_the_last_round_of_each_prompt_and_forgets_the_oldest(monkeypatch):
    prompts_, texts = [np.array([n], np.int32) for n in range(3)], np.arange(12, dtype=np.int32)
    monkeypatch.setattr(recall, "_MOST_TOKENS", 9)
    subject = recall.Recall()
    said = lambda n: [text.tolist() for text in subject.completions(prompts_[n])]
    first = subject.begin()
    subject.add(first, prompts_[0], texts[:2])
    subject.add(first, prompts_[1], texts[:3])
    subject.add(first, prompts_[0], texts[2:4])
    assert said(0) == [[0, 1], [2, 3]] and said(1) == [[0, 1, 2]] and said(2) == []
    second = subject.begin()
    subject.add(second, prompts_[0], texts[5:9])
    assert said(0) == [[5, 6, 7, 8]] and said(1) == [[0, 1, 2]]
    subject.add(second, prompts_[2], texts[:4])
    assert said(1) == [] and said(0) == [[5, 6, 7, 8]] and said(2) == [[0, 1, 2, 3]]
    subject.add(second, prompts_[2], texts)
    assert said(0) == said(2) == []


@pytest.mark.slow
def test_drafts_that_are_only_compared_know_nothing_of_what_follows():
    """Counted again in Python, row by row and place by place."""
    control, chunk = Control(0), 32
    queue = prompts(0, (5, 9), (3, 2), limit=2 * chunk)
    drafts = Drafting(lambda: control, least_limit=1)
    said = [tokens for tokens, *_ in run(queue, 0.0, chunk=chunk, drafts=drafts)]
    starts = [prompt.tokens.tolist() for prompt in queue for _ in prompt.keys]
    group, ended = [0, 0, 0, 1, 1], [[]] * 5
    for number, outcome in enumerate(control.outcomes):
        tried, right, matches = np.zeros(KINDS, int), np.zeros(KINDS, int), np.zeros(9, int)
        for place in (0, 16):
            begin = chunk * number + place
            texts = [start + said[row][:begin] for row, start in enumerate(starts)]
            for row, (match, draft) in enumerate(search_tests.expected(texts, ended, group)):
                matches[match] += 1
                truth = said[row][begin : chunk * (number + 1)][:MOST]
                draft = draft + [-1] * (MOST - len(draft))
                for i, token in enumerate(truth if match else []):
                    kind = min(match + i, 8).bit_length()
                    tried[kind] += 1
                    right[kind] += token == draft[i]
                    if token != draft[i]:
                        break
        assert outcome.tried.tolist() == tried.tolist()
        assert outcome.right.tolist() == right.tolist()
        assert outcome.matches.tolist() == matches.tolist()
        assert (int(outcome.calls), int(outcome.rows)) == (chunk, 5 * chunk)
    assert len(control.outcomes) == 2 and right.sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [8, 32])
def test_on_its_device_rows_with_drafts_are_those_without_but_for_rounding(slots):
    """All kernels run as in a 7B. The second round drafts what the first has sampled with the same keys."""
    model, policy = plain.layers_of_7b()
    lengths = np.random.default_rng(0).integers(60, 200, slots // 2)
    queue = prompts(0, lengths, [2] * len(lengths), limit=150)
    limits = {"max_prompt_length": 200, "max_concurrent": slots}
    subject = Engine(model, engine.EngineSpec(4000), drafts=drafting(64))
    samplers = Engine(model, engine.EngineSpec(4000)), subject, subject
    first, *drafted = (complete(sampler, queue, 1.0, policy, **limits) for sampler in samplers)
    alike = []
    for found in drafted:
        for number, row in found.items():
            other = first[number]
            unlike = np.flatnonzero(row.tokens != other.tokens)
            count = unlike[0] if len(unlike) else len(row.tokens)
            alike.append(count / len(row.tokens))
            np.testing.assert_allclose(
                row.behaviour_logps[:count], other.behaviour_logps[:count], atol=0.1
            )
    assert np.mean(alike) > 0.7
    # Of 32 rows each can draft one token only.
    assert subject.drafted.accepted_per_call > (1.5 if slots == 8 else 1.2)
