"""Tests an update on the portable kernels, run by Triton's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.portable import launch
from qerl_jax.model.transformer import random_base
from qerl_jax.rl import update
from qerl_jax.rl.objective import Objective
from tests.qerl_jax.rl import test_update as example


@pytest.fixture
def launched(monkeypatch):
    """Returns the names of the kernels that are launched."""
    names, call = [], launch.call

    def noted(kernel, *args, **kwargs):
        names.append(kernel)
        return call(kernel, *args, **kwargs)

    monkeypatch.setattr(launch, "call", noted)
    return names


@pytest.mark.slow
@pytest.mark.skipif(not runtime.interprets_triton(), reason="needs triton and a CPU")
@pytest.mark.parametrize(
    ("copies", "kernels"),
    # Gradients, and products of more than 128 tokens, are computed with unpacked weights.
    [(1, {"matmul_kernels.product", "matmul_kernels.unpack"}), (4, {"matmul_kernels.unpack"})],
)
def test_a_portable_update_has_the_loss_and_gradient_of_the_reference(launched, copies, kernels):
    rows = np.tile(np.arange(example.ROWS), copies)[:, None]
    experience = example.sample_experience().take(rows)
    model = example.model().clone(dtype=jnp.bfloat16)
    objective = Objective(model, example.DAPO, example.TEMPERATURE, example.NUM_TOKENS)
    optim = example.geometry(copies * example.ROWS, 1)
    found = {}
    for chosen, expected in (("reference", set()), ("portable", kernels)):
        # What was traced with other kernels must not be met again.
        jax.clear_caches()
        with runtime.on(runtime.device(), chosen):
            frozen = random_base(model, jax.random.key(0))
            updater = update.Updater(objective, optim, 10, **example.BOUNDS)
            state = example.state_of(example.trained_params())
            launched.clear()
            state, metrics = updater(state, frozen, experience, None, jax.random.key(0))
        assert set(launched) == expected
        found[chosen] = jax.device_get((metrics["loss"], example.gradient(state)))
    (loss, gradient), (expected_loss, slopes) = found["portable"], found["reference"]
    np.testing.assert_allclose(loss, expected_loss, rtol=2**-8)
    for actual, slope in zip(jax.tree.leaves(gradient), jax.tree.leaves(slopes), strict=True):
        # dX is rounded elsewhere, by some 2**-8 of it. Against float32, bfloat16 changes a slope by 4 to 50%.
        size = np.linalg.norm(slope)
        assert size > 0 and np.linalg.norm(actual - slope) < 2**-5 * size
