"""The kernel that `epilogue` describes. Each phase is a method of `_Block`, which computes one tile of the result."""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.finished_linear.lora import PackedLora
from pallas_kernels.finished_linear.residual_stream import Stream
from pallas_kernels.mosaic import fragments, registers, transposed
from pallas_kernels.mosaic import launch as mosaic
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.decode import Sums
from pallas_kernels.nvfp4_matmul.layout import TILE


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a launch; of the arrays in it, only the shapes are used.

    Attributes:
      mode: which result is written; see `epilogue`.
      sums: the partial sums of the product.
      columns: rows of x per block.
      branch: LoRA's branch; or None.
      norm: the stream whose unit the product is multiplied by, and the epsilon of its norm; or None.
      square_rows: number of rows of the new stream's `squares`.
      interpret: whether this runs on a CPU.
    """

    mode: Literal["plain", "residual", "swiglu"]
    sums: Sums
    columns: int
    branch: PackedLora | None
    norm: tuple[Stream, float] | None
    square_rows: int
    interpret: bool

    @property
    def halves(self) -> range:
        """Indices of the halves of N: two for a SwiGLU, otherwise one (all of N). A block computes a tile of each."""
        return range(2 if self.mode == "swiglu" else 1)

    @property
    def outputs(self) -> int:
        """Number of columns of the result."""
        return self.sums.size[1] // len(self.halves)

    @property
    def tiles(self) -> int:
        """Number of tiles of 64 columns of the result."""
        return self.outputs // TILE

    @property
    def ranks(self) -> int:
        """Number of columns of B; 0 without a branch."""
        return 0 if self.branch is None else self.branch.b.shape[1]

    @property
    def distinct(self) -> int:
        """Number of different slices of x A that a block reads; gate and up may share one."""
        is_swiglu = self.mode == "swiglu"
        return len(set(self.branch.firsts)) if is_swiglu and self.branch is not None else 1

    @property
    def square_tiles(self) -> int:
        """Number of rows of `squares` that hold sums; the others are padding."""
        return 0 if self.norm is None else len(self.norm[0].values) // TILE


def launch(operands: Mapping[str, jax.Array | None], problem: Problem) -> list[jax.Array]:
    """Launches the kernel.

    Args:
      operands: `partials` float32 [parts, N, M], in rows or as `fragments`, and `divisor` float32 [N] or of any other
        size. The others may be None: `bias` [N], LoRA's `b` bfloat16 [N, R] and `u` float32 [parts, ranks, M], the
        norm's `squares` float32 [R', M] (R' is D / 64 rounded up to a multiple of 64), `residual` bfloat16 [N, M] and
        the next norm's `scale` float32 [N].
      problem: the static parameters.

    Returns:
      One array, bfloat16 [M, outputs]; with a residual three: values, scaled values and squares of a `Stream`.
    """
    _, n, m = problem.sums.size
    halves, ranks = len(problem.halves), max(problem.ranks, TILE)
    is_stream = problem.mode == "residual"

    def in_tiles(*shape: int) -> plgpu.SMEM:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=mosaic.SWIZZLED)

    results = mosaic.launch(
        functools.partial(_kernel, problem=problem),
        operands,
        {
            "stream": jax.ShapeDtypeStruct((n, m), jnp.bfloat16) if is_stream else None,
            "out": jax.ShapeDtypeStruct((m, problem.outputs), jnp.bfloat16),
            "new_squares": jax.ShapeDtypeStruct((problem.square_rows, m), jnp.float32)
            if is_stream
            else None,
        },
        {
            "b_tiles": in_tiles(halves, TILE, ranks),
            "u_tiles": in_tiles(problem.distinct, problem.columns, ranks),
            "arrived": plgpu.Barrier(num_barriers=halves),
        },
        name=f"nvfp4_epilogue_sm90_{n}",
        interpret=problem.interpret,
        grid=(problem.tiles, m // problem.columns),
        grid_names=("tile", "columns"),
    )
    return list(results.values())


@dataclasses.dataclass(frozen=True)
class _Read:
    """The values that a block loads into registers before it computes. Tiles are [64, columns].

    Attributes:
      us: for each tile of ranks, the partial sums of x A.
      parts: for each half of N, the partial sums of the product.
      squares: tiles of 64 rows of `squares`.
      divisors: for each half of N, the divisor: a scalar, or a tile.
      biases: for each half of N, the bias as a tile; empty without a bias.
      residual: a tile in float32; or None.
      scale: the next norm's scale as a tile; or None.
    """

    us: list[list[jax.Array]]
    parts: list[list[jax.Array]]
    squares: list[jax.Array]
    divisors: list[jax.Array]
    biases: list[jax.Array]
    residual: jax.Array | None
    scale: jax.Array | None


def _kernel(refs: types.SimpleNamespace, *, problem: Problem) -> None:
    tile = lax.axis_index("tile")
    size = problem.columns
    window, pieces = (
        pl.ds(lax.axis_index("columns") * size, size) for size in (size, size // fragments.COLUMNS)
    )
    rows = [pl.ds((half * problem.tiles + tile) * TILE, TILE) for half in problem.halves]
    _Block(problem, refs, tile, window, pieces, rows).run()


@dataclasses.dataclass(frozen=True)
class _Block:
    """The program of one block, which computes one tile of the result.

    Attributes:
      problem: the static parameters, the same for all blocks.
      refs: operands, results and scratch of `launch`.
      tile: index of the tile of 64 columns of the result.
      window: the block's rows of x.
      pieces: the same rows, counted in chunks of `fragments`.
      rows: for each half of N, the block's rows of the sums.
    """

    problem: Problem
    refs: types.SimpleNamespace
    tile: jax.Array
    window: pl.Slice
    pieces: pl.Slice
    rows: list[pl.Slice]

    def run(self) -> None:
        """Reads everything, computes, and writes."""
        self._ask_for_b()
        read = self._read()
        self._put_u(read.us)
        unit = self._unit(read.squares)
        y = self._product(read, unit, 0)
        if self.problem.mode == "swiglu":
            gate, up = self._rounded(y), self._rounded(self._product(read, unit, 1))
            self._write((gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16))
        elif self.problem.mode == "plain":
            self._write(y.astype(jnp.bfloat16))
        else:
            r = self._rounded(read.residual + y)
            registers.store(r.astype(jnp.bfloat16), self.refs.stream.at[self.rows[0], self.window])
            self._write((r * read.scale).astype(jnp.bfloat16))
            squares = jnp.sum(r * r, axis=0)
            registers.store(squares, self.refs.new_squares.at[self.tile, self.window])

    # Reading -------------------------------------------------------------------------------------
    def _ask_for_b(self) -> None:
        """Starts the bulk copies of B to shared memory."""
        if not self.problem.ranks:
            return
        refs = self.refs
        for half, rows in enumerate(self.rows):
            plgpu.copy_gmem_to_smem(refs.b.at[rows], refs.b_tiles.at[half], refs.arrived.at[half])

    def _read(self) -> _Read:
        """Issues all loads before any value is used, because this kernel mostly waits for memory."""
        problem, refs = self.problem, self.refs
        u_parts = 0 if problem.branch is None else refs.u.shape[0]
        us = [[self._load_sum(refs.u, i, at) for i in range(u_parts)] for at in self._rank_tiles()]
        parts = [
            [
                self._load_sum(refs.partials, i, half * problem.tiles + self.tile)
                for i in range(refs.partials.shape[0])
            ]
            for half in problem.halves
        ]
        squares = [
            _load(refs.squares.at[pl.ds(at, TILE), self.window])
            for at in range(0, problem.square_tiles, TILE)
        ]
        divisors = [refs.divisor[0] for _ in problem.halves]
        if refs.divisor.shape[0] == problem.sums.size[1]:
            divisors = [self._along_rows(refs.divisor, rows) for rows in self.rows]
        biases = (
            [] if refs.bias is None else [self._along_rows(refs.bias, rows) for rows in self.rows]
        )
        residual = scale = None
        if problem.mode == "residual":
            residual = _load(refs.residual.at[self.rows[0], self.window]).astype(jnp.float32)
            scale = self._along_rows(refs.scale, self.rows[0])
        return _Read(us, parts, squares, divisors, biases, residual, scale)

    def _rank_tiles(self) -> list[jax.Array | int]:
        """Returns the indices of the tiles of ranks that this block's rows need."""
        branch = self.problem.branch
        if branch is None:
            return []
        is_swiglu = self.problem.mode == "swiglu"
        firsts = sorted(set(branch.firsts)) if is_swiglu else [branch.first(self.tile * TILE)]
        return [
            first // TILE + i for first in firsts for i in range(-(-self.problem.ranks // TILE))
        ]

    def _load_sum(self, ref: jax.Ref, part: int, tile: jax.Array | int) -> jax.Array:
        """Loads one part of the sums of one tile, float32 [64, columns]."""
        if self.problem.sums.in_fragments:
            ref = ref.at[part, tile, self.pieces]
            return fragments.load(ref, interpret=self.problem.interpret)
        return _load(ref.at[part, pl.ds(tile * TILE, TILE), self.window])

    def _along_rows(self, ref: jax.Ref, rows: pl.Slice) -> jax.Array:
        values = _load(ref.at[rows], plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
        return lax.broadcast_in_dim(values, (TILE, self.problem.columns), (0,))

    # Computing -----------------------------------------------------------------------------------
    def _put_u(self, us: list[list[jax.Array]]) -> None:
        """Sums the parts of x A, and writes it, transposed, to shared memory as the second operand of `wgmma`."""
        for i, more in enumerate(us):
            u = functools.reduce(jnp.add, more).astype(jnp.bfloat16)
            part, at = divmod(i * TILE, max(self.problem.ranks, TILE))
            if self.problem.interpret:
                self.refs.u_tiles[part, :, pl.ds(at, TILE)] = u.T
            else:
                transposed.store_swizzled(u, self.refs.u_tiles.at[part], at)
        if self.problem.ranks:
            plgpu.commit_smem()

    def _unit(self, squares: list[jax.Array]) -> jax.Array | None:
        """Returns 1 / RMS from the norm before, for each row of x; None without a norm."""
        if self.problem.norm is None:
            return None
        (stream, eps), tiles = self.problem.norm, self.problem.square_tiles
        shape = (TILE, self.problem.columns)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        squares = [
            some if at + TILE <= tiles else jnp.where(row < tiles - at, some, 0.0)
            for at, some in zip(range(0, tiles, TILE), squares, strict=True)
        ]
        total = jnp.sum(functools.reduce(jnp.add, squares), axis=0)
        return lax.rsqrt(total / stream.width + eps)

    def _product(self, read: _Read, unit: jax.Array | None, half: int) -> jax.Array:
        """Returns one half of y, float32 [64, columns]: with LoRA, norm and bias, without SwiGLU or residual."""
        sums = self.problem.sums
        row = (half * self.problem.tiles + self.tile) * TILE
        filled = sums.plan.parts(self._tile_of_sums(row))
        y, *others = read.parts[half]
        for part, more in enumerate(others, 1):
            y += jnp.where(part < filled, more, jnp.zeros_like(more))
        y = self._rounded(y) * (1 / read.divisors[half] / layout.DECODED_SCALE)
        if self.problem.ranks:
            y += self._rounded(self._branch(half))
        if unit is not None:
            y *= lax.broadcast_in_dim(unit, y.shape, (1,))
        if read.biases:
            y += read.biases[half]
        return y

    def _tile_of_sums(self, row: jax.Array) -> jax.Array:
        """Returns the tile of the plan to which this block's sums of a row of W belong."""
        sums, tile = self.problem.sums, lax.div(row, self.problem.sums.rows)
        if sums.plan.x_tiles == 1:
            return tile
        of_tile = sums.size[2] // sums.plan.x_tiles // self.problem.columns
        return tile * sums.plan.x_tiles + lax.div(lax.axis_index("columns"), of_tile)

    def _branch(self, half: int) -> jax.Array:
        """Returns the product of B and x A, float32 [64, columns]."""
        refs = self.refs
        plgpu.barrier_wait(refs.arrived.at[half])

        def multiply(acc):
            u = refs.u_tiles.at[min(half, self.problem.distinct - 1)]
            plgpu.wgmma(acc, refs.b_tiles.at[half], u.T)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((TILE, self.problem.columns), jnp.float32))

    def _rounded(self, values: jax.Array) -> jax.Array:
        return registers.rounded_to_bfloat16(values, interpret=self.problem.interpret)

    def _write(self, values: jax.Array) -> None:
        """Writes bfloat16 [64, columns] to the result, transposed."""
        ref = self.refs.out.at[self.window, self.rows[0]]
        if self.problem.interpret:
            ref[...] = values.T
        else:
            transposed.store(values, ref)


def _load(ref: jax.Ref, kind: plgpu.Layout = plgpu.Layout.WGMMA) -> jax.Array:
    return plgpu.load(ref, layout=kind, optimized=False)
