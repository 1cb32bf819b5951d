"""The tiles of `score` on Hopper: one asynchronous wgmma chain a head, whole tiles stored by bulk copies.

Formula, arguments and contract are those of `score`, whose scores these are bit for bit: one product a head over the
width, relu, heads added in their order.

A row tile is two halves of `rows` rows, a key tile 64 keys of a page. Each half has four warps of its own: the keys are
the left operand, in registers, the queries of the half, all heads of them, stay in shared memory while the program goes
through its keys. Up to four heads' chains are in flight, and a lane holds all heads of its (key, row) pairs, so that
nothing is shuffled and no head is padded. The halves take turns: one starts its chains when the other has, so that the
tensor cores have work while one of them stores. One more warp copies queries and, three tiles ahead, keys, which both
halves read; another one fills what no row of a row tile sees with -inf, out of one tile of it in shared memory.

Programs share the work: the (row tile, key tile) pairs to score lie on a line, those behind on another, and of each of
them every program owns an equal piece. The lengths are guessed from the first and last row of a tile, and a wrong guess
costs time only: what is scored and what is filled is decided by the rows themselves. A tile whose rows belong to
several requests is scored once for each of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from thalweg.contract import aligned
from thalweg.device import arch, current
from thalweg.gluon import bulk_load, thread_barrier
from thalweg.qsa.heads_gluon import KEYS, finished, here, page_row, seen, started
from thalweg.qsa.put_gluon import fill_rest, fill_tile, put, put_maxima
from thalweg.qsa.share_gluon import end, owned, part_of, piece

QUERY_BYTES = 1 << 16  # of a half's queries: with 48 KiB of keys and as much of scores a program fills a multiprocessor
RESIDENT = 132  # programs that run at once on an H200
STAGES = 3  # of keys
# Registers a lane of the warps that score, and of those that copy and fill: at 40 these spill what they look up. Scores
# alone, without -inf and without maxima, take eight more there and eight less here, or 16 bytes are spilled.
WORKING, COPYING = 224, 56
DIMS = (64, 128)
MOST_BLOCKS = 2**20 - 64  # places on the lines fit 32 bits


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Config:
    rows: int  # of half a tile
    programs: int
    num_warps: int  # of half a tile
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int]:
        registers = (2 * WORKING + COPYING) // 3  # a lane, on average over three groups of four warps
        return {"num_warps": self.num_warps, "maxnreg": registers}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device that takes it: sm_90, up to 16 heads of 64 or 128 in 16 bits."""
    rows = 64
    while rows > 16 and rows * shape.heads * shape.dim * 2 > QUERY_BYTES:
        rows //= 2
    tiles = -(-shape.rows // (2 * rows)) * -(-shape.blocks // KEYS.value)
    return Config(rows, max(1, min(RESIDENT, tiles)), 4, "two halves of 64 KiB of queries, a program a multiprocessor")


def why_not(call: Mapping[str, Any]) -> str | None:
    """Why these arguments of the op need the portable kernel; None: this one takes them."""
    q, keys, (R, N) = call["index_q"], call["block_keys"], call["out"].shape
    (_, heads, D), (pages, page, _) = q.shape, keys.shape
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {q.dtype}"
    if D not in DIMS or heads > 16:
        return f"takes up to 16 heads of 64 or 128, got {heads} of {D}"
    if page == 0 or page % KEYS.value or pages == 0:
        return f"takes pages of a multiple of {KEYS.value} block keys, got {pages} pages of {page}"
    if N > MOST_BLOCKS or -(-R // 32) * (-(-N // KEYS.value) + 1) >= 2**31:
        return f"takes up to {MOST_BLOCKS} blocks, and rows x blocks up to 2^38, got {R} x {N}"
    strides = q.stride()
    if strides[2] != 1 or strides[0] <= 0 or strides[0] % 8 or not 0 < strides[1] < 2**24 or not aligned(q):
        return f"index_q must have rows of whole 16 bytes, heads contiguous, got strides {tuple(strides)}"
    strides = keys.stride()
    packed = strides[2] == 1 and strides[1] >= D and strides[1] % 8 == 0
    if not packed or (pages > 1 and strides[0] % strides[1]) or not aligned(keys):
        return f"block_keys must have pages a whole number of rows apart, of 16 bytes each, got strides {strides}"
    if pages * max(page, strides[0] // strides[1]) >= 2**31:
        return f"block_keys must span less than {2**31} rows, got {pages} pages {strides[0] // strides[1]} rows apart"
    return None


@gluon.jit
def _copy(
    q, keys, s_q0, s_q1, s_k, full, free, q_full, q_free, table, row_request, visible,
    R, N, programs, requests, most, least, pages, pitch, stride_qh, stride_tr, stride_tp, stride_rr, stride_v,
    HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Queries and keys into shared memory."""
    LANES: gl.constexpr = gl.BlockedLayout([2 * BM // 32], [32], [1], [0])
    R = here(R)
    N = here(N)
    n = (N + KEYS - 1) // KEYS
    at, to, i_t, begin = piece(visible, stride_v, R, n, most, programs, 2 * BM, False, 1)
    loads = i_t * 0  # of queries, so far
    step = i_t * 0  # of keys, so far: the next stage and its phase
    while at < to:
        o_r = i_t.to(gl.int64) * (2 * BM) + here(gl.arange(0, 2 * BM, LANES))
        b_request, b_seen = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
        fresh = i_t * 0 + 1
        past = begin
        for part in range(2):  # what was guessed to be scored, then the rest
            i_lo, i_hi, past = part_of(visible, stride_v, i_t, at, to, begin, b_seen, R, n, most, part, 2 * BM)
            b_todo, owner, alone = owned(b_request, b_seen, i_lo)
            again = i_lo < i_hi
            while again:
                i_end = end(b_todo, b_seen, owner, i_lo, i_hi)
                if i_end > i_lo:
                    p_table = table + owner.to(gl.int64) * stride_tr
                    row = page_row(p_table, i_lo, pages, pitch, stride_tp, PAGE)
                    for i_tile in range(i_lo, i_end):
                        row1 = page_row(p_table, gl.minimum(i_tile + 1, i_end - 1), pages, pitch, stride_tp, PAGE)
                        s = step % STAGES
                        mbarrier.wait(free.index(s), (step // STAGES & 1) ^ 1)
                        mbarrier.expect(full.index(s), KEYS * D * 2)
                        bulk_load(keys, [row, 0], full.index(s), s_k.index(s))
                        if fresh > 0:
                            for g in gl.static_range(2):
                                s_q = s_q0 if g == 0 else s_q1
                                mbarrier.wait(q_free.index(g), (loads & 1) ^ 1)
                                mbarrier.expect(q_full.index(g), HEADS * BM * D * 2)
                                for i_h in gl.static_range(HEADS):
                                    where = [i_t * (2 * BM) + g * BM, i_h * stride_qh]
                                    bulk_load(q, where, q_full.index(g), s_q.index(i_h))
                            loads += 1
                            fresh = fresh * 0
                        row = row1
                        step += 1
                again = (owner >= 0) & (not alone)
                b_todo = gl.where(b_todo == here(owner), -1, b_todo)
                owner = gl.max(b_todo, 0)
        begin = past
        at = past
        i_t += 1


@gluon.jit
def _score(
    tiles, s_q, s_k, s_o, s_rows, full, free, turn, p_table, out, i_g, i_lo, i_end, step, owner, alone, whole,
    R, N, pages, pitch, stride_tp, stride_or, stride_on, maxima, stride_m, above,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr, FILL: gl.constexpr,
    BULK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of some key tiles of `owner` and half G of a row tile; returns the next step of the keys."""
    MAXIMA: gl.constexpr = maxima is not None
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    row = page_row(p_table, i_lo, pages, pitch, stride_tp, PAGE)
    for i_tile in range(i_lo, i_end):
        s = step % STAGES
        mbarrier.wait(full.index(s), step // STAGES & 1)
        b_k = s_k.index(s).load(LEFT)
        mbarrier.wait(turn.index(G), (step & 1) ^ (1 - G))
        w = started(b_k, s_q, here(0 * i_g), HEADS, BM)
        mbarrier.arrive(turn.index(1 - G))
        if MAXIMA:  # noqa: SIM102 - of the tile before, while products are in flight
            if i_tile > i_lo:
                put_maxima(maxima, s_o, s_rows, i_g, i_tile - 1, owner, R, stride_m, above, BM)
        row1 = page_row(p_table, gl.minimum(i_tile + 1, i_end - 1), pages, pitch, stride_tp, PAGE)
        if BULK:
            tma.store_wait(0)
        thread_barrier()
        mbarrier.arrive(free.index(s))
        b_s = finished(w, b_k, s_q, HEADS, BM)
        put(
            tiles, out, b_s, s_o, s_rows, i_g, i_tile, owner, alone, whole, row >= 0, R, N,
            stride_or, stride_on, BM, FILL, BULK, MAXIMA, ACC,
        )  # fmt: skip
        row = row1
        step += 1
    if MAXIMA:
        put_maxima(maxima, s_o, s_rows, i_g, i_end - 1, owner, R, stride_m, above, BM)
    return step


@gluon.jit
def _consume(
    tiles, s_q, s_k, s_o, s_rows, full, free, q_full, q_free, turn, table, row_request, visible, out,
    R, N, programs, requests, most, least, pages, pitch, stride_tr, stride_tp, stride_rr, stride_v,
    stride_or, stride_on, maxima, stride_m, above,
    G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr, FILL: gl.constexpr,
    BULK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of half G of the rows of every tile; what is not stored in bulk is stored here, lane by lane."""
    LANES: gl.constexpr = gl.BlockedLayout([2 * BM // 32], [32], [4], [0])  # each warp holds all: none waits
    HALF: gl.constexpr = gl.BlockedLayout([BM // 32 if BM > 32 else 1], [32], [4], [0])
    R = here(R)
    N = here(N)
    n = (N + KEYS - 1) // KEYS
    at, to, i_t, begin = piece(visible, stride_v, R, n, most, programs, 2 * BM, False, 4)
    loads = i_t * 0  # of queries, so far
    step = i_t * 0  # of keys, so far: the next stage and its phase
    while at < to:
        i_g = i_t * 2 + G  # the tile of BM rows
        fresh = i_t * 0 + 1
        past = begin
        for part in range(2):  # what was guessed to be scored, then the rest
            o_r = i_t.to(gl.int64) * (2 * BM) + here(gl.arange(0, 2 * BM, LANES))
            b_request, b_seen = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
            i_lo, i_hi, past = part_of(visible, stride_v, i_t, at, to, begin, b_seen, R, n, most, part, 2 * BM)
            b_todo, owner, alone = owned(b_request, b_seen, i_lo)
            o_r = i_g.to(gl.int64) * BM + here(gl.arange(0, BM, HALF))
            b_mine, b_sees = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
            s_rows.index(0).store(gl.where(b_sees > i_lo * KEYS, b_mine, -1))
            s_rows.index(1).store(b_sees)
            whole = gl.min(gl.where(o_r < R, b_sees, most if BULK else 0), 0)  # blocks that all rows see
            whole = gl.where(alone, whole, 0)
            again = i_lo < i_hi
            while again:
                i_end = end(b_todo, b_seen, owner, i_lo, i_hi)
                if i_end > i_lo:
                    p_table = table + owner.to(gl.int64) * stride_tr
                    if fresh > 0:
                        mbarrier.wait(q_full.index(G), loads & 1)
                        loads += 1
                        fresh = fresh * 0
                    step = _score(
                        tiles, s_q, s_k, s_o, s_rows, full, free, turn, p_table, out, i_g, i_lo, i_end, step, owner,
                        alone, whole, R, N, pages, pitch, stride_tp, stride_or, stride_on, maxima, stride_m, above,
                        G, HEADS, D, BM, PAGE, FILL, BULK, STAGES,
                    )  # fmt: skip
                if FILL:
                    for i_tile in range(i_end, i_hi):
                        fill_tile(out, s_rows, i_g, i_tile, owner, alone, R, N, stride_or, stride_on, BM)
                again = (owner >= 0) & (not alone)
                b_todo = gl.where(b_todo == here(owner), -1, b_todo)
                owner = gl.max(b_todo, 0)
        if fresh == 0:
            thread_barrier()
            mbarrier.arrive(q_free.index(G))
        begin = past
        at = past
        i_t += 1
    if BULK:
        tma.store_wait(0)


def _kernel(
    q, keys, tiles, table, row_request, visible, out,
    R, N, programs, requests, most, least, pages, pitch, stride_qh,
    stride_tr: gl.int64, stride_tp: gl.int64, stride_rr: gl.int64, stride_v: gl.int64, stride_or, stride_on,
    maxima, stride_m, above,
    HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr, FILL: gl.constexpr, BULK: gl.constexpr,
    STAGES: gl.constexpr, WORKING: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    s_q0 = gl.allocate_shared_memory(q.dtype, [HEADS, BM, D], q.layout)
    s_q1 = gl.allocate_shared_memory(q.dtype, [HEADS, BM, D], q.layout)
    s_k = gl.allocate_shared_memory(q.dtype, [STAGES, KEYS, D], keys.layout)
    s_o0 = gl.allocate_shared_memory(gl.float32, [BM, KEYS], SCORES)
    s_o1 = gl.allocate_shared_memory(gl.float32, [BM, KEYS], SCORES)
    s_none = s_o0
    if FILL and BULK:
        s_none = gl.allocate_shared_memory(gl.float32, [BM, KEYS], SCORES)
        s_none.store(gl.full([BM, KEYS], float("-inf"), gl.float32, WIDE))
    s_rows0 = gl.allocate_shared_memory(gl.int32, [2, BM], FLAT)
    s_rows1 = gl.allocate_shared_memory(gl.int32, [2, BM], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (
                tiles, s_q0, s_k, s_o0, s_rows0, full, free, q_full, q_free, turn, table, row_request, visible, out,
                R, N, programs, requests, most, least, pages, pitch, stride_tr, stride_tp, stride_rr, stride_v,
                stride_or, stride_on, maxima, stride_m, above, 0, HEADS, D, BM, PAGE, FILL, BULK, STAGES,
            )),
            (_consume, (
                tiles, s_q1, s_k, s_o1, s_rows1, full, free, q_full, q_free, turn, table, row_request, visible, out,
                R, N, programs, requests, most, least, pages, pitch, stride_tr, stride_tp, stride_rr, stride_v,
                stride_or, stride_on, maxima, stride_m, above, 1, HEADS, D, BM, PAGE, FILL, BULK, STAGES,
            )),
            (_copy, (
                q, keys, s_q0, s_q1, s_k, full, free, q_full, q_free, table, row_request, visible,
                R, N, programs, requests, most, least, pages, pitch, stride_qh, stride_tr, stride_tp, stride_rr,
                stride_v, HEADS, D, BM, PAGE, STAGES,
            )),
            (fill_rest, (
                out, tiles, s_none, row_request, visible, R if FILL else 0, N, programs, requests, most, least,
                stride_rr, stride_v, stride_or, stride_on, BM, BULK,
            )),
        ],
        [4, 1, 1],
        [WORKING, COPYING, COPYING],
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(i))
        mbarrier.invalidate(free.index(i))
    for i in gl.static_range(2):
        mbarrier.invalidate(q_full.index(i))
        mbarrier.invalidate(q_free.index(i))
        mbarrier.invalidate(turn.index(i))


# What changes from step to step: none of these values may be compiled in.
kernel = gluon.jit(
    _kernel,
    do_not_specialize=["R", "N", "programs", "requests", "most", "least", "pages", "pitch", "stride_qh", "stride_tr",
                       "stride_tp", "stride_rr", "stride_v", "stride_m", "above"],
    do_not_specialize_on_alignment=["table", "row_request", "visible"],
)  # fmt: skip


def _tiles(x: torch.Tensor, shape: tuple[int, int], pitch: int, box: tuple[int, int]) -> TensorDescriptor:
    """Rows of x, `pitch` elements apart, copied in boxes."""
    layout = gl.NVMMASharedLayout(128, 8 * x.element_size(), 2)
    return TensorDescriptor(x, list(shape), [pitch, 1], list(box), layout)


def score(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    least: int = 0,
    fill: bool = True,
    config: Config | None = None,
    maxima: torch.Tensor | None = None,
    above: int = 0,
) -> None:
    """Writes `out`; arguments as `score.score` takes them, within `why_not`.

    maxima `[R, W]` float32, without `fill` and where rows of `out` are whole 16 bytes: of the blocks that a row sees,
    the best score of each 16 and, from element `above` on if that is not 0, of each 64, NaN aside.

    No sync, no allocation. A given config overrides `choose`. Where rows of `out` are not whole 16 bytes, or its
    columns not contiguous, scores are stored lane by lane.
    """
    (R, heads, D), N = index_q.shape, out.shape[1]
    (pages, page, _), (requests, columns) = block_keys.shape, page_table.shape
    if R == 0 or N == 0:
        return
    config = config or choose(Shape(R, N, heads, D), arch(index_q.device))
    BM, keys = config.rows, KEYS.value
    q_pitch, (k_page, k_row, _), (o_row, o_column) = index_q.stride(0), block_keys.stride(), out.stride()
    pitch = k_page // k_row if pages > 1 else page
    bulk = o_column == 1 and o_row % 4 == 0 and o_row > 0 and aligned(out)
    q_tiles = _tiles(index_q, (R, (heads - 1) * index_q.stride(1) + D), q_pitch, (BM, D))
    key_tiles = _tiles(block_keys, ((pages - 1) * pitch + page, D), k_row, (keys, D))
    tiles = _tiles(out, (R, N), o_row if bulk else -(-N // 4) * 4, (BM, keys))
    less = 0 if fill or maxima is not None else 8
    with current(index_q.device):
        kernel[(config.programs,)](
            q_tiles, key_tiles, tiles if bulk else q_tiles, page_table, row_request, visible, out, R, N,
            config.programs, requests, min(N, columns * page), least, pages, pitch, index_q.stride(1),
            *page_table.stride(), row_request.stride(0), visible.stride(0), o_row, o_column,
            maxima, 0 if maxima is None else maxima.stride(0), above,
            HEADS=heads, D=D, BM=BM, PAGE=page, FILL=fill, BULK=bulk, STAGES=STAGES,
            WORKING=WORKING - less, COPYING=COPYING + 2 * less, **config.options,
        )  # fmt: skip
