"""How the blocks of the kernel for few rows (`decode`) divide its work."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@dataclasses.dataclass(frozen=True)
class Plan:
    """Assigns the tiles * steps units to blocks, in equal runs.

    Block b takes units b * units // blocks to (b + 1) * units // blocks - 1. Its partial sums of tile t are stored as
    part b - first_block(t).

    Attributes:
      tiles: tiles of rows of W, for all tiles of x.
      steps: steps along K in each tile.
      blocks: blocks that share the units.
      x_tiles: tiles of x. With several, `tiles` counts each tile of rows of W once for each of them, one after the
        other.
    """

    tiles: int
    steps: int
    blocks: int
    x_tiles: int = 1

    @property
    def units(self) -> int:
        return self.tiles * self.steps

    def start(self, block):
        """Returns the first unit of a block; `block` is an int or a traced integer."""
        return _quotient(block * self.units, self.blocks)

    def tile_and_step(self, unit):
        """Returns the tile and the step of a unit; `unit` is a traced integer."""
        return lax.div(unit, self.steps), lax.rem(unit, self.steps)

    def split_tile(self, tile):
        """Returns the tile of rows of W, and the tile of x, of a tile; `tile` is a traced integer."""
        if self.x_tiles == 1:
            return tile, jnp.int32(0)
        return lax.div(tile, self.x_tiles), lax.rem(tile, self.x_tiles)

    def first_block(self, tile):
        """Returns the block that has the first unit of a tile."""
        return _quotient((tile * self.steps + 1) * self.blocks - 1, self.units)

    def parts(self, tile):
        """Returns the number of blocks that share a tile."""
        last_block = _quotient((tile + 1) * self.steps * self.blocks - 1, self.units)
        return last_block - self.first_block(tile) + 1

    @property
    def most_parts(self) -> int:
        """The largest number of blocks that share a tile."""
        return int(self.parts(np.arange(self.tiles)).max())


def _quotient(a, b):
    """Returns a // b for non-negative numbers. For traced numbers, `//` would add instructions for signs."""
    return lax.div(a, b) if isinstance(a, jax.Array) else a // b


@dataclasses.dataclass(frozen=True)
class AdapterPlan:
    """Describes how the last blocks of the grid multiply x by LoRA's A.

    Attributes:
      tiles: number of tiles of 64 ranks; each is multiplied by every tile of x.
      units: number of units along K in each tile; a unit fills a slot.
      shares: number of blocks that share a tile.
      width: columns of a unit.
      pieces: pieces of A in a slot for each warpgroup; see `dense_tile`.
    """

    tiles: int
    units: int
    shares: int
    width: int
    pieces: int


@dataclasses.dataclass(frozen=True)
class NextProduct:
    """Describes the product after this one, whose first words are prefetched into the L2 cache.

    Attributes:
      words: its packed weight, int32 [N / 64, K / 64, 3, 192].
      blocks: number of blocks that multiply W.
      shape: rows and columns of the words that a block reads first, in tiles of 64 x 64.
      first: returns the row and column where a block's first words begin, in tiles of 64 x 64.
    """

    words: jax.Array
    blocks: int
    shape: tuple[int, int]
    first: Callable[[jax.Array], tuple[jax.Array, jax.Array | int]]
