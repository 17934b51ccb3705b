"""Tests the choice of high-entropy tokens, and the control of the entropy bonus."""

import numpy as np
import pytest

from qerl_jax.config import EntropyConfig
from qerl_jax.rl.entropy import EntropyControl, high_entropy

MASK = np.array([[True, True, True], [True, True, False]])
ENTROPIES = np.array([[0.1, 0.5, 0.3], [0.2, 0.4, 9.0]], np.float32)


@pytest.mark.parametrize(
    ("quantile", "marked"),
    [
        (1.0, [[1, 1, 1], [1, 1, 0]]),
        (0.5, [[0, 1, 1], [0, 1, 0]]),
        (0.25, [[0, 1, 0], [0, 1, 0]]),
        (0.0, [[0, 1, 0], [0, 0, 0]]),
    ],
)
def test_the_share_of_tokens_with_the_highest_entropies_is_marked(quantile, marked):
    np.testing.assert_array_equal(high_entropy(ENTROPIES, MASK, quantile), marked)
    assert not high_entropy(ENTROPIES, np.zeros_like(MASK), quantile).any()


def test_the_coefficient_rises_below_the_target_and_falls_above_it_within_its_bounds():
    """Values are by hand. As in TRL the bonus acts only after a step whose entropy was not above the target."""
    cfg = EntropyConfig(0.01, adaptive=True, coef_delta=0.005, coef_max=0.015, target=0.2)
    control = EntropyControl.begin(cfg)
    seen = []
    for mean in (0.3, 0.1, 0.2, 0.1, np.nan, 0.25):
        applied = control.applied(cfg)
        control = control.after(cfg, mean)
        seen.append((round(applied, 6), round(float(control.coef), 6)))
    applied, coefs = zip(*seen, strict=True)
    assert applied == (0.0, 0.0, 0.01, 0.015, 0.015, 0.015)
    assert coefs == (0.005, 0.01, 0.015, 0.015, 0.015, 0.01)
    assert control.applied(cfg) == 0
