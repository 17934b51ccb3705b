"""A fixture of all tests of faults."""

import pytest

from qerl_jax.tracking import charts


@pytest.fixture(autouse=True)
def no_charts(monkeypatch):
    """Draws no charts into the pages of runs: that takes as long as several steps."""
    monkeypatch.setattr(charts, "svg", lambda *_: "")
