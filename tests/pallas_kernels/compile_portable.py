"""Compiles the portable kernels for cards that need not be present: `python -m tests.pallas_kernels.compile_portable`.

Lists the launches of a decoding step of Qwen2.5-7B, of products with all formats, of unpacking weights, and of other
rows, ranks, heads and formats. All are divided as on a card of the capability, also by its tuned table. It compiles each
to machine code with Triton's own assembler and prints registers, spilled bytes and shared memory. The exit status
is 1 if a kernel does not compile, spills more than a few registers, or needs more shared memory than the card has. It
needs the packages of `.[triton]`; jax-triton itself is only needed on a card.

    python -m tests.pallas_kernels.compile_portable                          # all capabilities, about five minutes
    python -m tests.pallas_kernels.compile_portable --capabilities 75 90     # those of a T4 and an H100
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

# Triton reads this once. Kernels must be compiled, not interpreted.
os.environ["TRITON_INTERPRET"] = "0"

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
# Most bytes that a thread may spill: a few registers. For a T4 Triton uses no tensor cores and computes products in
# registers. There attention with heads of 128 spills 640 bytes, the epilogue with rank 64 up to 432, and NF4 24.
MOST_SPILLED = dict.fromkeys(CAPABILITIES, 16) | {75: 704}
# Beside all linears of a layer with `--rows` and rank 32: rows, rank, format, and which linear.
OTHERS = (
    (1, 0, "nf4", "qkv"),
    (1, 16, "nvfp4", "gate_up"),
    (32, 16, "mxfp4", "o"),
    (32, 64, "nf4", "gate_up"),
    (128, 64, "nvfp4", "qkv"),
    (128, 0, "nvfp4", "down"),
)
# Head size, query heads of a key head, and whether attention writes the new keys and values.
HEADS = ((128, 7, True), (64, 1, False), (256, 8, True))


def card_of(capability: int) -> Any:
    """The last card of a compute capability in `qerl_jax.planning.cards`, with its own number of processors."""
    from qerl_jax.planning import cards

    name = f"{capability // 10}.{capability % 10}"
    return [card.device for card in cards.CARDS if card.capability == name][-1]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the assembler reports about a kernel.

    Attributes:
        registers: Registers per thread.
        spilled: Bytes of stack per thread.
        shared: Bytes of shared memory.
        products: Instructions of tensor cores.
    """

    registers: int
    spilled: int
    shared: int
    products: int


def launches(capability: int, rows: Sequence[int] = (8, 64)) -> list[Any]:
    """The launches to compile for a card of a capability, without duplicates."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import FORMATS, runtime
    from pallas_kernels.portable import attention, epilogue, launch, layout, matmul, tuning

    card = card_of(capability)
    array = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype)

    def weight(kind: str, *shape: int) -> Any:
        make = lambda: layout.prepare(FORMATS[kind].random(jax.random.key(0), shape))
        return jax.eval_shape(make)

    def linear(name: str, m: int, rank: int = 32, kind: str = "nvfp4") -> None:
        sizes, k, options = linears[name]
        n, layers = sum(sizes), 2
        w = weight(kind, layers, n, k)
        pairs = [
            (array((layers, k, rank), jnp.float32), array((layers, rank, size), jnp.float32))
            for size in sizes
        ]
        packed = functools.partial(epilogue.pack_lora, scaling=1.0)
        branch = jax.eval_shape(packed, pairs) if rank else None
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

    linears = {
        "qkv": ((3584, 512, 512), 3584, {}),
        "o": ((3584,), 3584, {"residual": True}),
        "gate_up": ((18944, 18944), 3584, {"is_swiglu": True}),
        "down": ((3584,), 18944, {"residual": True}),
    }
    # Under another name, so that the rule divides what a table has, too.
    with runtime.on(dataclasses.replace(card, name="a card")), launch.writing_down() as found:
        kinds = [kind for kind in FORMATS if layout.unless_format(kind) is None]
        for m in rows:
            for name in linears:
                linear(name, m)
        for m, rank, kind, name in OTHERS:
            linear(name, m, rank, kind if kind in kinds else "nvfp4")
        for (m, n, k), config in tuning.table_of(card.name).items():
            x, w = array((m, k), jnp.bfloat16), weight("nvfp4", n, k)
            jax.eval_shape(functools.partial(matmul.product, config=config), x, w)
        for kind in kinds:
            one = weight(kind, 3584, 3584)
            for m in rows:
                jax.eval_shape(matmul.product, array((m, 3584), jnp.bfloat16), one)
            jax.eval_shape(matmul.unpacked, one)
        for size, group, appends in HEADS:
            if attention.supports_heads(group, 1, size):
                continue
            pool = array((2, 99, 4, 64, size), jnp.bfloat16)
            angles = array((8, size // 2), jnp.float32)
            jax.eval_shape(
                functools.partial(attention.decode_attention, appends=appends),
                array((8, 4 * (group + 2), size), jnp.bfloat16),
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
    products = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", kernel.asm["ptx"])
    return Compiled(number("REG"), number("STACK"), kernel.metadata.shared, len(products))


def main(argv: list[str] | None = None) -> int:
    """Compiles all launches and prints a line for each kernel and card. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capabilities", type=int, nargs="+", default=[*CAPABILITIES])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    args = parser.parse_args(argv)
    failed = 0
    for capability in args.capabilities:
        for launch in launches(capability, args.rows):
            constants = launch.constants
            sizes = " ".join(
                f"{name}={constants[name]}"
                for name in ("M", "N", "K", "FORMAT", "RANK", "SIZE", "GROUP", "APPENDS")
                if name in constants
            )
            line = f"sm_{capability:<4}{launch.kernel:28}{sizes:52}"
            try:
                result = compiled(launch, capability)
            except Exception as error:
                failed += 1
                print(f"{line} FAILED: {str(error).strip().splitlines()[-1]}")
                continue
            line += (
                f"{result.registers:4} registers {result.spilled:5} B spilled "
                f"{result.shared:7} B shared {result.products:4} mma"
            )
            is_bad = result.shared > card_of(capability).shared_bytes
            is_bad |= result.spilled > MOST_SPILLED[capability]
            failed += is_bad
            print(line + (" FAILED" if is_bad else ""), flush=True)
    print(f"{failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
