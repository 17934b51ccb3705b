"""Adaptive Quantization Noise (QeRL, arXiv:2510.11696, section 3.3) as a function of the step.

QeRL adds a Gaussian vector Z to the scale w of an RMSNorm (eq. 10),

    RMSNorm(x) = (w + Z) * x / sqrt(mean(x^2) + eps),   Z ~ N(0, sigma^2 I),

This multiplies input channel j of the linear layers after the norm by 1 + Z_j / w_j (eq. 11, 12), and so
explores without extra computation. sigma decreases in stages over the run, and the first stage has no noise.

There is no state here. Step and seed determine the noise, so a resumed run, a replayed step and every device
of a mesh get the same noise. The model adds it in float32 when the norm is computed, so it neither
accumulates in the weights nor is rounded away (in bfloat16, neighbouring numbers near 1.0 are 0.008 apart,
and sigma ends near 1e-4).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from qerl_jax.aqn.draw import norm_noise as norm_noise
from qerl_jax.system.checked import require

# The mean relative distance of neighbouring bfloat16 numbers, for values whose logarithm is uniform.
_STEP = 2.0**-7 / (2 * math.log(2))
# The ratio of noise to a norm's scale below which rounding to bfloat16 adds more noise, see `flips_to_signal`.
FLOOR = _STEP * math.sqrt(2 / math.pi) / 2


def stage(step: Array | int, *, num_stages: int, total_steps: int) -> Array:
    """Returns the number of the stage that a step belongs to, an int32 scalar; stages have equal lengths.

        min(floor(step * num_stages / total_steps), num_stages - 1)

    It is exact for any step: there is no float division, and no product that could overflow.

    Args:
        step: number of optimizer updates done so far (0 for the first), traced or not.
        num_stages: stages of the run, at least 1.
        total_steps: optimizer updates of the run, at least 1.
    """
    # Stage j begins at the first step with step * num_stages >= j * total_steps.
    begins = [-(-j * total_steps // num_stages) for j in range(1, num_stages)]
    return jnp.sum(step >= np.array(begins, np.int32), dtype=jnp.int32)


def sigma_schedule(
    kind: str = "exponential",
    *,
    sigma_start: float,
    sigma_end: float,
    num_stages: int,
    total_steps: int,
    exponent: str = "code",
) -> Callable[[Array | int], Array]:
    """Returns the function from a step to the standard deviation of its noise.

    Stage 0 has no noise. Stage j = 1 .. K - 1 (K = num_stages, s = sigma_start, e = sigma_end) has

        exponential  s (e / s)^u                           eq. 8
        linear       s + (e - s) u
        cosine       e + (s - e) (1 + cos(pi u)) / 2
        logarithmic  s + (e - s) log10(1 + 9 u)

    with u = (j - 1) / (K - 2) as in QeRL's code, where the last stage reaches e, or u = (j - 1) / (K - 1) as in eq. 8
    with Algorithm 1, where it does not. The paper names the other three kinds but gives no formulas: these are the
    simplest that start at s for u = 0 and reach e for u = 1.

    Args:
        kind: "exponential", "linear", "cosine" or "logarithmic".
        sigma_start: standard deviation in stage 1, in units of the norm's scale.
        sigma_end: standard deviation at u = 1.
        num_stages: stages of the run, the one without noise included.
        total_steps: optimizer updates of the run.
        exponent: "code" or "paper".

    Returns:
        A function of the number of optimizer updates done so far, traced or not, that returns a float32 scalar.

    Raises:
        ValueError: for an unknown option, a sigma that is not positive, no steps, or too few stages for u.
    """
    s, e = sigma_start, sigma_end
    require(s > 0 and e > 0, "sigma_start, sigma_end", (s, e), "both must be positive")
    require(exponent in ("code", "paper"), "exponent", exponent, "must be 'code' or 'paper'")
    require(total_steps >= 1, "total_steps", total_steps, "must be at least 1")
    last = num_stages - 2 if exponent == "code" else num_stages - 1
    rule = f"must be at least {num_stages - last + 1} with {exponent=}"
    require(last >= 1, "num_stages", num_stages, rule)
    curves = {
        "exponential": lambda u: s * (e / s) ** u,
        "linear": lambda u: s + (e - s) * u,
        "cosine": lambda u: e + (s - e) * (1 + math.cos(math.pi * u)) / 2,
        "logarithmic": lambda u: s + (e - s) * math.log10(1 + 9 * u),
    }
    require(kind in curves, "kind", kind, f"must be one of {', '.join(curves)}")
    sigmas = [0.0] + [curves[kind]((j - 1) / last) for j in range(1, num_stages)]

    @jax.jit
    def sigma(step: Array | int) -> Array:
        # A table, since jit may change the last bits of a formula.
        table = jnp.array(sigmas, jnp.float32)
        return table[stage(step, num_stages=num_stages, total_steps=total_steps)]

    return sigma


def adapted_sigma(
    sigma: float, signal: float, *, target: float, rate: float, lowest: float, highest: float
) -> float:
    """Returns the next sigma of a schedule that follows a measured signal.

        sigma * rate   where the signal is below its target,
        sigma / rate   else,                                    kept within [lowest, highest]

    This is the rule of adaptive parameter noise (arXiv:1706.01905, section 3), where the signal is the distance between
    the policies with and without noise. PSN-RLVR (arXiv:2602.02555) follows cheaper signals, as here.

    Args:
        sigma: the current sigma.
        signal: the value that was measured with it; NaN leaves sigma unchanged.
        target: the desired value of the signal.
        rate: factor of one step, above 1.
        lowest: lower bound of sigma.
        highest: upper bound of sigma.

    Raises:
        ValueError: for a rate that is not above 1.
    """
    require(rate > 1, "rate", rate, "must be above 1")
    if math.isnan(signal):
        return sigma
    return min(max(sigma * rate if signal < target else sigma / rate, lowest), highest)


def flips_to_signal(relative: float) -> float:
    """Returns the ratio of two standard deviations: of the noise that rounding to bfloat16 adds, and of AQN's noise.

    A value v is between bfloat16 neighbours that are u |v| apart, 2^-8 <= u <= 2^-7. Relative noise s z,
    z ~ N(0, 1), that is small against u moves the rounded value by a whole step with probability s |z| / u, else
    not at all. So the mean is kept, and the variance is u s E|z| instead of s^2. The added noise has the standard
    deviation

        sqrt(u E|z| / s - 1)

    times that of AQN, with E|z| = sqrt(2 / pi) and u = 2^-7 / (2 log 2) on average over values whose logarithm is
    uniform. Both are equal at s = 2.2e-3, `FLOOR`; at 1e-4 rounding adds 7 times as much.

    Args:
        relative: s, the noise's standard deviation over the norm's scale; positive. From u E|z| on the result is 0.
    """
    return math.sqrt(max(0.0, _STEP * math.sqrt(2 / math.pi) / relative - 1))


def step_key(seed_key: Array, step: Array | int) -> Array:
    """Returns the key of one step's noise; use `seed_key` only for the noise."""
    return jax.random.fold_in(seed_key, step)
