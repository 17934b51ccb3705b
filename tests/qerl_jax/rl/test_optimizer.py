"""Tests AdamW's schedule, its chain of transformations, and skipped steps."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.config import OptimConfig
from qerl_jax.rl import optimizer

HALF_COSINE = 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2


@pytest.mark.parametrize(
    ("kind", "warmup_ratio", "rates"),
    [
        # Of 10 steps: {step: rate}, the peak being 1 and the end 0.1.
        ("constant", 0.0, {0: 1, 5: 1, 10: 1}),
        ("constant", 0.1, {0: 1, 1: 1, 10: 1}),
        ("constant", 0.2, {0: 0.5, 1: 1, 2: 1, 10: 1}),
        ("linear", 0.0, {0: 1, 5: 0.55, 9: 0.19, 10: 0.1, 11: 0.1}),
        ("linear", 0.1, {0: 1, 1: 1, 4: 0.7, 10: 0.1}),
        ("linear", 0.2, {0: 0.5, 1: 1, 2: 1, 6: 0.55, 10: 0.1}),
        ("cosine", 0.0, {0: 1, 5: 0.55, 10: 0.1, 11: 0.1}),
        ("cosine", 0.1, {0: 1, 1: 1, 4: 0.775, 10: 0.1}),
        ("cosine", 0.2, {0: 0.5, 1: 1, 2: 1, 4: HALF_COSINE, 6: 0.55, 10: 0.1}),
        ("linear", 0.4, {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 7: 0.55, 10: 0.1}),
    ],
)
def test_learning_rate(kind, warmup_ratio, rates):
    cfg = OptimConfig(1.0, kind, warmup_ratio, min_lr_ratio=0.0 if kind == "constant" else 0.1)
    rate = optimizer.learning_rate(cfg, 10)
    actual = {step: float(rate(jnp.int32(step))) for step in rates}
    assert actual == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize("warmup_ratio", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("total_steps", [1, 2, 7])
def test_every_step_of_a_run_learns(kind, warmup_ratio, total_steps):
    rate = optimizer.learning_rate(OptimConfig(1.0, kind, warmup_ratio), total_steps)
    assert all(rate(step) > 0 for step in range(total_steps))


def test_weight_decay_acts_on_adapters_and_not_on_norms():
    params = {
        "layers": {
            "qkv": {"q_proj": {"a": jnp.array([2.0]), "b": jnp.array([-4.0])}},
            "input_layernorm": {"scale": jnp.array([8.0])},
        }
    }
    tx = optimizer.transformation(OptimConfig(weight_decay=0.5))
    moves, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert moves["layers"]["qkv"]["q_proj"] == {"a": 1.0, "b": -2.0}
    assert moves["layers"]["input_layernorm"]["scale"] == 0.0


@pytest.mark.parametrize(
    ("max_grad_norm", "clipped"), [(0.5, [0.3, 0.4]), (4.0, [2.4, 3.2]), (6.0, [3.0, 4.0])]
)
def test_gradients_are_clipped_to_the_global_norm(max_grad_norm, clipped):
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    tx = optimizer.transformation(OptimConfig(max_grad_norm=max_grad_norm, adam_beta1=0.0))
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}  # norm 5
    _, state = tx.update(gradients, tx.init(params), params)
    np.testing.assert_allclose([*state[1].mu["a"], *state[1].mu["b"]], clipped, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_step_that_is_not_kept_leaves_parameters_and_state_as_they_are(name):
    tx = optimizer.transformation(OptimConfig(optimizer=name))
    params = {"o": {"a": jnp.ones((64, 96)), "scale": jnp.ones(3)}}
    grads = jax.tree.map(lambda p: 0.1 + p, params)
    params, state = optimizer.step(tx, 0.1, True, grads, tx.init(params), params)
    same = optimizer.step(tx, 0.1, jnp.array(False), grads, state, params)
    jax.tree.map(np.testing.assert_array_equal, same, (params, state))
    moved, after = optimizer.step(tx, 0.1, jnp.array(True), grads, state, params)
    assert after[1].count == 2 and state[1].count == 1
    assert (moved["o"]["a"] < params["o"]["a"]).all()


@pytest.mark.parametrize(("name", "temporaries"), [("adamw", 1.2), ("adamw_8bit", 2.5)])
def test_a_step_that_may_be_skipped_updates_its_state_in_place(name, temporaries):
    """When all 8-bit moments were in float32 at once, it took nine times the memory of what is trained."""
    tx = optimizer.transformation(OptimConfig(optimizer=name))
    shape = jax.ShapeDtypeStruct((16, 1024, 512), jnp.float32)
    params = {name: {"a": shape} for name in "xyz"}
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads, keep):
        return optimizer.step(tx, 0.1, keep, grads, state, params)

    arguments = (params, state, params, jax.ShapeDtypeStruct((), bool))
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
    size = sum(4 * leaf.size for leaf in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes < temporaries * size
