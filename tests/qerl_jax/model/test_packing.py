"""Tests rows packed on one axis of tokens: what attention sees, the way back, and gradients in both directions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import LoraConfig
from qerl_jax.model import packing
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, head, init_params, random_base
from qerl_jax.rl import objective
from qerl_jax.rl.experience import PackedRows
from tests.pallas_kernels.common import slow

# Two prompts, 1 2 and 5 6 7. Completions: 3 4 and 13 14 of the first, 8 9 and 18 of the second. The
# long row stands in the first array of attention, others in the second, where one row is empty.
ROWS = np.array([1, 0, 0, 1, -1]), np.array([3, 2, 2, 3, 0]), np.array([2, 2, 2, 1, 9])
LAYOUT = packing.pack(*ROWS, tokens=14, arrays=((1, 6), (4, 4)), prompt_width=3)
FLAT = jnp.array([8, 9, 3, 4, 13, 14, 18, 5, 6, 7, 1, 2, 90, 91], jnp.float32)[:, None]
ARRAYS = (
    [[5, 6, 7, 8, 9, 0]],
    [[1, 2, 3, 4], [1, 2, 13, 14], [5, 6, 7, 18], [0, 0, 0, 0]],
)


def test_a_row_is_a_prompt_and_one_of_its_completions_without_a_gap():
    unfolded = LAYOUT.unfold(FLAT)
    assert tuple(x[..., 0].tolist() for x in unfolded) == ARRAYS
    assert LAYOUT.positions.tolist() == [3, 4, 2, 3, 2, 3, 3, 0, 1, 2, 0, 1, 0, 0]
    # Folding brings every real token back to its place.
    assert LAYOUT.fold(unfolded)[:, 0].tolist() == FLAT[:12, 0].tolist() + [0, 0]


def test_the_first_token_of_a_completion_is_predicted_by_its_prompts_last():
    before = LAYOUT.before(FLAT)[:, 0]
    assert before.tolist() == [7, 8, 2, 3, 2, 13, 7] + 7 * [0]


def test_values_of_completions_stand_by_row():
    rows = LAYOUT.by_row(FLAT[:, 0])
    assert rows[:, :2].tolist() == [[8, 9], [3, 4], [13, 14], [18, 0], [0, 0]]
    assert rows.shape == (5, 6) and not rows[:, 2:].any()


def numbered(like):
    """Makes an array of that shape whose values differ."""
    return jnp.arange(1.0, like.size + 1).reshape(like.shape)


@pytest.mark.parametrize("name", ["unfold", "before", "by_row"])
def test_slopes_are_those_of_a_product_with_a_matrix(name):
    """Each function is linear: its matrix is read column by column, and transposed."""
    f = lambda x: jnp.concatenate([y.ravel() for y in jax.tree.leaves(getattr(LAYOUT, name)(x))])
    x = FLAT[:, 0] if name == "by_row" else FLAT
    columns = [f(jnp.zeros_like(x).at[i].set(1)) for i in range(len(x))]
    matrix = np.stack(columns, axis=1)
    weights = numbered(jnp.zeros(len(matrix)))
    slopes = jax.grad(lambda x: jnp.sum(weights * f(x)))(x)
    np.testing.assert_array_equal(slopes.reshape(-1), matrix.T @ np.asarray(weights))
    assert matrix.sum() == len(np.flatnonzero(matrix))  # of zeros and ones


@pytest.mark.parametrize(
    ("tokens", "arrays"), [(11, ((1, 6), (4, 4))), (14, ((1, 4), (4, 4)))], ids=["tokens", "width"]
)
def test_rows_that_do_not_fit_are_an_error(tokens, arrays):
    with pytest.raises(ValueError, match="rows of 12 tokens do not fit"):
        packing.pack(*ROWS, tokens=tokens, arrays=arrays, prompt_width=3)


# Against the model on right-padded rows -------------------------------------------------------------

ARCH = Architecture("qwen3", 64, 32, 48, 2, 4, 2, 8, qk_norm=True)


@functools.cache
def policy():
    model = Transformer(ARCH, "float32", LoraConfig(2, 4.0), jnp.float32)
    base = random_base(model, jax.random.key(0))
    params = init_params(model, base, jax.random.key(1))
    params = jax.tree.map(lambda p: p + 0.2 * jax.random.normal(jax.random.key(2), p.shape), params)
    return model, {"params": params, "frozen": base}


def drawn_rows(share, rows=7, seed=0):
    """Draws prompts by number, lengths of prompts and completions, and the tokens of each row."""
    rng = np.random.default_rng(seed)
    prompts = np.sort(rng.integers(0, 3, rows)) if share else np.arange(rows)
    prompt_lengths = rng.integers(1, 6, rows)[prompts]
    lengths = rng.integers(1, 9, rows)
    texts = {p: rng.integers(0, 64, n) for p, n in zip(prompts, prompt_lengths, strict=True)}
    pairs = zip(prompts, lengths, strict=True)
    tokens = [np.concatenate([texts[p], rng.integers(0, 64, n)]) for p, n in pairs]
    return prompts, prompt_lengths, lengths, tokens


def plain_logps(variables, prompt_lengths, tokens):
    """Computes log-probabilities of the completions one row after the other, from all logits."""
    model = policy()[0]
    longest = max(map(len, tokens))
    padded = np.stack([np.pad(row, (0, longest - len(row)), constant_values=63) for row in tokens])

    def scored(row):
        hidden, _ = model.apply(variables, row[None])
        return jax.nn.log_softmax(hidden[0] @ head(variables["frozen"]).T / 0.7)

    # One program for all rows: nobody sees what fills them up, behind their ends.
    everything = jax.lax.map(scored, jnp.asarray(padded))
    return jnp.concatenate(
        [
            everything[row, np.arange(start - 1, len(own) - 1), own[start:]]
            for row, (own, start) in enumerate(zip(tokens, prompt_lengths, strict=True))
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", slow("layer")])
@pytest.mark.parametrize("share", [True, slow(False)])
@pytest.mark.parametrize(
    ("tokens", "arrays"),
    [
        (100, ((7, 13),)),
        *[slow(128, ((2, 14), (9, 13))), slow(97, ((5, 20), (1, 13), (3, 13)))],
    ],
)
def test_packed_rows_have_the_log_probabilities_and_slopes_of_rows_by_themselves(
    tokens, arrays, share, remat
):
    prompts, prompt_lengths, lengths, rows = drawn_rows(share)
    missing = sum(n for n, _ in arrays) - len(rows)
    of_rows = zip((prompts, prompt_lengths, lengths), (-1, 0, 0), strict=True)
    filled = [np.pad(x, (0, missing), constant_values=fill) for x, fill in of_rows]
    layout = packing.pack(*filled, tokens=tokens, arrays=arrays, prompt_width=5)
    completions = [row[n:] for row, n in zip(rows, prompt_lengths, strict=True)]
    firsts = np.unique(prompts, return_index=True)[1]
    # By the order of `pack`: completions, then each prompt once.
    flat = np.concatenate([*completions, *(rows[i][: prompt_lengths[i]] for i in firsts)])
    flat = np.pad(flat, (0, tokens - len(flat)), constant_values=63)
    model, variables = policy()
    weights = jax.random.normal(jax.random.key(3), (lengths.sum(),))
    unused = {"mask": None, "behaviour_logps": None, "advantages": None, "fixed": {}}
    batch = PackedRows(layout, jnp.asarray(flat, jnp.int32), **unused)
    options = {"temperature": 0.7, "num_tokens": 64, "remat": remat}

    def packed(params):
        with_params = variables | {"params": params}
        logps, _ = objective.token_logps(model, with_params, batch, **options)
        return jnp.sum(weights * logps[: lengths.sum()]), logps[: lengths.sum()]

    def plain(params):
        logps = plain_logps(variables | {"params": params}, prompt_lengths, rows)
        return jnp.sum(weights * logps), logps

    found, expected = (
        jax.jit(jax.grad(f, has_aux=True))(variables["params"]) for f in (packed, plain)
    )
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-5)
    for a, e in zip(jax.tree.leaves(found[0]), jax.tree.leaves(expected[0]), strict=True):
        # A slope is a sum over tokens, whose float32 roundings are as large as its largest terms ask.
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * max(1, np.abs(e).max()))
