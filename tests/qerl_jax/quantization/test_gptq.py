"""Tests GPTQ against a plain numpy version that eliminates one column after another in float64."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS
from qerl_jax.quantization import awq, gptq, quantizer
from qerl_jax.quantization.quantizer import Recipe
from tests.pallas_kernels.common import slow
from tests.qerl_jax.quantization.test_awq import ROWS

N, K = 24, 192


def problem(seed=0, width=K):
    """Makes a weight, and the Gram matrix of inputs that are correlated and differ in size, in numpy."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((width, width)) * np.exp(rng.standard_normal(width))
    x = rng.standard_normal((4 * width, width)) @ mixed
    weight = rng.standard_normal((N, width)) * 0.02
    return weight.astype(np.float32), (x.T @ x).astype(np.float32)


def by_hand(weight, steps, gram, grid):
    """Computes OBQ's own equations: round a column, move the others, remove it from the inverse."""
    weight, gram = weight.astype(np.float64), gram.astype(np.float64)
    size = np.diag(gram).mean()
    inverse = np.linalg.inv(gram + gptq.DAMPING * size * np.eye(len(gram)))
    result, left = weight.copy(), weight.copy()
    for j in np.argsort(-np.diag(gram), kind="stable"):
        ratios = left[:, j] / steps[:, j]
        rounded = grid[np.abs(ratios[:, None] - grid).argmin(-1)] * steps[:, j]
        result[:, j] = rounded
        left -= np.outer((left[:, j] - rounded) / inverse[j, j], inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return result


def pack(form, weight, gram, scales="search", before=None):
    """Packs one weight by GPTQ; returns it, and the errors of rounding to nearest and of GPTQ."""
    (t,), errors = gptq.pack(form, scales, [jnp.asarray(weight)], jnp.asarray(gram), before)
    return t, errors


def error(weight, other, gram):
    off = (np.asarray(other) - weight).astype(np.float64)
    return np.vdot(off @ gram, off)


@pytest.mark.parametrize("name", ["nvfp4", *map(slow, sorted(FORMATS.keys() - {"nvfp4"}))])
def test_gptq_gives_what_plain_elimination_gives_and_loses_less_than_the_search(name):
    """192 columns are a block and a half, with errors within blocks, between them, and padding."""
    form = FORMATS[name]
    weight, gram = problem()
    found, errors = pack(form, weight, gram)
    # Only the codes are by its own equations: the scales are those that are kept.
    expected = by_hand(weight, np.asarray(form.steps(found)), gram, form.grid)
    actual = np.asarray(form.unpack(found, jnp.float32))
    # Where float32 rounds a tie the other way, all later columns of the row differ.
    same = np.isclose(actual, expected, rtol=1e-4, atol=1e-7).all(1)
    assert same.mean() > 0.8
    of = [error(weight, w, gram) for w in (actual, expected)]
    np.testing.assert_allclose(*of, rtol=0.02)
    nearest = form.unpack(form.pack([jnp.asarray(weight)])[0], jnp.float32)
    size = error(0, weight, gram)
    expected = [np.sqrt(error(weight, w, gram) / size) for w in (nearest, actual)]
    np.testing.assert_allclose(errors, expected, rtol=1e-3)
    (searched,) = form.pack([jnp.asarray(weight)], "search", form.moments(jnp.asarray(gram)))
    of = [error(weight, w, gram) for w in (nearest, form.unpack(searched, jnp.float32), actual)]
    assert of[2] < 0.6 * of[0] and of[2] < 0.8 * of[1]


@pytest.mark.slow
def test_parts_of_a_linear_go_together_and_keep_their_scales():
    form = FORMATS["nvfp4"]
    weight, gram = problem(2, 64)
    parts = [jnp.asarray(weight[:16]), jnp.asarray(weight[16:])]
    start = form.pack(parts)
    found, _ = gptq.pack(form, "maximum", parts, jnp.asarray(gram))
    for old, new in zip(start, found, strict=True):
        assert new.shape == old.shape and new.global_scale == old.global_scale
        np.testing.assert_array_equal(new.scales, old.scales)
        assert (np.asarray(new.codes) != np.asarray(old.codes)).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["never seen", "one row", "not finite"])
def test_inputs_that_say_little_do_no_harm(kind):
    """There are dead channels, fewer rows than channels, and a Gram matrix that cannot be factored."""
    form = FORMATS["nvfp4"]
    weight, gram = problem(3, 64)
    if kind == "never seen":
        gram[:, ::3] = gram[::3] = 0
    elif kind == "one row":
        x = np.random.default_rng(0).standard_normal((1, 64)).astype(np.float32)
        gram = x.T @ x
    else:
        gram[0, 0] = np.nan
    found, errors = pack(form, weight, gram)
    unpacked = np.asarray(form.unpack(found, jnp.float32))
    assert np.isfinite(unpacked).all()
    assert np.abs(unpacked - weight).max() < 0.05
    if kind != "not finite":
        assert errors[1] < errors[0]


@pytest.mark.slow
def test_a_job_by_gptq_reports_smaller_errors_of_outputs_in_every_linear(tmp_path, monkeypatch):
    monkeypatch.setattr(awq, "GRID", 2)
    found = {}
    for method in ("gptq", "awq+gptq"):
        recipe = Recipe("nvfp4", method, calibration=ROWS)
        report = quantizer.quantize("qerl-tiny", tmp_path / method, recipe, lambda line: None)
        outputs = [layer["outputs"] for layer in report["layers"]]
        found[method] = [errors for linears in outputs for errors in linears.values()]
        assert all(after < 0.6 * nearest for nearest, after in found[method])
    assert len(found["gptq"]) == 12


@pytest.mark.slow
def test_of_gptq_and_what_was_there_before_the_better_is_kept():
    form = FORMATS["nvfp4"]
    weight, gram = problem(4, 64)
    found, errors = pack(form, weight, gram)
    for before, is_kept in ((found, True), (form.pack([jnp.asarray(weight)])[0], False)):
        again, now = pack(form, weight, gram, "maximum", [before])
        same = np.array_equal(np.asarray(again.codes), np.asarray(before.codes))
        assert same == is_kept
        assert now[1] <= errors[1] * (1 + 1e-6) or not is_kept


@pytest.mark.slow
def test_scales_are_searched_by_what_an_error_costs_once_later_columns_make_up_for_it(monkeypatch):
    """This cost is the inverse of the diagonal of an inverse, over the column itself and the later ones."""
    form, seen = FORMATS["nvfp4"], []
    monkeypatch.setattr(gptq, "DAMPING", 1e-6)
    record = lambda parts, scales, moments: seen.append(np.asarray(moments)) or form.pack(parts)
    weight, gram = problem(5, 32)
    order = np.argsort(np.diag(gram), kind="stable")
    with jax.disable_jit():
        fake = types.SimpleNamespace(pack=record, moments=form.moments)
        lower = gptq.factor(jnp.asarray(gram), jnp.asarray(order))
        gptq._start(fake, "search", [jnp.asarray(weight)], jnp.asarray(order), lower)
    for place, k in enumerate(order):
        left = order[: place + 1]
        cost = 1 / np.linalg.inv(gram[np.ix_(left, left)].astype(np.float64))[place, place]
        np.testing.assert_allclose(seen[0][k // 16, k % 16, k % 16], cost, rtol=0.02)
