"""Devices that tests pretend to have."""

import dataclasses

import pytest

from pallas_kernels import runtime


def pretend(monkeypatch, **traits):
    """Whoever asks finds the device that there is, with other traits; returns it."""
    device = dataclasses.replace(runtime.device(), **traits)
    monkeypatch.setattr(runtime, "device", lambda: device)
    return device


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def portable(request, monkeypatch):
    """Whoever asks gets the portable kernels: interpreted on a CPU, or on the GPU that there is."""
    monkeypatch.setattr(runtime, "_CHOSEN", "portable")
    if request.param == "interpreted" and not runtime.interprets_triton():
        pytest.skip("needs triton, TRITON_INTERPRET=1 and a CPU")
    if reason := runtime.unless_portable():
        pytest.skip(reason)
    return request.param
