"""Attention of one token per row on Hopper, in Pallas Mosaic GPU.

`plan` says which pieces of which units (a row and a key/value head) a team attends to. A team is a
warpgroup; the teams of a block share nothing, so that one computes while others wait for memory. It takes a
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

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.decode_attention import plans
from pallas_kernels.decode_attention.plans import PAGE

# Queries of a group are padded to half the rows that a warp has, or to all of them.
GROUP = 16
# Query heads per key head, by the head's size. With more than eight of size 64 the kernel missed the reference on an
# H100 wherever a piece had several pages, though it meets it when interpreted; those of 128 met it in all cases.
MOST_QUERIES = {64: 8, 128: GROUP}
HEAD_SIZES = tuple(MOST_QUERIES)
# Parts that are read at a time when a unit is added up, by teams: what registers there are for with 8 rows.
BATCH = {1: 16, 2: 16, 3: 8, 4: 8}
# Less than any score, and finite.
NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      pages: of a piece at most, if it is not one of the most parts.
      stages: pages on their way to each team, or there.
      parts: most pieces of a unit, which is a row's queries of one key head.
      blocks: among whose teams the pieces are divided.
      teams: of a block; 1 to 4.
    """

    pages: int
    stages: int
    parts: int
    blocks: int
    teams: int = 1

    def __post_init__(self):
        if self.pages < 1:
            raise ValueError(f"pages must be 1 or more; got {self.pages}")
        if self.stages < 1:
            raise ValueError(f"stages must be 1 or more; got {self.stages}")
        if self.parts < 1:
            raise ValueError(f"parts must be 1 or more; got {self.parts}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")
        if self.teams not in BATCH:
            raise ValueError(f"teams must be 1 to {max(BATCH)}; got {self.teams}")


def supports_heads(heads: int, key_heads: int, head_size: int) -> str | None:
    """Why this kernel cannot attend with a model's heads, or None.

    Args:
      heads: H, of queries.
      key_heads: J.
      head_size: C.
    """
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if (group := heads // key_heads) > (most := MOST_QUERIES[head_size]):
        return f"needs at most {most} query heads per key head of size {head_size}; got {group}"
    return None


def supports_cache(shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why this kernel cannot read a cache, or None."""
    *_, slots, head_size = shape
    if dtype != jnp.bfloat16:
        return f"needs keys and values in bfloat16; got {dtype}"
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if slots != PAGE:
        return f"needs pages of {PAGE} slots; got {slots}"
    return None


def supports(
    qkv_shape: tuple[int, ...],
    dtype: DTypeLike,
    cache_shape: tuple[int, ...],
    cache_dtype: DTypeLike,
    config: Config,
) -> str | None:
    """Why this kernel cannot run a problem with this configuration, or None."""
    layers, pages, key_heads, slots, head_size = cache_shape
    group = qkv_shape[1] // key_heads - 2
    if reason := supports_cache(cache_shape, cache_dtype):
        return reason
    if dtype != jnp.bfloat16:
        return f"needs qkv in bfloat16; got {dtype}"
    if reason := supports_heads(group * key_heads, key_heads, head_size):
        return reason
    if layers * pages * key_heads * slots >= 2**31:
        return f"needs fewer than 2^31 rows of keys; got L * N * J * S of {cache_shape[:-1]}"
    if (used := shared_bytes(group, head_size, config)) > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def pick_config(rows: int, key_heads: int, head_size: int, group: int = 8) -> Config:
    """As many teams as there are registers for, longer pieces where there are many units.

    Configurations for groups of another size differ in stages alone, on which no plan depends.

    Args:
      rows: B.
      key_heads: J.
      head_size: C.
      group: H / J.
    """
    units = rows * key_heads
    # With so few units adding up the parts takes the time, and registers save some of it.
    teams = 2 if units <= 8 else 4 if head_size <= 64 else 3
    # Of 2, 3, 4 and 6 the fastest on an H200 for 1, 8, 16 and 128 rows of 4 key heads; for 64, where 6 is 5 %
    # faster for rows of unlike length and 4 is 4 % faster for others, the latter.
    pages = 2 if units <= 32 else 3 if units <= 96 else 4 if units <= 384 else 6
    stages, parts = max(1, 768 // head_size // teams), -(-64 // pages)
    config = Config(pages, stages, parts, runtime.device().processors, teams)
    while config.stages > 1 and shared_bytes(group, head_size, config) > most_shared_bytes():
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def most_shared_bytes() -> int:
    """Bytes of shared memory that a block may use on this device, less what barriers and alignment take."""
    return runtime.device().shared_bytes - 2048


def shared_bytes(group: int, head_size: int, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    pages = config.stages * 2 * PAGE * head_size * 2
    inputs = 2 * (_input_rows(group) * _row_columns(head_size) * 2 + 2 * 64 * 4)
    return config.teams * (pages + inputs + 4)


def _row_columns(head_size: int) -> int:
    """Columns of a head's row in shared memory: at least 128, so that a half turned row is a slice."""
    return max(head_size, 128)


def _group_rows(group: int) -> int:
    """Rows that a group's queries are padded to."""
    return 8 if group <= 8 else GROUP


def _input_rows(group: int) -> int:
    """Rows of a unit's queries, key and value in shared memory; the first `_group_rows` are read as queries."""
    return max(group + 2, _group_rows(group))


def plan(
    shape: tuple[int, ...], tables: jax.Array, ends: jax.Array, config: Config | None = None
) -> jax.Array:
    """What every block attends to, for a cache of a shape: an operand of `decode_attention`."""
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
    """What `api.decode_attention` says, for a cache in bfloat16.

    `plan` is made from `tables` and `ends` where it is not given, `config` is by default that of
    `pick_config`; `interpret` runs on a CPU and reports data races, with parts added up outside.

    Raises:
      ValueError: a plan of another problem.
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
    outs, keys, values = _launch(
        qkv, cos, sin, layer.reshape(1), plan, keys, values, config, cut, interpret
    )
    if interpret:
        live = jnp.clip(ends, 0, cut.width * PAGE - 1) // PAGE + 1
        parts = plans.parts_of(live, cut)
        return _merge(*outs[1:], parts, qkv), keys, values
    return outs[0], keys, values


def _after_check(qkv: jax.Array, plan: jax.Array, cut: plans.Cut) -> jax.Array:
    """qkv, once the plan's counters have been looked at: see `runtime.checks_kernels`.

    The kernel counts in its plan, which XLA takes to be constant, and leaves zeros again. Had a launch
    not done so, the next would not know the last part of a unit, and not write its output.

    Raises:
      ValueError: inside of the program; a counter is not zero.
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
    """Parts [B * J, parts, G, C] and [B * J, parts, 2, G], G of `_group_rows` -> [B, H, C]."""
    rows = len(parts)
    units, most, _, head_size = products.shape
    key_heads = units // rows
    is_there = jnp.arange(most) < jnp.repeat(parts, key_heads)[:, None]
    maxima = jnp.where(is_there[..., None], totals[:, :, 0], -jnp.inf)
    weights = jnp.exp2(maxima - maxima.max(1, keepdims=True))[..., None]
    add = lambda a: jnp.sum(jnp.where(weights > 0, weights * a, 0), axis=1)
    out = add(products) / add(totals[:, :, 1, :, None])  # [B * J, G, C]
    return out[:, : qkv.shape[1] // key_heads - 2].reshape(rows, -1, head_size).astype(qkv.dtype)


def _launch(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array,
    plan: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    config: Config,
    cut: plans.Cut,
    interpret: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import collectives, launch

    layers, pages, key_heads, _, head_size = keys.shape
    rows = cut.rows
    heads = qkv.shape[1] - 2 * key_heads
    group = heads // key_heads
    stages = config.stages
    most_parts = cut.most_parts
    chunks, columns = head_size // 64, _row_columns(head_size)
    group_rows = _group_rows(group)
    teams, most_batch = config.teams, BATCH[config.teams] * 8 // group_rows
    exponent_scale = head_size**-0.5 * math.log2(math.e)

    of_tile = plgpu.Layout.WGMMA  # queries, by slots or columns of a head
    of_rows, of_columns = of_tile.reduce(1), of_tile.reduce(0)
    broadcast = lambda a, shape, axis: lax.broadcast_in_dim(a, shape, (axis,))
    iota = lambda shape, axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=of_tile)
    full = lambda shape, value, layout: plgpu.layout_cast(
        jnp.full(shape, value, jnp.float32), layout
    )

    def kernel(
        qkv_gmem,
        cos_gmem,
        sin_gmem,
        layer_gmem,
        plan_gmem,
        keys_gmem,
        values_gmem,
        *refs,
    ):
        outs, refs = refs[: len(out_type)], refs[len(out_type) :]
        inputs, turns_of, k_smem, v_smem, flag, *scratch, barriers = refs
        inputs_full, k_full, v_full = barriers
        team = lax.axis_index("team")
        # Teams of a block are far apart: what is left over goes to different blocks.
        number = team * config.blocks + lax.axis_index("block")
        inputs, turns_of, k_smem, v_smem, flag = (
            ref.at[team] for ref in (inputs, turns_of, k_smem, v_smem, flag)
        )

        # What to do ----------------------------------------------------------------------------
        def describe(i):
            """A piece of this team: its fields; past the last, those of some piece."""
            piece = number * cut.rounds + lax.min(i, cut.rounds - 1)
            return tuple(
                plan_gmem[cut.pieces_at + piece * len(plans.FIELDS) + field]
                for field in plans.FIELDS
            )

        def page_at(n):
            """The n-th page of this team; after the last, a negative number."""
            return plan_gmem[cut.pages_at + number * (cut.length + 1) + lax.min(n, cut.length)]

        def place(unit):
            """Row and key head."""
            return lax.div(unit, key_heads), lax.rem(unit, key_heads)

        def cache_row(page):
            """First row of a page among all rows of the cache."""
            return (first_page * key_heads + page) * PAGE

        # Bulk copies ---------------------------------------------------------------------------
        def fetch(gmem, smem, barrier, n, page):
            slot = lax.rem(n, stages)
            rows_of_page = pl.ds(cache_row(page), PAGE)
            plgpu.copy_gmem_to_smem(gmem.at[rows_of_page], smem.at[slot], barrier.at[team, slot])

        fetch_keys = functools.partial(fetch, keys_gmem, k_smem, k_full)
        fetch_values = functools.partial(fetch, values_gmem, v_smem, v_full)

        def fetch_inputs(parity, unit):
            row, head = place(unit)
            to = inputs.at[parity]
            for start, length, at in (
                (head * group, group, 0),
                (heads + head, 1, group),
                (heads + key_heads + head, 1, group + 1),
            ):
                plgpu.copy_gmem_to_smem(
                    qkv_gmem.at[row, pl.ds(start, length)],
                    to.at[pl.ds(at, length)],
                    inputs_full.at[team, parity],
                )
            for copy in range(columns // head_size):
                half = pl.ds(copy * (head_size // 2), head_size // 2)
                for which, table in enumerate((cos_gmem, sin_gmem)):
                    plgpu.copy_gmem_to_smem(
                        table.at[row],
                        turns_of.at[parity, which, half],
                        inputs_full.at[team, parity],
                    )

        # What the interpreter does otherwise ---------------------------------------------------
        def sync():
            if interpret:  # which wants a fence between a read and the bulk copy after it
                plgpu.commit_smem()
            else:
                collectives.sync()

        def load_rows(ref, **options):
            if interpret:
                return jnp.concatenate([ref[...]] * (64 // ref.shape[0]))
            return collectives.load_rows(ref, **options)

        def store_rows(values, ref):
            if interpret:
                ref[...] = values[: ref.shape[0]]
            else:
                collectives.store_rows(values, ref)

        def store_row_values(values, ref):
            if interpret:
                ref[...] = values[:group_rows]
            else:
                collectives.store_row_values(values, ref)

        def operand(a):
            """What `wgmma` takes first."""
            if not interpret:
                return a
            scratch[0].at[team][...] = a
            return scratch[0].at[team]

        # Queries and the new token -------------------------------------------------------------
        def rotated(parity, read, chunk, spread):
            """Columns 64 * chunk and on of what `read` reads, in float32; `spread` widens a table."""
            x, partner = (
                read((64 * chunk + shift) % columns).astype(jnp.float32)
                for shift in (0, head_size // 2)
            )
            cos, sin = (
                plgpu.load(turns_of.at[parity, i], layout=of_columns, optimized=False)
                for i in range(2)
            )
            if head_size == 64:
                column = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=of_columns)
                sin = jnp.where(column < 32, -sin, sin)
            elif chunk == 0:
                sin = -sin
            return (x * spread(cos) + partner * spread(sin)).astype(keys.dtype)

        def read_queries(parity, at):
            return load_rows(inputs.at[parity, pl.ds(0, group_rows), pl.ds(at, 64)])

        def read_input(parity, which, at):
            ref = inputs.at[parity, which, pl.ds(at, 64)]
            return plgpu.load(ref, layout=of_columns, optimized=False)

        def put(new, smem, slot, chunk, *, clear):
            """Puts 64 columns of a row into a page's tile; what comes after it may become 0."""
            if not interpret:
                collectives.put_row(new, smem, slot, chunk, clear=clear)
                return
            span = pl.ds(64 * chunk, 64)
            old = smem.at[:, span][...]
            slots = iota(old.shape, 0)
            rest = jnp.where(slots > slot, jnp.zeros_like(old), old) if clear else old
            smem.at[:, span][...] = jnp.where(slots == slot, broadcast(new, old.shape, 1), rest)

        def append(smem, gmem, slot, page, new, *, clear):
            """Puts a row, 64 columns each, into a page's tile and into the cache."""
            for chunk, columns_of_row in enumerate(new):
                put(columns_of_row, smem, slot, chunk, clear=clear)
            plgpu.commit_smem()
            for chunk, columns_of_row in enumerate(new):
                gmem.at[cache_row(page) + slot, pl.ds(64 * chunk, 64)][...] = columns_of_row

        # Pages ---------------------------------------------------------------------------------
        def attend(parity, slots, home, queries, turn, carry):
            maximum, total, products, n, ahead = carry
            slot = lax.rem(n, stages)
            further = page_at(n + stages + 1)
            new_slot = slots - 1 - turn * PAGE
            # `home` is negative where another piece has the row's last page.
            has_new = (new_slot < PAGE) & (home >= 0)

            with jax.named_scope("scores"):
                plgpu.barrier_wait(k_full.at[team, slot])

                @pl.when(has_new)
                def _append_key():
                    read = functools.partial(read_input, parity, group)
                    new = [rotated(parity, read, c, lambda table: table) for c in range(chunks)]
                    append(k_smem.at[slot], keys_gmem, new_slot, home, new, clear=False)

                def product(acc):
                    for chunk, of_chunk in enumerate(queries):
                        keys_of_page = k_smem.at[slot, :, pl.ds(64 * chunk, 64)]
                        plgpu.wgmma(acc, operand(of_chunk), keys_of_page.T)
                    return acc[...]

                scores = pl.run_scoped(product, plgpu.ACC((64, PAGE), jnp.float32))

            def refill(fetch):
                # All warps have read what is overwritten.
                sync()
                pl.when(ahead >= 0)(lambda: fetch(n + stages, ahead))

            refill(fetch_keys)

            with jax.named_scope("softmax"):
                is_live = iota(scores.shape, 1) <= new_slot
                scores = jnp.where(is_live, scores * exponent_scale, NOTHING)
                higher = jnp.maximum(maximum, jnp.max(scores, axis=1))
                decay = jnp.exp2(maximum - higher)
                exponentials = jnp.exp2(scores - broadcast(higher, scores.shape, 0))
                total = total * decay + jnp.sum(exponentials, axis=1)
                weights = exponentials.astype(values.dtype)
                products = products * broadcast(decay, products.shape, 0)

            with jax.named_scope("products"):
                plgpu.barrier_wait(v_full.at[team, slot])

                @pl.when(has_new)
                def _append_value():
                    new = [
                        read_input(parity, group + 1, 64 * chunk).astype(values.dtype)
                        for chunk in range(chunks)
                    ]
                    append(v_smem.at[slot], values_gmem, new_slot, home, new, clear=True)

                def add_product(acc):
                    plgpu.wgmma(acc, operand(weights), v_smem.at[slot])

                if interpret:
                    acc = plgpu.ACC(products.shape, jnp.float32)
                    products += pl.run_scoped(lambda acc: (add_product(acc), acc[...])[1], acc)
                else:
                    products = pl.run_state(add_product)(plgpu.ACC.init(products))
            refill(fetch_values)
            return higher, total, products, n + 1, further

        # Pieces --------------------------------------------------------------------------------
        def place_out(unit):
            row, head = place(unit)
            return outs[0].at[row, pl.ds(head * group, group)]

        def merge(unit, parts):
            """Adds up a unit's parts, in order, and writes the result."""
            width = head_size // collectives.WARPS

            def add(batch, carry):
                maximum, total, products = carry
                at = [lax.min(batch * most_batch + k, parts - 1) for k in range(most_batch)]
                of_parts = [load_rows(outs[1].at[unit, k], is_quarter=True) for k in at]
                maxima, totals = (
                    [collectives.load_row_values(outs[2].at[unit, k, which]) for k in at]
                    for which in range(2)
                )
                higher = functools.reduce(jnp.maximum, maxima, maximum)
                decay = jnp.exp2(maximum - higher)
                shares = [
                    jnp.where(batch * most_batch + k < parts, jnp.exp2(m - higher), 0.0)
                    for k, m in enumerate(maxima)
                ]
                total = total * decay + sum(a * b for a, b in zip(shares, totals, strict=True))
                products = products * broadcast(decay, products.shape, 0) + sum(
                    a * broadcast(b, a.shape, 0) for a, b in zip(of_parts, shares, strict=True)
                )
                return higher, total, products

            start = (
                full((64,), NOTHING, of_rows),
                full((64,), 0, of_rows),
                full((64, width), 0, of_tile),
            )
            batches = lax.div(parts + most_batch - 1, most_batch)
            _, total, products = lax.fori_loop(0, batches, add, start)
            out = products * broadcast(1 / total, products.shape, 0)
            collectives.store_rows(out.astype(qkv.dtype), place_out(unit), is_quarter=True)

        def leave(unit, part, parts, maximum, total, products):
            """Leaves a part behind; whoever is the last to do so adds them up."""
            store_rows(products, outs[1].at[unit, part])
            store_row_values(maximum, outs[2].at[unit, part, 0])
            store_row_values(total, outs[2].at[unit, part, 1])
            if not interpret:
                collectives.count(plan_gmem.at[unit], parts - 1, flag)
                pl.when(flag[0] != 0)(lambda: merge(unit, parts))

        def work(i, carry):
            piece, following, n, ahead = carry
            unit, part, slots, home = piece
            part, parts = lax.div(part, plans.SHIFT), lax.rem(part, plans.SHIFT)
            after_following = describe(i + 2)
            parity = lax.rem(i, 2)
            with jax.named_scope("queries"):
                plgpu.barrier_wait(inputs_full.at[team, parity])
                read = functools.partial(read_queries, parity)
                spread = lambda table: broadcast(table, (64, 64), 1)
                queries = [rotated(parity, read, chunk, spread) for chunk in range(chunks)]
                # All warps are done with the piece before.
                sync()
                pl.when(i + 1 < count)(lambda: fetch_inputs(1 - parity, following[plans.UNIT]))
            start = (
                full((64,), NOTHING, of_rows),
                full((64,), 0, of_rows),
                full((64, head_size), 0, of_tile),
                n,
                ahead,
            )
            maximum, total, products, n, ahead = lax.fori_loop(
                0,
                lax.div(slots + PAGE - 1, PAGE),
                functools.partial(attend, parity, slots, home, queries),
                start,
            )
            with jax.named_scope("merge"):
                parting = lambda: leave(unit, part, parts, maximum, total, products)
                if interpret:
                    parting()
                else:

                    @pl.when(parts == 1)
                    def _write():
                        out = products * broadcast(1 / total, products.shape, 0)
                        collectives.store_rows(out.astype(qkv.dtype), place_out(unit))

                    if most_parts > 1:
                        pl.when(parts > 1)(parting)
            return following, after_following, n, ahead

        piece, following = describe(jnp.int32(0)), describe(jnp.int32(1))
        first = [page_at(n) for n in range(stages)]
        ahead = page_at(stages)
        first_page = lax.clamp(0, layer_gmem[0], layers - 1) * pages
        count = plan_gmem[cut.counts_at + number]
        pl.when(count > 0)(lambda: fetch_inputs(0, piece[plans.UNIT]))
        for n, page in enumerate(first):
            for fetch_page in (fetch_keys, fetch_values):
                pl.when(page >= 0)(functools.partial(fetch_page, jnp.int32(n), page))

        lax.fori_loop(0, count, work, (piece, following, jnp.int32(0), ahead))

    of_units = (rows * key_heads, most_parts)
    out_type = (
        jax.ShapeDtypeStruct((rows, heads, head_size), qkv.dtype),
        jax.ShapeDtypeStruct((*of_units, group_rows, head_size), jnp.float32),
        jax.ShapeDtypeStruct((*of_units, 2, group_rows), jnp.float32),
    )
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    shared = lambda shape, dtype, transforms=(): plgpu.SMEM(
        (teams, *shape), dtype, transforms=transforms
    )
    of_pages = shared((stages, PAGE, head_size), keys.dtype, swizzled)
    barrier = lambda *shape, arrivals=1: plgpu.Barrier(
        num_arrivals=arrivals, num_barriers=(teams, *shape)
    )
    # A half turned row of a short head is then a slice; written once by what makes qkv.
    qkv = jnp.concatenate([qkv] * (columns // head_size), axis=-1)
    # All layers, pages and heads in one axis: bulk copies know five.
    caches = [jax.new_ref(cache.reshape(-1, head_size)) for cache in (keys, values)]
    outs = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=teams,
        thread_name="team",
        scratch_types=(
            shared((2, _input_rows(group), columns), qkv.dtype),
            shared((2, 2, 64), jnp.float32),
            of_pages,
            of_pages,
            shared((1,), jnp.int32),
            *[shared((64, 64), keys.dtype, swizzled)] * interpret,
            [
                barrier(2, arrivals=3 + 2 * columns // head_size),
                barrier(stages),
                barrier(stages),
            ],
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            reduction_scratch_bytes=0,
        ),
        interpret=launch.INTERPRETED if interpret else None,
        kernel_name="decode_attention_sm90",
    )(qkv, cos, sin, layer, plan, *caches)
    keys, values = (jax.freeze(ref).reshape(keys.shape) for ref in caches)
    return outs, keys, values
