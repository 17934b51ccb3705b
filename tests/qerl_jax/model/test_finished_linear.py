"""Which kernel a linear of a model runs through, where LoRA, a norm and a bias meet it."""

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.nvfp4_matmul import api, layout, reference, wide
from qerl_jax.model import layers
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
    run = functools.partial(layers.finished_linear, x, w)
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
