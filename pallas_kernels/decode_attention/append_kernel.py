"""The Hopper kernel that writes all new keys and values into the cache, for rows that read each other's new tokens.

Each block writes the key and the value of one row and one key head.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode_attention import plans
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic import registers

# The layout of half a head's columns. Every warp of a warpgroup holds all of them.
_OF_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def launch(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array,
    plan: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    split: plans.Split,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Writes new tokens to the cache as `append.append` does.

    Arguments are those of `decode_kernel.launch`. The plan must hold the places of new tokens: `split.appends` is
    False. The head size must be a multiple of 16. `interpret` runs the kernel on a CPU.

    Returns:
      The new keys and the new values [L, N, J, S, C].
    """
    # Layers, pages, heads and slots are merged into one axis, as in the attention kernel.
    caches = [jax.new_ref(cache.reshape(-1, keys.shape[-1])) for cache in (keys, values)]
    operands = {"qkv": qkv, "cos": cos, "sin": sin, "layer": layer, "plan": plan}
    mosaic.launch(
        functools.partial(_kernel, shape=keys.shape, split=split),
        operands | {"keys": caches[0], "values": caches[1]},
        {},
        {},
        name="append_sm90",
        interpret=interpret,
        grid=(split.rows, split.key_heads),
        grid_names=("row", "head"),
    )
    return tuple(jax.freeze(ref).reshape(keys.shape) for ref in caches)


def _kernel(refs: types.SimpleNamespace, *, shape: tuple[int, ...], split: plans.Split) -> None:
    layers, pages, key_heads, slots, head_size = shape
    row, head = lax.axis_index("row"), lax.axis_index("head")
    page, slot = (refs.plan[split.places_at + n * split.rows + row] for n in range(2))
    layer = lax.clamp(0, refs.layer[0], layers - 1)
    at = ((layer * pages + page) * key_heads + head) * slots + slot
    half = head_size // 2
    load = lambda ref: plgpu.load(ref, layout=_OF_COLUMNS, optimized=False).astype(jnp.float32)

    def write() -> None:
        first_key = refs.qkv.shape[1] - 2 * key_heads
        key, value = (refs.qkv.at[row, first_key + head + n * key_heads] for n in range(2))
        halves = [pl.ds(0, half), pl.ds(half, half)]
        first, second = (load(key.at[columns]) for columns in halves)
        cos, sin = load(refs.cos.at[row]), load(refs.sin.at[row])
        new_key = first * cos - second * sin, second * cos + first * sin
        new_value = (load(value.at[columns]) for columns in halves)
        for cache, new in ((refs.keys, new_key), (refs.values, new_value)):
            for columns, values in zip(halves, new, strict=True):
                registers.store(values.astype(cache.dtype), cache.at[at, columns])

    pl.when(page < pages)(write)
