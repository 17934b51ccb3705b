"""Tests that JAX asks for the version of ptxas once."""

import types

import pytest
from jax.experimental.mosaic.gpu import fragmented_array

from pallas_kernels.mosaic import ptx_version


def test_the_version_is_asked_for_once(monkeypatch):
    calls = []
    extension = types.SimpleNamespace(_get_ptxas_isa_version=lambda: calls.append(1) or 90)
    library = types.SimpleNamespace(_mosaic_gpu_ext=extension)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", library)
    ptx_version.keep.__wrapped__()
    # As JAX asks.
    ask = lambda: fragmented_array.mgpu_lib._mosaic_gpu_ext._get_ptxas_isa_version()
    assert [ask() for _ in range(3)] == [90] * 3 and len(calls) == 1


@pytest.mark.parametrize("library", [None, types.SimpleNamespace()])
def test_a_jax_that_does_not_ask_is_left_alone(monkeypatch, library):
    monkeypatch.setattr(fragmented_array, "mgpu_lib", library)
    ptx_version.keep.__wrapped__()
    assert fragmented_array.mgpu_lib is library
