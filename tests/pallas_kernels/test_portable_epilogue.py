import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4, rounded, runtime
from pallas_kernels.linear import finish
from pallas_kernels.portable import epilogue, layout
from tests.pallas_kernels.common import f32, normal, to_portable
from tests.pallas_kernels.devices import like

LAYERS, LAYER = 2, 1
# Compiled whole: operation by operation these tests take several times as long.
quantize = jax.jit(nvfp4.quantize)
decoded = jax.jit(layout.decoded, static_argnums=1)


def problem(sizes, k, *, m=5, rank=None, has_bias=False, per_row=False):
    """Makes a stack of packed linears, LoRA's matrices, and the last layer's result by the definition."""
    n, draw = sum(sizes), lambda seed, *shape: normal(seed, (LAYERS, *shape), jnp.float32)
    parts = [quantize(draw(s, s, k) * k**-0.5) for s in (sizes if per_row else [n])]
    t = nvfp4.fuse(parts, shared=not per_row)
    pair = lambda i, size: (draw(i, k, rank) * k**-0.5, draw(i + 9, rank, size))
    matrices = [pair(i, size) for i, size in enumerate(sizes)] if rank else None
    bias = normal(3, (LAYERS, n)) if has_bias else None
    return to_portable(t), matrices, bias, normal(4, (m, k))


def definition(w, matrices, bias, x, *, unit=None, residual=None):
    """Computes `finish` of the layer's product, with the sums of `decoded`."""
    one = jax.tree.map(lambda leaf: leaf[LAYER], w)
    sums = np.asarray(x, np.float64) @ np.asarray(decoded(one, jnp.float32), np.float64).T
    sums = rounded(jnp.asarray(sums, jnp.float32), jnp.bfloat16).astype(jnp.float32)
    branches = []
    for a, b in matrices or []:
        down = jnp.dot(x.astype(jnp.float32), a[LAYER].astype(jnp.bfloat16).astype(jnp.float32))
        up = (0.5 * b[LAYER]).astype(jnp.bfloat16)
        branches.append((rounded(down, jnp.bfloat16), up))
    bias = None if bias is None else bias[LAYER]
    traits = {"unit": unit, "bias": bias, "residual": residual, "dtype": jnp.bfloat16}
    return finish(sums * one.multiplier, branches, **traits)


def linear(w, matrices, bias, x, sizes, residual=None, **options):
    options |= {"branch": None if matrices is None else epilogue.pack_lora(matrices, 0.5)}
    options |= {"layer": jnp.array([LAYER], jnp.int32), "multiplier": w.multiplier, "bias": bias}
    run = lambda x, residual: epilogue.linear(x, w, sizes=sizes, residual=residual, **options)
    return jax.jit(run)(x, residual)


def assert_mostly_equal(actual, expected):
    """Sums in another order may round the other way in bfloat16; a missing rounding changes half of all values."""
    actual, expected = f32(actual), f32(expected)
    assert actual.shape == expected.shape
    assert np.mean(actual != expected) < 0.02
    np.testing.assert_allclose(actual, expected, rtol=2**-6, atol=np.abs(expected).max() * 2**-7)


@pytest.mark.parametrize(
    ("sizes", "rank", "options"),
    [
        ((72, 16, 40), 8, {"has_bias": True, "per_row": True}),  # parts that end within tiles
        ((64,), None, {"m": 17}),  # no adapter; two blocks of rows
    ],
)
def test_a_finished_product_is_what_its_definition_says(portable, sizes, rank, options):
    w, matrices, bias, x = problem(sizes, 128, rank=rank, **options)
    actual = linear(w, matrices, bias, x, sizes)
    assert_mostly_equal(actual, definition(w, matrices, bias, x))


@pytest.mark.slow
@pytest.mark.parametrize("is_normed", [True, False])
def test_before_compute_capability_8_rows_may_be_larger_than_float16_is(portable, is_normed):
    if portable == "gpu":
        pytest.skip("pretends to be a T4")
    sizes = (64, 32)
    w, matrices, bias, x = problem(sizes, 128, rank=8, has_bias=True)
    x *= jnp.asarray([[1e6], [1e-6], [0], [300], [1]], jnp.bfloat16)
    stream = epilogue.stream(x, jnp.ones(128))
    with runtime.on(like(compute_capability="7.5")):
        if is_normed:
            actual = linear(w, matrices, bias, stream, sizes, eps=1e-6)
        else:
            actual = linear(w, matrices, bias, x, sizes)
    unit = stream.unit(1e-6)[:, None] if is_normed else None
    wanted = definition(w, matrices, bias, x, unit=unit)
    for row, expected in zip(actual, wanted, strict=True):
        largest = np.abs(f32(expected)).max()
        np.testing.assert_allclose(f32(row), f32(expected), atol=largest * 2**-7)


@pytest.mark.slow
def test_a_residual_stream_is_normalized_by_its_two_kernels(portable):
    sizes, width = (80,), 80
    w, matrices, _, x = problem(sizes, 128, rank=24)
    before, scales = normal(6, (5, width)), 1 + 0.1 * normal(7, (LAYERS, width), jnp.float32)
    stream = epilogue.stream(before, scales[0])
    new = linear(w, matrices, None, x, sizes, residual=(stream, scales))
    expected = definition(w, matrices, None, x, residual=before)
    assert_mostly_equal(new.values, expected)
    wide = f32(new.values)
    np.testing.assert_array_equal(new.scaled, jnp.asarray(wide * scales[LAYER], jnp.bfloat16))
    unit = 1 / np.sqrt((wide**2).mean(axis=1) + 1e-6)
    np.testing.assert_allclose(new.unit(1e-6), unit, rtol=1e-5)

    # The next linear reads what was scaled, and multiplies by the unit.
    next_sizes = (32, 64)
    w, matrices, bias, _ = problem(next_sizes, width, rank=8, has_bias=True)
    actual = linear(w, matrices, bias, new, next_sizes, eps=1e-6)
    expected = definition(w, matrices, bias, new.scaled, unit=jnp.asarray(unit)[:, None])
    assert_mostly_equal(actual, expected)


@pytest.mark.slow
def test_a_gate_and_what_it_lets_through_become_one(portable):
    sizes = (112, 112)
    w, matrices, _, x = problem(sizes, 64, rank=16)
    actual = linear(w, matrices, None, x, sizes, is_swiglu=True)
    gate, up = jnp.split(definition(w, matrices, None, x).astype(jnp.float32), 2, axis=1)
    assert_mostly_equal(actual, rounded(jax.nn.silu(gate) * up, jnp.bfloat16))


def test_ranks_are_filled_up_to_powers_of_two():
    assert [epilogue.filled_rank(r) for r in (1, 16, 17, 32, 48, 256)] == [16, 16, 32, 32, 64, 256]
    matrices = [(jnp.ones((2, 64, 24)), jnp.ones((2, 24, size))) for size in (40, 8)]
    branch = epilogue.pack_lora(matrices, 3.0)
    assert branch.a.shape == (2, 64, 64) and branch.b.shape == (2, 48, 32)
    assert branch.sizes == (40, 8) and branch.rank == 32
    np.testing.assert_array_equal(f32(branch.b).sum(axis=-1), 72)
    np.testing.assert_array_equal(f32(branch.a).sum(axis=(1, 2)), 2 * 24 * 64)
