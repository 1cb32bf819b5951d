"""What the kernels of qsa_attend share: where list entries lie, rows of the pools, a unit's sums, folding.

Device functions, the dtypes of products, what the kernels in Gluon take; names and shapes as in `attention`.
"""

import torch
import triton
import triton.language as tl

DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def why_not_gluon(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, most: int) -> str | None:
    """What the kernels in Gluon, of at most so many query heads a KV head, cannot take; metadata only."""
    if q.shape[2] not in (64, 128, 256) or q.shape[1] // k_cache.shape[2] > most:
        return f"takes heads of 64, 128 or 256, up to {most} a KV head, got {list(q.shape)}"
    if q.dtype != k_cache.dtype or q.dtype not in (torch.bfloat16, torch.float16):
        return f"takes queries and cache of one 16-bit dtype, got {q.dtype} and {k_cache.dtype}"
    for x in (k_cache, v_cache):
        if x.stride(3) != 1 or any(s % 8 for s in (*x.stride()[:3], x.storage_offset())):
            return f"takes caches contiguous in D and aligned to 16 bytes, got strides {x.stride()}"
        if x.stride(0) != x.shape[1] * x.stride(1):
            return f"takes evenly spaced pages, got strides {x.stride()}"
    return None


@triton.jit
def row(row_request, positions, i_r, ratio, capacity, requests, stride_rr, stride_p):
    """Request (0 for padding) and position (-1) of a row."""
    i_request = tl.load(row_request + i_r * stride_rr).to(tl.int64)
    position = tl.load(positions + i_r * stride_p).to(tl.int64)
    live = (i_request >= 0) & (i_request < requests) & (position >= 0)
    # Past the table's capacity everything is a hole: a position may be taken for one just behind it.
    position = tl.minimum(tl.where(live, position, -1), capacity + 2 * ratio).to(tl.int32)
    return tl.where(live, i_request, 0), position


@triton.jit
def slots(b_id, p_table, o_j, position, k, ratio, capacity, pages, stride_tp, PAGE: tl.constexpr):
    """Page and row in it of list entries of blocks b_id, and which of them are tokens that the row attends to."""
    visible = (position + 1) // ratio
    listed = (b_id >= 0) & (b_id < visible)
    b_token = tl.where(listed, b_id, 0).to(tl.int32) * ratio + o_j % ratio
    b_tail = visible * ratio + (o_j - k * ratio)
    tail = (o_j >= k * ratio) & (o_j < k * ratio + ratio - 1) & (b_tail <= position)
    b_token = tl.where(tail, b_tail, b_token)
    m_j = (listed | tail) & (b_token < capacity)
    b_page = tl.load(p_table + (b_token // PAGE).to(tl.int64) * stride_tp, mask=m_j, other=-1).to(tl.int64)
    m_j = m_j & (b_page >= 0) & (b_page < pages)
    return b_page, b_token % PAGE, m_j


@triton.jit
def rows(p, b_page, b_row, m_j, stride_p, stride_t, stride_d, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
          dtype: tl.constexpr):  # fmt: skip
    """Keys or values of slots, in tiles of BC columns: a lane copies the same few slots of each tile."""
    o_c = tl.arange(0, BC)
    p_row = p + b_page * stride_p + b_row.to(tl.int64) * stride_t
    b = ()
    for i_c in tl.static_range(BD // BC):
        m = m_j[:, None]
        if D < BD:
            m = m & (o_c + i_c * BC < D)[None, :]
        b = b + (tl.load(p_row[:, None] + (o_c + i_c * BC)[None, :] * stride_d, mask=m, other=0.0).to(dtype),)
    return b


@triton.jit
def query(q, o_g, stride_qh, stride_qd, group, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    o_c = tl.arange(0, BC)
    b = ()
    for i_c in tl.static_range(BD // BC):
        o_d = o_c + i_c * BC
        m = (o_g < group)[:, None] & (o_d < D)[None, :]
        p_q = q + o_g[:, None] * stride_qh + o_d[None, :] * stride_qd
        b = b + (tl.load(p_q, mask=m, other=0.0).to(dtype),)
    return b


@triton.jit
def unit(b_q, b_k, b_v, m_j, scale, N: tl.constexpr, dtype: tl.constexpr):
    """Sums (a tile of columns each), maximum (base 2) and weight (a tile, all columns alike) of a unit by itself.

    A masked entry has no weight, not even a bit. The scores of each tile of columns are summed on their own: short
    chains of products. The weight is a product like the sums: none of it depends on how many warps there are.
    """
    b_s = tl.dot(b_q[0], tl.trans(b_k[0]), input_precision="ieee")
    for i_c in tl.static_range(1, N):
        b_s += tl.dot(b_q[i_c], tl.trans(b_k[i_c]), input_precision="ieee")
    b_s = tl.where(m_j[None, :], b_s * scale, float("-inf"))
    b_m = tl.max(b_s, 1)
    b_p = tl.exp2(b_s - tl.where(b_m == float("-inf"), 0.0, b_m)[:, None]).to(dtype)
    b_o = ()
    for i_c in tl.static_range(N):
        b_o = b_o + (tl.dot(b_p, b_v[i_c], input_precision="ieee"),)
    ones = tl.full(b_v[0].shape, 1.0, dtype)
    return b_o, b_m, tl.dot(b_p, ones, input_precision="ieee")


@triton.jit
def fold(b_tm, b_m):
    """The maximum of what was folded before and a unit, and the factors of both."""
    b_new = tl.maximum(b_tm, b_m)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    return b_new, tl.exp2(b_tm - b_base), tl.exp2(b_m - b_base)


@triton.jit
def add(b_to, b_o, b_a, b_b):
    return tl.fma(b_to, tl.broadcast_to(b_a, b_to.shape), b_o * b_b)


@triton.jit
def put(p, b_o, b_m, b_l, o_g, group, BD: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr):
    """Stores what is known of a unit."""
    o_c = tl.arange(0, BC)
    for i_c in tl.static_range(BD // BC):
        tl.store(p + o_g[:, None] * BD + (o_c + i_c * BC)[None, :], b_o[i_c], mask=(o_g < group)[:, None])
    tl.store(p + group * BD + o_g, b_m)
    o_l = tl.broadcast_to(o_g[:, None], b_l.shape)
    tl.store(p + group * BD + BG + o_l, b_l, mask=tl.broadcast_to((o_c == 0)[None, :], b_l.shape))


@triton.jit
def finish(p_out, p_gate, b_o, b_l, v_scale, m):
    """Stores sums over weights; where there is no gate its pointers are None."""
    b_o = b_o * (v_scale / tl.where(b_l > 0.0, b_l, 1.0))
    if p_gate is not None:
        b_o = b_o * tl.sigmoid(tl.load(p_gate, mask=m, other=0.0).to(tl.float32))
    tl.store(p_out, tl.where(b_l == 0.0, 0.0, b_o).to(p_out.dtype.element_ty), mask=m)
