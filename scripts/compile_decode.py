"""Compiles the decoding program for a card without having one: `python -m scripts.compile_decode`.

Traces, lowers and compiles the program that samples 32 tokens of each row, ahead of time, with shapes instead of
weights. It prints for each base: the seconds of each stage on this host, the number of matrix products that XLA gives
to Triton, the number of kernels that a layer launches (if layers are a loop), and the size of temporary buffers. It
needs the packages of `.[cuda]`, but no card. It times no kernel; `scripts.bench` does that, on a card.

    python -m scripts.compile_decode --model qwen2.5-7b --rows 16 64
    python -m scripts.compile_decode --bases nvfp4 mxfp4 nf4 --kernels portable    # needs `.[triton]` too
    python -m scripts.compile_decode --bases nvfp4 --device "RTX 4090"    # likewise; an H200 by default
    python -m scripts.compile_decode --rows 8 --bases nvfp4 --drafts 64   # steps of 64 tokens of 8 rows
    python -m scripts.compile_decode --model qwen2.5-32b --tensor 4   # the program of four that decode rows together
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import re
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

TOKENS = 768
# The properties of a card that XLA asks for; those that are not filled in are an H200's, also for other cards.
_PROPERTIES = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {per_core} threads_per_core_limit: 2048 core_count: {processors} fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: {per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{name}"
"""


def card(name: str) -> Any:
    """A card by its name in `qerl_jax.planning.cards`, as a `runtime.Device`. Only what is installed here counts as installed."""
    from qerl_jax.planning import cards

    return dataclasses.replace(cards.named(name).device, has_packages=False)


def properties(device: Any) -> str:
    """The text that describes a card to XLA."""
    major, minor = device.compute_capability.split(".")
    shared = {"per_core": device.shared_bytes + 1024, "per_block": device.shared_bytes}
    named = {"processors": device.processors, "name": device.name}
    return _PROPERTIES.format(major=major, minor=minor, **shared, **named)


@contextlib.contextmanager
def as_on(name: str, kernels: str | None = None) -> Iterator[Any]:
    """Makes the library choose kernels as on a card, except cuDNN's attention, which needs a card to compile."""
    from pallas_kernels import runtime

    without_cudnn = mock.patch.object(runtime, "has_cudnn_attention", lambda *_: False)
    with runtime.on(card(name), kernels) as device, without_cudnn:
        yield device


def arguments(
    name: str,
    base: str,
    rows: int,
    rank: int,
    device: Any,
    tensor: int = 1,
    positions: int | None = None,
) -> tuple[list, dict]:
    """Shapes and static arguments of `engine.decode`.

    Args:
        name: The model.
        base: Format of its weights.
        rows: Rows of the batch.
        rank: Rank of LoRA.
        device: The sharding of arrays that are not divided.
        tensor: Devices that decode rows together.
        positions: Tokens of a step with drafts; 0 for drafts that are only compared, None for none.
    """
    import jax
    import jax.numpy as jnp

    from qerl_jax.config import LoraConfig
    from qerl_jax.distributed import sharding
    from qerl_jax.generation import device_pool
    from qerl_jax.generation.draft_control import MOST_ENDED
    from qerl_jax.generation.draft_search import KINDS, Texts
    from qerl_jax.generation.engine import EngineSpec
    from qerl_jax.generation.packed import Packed
    from qerl_jax.generation.scheduler import Slots
    from qerl_jax.model import architecture, kv_cache
    from qerl_jax.model.transformer import Transformer, init_params, random_base

    arch = architecture.KNOWN[name] if name in architecture.KNOWN else architecture.load(name)
    lora = LoraConfig(rank, float(rank))
    model = Transformer(arch, base, lora, jnp.bfloat16, tensor=tensor)
    frozen = jax.eval_shape(functools.partial(random_base, model), jax.random.key(0))
    params = jax.eval_shape(functools.partial(init_params, model), frozen, jax.random.key(1))
    page = kv_cache.PAGE_SIZE
    width = -(-TOKENS // page)
    pool = jax.eval_shape(lambda: kv_cache.pool(arch, rows * width + 1, jnp.bfloat16, page))
    numbers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    slots = Slots(
        tables=numbers(rows, width),
        **{field: numbers(rows) for field in ("ends", "token", "step", "limit")},
        live=jax.ShapeDtypeStruct((rows,), bool),
        keys=jax.ShapeDtypeStruct((rows, 2), jnp.uint32),
        history=None if positions is None else numbers(rows, TOKENS),
        span=None if positions is None else numbers(),
        patience=None if positions is None else numbers(),
    )
    packed = jax.eval_shape(Packed.of, slots)
    temperature = jax.ShapeDtypeStruct((), jnp.float32)
    shapes = [{"frozen": frozen, "params": params}, pool, packed, temperature, numbers(8)]
    static = {"model": model, "spec": EngineSpec(min(151_665, arch.vocab_size))}
    if positions is not None:
        shapes.append(Texts(numbers(rows, MOST_ENDED), numbers(rows)))
        shapes.append(jax.ShapeDtypeStruct((KINDS,), jnp.float32))
        shapes.append(jax.ShapeDtypeStruct((), bool))
        static["positions"] = positions or None
    on_device = lambda x, at=device: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    if tensor == 1:
        return jax.tree.map(on_device, shapes), static
    divided = lambda spec: jax.sharding.NamedSharding(device.mesh, spec)
    heads = tensor * model.own_part.arch.num_kv_heads
    by_heads = lambda x: on_device(
        x.update(shape=(*x.shape[:2], heads, *x.shape[3:])), divided(device_pool.BY_HEADS)
    )
    variables, pool, *others = shapes
    places = jax.tree.map(divided, sharding.specs(variables, tensor))
    variables = jax.tree.map(on_device, variables, places)
    return [variables, jax.tree.map(by_heads, pool), *jax.tree.map(on_device, others)], static


def report(program: Any, shapes: list, traits: dict) -> str:
    """Compiles a program and returns its row: seconds of each stage, Triton products, kernels, temporaries."""
    import jax

    jax.clear_caches()
    times = [time.perf_counter()]
    traced = program.trace(*shapes, **traits)
    times.append(time.perf_counter())
    lowered = traced.lower(lowering_platforms=("cuda",))
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    spent = [f"{end - start:.1f}" for start, end in itertools.pairwise(times)]
    text, layers = compiled.as_text(), traits["model"].arch.num_layers
    counts = text.count("__triton_nested_gemm_fusion"), launches(text, layers)
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 1e9
    return " | ".join([*spent, *map(str, counts), f"{temporaries:.2f}"])


def launches(program: str, layers: int) -> int | None:
    """The number of kernels that a layer launches in a compiled program; None if layers are not a loop.

    A fusion, a library call and a copy each count as one kernel.
    """
    times, body = rf'"known_trip_count":{{"n":"{layers}"}}', r"body=%([\w.-]+)"
    loop = re.search(rf"{body},[^\n]*{times}", program)
    loop = loop or re.search(rf"{times}[^\n]*{body}", program)
    if loop is None:
        return None
    body = re.search(rf"^%{re.escape(loop[1])} \(.*?^}}", program, re.MULTILINE | re.DOTALL)
    return len(re.findall(r" (?:fusion|custom-call|copy|dot|scatter|sort)\(", body[0]))


def main() -> None:
    """Compiles the programs that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    bases = {"choices": ["nvfp4", "mxfp4", "nf4", "bfloat16"], "default": ["nvfp4", "bfloat16"]}
    drafts = "tokens of a step with drafts; 0 for drafts that are only compared"
    parser.add_argument("--model", default="qwen2.5-7b", help="a published model, or a folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--bases", nargs="+", **bases)
    parser.add_argument("--tensor", type=int, default=1, help="devices that decode rows together")
    parser.add_argument("--drafts", type=int, help=drafts)
    parser.add_argument("--device", default="H200", help="a name that `qerl plan --device` knows")
    parser.add_argument("--kernels", default="auto", choices=["auto", "portable", "reference"])
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import numpy as np
    from jax.experimental import topologies

    from qerl_jax.distributed import sharding
    from qerl_jax.generation import engine

    jax.devices()  # plugins are discovered when devices are first listed
    grid = f"1x1x{args.tensor}"
    shape = {"topology_name": grid, "topology": grid}
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=properties(card(args.device)), **shape
    )
    device = jax.sharding.SingleDeviceSharding(topology.devices[0])
    if args.tensor > 1:
        mesh = jax.sharding.Mesh(np.array(topology.devices), (sharding.GROUP,))
        device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    head = "base | rows | program | trace s | lower s | compile s | by Triton | kernels a layer"
    print(f"| {head} | temporaries GB |\n|{' --- |' * 9}")
    from pallas_kernels import runtime

    with as_on(args.device):
        runtime.use_kernels(args.kernels)
        for base, rows in itertools.product(args.bases, args.rows):
            others = args.rank, device, args.tensor, args.drafts
            shapes, traits = arguments(args.model, base, rows, *others)
            for name in ("packed", "dense") if base == "bfloat16" else ("packed",):
                cells = report(getattr(engine.decode, name), shapes, traits)
                print(f"| {base} | {rows} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
