"""Tests products of many rows with weights in the Hopper layout: the kernels, and the choice between them."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, nvfp4_matmul, prepare, runtime, unprepare
from pallas_kernels.nvfp4_matmul import (
    api,
    dequantize,
    layout,
    prefill,
    prefill_config,
    reference,
    shapes,
)
from pallas_kernels.nvfp4_matmul.prefill_config import Config
from tests.pallas_kernels.common import (
    assert_within_an_ulp,
    f32,
    normal,
    on_cpu,
    random,
    slow,
    to_hopper,
    weight,
)
from tests.pallas_kernels.devices import like

dequantized = functools.partial(nvfp4_matmul, implementation="dequantized")


@pytest.fixture
def pretended_hopper(monkeypatch, h200):
    """On a Hopper card, but without the kernels.

    Interpreted, they would do, but not under `jax.checkpoint`.
    """
    unpack = lambda w: nvfp4.scaled_codes(layout.unprepare(w))
    monkeypatch.setattr(dequantize, "dequantize", unpack)
    multiply = lambda x, w: reference.forward(x, layout.unprepare(w))
    monkeypatch.setattr(api._Prefill, "forward", staticmethod(multiply))
    multiply_back = lambda dy, w: reference.backward(dy, layout.unprepare(w))
    monkeypatch.setattr(prefill, "backward", multiply_back)


def assert_equal_leaves(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "k", "config", "is_paired"),
    [
        # Unequal runs, one of which is shorter than the pipeline.
        slow(128, 256, dequantize.Config(128, 2, 3), False),
        slow(192, 320, dequantize.Config(64, 2, 2), False),  # slots used again
        (100, 208, None, False),  # ragged N and K
        slow(64, 64, None, False),  # less work than blocks
        slow(192, 208, None, True),
        slow(192, 320, dequantize.Config(64, 2, 2), True),
        slow(192, 256, dequantize.Config(128, 2, 3), True),
        slow(192, 256, dequantize.Config(256, 2, 3), True),
    ],
)
def test_a_weight_is_written_out_in_order_as_scaled_codes(interpreter, n, k, config, is_paired):
    t = weight(n, n, k)
    actual = dequantize.dequantize(to_hopper(t, is_paired=is_paired), config, interpret=True)
    np.testing.assert_array_equal(actual, nvfp4.scaled_codes(t), strict=True)


def test_a_step_that_does_not_divide_k_is_refused_and_never_picked():
    reason = "needs K of whole steps of 128; got K = 320"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        dequantize.dequantize(to_hopper(weight(0, 64, 320)), dequantize.Config(128))
    for n, k in [(p.n, p.k) for p in shapes.PROBLEMS] + [(16, 16), (40, 1040), (64, 320)]:
        assert dequantize.supports(n, k, dequantize.pick_config(k)) is None


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        slow(16, 256, 128, Config(16, 2, 3)),  # one tile of x
        # Ragged M, more tiles than a band, slots used again.
        slow(44, 128, 320, Config(16, 1, 3, 2)),
        slow(24, 180, 48, Config(24, 3, 3)),  # ragged N and K
        (44, 128, 256, Config(16, 2, 2, producer=True, split=2)),  # all tiles split
        slow(16, 192, 256, Config(16, 1, 3, split=4)),  # one split, the others whole
    ],
)
def test_products_meet_the_reference_without_a_race(interpreter, assume, m, n, k, config):
    assume(like(processors=2))  # so that a block has several tiles
    x, t = normal(m, (m, k)), weight(n, n, k, scale_per_row=n in (180, 192))
    actual = prefill.matmul(x, to_hopper(t), config, interpret=True)
    assert_within_an_ulp(actual, reference.forward(x.astype(jnp.float32), t))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "k", "config", "scale_per_row", "is_paired"),
    [
        slow(44, 320, 256, Config(16, 2, 2, 2, producer=True), False, False),
        (32, 180, 48, Config(32, 1, 3), True, False),  # ragged N and K
        # One tile split, the others whole.
        slow(16, 256, 192, Config(16, 1, 3, split=2), False, False),
        slow(44, 192, 128, Config(16, 2, 3), False, True),
        slow(44, 192, 128, Config(16, 2, 3), True, True),
    ],
)
def test_derivatives_meet_the_reference_without_a_race(
    interpreter, assume, m, n, k, config, scale_per_row, is_paired
):
    assume(like(processors=2))
    dy, t = normal(m, (m, n)), weight(n, n, k, scale_per_row=scale_per_row)
    actual = prefill.backward(dy, to_hopper(t, is_paired=is_paired), config, interpret=True)
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (44, 192, 208, Config(16, 1, 3, 2)),  # ragged M and K
        (44, 128, 256, Config(16, 2, 2, producer=True, split=2)),  # all tiles split
        (16, 192, 256, Config(16, 1, 3, split=4)),  # one split, the others whole
        (256, 384, 64, Config(256, 3, 3)),
    ],
)
@pytest.mark.slow
def test_the_order_of_rows_in_memory_changes_no_bit(interpreter, assume, m, n, k, config):
    x, t = normal(m, (m, k)), weight(n, n, k, scale_per_row=n == 192)
    assume(like(processors=2))
    w = (to_hopper(t, is_paired=is_paired) for is_paired in (False, True))
    product = functools.partial(prefill.matmul, x, config=config, interpret=True)
    np.testing.assert_array_equal(*map(product, w))


@pytest.mark.slow
@pytest.mark.parametrize("scale_per_row", [slow(False), True])
def test_its_sums_are_scaled_before_they_are_rounded(interpreter, scale_per_row):
    t = weight(11, 128, 64, scale_per_row=scale_per_row)
    x = jnp.eye(64, dtype=jnp.bfloat16) + jnp.eye(64, k=1, dtype=jnp.bfloat16)
    actual = prefill.matmul(x, to_hopper(t), Config(64, 2, 3), interpret=True)
    # Of two terms; one rounding to float32 is exact or of no consequence.
    codes = np.asarray(nvfp4.scaled_codes(t, jnp.float32))
    sums = np.asarray(x, np.float32) @ codes.T
    np.testing.assert_array_equal(actual, (sums * t.multiplier).astype(jnp.bfloat16))
    if not scale_per_row:  # else dy takes the scales, and is rounded with them
        one_hot, config = jnp.eye(128, dtype=jnp.bfloat16), Config(64, 1, 3)
        dx = prefill.backward(one_hot, to_hopper(t), config, interpret=True)
        exact = (codes * t.multiplier).astype(jnp.bfloat16)
        np.testing.assert_array_equal(dx, exact, strict=True)


@pytest.mark.parametrize(("processors", "least"), [(132, 0.85), (114, 0.8), (78, 0.8)])
def test_every_problem_has_a_configuration_that_leaves_few_blocks_idle(assume, processors, least):
    assume(like(processors=processors))
    pick, supports = prefill_config.pick_config, prefill_config.supports
    for p in shapes.PROBLEMS:
        for m in (1, 129, 300, 512, 1024, 2048, 4096, 8192):
            back = pick(m, p.k, p.n, backward=True)
            assert supports(p.k, p.n, back, backward=True) is None, (p, m, back)
            config = pick(m, p.n, p.k)
            assert supports(p.n, p.k, config) is None, (p, m, config)
            if m < 2048:
                continue
            tiles = -(-m // config.rows) * layout.tiles(p.n) // config.warpgroups
            waves, left = divmod(tiles, processors)
            waves += -(-left * config.split // processors) / config.split
            # Of the multiplications that all waves could make, those asked for.
            share = m * p.n / (waves * processors * config.rows * 64 * config.warpgroups)
            assert share > least, (p, m, config)


@pytest.mark.parametrize(
    ("n", "config", "reason"),
    [
        (192, Config(64, 2), "needs N of whole 128-row tiles; got N = 192"),
        (128, Config(256, 2, 5), "needs 252416 bytes of shared memory of 231424"),
        (128, Config(64, 2, split=2), "needs K of whole 128s; got K = 64"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(n, config, reason):
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        prefill.matmul(normal(0, (64, 64)), to_hopper(weight(0, n, 64)), config)
    with pytest.raises(NotImplementedError, match="needs rows in sixteens for dX; got 24"):
        prefill.backward(normal(0, (24, 64)), to_hopper(weight(0, 64, 128)), Config(24))


@pytest.mark.parametrize(
    ("scale_per_row", "is_paired"),
    [(False, True), (True, False), slow(False, False), slow(True, True)],
)
def test_products_and_derivatives_meet_the_reference(pretended_hopper, scale_per_row, is_paired):
    n = 192 if is_paired else 96
    x, dy = normal(0, (2, 65, 208)), normal(1, (2, 65, n))
    t = weight(2, n, 208, scale_per_row=scale_per_row)
    w = to_hopper(t, is_paired=is_paired)

    @functools.partial(jax.jit, static_argnums=0)
    def both(product, w, x, dy):
        y, vjp = jax.vjp(lambda x: product(x, w), x)
        return y, vjp(dy)[0]

    found = both(dequantized, w, x, dy)
    expected = both(nvfp4_matmul, t, x.astype(jnp.float32), dy.astype(jnp.float32))
    for pair in zip(found, expected, strict=True):
        assert_within_an_ulp(*pair)


def assert_scans_are_rematerialized(m, n, name):
    """Checks loss and dX of two layers, of weights in the Hopper layout and of plain ones."""
    layers = [weight(seed, n, n) for seed in (4, 5)]

    def loss(x, stacked, implementation):
        product = functools.partial(nvfp4_matmul, implementation=implementation)
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w)), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0].astype(jnp.float32) ** 2)

    def result(layers, implementation):
        grad = jax.jit(jax.value_and_grad(loss), donate_argnums=0, static_argnums=2)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        donated = normal(6, (m, n))
        found = grad(donated, stacked, implementation)
        assert donated.is_deleted()
        return map(f32, found)

    actual, dx = result(map(to_hopper, layers), name)
    expected, expected_dx = result(layers, "reference")
    np.testing.assert_allclose(actual, expected, rtol=1e-2)
    # Two layers, forward and backward, each rounding to bfloat16.
    assert np.abs(dx - expected_dx).max() <= 4 * 2**-7 * np.abs(expected_dx).max()


@pytest.mark.slow
def test_stacked_weights_are_scanned_rematerialized_and_x_is_donated(pretended_hopper):
    assert_scans_are_rematerialized(130, 64, None)


@pytest.mark.gpu
def test_on_its_device_stacked_weights_are_scanned_rematerialized_and_x_is_donated():
    assert_scans_are_rematerialized(300, 512, "prefill")


def test_nothing_but_the_packed_weight_is_kept_for_the_derivative(pretended_hopper):
    w = to_hopper(weight(7, 64, 64))
    _, vjp = jax.vjp(lambda x: nvfp4_matmul(x, w), normal(8, (130, 64)))
    kept = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]
    assert sum(leaf.nbytes for leaf in kept) == w.words.nbytes + w.global_scale.nbytes


def test_the_number_of_rows_and_their_type_choose_the_implementation(pretended_hopper):
    bfloat16 = {1: "decode", 128: "decode", 129: "prefill", 1 << 16: "prefill", 0: "dequantized"}
    float32 = dict.fromkeys((16, 129), "reference")
    for dtype, names in (("bfloat16", bfloat16), ("float32", float32)):
        for (m, name), p in itertools.product(names.items(), shapes.PROBLEMS):
            offered = api._HOPPER_IMPLEMENTATIONS
            assert api._choose(offered, None, m, p.n, p.k, jnp.dtype(dtype)) == name


@pytest.mark.parametrize(
    ("m", "bandwidth", "unpacks"),
    [
        (2048, runtime.H200.bandwidth, False),
        (8192, runtime.H200.bandwidth, True),
        # A copy of the weight costs more where memory is slow.
        (4096, 2 * runtime.H200.bandwidth, True),
        (4096, runtime.H200.bandwidth / 2, False),
    ],
)
def test_dx_of_few_rows_is_unpacked_in_tiles(pretended_hopper, monkeypatch, m, bandwidth, unpacks):
    called = []
    for name, module in (("copy", dequantize), ("tiles", prefill)):
        dx = lambda dy, w, name=name: called.append(name) or dy
        monkeypatch.setattr(module, "backward", dx)
    words = jax.ShapeDtypeStruct((56, 56, *layout.TILE_SHAPE), jnp.int32)
    w = layout.HopperNVFP4(words, jax.ShapeDtypeStruct((1,), jnp.float32), (3584, 3584))
    x = jax.ShapeDtypeStruct((m, 3584), jnp.bfloat16)
    with runtime.on(like(bandwidth=bandwidth)):
        jax.eval_shape(lambda x, w: jax.vjp(lambda x: nvfp4_matmul(x, w), x)[1](x), x, w)
    assert called == ["copy" if unpacks else "tiles"]


@on_cpu
@pytest.mark.parametrize("name", ["prefill", "dequantized"])
def test_neither_runs_without_its_device(name):
    with pytest.raises(NotImplementedError, match=f"'{name}': needs a GPU of compute capability 9"):
        nvfp4_matmul(normal(0, (2, 64)), to_hopper(weight(0, 64, 64)), implementation=name)


def test_weights_take_the_layout_of_the_device_and_come_back(pretended_hopper):
    t = random(jax.random.key(9), (3, 80, 96))
    prepared = jax.jit(lambda t: prepare(t, jnp.dtype(jnp.bfloat16)))(t)
    assert_equal_leaves(prepared, to_hopper(t))
    assert_equal_leaves(jax.jit(lambda w: unprepare(w))(prepared), t)
    assert prepare(t, jnp.dtype(jnp.float32)) is t and unprepare(t) is t


@on_cpu
def test_weights_keep_their_layout_on_a_cpu():
    t = weight(10, 64, 64)
    assert prepare(t, jnp.dtype(jnp.bfloat16)) is t


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4608, 3584), (3584, 18944), (180, 208)])
def test_on_its_device_the_kernel_writes_scaled_codes(n, k):
    t = weight(n, n, k)
    actual = jax.jit(dequantize.dequantize)(to_hopper(t))
    np.testing.assert_array_equal(actual, jax.jit(nvfp4.scaled_codes)(t))


@pytest.mark.gpu
@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("scale_per_row", [False, True])
@pytest.mark.parametrize("name", ["prefill", "dequantized"])
def test_on_its_device_products_and_derivatives_meet_the_reference(name, scale_per_row, is_paired):
    m, n, k = 300, 4608, 3584
    x, dy, t = normal(0, (m, k)), normal(1, (m, n)), weight(2, n, k, scale_per_row=scale_per_row)
    w = to_hopper(t, is_paired=is_paired)
    product = jax.jit(functools.partial(nvfp4_matmul, implementation=name))
    assert_within_an_ulp(product(x, w), reference.forward(x.astype(jnp.float32), t))
    actual = jax.jit(lambda x, dy: jax.vjp(lambda x: product(x, w), x)[1](dy)[0])(x, dy)
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))


_OF_BOTH = [Config(64, 2, 8, producer=True), Config(256), Config(256, cluster=2)]
_OF_BOTH += [Config(256, split=4)]
_OF_PRODUCTS = [Config(152, 2, 8, producer=True), Config(128, 2, 8, producer=True, split=2)]
_OF_PRODUCTS += [Config(192, 2, 5, cluster=2)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "config"),
    [("forward", config) for config in _OF_BOTH + _OF_PRODUCTS]
    + [("backward", config) for config in [*_OF_BOTH, Config(144, 2, 7, producer=True, split=2)]],
)
def test_on_its_device_every_tile_meets_the_reference(name, config):
    kernel = {"forward": prefill.matmul, "backward": prefill.backward}[name]
    # Several tiles for each block, the last of them ragged.
    x = normal(0, (10 * config.rows - 24, 3584 if name == "forward" else 4608))
    t = weight(1, 4608, 3584)
    actual = jax.jit(lambda x, w: kernel(x, w, config))(x, to_hopper(t))
    assert_within_an_ulp(actual, getattr(reference, name)(x.astype(jnp.float32), t))
