"""What follows a product of the decode kernel, in one small kernel: everything between two products but attention.

    y = (sum of parts * scale + U B) * unit + bias       U = sum of the parts of x A
    plain       y
    residual    r + y, with it times the next norm's scale, and the sums of its squares
    swiglu      silu(gate) * up

RMSNorm is spread over two kernels. The one that makes the residual stream r writes r * scale and,
of each 64 columns, the sum of r^2; the one after the next product multiplies by
unit = 1 / sqrt(mean r^2 + eps), which a product lets pass. So no kernel has to see a whole row.

The residual stream lies transposed, [D, M], as sums of products do; x of a product [M, K].
Every value is rounded to bfloat16 where the plain layer rounds it, but r * scale, whose unit comes later.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import runtime
from pallas_kernels.nvfp4_matmul import layout
from pallas_kernels.nvfp4_matmul.hopper import Sums
from pallas_kernels.nvfp4_matmul.layout import TILE

# Columns of one block; more rows of x go to further blocks.
_MOST_COLUMNS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream:
    """The residual stream of M rows, ready for a norm.

    Attributes:
      values: bfloat16 [D, M].
      scaled: bfloat16 [M, D], values times the scale of the norm that comes next.
      squares: float32 [ceil(D / 64) up to a multiple of 64, M]; its first ceil(D / 64) rows sum up to
        each row's sum of squares.
    """

    values: jax.Array
    scaled: jax.Array
    squares: jax.Array

    def unit(self, eps: float) -> jax.Array:
        """float32 [M], 1 / sqrt(mean of squares + eps)."""
        width = len(self.values)
        return jax.lax.rsqrt(jnp.sum(self.squares[: width // TILE], axis=0) / width + eps)


def stream(values: jax.Array, scale: jax.Array) -> Stream:
    """A stream from activations bfloat16 [M, D] and the float32 [D] scale of the first norm."""
    width = values.shape[1]
    wide = values.astype(jnp.float32)
    squares = jnp.zeros((_square_rows(width), len(values)), jnp.float32)
    squares = squares.at[0].set(jnp.sum(wide * wide, axis=1))
    return Stream(values.T, (wide * scale).astype(values.dtype), squares)


def supports(m: int, n: int, *, is_swiglu: bool = False) -> str | None:
    """Why this kernel cannot finish a product, or None."""
    if m % 8 or (m > _MOST_COLUMNS and m % _MOST_COLUMNS):
        return f"needs M of 8, 16, 24 or whole 32s; got M = {m}"
    if n % (2 * TILE if is_swiglu else TILE):
        return f"needs N of whole tiles of 64 rows; got N = {n}"
    return None


def finish(
    sums: Sums,
    multiplier: jax.Array,
    *,
    bias: jax.Array | None = None,
    b: jax.Array | None = None,
    norm: tuple[Stream, float] | None = None,
    residual: tuple[jax.Array, jax.Array] | None = None,
    is_swiglu: bool = False,
    interpret: bool = False,
) -> jax.Array | Stream:
    """Finishes a product of N columns and M rows.

    Args:
      sums: from `hopper.product`.
      multiplier: float32 [1] or [N], by which sums become products.
      bias: [N].
      b: bfloat16 [N, ranks], LoRA's B of all branches, transposed and scaled, zero where a branch
        has no part; given if and only if `sums` has an adapter.
      norm: the stream whose `scaled` was multiplied, and its norm's epsilon; the product is multiplied
        by its unit.
      residual: the stream's values [N, M], to which the product is added, and the float32 [N] scale
        of the norm that comes next.
      is_swiglu: whether the first half of N is a gate and the second what it lets through.
      interpret: run on a CPU, and report data races.

    Returns:
      bfloat16 [M, N], or [M, N / 2] of a `swiglu`; or the new Stream.

    Raises:
      NotImplementedError: the reason `supports` gives.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.nvfp4_matmul import transposed

    most_parts, n, m = sums.partials.shape
    if reason := supports(m, n, is_swiglu=is_swiglu):
        raise NotImplementedError(reason)
    columns = min(m, _MOST_COLUMNS)
    outputs = n // 2 if is_swiglu else n
    tiles, halves = outputs // TILE, 2 if is_swiglu else 1
    ranks = 0 if b is None else b.shape[1]
    square_tiles = 0 if norm is None else len(norm[0].values) // TILE
    of_rows = plgpu.Layout.WGMMA.reduce(1)
    swizzled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))

    operands = {"partials": sums.partials, "multiplier": multiplier / layout.DECODED_SCALE}
    if bias is not None:
        operands["bias"] = bias.astype(jnp.float32)
    if b is not None:
        operands |= {"b": b, "u": sums.adapter}
    if norm is not None:
        operands["squares"] = norm[0].squares
    if residual is not None:
        operands |= {"residual": residual[0], "scale": residual[1]}

    def kernel(*refs):
        gmem = dict(zip(operands, refs, strict=False))
        refs = refs[len(operands) :]
        outs, (b_smem, u_smem, arrived) = refs[: len(out_type)], refs[len(out_type) :]
        tile = lax.axis_index("tile")
        window = pl.ds(lax.axis_index("columns") * columns, columns)

        def load(ref, kind):
            return plgpu.load(ref, layout=kind, optimized=False).astype(jnp.float32)

        def rows_of(half):
            return pl.ds((half * tiles + tile) * TILE, TILE)

        if ranks:
            for half in range(halves):
                plgpu.copy_gmem_to_smem(
                    gmem["b"].at[rows_of(half)], b_smem.at[half], arrived.at[half]
                )
            for at in range(0, ranks, TILE):
                parts = gmem["u"].at[:, pl.ds(at, TILE), window]
                u = sum(load(parts.at[i], plgpu.Layout.WGMMA) for i in range(parts.shape[0]))
                u = u.astype(jnp.bfloat16)
                into = u_smem.at[:, pl.ds(at, TILE)]
                if interpret:
                    into[...] = u.T
                else:
                    transposed.store_swizzled(u, u_smem, at)
            plgpu.commit_smem()

        unit = None
        if norm is not None:
            total = 0
            for at in range(0, square_tiles, TILE):
                some = load(gmem["squares"].at[pl.ds(at, TILE), window], plgpu.Layout.WGMMA)
                if at + TILE > square_tiles:
                    row = plgpu.broadcasted_iota(
                        jnp.int32, some.shape, 0, layout=plgpu.Layout.WGMMA
                    )
                    some = jnp.where(row < square_tiles - at, some, 0.0)
                total += jnp.sum(some, axis=0)
            unit = lax.rsqrt(total / (square_tiles * TILE) + norm[1])

        def product(half):
            rows = rows_of(half)
            filled = sums.plan.parts((half * tiles + tile) * TILE // sums.rows)
            y = load(gmem["partials"].at[0, rows, window], plgpu.Layout.WGMMA)
            for part in range(1, most_parts):
                more = load(gmem["partials"].at[part, rows, window], plgpu.Layout.WGMMA)
                y += jnp.where(part < filled, more, jnp.zeros_like(more))
            if multiplier.shape == (1,):
                y *= gmem["multiplier"][0]
            else:
                y *= along_rows(gmem["multiplier"], rows)
            if ranks:
                plgpu.barrier_wait(arrived.at[half])

                def branch(acc):
                    plgpu.wgmma(acc, b_smem.at[half], u_smem.T)
                    plgpu.wgmma_wait(0)
                    return acc[...]

                y += pl.run_scoped(branch, plgpu.ACC((TILE, columns), jnp.float32))
            if unit is not None:
                y *= lax.broadcast_in_dim(unit, y.shape, (1,))
            if bias is not None:
                y += along_rows(gmem["bias"], rows)
            return y.astype(jnp.bfloat16)

        def along_rows(ref, rows):
            return lax.broadcast_in_dim(load(ref.at[rows], of_rows), (TILE, columns), (0,))

        def store(values, out):
            ref = out.at[window, rows_of(0)]
            if interpret:
                ref[...] = values.T
            else:
                transposed.store(values, ref)

        y = product(0)
        if is_swiglu:
            gate = y.astype(jnp.float32)
            gate = (gate / (1 + jnp.exp(-gate))).astype(jnp.bfloat16).astype(jnp.float32)
            store((gate * product(1).astype(jnp.float32)).astype(jnp.bfloat16), outs[0])
        elif residual is None:
            store(y, outs[0])
        else:
            rows = rows_of(0)
            r = load(gmem["residual"].at[rows, window], plgpu.Layout.WGMMA)
            r = (r + y.astype(jnp.float32)).astype(jnp.bfloat16)
            outs[0][rows, window] = r
            r = r.astype(jnp.float32)
            store((r * along_rows(gmem["scale"], rows)).astype(jnp.bfloat16), outs[1])
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
            plgpu.SMEM((halves, TILE, max(ranks, TILE)), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((columns, max(ranks, TILE)), jnp.bfloat16, transforms=swizzled),
            plgpu.Barrier(num_barriers=halves),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=runtime.interpret_params() if interpret else None,
        kernel_name="nvfp4_epilogue_sm90",
    )(*operands.values())
    return results[0] if residual is None else Stream(*results)


def _square_rows(width: int) -> int:
    # `finish` reads them 64 at a time.
    return -(-width // (TILE * TILE)) * TILE
