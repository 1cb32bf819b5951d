"""The anchored form of `prepare` on Hopper: the same hand-over, the same contract, K = 128, bfloat16 in and out.

A program owns a chunk of a head, a lane two channels of the 16 rows of half a chunk: the gate is cumulated without
shuffles. q, k and the gate come once, by asynchronous copies that fill rows past the end with zeros, into the tiles
whose places the score operands take later:

    rows    [64, 128]   k | q, then Kp | Qp      left operand of both products
    others  [32, 128]   the gate, then Ke        right operand of the scores

The norms of k and q are the diagonal of (k | q) (k | q)^T, a product that runs while the gate is activated. L and beta
are left in pairs for `substitution.invert`, which prepare launches behind the kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from thalweg.device import arch, current
from thalweg.gluon import copy_async, thread_barrier
from thalweg.kda.anchor import anchored, frame
from thalweg.kda.substitution import invert

LOG2E = gl.constexpr(1.4426950408889634)
OFFSETS = gl.constexpr(32)  # sequence offsets read at once, one a lane: every warp holds them all
C = gl.constexpr(32)
K = gl.constexpr(128)
CLOSED = gl.constexpr(-3e38)  # a raw gate that decays nothing: of rows past the end


@dataclass(frozen=True)
class Config:
    num_warps: int
    max_registers: int  # a lane
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "maxnreg": self.max_registers, "enable_fp_fusion": True}


def choose() -> Config:
    """The configuration of everything that `why_not` takes."""
    # Measured at 8,192 tokens x 64 heads: 243 us at 128 registers, 250 at 112, 300 at 96, which spills.
    return Config(4, 128, "four warps are one wgmma; at 128 registers four programs share a multiprocessor")


def why_not(call: Mapping[str, Any]) -> str | None:
    """Why these arguments of the op need the portable stage; None: this one takes them."""
    if arch(call["q"].device) != "sm_90":
        return "made for the sm_90 architecture"
    if not anchored(call["out"].dtype, call["gate"], call["lower_bound"], call["qk_l2norm"], call["scale"]):
        return "takes a gate bounded by -5 or less, normalised q and k, bfloat16 results, a scale near 1"
    for name in ("q", "k", "g_raw"):
        x = call[name]
        if x.dtype != torch.bfloat16 or x.shape[2] != K.value:
            return f"takes {name} in bfloat16 with K = {K.value}, got {list(x.shape)} in {x.dtype}"
        if x.stride(2) != 1 or x.stride(0) % 16 or x.stride(1) % 16 or x.data_ptr() % 16:
            return f"{name} must have contiguous rows that start at multiples of 32 bytes, got strides {x.stride()}"
    return None


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def _times(x, y):
    """x y in bf16, two at a time."""
    return gl.inline_asm_elementwise("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, y], gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def _octaves(x, octave):
    """x times a power of two, which octave holds twice in bf16: exact, two at a time."""
    return gl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;",
        "=r,r,r,r",
        [x, octave + gl.zeros_like(x).to(gl.int32)],
        gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _offsets(cu_seqlens, stride, first, N, T):
    ROW: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    o_cu = first + gl.arange(0, OFFSETS, ROW)
    b_cu = gl.load(cu_seqlens + o_cu.to(gl.int64) * stride, mask=o_cu <= N, other=0).to(gl.int64)
    return o_cu, gl.minimum(gl.maximum(b_cu, 0), T).to(gl.int32)


@gluon.jit
def _good(slot, slots, null_slot):
    return (slot >= 0) & (slot < slots) & (slot != null_slot)


@gluon.jit
def _live(read_slots, write_slots, fresh, o_n, m, slots, null_slot, stride_read, stride_write, stride_fresh):
    """`slots.row`: whether sequences o_n are no padding."""
    read = gl.load(read_slots + o_n.to(gl.int64) * stride_read, mask=m, other=-1).to(gl.int64)
    write = gl.load(write_slots + o_n.to(gl.int64) * stride_write, mask=m, other=-1).to(gl.int64)
    live = _good(read, slots, null_slot)
    if fresh is not None:
        live = live | (gl.load(fresh + o_n.to(gl.int64) * stride_fresh, mask=m, other=0) != 0)
    return live & _good(write, slots, null_slot)


@gluon.jit
def _locate(
    cu_seqlens, read_slots, write_slots, fresh, stride, stride_read, stride_write, stride_fresh, slots, null_slot,
    i_chunk, N, T,
):  # fmt: skip
    """`chunks.locate`: the chunk's first token, its count of tokens, whether a sequence covers it; and whether that is
    no padding.
    """
    # The first offsets and slots are asked for at once: with fewer than 32 sequences there is nothing else to ask.
    o_cu, b_cu = _offsets(cu_seqlens, stride, 0, N, T)
    b_live = _live(
        read_slots, write_slots, fresh, o_cu, o_cu < N, slots, null_slot, stride_read, stride_write, stride_fresh
    )
    i_span = gl.min(gl.where(o_cu <= N, gl.maximum(o_cu, i_chunk - b_cu // C), N + 1), 0)
    for first in range(OFFSETS, N + 1, OFFSETS):
        o_more, b_more = _offsets(cu_seqlens, stride, first, N, T)
        b_past = gl.maximum(o_more, i_chunk - b_more // C)
        i_span = gl.minimum(i_span, gl.min(gl.where(o_more <= N, b_past, N + 1), 0))
    live = gl.max(gl.where(o_cu == i_span - 1, b_live.to(gl.int32), 0), 0)
    start = gl.max(gl.where(o_cu < i_span, b_cu, 0), 0)
    end = gl.max(gl.where(o_cu <= i_span, b_cu, 0), 0)
    for first in range(OFFSETS, gl.minimum(i_span, N) + 1, OFFSETS):
        o_cu, b_cu = _offsets(cu_seqlens, stride, first, N, T)
        b_live = _live(
            read_slots, write_slots, fresh, o_cu, o_cu < N, slots, null_slot, stride_read, stride_write, stride_fresh
        )
        live = gl.maximum(live, gl.max(gl.where(o_cu == i_span - 1, b_live.to(gl.int32), 0), 0))
        start = gl.maximum(start, gl.max(gl.where(o_cu < i_span, b_cu, 0), 0))
        end = gl.maximum(end, gl.max(gl.where(o_cu <= i_span, b_cu, 0), 0))
    end = gl.where(i_span > N, T, end)
    i_t = start + (i_chunk - start // C - i_span) * C
    return i_t, gl.minimum(end - i_t, C), (i_span > 0) & (i_span <= N), live


@gluon.jit
def _empty(out, lower, i_t, i_hv, n, covered, stride_ot, stride_oh, stride_od, V: gl.constexpr):
    """A chunk number without tokens, or of padding: nothing to invert; zeros in the n rows that no sequence covers."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    o_r = gl.arange(0, C, gl.SliceLayout(1, TILE))[:, None]
    o_c = gl.arange(0, 64, gl.SliceLayout(0, TILE))[None, :]
    gl.store(lower + o_r * C + o_c, gl.zeros([C, 64], gl.float32, TILE), mask=(o_r >= 0) & (o_c < C))
    if not covered:
        for i in gl.static_range(0, V, 64):
            p_out = out + i_t.to(gl.int64) * stride_ot + i_hv * stride_oh + o_r * stride_ot + (i + o_c) * stride_od
            gl.store(p_out, gl.zeros([C, 64], out.dtype.element_ty, TILE), mask=(o_r < n) & (i + o_c < V))


@gluon.jit
def _copy(tile, p, stride, n):
    """Starts to copy the n rows at p, `stride` apart, into a tile, with zeros behind them."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_r = gl.arange(0, C, gl.SliceLayout(1, ROWS))[:, None]
    o_d = gl.arange(0, K, gl.SliceLayout(0, ROWS))[None, :]
    copy_async(tile, p + (o_r * stride + o_d), (o_r < n) & (o_d < K))


@gluon.jit
def _halved(b, HALVES: gl.constexpr):
    """A `[32, 128]` tile of registers as [half, row, channel]: no value moves."""
    return gl.convert_layout(gl.reshape(b, [2, C // 2, K]), HALVES, True)


@gluon.jit
def _whole(b, TILE: gl.constexpr):
    return gl.convert_layout(gl.reshape(b, [C, K]), TILE, True)


@gluon.jit
def _kernel(
    q, k, g_raw, beta_logits, A_log, dt_bias, cu_seqlens, read_slots, write_slots, fresh, out, factors, pairs, decays,
    T, N, first, HV, group, bound, anchor, scale, down_k, down_q, up_q,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_gt, stride_gh, stride_bt, stride_bh, stride_a, stride_dh,
    stride_dd, stride_ot, stride_oh, stride_od, stride_cu, stride_read, stride_write, stride_fresh, slots, null_slot,
    V: gl.constexpr, DOUBLED: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [2, 1, 2], [2, 1, 0])
    TILE: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 64], [16, 0]], [],
        [32, 128],
    )  # fmt: skip
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GRAM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    CHANNELS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, HALVES))
    i_head = gl.program_id(0) % HV
    i_hv = i_head.to(gl.int64)
    i_entry = gl.program_id(0) // HV
    i_t, n, covered, live = _locate(
        cu_seqlens, read_slots, write_slots, fresh, stride_cu, stride_read, stride_write, stride_fresh, slots,
        null_slot, first + i_entry, N, T,
    )  # fmt: skip
    i_row = i_entry.to(gl.int64) * HV + i_hv
    pairs += i_row * (3 * C * C)
    lower = pairs.to(gl.pointer_type(gl.float32), bitcast=True)
    if (n <= 0) | (live == 0):
        _empty(out, lower, i_t, i_hv, n, covered, stride_ot, stride_oh, stride_od, V)
        n = 0
    if n > 0:
        rows = gl.allocate_shared_memory(gl.bfloat16, [2 * C, K], OPERAND)
        others = gl.allocate_shared_memory(gl.bfloat16, [C, K], OPERAND)
        norms = gl.allocate_shared_memory(gl.float32, [2 * C], LINE)
        octaves = gl.allocate_shared_memory(gl.int32, [2 * C], LINE)
        sums = gl.allocate_shared_memory(gl.float32, [2 * K], LINE)
        token = i_t.to(gl.int64)
        i_h = (i_head // group).to(gl.int64)
        _copy(others, g_raw + token * stride_gt + i_hv * stride_gh, stride_gt, n)
        _copy(rows.slice(0, C), k + token * stride_kt + i_h * stride_kh, stride_kt, n)
        _copy(rows.slice(C, C), q + token * stride_qt + i_h * stride_qh, stride_qt, n)
        async_copy.commit_group()
        o_d = gl.arange(0, K, CHANNELS)
        b_rate = -LOG2E
        if A_log is not None:
            # Never quite zero, so that a closed gate stays closed.
            b_rate = gl.minimum(_exp2(LOG2E * gl.load(A_log + i_hv * stride_a)) * -LOG2E, -1e-30)
        b_bias = gl.zeros([K], gl.float32, CHANNELS)
        if dt_bias is not None:
            b_bias = gl.load(dt_bias + i_hv * stride_dh + o_d * stride_dd) * b_rate
        async_copy.wait_group(0)
        fence_async_shared()
        thread_barrier()
        b_gram = warpgroup_mma(rows, rows.permute((1, 0)), gl.zeros([2 * C, 2 * C], gl.float32, GRAM), is_async=True)
        if n < C:
            o_r = gl.arange(0, C, gl.SliceLayout(1, TILE))[:, None]
            others.store(gl.where(o_r < n, others.load(TILE), gl.full([1, 1], CLOSED, gl.bfloat16, TILE)))
        b_g = _halved(others.load(TILE), HALVES).to(gl.float32) * b_rate + b_bias[None, None, :]
        b_g = bound * _reciprocal(1.0 + _exp2(b_g))
        b_cum = gl.associative_scan(b_g, 1, _add)
        sums.store(gl.reshape(gl.sum(b_g, 1), [2 * K]))
        b_gram = warpgroup_mma_wait(0, [b_gram])
        o_gram = gl.arange(0, 2 * C, gl.SliceLayout(1, GRAM))
        m_gram = o_gram[:, None] == gl.arange(0, 2 * C, gl.SliceLayout(0, GRAM))[None, :]
        b_norm = gl.rsqrt(gl.sum(gl.where(m_gram, b_gram, 0.0), 1) + 1e-6)
        # A power of two, twice in bf16, and what is left between 1 and 2: k scaled by the first keeps every digit.
        b_bits = b_norm.to(gl.int32, bitcast=True)
        b_octave = b_bits & 0x7F800000
        octaves.store(b_octave | b_octave >> 16)
        norms.store(gl.where(o_gram < C, (b_bits & 0x7FFFFF | 0x3F800000).to(gl.float32, bitcast=True), b_norm * scale))
        thread_barrier()
        b_before = sums.slice(0, K).load(CHANNELS)
        b_all = b_before + sums.slice(K, K).load(CHANNELS)
        o_half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, HALVES)))[:, None, None]
        b_cum += gl.where(o_half == 0, 0.0, b_before[None, None, :]) - anchor
        b_kn = gl.reshape(norms.slice(0, C).load(gl.SliceLayout(1, TILE)), [2, C // 2])
        b_qn = gl.reshape(norms.slice(C, C).load(gl.SliceLayout(1, TILE)), [2, C // 2])
        b_kn = gl.convert_layout(b_kn, gl.SliceLayout(2, HALVES), True)[:, :, None]
        b_qn = gl.convert_layout(b_qn, gl.SliceLayout(2, HALVES), True)[:, :, None]
        b_o = gl.reshape(octaves.slice(0, C).load(gl.SliceLayout(1, TILE)), [2, C // 2])
        b_o = gl.convert_layout(b_o, gl.SliceLayout(2, HALVES), True)[:, :, None]
        b_k = _octaves(_halved(rows.slice(0, C).load(TILE), HALVES), b_o).to(gl.float32)
        b_q = _halved(rows.slice(C, C).load(TILE), HALVES).to(gl.float32) * b_qn
        b_w = _exp2(b_cum)
        b_kp = (b_k * b_kn * b_w).to(gl.bfloat16)
        b_qp = (b_q * b_w).to(gl.bfloat16)
        b_ke = b_k * _exp2(-b_cum)
        rows.slice(0, C).store(_whole(b_kp, TILE))
        rows.slice(C, C).store(_whole(b_qp, TILE))
        others.store(_whole(b_ke.to(gl.bfloat16), TILE))
        fence_async_shared()
        thread_barrier()
        b_scores = warpgroup_mma(rows, others.permute((1, 0)), gl.zeros([2 * C, C], gl.float32, SCORES), is_async=True)
        o_row = o_half * (C // 2) + gl.arange(0, C // 2, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :, None]
        p_f = factors + i_row * (3 * C * K) + (o_row * K + o_d[None, None, :])
        gl.store(p_f, _times(b_kp, gl.full([2, C // 2, K], -down_k, gl.bfloat16, HALVES)))
        gl.store(p_f + C * K, _times(b_qp, gl.full([2, C // 2, K], down_q, gl.bfloat16, HALVES)))
        gl.store(p_f + 2 * C * K, (b_ke * _exp2(b_all - anchor)[None, None, :]).to(gl.bfloat16))
        gl.store(decays + i_row * K + o_d, _exp2(b_all))
        o_1 = gl.arange(0, 2 * C, gl.SliceLayout(1, SCORES))
        p_beta = beta_logits + token * stride_bt + i_hv * stride_bh + o_1 % C * stride_bt
        b_beta = gl.load(p_beta, mask=o_1 % C < n, other=-float("inf")).to(gl.float32)
        b_beta = _reciprocal(1.0 + _exp2(-LOG2E * b_beta)) * norms.load(gl.SliceLayout(1, SCORES))
        if DOUBLED:
            b_beta *= 2.0
        o_i = o_1[:, None]
        o_j = gl.arange(0, C, gl.SliceLayout(0, SCORES))[None, :]
        # Right of the diagonal may stand infinities, which nothing reads.
        b_scores = warpgroup_mma_wait(0, [b_scores])
        b_Aqk = gl.where(o_i - C >= o_j, b_scores * up_q, 0.0)
        gl.store(pairs + C * C + o_i * C + o_j, b_Aqk.to(gl.bfloat16), mask=(o_i >= C) & (o_j < C))
        m_l = (o_i < C) & ((o_i >= C // 2) | (o_j < C // 2))  # nothing reads the quarter above the diagonal tiles
        gl.store(lower + o_i * C + o_j, b_scores * b_beta[:, None], mask=m_l)
        thread_barrier()  # beta onto the diagonal of what other lanes have stored: cheaper than 16 selections a lane
        gl.store(lower + o_1 * (C + 1), b_beta, mask=o_1 < C)


kernel = gluon.jit(
    _kernel.fn,
    do_not_specialize=["T", "N", "first", "HV", "group", "slots", "null_slot", "stride_cu", "stride_read",
                       "stride_write", "stride_fresh", "stride_bt", "stride_bh", "stride_a", "stride_dh"],
    do_not_specialize_on_alignment=["cu_seqlens", "read_slots", "write_slots", "fresh", "beta_logits", "A_log"],
)  # fmt: skip


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    factors: torch.Tensor,
    pairs: torch.Tensor,
    decays: torch.Tensor,
    first: int,
    *,
    gate: str,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float,
    scale: float,
    allow_neg_eigval: bool,
    qk_l2norm: bool,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    fresh: torch.Tensor | None,
    slots: int,
    null_slot: int | None,
) -> None:
    """Launches the kernels, a program a chunk number and head; arguments as `prepare.prepare`'s, as `why_not` takes
    them. No sync, no allocation.
    """
    T, H, _ = q.shape
    HV, V = out.shape[1:]
    rows = (cu_seqlens, read_slots, write_slots, fresh)
    with current(q.device):
        kernel[(factors.shape[0] * HV,)](
            q, k, g_raw, beta_logits, A_log, dt_bias, *rows, out, factors, pairs, decays,
            T, cu_seqlens.shape[0] - 1, first, HV, HV // H, *frame(lower_bound, scale),
            *q.stride()[:2], *k.stride()[:2], *g_raw.stride()[:2], *beta_logits.stride(),
            A_log.stride(0) if A_log is not None else 0, *(dt_bias.stride() if dt_bias is not None else (0, 0)),
            *out.stride(), *(0 if x is None else x.stride(0) for x in rows), slots,
            -1 if null_slot is None else null_slot, V=V, DOUBLED=allow_neg_eigval, **choose().options,
        )  # fmt: skip
    invert(pairs)
