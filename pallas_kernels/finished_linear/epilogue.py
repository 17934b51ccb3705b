"""What follows a product of the decode kernel, in one small kernel: everything between two products but attention.

    y = ([sum of parts] * scale + [[U] B]) * unit + bias       U = sum of the parts of x A
    plain       [y]
    residual    [r + y], with [it times the next norm's scale], and the sums of its squares
    swiglu      [silu([gate]) * [up]]

RMSNorm is spread over two kernels. The one that makes the residual stream r writes r * scale and,
of each 64 columns, the sum of r^2; the one after the next product multiplies by
unit = 1 / sqrt(mean r^2 + eps), which a product lets pass. So no kernel has to see a whole row.

What stands in brackets is rounded to bfloat16, and nothing else is. A layer in training rounds in the
same places, most of which are its products' outputs, because random weights make of a rounding that one
of them leaves out more than of an addition in another order (docs/design.md, "Where rounding
happens").

The residual stream lies transposed, [D, M], as sums of products do; x of a product [M, K].
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.finished_linear.lora import Branch
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.decode import Sums, most_shared_bytes
from pallas_kernels.nvfp4_matmul.layout import TILE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream of M rows, ready for a norm.

    Attributes:
      values: bfloat16 [D, M], D filled up with zeros to whole tiles of 64.
      scaled: bfloat16 [M, D], likewise, values times the scale of the norm that comes next.
      squares: float32 [ceil(D / 64) up to a multiple of 64, M]; its first ceil(D / 64) rows sum up to
        each row's sum of squares.
      width: D.
    """

    values: jax.Array
    scaled: jax.Array
    squares: jax.Array
    width: int = dataclasses.field(metadata={"static": True})

    def unit(self, eps: float) -> jax.Array:
        """float32 [M], 1 / sqrt(mean of squares + eps)."""
        squares = self.squares[: layout.tiles(self.width)]
        return jax.lax.rsqrt(jnp.sum(squares, axis=0) / self.width + eps)


def stream(values: jax.Array, scale: jax.Array) -> Stream:
    """A stream from activations bfloat16 [M, D] and the float32 [D] scale of the first norm."""
    width = values.shape[1]
    more = -width % TILE
    values, scale = jnp.pad(values, ((0, 0), (0, more))), jnp.pad(scale, (0, more))
    wide = values.astype(jnp.float32)
    squares = jnp.zeros((_square_rows(width), len(values)), jnp.float32)
    squares = squares.at[0].set(jnp.sum(wide * wide, axis=1))
    return Stream(values.T, (wide * scale).astype(values.dtype), squares, width)


def supports(m: int, n: int, *, rank: int = 0, is_swiglu: bool = False) -> str | None:
    """Why this kernel cannot finish a product, or None.

    Args:
      m: rows of x.
      n: rows of W.
      rank: of one part of the branch of LoRA, as `lora.filled_rank` makes it; 0 without one.
      is_swiglu: whether N is a gate and what it lets through.
    """
    if m % _columns(m):
        return f"needs M in eights up to 32, then in 32s; got M = {m}"
    if n % (2 * TILE if is_swiglu else TILE):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    used, most = shared_bytes(m, rank, is_swiglu=is_swiglu), most_shared_bytes()
    if used > most:
        return (
            f"needs {used} bytes of shared memory of {most} to finish M = {m} rows of "
            f"LoRA of rank {rank}"
        )
    return None


def shared_bytes(m: int, rank: int, *, is_swiglu: bool) -> int:
    """Bytes of shared memory that a block takes: B of its rows, and x A of its rows of x."""
    halves = 2 if is_swiglu else 1
    # Of ranks below a tile a gate and what it lets through share one.
    distinct = halves if rank >= TILE else 1
    return 2 * max(rank, TILE) * (halves * TILE + distinct * _columns(m))


def finish(
    sums: Sums,
    divisor: jax.Array,
    *,
    bias: jax.Array | None = None,
    branch: Branch | None = None,
    norm: tuple[Stream, float] | None = None,
    residual: tuple[jax.Array, jax.Array] | None = None,
    is_swiglu: bool = False,
    interpret: bool = False,
) -> jax.Array | Stream:
    """Finishes a product of N columns and M rows.

    Args:
      sums: from `nvfp4_matmul.decode.product`.
      divisor: float32 [N], or fewer of which the first counts, the weight's global scale.
      bias: [N], as all that has an axis N with parts that are filled up to whole tiles.
      branch: LoRA's; given if and only if `sums` has an adapter.
      norm: the stream whose `scaled` was multiplied, and its norm's epsilon; the product is multiplied
        by its unit.
      residual: the stream's values [N, M], to which the product is added, and the float32 scale of the
        norm that comes next, which says how much of N is real.
      is_swiglu: whether the first half of N is a gate and the second what it lets through.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or [M, N / 2] of a `swiglu`; or the new Stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import fragments, launch, registers, transposed

    most_parts, n, m = sums.size
    rank = 0 if branch is None else branch.rank
    if reason := supports(m, n, rank=rank, is_swiglu=is_swiglu):
        raise NotImplementedError(reason)
    columns = _columns(m)
    outputs = n // 2 if is_swiglu else n
    tiles, halves = outputs // TILE, range(2 if is_swiglu else 1)
    ranks = 0 if branch is None else branch.b.shape[1]
    u_parts = 0 if branch is None else len(sums.adapter)
    # A gate and what it lets through may find their ranks in one tile.
    distinct = len(set(branch.firsts)) if is_swiglu and branch is not None else 1
    square_tiles = 0 if norm is None else len(norm[0].values) // TILE
    whole, of_rows = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))

    operands = {"partials": sums.partials, "divisor": divisor}
    if bias is not None:
        operands["bias"] = bias
    if branch is not None:
        operands |= {"b": branch.b, "u": sums.adapter}
    if norm is not None:
        operands["squares"] = norm[0].squares
    if residual is not None:
        scale = jnp.pad(residual[1], (0, n - len(residual[1])))
        operands |= {"residual": residual[0], "scale": scale}

    def kernel(*refs):
        gmem = dict(zip(operands, refs, strict=False))
        refs = refs[len(operands) :]
        outs, (b_smem, u_smem, arrived) = refs[: len(out_type)], refs[len(out_type) :]
        tile = lax.axis_index("tile")
        window, pieces = (
            pl.ds(lax.axis_index("columns") * size, size)
            for size in (columns, columns // fragments.COLUMNS)
        )
        rows = [pl.ds((half * tiles + tile) * TILE, TILE) for half in halves]

        def load(ref, kind=whole):
            return plgpu.load(ref, layout=kind, optimized=False)

        def load_sum(ref, part, tile):
            if sums.in_fragments:
                return fragments.load(ref.at[part, tile, pieces], interpret=interpret)
            return load(ref.at[part, pl.ds(tile * TILE, TILE), window])

        def rank_tiles():
            if branch is None:
                return []
            firsts = sorted(set(branch.firsts)) if is_swiglu else [branch.first(tile * TILE)]
            return [first // TILE + i for first in firsts for i in range(-(-ranks // TILE))]

        def as_rounded(values):
            return registers.rounded_to_bfloat16(values, interpret=interpret)

        def along_rows(ref, half):
            values = load(ref.at[rows[half]], of_rows).astype(jnp.float32)
            return lax.broadcast_in_dim(values, (TILE, columns), (0,))

        if ranks:
            for half in halves:
                plgpu.copy_gmem_to_smem(gmem["b"].at[rows[half]], b_smem.at[half], arrived.at[half])

        # All that is read is asked for before any of it is used: latency is most of this kernel.
        us = [
            [load_sum(gmem["u"], i, rank_tile) for i in range(u_parts)]
            for rank_tile in rank_tiles()
        ]
        parts = [
            [load_sum(gmem["partials"], i, half * tiles + tile) for i in range(most_parts)]
            for half in halves
        ]
        squares = [
            load(gmem["squares"].at[pl.ds(at, TILE), window]) for at in range(0, square_tiles, TILE)
        ]
        divisors = [gmem["divisor"][0] for _ in halves]
        if len(divisor) == n:
            divisors = [along_rows(gmem["divisor"], half) for half in halves]
        biases = [along_rows(gmem["bias"], half) for half in halves] if bias is not None else []
        if residual is not None:
            r = load(gmem["residual"].at[rows[0], window]).astype(jnp.float32)
            scale = along_rows(gmem["scale"], 0)

        for i, more in enumerate(us):
            u = functools.reduce(jnp.add, more).astype(jnp.bfloat16)
            part, at = divmod(i * TILE, max(ranks, TILE))
            if interpret:
                u_smem[part, :, pl.ds(at, TILE)] = u.T
            else:
                transposed.store_swizzled(u, u_smem.at[part], at)
        if ranks:
            plgpu.commit_smem()

        unit = None
        if norm is not None:
            row = plgpu.broadcasted_iota(jnp.int32, (TILE, columns), 0, layout=whole)
            squares = [
                some if at + TILE <= square_tiles else jnp.where(row < square_tiles - at, some, 0.0)
                for at, some in zip(range(0, square_tiles, TILE), squares, strict=True)
            ]
            total = jnp.sum(functools.reduce(jnp.add, squares), axis=0)
            unit = lax.rsqrt(total / norm[0].width + norm[1])

        def product(half):
            filled = sums.plan.parts(lax.div((half * tiles + tile) * TILE, sums.rows))
            y, *others = parts[half]
            for part, more in enumerate(others, 1):
                y += jnp.where(part < filled, more, jnp.zeros_like(more))
            y = as_rounded(y) * (1 / divisors[half] / layout.DECODED_SCALE)
            if ranks:
                plgpu.barrier_wait(arrived.at[half])

                def multiply(acc):
                    plgpu.wgmma(acc, b_smem.at[half], u_smem.at[min(half, distinct - 1)].T)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                y += as_rounded(pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32)))
            if unit is not None:
                y *= lax.broadcast_in_dim(unit, y.shape, (1,))
            if biases:
                y += biases[half]
            return y

        def store(values, out):
            ref = out.at[window, rows[0]]
            if interpret:
                ref[...] = values.T
            else:
                transposed.store(values, ref)

        y = product(0)
        if is_swiglu:
            gate, up = as_rounded(y), as_rounded(product(1))
            store((gate / (1 + jnp.exp(-gate)) * up).astype(jnp.bfloat16), outs[0])
        elif residual is None:
            store(y.astype(jnp.bfloat16), outs[0])
        else:
            r = as_rounded(r + y)
            outs[0][rows[0], window] = r.astype(jnp.bfloat16)
            store((r * scale).astype(jnp.bfloat16), outs[1])
            outs[2][tile, window] = jnp.sum(r * r, axis=0)

    out_type = [jax.ShapeDtypeStruct((m, outputs), jnp.bfloat16)]
    if residual is not None:
        out_type = [
            jax.ShapeDtypeStruct((n, m), jnp.bfloat16),
            *out_type,
            jax.ShapeDtypeStruct((_square_rows(n), m), jnp.float32),
        ]
    results = plgpu.kernel(
        kernel,
        out_type=tuple(out_type),
        grid=(tiles, m // columns),
        grid_names=("tile", "columns"),
        scratch_types=(
            plgpu.SMEM((len(halves), TILE, max(ranks, TILE)), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((distinct, columns, max(ranks, TILE)), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_barriers=len(halves)),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=launch.INTERPRETED if interpret else None,
        kernel_name=f"nvfp4_epilogue_sm90_{n}",
    )(*operands.values())
    return results[0] if residual is None else Stream(*results, len(residual[1]))


def _columns(m: int) -> int:
    """Rows of x that one block finishes; on an H200 the best of 8, 16 and 32 for a 7B layer."""
    return 8 if m <= 32 else 16 if m <= 64 else 32


def _square_rows(width: int) -> int:
    # `finish` reads them 64 at a time.
    return -(-width // (TILE * TILE)) * TILE
