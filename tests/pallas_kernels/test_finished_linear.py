"""What a linear multiplies, and through which kernel, where LoRA, a norm and a bias meet it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import finished_linear, nvfp4
from pallas_kernels.nvfp4_matmul import api, layout, reference, wide
from tests.pallas_kernels.test_nvfp4_fused_wide import (
    assert_almost_all_are_equal,
    pretend,
    random,
    to_hopper,
)


def test_a_linear_of_many_rows_is_one_kernel_where_it_can_be(monkeypatch):
    case = random(160, (256, 128), 512)
    pretend(monkeypatch)
    asked = []

    def by_definition(x, w, *, epilogue):
        asked.append(epilogue.sizes)
        return case.expected()

    monkeypatch.setattr(wide, "matmul", by_definition)
    w, x = to_hopper(case.weight), case.x.reshape(2, 80, -1)
    unit = case.unit.reshape(2, 80, 1)
    run = functools.partial(finished_linear.finished_linear, x, w)
    y = run(case.branches, unit=unit, bias=case.bias)
    assert asked == [(256, 128)]
    np.testing.assert_array_equal(y, case.expected().reshape(2, 80, -1))

    # What it does not do goes through the product and the definition.
    multiply = lambda x, w: reference.forward(x, layout.unprepare(w))
    monkeypatch.setattr(api._Wide, "forward", staticmethod(multiply))
    residual = jnp.zeros((2, 80, 384), jnp.bfloat16)
    plain = run(case.branches, unit=unit, bias=case.bias, residual=residual)
    assert_almost_all_are_equal(plain.reshape(160, -1), y.reshape(160, -1))
    assert run([], unit=unit).shape == run(case.branches).shape == (2, 80, 384)
    assert len(asked) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_linear_multiplies_by_the_transposed_weight(packed):
    x = np.random.default_rng(0).normal(size=(2, 3, 32)).astype(np.float32)
    weight = jax.random.normal(jax.random.key(1), (24, 32))
    held = nvfp4.quantize(weight) if packed else weight
    matrix = nvfp4.dequantize(held) if packed else weight
    expected = x.astype(np.float64) @ np.asarray(matrix, np.float64).T
    np.testing.assert_allclose(finished_linear.linear(jnp.asarray(x), held), expected, atol=2e-5)
