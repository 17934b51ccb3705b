"""The Hopper decode attention kernel, which `decode.py` describes. Each phase is a method of `_Warpgroup`."""

import dataclasses
import functools
import math
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.decode_attention import config as configs
from pallas_kernels.decode_attention import plans
from pallas_kernels.decode_attention.config import Config
from pallas_kernels.decode_attention.plans import PAGE
from pallas_kernels.mosaic import collectives, gathered, registers
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic.ring import Ring

# The score of a masked slot: lower than any real score, but finite, so that differences of scores are never NaN.
NOTHING = -1e30
# The register layout of [queries, slots] and [queries, head columns], and those of one value per row or per column.
_OF_TILE = plgpu.Layout.WGMMA
_OF_ROWS, _OF_COLUMNS = _OF_TILE.reduce(1), _OF_TILE.reduce(0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a launch.

    Attributes:
      config: numbers of blocks, warpgroups and pipeline stages.
      split: how the work is divided among warpgroups.
      group: query heads per key head, H / J.
      cache: [L, N, J, S, C], the shape of keys and of values.
      interpret: whether this runs on a CPU.
    """

    config: Config
    split: plans.Split
    group: int
    cache: tuple[int, ...]
    interpret: bool

    @property
    def key_heads(self) -> int:
        """J, key/value heads."""
        return self.split.key_heads

    @property
    def heads(self) -> int:
        """H, query heads."""
        return self.group * self.key_heads

    @property
    def head_size(self) -> int:
        """C, channels per head."""
        return self.cache[-1]

    @property
    def chunks(self) -> int:
        """C / 64: a head is processed in chunks of 64 columns."""
        return self.head_size // 64

    @property
    def columns(self) -> int:
        """Columns of a head's row in shared memory."""
        return configs.row_columns(self.head_size)

    @property
    def group_rows(self) -> int:
        """The number of rows to which a group's queries are padded."""
        return configs.group_rows(self.group)

    @property
    def most_batch(self) -> int:
        """Number of parts that are loaded at once when the parts of a unit are summed."""
        return configs.BATCH[self.config.warpgroups] * 8 // self.group_rows


def launch(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    layer: jax.Array,
    plan: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    problem: Problem,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    """Launches the kernel. Arguments are those of `decode.decode_attention`, but `layer` is int32 [1].

    Returns:
      Three values. The first is a tuple: the output [B, H, C], products of parts float32 [B * J, P, G, C], and maxima
      and sums of parts float32 [B * J, P, 2, G], with P = `split.most_parts` and G = `group_rows`. The others are the
      new keys and the new values.
    """
    config, split, warpgroups = problem.config, problem.split, problem.config.warpgroups
    head_size, columns = problem.head_size, problem.columns

    def shared(shape: tuple[int, ...], dtype: DTypeLike, transforms: tuple = ()) -> plgpu.SMEM:
        return plgpu.SMEM((warpgroups, *shape), dtype, transforms=transforms)

    def barriers(count: int, arrivals: int = 1) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=(warpgroups, count))

    units = (split.rows * split.key_heads, split.most_parts)
    of_pages = shared((config.stages, PAGE, head_size), keys.dtype, mosaic.SWIZZLED)
    # A head of 64 is stored twice, so that the row shifted by half a head is a slice of shared memory. XLA fuses this
    # into the operation that computes qkv. Tokens of sequences need no copy: they are read from device memory.
    if not split.sequences:
        qkv = jnp.concatenate([qkv] * (columns // head_size), axis=-1)
    # Layers, pages, heads and slots are merged into one axis, because bulk copies take at most five axes.
    caches = [jax.new_ref(cache.reshape(-1, head_size)) for cache in (keys, values)]
    results = mosaic.launch(
        functools.partial(_kernel, problem=problem),
        {
            "qkv": qkv,
            "cos": cos,
            "sin": sin,
            "layer": layer,
            "plan": plan,
            "keys": caches[0],
            "values": caches[1],
        },
        {
            "out": jax.ShapeDtypeStruct((split.rows, problem.heads, head_size), qkv.dtype),
            "products": jax.ShapeDtypeStruct((*units, problem.group_rows, head_size), jnp.float32),
            "totals": jax.ShapeDtypeStruct((*units, 2, problem.group_rows), jnp.float32),
        },
        {
            "inputs": shared((2, configs.input_rows(problem.group), columns), qkv.dtype),
            "turns": shared((2, 2, 64), jnp.float32),
            "key_slots": of_pages,
            "value_slots": of_pages,
            "flags": shared((max(1, split.siblings),), jnp.int32),
            "operand": shared((64, 64), keys.dtype, mosaic.SWIZZLED) if problem.interpret else None,
            "inputs_full": barriers(2, arrivals=3 + 2 * columns // head_size),
            "keys_full": barriers(config.stages),
            "values_full": barriers(config.stages),
        },
        name="decode_attention_sm90",
        interpret=problem.interpret,
        options={"approx_math": True, "reduction_scratch_bytes": 0},
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
    )
    keys, values = (jax.freeze(ref).reshape(problem.cache) for ref in caches)
    return tuple(results.values()), keys, values


def _kernel(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    warpgroup, config = lax.axis_index("warpgroup"), problem.config
    # Consecutive warpgroups of the plan are in different blocks, so that the remainder of the work is spread over
    # blocks.
    agenda = _Agenda(refs.plan, warpgroup * config.blocks + lax.axis_index("block"), problem.split)
    start = agenda.piece(jnp.int32(0)), agenda.piece(jnp.int32(1))
    pages = [agenda.page(n) for n in range(config.stages + 1)]
    layers, pages_of_layer, *_ = problem.cache
    first_page = lax.clamp(0, refs.layer[0], layers - 1) * pages_of_layer
    per_warpgroup = ("inputs", "turns", "key_slots", "value_slots", "flags", "operand")
    of_warpgroup = {
        name: ref.at[warpgroup]
        for name in per_warpgroup
        if (ref := getattr(refs, name)) is not None
    }
    refs = types.SimpleNamespace(**vars(refs) | of_warpgroup)
    _Warpgroup(problem, refs, agenda, warpgroup, first_page).run(*start, pages)


class _Piece(NamedTuple):
    """The fields of a part; `plans.FIELDS` describes them."""

    unit: jax.Array
    part: jax.Array
    slots: jax.Array
    home: jax.Array


@dataclasses.dataclass(frozen=True)
class _Agenda:
    """Reads one warpgroup's work from the plan.

    Attributes:
      plan: int32 [cut.size], from `plans.make`.
      number: the warpgroup's index among the warpgroups of all blocks.
      split: the layout of the plan.
    """

    plan: jax.Ref
    number: jax.Array
    split: plans.Split

    def piece(self, i: jax.Array) -> _Piece:
        """Returns the i-th part of this warpgroup. After the last part the result is meaningless."""
        at = self.number * self.split.rounds + lax.min(i, self.split.rounds - 1)
        fields = plans.FIELDS
        return _Piece(*(self.plan[self.split.pieces_at + at * len(fields) + f] for f in fields))

    def page(self, n: jax.Array | int) -> jax.Array:
        """Returns the n-th page of this warpgroup as page * J + head, or -1 after the last."""
        at, last = self.split.pages_at, self.split.length
        return self.plan[at + self.number * (last + 1) + lax.min(n, last)]

    def count(self) -> jax.Array:
        """Returns the number of parts of this warpgroup."""
        return self.plan[self.split.counts_at + self.number]

    def members(self, tile: jax.Array) -> jax.Ref:
        """Returns the rows of a tile, a list of members for `gathered`."""
        siblings = self.split.siblings
        return self.plan.at[pl.ds(self.split.tiles_at + tile * siblings, siblings)]

    def totals(self) -> jax.Ref:
        """Returns the number of parts of each row's units, int32 [B]."""
        return self.plan.at[pl.ds(self.split.totals_at, self.split.rows)]

    def is_tile(self, unit: jax.Array) -> jax.Array:
        """Returns whether a part with this unit belongs to a tile of rows that share pages (not of a sequence)."""
        return unit >= self.split.units


class _Softmax(NamedTuple):
    """A running (online) softmax over the pages read so far. Its rows are queries.

    Attributes:
      maximum: float32 [64], the largest score so far, times log2(e).
      total: float32 [64], the sum of exponentials relative to `maximum`.
      products: float32 [64, C], the sum of the same exponentials times the values.
    """

    maximum: jax.Array
    total: jax.Array
    products: jax.Array

    @classmethod
    def start(cls, columns: int) -> "_Softmax":
        """Returns the state before the first page."""
        return cls(
            _full((64,), NOTHING, _OF_ROWS),
            _full((64,), 0, _OF_ROWS),
            _full((64, columns), 0, _OF_TILE),
        )

    def result(self) -> jax.Array:
        """Returns the attention output, float32 [64, C]."""
        return self.products * _broadcast(1 / self.total, self.products.shape, 0)


@dataclasses.dataclass(frozen=True)
class _Warpgroup:
    """The program of one warpgroup.

    Attributes:
      problem: static parameters.
      refs: operands, results and scratch of `launch`: the barriers of all warpgroups, the other scratch of this one.
      agenda: the warpgroup's work.
      number: the warpgroup's index in its block.
      first_page: index of the layer's first page among the pages of all layers.
    """

    problem: Problem
    refs: types.SimpleNamespace
    agenda: _Agenda
    number: jax.Array
    first_page: jax.Array

    def run(self, piece: _Piece, following: _Piece, pages: list[jax.Array]) -> None:
        """Attends to all parts, given the first two parts and the first `config.stages + 1` pages."""
        *first, ahead = pages
        count = self.agenda.count()
        if not self.problem.split.sequences:
            pl.when(count > 0)(lambda: self._fetch_inputs(0, piece.unit))
        for n, page in enumerate(first):
            for ring in self._keys, self._values:
                pl.when(page >= 0)(functools.partial(ring.fetch, jnp.int32(n), page))
        attend = functools.partial(self._attend_piece, count)
        lax.fori_loop(0, count, attend, (piece, following, jnp.int32(0), ahead))

    # Bulk copies ---------------------------------------------------------------------------------
    @property
    def _keys(self) -> Ring:
        """The ring buffer of page slots for keys."""
        return self._ring(self.refs.keys, self.refs.key_slots, self.refs.keys_full)

    @property
    def _values(self) -> Ring:
        return self._ring(self.refs.values, self.refs.value_slots, self.refs.values_full)

    def _ring(self, cache: jax.Ref, slots: jax.Ref, full: jax.Ref) -> Ring:
        def copy(n, slot, page):
            rows = pl.ds(self._cache_row(page), PAGE)
            plgpu.copy_gmem_to_smem(cache.at[rows], slots.at[slot], full.at[self.number, slot])

        return Ring(self.problem.config.stages, copy, full, which=(self.number,))

    def _cache_row(self, page: jax.Array) -> jax.Array:
        """Returns the first row of a page in the cache [L * N * J * S, C]; `page` is page * J + head."""
        return (self.first_page * self.problem.key_heads + page) * PAGE

    def _row_and_head(self, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row and the key head of a unit; for a tile, its first row."""
        split = self.problem.split
        row = lax.div(unit, split.key_heads)
        if split.siblings:
            row = lax.rem(row, split.rows)
        return row, lax.rem(unit, split.key_heads)

    def _fetch_inputs(self, parity: jax.Array | int, unit: jax.Array) -> None:
        """Starts copies of a unit's queries, new key and new value, and of its row's cosines and sines."""
        problem, refs = self.problem, self.refs
        (row, head), full = self._row_and_head(unit), refs.inputs_full.at[self.number, parity]
        heads, group, half_size = problem.heads, problem.group, problem.head_size // 2
        to = refs.inputs.at[parity]
        for start, length, at in (
            (head * group, group, 0),
            (heads + head, 1, group),
            (heads + problem.key_heads + head, 1, group + 1),
        ):
            source = refs.qkv.at[row, pl.ds(start, length)]
            plgpu.copy_gmem_to_smem(source, to.at[pl.ds(at, length)], full)
        for copy in range(problem.columns // problem.head_size):
            half = pl.ds(copy * half_size, half_size)
            for which, table in enumerate((refs.cos, refs.sin)):
                plgpu.copy_gmem_to_smem(table.at[row], refs.turns.at[parity, which, half], full)

    # Queries and the new token -------------------------------------------------------------------
    def _rotated(
        self,
        read: Callable[[int], jax.Array],
        chunk: int,
        turns: tuple[jax.Array, jax.Array],
    ) -> jax.Array:
        """Reads one chunk of 64 columns and applies RoPE; returns it in the cache's dtype.

        read(c) returns 64 columns from c on, in the shape of `turns`, the cosines and signed sines from `_signed`.
        """
        x, partner = (
            read((64 * chunk + shift) % self.problem.columns).astype(jnp.float32)
            for shift in (0, self.problem.head_size // 2)
        )
        cos, sin = turns
        return (x * cos + partner * sin).astype(self.refs.keys.dtype)

    def _signed(self, cos: jax.Array, sin: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines of a chunk's columns, [..., 64], with negated sines in a head's first half."""
        if self.problem.head_size == 64:
            layout = _OF_COLUMNS if sin.ndim == 1 else _OF_TILE
            column = plgpu.broadcasted_iota(jnp.int32, sin.shape, sin.ndim - 1, layout=layout)
            return cos, jnp.where(column < 32, -sin, sin)
        return cos, -sin if chunk == 0 else sin

    def _turns(self, parity: jax.Array, chunk: int) -> tuple[jax.Array, jax.Array]:
        """Returns `_signed` of the row in one of the two input buffers, [64] each."""
        cos, sin = (_load_columns(self.refs.turns.at[parity, i]) for i in range(2))
        return self._signed(cos, sin, chunk)

    def _queries(self, parity: jax.Array, unit: jax.Array) -> list[jax.Array]:
        """Returns the rotated queries of a unit, or of all rows of a tile: [64, 64] for each chunk of columns."""
        if self.problem.split.sequences:
            return self._gathered_queries(unit)
        if not self.problem.split.siblings:
            return self._own_queries(parity)
        return lax.cond(
            self.agenda.is_tile(unit),
            lambda: self._gathered_queries(unit),
            lambda: self._own_queries(parity),
        )

    def _own_queries(self, parity: jax.Array) -> list[jax.Array]:
        def read(at: int) -> jax.Array:
            ref = self.refs.inputs.at[parity, pl.ds(0, self.problem.group_rows), pl.ds(at, 64)]
            return collectives.load_rows(ref, interpret=self.problem.interpret)

        queries = []
        for chunk in range(self.problem.chunks):
            turns = [_broadcast(table, (64, 64), 1) for table in self._turns(parity, chunk)]
            queries.append(self._rotated(read, chunk, turns))
        return queries

    def _gathered_queries(self, unit: jax.Array) -> list[jax.Array]:
        problem, refs, interpret = self.problem, self.refs, self.problem.interpret
        tile, head = self._row_and_head(unit)
        members = self.agenda.members(tile)
        cos, sin = (
            gathered.load_columns(table, members, interpret=interpret)
            for table in (refs.cos, refs.sin)
        )

        def read(at: int) -> jax.Array:
            first, group = head * problem.group, problem.group
            return gathered.load_heads(refs.qkv, members, first, group, at, interpret=interpret)

        return [
            self._rotated(read, chunk, self._signed(cos, sin, chunk))
            for chunk in range(problem.chunks)
        ]

    def _read_input(self, parity: jax.Array, which: int, at: int) -> jax.Array:
        return _load_columns(self.refs.inputs.at[parity, which, pl.ds(at, 64)])

    def _append_key(
        self, parity: jax.Array, ring_slot: jax.Array, slot: jax.Array, page: jax.Array
    ) -> None:
        """Rotates the new key and writes it to the page's tile and to the cache."""
        read = functools.partial(self._read_input, parity, self.problem.group)
        chunks = range(self.problem.chunks)
        new = [self._rotated(read, chunk, self._turns(parity, chunk)) for chunk in chunks]
        tile = self.refs.key_slots.at[ring_slot]
        self._append(tile, self.refs.keys, slot, page, new, clear=False)

    def _append_value(
        self, parity: jax.Array, ring_slot: jax.Array, slot: jax.Array, page: jax.Array
    ) -> None:
        """Writes the new value to the page's tile and to the cache.

        The tile's rows after it become 0: their weights are 0, but 0 times infinity or NaN would be NaN.
        """
        read = functools.partial(self._read_input, parity, self.problem.group + 1)
        chunks = range(self.problem.chunks)
        new = [read(64 * chunk).astype(self.refs.values.dtype) for chunk in chunks]
        tile = self.refs.value_slots.at[ring_slot]
        self._append(tile, self.refs.values, slot, page, new, clear=True)

    def _append(
        self,
        tile: jax.Ref,
        cache: jax.Ref,
        slot: jax.Array,
        page: jax.Array,
        new: list[jax.Array],
        *,
        clear: bool,
    ) -> None:
        """Writes a new key or value, [64] for each chunk of columns, to a page's tile [64, C] and to the cache.

        `page` is page * J + head. With `clear` the tile's rows after `slot` become 0.
        """
        interpret = self.problem.interpret
        for chunk, columns in enumerate(new):
            collectives.put_row(columns, tile, slot, chunk, clear=clear, interpret=interpret)
        plgpu.commit_smem()
        for chunk, columns in enumerate(new):
            registers.store(columns, cache.at[self._cache_row(page) + slot, pl.ds(64 * chunk, 64)])

    # Pages ---------------------------------------------------------------------------------------
    def _attend_page(
        self,
        parity: jax.Array,
        piece: _Piece,
        queries: list[jax.Array],
        turn: jax.Array,
        carry: tuple[_Softmax, jax.Array, jax.Array],
    ) -> tuple[_Softmax, jax.Array, jax.Array]:
        """Attends to page `turn` of a part, whose inputs are in buffer `parity`, and starts loading what takes its slot.

        The carry is the softmax so far; the page's index among the warpgroup's pages; the page to load into its slot.
        """
        softmax, n, ahead = carry
        slot = self._keys.slot(n)
        further = self.agenda.page(n + self.problem.config.stages + 1)
        split = self.problem.split
        # The slot, in this page, of the row's new token; for a tile of a sequence's tokens, that of its first token.
        new_slot = (piece.home if split.sequences else piece.slots - 1) - turn * PAGE
        # In kernels that append, `home` is negative unless this part has the row's last page.
        has_new = (new_slot < PAGE) & (piece.home >= 0)
        when_new = pl.when(has_new) if split.appends else lambda write: None
        with jax.named_scope("scores"):
            self._keys.wait(slot)
            when_new(lambda: self._append_key(parity, slot, new_slot, piece.home))
            scores = self._scores(self._reloaded(queries, ahead), slot)
        self._refill(self._keys, n, ahead)
        with jax.named_scope("softmax"):
            softmax, weights = self._weights(softmax, scores, new_slot)
        with jax.named_scope("products"):
            self._values.wait(slot)
            when_new(lambda: self._append_value(parity, slot, new_slot, piece.home))
            products = self._add_products(softmax.products, weights, slot)
        self._refill(self._values, n, ahead)
        return softmax._replace(products=products), n + 1, further

    def _refill(self, ring: Ring, n: jax.Array, ahead: jax.Array) -> None:
        """Starts loading page `ahead` into the slot of the warpgroup's n-th page."""
        # All warps must have read the slot before it is overwritten.
        collectives.sync(interpret=self.problem.interpret)
        pl.when(ahead >= 0)(lambda: ring.fetch(n + ring.stages, ahead))

    def _reloaded(self, queries: list[jax.Array], ahead: jax.Array) -> list[jax.Array]:
        """Returns the queries unchanged, but so that the compiler believes that they differ from page to page.

        This works around a bug. With one chunk, queries and weights are operands of equal shape. The ptxas of CUDA
        13.0 gives both the same registers but loads the queries only before the loop, so the second page would be
        multiplied by weights. The condition is never true, because no page is less than -1.
        """
        if self.problem.chunks > 1 or self.problem.interpret:
            return queries
        return [jnp.where(ahead < -1, jnp.zeros_like(chunk), chunk) for chunk in queries]

    def _scores(self, queries: list[jax.Array], slot: jax.Array) -> jax.Array:
        """Returns Q K^T of a page, float32 [64, slots]."""

        def product(acc):
            for chunk, of_chunk in enumerate(queries):
                keys = self.refs.key_slots.at[slot, :, pl.ds(64 * chunk, 64)]
                plgpu.wgmma(acc, self._operand(of_chunk), keys.T)
            return acc[...]

        return pl.run_scoped(product, plgpu.ACC((64, PAGE), jnp.float32))

    def _weights(
        self, softmax: _Softmax, scores: jax.Array, new_slot: jax.Array
    ) -> tuple[_Softmax, jax.Array]:
        """Adds a page's scores to the running softmax, whose products are rescaled but do not yet include this page.

        Also returns P [64, slots], the weights of the page's values.
        """
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_OF_TILE)
        if self.problem.split.sequences:
            row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=_OF_TILE)
            # Each token of a sequence has 8 rows, and ends one slot after the token before it. So the condition is
            # column <= new_slot + row // 8.
            column, new_slot = 8 * column - row, 8 * new_slot
        is_live = column <= new_slot
        scale = self.problem.head_size**-0.5 * math.log2(math.e)
        scores = jnp.where(is_live, scores * scale, NOTHING)
        higher = jnp.maximum(softmax.maximum, jnp.max(scores, axis=1))
        decay = jnp.exp2(softmax.maximum - higher)
        exponentials = jnp.exp2(scores - _broadcast(higher, scores.shape, 0))
        total = softmax.total * decay + jnp.sum(exponentials, axis=1)
        weights = exponentials.astype(self.refs.values.dtype)
        products = softmax.products * _broadcast(decay, softmax.products.shape, 0)
        return _Softmax(higher, total, products), weights

    def _add_products(self, products: jax.Array, weights: jax.Array, slot: jax.Array) -> jax.Array:
        """Returns products + P V of a page, float32 [64, C]."""

        def add_product(acc):
            plgpu.wgmma(acc, self._operand(weights), self.refs.value_slots.at[slot])

        if not self.problem.interpret:
            return pl.run_state(add_product)(plgpu.ACC.init(products))
        acc = plgpu.ACC(products.shape, jnp.float32)
        return products + pl.run_scoped(lambda acc: (add_product(acc), acc[...])[1], acc)

    def _operand(self, values: jax.Array) -> jax.Array | jax.Ref:
        """Returns the first operand of `wgmma`: in registers, or in shared memory for the interpreter."""
        if not self.problem.interpret:
            return values
        self.refs.operand[...] = values
        return self.refs.operand

    # Parts ---------------------------------------------------------------------------------------
    def _attend_piece(
        self, count: jax.Array, i: jax.Array, carry: tuple[_Piece, _Piece, jax.Array, jax.Array]
    ) -> tuple[_Piece, _Piece, jax.Array, jax.Array]:
        """Attends to part i of `count`, and writes its result, or a partial result if the unit has several parts.

        The carry is this part; the next part; and the page index and the page to load, as in `_attend_page`'s carry.
        """
        piece, following, n, ahead = carry
        part, parts = lax.div(piece.part, plans.SHIFT), lax.rem(piece.part, plans.SHIFT)
        after_following = self.agenda.piece(i + 2)
        parity = lax.rem(i, 2)
        with jax.named_scope("queries"):
            if self.problem.split.sequences:
                queries = self._queries(parity, piece.unit)
            else:
                plgpu.barrier_wait(self.refs.inputs_full.at[self.number, parity])
                queries = self._queries(parity, piece.unit)
                # All warps must be done with the previous part before its buffer is overwritten.
                collectives.sync(interpret=self.problem.interpret)
                pl.when(i + 1 < count)(lambda: self._fetch_inputs(1 - parity, following.unit))
        softmax, n, ahead = lax.fori_loop(
            0,
            lax.div(piece.slots + PAGE - 1, PAGE),
            functools.partial(self._attend_page, parity, piece, queries),
            (_Softmax.start(self.problem.head_size), n, ahead),
        )
        with jax.named_scope("merge"):
            if self.problem.split.sequences:
                self._finish_sequence(piece.unit, part, parts, softmax)
            elif self.problem.split.siblings:
                self._finish_shared(piece.unit, part, parts, softmax)
            else:
                self._finish(piece.unit, part, parts, softmax)
        return following, after_following, n, ahead

    def _finish(
        self, unit: jax.Array, part: jax.Array, parts: jax.Array, softmax: _Softmax
    ) -> None:
        """Writes the result if the unit has one part; otherwise writes partial sums, and the last part sums them."""
        if self.problem.interpret:
            self._leave(unit, part, parts, softmax)
            return
        pl.when(parts == 1)(lambda: self._write(unit, softmax, is_quarter=False))
        if self.problem.split.most_parts > 1:

            @pl.when(parts > 1)
            def _leave_part():
                self._leave(unit, part, parts, softmax)
                pl.when(self.refs.flags[0] != 0)(lambda: self._merge(unit, parts))

    def _finish_shared(
        self, unit: jax.Array, part: jax.Array, parts: jax.Array, softmax: _Softmax
    ) -> None:
        """Does what `_finish` does if rows may share pages: a part of a tile belongs to several units."""
        is_tile = self.agenda.is_tile(unit)
        is_whole = jnp.logical_not(is_tile) & (parts == 1)
        is_part = jnp.logical_not(is_tile | is_whole)
        pl.when(is_tile)(lambda: self._leave_to_members(unit, part, softmax))
        if self.problem.interpret:
            pl.when(jnp.logical_not(is_tile))(lambda: self._leave(unit, part, parts, softmax))
            return
        pl.when(is_whole)(lambda: self._write(unit, softmax, is_quarter=False))
        pl.when(is_part)(lambda: self._leave(unit, part, parts, softmax))

        # One loop serves both kinds of parts, so that the long code of `_merge` is compiled only once.
        split, (row, head) = self.problem.split, self._row_and_head(unit)
        plan = self.refs.plan

        def merge_if_last(k, carry):
            @pl.when(self.refs.flags[k] != 0)
            def _merge():
                member = jnp.where(is_tile, plan[split.tiles_at + row * split.siblings + k], row)
                self._merge(member * split.key_heads + head, plan[split.totals_at + member])

            return carry

        units = jnp.where(is_tile, split.siblings, jnp.where(is_part, 1, 0))
        lax.fori_loop(0, units, merge_if_last, 0)

    def _finish_sequence(
        self, unit: jax.Array, part: jax.Array, parts: jax.Array, softmax: _Softmax
    ) -> None:
        """Does what `_finish` does for a tile of a sequence's tokens, whose rows have no other parts."""
        refs = self.refs
        if self.problem.interpret:
            self._leave_to_members(unit, part, softmax)
            return
        pl.when(parts == 1)(lambda: self._write_to_members(unit, softmax.result(), 0))
        if self.problem.split.most_parts > 1:

            @pl.when(parts > 1)
            def _leave_part():
                self._leave_to_members(unit, part, softmax)
                collectives.count(refs.plan.at[unit], parts - 1, refs.flags)
                pl.when(refs.flags[0] != 0)(lambda: self._merge_tile(unit, parts))

    def _write(self, unit: jax.Array, softmax: _Softmax, *, is_quarter: bool) -> None:
        out = softmax.result().astype(self.refs.out.dtype)
        row, head = self._row_and_head(unit)
        ref = self.refs.out.at[row, pl.ds(head * self.problem.group, self.problem.group)]
        collectives.store_rows(out, ref, is_quarter=is_quarter, interpret=self.problem.interpret)

    def _leave(self, unit: jax.Array, part: jax.Array, parts: jax.Array, softmax: _Softmax) -> None:
        """Writes this part's sums to device memory. The flag becomes 1 if this is the unit's last part to finish."""
        refs, interpret = self.refs, self.problem.interpret
        collectives.store_rows(softmax.products, refs.products.at[unit, part], interpret=interpret)
        for which, values in enumerate((softmax.maximum, softmax.total)):
            ref = refs.totals.at[unit, part, which]
            collectives.store_row_values(values, ref, interpret=interpret)
        if not interpret:
            collectives.count(refs.plan.at[unit], parts - 1, refs.flags)

    def _leave_to_members(self, unit: jax.Array, part: jax.Array, softmax: _Softmax) -> None:
        """Writes a tile's part to device memory for each of its rows.

        Rows that share pages have other parts too, so the part is also counted in each row, with a flag for each as
        in `_leave`.
        """
        refs, split, interpret = self.refs, self.problem.split, self.problem.interpret
        tile, head = self._row_and_head(unit)
        members, at = self.agenda.members(tile), (split.key_heads, head, part)
        gathered.store_parts(softmax.products, refs.products, members, at, interpret=interpret)
        for which, values in enumerate((softmax.maximum, softmax.total)):
            gathered.store_part_values(values, refs.totals, members, at, which, interpret=interpret)
        if not (interpret or split.sequences):
            counters, totals = refs.plan.at[pl.ds(0, split.units)], self.agenda.totals()
            gathered.count(counters, totals, members, split.key_heads, head, refs.flags)

    def _write_to_members(self, unit: jax.Array, out: jax.Array, at: int) -> None:
        """Writes columns of a tile's result, [64, n], from column `at` on."""
        tile, head = self._row_and_head(unit)
        first, count = head * self.problem.group, self.problem.group
        out = out.astype(self.refs.out.dtype)
        gathered.store_heads(out, self.refs.out, self.agenda.members(tile), first, count, at)

    def _merge_tile(self, unit: jax.Array, parts: jax.Array) -> None:
        """Sums the parts of a tile in order and writes the result: first the totals, then 64 columns at a time."""
        refs, (tile, head) = self.refs, self._row_and_head(unit)
        members = self.agenda.members(tile)

        def of_part(k: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Returns maximum and sum of a part."""
            index = self.problem.key_heads, head, k
            return tuple(
                gathered.load_part_values(refs.totals, members, index, which) for which in range(2)
            )

        def add_totals(k: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            maximum, total = carry
            part_maximum, part_total = of_part(k)
            higher = jnp.maximum(maximum, part_maximum)
            scaled = total * jnp.exp2(maximum - higher) + part_total * jnp.exp2(
                part_maximum - higher
            )
            return higher, scaled

        start = _Softmax.start(64)
        maximum, total = lax.fori_loop(0, parts, add_totals, (start.maximum, start.total))
        for chunk in range(self.problem.chunks):

            def add_products(k: jax.Array, products: jax.Array, chunk: int = chunk) -> jax.Array:
                share = jnp.exp2(of_part(k)[0] - maximum)
                index = self.problem.key_heads, head, k
                of_chunk = gathered.load_parts(refs.products, members, index, 64 * chunk)
                return products + of_chunk * _broadcast(share, of_chunk.shape, 0)

            products = lax.fori_loop(0, parts, add_products, start.products)
            result = _Softmax(maximum, total, products).result()
            self._write_to_members(unit, result, 64 * chunk)

    def _merge(self, unit: jax.Array, parts: jax.Array) -> None:
        """Sums a unit's parts in order and writes the result."""
        batch = self.problem.most_batch
        add = functools.partial(self._add_batch, unit, parts)
        start = _Softmax.start(self.problem.head_size // collectives.WARPS)
        softmax = lax.fori_loop(0, lax.div(parts + batch - 1, batch), add, start)
        self._write(unit, softmax, is_quarter=True)

    def _add_batch(
        self, unit: jax.Array, parts: jax.Array, batch: jax.Array, softmax: _Softmax
    ) -> _Softmax:
        """Adds the next `most_batch` parts of a unit to the softmax. Each warp has a quarter of the columns."""
        refs, most = self.refs, self.problem.most_batch
        at = [lax.min(batch * most + k, parts - 1) for k in range(most)]
        of_parts = [
            collectives.load_rows(refs.products.at[unit, k], is_quarter=True, interpret=False)
            for k in at
        ]
        maxima, totals = (
            [collectives.load_row_values(refs.totals.at[unit, k, which]) for k in at]
            for which in range(2)
        )
        higher = functools.reduce(jnp.maximum, maxima, softmax.maximum)
        decay = jnp.exp2(softmax.maximum - higher)
        shares = [
            jnp.where(batch * most + k < parts, jnp.exp2(m - higher), 0.0)
            for k, m in enumerate(maxima)
        ]
        total = softmax.total * decay + sum(a * b for a, b in zip(shares, totals, strict=True))
        products = softmax.products * _broadcast(decay, softmax.products.shape, 0) + sum(
            a * _broadcast(b, a.shape, 0) for a, b in zip(of_parts, shares, strict=True)
        )
        return _Softmax(higher, total, products)


def _full(shape: tuple[int, ...], value: float, layout: plgpu.Layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _broadcast(values: jax.Array, shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, (axis,))


def _load_columns(ref: jax.Ref) -> jax.Array:
    return plgpu.load(ref, layout=_OF_COLUMNS, optimized=False)
