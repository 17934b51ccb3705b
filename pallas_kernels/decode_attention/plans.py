"""The plan of decode attention: which team (warpgroup) attends to which pages. One plan serves all layers.

A unit is one row and one key/value head. Its live pages are cut into pieces of equal length (within one page): at
most `pages` pages, or more where that would make more than `parts` pieces. A very long unit has up to `long_parts`
pieces, if each then has at least `LONG` pages. So the cut of a row depends only on its own length and on shapes, and
the bits of its result do not depend on other rows. Which team gets a piece does depend on
them. The pieces of all units are sorted, longest first, and dealt to the teams in alternating order (first to last,
then last to first), so that all teams read about the same amount. The pieces of a unit have the same length, so they
are read at about the same time and can be summed while other units are read.

The code calls a team a block: `Cut.blocks` counts the teams of all blocks of the kernel.
"""

import dataclasses

import jax
import jax.numpy as jnp

PAGE = 64
# The fields of a piece. UNIT: row * J + head. PART: its index in the unit, times SHIFT, plus the unit's number of
# pieces. SLOTS: its number of live slots. HOME: page * J + head of the row's last page if the piece ends there, else -1.
FIELDS = UNIT, PART, SLOTS, HOME = range(4)
SHIFT = 2**16
# A unit has more than `parts` pieces only if each has at least so many pages, beside which adding up a piece is short.
LONG = 8


@dataclasses.dataclass(frozen=True)
class Cut:
    """How units are cut, and the layout of a plan.

    A plan holds, in this order: a counter per unit, all 0; pieces [blocks, rounds, fields]; pages
    [blocks, length + 1], each page * J + head, and -1 after the last; the number of pieces of each team [blocks].

    Attributes:
      rows: B, rows of the batch.
      width: W, most pages of a row.
      key_heads: J, key/value heads.
      pages: most pages of a piece, unless its unit has `parts` pieces.
      parts: most pieces of a unit, unless all have `LONG` pages or more.
      blocks: number of teams in all blocks of the kernel.
      long_parts: most pieces of a unit whose pieces all have `LONG` pages or more.
    """

    rows: int
    width: int
    key_heads: int
    pages: int
    parts: int
    blocks: int
    long_parts: int = 0

    @property
    def most_parts(self) -> int:
        """Number of pieces of the longest unit: `parts_of` its pages, as a Python number."""
        most = max(self.parts, min(self.long_parts, self.width // LONG))
        return min(most, -(-self.width // self.pages))

    @property
    def rounds(self) -> int:
        """Most pieces of a team."""
        return -(-self.rows * self.key_heads * self.most_parts // self.blocks)

    @property
    def length(self) -> int:
        """Most pages of a team."""
        return self.rounds * max(self.pages, -(-self.width // self.parts))

    @property
    def pieces_at(self) -> int:
        """Index of the first piece, after the units' counters."""
        return self.rows * self.key_heads

    @property
    def pages_at(self) -> int:
        """Index of the first page."""
        return self.pieces_at + self.blocks * self.rounds * len(FIELDS)

    @property
    def counts_at(self) -> int:
        """Index of the first number of pieces."""
        return self.pages_at + self.blocks * (self.length + 1)

    @property
    def size(self) -> int:
        """Length of a plan, in int32 words."""
        return self.counts_at + self.blocks


def parts_of(live: jax.Array, cut: Cut) -> jax.Array:
    """Number of pieces that a unit with `live` pages is cut into; int32, in the shape of `live`."""
    most = jnp.maximum(cut.parts, jnp.minimum(cut.long_parts, live // LONG))
    return jnp.minimum(-(-live // cut.pages), most)


def make(tables: jax.Array, ends: jax.Array, pages: int, cut: Cut) -> jax.Array:
    """Lists the work of every team.

    Ranks and positions are computed as sums over pairs, without a sort or a scan: XLA fuses them into a few small
    kernels.

    Args:
      tables: int32 [B, W], each row's pages.
      ends: int32 [B], the slot of each row's new token.
      pages: N, pages of the cache in one layer.
      cut: how units are cut.

    Returns:
      int32 [cut.size], laid out as `Cut` describes.
    """
    rows, key_heads, blocks, rounds = cut.rows, cut.key_heads, cut.blocks, cut.rounds
    tables = jnp.clip(tables, 0, pages - 1)
    ends = jnp.clip(ends, 0, cut.width * PAGE - 1)
    each_row = jnp.arange(rows)
    live = ends // PAGE + 1
    parts = parts_of(live, cut)
    size, longer = live // parts, live % parts

    # A row has two kinds of pieces: the first `longer` ones have one page more than the rest.
    sizes = jnp.concatenate([size + 1, size])
    each_head = jnp.concatenate([longer, parts - longer])
    counts = key_heads * each_head
    kinds = jnp.arange(2 * rows)
    is_before = (sizes > sizes[:, None]) | (sizes == sizes[:, None]) & (kinds < kinds[:, None])
    firsts = jnp.sum(jnp.where(is_before, counts, 0), axis=1)

    block, turn = jnp.arange(blocks)[:, None], jnp.arange(rounds)[None]
    rank = turn * blocks + jnp.where(turn % 2 == 0, block, blocks - 1 - block)
    within = rank[..., None] - firsts
    is_kind = (within >= 0) & (within < counts)
    pick = lambda values: jnp.sum(jnp.where(is_kind, values, 0), axis=-1)
    is_piece = rank < jnp.sum(counts)
    kind, within = pick(kinds), pick(within)
    row = kind % rows
    in_head = jnp.maximum(each_head[kind], 1)
    head = within // in_head
    part = within % in_head + jnp.where(kind < rows, 0, longer[row])
    begin = part * size[row] + jnp.minimum(part, longer[row])
    slots = jnp.minimum(ends[row] + 1 - begin * PAGE, sizes[kind] * PAGE)
    slots = jnp.where(is_piece, slots, 0)
    lengths = -(-slots // PAGE)
    earlier = jnp.arange(rounds) < jnp.arange(rounds)[:, None]
    starts = jnp.sum(jnp.where(earlier, lengths[:, None], 0), axis=-1)
    home = tables[each_row, live - 1][row] * key_heads + head
    home = jnp.where(part == parts[row] - 1, home, -1)
    unit = row * key_heads + head
    pieces = jnp.stack([unit, part * SHIFT + parts[row], slots, home], axis=-1)

    place = jnp.arange(cut.length + 1)
    owner = jnp.sum(place[:, None] >= (starts + lengths)[:, None], axis=-1)  # [blocks, length + 1]
    of_owner = lambda values: jnp.take_along_axis(values, jnp.minimum(owner, rounds - 1), axis=1)
    row, head = of_owner(row), of_owner(head)
    at = of_owner(begin) + place - of_owner(starts)
    page = tables[row, jnp.minimum(at, cut.width - 1)] * key_heads + head
    page = jnp.where(owner < rounds, page, -1)
    lists = (pieces, page, jnp.sum(is_piece, axis=1))
    counters = jnp.zeros(cut.pieces_at, jnp.int32)
    return jnp.concatenate([counters, *(part.reshape(-1).astype(jnp.int32) for part in lists)])
