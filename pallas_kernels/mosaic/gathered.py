"""Loads and stores tiles of 64 rows (layout `WGMMA`), in which 8 rows each belong to one row of the batch, a member.

A list of members is int32 [8] in device memory, in the order of the tile. An absent member is -1 - m. For it, row m
of the batch is loaded, and nothing is stored or counted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.mosaic.registers import fragment, i32, index, llvm, pointer, position, thread

utils = mgpu.utils

MEMBERS, ROWS = 8, 8
_OF_TILE = plgpu.Layout.WGMMA
_OF_REF, _OF_SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())


def load_heads(
    ref: jax.Ref, members: jax.Ref, head: jax.Array, count: int, at: int, *, interpret: bool
) -> jax.Array:
    """Loads 64 columns of `count` heads of each member.

    Args:
      ref: [B, heads, n] of a 16-bit type in device memory.
      members: the list.
      head: int32, the first head.
      count: number of heads, at most 8.
      at: the first column; a multiple of 8. After the last column comes the first.
      interpret: whether this runs on a CPU.

    Returns:
      [64, 64], 8 rows for each member. The first `count` of them are the heads; do not use the others.
    """
    columns = ref.shape[-1]
    if interpret:
        at %= columns
        parts = [(at, min(64, columns - at)), (0, max(0, at + 64 - columns))]
        heads_of = lambda k: jnp.concatenate(
            [
                ref[_present(members[k]), pl.ds(head, count), pl.ds(begin, length)]
                for begin, length in parts
                if length
            ],
            axis=-1,
        )
        of_members = [heads_of(k) for k in range(MEMBERS)]
        return jnp.concatenate(
            [jnp.pad(heads, ((0, ROWS - count), (0, 0))) for heads in of_members]
        )

    def emit(
        _: mgpu.LaunchContext, ref: ir.Value, members: ir.Value, head: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        _, row, column = position()
        of_row = index(arith.addi(head.registers.item(), arith.minui(row, i32(count - 1))))

        def load(member: ir.Value, tile: int, pair: ir.Type) -> ir.Value:
            where = index(arith.addi(column, i32((at + 8 * tile) % columns)))
            return vector.load(pair, ref, [index(member), of_row, where])

        return _loaded(kind, ref, members, load)

    arg_types, kind = (_OF_REF, _OF_REF, _OF_SCALAR), _tile_of(ref.dtype)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(ref, members, head)


def load_columns(ref: jax.Ref, members: jax.Ref, *, interpret: bool) -> jax.Array:
    """Loads one vector for each member: [64, 64], whose column c is entry c % n in all 8 rows of the member.

    Args:
      ref: float32 [B, n] in device memory, n 32 or 64.
      members: the list.
      interpret: whether this runs on a CPU.
    """
    _, length = ref.shape
    if interpret:
        of_members = [
            jnp.concatenate([ref[_present(members[k])]] * (64 // length)) for k in range(MEMBERS)
        ]
        return jnp.concatenate([jnp.broadcast_to(row, (ROWS, 64)) for row in of_members])

    def emit(_: mgpu.LaunchContext, ref: ir.Value, members: ir.Value) -> mgpu.FragmentedArray:
        _, _, column = position()

        def load(member: ir.Value, tile: int, pair: ir.Type) -> ir.Value:
            where = index(arith.addi(column, i32(8 * tile % length)))
            return vector.load(pair, ref, [index(member), where])

        return _loaded(kind, ref, members, load)

    arg_types, kind = (_OF_REF, _OF_REF), _tile_of(ref.dtype)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(ref, members)


def store_parts(
    values: jax.Array,
    ref: jax.Ref,
    members: jax.Ref,
    position_of: tuple[int, jax.Array, jax.Array],
    *,
    interpret: bool,
) -> None:
    """Stores the 8 rows of each member.

    Args:
      values: float32 [64, n].
      ref: float32 [units, parts, 8, n] in device memory.
      members: the list.
      position_of: J, the unit of member 0, and the part: member m's rows go to ref[m * J + unit, part].
      interpret: run on a CPU.
    """
    stride, unit, part = position_of
    if interpret:
        _store_each(values, members, stride, unit, lambda at: ref.at[at, part])
        return

    def emit(_: mgpu.LaunchContext, values, ref, members, unit, part) -> None:
        _, row, column = position()

        def store(half: int, of_unit: ir.Value) -> None:
            begin = [of_unit, index(part.registers.item()), index(row)]
            for tile, pair in enumerate(values.registers.flat[half::2]):
                vector.store(pair, ref, [*begin, index(arith.addi(column, i32(8 * tile)))])

        _for_present(members, stride, unit, store)

    arg_types = (_OF_TILE, _OF_REF, _OF_REF, _OF_SCALAR, _OF_SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref, members, unit, part)


def store_part_values(
    values: jax.Array,
    ref: jax.Ref,
    members: jax.Ref,
    position_of: tuple[int, jax.Array, jax.Array],
    which: int,
    *,
    interpret: bool,
) -> None:
    """Stores the 8 values of each member: float32 [64], one for each row of a tile.

    `ref` is float32 [units, parts, kinds, 8] in device memory, and `which` the kind of value. The other arguments are
    those of `store_parts`.
    """
    stride, unit, part = position_of
    if interpret:
        _store_each(values, members, stride, unit, lambda at: ref.at[at, part, which])
        return

    def emit(_: mgpu.LaunchContext, values, ref, members, unit, part) -> None:
        _, row, column = position()
        kind = utils.c(which, ir.IndexType.get())

        def store(half: int, of_unit: ir.Value) -> None:
            with utils.when(arith.cmpi(arith.CmpIPredicate.eq, column, i32(0))):
                at = [of_unit, index(part.registers.item()), kind, index(row)]
                vector.store(values.registers.flat[half], ref, at)

        _for_present(members, stride, unit, store)

    arg_types = (_OF_TILE.reduce(1), _OF_REF, _OF_REF, _OF_SCALAR, _OF_SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref, members, unit, part)


def load_parts(
    ref: jax.Ref, members: jax.Ref, position_of: tuple[int, jax.Array, jax.Array], at: int
) -> jax.Array:
    """Loads 64 columns, from `at` on, of what `store_parts` stored: float32 [64, 64]. It cannot be interpreted."""
    stride, unit, part = position_of

    def emit(_: mgpu.LaunchContext, ref, members, unit, part) -> mgpu.FragmentedArray:
        _, row, column = position()

        def load(member: ir.Value, tile: int, pair: ir.Type) -> ir.Value:
            of_unit = arith.addi(arith.muli(member, i32(stride)), unit.registers.item())
            where = arith.addi(column, i32(at + 8 * tile))
            begin = [of_unit, part.registers.item(), row, where]
            return vector.load(pair, ref, [index(item) for item in begin])

        return _loaded(kind, ref, members, load)

    arg_types, kind = (_OF_REF, _OF_REF, _OF_SCALAR, _OF_SCALAR), _tile_of(ref.dtype)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(ref, members, unit, part)


def load_part_values(
    ref: jax.Ref, members: jax.Ref, position_of: tuple[int, jax.Array, jax.Array], which: int
) -> jax.Array:
    """Loads what `store_part_values` stored: float32 [64]. It cannot be interpreted."""
    stride, unit, part = position_of
    kind = plgpu.ShapeDtypeStruct((64,), ref.dtype, layout=_OF_TILE.reduce(1))

    def emit(_: mgpu.LaunchContext, ref, members, unit, part) -> mgpu.FragmentedArray:
        _, row, _ = position()
        single, loaded = ir.VectorType.get((1,), ir.MemRefType(ref.type).element_type), []
        for member in _members_of_halves(members):
            of_unit = arith.addi(arith.muli(_row_of(member), i32(stride)), unit.registers.item())
            at = [of_unit, part.registers.item(), i32(which), row]
            loaded.append(vector.load(single, ref, [index(item) for item in at]))
        return fragment(kind, loaded)

    arg_types = (_OF_REF, _OF_REF, _OF_SCALAR, _OF_SCALAR)
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=kind)(emit)(ref, members, unit, part)


def store_heads(
    values: jax.Array, ref: jax.Ref, members: jax.Ref, head: jax.Array, count: int, at: int
) -> None:
    """Stores columns of some heads of each member, the reverse of `load_heads`. It cannot be interpreted.

    Args:
      values: [64, n] of a 16-bit type, 8 rows a member, of which the first `count` are stored.
      ref: [B, heads, columns] of the same type in device memory.
      members: the list.
      head: int32, the first head.
      count: number of heads, at most 8.
      at: the first column.
    """

    def emit(_: mgpu.LaunchContext, values, ref, members, head) -> None:
        _, row, column = position()
        is_head = arith.cmpi(arith.CmpIPredicate.ult, row, i32(count))
        of_row = index(arith.addi(head.registers.item(), row))

        def store(half: int, member: ir.Value) -> None:
            for tile, pair in enumerate(values.registers.flat[half::2]):
                where = index(arith.addi(column, i32(at + 8 * tile)))
                vector.store(pair, ref, [member, of_row, where])

        with utils.when(is_head):
            for half, member in enumerate(_members_of_halves(members)):
                with utils.when(arith.cmpi(arith.CmpIPredicate.sge, member, i32(0))):
                    store(half, index(member))

    arg_types = (_OF_TILE, _OF_REF, _OF_REF, _OF_SCALAR)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref, members, head)


def count(
    counters: jax.Ref,
    totals: jax.Ref,
    members: jax.Ref,
    stride: int,
    unit: jax.Array,
    flags: jax.Ref,
) -> None:
    """Does what `collectives.count` does, for one unit of each member at once. Each of 8 threads counts in one unit.

    Args:
      counters: int32 [units] in device memory, 0 before the first warpgroup is counted.
      totals: int32 [B] in device memory, the number of warpgroups to count in each unit of a row of the batch.
      members: the list.
      stride: J; member m counts in unit m * J + `unit`.
      unit: int32, the unit of member 0.
      flags: int32 [8] in this warpgroup's shared memory. A member's flag becomes 1 if this warpgroup is the last one
        of its unit, otherwise 0.
    """

    def emit(_: mgpu.LaunchContext, counters, totals, members, unit, flags) -> None:
        word, number = ir.IntegerType.get_signless(32), thread()
        single = ir.VectorType.get((1,), word)
        read = lambda ref, at: vector.extract(vector.load(single, ref, [index(at)]), [], [0])
        utils.warpgroup_barrier()
        with utils.when(arith.cmpi(arith.CmpIPredicate.ult, number, i32(MEMBERS))):
            member = read(members, number)
            present = _row_of(member)
            at = arith.addi(arith.muli(present, i32(stride)), unit.registers.item())
            base = llvm.ptrtoint(word, pointer(flags))
            utils.inline_ptx(
                "{ .reg .b32 before, is_last; .reg .pred is_equal;\n"
                "mov.b32 is_last, 0;\n"
                "@$3 atom.acq_rel.gpu.global.inc.u32 before, [$0], $1;\n"
                "@$3 setp.eq.u32 is_equal, before, $1;\n"
                "@$3 selp.b32 is_last, 1, 0, is_equal;\n"
                "st.shared.b32 [$2], is_last; }",
                utils.getelementptr(pointer(counters), [at], word),
                arith.subi(read(totals, present), i32(1)),
                arith.addi(base, arith.muli(number, i32(4))),
                arith.cmpi(arith.CmpIPredicate.sge, member, i32(0)),
                has_side_effects=True,
            )
        utils.warpgroup_barrier()

    arg_types = (_OF_REF, _OF_REF, _OF_REF, _OF_SCALAR, _OF_REF)
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(counters, totals, members, unit, flags)


def _tile_of(dtype: jnp.dtype) -> plgpu.ShapeDtypeStruct:
    return plgpu.ShapeDtypeStruct((64, 64), dtype, layout=_OF_TILE)


def _present(member: jax.Array) -> jax.Array:
    """Returns the row of the batch that is loaded for an entry of a list."""
    return jnp.where(member < 0, -1 - member, member)


def _row_of(member: ir.Value) -> ir.Value:
    """Computes `_present` for a thread's value: -1 - m is m with all bits inverted."""
    return arith.xori(member, arith.shrsi(member, i32(31)))


def _members_of_halves(members: ir.Value) -> list[ir.Value]:
    """Returns the entries of the list for the two rows of a thread: a warp has the rows of two members."""
    warp, _, _ = position()
    single = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    at = [arith.addi(arith.muli(warp, i32(2)), i32(half)) for half in range(2)]
    return [vector.extract(vector.load(single, members, [index(k)]), [], [0]) for k in at]


def _loaded(
    kind: plgpu.ShapeDtypeStruct,
    ref: ir.Value,
    members: ir.Value,
    load: Callable[[ir.Value, int, ir.Type], ir.Value],
) -> mgpu.FragmentedArray:
    """Makes a [64, 64] tile; load(row of the batch, index of 8 columns, type) returns a thread's two values."""
    pair = ir.VectorType.get((2,), ir.MemRefType(ref.type).element_type)
    halves = [
        [load(_row_of(member), tile, pair) for tile in range(8)]
        for member in _members_of_halves(members)
    ]
    return fragment(kind, [value for both in zip(*halves, strict=True) for value in both])


def _for_present(
    members: ir.Value,
    stride: int,
    unit: mgpu.FragmentedArray,
    store: Callable[[int, ir.Value], None],
) -> None:
    """Calls store(half, unit of the member) for both rows of a thread, where the member is not absent."""
    for half, member in enumerate(_members_of_halves(members)):
        with utils.when(arith.cmpi(arith.CmpIPredicate.sge, member, i32(0))):
            at = arith.addi(arith.muli(member, i32(stride)), unit.registers.item())
            store(half, index(at))


def _store_each(
    values: jax.Array,
    members: jax.Ref,
    stride: int,
    unit: jax.Array,
    position_of: Callable[[jax.Array], jax.Ref],
) -> None:
    """Stores the rows of each member at `position_of(unit)`, for interpreted kernels."""

    def store(k: int, member: jax.Array) -> None:
        position_of(member * stride + unit)[...] = lax.slice_in_dim(
            values, ROWS * k, ROWS * (k + 1)
        )

    for k in range(MEMBERS):
        member = members[k]
        pl.when(member >= 0)(lambda k=k, member=member: store(k, member))
