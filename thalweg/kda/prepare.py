"""Everything of a chunk of KDA prefill that does not need the state: norms, gate, scores, inverse.

Per chunk of C tokens and value head, G the gate cumulated inside the chunk, Gc its last row:

    Kp = k exp(G)    Qp = scale q exp(G)    Ke = (k / s) exp(Gc - G)
    Akk = strict_lower(diag(beta) Kp (k exp(-G))^T)       Aqk = lower(Qp (k / s exp(-G))^T), its diagonal included
    inverse = diag(s) (I + Akk)^-1 diag(beta)

s is what the norm of a row of k is beyond a power of two: k / s has the digits that k came with, and so has Ke where
hardly anything is forgotten. Of k rounded, equal keys leave in the state what no later write takes out: 1.0e-2 after
1,024 tokens, and growing; 1.7e-3 with s. In float32 s is 1.

No exponent is ever taken that could overflow, and none depends on a later token. Where the gate is bounded, G is taken
from a constant (`anchor`), so that Kp and Qp are the operands of the scores times a power of two. Where it is not, rows
meet in halves (`halving`), and every exponent is at most 0.

    q, k         [T, H, K]    bfloat16, float16, float32; any strides
    g_raw        [T, HV, K]   raw gate; natural log once activated
    beta_logits  [T, HV]; A_log [HV] float32 or None; dt_bias [HV, K] float32 or None
    out          [T, HV, V]   tokens no sequence covers are set to zero here
    cu_seqlens, read_slots, write_slots, fresh   as `scan` takes them; of padding nothing is handed over
  handed over, one entry a chunk number (`chunks`) and head, for chunk numbers first .. first + count - 1:
    factors      [count, HV, 3, C, BK]    -Kp, Qp, Ke; BK is K rounded up to a power of two, zeros there
    pairs        [count, HV, 3, C, C]     inverse as high + low bf16, Aqk; in float32: inverse, Aqk and no third
    decays       [count, HV, BK] float32  exp(Gc)

Source: Kimi Linear (arXiv 2510.26692), the chunkwise form; here exponents and inverse are as described above.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, current, next_power_of_2
from thalweg.kda import chunks
from thalweg.kda.anchor import anchored, frame
from thalweg.kda.gate import LOG2E, log2_decay
from thalweg.kda.halving import half_scores, unit_lower_inverse
from thalweg.kda.products import halves, sums
from thalweg.kda.slots import live
from thalweg.kda.substitution import invert


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences."""

    K: int
    out_dtype: torch.dtype
    gate: str
    lower_bound: float
    unit: bool  # q and k are normalised here, so at most 1
    scale: float
    biased: bool  # dt_bias is there


@dataclass(frozen=True)
class Config:
    products: str  # of the scores: bf16, tf32x3 or ieee
    anchored: bool  # one anchor a chunk, else halves
    channels: int  # of K at a time
    num_warps: int
    reason: str = field(compare=False)
    max_registers: int | None = None  # a lane, NVIDIA only

    @property
    def options(self) -> dict[str, int | bool]:
        cap = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": True, **cap}


def products(out_dtype: torch.dtype, device: str) -> str:
    """What rounding the outputs' dtype hides; one rule for all stages, as they hand over tiles of one dtype."""
    if out_dtype == torch.bfloat16:
        return "bf16"
    return "tf32x3" if out_dtype == torch.float16 and device.startswith("sm_") else "ieee"


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    form, nvidia = products(shape.out_dtype, device), device.startswith("sm_")
    width = max(16, next_power_of_2(shape.K))
    if anchored(shape.out_dtype, shape.gate, shape.lower_bound, shape.unit, shape.scale):
        # 128 registers are four programs a multiprocessor: 293 us at 8,192 tokens x 64 heads, against 333 at 136.
        # Without a bias, or with K = 256, the compiler needs more, and spills under the cap.
        cap = 128 if nvidia and width <= 128 and shape.biased else None
        reason = "one anchor a chunk: the bound keeps its halves within e^80"
        return Config(form, True, max(width, 64), 8 if width > 128 else 4, reason, cap)
    return Config(form, False, min(width, 32 if form == "bf16" else 16), 4, "no bound: halves")


@triton.jit
def _rows(p, o_t, o_d, stride_t, stride_d, n, K: tl.constexpr, BK: tl.constexpr):
    """Rows below n and channels below K of a `[C, BK]` tile, as float32; zeros elsewhere."""
    m = (o_t < n)[:, None]
    if K < BK:
        m = m & (o_d < K)[None, :]
    return tl.load(p + o_t[:, None] * stride_t + o_d[None, :] * stride_d, mask=m, other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(p, o_t, stride_t, stride_d, n, width, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):
    b_sum = tl.zeros([o_t.shape[0]], tl.float32)
    for i_d in tl.range(0, width, BD, num_stages=1):
        b_x = _rows(p, o_t, i_d + tl.arange(0, BD), stride_t, stride_d, n, K, BK)
        b_sum += tl.sum(b_x * b_x, 1)
    return tl.rsqrt(b_sum + 1e-6)


@triton.jit
def _clear(out, i_t, i_hv, n, stride_ot, stride_oh, stride_od, V: tl.constexpr, C: tl.constexpr):
    """Zeros in the n rows of a chunk that no sequence covers."""
    o_t = tl.arange(0, C)
    for i in tl.static_range(0, V, 64):
        o_v = i + tl.arange(0, 64)
        p_out = out + i_t * stride_ot + i_hv * stride_oh + o_t[:, None] * stride_ot + o_v[None, :] * stride_od
        tl.store(p_out, tl.zeros([C, 64], out.dtype.element_ty), (o_t < n)[:, None] & (o_v < V)[None, :])


@triton.jit
def _fold(b, C: tl.constexpr, BC: tl.constexpr):
    """`[C, BC]` as [channel of a pair, row of a half, half, group of 64 channels, pair]: a lane holds whole columns."""
    return tl.permute(tl.reshape(b, [2, C // 2, BC // 64, 32, 2]), [4, 1, 0, 2, 3])


@triton.jit
def _unfold(b, C: tl.constexpr, BC: tl.constexpr):
    return tl.reshape(tl.permute(b, [2, 1, 3, 4, 0]), [C, BC])


@triton.jit
def _norm(b):
    """What takes the rows of a raw tile to length 1."""
    b_x = b.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, 1) + 1e-6)


@triton.jit
def _octave(b_norm):
    """A power of two and the rest, 1 or between 1 and 2: their product is b_norm."""
    b_bits = b_norm.to(tl.int32, bitcast=True)
    b_rest = (b_bits & 0x7FFFFF) | 0x3F800000
    return (b_bits & 0x7F800000).to(tl.float32, bitcast=True), b_rest.to(tl.float32, bitcast=True)


@triton.jit
def _rows_of(b, C: tl.constexpr):
    """A value a row, as it meets folded tiles."""
    return tl.trans(tl.reshape(b, [2, C // 2]))[None, :, :, None, None]


def _anchored_kernel(
    q, k, g_raw, beta_logits, A_log, dt_bias, cu_seqlens, read_slots, write_slots, fresh, out, factors, pairs, decays,
    T, N, first, HV, group, bound, anchor, scale, down_k, down_q, up_q,
    stride_qt, stride_qh: tl.int64, stride_qd, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_gt, stride_gh: tl.int64, stride_gd, stride_bt, stride_bh: tl.int64, stride_a, stride_dh: tl.int64, stride_dd,
    stride_ot, stride_oh: tl.int64, stride_od, stride_cu, stride_read, stride_write, stride_fresh, slots, null_slot,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, DOUBLED: tl.constexpr,
):  # fmt: skip
    """One anchor a chunk; leaves L (but its upper right quarter) and beta for `invert`. bound, anchor: in base 2."""
    i_hv = tl.program_id(0) % HV
    i_entry = tl.program_id(0) // HV
    i_t, n, i_n, covered = chunks.locate(cu_seqlens, stride_cu, first + i_entry, N, T, C)
    i_hv = i_hv.to(tl.int64)
    i_t = i_t.to(tl.int64)
    o_r = tl.arange(0, C)[:, None]
    pairs += (i_entry.to(tl.int64) * HV + i_hv) * (3 * C * C)
    p_lower = pairs.to(tl.pointer_type(tl.float32), bitcast=True)
    if not covered:
        _clear(out, i_t, i_hv, n, stride_ot, stride_oh, stride_od, V, C)
        n = 0
    if n > 0:
        n *= live(read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh)
    if n <= 0:
        tl.store(p_lower + o_r * C + tl.arange(0, C)[None, :], tl.zeros([C, C], tl.float32))
    if n > 0:
        i_h = (i_hv.to(tl.int32) // group).to(tl.int64)
        q += i_t * stride_qt + i_h * stride_qh
        k += i_t * stride_kt + i_h * stride_kh
        g_raw += i_t * stride_gt + i_hv * stride_gh
        factors += (i_entry.to(tl.int64) * HV + i_hv) * (3 * C * BK)
        decays += (i_entry.to(tl.int64) * HV + i_hv) * BK
        beta_logits += i_t * stride_bt + i_hv * stride_bh
        o_d = tl.arange(0, BC)[None, :]
        m = o_r < n
        if K < BC:
            m = m & (o_d < K)
        b_g = tl.load(g_raw + (o_r * stride_gt + o_d * stride_gd), mask=m, other=0.0)
        b_k = tl.load(k + (o_r * stride_kt + o_d * stride_kd), mask=m, other=0.0)
        b_q = tl.load(q + (o_r * stride_qt + o_d * stride_qd), mask=m, other=0.0)
        o_half = tl.arange(0, 2)[None, None, :, None, None]
        o_f = tl.arange(0, BC // 64)[None, None, None, :, None] * 64 + tl.arange(0, 32)[None, None, None, None, :] * 2
        o_f += tl.arange(0, 2)[:, None, None, None, None]  # channels, folded
        m_f = o_half * (C // 2) + tl.arange(0, C // 2)[None, :, None, None, None] < n
        if K < BC:
            m_f = m_f & (o_f < K)
        b_rate = -LOG2E
        if A_log is not None:
            b_rate *= tl.exp(tl.load(A_log + i_hv * stride_a))
        b_x = _fold(b_g, C, BC).to(tl.float32) * b_rate
        if dt_bias is not None:
            b_x += tl.load(dt_bias + i_hv * stride_dh + o_f * stride_dd, mask=o_f < K, other=0.0) * b_rate
        b_s = tl.rsqrt(1.0 + tl.exp2(b_x))  # its square is the sigmoid: cheaper than a division
        b_g = tl.where(m_f, bound * b_s * b_s, 0.0)
        b_cum = tl.cumsum(b_g, 1)
        b_half = tl.sum(b_g, 1)
        b_before = tl.sum(tl.where(tl.arange(0, 2)[None, :, None, None] == 0, b_half, 0.0), 1)
        b_all = tl.sum(b_half, 1)
        b_cum += tl.where(o_half == 1, b_before[:, None, None, :, :], 0.0) - anchor
        b_w = tl.exp2(b_cum)
        b_octave, b_rest = _octave(_norm(b_k))
        b_k = _fold(b_k, C, BC).to(tl.float32) * _rows_of(b_octave, C)
        b_kp = (b_k * b_w).to(tl.bfloat16)
        b_qp = (_fold(b_q, C, BC).to(tl.float32) * _rows_of(_norm(b_q) * scale, C) * b_w).to(tl.bfloat16)
        b_ke = b_k * tl.exp2(-b_cum)
        b_twice = tl.reshape(tl.permute(tl.join(b_rest, b_rest), [1, 0]), [2 * C])[:, None]
        p_f = factors + o_r * BK + o_d
        m_k = (o_r < C) & (o_d < BK)
        tl.store(p_f, (_unfold(b_kp, C, BC).to(tl.float32) * (b_rest * -down_k)[:, None]).to(tl.bfloat16), mask=m_k)
        tl.store(p_f + C * BK, _unfold(b_qp * tl.full([1, 1, 1, 1, 1], down_q, tl.bfloat16), C, BC), mask=m_k)
        b_last = (b_ke * tl.exp2(b_all - anchor)[:, None, None, :, :]).to(tl.bfloat16)
        tl.store(p_f + 2 * C * BK, _unfold(b_last, C, BC), mask=m_k)
        o_all = tl.arange(0, BC // 64)[None, :, None] * 64 + tl.arange(0, 32)[None, None, :] * 2
        o_all += tl.arange(0, 2)[:, None, None]
        tl.store(decays + o_all, tl.exp2(b_all), mask=o_all < BK)
        # Both products at once: 64 rows are one wgmma. Right of the diagonal may stand infinities, which nothing reads.
        b_rows = tl.reshape(tl.permute(tl.join(b_kp, b_qp), [5, 2, 1, 3, 4, 0]), [2 * C, BC])
        b_scores = tl.dot(b_rows, tl.trans(_unfold(b_ke.to(tl.bfloat16), C, BC)))
        o_i = tl.arange(0, 2 * C)[:, None]
        o_j = tl.arange(0, C)[None, :]
        b_beta = tl.load(beta_logits + o_i % C * stride_bt, mask=o_i % C < n, other=-float("inf")).to(tl.float32)
        b_beta = tl.sigmoid(b_beta) * (2.0 if DOUBLED else 1.0)
        b_Aqk = tl.where(o_i - C >= o_j, b_scores * up_q, 0.0)
        tl.store(pairs + C * C + o_i * C + o_j, b_Aqk.to(tl.bfloat16), mask=(o_i >= C) & (o_j < C))
        b_beta *= b_twice
        b_lower = tl.where(o_i == o_j, b_beta, b_scores * (b_beta * b_twice))
        tl.store(p_lower + o_i * C + o_j, b_lower, mask=(o_i < C) & ((o_i >= C // 2) | (o_j < C // 2)))


def _kernel(
    q, k, g_raw, beta_logits, A_log, dt_bias, cu_seqlens, read_slots, write_slots, fresh, out, factors, pairs, decays,
    T, N, first, width, HV, group, lower_bound, scale,
    stride_qt, stride_qh: tl.int64, stride_qd, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_gt, stride_gh: tl.int64, stride_gd, stride_bt, stride_bh: tl.int64, stride_a, stride_dh: tl.int64, stride_dd,
    stride_ot, stride_oh: tl.int64, stride_od, stride_cu, stride_read, stride_write, stride_fresh, slots, null_slot,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, DOUBLED: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    i_hv = tl.program_id(0) % HV
    i_entry = tl.program_id(0) // HV
    i_t, n, i_n, covered = chunks.locate(cu_seqlens, stride_cu, first + i_entry, N, T, C)
    i_hv = i_hv.to(tl.int64)
    i_t = i_t.to(tl.int64)
    o_t = tl.arange(0, C)
    if not covered:
        _clear(out, i_t, i_hv, n, stride_ot, stride_oh, stride_od, V, C)
        n = 0
    if n > 0:
        n *= live(read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh)
    if n > 0:
        i_h = (i_hv.to(tl.int32) // group).to(tl.int64)
        q += i_t * stride_qt + i_h * stride_qh
        k += i_t * stride_kt + i_h * stride_kh
        g_raw += i_t * stride_gt + i_hv * stride_gh
        factors += (i_entry.to(tl.int64) * HV + i_hv) * (3 * C * BK)
        pairs += (i_entry.to(tl.int64) * HV + i_hv) * ((3 if PRODUCTS == "bf16" else 2) * C * C)
        decays += (i_entry.to(tl.int64) * HV + i_hv) * BK
        b_rate = 1.0
        if A_log is not None:
            b_rate = tl.exp(tl.load(A_log + i_hv * stride_a))
        b_qn = 1.0
        b_kn = 1.0
        b_rest = tl.full([C, 1], 1.0, tl.float32)  # of k's norm: what Ke leaves out, so that bf16 keeps k's digits
        if NORM:
            b_qn = _inverse_norm(q, o_t, stride_qt, stride_qd, n, width, K, BK, BD)[:, None]
            b_kn = _inverse_norm(k, o_t, stride_kt, stride_kd, n, width, K, BK, BD)[:, None]
            if PRODUCTS == "bf16":
                b_rest = _octave(b_kn)[1]
        b_Aqk = tl.zeros([C, C], tl.float32)
        b_Akk = tl.zeros([C, C], tl.float32)
        o_i = tl.arange(0, C)[:, None]
        o_j = tl.arange(0, C)[None, :]
        for i_d in tl.range(0, width, BD, num_stages=1):
            o_d = i_d + tl.arange(0, BD)
            m = (o_t < n)[:, None]
            if K < BK:
                m = m & (o_d < K)[None, :]
            b_bias = 0.0
            if dt_bias is not None:
                b_bias = tl.load(dt_bias + i_hv * stride_dh + o_d * stride_dd, mask=o_d < K, other=0.0)[None, :]
            b_g = _rows(g_raw, o_t, o_d, stride_gt, stride_gd, n, K, BK)
            b_g = tl.where(m, log2_decay(b_g, b_rate, b_bias, lower_bound, GATE), 0.0)
            b_k = _rows(k, o_t, o_d, stride_kt, stride_kd, n, K, BK) * b_kn
            b_q = _rows(q, o_t, o_d, stride_qt, stride_qd, n, K, BK) * b_qn
            b_all = tl.sum(b_g, 0)
            if PRODUCTS != "bf16":  # before what is handed over, or 8 bytes spill; in bf16 behind it, or 8 bytes spill
                b_qs, b_ks = half_scores(b_q, b_k, b_g, n, C, PRODUCTS)
                b_Aqk += b_qs
                b_Akk += b_ks
            b_w = tl.exp2(sums(tl.where(o_j <= o_i, 1.0, 0.0), b_g, PRODUCTS))
            b_kp = b_k * b_w
            b_qp = b_q * b_w * scale
            b_ke = b_k * (1.0 / b_rest) * tl.exp2(sums(tl.where(o_j > o_i, 1.0, 0.0), b_g, PRODUCTS))
            p_f = factors + o_i * BK + o_d[None, :]
            tl.store(p_f, (-b_kp).to(factors.dtype.element_ty))
            tl.store(p_f + C * BK, b_qp.to(factors.dtype.element_ty))
            tl.store(p_f + 2 * C * BK, b_ke.to(factors.dtype.element_ty))
            tl.store(decays + o_d, tl.exp2(b_all))
            if PRODUCTS == "bf16":
                b_qs, b_ks = half_scores(b_q, b_k, b_g, n, C, PRODUCTS)
                b_Aqk += b_qs
                b_Akk += b_ks
        p_beta = beta_logits + i_t * stride_bt + i_hv * stride_bh
        b_beta = tl.sigmoid(tl.load(p_beta + o_t * stride_bt, mask=o_t < n, other=0.0).to(tl.float32))
        b_beta = tl.where(o_t < n, b_beta * (2.0 if DOUBLED else 1.0), 0.0)
        b_Aqk = tl.where(o_i >= o_j, b_Aqk * scale / tl.trans(b_rest), 0.0)
        b_Akk = tl.where(o_i > o_j, b_Akk * b_beta[:, None], 0.0)
        b_x = unit_lower_inverse(b_Akk, n, C, "bf16x3" if PRODUCTS == "bf16" else PRODUCTS)
        b_x = b_x * b_rest * tl.trans(b_beta[:, None])
        p_pairs = pairs + o_i * C + o_j
        if PRODUCTS == "bf16":
            b_high, b_low = halves(b_x)
            tl.store(p_pairs, b_high)
            tl.store(p_pairs + C * C, b_low)
            p_pairs += C * C
        else:
            tl.store(p_pairs, b_x)
        tl.store(p_pairs + C * C, b_Aqk.to(pairs.dtype.element_ty))


# T and N change from step to step, and strides of head-major views with them: none of their values may be compiled in.
# Nor may `width`, which is BK: a loop over channels that the compiler can count it unrolls, and then spills.
SPARED = {
    "do_not_specialize": ["T", "N", "first", "slots", "null_slot", "stride_cu", "stride_read", "stride_write",
                          "stride_fresh", "stride_bt", "stride_bh", "stride_a", "stride_dh"],
    "do_not_specialize_on_alignment": ["cu_seqlens", "read_slots", "write_slots", "fresh", "beta_logits", "A_log"],
}  # fmt: skip
kernel = triton.jit(_kernel, **SPARED | {"do_not_specialize": SPARED["do_not_specialize"] + ["width"]})
anchored_kernel = triton.jit(_anchored_kernel, **SPARED)


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
    config: Config | None = None,
) -> None:
    """Launches the kernels, a program a chunk number and head; arguments as the module's docstring says.

    No sync, no allocation. A given config overrides `choose`.
    """
    T, H, K = q.shape
    HV, V = out.shape[1:]
    count, _, _, C, BK = factors.shape
    shape = Shape(K, out.dtype, gate, lower_bound, qk_l2norm, scale, dt_bias is not None)
    config = config or choose(shape, arch(q.device))
    rows = (cu_seqlens, read_slots, write_slots, fresh)
    tensors = (q, k, g_raw, beta_logits, A_log, dt_bias, *rows, out, factors, pairs, decays)
    strides = (
        *q.stride(), *k.stride(), *g_raw.stride(), *beta_logits.stride(),
        A_log.stride(0) if A_log is not None else 0, *(dt_bias.stride() if dt_bias is not None else (0, 0)),
        *out.stride(), *(0 if x is None else x.stride(0) for x in rows), slots, -1 if null_slot is None else null_slot,
    )  # fmt: skip
    N = cu_seqlens.shape[0] - 1
    with current(q.device):
        if config.anchored:
            anchored_kernel[(count * HV,)](
                *tensors, T, N, first, HV, HV // H, *frame(lower_bound, scale), *strides,
                K=K, V=V, C=C, BK=BK, BC=config.channels, DOUBLED=allow_neg_eigval, **config.options,
            )  # fmt: skip
        else:
            kernel[(count * HV,)](
                *tensors, T, N, first, BK, HV, HV // H, float(lower_bound), float(scale), *strides,
                K=K, V=V, C=C, BK=BK, BD=config.channels, GATE=gate, NORM=qk_l2norm, DOUBLED=allow_neg_eigval,
                PRODUCTS=config.products, **config.options,
            )  # fmt: skip
    if config.anchored:
        invert(pairs)
