"""Attention of one token per row on Hopper, in Pallas Mosaic GPU.

`plan` says which pieces of which units (a row and a key/value head) a team attends to. A team has one
warpgroup for each 64 columns of a head; the teams of a block share nothing, and one computes while
the other waits. A team takes up to `pages` of a piece at a time, with keys and values as
the operand of 64 rows and the group's queries, padded to 8, as the other:

    S^T [slots, queries] = K Q^T      a warpgroup has every second page; its own maximum and sum
    O^T [64, queries]   += V^T P^T    a warpgroup has its columns, of all pages; rescaled to the common maximum

    warpgroup    wait K | K Q^T | maximum, P and sum to shared memory | meet | refill K |
                 wait V | V^T P^T | meet | refill V | next pages
    slot         a page's keys and values [64, C]; `stages` a team, brought by bulk copies, page after page
                 whatever piece they are of

The warpgroup that has a row's last page rotates the new key, puts it and the new value into the
page's tile in shared memory, where it is needed now, and into the cache, where it is needed later.

A unit in one piece is done. Of others every piece leaves maximum, sum and products in device memory, and
the team that finds itself the last of a unit, by an atomic counter, adds them up in the order of pieces. How a row
is cut follows from its own length and from shapes, so its result has the same bits whatever the other
rows are.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.decode_attention import plan as plans
from pallas_kernels.decode_attention.plan import PAGE

# Queries of a group are padded to what `wgmma` takes at least.
GROUP = 8
HEAD_SIZES = (64, 128)
# What one block may use on compute capability 9.0, less what barriers and alignment take.
SHARED_BYTES = 232448 - 2048
# Multiprocessors of an H200. A card with fewer runs some blocks later.
PROCESSORS = 132
# Parts that are read at a time when a unit is added up, by teams: what registers there are for.
BATCH = {1: 16, 2: 4, 3: 4, 4: 2}
# Less than any score, and finite: what is not there has weight 0 beside what is, and no NaN where nothing is.
NOTHING = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      pages: that a team works on at a time, and of a piece at most, if it is not one of the most parts.
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
        if not self.pages <= self.stages <= 32:
            raise ValueError(f"stages must be pages = {self.pages} to 32; got {self.stages}")
        if self.parts < 1:
            raise ValueError(f"parts must be 1 or more; got {self.parts}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")
        if self.teams not in BATCH:
            raise ValueError(f"teams must be 1 to {max(BATCH)}; got {self.teams}")


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
    if dtype != jnp.bfloat16 or cache_dtype != jnp.bfloat16:
        return f"needs qkv, keys and values in bfloat16; got {dtype} and {cache_dtype}"
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if slots != PAGE:
        return f"needs pages of {PAGE} slots; got {slots}"
    if group > GROUP:
        return f"needs at most {GROUP} query heads per key head; got {group}"
    if layers * pages * key_heads * slots >= 2**31:
        return f"needs fewer than 2^31 rows of keys; got L * N * J * S of {cache_shape[:-1]}"
    if (warpgroups := config.teams * head_size // 64) > 4:
        return f"needs {warpgroups} warpgroups of 4"
    if (used := shared_bytes(group, head_size, config)) > SHARED_BYTES:
        return f"needs {used} bytes of shared memory of {SHARED_BYTES}"
    return None


def pick_config(rows: int, width: int, key_heads: int, head_size: int) -> Config:
    """One block on each multiprocessor; shorter pieces where there may be few.

    Args:
      rows: B.
      width: W, the pages that a row may have.
      key_heads: J.
      head_size: C.
    """
    pages = 2 if rows * key_heads <= 64 else 4
    resident = 128 // head_size
    return Config(pages, 6, 64 // pages, PROCESSORS * resident)


def shared_bytes(group: int, head_size: int, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    warpgroups = head_size // 64
    turns = -(-config.pages // warpgroups)
    pages = config.stages * 2 * PAGE * head_size * 2
    inputs = 2 * (_input_rows(group) * _row_columns(head_size) * 2 + 2 * 64 * 4)
    weights = turns * warpgroups * GROUP * PAGE * 2
    own = GROUP * head_size * 2 + GROUP * 64 * 2 + 4 * 64 + 4 + 2 * GROUP * 4
    return config.teams * (pages + inputs + weights + warpgroups * own)


def _row_columns(head_size: int) -> int:
    """Columns of a head's row in shared memory: at least 128, so that a half turned row is a slice."""
    return max(head_size, 128)


def _input_rows(group: int) -> int:
    """Rows of a unit's queries, key and value in shared memory, of which GROUP are read as queries."""
    return max(group + 2, GROUP)


def plan(
    shape: tuple[int, ...], tables: jax.Array, ends: jax.Array, config: Config | None = None
) -> jax.Array:
    """What every block attends to, for a cache of a shape: an operand of `decode_attention`."""
    _, pages, key_heads, _, head_size = shape
    config = config or pick_config(*tables.shape, key_heads, head_size)
    return plans.make(tables, ends, pages, _cut(tables.shape, shape, config))


def _cut(of_tables: tuple[int, ...], shape: tuple[int, ...], config: Config) -> plans.Cut:
    rows, width = of_tables
    _, _, key_heads, _, head_size = shape
    counters = head_size // 64
    return plans.Cut(
        rows, width, key_heads, config.pages, config.parts, config.blocks * config.teams, counters
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
      NotImplementedError: the reason `supports` gives.
    """
    _, _, key_heads, _, head_size = keys.shape
    config = config or pick_config(*tables.shape, key_heads, head_size)
    if reason := supports(qkv.shape, qkv.dtype, keys.shape, keys.dtype, config):
        raise NotImplementedError(reason)
    cut = _cut(tables.shape, keys.shape, config)
    if plan is None:
        plan = plans.make(tables, ends, keys.shape[1], cut)
    outs, keys, values = _launch(
        qkv, cos, sin, layer.reshape(1), plan, keys, values, config, cut, interpret
    )
    if interpret:
        live = jnp.clip(ends, 0, cut.width * PAGE - 1) // PAGE + 1
        parts = plans.parts_of(live, cut)
        return _merge(*outs[1:], parts, qkv), keys, values
    return outs[0], keys, values


def _merge(products: jax.Array, totals: jax.Array, parts: jax.Array, qkv: jax.Array) -> jax.Array:
    """Parts [B * J, parts, C / 64, 64, GROUP] and [B * J, parts, C / 64, 2, GROUP] -> [B, H, C]."""
    rows = len(parts)
    units, most, chunks, _, _ = products.shape
    key_heads = units // rows
    is_there = jnp.arange(most) < jnp.repeat(parts, key_heads)[:, None]
    maxima = jnp.where(is_there[..., None, None], totals[..., 0, :], -jnp.inf)
    weights = jnp.exp2(maxima - maxima.max(1, keepdims=True))
    add = lambda a: jnp.sum(jnp.where(weights > 0, weights * a, 0), axis=1)
    total = add(totals[..., 1, :])
    weights = weights[..., None, :]
    out = add(products) / total[..., None, :]  # [B * J, chunks, 64, GROUP]
    out = jnp.moveaxis(out, -1, 1)[:, : qkv.shape[1] // key_heads - 2]
    return out.reshape(rows, -1, qkv.shape[2]).astype(qkv.dtype)


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

    from pallas_kernels.decode_attention import collectives

    layers, pages, key_heads, _, head_size = keys.shape
    rows = cut.rows
    heads = qkv.shape[1] - 2 * key_heads
    group = heads // key_heads
    at_once, stages = config.pages, config.stages
    most_parts = cut.most_parts
    chunks, columns = head_size // 64, _row_columns(head_size)
    warpgroups, teams = chunks, config.teams
    most_batch = BATCH[teams]
    turns = -(-at_once // warpgroups)
    exponent_scale = head_size**-0.5 * math.log2(math.e)

    of_tile = plgpu.Layout.WGMMA  # slots or columns of a head, by queries or columns of a head
    of_rows, of_columns = of_tile.reduce(1), of_tile.reduce(0)
    tile = (64, GROUP)
    broadcast = lambda a, shape, axis: lax.broadcast_in_dim(a, shape, (axis,))
    iota = lambda shape, layout: plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
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
        inputs, turns_of, queries, k_smem, v_smem, weights, stats, scratch, *rest = refs
        result, flag, barriers = rest
        inputs_full, k_full, v_full, met, v_free = barriers
        team = lax.div(lax.axis_index("warpgroup"), warpgroups)
        warpgroup = lax.rem(lax.axis_index("warpgroup"), warpgroups)
        # Teams of a block are far apart: what is left over goes to different blocks.
        number = team * config.blocks + lax.axis_index("block")
        of_team = lambda *refs: (ref.at[team] for ref in refs)
        inputs, turns_of, k_smem, v_smem, weights, stats = of_team(
            inputs, turns_of, k_smem, v_smem, weights, stats
        )
        queries, scratch, result, flag = of_team(queries, scratch, result, flag)
        met, v_free = of_team(met, v_free)
        queries, scratch, result, flag = (
            ref.at[warpgroup] for ref in (queries, scratch, result, flag)
        )
        brings_keys, brings_values = warpgroup == 0, warpgroup == warpgroups - 1

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

        # Queries and the new token -------------------------------------------------------------
        def rotated(parity, read, chunk, layout, spread):
            """Columns 64 * chunk and on of what `read` reads, in float32; `spread` widens a table."""
            x, partner = (
                read((64 * chunk + shift) % columns).astype(jnp.float32)
                for shift in (0, head_size // 2)
            )
            cos, sin = (
                plgpu.load(turns_of.at[parity, i], layout=layout, optimized=False) for i in range(2)
            )
            if head_size == 64:
                sin = jnp.where(iota((64,), layout) < 32, -sin, sin)
            elif chunk == 0:
                sin = -sin
            return (x * spread(cos) + partner * spread(sin)).astype(keys.dtype)

        def read_queries(parity, at):
            ref = inputs.at[parity, pl.ds(0, GROUP), pl.ds(at, 64)].T
            return plgpu.load(ref, layout=of_tile, optimized=False)

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
            slots = iota(old.shape, of_tile)
            rest = jnp.where(slots > slot, jnp.zeros_like(old), old) if clear else old
            smem.at[:, span][...] = jnp.where(slots == slot, broadcast(new, old.shape, 1), rest)

        def append(smem, gmem, slot, page, new, *, clear):
            """Puts chunks of a row into a page's tile and into the cache."""
            for chunk, columns_of_row in new:
                put(columns_of_row, smem, slot, chunk, clear=clear)
            plgpu.commit_smem()
            for chunk, columns_of_row in new:
                gmem.at[cache_row(page) + slot, pl.ds(64 * chunk, 64)][...] = columns_of_row

        def reduce_rows(values, operation):
            if interpret:
                return {"max": jnp.max, "add": jnp.sum}[operation](values, axis=0)
            return collectives.reduce_rows(values, operation, scratch)

        # Pages ---------------------------------------------------------------------------------
        def attend(i, piece, following, step, carry):
            maximum, total, products, n, ahead, _ = carry
            _, part, slots, home = piece
            part, parts = lax.div(part, plans.SHIFT), lax.rem(part, plans.SHIFT)
            parity = lax.rem(i, 2)
            first = step * at_once
            live = lax.min(lax.div(slots + PAGE - 1, PAGE) - first, at_once)
            stop = lax.min(slots, (first + at_once) * PAGE)
            new_slot = lax.rem(slots - 1, PAGE)
            last = lax.div(slots - 1, PAGE) - first
            has_new = (part == parts - 1) & (last < at_once)
            # Where there is no page, one that is there.
            slot_of = lambda j: lax.rem(n + jnp.where(j < live, j, 0), stages)
            last_slot = lax.rem(n + last, stages)

            def wait(barrier):
                for j in range(at_once):
                    pl.when(j < live)(
                        lambda j=j: plgpu.barrier_wait(barrier.at[team, lax.rem(n + j, stages)])
                    )

            with jax.named_scope("scores"):
                wait(k_full)

                @pl.when(has_new & (lax.rem(last, warpgroups) == warpgroup))
                def _append_key():
                    read = functools.partial(read_input, parity, group)
                    new = [
                        (chunk, rotated(parity, read, chunk, of_columns, lambda table: table))
                        for chunk in range(chunks)
                    ]
                    append(k_smem.at[last_slot], keys_gmem, new_slot, home, new, clear=False)

                def product(*accs):
                    for own, acc in enumerate(accs):
                        j = own * warpgroups + warpgroup
                        plgpu.wgmma(acc, k_smem.at[slot_of(j)], queries.T)
                    return [acc[...] for acc in accs]

                scores = pl.run_scoped(product, *[plgpu.ACC(tile, jnp.float32)] * turns)

            with jax.named_scope("softmax"):
                for own in range(turns):
                    before = (first + own * warpgroups + warpgroup) * PAGE
                    is_live = iota(tile, of_tile) < stop - before
                    scores[own] = jnp.where(is_live, scores[own] * exponent_scale, NOTHING)
                highest = reduce_rows(functools.reduce(jnp.maximum, scores), "max")
                exponentials = [jnp.exp2(s - broadcast(highest, tile, 1)) for s in scores]
                for own, of_page in enumerate(exponentials):
                    to = weights.at[own * warpgroups + warpgroup]
                    to.T[...] = of_page.astype(weights.dtype)
                stats.at[warpgroup, 0][...] = highest
                plgpu.commit_smem()
                plgpu.barrier_arrive(met)
                plgpu.barrier_wait(met)

            # What takes its time to come is asked for here: the next fence waits for it.
            further = tuple(page_at(n + live + stages + j) for j in range(at_once))
            after_following = describe(i + 2)

            def refill(fetch):
                for j, page in enumerate(ahead):
                    pl.when((j < live) & (page >= 0))(
                        lambda j=j, page=page: fetch(n + stages + j, page)
                    )

            # All have read these keys, and are done with the piece before.
            pl.when(brings_keys)(lambda: refill(fetch_keys))
            pl.when(brings_values & (step == 0) & (i + 1 < count))(
                lambda: fetch_inputs(1 - parity, following[plans.UNIT])
            )

            with jax.named_scope("products"):

                def load_stats(which):
                    return [
                        plgpu.load(stats.at[g, which], layout=of_columns, optimized=False)
                        for g in range(warpgroups)
                    ]

                maxima = load_stats(0)
                higher = functools.reduce(jnp.maximum, maxima, maximum)
                decay = jnp.exp2(maximum - higher)
                shares = [jnp.exp2(m - higher) for m in maxima]
                wait(v_full)

                @pl.when(has_new)
                def _append_value():
                    new = read_input(parity, group + 1, 64 * warpgroup).astype(values.dtype)
                    tile_of_page = v_smem.at[last_slot]
                    new = [(warpgroup, new)]
                    append(tile_of_page, values_gmem, new_slot, home, new, clear=True)

                def product_of_pages(*accs):
                    for j in range(turns * warpgroups):
                        columns_of_page = v_smem.at[slot_of(j), :, pl.ds(64 * warpgroup, 64)]
                        plgpu.wgmma(accs[j % warpgroups], columns_of_page.T, weights.at[j].T)
                    # While that goes on.
                    stats.at[warpgroup, 1][...] = reduce_rows(sum(exponentials), "add")
                    return [acc[...] for acc in accs]

                added = pl.run_scoped(
                    product_of_pages, *[plgpu.ACC(tile, jnp.float32)] * warpgroups
                )
                products = products * broadcast(decay, tile, 1) + sum(
                    a * broadcast(share, tile, 1) for a, share in zip(added, shares, strict=True)
                )
                # Then all have read these values, and what was multiplied with them.
                plgpu.barrier_arrive(v_free)
                plgpu.barrier_wait(v_free)
                pl.when(brings_values)(lambda: refill(fetch_values))
                totals = load_stats(1)
                total = total * decay + sum(a * b for a, b in zip(shares, totals, strict=True))
            return higher, total, products, n + live, further, after_following

        # Pieces --------------------------------------------------------------------------------
        def write(unit, out):
            row, head = place(unit)
            # The copy of the last unit has left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            result.T[...] = out.astype(qkv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                result.at[pl.ds(0, group)],
                outs[0].at[row, pl.ds(head * group, group), pl.ds(64 * warpgroup, 64)],
            )

        def merge(unit, parts):
            """Adds up a unit's parts, in order."""

            def add(batch, carry):
                maximum, total, products = carry
                at = [lax.min(batch * most_batch + k, parts - 1) for k in range(most_batch)]
                load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
                of_parts = [load(outs[1].at[unit, k, warpgroup], of_tile) for k in at]
                maxima, totals = (
                    [load(outs[2].at[unit, k, warpgroup, which], of_columns) for k in at]
                    for which in range(2)
                )
                higher = functools.reduce(jnp.maximum, maxima, maximum)
                decay = jnp.exp2(maximum - higher)
                shares = [
                    jnp.where(batch * most_batch + k < parts, jnp.exp2(m - higher), 0.0)
                    for k, m in enumerate(maxima)
                ]
                total = total * decay + sum(a * b for a, b in zip(shares, totals, strict=True))
                products = products * broadcast(decay, tile, 1) + sum(
                    a * broadcast(b, tile, 1) for a, b in zip(of_parts, shares, strict=True)
                )
                return higher, total, products

            start = (
                full((GROUP,), NOTHING, of_columns),
                full((GROUP,), 0, of_columns),
                full(tile, 0, of_tile),
            )
            _, total, products = lax.fori_loop(
                0, lax.div(parts + most_batch - 1, most_batch), add, start
            )
            return products * broadcast(1 / total, tile, 1)

        def leave(unit, part, parts, maximum, total, products):
            """Leaves a part behind; whoever is the last to do so adds them up."""
            outs[1].at[unit, part, warpgroup][...] = products
            outs[2].at[unit, part, warpgroup, 0][...] = maximum
            outs[2].at[unit, part, warpgroup, 1][...] = total
            if interpret:
                return
            collectives.count(plan_gmem.at[unit * chunks + warpgroup], parts - 1, flag)
            pl.when(flag[0] != 0)(lambda: write(unit, merge(unit, parts)))

        def work(i, carry):
            piece, following, n, ahead = carry
            unit, part, slots, _ = piece
            part, parts = lax.div(part, plans.SHIFT), lax.rem(part, plans.SHIFT)
            parity = lax.rem(i, 2)
            with jax.named_scope("queries"):
                plgpu.barrier_wait(inputs_full.at[team, parity])
                read = functools.partial(read_queries, parity)
                for chunk in range(chunks):
                    queries.at[:, pl.ds(64 * chunk, 64)].T[...] = rotated(
                        parity, read, chunk, of_rows, lambda table: broadcast(table, tile, 0)
                    )
                plgpu.commit_smem()
            start = (
                full((GROUP,), NOTHING, of_columns),
                full((GROUP,), 0, of_columns),
                full(tile, 0, of_tile),
                n,
                ahead,
                following,
            )
            maximum, total, products, n, ahead, after_following = lax.fori_loop(
                0,
                lax.div(slots + PAGE * at_once - 1, PAGE * at_once),
                functools.partial(attend, i, piece, following),
                start,
            )

            with jax.named_scope("merge"):
                if interpret:
                    leave(unit, part, parts, maximum, total, products)
                else:
                    done = lambda: write(unit, products * broadcast(1 / total, tile, 1))
                    pl.when(parts == 1)(done)
                    if most_parts > 1:
                        pl.when(parts > 1)(
                            lambda: leave(unit, part, parts, maximum, total, products)
                        )
            return following, after_following, n, ahead

        piece, following = describe(jnp.int32(0)), describe(jnp.int32(1))
        first, ahead = (
            tuple(page_at(start + j) for j in range(length))
            for start, length in ((0, stages), (stages, at_once))
        )
        first_page = lax.clamp(0, layer_gmem[0], layers - 1) * pages
        count = plan_gmem[cut.counts_at + number]

        pl.when(brings_values & (count > 0))(lambda: fetch_inputs(0, piece[plans.UNIT]))
        for n, page in enumerate(first):
            for brings, fetch_page in ((brings_keys, fetch_keys), (brings_values, fetch_values)):
                pl.when(brings & (page >= 0))(
                    lambda n=n, page=page, fetch_page=fetch_page: fetch_page(jnp.int32(n), page)
                )
        lax.fori_loop(0, count, work, (piece, following, jnp.int32(0), ahead))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    of_units = (rows * key_heads, most_parts, chunks)
    out_type = (
        jax.ShapeDtypeStruct((rows, heads, head_size), qkv.dtype),
        jax.ShapeDtypeStruct((*of_units, *tile), jnp.float32),
        jax.ShapeDtypeStruct((*of_units, 2, GROUP), jnp.float32),
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
        num_threads=teams * warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            shared((2, _input_rows(group), columns), qkv.dtype),
            shared((2, 2, 64), jnp.float32),
            shared((warpgroups, GROUP, head_size), keys.dtype, swizzled),
            of_pages,
            of_pages,
            shared((turns * warpgroups, GROUP, PAGE), keys.dtype, swizzled),
            shared((warpgroups, 2, GROUP), jnp.float32),
            shared((warpgroups, collectives.SCRATCH), jnp.float32),
            shared((warpgroups, GROUP, 64), qkv.dtype),
            shared((warpgroups, 1), jnp.int32),
            [
                barrier(2, arrivals=3 + 2 * columns // head_size),
                barrier(stages),
                barrier(stages),
                barrier(arrivals=warpgroups),
                barrier(arrivals=warpgroups),
            ],
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            approx_math=True,
            # `collectives` brings its own.
            reduction_scratch_bytes=0,
        ),
        interpret=runtime.interpret_params() if interpret else None,
        kernel_name="decode_attention_sm90",
    )(qkv, cos, sin, layer, plan, *caches)
    keys, values = (jax.freeze(ref).reshape(keys.shape) for ref in caches)
    return outs, keys, values
