"""Times products of e4m3 x e4m3 by XLA, and what they need, beside bfloat16: JSON lines, the important ones first.

    python -m scripts.float8_card --out FILE --seconds 120    # on one H100 or H200

It stops when the seconds are over. Rows have `product_us`, the kernels of a call that are not XLA's own, and `call_us`, all of
them, by CUPTI; weights rotate, so that they come from memory. XLA joins products with one x: `wrapped_concatenate`, which counts
in `call_us` only, is such a join, not a part of the product. The last lines are ratios of products.
"""

import argparse
import concurrent.futures
import functools
import json
import pathlib
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.formats import nvfp4
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic import paired
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import dequantize, layout, nvfp4_matmul, packed_tile
from pallas_kernels.nvfp4_matmul.shapes import PROBLEMS

F8, TILE, MAX = jnp.float8_e4m3fn, layout.TILE, 448.0
ALGORITHMS = {
    "f8": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32,
    "f8_fast": lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM,
}
SHAPES = {
    (model, p.layer): (p.n, p.k)
    for model in ("7b", "1.5b")
    for p in PROBLEMS
    if p.model == f"qwen2.5-{model}" and p.layer != "lm_head"
}
LAYERS = ("qkv", "o", "gate_up", "down")
# Products by cuBLAS, not by Triton.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}
XLA_KERNELS = re.compile("fusion|wrapped|memset|memcpy", re.IGNORECASE)


def dot(x, w, precision=None, out=jnp.float32):
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=out
    )


def float8_product(kind, out=jnp.float32):
    """y = x8 w8^T in float32 sums, times the rows' scales and the weight's; bfloat16."""

    def product(x, row_scale, w, scale):
        y = dot(x, w, ALGORITHMS[kind], out)
        return (y.astype(jnp.float32) * (row_scale * scale)).astype(jnp.bfloat16)

    return product


def quantize_rows(x):
    """x [M, K] -> e4m3 [M, K] and float32 scales [M, 1]."""
    wide = x.astype(jnp.float32)
    top = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(top > 0, top / MAX, 1.0)
    return (wide / scale).astype(F8), scale


def swiglu(gate_up):
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


def to_float8(t):
    """e4m3(code x scale x 2^-3) of an NVFP4Tensor, as XLA fuses it."""
    return (nvfp4.scaled_codes(t, jnp.float32) * 0.125).astype(F8)


def kernel_to_float8(w):
    """The same of a HopperNVFP4 by a kernel: `dequantize_kernel` with another last step."""
    from pallas_kernels import runtime

    n, k = w.shape
    config = dequantize.pick_config(k)
    steps = w.words.shape[1] // (config.step // TILE)
    blocks = min(4 * runtime.device().processors, len(w.words) * steps)
    return launch(w.words, config.step, config.stages, blocks, w.is_paired)[:n, :k]


def launch(words, step, stages, blocks, is_paired):
    row_tiles, column_tiles = words.shape[:2]
    narrow = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
    return mosaic.launch(
        functools.partial(_unpack, step=step, stages=stages, blocks=blocks, is_paired=is_paired),
        {"w": words},
        {"out": jax.ShapeDtypeStruct((row_tiles * TILE, column_tiles * TILE), F8)},
        {
            "slots": plgpu.SMEM((stages, step // TILE, *layout.TILE_SHAPE), jnp.int32),
            "unpacked": plgpu.SMEM((2, TILE, step), F8, transforms=narrow),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        },
        name="nvfp4_to_float8_sm90",
        interpret=False,
        grid=(blocks,),
        grid_names=("block",),
    )["out"]


def _unpack(refs, *, step, stages, blocks, is_paired):
    row_tiles, column_tiles = refs.w.shape[:2]
    chunks = step // TILE
    steps = column_tiles // chunks
    block = lax.axis_index("block")
    turns = lax.div(row_tiles * steps - block + blocks - 1, blocks)
    half, up = TILE // 2, row_tiles * TILE // 2
    places = [(pl.ds(0, TILE), lambda row: pl.ds(row * TILE, TILE))]
    if is_paired:
        places = [
            (pl.ds(0, half), lambda row: pl.ds(row * half, half)),
            (pl.ds(half, half), lambda row: pl.ds(up + row * half, half)),
        ]

    def row_and_column(turn):
        unit = block + turn * blocks
        return lax.div(unit, steps), lax.rem(unit, steps)

    def copy(turn, slot):
        row, column = row_and_column(turn)
        plgpu.copy_gmem_to_smem(
            refs.w.at[row, pl.ds(column * chunks, chunks)], refs.slots.at[slot], refs.full.at[slot]
        )

    ring = Ring(stages, copy, refs.full, end=turns)
    ring.fill()

    @pl.loop(0, turns)
    def _units(turn):
        (row, column), slot = row_and_column(turn), ring.slot(turn)
        result = refs.unpacked.at[lax.rem(turn, 2)]
        ring.wait(slot)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        for chunk in range(chunks):
            values = packed_tile.decode(refs.slots.at[slot, chunk])
            values = values * jnp.bfloat16(0.125 / layout.DECODED_SCALE)
            parts = paired.halves(values, interpret=False) if is_paired else (values,)
            for part, (rows, _) in zip(parts, places, strict=True):
                result[rows, pl.ds(chunk * TILE, TILE)] = part.astype(jnp.float32).astype(F8)
        plgpu.commit_smem()
        for at, (rows, to) in enumerate(places):
            plgpu.copy_smem_to_gmem(
                result.at[rows],
                refs.out.at[to(row), pl.ds(column * step, step)],
                commit_group=at == len(places) - 1,
            )
        pl.when(turn + stages < turns)(lambda: ring.fetch(turn + stages))

    plgpu.wait_smem_to_gmem(0)


# Cases: (row of the result, function of (shared arguments, one copy of the rotated argument), arguments, rotated argument).
def cases():
    """All cases, the important ones first: name and what makes it."""
    for model, rows in (("7b", 2048), ("1.5b", 2048)):
        for layer in LAYERS:
            yield "bf16", model, layer, rows
            yield "f8", model, layer, rows
        if model == "7b":
            for layer in LAYERS:
                for kind in ("f8_fast", "f8_bf16out"):
                    yield kind, model, layer, rows
        for layer in ("qkv", "down"):
            yield "quantize_x", model, layer, rows
        for kind in ("swiglu", "swiglu_quantized"):
            yield kind, model, "down", rows
        for layer in LAYERS:
            yield "to_float8_xla", model, layer, None
        for layer in ("gate_up", "down"):
            for kind in ("to_float8_kernel", "to_bf16_kernel", "transpose"):
                yield kind, model, layer, None
            yield "nvfp4", model, layer, rows
    for rows in (512, 8192, 256):
        for model in ("7b", "1.5b"):
            for layer in LAYERS:
                yield "bf16", model, layer, rows
                yield "f8", model, layer, rows
            for layer in ("qkv", "down"):
                yield "quantize_x", model, layer, rows
            yield "swiglu", model, "down", rows
            yield "swiglu_quantized", model, "down", rows
    for layer in LAYERS:
        for kind in ("f8_fast", "f8_bf16out"):
            yield kind, "1.5b", layer, 2048
    for model in ("7b", "1.5b"):
        for layer in ("qkv", "o"):
            for kind in ("to_float8_kernel", "to_bf16_kernel", "transpose"):
                yield kind, model, layer, None
            yield "nvfp4", model, layer, 2048
        for layer in ("gate_up", "down"):
            yield "nvfp4", model, layer, 512


def built(kind, model, layer, rows, l2_bytes):
    """A function of all arguments that calls a case's function for all copies, and functions that make the arguments."""
    n, k = SHAPES[model, layer]
    key = jax.random.key(1)
    bytes_of = {
        "bf16": 2,
        "nvfp4": 9 / 16,
        "to_float8_xla": 9 / 16,
        "to_float8_kernel": 9 / 16,
        "to_bf16_kernel": 9 / 16,
    }
    copies = min(24, max(2, round(4 * l2_bytes / (n * k * bytes_of.get(kind, 1)))))
    normal = lambda *shape: jax.random.normal(key, shape, jnp.bfloat16)
    as8 = lambda *shape: (normal(*shape) * 16).astype(F8)
    many = lambda one: [one() for _ in range(copies)]
    packed = lambda: jax.jit(nvfp4.random, static_argnums=1)(key, (n, k))
    prepared = lambda: jax.jit(functools.partial(layout.prepare, is_paired=layer == "gate_up"))(
        packed()
    )
    x8 = lambda: (as8(rows, k), jnp.ones((rows, 1)), jnp.float32(1))
    if kind == "bf16":
        return lambda x, ws: [dot(x, w, out=jnp.bfloat16) for w in ws], lambda: (
            normal(rows, k),
            many(lambda: normal(n, k)),
        )
    if kind.startswith("f8"):
        product = float8_product(
            "f8" if kind == "f8_bf16out" else kind,
            jnp.bfloat16 if kind == "f8_bf16out" else jnp.float32,
        )
        return lambda x, ws: [product(x[0], x[1], w, x[2]) for w in ws], lambda: (
            x8(),
            many(lambda: as8(n, k)),
        )
    if kind == "nvfp4":
        return lambda x, ws: [nvfp4_matmul(x, w) for w in ws], lambda: (
            normal(rows, k),
            many(prepared),
        )
    if kind == "transpose":
        return lambda _, ws: [lax.optimization_barrier(w.T) for w in ws], lambda: (
            None,
            many(lambda: as8(n, k)),
        )
    if kind == "to_float8_xla":
        return lambda _, ws: [to_float8(w) for w in ws], lambda: (None, many(packed))
    if kind == "to_float8_kernel":
        return lambda _, ws: [kernel_to_float8(w) for w in ws], lambda: (None, many(prepared))
    if kind == "to_bf16_kernel":
        return lambda _, ws: [dequantize.dequantize(w) for w in ws], lambda: (None, many(prepared))
    copies = min(24, max(2, round(4 * l2_bytes / (2 * rows * k))))
    if kind == "quantize_x":
        return lambda _, xs: [quantize_rows(x) for x in xs], lambda: (
            None,
            many(lambda: normal(rows, k)),
        )
    after = {"swiglu": swiglu, "swiglu_quantized": lambda x: quantize_rows(swiglu(x))}[kind]
    return lambda _, xs: [after(x) for x in xs], lambda: (None, many(lambda: normal(rows, 2 * k)))


def compiled(case, l2_bytes):
    """Compiles a case: the programs that make its arguments and that run it, and the seconds."""
    began = time.perf_counter()
    run, make = built(*case, l2_bytes)
    maker = jax.jit(make).lower().compile()
    program = jax.jit(run).lower(*jax.eval_shape(make)).compile(compiler_options=OPTIONS)
    return maker, program, time.perf_counter() - began


def measured(case, maker, program, seconds):
    """A row of the result."""
    from jax.experimental.mosaic.gpu import profiler

    kind, model, layer, rows = case
    arguments = maker()
    copies = len(arguments[1])
    measure = profiler.measure(program, aggregate=False)
    products, totals = [], []
    for _ in range(5):
        spent = {}
        for name, ms in measure(*arguments)[1]:
            spent[name] = spent.get(name, 0.0) + 1e3 * ms / copies
        others = [us for name, us in spent.items() if not XLA_KERNELS.search(name)]
        products.append(sum(others) or max(spent.values()))
        totals.append(sum(spent.values()))
    names = sorted(spent, key=spent.get, reverse=True)
    n, k = SHAPES[model, layer]
    return {
        "kind": kind, "model": model, "layer": layer, "rows": rows, "n": n, "k": k,
        "product_us": round(statistics.median(products), 2), "call_us": round(statistics.median(totals), 2),
        "least_us": round(min(totals), 2), "copies": copies, "compile_s": round(seconds, 2), "kernels": [name[:60] for name in names[:3]],
    }  # fmt: skip


def errors():
    """Relative errors of sums: of both algorithms, against products in float32, for K = 18,944."""
    key = jax.random.key(7)
    x = (jax.random.normal(key, (256, 18944)) * 16).astype(F8)
    w = (jax.random.normal(jax.random.key(8), (1024, 18944)) * 16).astype(F8)
    exact = dot(x.astype(jnp.float32), w.astype(jnp.float32), lax.Precision.HIGHEST)
    for kind, algorithm in ALGORITHMS.items():
        y = jax.jit(lambda x, w, a=algorithm: dot(x, w, a))(x, w)
        off = jnp.sqrt(jnp.mean((y - exact) ** 2) / jnp.mean(exact**2))
        yield {"kind": "sum_error", "algorithm": kind, "relative": float(off)}
    t = nvfp4.random(jax.random.key(9), (256, 512))
    for is_paired in (False, True):
        a = kernel_to_float8(layout.prepare(t, is_paired=is_paired)).astype(jnp.float32)
        equal = bool((a == to_float8(t).astype(jnp.float32)).all())
        yield {"kind": "to_float8_kernel_equal", "is_paired": is_paired, "equal": equal}


def ratios(rows):
    """bfloat16's time over float8's, products alone."""
    at = {(r["kind"], r["model"], r["layer"], r["rows"]): r for r in rows if "model" in r}
    for (kind, *problem), row in list(at.items()):
        if kind == "bf16" and (other := at.get(("f8", *problem))):
            ratio = round(row["product_us"] / other["product_us"], 3)
            yield {"kind": "ratio", "problem": problem, "product": ratio}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    began, rows = time.perf_counter(), []

    def tell(row):
        rows.append(row)
        line = json.dumps(row)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        with args.out.open("a") as file:
            file.write(line + "\n")

    from pallas_kernels import runtime

    device = jax.devices()[0]
    tell(
        {"kind": "device", "device": device.device_kind, "jax": jax.__version__, "options": OPTIONS}
    )
    # Warms the card up.
    a = jnp.ones((8192, 8192), jnp.bfloat16)
    for _ in range(200):
        b = a @ a
    b.block_until_ready()
    l2_bytes = runtime.device().l2_bytes
    for row in errors_or_message():
        tell(row)
    # All cases are compiled first, several at a time, because XLA's timing of products would disturb ours.
    late = began + 0.55 * args.seconds
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        soon = lambda case: compiled(case, l2_bytes) if time.perf_counter() < late else None
        programs = [(case, pool.submit(soon, case)) for case in cases()]
    tell(
        {
            "kind": "compiled",
            "seconds": round(time.perf_counter() - began, 1),
            "cases": sum(f.exception() is None and f.result() is not None for _, f in programs),
        }
    )
    for case, future in programs:
        try:
            if (ready := future.result()) is None or time.perf_counter() - began > args.seconds:
                tell({"kind": "left out", "case": case})
            else:
                tell(measured(case, *ready))
        except Exception as error:  # one case that fails must not end the run
            tell(
                {"kind": "failed", "case": case, "error": f"{type(error).__name__}: {error}"[:400]}
            )
    for row in ratios(rows):
        tell(row)
    tell({"kind": "seconds", "seconds": round(time.perf_counter() - began, 1)})


def errors_or_message():
    try:
        yield from errors()
    except Exception as error:
        yield {
            "kind": "failed",
            "case": "errors",
            "error": f"{type(error).__name__}: {error}"[:400],
        }


if __name__ == "__main__":
    main()
