"""Scores that reach a row's threshold, on Hopper: the tiles of `score_gluon` with lists in place of a score matrix.

    (score, block) is in a list of its row where score[row, block] >= least[row], the block visible and mapped, the
    score a number

The products, and so the bits of a score, are those of `score_gluon`. A program has one row tile and each `splits`-th
of its key tiles, so that keys which crowd together fill all lists alike. When a tile is scored it waits in shared
memory; a lane then holds half a row of it and appends what reaches the threshold to a list that is the lane's alone,
while the next tile's products are in flight: no lane waits for another, nothing is atomic, the order is always that of
the blocks.

    least      [R] float32; NaN: nothing reaches it
    lists      [R, lists, capacity] int64, flat: the float32 bits of a score above, its block below; 2 lists a program
    counts     [R, lists] int32: how many are in the list; more than `capacity`: some are not
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from thalweg.device import current
from thalweg.gluon import bulk_load, thread_barrier
from thalweg.qsa.heads_gluon import KEYS, finished, here, page_row, seen, started

HALF = gl.constexpr(32)  # keys of a tile that a lane appends


# Appends the scores $32 ... $63 that reach $96, with blocks from $128 on, at $64; $0: how many. From tensors of places
# and masks the compiler makes 16 instructions a score, from this 7: of the address only the lower half moves.
_STEP = (
    "setp.ge.f32 p, ${score}, $96; add.s32 n, $128, {i}; mov.b64 a, {{l, h}}; "
    "@p st.global.v2.b32 [a], {{n, ${score}}}; @p add.s32 l, l, 8;"
)
_TEXT = " ".join(
    ["{ .reg .pred p; .reg .b64 a; .reg .b32 l, h, m, n; mov.b64 {l, h}, $64; mov.b32 m, l;"]
    + [_STEP.format(score=32 + i, i=i) for i in range(32)]
    + ["sub.s32 m, l, m; shr.u32 $0, m, 3;"]
    + [f"mov.b32 ${i}, 0;" for i in range(1, 32)]
    + ["}"]
)
TEXT = gl.constexpr(_TEXT)
CONSTRAINTS = gl.constexpr(",".join(["=r"] * 32 + ["f"] * 32 + ["l"] * 32 + ["f"] * 32 + ["r"] * 32))


@gluon.jit
def _put(b_s, p_end, b_least, b_first, LAYOUT: gl.constexpr):
    """Puts `[BM, 2, 32]` scores that reach b_least `[BM, 2]`, and their blocks from b_first on, at p_end; how many."""
    p = gl.expand_dims(p_end.to(gl.int64), 2)
    args = [b_s, p, gl.expand_dims(b_least, 2), gl.expand_dims(b_first, 2)]
    b_n = gl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, gl.int32, is_pure=False, pack=32)
    o_n = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    return gl.sum(gl.where(gl.expand_dims(gl.expand_dims(o_n, 0), 0) == 0, b_n, 0), 2)


@gluon.jit
def _crosses(p_list, capacity):
    """Whether the upper half of addresses changes within the lists: of at most one in 4 GiB."""
    b_low = p_list.to(gl.int64) & 0xFFFFFFFF
    return b_low + capacity * 8 > 0xFFFFFFFF


@gluon.jit
def _append(s_s, p_list, b_count, b_least, i_tile, capacity, BM: gl.constexpr):
    """Appends what reaches the threshold of a tile's scores; how many each list holds now.

    A list that might not take 32 more takes none, and its count becomes more than capacity.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [2, 2], [1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1, 32], [32, 1, 1], [2, 2, 1], [2, 1, 0])
    b_s = gl.convert_layout(gl.reshape(s_s.load(ROW), [BM, 2, HALF]), HALVES)
    room = b_count <= capacity - HALF
    o_half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))
    b_first = gl.expand_dims(o_half * HALF + i_tile * KEYS, 0) + b_count * 0
    b_new = _put(b_s, p_list + b_count, gl.where(room, b_least, float("nan")), b_first, HALVES)
    return gl.where(room, b_count + b_new, capacity + 1)


@gluon.jit
def _hidden(b_s, s_rows, i_tile, there, ACC: gl.constexpr):
    """NaN, which no threshold takes, where a row does not see the block and everywhere on a hole."""
    o_n = here(i_tile * KEYS) + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    b_seen = s_rows.index(1).load(gl.SliceLayout(0, ACC))
    return gl.where((gl.expand_dims(o_n, 1) < gl.expand_dims(b_seen, 0)) & there, b_s, float("nan"))


def _kernel(
    q, keys, table, row_request, visible, least_score, lists, counts,
    R, requests, most, least, pages, pitch, stride_qh,
    stride_tr: gl.int64, stride_tp: gl.int64, stride_rr: gl.int64, stride_v: gl.int64, splits, capacity,
    HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([BM // 32 if BM > 32 else 1], [32], [4], [0])
    HALVES: gl.constexpr = gl.BlockedLayout([1, 1, 32], [32, 1, 1], [2, 2, 1], [2, 1, 0])
    LIST: gl.constexpr = gl.SliceLayout(2, HALVES)
    s_q = gl.allocate_shared_memory(q.dtype, [HEADS, BM, D], q.layout)
    s_k = gl.allocate_shared_memory(q.dtype, [2, KEYS, D], keys.layout)
    s_s = gl.allocate_shared_memory(gl.float32, [BM, KEYS], gl.NVMMASharedLayout(128, 32, 2))
    s_rows = gl.allocate_shared_memory(gl.int32, [2, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    i_t = gl.program_id(0) // splits
    i_split = gl.program_id(0) % splits
    first = i_t.to(gl.int64) * BM
    o_r = first + gl.arange(0, BM, ROWS)
    b_request, b_seen = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
    s_rows.index(0).store(b_request)
    s_rows.index(1).store(b_seen)
    o_m = gl.arange(0, BM, gl.SliceLayout(1, LIST))
    o_half = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, LIST)), 0) + i_split * 2
    b_list = gl.expand_dims((first + o_m) * (splits * 2), 1) + o_half
    b_count = gl.where(_crosses(lists + b_list * capacity, capacity), capacity + 1, 0)
    step = i_t * 0  # of keys, so far: the next stage and its phase
    b_todo = b_request
    owner = gl.max(b_todo, 0)
    while owner >= 0:
        b_mine = b_todo == owner
        end = (gl.max(gl.where(b_mine, b_seen, 0), 0) + KEYS - 1) // KEYS
        whole = gl.min(gl.where(b_mine, b_seen, most), 0)  # blocks that all of these rows see
        count = (end - i_split + splits - 1) // splits
        if count > 0:
            p_table = table + owner.to(gl.int64) * stride_tr
            last = end - 1
            row = page_row(p_table, i_split, pages, pitch, stride_tp, PAGE)
            row1 = page_row(p_table, gl.minimum(i_split + splits, last), pages, pitch, stride_tp, PAGE)
            row2 = page_row(p_table, gl.minimum(i_split + splits * 2, last), pages, pitch, stride_tp, PAGE)
            thread_barrier()
            s = step & 1
            mbarrier.expect(full.index(s), KEYS * D * 2)
            bulk_load(keys, [row, 0], full.index(s), s_k.index(s))
            if step == 0:
                mbarrier.expect(full.index(2), HEADS * BM * D * 2)
                for i_h in gl.static_range(HEADS):
                    bulk_load(q, [i_t * BM, i_h * stride_qh], full.index(2), s_q.index(i_h))
            mbarrier.expect(full.index(1 - s), KEYS * D * 2, pred=count > 1)
            bulk_load(keys, [row1, 0], full.index(1 - s), s_k.index(1 - s), pred=count > 1)
            b_owner = gl.expand_dims(s_rows.index(0).load(gl.SliceLayout(1, LIST)), 1)
            m_row = gl.expand_dims(first + o_m < R, 1) & (b_owner == owner)
            p_least = least_score + gl.expand_dims(first + o_m, 1) + o_half * 0
            b_least = gl.load(p_least, mask=m_row, other=float("nan"))
            if step == 0:
                mbarrier.wait(full.index(2), 0)
            i_tile = i_split
            for i_turn in range(count):
                s = step & 1
                mbarrier.wait(full.index(s), (step >> 1) & 1)
                b_k = s_k.index(s).load(LEFT)
                w = started(b_k, s_q, here(0 * i_t), HEADS, BM)
                if i_turn > 0:  # the tile before, while products are in flight
                    p_list = lists + b_list * capacity
                    b_count = _append(s_s, p_list, b_count, b_least, i_tile - splits, capacity, BM)
                more = i_turn + 2 < count
                mbarrier.expect(full.index(s), KEYS * D * 2, pred=more)
                row3 = page_row(p_table, gl.minimum(i_tile + 3 * splits, last), pages, pitch, stride_tp, PAGE)
                thread_barrier()
                bulk_load(keys, [row2, 0], full.index(s), s_k.index(s), pred=more)
                b_s = finished(w, b_k, s_q, HEADS, BM)
                if (i_tile * KEYS + KEYS > whole) | (row < 0):
                    b_s = _hidden(b_s, s_rows, i_tile, row >= 0, ACC)
                s_s.permute((1, 0)).store(b_s)
                thread_barrier()
                row = row1
                row1 = row2
                row2 = row3
                step += 1
                i_tile += splits
            p_list = lists + b_list * capacity
            b_count = _append(s_s, p_list, b_count, b_least, i_tile - splits, capacity, BM)
        b_todo = gl.where(b_mine, -1, b_todo)
        owner = gl.max(b_todo, 0)
    gl.store(counts + b_list, b_count, mask=gl.expand_dims(first + o_m < R, 1))
    thread_barrier()
    for i in gl.static_range(3):
        mbarrier.invalidate(full.index(i))


# What changes from step to step: none of these values may be compiled in.
kernel = gluon.jit(
    _kernel,
    do_not_specialize=["R", "requests", "most", "least", "pages", "pitch", "stride_qh", "stride_tr", "stride_tp",
                       "stride_rr", "stride_v", "splits", "capacity"],
    do_not_specialize_on_alignment=["table", "row_request", "visible", "least_score", "counts"],
)  # fmt: skip


def _tiles(x: torch.Tensor, shape: tuple[int, int], pitch: int, box: tuple[int, int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(shape), [pitch, 1], list(box), gl.NVMMASharedLayout(128, 16, 2))


def survivors(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    least_score: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    least: int,
    tile: int,
    capacity: int,
) -> None:
    """Writes `counts` and, as far as these say, `lists`; arguments as `score_gluon.score` takes them.

    least: rows that see at most so many blocks are not scored. tile: rows of a row tile.
    """
    R, heads, D = index_q.shape
    (pages, page, _), (requests, columns) = block_keys.shape, page_table.shape
    (k_page, k_row, _), splits, keys = block_keys.stride(), counts.shape[1] // 2, KEYS.value
    pitch = k_page // k_row if pages > 1 else page
    q_tiles = _tiles(index_q, (R, (heads - 1) * index_q.stride(1) + D), index_q.stride(0), (tile, D))
    key_tiles = _tiles(block_keys, ((pages - 1) * pitch + page, D), k_row, (keys, D))
    with current(index_q.device):
        kernel[(-(-R // tile) * splits,)](
            q_tiles, key_tiles, page_table, row_request, visible, least_score, lists, counts, R, requests,
            columns * page, least, pages, pitch, index_q.stride(1), *page_table.stride(), row_request.stride(0),
            visible.stride(0), splits, capacity, HEADS=heads, D=D, BM=tile, PAGE=page, num_warps=4,
        )  # fmt: skip
