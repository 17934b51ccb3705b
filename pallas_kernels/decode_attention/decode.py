"""Attention of one token per row on Hopper, in Pallas Mosaic GPU.

`plan` lists the pieces of units (a row and a key/value head) that a team attends to. A team is a
warpgroup; the teams of a block share nothing, so one computes while others wait for memory. It takes a
page at a time, with the group's queries, 8 rows that are there eight times over (or 16 that are there four
times), as the operand in registers:

    S [64, slots] = Q K^T      a softmax that keeps a running maximum, within four threads
    O [64, C]    += P V        P goes from registers to registers

    team    wait K | Q K^T | refill K | softmax | wait V | P V | refill V | next page
    slot    a page's keys and values [64, C]; `stages` a team, brought by bulk copies, page after page
            whatever piece they are of

Seven of eight products are copies, or three of four: the tensor cores have the time, and nothing but the new token needs to be
written to shared memory, whose fence would wait for all that a thread has written to device memory.

The team that has a row's last page rotates the new key, puts it and the new value into the
page's tile in shared memory, where it is needed now, and into the cache, where it is needed later.

A unit in one piece is done. Of others every piece leaves maximum, sum and products in device memory, and
the team that finds itself the last of a unit, by an atomic counter, adds them up in the order of pieces. The
counters lie in the plan and are 0 before and after a launch (`runtime.checks_kernels` has that checked). How a row
is cut follows from its own length and from shapes, so its result has the same bits whatever the other
rows are.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.decode_attention import plans
from pallas_kernels.decode_attention.config import Config, pick_config, supports
from pallas_kernels.decode_attention.plans import PAGE


def plan(
    shape: tuple[int, ...], tables: jax.Array, ends: jax.Array, config: Config | None = None
) -> jax.Array:
    """The work of every block, for a cache of the given shape: an operand of `decode_attention`."""
    _, pages, key_heads, _, head_size = shape
    config = config or pick_config(len(tables), key_heads, head_size)
    return plans.make(tables, ends, pages, _cut(tables.shape, shape, config))


def _cut(of_tables: tuple[int, ...], shape: tuple[int, ...], config: Config) -> plans.Cut:
    rows, width = of_tables
    key_heads = shape[2]
    return plans.Cut(
        rows, width, key_heads, config.pages, config.parts, config.blocks * config.teams
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
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.decode_attention`; for a cache in bfloat16.

    Without `plan`, one is made from `tables` and `ends`. `config` defaults to that of `pick_config`. `interpret`
    runs on a CPU and reports data races; parts are then summed outside of the kernel.

    Raises:
      ValueError: a plan for another problem.
      NotImplementedError: the reason `supports` gives.
    """
    _, _, key_heads, _, head_size = keys.shape
    group = qkv.shape[1] // key_heads - 2
    config = config or pick_config(len(tables), key_heads, head_size, group)
    if reason := supports(qkv.shape, qkv.dtype, keys.shape, keys.dtype, config):
        raise NotImplementedError(reason)
    cut = _cut(tables.shape, keys.shape, config)
    if plan is not None and (plan.shape, plan.dtype) != ((cut.size,), jnp.int32):
        raise ValueError(
            f"plan must be int32 [{cut.size}], of these tables; got {plan.dtype} {list(plan.shape)}"
        )
    if plan is None:
        plan = plans.make(tables, ends, keys.shape[1], cut)
    if runtime.checks_kernels():
        qkv = _after_check(qkv, plan, cut)
    # This import takes half a second, so it is made only when needed.
    from pallas_kernels.decode_attention import decode_kernel

    problem = decode_kernel.Problem(config, cut, group, keys.shape, interpret)
    outs, keys, values = decode_kernel.launch(
        qkv, cos, sin, layer.reshape(1), plan, keys, values, problem
    )
    if interpret:
        live = jnp.clip(ends, 0, cut.width * PAGE - 1) // PAGE + 1
        parts = plans.parts_of(live, cut)
        return _merge(*outs[1:], parts, qkv), keys, values
    return outs[0], keys, values


def _after_check(qkv: jax.Array, plan: jax.Array, cut: plans.Cut) -> jax.Array:
    """Returns qkv after checking the plan's counters: see `runtime.checks_kernels`.

    The kernel counts in its plan, which XLA takes to be constant, and resets the counters to zero. If a launch
    failed to do so, the next launch would not find the last part of a unit, and would not write its output.

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

    # XLA would look once before a loop over layers at what it takes to be constant: qkv is another in each.
    qkv, plan = lax.optimization_barrier((qkv, plan))
    counters = plan[: cut.pieces_at]
    jax.debug.callback(check, counters)
    # And the look comes before the launch.
    return lax.optimization_barrier((qkv, counters))[0]


def _merge(products: jax.Array, totals: jax.Array, parts: jax.Array, qkv: jax.Array) -> jax.Array:
    """Parts [B * J, parts, G, C] and [B * J, parts, 2, G], G of `config.group_rows` -> [B, H, C]."""
    rows = len(parts)
    units, most, _, head_size = products.shape
    key_heads = units // rows
    is_there = jnp.arange(most) < jnp.repeat(parts, key_heads)[:, None]
    maxima = jnp.where(is_there[..., None], totals[:, :, 0], -jnp.inf)
    weights = jnp.exp2(maxima - maxima.max(1, keepdims=True))[..., None]
    add = lambda a: jnp.sum(jnp.where(weights > 0, weights * a, 0), axis=1)
    out = add(products) / add(totals[:, :, 1, :, None])  # [B * J, G, C]
    return out[:, : qkv.shape[1] // key_heads - 2].reshape(rows, -1, head_size).astype(qkv.dtype)
