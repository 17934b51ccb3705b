"""What the threads of a warpgroup, or of a cluster of blocks, do together and Pallas has no words for."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

llvm = mgpu.utils.llvm  # which jax.extend.mlir leaves out

# Float32 values of shared memory that one warpgroup's `reduce_rows` needs, for 8 columns: two of every
# thread.
SCRATCH = 256


def reduce_rows(values: jax.Array, operation: str, scratch: jax.Ref) -> jax.Array:
    """Reduces float32 [64, 8] in the layout `WGMMA` to [8].

    Pallas' own reduction across warps has one scratch for all warpgroups of a block, which would overwrite
    each other's.

    Args:
      values: of one warpgroup.
      operation: "max" or "add".
      scratch: float32 [SCRATCH] in shared memory, this warpgroup's.
    """
    kind = plgpu.ShapeDtypeStruct((8,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(0))

    def emit(
        _: mgpu.LaunchContext, values: mgpu.FragmentedArray, scratch: ir.Value
    ) -> mgpu.FragmentedArray:
        return values.reduce(operation, 0, scratch)

    arg_types = (plgpu.Layout.WGMMA, plgpu.RefType())
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(values, scratch)


def arrive_at_cluster() -> None:
    """Tells all blocks of this cluster that all warps of this one have come here; no thread waits."""
    _emit("barrier.cluster.arrive.release.aligned;")


def wait_for_cluster() -> None:
    """Waits for all threads' `arrive_at_cluster`, and sees what they wrote to shared memory before it.

    The two take turns: every thread of the cluster has to call both equally often.
    """
    _emit("barrier.cluster.wait.acquire.aligned;")


def _emit(instruction: str) -> None:
    def emit(_: mgpu.LaunchContext) -> None:
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [], instruction, "", has_side_effects=True)

    plgpu.inline_mgpu()(emit)()
