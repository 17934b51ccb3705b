"""Launches Mosaic GPU kernels that receive their operands, results and scratch buffers by name."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import module_names, ptx_version

# The shared memory layout that `wgmma` reads: 64 columns of 16 bits in a row of 128 bytes, with a 128-byte swizzle.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# The same for 32 columns in a row of 64 bytes. Bulk copies read it, and threads write it, without bank conflicts.
NARROW = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))

# Runs a kernel on a CPU and reports data races. `interpret=True` cannot be used: it fails on TMA copies.
INTERPRETED = plgpu.InterpretGPUParams(detect_races=True)


def launch(
    body: Callable[[types.SimpleNamespace], None],
    operands: Mapping[str, jax.Array | None],
    results: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch: Mapping[str, Any],
    *,
    name: str,
    interpret: bool,
    options: Mapping[str, Any] | None = None,
    **mesh: Any,
) -> dict[str, jax.Array]:
    """Launches a kernel.

    Args:
      body: the kernel. Its argument has an attribute for each name below: a reference, or None if the mapping has
        None.
      operands: arrays by name. A `jax.Ref` among them can be written to.
      results: shapes and dtypes by name.
      scratch: shared memory and barriers of a block by name, in memory order.
      name: the kernel's name in profiles.
      interpret: whether to run on a CPU and report data races.
      options: compiler options, in addition to those of all kernels.
      **mesh: grid, cluster and threads, as `plgpu.kernel` takes them.

    Returns:
      The results that are not None, by name.
    """
    module_names.use()
    ptx_version.keep()
    parts = operands, results, scratch
    absent = {key: None for part in parts for key, value in part.items() if value is None}
    operands, results, scratch = (
        {key: value for key, value in part.items() if value is not None} for part in parts
    )

    def kernel(*refs):
        names = [*operands, *results, *scratch]
        body(types.SimpleNamespace(**absent, **dict(zip(names, refs, strict=True))))

    outs = plgpu.kernel(
        kernel,
        out_type=tuple(results.values()),
        scratch_types=tuple(scratch.values()),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            **options or {},
        ),
        interpret=INTERPRETED if interpret else None,
        kernel_name=name,
        **mesh,
    )(*operands.values())
    return dict(zip(results, outs, strict=True))
