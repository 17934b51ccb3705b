"""Tests that rows get the tokens with drafts that they get without."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
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
from tests.qerl_jax.generation import test_draft_search as search_tests
from tests.qerl_jax.generation import test_engine as plain
from tests.qerl_jax.generation.test_engine import assert_same, prompts, run


class Always:
    """A control that asks for the same number of tokens in each step."""

    def __init__(self, positions):
        self.record, self._positions, self.said = draft_control.Record(), positions, []

    def positions(self, slots, live):
        return max(slots, self._positions)

    def odds(self):
        return np.linspace(0.2, 0.9, KINDS).astype(np.float32)

    def learn(self, slots, positions, outcome, tokens):
        self.record.add(slots, positions, outcome, tokens)


def drafting(positions=24, **options):
    return Drafting(
        functools.partial(Always, positions), least_limit=1, most_positions=64, **options
    )


@functools.cache
def free(limit=40, **options):
    return run(prompts(limit=limit), **options)


@pytest.mark.parametrize(
    ("temperature", "positions"),
    [
        (1.0, 12),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(0.0, 64), (0.0, 12), (0.3, 64), (1.0, 64)]
        ),
    ],
)
def test_tokens_are_those_without_drafts(temperature, positions):
    queue = prompts(limit=40)
    expected = run(queue, temperature, chunk=16)
    subject = plain.make(chunk=4, drafts=drafting(positions))
    rows = {
        row.row: (row.tokens.tolist(), row.behaviour_logps.tolist(), row.ended)
        for row in subject.completions(
            plain.policy()[1], queue, temperature, max_prompt_length=plain.WIDTH
        )
    }
    assert_same([rows[row] for row in range(len(rows))], expected)
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


class InTurn(Always):
    """A control that makes drafts in one chunk, compares some in the next, and does neither in the one after."""

    def positions(self, slots, live):
        self.said.append(slots)
        return (max(slots, self._positions), 0, None)[len(self.said) % 3]


class Watching(Always):
    """Notes of each chunk its steps, and the steps for which rows that ended in it were idle."""

    def __init__(self, positions):
        super().__init__(positions)
        self.chunks = []

    def learn(self, slots, positions, outcome, tokens):
        calls, rows = int(outcome.calls), int(outcome.rows)
        self.chunks.append((calls, slots * calls - rows, tokens))


def watched(queue, **options):
    control = Watching(8)
    run(queue, drafts=Drafting(lambda: control, least_limit=1), **options)
    return control.chunks


@pytest.mark.slow
def test_a_chunk_ends_when_rows_wait_for_the_slots_of_ended_ones():
    how = {"stop_tokens": plain.stops(), "chunk": 16}
    # Ten rows in four slots: in the last chunk none waits.
    *while_rows_wait, last = watched(prompts(limit=40), max_concurrent=4, **how)
    assert len(while_rows_wait) > 3 and max(idle for _, idle, _ in while_rows_wait) <= 1
    assert last[1] > 20 and len(watched(prompts(limit=40), **how)) == 1


def test_a_chunk_is_short_where_a_string_may_end_rows():
    texts = lambda tokens: "".join(f"<{token}>" for token in tokens)
    stops = StopStrings(("no such text",), texts)
    how = {"chunk": 4, "temperature": 0.0}
    short, long = (
        watched(prompts(limit=40), stop_strings=stops, **how),
        watched(prompts(limit=40), **how),
    )
    assert max(tokens for _, _, tokens in short) <= 10 * (4 + MOST)
    assert len(short) > 2 * len(long)


def test_a_stop_string_ends_a_row_as_without_drafts():
    texts = lambda tokens: "".join(f"<{token}>" for token in tokens)
    stops = StopStrings((texts(free()[0][0][6:8]),), texts)
    expected = run(prompts(limit=40), stop_strings=stops)
    assert_same(run(prompts(limit=40), drafts=drafting(), stop_strings=stops), expected)


def test_what_was_sampled_behind_a_stop_string_is_no_draft_later():
    texts = lambda tokens: "".join(f"<{token}>" for token in tokens)
    stops = StopStrings((texts(free()[0][0][5:7]),), texts)
    queue, subject = prompts(limit=40), plain.make(stop_strings=stops, drafts=drafting())
    rows = subject.completions(plain.policy()[1], queue, 1.0, max_prompt_length=plain.WIDTH)
    said = {row.row: row.tokens.tolist() for row in rows}
    assert len(said[0]) == 7
    known = [text.tolist() for text in subject._recall.completions(queue[0].tokens)]
    assert sorted(known) == sorted([said[0], said[1]])


@pytest.mark.parametrize("penalty", [0.7, pytest.param(1.3, marks=pytest.mark.slow)])
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
        rows = subject.completions(
            plain.policy()[1], prompts(limit=30), 0.5, max_prompt_length=plain.WIDTH
        )
        return {row.row: row.entropies for row in rows}

    expected, found = entropies(None), entropies(drafting(64))
    for row, values in expected.items():
        np.testing.assert_allclose(found[row], values, atol=1e-5)


@pytest.mark.parametrize(
    "per", [pytest.param(per, marks=pytest.mark.slow) for per in ("group", "sequence", "token")]
)
def test_noise_of_the_rows_own_is_that_without_drafts(per):
    model, variables = plain.policy()
    own = noise.row_noise(jax.random.key(3), 0.3, noise_shapes(model.arch), per)
    queue = prompts(limit=20)
    first = 0
    for place, prompt in enumerate(queue):
        numbers = first + np.arange(len(prompt.keys), dtype=np.int32)
        if per == "group":
            numbers = np.full(len(prompt.keys), place, np.int32)
        first += len(prompt.keys)
        object.__setattr__(prompt, "noise", numbers)
    found = []
    for drafts in None, drafting(64):
        subject = plain.make(chunk=4, drafts=drafts)
        rows = subject.completions(
            variables | {"noise": own}, queue, 0.3, max_prompt_length=plain.WIDTH
        )
        by_row = {
            row.row: (row.tokens.tolist(), row.behaviour_logps.tolist(), row.ended) for row in rows
        }
        found.append([by_row[row] for row in range(len(by_row))])
    assert_same(found[1], found[0])
    assert_same(found[0], found[0])


def test_without_compact_there_are_no_drafts():
    """They would change the last bits of log-probabilities, which do not depend on other rows then."""
    subject = plain.make(compact=False, drafts=drafting())
    list(subject.stream(plain.policy()[1], prompts(limit=20), 1.0, max_prompt_length=plain.WIDTH))
    assert subject.drafted == draft_control.Record()


def test_short_and_many_rows_have_no_drafts():
    for queue, options in (
        (prompts(limit=20), {"most_rows": 4}),
        (prompts(limit=20), {"least_limit": 21}),
    ):
        how = draft_control.dataclasses.replace(drafting(), **options)
        subject = plain.make(drafts=how, compact=True)
        stream = subject.stream(
            plain.policy()[1], queue, 1.0, max_prompt_length=plain.WIDTH, max_concurrent=10
        )
        assert list(stream)
        assert subject.drafted.rows == 0


@pytest.mark.slow
def test_a_batch_that_grows_again_has_no_drafts():
    """Rows wait for pages, so few run at first; once some have ended there are more than may have drafts."""
    queue = prompts(0, (5, 9, 7, 6), (6, 6, 6, 6), limit=60)
    limits = {"max_prompt_length": plain.WIDTH, "max_concurrent": 10}
    sizes = []

    class Noted(Always):
        def positions(self, slots, live):
            sizes.append(slots)
            return super().positions(slots, live)

    texts = []
    for drafts in (None, Drafting(lambda: Noted(24), most_rows=8, least_limit=1)):
        subject = plain.make(chunk=4, drafts=drafts, kv_cache_tokens=400)
        rows = subject.completions(plain.policy()[1], queue, 0.3, **limits)
        texts.append({row.row: row.tokens.tolist() for row in rows})
        assert subject.times_parked > 0
    assert texts[0] == texts[1] and set(sizes) == {8}


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
def test_ended_completions_are_looked_through_and_other_groups_too():
    """At temperature 0 the completions of a prompt are equal: the second of two is known when it begins."""
    queue = prompts(0, (5,), (2,), limit=40)
    subject = plain.make(chunk=8, drafts=drafting(64))
    one = {"max_prompt_length": plain.WIDTH, "max_concurrent": 1}
    rows = list(subject.completions(plain.policy()[1], queue, 0.0, **one))
    assert rows[0].tokens.tolist() == rows[1].tokens.tolist()
    alone = plain.make(chunk=8, drafts=drafting(64))
    list(alone.completions(plain.policy()[1], prompts(0, (5,), (1,), limit=40), 0.0, **one))
    second = subject.drafted.rows - alone.drafted.rows
    assert second <= alone.drafted.rows
    assert second <= 8 + jnp.ceil(40 / 8)


@pytest.mark.slow
def test_the_control_begins_by_itself_where_drafts_come_true():
    queue = prompts(0, (5, 9), (3, 2), limit=300)
    subject = plain.make(chunk=8, drafts=Drafting(least_limit=1))
    limits = {"max_prompt_length": plain.WIDTH}
    rows = list(subject.completions(plain.policy()[1], queue, 0.0, **limits))
    drafted = subject.drafted
    assert drafted.accepted_per_call > 1.5 and drafted.speedup > 1
    # It began without: some tokens came one by one.
    assert drafted.tokens < 5 * 300
    expected = run(queue, 0.0)
    for row in rows:
        assert row.tokens.tolist() == expected[row.row][0]


def test_a_prompt_that_comes_again_is_drafted_from_what_it_was_answered():
    """With the same keys and policy the second round says the same."""
    queue, subject = prompts(limit=40), plain.make(chunk=4, drafts=drafting(64))
    rounds = []
    for _ in range(2):
        before = subject.drafted
        rows = subject.completions(plain.policy()[1], queue, 1.0, max_prompt_length=plain.WIDTH)
        rounds.append(
            ({row.row: row.tokens.tolist() for row in rows}, (subject.drafted - before).rows)
        )
    (first, steps), (second, fewer) = rounds
    assert first == second and fewer < steps / 3


def test_a_recall_keeps_the_last_round_of_each_prompt_and_forgets_the_oldest():
    prompts_, texts = [np.array([n], np.int32) for n in range(3)], np.arange(12, dtype=np.int32)
    subject = recall.Recall(most_tokens=9)
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


class Watch(Always):
    """A control that makes no drafts, and keeps what became of those that were only compared."""

    def positions(self, slots, live):
        return 0

    def learn(self, slots, positions, outcome, tokens):
        self.said.append(outcome)


def test_drafts_that_are_only_compared_know_nothing_of_what_follows():
    """Counted again in Python, row by row and place by place."""
    control, chunk = Watch(0), 32
    queue = prompts(0, (5, 9), (3, 2), limit=2 * chunk)
    how = Drafting(lambda: control, least_limit=1)
    subject = plain.make(chunk=chunk, drafts=how)
    rows = subject.completions(plain.policy()[1], queue, 0.0, max_prompt_length=plain.WIDTH)
    said = {row.row: row.tokens.tolist() for row in rows}
    starts = [prompt.tokens.tolist() for prompt in queue for _ in prompt.keys]
    group, ended = [0, 0, 0, 1, 1], [[]] * 5
    for number, outcome in enumerate(control.said):
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
    assert len(control.said) == 2 and right.sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [8, 32])
def test_on_its_device_rows_with_drafts_are_those_without_but_for_rounding(slots):
    """All kernels run as in a 7B. The second round drafts what the first has sampled with the same keys."""
    model, policy = plain.layers_of_7b()
    lengths = np.random.default_rng(0).integers(60, 200, slots // 2)
    queue = prompts(0, lengths, [2] * len(lengths), limit=150)
    limits = {"max_prompt_length": 200, "max_concurrent": slots}
    rounds = []
    subject = Engine(model, engine.EngineSpec(4000), drafts=drafting(64))
    for sampler in (Engine(model, engine.EngineSpec(4000)), subject, subject):
        rows = sampler.completions(policy, queue, 1.0, **limits)
        rounds.append({row.row: row for row in rows})
    first, *drafted = rounds
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
