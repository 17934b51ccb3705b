"""Which block of the kernel attends to which pages. A plan depends only on tables and ends, and serves all layers.

A unit is a row and a key/value head. Its live pages are cut into equal pieces of at most `pages` pages, or of more
where there would be more than `parts` pieces. So the cut of a row depends only on its own length and on shapes, and
the bits of its result do not depend on other rows. The block that gets a piece does depend on them. The pieces of
all units, longest first, are dealt to the blocks forth and back, so that all blocks read about the same amount.
Pieces of a unit are equal, so that they are read at about the same time, and summed while others are read.
"""

import dataclasses

import jax
import jax.numpy as jnp

PAGE = 64
# What is written down of a piece: the unit, row * J + head; which of the unit's pieces, times SHIFT, and of how
# many; its live slots; its last page, as pages are written down, if it is the row's last, and otherwise -1.
FIELDS = UNIT, PART, SLOTS, HOME = range(4)
SHIFT = 2**16


@dataclasses.dataclass(frozen=True)
class Cut:
    """How units are cut, and the number of blocks that share them.

    Attributes:
      rows: B.
      width: W, the pages that a row may have.
      key_heads: J.
      pages: of a piece at most, if it is not one of the most parts.
      parts: most pieces of a unit.
      blocks: teams of the kernel, those of all its blocks.
    """

    rows: int
    width: int
    key_heads: int
    pages: int
    parts: int
    blocks: int

    @property
    def most_parts(self) -> int:
        """Pieces of the longest unit."""
        return min(self.parts, -(-self.width // self.pages))

    @property
    def rounds(self) -> int:
        """Most pieces of a block."""
        return -(-self.rows * self.key_heads * self.most_parts // self.blocks)

    @property
    def length(self) -> int:
        """Most pages of a block."""
        return self.rounds * max(self.pages, -(-self.width // self.parts))

    @property
    def pieces_at(self) -> int:
        """Where pieces [blocks, rounds, fields] begin; before come the units' counters of parts, zeros."""
        return self.rows * self.key_heads

    @property
    def pages_at(self) -> int:
        """Where pages begin, of each block so many: page * J + head, and -1 after the last."""
        return self.pieces_at + self.blocks * self.rounds * len(FIELDS)

    @property
    def counts_at(self) -> int:
        """Where the blocks' numbers of pieces [blocks] begin."""
        return self.pages_at + self.blocks * (self.length + 1)

    @property
    def size(self) -> int:
        """Words in all."""
        return self.counts_at + self.blocks


def parts_of(live: jax.Array, cut: Cut) -> jax.Array:
    """Pieces of rows with so many live pages."""
    return jnp.minimum(-(-live // cut.pages), cut.parts)


def make(tables: jax.Array, ends: jax.Array, pages: int, cut: Cut) -> jax.Array:
    """Makes the list of every block's work.

    Nothing is sorted or scanned: each is a sum over pairs, which XLA fuses into few small kernels.

    Args:
      tables: int32 [B, W].
      ends: int32 [B].
      pages: pages per layer of the cache.
      cut: how units are cut.

    Returns:
      int32 [cut.size]: counters, pieces, pages and counts as `Cut` says.
    """
    rows, key_heads, blocks, rounds = cut.rows, cut.key_heads, cut.blocks, cut.rounds
    tables = jnp.clip(tables, 0, pages - 1)
    ends = jnp.clip(ends, 0, cut.width * PAGE - 1)
    each_row = jnp.arange(rows)
    live = ends // PAGE + 1
    parts = parts_of(live, cut)
    size, longer = live // parts, live % parts

    # Two kinds of pieces of a row: the first few, with a page more, and the rest.
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
