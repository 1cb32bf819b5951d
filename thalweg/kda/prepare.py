"""Everything of a chunk of KDA prefill that does not need the state: norms, gate, scores, inverse.

Per chunk of C tokens and value head, G the gate cumulated inside the chunk, Gc its last row:

    Kp = k exp(G)    Qp = scale q exp(G)    Ke = k exp(Gc - G)
    Akk = strict_lower(diag(beta) Kp (k exp(-G))^T)       Aqk = lower(Qp (k exp(-G))^T), its diagonal included
    inverse = (I + Akk)^-1 diag(beta)

No exponent is ever taken that could overflow, and none depends on a later token. Where the gate is bounded, G lies
between 0 and C lower_bound, and is taken from the middle of that range: exp(G - middle) and exp(middle - G) stay within
e^80. Where it is not, rows meet in halves (16 rows with the 16 before, 8 with 8, ... 1 with 1), each row decayed to the
boundary between its half and the other: every exponent is a sum of gates over the rows it spans, never a difference,
and at most 0.

The inverse grows by the same halves, X <- X - X (Akk between halves) X from 1 x 1 up: forward substitution by blocks,
stable on parallel keys where series are not, in float32 tiles.

    q, k         [T, H, K]    bfloat16, float16, float32; any strides
    g_raw        [T, HV, K]   raw gate; natural log once activated
    beta_logits  [T, HV]
    A_log        [HV] float32 or None; dt_bias [HV, K] float32 or None
    cu_seqlens   [N + 1]      int32 or int64
    out          [T, HV, V]   tokens no sequence covers are set to zero here
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

from thalweg.device import arch, current
from thalweg.kda import chunks
from thalweg.kda.products import halves, product, sums
from thalweg.kda.workspace import CHUNK

LOG2E = tl.constexpr(1.4426950408889634)
FORGOTTEN = tl.constexpr(-1000.0)  # a log decay whose exp is zero: what is below it changes nothing but overflow
LIFT = tl.constexpr(10.0)  # unit keys times 2^10 e^80 are finite, and a key of 2^-21 times e^-80 is no denormal
SPAN = 80.0  # natural-log decay that exp of both signs stands in bf16 and float32


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences."""

    K: int
    out_dtype: torch.dtype
    gate: str
    lower_bound: float
    unit: bool  # q and k are normalised here, so at most 1


@dataclass(frozen=True)
class Config:
    products: str  # of the scores: bf16, tf32x3 or ieee
    anchored: bool  # one anchor a chunk, else halves
    channels: int  # of K at a time
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def products(out_dtype: torch.dtype, device: str) -> str:
    """What rounding the outputs' dtype hides; one rule for all stages, as they hand over tiles of one dtype."""
    if out_dtype == torch.bfloat16:
        return "bf16"
    return "tf32x3" if out_dtype == torch.float16 and device.startswith("sm_") else "ieee"


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    form = products(shape.out_dtype, device)
    width = max(16, triton.next_power_of_2(shape.K))
    # Adding the middle costs an exponent its last digits, which a float32 result would show.
    anchored = form == "bf16" and shape.gate == "bounded" and shape.unit and -shape.lower_bound * CHUNK <= 2 * SPAN
    reason = "one anchor a chunk: the bound keeps its halves within e^80" if anchored else "no bound: halves"
    if form == "bf16":
        return Config(form, anchored, min(width, 32), 4, reason)
    return Config(form, anchored, min(width, 16), 4, reason)


@triton.jit
def _log2_decay(b_x, b_rate, b_bias, lower_bound, GATE: tl.constexpr):
    """Log decay of a raw gate, in base 2."""
    if GATE == "given":
        b_g = b_x
    elif GATE == "soft":
        b_x += b_bias
        b_e = tl.exp(tl.minimum(b_x, 20.0))
        b_u = 1.0 + b_e
        # log(1 + e) with all digits of a small e, which a slow gate is made of.
        b_plus = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
        b_g = -b_rate * tl.where(b_x > 20.0, b_x, b_plus)
    else:
        b_g = lower_bound / (1.0 + tl.exp2((b_rate * -LOG2E) * (b_x + b_bias)))
    return tl.maximum(b_g, FORGOTTEN) * LOG2E


@triton.jit
def _half_scores(b_q, b_k, b_g, n, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """q k^T and k k^T, decayed, of all pairs of rows i > j, and q k^T of i = j; zeros above. b_g in base 2.

    A loop, not unrolled: halves of h >= n rows do not meet, and the compiler would interleave what is unrolled.
    """
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    b_Aqk = tl.where(o_i == o_j, tl.sum(b_q * b_k, 1)[:, None], 0.0)
    b_Akk = tl.zeros([C, C], tl.float32)
    h = 1
    while h < n:
        later = (o_i & h) != 0
        b_span = ((o_i & -h) == (o_j & -h)) & ((later & (o_j <= o_i)) | (((o_i & h) == 0) & (o_j > o_i)))
        b_w = tl.exp2(sums(tl.where(b_span, 1.0, 0.0), b_g, PRODUCTS))
        b_kw = b_k * b_w
        meet = (o_i > o_j) & ((o_i ^ o_j) >= h) & ((o_i ^ o_j) < 2 * h)
        b_zero = tl.zeros([C, C], tl.float32)
        b_Aqk += tl.where(meet, product(b_q * b_w, tl.trans(b_kw), b_zero, PRODUCTS), 0.0)
        b_Akk += tl.where(meet, product(b_kw, tl.trans(b_kw), b_zero, PRODUCTS), 0.0)
        h *= 2
    return b_Aqk, b_Akk


@triton.jit
def _unit_lower_inverse(b_lower, n, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """(I + b_lower)^-1 of a strictly lower `[C, C]` tile, zero from row n on."""
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    apart = o_i ^ o_j
    b_x = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(apart == 1, b_lower, 0.0)
    h = 2
    while h < n:
        b_between = tl.where((apart >= h) & (apart < 2 * h), b_lower, 0.0)
        b_y = product(b_between, b_x, tl.zeros([C, C], tl.float32), PRODUCTS)
        b_x = product(-b_x, b_y, b_x, PRODUCTS)
        h *= 2
    return b_x


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


def _kernel(
    q, k, g_raw, beta_logits, A_log, dt_bias, cu_seqlens, out, factors, pairs, decays,
    T, N, first, width, HV, group, lower_bound, scale,
    stride_qt, stride_qh: tl.int64, stride_qd, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_gt, stride_gh: tl.int64, stride_gd, stride_bt, stride_bh: tl.int64, stride_a, stride_dh: tl.int64, stride_dd,
    stride_ot, stride_oh: tl.int64, stride_od, stride_cu,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, GATE: tl.constexpr,
    NORM: tl.constexpr, DOUBLED: tl.constexpr, ANCHORED: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    i_hv = tl.program_id(0) % HV
    i_entry = tl.program_id(0) // HV
    i_t, n, covered = chunks.locate(cu_seqlens, stride_cu, first + i_entry, N, T, C)
    i_hv = i_hv.to(tl.int64)
    i_t = i_t.to(tl.int64)
    o_t = tl.arange(0, C)
    if not covered:
        for i in tl.static_range(0, V, 64):
            o_v = i + tl.arange(0, 64)
            p_out = out + i_t * stride_ot + i_hv * stride_oh + o_t[:, None] * stride_ot + o_v[None, :] * stride_od
            tl.store(p_out, tl.zeros([C, 64], out.dtype.element_ty), (o_t < n)[:, None] & (o_v < V)[None, :])
        n = 0
    if n > 0:
        i_h = i_hv // group
        q += i_t * stride_qt + i_h * stride_qh
        k += i_t * stride_kt + i_h * stride_kh
        g_raw += i_t * stride_gt + i_hv * stride_gh
        factors += (i_entry.to(tl.int64) * HV + i_hv) * (3 * C * BK)
        pairs += (i_entry.to(tl.int64) * HV + i_hv) * ((3 if PRODUCTS == "bf16" else 2) * C * C)
        decays += (i_entry.to(tl.int64) * HV + i_hv) * BK
        middle = lower_bound * (LOG2E * (C // 2))
        b_rate = 1.0
        if A_log is not None:
            b_rate = tl.exp(tl.load(A_log + i_hv * stride_a))
        b_qn = 1.0
        b_kn = 1.0
        if NORM:
            b_qn = _inverse_norm(q, o_t, stride_qt, stride_qd, n, width, K, BK, BD)[:, None]
            b_kn = _inverse_norm(k, o_t, stride_kt, stride_kd, n, width, K, BK, BD)[:, None]
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
            b_g = tl.where(m, _log2_decay(b_g, b_rate, b_bias, lower_bound, GATE), 0.0)
            b_k = _rows(k, o_t, o_d, stride_kt, stride_kd, n, K, BK) * b_kn
            b_q = _rows(q, o_t, o_d, stride_qt, stride_qd, n, K, BK) * b_qn
            b_all = tl.sum(b_g, 0)
            if ANCHORED:
                b_cum = tl.cumsum(b_g, 0)
                b_kp = b_k * tl.exp2(b_cum - middle + LIFT)
                b_qp = b_q * tl.exp2(b_cum - middle + LIFT)
                b_ke = b_k * tl.exp2(middle - b_cum + LIFT)
                # Above the diagonal these may be infinite: those entries are never looked at.
                b_Aqk = product(b_qp, tl.trans(b_ke), b_Aqk, PRODUCTS)
                b_Akk = product(b_kp, tl.trans(b_ke), b_Akk, PRODUCTS)
                b_kp = b_kp * tl.exp2(middle - LIFT)
                b_qp = b_qp * (tl.exp2(middle - LIFT) * scale)
                b_ke = b_ke * tl.exp2(b_all - middle - LIFT)[None, :]
            else:
                b_qs, b_ks = _half_scores(b_q, b_k, b_g, n, C, PRODUCTS)
                b_Aqk += b_qs
                b_Akk += b_ks
                b_w = tl.exp2(sums(tl.where(o_j <= o_i, 1.0, 0.0), b_g, PRODUCTS))
                b_kp = b_k * b_w
                b_qp = b_q * b_w * scale
                b_ke = b_k * tl.exp2(sums(tl.where(o_j > o_i, 1.0, 0.0), b_g, PRODUCTS))
            p_f = factors + o_i * BK + o_d[None, :]
            tl.store(p_f, (-b_kp).to(factors.dtype.element_ty))
            tl.store(p_f + C * BK, b_qp.to(factors.dtype.element_ty))
            tl.store(p_f + 2 * C * BK, b_ke.to(factors.dtype.element_ty))
            tl.store(decays + o_d, tl.exp2(b_all))
        p_beta = beta_logits + i_t * stride_bt + i_hv * stride_bh
        b_beta = tl.sigmoid(tl.load(p_beta + o_t * stride_bt, mask=o_t < n, other=0.0).to(tl.float32))
        b_beta = tl.where(o_t < n, b_beta * (2.0 if DOUBLED else 1.0), 0.0)
        unlift = 1.0
        if ANCHORED:
            unlift = tl.exp2(-2.0 * LIFT)
        b_Aqk = tl.where(o_i >= o_j, b_Aqk * (unlift * scale), 0.0)
        b_Akk = tl.where(o_i > o_j, b_Akk * (b_beta * unlift)[:, None], 0.0)
        b_x = _unit_lower_inverse(b_Akk, n, C, "bf16x3" if PRODUCTS == "bf16" else PRODUCTS)
        b_x = b_x * tl.trans(b_beta[:, None])
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
kernel = triton.jit(
    _kernel,
    do_not_specialize=["T", "N", "first", "width", "stride_cu", "stride_bt", "stride_bh", "stride_a", "stride_dh"],
    do_not_specialize_on_alignment=["cu_seqlens", "beta_logits", "A_log"],
)


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
    config: Config | None = None,
) -> None:
    """Launches the kernel, a program a chunk number and head; arguments as the module's docstring says.

    No sync, no allocation. A given config overrides `choose`.
    """
    T, H, K = q.shape
    HV, V = out.shape[1:]
    count, _, _, C, BK = factors.shape
    config = config or choose(Shape(K, out.dtype, gate, lower_bound, qk_l2norm), arch(q.device))
    with current(q.device):
        kernel[(count * HV,)](
            q, k, g_raw, beta_logits, A_log, dt_bias, cu_seqlens, out, factors, pairs, decays,
            T, cu_seqlens.shape[0] - 1, first, BK, HV, HV // H, float(lower_bound), float(scale),
            *q.stride(), *k.stride(), *g_raw.stride(), *beta_logits.stride(),
            A_log.stride(0) if A_log is not None else 0, *(dt_bias.stride() if dt_bias is not None else (0, 0)),
            *out.stride(), cu_seqlens.stride(0),
            K=K, V=V, C=C, BK=BK, BD=config.channels, GATE=gate, NORM=qk_l2norm, DOUBLED=allow_neg_eigval,
            ANCHORED=config.anchored, PRODUCTS=config.products, **config.options,
        )  # fmt: skip
