"""Launches kernels whose references have names."""

import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# The layout that `wgmma` needs in shared memory: 64 columns of 16 bits in a row of 128 bytes.
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# The same for rows of 64 bytes: bulk copies of 32 columns, which are stored and read without bank conflicts.
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
      body: the kernel. Its argument has a reference to each operand, result and scratch buffer by name, or None where
        the mapping has None.
      operands: arrays, in the order of the kernel's parameters.
      results: shapes and dtypes, in the order of the kernel's parameters, which follow the operands.
      scratch: shared memory and barriers of a block, in memory order.
      name: the kernel's name in profiles.
      interpret: run on a CPU and report data races.
      options: compiler options, in addition to those of all kernels.
      **mesh: grid, cluster and threads, as `plgpu.kernel` takes them.

    Returns:
      The results that are not None, by name.
    """
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
