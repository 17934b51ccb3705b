"""Attention of one token per row on Hopper, in Pallas Mosaic GPU.

A unit of work is a row and a key/value head. The live pages of a unit are divided among the `splits`
blocks of a cluster, and those of a block among its warpgroups. Cluster b takes units b, b + clusters,
...; the first pages of the next unit are on their way while one is finished. A warpgroup works on a page
at a time, with keys and values as the operand of 64 rows and the group's queries, padded to 8, as the
other:

    S^T [slots, queries] = K Q^T      scores; a softmax that keeps a running maximum
    O^T [C, queries]    += V^T P^T    rescaled where the maximum rises

    warpgroup    wait K | K Q^T | maximum over slots | P to shared memory | refill K and the last V |
                 wait V | V^T P^T | next page
    slot         a page's keys and values [64, C]; `stages` of them, brought by bulk copies

The warpgroup whose share has a row's last page rotates the new key, puts it and the new value into the
page's tile in shared memory, where it is needed now, and into the cache, where it is needed later.

Maxima, sums and products of all warpgroups then meet: blocks of a cluster read each other's shared
memory (`fused`), or everything is written out in float32 and added up outside. How a row is divided
follows from the number of its live tokens and from shapes, so its result has the same bits whatever the
other rows are.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import runtime

PAGE = 64
# Queries of a group are padded to what `wgmma` takes at least.
GROUP = 8
HEAD_SIZES = (64, 128)
# Largest cluster that every Hopper card can place.
MAX_SPLITS = 8
# What one block may use on compute capability 9.0, less a little for barriers.
SHARED_BYTES = 232448 - 1024
# Clusters, by their size, that an H200 surely has room for at one time with two blocks on each of its 132
# multiprocessors. A cluster stays within one of eight parts of the card, whose multiprocessors are
# even in number and not the same on every card, so that clusters of 8 may leave some out.
ROOM = {1: 256, 2: 128, 4: 64, MAX_SPLITS: 28}


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is cut up.

    Attributes:
      splits: blocks that share a row's pages; 1, 2, 4 or 8.
      warpgroups: of a block; 1 to 4.
      stages: pages on their way to each warpgroup.
      clusters: among which the units are divided, each a row's queries of one key head.
      fused: whether parts are added up in the kernel.
    """

    splits: int
    warpgroups: int
    stages: int
    clusters: int
    fused: bool = True

    def __post_init__(self):
        if self.splits not in ROOM:
            raise ValueError(f"splits must be 1, 2, 4 or {MAX_SPLITS}; got {self.splits}")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups must be 1 to 4; got {self.warpgroups}")
        if self.stages < 1:
            raise ValueError(f"stages must be 1 or more; got {self.stages}")
        if self.clusters < 1:
            raise ValueError(f"clusters must be 1 or more; got {self.clusters}")


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
    if (used := shared_bytes(head_size, config)) > SHARED_BYTES:
        return f"needs {used} bytes of shared memory of {SHARED_BYTES}"
    return None


def pick_config(rows: int, width: int, key_heads: int, head_size: int) -> Config:
    """As many blocks as keep the card busy, and more where rows may be long and so unequal.

    Args:
      rows: B.
      width: W, the pages that a row may have.
      key_heads: J.
      head_size: C.
    """
    units = rows * key_heads
    # As many as all have room at one time; or parts of long rows that are not too long for one block;
    # or no more than one page for each.
    busy = max(splits for splits, room in ROOM.items() if units <= room or splits == 1)
    unequal = 4 if width >= 16 else 2
    splits = min(max(busy, unequal), 2 ** math.ceil(math.log2(width)))
    stages = 384 // head_size
    if units * splits <= 96:  # each block a multiprocessor to itself
        return Config(splits, 2, stages, units)
    return Config(splits, 1, stages, ROOM[splits])


def shared_bytes(head_size: int, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    pages = config.stages * 2 * PAGE * head_size * 2
    inputs = (GROUP + 2) * _row_columns(head_size) * 2 + 2 * 64 * 4
    operands = GROUP * (head_size + PAGE) * 2 + 4 * 256
    part = (head_size + 64) * GROUP * 4
    return config.warpgroups * (pages + inputs + operands + part) + GROUP * head_size * 2


def _row_columns(head_size: int) -> int:
    """Columns of a head's row in shared memory: at least 128, so that a half turned row is a slice."""
    return max(head_size, 128)


def decode_attention(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    config: Config | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `api.decode_attention` says, for a cache in bfloat16.

    `config` is by default that of `pick_config`; `interpret` runs on a CPU and reports data races, with
    parts added up outside.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    _, _, key_heads, _, head_size = keys.shape
    config = config or pick_config(*tables.shape, key_heads, head_size)
    if reason := supports(qkv.shape, qkv.dtype, keys.shape, keys.dtype, config):
        raise NotImplementedError(reason)
    if interpret:
        config = dataclasses.replace(config, fused=False)
    inputs = (qkv, cos, sin, layer.reshape(1), tables, ends)
    out, keys, values = _launch(*inputs, keys, values, config, interpret)
    return (out if config.fused else _merge(*out, qkv), keys, values)


def _merge(maxima: jax.Array, sums: jax.Array, products: jax.Array, qkv: jax.Array) -> jax.Array:
    """Parts [B, J, parts, GROUP], the same, and [B, J, parts, C / 64, 64, GROUP] -> [B, H, C]."""
    with jax.named_scope("merge"):
        weights = jnp.exp2(maxima - maxima.max(2, keepdims=True))
        weights /= jnp.sum(weights * sums, axis=2, keepdims=True)
        rows, key_heads, *_ = weights.shape
        out = jnp.sum(weights[:, :, :, None, None] * products, axis=2)  # [B, J, C / 64, 64, GROUP]
        out = jnp.moveaxis(out, -1, 2)[:, :, : qkv.shape[1] // key_heads - 2]
        return out.reshape(rows, -1, qkv.shape[2]).astype(qkv.dtype)


def _launch(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array,
    tables: jax.Array,
    ends: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    config: Config,
    interpret: bool,
) -> tuple[jax.Array | list[jax.Array], jax.Array, jax.Array]:
    # Half a second that only those pay who come here.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.decode_attention import collectives

    layers, pages, key_heads, _, head_size = keys.shape
    rows, width = tables.shape
    heads = qkv.shape[1] - 2 * key_heads
    group = heads // key_heads
    splits, warpgroups, stages, clusters, fused = dataclasses.astuple(config)
    units = rows * key_heads
    clusters = min(clusters, units)
    chunks, columns = head_size // 64, _row_columns(head_size)
    exponent_scale = head_size**-0.5 * math.log2(math.e)

    of_tile = plgpu.Layout.WGMMA  # slots or columns of a head, by queries or columns of a head
    of_rows, of_columns = of_tile.reduce(1), of_tile.reduce(0)
    tile = (64, GROUP)
    broadcast = lambda a, shape, axis: lax.broadcast_in_dim(a, shape, (axis,))
    iota = lambda shape, layout: plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)

    def kernel(
        qkv_gmem,
        cos_gmem,
        sin_gmem,
        layer_gmem,
        tables_gmem,
        ends_gmem,
        keys_gmem,
        values_gmem,
        *refs,
    ):
        outs, refs = refs[: len(out_type)], refs[len(out_type) :]
        inputs, turns_of, queries, k_smem, v_smem, weights, scratch, *exchange, barriers = refs
        cluster, split = lax.axis_index("cluster"), lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        mine = lambda *refs: (ref.at[warpgroup] for ref in refs)
        inputs, turns_of, queries, k_smem, v_smem, weights, scratch = mine(
            inputs, turns_of, queries, k_smem, v_smem, weights, scratch
        )
        inputs_full, k_full, v_full = barriers
        inputs_full = inputs_full.at[warpgroup]
        first_page = lax.clamp(0, layer_gmem[0], layers - 1) * pages

        # Where things are ----------------------------------------------------------------------
        def place_unit(i):
            """Row and head of this cluster's i-th unit, or where it has none, of some unit."""
            unit = lax.min(cluster + i * clusters, units - 1)
            return lax.div(unit, key_heads), lax.rem(unit, key_heads)

        def share(end):
            """Pages that are live, this warpgroup's first, and how many it has."""
            live = lax.div(end, PAGE) + 1
            first = lax.div(split * live, splits) + warpgroup
            stop = lax.div((split + 1) * live, splits)
            return live, first, lax.div(stop - first + warpgroups - 1, warpgroups)

        def place(i, end, turn):
            """First row of a turn's page among all rows of the cache, or where it has none, of some page."""
            row, head = place_unit(i)
            _, first, _ = share(end)
            at = lax.min(first + turn * warpgroups, width - 1)
            page = lax.clamp(0, tables_gmem[row, at], pages - 1)
            return ((first_page + page) * key_heads + head) * PAGE

        def locate(i):
            """A unit's end, and the places of what `fill` fetches and of one page more."""
            end = lax.clamp(0, ends_gmem[place_unit(i)[0]], width * PAGE - 1)
            # All are asked for before the first is waited for.
            return end, *(place(i, end, turn) for turn in range(stages + 1))

        # Bulk copies ---------------------------------------------------------------------------
        def fetch(turn, at, gmem, smem, full):
            slot = lax.rem(turn, stages)
            plgpu.copy_gmem_to_smem(
                gmem.at[pl.ds(at, PAGE)], smem.at[slot], full.at[warpgroup, slot]
            )

        fetch_keys = lambda turn, at: fetch(turn, at, keys_gmem, k_smem, k_full)
        fetch_values = lambda turn, at: fetch(turn, at, values_gmem, v_smem, v_full)

        def fill(i, end, *places):
            """Starts a unit: what it multiplies with, and its first pages."""
            row, head = place_unit(i)
            for start, length, to in (
                (head * group, group, 0),
                (heads + head, 1, GROUP),
                (heads + key_heads + head, 1, GROUP + 1),
            ):
                plgpu.copy_gmem_to_smem(
                    qkv_gmem.at[row, pl.ds(start, length)],
                    inputs.at[pl.ds(to, length)],
                    inputs_full,
                )
            for copy in range(columns // head_size):
                half = pl.ds(copy * (head_size // 2), head_size // 2)
                plgpu.copy_gmem_to_smem(cos_gmem.at[row], turns_of.at[0, half], inputs_full)
                plgpu.copy_gmem_to_smem(sin_gmem.at[row], turns_of.at[1, half], inputs_full)
            _, _, turns = share(end)
            for turn, at in enumerate(places[:stages]):

                @pl.when(turn < turns)
                def _fetch(turn=turn, at=at):
                    fetch_keys(jnp.int32(turn), at)
                    fetch_values(jnp.int32(turn), at)

        # Queries and the new token -------------------------------------------------------------
        def rotated(read, chunk, layout, spread):
            """Columns 64 * chunk and on of what `read` reads, in float32; `spread` widens a table."""
            x, partner = (
                read((64 * chunk + shift) % columns).astype(jnp.float32)
                for shift in (0, head_size // 2)
            )
            cos, sin = (
                plgpu.load(turns_of.at[i], layout=layout, optimized=False) for i in range(2)
            )
            if head_size == 64:
                sin = jnp.where(iota((64,), layout) < 32, -sin, sin)
            elif chunk == 0:
                sin = -sin
            return (x * spread(cos) + partner * spread(sin)).astype(keys.dtype)

        def read_queries(at):
            ref = inputs.at[pl.ds(0, GROUP), pl.ds(at, 64)].T
            return plgpu.load(ref, layout=of_tile, optimized=False)

        def read_input(which):
            return lambda at: plgpu.load(
                inputs.at[which, pl.ds(at, 64)], layout=of_columns, optimized=False
            )

        def append(slot, smem, gmem, at, new, *, clear):
            """Puts a row into a page's tile and into the cache; what comes after it may become 0."""
            for chunk in range(chunks):
                span = pl.ds(64 * chunk, 64)
                row_of_chunk = new(chunk)
                gmem.at[at + slot, span][...] = row_of_chunk
                old = smem.at[:, span][...]
                slots = iota(old.shape, of_tile)
                rest = jnp.where(slots > slot, jnp.zeros_like(old), old) if clear else old
                new_row = broadcast(row_of_chunk, old.shape, 1)
                smem.at[:, span][...] = jnp.where(slots == slot, new_row, rest)
            plgpu.commit_smem()

        def reduce_rows(values, operation):
            if interpret:
                return {"max": jnp.max, "add": jnp.sum}[operation](values, axis=0)
            return collectives.reduce_rows(values, operation, scratch)

        # Pages ---------------------------------------------------------------------------------
        def attend(i, end, turn, carry):
            maximum, total, products, behind, ahead = carry
            slot = lax.rem(turn, stages)
            keys, values = k_smem.at[slot], v_smem.at[slot]
            live, first, turns = share(end)
            page = first + turn * warpgroups
            is_last = page == live - 1
            further = place(i, end, turn + 1 + stages)

            with jax.named_scope("scores"):
                plgpu.barrier_wait(k_full.at[warpgroup, slot])

                @pl.when(is_last)
                def _append_key():
                    new = lambda chunk: rotated(
                        read_input(GROUP), chunk, of_columns, lambda table: table
                    )
                    at = place(i, end, turn)
                    append(lax.rem(end, PAGE), keys, keys_gmem, at, new, clear=False)

                def product(acc):
                    plgpu.wgmma(acc, keys, queries.T)
                    return acc[...]

                scores = pl.run_scoped(product, plgpu.ACC(tile, jnp.float32))

            with jax.named_scope("softmax"):
                is_live = iota(tile, of_tile) <= end - page * PAGE
                scores = jnp.where(is_live, scores * exponent_scale, -jnp.inf)
                higher = jnp.maximum(maximum, reduce_rows(scores, "max"))
                decay = broadcast(jnp.exp2(maximum - higher), tile, 1)
                exponentials = jnp.exp2(scores - broadcast(higher, tile, 1))
                weights.T[...] = exponentials.astype(weights.dtype)
                plgpu.commit_smem()

            # All warps have read this turn's keys and, before that, the last turn's values.
            pl.when(turn + stages < turns)(lambda: fetch_keys(turn + stages, ahead))
            pl.when((turn > 0) & (turn - 1 + stages < turns))(
                lambda: fetch_values(turn - 1 + stages, behind)
            )

            with jax.named_scope("products"):
                plgpu.barrier_wait(v_full.at[warpgroup, slot])

                @pl.when(is_last)
                def _append_value():
                    new = lambda chunk: read_input(GROUP + 1)(64 * chunk).astype(values.dtype)
                    at = place(i, end, turn)
                    append(lax.rem(end, PAGE), values, values_gmem, at, new, clear=True)

                def product_of_chunks(*accs):
                    for chunk, acc in enumerate(accs):
                        span = pl.ds(64 * chunk, 64)
                        plgpu.wgmma(acc, values.at[:, span].T, weights.T)
                    return [acc[...] for acc in accs]

                accs = [plgpu.ACC(tile, jnp.float32)] * chunks
                added = pl.run_scoped(product_of_chunks, *accs)
                products = tuple(a * decay + b for a, b in zip(products, added, strict=True))
            return higher, total * decay + exponentials, products, ahead, further

        # Parts ---------------------------------------------------------------------------------
        def read_part(parts, part, layout, *at):
            ref = parts.at[part % warpgroups, *at]
            if splits > 1:
                ref = plgpu.cluster_ref(ref, {"split": part // warpgroups})
            return plgpu.load(ref, layout=layout, optimized=False)

        def merge(parts, result, row, head, chunk):
            each = range(splits * warpgroups)
            products = [read_part(parts, part, of_tile, chunk) for part in each]
            maxima, totals = (
                [read_part(parts, part, of_columns, chunks, i) for part in each] for i in (0, 1)
            )
            highest = functools.reduce(jnp.maximum, maxima)
            shares = [jnp.exp2(maximum - highest) for maximum in maxima]
            total = sum(a * b for a, b in zip(shares, totals, strict=True))
            out = sum(
                a * broadcast(share / total, tile, 1)
                for a, share in zip(products, shares, strict=True)
            )
            # The copy of the last unit has left it.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            result.at[chunk].T[...] = out.astype(qkv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                result.at[chunk, pl.ds(0, group)],
                outs[0].at[row, pl.ds(head * group, group), pl.ds(64 * chunk, 64)],
            )

        def finish(row, head, maximum, total, products):
            if not fused:
                part = split * warpgroups + warpgroup
                outs[0][row, head, part] = maximum
                outs[1][row, head, part] = total
                for chunk in range(chunks):
                    outs[2][row, head, part, chunk] = products[chunk]
                return
            parts, result = exchange
            # Nobody reads the last unit's parts any more.
            collectives.wait_for_cluster()
            for chunk in range(chunks):
                parts[warpgroup, chunk] = products[chunk]
            parts[warpgroup, chunks, 0] = maximum
            parts[warpgroup, chunks, 1] = total
            collectives.arrive_at_cluster()
            collectives.wait_for_cluster()
            for chunk in range(chunks):
                pl.when((warpgroup == 0) & (split == chunk % splits))(
                    functools.partial(merge, parts, result, row, head, chunk)
                )
            collectives.arrive_at_cluster()

        # Units ---------------------------------------------------------------------------------
        rounds = lax.div(units - cluster + clusters - 1, clusters)

        def work(i, located):
            end, *places = located
            row, head = place_unit(i)
            following = locate(i + 1)
            with jax.named_scope("queries"):
                plgpu.barrier_wait(inputs_full)
                for chunk in range(chunks):
                    queries.at[:, pl.ds(64 * chunk, 64)].T[...] = rotated(
                        read_queries, chunk, of_rows, lambda table: broadcast(table, tile, 0)
                    )
                plgpu.commit_smem()
            zeros = plgpu.layout_cast(jnp.zeros(tile, jnp.float32), of_tile)
            nothing = plgpu.layout_cast(jnp.full((GROUP,), -jnp.inf, jnp.float32), of_columns)
            _, _, turns = share(end)
            maximum, total, products, *_ = lax.fori_loop(
                0,
                turns,
                functools.partial(attend, i, end),
                (nothing, zeros, (zeros,) * chunks, *places[-2:]),
            )
            # With this all warps have read what the next unit overwrites.
            total = reduce_rows(total, "add")
            pl.when(i + 1 < rounds)(lambda: fill(i + 1, *following))
            with jax.named_scope("merge"):
                finish(row, head, maximum, total, products)
            return following

        if fused:
            collectives.arrive_at_cluster()
        located = locate(jnp.int32(0))
        fill(jnp.int32(0), *located)
        lax.fori_loop(0, rounds, work, located)
        if fused:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # No block may leave while others read what it holds.
            collectives.wait_for_cluster()

    if fused:
        out_type = (jax.ShapeDtypeStruct((rows, heads, head_size), qkv.dtype),)
    else:
        prefix = (rows, key_heads, splits * warpgroups)
        out_type = tuple(
            jax.ShapeDtypeStruct((*prefix, *shape), jnp.float32)
            for shape in ((GROUP,), (GROUP,), (chunks, 64, GROUP))
        )
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    each = lambda shape, dtype, transforms=(): plgpu.SMEM(
        (warpgroups, *shape), dtype, transforms=transforms
    )
    of_pages = each((stages, PAGE, head_size), keys.dtype, swizzled)
    barrier = lambda *shape, arrivals=1: plgpu.Barrier(
        num_arrivals=arrivals, num_barriers=(warpgroups, *shape)
    )
    # Of every warpgroup: products, then a tile whose first two rows are maxima and sums. And a result.
    parts = each((chunks + 1, 64, GROUP), jnp.float32)
    exchange = (parts, plgpu.SMEM((chunks, GROUP, 64), qkv.dtype)) if fused else ()
    in_cluster = fused and splits > 1
    cluster = {"cluster": (splits,), "cluster_names": ("split",)} if in_cluster else {}
    # A half turned row of a short head is then a slice; written once by what makes qkv.
    qkv = jnp.concatenate([qkv] * (columns // head_size), axis=-1)
    # All layers, pages and heads in one axis: bulk copies know five.
    caches = [jax.new_ref(cache.reshape(-1, head_size)) for cache in (keys, values)]
    out = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(clusters,) if in_cluster else (clusters, splits),
        grid_names=("cluster",) if in_cluster else ("cluster", "split"),
        **cluster,
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            each((GROUP + 2, columns), qkv.dtype),
            each((2, 64), jnp.float32),
            each((GROUP, head_size), keys.dtype, swizzled),
            of_pages,
            of_pages,
            each((GROUP, PAGE), keys.dtype, swizzled),
            each((collectives.SCRATCH,), jnp.float32),
            *exchange,
            [barrier(arrivals=3 + 2 * columns // head_size), barrier(stages), barrier(stages)],
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
    )(qkv, cos, sin, layer, tables, ends, *caches)
    keys, values = (jax.freeze(ref).reshape(keys.shape) for ref in caches)
    return out[0] if fused else out, keys, values
