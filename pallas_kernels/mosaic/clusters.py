"""Sends sums between the blocks of a cluster, from registers to another block's shared memory.

A sender does not wait: `st.async` counts its bytes at a barrier of the receiving block when they have arrived. Pallas'
own `async_store_smem` moves 8 bytes at a time, and lets every thread arrive at the remote barrier. Here a thread moves
16 bytes, and only the receiver arrives: it knows how many bytes to expect.

    all blocks   prepare, arrive ... await_all, send, send, ...
    receiver     ... await_sent, load

Between `arrive` and `await_all` a block may do anything that does not use the memory that others write.
"""

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.mosaic import fragments
from pallas_kernels.mosaic.registers import elements, i32, llvm, pointer, thread

utils = mgpu.utils

# Words of shared memory that a barrier takes.
BARRIER_WORDS = 2


def prepare(barriers: jax.Ref) -> None:
    """Makes barriers that `send` and `await_sent` use.

    Args:
      barriers: int32 [G, BARRIER_WORDS] in shared memory.
    """

    def emit(_: mgpu.LaunchContext, barriers: ir.Value) -> None:
        count, _ = ir.MemRefType(barriers.type).shape
        is_first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), i32(0))
        for at in range(count):
            address = _shared_address(barriers, BARRIER_WORDS * at)
            code = "mbarrier.init.shared::cta.b64 [$0], 1;"
            utils.inline_ptx(code, address, predicate=is_first, has_side_effects=True)
        utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(barriers)


def arrive() -> None:
    """Tells the cluster that this block's memory may be written; all threads of all its blocks call this once."""
    plgpu.inline_mgpu()(lambda _: _of_all_threads("barrier.cluster.arrive.release.aligned;"))()


def await_all() -> None:
    """Waits until all threads of the cluster have called `arrive`; all threads call this once."""
    plgpu.inline_mgpu()(lambda _: _of_all_threads("barrier.cluster.wait.acquire.aligned;"))()


def send(values: jax.Array, ref: jax.Ref, barrier: jax.Ref, block: jax.Array) -> None:
    """Stores values as `fragments` in the shared memory of a block of this cluster, which may be this block.

    Args:
      values: float32 [64, M] in the layout `WGMMA`.
      ref: float32 [M / 8, 512], this block's own array; the other block's array of the same name is written.
      barrier: int32 [BARRIER_WORDS] from `prepare`, also of the other block.
      block: int32, the other block's number in the cluster.
    """

    def emit(
        _: mgpu.LaunchContext,
        values: mgpu.FragmentedArray,
        ref: ir.Value,
        barrier: ir.Value,
        block: mgpu.FragmentedArray,
    ) -> None:
        block = block.registers.item()
        to, counted_by = (
            _of_block(address, block)
            for address in (_shared_address(ref, 0), _shared_address(barrier, 0))
        )
        to = arith.addi(to, arith.muli(thread(), i32(16)))
        own = [value for pair in values.registers.flat for value in elements(pair)]
        for column in range(len(own) // 4):
            utils.inline_ptx(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32"
                " [$0], {$1, $2, $3, $4}, [$5];",
                arith.addi(to, i32(4 * fragments.PIECE * column)),
                *own[4 * column : 4 * column + 4],
                counted_by,
                has_side_effects=True,
            )

    arg_types = (plgpu.Layout.WGMMA, *(plgpu.RefType(),) * 2, plgpu.Layout.WG_SPLAT(()))
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(values, ref, barrier, block)


def await_sent(barrier: jax.Ref, count: int) -> None:
    """Waits until `count` bytes have arrived by `send`. One warpgroup waits, once for each barrier.

    Args:
      barrier: int32 [BARRIER_WORDS] from `prepare`.
      count: bytes that all blocks send to this barrier.
    """

    def emit(_: mgpu.LaunchContext, barrier: ir.Value) -> None:
        address = _shared_address(barrier, 0)
        utils.inline_ptx(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
            address,
            i32(count),
            predicate=utils.single_thread_predicate(scope=utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )
        utils.inline_ptx(
            "{ .reg .pred has_arrived;\n"
            "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 has_arrived, [$0], 0;\n"
            "@!has_arrived bra again; }",
            address,
            has_side_effects=True,
        )

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(emit)(barrier)


def _of_all_threads(code: str) -> None:
    utils.inline_ptx(code, has_side_effects=True, convergent=True)


def _shared_address(ref: ir.Value, word: int) -> ir.Value:
    """Address of a word of an array in this block's shared memory, as a 32-bit number."""
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), pointer(ref))
    return arith.addi(base, i32(4 * word))


def _of_block(address: ir.Value, block: ir.Value) -> ir.Value:
    """The same place in the shared memory of another block of the cluster."""
    code = "mapa.shared::cluster.u32 $0, $1, $2;"
    word = ir.IntegerType.get_signless(32)
    return utils.inline_ptx(code, address, block, result_types=word)
