"""The serial pass of KDA prefill: every chunk advances the state S [V, K] and writes its outputs.

    R   = inverse (v - Kp S)         o = Qp S + Aqk R          S <- exp(Gc) S + R^T Ke

transposed throughout, so that what changes from chunk to chunk is always the left operand and stays in registers:
S [V, K], R^T [V, C], o^T [V, C]. A program owns a slice of V of one head of one sequence. Where products are in bf16, R
and the inverse are pairs of bf16: rounding either once loses near-parallel keys (state 1.5e-2 and 1.1e-2 instead of
7.6e-3). What the inverse is applied to is rounded once: a pair there gains nothing that shows.

    factors, pairs, decays   what `prepare` hands over for chunk numbers first .. first + count - 1
    v            [T, HV, V]   bfloat16, float16, float32; any strides
    cu_seqlens   [N + 1]      read_slots, write_slots [N], fresh [N] bool or None: int32 or int64, any strides
    state        [slots, HV, V, K]  float32 or bfloat16, any strides, mutated: rounded once, when stored
    checkpoint_slots [N, M] or None: the state after (j + 1) checkpoint_every tokens goes to slot [i, j] too
    carry        [2, HV, V, K] float32: the state of the one sequence that a cut between two launches goes through,
                 written to carry[1 - turn] and read from carry[turn]
    out          [T, HV, V]   every token of every sequence is written, zeros where its row is padding

A bad slot (negative, past the pool, null_slot) is padding. An empty sequence touches nothing.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from thalweg.device import arch, cdiv, current, next_power_of_2
from thalweg.kda import chunks
from thalweg.kda.products import halves, product
from thalweg.kda.slots import good, row


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences."""

    K: int
    V: int
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    products: str  # bf16, tf32x3 or ieee
    values: int  # of V a program
    stages: int
    num_warps: int
    bulk: bool  # v in bulk copies, where its strides allow them
    channels: int  # of K in one tile: a state is a row of tiles
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    nvidia, values = device.startswith("sm_"), min(64, max(16, next_power_of_2(shape.V)))
    width = max(16, next_power_of_2(shape.K))
    if shape.out_dtype != torch.bfloat16:
        # What float32 sums lose costs registers: at K = 128 such products spill 8 bytes in eight warps, 272 in four.
        exact = not nvidia or (shape.out_dtype == torch.float32 and shape.K <= 64)
        reason = "float32 tiles: exact before it is fast; wider ones spill"
        return Config("ieee" if exact else "tf32x3", 16, 1, 8 if exact else 4, False, min(width, 32), reason)
    if shape.K > 128:
        return Config(
            "bf16", 16, 1, 4, False, width, "a slice of 32 x 256 of the state spills, in four warps and in eight"
        )
    if device.startswith("gfx"):
        return Config("bf16", values, 1, 8, False, width, "gfx950: four waves spill 24 bytes a lane, eight none")
    reason = "64 rows: one wgmma, left operand in registers; bulk v: 328, not 580 us"
    return Config("bf16", values, 3, 4, True, width, reason)


@triton.jit
def _advance(
    b_s, i_first, i_last, factors, pairs, decays, values, v, out, start, tokens, entry, HV, i_hv, i_v, o_v,
    stride_vt, stride_vd, stride_ot, stride_od,
    V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
    PRODUCTS: tl.constexpr,
):  # fmt: skip
    """The state, a tuple of tiles [BV, BD], after chunks i_first .. i_last - 1 of the sequence of `tokens` tokens that
    begins at token `start`, whose outputs are written; chunk 0 has entry number `entry` in what was handed over.
    """
    TILES: tl.constexpr = 3 if PRODUCTS == "bf16" else 2
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, BD)
    i_t = i_first.to(tl.int64) * C
    v += i_t * stride_vt
    out += i_t * stride_ot
    o_in = o_t[:, None] * stride_vt + o_v[None, :] * stride_vd
    o_out = o_t[:, None] * stride_ot + o_v[None, :] * stride_od
    for i_c in tl.range(i_first, i_last, num_stages=STAGES):
        i_row = (entry + i_c) * HV + i_hv
        m = (o_t < tokens - i_c * C)[:, None]
        if V % BV != 0:
            m = m & (o_v < V)[None, :]
        if values is None:
            b_acc = tl.trans(tl.load(v + o_in, mask=m, other=0.0)).to(tl.float32)
        else:  # a copy may reach into the next sequence
            b_v = tl.reshape(values.load([start + i_c * C, i_hv, i_v]), [C, BV])
            b_acc = tl.where((o_t < tokens - i_c * C)[None, :], tl.trans(b_v).to(tl.float32), 0.0)
        b_x = pairs.load([i_row * (TILES * C), 0])
        b_a = pairs.load([i_row * (TILES * C) + (TILES - 1) * C, 0])
        p_decay = decays + i_row.to(tl.int64) * BK + o_k
        b_zero = tl.zeros([BV, C], tl.float32)
        if PRODUCTS == "bf16":
            b_kp = factors.load([i_row * (3 * C), 0])
            b_ke = factors.load([i_row * (3 * C) + 2 * C, 0])
            b_qp = factors.load([i_row * (3 * C) + C, 0])
            b_xl = pairs.load([i_row * (TILES * C) + C, 0])
            b_sb = b_s[0].to(tl.bfloat16)
            b_rhs = tl.dot(b_sb, tl.trans(b_kp), b_acc).to(tl.bfloat16)
            b_r = tl.dot(b_rhs, tl.trans(b_xl), b_zero)
            b_high, b_low = halves(tl.dot(b_rhs, tl.trans(b_x), b_r))
            b_n = tl.dot(b_low, b_ke, b_s[0] * tl.load(p_decay)[None, :])
            b_s = (tl.dot(b_high, b_ke, b_n),)
            b_o = tl.dot(b_sb, tl.trans(b_qp), b_zero)
            b_o = tl.dot(b_low, tl.trans(b_a), b_o)
            b_o = tl.dot(b_high, tl.trans(b_a), b_o)
        else:
            b_o = b_zero
            for j in tl.static_range(BK // BD):
                b_acc = product(b_s[j], tl.trans(factors.load([i_row * (3 * C), j * BD])), b_acc, PRODUCTS)
                b_o = product(b_s[j], tl.trans(factors.load([i_row * (3 * C) + C, j * BD])), b_o, PRODUCTS)
            b_r = product(b_acc, tl.trans(b_x), b_zero, PRODUCTS)
            b_o = product(b_r, tl.trans(b_a), b_o, PRODUCTS)
            b_next = ()
            for j in tl.static_range(BK // BD):
                b_n = b_s[j] * tl.load(p_decay + j * BD)[None, :]
                b_ke = factors.load([i_row * (3 * C) + 2 * C, j * BD])
                b_next = b_next + (product(b_r, b_ke, b_n, PRODUCTS),)
            b_s = b_next
        tl.store(out + o_out, tl.trans(b_o.to(out.dtype.element_ty)), m)
        v += C * stride_vt
        out += C * stride_ot
    return b_s


@triton.jit
def _load(p_s, stride, m_v, o_k, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):
    """Rows of a state as a tuple of tiles, in float32."""
    b_s = ()
    for j in tl.static_range(BK // BD):
        b_s = b_s + (tl.load(p_s + (j * BD + o_k) * stride, mask=m_v & (j * BD + o_k < K), other=0.0).to(tl.float32),)
    return b_s


@triton.jit
def _store(p_s, b_s, stride, m_v, o_k, K: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr):
    for j in tl.static_range(BK // BD):
        tl.store(p_s + (j * BD + o_k) * stride, b_s[j].to(p_s.dtype.element_ty), m_v & (j * BD + o_k < K))


def _kernel(
    factors, pairs, decays, values, v, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots, carry, out,
    T, N, first, count, HV, slots, null_slot, every, marks, turn,
    stride_vt, stride_vh: tl.int64, stride_vd, stride_cu, stride_s: tl.int64, stride_sh: tl.int64, stride_sv, stride_sk,
    stride_read, stride_write, stride_fresh, stride_mn, stride_mj, stride_ot, stride_oh: tl.int64, stride_od,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (V + BV - 1) // BV
    i_v = tl.program_id(0) % SLICES * BV
    o_v = i_v + tl.arange(0, BV)
    i_hv = tl.program_id(0) // SLICES % HV
    i_n = tl.program_id(0) // SLICES // HV
    start, end, base = chunks.span(cu_seqlens, stride_cu, i_n, N, T, C)
    total = (end - start + C - 1) // C
    i_first = tl.maximum(first - base, 0)
    i_last = tl.minimum(first + count - base, total)
    if i_first < i_last:
        read, write, anew, live = row(
            read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh
        )
        o_t = tl.arange(0, C)
        o_k = tl.arange(0, BD)[None, :]
        m_v = (o_v < V)[:, None]
        v += start.to(tl.int64) * stride_vt + i_hv.to(tl.int64) * stride_vh
        out += start.to(tl.int64) * stride_ot + i_hv.to(tl.int64) * stride_oh
        p_state = state + i_hv.to(tl.int64) * stride_sh + o_v[:, None].to(tl.int64) * stride_sv
        p_carry = carry + (i_hv.to(tl.int64) * V + o_v[:, None]) * K
        flip = HV.to(tl.int64) * V * K
        if live:
            if i_first > 0:
                b_s = _load(p_carry + turn * flip, 1, m_v, o_k, K, BK, BD)
            else:
                b_s = _load(p_state + read * stride_s, stride_sk, m_v & (not anew), o_k, K, BK, BD)
            if checkpoint_slots is None:
                b_s = _advance(
                    b_s, i_first, i_last, factors, pairs, decays, values, v, out, start, end - start, base - first, HV,
                    i_hv, i_v, o_v, stride_vt, stride_vd, stride_ot, stride_od, V, C, BK, BD, BV, STAGES, PRODUCTS,
                )  # fmt: skip
            else:
                # A loop from mark to mark: a store inside the inner one would cost it registers it does not have.
                i_c = i_first
                step = every // C
                while i_c < i_last:
                    i_end = tl.minimum((i_c // step + 1) * step, i_last)
                    b_s = _advance(
                        b_s, i_c, i_end, factors, pairs, decays, values, v, out, start, end - start, base - first, HV,
                        i_hv, i_v, o_v, stride_vt, stride_vd, stride_ot, stride_od, V, C, BK, BD, BV, STAGES, PRODUCTS,
                    )  # fmt: skip
                    i_c = i_end
                    j = i_c // step - 1
                    if (i_c % step == 0) & (i_c * C <= end - start) & (j < marks):
                        p_mark = checkpoint_slots + i_n.to(tl.int64) * stride_mn + j.to(tl.int64) * stride_mj
                        mark = tl.load(p_mark).to(tl.int64)
                        if good(mark, slots, null_slot):
                            _store(p_state + mark * stride_s, b_s, stride_sk, m_v, o_k, K, BK, BD)
            if i_last < total:
                _store(p_carry + (1 - turn) * flip, b_s, 1, m_v, o_k, K, BK, BD)
            else:
                _store(p_state + write * stride_s, b_s, stride_sk, m_v, o_k, K, BK, BD)
        else:
            for i_c in tl.range(i_first, i_last):
                o_row = i_c * C + o_t[:, None]
                p_out = out + o_row.to(tl.int64) * stride_ot + o_v[None, :] * stride_od
                m = (o_row < end - start) & (o_v < V)[None, :]
                tl.store(p_out, tl.zeros([C, BV], out.dtype.element_ty), m)


# What changes from step to step: none of these values may be compiled in.
kernel = triton.jit(
    _kernel,
    do_not_specialize=["T", "N", "HV", "first", "count", "slots", "null_slot", "every", "marks", "turn", "stride_cu",
                       "stride_read", "stride_write", "stride_fresh", "stride_mn", "stride_mj"],
    do_not_specialize_on_alignment=["cu_seqlens", "read_slots", "write_slots", "fresh", "checkpoint_slots"],
)  # fmt: skip


def bulk(x: torch.Tensor) -> bool:
    """Whether bulk copies can read (or write) this [T, heads, columns] tensor: in rows of whole 16 bytes, aligned."""
    size = x.element_size()
    strides = [stride * size % 16 == 0 for stride in x.stride()[:2]]
    return x.stride(2) == 1 and all(strides) and x.data_ptr() % 16 == 0 and min(x.stride()[:2]) > 0


def scan(
    factors: torch.Tensor,
    pairs: torch.Tensor,
    decays: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    carry: torch.Tensor,
    out: torch.Tensor,
    first: int,
    turn: int,
    *,
    fresh: torch.Tensor | None,
    checkpoint_slots: torch.Tensor | None,
    checkpoint_every: int,
    null_slot: int | None,
    config: Config | None = None,
) -> None:
    """Launches the kernel, a program a sequence, head and slice of V; arguments as the module's docstring says.

    No sync, no allocation. A given config overrides `choose`.
    """
    T, HV, V = v.shape
    K, N = state.shape[3], cu_seqlens.shape[0] - 1
    count, _, _, C, BK = factors.shape
    if N == 0:
        return
    config = config or choose(Shape(K, V, out.dtype), arch(v.device))
    BD = min(BK, config.channels)
    tiles = [TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [C, n]) for x, n in ((factors, BD), (pairs, C))]
    values = TensorDescriptor.from_tensor(v, [C, 1, config.values]) if config.bulk and bulk(v) else None
    marks = checkpoint_slots.shape[1] if checkpoint_slots is not None else 0
    with current(v.device):
        kernel[(N * HV * cdiv(V, config.values),)](
            *tiles, decays, values, v, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots, carry, out,
            T, N, first, count, HV, state.shape[0], -1 if null_slot is None else null_slot, checkpoint_every or 1,
            marks, turn, *v.stride(), cu_seqlens.stride(0), *state.stride(), read_slots.stride(0),
            write_slots.stride(0), fresh.stride(0) if fresh is not None else 0,
            *(checkpoint_slots.stride() if checkpoint_slots is not None else (0, 0)), *out.stride(),
            K=K, V=V, C=C, BK=BK, BD=BD, BV=config.values, STAGES=config.stages, PRODUCTS=config.products,
            **config.options,
        )  # fmt: skip
