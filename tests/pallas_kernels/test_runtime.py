"""What is asked of the machine and of JAX."""

import os
import pathlib

import jax
import pytest

from pallas_kernels import runtime


@pytest.fixture
def folder_of_programs(monkeypatch):
    """Sets where JAX keeps compiled programs, and puts it back."""
    before = jax.config.jax_compilation_cache_dir
    yield lambda folder: jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize(
    ("platform", "given", "kept"),
    [
        ("gpu", None, str(pathlib.Path("~/.cache/qerl_jax/xla").expanduser())),
        ("gpu", "/elsewhere", "/elsewhere"),
        ("cpu", None, None),
    ],
)
def test_a_gpus_programs_are_kept_unless_jax_is_told_where(
    monkeypatch, folder_of_programs, platform, given, kept
):
    monkeypatch.setattr(runtime, "platform", lambda: platform)
    folder_of_programs(given)
    runtime.use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == kept


def test_deterministic_kernels_are_asked_for_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=1")
    runtime.use_deterministic_kernels()
    runtime.use_deterministic_kernels()
    assert os.environ["XLA_FLAGS"] == "--one=1 --xla_gpu_deterministic_ops=true"
