"""The model as Linen modules, which define the names and shapes of the variables. The arithmetic is in `layers.py`.

Of the collections of variables, `params` holds exactly what trains, in float32: the adapter and, with `train_norms`, the
layer norms; or all weights of the layers, if the model is `full`. `frozen` holds everything else. `noise` is optional:
float32 vectors that are added to the norm scales (AQN), for all rows or for each row. `prepared` is optional, too: see
`with_prepared_adapter`. Every leaf under `layers` has a leading axis L, over which the forward pass scans.
"""

import dataclasses
import enum
import functools
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import FORMATS, decode_attention, prepare, rounded
from pallas_kernels.finished_linear import finished_linear, prepare_lora
from qerl_jax.config import DENSE, LoraConfig, Remat, Weights
from qerl_jax.distributed import sharding
from qerl_jax.model import kv_cache, layers, packing
from qerl_jax.model.architecture import LAYER_NORMS, Architecture
from qerl_jax.model.division import Division
from qerl_jax.model.lora import LinearShape
from qerl_jax.model.lora import shapes as lora_shapes

# For each `remat`, the linears whose outputs are saved for the backward pass. It does not need the output of "down".
_SAVED_ACTIVATIONS = {"products": ("qkv", "o", "gate_up"), "mlp": ("qkv", "o"), "layer": ()}

# Linears of a packed base that are dense, in 16 bits: (name, indices of the layers in which they are). If a linear is
# dense in some layers only, it has a packed weight in every layer, so that all layers have the same structure, and
# `frozen["dense_overrides"]` holds its dense weights as a stack. A layer with a dense weight does not read its packed one.
type DenseLinears = tuple[tuple[str, tuple[int, ...]], ...]


class Role(enum.Enum):
    """The use of a module's weights."""

    FROZEN = enum.auto()  # they belong to the base and do not train
    ADAPTED = enum.auto()  # the same, and an adapter in `params` trains beside them
    TRAINED = enum.auto()  # they are in `params` themselves and train


class Norm(nn.Module):
    """RMSNorm to whose scale the `noise` collection may add noise, for all rows or row by row.

    Attributes:
        eps: Epsilon that is added to the mean square.
        dtype: Dtype of a frozen scale.
        role: ADAPTED trains a float32 copy of the frozen scale.
        split: Whether to return the two factors of `layers.split_norm`, for a linear, instead of one array.
    """

    eps: float
    dtype: Any
    role: Role = Role.FROZEN
    split: bool = False

    @nn.compact
    def __call__(self, x, rows=None):
        """Normalizes the last axis of x, [..., D]; it is [B, T, D] if rows have their own noise.

        `rows`, int32 [T], has the row of each token if B is 1 and several rows are packed on the token axis.
        """
        shape = x.shape[-1:]
        if self.role is Role.TRAINED:
            scale = self.param("scale", nn.initializers.ones, shape, jnp.float32)
        else:
            scale = self.variable("frozen", "scale", jnp.ones, shape, self.dtype).value
            scale = scale.astype(jnp.float32)
        if self.role is Role.ADAPTED:
            scale = self.param("scale", lambda _: scale)
        if self.has_variable("noise", "scale"):
            noise = self.get_variable("noise", "scale")
            if noise.ndim == 2:  # [B, D]: each row has its own noise
                noise = noise[:, None] if rows is None else noise.at[rows].get(mode="clip")
            scale = scale + noise
        return (layers.split_norm if self.split else layers.rms_norm)(x, scale, self.eps)


class Adapter(nn.Module):
    """The weights of one LoRA branch, for `layers.branches`. A is initialized as in PEFT, and B with zeros."""

    features: int
    lora: LoraConfig
    rank: int | None = None

    @nn.compact
    def __call__(self, x, rank_mask=None):
        """Returns x [..., K] after dropout (with the rng "dropout"), A float32 [K, rank] and B float32 [rank, features].

        `rank_mask`, bool [rank], marks the ranks that a new branch has; None for all.
        """
        width, rank = x.shape[-1], self.rank or self.lora.rank
        # PEFT's Kaiming-uniform with a = sqrt(5) is uniform within 1/sqrt(K).
        uniform = nn.initializers.uniform(2 * width**-0.5)

        def start(key):
            a = uniform(key, (width, rank), jnp.float32) - width**-0.5
            return a if rank_mask is None else jnp.where(rank_mask, a, 0)

        a = self.param("a", start)
        b = self.param("b", nn.initializers.zeros, (rank, self.features), jnp.float32)
        if self.lora.dropout and self.has_rng("dropout"):
            keep = 1.0 - self.lora.dropout
            dropout_mask = jax.random.bernoulli(self.make_rng("dropout"), keep, x.shape)
            x = jnp.where(dropout_mask, x / keep, 0).astype(x.dtype)
        return x, a, b


class FusedLinear(nn.Module):
    """Linears that read the same input, as one base matmul; each part has its own LoRA branch.

    The products are summed in float32 and rounded once. Sampler and trainer must round in the same places, which
    docs/design/model.md lists.

    Attributes:
        parts: (name, output features) of each part.
        weights: Storage format of a new weight.
        lora: Config of the branches, which exist if the role is ADAPTED.
        role: The role of weight and bias.
        bias: Whether there is a bias.
        shape: Ranks and scalings of the branches; None means that all have the rank and scaling of `lora`.
        stored: The division by which the weight is stored in parts; None if it is stored whole.
        over: The mesh axis over which the input features are divided; None if each device has all of them.
    """

    parts: tuple[tuple[str, int], ...]
    weights: Weights
    lora: LoraConfig | None = None
    role: Role = Role.FROZEN
    bias: bool = False
    shape: LinearShape | None = None
    stored: Division | None = None
    over: str | None = None

    @nn.compact
    def __call__(self, x, residual=None, index=0, dense_override=None):
        """Computes the linear with its LoRA branches, and adds a residual if one is given.

        Args:
            x: [..., K], or the two factors of a norm (`layers.Normed`).
            residual: [..., N], or None.
            index: The layer number.
            dense_override: A stack of dense weights, and this layer's index in it. That weight is used instead of
                the layer's own, unless the index is -1.

        Returns:
            [..., N] in x's dtype.
        """
        x, unit = x if isinstance(x, layers.Normed) else (x, None)
        if self.is_mutable_collection("intermediates"):  # the caller asks; see `run_layer`
            self.sow("intermediates", "input", x if unit is None else (x * unit).astype(x.dtype))
        features = sum(size for _, size in self.parts)
        weight = sharding.gathered(self._base("weight", lambda key: self._random(key, features, x)))
        if self.stored is not None:
            weight = self.stored.whole(self.name, weight)
        branches, bias = [], None
        if self.role is Role.ADAPTED:
            is_prepared = self.has_variable("prepared", "branches")
            prepared = functools.partial(self.get_variable, "prepared", "branches")
            branches = prepared() if is_prepared else self._branches(x, index)
        if self.bias:
            zeros = lambda _: jnp.zeros((features,), _dtype(self.weights))
            bias = rounded(self._base("bias", zeros), x.dtype)
        finished = lambda weight: finished_linear(
            x, weight, branches, unit=unit, bias=bias, residual=residual, over=self.over
        )
        if dense_override is None:
            y = finished(weight)
        else:
            stack, index_in_stack = dense_override
            dense = lambda: finished(
                jax.lax.dynamic_index_in_dim(stack, index_in_stack, keepdims=False)
            )
            y = jax.lax.cond(index_in_stack >= 0, dense, lambda: finished(weight))
        return checkpoint_name(y, self.name)

    def _branches(self, x, index):
        shape = self.shape
        if shape is None:
            adapters = [Adapter(size, self.lora, name=name)(x) for name, size in self.parts]
            return layers.branches(adapters, self.lora.scaling)
        adapters = []
        for part, (name, size) in enumerate(self.parts):
            rank_mask = shape.rank_mask(part, index)
            x_, a, b = Adapter(size, self.lora, shape.rank, name=name)(x, rank_mask)
            adapters.append((x_, a, shape.scaled(b, part, index)))
        return layers.branches(adapters, shape.factor)

    def _base(self, name, init):
        if self.role is Role.TRAINED:
            return self.param(name, lambda key: init(key).astype(jnp.float32))
        return self.variable("frozen", name, lambda: init(self.make_rng("params"))).value

    def _random(self, key, features, x):
        shape = (features, x.shape[-1])
        if self.weights in DENSE:
            return 0.02 * jax.random.normal(key, shape, _dtype(self.weights))
        is_gated = [name for name, _ in self.parts] == ["gate_proj", "up_proj"]
        rank = self.shape.rank if self.shape else 0
        weight = FORMATS[self.weights].random(key, shape)
        return prepare(weight, x.dtype, is_gated=is_gated, rank=rank)


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). The carry is (residual stream, cache).

    Attributes:
        arch: Sizes and traits.
        weights: Storage format of new linears.
        lora: Config of the adapter.
        role: The role of the weights.
        dense: Linears that are not packed, whatever `weights` says.
        stored: See `FusedLinear`.
        over: The mesh axis whose devices each run a part of the layer; None if each device runs all of it.
    """

    arch: Architecture
    weights: Weights
    lora: LoraConfig | None = None
    role: Role = Role.FROZEN
    dense: tuple[str, ...] = ()
    stored: Division | None = None
    over: str | None = None

    @nn.compact
    def __call__(self, carry, index, tables, packed=None, plan=None, dense_overrides=None):
        """Runs the layer, and returns (the new carry, None) for `nn.scan`.

        Args:
            carry: Residual stream [B, T, D], and cache or None.
            index: The layer number.
            tables: The result of `layers.rope_tables`.
            packed: The layout of a single packed row; None for ordinary rows.
            plan: The plan of `decode_attention` for a step of one token per row.
            dense_overrides: By linear, a stack of dense weights, and each layer's index [L] in it or -1.
        """
        x, cache = carry
        dense_overrides = dense_overrides or {}
        overrides = {name: (stack, at[index]) for name, (stack, at) in dense_overrides.items()}
        x, cache = self._attention(x, cache, index, tables, packed, plan, overrides)
        rows = None if packed is None else packed.rows
        normed = self._norm("post_attention_layernorm", split=True)(x, rows)
        gate_up = self._linear("gate_up")(normed, None, index, overrides.get("gate_up"))
        down = self._linear("down")(layers.swiglu(gate_up), x, index, overrides.get("down"))
        return (down, cache), None

    def _attention(self, x, cache, index, tables, packed, plan, overrides):
        arch = self.arch
        rows = None if packed is None else packed.rows
        normed = self._norm("input_layernorm", split=True)(x, rows)
        qkv = self._linear("qkv", arch.qkv_bias)(normed, None, index, overrides.get("qkv"))
        batch, length, _ = qkv.shape
        heads = qkv.reshape(batch, length, -1, arch.head_size)
        query, key, value = jnp.split(
            heads, [arch.num_heads, arch.num_heads + arch.num_kv_heads], axis=2
        )
        if arch.qk_norm:
            query = self._norm("q_norm")(query)
            key = self._norm("k_norm")(key)
            heads = jnp.concatenate([query, key, value], axis=2)
        if cache is not None and length == 1:
            angles = [table[:, 0, 0] for table in tables]
            pages = cache.keys, cache.values, index, cache.tables, cache.ends
            options = {"plan": plan, "shared": cache.shared, "sequence": cache.sequence}
            mixed, keys, values = decode_attention.decode_attention(
                heads[:, 0], *angles, *pages, **options
            )
            cache = dataclasses.replace(cache, keys=keys, values=values)
        else:
            query, key = layers.rotate(query, tables), layers.rotate(key, tables)
            if cache is not None:
                cache = cache.fill(index, key, value)
            if packed is None:
                mixed = layers.attention(query, key, value)
            else:
                mixed = _packed_attention(packed, query, key, value)
        mixed = mixed.reshape(batch, length, arch.query_width)
        return self._linear("o")(mixed, x, index, overrides.get("o")), cache

    def _linear(self, name, bias=False):
        parts, role, shape = self.arch.linears()[name], self.role, None
        if role is Role.ADAPTED:
            shape = lora_shapes(self.lora, self.arch).get(name)
            role = Role.FROZEN if shape is None else role
        weights = "bfloat16" if name in self.dense else self.weights
        over = self.over if name in ("o", "down") else None
        return FusedLinear(
            parts, weights, self.lora, role, bias, shape, self.stored, over, name=name
        )

    def _norm(self, name, split=False):
        role = self.role
        if role is Role.ADAPTED and not (self.lora.train_norms and name in LAYER_NORMS):
            role = Role.FROZEN
        return Norm(self.arch.rms_norm_eps, _dtype(self.weights), role, split, name=name)


class Transformer(nn.Module):
    """A decoder-only transformer up to its last norm; `layers.logits` with `head(frozen)` gives the logits.

    Attributes:
        arch: Sizes and traits.
        weights: Storage format of the linears. Embedding, norms and biases are float32 if this is "float32", else
            bfloat16.
        lora: Config of the adapter, or None for the bare base.
        dtype: Dtype of the activations: bfloat16 or float32.
        full: Whether `params` holds the layers' own weights instead of an adapter; see `trainable`.
        dense_linears: Linears of a packed base that are in bfloat16, and in which layers; has no effect if no linear
            is packed.
        fsdp: Number of devices over which the layers' weights are sharded (FSDP); see `sharding`.
        tensor: Tensor-parallel size: number of devices that share the layers' weights and decode rows together.
            Weights are stored in this many parts (`division`). Layers join them again, except in the model of
            `own_part`.
        over: In the model of `own_part` the mesh axis of the devices; else None.
    """

    arch: Architecture
    weights: Weights = "nvfp4"
    lora: LoraConfig | None = None
    dtype: Any = jnp.bfloat16
    full: bool = False
    dense_linears: DenseLinears = ()
    fsdp: int = 1
    tensor: int = 1
    over: str | None = None

    @property
    def group(self) -> int:
        """The number of devices that share the layers' weights."""
        return self.fsdp * self.tensor

    @property
    def division(self) -> Division:
        """The division of the layers' weights among `tensor` devices."""
        return Division(self.arch, self.tensor, self.weights)

    @property
    def own_part(self) -> Self:
        """The part of this model that each tensor-parallel device runs, with the variables of `Division.own`.

        Its hidden states are those of the whole model, and the same on all devices.
        """
        if self.tensor == 1:
            return self
        return self.clone(arch=self.division.part, tensor=1, over=sharding.GROUP)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        *,
        cache: kv_cache.KVCache | None = None,
        packed: packing.Packing | None = None,
        adapter: bool = True,
        remat: Remat = "none",
    ) -> tuple[jax.Array, kv_cache.KVCache | None]:
        """Runs T tokens of each row.

        Args:
            tokens: int32 [B, T]. Rows may be padded on the right: no real token sees the padding.
            cache: T > 1 fills an empty cache, T == 1 extends it. Both move its `ends` on by T.
            packed: The layout of a single row [1, T] that holds several prompts and their completions; not with a
                cache.
            adapter: Whether to use `params` (LoRA and trained norms); False gives the reference policy.
            remat: What is saved for the backward pass, which recomputes the rest. "layer" saves the input of each
                layer, "mlp" also the outputs of qkv and o, "products" also that of gate_up, and "none" everything.
                Attention of packed rows is always recomputed.

        Returns:
            Hidden states [B, T, D] after the last norm, in `dtype`, and the extended cache (None without one).
        """
        arch, dtype = self.arch, _dtype(self.weights)
        shape = (arch.vocab_size, arch.width)
        embedding = self.variable("frozen", "embed_tokens", self._random, shape, dtype).value
        if not arch.tie_word_embeddings:
            self.variable("frozen", "lm_head", self._random, shape, dtype)

        slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        if packed is not None:
            slots = packed.positions[None]
        if cache is not None:
            slots = slots + cache.ends[:, None]
        tables = layers.rope_tables(slots, arch)

        block = Block
        if remat != "none":
            policy = jax.checkpoint_policies.save_only_these_names(*_SAVED_ACTIVATIONS[remat])
            block = nn.remat(Block, prevent_cse=False, policy=policy)
        extends = cache is not None and tokens.shape[1] == 1
        scan = nn.scan(
            block,
            variable_axes={"params": 0, "frozen": 0, "noise": 0, "prepared": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast, nn.broadcast),
            length=arch.num_layers,
            # Flax's check rejects a kernel that writes to the cache, because the loop then is not invariant. Layers
            # share no variable, so the check is not needed here. Otherwise it stays on: without it the same seed
            # would give another random adapter.
            check_constancy_invariants=not extends,
        )
        dense, partly = self.split_dense()
        stored = self.division if self.tensor > 1 else None
        role = Role.ADAPTED if adapter and self.lora is not None else Role.FROZEN
        role = Role.TRAINED if self.full else role
        options = arch, self.weights, self.lora, role, dense, stored, self.over
        stack = scan(*options, name="layers")
        dense_overrides = self._dense_overrides(partly)
        x = embedding[tokens].astype(self.dtype)
        plan = None
        if extends:
            pages = cache.keys, cache.tables, cache.ends, cache.shared, cache.sequence
            plan = decode_attention.plan(*pages, heads=arch.num_heads)
        carry, indices = (x, cache), jnp.arange(arch.num_layers)
        (x, cache), _ = stack(carry, indices, tables, packed, plan, dense_overrides)
        if cache is not None:
            cache = dataclasses.replace(cache, ends=cache.ends + tokens.shape[1])
        rows = None if packed is None else packed.rows
        return Norm(arch.rms_norm_eps, dtype, name="norm")(x, rows), cache

    def split_dense(self) -> tuple[tuple[str, ...], dict[str, tuple[int, ...]]]:
        """Returns the linears of a packed base that are in 16 bits in all layers, and those that are in some layers.

        The latter are a dict from the linear to the indices of these layers.
        """
        layers_of = {} if self.weights in DENSE else dict(self.dense_linears)
        dense = tuple(name for name, at in layers_of.items() if len(at) == self.arch.num_layers)
        return dense, {name: at for name, at in layers_of.items() if name not in dense}

    def _dense_overrides(
        self, partly: dict[str, tuple[int, ...]]
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns by linear the stacked dense weights of some layers, and each layer's index [L] in them, or -1."""
        if not partly:
            return {}

        def random(name, count):
            features = sum(size for _, size in self.arch.linears()[name])
            return self._random((count, features, self.arch.input_width(name)), jnp.bfloat16)

        start = lambda: {name: random(name, len(at)) for name, at in partly.items()}
        stacks, overrides = self.variable("frozen", "dense_overrides", start).value, {}
        for name, at in partly.items():
            indices = [at.index(i) if i in at else -1 for i in range(self.arch.num_layers)]
            overrides[name] = stacks[name], jnp.array(indices, jnp.int32)
        return overrides

    def _random(self, shape, dtype):
        return 0.02 * jax.random.normal(self.make_rng("params"), shape, dtype)


def head(frozen: dict[str, Any]) -> jax.Array:
    """Returns the matrix [V, D] of a base's LM head: its own, or the embedding if they are tied."""
    return frozen.get("lm_head", frozen["embed_tokens"])


def random_base(model: Transformer, key: jax.Array, places: Any = None) -> dict[str, Any]:
    """Makes a `frozen` tree of random weights on the device. It is packed layer by layer and never exists in 16 bits.

    `places` has the sharding of each array; None puts all on one device.
    """

    if places is None:
        return _packed(model, key)
    return jax.jit(functools.partial(_packed, model), out_shardings=places)(key)


@functools.partial(jax.jit, static_argnums=0)
def _packed(model: Transformer, key: jax.Array) -> dict[str, Any]:
    whole = model.clone(tensor=1).init(key, jnp.zeros((1, 1), jnp.int32))["frozen"]
    layers_ = dict(whole["layers"])
    for linear in model.arch.linears():
        weight = model.division.split(linear, layers_[linear]["weight"], axis=1)
        layers_[linear] = layers_[linear] | {"weight": weight}
    return whole | {"layers": layers_}


def abstract_base(model: Transformer) -> dict[str, Any]:
    """Returns the `frozen` tree with shapes and dtypes (`jax.ShapeDtypeStruct`) instead of arrays."""
    return jax.eval_shape(functools.partial(random_base, model), jax.random.key(0))


@functools.partial(jax.jit, static_argnums=0)
def init_params(model: Transformer, frozen: dict[str, Any], key: jax.Array) -> dict[str, Any]:
    """Makes the `params` of a new adapter: A random, B zero, trained norms equal to those of `frozen`."""
    tokens, how = jnp.zeros((1, 1), jnp.int32), {"rngs": {"params": key}, "mutable": ["params"]}
    return model.apply({"frozen": frozen}, tokens, **how)[1].get("params", {})


def trainable(
    model: Transformer, frozen: dict[str, Any], key: jax.Array
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns `params` (what trains) and `frozen` of a new run, from a base.

    With an adapter they are the result of `init_params` and the whole base. For a `full` model they are float32
    copies of the layers, and the rest of the base (embedding, last norm, head).
    """
    if not model.full:
        return init_params(model, frozen, key), frozen
    layers_ = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), frozen["layers"])
    return {"layers": layers_}, {name: v for name, v in frozen.items() if name != "layers"}


def as_computed(params: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """Returns `params` with the weights and biases of a `full` model rounded to the activations' dtype.

    Every product would round them in the same way; in bfloat16 sampling reads half the bytes. An adapter is returned
    unchanged.
    """

    def rounded(path, leaf):
        return leaf.astype(dtype) if path[-1].key in ("weight", "bias") else leaf

    return jax.tree_util.tree_map_with_path(rounded, params)


def with_prepared_adapter(
    model: Transformer, variables: dict[str, Any], rows: int
) -> dict[str, Any]:
    """Adds the collection `prepared`: LoRA's matrices in the form that products with this many rows read.

    A decoding loop calls this once; otherwise each layer of each step would convert its matrices again. It is for
    sampling only: no gradient flows through `prepared`, and dropout is not applied. `rows` is the number of tokens that
    run at a time.
    """
    stacked, params = variables["frozen"]["layers"], variables["params"]["layers"]
    _, partly = model.split_dense()

    def branches(linear: str, shape: LinearShape):
        pairs = [params[linear][part] for part, _ in model.arch.linears()[linear]]
        matrices = [(pair["a"], shape.scaled(pair["b"], i)) for i, pair in enumerate(pairs)]
        # If a layer may use a dense weight instead, or gathers its weight from several devices, the matrices are
        # prepared for any kind of weight.
        weight = None if linear in partly or model.group > 1 else stacked[linear]["weight"]
        options = {"weight": weight, "dtype": model.dtype, "rows": rows}
        options |= {"scaling": shape.factor, "has_unit": linear in ("qkv", "gate_up")}
        of_layer = functools.partial(prepare_lora, **options)
        return {"branches": jax.vmap(of_layer)(matrices, stacked[linear].get("bias"))}

    shapes = lora_shapes(model.lora, model.arch).items()
    return variables | {"prepared": {"layers": {name: branches(name, s) for name, s in shapes}}}


def run_layer(
    model: Transformer, layer: dict[str, Any], x: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Runs one layer of a bare base by itself, for calibration, on hidden states x [B, T, D] of right-padded rows.

    `layer` is its `frozen` tree, without a leading axis. Returns the hidden states after the layer, and the input
    [B, T, K] of each of its linears, by name.
    """
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    tables = layers.rope_tables(positions, model.arch)
    ((x, _), _), seen = Block(model.arch, model.weights).apply(
        {"frozen": layer}, (x, None), 0, tables, mutable=["intermediates"]
    )
    return x, {name: seen["intermediates"][name]["input"][0] for name in model.arch.linears()}


def noise_shapes(arch: Architecture, final_norm: bool = False) -> dict[str, Any]:
    """Returns the shapes of the `noise` collection: the two norms of each layer and, with `final_norm`, the last."""
    scale = lambda *shape: {"scale": jax.ShapeDtypeStruct(shape, jnp.float32)}
    shapes = {"layers": {name: scale(arch.num_layers, arch.width) for name in LAYER_NORMS}}
    return shapes | ({"norm": scale(arch.width)} if final_norm else {})


# Rows repeat prompts and are padded, so the flat axis is saved for the backward pass, not the rows.
@functools.partial(jax.checkpoint, prevent_cse=False)
def _packed_attention(packed, query, key, value):
    """Computes `layers.attention` for the rows of a flat axis: [1, T, heads, C] each -> [1, T, H * C]."""
    heads = [query.shape[2], key.shape[2], value.shape[2]]
    flat = jnp.concatenate([query, key, value], axis=2)[0]
    mixed = []
    for rows in packed.unfold(flat.reshape(len(flat), -1)):
        parts = rows.reshape(*rows.shape[:2], sum(heads), -1)
        parts = jnp.split(parts, [heads[0], heads[0] + heads[1]], axis=2)
        mixed.append(layers.attention(*parts).reshape(*rows.shape[:2], -1))
    return packed.fold(tuple(mixed))[None]


def _dtype(weights: Weights):
    return jnp.float32 if weights == "float32" else jnp.bfloat16
