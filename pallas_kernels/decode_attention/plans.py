"""The plan of decode attention says which warpgroup attends to which pages. All layers share one plan.

A unit is one row and one key/value head. Its pages up to the row's end are cut into parts of equal length, to within
one page: a part has at most `pages` pages, or more if there would be more than `parts` parts. Rows that share pages,
and consecutive tokens of a sequence, form tiles of up to `siblings` rows. docs/design/kernels.md, "The plan of decode
attention", says why. In the code, `piece` means a part. `Split.blocks` counts the warpgroups of all blocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

PAGE = 64
# The fields of a part:
#   UNIT   row * J + head; (B + first row) * J + head for a tile of rows that share pages, first row * J + head for a
#          tile of a sequence's tokens.
#   PART   index of the part in its unit * SHIFT + the unit's number of parts (for a tile, that of its first row).
#   SLOTS  number of slots of the part up to the row's end.
#   HOME   page * J + head of the row's last page if the part ends there and the kernel appends the new token, else
#          -1. For a tile of a sequence's tokens: the slot of the first token, counted from the part's first slot; it
#          is negative if that token is in an earlier part.
FIELDS = UNIT, PART, SLOTS, HOME = range(4)
SHIFT = 2**16


@dataclasses.dataclass(frozen=True)
class Split:
    """Describes how units are cut, and the layout of a plan.

    A plan is one int32 array that holds, in this order:

        counters   [B * J], one for each unit, all 0
        parts      [blocks, rounds, fields]
        pages      [blocks, length + 1], each page * J + head; -1 after a warpgroup's last page
        counts     [blocks], the number of parts of each warpgroup
        tiles      [B, siblings], the rows of the tile that each row t identifies; -1 - t for an absent row
        totals     [B], the number of parts of each row's units
        places     [2, B], page and slot of each row's new token, from `places`

    Tiles and totals are there only if `siblings` is not 0, places only if the kernel does not append.

    Attributes:
      rows: B, rows of the batch.
      width: W, most pages of a row.
      key_heads: J, key/value heads.
      pages: most pages of a part, unless its unit already has the most parts.
      parts: most parts of a unit, or with shared pages of each of its two runs of pages.
      blocks: number of warpgroups in all blocks of the kernel.
      siblings: most rows of a tile; 0 if there are no tiles.
      appends: whether the attention kernel writes each row's new token to the cache; if not, it is there already.
      sequences: whether tiles are consecutive tokens of sequences.
    """

    rows: int
    width: int
    key_heads: int
    pages: int
    parts: int
    blocks: int
    siblings: int = 0
    appends: bool = True
    sequences: bool = False

    @property
    def longest_run(self) -> int:
        """Most parts of one run of pages: `parts_of(width)` as a Python number."""
        return min(self.parts, -(-self.width // self.pages))

    @property
    def most_parts(self) -> int:
        """Most parts of a unit. Shared and other pages are cut separately, so their number is rounded up twice."""
        if self.sequences or not self.siblings:
            return self.longest_run
        return min(2 * self.longest_run, -(-self.width // self.pages) + 1)

    @property
    def units(self) -> int:
        """Number of units, B * J, without tiles."""
        return self.rows * self.key_heads

    @property
    def rounds(self) -> int:
        """Most parts of a warpgroup."""
        return -(-self.units * self.most_parts // self.blocks)

    @property
    def length(self) -> int:
        """Most pages of a warpgroup."""
        return self.rounds * max(self.pages, -(-self.width // self.parts))

    @property
    def pieces_at(self) -> int:
        """Index of the first part, after the units' counters."""
        return self.units

    @property
    def pages_at(self) -> int:
        """Index of the first page."""
        return self.pieces_at + self.blocks * self.rounds * len(FIELDS)

    @property
    def counts_at(self) -> int:
        """Index of the first number of parts."""
        return self.pages_at + self.blocks * (self.length + 1)

    @property
    def tiles_at(self) -> int:
        """Index of the first tile's rows."""
        return self.counts_at + self.blocks

    @property
    def totals_at(self) -> int:
        """Index of the first row's number of parts."""
        return self.tiles_at + self.rows * self.siblings

    @property
    def places_at(self) -> int:
        """Index of the first row's page."""
        return self.totals_at + (self.rows if self.siblings else 0)

    @property
    def size(self) -> int:
        """Length of a plan, in int32 words."""
        return self.places_at + (0 if self.appends else 2 * self.rows)


def parts_of(live: jax.Array, split: Split) -> jax.Array:
    """Returns the number of parts into which a run of `live` pages is cut: int32, in the shape of `live`."""
    return jnp.minimum(-(-live // split.pages), split.parts)


def totals_of(
    ends: jax.Array,
    split: Split,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
) -> jax.Array:
    """Returns the number of parts of each row's units, int32 [B]; arguments as for `make`."""
    ends = _clipped(ends, split)
    if split.sequences:
        ends = _last_ends(ends, _tiles_of((sequence,), split.siblings))
    live = ends // PAGE + 1
    if shared is None:
        return parts_of(live, split)
    shared = _shared(shared, ends, split)
    return parts_of(shared, split) + parts_of(live - shared, split)


def _clipped(ends: jax.Array, split: Split) -> jax.Array:
    return jnp.clip(ends, 0, split.width * PAGE - 1)


def _shared(shared: jax.Array, ends: jax.Array, split: Split) -> jax.Array:
    """Clips each row's number of shared pages, so that the page of the new token is never one of them."""
    return jnp.clip(shared, 0, _clipped(ends, split) // PAGE)


def make(
    tables: jax.Array,
    ends: jax.Array,
    pages: int,
    split: Split,
    shared: jax.Array | None = None,
    sequence: jax.Array | None = None,
) -> jax.Array:
    """Makes the plan: a list of the work of every warpgroup.

    Ranks and positions are computed as sums over all pairs, not by a sort or a scan, because XLA fuses such sums into
    a few small kernels.

    Args:
      tables: int32 [B, W], as for `api.decode_attention`, and so are `ends`, `shared` and `sequence`.
      ends: int32 [B].
      pages: N, pages of the cache in one layer.
      split: how units are cut.
      shared: int32 [B]; None if `split.siblings` is 0 or `split.sequences`.
      sequence: int32 [B]; used only if `split.sequences`.

    Returns:
      int32 [split.size], laid out as `Split` describes.
    """
    rows, key_heads, blocks, rounds = split.rows, split.key_heads, split.blocks, split.rounds
    tables = jnp.clip(tables, 0, pages - 1)
    ends = _clipped(ends, split)
    each_row = jnp.arange(rows)
    # A run is a range of pages that are cut together. First come the own pages of all rows, then the shared pages of
    # the tiles that the rows identify.
    row_of = each_row
    first, live = jnp.zeros(rows, jnp.int32), ends // PAGE + 1
    totals = totals_of(ends, split, shared, sequence)
    last = ends
    if split.sequences:
        tile = _tiles_of((sequence,), split.siblings)
        tiles, is_named = _members(tile, split.siblings)
        last = _last_ends(ends, tile)
        live = jnp.where(is_named, last // PAGE + 1, 0)
    elif shared is not None:
        shared = _shared(shared, ends, split)
        last_page = tables[each_row, jnp.maximum(shared - 1, 0)]
        tiles, is_named = _members(_tiles_of((last_page, shared), split.siblings), split.siblings)
        is_named = is_named & (shared > 0)
        row_of = jnp.concatenate([each_row, each_row])
        live = jnp.concatenate([live - shared, jnp.where(is_named, shared, 0)])
        first = jnp.concatenate([shared, first])
    runs = len(row_of)
    parts = parts_of(live, split)
    size, longer = live // jnp.maximum(parts, 1), live % jnp.maximum(parts, 1)

    # A run has two kinds of parts: the first `longer` ones have one page more than the rest.
    sizes = jnp.concatenate([size + 1, size])
    each_head = jnp.concatenate([longer, parts - longer])
    counts = key_heads * each_head
    kinds = jnp.arange(2 * runs)
    order = sizes
    if shared is not None:
        order = order + jnp.where(kinds % runs < rows, 0, split.width + 1)
    is_before = (order > order[:, None]) | (order == order[:, None]) & (kinds < kinds[:, None])
    firsts = jnp.sum(jnp.where(is_before, counts, 0), axis=1)

    block, turn = jnp.arange(blocks)[:, None], jnp.arange(rounds)[None]
    rank = turn * blocks + jnp.where(turn % 2 == 0, block, blocks - 1 - block)
    within = rank[..., None] - firsts
    is_kind = (within >= 0) & (within < counts)
    pick = lambda values: jnp.sum(jnp.where(is_kind, values, 0), axis=-1)
    is_piece = rank < jnp.sum(counts)
    kind, within = pick(kinds), pick(within)
    run = kind % runs
    in_head = jnp.maximum(each_head[kind], 1)
    head = within // in_head
    part = within % in_head + jnp.where(kind < runs, 0, longer[run])
    begin = first[run] + part * size[run] + jnp.minimum(part, longer[run])
    row = row_of[run]
    slots = jnp.minimum(last[row] + 1 - begin * PAGE, sizes[kind] * PAGE)
    slots = jnp.where(is_piece, slots, 0)
    lengths = -(-slots // PAGE)
    earlier = jnp.arange(rounds) < jnp.arange(rounds)[:, None]
    starts = jnp.sum(jnp.where(earlier, lengths[:, None], 0), axis=-1)
    home = tables[each_row, ends // PAGE][row] * key_heads + head
    is_last = (part == parts[run] - 1) & (run < rows) & split.appends
    home = jnp.where(is_last, home, -1)
    if split.sequences:
        home = ends[row] - begin * PAGE
    # A row's own parts are counted after the parts of its tile.
    before = totals - parts[:rows] if shared is not None else jnp.zeros_like(totals)
    part = part + jnp.where(run < rows, before[row], 0)
    unit = run * key_heads + head
    pieces = jnp.stack([unit, part * SHIFT + totals[row], slots, home], axis=-1)

    index = jnp.arange(split.length + 1)
    owner = jnp.sum(index[:, None] >= (starts + lengths)[:, None], axis=-1)  # [blocks, length + 1]
    of_owner = lambda values: jnp.take_along_axis(values, jnp.minimum(owner, rounds - 1), axis=1)
    row, head = of_owner(row), of_owner(head)
    at = of_owner(begin) + index - of_owner(starts)
    page = tables[row, jnp.minimum(at, split.width - 1)] * key_heads + head
    page = jnp.where(owner < rounds, page, -1)
    lists = [pieces, page, jnp.sum(is_piece, axis=1)]
    if split.siblings:
        lists += [tiles, totals]
    if not split.appends:
        lists += places(tables, ends, pages)
    counters = jnp.zeros(split.pieces_at, jnp.int32)
    return jnp.concatenate([counters, *(part.reshape(-1).astype(jnp.int32) for part in lists)])


def places(
    tables: jax.Array, ends: jax.Array, pages: int, slots: int = PAGE
) -> tuple[jax.Array, jax.Array]:
    """Returns page and slot of each row's new token, int32 [B] each.

    All places are different. If several rows write to one slot, only the last of them keeps its page; the others get
    numbers from N on, which are no pages. The other arguments are those of `make`; `slots` is S, slots of a page.
    """
    rows, width = tables.shape
    ends = jnp.clip(ends, 0, width * slots - 1)
    page = jnp.clip(tables[jnp.arange(rows), ends // slots], 0, pages - 1)
    slot = ends % slots
    flat = page * slots + slot
    is_overwritten = jnp.any(jnp.triu(flat == flat[:, None], 1), axis=1)
    return jnp.where(is_overwritten, pages + jnp.arange(rows), page), slot


def _tiles_of(keys: tuple[jax.Array, ...], siblings: int) -> jax.Array:
    """Returns which rows are in each row's tile, bool [B, B]: up to `siblings` rows with equal keys, int32 [B], in order."""
    is_sibling = functools.reduce(jnp.logical_and, (key == key[:, None] for key in keys))
    rows = jnp.arange(len(is_sibling))
    rank = jnp.sum(is_sibling & (rows < rows[:, None]), axis=1)
    return is_sibling & (rank // siblings == (rank // siblings)[:, None])


def _members(tile: jax.Array, siblings: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of the tile that each row identifies, and whether a row is the first in its tile.

    The rows are int32 [B, siblings], as in `Split`; the other result is bool [B]. `tile` is from `_tiles_of`.
    """
    rows = jnp.arange(len(tile))
    rank = jnp.sum(tile & (rows < rows[:, None]), axis=1)
    wanted = rank[:, None] + jnp.arange(siblings)
    is_member = tile[:, None] & (rank == wanted[..., None])  # [B, siblings, B]
    members = jnp.sum(jnp.where(is_member, rows, 0), axis=-1)
    return jnp.where(jnp.any(is_member, axis=-1), members, -1 - rows[:, None]), rank == 0


def _last_ends(ends: jax.Array, tile: jax.Array) -> jax.Array:
    """Returns the largest end in each row's tile, int32 [B]."""
    return jnp.max(jnp.where(tile, ends, 0), axis=1)
