"""Launches Triton kernels: by jax-triton on a GPU, by Triton's interpreter on a CPU; or only lists the launches.

Modules `*_kernels` and `decoders` import triton and are themselves imported here, when a kernel is started:
everything else in this package works without it.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime


@dataclasses.dataclass(frozen=True)
class Launch:
    """The parts of a kernel launch on which its compilation depends.

    Attributes:
      kernel: "module.function" in this package.
      types: types of its array arguments, operands and results, by name.
      constants: its other arguments.
      warps: of 32 threads in a program.
      stages: of the software pipeline of loads.
    """

    kernel: str
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int


_WRITTEN_DOWN: list[Launch] | None = None


@contextlib.contextmanager
def writing_down() -> Iterator[list[Launch]]:
    """Inside the block kernels are not launched but listed, and their results are zeros. For `jax.eval_shape`,
    followed by `compile_for`."""
    global _WRITTEN_DOWN
    before, _WRITTEN_DOWN = _WRITTEN_DOWN, []
    try:
        yield _WRITTEN_DOWN
    finally:
        _WRITTEN_DOWN = before


def call(
    kernel: str,
    operands: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    grid: Sequence[int],
    *,
    warps: int,
    stages: int,
    aliases: Mapping[str, str] | None = None,
    has_tensor_cores: bool = True,
    **constants: Any,
) -> list[jax.Array]:
    """Launches a Triton kernel.

    Args:
      kernel: "module.function" in this package. Its array arguments are the operands and then the results.
      operands: by name.
      results: by name.
      grid: programs along each axis, of which there are at most three.
      warps: of 32 threads in a program.
      stages: of the software pipeline of loads.
      aliases: operands by the results that are updated copies of them, in the same place.
      has_tensor_cores: whether the kernel has an argument COMPUTE, the type that it multiplies in.
      **constants: other arguments.

    Returns:
      The results in their order.
    """
    arrays = [*operands.values()]
    types = {name: jnp.dtype(array.dtype) for name, array in [*operands.items(), *results.items()]}
    if _WRITTEN_DOWN is not None:
        constants |= {"COMPUTE": runtime.tensor_core_type()} if has_tensor_cores else {}
        _WRITTEN_DOWN.append(Launch(kernel, types, constants | {"ASSEMBLY": True}, warps, stages))
        return [jnp.zeros(result.shape, result.dtype) for result in results.values()]
    import triton.language as tl

    names = list(operands)
    places = {names.index(o): i for i, r in enumerate(results) if (o := (aliases or {}).get(r))}
    is_interpreted = runtime.interprets_triton()
    if has_tensor_cores:
        kind = runtime.tensor_core_type()
        # The interpreter has no arithmetic in bfloat16: `_interpret` gives it float32.
        constants["COMPUTE"] = getattr(
            tl, "float32" if is_interpreted and kind == "bfloat16" else kind
        )
    if is_interpreted:
        run = functools.partial(
            _interpret, kernel, tuple(results.values()), tuple(grid), places, constants
        )
        return list(jax.pure_callback(run, tuple(results.values()), *arrays))
    import jax_triton

    return list(
        jax_triton.triton_call(
            *arrays,
            kernel=_function(kernel),
            out_shape=tuple(results.values()),
            grid=tuple(grid),
            name=f"portable_{kernel.split('.')[1]}",
            num_warps=warps,
            num_stages=stages,
            # Said here, nobody asks a device, which may not be there.
            compute_capability=int(runtime.device().compute_capability.replace(".", "")),
            input_output_aliases=places,
            ASSEMBLY=True,
            **constants,
        )
    )


def compile_for(launch: Launch, capability: int) -> Any:
    """Compiles a kernel to machine code for a card that need not be present.

    Args:
      launch: from `writing_down`.
      capability: compute capability, times ten.

    Returns:
      What `triton.compile` returns.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _function(launch.kernel)
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
    short |= {"int16": "i16", "uint8": "u8", "int8": "i8"}
    signature = {
        name: f"*{short[str(launch.types[name])]}" if name in launch.types else "constexpr"
        for name in function.arg_names
    }
    # JAX's buffers begin at multiples of 256 bytes; jax-triton tells Triton of 16.
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if name in launch.types
    }
    constants = dict(launch.constants)
    if "COMPUTE" in constants:
        constants["COMPUTE"] = getattr(tl, constants["COMPUTE"])
    return triton.compile(
        ASTSource(function, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": launch.warps, "num_stages": launch.stages},
    )


def _function(kernel: str) -> Any:
    module, name = kernel.split(".")
    return getattr(importlib.import_module(f"pallas_kernels.portable.{module}"), name)


class _HostArray:
    """An array with the few methods of a torch tensor that Triton's interpreter asks for."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostArray":
        return self

    def cpu(self) -> "_HostArray":
        return self

    def new_empty(self, *_, **__) -> "_HostArray":
        return _HostArray(self.array)

    def set_(self, storage: "_HostArray", *_) -> None:
        self.array = storage.array

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        return self.array.strides

    def copy_(self, other: "_HostArray") -> None:
        pass


def _interpret(
    kernel: str,
    results: Sequence[jax.ShapeDtypeStruct],
    grid: Sequence[int],
    aliases: Mapping[int, int],
    constants: Mapping[str, Any],
    *operands: jax.Array,
) -> tuple[np.ndarray, ...]:
    """Runs a kernel on host arrays; bfloat16 ones are float32 in between."""
    _mend_interpreter()
    wide = lambda dtype: np.float32 if dtype == jnp.bfloat16 else dtype
    arrays = [np.array(o).astype(wide(o.dtype)) for o in map(np.asarray, operands)]
    # What no program writes must not be read: it is not a number.
    filled = lambda dtype: np.nan if jnp.issubdtype(dtype, jnp.floating) else -1
    outputs = [np.full(r.shape, filled(r.dtype), wide(r.dtype)) for r in results]
    for operand, result in aliases.items():
        outputs[result] = arrays[operand]
    hosts = {id(array): _HostArray(array) for array in (*arrays, *outputs)}
    function = _function(kernel)
    function[tuple(grid) + (1,) * (3 - len(grid))](
        *(hosts[id(array)] for array in itertools.chain(arrays, outputs)),
        ASSEMBLY=False,
        **constants,
    )
    return tuple(output.astype(r.dtype) for output, r in zip(outputs, results, strict=True))


@functools.cache
def _mend_interpreter() -> None:
    """Lets a loop's bounds be arrays of one number: numpy 2.5 takes no such array for a number."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
