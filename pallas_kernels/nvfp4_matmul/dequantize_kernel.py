"""The kernel that `dequantize` describes."""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.mosaic import paired
from pallas_kernels.mosaic.ring import Ring
from pallas_kernels.nvfp4_matmul import layout, packed_tile
from pallas_kernels.nvfp4_matmul.layout import TILE


def launch(
    words: jax.Array, step: int, stages: int, blocks: int, *, is_paired: bool, interpret: bool
) -> jax.Array:
    """Unpacks tiles, int32 [N / 64, K / 64, 3, 192], to code * scale, bfloat16 [N, K]; see `dequantize.Config`.

    If `is_paired`, the rows of the tiles are in the order of `layout.paired_rows`, and those of the result are not.
    """
    row_tiles, column_tiles = words.shape[:2]
    chunks = step // TILE
    out = jax.ShapeDtypeStruct((row_tiles * TILE, column_tiles * TILE), jnp.bfloat16)
    return mosaic.launch(
        functools.partial(
            _unpack,
            step=step,
            stages=stages,
            blocks=blocks,
            is_paired=is_paired,
            interpret=interpret,
        ),
        {"w": words},
        {"out": out},
        {
            "slots": plgpu.SMEM((stages, chunks, *layout.TILE_SHAPE), jnp.int32),
            "unpacked": plgpu.SMEM((2, TILE, step), jnp.bfloat16, transforms=mosaic.SWIZZLED),
            "full": plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        },
        name="nvfp4_dequantize_sm90",
        interpret=interpret,
        grid=(blocks,),
        grid_names=("block",),
    )["out"]


def _unpack(
    refs: types.SimpleNamespace,
    *,
    step: int,
    stages: int,
    blocks: int,
    is_paired: bool,
    interpret: bool,
) -> None:
    """Unpacks units block, block + blocks, ... of 64 rows by `step` columns."""
    row_tiles, column_tiles = refs.w.shape[:2]
    chunks = step // TILE
    steps = column_tiles // chunks
    units = row_tiles * steps
    block = lax.axis_index("block")
    turns = lax.div(units - block + blocks - 1, blocks)
    # The ranges of a unit's rows that are stored together, and where they go in the result.
    places = [(pl.ds(0, TILE), lambda row: pl.ds(row * TILE, TILE))]
    if is_paired:
        half, up = TILE // 2, row_tiles * TILE // 2
        places = [
            (pl.ds(0, half), lambda row: pl.ds(row * half, half)),
            (pl.ds(half, half), lambda row: pl.ds(up + row * half, half)),
        ]

    def row_and_column(turn):
        unit = block + turn * blocks
        return lax.div(unit, steps), lax.rem(unit, steps)

    def copy(turn, slot):
        row, column = row_and_column(turn)
        plgpu.copy_gmem_to_smem(
            refs.w.at[row, pl.ds(column * chunks, chunks)], refs.slots.at[slot], refs.full.at[slot]
        )

    ring = Ring(stages, copy, refs.full, end=turns)
    ring.fill()

    @pl.loop(0, turns)
    def _units(turn):
        (row, column), slot = row_and_column(turn), ring.slot(turn)
        result = refs.unpacked.at[lax.rem(turn, 2)]
        with jax.named_scope("load"):
            ring.wait(slot)
            # Wait for the second to last copy: it reads the buffer that is written next.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        with jax.named_scope("decode"):
            for chunk in range(chunks):
                tile = refs.slots.at[slot, chunk]
                decode = (
                    (lambda ref: packed_tile.decode_words(ref[...]))
                    if interpret
                    else packed_tile.decode
                )
                # Exact, because the factor is a power of two.
                values = decode(tile) * jnp.bfloat16(1 / layout.DECODED_SCALE)
                parts = paired.halves(values, interpret=interpret) if is_paired else (values,)
                for part, (rows, _) in zip(parts, places, strict=True):
                    result[rows, pl.ds(chunk * TILE, TILE)] = part
        with jax.named_scope("store"):
            # After this barrier all threads are done: the result can be copied out, and the packed slot refilled.
            plgpu.commit_smem()
            for at, (rows, to) in enumerate(places):
                plgpu.copy_smem_to_gmem(
                    result.at[rows],
                    refs.out.at[to(row), pl.ds(column * step, step)],
                    commit_group=at == len(places) - 1,
                )
        pl.when(turn + stages < turns)(lambda: ring.fetch(turn + stages))

    plgpu.wait_smem_to_gmem(0)
