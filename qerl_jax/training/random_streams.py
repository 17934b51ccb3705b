"""The independent random streams of a run.

No two streams meet, neither of one run nor of runs with different seeds.
"""

import jax

from qerl_jax.config import RunConfig

# Each folds in the step.
SAMPLE, NOISE, UPDATE, EVAL, PARAMS = range(5)


def stream_key(cfg: RunConfig, stream: int) -> jax.Array:
    """Returns the random key of a stream: one of `SAMPLE`, `NOISE`, `UPDATE`, `EVAL` and `PARAMS`."""
    return jax.random.fold_in(jax.random.key(cfg.seed), stream)
