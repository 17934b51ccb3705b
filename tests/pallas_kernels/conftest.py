"""Fixtures that all tests of kernels share."""

from tests.pallas_kernels.devices import assume, h200, portable  # noqa: F401
