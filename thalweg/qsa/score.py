"""Scores of block keys: sum over heads of relu(q_h . key_b), for tiles of rows or one row at a time.

    score[r, b] = ((relu(q_r0 . key_b) + relu(q_r1 . key_b)) + relu(q_r2 . key_b)) + ...

One product a head, its sum over the width in one tensor-core chain with float32 sums, relu, heads added in their order:
the same in both kernels, so a row's scores have the same bits in each of them and in any batch.

Tiles: a program takes `rows` consecutive rows and `span` blocks. The rows of a tile need not belong to one request:
its requests are scored in turn, so a tile is cut where a request ends, with no map made on the host; rows in random
order are right and slow. Keys are the tall side of the product and the rows of `group` heads its columns, head by head:
a lane then holds all heads of its (block, row) pairs, no head is padded, and keys are read once a tile.
Rows: a program takes one row and `span` blocks, heads padded to 16 columns; for decode, where a request has one row.

    index_q      [R, Hi, Di]                  bfloat16, float16 or float32; any strides
    block_keys   [pages, page_rows, Di]       the dtype of index_q
    page_table   [requests, max_pages]        int32 or int64; -1 or out of range: a hole
    row_request  [R], visible [R]             int32 or int64
    out          [R, N] float32               -inf at and past visible (with `fill`), on holes, in padding rows

Source: the indexer of `qwen4_exp` (transformers); the many-row form with one dot a head follows a published change.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, cdiv, current, next_power_of_2

RESIDENT = {"sm_90": 264, "gfx950": 512}  # programs of the tile form that run at once: two a multiprocessor
QUERY_BYTES = 1 << 16  # of a tile's queries, which stay in shared memory
FEW = 4  # rows a request up to which each is scored alone


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    requests: int
    heads: int
    dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile; 1: the one-row form
    keys: int  # of a tile
    span: int  # blocks a program
    group: int  # heads in one product
    num_warps: int
    num_stages: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def _span(blocks: int, splits: int, keys: int) -> int:
    return max(1, cdiv(cdiv(blocks, max(1, splits)), keys)) * keys


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    resident = RESIDENT.get(device, 256)
    width = max(16, next_power_of_2(shape.dim))
    if shape.dtype != torch.float32 and shape.rows <= FEW * shape.requests:
        # One row of 32,768, us: 5.4; 32 keys and 2 warps 5.7, 1 warp 5.5; 128 keys 6.1.
        if shape.rows <= 4 or width > 128:
            keys, warps, stages = (64, 4, 2) if width <= 128 else (32, 2, 4)
            span = _span(shape.blocks, cdiv(4 * resident, shape.rows), keys)
            return Config(1, keys, span, 1, warps, stages, "very few rows: small programs, many of them")
        # 16 and 64 rows of 32,768 blocks, us: 6 stages 36.5 and 133.1, 4: 36.8 and 134.4, 3: 36.8 and 135.2; spans of
        # 512: 40.3 and 135.6; 64 rows in spans of 3,648: 158.
        most, fewest = (_span(shape.blocks, cdiv(n * resident, shape.rows), 64) for n in (2, 8))
        span = max(fewest, min(most, 1024), 256)
        return Config(1, 64, span, 1, 4, 6, f"at most {FEW} rows a request: one row a program")
    group = 4 if shape.heads % 4 == 0 else 2 if shape.heads % 2 == 0 else 1
    size = shape.dtype.itemsize
    # 64 rows x 64 keys at P249K: 582 us; 32 x 64: 722; 64 x 128 with 8 warps: 923. One wave: 582, two 644, four 662.
    # Products of 512 columns (128 rows x 4 heads) come out wrong on sm_90 (Triton 3.6).
    rows = 64
    while rows > 16 and rows * shape.heads * width * size > QUERY_BYTES:
        rows //= 2
    if shape.dtype == torch.float32:
        span = _span(shape.blocks, resident // max(1, cdiv(shape.rows, 16)), 16)
        return Config(16, 16, span, 1, 8, 1, "float32: exact products, tiles small enough to stay in registers")
    splits = resident // max(1, cdiv(shape.rows, rows))
    if shape.requests > 1:  # of different lengths: more programs even them out (mix: 4 x 276 us, 6 x 269, 12 x 277)
        splits = max(1, 6 * resident // max(1, cdiv(shape.rows, rows)))
    span = _span(shape.blocks, splits, 64)
    return Config(rows, 64, span, group, 4, 2, "tiles of rows: keys are read once a tile")


@triton.jit
def _relu(b_x):
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _add_heads(b_sum, b_x, FIRST: tl.constexpr, GROUP: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):
    """Adds relu of the heads of products `[BN, GROUP * BM]` (head-major columns), in their order, to `[BN, BM]`."""
    b_x = _relu(b_x)
    if GROUP == 1:
        b_sum = b_x if FIRST else b_sum + b_x
    elif GROUP == 2:
        b_0, b_1 = tl.split(tl.permute(tl.reshape(b_x, [BN, 2, BM]), (0, 2, 1)))
        b_sum = b_0 if FIRST else b_sum + b_0
        b_sum += b_1
    else:
        b_even, b_odd = tl.split(tl.permute(tl.reshape(b_x, [BN, 2, 2, BM]), (0, 3, 1, 2)))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        b_sum = b_0 if FIRST else b_sum + b_0
        b_sum += b_1
        b_sum += b_2
        b_sum += b_3
    return b_sum


@triton.jit
def _keys(p_keys, p_table, i_n, end, pages, stride_tp, stride_kp, stride_kr, stride_kd, D: tl.constexpr,
          BD: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Keys `[BN, BD]` of the blocks from i_n on, zeros past `end` and on holes; which are neither; whether to look.

    One look-up where BN blocks share a page: then there is a page for all of them or for none.
    """
    o_n = i_n + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    if PAGE % BN == 0:
        i_page = tl.load(p_table + tl.cast(i_n // PAGE, tl.int64) * stride_tp).to(tl.int64)
        there = (i_page >= 0) & (i_page < pages)
        m_n = (o_n < end) & there
        p_k = p_keys + i_page * stride_kp + ((o_n % PAGE)[:, None] * stride_kr + o_d[None, :] * stride_kd)
    else:
        b_page = tl.load(p_table + (o_n // PAGE).to(tl.int64) * stride_tp, mask=o_n < end, other=-1).to(tl.int64)
        m_n = (b_page >= 0) & (b_page < pages)
        there = i_n < end
        p_k = (p_keys + b_page * stride_kp + (o_n % PAGE) * stride_kr)[:, None] + o_d[None, :] * stride_kd
    m = m_n[:, None]
    if D < BD:
        m = m & (o_d < D)[None, :]
    return tl.load(p_k, mask=m, other=0.0), m_n, there


@triton.jit
def _seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v):
    """Request and visible blocks (0: nothing to score) of rows; a request out of range is padding."""
    b_request = tl.load(row_request + o_r * stride_rr, mask=o_r < R, other=-1).to(tl.int64)
    b_seen = tl.load(visible + o_r * stride_v, mask=o_r < R, other=0).to(tl.int64)
    b_seen = tl.minimum(tl.maximum(b_seen, 0), most).to(tl.int32)
    return b_request, tl.where((b_request >= 0) & (b_request < requests) & (b_seen > least), b_seen, 0)


def _tiles_kernel(
    q, keys, table, row_request, visible, out,
    R, N, tiles, requests, most, least, pages,
    stride_qr, stride_qh, stride_qd, stride_kp: tl.int64, stride_kr, stride_kd,
    stride_tr: tl.int64, stride_tp: tl.int64, stride_rr: tl.int64, stride_v: tl.int64, stride_or, stride_on,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, FILL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    o_m = tl.arange(0, BM)
    o_r = tl.program_id(0).to(tl.int64) * BM + o_m
    i_s = tl.program_id(1)  # spans from both ends in turn: short contexts fill while long ones score
    i_s = tl.where(i_s % 2 == 0, i_s // 2, tl.num_programs(1) - 1 - i_s // 2)
    i_lo = i_s * tiles * BN
    i_hi = tl.minimum(i_lo + tiles * BN, N)
    b_request, b_seen = _seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
    o_c = tl.arange(0, GROUP * BM)
    o_d = tl.arange(0, BD)
    left = tl.max(tl.where(b_seen > i_lo, BM - o_m, 0), 0)  # the first row yet to be scored is BM - left
    b_qs = ()
    for i_g in tl.static_range(HEADS // GROUP):
        p_q = q + tl.program_id(0).to(tl.int64) * BM * stride_qr
        o_q = o_c % BM * stride_qr + (i_g * GROUP + o_c // BM) * stride_qh
        m_q = ((tl.program_id(0) * BM + o_c % BM < R) & (left > 0))[:, None]
        if D < BD:
            m_q = m_q & (o_d < D)[None, :]
        b_qs = b_qs + (tl.load(p_q + (o_q[:, None] + o_d[None, :] * stride_qd), mask=m_q, other=0.0),)
    o_n = tl.arange(0, BN)
    p_out = out + tl.program_id(0).to(tl.int64) * BM * stride_or
    b_done = tl.zeros([BM], tl.int32) + i_lo  # columns of each row that have been written
    while left > 0:
        i_request = tl.max(tl.where(o_m == BM - left, b_request, -1), 0)
        mine = (b_request == i_request) & (b_seen > i_lo) & (b_done == i_lo)
        end = tl.minimum(tl.max(tl.where(mine, b_seen, 0), 0), i_hi)
        whole = tl.min(tl.where(mine, tl.minimum(b_seen, i_hi), 0), 0)  # blocks that all rows of the tile see
        p_table = table + i_request * stride_tr
        for i_n in tl.range(i_lo, end, BN, num_stages=STAGES):
            b_k, m_n, there = _keys(keys, p_table, i_n, end, pages, stride_tp, stride_kp, stride_kr, stride_kd, D, BD,
                                    PAGE, BN)  # fmt: skip
            b_s = tl.zeros([BN, BM], tl.float32)
            for i_g in tl.static_range(HEADS // GROUP):
                b_x = tl.dot(b_k, tl.trans(b_qs[i_g]), input_precision="ieee")
                b_s = _add_heads(b_s, b_x, i_g == 0, GROUP, BN, BM)
            p_s = p_out + ((i_n + o_n).to(tl.int64)[:, None] * stride_on + o_m[None, :] * stride_or)
            if (i_n + BN <= whole) & there:  # scores leave the cache first: mix 265 us, 273 without the hint
                if PAGE % BN != 0:
                    b_s = tl.where(m_n[:, None], b_s, float("-inf"))
                tl.store(p_s, b_s, eviction_policy="evict_first")
            else:
                m_s = m_n[:, None] & ((i_n + o_n)[:, None] < b_seen[None, :])
                b_s = tl.where(m_s, b_s, float("-inf"))
                tl.store(p_s, b_s, mask=((i_n + o_n) < i_hi)[:, None] & mine[None, :])
        b_done = tl.where(mine, i_lo + (end - i_lo + BN - 1) // BN * BN, b_done)
        left = tl.max(tl.where((b_seen > i_lo) & (b_done == i_lo), BM - o_m, 0), 0)
    if FILL:
        b_done = tl.where(o_r < R, b_done, i_hi)
        most_done = tl.max(b_done, 0)
        b_s = tl.full([BN, BM], float("-inf"), tl.float32)
        for i_n in range(tl.min(b_done, 0), i_hi, BN):
            p_s = p_out + ((i_n + o_n).to(tl.int64)[:, None] * stride_on + o_m[None, :] * stride_or)
            if (i_n >= most_done) & (i_n + BN <= i_hi):
                tl.store(p_s, b_s, eviction_policy="evict_first")
            else:
                tl.store(p_s, b_s, mask=((i_n + o_n) < i_hi)[:, None] & ((i_n + o_n)[:, None] >= b_done[None, :]))


def _row_kernel(
    q, keys, table, row_request, visible, out,
    R, N, span, requests, most, least, pages,
    stride_qr: tl.int64, stride_qh: tl.int64, stride_qd, stride_kp: tl.int64, stride_kr, stride_kd,
    stride_tr: tl.int64, stride_tp: tl.int64, stride_rr: tl.int64, stride_v: tl.int64, stride_or: tl.int64, stride_on,
    HEADS: tl.constexpr, BH: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
    FILL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    i_lo = tl.program_id(1) * span
    i_hi = tl.minimum(i_lo + span, N)
    i_request, seen = _seen(row_request, visible, i_r, R, requests, most, least, stride_rr, stride_v)
    end = tl.minimum(seen, i_hi)
    o_n = tl.arange(0, BN)
    p_out = out + i_r * stride_or
    if end > i_lo:
        o_h = tl.arange(0, BH)
        o_d = tl.arange(0, BD)
        p_q = q + i_r * stride_qr + o_h[:, None].to(tl.int64) * stride_qh + o_d[None, :] * stride_qd
        b_q = tl.load(p_q, mask=(o_h < HEADS)[:, None] & (o_d < D)[None, :], other=0.0)
        p_table = table + i_request * stride_tr
        for i_n in tl.range(i_lo, end, BN, num_stages=STAGES):
            b_k, m_n, _ = _keys(keys, p_table, i_n, end, pages, stride_tp, stride_kp, stride_kr, stride_kd, D, BD,
                                PAGE, BN)  # fmt: skip
            b_x = _relu(tl.dot(b_k, tl.trans(b_q)))
            # One head is picked out by adding zeros, which is exact: the order of the heads is ours, not a tree's.
            b_s = tl.sum(tl.where((o_h == 0)[None, :], b_x, 0.0), 1)
            for i_h in tl.static_range(1, HEADS):
                b_s += tl.sum(tl.where((o_h == i_h)[None, :], b_x, 0.0), 1)
            b_s = tl.where(m_n, b_s, float("-inf"))
            tl.store(p_out + (i_n + o_n).to(tl.int64) * stride_on, b_s, mask=(i_n + o_n) < end)
    if FILL:
        for i_n in range(tl.maximum(end, i_lo), i_hi, BN):
            p_s = p_out + (i_n + o_n).to(tl.int64) * stride_on
            tl.store(p_s, tl.full([BN], float("-inf"), tl.float32), mask=(i_n + o_n) < i_hi)


# Counts and the strides that follow them change from step to step: none of their values may be compiled in. Whether the
# rows of `out` are aligned is: it is what stores of four scores are made by.
STEPS = ["R", "N", "requests", "most", "least", "pages", "stride_tr", "stride_tp", "stride_rr", "stride_v"]
INDICES = ["table", "row_request", "visible"]
tiles_kernel = triton.jit(_tiles_kernel, do_not_specialize=[*STEPS, "tiles"], do_not_specialize_on_alignment=INDICES)
row_kernel = triton.jit(
    _row_kernel, do_not_specialize=[*STEPS, "span", "stride_or"], do_not_specialize_on_alignment=[*INDICES, "out"]
)


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
) -> None:
    """Writes `out`; arguments as the module's docstring says.

    Rows that see at most `least` blocks are not scored. Without `fill` nothing is written past visible. No sync, no
    allocation. A given config overrides `choose`.
    """
    (R, heads, D), N = index_q.shape, out.shape[1]
    pages, page_rows = block_keys.shape[:2]
    requests, columns = page_table.shape
    if R == 0 or N == 0:
        return
    most = min(N, columns * page_rows)
    config = config or choose(Shape(R, N, requests, heads, D, index_q.dtype), arch(index_q.device))
    width = max(16, next_power_of_2(D))
    span = config.span if config.rows == 1 else config.span // config.keys
    call = (
        index_q, block_keys, page_table, row_request, visible, out, R, N, span, requests, most, least, pages,
        *index_q.stride(), *block_keys.stride(), *page_table.stride(), row_request.stride(0), visible.stride(0),
        *out.stride(),
    )  # fmt: skip
    grid = (cdiv(R, config.rows), cdiv(N, config.span))
    shared = {"HEADS": heads, "D": D, "BD": width, "PAGE": max(1, page_rows), "BN": config.keys, "FILL": fill}
    with current(index_q.device):
        if config.rows == 1:
            wide = max(16, next_power_of_2(heads))
            row_kernel[grid](*call, BH=wide, STAGES=config.num_stages, **shared, **config.options)
            return
        tiles_kernel[grid](
            *call, GROUP=config.group, BM=config.rows, STAGES=config.num_stages, **shared,
            **config.options,
        )  # fmt: skip
