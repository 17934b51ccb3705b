"""Tests products of many rows with weights in the Hopper layout: the kernels, and the choice between them."""

import dataclasses
import functools
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
from tests.pallas_kernels.devices import like

random = jax.jit(nvfp4.random, static_argnums=1)
to_hopper = jax.jit(layout.prepare, static_argnames="is_paired")
on_cpu = pytest.mark.skipif(runtime.platform() != "cpu", reason="interpret mode is for a CPU")
interpreted = functools.partial(dequantize.dequantize, interpret=True)
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


def normal(seed, shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def weight(seed, n, k, *, scale_per_row=False):
    t = random(jax.random.key(seed), (n, k))
    rows = t.global_scale * jnp.geomspace(0.5, 8, n)
    return dataclasses.replace(t, global_scale=rows) if scale_per_row else t


def assert_equal_leaves(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_within_an_ulp(actual, expected):
    """Checks that errors are at most one bfloat16 ulp of the largest output."""
    expected = np.asarray(expected, np.float32)
    assert actual.dtype == jnp.bfloat16
    error = np.abs(np.asarray(actual, np.float32) - expected).max()
    assert error <= np.abs(expected).max() * 2**-7


# The kernel that writes a weight out ---------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("n", "k", "config"),
    [
        # Unequal runs, one of which is shorter than the pipeline.
        pytest.param(*(128, 256, dequantize.Config(128, 2, 3)), marks=pytest.mark.slow),
        pytest.param(
            *(192, 320, dequantize.Config(64, 2, 2)), marks=pytest.mark.slow
        ),  # slots used again
        (100, 208, None),  # ragged N and K
        pytest.param(*(64, 64, None), marks=pytest.mark.slow),  # less work than blocks
    ],
)
def test_a_weight_is_written_out_as_scaled_codes_without_a_race(capfd, n, k, config):
    t = weight(n, n, k)
    actual = interpreted(to_hopper(t), config)
    np.testing.assert_array_equal(actual, nvfp4.scaled_codes(t), strict=True)
    # JAX 0.11 reports races on standard output and goes on; JAX 0.12 raises an error.
    assert "RACE" not in capfd.readouterr().out


def test_a_step_that_does_not_divide_k_is_refused_and_never_picked():
    reason = "needs K of whole steps of 128; got K = 320"
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        dequantize.dequantize(to_hopper(weight(0, 64, 320)), dequantize.Config(128))
    for n, k in [(p.n, p.k) for p in shapes.PROBLEMS] + [(16, 16), (40, 1040), (64, 320)]:
        assert dequantize.supports(n, k, dequantize.pick_config(k)) is None


@on_cpu
@pytest.mark.parametrize(
    ("k", "config"),
    [
        (208, None),  # ragged K
        pytest.param(*(320, dequantize.Config(64, 2, 2)), marks=pytest.mark.slow),
        pytest.param(*(256, dequantize.Config(128, 2, 3)), marks=pytest.mark.slow),
        pytest.param(*(256, dequantize.Config(256, 2, 3)), marks=pytest.mark.slow),
    ],
)
def test_rows_in_pairs_are_written_out_in_order(capfd, k, config):
    t = weight(k, 192, k)
    actual = interpreted(to_hopper(t, is_paired=True), config)
    np.testing.assert_array_equal(actual, nvfp4.scaled_codes(t), strict=True)
    assert "RACE" not in capfd.readouterr().out


# The kernel that multiplies ------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        # One tile of x.
        pytest.param(*(16, 256, 128, prefill_config.Config(16, 2, 3)), marks=pytest.mark.slow),
        # Ragged M, more tiles than a band, slots used again.
        pytest.param(*(44, 128, 320, prefill_config.Config(16, 1, 3, 2)), marks=pytest.mark.slow),
        pytest.param(
            *(24, 180, 48, prefill_config.Config(24, 3, 3)), marks=pytest.mark.slow
        ),  # ragged N and K
        (44, 128, 256, prefill_config.Config(16, 2, 2, producer=True, split=2)),  # all tiles split
        # One split, the others whole.
        pytest.param(
            *(16, 192, 256, prefill_config.Config(16, 1, 3, split=4)), marks=pytest.mark.slow
        ),
    ],
)
def test_products_meet_the_reference_without_a_race(capfd, assume, m, n, k, config):
    assume(like(processors=2))  # so that a block has several tiles
    x, t = normal(m, (m, k)), weight(n, n, k, scale_per_row=n in (180, 192))
    actual = prefill.matmul(x, to_hopper(t), config, interpret=True)
    assert_within_an_ulp(actual, reference.forward(x.astype(jnp.float32), t))
    assert "RACE" not in capfd.readouterr().out


@on_cpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        pytest.param(
            *(44, 320, 256, prefill_config.Config(16, 2, 2, 2, producer=True)),
            marks=pytest.mark.slow,
        ),
        (32, 180, 48, prefill_config.Config(32, 1, 3)),  # ragged N and K
        # One tile split, the others whole.
        pytest.param(
            16, 256, 192, prefill_config.Config(16, 1, 3, split=2), marks=pytest.mark.slow
        ),
    ],
)
def test_derivatives_meet_the_reference_without_a_race(capfd, assume, m, n, k, config):
    assume(like(processors=2))
    dy, t = normal(m, (m, n)), weight(n, n, k, scale_per_row=n == 180)
    actual = prefill.backward(dy, to_hopper(t), config, interpret=True)
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))
    assert "RACE" not in capfd.readouterr().out


@on_cpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (44, 192, 208, prefill_config.Config(16, 1, 3, 2)),  # ragged M and K
        pytest.param(
            *(44, 128, 256, prefill_config.Config(16, 2, 2, producer=True, split=2)),
            marks=pytest.mark.slow,
        ),  # all tiles split
        # One split, the others whole.
        pytest.param(
            *(16, 192, 256, prefill_config.Config(16, 1, 3, split=4)), marks=pytest.mark.slow
        ),
        pytest.param(*(256, 384, 64, prefill_config.Config(256, 3, 3)), marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_the_order_of_rows_in_memory_changes_no_bit(capfd, assume, m, n, k, config):
    x, t = normal(m, (m, k)), weight(n, n, k, scale_per_row=n == 192)
    assume(like(processors=2))
    found = [
        prefill.matmul(x, to_hopper(t, is_paired=p), config, interpret=True) for p in (False, True)
    ]
    np.testing.assert_array_equal(*found)
    assert "RACE" not in capfd.readouterr().out


@on_cpu
@pytest.mark.parametrize("scale_per_row", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dx_of_rows_in_pairs_meets_the_reference(assume, scale_per_row):
    t = weight(5, 192, 128, scale_per_row=scale_per_row)
    dy, config = normal(4, (44, 192)), prefill_config.Config(16, 2, 3)
    assume(like(processors=2))
    actual = prefill.backward(dy, to_hopper(t, is_paired=True), config, interpret=True)
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))


@on_cpu
@pytest.mark.parametrize("scale_per_row", [pytest.param(False, marks=pytest.mark.slow), True])
def test_its_sums_are_scaled_before_they_are_rounded(scale_per_row):
    t = weight(11, 128, 64, scale_per_row=scale_per_row)
    x = jnp.eye(64, dtype=jnp.bfloat16) + jnp.eye(64, k=1, dtype=jnp.bfloat16)
    actual = prefill.matmul(x, to_hopper(t), prefill_config.Config(64, 2, 3), interpret=True)
    # Of two terms; one rounding to float32 is exact or of no consequence.
    sums = np.asarray(x, np.float32) @ np.asarray(nvfp4.scaled_codes(t, jnp.float32)).T
    np.testing.assert_array_equal(actual, (sums * t.multiplier).astype(jnp.bfloat16))


@pytest.mark.parametrize(("processors", "least"), [(132, 0.85), (114, 0.8), (78, 0.8)])
def test_every_problem_has_a_configuration_and_large_ones_leave_few_blocks_idle(
    assume, processors, least
):
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


# Configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dequantize.Config(96), "step must be 64, 128 or 256; got 96"),
        (lambda: dequantize.Config(stages=1), "stages must be 2 or more; got 1"),
        (lambda: dequantize.Config(blocks=0), "blocks must be 1 or more; got 0"),
        (lambda: prefill_config.Config(100), "rows must be a multiple of 8 up to 256; got 100"),
        (lambda: prefill_config.Config(264), "rows must be a multiple of 8 up to 256; got 264"),
        (lambda: prefill_config.Config(64, 4), "warpgroups must be 1 to 3; got 4"),
        (lambda: prefill_config.Config(64, cluster=3), "cluster must be 1 or 2; got 3"),
        (
            lambda: prefill_config.Config(72, cluster=2),
            "rows must be in sixteens for two blocks; got 72",
        ),
        (
            lambda: prefill_config.Config(168, producer=True),
            "a producer leaves registers for 160 rows",
        ),
        (lambda: prefill_config.Config(64, stages=2), "stages must be 3 or more; got 2"),
        (
            lambda: prefill_config.Config(64, stages=1, producer=True),
            "stages must be 2 or more; got 1",
        ),
        (lambda: prefill_config.Config(64, split=0), "split must be 1 or more; got 0"),
        (lambda: prefill_config.Config(64, band=0), "band must be 1 or more; got 0"),
    ],
)
def test_impossible_configurations_cannot_be_made(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("n", "config", "reason"),
    [
        (192, prefill_config.Config(64, 2), "needs N of whole 128-row tiles; got N = 192"),
        (128, prefill_config.Config(256, 2, 5), "needs 252416 bytes of shared memory of 231424"),
        (128, prefill_config.Config(64, 2, split=2), "needs K of whole 128s; got K = 64"),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(n, config, reason):
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        prefill.matmul(normal(0, (64, 64)), to_hopper(weight(0, n, 64)), config)


def test_dx_in_other_than_sixteens_of_rows_is_refused():
    reason = "needs rows in sixteens for dX; got 24"
    with pytest.raises(NotImplementedError, match=reason):
        prefill.backward(
            normal(0, (24, 64)), to_hopper(weight(0, 64, 128)), prefill_config.Config(24)
        )


# Through the front door ----------------------------------------------------------------------


@pytest.mark.parametrize("is_paired", [False, True])
@pytest.mark.parametrize("scale_per_row", [False, True])
def test_products_and_their_derivative_meet_the_reference(
    pretended_hopper, scale_per_row, is_paired
):
    n = 192 if is_paired else 96
    x, dy = normal(0, (2, 65, 208)), normal(1, (2, 65, n))
    t = weight(2, n, 208, scale_per_row=scale_per_row)
    w = to_hopper(t, is_paired=is_paired)
    actual, vjp = jax.vjp(lambda x: dequantized(x, w), x)
    expected, expected_vjp = jax.vjp(lambda x: nvfp4_matmul(x, t), x.astype(jnp.float32))
    assert_within_an_ulp(actual, expected)
    assert_within_an_ulp(vjp(dy)[0], expected_vjp(dy.astype(jnp.float32))[0])


@on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("scale_per_row", [False, True])
def test_one_hot_inputs_return_scaled_codes_times_the_multiplier(scale_per_row):
    t = weight(3, 64, 64, scale_per_row=scale_per_row)
    codes = np.asarray(nvfp4.scaled_codes(t, jnp.float32))
    one_hot, w, config = (
        jnp.eye(64, dtype=jnp.bfloat16),
        to_hopper(t),
        prefill_config.Config(64, 1, 3),
    )
    y = prefill.matmul(one_hot, w, config, interpret=True)
    exact = (codes * t.multiplier[:, None]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(y, exact.T, strict=True)
    if not scale_per_row:  # else dy takes the scales, and is rounded with them
        dx = prefill.backward(one_hot, w, config, interpret=True)
        np.testing.assert_array_equal(dx, exact, strict=True)


def test_stacked_weights_are_scanned_rematerialized_and_x_is_donated(pretended_hopper):
    layers = [weight(seed, 64, 64) for seed in (4, 5)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(to_hopper, layers))
    x = normal(6, (130, 64))

    def loss(product, x, stacked):
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w)), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0].astype(jnp.float32) ** 2)

    grad = jax.jit(jax.value_and_grad(functools.partial(loss, nvfp4_matmul)), donate_argnums=0)
    donated = jnp.copy(x)
    actual, dx = grad(donated, stacked)
    assert donated.is_deleted()
    plain = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    expected, expected_dx = grad(x, plain)
    np.testing.assert_allclose(actual, expected, rtol=1e-2)
    # Two layers, forward and backward, each rounding to bfloat16.
    difference = np.abs(np.asarray(dx - expected_dx, np.float32))
    assert difference.max() <= 4 * 2**-7 * np.abs(np.asarray(expected_dx, np.float32)).max()


def test_nothing_but_the_packed_weight_is_kept_for_the_derivative(pretended_hopper):
    w = to_hopper(weight(7, 64, 64))
    _, vjp = jax.vjp(lambda x: nvfp4_matmul(x, w), normal(8, (130, 64)))
    kept = [leaf for leaf in jax.tree.leaves(vjp) if isinstance(leaf, jax.Array)]
    assert sum(leaf.nbytes for leaf in kept) == w.words.nbytes + w.global_scale.nbytes


@pytest.mark.parametrize(
    ("m", "dtype", "name"),
    [
        (1, jnp.bfloat16, "decode"),
        (128, jnp.bfloat16, "decode"),
        (129, jnp.bfloat16, "prefill"),
        (1 << 16, jnp.bfloat16, "prefill"),
        (0, jnp.bfloat16, "dequantized"),
        (16, jnp.float32, "reference"),
        (129, jnp.float32, "reference"),
    ],
)
def test_the_number_of_rows_and_their_type_choose_the_implementation(
    pretended_hopper, m, dtype, name
):
    for p in shapes.PROBLEMS:
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
def test_dx_of_few_rows_is_unpacked_in_its_tiles(
    pretended_hopper, monkeypatch, m, bandwidth, unpacks
):
    called = []
    dx = lambda name: (
        lambda dy, w: called.append(name) or jnp.zeros((len(dy), w.shape[1]), dy.dtype)
    )
    monkeypatch.setattr(dequantize, "backward", dx("copy"))
    monkeypatch.setattr(prefill, "backward", dx("tiles"))
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
    prepared = prepare(t, jnp.dtype(jnp.bfloat16))
    assert_equal_leaves(prepared, to_hopper(t))
    assert_equal_leaves(unprepare(prepared), t)
    assert prepare(t, jnp.dtype(jnp.float32)) is t and unprepare(t) is t


@on_cpu
def test_weights_keep_their_layout_on_a_cpu():
    t = weight(10, 64, 64)
    assert prepare(t, jnp.dtype(jnp.bfloat16)) is t


# On the device -------------------------------------------------------------------------------


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
def test_on_its_device_the_product_and_its_derivative_meet_the_reference(
    name, scale_per_row, is_paired
):
    m, n, k = 300, 4608, 3584
    x, dy, t = normal(0, (m, k)), normal(1, (m, n)), weight(2, n, k, scale_per_row=scale_per_row)
    w = to_hopper(t, is_paired=is_paired)
    product = jax.jit(functools.partial(nvfp4_matmul, implementation=name))
    assert_within_an_ulp(product(x, w), reference.forward(x.astype(jnp.float32), t))
    actual = jax.jit(lambda x, dy: jax.vjp(lambda x: product(x, w), x)[1](dy)[0])(x, dy)
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))


@pytest.mark.gpu
def test_on_its_device_stacked_weights_are_scanned_rematerialized_and_x_is_donated():
    layers = [weight(seed, 512, 512) for seed in (4, 5)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(to_hopper, layers))
    x = normal(6, (300, 512))

    def loss(implementation, x, stacked):
        product = functools.partial(nvfp4_matmul, implementation=implementation)
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w)), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0].astype(jnp.float32) ** 2)

    grads = {}
    for name in ("prefill", "reference"):
        donated = jnp.copy(x)
        grad = jax.jit(jax.grad(functools.partial(loss, name)), donate_argnums=0)
        grads[name] = np.asarray(grad(donated, stacked), np.float32)
        assert donated.is_deleted()
    # Two layers, forward and backward, each rounding to bfloat16.
    difference = np.abs(grads["prefill"] - grads["reference"]).max()
    assert difference <= 4 * 2**-7 * np.abs(grads["reference"]).max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        prefill_config.Config(64, 2, 8, producer=True),
        prefill_config.Config(152, 2, 8, producer=True),
        prefill_config.Config(128, 2, 8, producer=True, split=2),
        prefill_config.Config(192, 2, 5, cluster=2),
        prefill_config.Config(256),
        prefill_config.Config(256, cluster=2),
        prefill_config.Config(256, split=4),
    ],
)
def test_on_its_device_every_tile_meets_the_reference(config):
    # Several tiles for each block, the last of them ragged.
    x, t = normal(0, (10 * config.rows - 24, 3584)), weight(1, 4608, 3584)
    actual = jax.jit(lambda x, w: prefill.matmul(x, w, config))(x, to_hopper(t))
    assert_within_an_ulp(actual, reference.forward(x.astype(jnp.float32), t))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        prefill_config.Config(64, 2, 8, producer=True),
        prefill_config.Config(144, 2, 7, producer=True, split=2),
        prefill_config.Config(256),
        prefill_config.Config(256, cluster=2),
        prefill_config.Config(256, split=4),
    ],
)
def test_on_its_device_every_tile_of_a_derivative_meets_the_reference(config):
    dy, t = normal(0, (10 * config.rows - 24, 4608)), weight(1, 4608, 3584)
    actual = jax.jit(lambda dy, w: prefill.backward(dy, w, config))(dy, to_hopper(t))
    assert_within_an_ulp(actual, reference.backward(dy.astype(jnp.float32), t))
