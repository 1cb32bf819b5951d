"""Attention of tiles of neighbouring rows over the union of their blocks: what several rows selected is fetched once.

Neighbouring rows of real text pick about 90 % the same blocks. A tile is ROWS rows; the union of its blocks, each with
a bit for every row that selected it, is one list, and the rows x heads of a KV head fill one tall product over it.
Where a tile's rows are not of one request, or its union is so large that fetching row by row is faster (more than
`limit` blocks), the tile counts no blocks and its rows are left to `attention`.

A row's sums run over its tile's list, in which its own blocks lie among those of its neighbours: its last bits depend
on which rows share the tile. They are the same in every run.

    marks        [tiles, ROWS, words] int32: for each row a bit a block, of those that it selected and its open one
    counts       [tiles] int32: blocks of the union, 0 for a tile that is not shared
    blocks       [tiles, width, 2] int32: their ids, ascending, and a bit for each row that has it
    slots        [tiles, size] int32: place in the pool of each of their tokens, -1 for a hole
    masks        [tiles, size / 32, 16] int32: of each row, a bit for each of 32 tokens that it attends to
    the rest     as in `attention`

Source: flash attention (arXiv 2205.14135) with a mask a row.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import cdiv, next_power_of_2
from thalweg.qsa import gather

MOST = 64  # query heads of a KV head that a tile holds
BYTES = 128 << 20  # of lists at once; more rows are attended to in parts


@dataclass(frozen=True)
class Config:
    tall: int  # rows of the product, query heads of a KV head times rows of a tile at most
    tokens: int  # of a step
    columns: int  # of keys and values that are copied, and are products, of their own
    num_warps: int
    num_stages: int  # 0: the kernel in Gluon
    limit: float  # of the blocks that the rows of a tile fetch alone: a union of more is not shared
    reason: str = field(compare=False)


def choose(group: int, dim: int, itemsize: int, hopper: bool) -> Config:
    """The configuration for query heads a KV head and their width; hopper: the kernel in Gluon takes them."""
    width = max(16, next_power_of_2(dim))
    if hopper:
        return Config(64, 64, width, 4, 0, 0.65, "5 rows of 12 heads, 60 of 64; two programs a multiprocessor")
    tokens = 32 if 2 * 32 * width * itemsize <= 1 << 15 else 16
    if itemsize == 4:
        return Config(32, tokens, min(width, 64), 4, 2, 0.55, "2 rows of 12 heads; 64 tall spill 376 bytes at 256 wide")
    return Config(64, tokens, min(width, 64), 4, 2, 0.55, "5 rows of 12 heads, 60 of 64; two programs a multiprocessor")


def rows_of(config: Config, group: int) -> int:
    """Rows of a tile: as many as the product holds, 16 at most."""
    return max(1, min(16, config.tall // group))


@triton.jit
def _tile(row_request, positions, i_t, R, ratio, capacity, requests, stride_rr, stride_p, ROWS: tl.constexpr):
    """Numbers of a tile's rows, their requests and positions (-1 for padding)."""
    o_r = tl.arange(0, 16)
    i_r = i_t * ROWS + o_r
    m = (o_r < ROWS) & (i_r < R)
    request = tl.load(row_request + i_r * stride_rr, mask=m, other=-1).to(tl.int64)
    position = tl.load(positions + i_r * stride_p, mask=m, other=-1).to(tl.int64)
    live = (request >= 0) & (request < requests) & (position >= 0)
    position = tl.minimum(tl.where(live, position, -1), capacity + 2 * ratio).to(tl.int32)
    return tl.where(live, request, -1).to(tl.int32), position


def _mark_kernel(
    row_request, positions, block_ids, marks, R, k, ratio, capacity, requests, words,
    stride_rr: tl.int64, stride_p: tl.int64, stride_ir: tl.int64, stride_ik, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A program a row: a bit for each of its k blocks and for its open one, if that has tokens."""
    i_r = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    b_id = tl.load(block_ids + i_r * stride_ir + o_k * stride_ik, mask=o_k < k, other=-1)
    request = tl.load(row_request + i_r * stride_rr).to(tl.int64)
    position = tl.load(positions + i_r * stride_p).to(tl.int64)
    position = tl.where((request >= 0) & (request < requests) & (position >= 0), position, -1)
    position = tl.minimum(position, capacity - 1).to(tl.int32)  # tokens past the table's capacity are holes
    visible = (position + 1) // ratio
    b_id = tl.where((o_k == k) & ((position + 1) % ratio != 0), visible, b_id).to(tl.int32)
    m = (b_id >= 0) & (b_id < visible + (o_k == k).to(tl.int32)) & (o_k <= k)
    p_mark = marks + ((i_r // ROWS) * ROWS + i_r % ROWS) * words + b_id // 32
    tl.atomic_or(p_mark, 1 << (b_id % 32), mask=m, sem="relaxed")


@triton.jit
def _count(b):
    """Bits of each int32."""
    b = b - ((b >> 1) & 0x55555555)
    b = (b & 0x33333333) + ((b >> 2) & 0x33333333)
    return (((b + (b >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24 & 0xFF


def _union_kernel(
    row_request, positions, marks, counts, blocks, R, ratio, capacity, requests, words, limit, width,
    stride_rr: tl.int64, stride_p: tl.int64, ROWS: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """A program a tile: ids of the blocks that any row marked, ascending, each with a bit for every such row."""
    i_t = tl.program_id(0).to(tl.int64)
    b_request, _ = _tile(row_request, positions, i_t, R, ratio, capacity, requests, stride_rr, stride_p, ROWS)
    request = tl.max(b_request, 0)
    alone = tl.min(tl.where(b_request >= 0, b_request, request), 0) == request
    o_w = tl.arange(0, BW)
    marks += i_t * ROWS * words
    blocks += i_t * width * 2
    count = 0
    for i_w in range(0, words, BW):
        b_any = tl.zeros([BW], tl.int32)
        b_marks = ()
        for i_b in tl.static_range(ROWS):
            m_w = (i_w + o_w < words) & (i_t * ROWS + i_b < R)
            b_mark = tl.load(marks + i_b * words + i_w + o_w, mask=m_w, other=0)
            b_marks = b_marks + (b_mark,)
            b_any |= b_mark
        b_many = _count(b_any)
        b_place = count + tl.cumsum(b_many, 0) - b_many
        count += tl.sum(b_many, 0)
        for _i in range(tl.max(b_many, 0)):  # the lowest bit that each word still has
            b_low = b_any & -b_any
            b_bit = _count(b_low - 1)
            b_rows = tl.zeros([BW], tl.int32)
            for i_b in tl.static_range(ROWS):
                b_rows |= ((b_marks[i_b] >> b_bit) & 1) << i_b
            m = (b_any != 0) & (b_place < limit)
            tl.store(blocks + 2 * b_place, (i_w + o_w) * 32 + b_bit, mask=m)
            tl.store(blocks + 2 * b_place + 1, b_rows, mask=m)
            b_any = b_any & ~b_low
            b_place += 1
    tl.store(counts + i_t, tl.where(alone & (count <= limit), count, 0))


def _expand_kernel(
    table, row_request, positions, counts, blocks, slots, masks, R, ratio, capacity, pages, requests, width, size,
    stride_tr: tl.int64, stride_tp: tl.int64, stride_rr: tl.int64, stride_p: tl.int64,
    ROWS: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A program a tile and BN tokens: their slots, and for each row a bit a token (what a product's lane looks at).

    The last tokens of an open block may be one row's past and another's future.
    """
    i_t = tl.program_id(0).to(tl.int64)
    n = tl.load(counts + i_t) * ratio
    if tl.program_id(1) * BN >= n:
        return
    b_request, b_position = _tile(row_request, positions, i_t, R, ratio, capacity, requests, stride_rr, stride_p, ROWS)
    p_table = table + tl.maximum(tl.max(b_request, 0), 0).to(tl.int64) * stride_tr
    o_r = tl.arange(0, 16)
    o_j = tl.program_id(1) * BN + tl.arange(0, BN)
    p_block = blocks + (i_t * width + o_j // ratio) * 2
    b_token = tl.load(p_block, mask=o_j < n, other=0) * ratio + o_j % ratio
    b_rows = tl.load(p_block + 1, mask=o_j < n, other=0)
    m = (((b_rows[None, :] >> o_r[:, None]) & 1) != 0) & (b_token[None, :] <= b_position[:, None])
    m_t = (tl.max(m.to(tl.int32), 0) > 0) & (b_token < capacity)
    b_page = tl.load(p_table + (b_token // PAGE).to(tl.int64) * stride_tp, mask=m_t, other=-1).to(tl.int64)
    m_t = m_t & (b_page >= 0) & (b_page < pages)
    b_slot = tl.where(m_t, b_page.to(tl.int32) * PAGE + b_token % PAGE, -1)
    tl.store(slots + i_t * size + o_j, b_slot, mask=o_j < size)
    b_bits = (m & m_t[None, :]).to(tl.int32) << (o_j % 32)[None, :]
    b_mask = tl.sum(tl.reshape(b_bits, [16, BN // 32, 32]), 2)
    o_s = tl.program_id(1) * (BN // 32) + tl.arange(0, BN // 32)
    p_mask = masks + (i_t * (size // 32) + o_s[None, :]) * 16 + o_r[:, None]
    tl.store(p_mask, b_mask, mask=(o_s < size // 32)[None, :])


def _tiles_kernel(
    q, k_cache, v_cache, counts, slots, masks, out_gate, out, R, ratio, size, group, scale, v_scale,
    stride_qr: tl.int64, stride_qh, stride_qd, stride_kp: tl.int64, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_vp: tl.int64, stride_vt, stride_vh: tl.int64, stride_vd,
    stride_gr: tl.int64, stride_gh, stride_gd, stride_or: tl.int64, stride_oh, stride_od,
    ROWS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PAGE: tl.constexpr, FLAT: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A program a tile and KV head."""
    i_t = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    n = tl.load(counts + i_t) * ratio
    o_c = tl.arange(0, BC)
    o_n = tl.arange(0, BN)
    o_m = tl.arange(0, BM)
    NC: tl.constexpr = BD // BC
    o_r = o_m // group
    o_h = i_h * group + o_m % group
    i_r = i_t * ROWS + o_r
    m_q = ((o_r < ROWS) & (i_r < R) & (n > 0))[:, None]
    p_q = q + (i_r * stride_qr + o_h * stride_qh)[:, None]
    b_q, b_o = (), ()
    for i_c in tl.static_range(NC):
        o_d = (o_c + i_c * BC)[None, :]
        b_q = b_q + (tl.load(p_q + o_d * stride_qd, mask=m_q & (o_d < D), other=0.0).to(DTYPE),)
        b_o = b_o + (tl.zeros([BM, BC], tl.float32),)
    p_k = k_cache + i_h * stride_kh
    p_v = v_cache + i_h * stride_vh
    p_slots = slots + i_t * size + o_n
    p_masks = masks + i_t * (size // 32) * 16 + o_r
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_slot = tl.load(p_slots, mask=o_n < n, other=-1)
    m_r = (o_r < ROWS) & (n > 0)
    b_low = tl.load(p_masks, mask=m_r, other=0)
    b_high = tl.load(p_masks + 16, mask=m_r & (n > 32), other=0) if BN > 32 else b_low
    for i_j in tl.range(0, n, BN, num_stages=STAGES):
        b_page, b_row = 0, b_slot
        if not FLAT:
            b_page, b_row = (b_slot // PAGE).to(tl.int64), b_slot % PAGE
        b_k = gather.rows(p_k, b_page, b_row, b_slot >= 0, stride_kp, stride_kt, stride_kd, D, BD, BC, DTYPE)
        b_v = gather.rows(p_v, b_page, b_row, b_slot >= 0, stride_vp, stride_vt, stride_vd, D, BD, BC, DTYPE)
        b_word = tl.where((o_n < 32)[None, :], b_low[:, None], b_high[:, None])
        o_b = o_n & 31
        if BN < 32:  # a word holds the tokens of several steps
            o_b += i_j & 31
        m_s = ((b_word >> o_b[None, :]) & 1) != 0
        m_n = o_n + i_j + BN < n
        b_slot = tl.load(p_slots + i_j + BN, mask=m_n, other=-1)
        p_masks += BN // 2 if BN >= 32 else ((i_j + BN) // 32 - i_j // 32) * 16
        b_low = tl.load(p_masks, mask=m_r & (i_j + BN < n), other=0)
        b_high = tl.load(p_masks + 16, mask=m_r & (i_j + BN + 32 < n), other=0) if BN > 32 else b_low
        b_s = tl.dot(b_q[0], tl.trans(b_k[0]), input_precision="ieee")
        for i_c in tl.static_range(1, NC):
            b_s = tl.dot(b_q[i_c], tl.trans(b_k[i_c]), b_s, input_precision="ieee")
        b_s = tl.where(m_s, b_s * scale, float("-inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_base[:, None])
        b_decay = tl.exp2(b_m - b_base)
        b_l = b_l * b_decay + tl.sum(b_p, 1)
        b_p = b_p.to(DTYPE)
        b_more = ()
        for i_c in tl.static_range(NC):
            b_more = b_more + (tl.dot(b_p, b_v[i_c], b_o[i_c] * b_decay[:, None], input_precision="ieee"),)
        b_o = b_more
        b_m = b_new
    b_scale = (tl.where(b_l > 0.0, v_scale / tl.where(b_l > 0.0, b_l, 1.0), 0.0))[:, None]
    # Counted once more, by a zero that the compiler cannot know: else rows and heads are held all through the loop.
    o_e = o_m + tl.minimum(tl.load(counts + i_t, volatile=True), 0)
    o_r = o_e // group
    o_h = i_h * group + o_e % group
    i_r = i_t * ROWS + o_r
    m_r = ((o_r < ROWS) & (i_r < R) & (n > 0))[:, None]
    p_gate = out_gate
    if out_gate is not None:
        p_gate = out_gate + (i_r * stride_gr + o_h * stride_gh)[:, None]
    p_o = out + (i_r * stride_or + o_h * stride_oh)[:, None]
    for i_c in tl.static_range(NC):
        o_d = (o_c + i_c * BC)[None, :]
        b = b_o[i_c] * b_scale
        if out_gate is not None:
            b_gate = tl.load(p_gate + o_d * stride_gd, mask=m_r & (o_d < D), other=0.0).to(tl.float32)
            b = tl.where(b_scale > 0.0, b * tl.sigmoid(b_gate), 0.0)
        tl.store(p_o + o_d * stride_od, b.to(out.dtype.element_ty), mask=m_r & (o_d < D))


STEPS = ["R", "k", "capacity", "requests", "words", "stride_rr", "stride_p", "stride_ir"]
INDICES = ["row_request", "positions", "block_ids"]
mark_kernel = triton.jit(_mark_kernel, do_not_specialize=STEPS, do_not_specialize_on_alignment=INDICES)
union_kernel = triton.jit(
    _union_kernel, do_not_specialize=["R", *STEPS[2:7], "limit", "width"], do_not_specialize_on_alignment=INDICES[:2]
)
expand_kernel = triton.jit(
    _expand_kernel,
    do_not_specialize=["R", *STEPS[2:4], *STEPS[5:7], "pages", "width", "size", "stride_tr", "stride_tp"],
    do_not_specialize_on_alignment=["table", *INDICES[:2]],
)  # fmt: skip
tiles_kernel = triton.jit(_tiles_kernel, do_not_specialize=["R"])


class Lists(NamedTuple):
    """What the attention over tiles reads; counts also tells which rows are left."""

    counts: torch.Tensor
    slots: torch.Tensor
    masks: torch.Tensor
    rows: int  # of a tile


class Sizes(NamedTuple):
    """int32 numbers a tile takes, and what follows from them."""

    rows: int  # of a tile
    words: int  # of a row's marks
    width: int  # blocks of the longest list
    size: int  # tokens of it, and of a whole step
    tiles: int  # at once


def sizes(R: int, group: int, k: int, ratio: int, capacity: int, config: Config) -> Sizes:
    rows = rows_of(config, group)
    words = cdiv(capacity, 32 * ratio)
    width = int(config.limit * rows * (k + 1)) // 2 * 2  # so that all that lies behind is aligned
    size = cdiv(width * ratio, 64) * 64
    tile = 4 * (1 + rows * words + 2 * width + size + size // 2)
    return Sizes(rows, words, width, size, max(1, min(cdiv(R, rows), BYTES // tile)))


def lists(index, k_cache: torch.Tensor, group: int, ratio: int, config: Config) -> Lists:
    """The unions of the tiles of rows that `index` (page_table, row_request, positions, block_ids) describes."""
    page_table, row_request, positions, block_ids = index
    (R, k), (requests, columns), (pages, page_tokens) = block_ids.shape, page_table.shape, k_cache.shape[:2]
    capacity = columns * page_tokens
    rows, words, width, size, _ = sizes(R, group, k, ratio, capacity, config)
    tiles = cdiv(R, rows)
    parts = [tiles * n for n in (size, size // 2, 2 * width, 1)]
    slots, masks, blocks, counts = torch.empty(sum(parts), dtype=torch.int32, device=k_cache.device).split(parts)
    marks = torch.zeros(tiles * rows * words, dtype=torch.int32, device=k_cache.device)
    strides = row_request.stride(0), positions.stride(0)
    mark_kernel[(R,)](
        row_request, positions, block_ids, marks, R, k, ratio, capacity, requests, words, *strides,
        *block_ids.stride(), ROWS=rows, BK=next_power_of_2(k + 1), num_warps=4,
    )  # fmt: skip
    union_kernel[(tiles,)](
        row_request, positions, marks, counts, blocks, R, ratio, capacity, requests, words, width, width, *strides,
        ROWS=rows, BW=1024, num_warps=8,
    )  # fmt: skip
    expand_kernel[(tiles, cdiv(size, 256))](
        page_table, row_request, positions, counts, blocks, slots, masks, R, ratio, capacity, pages, requests, width,
        size, *page_table.stride(), *strides, ROWS=rows, PAGE=page_tokens, BN=256, num_warps=2,
    )  # fmt: skip
    return Lists(counts, slots, masks, rows)


def attend(heavy, made: Lists, out_gate, out: torch.Tensor, ratio: int, scales, dtype: torch.dtype, config: Config):
    """Writes `out` of the rows of shared tiles. scales: of scores (base 2) and of values."""
    q, k_cache, v_cache = heavy
    (R, heads, D), (_, page_tokens, kv_heads, _) = q.shape, k_cache.shape
    tiles = made.counts.shape[0]
    flat = all(x.stride(0) == page_tokens * x.stride(1) for x in (k_cache, v_cache))
    gate_strides = (0, 0, 0) if out_gate is None else out_gate.stride()
    width = max(16, next_power_of_2(D))
    tiles_kernel[(tiles, kv_heads)](
        *heavy, made.counts, made.slots, made.masks, out_gate, out, R, ratio, made.slots.shape[0] // tiles,
        heads // kv_heads, *scales, *q.stride(), *k_cache.stride(), *v_cache.stride(), *gate_strides, *out.stride(),
        ROWS=made.rows, D=D, BD=width, BC=min(width, config.columns), BM=config.tall, BN=config.tokens,
        PAGE=page_tokens, FLAT=flat, STAGES=config.num_stages, DTYPE=gather.DTYPES[dtype], num_warps=config.num_warps,
    )  # fmt: skip
