"""Devices that tests pretend to have."""

import dataclasses

from pallas_kernels import runtime


def pretend(monkeypatch, **traits):
    """Whoever asks finds the device that there is, with other traits; returns it."""
    device = dataclasses.replace(runtime.device(), **traits)
    monkeypatch.setattr(runtime, "device", lambda: device)
    return device
