"""Tests continuous batching: under any schedule, a row gets the tokens that it would get alone."""

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention
from qerl_jax.config import LoraConfig
from qerl_jax.generation import decode_step, device_pool, engine, kv_capacity, programs, scheduler
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.generation.stop_strings import StopStrings
from qerl_jax.model import architecture, layers
from qerl_jax.model.transformer import Transformer, head, init_params, noise_shapes, random_base
from tests.pallas_kernels.common import slow

C, WIDTH = 9, 82
# Two padded lengths, more rows than slots, and a prompt of which nothing is prefilled.
LENGTHS = (3, 82, 5, 1, 80)
GROUPS = (2, 3, 1, 2, 2)


@functools.cache
def policy():
    arch = architecture.Architecture("qwen3", 64, 16, 24, 2, 4, 2, 8)
    model = Transformer(arch, "float32", None, jnp.float32)
    frozen = random_base(model, jax.random.key(0))
    # A scale at which next tokens differ in probability, and the prompt matters.
    return model, {"frozen": jax.tree.map(lambda x: 10 * x if x.ndim > 2 else x, frozen)}


def make(num_tokens=64, chunk=4, repetition_penalty=1.0, model=None, **options):
    model = model or policy()[0]
    params = SamplingParams(repetition_penalty=repetition_penalty)
    spec = EngineSpec(num_tokens, params, chunk)
    return Engine(model, spec, **{"page_size": 8} | options)


def prompts(seed=0, lengths=LENGTHS, groups=GROUPS, limit=C):
    draw = np.random.default_rng(seed)
    return [
        QueuedPrompt(
            draw.integers(1, 64, length).astype(np.int32),
            draw.integers(0, 2**32, (count, 2), np.uint32),
            limit,
        )
        for length, count in zip(lengths, groups, strict=True)
    ]


def complete(subject, queue, temperature=1.0, variables=None, **limits):
    """Returns the complete rows of an engine by number, in the order in which they ended."""
    limits = {"max_prompt_length": WIDTH} | limits
    rows = subject.completions(variables or policy()[1], queue, temperature, **limits)
    return {row.row: row for row in rows}


def values(rows):
    """Returns (tokens, log-probabilities, why it ended) of every row."""
    in_order = (rows[number] for number in sorted(rows))
    return [(row.tokens.tolist(), row.behaviour_logps.tolist(), row.ended) for row in in_order]


def run(queue, temperature=1.0, max_concurrent=None, **options):
    return values(complete(make(**options), queue, temperature, max_concurrent=max_concurrent))


def tagged(tokens):
    """Converts tokens to a text in which none is part of another."""
    return "".join(f"<{token}>" for token in tokens)


def noting(monkeypatch, target, name, note):
    """Makes a function of a module call `note` with its arguments before it runs."""
    function = getattr(target, name)
    noted = lambda *args, **options: (note(*args), function(*args, **options))[1]
    monkeypatch.setattr(target, name, noted)


@functools.cache
def stops():
    """Returns stop tokens at which some rows end early, others late, and one not at all."""
    free = run(prompts())
    chosen = tuple({free[0][0][0], free[3][0][4], free[6][0][2], free[8][0][8]})
    lengths = {len(row[0]) for row in run(prompts(), stop_tokens=chosen)}
    assert len(lengths) > 3 and min(lengths) == 1 and max(lengths) == C
    return chosen


@functools.cache
def whole():
    return run(prompts(), stop_tokens=stops())


def assert_same(actual, expected):
    assert [row[0] for row in actual] == [row[0] for row in expected]
    assert [row[2] for row in actual] == [row[2] for row in expected]
    for (_, logps, _), (_, wanted, _) in zip(actual, expected, strict=True):
        np.testing.assert_allclose(logps, wanted, atol=1e-5)


@pytest.mark.slow
def test_completions_are_the_rows_of_a_stream_put_together():
    options = {"max_prompt_length": WIDTH, "max_concurrent": 4}
    subject = make(stop_tokens=stops())
    done = complete(subject, prompts(), **options)
    assert [*done] != sorted(done) == [*range(10)]
    rows = [([], [], []) for _ in done]
    for piece in itertools.chain(*subject.stream(policy()[1], prompts(), 1.0, **options)):
        tokens, logps, ended = rows[piece.row]
        assert not ended, "a row that has ended brings nothing more"
        tokens += piece.tokens.tolist()
        logps += piece.behaviour_logps.tolist()
        ended += [piece.ended] if piece.ended else []
        assert (piece.tokens.dtype, piece.behaviour_logps.dtype) == (np.int32, np.float32)
    assert [(tokens, logps, *ended) for tokens, logps, ended in rows] == values(done)


@pytest.mark.parametrize("wanted,rows,expected", [(None, None, 3), (4, None, 4), (None, 2, 2)])
def test_without_a_report_of_memory_the_default_is_what_the_assumed_memory_holds(
    wanted, rows, expected, monkeypatch
):
    """A longest row needs keys and values of WIDTH - 1 + C tokens; a number that is given stands."""
    share = 3.5 * (WIDTH - 1 + C) * policy()[0].arch.kv_bytes(4)
    monkeypatch.setattr(kv_capacity, "_UNREPORTED_MEMORY", share / kv_capacity._ROWS_SHARE)
    options = {"max_prompt_length": WIDTH, "max_concurrent": wanted, "rows": rows}
    (schedule,) = make().schedules(policy()[1], prompts(), **options)
    assert schedule._shapes.sizes[0] == expected


def test_rows_end_with_a_stop_token_or_at_their_limit():
    for (tokens, logps, ended), (unbounded, *_) in zip(whole(), run(prompts()), strict=True):
        assert tokens == unbounded[: len(tokens)]
        assert np.isin(tokens, stops()).tolist() == [False] * (len(tokens) - 1) + [ended == "stop"]
        assert ended == "stop" or len(tokens) == C
        assert len(logps) == len(tokens) and max(logps) < 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_tokens": 90},  # room for hardly more than one row of the longest prompt
        pytest.param({"chunk": 3, "page_size": 7}, marks=pytest.mark.slow),
    ],
    ids=["a slot", "pages", "other sizes"],
)
def test_rows_that_wait_are_those_sampled_at_once(options):
    assert_same(run(prompts(), max_concurrent=4, stop_tokens=stops(), **options), whole())


@pytest.mark.slow
def test_rows_that_are_left_keep_the_lengths_that_were_recorded_for_them():
    """A benchmark's lengths are of rows, and not of calls."""
    lengths = [2, 9, 4, 8, 9, 3, 9, 5, 6, 7]
    subject, limits = make(row_lengths=lengths, chunk=1, carries=True), {"rows": 10}
    first = complete(subject, prompts(), leave=4, **limits)
    left = [number for number in sorted(first) if first[number].ended is None]
    rows = [(prompt, key[None]) for prompt in prompts() for key in prompt.keys]
    queue = [
        dataclasses.replace(rows[number][0], keys=rows[number][1], begun=first[number])
        for number in left
    ]
    second = dict(zip(left, values(complete(subject, queue, **limits)), strict=True))
    assert 0 < len(left) <= 4
    every = [second.get(number, row) for number, row in enumerate(values(first))]
    assert [len(tokens) for tokens, *_ in every] == lengths
    assert [ended for *_, ended in every] == ["length" if n == C else "stop" for n in lengths]


@pytest.mark.slow
def test_an_error_whose_traceback_is_kept_keeps_no_cache_on_the_device():
    """As in a notebook after Ctrl-C: the next call has to find room."""

    def pools():
        return sum(array.ndim == 5 for array in jax.live_arrays())

    def interrupt():
        if pools() > before:
            raise KeyboardInterrupt

    before = pools()
    with pytest.raises(KeyboardInterrupt) as kept:
        run(prompts(), poll=interrupt, chunk=2)
    assert kept.tb is not None and pools() == before
    run(prompts(0, (20,), (2,)))
    gc.collect()
    assert pools() == before


def test_what_was_sampled_before_a_run_is_told_to_end_is_given():
    """The rows of a chunk are given when the next one is under way, or before the error that keeps it from beginning."""
    calls = itertools.count()

    def interrupt():
        if next(calls) == 3:
            raise KeyboardInterrupt

    tokens = collections.Counter()
    stream = make(poll=interrupt, chunk=2).stream(
        policy()[1], prompts(limit=12), 1.0, max_prompt_length=WIDTH
    )
    with pytest.raises(KeyboardInterrupt):
        for piece in itertools.chain.from_iterable(stream):
            tokens[piece.row] += len(piece.tokens)
    # Three chunks, but for a row that ended.
    assert max(tokens.values()) == 6


@pytest.mark.slow
def test_calls_that_may_compile_are_told_apart_wherever_programs_differ():
    """Devices enter a call by its key: one by one where the program is new to them, else at once."""
    model, variables = policy()
    silent = jax.tree.map(lambda s: jnp.zeros(s.shape), noise_shapes(model.arch))

    def programs_of(variables, turns=None):
        subject, keys = make(), set()
        (schedule,) = subject.schedules(
            variables, prompts(limit=4), max_prompt_length=WIDTH, turns=turns
        )
        note = lambda device, *key: keys.add(key) or contextlib.nullcontext()
        list(subject.run(variables, schedule, 1.0, compiles=note))
        return keys

    plain = programs_of(variables)
    assert plain == programs_of(variables)
    assert not plain & programs_of(variables | {"noise": silent})
    # Prefills are the same.
    assert plain != programs_of(variables, turns=lambda row, tokens: None)


def test_each_prompt_has_its_own_limit():
    limits = (2, C, 1, 7, C)
    queue = [dataclasses.replace(p, limit=n) for p, n in zip(prompts(), limits, strict=True)]
    rows, free = run(queue, max_concurrent=4), run(prompts())
    expected = [n for n, count in zip(limits, GROUPS, strict=True) for _ in range(count)]
    assert [len(row[0]) for row in rows] == expected
    for row, longer, length in zip(rows, free, expected, strict=True):
        assert row[0] == longer[0][:length] and row[2] == "length"


def test_rows_of_a_benchmark_end_at_the_lengths_that_it_names():
    """They end as by a stop token, which itself ends nothing; lengths go on from call to call."""
    lengths, unbounded = (2, 5, C, 1, 30, 3, 7), run(prompts())
    engine = make(row_lengths=lengths, stop_tokens=stops())
    for call in range(2):
        rows = values(complete(engine, prompts(), max_concurrent=4))
        for number, (tokens, *_) in enumerate(unbounded):
            length = lengths[(call * len(unbounded) + number) % len(lengths)]
            assert rows[number][0] == tokens[:length]
            assert rows[number][2] == ("stop" if length < C else "length")


def test_at_a_fixed_number_of_slots_a_row_is_bitwise_independent_of_the_others():
    """Row 3 runs among others that are longer or shorter, and end elsewhere."""
    options = {"compact": False, "max_concurrent": 4}
    mine = prompts()
    theirs = prompts(1, (82, 11, 2, 77, 1))
    mixed = [theirs[0], mine[1], *theirs[2:]]
    before, after = (run(q, stop_tokens=stops(), **options) for q in (mine, mixed))
    assert before[2:5] == after[2:5]
    assert all(a[0] != b[0] for a, b in zip(before[:2], after[:2], strict=True))
    alone = run([mine[1]], stop_tokens=stops(), **options)
    assert alone == before[2:5]


def layers_of_7b():
    """Makes three layers of Qwen2.5-7B in NVFP4 with LoRA, and their variables."""
    arch = dataclasses.replace(architecture.KNOWN["qwen2.5-7b"], num_layers=3, vocab_size=4096)
    model = Transformer(arch, "nvfp4", LoraConfig(32, 32.0), jnp.bfloat16)
    frozen = random_base(model, jax.random.key(0))
    params = jax.tree.map(lambda x: x + 1e-2, init_params(model, frozen, jax.random.key(1)))
    return model, {"frozen": frozen, "params": params}


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [8, 64])
def test_rows_that_are_parked_find_what_kernels_wrote(slots):
    """The cache has too few pages for the ends of all rows. Results are equal bit for bit."""
    model, policy = layers_of_7b()
    queue = prompts(0, np.random.default_rng(0).integers(150, 200, slots), [2] * slots, limit=200)
    limits = {"max_prompt_length": 200, "max_concurrent": slots}
    results, parked = [], []
    for tokens in (None, slots * 300):
        sampler = Engine(model, EngineSpec(4000, chunk=8), compact=False, kv_cache_tokens=tokens)
        results.append(values(complete(sampler, queue, 1.0, policy, **limits)))
        parked.append(sampler.times_parked)
    assert results[0] == results[1] and parked[0] == 0 < parked[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("slots", "shortest", "shares"),
    [
        *[(8, 1, 0), (128, 300, 0), (8, 1, 1), (32, 300, 1)],
        *[slow(32, 300, 0), slow(64, 300, 0), slow(128, 300, 1)],
    ],
)
def test_a_row_is_bitwise_independent_of_the_others_through_all_kernels(
    monkeypatch, slots, shortest, shares
):
    """Products with LoRA, epilogues, attention over pages, prefill, head and sampling run as in a 7B."""
    monkeypatch.setattr(decode_attention, "LEAST_SHARED", 1 if shares else 1 << 30)
    model, policy = layers_of_7b()
    sampler = Engine(model, EngineSpec(4000), compact=False)

    def sampled(seed, mine):
        draw = np.random.default_rng(seed)
        # More rows than slots, of unlike prompts; some share one.
        lengths, groups = draw.integers(shortest, 400, slots), draw.integers(1, 3, slots)
        queue = prompts(seed, [*lengths], [*groups], limit=int(draw.integers(20, 90)))
        queue[slots // 2 : slots // 2 + 3] = mine
        first = sum(len(prompt.keys) for prompt in queue[: slots // 2])
        limits = {"max_prompt_length": 400, "max_concurrent": slots}
        rows = values(complete(sampler, queue, 1.0, policy, **limits))
        return rows[first : first + 6], rows[0]

    mine = prompts(7, (300, 390, 400), (1, 3, 2), limit=100)
    (expected, other), *others = (sampled(seed, mine) for seed in range(3))
    assert [len(tokens) for tokens, *_ in expected] == [100] * 6
    for actual, neighbour in others:
        assert actual == expected and neighbour != other


@pytest.mark.slow
def test_attention_learns_which_pages_rows_share_where_prompts_are_long(monkeypatch):
    monkeypatch.setattr(decode_attention, "supports_sharing", lambda *_: None)
    told, attend = [], decode_attention.decode_attention

    def watched(*arguments, shared, **options):
        told.append(shared is not None)
        return attend(*arguments, shared=shared, **options)

    monkeypatch.setattr(decode_attention, "decode_attention", watched)
    shared, alone = prompts(0, (20, 9), (3, 1)), prompts(0, (20, 9), (1, 1))
    # 19 tokens are two whole pages of eight; no prompt has a hundred.
    for queue, least, is_told in ((shared, 2, True), (shared, 100, False), (alone, 1, False)):
        monkeypatch.setattr(decode_attention, "LEAST_SHARED", least)
        told.clear()
        jax.clear_caches()  # of layers that were traced before
        assert len(run(queue)) == sum(len(prompt.keys) for prompt in queue)
        assert told and set(told) == {is_told}
    jax.clear_caches()


@pytest.mark.slow
def test_other_rows_adapters_and_noise_reach_the_rows_without_recompiling():
    plain, variables = policy()
    model = plain.clone(lora=LoraConfig(2, 2.0))
    params = init_params(model, variables["frozen"], jax.random.key(1))
    silent = jax.tree.map(lambda s: jnp.zeros(s.shape), noise_shapes(model.arch))
    first = variables | {"params": params, "noise": silent}
    moved = jax.tree.map(lambda x: x + 0.1, first)
    other_prompts = prompts(1, (2, 79, 2, 78, 11), (1, 4, 3, 1, 1))
    programs = engine.decode.dense, engine.prefill.dense, device_pool.copied
    sampler = Engine(model, EngineSpec(64, chunk=4), page_size=8)
    logps, compiled = [], []
    for queue, values, temperature in [
        (prompts(), first, 1.0),
        (prompts(), first | {"params": moved["params"]}, 1.0),
        (prompts(), first | {"noise": moved["noise"]}, 1.0),
        (other_prompts, moved, 0.0),
    ]:
        rows = complete(sampler, queue, temperature, values, max_concurrent=4)
        logps.append(rows[0].behaviour_logps)
        compiled.append([program._cache_size() for program in programs])
    assert compiled == [compiled[0]] * 4
    for changed in logps[1:3]:
        assert abs(changed[0] - logps[0][0]) > 1e-4


class Recorder:
    """A policy with almost no layers and the same scores after any token, which records the shapes of its steps."""

    arch = architecture.Architecture("qwen2", 4, 2, 16, 1, 1, 1, 2)
    dtype, weights, group, tensor, over = jnp.float32, "float32", 1, 1, None
    own_part = property(lambda self: self)

    def __init__(self, probabilities=(0.5, 0.4, 0.1)):
        self.decoded, self.prefilled = [], []
        self.variables = {"frozen": {"embed_tokens": jnp.log(jnp.array(probabilities))[:, None]}}

    def apply(self, variables, tokens, *, cache, adapter):
        note = self.decoded if tokens.shape[1] == 1 else self.prefilled
        jax.debug.callback(lambda: note.append(tokens.shape))
        return jnp.ones((*tokens.shape, 1)), cache


def record(count, prompts=1, limit=40, max_concurrent=None, **options):
    """Samples rows of prompts of five tokens each; returns the batch sizes of the steps, and the prefills."""
    model = Recorder()
    subject = Engine(model, EngineSpec(3, chunk=8), stop_tokens=(2,), page_size=4, **options)
    keys = np.arange(2 * count, dtype=np.uint32).reshape(count, 2)
    queue = [QueuedPrompt(np.zeros(5, np.int32), keys, limit)] * prompts
    sizes = {"max_prompt_length": 5, "max_concurrent": max_concurrent}
    rows = complete(subject, queue, 1.0, model.variables, **sizes)
    jax.effects_barrier()
    assert sorted(rows) == list(range(count * prompts))
    return [rows for rows, _ in model.decoded], model.prefilled


def test_the_batch_shrinks_as_rows_end_and_by_few_sizes():
    sizes, _ = record(64, limit=80)
    assert sizes == sorted(sizes, reverse=True)
    assert {64, 8} <= set(sizes) <= {64, 32, 16, 8}
    assert set(record(64, limit=80, compact=False)[0]) == {64}


@pytest.mark.parametrize(
    ("slots", "events"),
    [
        (2, "start start read start read read"),  # 12 tokens of 4 each
        pytest.param(
            *(1, "start read start read start read start start read start read read"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_device_goes_on_while_the_host_reads_unless_a_row_waits(monkeypatch, slots, events):
    seen = []
    noting(monkeypatch, engine, "decode", lambda *_: seen.append("start"))
    noting(monkeypatch, jax, "device_get", lambda *_: seen.append("read"))
    run(prompts(0, (5, 5), (1, 1), limit=12), max_concurrent=slots)
    assert " ".join(seen) == events


def test_rows_are_given_when_the_next_chunk_is_under_way(monkeypatch):
    """The device does not wait for what is done with them."""
    seen = []
    noting(monkeypatch, engine, "decode", lambda *_: seen.append("start"))
    queue, sizes = prompts(0, (5, 5, 5), (1, 1, 1), limit=4), {"max_prompt_length": WIDTH}
    for pieces in make().stream(policy()[1], queue, 1.0, max_concurrent=1, **sizes):
        seen += [piece.row for piece in pieces]
    assert seen == ["start", "start", 0, "start", 1, 2]


def test_a_row_that_a_stop_string_ended_runs_one_chunk_too_far_at_most(monkeypatch):
    free, live = run(prompts(0, (5, 5), (1, 1), limit=40)), []
    note = lambda variables, pool, rows, *_: live.append(int(rows.tree().live.sum()))
    noting(monkeypatch, engine, "decode", note)
    stops = StopStrings((tagged(free[0][0][:2]),), tagged)
    rows = run(prompts(0, (5, 5), (1, 1), limit=40), stop_strings=stops)
    assert len(rows[0][0]) == 2 and len(rows[1][0]) == 40
    assert live == [2, 2] + [1] * 8


@pytest.mark.parametrize(
    ("weights", "chosen"), [("nvfp4", "packed"), ("bfloat16", "dense"), ("float32", "dense")]
)
def test_weights_that_are_not_packed_have_a_program_of_their_own(weights, chosen):
    """Only it has options for XLA, which jit refuses within another jit."""
    program = programs.program("model")(lambda pool, model: pool + 1)
    model = policy()[0].clone(weights=weights)
    assert program.of(model) is getattr(program, chosen)
    expected = contextlib.nullcontext()
    if chosen == "dense":
        expected = pytest.raises(ValueError, match="compiler_options")
    with expected:
        assert jax.jit(lambda pool: program(pool, model=model))(jnp.zeros(2)).sum() == 2


@pytest.mark.parametrize("is_committed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_batch_size_is_compiled_once(caplog, is_committed):
    _, variables = policy()
    if is_committed:
        variables = jax.device_put(variables, jax.devices()[0])
    # Numbers of tokens that no other test has.
    subject = make(chunk=3, num_tokens=62 - is_committed)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        stream = subject.stream(variables, prompts(limit=9), 1.0, max_prompt_length=WIDTH)
        assert len(list(stream)) == 3
    found = [record.message for record in caplog.records if "decode" in record.message]
    assert sum(message.startswith("Compiling") for message in found) == 1


@pytest.mark.slow
def test_a_penalty_remembers_what_chunks_made_that_the_host_has_not_read():
    penalized = functools.partial(run, prompts(), 0.0, repetition_penalty=1.5)
    assert_same(penalized(), penalized(chunk=16))
    assert [row[0] for row in penalized()] != [row[0] for row in run(prompts(), 0.0)]


def test_the_completions_of_a_prompt_pay_for_one_prefill():
    assert record(8, prompts=16)[1] == [(16, 16)]


def test_a_row_that_fits_runs_though_its_bound_would_not():
    few = prompts(0, (20,), (2,))
    assert_same(run(few, kv_cache_tokens=19 + C, page_size=8), run(few, page_size=8))
    assert run([]) == []


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (LENGTHS, {"kv_cache_tokens": 80}, "prompt 1: .* space for 80 tokens; a row may need 90"),
        (LENGTHS, {"kv_cache_fraction": 0.5}, "does not report its memory: give kv_cache_tokens"),
        ((3, 83), {}, "prompt 1: got 83 tokens; must have 1 to"),
        ((0,), {}, "prompt 0: got 0 tokens"),
    ],
)
def test_a_row_that_cannot_fit_is_an_error_before_anything_runs(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        run(prompts(0, lengths, [1] * len(lengths)), **options)


@pytest.mark.parametrize(
    "options,free,pages",
    [
        # What eight rows of 44 tokens and their prompt can need, and scratch.
        ({}, None, 1 + 8 * 11 + 1),
        ({"kv_cache_tokens": 100}, None, 2 + 25),
        # At 16 bytes a token; of nine tenths, or a half, up to an eighth is left over.
        ({}, 16 * 200, 2 + 176 // 4),
        ({"kv_cache_fraction": 0.5}, 16 * 200, 2 + 96 // 4),
        ({"kv_cache_fraction": 0.5}, 16 * 10**6, 1 + 8 * 11 + 1),
    ],
)
def test_the_cache_takes_what_rows_can_need_or_what_there_is(options, free, pages, monkeypatch):
    # What a fraction is not given of is left for scores and prefill.
    beside = 0 if "kv_cache_fraction" in options else 500
    stats = free and {"bytes_limit": free + beside + 1000, "bytes_in_use": 1000}
    monkeypatch.setattr(engine.runtime, "memory_stats", lambda: stats)
    monkeypatch.setattr(kv_capacity.Demand, "workspace", lambda *_: {"scores": 400, "prefill": 100})

    def pool(arch, num_pages, *_):
        raise NotImplementedError(f"{num_pages} pages")

    monkeypatch.setattr(engine.kv_cache, "pool", pool)
    with pytest.raises(NotImplementedError, match=f"^{pages} pages$"):
        record(8, max_concurrent=8, **options)


def test_absent_slots_are_as_many_as_the_cache_is_expected_to_hold():
    """A row can need eleven of 27 pages, and needs four if it ends after a quarter of its limit."""
    assert set(record(8, kv_cache_tokens=100)[0]) == {6}


@pytest.mark.parametrize(("rows", "slots"), [(2, 2), (3, 2), (4, 2), (5, 5)])
def test_absent_slots_are_no_number_with_which_fused_layers_would_be_faster(
    monkeypatch, rows, slots
):
    most = lambda *_, **__: 2  # as if fused layers decoded two rows
    monkeypatch.setattr(engine.fused_decode, "most_rows", most)
    sampler = Engine(policy()[0], EngineSpec(64), compact=False)
    schedules = sampler.schedules({}, prompts(0, [5], [rows], limit=4), max_prompt_length=5)
    assert schedules[0]._shapes.sizes[0] == slots


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [slow({}), {"compact": False}, slow({"repetition_penalty": 1.2})],
)
def test_rows_that_are_parked_are_those_that_never_were(options, monkeypatch):
    """Their pages go to the host and come back as they are, so results are equal bit for bit."""
    parked = []
    noting(monkeypatch, scheduler.Schedule, "_park", lambda _, row: parked.append(row.index))
    options = options | {"max_concurrent": 6, "page_size": 4, "chunk": 1}
    queue = prompts(0, (5, 9, 3, 7, 4), (2, 3, 1, 4, 2))
    rows = run(queue, kv_cache_tokens=40, **options)
    assert len(set(parked)) > 3
    parked.clear()
    free = run(queue, **options)
    assert parked == []
    if options.get("compact") is False:
        assert rows == free
    else:
        assert_same(rows, free)


@jax.jit
def plain_pass(padded):
    model, variables = policy()
    return layers.logits(model.apply(variables, padded[None])[0][0], head(variables["frozen"]))


def plain_scores(prompt, tokens):
    """Computes logits [n, V] before each token of a completion by one pass over at most 122 tokens."""
    row = np.array([*prompt, *tokens])
    return np.float64(plain_pass(np.pad(row, (0, 122 - len(row)))))[len(prompt) - 1 : len(row) - 1]


def likeliest(prompt, tokens, penalty):
    """Returns the likeliest token in the place of each token of a completion, with a repetition penalty."""
    scores = plain_scores(prompt, tokens)
    for place, row in enumerate(scores):
        seen = np.unique([*prompt, *tokens[:place]])
        row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
    return scores.argmax(axis=1).tolist()


@pytest.mark.slow
def test_the_repetition_penalty_acts_on_tokens_of_prompt_and_completion():
    """It acts as in transformers; log-probabilities are the model's own."""
    queue = prompts(0, LENGTHS[:2], (1, 1))
    bent = run(queue, 0.0, max_concurrent=1, repetition_penalty=1.5)
    for prompt, (tokens, logps, _) in zip(queue, bent, strict=True):
        unbent, expected = (likeliest(prompt.tokens, tokens, penalty) for penalty in (1.0, 1.5))
        assert tokens == expected != unbent
        wanted = jax.nn.log_softmax(plain_scores(prompt.tokens, tokens))
        np.testing.assert_allclose(logps, wanted[np.arange(C), tokens], atol=1e-4)


def test_a_stop_string_ends_a_row_with_the_token_that_completes_it():
    free = run(prompts())
    # Across two tokens of row 0, and within one of row 5.
    stops = StopStrings((tagged(free[0][0][5:7])[1:-1], f"{free[5][0][2]}>"), tagged)
    expected = [stops.end(tokens) or len(tokens) for tokens, _, _ in free]
    assert expected[0] <= 7 and expected[5] <= 3 and max(expected) == C
    rows = run(prompts(), max_concurrent=4, stop_strings=stops)
    pairs = zip(rows, free, expected, strict=True)
    for (tokens, logps, ended), (whole, wanted, _), length in pairs:
        assert tokens == whole[:length]
        np.testing.assert_allclose(logps, wanted[:length], atol=1e-5)
        assert ended == ("stop" if stops.end(tokens) else "length")


def of_each_device(function, *arrays):
    """Computes on one device the results of two devices that decode rows together."""
    model = types.SimpleNamespace(over="group")
    run = functools.partial(function, model)
    return jax.vmap(run, axis_name="group", axis_size=2)(*arrays)


def test_of_devices_that_decode_together_all_take_the_first_ones_tokens():
    tokens = jnp.array([[1, 2, 3], [1, 5, 3]], jnp.int32)
    logps = jnp.array([[-1.5, -2.0, -0.0], [-1.5, -3.0, -0.1]])
    found, their_logps = of_each_device(decode_step.agreed, tokens, logps)
    np.testing.assert_array_equal(found, [tokens[0]] * 2)
    np.testing.assert_array_equal(their_logps, [logps[0]] * 2)


@pytest.mark.parametrize("words", [10, 11])  # 11 rows of the head cannot be shared by two
def test_devices_that_decode_together_share_out_the_scores(words):
    matrix = jax.random.normal(jax.random.key(0), (words, 8))
    hidden = jax.random.normal(jax.random.key(1), (3, 8))
    scores = lambda model, _: decode_step.scorer(model, matrix)(hidden)
    found = of_each_device(scores, jnp.zeros(2))
    # Scores are up to 5; one near 0 is a sum of such numbers, and as far off as the last place of these.
    np.testing.assert_allclose(found, [layers.logits(hidden, matrix)] * 2, rtol=1e-6, atol=5e-7)
