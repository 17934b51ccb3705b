"""Compiles the portable kernels for cards that need not be present: `python -m scripts.compile_portable`.

Lists the launches of a decoding step of Qwen2.5-7B, of products with all formats, and of unpacking weights. It compiles
each to machine code with Triton's own assembler and prints registers, spilled bytes and shared memory. The exit status
is 1 if a kernel does not compile, spills more than a few registers, or needs more shared memory than the card has. It
needs the packages of `.[triton]`; jax-triton itself is only needed on a card.

    python -m scripts.compile_portable                          # all capabilities, two minutes
    python -m scripts.compile_portable --capabilities 75 90     # those of a T4 and an H100
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

# Triton reads this once. Kernels must be compiled, not interpreted.
os.environ["TRITON_INTERPRET"] = "0"

# Bytes of shared memory that a program may use, by compute capability times ten.
SHARED_BYTES = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
# Most bytes that a kernel may spill: a few of a thread's registers. For a T4 Triton uses no tensor cores. It computes
# products in registers, and spills more.
MOST_SPILLED = dict.fromkeys(SHARED_BYTES, 16) | {75: 1 << 20}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the assembler reports about a kernel.

    Attributes:
        registers: Registers per thread.
        spilled: Bytes of stack per thread.
        shared: Bytes of shared memory.
    """

    registers: int
    spilled: int
    shared: int


def launches(capability: int, rows: Sequence[int] = (8, 64)) -> list[Any]:
    """The launches to compile for a card, without duplicates."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import mxfp4, nf4, nvfp4, runtime
    from pallas_kernels.portable import attention, epilogue, launch, layout, matmul

    card = dataclasses.replace(
        runtime.H200,
        name="a card",
        compute_capability=f"{capability // 10}.{capability % 10}",
        shared_bytes=SHARED_BYTES[capability],
    )
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)
    random = {"nvfp4": nvfp4.random, "mxfp4": mxfp4.random, "nf4": nf4.random}

    def weight(kind: str, *shape: int) -> Any:
        make = lambda: layout.prepare(random[kind](jax.random.key(0), shape))
        return jax.eval_shape(make)

    def linear(m: int, sizes: Sequence[int], k: int, **options: Any) -> None:
        n, layers = sum(sizes), 2
        w = weight("nvfp4", layers, n, k)
        pairs = [
            (array((layers, k, 32), jnp.float32), array((layers, 32, size), jnp.float32))
            for size in sizes
        ]
        branch = jax.eval_shape(functools.partial(epilogue.pack_branch, scaling=1.0), pairs)
        scale = array((layers, n), jnp.float32)
        stream = jax.eval_shape(
            epilogue.stream,
            array((m, n if options.get("residual") else k), jnp.bfloat16),
            array((n if options.get("residual") else k,), jnp.float32),
        )
        arguments = {
            "x": array((m, k), jnp.bfloat16) if options.get("residual") else stream,
            "w": w,
            "layer": array((1,), jnp.int32),
            "multiplier": array((layers, 1), jnp.float32),
            "bias": None if options.get("residual") else array((layers, n), jnp.bfloat16),
            "branch": branch,
            "residual": (stream, scale) if options.get("residual") else None,
        }
        is_swiglu = options.get("is_swiglu", False)
        run = functools.partial(epilogue.linear, sizes=sizes, eps=1e-6, is_swiglu=is_swiglu)
        jax.eval_shape(lambda kwargs: run(**kwargs), arguments)

    with mock.patch.object(runtime, "device", lambda: card), launch.writing_down() as found:
        for m in rows:
            linear(m, (3584, 512, 512), 3584)
            linear(m, (3584,), 3584, residual=True)
            linear(m, (18944, 18944), 3584, is_swiglu=True)
            linear(m, (3584,), 18944, residual=True)
        for kind in ("nvfp4", "mxfp4", "nf4"):
            # `layout.supports` refuses it.
            if capability < 80 and kind == "mxfp4":
                continue
            one = weight(kind, 3584, 3584)
            for m in rows:
                jax.eval_shape(matmul.product, array((m, 3584), jnp.bfloat16), one)
            jax.eval_shape(matmul.unpacked, one)
        pool = array((2, 99, 4, 64, 128), jnp.bfloat16)
        angles = array((8, 64), jnp.float32)
        jax.eval_shape(
            attention.decode_attention,
            array((8, 36, 128), jnp.bfloat16),
            angles,
            angles,
            pool,
            pool,
            array((), jnp.int32),
            array((8, 12), jnp.int32),
            array((8,), jnp.int32),
        )
    return [each for at, each in enumerate(found) if each not in found[:at]]


def compiled(launch: Any, capability: int) -> Compiled:
    """Compiles a launch for a card and reads the assembler's report."""
    import triton

    from pallas_kernels.portable.launch import compile_for

    kernel = compile_for(launch, capability)
    if re.search(r"\btrap;", kernel.asm["ptx"]):
        raise RuntimeError("Triton made a trap of it, as it does if tensor memory does not suffice")
    tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    number = lambda name: int(re.search(rf"{name}:(\d+)", said)[1])
    return Compiled(number("REG"), number("STACK"), kernel.metadata.shared)


def main(argv: list[str] | None = None) -> int:
    """Compiles all launches and prints a line for each kernel and card. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[*SHARED_BYTES])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    args = parser.parse_args(argv)
    failed = 0
    for capability in args.capabilities:
        for launch in launches(capability, args.rows):
            constants = launch.constants
            sizes = " ".join(
                f"{name}={constants[name]}"
                for name in ("M", "N", "K", "FORMAT")
                if name in constants
            )
            line = f"sm_{capability:<4}{launch.kernel:28}{sizes:40}"
            try:
                result = compiled(launch, capability)
            except Exception as error:
                failed += 1
                print(f"{line} FAILED: {str(error).strip().splitlines()[-1]}")
                continue
            line += (
                f"{result.registers:4} registers {result.spilled:5} B spilled "
                f"{result.shared:7} B shared"
            )
            is_bad = result.shared > SHARED_BYTES[capability]
            is_bad |= result.spilled > MOST_SPILLED[capability]
            failed += is_bad
            print(line + (" FAILED" if is_bad else ""), flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
