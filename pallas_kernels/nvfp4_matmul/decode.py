"""The product for few rows of x (decoding) on Hopper, in Pallas Mosaic GPU.

W is the operand that `wgmma` takes from registers, 64 rows at a time, x^T the one from shared
memory: y^T = W x^T, with M in the place of an instruction's N. One kernel serves all shapes. Its
work is a list of units, a tile of `64 * warpgroups` rows by `step` columns each, ordered by tile,
then by column; every block takes an equal run of it (stream-K; Osama et al., 2023). With as many
blocks as the card has multiprocessors the run goes over several tiles, which suits wide matrices;
with a few times as many blocks as tiles it is a plain split along K, which suits narrow ones.

    block      all warpgroups share x; each decodes and multiplies its own 64 rows of W

      warpgroup 0    wait full | decode, wgmma | leave the last slot | ... | refill the last slot
      warpgroup 1    wait full | decode, wgmma | leave the last slot | ...
      ...

    slot       `step` columns of x [M, step] and of W [warpgroups, step / 64, 3, 192 words], or more words where
               a tile of A needs them;
               `stages` of them, brought by bulk copies that warpgroup 0 starts

A product runs while the next tile is decoded, so a slot is left when the first product after it has
been issued, and refilled at the end of that unit, when the other warpgroups have most likely left
it too. There is no warpgroup for the copies alone: all registers go to those that multiply.

Sums over a part of K are written out in float32, as they lie in registers (`fragments`); `epilogue` adds
them up, scales them and does what follows a product, in one small kernel.

From a block's start to its first tile of W two microseconds go by, most of them on the way from
memory. So before a block stores its last sums, it asks the L2 cache for what blocks of the `Upcoming`
product read first.

Where the product has a LoRA branch, the last blocks of the grid multiply x with its A in the same
way, for they read the same x: A lies in memory as W does, in tiles of four times as many words
(`dense_tile`), and comes through the same slots.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import dense_tile, layout
from pallas_kernels.nvfp4_matmul.config import Config, supports
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4
from pallas_kernels.runtime import Device


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which block does what: `units` = tiles x steps, in equal runs.

    Block b takes units b * units // blocks up to (b + 1) * units // blocks. Its sum over a part of
    tile t goes to slot b - first_block(t) of the partial sums.
    """

    tiles: int
    steps: int
    blocks: int

    @property
    def units(self) -> int:
        return self.tiles * self.steps

    def start(self, block):
        """First unit of a block, a number or a traced integer."""
        return _quotient(block * self.units, self.blocks)

    def place(self, unit):
        """Tile and step of a unit, a traced integer."""
        return lax.div(unit, self.steps), lax.rem(unit, self.steps)

    def first_block(self, tile):
        """Block that has the first unit of a tile."""
        return _quotient((tile * self.steps + 1) * self.blocks - 1, self.units)

    def parts(self, tile):
        """Number of blocks that share a tile."""
        last_block = _quotient((tile + 1) * self.steps * self.blocks - 1, self.units)
        return last_block - self.first_block(tile) + 1

    @property
    def most_parts(self) -> int:
        """The largest of `parts`."""
        return int(self.parts(np.arange(self.tiles)).max())


def _quotient(a, b):
    """a // b of what is not negative: of traced numbers `//` would also compute what signs change."""
    return lax.div(a, b) if isinstance(a, jax.Array) else a // b


@dataclasses.dataclass(frozen=True)
class Beside:
    """How the last blocks of the grid multiply x with A.

    Attributes:
      tiles: of 64 ranks.
      units: of columns, which fill a slot each.
      shares: blocks that share a tile.
      width: columns of a unit.
      pieces: of A in a slot for each warpgroup, see `dense_tile`.
    """

    tiles: int
    units: int
    shares: int
    width: int
    pieces: int


@dataclasses.dataclass(frozen=True)
class Upcoming:
    """A product that starts soon after this one.

    Attributes:
      words: the words of its weight.
      config: how its work is divided.
      plan: which of its blocks does which work.
    """

    words: jax.Array
    config: Config
    plan: Plan

    @property
    def blocks(self) -> int:
        """Of that product."""
        return self.plan.blocks

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, in tiles, of what a block reads first."""
        return self.config.warpgroups, self.config.step // TILE

    def first(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where that begins, in tiles."""
        tile, at = self.plan.place(self.plan.start(block))
        high, wide = self.shape
        return tile * high, at * wide


def _cut(
    m: int,
    w: HopperNVFP4,
    config: Config,
    a_words: jax.Array | None,
    device: Device | None = None,
) -> tuple[Plan, int]:
    """What blocks do with W, and how many blocks share each tile of A."""
    (n, k), blocks, shares = w.shape, config.blocks, 0
    if a_words is not None:
        a_units = dense_tile.in_units(a_words, config.warpgroups, config.step)
        shares = dense_tile.shares(
            a_units,
            m=m,
            base_bytes=w.words.nbytes,
            most=blocks // 2,
            processors=(device or runtime.device()).processors,
        )
        blocks = max(1, blocks - len(a_units) * shares)
    columns = layout.tiles(k) * TILE
    return Plan(layout.tiles(n) // config.warpgroups, columns // config.step, blocks), shares


def upcoming(m: int, w: HopperNVFP4, config: Config, a_words: jax.Array | None) -> Upcoming:
    """A product with m rows and these other arguments of `product`, for the one before it."""
    return Upcoming(w.words, config, _cut(m + -m % 8, w, config, a_words)[0])


@dataclasses.dataclass(frozen=True)
class Sums:
    """A product as the kernel writes it, before the epilogue.

    Attributes:
      partials: float32 [parts, N, M] as `fragments`, or in rows: y^T before scaling, N of whole
        tiles; of a tile of `rows` rows the first `plan.parts` are filled.
      plan: how they came about.
      rows: of one tile of the plan.
      adapter: likewise [parts, ranks, M], (x A)^T in parts of which all are filled; or None.
    """

    partials: jax.Array
    plan: Plan
    rows: int
    adapter: jax.Array | None

    @property
    def size(self) -> tuple[int, int, int]:
        """(parts, N, M)."""
        if not self.in_fragments:
            return self.partials.shape
        parts, tiles, columns, piece = self.partials.shape
        return parts, tiles * TILE, columns * piece // TILE

    def in_rows(self) -> "Sums":
        """The same sums in one part, and in rows, added up in the order in which `epilogue` does it."""
        from pallas_kernels.mosaic import fragments

        if not self.in_fragments:
            return self
        with jax.named_scope("reduce"):
            filled = np.repeat(self.plan.parts(np.arange(self.plan.tiles)), self.rows // TILE)
            filled, total = filled[:, None, None], self.partials[0]
            for part in range(1, len(self.partials)):
                total += jnp.where(part < filled, self.partials[part], 0)
            rows = fragments.to_rows(total)[None]
        u = None if self.adapter is None else fragments.to_rows(self.adapter)
        tiles = rows.shape[1] // TILE
        return Sums(rows, Plan(tiles, 1, tiles), TILE, u)

    @property
    def in_fragments(self) -> bool:
        """Whether sums lie as the kernel's warpgroups held them, not in rows."""
        return self.partials.ndim == 4


def product(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config,
    a_words: jax.Array | None = None,
    following: Upcoming | None = None,
    *,
    device: Device | None = None,
    interpret: bool = False,
) -> Sums:
    """Multiplies x [M, K] by a packed weight, and by A if there is one; returns partial sums.

    Args:
      x: bfloat16 [M, K], M <= 128, or with K filled up with zeros to whole tiles; M is filled up to a
        multiple of eight.
      w: an [N, K] weight without stacked axes.
      config: see `config.pick_config`.
      a_words: from `dense_tile.pack`.
      following: the next product, some of whose words are prefetched; it does not change the result.
      device: the device that runs it; None for the current one.
      interpret: run on a CPU, and report data races.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    m, k = x.shape
    if k not in (w.shape[1], layout.whole(w.shape[1])):
        raise ValueError(
            f"x must be [M, K = {w.shape[1]}] to meet w of shape {w.shape}; got {x.shape}"
        )
    if reason := supports(
        m, w.shape[0], k, config, with_adapter=a_words is not None, device=device
    ):
        raise NotImplementedError(reason)
    # `wgmma` takes M in eights; K is padded as the weight is.
    x = jnp.pad(x, ((0, -m % 8), (0, -k % TILE)))
    plan, shares = _cut(len(x), w, config, a_words, device)
    return _launch(x, w, config, plan, a_words, shares, following, interpret=interpret)


def matmul(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config,
    *,
    device: Device | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x [M, K] -> x @ dequantize(w)^T [M, N], both bfloat16; see `product`."""
    m, (n, _) = len(x), w.shape
    total = product(x, w, config, device=device, interpret=interpret).in_rows().partials[0]
    with jax.named_scope("reduce"):
        scale = w.multiplier / layout.DECODED_SCALE
        return (total.T[:m, :n] * scale).astype(x.dtype)


def _launch(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config,
    plan: Plan,
    a_words: jax.Array | None,
    shares: int,
    following: Upcoming | None,
    *,
    interpret: bool,
) -> Sums:
    # This import takes half a second, so it is made only when needed.
    from pallas_kernels.nvfp4_matmul import decode_kernel

    a = None
    if a_words is not None:
        a_words = dense_tile.in_units(a_words, config.warpgroups, config.step)
        tiles, units, _, pieces = a_words.shape[:4]
        width = dense_tile.width(w.shape[1], config.warpgroups, config.step)
        a = Beside(tiles, units, shares, width, pieces)
    partials, adapter = decode_kernel.launch(
        x,
        w.words,
        a_words,
        decode_kernel.Problem(config, plan, a, following, interpret),
        name=f"nvfp4_matmul_sm90_{len(w.words) * TILE}x{w.shape[1]}",
    )
    return Sums(partials, plan, TILE * config.warpgroups, adapter)
