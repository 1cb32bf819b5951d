"""Index queries of new tokens, their raw keys into the ring, and the block keys that become complete; one kernel.

    query      rope(round(norm(raw))), rounded; norm(x) = x rsqrt(mean x^2 + eps) (1 + w), RoPE on the first R lanes
    block key  the same of the float32 mean, rounded, of the group's raw keys, RoPE at the group's first token

A program is some tokens' queries, or the block keys of those that end a group that lies whole in this call, or a
request. A request's finds the request's run of rows; the one group that began in an earlier call takes its old keys
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

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from thalweg.device import arch, current, next_power_of_2


@dataclass(frozen=True)
class Config:
    """tokens, heads: of a program's tile of queries. rows: of row_request that a request's program looks at in one
    step."""

    tokens: int
    heads: int
    rows: int
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(T: int, device: str) -> Config:
    """The configuration for T rows on an architecture (`device.arch`); us on an H200 at p128k / d64-s3."""
    return Config(4, 1, 1024, 4, "10.5 / 4.4; 2 tokens x 2 heads 11.8 / 4.4, 2 x 4 13.2 / 4.4, in two warps 10.5 / 4.6")


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
    """cos and sin of the lanes o_d at positions (as wide as o_d, or 1 wide), clipped to the table."""
    b_position = tl.minimum(tl.maximum(b_position, 0), P - 1).to(tl.int32)
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
def _queries(
    index_qk, q_norm_weight, rope_table, positions, row_request, axes, out, i_tile, T, P, requests, heads, eps,
    stride_qt, stride_qd, stride_qw, stride_rp, stride_rl, stride_p, stride_rr, stride_at, stride_aa, stride_ot,
    stride_oh, stride_od, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The index queries of BT tokens, BH heads at a time, zeros for padding: a row of the tile is a token's head."""
    o_d, o_p, b_sign = _lanes(D, BD, HALF)
    o_d, o_p, b_sign = o_d[None], o_p[None], b_sign[None]
    o_r = tl.arange(0, BT * BH)[:, None]
    o_t = i_tile.to(tl.int64) * BT + o_r // BH
    b_request = tl.load(row_request + o_t * stride_rr, mask=o_t < T, other=-1).to(tl.int64)
    b_at = tl.load(positions + o_t * stride_p, mask=o_t < T, other=-1).to(tl.int64)
    live = (b_request >= 0) & (b_request < requests) & (b_at >= 0)
    if axes is not None:
        b_at = tl.load(axes + o_t * stride_at + _axis(o_d, HALF) * stride_aa, mask=live, other=0).to(tl.int64)
    b_cos, b_sin = _angles(rope_table, b_at, o_d, P, stride_rp, stride_rl, HALF)
    b_w = tl.load(q_norm_weight + o_d * stride_qw, mask=o_d < D, other=0.0).to(tl.float32)
    b_v = tl.load(q_norm_weight + o_p * stride_qw).to(tl.float32)
    dtype = out.dtype.element_ty
    for i_h in range(0, heads, BH):
        o_h = i_h + o_r % BH
        p_q = index_qk + o_t * stride_qt + o_h * D * stride_qd
        m = live & (o_h < heads)
        b_x = tl.load(p_q + o_d * stride_qd, mask=m & (o_d < D), other=0.0).to(tl.float32)
        b_y = tl.load(p_q + o_p * stride_qd, mask=m, other=0.0).to(tl.float32)
        b_n = tl.rsqrt(tl.sum(b_x * b_x, 1, keep_dims=True) / D + eps)
        b_x = (b_x * b_n * (1.0 + b_w)).to(dtype).to(tl.float32)
        b_y = (b_y * b_n * (1.0 + b_v)).to(dtype).to(tl.float32)
        b_q = tl.where(o_d < 2 * HALF, b_x * b_cos + b_sign * b_y * b_sin, b_x)
        p_o = out + o_t * stride_ot + o_h * stride_oh + o_d * stride_od
        tl.store(p_o, tl.where(m, b_q, 0.0).to(dtype), mask=(o_t < T) & (o_h < heads) & (o_d < D))


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
                p_n = p_raw - (ratio - 1 - i) * stride_qt  # a name of its own: another dtype
                b_x += tl.load(p_n + o_d * stride_qd, mask=o_d < D, other=0.0).to(ring_type).to(tl.float32)
                b_y += tl.load(p_n + o_p * stride_qd).to(ring_type).to(tl.float32)
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


@triton.jit
def _to_ring(
    index_key, axes, p_ring, p_ring_axes, row_request, positions, i_request, i_first, i_last, Rn, stride_qt, stride_qd,
    stride_rr, stride_p, stride_gr, stride_gd, stride_at, stride_aa, stride_xr, stride_xa,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The raw keys of a request's newest rows to its ring, backwards, until a row is older than the ring is deep."""
    o_d = tl.arange(0, BD)[None]
    newest = tl.load(positions + i_last * stride_p).to(tl.int64)
    i_t = i_last.to(tl.int64)
    while i_t >= i_first:
        o_t = i_t - tl.arange(0, BR)[:, None]
        b_position = tl.load(positions + o_t * stride_p, mask=o_t >= i_first, other=-1).to(tl.int64)
        b_request = tl.load(row_request + o_t * stride_rr, mask=o_t >= i_first, other=-1).to(tl.int64)
        mine = (b_request == i_request) & (b_position >= 0)
        older = tl.max((mine & (b_position <= newest - Rn + 1)).to(tl.int32))
        mine = mine & (b_position > newest - Rn) & (b_position <= newest)
        entry = tl.maximum(b_position, 0) % Rn
        m = mine & (o_d < D)
        b_x = tl.load(index_key + o_t * stride_qt + o_d * stride_qd, mask=m, other=0.0)
        tl.store(p_ring + entry * stride_gr + o_d * stride_gd, b_x.to(p_ring.dtype.element_ty), mask=m)
        if axes is not None:
            o_a = tl.arange(0, 4)[None]
            m = mine & (o_a < 3)
            b_a = tl.load(axes + o_t * stride_at + o_a * stride_aa, mask=m, other=0)
            tl.store(p_ring_axes + entry * stride_xr + o_a * stride_xa, b_a.to(p_ring_axes.dtype.element_ty), mask=m)
        i_t = tl.where(older > 0, i_first - 1, i_t - BR)


def _kernel(
    index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, keys, table, axes, ring_axes,
    out, T, P, Rn, ratio, eps, requests, columns, pages, heads,
    stride_qt: tl.int64, stride_qd, stride_qw, stride_kw, stride_rp: tl.int64, stride_rl, stride_p: tl.int64,
    stride_rr: tl.int64, stride_gn: tl.int64, stride_gr: tl.int64, stride_gd, stride_kp: tl.int64, stride_kr: tl.int64,
    stride_kd, stride_pn: tl.int64, stride_pp: tl.int64, stride_at: tl.int64, stride_aa: tl.int64, stride_xn: tl.int64,
    stride_xr: tl.int64, stride_xa: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64, stride_od,
    D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BR: tl.constexpr, HALF: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    index_qk_key = index_qk + heads * D * stride_qd
    tiles = (T + BT - 1) // BT
    i_p = tl.program_id(0)
    if i_p < tiles:
        _queries(
            index_qk, q_norm_weight, rope_table, positions, row_request, axes, out, i_p, T, P, requests, heads, eps,
            stride_qt, stride_qd, stride_qw, stride_rp, stride_rl, stride_p, stride_rr, stride_at, stride_aa, stride_ot,
            stride_oh, stride_od, D, BD, BT, BH, HALF,
        )  # fmt: skip
    elif i_p < 2 * tiles:
        back = ratio - 1
        for i in range(BT):
            i_t = (i_p - tiles).to(tl.int64) * BT + i
            position = tl.load(positions + i_t * stride_p, mask=i_t < T, other=-1).to(tl.int64)
            i_request = tl.load(row_request + i_t * stride_rr, mask=i_t < T, other=-1).to(tl.int64)
            i_f = i_t - back
            ends = (i_request >= 0) & (i_request < requests) & (position >= 0) & (position % ratio == back) & (i_f >= 0)
            if ends:
                whole = tl.load(row_request + i_f * stride_rr).to(tl.int64) == i_request
                whole = whole & (tl.load(positions + i_f * stride_p).to(tl.int64) == position - back)
                if whole:
                    p_axes = axes
                    if axes is not None:
                        p_axes += i_t * stride_at
                    _block_key(
                        index_qk_key + i_t * stride_qt, raw_ring, p_axes, ring_axes, k_norm_weight, rope_table, keys,
                        table + i_request * stride_pn, position, 0, P, Rn, ratio, eps, columns, pages,
                        stride_qt, stride_qd, stride_gr, stride_gd, stride_at, stride_aa, stride_xr, stride_xa,
                        stride_kw, stride_rp, stride_rl, stride_kp, stride_kr, stride_kd, stride_pp, D, BD, HALF, PAGE,
                    )  # fmt: skip
    else:
        i_request = (i_p - 2 * tiles).to(tl.int64)
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
            _to_ring(
                index_qk_key, axes, p_ring, p_ring_axes, row_request, positions, i_request, i_first, i_last, Rn,
                stride_qt, stride_qd, stride_rr, stride_p, stride_gr, stride_gd, stride_at, stride_aa, stride_xr,
                stride_xa, D, BD, BR,
            )  # fmt: skip


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
    """Launches the kernel, programs of tokens and of requests; arguments as the module's docstring says. No sync."""
    T, D = index_qk.shape[0], q_norm_weight.shape[0]
    requests, columns = page_table.shape
    if T == 0:
        return
    axes = (0, 0) if rope_positions is None else rope_positions.stride()
    ring_axes = (0, 0, 0) if ring_positions is None else ring_positions.stride()
    config = choose(T, arch(index_qk.device))
    with current(index_qk.device):
        kernel[(2 * -(-T // config.tokens) + requests,)](
            index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys,
            page_table, rope_positions, ring_positions, out,
            T, rope_table.shape[0], raw_ring.shape[1], ratio, float(eps), requests, columns,
            block_keys.shape[0] if block_keys.shape[1] else 0,
            index_qk.shape[1] // D - 1, *index_qk.stride(), q_norm_weight.stride(0), k_norm_weight.stride(0),
            *rope_table.stride(), positions.stride(0), row_request.stride(0), *raw_ring.stride(), *block_keys.stride(),
            *page_table.stride(), *axes, *ring_axes, *out.stride(),
            D=D, BD=max(16, next_power_of_2(D)), BT=config.tokens, BH=config.heads, BR=16,
            HALF=rope_table.shape[1] // 2, PAGE=max(1, block_keys.shape[1]), ROWS=config.rows, **config.options,
        )  # fmt: skip
