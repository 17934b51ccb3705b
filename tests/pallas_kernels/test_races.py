"""Tests that interpret mode detects a race, because the other tests rely on it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import runtime
from pallas_kernels.mosaic import launch


@pytest.mark.skipif(runtime.is_hopper(), reason="interprets the kernel, on a CPU")
@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_race_is_reported_and_only_a_race(capfd, is_guarded):
    def kernel(out, shared, written):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _write():
            shared[...] = jnp.ones(128, jnp.float32)
            plgpu.barrier_arrive(written)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _read():
            if is_guarded:
                plgpu.barrier_wait(written)
            out[...] = shared[...]

    interpreted = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=(plgpu.SMEM((128,), jnp.float32), plgpu.Barrier()),
        interpret=launch.INTERPRETED,
    )
    raised = ""
    try:
        jax.block_until_ready(interpreted())
    except jax.errors.JaxRuntimeError as error:  # JAX 0.11 prints the race and goes on
        raised = str(error)
    assert ("RACE" in capfd.readouterr().out + raised) == (not is_guarded)
