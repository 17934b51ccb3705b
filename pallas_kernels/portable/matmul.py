"""Products with packed weights in Triton: a fused split-K kernel for few rows, an unpacked copy and cuBLAS for many.

    few rows   y = sum over parts of K of x W^T     `product` returns partial sums; the caller adds them up
    many rows  y = x @ unpacked(W)^T                unpacking takes little time compared with the product

Forward products leave out `global_scale`; `nvfp4_matmul` applies it. `backward` includes it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.portable import launch, layout, tuning
from pallas_kernels.portable.layout import CHUNK, PortableWeight
from pallas_kernels.portable.tuning import Config

MAX_M = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """The partial sums of `product`. The sum over their first axis, times `back` if there is one, is the product.

    Attributes:
      partials: float32 [parts, M, N'] of x W^T, with N' = N rounded up to a multiple of 64.
      down: float32 [parts, M, ranks] of x A^T, with its own number of parts; or None.
      back: float32 [M], powers of two by which rows of x were divided for float16; None for bfloat16.
    """

    partials: jax.Array
    down: jax.Array | None
    back: jax.Array | None


def supports(m: int, n: int, k: int, config: Config) -> str | None:
    """Returns why the kernel for few rows cannot run x [M, K] @ W [N, K]^T with this configuration, or None."""
    if not 1 <= m <= MAX_M:
        return f"needs 1 <= M <= {MAX_M}; got M = {m}"
    if layout.whole(n) % config.block_n:
        return f"needs N of whole blocks of {config.block_n} rows; got N = {n}"
    if -(-k // CHUNK) % config.units:
        return f"needs K of whole rounds of {config.units} times {CHUNK} columns; got K = {k}"
    return None


def product(
    x: jax.Array,
    w: PortableWeight,
    *,
    layer: jax.Array | None = None,
    a: jax.Array | None = None,
    config: Config | None = None,
) -> Sums:
    """Computes partial sums (split-K) of x W^T, and of x A^T in the same launch.

    Args:
      x: bfloat16 [M, K], M at most 128.
      w: a weight, or a stack [L, ...]. A stack is read in place, because a slice of it would be a copy.
      layer: int32 [1], index into the stack; None for a single weight.
      a: bfloat16 [ranks, K], or [L, ranks, K] for a stack; ranks must be a multiple of 16. None without LoRA.
      config: the launch configuration; None for that of `tuning.pick_config`.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    m, (n, k) = len(x), w.shape
    config = config or tuning.pick_config(m, n, k)
    if reason := supports(m, n, k, config):
        raise NotImplementedError(reason)
    rows, ranks = w.words.shape[-2], 0 if a is None else a.shape[-2]
    block_m = tuning.block_m(m, config)
    block_r = 32 if ranks % 32 == 0 else 16
    rank_split = tuning.rank_split(k) if ranks else 1
    back = None
    if runtime.tensor_core_type() == "float16":
        unit = _unit(x)
        # Exact, because bfloat16 has the exponents of float32.
        x, back = (x.astype(jnp.float32) * unit).astype(x.dtype), 1 / unit[:, 0]
    # Absent operands get a placeholder that the kernel does not read.
    operands = {
        "layer": jnp.zeros((1,), jnp.int32) if layer is None else layer,
        "x": x,
        "words": w.words,
        "scales": w.scales,
        "a": x if a is None else a,
    }
    results = {
        "partials": jax.ShapeDtypeStruct((config.split, m, rows), jnp.float32),
        "down": jax.ShapeDtypeStruct((rank_split, m, max(ranks, 1)), jnp.float32),
    }
    partials, down = launch.call(
        "matmul_kernels.product",
        operands,
        results,
        (rows // config.block_n * config.split + ranks // block_r * rank_split, -(-m // block_m)),
        warps=config.warps,
        stages=config.stages,
        M=m,
        N=rows,
        K=k,
        RANKS=ranks,
        BLOCK_M=block_m,
        BLOCK_N=config.block_n,
        BLOCK_R=block_r,
        UNITS=config.units,
        SPLIT=config.split,
        RANK_SPLIT=rank_split,
        STAGES=config.stages,
        FORMAT=w.format,
    )
    return Sums(partials, down if ranks else None, back)


def unpacked(w: PortableWeight, config: Config | None = None) -> jax.Array:
    """Decodes a weight to [N, K] in the dtype of the tensor cores: the weights times `global_scale`."""
    n, k = w.shape
    chunks, rows, _ = w.words.shape
    config = config or tuning.UNPACK
    kind = jnp.dtype(runtime.tensor_core_type())
    return launch.call(
        "matmul_kernels.unpack",
        {"words": w.words, "scales": w.scales},
        {"out": jax.ShapeDtypeStruct((n, k), kind)},
        (chunks, rows // config.block_n),
        warps=config.warps,
        stages=config.stages,
        N=n,
        K=k,
        ROWS=rows,
        BLOCK_N=config.block_n,
        FORMAT=w.format,
    )[0]


def unless_fit(dtype: DTypeLike) -> str | None:
    """Returns why the portable kernels cannot multiply x of this dtype here, or None if they can."""
    if reason := runtime.unless_portable():
        return reason
    return None if dtype == jnp.bfloat16 else f"needs x in bfloat16; got {dtype}"


def few_rows(x: jax.Array, w: PortableWeight) -> jax.Array:
    """Computes x [M, K] @ unpacked(W)^T as float32 [M, N], with the fused kernel. M is at most 128."""
    sums = product(x, w)
    y = jnp.sum(sums.partials, axis=0)[:, : w.shape[0]]
    return y if sums.back is None else y * sums.back[:, None]


def many_rows(x: jax.Array, w: PortableWeight) -> jax.Array:
    """Computes x [M, K] @ unpacked(W)^T as [M, N], with cuBLAS.

    The result is bfloat16, or float32 where the tensor cores need float16.
    """
    return _dot(x, unpacked(w), contract=1)


def backward(dy: jax.Array, w: PortableWeight) -> jax.Array:
    """Computes dy [M, N] @ W as [M, K] in dy's dtype, with `global_scale` applied."""
    if w.global_scale.shape[-1] == 1:
        dx = _dot(dy, unpacked(w), contract=0)
        return (dx.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
    # The sum is over rows with different global scales, so the multiplier must be applied before it.
    scaled = (dy.astype(jnp.float32) * w.multiplier).astype(dy.dtype)
    return _dot(scaled, unpacked(w), contract=0).astype(dy.dtype)


def _dot(x: jax.Array, weight: jax.Array, *, contract: int) -> jax.Array:
    if weight.dtype == x.dtype:
        return jax.lax.dot_general(x, weight, (((1,), (contract,)), ((), ())))
    unit = _unit(x)
    scaled = (x.astype(jnp.float32) * unit).astype(weight.dtype)
    product = jax.lax.dot_general(
        scaled,
        weight,
        (((1,), (contract,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return product / unit


def _unit(x: jax.Array) -> jax.Array:
    """Returns powers of two [M, 1] that scale the largest value of each row of x into [1, 2).

    They are needed because float16 ends at 65504.
    """
    largest = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=1, keepdims=True)
    return jnp.exp2(-jnp.floor(jnp.log2(jnp.where(largest > 0, largest, 1))))
