"""Tests sampling against a plain loop of full forward passes, and its tokens against exact distributions."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from qerl_jax.checkpoint import base_model, peft
from qerl_jax.config import LoraConfig
from qerl_jax.generation import sampling
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.model import architecture, layers, logprobs
from qerl_jax.model.transformer import Transformer, head
from qerl_jax.rl.objective import token_logps
from tests.experiences import in_one_batch, of_lines
from tests.golden_files import GOLDEN
from tests.pallas_kernels.common import slow
from tests.qerl_jax.generation.test_engine import Recorder, complete

P, G, C = 3, 2, 6
LENGTHS = np.array([3, 7, 5], np.int32)
WIDTH = 7
ROWS = np.repeat(np.arange(P), G)


@functools.cache
def policy(name):
    """Loads a recorded float32 model; qwen2_untied has its recorded adapter."""
    folder = GOLDEN / "models" / name
    lora = LoraConfig(8, 16.0) if name == "qwen2_untied" else None
    model = Transformer(architecture.load(folder), "float32", lora, jnp.float32)
    variables = {"frozen": base_model.read_base(folder, model)}
    if lora is not None:
        variables["params"] = peft.import_adapter(GOLDEN / "lora/qwen2_untied_r8", model)
    return model, variables


def sampled(engine, variables, tokens, lengths, row_keys, temperature, limit=C):
    """Returns rows of an engine as arrays [B, limit], with 0 after their ends."""
    groups = np.asarray(jax.random.key_data(row_keys)).reshape(len(tokens), -1, 2)
    queue = [
        QueuedPrompt(prompt[:length], group, limit)
        for prompt, length, group in zip(tokens, lengths, groups, strict=True)
    ]
    rows = complete(engine, queue, temperature, variables, max_prompt_length=tokens.shape[1])
    rows = [rows[number] for number in sorted(rows)]
    padded = lambda x: np.zeros(limit) if x is None else np.pad(x, (0, limit - len(x)))
    out = types.SimpleNamespace(lengths=np.array([len(row.tokens) for row in rows]))
    for name in ("tokens", "behaviour_logps", "entropies"):
        setattr(out, name, np.stack([padded(getattr(row, name)) for row in rows]))
    out.stopped = np.array([row.ended == "stop" for row in rows])
    return out


def prompts(name):
    """Makes int32 [P, WIDTH], of which each prompt uses as many tokens as it is long."""
    vocab = policy(name)[0].arch.vocab_size
    return np.random.default_rng(0).integers(1, vocab, (P, WIDTH)).astype(np.int32)


def keys(seed=0, rows=P * G):
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(seed), jnp.arange(rows))


def sample(name, temperature=1.0, *, row_keys=None, num_tokens=None, **spec):
    model, variables = policy(name)
    row_keys = keys() if row_keys is None else row_keys
    engine = Engine(model, EngineSpec(num_tokens or model.arch.vocab_size, **spec))
    return sampled(engine, variables, prompts(name), LENGTHS, row_keys, temperature)


@pytest.mark.parametrize(
    "name", ["qwen2_untied", *map(slow, ("qwen2_tied", "qwen3", "llama3", "mistral"))]
)
def test_greedy_tokens_are_the_likeliest_of_a_pass_without_cache(name):
    (model, variables), actual = policy(name), sample(name, 0.0)
    lengths = np.repeat(LENGTHS, G)
    rows = zip(np.repeat(prompts(name), G, axis=0), lengths, actual.tokens, strict=True)
    padded = [[*prompt[:n], *tokens, *[0] * (WIDTH - n)] for prompt, n, tokens in rows]
    hidden, _ = jax.jit(model.apply)(variables, np.array(padded, np.int32))
    logps = jax.nn.log_softmax(layers.logits(hidden, head(variables["frozen"])))
    places = lengths[:, None] - 1 + np.arange(C)
    logps = np.take_along_axis(np.asarray(logps), places[..., None], axis=1)
    np.testing.assert_array_equal(actual.tokens, logps.argmax(axis=-1))
    np.testing.assert_allclose(actual.behaviour_logps, logps.max(axis=-1), atol=1e-4)
    assert (actual.lengths == C).all() and not actual.stopped.any()


@functools.cache
def scorer(name, num_tokens):
    model, _ = policy(name)

    def score(variables, batch, temperature):
        options = {"temperature": temperature, "num_tokens": num_tokens}
        return token_logps(model, variables, batch, **options)

    return jax.jit(score)


def recomputed(name, completions, temperature, num_tokens):
    """Computes the trainer's log-probabilities and entropies of completions, [B, C] each."""
    mask, zeros = np.ones_like(completions, bool), np.zeros_like(completions, np.float32)
    experience = of_lines(prompts(name), LENGTHS, completions, mask, zeros, zeros[:, 0])
    values = scorer(name, num_tokens)(policy(name)[1], in_one_batch(experience), temperature)
    return [np.reshape(x[: completions.size], completions.shape) for x in values]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_returned_log_probabilities_and_entropies_are_the_trainers(temperature):
    """They are taken before truncation, and entropies change no token. There may be fewer ids than rows of the embedding."""
    options = {"num_tokens": 500, "params": SamplingParams(top_k=20, top_p=0.9)}
    actual = sample("qwen2_untied", temperature, entropies=True, **options)
    without = sample("qwen2_untied", temperature, **options)
    assert actual.tokens.max() < 500 and not without.entropies.any()
    np.testing.assert_array_equal(actual.tokens, without.tokens)
    logps, entropies = recomputed("qwen2_untied", actual.tokens, temperature, 500)
    for found in (actual, without):
        np.testing.assert_allclose(found.behaviour_logps, logps, atol=1e-4)
    np.testing.assert_allclose(actual.entropies, entropies, atol=1e-4)
    if temperature == 0:
        at_one, _ = recomputed("qwen2_untied", actual.tokens, 1.0, 500)
        np.testing.assert_array_equal(logps, at_one)


@pytest.mark.slow
def test_the_mean_surprise_of_sampled_tokens_estimates_the_entropies():
    """Tokens are sampled without truncation; the bound is five standard errors."""
    free = sample("qwen2_untied", row_keys=keys(1, P * 64), entropies=True)
    surplus = free.entropies + free.behaviour_logps
    assert abs(surplus.mean()) < 5 * surplus.std() / surplus.size**0.5


def memoryless(probabilities, length, stop_tokens, rows):
    model = Recorder(probabilities)
    engine = Engine(model, EngineSpec(len(probabilities)), stop_tokens=stop_tokens)
    tokens = np.zeros((1, 1), np.int32)  # nothing to prefill
    out = sampled(engine, model.variables, tokens, [1], keys(rows=rows), 1.0, limit=length)
    jax.effects_barrier()
    return out, len(model.decoded) + len(model.prefilled)


def test_generation_ends_with_its_longest_row():
    """It takes one step per token and a prefill of dead rows, and no step after the last stop."""
    out, steps = memoryless([0.5, 0.25, 0.25], 1000, (2,), rows=8)
    assert out.stopped.all()
    assert 1 < out.lengths.min() + 1 < out.lengths.max() < 100
    assert steps == out.lengths.max() + 1


def assert_frequencies(counts, probabilities):
    """A right sampler fails one seed in a thousand, and the seed is fixed."""
    assert stats.chisquare(counts, np.sum(counts) * probabilities).pvalue > 1e-3


@pytest.mark.slow
def test_successive_tokens_of_a_row_are_independent_and_have_their_frequencies():
    probabilities = np.array([0.5, 0.3, 0.2])
    out, _ = memoryless(probabilities, 2, (), rows=20_000)
    pairs = np.bincount(out.tokens @ [3, 1], minlength=9)
    assert_frequencies(pairs, np.outer(probabilities, probabilities).reshape(-1))
    np.testing.assert_allclose(out.behaviour_logps, np.log(probabilities)[out.tokens], atol=1e-6)


SCORES = np.array([1.0, -0.5, 0.3, 2.0, 0.0, 1.5, 9.0, 7.0], np.float32)


def next_tokens(scores, key, num_tokens, temperature=1.0):
    """Samples a token for each row of scores without truncation."""
    row_keys, params = jax.random.split(key, len(scores)), SamplingParams()
    return sampling.next_token(scores, row_keys, jnp.float32(temperature), num_tokens, params)


@pytest.mark.parametrize(
    "temperature,params,kept",
    [
        *[(temperature, SamplingParams(), [0, 1, 2, 3, 4, 5]) for temperature in (0.7, 2.0)],
        (0.7, SamplingParams(top_k=3), [0, 3, 5]),
    ],
)
def test_sampled_frequencies_are_the_distributions(temperature, params, kept):
    """There are 20,000 draws; ids 6 and 7 have the largest scores but are not the tokenizer's."""
    scores = jnp.broadcast_to(SCORES, (20_000, len(SCORES)))
    draw = jax.jit(functools.partial(sampling.next_token, num_tokens=6, params=params))
    tokens, logps = jax.device_get(draw(scores, keys(rows=20_000), jnp.float32(temperature)))
    probabilities = np.exp(SCORES[:6].astype(np.float64) / temperature)
    probabilities /= probabilities.sum()
    assert set(tokens.tolist()) == set(kept)
    counts = np.bincount(tokens, minlength=6)[kept]
    assert_frequencies(counts, probabilities[kept] / probabilities[kept].sum())
    np.testing.assert_allclose(logps, np.log(probabilities)[tokens], atol=1e-5)


def test_noise_is_gumbels_at_both_ends():
    """Large noise lets tokens of small probability win; a share of 1e-8 of the noise is above 18.4."""
    counts = [0, 1, 2, 3, 42, 429, 4294, 2**20, 2**31, 2**32 - 2**20, 2**32 - 2, 2**32 - 1]
    actual = sampling.gumbel(jnp.array(counts, jnp.uint32))
    u = (np.array(counts) + 0.5) / 2**32
    # Nothing is lost where 1 - u is too small for a float32: such a token loses anyway.
    expected = -np.log(-np.log1p(-np.minimum(u, 1 - 2.0**-24)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    assert (np.diff(actual) <= 0).all() and actual[0] > 22.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "num_tokens", "rows"),
    # The last ones are two blocks.
    [*map(slow, (1000, 256, 100), (990, 256, 97), [20_000] * 3), (300, 290, 1_000)],
)
def test_draws_from_blocks_have_their_frequencies_into_the_tails(vocab, num_tokens, rows):
    """Masses are from a half to 1e-5, in 50 draws of so many rows; rare ids are counted together."""
    logits = np.random.default_rng(vocab).permutation(np.linspace(0, -12, vocab)).astype(np.float32)
    exact = np.exp(logits[:num_tokens].astype(np.float64))
    exact /= exact.sum()
    scores = jnp.broadcast_to(logits, (rows, vocab))

    counts = jax.jit(
        lambda key: jnp.bincount(next_tokens(scores, key, num_tokens)[0], length=vocab)
    )
    found = sum(np.asarray(counts(key)) for key in jax.random.split(jax.random.key(1), 50))
    assert found[num_tokens:].sum() == 0 and found.sum() == 50 * rows
    # Of ids in order of their probability, groups of which each is expected 50 times or more.
    order = np.argsort(-exact)
    group = np.floor(np.cumsum(exact[order]) * found.sum() / 50).astype(int)
    group = np.unique(group, return_inverse=True)[1]
    summed = np.bincount(group, found[:num_tokens][order])
    assert len(summed) > 40
    assert_frequencies(summed, np.bincount(group, exact[order]))


def test_at_temperature_0_the_likeliest_is_taken_though_its_block_is_not():
    """There are 300 ids: the first block has the most mass, the last one the likeliest id."""
    scores = jnp.concatenate([jnp.zeros(256), jnp.full(43, -9.0), jnp.array([0.5])])[None]
    draw = jax.jit(lambda key: next_tokens(scores, key, 300, temperature=0)[0])
    assert draw(jax.random.key(0)) == 299


def kept(params, logps):
    out = np.asarray(sampling.truncate(jnp.asarray(logps), params))
    stays = ~np.isneginf(out)
    np.testing.assert_array_equal(out[stays], np.asarray(logps)[stays])
    return stays


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        *[({}, "11111"), ({"top_k": 5}, "11111"), ({"top_k": 9}, "11111")],
        *[({"top_k": 1}, "01000"), ({"top_k": 2}, "11000")],
        *[({"top_p": mass}, "01000") for mass in (0.01, 1e-46, 0.39)],
        *[({"top_p": 0.41}, "11000"), ({"top_p": 0.69}, "11000"), ({"top_p": 0.71}, "11010")],
        *[({"min_p": 1.0}, "01000"), ({"min_p": 0.7}, "11000"), ({"min_p": 0.3}, "11010")],
        # Of the two that top_k leaves, the likelier one has 4/7 of the mass.
        ({"top_k": 2, "top_p": 0.55}, "01000"),
        ({"top_p": 0.95, "min_p": 0.3}, "11010"),
    ],
)
def test_truncation_by_hand(options, stays):
    logps = np.log(np.array([0.3, 0.4, 0.05, 0.15, 0.1], np.float32))
    assert kept(SamplingParams(**options), logps).tolist() == [stay == "1" for stay in stays]


@pytest.mark.parametrize("params", [SamplingParams(top_k=2), SamplingParams(top_p=0.5)])
def test_tokens_as_likely_as_the_last_one_kept_stay(params):
    logps = np.log(np.array([0.2, 0.4, 0.1, 0.2, 0.1], np.float32))
    assert kept(params, logps).tolist() == [True, True, False, True, False]


def truncation_oracle(params, logps):
    """Finds the kept tokens of one row with a loop from the likeliest down."""
    order = np.argsort(-logps)
    probabilities = np.exp(logps.astype(np.float64))
    if params.top_k:
        order = order[: params.top_k]
    total, mass, last = probabilities[order].sum(), 0.0, 0
    while last < len(order) and mass < params.top_p * total:
        mass, last = mass + probabilities[order[last]], last + 1
    order = order[:last]
    order = order[probabilities[order] >= params.min_p * probabilities[order[0]]]
    return np.isin(np.arange(len(logps)), order)


@pytest.mark.parametrize(
    "options",
    [{"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}],
)
def test_truncation_equals_a_loop_from_the_likeliest_down(options):
    params = SamplingParams(**options)
    scores = np.random.default_rng(0).normal(scale=2, size=(4, 5, 60)).astype(np.float32)
    logps = np.asarray(logprobs.log_softmax(jnp.asarray(scores), 1.0, num_tokens=55))
    actual = kept(params, logps)
    expected = np.apply_along_axis(lambda row: truncation_oracle(params, row), -1, logps)
    np.testing.assert_array_equal(actual, expected)
    assert not actual[..., 55:].any()
