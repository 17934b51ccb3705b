"""The public functions of decode attention. They check the arguments and choose an implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from pallas_kernels.decode_attention import append, decode, reference
from pallas_kernels.decode_attention import config as configs
from pallas_kernels.portable import attention as portable


class _Reference:
    """Runs `reference.decode_attention`. It supports everything that the API accepts and needs no plan."""

    @staticmethod
    def decode_attention(*arguments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        *arguments, _plan, _shared, _sequence = arguments
        return reference.decode_attention(*arguments)  # it always writes all tokens first

    @staticmethod
    def supports(qkv: jax.Array, keys: jax.Array, tables: jax.Array) -> str | None:
        return None


class _Hopper:
    """Runs `decode.decode_attention` with its default configuration."""

    @staticmethod
    def decode_attention(*arguments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        *arguments, shared, sequence = arguments
        return decode.decode_attention(*arguments, shared=shared, sequence=sequence)

    @staticmethod
    def supports(qkv: jax.Array, keys: jax.Array, tables: jax.Array) -> str | None:
        if reason := runtime.unless_hopper():
            return reason
        key_heads, head_size = keys.shape[2], keys.shape[4]
        group = qkv.shape[1] // key_heads - 2
        config = configs.pick_config(len(tables), key_heads, head_size, group)
        return configs.supports(qkv.shape, qkv.dtype, keys.shape, keys.dtype, config)


class _Portable:
    """Runs `portable.attention.decode_attention`, which needs no plan."""

    supports = staticmethod(portable.supports)

    @staticmethod
    def decode_attention(*arguments: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        *arguments, _plan, _shared, sequence = arguments
        if sequence is not None:
            arguments[3:5] = append.append(*arguments)
        return portable.decode_attention(*arguments, appends=sequence is None)


# In order of preference.
_IMPLEMENTATIONS: dict[str, Any] = {
    "hopper": _Hopper,
    "portable": _Portable,
    "reference": _Reference,
}


def supports_heads(heads: int, key_heads: int, head_size: int) -> str | None:
    """Returns why no kernel supports H query heads and J key/value heads of C channels here, or None if one does.

    Without a kernel, `decode_attention` runs the reference. It gathers all pages of every row, which is many times
    slower.
    """
    if (reason := runtime.unless_hopper()) is None:
        return configs.supports_heads(heads, key_heads, head_size)
    if runtime.unless_portable() is None:
        return portable.supports_heads(heads, key_heads, head_size)
    return reason


def unless_kernel(heads: int, key_heads: int, head_size: int) -> str | None:
    """Returns why `decode_attention` runs the reference for a model's heads in bfloat16, or None if a kernel runs.

    On a Hopper card the portable kernel takes the heads that Hopper's kernel does not support, if it can run there. The
    arguments are as for `supports_heads`.
    """
    reason = supports_heads(heads, key_heads, head_size)
    if reason is None or runtime.unless_portable() is not None:
        return reason
    return portable.supports_heads(heads, key_heads, head_size)


def supports_sharing(heads: int, key_heads: int) -> str | None:
    """Returns why no kernel here reads shared pages once for rows of H and J heads, or None if one does."""
    return runtime.unless_hopper() or configs.supports_sharing(heads, key_heads)


def plan(
    keys: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
    *,
    heads: int,
) -> jax.Array | None:
    """Divides the work of `decode_attention` among warpgroups. All layers of a decoding step share one plan.

    Args:
      keys: as for `decode_attention`, as are the other arrays; of the keys only shape and dtype are used.
      tables: int32 [B, W].
      ends: int32 [B].
      shared: int32 [B] or None.
      sequence: int32 [B] or None.
      heads: H, query heads.

    Returns:
      The plan for `decode_attention`, int32; its layout is private (`plans.Split`). None if the Hopper kernel cannot
      run on this device or with this cache: other implementations need no plan.
    """
    if runtime.unless_hopper() or configs.supports_cache(keys.shape, keys.dtype):
        return None
    of_rows = {"shared": shared, "sequence": sequence}
    return decode.plan(keys.shape, tables, ends, **of_rows, group=heads // keys.shape[2])


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
    plan: jax.Array | None = None,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates a new token's query and key, appends its key and value to the cache, and computes attention.

        out[h] = softmax(q[h] . k[0 ... end] / sqrt(C)) @ v[0 ... end]

    The softmax is computed in float32. Queries and keys are rotated by RoPE (arXiv 2104.09864) in float32 and
    rounded to the cache's dtype. Token s of a row is in slot s % S of page tables[row, s // S]. Several rows may read
    one page (a common prefix), but then none of them may write to it. With implementation "hopper" or "portable", the
    bits of a row's result do not depend on what the other rows hold.

    In a loop that carries them, `keys` and `values` are updated in place. An index outside the tables or the cache is
    clamped to the nearest valid one. So an unused row may have a table of zeros and any end: it writes to page 0,
    which no other row should use, and its result is finite if that page is finite.

    Args:
      qkv: bfloat16 or float32 [B, H + 2 J, C], the query, key and value heads of one token per row, not rotated.
        Query head h uses key head h // (H / J).
      cos: float32 [B, C / 2], cosines of the angles of each row's position; pair c is (c, c + C / 2).
      sin: float32 [B, C / 2], sines of the same angles.
      keys: [L, N, J, S, C], rotated keys: N pages of S slots for each layer, J key/value heads.
      values: [L, N, J, S, C], in the dtype of keys.
      layer: int32 scalar, the layer's index in the cache.
      tables: int32 [B, W], the page table: each row's pages in order.
      ends: int32 [B], each row's number of tokens before the new one, which is the new token's position in the row.
      plan: the result of `plan` for the same tables, ends, `shared` and `sequence`. If it is None, the Hopper
        implementation makes a plan in this call.
      shared: int32 [B], the number of each row's first pages that other rows may share, or None. The Hopper kernel
        reads such pages once for several rows, for heads that `supports_sharing` accepts. If two rows have the same
        number n and the same page at index n - 1 of their tables, all of their first n pages must be equal. The
        order of summation in a row depends on n, not on whether other rows share its pages.
      sequence: int32 [B], or None if every row is a sequence of its own. Adjacent rows with the same number are
        consecutive tokens of one sequence (drafts to verify) and have the same page table. All new keys and values
        are then written before any row attends, and slots after a row's end must be finite. The order of summation in
        a row may depend on the end of the sequence's last token. Rows with a negative number are unused: their
        results are finite but meaningless. `shared` must then be None.
      implementation: "hopper", "portable" or "reference"; None chooses the first of these that supports the problem.

    Returns:
      The attention output [B, H, C] in qkv's dtype, the new keys and the new values.

    Raises:
      ValueError: a dtype or shape is wrong, `shared` and `sequence` are both given, or the implementation is unknown.
      NotImplementedError: the named implementation cannot run this problem.
    """
    if qkv.ndim != 3 or qkv.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"qkv must be [B, H + 2 J, C], float32 or bfloat16; got {qkv.shape}, {qkv.dtype}"
        )
    rows, all_heads, head_size = qkv.shape
    if keys.ndim != 5 or keys.shape[-1] != head_size or not all(keys.shape):
        raise ValueError(
            f"keys must be [L, N, J, S, C = {head_size}], none of them 0; got {keys.shape}"
        )
    if (values.shape, values.dtype) != (keys.shape, keys.dtype):
        raise ValueError(
            f"values must be like keys, {keys.shape} in {keys.dtype}; "
            f"got {values.shape} in {values.dtype}"
        )
    key_heads = keys.shape[2]
    heads = all_heads - 2 * key_heads
    if heads < 1 or heads % key_heads:
        raise ValueError(
            f"qkv must have H + 2 J heads, H a multiple of J = {key_heads}; got {all_heads}"
        )
    if tables.ndim != 2 or not tables.size:
        raise ValueError(f"tables must be [B, W], B and W at least 1; got {tables.shape}")
    for name, array, shape, dtype in (
        ("cos", cos, (rows, head_size // 2), jnp.float32),
        ("sin", sin, (rows, head_size // 2), jnp.float32),
        ("layer", layer, (), jnp.int32),
        ("tables", tables, (rows, tables.shape[1]), jnp.int32),
        ("ends", ends, (rows,), jnp.int32),
        ("shared", ends if shared is None else shared, (rows,), jnp.int32),
        ("sequence", ends if sequence is None else sequence, (rows,), jnp.int32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name} must be {jnp.dtype(dtype)} {list(shape)}; got {array.dtype} {list(array.shape)}"
            )
    if shared is not None and sequence is not None:
        raise ValueError("shared must be None where sequence is given")
    name = _choose(implementation, qkv, keys, tables)
    chosen = _IMPLEMENTATIONS[name].decode_attention
    return chosen(qkv, cos, sin, keys, values, layer, tables, ends, plan, shared, sequence)


def _choose(name: str | None, qkv: jax.Array, keys: jax.Array, tables: jax.Array) -> str:
    if name is None:
        return next(
            name for name, i in _IMPLEMENTATIONS.items() if i.supports(qkv, keys, tables) is None
        )
    if name not in _IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be one of {sorted(_IMPLEMENTATIONS)} or None; got {name!r}"
        )
    if reason := _IMPLEMENTATIONS[name].supports(qkv, keys, tables):
        raise NotImplementedError(f"implementation {name!r}: {reason}")
    return name
