"""Tests which weight and which kernel a linear uses with LoRA, a norm and a bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import finished_linear, nvfp4
from pallas_kernels.nvfp4_matmul import api, layout, prefill, reference
from tests.pallas_kernels.common import f32, slow, to_hopper
from tests.pallas_kernels.test_finished_linear_prefill import (
    assert_almost_all_are_equal,
    on_hopper,  # noqa: F401
    random,
)


@pytest.fixture
def epilogues(monkeypatch, on_hopper):  # noqa: F811
    """Returns a function that lets a case's definition stand in for the kernel, and lists the kernel's epilogues."""

    def stand_in(case):
        epilogues = []
        run = lambda x, w, *, epilogue: epilogues.append(epilogue) or case.expected()
        monkeypatch.setattr(prefill, "matmul", run)
        return epilogues

    return stand_in


@pytest.mark.slow
def test_a_linear_of_many_rows_is_one_kernel_where_it_can_be(monkeypatch, epilogues):
    case = random(160, (256, 128), 512)
    launched = epilogues(case)
    w, x = to_hopper(case.weight), case.x.reshape(2, 80, -1)
    unit = case.unit.reshape(2, 80, 1)
    run = functools.partial(finished_linear.finished_linear, x, w)
    y = run(case.branches, unit=unit, bias=case.bias)
    assert [epilogue.sizes for epilogue in launched] == [(256, 128)]
    np.testing.assert_array_equal(y, case.expected().reshape(2, 80, -1))

    # What it does not do goes through the product and the definition.
    multiply = lambda x, w: reference.forward(x, layout.unprepare(w))
    monkeypatch.setattr(api._Prefill, "forward", staticmethod(multiply))
    residual = jnp.zeros((2, 80, 384), jnp.bfloat16)
    plain = run(case.branches, unit=unit, bias=case.bias, residual=residual)
    assert_almost_all_are_equal(plain.reshape(160, -1), y.reshape(160, -1))
    assert run([], unit=unit).shape == run(case.branches).shape == (2, 80, 384)
    assert len(launched) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_linear_multiplies_by_the_transposed_weight(packed):
    x = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    weight = jax.random.normal(jax.random.key(1), (24, 32))
    held = jax.jit(nvfp4.quantize)(weight) if packed else weight
    matrix = jax.jit(nvfp4.dequantize)(held) if packed else weight
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64).T
    np.testing.assert_allclose(finished_linear.linear(jnp.asarray(x), held), expected, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_prepared_matrices_give_the_bits_of_those_they_were_made_of(dtype):
    key = functools.partial(jax.random.normal, jax.random.key(2))
    x, weight, residual = key((5, 48), dtype), key((40, 48), dtype), key((5, 40), dtype)
    matrices = [(key((48, 8)), key((8, size))) for size in (24, 16)]
    others = None, 0.3, weight, dtype
    prepared = finished_linear.prepare_lora(matrices, *others, rows=5, has_unit=False)
    assert prepared.b is None and len(prepared.ups) == (2 if dtype == jnp.float32 else 1)
    downs = jnp.split(x @ jnp.concatenate([a.astype(dtype) for a, _ in matrices], 1), 2, axis=1)
    branches = [(d, (0.3 * b).astype(dtype)) for d, (_, b) in zip(downs, matrices, strict=True)]
    found, expected = (
        finished_linear.finished_linear(x, weight, each, residual=residual)
        for each in (prepared, branches)
    )
    np.testing.assert_array_equal(found, expected)


# Parts in whole tiles, one part, and parts whose ranks share one tile.
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [slow((256, 128)), slow((384,)), (40, 24, 36)])
def test_matrices_prepared_for_the_kernel_are_those_that_it_makes_itself(epilogues, sizes):
    case = random(160, sizes, 512)
    launched, w, rank = epilogues(case), to_hopper(case.weight), 16
    key = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    matrices = [(key(size, 512, rank), key(1, rank, size)) for size in sizes]
    dtype = case.x.dtype
    others = case.bias, 0.5, w, dtype
    prepared = finished_linear.prepare_lora(matrices, *others, rows=160, has_unit=True)
    branches = [(case.x @ a.astype(dtype), (0.5 * b).astype(dtype)) for a, b in matrices]
    for each in (prepared, branches):
        finished_linear.finished_linear(case.x, w, each, unit=case.unit, bias=case.bias)
    found, expected = launched
    assert found.sizes == expected.sizes
    for name in ("b", "unit", "bias"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    # One product in place of several: sums may come in another order.
    np.testing.assert_allclose(f32(found.u), f32(expected.u), rtol=2**-7, atol=2**-7 * 30)
