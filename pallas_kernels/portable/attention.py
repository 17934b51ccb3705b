"""Decode attention over a paged cache in Triton: checks and launches. `attention_kernels.py` has the kernels."""

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.portable import launch

# The query heads of a key head are the rows of `tl.dot`'s left operand, which needs at least so many rows.
_LEAST_GROUP = 16
# The most parts (splits) of a row. The second kernel reads all of them at once.
_MOST_PIECES = 64


def supports_heads(heads: int, key_heads: int, head_size: int, slots: int = 64) -> str | None:
    """Returns why the kernels do not support H and J heads of C channels with pages of `slots` slots here, or None."""
    if head_size not in (32, 64, 128, 256):
        return f"needs heads of size 32, 64, 128 or 256; got {head_size}"
    if heads // key_heads > 64:
        return f"needs at most 64 query heads to a key head; got {heads // key_heads}"
    # Bytes for a page of keys and values, the queries, and their probabilities, in 16 bits.
    filled, card = _filled(heads // key_heads), runtime.device()
    needed = 2 * (2 * slots * head_size + filled * (slots + head_size))
    if filled == 64 and card.compute_capability.startswith(("9.", "10.")):
        # There, Triton's products of 64 rows read operands in other layouts, so some operands are stored twice.
        needed *= 2
    if needed > (offered := card.shared_bytes):
        return f"needs {needed} bytes of shared memory of {offered} for pages of {slots} slots of size {head_size}"
    return None


def _filled(group: int) -> int:
    """Rounds the number of query heads per key head up to a power of two, at least 16."""
    return max(_LEAST_GROUP, 1 << (group - 1).bit_length())


def supports(qkv: jax.Array, keys: jax.Array, tables: jax.Array) -> str | None:
    """Returns why the kernels cannot run a problem of these shapes and dtypes here, or None if they can."""
    if reason := runtime.unless_portable():
        return reason
    _, _, key_heads, slots, head_size = keys.shape
    heads = qkv.shape[1] - 2 * key_heads
    if qkv.dtype != jnp.bfloat16 or keys.dtype != jnp.bfloat16:
        return f"needs queries and cache in bfloat16; got {qkv.dtype} and {keys.dtype}"
    if slots not in (16, 32, 64, 128):
        return f"needs pages of 16, 32, 64 or 128 slots; got {slots}"
    return supports_heads(heads, key_heads, head_size, slots)


def pages_of_a_piece(rows: int, key_heads: int, width: int) -> int:
    """Returns the number of pages of a part, so that there are about eight programs per multiprocessor.

    A row of up to `width` pages has at most 64 parts. A program processes one part of one row and key head.
    """
    wanted = max(1, 8 * runtime.device().processors // (rows * key_heads))
    pieces = min(width, wanted, _MOST_PIECES)
    return -(-width // pieces)


def decode_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    *,
    appends: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `decode_attention.api.decode_attention`, which describes the arguments.

    If `appends` is False, the caches already hold the new tokens, and are not written to.
    """
    rows, all_heads, size = qkv.shape
    layers, pool, key_heads, slots, _ = keys.shape
    width = tables.shape[1]
    group = all_heads // key_heads - 2
    pages = pages_of_a_piece(rows, key_heads, width)
    pieces = -(-width // pages)
    sizes = {"KEY_HEADS": key_heads, "GROUP": group, "SIZE": size, "SLOTS": slots, "WIDTH": width}
    sizes |= {"PAGES": pages, "PIECES": pieces}
    products, weights, keys, values = launch.call(
        "attention_kernels.attend",
        {
            "layer": jnp.reshape(layer, (1,)),
            "qkv": qkv,
            "cos": cos,
            "sin": sin,
            "keys": keys,
            "values": values,
            "tables": tables,
            "ends": ends,
        },
        {
            "products": jax.ShapeDtypeStruct((rows, key_heads, pieces, group, size), jnp.float32),
            "weights": jax.ShapeDtypeStruct((rows, key_heads, pieces, 2, group), jnp.float32),
            "new_keys": jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            "new_values": jax.ShapeDtypeStruct(values.shape, values.dtype),
        },
        (rows, key_heads, pieces),
        warps=4,
        stages=2,
        aliases={"new_keys": "keys", "new_values": "values"},
        LAYERS=layers,
        POOL=pool,
        GROUP_FILLED=_filled(group),
        APPENDS=appends,
        **sizes,
    )
    out = launch.call(
        "attention_kernels.combine",
        {"ends": ends, "products": products, "weights": weights},
        {"out": jax.ShapeDtypeStruct((rows, key_heads * group, size), qkv.dtype)},
        (rows, key_heads * group),
        warps=4,
        stages=1,
        has_tensor_cores=False,
        PIECES_FILLED=1 << (pieces - 1).bit_length(),
        **sizes,
    )[0]
    return out, keys, values
