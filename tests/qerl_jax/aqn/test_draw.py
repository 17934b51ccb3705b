"""Tests noise of a single row: a function of key and number that affects only that row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import decode_attention
from pallas_kernels.finished_linear import decode as fused
from qerl_jax.aqn import draw as noise
from qerl_jax.config import LoraConfig
from qerl_jax.model import fused_decode
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, init_params, noise_shapes, random_base
from tests.pallas_kernels.devices import h200  # noqa: F401

ARCH = Architecture("qwen2", 64, 32, 48, 2, 4, 2, 8)
WIDE = Architecture("qwen2", 64, 512, 48, 3, 4, 2, 8)
SHAPES = noise_shapes(ARCH, final_norm=True)
KEY = jax.random.key(7)


@functools.cache
def policy():
    model = Transformer(ARCH, "float32", LoraConfig(2, 4.0, train_norms=True), jnp.float32)
    frozen = random_base(model, jax.random.key(0))
    return model, {"params": init_params(model, frozen, jax.random.key(1)), "frozen": frozen}


def drawn(numbers, tokens=None, per="group", sigma=0.3):
    tokens = None if tokens is None else jnp.array(tokens)
    return noise.row_noise(KEY, sigma, SHAPES, per).draw(jnp.array(numbers), tokens)


def leaves(tree):
    """Returns the noise of each row, [B, everything]."""
    parts = [np.moveaxis(np.asarray(leaf), -2, 0) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


def of_row(tree, row):
    return jax.tree.map(lambda leaf: leaf[..., row, :], tree)


@pytest.mark.slow
@pytest.mark.parametrize("per", ["group", "sequence"])
def test_a_number_has_one_noise_wherever_and_with_whomever_it_is_drawn(per):
    first, again = leaves(drawn([3, 8, 3], per=per)), leaves(drawn([5, 3], per=per))
    np.testing.assert_array_equal(first[0], first[2])
    np.testing.assert_array_equal(first[0], again[1])
    jitted = jax.jit(noise.row_noise(KEY, 0.3, SHAPES, per).draw)(jnp.array([3, 8, 3]))
    np.testing.assert_allclose(leaves(jitted), first, rtol=1e-6)


def test_a_rows_noise_is_that_of_its_own_key():
    """The key is the step's key with the number of the row's group folded in."""
    alone = noise.norm_noise(jax.random.fold_in(KEY, 8), 0.3, SHAPES)
    ours = of_row(drawn([3, 8]), 1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), ours, alone)


def test_every_token_has_its_own_noise_where_that_is_asked_for():
    tokens = leaves(drawn([3, 3, 3, 4], [0, 1, 1, 1], per="token"))
    np.testing.assert_array_equal(tokens[1], tokens[2])
    for other in (0, 3):
        assert not np.isclose(tokens[1], tokens[other]).any()


@pytest.mark.parametrize(("per", "rows_per_number"), [("group", 1), ("token", 8)])
def test_draws_of_rows_are_independent_and_have_the_deviation_sigma(per, rows_per_number):
    rows, drawn = jnp.arange(64), noise.row_noise(KEY, 0.3, noise_shapes(WIDE), per)
    values = leaves(drawn.draw(rows // rows_per_number, rows % 8))
    # Five standard errors of a deviation from n draws, and of correlations.
    np.testing.assert_allclose(values.std(), 0.3, rtol=5 / (2 * values.size) ** 0.5)
    correlations = np.corrcoef(values)[np.triu_indices(64, 1)]
    assert np.abs(correlations).max() < 5.5 / values.shape[1] ** 0.5


def test_numbers_are_those_of_groups_or_of_all_rows():
    numbers = lambda per: noise.row_noise(KEY, 0.1, SHAPES, per).numbers(np.array([4, 9]), 3)
    assert numbers("group").tolist() == [[4, 4, 4], [9, 9, 9]]
    for per in ("sequence", "token"):
        assert numbers(per).tolist() == [[12, 13, 14], [27, 28, 29]]
    assert numbers("token").dtype == np.int32
    with pytest.raises(ValueError, match="per: got 'row'; must be 'group', 'sequence' or 'token'"):
        numbers("row")


def test_variables_without_noise_of_rows_stay_as_they_are():
    _, variables = policy()
    for given in (variables, variables | {"noise": noise.norm_noise(KEY, 0.1, SHAPES)}):
        assert noise.of_rows(given, None) is given and not noise.has_own(given)


def test_fused_layers_refuse_noise_of_rows_and_say_why(monkeypatch, h200):  # noqa: F811
    """On a GPU that has them, the plain model decodes instead, with the same noise."""
    monkeypatch.setattr(decode_attention, "supports_heads", lambda *_: None)
    monkeypatch.setattr(decode_attention, "unless_kernel", lambda *_: None)
    monkeypatch.setattr(fused, "supports", lambda *_, **__: None)
    model = policy()[0].clone(dtype=jnp.bfloat16, weights="bfloat16")
    assert fused_decode.supports(model, 8) is None and fused_decode.slow_because(model, 8) is None
    reason = fused_decode.supports(model, 8, own_noise=True)
    assert "noise.per" in reason and "one norm scale for all rows" in reason
    said = fused_decode.slow_because(model, 8, own_noise=True)
    assert reason in said and said.endswith('set noise.per to "rollout"')
    queries = []
    supports = lambda *_, own_noise, **__: queries.append(own_noise) or "not here"
    monkeypatch.setattr(fused_decode, "supports", supports)
    for tree in (drawn([1, 2]), noise.norm_noise(KEY, 0.1, SHAPES)):
        fused_decode.extender(model, policy()[1] | {"noise": tree}, 2)
    assert list(dict.fromkeys(queries)) == [True, False]
