"""Compiles the portable kernels for cards that need not be present: `python -m tests.pallas_kernels.compile_portable`.

It compiles the launches of a decoding step of Qwen2.5-7B, and of other formats, rows, ranks and heads, as they are
divided on a card of each capability, and prints registers, spilled bytes and shared memory. The exit status is 1 if a
kernel does not compile, spills more than a few registers, or needs more shared memory than the card has. It takes
about five minutes for all capabilities, and needs the packages of `.[triton]`; jax-triton only on a card.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
# The linears of a layer: the sizes of their parts, K, and what they are beside a product.
LINEARS = {
    "qkv": ((3584, 512, 512), 3584, ""),
    "o": ((3584,), 3584, "residual"),
    "gate_up": ((18944, 18944), 3584, "gate"),
    "down": ((3584,), 18944, "residual"),
}
# Head size, query heads of a key head, and whether attention writes the new keys and values.
HEADS = ((128, 7, True), (64, 1, False), (256, 8, True))


def card_of(capability: int) -> Any:
    """The last card of a compute capability in `qerl_jax.planning.cards`, with its own number of processors."""
    from qerl_jax.planning import cards

    name = f"{capability // 10}.{capability % 10}"
    return [card.device for card in cards.CARDS if card.capability == name][-1]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the assembler reports about a kernel: registers and bytes of stack per thread, bytes, instructions."""

    registers: int
    spilled: int
    shared: int
    products: int  # of tensor cores


def launches(capability: int, rows: Sequence[int] = (8, 64)) -> list[Any]:
    """The launches to compile for a card of a capability, without duplicates."""
    import jax

    from pallas_kernels import FORMATS, runtime
    from pallas_kernels.portable import attention, epilogue, launch, layout, matmul, tuning

    card = card_of(capability)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    bf16, f32, i32 = (functools.partial(array, dtype) for dtype in ("bfloat16", "float32", "int32"))

    def trace(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        # As a new function, since JAX does not trace an old one again, for another card.
        return jax.eval_shape(lambda *arguments: function(*arguments, **options), *arguments)

    def weight(kind: str, *shape: int) -> Any:
        return trace(lambda: layout.prepare(FORMATS[kind].random(jax.random.key(0), shape)))

    def linear(name: str, m: int, rank: int = 32, kind: str = "nvfp4") -> None:
        sizes, k, role = LINEARS[name]
        n, layers = sum(sizes), 2
        is_residual = role == "residual"
        pairs = [(f32(layers, k, rank), f32(layers, rank, size)) for size in sizes]
        width = n if is_residual else k
        stream = trace(epilogue.stream, bf16(m, width), f32(width))
        arguments = {
            "x": bf16(m, k) if is_residual else stream,
            "w": weight(kind, layers, n, k),
            "layer": i32(1),
            "multiplier": f32(layers, 1),
            "bias": None if is_residual else bf16(layers, n),
            "branch": trace(epilogue.pack_lora, pairs, scaling=1.0) if rank else None,
            "residual": (stream, f32(layers, n)) if is_residual else None,
        }
        options = {"sizes": sizes, "eps": 1e-6, "is_swiglu": role == "gate"}
        trace(lambda kwargs: epilogue.linear(**kwargs, **options), arguments)

    # Under another name, so that the rule divides what a table has, too.
    with runtime.on(dataclasses.replace(card, name="a card")), launch.writing_down() as written:
        kinds = [kind for kind in FORMATS if layout.unless_format(kind) is None]
        for m, name in itertools.product(rows, LINEARS):
            linear(name, m)
        for m, rank, kind, name in OTHERS:
            linear(name, m, rank, kind if kind in kinds else "nvfp4")
        for (m, n, k), config in tuning.table_of(card.name).items():
            trace(matmul.product, bf16(m, k), weight("nvfp4", n, k), config=config)
        for kind in kinds:
            one = weight(kind, 3584, 3584)
            for m in rows:
                trace(matmul.product, bf16(m, 3584), one)
            trace(matmul.unpacked, one)
        for size, group, appends in HEADS:
            if attention.supports_heads(group, 1, size):
                continue
            angles, cache = f32(8, size // 2), bf16(2, 99, 4, 64, size)
            new = bf16(8, 4 * (group + 2), size), angles, angles
            where = i32(), i32(8, 12), i32(8)
            trace(attention.decode_attention, *new, cache, cache, *where, appends=appends)
    return [one for at, one in enumerate(written) if one not in written[:at]]


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
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    number = lambda name: int(re.search(rf"{name}:(\d+)", report)[1])
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
            shown = ("M", "N", "K", "FORMAT", "RANK", "SIZE", "GROUP", "APPENDS")
            constants = launch.constants
            sizes = " ".join(f"{name}={constants[name]}" for name in shown if name in constants)
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
