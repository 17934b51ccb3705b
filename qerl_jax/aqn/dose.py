"""The dose of noise: the sigma that moves a policy by a given divergence, and the temperature that equals it."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from qerl_jax.model import logprobs

# Where `equal_entropy_temperature` searches.
_COLDEST, _HOTTEST = 1 / 8, 8.0


def bisected(
    value_of: Callable[[float], float],
    target: float,
    lowest: float,
    highest: float,
    *,
    tolerance: float = 0.01,
) -> float:
    """Returns where an increasing function of a positive number reaches `target`, by bisection of the logarithm.

    A target that the function does not reach gives the nearer bound. NaN counts as above the target.

    Args:
        value_of: The function; called about log2(log(highest / lowest) / tolerance) times.
        target: The desired value.
        lowest: Lower bound of the result, above 0.
        highest: Upper bound of the result.
        tolerance: Relative precision of the result.
    """
    low, high = lowest, highest
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if value_of(middle) < target else (low, middle)
    if low == lowest or high == highest:
        return lowest if low == lowest else highest
    return math.sqrt(low * high)


def equal_entropy_temperature(
    hidden: Array, head: Array, entropy: float, *, num_tokens: int
) -> float:
    """Returns the sampling temperature at which a policy is as uncertain as one with noise or with rounded weights.

    A temperature is the plain alternative to noise: it raises the entropy too, and moves the policy by less. Both are
    compared on the same samples of the policy.

    Args:
        hidden: [N, D], the policy's hidden states that predict the sampled tokens, after the last norm.
        head: [V, D], its LM head.
        entropy: The other policy's mean entropy at these tokens, in nats.
        num_tokens: Number of ids that the tokenizer has.

    Returns:
        The temperature, with a relative precision of 1e-4; the nearer bound of [1/8, 8] if there is none.
    """
    targets = jnp.zeros(len(hidden), jnp.int32)

    # The arrays are arguments: as constants of the program, XLA would try to compute products of them while it compiles.
    @jax.jit
    def mean_entropy(hidden, head, temperature):
        options = {"temperature": temperature, "num_tokens": num_tokens}
        return jnp.mean(logprobs.of_targets(hidden, head, targets, **options)[1])

    value_of = lambda temperature: float(mean_entropy(hidden, head, temperature))
    return bisected(value_of, entropy, _COLDEST, _HOTTEST, tolerance=1e-4)
