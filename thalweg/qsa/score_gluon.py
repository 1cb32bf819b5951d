"""The tiles of `score` on Hopper: one asynchronous wgmma chain a head, whole tiles stored by bulk copies.

Formula, arguments and contract are those of `score`, whose scores these are bit for bit: one product a head over the
width, relu, heads added in their order.

A tile is 64 keys of a page by `rows` rows. Its keys are the left operand, in registers; the queries of the rows, all
heads of them, stay in shared memory while the program goes through its keys. Up to four heads' chains are in flight,
and a lane holds all heads of its (key, row) pairs, so that nothing is shuffled and no head is padded. Keys arrive by
bulk copies into two stages, each refilled as soon as the four warps have read it.

Programs share the work by what it costs: the (row tile, key tile) pairs lie on a line, each as long as it takes to
score or to fill, and every program owns an equal piece. The lengths are guessed from the first and last row of a tile,
and a wrong guess costs time only: what is scored and what is filled is decided by the rows themselves. Within a row
tile a program owns equal parts of the keys to score and of the blocks past visible, and fills while it scores. A tile
whose rows belong to several requests is scored once for each of them.
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
from thalweg.gluon import bulk_load, bulk_store, thread_barrier
from thalweg.qsa.heads_gluon import KEYS, finished, here, page_row, seen, started
from thalweg.qsa.share_gluon import SCORED, cost_of, piece

QUERY_BYTES = 1 << 16  # of a tile's queries: with 48 KiB of keys and scores two programs share a multiprocessor
RESIDENT = 264  # programs that run at once on an H200
DIMS = (64, 128)
MOST_BLOCKS = 2**20 - 64  # costs, and their products with a count of tiles, fit 32 bits


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile
    programs: int
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device that takes it: sm_90, up to 16 heads of 64 or 128 in 16 bits."""
    rows = 64
    while rows > 16 and rows * shape.heads * shape.dim * 2 > QUERY_BYTES:
        rows //= 2
    tiles = -(-shape.rows // rows) * -(-shape.blocks // KEYS.value)
    return Config(rows, max(1, min(RESIDENT, tiles)), 4, "64 KiB of queries, two programs a multiprocessor")


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
    tiles, cost = -(-R // 16), -(-N // KEYS.value) * SCORED.value + 1
    if N > MOST_BLOCKS or tiles * cost >= 2**31:
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
def _fill(out, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on, BM: gl.constexpr):
    """-inf in a tile: in all rows where they are of one request, else in those of `owner` (-1: that see nothing)."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    zero = here(0 * i_t)
    o_m = zero + gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    o_n = gl.arange(0, KEYS, gl.SliceLayout(0, WIDE))
    i_r = i_t.to(gl.int64) * BM
    p_out = out + (i_r * stride_or + i_tile.to(gl.int64) * KEYS * stride_on)
    p_out += gl.expand_dims(o_m * stride_or, 1) + gl.expand_dims(o_n * stride_on, 0)
    b_s = gl.full([BM, KEYS], float("-inf"), gl.float32, WIDE)
    if alone & (i_r + BM <= R) & (i_tile * KEYS + KEYS <= N):
        gl.store(p_out, b_s)
    else:
        m = alone | (s_rows.index(0).load(gl.SliceLayout(1, WIDE)) == owner)
        m = gl.expand_dims(m & (i_r + o_m < R), 1) & gl.expand_dims(i_tile * KEYS + o_n < N, 0)
        gl.store(p_out, b_s, mask=m)


@gluon.jit
def _hidden(b_s, s_rows, i_tile, there, PAST: gl.constexpr, ACC: gl.constexpr):
    """PAST where a row does not see the block, -inf in other rows on a hole."""
    o_n = here(i_tile * KEYS) + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    b_seen = s_rows.index(1).load(gl.SliceLayout(0, ACC))
    m = gl.expand_dims(o_n, 1) < gl.expand_dims(b_seen, 0)
    return gl.where(m & there, b_s, gl.where(m, float("-inf"), PAST))


@gluon.jit
def _put_maxima(maxima, s_o, s_rows, i_t, i_tile, owner, R, stride_m, above, BM: gl.constexpr):
    """The best of each 16 and of all 64 scores of a tile, in the rows that belong to `owner`."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [4, 1], [1, 0])  # half a row a lane
    BEST: gl.constexpr = gl.BlockedLayout([1, 2], [16, 2], [4, 1], [1, 0])
    b_16 = gl.convert_layout(gl.max(gl.reshape(s_o.load(ROW), [BM, 4, 16]), 2), BEST)
    o_m = gl.arange(0, BM, gl.SliceLayout(1, BEST))
    m = (i_t * BM + o_m < R) & (s_rows.index(0).load(gl.SliceLayout(1, BEST)) == owner)
    p = maxima + (i_t.to(gl.int64) * BM * stride_m + i_tile * 4)
    o_16 = gl.expand_dims(o_m * stride_m, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, BEST)), 0)
    gl.store(p + o_16, b_16, mask=gl.expand_dims(m, 1))
    gl.store(p + (o_m * stride_m + (above - 3 * i_tile)), gl.max(b_16, 1), mask=m & (above > 0))


@gluon.jit
def _store(
    out, b_s, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on,
    BM: gl.constexpr, FILL: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Scores of the rows that belong to `owner`, lane by lane; without FILL as far as each row sees."""
    zero = here(0 * i_t)
    o_n = zero + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    o_m = zero + gl.arange(0, BM, gl.SliceLayout(0, ACC))
    p_out = out + (i_t.to(gl.int64) * BM * stride_or + i_tile.to(gl.int64) * KEYS * stride_on)
    p_out += gl.expand_dims(o_n * stride_on, 1) + gl.expand_dims(o_m * stride_or, 0)
    b_owner = s_rows.index(0).load(gl.SliceLayout(0, ACC))
    if FILL:
        m = gl.expand_dims(i_tile * KEYS + o_n < N, 1)
        m = m & gl.expand_dims((i_t * BM + o_m < R) & (alone | (b_owner == owner)), 0)
    else:
        b_seen = s_rows.index(1).load(gl.SliceLayout(0, ACC))
        m = gl.expand_dims(i_tile * KEYS + o_n, 1) < gl.expand_dims(gl.where(b_owner == owner, b_seen, 0), 0)
    gl.store(p_out, b_s, mask=m)


def _kernel(
    q, keys, tiles, table, row_request, visible, out,
    R, N, requests, most, least, pages, pitch, stride_qh,
    stride_tr: gl.int64, stride_tp: gl.int64, stride_rr: gl.int64, stride_v: gl.int64, stride_or, stride_on,
    maxima, stride_m, above,
    HEADS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, PAGE: gl.constexpr, FILL: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    MAXIMA: gl.constexpr = maxima is not None
    PAST: gl.constexpr = float("nan") if MAXIMA else float("-inf")
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROWS: gl.constexpr = gl.BlockedLayout([BM // 32 if BM > 32 else 1], [32], [4], [0])
    s_q = gl.allocate_shared_memory(q.dtype, [HEADS, BM, D], q.layout)
    s_k = gl.allocate_shared_memory(q.dtype, [2, KEYS, D], keys.layout)
    s_o = gl.allocate_shared_memory(gl.float32, [BM, KEYS], gl.NVMMASharedLayout(128, 32, 2))
    s_rows = gl.allocate_shared_memory(gl.int32, [2, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    n = (N + KEYS - 1) // KEYS
    at, to, i_t, begin = piece(visible, stride_v, R, n, most, BM, FILL)
    loaded = i_t * 0 - 1  # the row tile whose queries are there
    loads = i_t * 0  # of queries, so far
    step = i_t * 0  # of keys, so far: the next stage and its phase
    while at < to:
        first = i_t.to(gl.int64) * BM
        head = gl.load(visible + first * stride_v)
        tail = gl.load(visible + gl.minimum(first + BM - 1, R - 1) * stride_v)
        guess, cost = cost_of(head, tail, n, most, FILL)
        a = at - begin
        b = gl.minimum(to - begin, cost)
        f_lo = guess + (n - guess) * a // cost
        f_hi = guess + (n - guess) * b // cost
        i_lo = guess * a // cost
        i_hi = guess * b // cost
        for part in range(2):  # key tiles that were guessed to be scored, then those to be filled
            if part == 1:
                i_lo = f_lo
                i_hi = f_hi
            o_r = first + gl.arange(0, BM, ROWS)
            b_request, b_seen = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
            b_todo = gl.where(b_seen > i_lo * KEYS, b_request, -1)
            s_rows.index(0).store(b_todo)
            s_rows.index(1).store(b_seen)
            owner = gl.max(b_todo, 0)
            alone = gl.min(gl.where(b_todo >= 0, b_todo, owner), 0) == owner
            whole = gl.min(gl.where(o_r < R, b_seen, most if BULK else 0), 0)  # blocks that all rows see
            whole = gl.where(alone, whole, 0)
            spare = i_t * 0
            if (part == 0) & alone & (gl.max(b_seen, 0) <= f_lo * KEYS) & FILL:
                spare = f_hi - f_lo
            again = i_lo < i_hi
            while again:
                end = gl.max(gl.where((b_todo == owner) & (owner >= 0), b_seen, 0), 0)
                i_end = gl.minimum(gl.maximum((end + KEYS - 1) // KEYS, i_lo), i_hi)
                count = i_end - i_lo
                if count > 0:
                    p_table = table + owner.to(gl.int64) * stride_tr
                    row = page_row(p_table, i_lo, pages, pitch, stride_tp, PAGE)
                    row1 = page_row(p_table, gl.minimum(i_lo + 1, i_end - 1), pages, pitch, stride_tp, PAGE)
                    row2 = page_row(p_table, gl.minimum(i_lo + 2, i_end - 1), pages, pitch, stride_tp, PAGE)
                    thread_barrier()
                    s = step & 1
                    mbarrier.expect(full.index(s), KEYS * D * 2)
                    bulk_load(keys, [row, 0], full.index(s), s_k.index(s))
                    if loaded != i_t:
                        mbarrier.expect(full.index(2), HEADS * BM * D * 2)
                        for i_h in gl.static_range(HEADS):
                            bulk_load(q, [i_t * BM, i_h * stride_qh], full.index(2), s_q.index(i_h))
                    mbarrier.expect(full.index(1 - s), KEYS * D * 2, pred=count > 1)
                    bulk_load(keys, [row1, 0], full.index(1 - s), s_k.index(1 - s), pred=count > 1)
                    if loaded != i_t:
                        mbarrier.wait(full.index(2), loads & 1)
                        loads += 1
                        loaded = i_t
                    owed = i_t * 0
                    for i_tile in range(i_lo, i_end):
                        s = step & 1
                        mbarrier.wait(full.index(s), (step >> 1) & 1)
                        b_k = s_k.index(s).load(LEFT)
                        w = started(b_k, s_q, here(0 * i_t), HEADS, BM)
                        if MAXIMA:  # noqa: SIM102 - of the tile before, while products are in flight
                            if i_tile > i_lo:
                                _put_maxima(maxima, s_o, s_rows, i_t, i_tile - 1, owner, R, stride_m, above, BM)
                        more = i_tile + 2 < i_end
                        mbarrier.expect(full.index(s), KEYS * D * 2, pred=more)
                        row3 = page_row(p_table, gl.minimum(i_tile + 3, i_end - 1), pages, pitch, stride_tp, PAGE)
                        if BULK:
                            tma.store_wait(0)
                        thread_barrier()
                        bulk_load(keys, [row2, 0], full.index(s), s_k.index(s), pred=more)
                        b_s = finished(w, b_k, s_q, HEADS, BM)
                        plain = (i_tile * KEYS + KEYS <= whole) & (row >= 0)
                        bulk = (alone if FILL else plain) & BULK
                        if not plain:
                            b_s = _hidden(b_s, s_rows, i_tile, row >= 0, PAST, ACC)
                        if BULK:  # noqa: SIM102 - known when this is compiled, unlike bulk
                            if bulk | MAXIMA:
                                s_o.permute((1, 0)).store(b_s)
                                fence_async_shared()
                        thread_barrier()
                        if BULK:  # noqa: SIM102 - known when this is compiled, unlike bulk
                            if bulk:
                                bulk_store(tiles, [i_t * BM, i_tile * KEYS], s_o)
                        if not bulk:
                            _store(
                                out, b_s, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on, BM, FILL, ACC
                            )
                        owed += spare
                        while owed >= count:
                            _fill(out, s_rows, i_t, f_lo, owner, True, R, N, stride_or, stride_on, BM)
                            f_lo += 1
                            owed -= count
                        row = row1
                        row1 = row2
                        row2 = row3
                        step += 1
                    if MAXIMA:
                        _put_maxima(maxima, s_o, s_rows, i_t, i_end - 1, owner, R, stride_m, above, BM)
                if FILL:
                    for i_tile in range(i_end, i_hi):
                        _fill(out, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on, BM)
                again = (owner >= 0) & (not alone)
                b_todo = gl.where(b_todo == owner, -1, b_todo)
                owner = gl.max(b_todo, 0)
        begin += cost
        at = begin
        i_t += 1
    if BULK:
        tma.store_wait(0)
    thread_barrier()
    for i in gl.static_range(3):
        mbarrier.invalidate(full.index(i))


# What changes from step to step: none of these values may be compiled in.
kernel = gluon.jit(
    _kernel,
    do_not_specialize=["R", "N", "requests", "most", "least", "pages", "pitch", "stride_qh", "stride_tr", "stride_tp",
                       "stride_rr", "stride_v", "stride_m", "above"],
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
    with current(index_q.device):
        kernel[(config.programs,)](
            q_tiles, key_tiles, tiles if bulk else q_tiles, page_table, row_request, visible, out, R, N, requests,
            min(N, columns * page), least, pages, pitch, index_q.stride(1), *page_table.stride(),
            row_request.stride(0), visible.stride(0), o_row, o_column,
            maxima, 0 if maxima is None else maxima.stride(0), above,
            HEADS=heads, D=D, BM=BM, PAGE=page, FILL=fill, BULK=bulk, **config.options,
        )  # fmt: skip
