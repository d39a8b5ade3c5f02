"""flash-attn-4's backward for Hopper in another order of work, with dQ added up in a fixed one (README.md, "Sums in a fixed order").

The package's kernel has one thread block per block of keys and head: a warp loads, two warp groups multiply, and a warp adds each dQ from
shared memory to global memory. For our mask the first two get their work by way of objects that look like the package's own: a scheduler
that says which block of keys a thread block has, lists that count its blocks of queries down, and a mask that is applied where it is
needed. The last is replaced: it waits until all that come before have added to this dQ, adds, and counts itself.

Imported where the package is about to be used (`fa4_ordered.py`), since it needs the CuTe DSL.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, cute
from flash_attn.cute import barrier
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90, copy_utils, layout_utils
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.tile_scheduler import WorkTileInfo

from sp_compile.kernels.attention import fa4_mask

NEIGHBOURS = 4
"""Blocks of keys that start one after the other for the same head. Heads that share keys are as far apart: they take turns, too."""


@cute.jit
def ordered_mask(batch, head, query, key, lengths, tensors):
    """`forest_mask`; that a kernel is given this function is how it knows that it adds up in turn."""
    return fa4_mask.forest_mask(batch, head, query, key, lengths, tensors)


class Work(NamedTuple):
    """What a thread block does: `head`, and a row of `mask_order`."""

    head: Int32
    block: Int32
    middle: Int32
    stop: Int32
    last_turn: Int32
    turn: Int32

    @property
    def length(self) -> Int32:
        """Blocks of queries."""
        return self.stop - self.block


def find_work(lists: Any, groups: int) -> Work:
    """Of this thread block, given `lists` that hold `mask_order` (`fa4_ordered.py`) and how many heads share keys.

    In chunks of `NEIGHBOURS` rows: first these for one head of each group, then for the next ones.
    """
    block, middle, stop, last_turn = lists[0], lists[1], lists[2], lists[3]
    turn = lists[6]
    _, heads, blocks = block.shape
    index, _, _ = cute.arch.block_idx()
    kv_heads = heads // groups
    chunk, index = index // (heads * NEIGHBOURS), index % (heads * NEIGHBOURS)
    rows = cutlass.min(blocks - chunk * NEIGHBOURS, NEIGHBOURS)
    member, index = index // (rows * kv_heads), index % (rows * kv_heads)
    row = chunk * NEIGHBOURS + index // kv_heads
    head = index % kv_heads * groups + member
    return Work(
        head, block[0, 0, row], middle[0, 0, row, 0], stop[0, 0, row], last_turn[0, 0, row, 0], turn[0, 0, row, 0],
    )  # fmt: skip


class Schedule:
    """In place of the package's scheduler: one tile."""

    def __init__(self, work: Work, begun: Int32) -> None:
        self.work, self.begun = work, begun

    def get_current_work(self) -> WorkTileInfo:
        return WorkTileInfo((self.work.block, self.work.head, Int32(0), Int32(0)), self.begun == 0)

    initial_work_tile_info = get_current_work

    def prefetch_next_work(self) -> None:
        """There is none."""

    def advance_to_next_work(self) -> None:
        self.begun = Int32(1)

    def __extract_mlir_values__(self) -> Any:
        return cutlass.extract_mlir_values(self.begun)

    def __new_from_mlir_values__(self, values: Any) -> Schedule:
        return Schedule(self.work, cutlass.new_from_mlir_values(self.begun, values))


class Items:
    """In place of a list of blocks of queries: from the last one down."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __getitem__(self, place: Any) -> Any:
        return self if isinstance(place, tuple) else self.work.stop - 1 - place


class Count:
    """In place of the length of such a list."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __getitem__(self, place: Any) -> Any:
        return self.work.length


class Mask:
    """In place of the package's mask: what `forest_mask` says, where blocks are seen in part, with a load a key instead of a score."""

    def __init__(self, mask: Any, work: Work, factor: int) -> None:
        self.mask, self.work, self.factor = mask, work, factor

    @cute.jit
    def apply_mask(self, acc_S, m_block, n_block, thr_mma, aux_data, **given):
        """key <= query < end[key], and `end` is 0 behind the last token: lengths need no look of their own."""
        mask = self.mask
        listed = m_block // self.factor
        if (listed == n_block) | (listed >= self.work.middle):
            swapped = mask.swap_AB
            scores = layout_utils.reshape_acc_to_mn(acc_S, transpose=swapped)
            places = cute.make_identity_tensor((mask.tile_n, mask.tile_m) if swapped else (mask.tile_m, mask.tile_n))
            # Of this thread, and of thread 0, whose places are constants: each is the same for both but for an offset.
            mine = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(places), transpose=swapped)
            first = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(places), transpose=swapped)
            q, k = (1, 0) if swapped else (0, 1)
            start = m_block * mask.tile_m + mine[0, 0][q] - first[0, 0][q]
            for column in cutlass.range_constexpr(cute.size(scores.shape[1])):
                key = n_block * mask.tile_n + mine[0, column][k]
                low, high = key - start, aux_data.tensors[0][key] - start
                for row in cutlass.range_constexpr(cute.size(scores.shape[0])):
                    query = first[row, 0][q]
                    hidden = (query < low) | (query >= high)
                    scores[row, column] = -Float32.inf if hidden else scores[row, column]


class OrderedBackwardSm90(FlashAttentionBackwardSm90):
    """The package's class, but for kernels that are deterministic and have `ordered_mask`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.in_turn = self.deterministic and self.mask_mod is ordered_mask

    def _run(self, method: Any, args: Any, kwargs: Any) -> None:
        """The package's method, for our mask with our objects in place of its own."""
        if self.in_turn:
            given = inspect.signature(method).bind(*args, **kwargs)
            work, masks = find_work(given.arguments["blocksparse_tensors"], self.qhead_per_kvhead), given.arguments.get("AttentionMaskCls")
            given.arguments["TileSchedulerCls"] = lambda: Schedule(work, Int32(0))
            given.arguments["blocksparse_tensors"] = Count(work), Items(work), None, None
            if masks is not None:
                given.arguments["AttentionMaskCls"] = lambda lengths: Mask(masks(lengths), work, self.q_subtile_factor)
            args, kwargs = given.args, given.kwargs
        method(*args, **kwargs)

    def load(self, *args: Any, **kwargs: Any) -> None:
        """What warp 0 does."""
        self._run(super().load, args, kwargs)

    def mma(self, *args: Any, **kwargs: Any) -> None:
        """What the warp groups do that multiply."""
        self._run(super().mma, args, kwargs)

    def dQaccum_store(self, *args: Any, **kwargs: Any) -> None:
        """What warp 1 does."""
        (self.add_in_turn if self.in_turn else super().dQaccum_store)(*args, **kwargs)

    @cute.jit
    def add_in_turn(self, mdQaccum, sdQaccum, block_info, TileSchedulerCls, SeqlenInfoCls, blocksparse_tensors, mdQ_semaphore):
        """Counters are per block of queries of the kernel, of which `q_subtile_factor` are a listed one."""
        work = find_work(blocksparse_tensors, self.qhead_per_kvhead)
        _, m_blocks = block_info.get_m_block_min_max(SeqlenInfoCls(Int32(0)), work.block)
        tile = cute.make_layout((self.tile_m * self.tile_hdim // self.num_wg_dQ, self.num_wg_dQ))
        sums = cute.local_tile(mdQaccum[None, work.head, 0], (tile,), (None,))
        counters = mdQ_semaphore[None, None, work.head, 0]
        lane = cute.arch.lane_idx()
        group_threads = self.num_threads_per_warp_group + cute.arch.WARP_SIZE
        added = Int32(-1)  # the block whose sums may not be written yet
        for step in cutlass.range(work.length * self.q_subtile_factor, unroll=1):
            item = step // self.q_subtile_factor
            m_block = (work.stop - 1 - item) * self.q_subtile_factor + step % self.q_subtile_factor
            turn = work.last_turn if item == 0 else work.turn
            # Shared memory is free as soon as it has been read, which is before the sums are written.
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            if m_block < m_blocks:
                for group in cutlass.range_constexpr(self.num_wg_dQ):
                    cute.arch.barrier_arrive(barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + group, number_of_threads=group_threads)
                self.end_turn(added, counters)
                barrier.wait_eq(counters[(m_block, None)].iterator, lane, 0, turn)
                for group in cutlass.range_constexpr(self.num_wg_dQ):
                    cute.arch.barrier(barrier_id=int(NamedBarrierBwd.dQFullWG0) + group, number_of_threads=group_threads)
                    # One lane starts, waits for and reports the addition: completion is known to the thread that started it.
                    if lane == 0:
                        copy_utils.cpasync_reduce_bulk_add_f32(
                            sdQaccum[None, group].iterator, sums[(None, group), m_block].iterator, self.tma_copy_bytes["dQ"]
                        )
                    cute.arch.cp_async_bulk_commit_group()
                added = m_block
        self.end_turn(added, counters)

    @cute.jit
    def end_turn(self, added, counters):
        """Waits until the last sums are written, and passes the turn of their block of queries on."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        if added >= 0:
            barrier.arrive_inc(counters[(added, None)].iterator, cute.arch.lane_idx(), 0, 1)


# Kernels are kept on disk under the hash of the mask and of the package's sources, which do not hold this file.
ordered_mask.__cute_hash__ = hashlib.sha256(
    "".join(inspect.getsource(module) for module in (sys.modules[__name__], fa4_mask)).encode()
).hexdigest()
