"""Devices for tests: arguments of planning functions, or assumed by the whole library."""

import contextlib
import dataclasses

import pytest

from pallas_kernels import runtime


def like(**traits):
    """Returns the present device with other traits."""
    return dataclasses.replace(runtime.device(), **traits)


@pytest.fixture
def h200():
    """Makes every question about the device answer with an H200."""
    with runtime.on(runtime.H200) as device:
        yield device


@pytest.fixture
def assume():
    """Returns `runtime.on` as a function whose effect lasts until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *args: stack.enter_context(runtime.on(*args))


@pytest.fixture(params=["interpreted", pytest.param("gpu", marks=pytest.mark.gpu)])
def portable(request):
    """Makes the portable kernels the chosen ones: interpreted on a CPU, or on the present GPU."""
    with runtime.on(runtime.device(), "portable"):
        if request.param == "interpreted" and not runtime.interprets_triton():
            pytest.skip("needs triton, TRITON_INTERPRET=1 and a CPU")
        if reason := runtime.unless_portable():
            pytest.skip(reason)
        yield request.param
