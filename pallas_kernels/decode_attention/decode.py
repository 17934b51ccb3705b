"""Decode attention on Hopper in Pallas Mosaic GPU: checks, the plan and the launch.

A unit is one row and one key/value head; its pages are cut into parts. The plan lists the parts of each warpgroup (see
`plans.py`), and the warpgroup that finishes a unit last adds up its parts. docs/design/kernels.md, "The kernel of
decode attention", describes the phases.
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
    """Makes the plan, an operand of `decode_attention`, as `api.plan` does; int32 [size], see `plans.Split`.

    `shape` is that of the keys. `config` defaults to that of `pick_config`. `group` is H / J, query heads per key head:
    tokens of a sequence form tiles if `supports_sharing` accepts it.
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

    `products` and `totals` are from `decode_kernel.launch`; `parts` is the number of parts of each row, int32 [B].
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
