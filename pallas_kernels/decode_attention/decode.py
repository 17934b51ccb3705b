"""Decode attention on Hopper in Pallas Mosaic GPU: checks, the plan and the launch.

**One part.** A unit is one row and one key/value head; its pages are cut into parts (see `plans.py`). The plan lists
the parts of each warpgroup. Warpgroups of a block share no data, so one can compute while others wait for memory. A
warpgroup processes one page at a time. The queries that share the key head are the first `wgmma` operand, in
registers: 8 rows repeated eight times, or 16 rows repeated four times.

    S [64, slots] = Q K^T      then softmax with a running maximum; four threads hold a row
    O [64, C]    += P V        P stays in registers

    warpgroup    wait K | Q K^T | refill K | softmax | wait V | P V | refill V | next page
    slot         the keys and values [64, C] of a page. Each warpgroup has `stages` slots, its pipeline stages. Bulk
                 copies (TMA) fill them page after page, also across the ends of parts.

Seven of eight (or three of four) computed rows are duplicates, but the tensor cores are not the bottleneck. The
repeated rows keep Q and P in registers, so only the new token is written to shared memory. Each such write needs a
fence, which waits for all of a thread's writes to device memory.

**The new token.** The warpgroup with a row's last page rotates the new key. It writes the new key and value into the
page's tile in shared memory, for this step, and into the cache, for later steps.

**Summing parts.** If a unit has one part, its warpgroup writes the result. Otherwise each warpgroup writes the
maximum, the sum and the products of its part to device memory, and increments an atomic counter. The warpgroup that
increments it last adds up the parts, in order. The counters are in the plan, and are 0 before and after a launch
(each launch checks this if `runtime.checks_kernels`). How a row is cut depends only on its own length and on shapes,
so the bits of its result do not depend on other rows.

**Shared pages.** A warpgroup with a part of a tile takes the queries of up to 8 rows, 8 for each. It reads them from
device memory, because shared memory has no space for them beside the pages. The loop over pages is the same: each row
of a `wgmma` operand has its own sums, whatever the others are. The part then counts as a part of each of these rows.

**Sequences.** If rows are consecutive tokens of sequences (drafts to verify), up to 8 tokens of a sequence form a
tile, which holds all pages of the sequence. Each token's end is one slot after that of the token before. The rows of
a tile have no other parts, so the warpgroup that finishes last adds them up together.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.decode_attention import plans
from pallas_kernels.decode_attention.config import (
    SIBLINGS,
    Config,
    pick_config,
    supports,
    supports_sharing,
)


def plan(
    shape: tuple[int, ...],
    tables: jax.Array,
    ends: jax.Array,
    config: Config | None = None,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
    *,
    group: int = SIBLINGS,
) -> jax.Array:
    """Makes the plan, an operand of `decode_attention`: it lists the work of every warpgroup.

    Args:
      shape: [L, N, J, S, C], the shape of the keys.
      tables: int32 [B, W], each row's pages.
      ends: int32 [B], the slot of each row's new token.
      config: the configuration; None for that of `pick_config`.
      shared: int32 [B], as for `api.decode_attention`; None if rows share no pages.
      sequence: int32 [B], as for `api.decode_attention`, or None.
      group: H / J, query heads per key head. Tokens of a sequence form tiles if `supports_sharing` accepts it.

    Returns:
      int32 [size], as described by `plans.Split`.
    """
    config, split = _division(tables.shape, shape, group, config, shared, sequence)
    return plans.make(tables, ends, shape[1], split, shared, sequence)


def _division(
    of_tables: tuple[int, ...],
    shape: tuple[int, ...],
    group: int,
    config: Config | None,
    shared: jax.Array | None,
    sequence: jax.Array | None,
) -> tuple[Config, plans.Split]:
    """Returns how the kernel and the plan divide a problem."""
    rows, width = of_tables
    key_heads, head_size = shape[2], shape[4]
    sequences = sequence is not None and supports_sharing(group * key_heads, key_heads) is None
    # The number of sequences is not known here. This assumes that each has `SIBLINGS` / 2 tokens.
    units = -(-2 * rows // SIBLINGS) if sequences else rows
    config = config or pick_config(units, key_heads, head_size, group)
    return config, plans.Split(
        rows,
        width,
        shape[2],
        config.pages,
        config.parts,
        config.blocks * config.warpgroups,
        SIBLINGS if sequences or shared is not None else 0,
        appends=sequence is None,
        sequences=sequences,
    )


def decode_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    plan: jax.Array | None = None,
    config: Config | None = None,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `api.decode_attention` for queries and a cache in bfloat16.

    `plan` defaults to one made from `tables`, `ends`, `shared` and `sequence`, `config` to that of `pick_config`.
    With `sequence` another kernel (`append_kernel`) first writes the new tokens of all rows, because rows read each
    other's. `interpret` runs on a CPU and reports data races; parts are then summed outside the kernel.

    Raises:
      ValueError: the plan has the wrong shape or dtype for this problem.
      NotImplementedError: the reason that `supports` or `supports_sharing` gives.
    """
    key_heads = keys.shape[2]
    group = qkv.shape[1] // key_heads - 2
    config, split = _division(tables.shape, keys.shape, group, config, shared, sequence)
    if reason := supports(qkv.shape, qkv.dtype, keys.shape, keys.dtype, config):
        raise NotImplementedError(reason)
    heads = group * key_heads
    if shared is not None and (reason := supports_sharing(heads, key_heads)):
        raise NotImplementedError(reason)
    if plan is not None and (plan.shape, plan.dtype) != ((split.size,), jnp.int32):
        raise ValueError(
            f"plan must be int32 [{split.size}], of these tables; got {plan.dtype} {list(plan.shape)}"
        )
    if plan is None:
        plan = plans.make(tables, ends, keys.shape[1], split, shared, sequence)
    if runtime.checks_kernels():
        qkv = _after_check(qkv, plan, split)
    # Imported here because it takes half a second.
    from pallas_kernels.decode_attention import append_kernel, decode_kernel

    layer = layer.reshape(1)
    if not split.appends:
        tokens = qkv, cos, sin, layer, plan
        keys, values = append_kernel.launch(*tokens, keys, values, split, interpret=interpret)
    problem = decode_kernel.Problem(config, split, group, keys.shape, interpret)
    outs, keys, values = decode_kernel.launch(qkv, cos, sin, layer, plan, keys, values, problem)
    if interpret:
        parts = plans.totals_of(ends, split, shared, sequence)
        return _merge(*outs[1:], parts, qkv), keys, values
    return outs[0], keys, values


def _after_check(qkv: jax.Array, plan: jax.Array, split: plans.Split) -> jax.Array:
    """Returns qkv, but only after the plan's counters are checked (see `runtime.checks_kernels`).

    The kernel counts in its plan, which XLA believes to be constant, and resets the counters to 0. If a launch failed
    to reset them, no warpgroup of the next launch would be the last one, so the output would not be written.

    Raises:
      ValueError: a counter is not zero; raised while the program runs.
    """

    def check(counters):
        counters = np.asarray(counters)
        if wrong := np.flatnonzero(counters).tolist():
            raise ValueError(
                f"decode_attention: the counters of a plan must be 0 before a launch; got "
                f"{counters[wrong[0]]} for unit {wrong[0]}, and {len(wrong)} of {len(counters)} not 0"
            )

    # XLA believes the plan to be constant, and would move the check out of a loop over layers. A barrier ties the
    # check to qkv, which differs in each layer.
    qkv, plan = lax.optimization_barrier((qkv, plan))
    counters = plan[: split.pieces_at]
    jax.debug.callback(check, counters)
    # This barrier makes the check run before the launch, which reads qkv.
    return lax.optimization_barrier((qkv, counters))[0]


def _merge(products: jax.Array, totals: jax.Array, parts: jax.Array, qkv: jax.Array) -> jax.Array:
    """Sums the parts of each unit in jnp, for interpreted kernels: returns the output [B, H, C] in qkv's dtype.

    Args:
      products: float32 [B * J, P, G, C], G = `config.group_rows`.
      totals: float32 [B * J, P, 2, G], the maxima (times log2(e)) and sums of exponentials.
      parts: int32 [B], the number of parts of each row.
      qkv: [B, H + 2 J, C]; only its shape and dtype are used.
    """
    rows = len(parts)
    units, most, _, head_size = products.shape
    key_heads = units // rows
    is_there = jnp.arange(most) < jnp.repeat(parts, key_heads)[:, None]
    maxima = jnp.where(is_there[..., None], totals[:, :, 0], -jnp.inf)
    weights = jnp.exp2(maxima - maxima.max(1, keepdims=True))[..., None]
    add = lambda a: jnp.sum(jnp.where(weights > 0, weights * a, 0), axis=1)
    out = add(products) / add(totals[:, :, 1, :, None])  # [B * J, G, C]
    return out[:, : qkv.shape[1] // key_heads - 2].reshape(rows, -1, head_size).astype(qkv.dtype)
