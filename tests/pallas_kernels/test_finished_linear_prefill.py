"""Tests linears with many rows in one kernel: LoRA and the norm's factor are applied before rounding."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear, nvfp4, nvfp4_matmul, runtime
from pallas_kernels.finished_linear import prefill as fused_wide
from pallas_kernels.nvfp4_matmul import api, dequantize, layout, prefill, reference, shapes
from pallas_kernels.nvfp4_matmul.prefill_config import Config
from tests.combinations import spread
from tests.pallas_kernels.common import f32, slow, to_hopper, weight
from tests.pallas_kernels.devices import like


@dataclasses.dataclass(frozen=True)
class Linear:
    """A random linear with its inputs, as `fused_wide.linear` takes them."""

    x: jax.Array
    weight: nvfp4.NVFP4Tensor
    branches: list[linear.LoraTerm]
    unit: jax.Array
    bias: jax.Array | None

    def expected(self) -> jax.Array:
        """Computes the result by the definition."""
        product = nvfp4_matmul(self.x, self.weight, out_dtype=jnp.float32)
        traits = {"unit": self.unit, "bias": self.bias, "dtype": self.x.dtype}
        return jax.jit(lambda y, b: linear.finish(y, b, **traits))(product, self.branches)


def random(m, sizes, k, *, rank=16, with_bias=True, scale_per_row=False):
    generator = np.random.default_rng(m + k)
    normal = lambda *shape: jnp.asarray(generator.standard_normal(shape), jnp.bfloat16)
    n = sum(sizes)
    t = weight(m, n, k, scale_per_row=scale_per_row)
    scale = jnp.asarray(np.sqrt(k / rank) * np.std(nvfp4.dequantize(t)), jnp.bfloat16)
    return Linear(
        normal(m, k),
        t,
        # As large as the product, so that an error of either shows.
        [(normal(m, rank), scale * normal(rank, size)) for size in sizes],
        jnp.asarray(generator.uniform(0.5, 2, (m, 1)), jnp.float32),
        normal(n) if with_bias else None,
    )


def assert_almost_all_are_equal(actual, expected):
    """Sums in another order may round to a neighbour, once in each bracket, but not in a whole tile."""
    assert actual.dtype == expected.dtype == jnp.bfloat16
    actual, expected = f32(actual), f32(expected)
    assert np.abs(actual - expected).max() <= np.abs(expected).max() * 2**-7
    for columns in range(0, actual.shape[1], 64):
        for rows in range(0, len(actual), 64):
            tile = slice(rows, rows + 64), slice(columns, columns + 64)
            assert (actual[tile] == expected[tile]).mean() > 0.9, tile


PAIRED, PER_ROW = {"is_paired": True}, {"scale_per_row": True}
_PRODUCER = functools.partial(Config, 16, 2, 2, producer=True)


@pytest.mark.parametrize(
    ("m", "sizes", "k", "config", "traits"),
    [
        slow(44, (128, 64), 128, Config(16, 1, 3, 2), {}),  # ragged M, several tiles for each block
        # Two tiles whole, one split.
        slow(16, (128, 128, 128), 256, _PRODUCER(split=4), PER_ROW | {"rank": 64}),
        slow(16, (128, 128), 128, _PRODUCER(split=2), PER_ROW),  # all split, of two parts
        slow(32, (128,), 128, _PRODUCER(), {"with_bias": False, "rank": 3}),
        # Neither K nor N in whole tiles, the ranks of all parts in one; the last part is filled up.
        (20, (40, 24, 36), 80, Config(16, 1, 3), PER_ROW),
        slow(20, (128, 64, 36), 144, Config(16, 1, 3), {"rank": 40}),
        # All split, and the last tile of N filled up.
        slow(16, (64, 40), 256, Config(16, 1, 3, split=4), {"rank": 40}),
        slow(168, (64,), 192, Config(168, 1, 3), {}),  # an epilogue in two unequal halves
        # Rows in pairs: ragged M and K, an odd number of tiles.
        slow(44, (96, 96), 208, Config(16, 1, 3, 2), PAIRED | PER_ROW),
        slow(16, (128, 128), 128, _PRODUCER(split=2), PAIRED | {"rank": 32}),  # all split
        # Two tiles whole, one split.
        slow(16, (192, 192), 256, _PRODUCER(split=4), PAIRED | PER_ROW | {"rank": 3}),
        slow(168, (32, 32), 192, Config(168, 1, 3), PAIRED | {"with_bias": False}),
        # Beside a producer, an epilogue of three pieces.
        slow(112, (64, 64), 128, Config(112, 2, 2, producer=True), PAIRED | {"rank": 32}),
    ],
)
def test_the_kernel_meets_its_definition(interpreter, assume, m, sizes, k, config, traits):
    assume(like(processors=2))  # so that a block has several tiles
    kind = {"is_paired": "is_paired" in traits}
    case = random(m, sizes, k, **{name: v for name, v in traits.items() if name != "is_paired"})
    epilogue = fused_wide.epilogue(case.branches, case.unit, case.bias, **kind)
    w = to_hopper(case.weight, **kind)
    actual = prefill.matmul(case.x, w, config, epilogue=epilogue, interpret=True)
    assert_almost_all_are_equal(actual, case.expected())


@pytest.fixture
def on_hopper(monkeypatch, h200):
    """Pretends to be a Hopper card on which the reference stands in for the kernels."""
    multiply_back = lambda dy, w: reference.backward(dy, layout.unprepare(w))
    monkeypatch.setattr(api._Prefill, "backward", staticmethod(multiply_back))


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "is_paired"), [slow((256, 128), False), ((192, 192), True)])
def test_its_derivatives_are_those_of_the_definition(monkeypatch, on_hopper, sizes, is_paired):
    case = random(136, sizes, 512)
    dy = jnp.asarray(np.random.default_rng(0).standard_normal((136, 384)), jnp.bfloat16)

    def plain(x, branches):
        return dataclasses.replace(case, x=x, branches=branches).expected()

    y, expected_vjp = jax.vjp(plain, case.x, case.branches)
    expected = expected_vjp(dy)
    monkeypatch.setattr(prefill, "matmul", lambda *_, epilogue: y)
    w = to_hopper(case.weight, is_paired=is_paired)
    run = lambda x, branches: fused_wide.linear(x, w, branches, case.unit, case.bias)
    out, vjp = jax.vjp(run, case.x, case.branches)
    np.testing.assert_array_equal(out, y)
    jax.tree.map(np.testing.assert_array_equal, vjp(dy), expected)


def test_x_and_branches_must_fit_the_weight():
    case = random(136, (256,), 512)
    others = to_hopper(case.weight), case.branches, case.unit, case.bias
    with pytest.raises(ValueError, match=r"got shape \(256, 512\)"):
        fused_wide.linear(case.x[:, :448], *others)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"m": 128}, "needs M > 128, else another kernel is faster"),
        ({"rank": 65}, "needs a rank of 1 to 64; got 65"),
        ({"dtype": jnp.float32}, "needs x in bfloat16; got"),
        ({"sizes": (288, 96), "rank": 40}, "needs parts of whole 64-row tiles but for"),
        ({"k": 64}, "needs K of"),
        # Rows in pairs have room for the ranks of both parts.
        (
            PAIRED | {"rank": 33},
            "needs 64 ranks or fewer in all parts if rows are in pairs; got 2 part",
        ),
        (PAIRED | {"rank": 32}, None),
        ({"rank": 33}, None),
    ],
)
def test_what_it_cannot_run_is_refused_with_its_reason(on_hopper, traits, reason):
    usual = {"m": 256, "sizes": (256, 256), "k": 512, "rank": 16, "dtype": jnp.bfloat16}
    actual = fused_wide.supports(**usual | traits)
    assert actual is None if reason is None else actual.startswith(reason)


def test_linears_of_every_model_and_of_no_whole_tiles_can_be_run(on_hopper):
    gates = [((p.n // 2, p.n // 2), p.k, 32) for p in shapes.PROBLEMS if p.layer == "gate_up"]
    # Key and value heads are the narrowest parts: 256 rows at least.
    heads = [((p.n - 512, 256, 256), p.k, 32) for p in shapes.PROBLEMS if p.layer == "qkv"]
    small = [(sizes, 576, 32) for sizes in ((576, 192, 192), (576,), (1536, 1536))]
    small += [((576,), 1536, 32)]  # SmolLM2-135M
    # An even number of tiles with odd parts; parts within a tile, whose ranks are in one.
    odd = [((640, 192, 192), 576, 64), ((288, 96, 96), 288, 21), ((1000, 1000), 1000, 32)]
    odd += [((1000,), 2000, 64), ((256,), 128, 8)]
    rows = (129, 300, 512, 1024, 2048, 8192)
    for m, shape in itertools.product(rows, gates + heads + small + odd):
        assert fused_wide.supports(m, *shape, jnp.bfloat16) is None, (m, shape)


def test_it_needs_its_device():
    if runtime.is_hopper():
        pytest.skip("asks what happens elsewhere")
    with pytest.raises(NotImplementedError, match="needs a GPU of compute capability 9.0"):
        case = random(136, (256,), 512)
        fused_wide.linear(case.x, to_hopper(case.weight), case.branches, case.unit, None)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "k"),
    spread(
        [
            (1200, (2560, 1024, 1024), Config(256)),
            (2000, (2560, 1024, 1024), Config(256, cluster=2)),
            (1200, (2432, 2432), Config(152, 2, 7, producer=True)),
            (500, (2560, 1024, 1024), Config(88, 2, 8, producer=True)),
            (2048, (2560, 1024, 1024), Config(256, split=4)),
            (300, (2432, 2432), None),
            (136, (3584, 512, 512), None),  # all split
            (512, (3584, 512, 512), None),  # 176 rows, no producer
            (2200, (3584, 512, 512), None),  # some split, of several parts
            (300, (576, 192, 192), None),
            (2000, (1000, 1000), None),
            (700, (1000,), None),
        ],
        [3584, 576, 208],
        every=2,
    ),
)
def test_on_its_device_every_tile_meets_the_definition(case, k):
    m, sizes, config = case
    if config is not None and k < 3584:
        pytest.skip("for the configuration's own shape")
    case = random(*(m, sizes, k), rank=32, with_bias=len(sizes) == 3, scale_per_row=config is None)
    w = to_hopper(case.weight)
    epilogue = fused_wide.epilogue(case.branches, case.unit, case.bias)
    run = jax.jit(lambda x, w, epilogue: prefill.matmul(x, w, config, epilogue=epilogue))
    assert_almost_all_are_equal(run(case.x, w, epilogue), case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (8192, 37888, 3584, None),
        (300, 9728, 896, None),
        (136, 9728, 896, None),
        (500, 4864, 576, Config(88, 2, 8, producer=True)),
        (2200, 2432, 208, None),
        (1000, 1984, 208, None),
    ],
)
def test_on_its_device_rows_in_pairs_give_what_rows_in_order_give(m, n, k, config):
    case = random(m, (n // 2, n // 2), k, rank=32)

    def results(*, is_paired):
        w = to_hopper(case.weight, is_paired=is_paired)
        more = fused_wide.epilogue(case.branches, case.unit, case.bias, is_paired=is_paired)
        run = jax.jit(lambda x, w, more: prefill.matmul(x, w, config, epilogue=more))
        return run(case.x, w, None), jax.jit(dequantize.dequantize)(w), run(case.x, w, more)

    *paired, finished = results(is_paired=True)
    *joined, wanted = results(is_paired=False)
    jax.tree.map(np.testing.assert_array_equal, paired, joined)
    # The ranks are summed in other places of B.
    assert_almost_all_are_equal(finished, wanted)


@pytest.mark.gpu
def test_on_its_device_it_is_rematerialized_in_a_scan_and_x_is_donated():
    case = random(300, (512, 512), 1024, with_bias=False)
    w = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), to_hopper(case.weight))

    def loss(linear_of, x, branches, w):
        layer = lambda x, w: (jnp.tanh(linear_of(x, w, branches)), None)
        last, _ = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, w)
        return jnp.sum(last.astype(jnp.float32) ** 2)

    def apart(x, w, branches):
        product = nvfp4_matmul(x, w, out_dtype=jnp.float32)
        return linear.finish(product, branches, unit=case.unit, dtype=x.dtype)

    found = []
    for linear_of in (lambda x, w, b: fused_wide.linear(x, w, b, case.unit, None), apart):
        donated = jnp.copy(case.x)
        grad = jax.grad(functools.partial(loss, linear_of), argnums=(0, 1))
        found.append(jax.jit(grad, donate_argnums=0)(donated, case.branches, w))
        assert donated.is_deleted()
    for actual, expected in zip(*map(jax.tree.leaves, found), strict=True):
        actual, expected = (np.asarray(leaf, np.float32) for leaf in (actual, expected))
        # Two layers, forward and backward, each rounding to bfloat16.
        assert np.abs(actual - expected).max() <= 4 * 2**-7 * np.abs(expected).max()
