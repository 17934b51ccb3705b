"""Tests that concurrent tests share a cache of compiled programs without disturbing each other."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
USES_JAX = "import jax\n\ndef test_a_program():\n    assert jax.jit(lambda x: 2 * x)(1.5) == 3\n"


@pytest.mark.slow
@pytest.mark.process
def test_half_an_entry_of_the_cache_fails_no_test(tmp_path):
    (tmp_path / "test_it.py").write_text(USES_JAX)
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += ["-c", str(ROOT / "pyproject.toml"), str(tmp_path / "test_it.py")]
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }

    def run():
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert run().returncode == 0
    entries = list(cache.glob("*-cache"))
    assert entries
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    again = run()
    assert again.returncode == 0, again.stdout
