import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import nvfp4_matmul, packed_matmul, prepare, runtime
from pallas_kernels.formats import mxfp4, nf4, nvfp4
from pallas_kernels.nvfp4_matmul import shapes
from pallas_kernels.portable import layout, matmul, tuning
from pallas_kernels.portable.layout import PortableWeight
from pallas_kernels.portable.tuning import Config
from tests.pallas_kernels.common import RANDOM, normal, portable_weight, slow, to_portable, weight
from tests.pallas_kernels.devices import like

decoded = jax.jit(layout.decoded, static_argnums=1)
TINY = Config(block_n=64, units=1, split=1, warps=2, stages=3)


def dense(w):
    """Returns the weight that the kernels decode, in float64."""
    return np.asarray(decoded(w, jnp.bfloat16)).astype(np.float64)


def assert_close(actual, expected, ulps=1):
    """Checks that errors are at most a few bfloat16 ulps of the largest output."""
    actual, expected = np.asarray(actual).astype(np.float64), np.asarray(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= np.abs(expected).max() * ulps * 2**-8


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (1, 64, 64, TINY),  # one chunk
        (5, 72, 192, dataclasses.replace(TINY, split=2)),  # ragged N; parts of different lengths
        slow(3, 64, 80, TINY),  # K ends within a chunk
        slow(17, 128, 272, dataclasses.replace(TINY, block_n=32, split=3)),  # in parts, too
        (70, 64, 128, dataclasses.replace(TINY, units=2)),  # two blocks of rows
    ],
)
def test_products_meet_a_float64_oracle(portable, m, n, k, config):
    x, w = normal(m, (m, k)), portable_weight("nvfp4", (n, k))
    run = jax.jit(functools.partial(matmul.product, config=config))
    partials = np.asarray(run(x, w).partials, np.float64)
    assert partials.shape == (config.split, m, layout.whole(n))
    expected = np.asarray(x, np.float64) @ dense(w).T
    # Sums in float32 of products that are exact.
    most = np.abs(expected).max() * 2**-16
    np.testing.assert_allclose(partials.sum(0)[:, :n], expected, atol=most)


@pytest.mark.parametrize("kind", ["mxfp4", slow("nf4")])
def test_other_formats_are_another_decoder_of_the_same_kernel(portable, kind):
    x, w = normal(0, (4, 128)), portable_weight(kind, (64, 128))
    sums = jax.jit(functools.partial(matmul.product, config=TINY))(x, w).partials.sum(0)
    assert_close(sums, np.asarray(x, np.float64) @ dense(w).T, ulps=1 if kind == "nf4" else 2**-8)


@pytest.mark.parametrize("kind", ["nvfp4", slow("nf4")])
def test_before_compute_capability_8_float16_is_multiplied(portable, kind):
    if portable == "gpu":
        pytest.skip("pretends to be a T4")
    x, w = normal(1, (3, 128)), portable_weight(kind, (64, 128))
    # Rows of very different sizes, and one of zeros: float16 ends at 65504.
    unlike = x * jnp.array([[1e6], [1e-6], [0]], jnp.bfloat16)
    with runtime.on(like(compute_capability="7.5")):
        unpacked, products = matmul.unpacked(w), matmul.many_rows(unlike, w)
        few = jax.jit(matmul.few_rows)
        sums, unlike_sums = few(x, w), few(unlike, w)
    assert_close(sums, np.asarray(x, np.float64) @ dense(w).T, ulps=1 if kind == "nf4" else 2**-8)
    assert unpacked.dtype == jnp.float16
    for found in (products, unlike_sums):
        for actual, row in zip(found, np.asarray(unlike, np.float64) @ dense(w).T, strict=True):
            assert_close(actual, row, ulps=1)


def test_before_compute_capability_8_mxfp4_is_refused():
    dense_weight = jax.eval_shape(mxfp4.quantize, jnp.ones((64, 128)))
    with runtime.on(like(compute_capability="7.5")):
        assert layout.supports(dense_weight).startswith("needs compute capability 8.0 for MXFP4")
    with runtime.on(like(compute_capability="8.0")):
        assert layout.supports(dense_weight) is None


def test_one_hot_inputs_return_what_is_decoded(portable):
    w = portable_weight("nvfp4", (64, 64))
    product = jax.jit(functools.partial(matmul.product, config=TINY))
    one_hot = product(jnp.eye(64, dtype=jnp.bfloat16), w)
    np.testing.assert_array_equal(one_hot.partials[0], dense(w).T)


def test_a_stack_is_read_at_its_layer_with_the_ranks_beside_it(portable):
    stack, x = portable_weight("nvfp4", (3, 64, 192)), normal(2, (9, 192))
    a = normal(3, (3, 48, 192))
    run = jax.jit(functools.partial(matmul.product, config=dataclasses.replace(TINY, split=2)))
    sums = run(x, stack, layer=jnp.array([2], jnp.int32), a=a)
    one = jax.tree.map(lambda leaf: leaf[2], stack)
    wide = np.asarray(x, np.float64)
    matrices = dense(one), np.asarray(a[2], np.float64)
    for actual, matrix in zip((sums.partials, sums.down), matrices, strict=True):
        actual, expected = np.asarray(actual, np.float64).sum(0), wide @ matrix.T
        np.testing.assert_allclose(actual, expected, atol=np.abs(expected).max() * 2**-16)


def test_a_row_has_the_same_bits_whatever_the_others_are(portable):
    w, x = portable_weight("nvfp4", (64, 128)), normal(4, (6, 128))
    run = jax.jit(functools.partial(matmul.product, config=TINY))
    other = x.at[1:].set(jnp.nan)
    np.testing.assert_array_equal(run(x, w).partials[:, 0], run(other, w).partials[:, 0])


def every_code_and_scale(kind):
    """Makes [127, 64] with 127 scales at every block of a chunk, 16 codes under each; and what is decoded of it."""
    row, column = np.arange(127)[:, None], np.arange(64)
    codes = jnp.asarray((row + column) % 16, jnp.uint8)
    if kind == "nf4":
        absmax = jnp.geomspace(1e-3, 1e3, 127)
        table = nf4.CODE_VALUES.astype(jnp.bfloat16).astype(np.float32)
        t = nf4.NF4Tensor(nf4.pack_codes(codes).reshape(-1), absmax, None, None, (127, 64))
        return t, table[codes] * absmax[:, None]
    block = 16 if kind == "nvfp4" else 32
    bytes_ = ((row + np.arange(64 // block)) % 127).astype(np.uint8)
    packed, values = nvfp4.pack_codes(codes), nvfp4.CODE_VALUES[codes]
    if kind == "nvfp4":
        scales, factor = bytes_.view(jnp.float8_e4m3fn), layout.DECODED_SCALE
        t = nvfp4.NVFP4Tensor(packed, jnp.asarray(scales), jnp.ones(1), (127, 64))
    else:
        # The largest exponent, 254, gets bfloat16's largest. Those that are 127 less or more are decoded as zero.
        scales, factor = 2.0 ** (bytes_ + 128.0 - 254), 2.0
        t = mxfp4.MXFP4Tensor(packed, jnp.asarray(bytes_ + 128), (127, 64))
    return t, values * np.repeat(scales.astype(np.float32), block, axis=1) * factor


@pytest.mark.parametrize("kind", RANDOM)
def test_every_code_is_decoded_exactly_with_every_scale(portable, kind):
    t, expected = every_code_and_scale(kind)
    decoded = jax.jit(matmul.unpacked)(to_portable(t))
    np.testing.assert_array_equal(decoded, jnp.asarray(expected, jnp.bfloat16))


@pytest.mark.parametrize("kind", RANDOM)
def test_jnp_decodes_every_code_exactly_with_every_scale(kind):
    t, expected = every_code_and_scale(kind)
    decoded = layout.decoded(to_portable(t), jnp.bfloat16)
    np.testing.assert_array_equal(decoded, jnp.asarray(expected, jnp.bfloat16))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [slow("nvfp4", (72, 128)), ("nf4", (72, 128)), ("nvfp4", (64, 96)), ("mxfp4", (64, 96))],
)
def test_a_weight_is_written_out(portable, kind, shape):
    w = portable_weight(kind, shape)
    np.testing.assert_array_equal(jax.jit(matmul.unpacked)(w), decoded(w, jnp.bfloat16))


@pytest.mark.parametrize("per_row", [False, True])
def test_the_api_prepares_multiplies_and_derives(portable, per_row):
    parts = [
        jax.jit(nvfp4.quantize)(normal(5 + i, (32, 64)).astype(jnp.float32) * 4**i)
        for i in range(2)
    ]
    t = nvfp4.fuse(parts, shared=not per_row)
    w = jax.jit(lambda t: prepare(t, jnp.bfloat16))(t)
    assert isinstance(w, PortableWeight)
    x, dy = normal(7, (2, 3, 64)), normal(8, (2, 3, 64))
    weights = np.asarray(decoded(w, jnp.float32) / w.global_scale[..., None], np.float64)
    for implementation in (None, "portable", "unpacked", "reference"):
        y, pull = jax.vjp(functools.partial(nvfp4_matmul, w=w, implementation=implementation), x)
        assert y.dtype == jnp.bfloat16
        assert_close(y, np.asarray(x, np.float64) @ weights.T, ulps=2)
        assert_close(pull(dy)[0], np.asarray(dy, np.float64) @ weights, ulps=2)


@pytest.mark.parametrize("kind", [slow("mxfp4"), "nf4"])
def test_packed_products_of_other_formats_go_the_same_way(portable, kind):
    t = RANDOM[kind](jax.random.key(9), (64, 64))
    w, x = jax.jit(lambda t: prepare(t, jnp.bfloat16))(t), normal(10, (3, 64))
    assert isinstance(w, PortableWeight)
    assert_close(packed_matmul(x, w), np.asarray(packed_matmul(x, t), np.float64), ulps=3)


@pytest.mark.slow
def test_float32_and_what_does_not_fit_stay_with_the_reference(portable):
    t = nvfp4.random(jax.random.key(0), (64, 64))
    assert prepare(t, jnp.float32) is t
    w = prepare(t, jnp.bfloat16)
    x = normal(11, (3, 64)).astype(jnp.float32)
    np.testing.assert_allclose(nvfp4_matmul(x, w), nvfp4_matmul(x, t), rtol=1e-5, atol=1e-6)
    crossing = nf4.random(jax.random.key(0), (4, 96))
    assert prepare(crossing, jnp.bfloat16) is crossing
    with pytest.raises(NotImplementedError, match="'portable': needs x in bfloat16; got float32"):
        nvfp4_matmul(x, w, implementation="portable")
    with pytest.raises(NotImplementedError, match="needs 1 <= M <= 128; got M = 129"):
        nvfp4_matmul(jnp.ones((129, 64), jnp.bfloat16), w, implementation="portable")
    with pytest.raises(ValueError, match=r"words have shape \(2, 1, 64, 16\)"):
        nvfp4_matmul(x, portable_weight("nvfp4", (2, 64, 64)))


def test_what_a_configuration_cannot_do_is_named():
    for n, k, config, message in (
        (40, 192, Config(block_n=128), "N of whole blocks of 128 rows; got N = 40"),
        (64, 192, Config(units=2), "K of whole rounds of 2 times 64 columns; got K = 192"),
    ):
        assert matmul.supports(1, n, k, config).endswith(message)
        # Rows are filled up to tiles of 64, columns to chunks of 64.
        assert matmul.supports(1, n + 64, k + 64, config) is None


@pytest.mark.parametrize("m", [1, 8, 16, 33, 64, 128])
def test_every_problem_has_configurations_that_can_run_it(m):
    for problem in shapes.PROBLEMS:
        found = tuning.candidates(m, problem.n, problem.k)
        # Of the smallest matrices one tile is all that there is.
        assert (1 if problem.k < 1024 else 2) <= len(found) <= 32
        for config in (tuning.pick_config(m, problem.n, problem.k), *found):
            assert matmul.supports(m, problem.n, problem.k, config) is None
            rows = tuning.block_m(m, config)
            # Sums of at most 64 registers a thread, and four bytes of x for each.
            most = 2048 * config.warps // config.block_n
            assert rows <= most and (rows * 16 >= 2 * 32 * config.warps or rows == most)


@pytest.mark.parametrize("m", [1, 8, 24, 64, 128])
@pytest.mark.parametrize(
    ("capability", "kilobytes"),
    [("8.0", 163), ("8.6", 99), ("8.9", 99), ("9.0", 227), ("12.0", 99)],
)
def test_processors_with_less_shared_memory_hold_several_programs_too(m, capability, kilobytes):
    traits = {"compute_capability": capability, "shared_bytes": kilobytes << 10}
    with runtime.on(like(**traits)):
        for problem in shapes.PROBLEMS:
            config = tuning.heuristic(m, problem.n, problem.k)
            # Eight warps or more on each processor.
            programs = traits["shared_bytes"] // tuning.prefetched(m, config)
            assert programs * config.warps >= 8
            for config in tuning.candidates(m, problem.n, problem.k):
                assert tuning.prefetched(m, config) <= traits["shared_bytes"]


def test_where_triton_takes_tensor_memory_programs_have_two_warps():
    with runtime.on(like(compute_capability="10.0")):
        for m, problem in itertools.product((8, 64, 128), shapes.PROBLEMS):
            found = tuning.candidates(m, problem.n, problem.k)
            assert found and all(config.warps <= 2 for config in found)


def test_every_row_of_a_table_can_be_run():
    for path in tuning.TABLES.glob("*.json"):
        for (m, n, k), config in tuning.table_of(path.stem.replace("_", " ")).items():
            assert matmul.supports(m, n, k, config) is None


def test_a_hopper_without_rows_takes_the_h200s_and_no_other_card_does():
    (m, n, k), row = next(iter(tuning.table_of("NVIDIA H200").items()))
    for card in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        with runtime.on(runtime.CARDS[card]):
            assert tuning.pick_config(m, n, k) == row
    a100 = dataclasses.replace(runtime.H200, name="NVIDIA A100", compute_capability="8.0")
    for card in (runtime.CARDS["NVIDIA H100 PCIe"], a100):
        with runtime.on(card):
            assert tuning.pick_config(m, n, k) == tuning.heuristic(m, n, k)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 16, 64, 128])
def test_on_its_device_every_problem_meets_the_reference(assume, m):
    assume(runtime.device(), "portable")
    for problem in shapes.PROBLEMS[:5]:
        t = weight(m, problem.n, problem.k)
        w, x = to_portable(t), normal(m, (m, problem.k))
        expected = jax.jit(functools.partial(nvfp4_matmul, implementation="reference"))(x, t)
        actual = jax.jit(functools.partial(nvfp4_matmul, implementation="portable"))(x, w)
        assert_close(actual, np.asarray(expected, np.float64), ulps=2)
