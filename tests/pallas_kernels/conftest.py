"""Fixtures that all tests of kernels share."""

import pytest

from pallas_kernels import runtime
from tests.pallas_kernels.devices import assume, h200, portable  # noqa: F401


@pytest.fixture
def interpreter(capfd):
    """Skips a test of an interpreted kernel where there is a GPU, and fails it after a race."""
    if runtime.platform() != "cpu":
        pytest.skip("interpret mode is for a CPU")
    yield
    # JAX 0.11 reports races on standard output and goes on; JAX 0.12 raises an error.
    assert "RACE" not in capfd.readouterr().out
