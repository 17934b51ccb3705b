"""Devices for tests: arguments of planning functions, or assumed by the whole library."""

import dataclasses

import pytest

from pallas_kernels import runtime


def like(**traits):
    """The device that there is, with other traits."""
    return dataclasses.replace(runtime.device(), **traits)


@pytest.fixture
def h200():
    """Whoever asks for the device gets an H200."""
    with runtime.on(runtime.H200) as device:
        yield device


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def portable(request, monkeypatch):
    """Whoever asks gets the portable kernels: interpreted on a CPU, or on the GPU that there is."""
    monkeypatch.setattr(runtime, "_CHOSEN", "portable")
    if request.param == "interpreted" and not runtime.interprets_triton():
        pytest.skip("needs triton, TRITON_INTERPRET=1 and a CPU")
    if reason := runtime.unless_portable():
        pytest.skip(reason)
    return request.param
