"""Tests attention against a float64 loop, the rotation by its properties, and the rest by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.model import architecture, layers
from tests.combinations import spread

ATTENTION = jax.jit(layers.attention)


def oracle(query, key, value):
    """Computes the softmax over the keys of slots 0 to t for the query at slot t, in float64."""
    rows, length, heads, size = query.shape
    groups = key.shape[2]
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    mixed = np.zeros(query.shape)
    for b, t, h in np.ndindex(rows, length, heads):
        seen = slice(0, t + 1)
        group = h * groups // heads
        scores = key[b, seen, group] @ query[b, t, h] / np.sqrt(size)
        weights = np.exp(scores - scores.max())
        mixed[b, t, h] = weights / weights.sum() @ value[b, seen, group]
    return mixed


def qkv(length, heads, groups, *, rows=3, size=8, dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.normal(size=(rows, length, n, size)).astype(dtype) for n in (heads, groups, groups)]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(actual, expected, atol=2e-6):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=atol)


@pytest.mark.parametrize("heads,groups", [(4, 4), (4, 2), (7, 1), (14, 2)])
def test_causal_attention_equals_its_definition(heads, groups):
    arrays = qkv(6, heads, groups)
    assert_close(ATTENTION(*arrays), oracle(*arrays))


def test_what_follows_the_end_of_a_right_padded_row_changes_no_bit_of_it():
    query, key, value = qkv(6, 4, 2)
    before = np.asarray(ATTENTION(query, key, value))
    ends = [6, 3, 1]
    for row, end in enumerate(ends):
        query[row, end:], key[row, end:], value[row, end:] = 3.0, 1e4, -1e4
    after = np.asarray(ATTENTION(query, key, value))
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(after[row, :end], before[row, :end])
    assert np.isfinite(after).all()


def test_bfloat16_attention_stays_within_two_of_its_steps():
    arrays = [x.astype(jnp.bfloat16) for x in qkv(6, 4, 2)]
    expected, actual = oracle(*arrays), ATTENTION(*arrays)
    assert actual.dtype == jnp.bfloat16
    assert_close(actual, expected, atol=2 * 2**-8 * np.abs(expected).max())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "length"), spread([(28, 4, 128), (14, 2, 64), (8, 8, 128)], [384, 293], every=2)
)
def test_on_its_device_attention_and_its_derivatives_meet_the_plain_one(shape, length):
    """A row is filled up on the right with values that would be noticed: its live part does not see them."""
    heads, groups, size = shape
    arrays = [x.astype(jnp.bfloat16) for x in qkv(length, heads, groups, rows=2, size=size)]
    live = jnp.arange(length)[:, None, None] < jnp.array([length, 200])[:, None, None, None]
    filled = [jnp.where(live, x, jnp.bfloat16(50)) for x in arrays]

    @functools.partial(jax.jit, static_argnums=0)
    def mixed_and_gradients(attend, query, key, value):
        mixed, vjp = jax.vjp(attend, query, key, value)
        return mixed, *vjp(jnp.where(live, jnp.cos(mixed), 0))

    actual = mixed_and_gradients(layers.attention, *filled)
    exact = [x.astype(jnp.float32) for x in filled]
    expected = mixed_and_gradients(layers.plain_attention, *exact)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == jnp.bfloat16
        got, wanted = (np.asarray(jnp.where(live, x, 0), np.float32) for x in (got, wanted))
        assert np.isfinite(got).all()
        assert np.abs(got - wanted).max() <= 2**-6 * np.abs(wanted).max()


ARCH = architecture.Architecture("llama", 32, 32, 64, 1, 4, 2, 8, rope_theta=100.0)


def rotated(x, positions, arch=ARCH):
    return layers.rotate(x, layers.rope_tables(positions, arch))


def test_rotation_turns_the_halves_of_a_head_by_position_times_frequency():
    """With C = 4 and theta = 100, frequencies are 1 and 1/10, and the pairs are (0, 2) and (1, 3)."""
    arch = dataclasses.replace(ARCH, head_size=4)
    np.testing.assert_allclose(layers.rope_frequencies(arch), [1.0, 0.1], rtol=1e-6)
    x = jnp.array([1.0, 1.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
    actual = rotated(x, jnp.array([[3]]), arch)[0, 0, 0]
    np.testing.assert_allclose(actual, [np.cos(3), np.cos(0.3), np.sin(3), np.sin(0.3)], atol=1e-6)


def test_a_scale_finer_than_bfloat16_acts_on_a_bfloat16_norm():
    """Near 1 steps of bfloat16 are 2^-7 wide; the scale is 1 + 2^-9, and the input 128 times it."""
    x = jnp.full((1, 4), 4.0, jnp.bfloat16)
    actual = layers.rms_norm(x, jnp.full(4, 128.5), 0.0)
    assert actual.dtype == jnp.bfloat16
    # 128.5 is a tie between 128 and 129 in bfloat16 and goes to the even 128; 128.75 does not.
    np.testing.assert_array_equal(actual, jnp.full((1, 4), 128, jnp.bfloat16))
    np.testing.assert_array_equal(layers.rms_norm(x, jnp.full(4, 128.75), 0.0).astype(float), 129)


def test_noise_far_below_a_step_acts_on_a_split_norm_in_full_on_average():
    x, scale, noise = jax.random.normal(jax.random.key(0), (3, 1 << 20))
    x, scale = x.astype(jnp.bfloat16), jnp.exp(0.3 * scale).astype(jnp.bfloat16)
    noise = 1e-3 * noise  # a step is 2^-8 to 2^-7 of a value
    clean, noisy = (
        jax.jit(layers.split_norm, static_argnums=2)(x, s, 1e-6).values.astype(jnp.float32)
        for s in (scale, scale.astype(jnp.float32) + noise)
    )
    wanted = x.astype(jnp.float32) * noise
    # Of each value there are thousands, so the regression's slope is 1 within a few hundredths.
    assert abs(jnp.vdot(noisy - clean, wanted) / jnp.vdot(wanted, wanted) - 1) < 0.05


def test_rms_norm_by_hand():
    """The mean square of (1, 7) is 25; with eps = 11 the root is 6."""
    actual = layers.rms_norm(jnp.array([1.0, 7.0]), jnp.array([6.0, 12.0]), 11.0)
    np.testing.assert_allclose(actual, [1.0, 14.0], rtol=1e-6)


def test_a_split_norm_is_the_whole_one_to_what_is_linear_in_it():
    shapes = [(2, 3, 32), (32,), (8, 32), (2, 3, 8)]
    x, scale, weight, dy = (normal(i, *shape) for i, shape in enumerate(shapes))

    def after(x, scale):
        normed = layers.split_norm(x, scale, 0.1)
        return normed.values @ weight.T * normed.unit

    before = lambda x, scale: layers.rms_norm(x, scale, 0.1) @ weight.T

    def both(f):
        value, pull = jax.vjp(f, x, scale)
        return value, *pull(dy)

    both = jax.jit(both, static_argnums=0)
    for actual, expected in zip(both(after), both(before), strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_swiglu_rounds_once():
    """silu(1) * 1.125 = 0.82244 rounds up; bfloat16's 0.73047 for silu(1) would give 0.82178, which rounds down."""
    actual = jax.jit(layers.swiglu)(jnp.array([1.0, 1.125], jnp.bfloat16))
    np.testing.assert_array_equal(np.float32(actual), [0.82421875])


def test_a_backward_pass_through_swiglu_keeps_its_input_alone():
    gate_up = jax.random.normal(jax.random.key(0), (4, 16)).astype(jnp.bfloat16)
    _, pull = jax.vjp(layers.swiglu, gate_up)
    kept = [leaf for leaf in jax.tree.leaves(pull) if isinstance(leaf, jax.Array)]
    assert sum(leaf.nbytes for leaf in kept) == gate_up.nbytes


@pytest.mark.parametrize("same", [True, False], ids=["one x", "an x of each"])
def test_branches_are_scaled_low_rank_products(same):
    x = normal(0, 2, 3, 8)
    branch = lambda i, n: (x if same else i * x, normal(1 + i, 8, 2), normal(5 + i, 2, n))
    adapters = [branch(i, n) for i, n in enumerate((5, 4, 3))]
    found = layers.branches(adapters, 0.5)
    assert len(found) == 3
    for (down, up), (x, a, b) in zip(found, adapters, strict=True):
        expected = 0.5 * (x @ a @ b).reshape(6, -1)
        np.testing.assert_allclose(down @ up, expected, rtol=1e-5, atol=1e-5)


def test_branches_of_one_input_pass_its_gradient_on_in_one_product():
    x, a, b = jnp.ones((4, 8)), jnp.ones((8, 2)), jnp.ones((2, 5))

    def total(x):
        found = layers.branches([(x, a, b)] * 3, 1.0)
        return sum((down @ up).sum() for down, up in found)

    products = str(jax.make_jaxpr(jax.grad(total))(x)).count("dot_general")
    # One forward and one back for all of x A; for each branch one forward and one back for B.
    assert products == 2 + 3 * 2
