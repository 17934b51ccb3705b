"""Tests that the portable kernels compile for every supported card, in a process that does not interpret them."""

import importlib.util
import os
import subprocess
import sys

import pytest

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles_for_a_card_and_hardly_spills(capability, tmp_path):
    command = [sys.executable, "-m", "tests.pallas_kernels.compile_portable"]
    command += ["--capabilities", str(capability)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "0 failed" and len(lines) > 20
    assert all(line.startswith(f"sm_{capability} ") for line in lines[:-1])
    seen = {word for line in lines for word in line.split()}
    assert {f"M={m}" for m in (1, 8, 32, 64, 128)} | {f"RANK={r}" for r in (0, 16, 32, 64)} <= seen
    # A T4 has no shared memory for heads of 256.
    sizes = (64, 128) if capability == 75 else (64, 128, 256)
    assert {f"SIZE={size}" for size in sizes} | {"GROUP=1", "GROUP=7", "APPENDS=False"} <= seen
    formats = ("nvfp4", "nf4") if capability == 75 else ("nvfp4", "nf4", "mxfp4")
    assert {f"FORMAT={name}" for name in formats} <= seen
    # Tensor cores multiply, but not on a T4.
    products = [int(line.split()[-2]) for line in lines if ".product " in line]
    assert products and all((count > 0) == (capability != 75) for count in products)
