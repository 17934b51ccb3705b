"""The product for few rows of x (decoding) on Hopper, in Pallas Mosaic GPU.

The kernel computes y^T = W x^T. The work is a list of units of `64 * warpgroups` rows and `step` columns, of which
every block takes an equal run (stream-K; Osama et al., 2023). Partial sums over K are written in float32, in the order
of the registers (`fragments`), and `epilogue` adds them up. docs/design/kernels.md, "The product for few rows",
describes the pipeline.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import decode_config, dense_tile, layout
from pallas_kernels.nvfp4_matmul.decode_config import Config, supports
from pallas_kernels.nvfp4_matmul.decode_plan import AdapterPlan, NextProduct, Plan
from pallas_kernels.nvfp4_matmul.layout import TILE, HopperNVFP4


def _cut(m: int, w: HopperNVFP4, config: Config, a_words: jax.Array | None) -> tuple[Plan, int]:
    """Returns the plan for W, and the number of blocks that share each tile of A (0 without A)."""
    (n, k), blocks = w.shape, config.blocks
    tiles, steps = layout.tiles(n) // config.warpgroups, layout.tiles(k) * TILE // config.step
    x_tiles = decode_config.x_tiles(m)
    if a_words is None:
        return Plan(tiles * x_tiles, steps, blocks, x_tiles), 0
    if (shares := config.shares) == 0:
        a_units = dense_tile.in_units(a_words, config.warpgroups, config.step)
        shares = dense_tile.shares(
            a_units,
            height=dense_tile.height_of(a_words),
            m=m,
            base_bytes=w.words.nbytes,
            most=blocks // 2,
            processors=runtime.device().processors,
            longest=2 * -(-x_tiles * tiles * steps // blocks),
        )
        blocks = max(1, blocks - x_tiles * len(a_units) * shares)
    return Plan(tiles * x_tiles, steps, blocks, x_tiles), shares


def next_product(m: int, w: HopperNVFP4, config: Config, a_words: jax.Array | None) -> NextProduct:
    """Returns the `NextProduct` that describes a call of `product` with m rows of x and these arguments."""
    plan, (high, wide) = (
        _cut(m + -m % 8, w, config, a_words)[0],
        (config.warpgroups, config.step // TILE),
    )

    def first(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        tile, step = plan.tile_and_step(plan.start(block))
        return plan.split_tile(tile)[0] * high, step * wide

    return NextProduct(w.words, plan.blocks, (high, wide), first)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Partial sums of a product as the kernel writes them, before the epilogue.

    Attributes:
      partials: y^T before scaling, float32 [parts, N, M] with N padded to whole tiles. It is stored in rows, or as
        `fragments`. For tile t of the plan, only the first `plan.parts(t)` parts are written.
      plan: the plan that made the sums.
      rows: rows of W in one tile of the plan.
      adapter: (x A)^T, float32 [parts, ranks, M], stored in the same way; all of its parts are written. None without
        A.
    """

    partials: jax.Array
    plan: Plan
    rows: int
    adapter: jax.Array | None

    @classmethod
    def of_rows(cls, rows: jax.Array, adapter: jax.Array | None) -> "Sums":
        """Returns sums of one part, float32 [1, N, M] in rows, with N in whole tiles."""
        tiles = rows.shape[1] // TILE
        return cls(rows, Plan(tiles, 1, tiles), TILE, adapter)

    @property
    def size(self) -> tuple[int, int, int]:
        """(parts, N, M)."""
        if not self.in_fragments:
            return self.partials.shape
        parts, tiles, columns, piece = self.partials.shape
        return parts, tiles * TILE, columns * piece // TILE

    def in_rows(self) -> "Sums":
        """Adds up all parts, in the same order as `epilogue` does, and returns the sums as one part, in rows."""
        from pallas_kernels.mosaic import fragments

        if not self.in_fragments:
            return self
        with jax.named_scope("reduce"):
            filled = self.plan.parts(np.arange(self.plan.tiles)).reshape(-1, self.plan.x_tiles)
            filled, total = np.repeat(filled, self.rows // TILE, axis=0), self.partials[0]
            filled = np.repeat(filled, total.shape[1] // self.plan.x_tiles, axis=1)[..., None]
            for part in range(1, len(self.partials)):
                total += jnp.where(part < filled, self.partials[part], 0)
            rows = fragments.to_rows(total)[None]
        u = None if self.adapter is None else fragments.to_rows(self.adapter)
        return Sums.of_rows(rows, u)

    @property
    def in_fragments(self) -> bool:
        """Whether the sums are stored as `fragments`, in the order of the registers, instead of in rows."""
        return self.partials.ndim == 4


def product(
    x: jax.Array,
    w: HopperNVFP4,
    config: Config,
    a_words: jax.Array | None = None,
    following: NextProduct | None = None,
    *,
    interpret: bool = False,
) -> Sums:
    """Computes the partial sums of x W^T, and of x A if LoRA's A is given.

    Args:
      x: bfloat16 [M, K]; K may be padded with zeros to whole tiles. The sums have M rounded up to a multiple of 8.
      w: one [N, K] weight.
      config: the configuration, for example from `decode_config.pick_config`.
      a_words: LoRA's A from `dense_tile.pack`; or None.
      following: the next product, whose first words are prefetched; it does not change the result. None for none.
      interpret: whether to run on a CPU and report data races.

    Raises:
      ValueError: K of x is not that of w.
      NotImplementedError: the reason `supports` gives.
    """
    m, k = x.shape
    if k not in (w.shape[1], layout.whole(w.shape[1])):
        raise ValueError(
            f"x must be [M, K = {w.shape[1]}] to meet w of shape {w.shape}; got {x.shape}"
        )
    if reason := supports(m, w.shape[0], k, config, with_adapter=a_words is not None):
        raise NotImplementedError(reason)
    # `wgmma` needs M in multiples of 8. K is padded like the weight's K.
    x = jnp.pad(x, ((0, -m % 8), (0, -k % TILE)))
    plan, shares = _cut(len(x), w, config, a_words)
    return _launch(x, w, config, plan, a_words, shares, following, interpret=interpret)


def matmul(x: jax.Array, w: HopperNVFP4, config: Config, *, interpret: bool = False) -> jax.Array:
    """Computes x @ dequantize(w)^T, bfloat16 [M, N]; arguments and errors as for `product`."""
    m, (n, _) = len(x), w.shape
    total = product(x, w, config, interpret=interpret).in_rows().partials[0]
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
    following: NextProduct | None,
    *,
    interpret: bool,
) -> Sums:
    # Imported here because the import takes half a second.
    from pallas_kernels.nvfp4_matmul import decode_kernel

    a = None
    if a_words is not None:
        height = dense_tile.height_of(a_words)
        width = dense_tile.width(w.shape[1], config.warpgroups, config.step, height)
        a_words = dense_tile.in_units(a_words, config.warpgroups, config.step)
        tiles, units, _, pieces = a_words.shape[:4]
        a = AdapterPlan(tiles, units, shares, width, pieces)
    partials, adapter = decode_kernel.launch(
        x,
        w.words,
        a_words,
        decode_kernel.Problem(config, plan, a, following, interpret),
        name=f"nvfp4_matmul_sm90_{len(w.words) * TILE}x{w.shape[1]}",
    )
    return Sums(partials, plan, TILE * config.warpgroups, adapter)
