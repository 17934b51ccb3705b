"""Tests that a kernel is lowered to the same bytes whatever was lowered before it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core

from pallas_kernels import nvfp4, runtime
from pallas_kernels.mosaic import module_names
from pallas_kernels.nvfp4_matmul import decode
from pallas_kernels.nvfp4_matmul.decode_config import Config
from pallas_kernels.nvfp4_matmul.layout import prepare


def lowered(n):
    """The program of a product with N rows of a weight, as the compilation cache sees it."""
    with runtime.on(runtime.H200):
        w = jax.eval_shape(lambda: prepare(nvfp4.random(jax.random.key(0), (n, 128))))
        x = jax.ShapeDtypeStruct((8, 128), jnp.bfloat16)
        product = functools.partial(decode.matmul, config=Config(1, 64, 2, 2))
        # A new function each time, since JAX keeps what it lowered for an old one.
        traced = jax.jit(lambda *arguments: product(*arguments)).trace(x, w)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_the_same_after_others():
    first = lowered(64)
    assert "mosaic_gpu" in first
    assert lowered(128) != first
    assert lowered(64) == first


@pytest.mark.parametrize("dumps", [True, False])
def test_modules_that_are_written_to_files_keep_their_numbers(monkeypatch, dumps):
    number = lambda module: module
    monkeypatch.setattr(core.dialect, "get_or_set_dump_options", number)
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO", raising=False)
    if dumps:
        monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "somewhere")
    module_names.use.__wrapped__()
    assert (core.dialect.get_or_set_dump_options is number) == dumps


def test_a_jax_without_such_numbers_is_left_alone(monkeypatch):
    monkeypatch.delattr(core.dialect, "get_or_set_dump_options")
    module_names.use.__wrapped__()
    assert not hasattr(core.dialect, "get_or_set_dump_options")
