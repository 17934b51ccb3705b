"""Random arguments, comparisons and marks that several tests of kernels share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS, nvfp4, runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.portable import layout as portable_layout

on_cpu = pytest.mark.skipif(runtime.platform() != "cpu", reason="asks what a CPU does")
# One program each: operation by operation, compilation takes longer than all kernels.
random = jax.jit(nvfp4.random, static_argnums=1, static_argnames="std")
to_hopper = jax.jit(layout.prepare, static_argnames="is_paired")
to_portable = jax.jit(portable_layout.prepare)
# Random weights of the formats that the portable kernels read, by (key, shape). NF4 is quantized twice.
RANDOM = {name: jax.jit(FORMATS[name].random, static_argnums=1) for name in FORMATS}


def slow(*values):
    """Returns a case of a parametrized test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def normal(seed, shape, dtype=jnp.bfloat16):
    """Returns an array of standard normal values, drawn by numpy."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def f32(x):
    """Returns an array as numpy's float32."""
    return np.asarray(x, np.float32)


def weight(seed, n, k, *, scale_per_row=False, std=None):
    """Returns a random packed weight [N, K], on request with a global scale for each row."""
    t = random(jax.random.key(seed), (n, k), **({} if std is None else {"std": std}))
    rows = t.global_scale * jnp.geomspace(0.5, 8, n)
    return dataclasses.replace(t, global_scale=rows) if scale_per_row else t


def nvfp4_tensor(codes, scales):
    """Returns a packed weight of codes [N, K] and block scales [N, K / 16], with the global scale 1."""
    packed = nvfp4.pack_codes(jnp.asarray(codes, jnp.uint8))
    scales = jnp.asarray(scales).astype(jnp.float8_e4m3fn)
    return nvfp4.NVFP4Tensor(packed, scales, jnp.ones(1), codes.shape)


def portable_weight(kind, shape, seed=0):
    """Returns a random weight of a format in the layout of the portable kernels."""
    return to_portable(RANDOM[kind](jax.random.key(seed), shape))


def without_negative_zero(packed):
    """Unpacks E2M1 codes, and replaces those of -0 by those of 0."""
    codes = nvfp4.unpack_codes(jnp.asarray(packed))
    return np.asarray(jnp.where(codes == 8, 0, codes))


def assert_equal_bits(actual, expected):
    """Checks that packed weights are equal bit for bit."""
    assert actual.shape == expected.shape
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def assert_within_an_ulp(actual, expected):
    """Checks that errors are at most one bfloat16 ulp of the largest output."""
    assert actual.dtype == jnp.bfloat16
    assert np.abs(f32(actual) - f32(expected)).max() <= np.abs(f32(expected)).max() * 2**-7
