"""Measures what float8 weights, inputs and caches cost a model: KL of the next token to 16 bits, on a CPU.

    python -m scripts.float8_kl MODEL.gguf OUT.json --tokenizer tokenizer.json --gsm8k test.parquet \
        --variants nvfp4 nvfp4-max w4a8 w4a8-today w4a8-max

Pages are questions and answers of GSM8K, and the first tokens of pages of docs/. All variants pass through the model
together, layer by layer. Linears round inputs and outputs to bfloat16; all sums are float32. KL is taken at every second
token. With `--draw` above 0, rows and columns of each weight are multiplied by random factors before it is packed, which
are divided out again: the same model with other roundings.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as parquet
from tokenizers import Tokenizer

from pallas_kernels.formats import float8, nvfp4
from pallas_kernels.formats.rounding import float8_values
from qerl_jax.checkpoint import gguf
from qerl_jax.model import architecture, layers

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# Pages with enough tokens.
NAMES = (
    *("concepts", "quantization", "performance", "losses", "rewards", "reliability"),
    *("troubleshooting", "exporting", "scale", "environments", "getting-started"),
)
# (weight, inputs, cache). Weights: NVFP4 with scales by search or of the maximum, the same rounded to float8, or searched
# for float8. Inputs: one scale a row, or one for 128 columns of it, or a row's for one linear only, or not for `down`.
VARIANTS = {
    "16": ("16", "16", "16"),
    "nvfp4": ("search", "16", "16"),
    "nvfp4-max": ("maximum", "16", "16"),
    "w8": ("for-float8", "16", "16"),
    "a8": ("16", "row", "16"),
    "w4a8": ("for-float8", "row", "16"),
    "w4a8-today": ("search-float8", "row", "16"),
    "w4a8-max": ("maximum-float8", "row", "16"),
    "w4a8-128": ("for-float8", "128", "16"),
    "w4a8-not-down": ("for-float8", "qkv+o+gate_up", "16"),
    **{f"a8-{linear}": ("16", linear, "16") for linear in ("qkv", "o", "gate_up", "down")},
    "kv8": ("16", "16", "float8"),
    "k8": ("16", "16", "float8 keys"),
    "v8": ("16", "16", "float8 values"),
    "k8-bias-v8": ("16", "16", "float8 without bias"),
    "ki8-v8": ("16", "16", "int8 keys"),
    "w4a8-kv8": ("for-float8", "row", "float8"),
}
PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}

bf16 = functools.partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
_rows = jax.jit(float8.quantize_rows)
_search = jax.jit(nvfp4.search, static_argnames="as_float8")
_pack = jax.jit(nvfp4.pack)
_dequantize = jax.jit(nvfp4.dequantize)
_float8 = jax.jit(float8.weight)


@jax.jit
def by_128(x: jax.Array) -> jax.Array:
    """Rounds rows to float8 with a scale for 128 columns; K is padded to whole blocks."""
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % 128)))
    x8, scale = float8.quantize_rows(padded.reshape(len(x), -1, 128))
    return (x8.astype(jnp.float32) * scale).reshape(padded.shape)[:, : x.shape[1]]


def heads_in_float8(x: jax.Array) -> jax.Array:
    """Rounds heads [B, T, J, C] to float8 with one power of two a token and head."""
    mantissa, power = jnp.frexp(jnp.max(jnp.abs(x), -1, keepdims=True) / 448)
    power = power - (mantissa == 0.5)
    return jnp.ldexp(float8_values(jnp.ldexp(x, -power)), power)


def heads_in_int8(x: jax.Array) -> jax.Array:
    """Rounds heads to int8 with one scale a token and head."""
    step = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    return jnp.round(x / step) * step


def pages(args: argparse.Namespace) -> Iterator[tuple[str, list[int]]]:
    """Yields kind and tokens of all pages."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    rows = iter(parquet.read_table(args.gsm8k).to_pylist())
    for _ in range(args.pages):
        text, tokens = "", []
        while len(tokens) < args.length:
            row = next(rows)
            text += f"Question: {row['question']}\nAnswer: {row['answer']}\n\n"
            tokens = tokenizer.encode(text).ids
        yield "gsm8k", tokens[: args.length]
    texts = (tokenizer.encode((DOCS / f"{name}.md").read_text()).ids for name in NAMES)
    long = [tokens[: args.length] for tokens in texts if len(tokens) >= args.length]
    yield from (("docs", tokens) for tokens in long[: args.pages])


@dataclasses.dataclass(frozen=True)
class Packed:
    """One linear in all forms that variants need: float32 [N, K] and its multiplier, and the factors of a draw."""

    forms: dict[str, tuple[np.ndarray, Any]]
    columns: np.ndarray | float = 1.0
    rows: np.ndarray | float = 1.0

    def __call__(self, variant: str, linear: str, x: jax.Array) -> jax.Array:
        """Computes x W^T as the variant rounds it."""
        form, inputs, _ = VARIANTS[variant]
        weight, multiplier = self.forms[form]
        x, rows = (x, 1.0) if form == "16" else (x / self.columns, self.rows)
        scale: Any = 1.0
        if inputs == "row" or linear in inputs.split("+"):
            x8, scale = _rows(x)
            x = x8.astype(jnp.float32)
        elif inputs == "128":
            x = by_128(x)
        # NumPy multiplies float32 faster than XLA on a CPU.
        return jnp.asarray(np.matmul(np.asarray(x), weight.T)) / rows * scale * multiplier


def packed(weights: Sequence[jax.Array], wanted: set[str], rng: Any) -> Packed:
    """Packs the parts of a linear, bfloat16 [N_i, K], in all wanted forms."""
    parts, columns, rows = list(weights), 1.0, 1.0
    if rng is not None:
        columns = np.exp(0.03 * rng.standard_normal(parts[0].shape[1])).astype(np.float32)
        factors = [np.exp2(rng.uniform(-0.25, 0.25, len(w))).astype(np.float32) for w in parts]
        parts = [
            w.astype(jnp.float32) * columns * f[:, None]
            for w, f in zip(parts, factors, strict=True)
        ]
        rows = np.concatenate(factors)
    forms: dict[str, Any] = {"16": (np.asarray(jnp.concatenate(weights), np.float32), 1.0)}
    makers = {
        "search": _search,
        "maximum": _pack,
        "for": functools.partial(_search, as_float8=True),
    }
    for name, make in makers.items():
        if not wanted & {name, f"{name}-float8"}:
            continue
        t = nvfp4.fuse(make(parts), shared=True)
        forms[name] = np.asarray(_dequantize(t)), 1.0
        w8, multiplier = _float8(t)
        forms[f"{name}-float8"] = np.asarray(w8, np.float32), multiplier[0]
    return Packed(forms, columns, rows)


def attention(arch: architecture.Architecture, shape: tuple[int, int], cache: str, qkv, bias):
    """Computes attention from qkv [B T, (H + 2 J) C] and the bias of the keys, with a rounded cache."""
    heads = qkv.reshape(*shape, -1, arch.head_size)
    counts = [arch.num_heads, arch.num_heads + arch.num_kv_heads]
    query, key, value = jnp.split(heads, counts, axis=2)
    positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    turn = lambda x: bf16(layers.rotate(x, layers.rope_tables(positions, arch)))
    query, key, turned = (
        turn(query),
        turn(key),
        turn(jnp.broadcast_to(bias.reshape(key.shape[2:]), key.shape)),
    )
    if cache in ("float8", "float8 keys"):
        key = heads_in_float8(key)
    elif cache == "float8 without bias":
        key = heads_in_float8(key - turned) + turned
    elif cache == "int8 keys":
        key = heads_in_int8(key)
    if cache not in ("16", "float8 keys"):
        value = heads_in_float8(value)
    return bf16(layers.plain_attention(query, key, value).reshape(len(qkv), -1))


def states(args: argparse.Namespace, tensors: gguf.Tensors, tokens: np.ndarray) -> dict[str, Any]:
    """Runs all layers: the hidden states before the last norm, float32 [B T, D] by variant."""
    arch = architecture.from_hf(tensors.config)
    rng = np.random.default_rng(args.draw) if args.draw else None
    wanted = {VARIANTS[name][0] for name in args.variants}
    attend = jax.jit(attention, static_argnums=(0, 1, 2))
    unit = jax.jit(lambda x: jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + arch.rms_norm_eps))
    float32 = lambda name: jnp.asarray(tensors[name], jnp.float32)
    xs = dict.fromkeys(args.variants, float32("model.embed_tokens.weight")[tokens.reshape(-1)])
    for index in range(args.layers or arch.num_layers):
        prefix = f"model.layers.{index}."
        names = {at: [f"{prefix}{part}" for part in parts] for at, parts in PARTS.items()}
        linears = {
            at: packed([jnp.asarray(tensors[f"{name}.weight"]) for name in parts], wanted, rng)
            for at, parts in names.items()
        }
        biases = [float32(f"{name}.bias") for name in names["qkv"]]
        norms = [
            float32(f"{prefix}{at}.weight")
            for at in ("input_layernorm", "post_attention_layernorm")
        ]
        for name, x in xs.items():
            run = lambda at, x, name=name, linears=linears: linears[at](name, at, x)
            qkv = bf16(run("qkv", bf16(x * norms[0])) * unit(x) + jnp.concatenate(biases))
            mixed = attend(arch, tokens.shape, VARIANTS[name][2], qkv, biases[1])
            x = bf16(run("o", mixed) + x)
            gate_up = bf16(run("gate_up", bf16(x * norms[1])) * unit(x))
            gate, up = jnp.split(gate_up, 2, -1)
            xs[name] = bf16(run("down", bf16(jax.nn.silu(gate) * up)) + x)
    scale = float32("model.norm.weight")
    return {name: bf16(x * unit(x) * scale) for name, x in xs.items()}


@jax.jit
def divergence(exact: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes the mean KL(exact || logits) of logits [T, V], and the second's mean entropy."""
    exact, other = jax.nn.log_softmax(exact), jax.nn.log_softmax(logits)
    kl = jnp.sum(jnp.exp(exact) * (exact - other), -1)
    return kl.mean(), -jnp.sum(jnp.exp(other) * other, -1).mean()


def main(argv: Sequence[str] | None = None) -> None:
    """Writes KL and entropy of all variants and pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True)
    parser.add_argument("--gsm8k", type=pathlib.Path, required=True)
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), required=True)
    parser.add_argument("--pages", type=int, default=8, help="pages of each kind")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, help="only so many layers, to try it")
    parser.add_argument("--draw", type=int, default=0)
    args = parser.parse_args(argv)
    args.variants = ["16", *(name for name in args.variants if name != "16")]
    tensors = gguf.Tensors(args.model)
    kinds, rows = zip(*pages(args), strict=True)
    tokens = np.array(rows, np.int32)
    last = states(args, tensors, tokens)
    tied = "lm_head.weight" not in tensors
    head = np.asarray(
        tensors["model.embed_tokens.weight" if tied else "lm_head.weight"], np.float32
    )
    result: dict[str, list] = {name: [] for name in last}
    for page in range(len(tokens)):
        at = page * args.length + np.arange(1, args.length - 1, 2)
        logits = lambda name, at=at: np.matmul(np.asarray(last[name][at]), head.T)
        exact = logits("16")
        for name in last:
            result[name].append([float(v) for v in divergence(exact, logits(name))])
    args.out.write_text(json.dumps({"kinds": kinds, "kl and entropy": result}))


if __name__ == "__main__":
    main()
