"""One decoding step through fused kernels: for each linear the product and its epilogue, and attention.

`Transformer` defines the arithmetic. This module runs it on the same parameter trees, for at most 128 rows of one token
each (`runtime.decodes_in_tiles`: 512), if kernels support the model (`supports`). Norms, LoRA, biases, SwiGLU and
residual additions are computed in the epilogues; with tensor parallelism, XLA sums the terms of o and down and computes
the residual addition and the norm. Of the two sets of kernels, for Hopper and portable ones, `fit` chooses one, and
`Ops` has the functions in which they differ.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from pallas_kernels import decode_attention, rounded, runtime
from pallas_kernels.finished_linear import decode as fused
from pallas_kernels.finished_linear import gated, residual_stream
from pallas_kernels.finished_linear.lora import PackedLora, pack_lora
from pallas_kernels.portable import epilogue as portable
from pallas_kernels.portable import layout as portable_layout
from qerl_jax.config import DENSE
from qerl_jax.model import kv_cache, layers, lora, transformer

LINEARS = ("qkv", "o", "gate_up", "down")
# Up to UNROLLED_ROWS rows the loop over layers is unrolled. On an H200 this saves 4 of the 68 us of a 7B layer, but
# none of the 106 us that a layer takes at 64 rows. Compilation takes 1.3 s longer; a 32B of 64 layers starts in 21 s.
# The loop is also unrolled if the linears of a layer have at most UNROLLED_BYTES: such a layer takes less time than
# the overhead of a loop iteration.
UNROLLED_ROWS, UNROLLED_BYTES = 32, 32 << 20
# The most rows of both sets of kernels. The plain layers, which decode more, make more tokens per second only from more
# than twice as many rows on.
MAX_ROWS = fused.MAX_M


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FusedWeights:
    """The weights of a policy as the fused kernels read them; leaves have a leading axis L unless stated otherwise.

    Attributes:
        weights: The base's weight of each linear, by the linear's name.
        divisors: Global scales of each packed linear, in a form of which the kernels can read slices; for portable
            kernels their reciprocals.
        biases: Biases [L, N], for the linears that have one.
        branches: The adapter's branches by linear; empty without an adapter.
        embedding: [V, D].
        first_scale: float32 [D], scale of the first layer's input norm, with training and noise applied.
        scales: float32 [L, D] each: "inside" for the norm before the MLP, and "after" for the norm that follows the
            layer (the next layer's input norm, or the last norm).
        head_norms: float32 [L, C], scales of `q_norm` and `k_norm`, if the model has them.
        kernels: The kernels that read this: "hopper" or "portable".
    """

    weights: dict[str, Any]
    divisors: dict[str, jax.Array]
    biases: dict[str, jax.Array]
    branches: dict[str, PackedLora | portable.PortableLora]
    embedding: jax.Array
    first_scale: jax.Array
    scales: dict[str, jax.Array]
    head_norms: dict[str, jax.Array]
    kernels: str = dataclasses.field(default="hopper", metadata={"static": True})


def fit(
    model: transformer.Transformer, rows: int, *, adapter: bool = True, own_noise: bool = False
) -> str | None:
    """Returns which kernels can decode a model on this device: "hopper", "portable" or None; see `supports`."""
    refusal = functools.partial(supports, model, rows, adapter=adapter, own_noise=own_noise)
    return next((kernels for kernels in OPS if refusal(kernels) is None), None)


def most_rows(
    model: transformer.Transformer, *, adapter: bool = True, own_noise: bool = False
) -> int:
    """Returns the most rows that fused layers decode at a time on this device, or 0 without them; see `fit`."""
    return MAX_ROWS if fit(model, MAX_ROWS, adapter=adapter, own_noise=own_noise) else 0


def supports(
    model: transformer.Transformer,
    rows: int,
    kernels: str = "hopper",
    *,
    adapter: bool = True,
    own_noise: bool = False,
) -> str | None:
    """Returns why a set of kernels cannot decode a model on this device, or None if it can.

    Args:
        model: The policy.
        rows: Number of rows; a step runs one token of each.
        kernels: "hopper" or "portable".
        adapter: Whether `params` (LoRA and trained norms) are used.
        own_noise: Whether each row has its own noise.
    """
    ops, arch = OPS[kernels], model.arch
    if reason := ops.refuses(model):
        return reason
    if model.full or model.group > 1:
        return "needs frozen weights, and all of them on each device"
    if any(model.split_dense()):
        return "needs linears that are all packed; some of this base are kept in 16 bits"
    if reason := decode_attention.supports_heads(arch.num_heads, arch.num_kv_heads, arch.head_size):
        return f"attention {reason}"
    branches = _branches(model, adapter)
    for name in arch.linears():
        rank = branches[name].rank if name in branches else 0
        if reason := ops.refuses_linear(model, name, rows, rank):
            return f"{name} {reason}"
    if own_noise:
        return "needs one norm scale for all rows; here rows have noise of their own (noise.per)"
    return None


def _branches(model: transformer.Transformer, adapter: bool) -> Mapping[str, lora.LinearShape]:
    """Returns the adapter's branches by linear; empty if no adapter is used."""
    return lora.shapes(model.lora, model.arch) if adapter and model.lora is not None else {}


def slow_because(
    model: transformer.Transformer, rows: int, *, own_noise: bool = False
) -> str | None:
    """Returns why sampling is slower on this GPU than it could be, with a remedy; None if it is not slower.

    `rows` is the largest number of rows that are sampled at a time. More than 256 are not reported: there the plain
    layers are faster than the fused ones with 128.
    """
    is_hopper = runtime.unless_hopper() is None
    if not is_hopper and runtime.unless_portable() is not None:
        return None
    requested, rows, arch = rows, min(rows, MAX_ROWS), model.arch
    what = "sampling goes without the fused layers of decoding:"
    # The plain layers use the same attention, so heads without a kernel are slow there too.
    attention = decode_attention.unless_kernel(arch.num_heads, arch.num_kv_heads, arch.head_size)
    if attention is not None:
        return f"{what} attention {attention}: without a kernel for it, expect it to be many times slower"
    if model.full:
        plain = 'a base that trains (model.trainable = "full") is decoded by the plain layers'
        return f"{what} {plain}" if is_hopper else None
    if fit(model, requested, own_noise=own_noise) is not None:
        return None
    if fit(model, rows, own_noise=own_noise) is not None:
        if not MAX_ROWS < requested <= 2 * MAX_ROWS:
            return None
        remedy = f"set max_concurrent to {MAX_ROWS}, which is as fast or faster"
        return f"{what} they take at most {MAX_ROWS} rows, got {requested}: {remedy}"
    kernels, remedy = "hopper" if is_hopper else "portable", "expect about half the speed"
    reason = supports(model, rows, kernels, own_noise=own_noise)
    if model.weights not in ("nvfp4", *DENSE) and is_hopper:
        remedy = (
            'each step unpacks all weights; set model.weights to "nvfp4" for four times the speed'
        )
    elif model.dtype != jnp.bfloat16:
        remedy = 'set model.dtype to "bfloat16"'
    elif own_noise:
        remedy += ', or set noise.per to "rollout"'
    return f"{what} {reason}: {remedy}"


def policy(
    model: transformer.Transformer,
    variables: dict[str, Any],
    *,
    adapter: bool = True,
    kernels: str = "hopper",
) -> FusedWeights:
    """Gathers the arrays that the kernels read: converts adapters and norm scales, and does not copy the weights.

    Arguments are those of `extender`; `kernels` is the result of `fit`, which must not be None.
    """
    frozen, noise = variables["frozen"], flatten_dict(variables.get("noise", {}))
    params = flatten_dict(variables.get("params", {}) if adapter else {})
    # A trained norm replaces the frozen one.
    norms = flatten_dict(frozen) | params

    def scale(*path: str) -> jax.Array:
        value = norms[*path, "scale"].astype(jnp.float32)
        return value + noise[*path, "scale"] if (*path, "scale") in noise else value

    def branch(linear: str, shape: lora.LinearShape) -> PackedLora | portable.PortableLora:
        pairs = []
        for part, (name, _) in enumerate(model.arch.linears()[linear]):
            path = "layers", linear, name
            pairs.append((params[*path, "a"], shape.scaled(params[*path, "b"], part)))
        return ops.pack_lora(pairs, shape.factor, weights[linear])

    ops, stacked, branches = OPS[kernels], frozen["layers"], _branches(model, adapter)
    first = scale("layers", "input_layernorm")
    weights = {name: stacked[name]["weight"] for name in LINEARS}
    scales = {
        "inside": scale("layers", "post_attention_layernorm"),
        "after": jnp.concatenate([first[1:], scale("norm")[None]]),
    }
    packed = {} if model.weights in DENSE else weights
    return FusedWeights(
        weights=weights,
        divisors={name: ops.divisor(weight) for name, weight in packed.items()},
        biases={name: stacked[name]["bias"] for name in LINEARS if "bias" in stacked[name]},
        branches={name: branch(name, shape) for name, shape in branches.items()},
        embedding=frozen["embed_tokens"],
        first_scale=first[0],
        scales=scales,
        head_norms={n: scale("layers", n) for n in ("q_norm", "k_norm") if model.arch.qk_norm},
        kernels=kernels,
    )


def extender(
    model: transformer.Transformer, variables: dict[str, Any], rows: int, *, adapter: bool = True
) -> Callable[[jax.Array, kv_cache.KVCache], tuple[jax.Array, kv_cache.KVCache]]:
    """Returns a function that runs one token of each of B rows, through fused kernels if possible, else the plain model.

    The variables are `frozen` and, if used, `params` and `noise`. With `adapter`, `params` are used.

    Returns:
        extend(tokens int32 [B], cache) -> hidden states [B, D] after the last norm, and the cache.
    """
    own_noise = any(leaf.ndim > 2 for leaf in jax.tree.leaves(variables.get("noise", {})))
    kernels = fit(model, rows, adapter=adapter, own_noise=own_noise)
    if kernels is not None:
        gathered = policy(model, variables, adapter=adapter, kernels=kernels)
        return functools.partial(extend, model, gathered)

    if adapter and model.lora is not None and not model.full:
        variables = transformer.with_prepared_adapter(model, variables, rows)

    def extend_plainly(tokens, cache):
        hidden, cache = model.apply(variables, tokens[:, None], cache=cache, adapter=adapter)
        return hidden[:, 0], cache

    return extend_plainly


def extend(
    model: transformer.Transformer, policy: FusedWeights, tokens: jax.Array, cache: kv_cache.KVCache
) -> tuple[jax.Array, kv_cache.KVCache]:
    """Runs the next token of each row and puts its keys and values into the cache.

    Tokens are int32 [B]. The new keys and values are written at the cache's `ends`, which the result moves on by one.
    Returns hidden states, bfloat16 [B, D] after the last norm, and the extended cache.
    """
    arch, rows = model.arch, len(tokens)
    more = OPS[policy.kernels].padded(rows) - rows
    # Rows that pad M for the kernels have no pages: they write to the scratch page.
    tokens = jnp.pad(tokens, (0, more))
    tables, ends = jnp.pad(cache.tables, ((0, more), (0, 0))), jnp.pad(cache.ends, (0, more))
    angles = layers.rope_tables(ends[:, None], arch)
    angles = [table[:, 0, 0] for table in angles]
    shared, sequence = cache.shared, cache.sequence
    if shared is not None:
        shared = jnp.pad(shared, (0, more))
    if sequence is not None:
        sequence = jnp.pad(sequence, (0, more), constant_values=-1)
    plan = decode_attention.plan(cache.keys, tables, ends, shared, sequence, heads=arch.num_heads)
    options = {"plan": plan, "shared": shared, "sequence": sequence}

    def attend(qkv, head_norms, index, pools):
        heads = qkv.reshape(len(qkv), -1, arch.head_size)
        if arch.qk_norm:
            ends_of = [arch.num_heads, arch.num_heads + arch.num_kv_heads]
            query, key, value = jnp.split(heads, ends_of, axis=1)
            query = layers.rms_norm(query, head_norms["q_norm"], arch.rms_norm_eps)
            key = layers.rms_norm(key, head_norms["k_norm"], arch.rms_norm_eps)
            heads = jnp.concatenate([query, key, value], axis=1)
        mixed, *pools = decode_attention.decode_attention(
            heads, *angles, *pools, index, tables, ends, **options
        )
        return mixed.reshape(len(qkv), arch.query_width), tuple(pools)

    x = policy.embedding[tokens].astype(model.dtype)
    hidden, (keys, values) = step(model, policy, x, attend, (cache.keys, cache.values))
    return hidden[:rows], dataclasses.replace(cache, keys=keys, values=values, ends=cache.ends + 1)


def step(
    model: transformer.Transformer,
    policy: FusedWeights,
    x: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    state: Any,
    *,
    unroll: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Any]:
    """Runs one token of each row through all layers and the last norm.

    Args:
        model: The policy.
        policy: The result of `policy`.
        x: bfloat16 [M, D], embedded tokens; M as `Ops.padded` returns it.
        attend: attend(qkv [M, N], head_norms, index, state) -> output [M, H * C] and the new state, where
            head_norms and index belong to one layer.
        state: The state that `attend` carries from layer to layer: the cache.
        unroll: Layers per iteration of the loop over layers; None for the faster of all and one.
        interpret: Whether to interpret Hopper's kernels, so that they run on a CPU.

    Returns:
        bfloat16 [M, D] after the last norm, and the state.
    """
    ops, arch = OPS[policy.kernels], model.arch
    eps, num_layers = arch.rms_norm_eps, arch.num_layers
    if unroll is None:
        of_layer = sum(leaf.nbytes for leaf in jax.tree.leaves(policy.weights)) // num_layers
        is_unrolled = len(x) <= UNROLLED_ROWS or of_layer <= UNROLLED_BYTES
        unroll = num_layers if is_unrolled else 1

    def run_layer(carry, slices):
        index, stream, state = carry
        arrays = dataclasses.replace(policy, **dict(zip(ops.sliced, slices, strict=True)))
        layer = _Layer(model, policy, arrays, index, counters, unroll == 1, interpret)

        def added(name, x, scale):
            if model.over is None:
                return ops.linear(layer, name, x, residual=(stream, scale))
            return ops.added(stream, _summed(ops.linear(layer, name, x), model.over), scale, index)

        qkv = ops.linear(layer, "qkv", stream, eps=eps)
        mixed, state = attend(qkv, arrays.head_norms, index[0] if index.ndim else index, state)
        stream = added("o", mixed, arrays.scales["inside"])
        hidden = ops.linear(layer, "gate_up", stream, eps=eps, is_swiglu=True)
        stream = added("down", hidden, arrays.scales["after"])
        return (index + 1, stream, state), None

    counters, start = ops.counters(), ops.stream(x, policy.first_scale)
    # The layer number is part of the carry: a scanned array of numbers would cost a four-byte copy per layer.
    carry, sliced = (ops.first_index(), start, state), [getattr(policy, n) for n in ops.sliced]
    # As a function of its own, a layer is lowered once and called by each of the layers of an unrolled loop.
    layer_of = jax.jit(run_layer)
    (_, stream, state), _ = jax.lax.scan(layer_of, carry, sliced, num_layers, unroll=unroll)
    # `stream.scaled` is already rounded, so the result would be rounded twice.
    unit = ops.values(stream).astype(jnp.float32) * stream.unit(eps)[:, None]
    return rounded(unit * policy.scales["after"][-1], x.dtype), state


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A layer of a step, as `Ops.linear` reads it.

    `arrays` are those of the policy, with the ones that `Ops.sliced` names of this layer only. `index` and `counters`
    are as `Ops` makes them. If the layers are a loop, the next layer's weights are not known.
    """

    model: transformer.Transformer
    policy: FusedWeights
    arrays: FusedWeights
    index: jax.Array
    counters: jax.Array | None
    is_in_loop: bool
    interpret: bool


@dataclasses.dataclass(frozen=True)
class Ops:
    """The functions of a decoding step that differ between sets of kernels.

    Attributes:
        refuses: refuses(model) -> why the kernels cannot run this device or the model's dtypes, or None.
        refuses_linear: refuses_linear(model, name, rows, rank) -> the same for a linear; rank 0 means no LoRA.
        padded: padded(rows) -> the number of rows that a step runs.
        pack_lora: pack_lora(pairs of A and B, factor, weight) -> the LoRA matrices of a linear, in all layers.
        divisor: divisor(weight) -> the global scales of a packed linear.
        sliced: The fields of `FusedWeights` that the loop over layers slices. Kernels read the other ones in place.
        first_index: first_index() -> the index of the first layer, int32.
        counters: counters() -> counters that all layers share, or None.
        stream: stream(x [M, D], scale [D]) -> the residual stream.
        linear: linear(layer, name, x, eps=, residual=, is_swiglu=) -> the output, or the new stream.
        added: added(stream, y [M, N], scales, index) -> the new stream, for a y that was summed over devices.
        values: values(stream) -> [M, D].
    """

    refuses: Callable[[transformer.Transformer], str | None]
    refuses_linear: Callable[[transformer.Transformer, str, int, int], str | None]
    padded: Callable[[int], int]
    pack_lora: Callable[..., PackedLora | portable.PortableLora]
    divisor: Callable[[Any], jax.Array]
    sliced: tuple[str, ...]
    first_index: Callable[[], jax.Array]
    counters: Callable[[], jax.Array | None]
    stream: Callable[[jax.Array, jax.Array], Any]
    linear: Callable[..., Any]
    added: Callable[..., Any]
    values: Callable[[Any], jax.Array]


def _hopper_refuses(model: transformer.Transformer) -> str | None:
    if reason := runtime.unless_hopper():
        return reason
    if model.dtype != jnp.bfloat16 or model.weights not in ("nvfp4", "bfloat16"):
        return f"needs activations in bfloat16; got {model.dtype} and weights in {model.weights}"
    return None


def _portable_refuses(model: transformer.Transformer) -> str | None:
    if reason := runtime.unless_portable():
        return reason
    if model.dtype != jnp.bfloat16 or model.weights in DENSE:
        return (
            f"needs activations in bfloat16 and packed weights; got {model.dtype}, {model.weights}"
        )
    if model.weights == "nvfp4" and runtime.unless_hopper() is None:
        return "weights are prepared for Hopper's kernels"
    return portable_layout.unless_format(model.weights)


def _hopper_refuses_linear(
    model: transformer.Transformer, name: str, rows: int, rank: int
) -> str | None:
    options = {"is_packed": model.weights == "nvfp4", "is_swiglu": name == "gate_up"}
    sizes, width = _sizes(model, name), model.arch.input_width(name)
    return fused.supports(rows, sizes, width, rank=rank, **options)


def _portable_refuses_linear(
    model: transformer.Transformer, name: str, rows: int, rank: int
) -> str | None:
    width = model.arch.input_width(name)
    if reason := portable_layout.unless_format(model.weights, width):
        return reason
    return portable.supports(rows, _sizes(model, name), width, rank=rank)


def _hopper_linear(layer: _Layer, name: str, x: Any, **options: Any) -> Any:
    weights, branches = layer.arrays.weights, layer.arrays.branches
    if name != LINEARS[-1]:
        after = LINEARS[LINEARS.index(name) + 1]
        following = weights[after], branches.get(after)
    elif layer.is_in_loop:
        following = None
    else:
        # After the last layer the index is clamped to that layer, which is harmless. Only the shape of the
        # branch is used, so this layer's serves.
        of_next = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer.index + 1, keepdims=False)
        following = jax.tree.map(of_next, layer.policy.weights["qkv"]), branches.get("qkv")
    options |= {"bias": layer.arrays.biases.get(name), "branch": branches.get(name)}
    options |= {"divisor": layer.arrays.divisors.get(name), "following": following}
    options |= {"counters": layer.counters, "interpret": layer.interpret}
    return fused.linear(x, weights[name], **options)


def _portable_linear(layer: _Layer, name: str, x: Any, **options: Any) -> Any:
    arrays, sizes = layer.arrays, _sizes(layer.model, name)
    options |= {"bias": arrays.biases.get(name), "branch": arrays.branches.get(name)}
    options |= {"multiplier": arrays.divisors[name], "layer": layer.index, "sizes": sizes}
    return portable.linear(x, arrays.weights[name], **options)


def _sizes(model: transformer.Transformer, name: str) -> list[int]:
    """Returns the numbers of output features of a linear's parts."""
    return [size for _, size in model.arch.linears()[name]]


# Hopper's kernels read slices of stacked arrays without a copy. For the portable ones XLA would copy each slice, so they
# take the layer's index, int32 [1], and read the stacks in place.
OPS = {
    "hopper": Ops(
        refuses=_hopper_refuses,
        refuses_linear=_hopper_refuses_linear,
        padded=fused.padded,
        pack_lora=lambda pairs, factor, weight: pack_lora(
            pairs,
            factor,
            is_packed=not isinstance(weight, jax.Array),
            is_paired=getattr(weight, "is_paired", False),
        ),
        divisor=lambda weight: fused.sliceable(weight.global_scale),
        sliced=("weights", "divisors", "biases", "branches", "scales", "head_norms"),
        first_index=lambda: jnp.int32(0),
        # All layers share one array of counters. Without the barrier XLA would clear one for each layer.
        counters=lambda: jax.lax.optimization_barrier(jnp.zeros((gated.COUNTERS,), jnp.int32)),
        stream=residual_stream.stream,
        linear=_hopper_linear,
        added=lambda stream, y, scale, _: residual_stream.added(stream, y, scale),
        values=lambda stream: stream.values[: stream.width].T,
    ),
    "portable": Ops(
        refuses=_portable_refuses,
        refuses_linear=_portable_refuses_linear,
        padded=lambda rows: rows,
        pack_lora=lambda pairs, factor, _: portable.pack_lora(pairs, factor),
        divisor=lambda weight: weight.multiplier,
        sliced=("head_norms",),
        first_index=lambda: jnp.zeros((1,), jnp.int32),
        counters=lambda: None,
        stream=portable.stream,
        linear=_portable_linear,
        added=lambda stream, y, scales, index: portable.added(
            stream, y, jax.lax.dynamic_index_in_dim(scales, index[0], keepdims=False)
        ),
        values=lambda stream: stream.values,
    ),
}


def _summed(term: jax.Array, over: str) -> jax.Array:
    """Sums the terms of all devices, and rounds the sum as `linear.finish` does."""
    return jax.lax.psum(term, over).astype(jnp.float32)
