"""Attention of each row over the tokens of its selected blocks and of its open block, gathered row by row.

    o[r, h] = sum_t softmax_t(scale q[r, h] . k[t]) v[t]          over the row's tokens t, times sigmoid(out_gate)

A row's list has k * ratio + ratio - 1 entries: its blocks in the order given, then the open block; entries that are
unused, on holes or not yet visible are masked and never fetched. The list is cut into segments of SEGMENT entries.
Each is one flash loop of its own, and their results are folded in order, by the same arithmetic whether one program
takes all segments of a row and KV head (many rows) or one each (few rows, then a second kernel folds): a row's bits do
not depend on how many rows there are. All query heads of a KV head share what is fetched.

    q            [R, Hq, D]                          bfloat16, float16 or float32; any strides
    k_cache      [pages, page_tokens, Hkv, D]        an activation dtype or float8_e4m3fn; any strides; v_cache alike
    page_table   [requests, max_pages], row_request [R], positions [R], block_ids [R, k]   int32 or int64
    out_gate     [R, Hq, D] or None
    out          [R, Hq, D]                          in q's dtype; zeros where there is nothing to attend to
    partial      [R, Hkv, segments, BG, BD + 2] float32: sum, maximum (base 2) and weight of each segment
    slots        [R, segments * SEGMENT] int32: pool row of each entry, -1 masked; with many rows it is made first, by a
                 kernel of its own, so that keys and values are one look-up away and can be fetched ahead

Source: flash attention (arXiv 2205.14135) and its split form, over gathered tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, current

LOG2E = 1.4426950408889634
SEGMENT = 256  # entries; a choice of arithmetic, not of speed: another value gives other last bits
FEW = 264  # programs up to which a row's segments are spread over programs


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    kv_heads: int
    group: int  # query heads of a KV head
    dim: int
    itemsize: int  # of a cached element as it is multiplied
    flat: bool  # rows of the pools are evenly spaced


@dataclass(frozen=True)
class Config:
    split: bool  # segments over programs
    listed: bool  # slots are looked up by a kernel before
    tokens: int  # of a step; divides SEGMENT
    num_warps: int
    num_stages: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    width = max(16, triton.next_power_of_2(shape.dim))
    split = shape.rows * shape.kv_heads <= FEW
    # A step's keys and values wait in shared memory, two steps of them: at most 64 KiB (B30); 64 tokens of 256 spill.
    tokens = 64
    while tokens > 16 and 4 * tokens * width * shape.itemsize > 1 << 16:
        tokens //= 2
    if device == "gfx950":  # 160 KiB, and no copies that pass registers by
        tokens = min(tokens, 32)
    listed = not split and shape.flat
    reason = "few rows: a program a segment" if split else "many rows: a program a row and KV head"
    return Config(split, listed, tokens, 4, 3 if listed else 4, reason)


@triton.jit
def _slots(p_ids, p_table, o_j, end, position, visible, k, ratio, capacity, pages, stride_ik, stride_tp,
           PAGE: tl.constexpr):  # fmt: skip
    """Page and row in it of list entries, and which of them are tokens that the row attends to."""
    b_id = tl.load(p_ids + (o_j // ratio) * stride_ik, mask=o_j < tl.minimum(end, k * ratio), other=-1)
    listed = (b_id >= 0) & (b_id < visible)
    b_token = tl.where(listed, b_id, 0).to(tl.int32) * ratio + o_j % ratio
    b_tail = visible * ratio + (o_j - k * ratio)
    tail = (o_j >= k * ratio) & (o_j < end) & (b_tail <= position)
    b_token = tl.where(tail, b_tail, b_token)
    m_j = (listed | tail) & (b_token < capacity)
    b_page = tl.load(p_table + (b_token // PAGE).to(tl.int64) * stride_tp, mask=m_j, other=-1).to(tl.int64)
    m_j = m_j & (b_page >= 0) & (b_page < pages)
    return b_page, b_token % PAGE, m_j


def _slots_kernel(
    table, row_request, positions, block_ids, slots, k, ratio, capacity, pages, requests, width,
    stride_tr: tl.int64, stride_tp: tl.int64, stride_rr: tl.int64, stride_p: tl.int64, stride_ir: tl.int64, stride_ik,
    PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    i_request, position, end = _row(row_request, positions, i_r, k, ratio, capacity, requests, stride_rr, stride_p)
    visible = (position + 1) // ratio
    o_j = tl.program_id(1) * BN + tl.arange(0, BN)
    b_page, b_row, m_j = _slots(block_ids + i_r * stride_ir, table + i_request * stride_tr, o_j, end, position, visible,
                                k, ratio, capacity, pages, stride_ik, stride_tp, PAGE)  # fmt: skip
    b_slot = tl.where(m_j, b_page.to(tl.int32) * PAGE + b_row, -1)
    tl.store(slots + i_r * width + o_j, b_slot, mask=o_j < width)


@triton.jit
def _row(row_request, positions, i_r, k, ratio, capacity, requests, stride_rr, stride_p):
    """Request (0 for padding), position (-1) and list entries (0) of a row."""
    i_request = tl.load(row_request + i_r * stride_rr).to(tl.int64)
    position = tl.load(positions + i_r * stride_p).to(tl.int64)
    live = (i_request >= 0) & (i_request < requests) & (position >= 0)
    # Past the table's capacity everything is a hole: a position may be taken for one just behind it.
    position = tl.minimum(tl.where(live, position, -1), capacity + 2 * ratio).to(tl.int32)
    return tl.where(live, i_request, 0), position, tl.where(live, k * ratio + ratio - 1, 0)


@triton.jit
def _rows(p, b_page, b_row, m_j, stride_p, stride_t, stride_d, D: tl.constexpr, BD: tl.constexpr, dtype: tl.constexpr):
    o_d = tl.arange(0, BD)
    m = m_j[:, None]
    if D < BD:
        m = m & (o_d < D)[None, :]
    p_row = p + b_page * stride_p + b_row.to(tl.int64) * stride_t
    return tl.load(p_row[:, None] + o_d[None, :] * stride_d, mask=m, other=0.0).to(dtype)


@triton.jit
def _step(b_q, b_k, b_v, m_j, b_o, b_m, b_l, scale):
    """One flash step: scores in base 2; a masked entry has weight zero and changes nothing, not even a bit."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    b_s = tl.where(m_j[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_s - b_base[:, None])
    b_decay = tl.exp2(b_m - b_base)
    b_l = tl.fma(b_l, b_decay, tl.sum(b_p, 1))
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * b_decay[:, None], input_precision="ieee")
    return b_o, b_new, b_l


@triton.jit
def _fold(b_to, b_tm, b_tl, b_o, b_m, b_l):
    """Adds a segment to those before it."""
    b_new = tl.maximum(b_tm, b_m)
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_a = tl.exp2(b_tm - b_base)
    b_b = tl.exp2(b_m - b_base)
    b_tl = tl.fma(b_tl, b_a, b_l * b_b)
    b_to = tl.fma(b_to, tl.broadcast_to(b_a[:, None], b_to.shape), b_o * b_b[:, None])
    return b_to, b_new, b_tl


@triton.jit
def _finish(out, out_gate, b_o, b_l, v_scale, o_h, o_d, m, stride_oh, stride_od, stride_gh, stride_gd):
    b_o = b_o * (v_scale / tl.where(b_l > 0.0, b_l, 1.0))[:, None]
    if out_gate is not None:
        b_gate = tl.load(out_gate + o_h[:, None] * stride_gh + o_d[None, :] * stride_gd, mask=m, other=0.0)
        b_o = b_o * tl.sigmoid(b_gate.to(tl.float32))
    b_o = tl.where((b_l == 0.0)[:, None], 0.0, b_o)
    tl.store(out + o_h[:, None] * stride_oh + o_d[None, :] * stride_od, b_o.to(out.dtype.element_ty), mask=m)


def _kernel(
    q, k_cache, v_cache, table, row_request, positions, block_ids, out_gate, out, partial, slots,
    k, ratio, capacity, pages, requests, segments, group, scale, v_scale,
    stride_qr: tl.int64, stride_qh, stride_qd, stride_kp: tl.int64, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_vp: tl.int64, stride_vt, stride_vh: tl.int64, stride_vd, stride_tr: tl.int64, stride_tp: tl.int64,
    stride_rr: tl.int64, stride_p: tl.int64, stride_ir: tl.int64, stride_ik, stride_gr: tl.int64, stride_gh, stride_gd,
    stride_or: tl.int64, stride_oh, stride_od,
    D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SEG: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_g = tl.arange(0, BG)
    o_d = tl.arange(0, BD)
    o_h = i_h * group + o_g
    m_q = (o_g < group)[:, None] & (o_d < D)[None, :]
    i_request, position, end = _row(row_request, positions, i_r, k, ratio, capacity, requests, stride_rr, stride_p)
    visible = (position + 1) // ratio
    lo = 0
    if SPLIT:
        lo = tl.program_id(2) * SEG
        end = tl.minimum(end, lo + SEG)
    p_q = q + i_r * stride_qr + o_h[:, None] * stride_qh + o_d[None, :] * stride_qd
    b_q = tl.load(p_q, mask=m_q & (position >= 0), other=0.0).to(DTYPE)
    p_ids = block_ids + i_r * stride_ir
    p_table = table + i_request * stride_tr
    p_k = k_cache + i_h * stride_kh
    p_v = v_cache + i_h * stride_vh
    b_to = tl.zeros([BG, BD], tl.float32)
    b_tm = tl.full([BG], float("-inf"), tl.float32)
    b_tl = tl.zeros([BG], tl.float32)
    b_o = tl.zeros([BG, BD], tl.float32)
    b_m = tl.full([BG], float("-inf"), tl.float32)
    b_l = tl.zeros([BG], tl.float32)
    for i_j in tl.range(lo, end, BN, num_stages=STAGES):
        if slots is not None:
            b_page = 0
            b_row = tl.load(slots + i_r * (segments * SEG) + i_j + tl.arange(0, BN))
            m_j = b_row >= 0
        else:
            b_page, b_row, m_j = _slots(p_ids, p_table, i_j + tl.arange(0, BN), end, position, visible, k, ratio,
                                        capacity, pages, stride_ik, stride_tp, PAGE)  # fmt: skip
        b_k = _rows(p_k, b_page, b_row, m_j, stride_kp, stride_kt, stride_kd, D, BD, DTYPE)
        b_v = _rows(p_v, b_page, b_row, m_j, stride_vp, stride_vt, stride_vd, D, BD, DTYPE)
        if not SPLIT:  # noqa: SIM102  (decided when it is compiled)
            if i_j % SEG == 0:
                b_to, b_tm, b_tl = _fold(b_to, b_tm, b_tl, b_o, b_m, b_l)
                b_o = tl.zeros([BG, BD], tl.float32)
                b_m = tl.full([BG], float("-inf"), tl.float32)
                b_l = tl.zeros([BG], tl.float32)
        b_o, b_m, b_l = _step(b_q, b_k, b_v, m_j, b_o, b_m, b_l, scale)
    if SPLIT:
        partial += ((i_r * tl.num_programs(1) + i_h) * segments + tl.program_id(2)) * (BG * (BD + 2))
        tl.store(partial + o_g[:, None] * BD + o_d[None, :], b_o)
        tl.store(partial + BG * BD + o_g, b_m)
        tl.store(partial + BG * (BD + 1) + o_g, b_l)
    else:
        b_to, b_tm, b_tl = _fold(b_to, b_tm, b_tl, b_o, b_m, b_l)
        out += i_r * stride_or
        if out_gate is not None:
            out_gate += i_r * stride_gr
        _finish(out, out_gate, b_to, b_tl, v_scale, o_h, o_d, m_q, stride_oh, stride_od, stride_gh, stride_gd)


def _fold_kernel(
    partial, out_gate, out, segments, group, v_scale, stride_gr: tl.int64, stride_gh, stride_gd, stride_or: tl.int64,
    stride_oh, stride_od, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """A program a row, KV head and BF of its columns."""
    i_r = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1)
    o_g = tl.arange(0, BG)
    o_d = tl.program_id(2) * BF + tl.arange(0, BF)
    partial += (i_r * tl.num_programs(1) + i_h) * segments * (BG * (BD + 2))
    b_to = tl.zeros([BG, BF], tl.float32)
    b_tm = tl.full([BG], float("-inf"), tl.float32)
    b_tl = tl.zeros([BG], tl.float32)
    for i_s in range(segments):
        p_s = partial + i_s * (BG * (BD + 2))
        b_o = tl.load(p_s + o_g[:, None] * BD + o_d[None, :])
        b_m = tl.load(p_s + BG * BD + o_g)
        b_l = tl.load(p_s + BG * (BD + 1) + o_g)
        b_to, b_tm, b_tl = _fold(b_to, b_tm, b_tl, b_o, b_m, b_l)
    m = (o_g < group)[:, None] & (o_d < D)[None, :]
    out += i_r * stride_or
    if out_gate is not None:
        out_gate += i_r * stride_gr
    _finish(out, out_gate, b_to, b_tl, v_scale, i_h * group + o_g, o_d, m, stride_oh, stride_od, stride_gh, stride_gd)


# Counts and the strides that follow them change from step to step: none of their values may be compiled in.
STEPS = ["k", "capacity", "pages", "requests", "segments", "stride_tr", "stride_tp", "stride_rr", "stride_p",
         "stride_ir"]  # fmt: skip
INDICES = ["table", "row_request", "positions", "block_ids"]
kernel = triton.jit(_kernel, do_not_specialize=STEPS, do_not_specialize_on_alignment=INDICES)
slots_kernel = triton.jit(
    _slots_kernel, do_not_specialize=[*(n for n in STEPS if n != "segments"), "width"],
    do_not_specialize_on_alignment=INDICES,
)  # fmt: skip
fold_kernel = triton.jit(_fold_kernel, do_not_specialize=["segments"])
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def multiplied(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The dtype of the products: an 8-bit cache is exact in any other; two different ones meet in float32."""
    return q if cache in (q, torch.float8_e4m3fn) else torch.float32


def partial_floats(shape: Shape, k: int, ratio: int) -> int:
    """float32 numbers of workspace the split form needs."""
    width = max(16, triton.next_power_of_2(shape.dim))
    segments = triton.cdiv(k * ratio + ratio - 1, SEGMENT)
    return shape.rows * shape.kv_heads * segments * max(16, triton.next_power_of_2(shape.group)) * (width + 2)


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    scale: float,
    out_gate: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    config: Config | None = None,
) -> None:
    """Writes `out`; arguments as the module's docstring says. No sync. A given config overrides `choose`."""
    R, heads, D = q.shape
    pages, page_tokens, kv_heads, _ = k_cache.shape
    (requests, columns), k = page_table.shape, block_ids.shape[1]
    segments = triton.cdiv(k * ratio + ratio - 1, SEGMENT)
    if R == 0:
        return
    if pages * page_tokens * columns * requests * segments == 0:
        out.zero_()
        return
    dtype = multiplied(q.dtype, k_cache.dtype)
    flat = all(x.stride(0) == page_tokens * x.stride(1) for x in (k_cache, v_cache)) and pages * page_tokens < 2**31
    shape = Shape(R, kv_heads, heads // kv_heads, D, dtype.itemsize, flat)
    config = config or choose(shape, arch(q.device))
    width, tall = max(16, triton.next_power_of_2(D)), max(16, triton.next_power_of_2(shape.group))
    partial = slots = None
    if config.split:
        partial = torch.empty(partial_floats(shape, k, ratio), dtype=torch.float32, device=q.device)
    if config.listed:
        slots = torch.empty(R * segments * SEGMENT, dtype=torch.int32, device=q.device)
    index_strides = (*page_table.stride(), row_request.stride(0), positions.stride(0), *block_ids.stride())
    gate_strides = (0, 0, 0) if out_gate is None else out_gate.stride()
    with current(q.device):
        if slots is not None:
            slots_kernel[(R, triton.cdiv(segments * SEGMENT, 1024))](
                page_table, row_request, positions, block_ids, slots, k, ratio, columns * page_tokens, pages, requests,
                segments * SEGMENT, *index_strides, PAGE=page_tokens, BN=1024, num_warps=4,
            )  # fmt: skip
        kernel[(R, kv_heads, segments if config.split else 1)](
            q, k_cache, v_cache, page_table, row_request, positions, block_ids, out_gate, out, partial, slots,
            k, ratio, columns * page_tokens, pages, requests, segments, shape.group,
            scale * LOG2E * (1.0 if k_scale is None else k_scale), 1.0 if v_scale is None else float(v_scale),
            *q.stride(), *k_cache.stride(), *v_cache.stride(), *index_strides, *gate_strides, *out.stride(),
            D=D, BD=width, BG=tall, BN=config.tokens, PAGE=page_tokens, SEG=SEGMENT, SPLIT=config.split,
            STAGES=config.num_stages, DTYPE=DTYPES[dtype], **config.options,
        )  # fmt: skip
        if config.split:
            fold_kernel[(R, kv_heads, width // min(width, 64))](
                partial, out_gate, out, segments, shape.group, 1.0 if v_scale is None else float(v_scale),
                *gate_strides, *out.stride(), D=D, BD=width, BG=tall, BF=min(width, 64), num_warps=4,
            )  # fmt: skip
