"""Tests 8-bit moments: the value of a code, and how far the optimizer is from exact Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.config import OptimConfig
from qerl_jax.rl import adam8bit, optimizer, update


def rounded(x, signed):
    return adam8bit.dequantize(adam8bit.quantize(x, signed=signed), x.shape, signed=signed)


@pytest.mark.parametrize("signed", [True, False])
def test_a_table_is_256_ascending_numbers_that_crowd_near_zero(signed):
    numbers = adam8bit.table(signed)
    assert len(numbers) == 256 and (np.diff(numbers) > 0).all()
    assert numbers[0] == (-numbers[-2] if signed else 0) and numbers[-1] == 1
    assert 0 in numbers
    assert numbers[numbers > 0][0] == pytest.approx(0.55e-6 if signed else 0.325e-6)
    # They come back exactly.
    numbers = jnp.asarray(numbers * 8).reshape(4, 64)
    packed = adam8bit.quantize(numbers, signed=signed)
    assert packed.codes.tolist() == [list(range(256))] and packed.scales.tolist() == [8]
    np.testing.assert_array_equal(rounded(numbers, signed), numbers)


@pytest.mark.parametrize("signed", [True, False])
def test_values_of_the_largest_decade_keep_a_hundredth_of_the_largest(signed):
    """The table's steps there are 0.9 / 64 (0.9 / 128 without a sign); rounding loses half of one."""
    x = np.random.default_rng(0).uniform(0.1, 1, (5, 300)).astype(np.float32)
    x *= np.sign(np.random.default_rng(1).normal(size=x.shape)) if signed else 1
    distance = np.abs(rounded(jnp.asarray(x), signed) - x).max()
    assert distance <= 0.9 / (64 if signed else 128) * 0.51


def test_a_small_second_moment_is_not_rounded_to_zero_and_a_block_of_zeros_stays():
    back = rounded(jnp.array([1.0, 1e-9, 0.0, 1e-30], jnp.float32), signed=False)
    assert back[0] == 1 and back[2] == 0
    assert (back[jnp.array([1, 3])] > 0).all()
    x = jnp.zeros((2, 256))
    np.testing.assert_array_equal(rounded(x, signed=True), x)


def trajectory(scale_by, steps=100):
    """Returns AdamW's weights after each step in a quadratic bowl of uneven curvature with noisy slopes."""
    rng = np.random.default_rng(3)
    curvature = jnp.asarray(10 ** rng.uniform(-2, 1, (64, 96)), jnp.float32)
    noise = jnp.asarray(rng.normal(size=(steps, 64, 96)), jnp.float32)
    start = jnp.asarray(rng.normal(size=(64, 96)), jnp.float32)
    tx = optax.chain(scale_by(0.9, 0.99, 1e-8), optax.add_decayed_weights(0.1))

    def step(carry, noise):
        weights, state = carry
        moves, state = tx.update(curvature * weights + 0.3 * noise, state, weights)
        weights = weights - 0.01 * moves
        return (weights, state), weights

    return start, jax.jit(lambda: jax.lax.scan(step, (start, tx.init(start)), noise)[1])()


@pytest.mark.slow
def test_the_trajectory_stays_within_a_twentieth_of_the_way():
    """At every tenth step, weights differ from those of 32-bit AdamW by less than 5 % of the way gone."""
    start, exact = trajectory(optax.scale_by_adam)
    _, ours = trajectory(adam8bit.scale_by_adam_8bit)
    for step in range(9, 100, 10):
        way = np.linalg.norm(exact[step] - start)
        assert 0 < np.linalg.norm(ours[step] - exact[step]) < 0.05 * way, step


TX = adam8bit.scale_by_adam_8bit(0.9, 0.99, 1e-8)


def test_small_leaves_are_those_of_adam_to_the_bit():
    params = {"norm": jnp.ones(adam8bit.SMALLEST - 1)}
    ours, exact = TX, optax.scale_by_adam(0.9, 0.99, 1e-8)
    states = [ours.init(params), exact.init(params)]
    for seed in range(3):
        grads = {"norm": jax.random.normal(jax.random.key(seed), params["norm"].shape)}
        moves, states[0] = ours.update(grads, states[0])
        expected, states[1] = exact.update(grads, states[1])
        np.testing.assert_array_equal(moves["norm"], expected["norm"])


def test_blocks_in_chunks_are_those_at_once(monkeypatch):
    """There are 26 blocks, the last one filled up, five at a time; a compiler may round a loop otherwise."""
    state = TX.init({"a": jnp.zeros((65, 101))})
    some, every = (jax.jit(lambda *arguments: TX.update(*arguments)) for _ in range(2))
    for seed in range(3):
        grads = {"a": jax.random.normal(jax.random.key(seed), (65, 101))}
        monkeypatch.setattr(adam8bit, "_AT_ONCE", 5)
        moves, in_chunks = some(grads, state)
        monkeypatch.setattr(adam8bit, "_AT_ONCE", 26)
        expected, state = every(grads, state)
        np.testing.assert_allclose(moves["a"], expected["a"], rtol=1e-3, atol=1e-6)
        for ours, theirs in ((in_chunks.mu, state.mu), (in_chunks.nu, state.nu)):
            np.testing.assert_allclose(ours["a"].scales, theirs["a"].scales, rtol=1e-6)
            steps = np.abs(np.int32(ours["a"].codes) - np.int32(theirs["a"].codes))
            assert steps.max() <= 1 and np.mean(steps) < 0.001


def test_moments_of_large_leaves_take_a_quarter_of_the_memory_and_can_be_donated():
    state = TX.init({"a": jnp.zeros((28, 1024, 32)), "norm": jnp.ones(3)})
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.mu["a"], state.nu["a"])))
    assert size == 2 * 28 * 1024 * 32 * (1 + 4 / 256)
    one_more = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    assert one_more(state).nu["norm"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_run_resumed_from_a_checkpoint_goes_on_to_the_bit(tmp_path):
    cfg = OptimConfig(optimizer="adamw_8bit")
    tx = optimizer.transformation(cfg)
    params = {"layers": {"o": {"a": jnp.ones((64, 96))}}}

    @jax.jit
    def step(state, key):
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), state.params)
        moved = optimizer.step(tx, 0.01, True, grads, state.opt_state, state.params)
        return update.TrainState(state.step + 1, *moved, state.skipped)

    halfway = update.init_state(params, cfg)
    for seed in range(2):
        halfway = step(halfway, jax.random.key(seed))
    files = StateFiles(tmp_path, keep=1)
    files.save(halfway)
    resumed = files.restore(update.init_state(params, cfg))
    assert resumed.opt_state[1].mu["layers"]["o"]["a"].codes.dtype == jnp.uint8
    whole = halfway
    for seed in range(2, 4):
        whole, resumed = (step(state, jax.random.key(seed)) for state in (whole, resumed))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
