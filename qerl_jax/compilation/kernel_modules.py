"""The Pallas kernels of a program for Hopper, which are compiled beside each other before the program.

While XLA compiles a program it compiles the kernels one after the other. And LLVM has one set of options for all threads:
kernels need others than XLA, and each waits until nobody uses the other's. So two programs that compile together take as
long as one after the other. JAX keeps each compiled kernel in its process, by the hash that the program names. So after
`KernelModules.compile` XLA finds all of them, and programs compile side by side.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# The call of a kernel in StableHLO, and its attributes that compilation depends on.
_CALL, _MODULE, _HASH, _BARRIER = "mosaic_gpu_v2", "module", "kernel_hash", "use_custom_barrier"
_THREADS = 8


def modules(lowered: jax.stages.Lowered) -> dict[bytes, dict[str, Any]]:
    """Returns the different kernels of a program: the attributes of their calls, by the hash of the kernel."""
    kernels = {}
    for operation in _inside(lowered.compiler_ir("stablehlo").operation):
        attributes = operation.attributes
        if (
            operation.name == "stablehlo.custom_call"
            and attributes["call_target_name"].value == _CALL
        ):
            config = attributes["mhlo.backend_config"]
            named = {name: config[name].value_bytes for name in (_MODULE, _HASH)}
            kernels[named[_HASH]] = named | {_BARRIER: config[_BARRIER].value}
    return kernels


class KernelModules:
    """Compiles kernels, each one once."""

    def __init__(self):
        """Starts no thread before the first kernel."""
        self._compiled: dict[bytes, concurrent.futures.Future[None]] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS)
        self._lock = threading.Lock()

    def compile(self, lowered: jax.stages.Lowered) -> None:
        """Compiles the kernels of a program, and waits for them.

        A kernel that fails is left to the compilation of the program, which then says why.
        """
        with self._lock:
            kernels = modules(lowered)
            for name in kernels.keys() - self._compiled.keys():
                self._compiled[name] = self._pool.submit(_compile, kernels[name])
        for name in kernels:
            with contextlib.suppress(concurrent.futures.CancelledError):
                self._compiled[name].exception()

    def end(self) -> None:
        """Begins no further kernels."""
        self._pool.shutdown(cancel_futures=True)


def _inside(operation: Any) -> Iterator[Any]:
    """Yields all operations inside an operation of MLIR."""
    for block in (block for region in operation.regions for block in region):
        for inner in block:
            yield inner.operation
            yield from _inside(inner.operation)


def _compile(kernel: dict[str, Any]) -> None:
    jax.jit(_call(kernel)).lower().compile()


def _call(kernel: dict[str, Any]) -> Callable[[], jax.Array]:
    """Returns the call of a kernel, to be compiled but not called: its shapes are not the kernel's."""
    call = jax.ffi.ffi_call(_CALL, jax.ShapeDtypeStruct((1,), jnp.int32))
    return lambda: call(**kernel)
