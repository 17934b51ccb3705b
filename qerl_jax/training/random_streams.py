"""The independent random streams of a run."""

import jax

from qerl_jax.config import RunConfig

# Each folds in the step.
SAMPLE, NOISE, UPDATE, EVAL, PARAMS = range(5)


def stream_key(cfg: RunConfig, stream: int) -> jax.Array:
    """Returns the random key of a stream: one of `SAMPLE`, `NOISE`, `UPDATE`, `EVAL` and `PARAMS`."""
    return jax.random.key(cfg.seed + 1000 * stream)
