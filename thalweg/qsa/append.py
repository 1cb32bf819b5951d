"""Index queries of new tokens, their raw keys into the ring, and the block keys that become complete; one kernel.

    query      rope(round(norm(raw))), rounded; norm(x) = x rsqrt(mean x^2 + eps) (1 + w), RoPE on the first R lanes
    block key  the same of the float32 mean, rounded, of the group's raw keys, RoPE at the group's first token

A program is a token or a request. A token's makes its queries, and its block key if it ends a group that lies whole in
this call. A request's finds the request's run of rows; the one group that began in an earlier call takes its old keys
from the ring, and only then are the newest keys put into it: no other program reads or writes that ring, so that what
is needed is never overwritten before it is read. Both make a block key by the same steps in the same order.

    index_qk         [T, (Hi + 1) * Di]          Hi raw queries, then the raw key; any strides
    q_norm_weight    [Di]; k_norm_weight alike
    rope_table       [P, R] float32              cos, then sin
    positions        [T], row_request [T]        int32 or int64; page_table [requests, max_pages]
    raw_ring         [requests, Rn, Di]          mutated; token p at entry p % Rn
    block_keys       [pages, page_rows, Di]      mutated
    rope_positions   [T, 3] or None              with ring_positions [requests, Rn, 3], mutated
    out              [T, Hi, Di]                 in block_keys' dtype

Source: the indexer of `qwen4_exp` (transformers).
"""

import torch
import triton
import triton.language as tl

from thalweg.device import current

ROWS = 1024  # of row_request that a request's program looks at in one step


@triton.jit
def _lanes(D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr):
    """Lanes of a head, the lane each is rotated with, and the sign of that one."""
    o_d = tl.arange(0, BD)
    o_p = tl.where(o_d < HALF, o_d + HALF, tl.where(o_d < 2 * HALF, o_d - HALF, o_d))
    return o_d, tl.minimum(o_p, D - 1), tl.where(o_d < HALF, -1.0, 1.0)


@triton.jit
def _rotated(b_x, b_y, p_w, stride_w, o_d, o_p, b_sign, b_cos, b_sin, eps, dtype: tl.constexpr, D: tl.constexpr,
             HALF: tl.constexpr):  # fmt: skip
    """Norm, rounding and RoPE of a head b_x `[BD]` (zeros past D); b_y is b_x at the lanes o_p."""
    b_n = tl.rsqrt(tl.sum(b_x * b_x, 0) / D + eps)
    b_w = tl.load(p_w + o_d * stride_w, mask=o_d < D, other=0.0).to(tl.float32)
    b_v = tl.load(p_w + o_p * stride_w).to(tl.float32)
    b_x = (b_x * b_n * (1.0 + b_w)).to(dtype).to(tl.float32)
    b_y = (b_y * b_n * (1.0 + b_v)).to(dtype).to(tl.float32)
    return tl.where(o_d < 2 * HALF, b_x * b_cos + b_sign * b_y * b_sin, b_x).to(dtype)


@triton.jit
def _angles(rope_table, b_position, o_d, P, stride_tp, stride_tl, HALF: tl.constexpr):
    """cos and sin of the lanes at positions (a scalar, or one a lane), clipped to the table."""
    b_position = tl.minimum(tl.maximum(b_position, 0), P - 1)
    o_f = tl.where(o_d < HALF, o_d, o_d - HALF)
    m = o_d < 2 * HALF
    p = rope_table + b_position * stride_tp
    b_cos = tl.load(p + o_f * stride_tl, mask=m, other=1.0)
    return b_cos, tl.load(p + (o_f + HALF) * stride_tl, mask=m, other=0.0)


@triton.jit
def _axis(o_d, HALF: tl.constexpr):
    """Frequency lane f takes its angle from axis f % 3."""
    return tl.where(o_d < HALF, o_d, o_d - HALF) % 3


@triton.jit
def _block_key(
    p_raw, p_ring, p_axes, p_ring_axes, k_norm_weight, rope_table, p_keys, p_table, position, old, P, Rn, ratio, eps,
    columns, pages, stride_qt, stride_qd, stride_gr, stride_gd, stride_at, stride_aa, stride_xr, stride_xa, stride_w,
    stride_tp, stride_tl, stride_kp, stride_kr, stride_kd, stride_pp,
    D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Writes the block key of the group that ends at `position`, whose first `old` members are in the ring.

    p_raw points at the raw key of the row that ends it, p_axes at its rope positions; no page: nothing is written.
    """
    block = position // ratio
    page = tl.load(p_table + (block // PAGE) * stride_pp, mask=block // PAGE < columns, other=-1).to(tl.int64)
    if (page >= 0) & (page < pages):
        o_d, o_p, b_sign = _lanes(D, BD, HALF)
        dtype = p_keys.dtype.element_ty
        ring_type = p_ring.dtype.element_ty
        b_x = tl.zeros([BD], tl.float32)
        b_y = tl.zeros([BD], tl.float32)
        first = position - (ratio - 1)
        for i in range(ratio):
            if i < old:
                p_m = p_ring + (first + i) % Rn * stride_gr
                b_x += tl.load(p_m + o_d * stride_gd, mask=o_d < D, other=0.0).to(tl.float32)
                b_y += tl.load(p_m + o_p * stride_gd).to(tl.float32)
            else:
                p_m = p_raw - (ratio - 1 - i) * stride_qt
                b_x += tl.load(p_m + o_d * stride_qd, mask=o_d < D, other=0.0).to(ring_type).to(tl.float32)
                b_y += tl.load(p_m + o_p * stride_qd).to(ring_type).to(tl.float32)
        b_n = tl.zeros([BD], tl.float32) + ratio
        b_x = tl.div_rn(b_x, b_n).to(dtype).to(tl.float32)
        b_y = tl.div_rn(b_y, b_n).to(dtype).to(tl.float32)
        if p_axes is None:
            b_at = first
        else:
            o_a = _axis(o_d, HALF)
            b_at = tl.load(p_ring_axes + first % Rn * stride_xr + o_a * stride_xa, mask=(o_d >= 0) & (old > 0), other=0)
            b_new = tl.load(p_axes - (ratio - 1) * stride_at + o_a * stride_aa, mask=(o_d >= 0) & (old == 0), other=0)
            b_at = b_at.to(tl.int64) + b_new.to(tl.int64)
        b_cos, b_sin = _angles(rope_table, b_at, o_d, P, stride_tp, stride_tl, HALF)
        b_k = _rotated(b_x, b_y, k_norm_weight, stride_w, o_d, o_p, b_sign, b_cos, b_sin, eps, dtype, D, HALF)
        p_k = p_keys + page * stride_kp + block % PAGE * stride_kr
        tl.store(p_k + o_d * stride_kd, b_k, mask=o_d < D)


@triton.jit
def _run(row_request, positions, i_request, T, stride_rr, stride_p, ROWS: tl.constexpr):
    """First and last live row of a request, T and -1 if it has none."""
    o_t = tl.arange(0, ROWS)
    b_first = tl.full([ROWS], 0, tl.int32) + T
    b_last = tl.full([ROWS], -1, tl.int32)
    for i_t in range(0, T, ROWS):
        m_t = i_t + o_t < T
        b_request = tl.load(row_request + (i_t + o_t).to(tl.int64) * stride_rr, mask=m_t, other=-1)
        b_position = tl.load(positions + (i_t + o_t).to(tl.int64) * stride_p, mask=m_t, other=-1)
        mine = m_t & (b_request == i_request) & (b_position >= 0)
        b_first = tl.minimum(b_first, tl.where(mine, i_t + o_t, T))
        b_last = tl.maximum(b_last, tl.where(mine, i_t + o_t, -1))
    return tl.min(b_first, 0), tl.max(b_last, 0)


def _kernel(
    index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, keys, table, axes, ring_axes,
    out, T, P, Rn, ratio, eps, requests, columns, pages, heads,
    stride_qt: tl.int64, stride_qd, stride_qw, stride_kw, stride_rp: tl.int64, stride_rl, stride_p: tl.int64,
    stride_rr: tl.int64, stride_gn: tl.int64, stride_gr: tl.int64, stride_gd, stride_kp: tl.int64, stride_kr: tl.int64,
    stride_kd, stride_pn: tl.int64, stride_pp: tl.int64, stride_at: tl.int64, stride_aa: tl.int64, stride_xn: tl.int64,
    stride_xr: tl.int64, stride_xa: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64, stride_od,
    D: tl.constexpr, BD: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    o_d, o_p, b_sign = _lanes(D, BD, HALF)
    index_qk_key = index_qk + heads * D * stride_qd
    if tl.program_id(0) < T:
        i_t = tl.program_id(0).to(tl.int64)
        i_request = tl.load(row_request + i_t * stride_rr).to(tl.int64)
        position = tl.load(positions + i_t * stride_p).to(tl.int64)
        p_axes = axes
        if axes is not None:
            p_axes += i_t * stride_at
        p_out = out + i_t * stride_ot
        if (i_request >= 0) & (i_request < requests) & (position >= 0):
            b_at = position
            if axes is not None:
                b_at = tl.load(p_axes + _axis(o_d, HALF) * stride_aa).to(tl.int64)
            b_cos, b_sin = _angles(rope_table, b_at, o_d, P, stride_rp, stride_rl, HALF)
            for i_h in range(heads):
                p_q = index_qk + i_t * stride_qt + i_h * D * stride_qd
                b_x = tl.load(p_q + o_d * stride_qd, mask=o_d < D, other=0.0).to(tl.float32)
                b_y = tl.load(p_q + o_p * stride_qd).to(tl.float32)
                b_q = _rotated(b_x, b_y, q_norm_weight, stride_qw, o_d, o_p, b_sign, b_cos, b_sin, eps,
                               out.dtype.element_ty, D, HALF)  # fmt: skip
                tl.store(p_out + i_h * stride_oh + o_d * stride_od, b_q, mask=o_d < D)
            back = ratio - 1
            if (position % ratio == back) & (i_t >= back):
                i_f = i_t - back
                whole = tl.load(row_request + i_f * stride_rr).to(tl.int64) == i_request
                whole = whole & (tl.load(positions + i_f * stride_p).to(tl.int64) == position - back)
                if whole:
                    _block_key(
                        index_qk_key + i_t * stride_qt, raw_ring, p_axes, ring_axes, k_norm_weight, rope_table, keys,
                        table + i_request * stride_pn, position, 0, P, Rn, ratio, eps, columns, pages,
                        stride_qt, stride_qd, stride_gr, stride_gd, stride_at, stride_aa, stride_xr, stride_xa,
                        stride_kw, stride_rp, stride_rl, stride_kp, stride_kr, stride_kd, stride_pp, D, BD, HALF, PAGE,
                    )  # fmt: skip
        else:
            for i_h in range(heads):
                b_q = tl.zeros([BD], out.dtype.element_ty)
                tl.store(p_out + i_h * stride_oh + o_d * stride_od, b_q, mask=o_d < D)
    else:
        i_request = (tl.program_id(0) - T).to(tl.int64)
        i_first, i_last = _run(row_request, positions, i_request, T, stride_rr, stride_p, ROWS)
        if i_last >= 0:
            first = tl.load(positions + i_first * stride_p).to(tl.int64)
            old = (first % ratio).to(tl.int32)
            i_end = i_first + ratio - 1 - old
            p_ring = raw_ring + i_request * stride_gn
            p_axes = axes
            p_ring_axes = ring_axes
            if axes is not None:
                p_axes += i_end * stride_at
                p_ring_axes += i_request * stride_xn
            closing = (old > 0) & (i_end <= i_last)
            if closing:
                closing = tl.load(row_request + i_end * stride_rr).to(tl.int64) == i_request
                closing = closing & (tl.load(positions + i_end * stride_p).to(tl.int64) == first - old + ratio - 1)
            if closing:
                _block_key(
                    index_qk_key + i_end * stride_qt, p_ring, p_axes, p_ring_axes, k_norm_weight, rope_table, keys,
                    table + i_request * stride_pn, first - old + ratio - 1, old, P, Rn, ratio, eps, columns, pages,
                    stride_qt, stride_qd, stride_gr, stride_gd, stride_at, stride_aa, stride_xr, stride_xa,
                    stride_kw, stride_rp, stride_rl, stride_kp, stride_kr, stride_kd, stride_pp, D, BD, HALF, PAGE,
                )  # fmt: skip
            tl.debug_barrier()  # every lane has read the old keys
            newest = tl.load(positions + i_last * stride_p).to(tl.int64)
            i_t = i_last
            while i_t >= i_first:  # backwards, until a row is older than the ring is deep
                position = tl.load(positions + i_t * stride_p).to(tl.int64)
                mine = (tl.load(row_request + i_t * stride_rr).to(tl.int64) == i_request) & (position >= 0)
                b_x = tl.load(index_qk_key + i_t * stride_qt + o_d * stride_qd, mask=o_d < D, other=0.0)
                b_x = b_x.to(raw_ring.dtype.element_ty)
                mine = mine & (position > newest - Rn) & (position <= newest)
                entry = tl.maximum(position, 0) % Rn
                tl.store(p_ring + entry * stride_gr + o_d * stride_gd, b_x, mask=(o_d < D) & mine)
                if axes is not None:
                    o_a = tl.arange(0, 4)
                    b_a = tl.load(axes + i_t * stride_at + o_a * stride_aa, mask=o_a < 3, other=0)
                    b_a = b_a.to(ring_axes.dtype.element_ty)
                    tl.store(p_ring_axes + entry * stride_xr + o_a * stride_xa, b_a, mask=(o_a < 3) & mine)
                i_t = tl.where(mine & (position <= newest - Rn + 1), i_first - 1, i_t - 1)


# Counts and the strides that follow them change from step to step: none of their values may be compiled in.
kernel = triton.jit(
    _kernel,
    do_not_specialize=["T", "P", "Rn", "ratio", "requests", "columns", "pages", "heads", "stride_p", "stride_rr",
                       "stride_pn", "stride_pp", "stride_at", "stride_aa"],
    do_not_specialize_on_alignment=["positions", "row_request", "table", "axes", "ring_axes"],
)  # fmt: skip


def append(
    index_qk: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_request: torch.Tensor,
    raw_ring: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    eps: float,
    rope_positions: torch.Tensor | None = None,
    ring_positions: torch.Tensor | None = None,
) -> None:
    """Launches the kernel, a program a token and a request; arguments as the module's docstring says. No sync."""
    T, D = index_qk.shape[0], q_norm_weight.shape[0]
    requests, columns = page_table.shape
    if T == 0:
        return
    axes = (0, 0) if rope_positions is None else rope_positions.stride()
    ring_axes = (0, 0, 0) if ring_positions is None else ring_positions.stride()
    with current(index_qk.device):
        kernel[(T + requests,)](
            index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys,
            page_table, rope_positions, ring_positions, out,
            T, rope_table.shape[0], raw_ring.shape[1], ratio, float(eps), requests, columns,
            block_keys.shape[0] if block_keys.shape[1] else 0,
            index_qk.shape[1] // D - 1, *index_qk.stride(), q_norm_weight.stride(0), k_norm_weight.stride(0),
            *rope_table.stride(), positions.stride(0), row_request.stride(0), *raw_ring.stride(), *block_keys.stride(),
            *page_table.stride(), *axes, *ring_axes, *out.stride(),
            D=D, BD=max(16, triton.next_power_of_2(D)), HALF=rope_table.shape[1] // 2,
            PAGE=max(1, block_keys.shape[1]), ROWS=ROWS, num_warps=1,
        )  # fmt: skip
