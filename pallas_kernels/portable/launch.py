"""Launches Triton kernels: with jax-triton on a GPU, or with Triton's interpreter on a CPU.

It can also record launches instead, to compile the kernels for another GPU. The modules `*_kernels` and `decoders`
import triton. They are imported here when a kernel is launched, so everything else in this package works without
triton.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime


@dataclasses.dataclass(frozen=True)
class Launch:
    """The parts of a kernel launch that affect its compilation.

    Attributes:
      kernel: "module.function" in this package.
      types: dtypes of the array arguments (operands and results), by name.
      constants: the other arguments, by name.
      warps: warps per program (`num_warps`).
      stages: pipeline stages of loads (`num_stages`).
    """

    kernel: str
    types: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int
    stages: int


_WRITTEN_DOWN: list[Launch] | None = None
# XLA runs calls concurrently if neither needs the other's result, but the interpreter has global state.
_INTERPRETER = threading.Lock()


@contextlib.contextmanager
def writing_down() -> Iterator[list[Launch]]:
    """Records launches in a list instead of launching kernels, inside a `with` block. Results are zeros.

    Trace programs in it with `jax.eval_shape`, and pass the recorded launches to `compile_for`.
    """
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
      kernel: "module.function" in this package. Its array arguments are the operands, followed by the results.
      operands: arrays by name, in the order of the arguments.
      results: shapes and dtypes by name, in the order of the arguments.
      grid: number of programs along each axis, at most three axes.
      warps: warps per program (`num_warps`).
      stages: pipeline stages of loads (`num_stages`).
      aliases: result name -> operand name, for each result that updates an operand in place.
      has_tensor_cores: whether the kernel has an argument COMPUTE, the dtype in which tensor cores multiply.
      **constants: the compile-time arguments, except COMPUTE and ASSEMBLY.

    Returns:
      The results, in the order of `results`.
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
        # The interpreter has no bfloat16 arithmetic, so `_interpret` gives it float32.
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
            # Without it jax-triton would ask the device, but there may be none.
            compute_capability=int(runtime.device().compute_capability.replace(".", "")),
            input_output_aliases=places,
            ASSEMBLY=True,
            **constants,
        )
    )


def compile_for(launch: Launch, capability: int) -> Any:
    """Compiles a kernel to machine code for a GPU that need not be present.

    Args:
      launch: a launch that `writing_down` recorded.
      capability: compute capability times ten, e.g. 75.

    Returns:
      The compiled kernel that `triton.compile` returns.
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
    # JAX aligns buffers to 256 bytes. jax-triton promises Triton 16 bytes, so this does the same.
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
    """A numpy array with the methods of a torch tensor that Triton's interpreter calls."""

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
    """Runs a kernel on host arrays with Triton's interpreter. bfloat16 arrays are float32 inside the kernel."""
    _mend_interpreter()
    wide = lambda dtype: np.float32 if dtype == jnp.bfloat16 else dtype
    arrays = [np.array(o).astype(wide(o.dtype)) for o in map(np.asarray, operands)]
    # Outputs start as NaN, or -1 if they are integers, so that tests notice values that no program wrote.
    filled = lambda dtype: np.nan if jnp.issubdtype(dtype, jnp.floating) else -1
    outputs = [np.full(r.shape, filled(r.dtype), wide(r.dtype)) for r in results]
    for operand, result in aliases.items():
        outputs[result] = arrays[operand]
    hosts = {id(array): _HostArray(array) for array in (*arrays, *outputs)}
    with _INTERPRETER:
        _function(kernel)[tuple(grid) + (1,) * (3 - len(grid))](
            *(hosts[id(array)] for array in itertools.chain(arrays, outputs)),
            ASSEMBLY=False,
            **constants,
        )
    return tuple(output.astype(r.dtype) for output, r in zip(outputs, results, strict=True))


@functools.cache
def _mend_interpreter() -> None:
    """Makes Triton's interpreter accept one-element arrays as loop bounds, which numpy 2.5 no longer converts."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend
