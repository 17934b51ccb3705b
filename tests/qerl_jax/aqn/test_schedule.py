"""Tests Adaptive Quantization Noise: tables of the schedules, and noise as a function of the step."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import schedule as aqn

KEY = jax.random.key(7)
LAYERS, WIDTH = 28, 2048
OF_LAYERS = {"scale": jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.bfloat16)}
SHAPES = {
    "layers": {"input_layernorm": OF_LAYERS, "post_attention_layernorm": OF_LAYERS},
    "norm": {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16)},
}
pytestmark = pytest.mark.usefixtures("no_silent_broadcasting")


def schedule(kind="exponential", **changes):
    options = {"sigma_start": 1e-2, "sigma_end": 1e-4, "num_stages": 10, "total_steps": 100}
    return aqn.sigma_schedule(kind, **(options | changes))


@pytest.mark.parametrize(
    ("total_steps", "num_stages"),
    [(934, 10), (10, 4), (7, 10), (600, 7), (1, 3), (2_000_000_011, 10)],
)
def test_each_stage_lasts_an_equal_share_of_the_run_exactly_in_integers(total_steps, num_stages):
    # 467 of 934 steps is stage 5 exactly; in floating point, 467 / (934 / 10) may fall short of it.
    # With two thousand million steps, step * num_stages would not fit an int32.
    steps = {0, 1, 467, total_steps // 2, total_steps - 1, total_steps}
    for j in range(num_stages + 1):
        steps |= {j * total_steps // num_stages, j * total_steps // num_stages + 1}
    stage = jax.jit(lambda s: aqn.stage(s, num_stages=num_stages, total_steps=total_steps))
    for step in steps:
        assert stage(jnp.int32(step)) == min(step * num_stages // total_steps, num_stages - 1)


@pytest.mark.parametrize(
    ("exponent", "start", "end", "table"),
    [
        ("code", 1e-2, 1e-4, "1.00e-02 5.62e-03 3.16e-03 1.78e-03 1.00e-03 5.62e-04 3.16e-04 "
         "1.78e-04 1.00e-04"),
        ("code", 5e-2, 5e-4, "5.00e-02 2.81e-02 1.58e-02 8.89e-03 5.00e-03 2.81e-03 1.58e-03 "
         "8.89e-04 5.00e-04"),
        ("paper", 1e-2, 1e-4, "1.00e-02 5.99e-03 3.59e-03 2.15e-03 1.29e-03 7.74e-04 4.64e-04 "
         "2.78e-04 1.67e-04"),
    ],
)  # fmt: skip
def test_exponential_stages_are_those_of_the_code_and_of_the_paper(exponent, start, end, table):
    sigma = schedule(sigma_start=start, sigma_end=end, exponent=exponent)
    assert [f"{sigma(step):.2e}" for step in range(10, 100, 10)] == table.split()


@pytest.mark.parametrize(
    ("kind", "at_a_quarter", "at_half"),
    [
        ("exponential", 2 * 2**-0.25, 2 * 2**-0.5),
        ("linear", 1.75, 1.5),
        ("cosine", 1.5 + 0.5 * math.sqrt(0.5), 1.5),
        ("logarithmic", 2 - math.log10(3.25), 2 - math.log10(5.5)),
    ],
)
def test_every_kind_is_silent_first_and_reaches_both_ends(kind, at_a_quarter, at_half):
    sigma = schedule(kind, sigma_start=2.0, sigma_end=1.0, num_stages=6, total_steps=6)
    table = [0.0, 2.0, at_a_quarter, at_half, 1.0]
    np.testing.assert_allclose([sigma(step) for step in (0, 1, 2, 3, 5)], table, rtol=1e-6)


def test_a_traced_step_gives_the_same_sigma_to_the_bit():
    sigma = schedule()
    steps = jnp.arange(0, 120, 3)
    traced = jax.jit(jax.vmap(sigma))(steps)
    assert traced.dtype == jnp.float32
    np.testing.assert_array_equal(traced, [sigma(int(step)) for step in steps])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "square"}, "kind: got 'square'; must be"),
        ({"exponent": "both"}, "exponent: got 'both'; must be"),
        ({"sigma_end": 0.0}, "sigma_start, sigma_end: got .0.01, 0.0.; both must be positive"),
        ({"total_steps": 0}, "total_steps: got 0; must be at least 1"),
        ({"num_stages": 2}, "num_stages: got 2; must be at least 3 with exponent='code'"),
        ({"num_stages": 1, "exponent": "paper"}, "got 1; must be at least 2 with exponent='paper'"),
    ],
)
def test_an_impossible_schedule_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        schedule(**change)


def test_noise_is_float32_in_the_shape_of_the_norms_and_silent_in_the_first_stage():
    sigma = schedule()
    for step in (0, 9):
        draw = aqn.norm_noise(aqn.step_key(KEY, step), sigma(step), SHAPES)
        like = jax.tree.map(lambda shape: np.zeros(shape.shape, np.float32), SHAPES)
        jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), draw, like)
    assert sigma(10) > 0


def test_a_resumed_run_draws_what_the_uninterrupted_one_did():
    sigma = schedule()

    @jax.jit
    def draw(step):
        return aqn.norm_noise(aqn.step_key(jax.random.key(7), step), sigma(step), SHAPES)

    uninterrupted = [draw(jnp.int32(step)) for step in (50, 51, 52)]
    resumed = aqn.norm_noise(aqn.step_key(KEY, 52), schedule()(52), SHAPES)
    jax.tree.map(np.testing.assert_array_equal, uninterrupted[2], resumed)


def correlation(a, b):
    return np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]


def test_steps_norms_and_layers_see_independent_vectors():
    first, second = (aqn.norm_noise(aqn.step_key(KEY, step), 1.0, SHAPES) for step in (3, 4))
    a, b = (first["layers"][f"{name}_layernorm"]["scale"] for name in ("input", "post_attention"))
    # Five standard errors of the correlation of independent draws, 1 / sqrt(n).
    assert abs(correlation(a, second["layers"]["input_layernorm"]["scale"])) < 5 / a.size**0.5
    assert abs(correlation(a, b)) < 5 / a.size**0.5
    assert abs(correlation(a[:-1], a[1:])) < 5 / a[1:].size ** 0.5
    assert abs(correlation(b[0], first["norm"]["scale"])) < 5 / WIDTH**0.5


@pytest.mark.parametrize("weight", [1.0, 4.0])
@pytest.mark.parametrize("step", [70, 90])
def test_late_noise_keeps_its_size_on_a_float32_scale(step, weight):
    sigma = schedule()(step)
    draw = aqn.norm_noise(aqn.step_key(KEY, step), sigma, SHAPES)
    z = np.asarray(draw["layers"]["input_layernorm"]["scale"])
    added = (np.float32(weight) + z) - np.float32(weight)
    # Five standard errors of a standard deviation from n draws, 1 / sqrt(2 n).
    np.testing.assert_allclose(added.std(), sigma, rtol=5 / (2 * z.size) ** 0.5)
    assert abs(added.mean()) < 5 * sigma / z.size**0.5


def follow(signals, rate=2.0):
    options, sigmas = {"target": 0.5, "rate": rate, "lowest": 1e-3, "highest": 2e-2}, [1e-2]
    for signal in signals:
        sigmas.append(aqn.adapted_sigma(sigmas[-1], signal, **options))
    return sigmas[1:]


def test_sigma_rises_while_the_signal_is_low_and_falls_while_it_is_not_within_its_bounds():
    assert follow([0.4, 0.6, 0.6, 0.5]) == [2e-2, 1e-2, 5e-3, 2.5e-3]
    assert follow([0.0] * 4 + [1.0]) == [2e-2] * 4 + [1e-2]
    assert follow([1.0] * 6 + [0.0])[-2:] == [1e-3, 2e-3]
    assert follow([math.nan]) == [1e-2]  # nothing was measured
    with pytest.raises(ValueError, match="rate: got 1.0; must be above 1"):
        follow([0.1], rate=1.0)


@pytest.mark.parametrize("relative", [1e-4, 3e-4, 1e-3, aqn.FLOOR])
def test_flips_of_rounding_are_as_large_as_a_simulation_finds_them(relative):
    """Values have a uniform logarithm, and are rounded to bfloat16 with and without the noise."""
    rng = np.random.default_rng(0)
    clean = np.exp2(rng.uniform(0, 4, 2_000_000))
    signal = clean * relative * rng.standard_normal(clean.shape)
    rounded = lambda x: np.asarray(x, jnp.bfloat16).astype(np.float64)
    moved = (rounded(clean + signal) - rounded(clean)) / clean
    flips = moved - signal / clean
    found = flips.std() / (signal / clean).std()
    np.testing.assert_allclose(found, aqn.flips_to_signal(relative), rtol=0.06)
    # On average the noise acts in full.
    slope = np.mean(moved * signal / clean) / np.mean((signal / clean) ** 2)
    np.testing.assert_allclose(slope, 1, atol=0.02)


def test_at_the_floor_flips_equal_the_signal_and_at_the_schedules_end_they_drown_it():
    np.testing.assert_allclose(aqn.flips_to_signal(aqn.FLOOR), 1, rtol=1e-9)
    np.testing.assert_allclose(aqn.FLOOR, 2.2e-3, rtol=0.03)
    assert 6 < aqn.flips_to_signal(1e-4) < 7 and aqn.flips_to_signal(1e-2) == 0
