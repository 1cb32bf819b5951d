"""The fused decode step of KDA in portable Triton: one token a row, conv, gate, state and gated norm in one kernel.

    y = silu(conv(history | qkv))      q, k = y / sqrt(sum y^2 + 1e-6), v = y        a = exp(log decay)
    d = beta (v - (S a) k)             S <- S a + d k^T        o = scale ((S a) q + d (k . q))
    out = o / sqrt(mean o^2 + eps) norm_weight sigmoid(out_gate)

S is touched once: o is written as above, so that both dots share the pass over S in registers. A program owns a query
and key head of a row and all value heads that share it, so the history of every channel is read and rolled by one
program; a barrier lies between the last read of it and the roll.

    qkv [B, C], g_raw [B, HV, K], beta_logits [B, HV], out_gate [B, HV, V]   bfloat16, float16, float32; any strides
    conv_weight [C, W], conv_bias [C] or None, norm_weight [V]               the same types; any strides
    A_log [HV], dt_bias [HV, K] or None    float32
    conv_state [slots, C, W - 1]           mutated: the last W - 1 raw inputs, oldest first; any strides
    state [slots, HV, V, K]                float32 or bfloat16, mutated: rounded once, when stored; any strides
    read_slots, write_slots [B]            int32 or int64; a row with a bad slot (negative, past a pool, null_slot) in
                                           either list is padding: zeros in out, no slot touched
    out [B, HV, V]                         of qkv's type; any strides

K and V are 64 or 128. Everything between qkv and out is float32.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thalweg.device import arch, current, overlaps_launches
from thalweg.kda.gate import softplus
from thalweg.kda.slots import good


class Shape(NamedTuple):
    """What a configuration depends on: not the number of rows, or a row's bits would depend on its company."""

    K: int
    V: int


@dataclass(frozen=True)
class Config:
    num_warps: int
    store: str  # cache modifier of the state's stores: .cs is 0 to 9 % faster at every shape on an H200
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    if shape.K * shape.V <= 64 * 128:
        return Config(2, ".cs", "a lane a channel: vectors smaller than the lanes are loaded in every layout")
    return Config(4, ".cs", "eight lanes share a sum: three exchanges, not five; more warps reload vectors")


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _log_decay(b_x, b_rate, b_bias, lower_bound, GATE: tl.constexpr):
    """Natural log of the decay of a raw gate, at most 0."""
    if GATE == "given":
        return b_x
    elif GATE == "soft":
        return -b_rate * softplus(b_x + b_bias)
    else:
        return lower_bound * _sigmoid(b_rate * (b_x + b_bias))


@triton.jit
def _decay(b_g):
    """exp(b_g). The hardware's exp2 may be off by 2^-22, which 4,096 steps of a slow channel add up: 2^-24 near 1."""
    b_near = 1.0 + b_g * (1.0 / 6.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 5.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 4.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 3.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 2.0)
    return tl.where(b_g > -0.25, 1.0 + b_g * b_near, tl.exp(b_g))


@triton.jit
def _token(qkv, o_q, o_k, o_v, stride_xc, p_g, p_beta, p_z):
    """What a head reads of a row: x of q, k and v, raw gate, beta logit, output gate."""
    b_xq, b_xk = tl.load(qkv + o_q * stride_xc), tl.load(qkv + o_k * stride_xc)
    return b_xq, b_xk, tl.load(qkv + o_v * stride_xc), tl.load(p_g), tl.load(p_beta), tl.load(p_z)


@triton.jit
def _window(p, o_c, stride_c, stride_t, TAPS: tl.constexpr):
    """TAPS values of channels o_c, as they are in memory: inputs of the history, or taps."""
    found = ()
    for tap in tl.static_range(TAPS):
        found = found + (tl.load(p + o_c * stride_c + tap * stride_t),)
    return found


@triton.jit
def _conv(b_x, taps, history, bias, o_c, stride_bias, W: tl.constexpr):
    """silu(conv) of channels of one row, float32, from what was loaded of them."""
    b_y = b_x.to(tl.float32) * taps[W - 1].to(tl.float32)
    for tap in tl.static_range(W - 1):
        b_y += taps[tap].to(tl.float32) * history[tap].to(tl.float32)
    if bias is not None:
        b_y += tl.load(bias + o_c * stride_bias).to(tl.float32)
    return b_y * _sigmoid(b_y)


@triton.jit
def _roll(b_x, b_h, target, o_c, stride_cc, stride_ct, W: tl.constexpr):
    """The history of channels o_c, one input on, from what was read of it."""
    for tap in tl.static_range(W - 2):
        tl.store(target + o_c * stride_cc + tap * stride_ct, b_h[tap + 1])
    tl.store(target + o_c * stride_cc + (W - 2) * stride_ct, b_x.to(target.dtype.element_ty))


@triton.jit
def _read_and_roll(qkv, source, target, o_c, stride_xc, stride_cc, stride_ct, W: tl.constexpr):
    """The same where it is read again. An address is read before the one lane that owns it writes it."""
    b_h = _window(source, o_c, stride_cc, stride_ct, W - 1)
    _roll(tl.load(qkv + o_c * stride_xc), b_h, target, o_c, stride_cc, stride_ct, W)


@triton.jit
def _quarters(x, WIDTH: tl.constexpr):
    """The four quarters of a vector [4 WIDTH]."""
    x02, x13 = tl.split(tl.reshape(tl.trans(tl.reshape(x, [4, WIDTH])), [WIDTH, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    return x0, x1, x2, x3


@triton.jit
def _dot(s0, s1, s2, s3, f0, f1, f2, f3):
    """Rows of the four quarters of a tile times a vector's: three quarters add up in a lane before lanes meet."""
    return tl.sum((s0 * f0[None, :] + s1 * f1[None, :]) + (s2 * f2[None, :] + s3 * f3[None, :]), 1)


def _kernel(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    A_log, dt_bias, out,
    H, slots, null_slot, norm_eps, lower_bound, scale,
    stride_xb: tl.int64, stride_xc, stride_gb: tl.int64, stride_gh: tl.int64, stride_gk, stride_bb: tl.int64,
    stride_bh: tl.int64, stride_zb: tl.int64, stride_zh: tl.int64, stride_zv, stride_wc, stride_ww, stride_bias,
    stride_cs: tl.int64, stride_cc, stride_ct, stride_s: tl.int64, stride_sh: tl.int64, stride_sv, stride_sk,
    stride_read: tl.int64, stride_write: tl.int64, stride_n, stride_a, stride_dh, stride_dk,
    stride_ob: tl.int64, stride_oh: tl.int64, stride_ov,
    K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr,
    DOUBLED: tl.constexpr, STORE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    i_b = (tl.program_id(0) // H).to(tl.int64)
    i_h = tl.program_id(0) % H
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
    read = tl.load(read_slots + i_b * stride_read).to(tl.int64)
    write = tl.load(write_slots + i_b * stride_write).to(tl.int64)
    out += i_b * stride_ob + i_h.to(tl.int64) * GROUP * stride_oh
    live = good(read, slots, null_slot) & good(write, slots, null_slot)
    qkv += i_b * stride_xb
    history = conv_state + read * stride_cs
    o_q = i_h * K + o_k
    o_s = o_v[:, None] * stride_sv + tl.arange(0, K // 4)[None, :] * stride_sk
    for j in range(GROUP):
        # What needs no slot is asked for before the slots are waited for, held there by a barrier: the compiler would
        # move it down to its use, and weights that are not in the cache would cost another trip to memory.
        i_hv = (i_h * GROUP + j).to(tl.int64)
        o_y = 2 * H * K + i_hv.to(tl.int32) * V + o_v
        b_wq = _window(conv_weight, o_q, stride_wc, stride_ww, W)
        b_wk = _window(conv_weight, o_q + H * K, stride_wc, stride_ww, W)
        b_wv = _window(conv_weight, o_y, stride_wc, stride_ww, W)
        b_rate = 0.0
        if A_log is not None:
            b_rate = tl.load(A_log + i_hv * stride_a)
        b_bias = 0.0
        if dt_bias is not None:
            b_bias = tl.load(dt_bias + i_hv * stride_dh + o_k * stride_dk)
        b_norm = tl.load(norm_weight + o_v * stride_n)
        p_g = g_raw + i_b * stride_gb + i_hv * stride_gh + o_k * stride_gk
        p_beta = beta_logits + i_b * stride_bb + i_hv * stride_bh
        p_z = out_gate + i_b * stride_zb + i_hv * stride_zh + o_v * stride_zv
        if not EARLY:
            b_xq, b_xk, b_xv, b_x, beta, b_z = _token(
                qkv, o_q, o_q + H * K, o_y, stride_xc, p_g, p_beta, p_z,
            )  # fmt: skip
        tl.debug_barrier()
        if live:
            b_hq = _window(history, o_q, stride_cc, stride_ct, W - 1)
            b_hk = _window(history, o_q + H * K, stride_cc, stride_ct, W - 1)
            b_hv = _window(history, o_y, stride_cc, stride_ct, W - 1)
            tl.debug_barrier()
            p_s = state + i_hv * stride_sh + o_s
            b_s0 = tl.load(p_s + read * stride_s).to(tl.float32)
            b_s1 = tl.load(p_s + read * stride_s + K // 4 * stride_sk).to(tl.float32)
            b_s2 = tl.load(p_s + read * stride_s + K // 2 * stride_sk).to(tl.float32)
            b_s3 = tl.load(p_s + read * stride_s + K // 4 * 3 * stride_sk).to(tl.float32)
            if EARLY:
                gdc_wait()
                gdc_launch_dependents()
                b_xq, b_xk, b_xv, b_x, beta, b_z = _token(
                    qkv, o_q, o_q + H * K, o_y, stride_xc, p_g, p_beta, p_z,
                )  # fmt: skip
            b_q = _conv(b_xq, b_wq, b_hq, conv_bias, o_q, stride_bias, W)
            b_k = _conv(b_xk, b_wk, b_hk, conv_bias, o_q + H * K, stride_bias, W)
            b_v = _conv(b_xv, b_wv, b_hv, conv_bias, o_y, stride_bias, W)
            b_beta = _sigmoid(beta.to(tl.float32))
            b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale
            b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
            b_kq = tl.sum(b_k * b_q, 0)
            b_a = _decay(_log_decay(b_x.to(tl.float32), tl.exp(b_rate), b_bias, lower_bound, GATE))
            if DOUBLED:
                b_beta *= 2.0
            b_f0, b_f1, b_f2, b_f3 = _quarters(b_k * b_a, K // 4)
            b_dot = _dot(b_s0, b_s1, b_s2, b_s3, b_f0, b_f1, b_f2, b_f3)
            b_f0, b_f1, b_f2, b_f3 = _quarters(b_q * b_a, K // 4)
            b_o = _dot(b_s0, b_s1, b_s2, b_s3, b_f0, b_f1, b_f2, b_f3)
            b_d = b_beta * (b_v - b_dot)
            b_o += b_d * b_kq
            b_f0, b_f1, b_f2, b_f3 = _quarters(b_a, K // 4)
            b_k0, b_k1, b_k2, b_k3 = _quarters(b_k, K // 4)
            p_s += write * stride_s
            b_s0 = b_s0 * b_f0[None, :] + b_d[:, None] * b_k0[None, :]
            b_s1 = b_s1 * b_f1[None, :] + b_d[:, None] * b_k1[None, :]
            b_s2 = b_s2 * b_f2[None, :] + b_d[:, None] * b_k2[None, :]
            b_s3 = b_s3 * b_f3[None, :] + b_d[:, None] * b_k3[None, :]
            dtype = state.dtype.element_ty
            tl.store(p_s, b_s0.to(dtype), cache_modifier=STORE)
            tl.store(p_s + K // 4 * stride_sk, b_s1.to(dtype), cache_modifier=STORE)
            tl.store(p_s + K // 2 * stride_sk, b_s2.to(dtype), cache_modifier=STORE)
            tl.store(p_s + K // 4 * 3 * stride_sk, b_s3.to(dtype), cache_modifier=STORE)
            b_out = _sigmoid(b_z.to(tl.float32))
            b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) * (1.0 / V) + norm_eps) * b_norm.to(tl.float32) * b_out
            tl.store(out + j * stride_oh + o_v * stride_ov, b_o.to(out.dtype.element_ty))
            if GROUP == 1:
                tl.debug_barrier()
                target = conv_state + write * stride_cs
                _roll(b_xq, b_hq, target, o_q, stride_cc, stride_ct, W)
                _roll(b_xk, b_hk, target, o_q + H * K, stride_cc, stride_ct, W)
                _roll(b_xv, b_hv, target, o_y, stride_cc, stride_ct, W)
        else:
            if EARLY:
                gdc_wait()
            tl.store(out + j * stride_oh + o_v * stride_ov, tl.zeros([V], out.dtype.element_ty))
    if live and GROUP > 1:  # histories of q and k are read by every value head, and rolled behind the last
        tl.debug_barrier()
        target = conv_state + write * stride_cs
        _read_and_roll(qkv, history, target, o_q, stride_xc, stride_cc, stride_ct, W)
        _read_and_roll(qkv, history, target, o_q + H * K, stride_xc, stride_cc, stride_ct, W)
        for j in range(GROUP):
            o_y = (2 * H * K + (i_h * GROUP + j) * V) + o_v
            _read_and_roll(qkv, history, target, o_y, stride_xc, stride_cc, stride_ct, W)


# What changes from step to step or with the caller's buffers: none of these values may be compiled in.
kernel = triton.jit(
    _kernel,
    do_not_specialize=["slots", "null_slot", "stride_read", "stride_write", "stride_a", "stride_bh", "stride_bb"],
    do_not_specialize_on_alignment=["read_slots", "write_slots", "beta_logits", "A_log"],
)


def decode(
    qkv: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    gate: str,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    lower_bound: float,
    scale: float,
    allow_neg_eigval: bool,
    null_slot: int | None,
    out: torch.Tensor,
    early: bool = False,
    config: Config | None = None,
) -> None:
    """Launches the kernel, a program a row and query head; arguments as the module's docstring says.

    No sync, no allocation. early: states are read before the kernel in front of this one has ended, all else after it.
    A given config overrides `choose`.
    """
    B, HV, V = out.shape
    early = early and overlaps_launches(qkv.device)
    K, W = state.shape[3], conv_weight.shape[1]
    H = (qkv.shape[1] - HV * V) // (2 * K)
    config = config or choose(Shape(K, V), arch(qkv.device))
    if B == 0:
        return
    with current(qkv.device):
        kernel[(B * H,)](
            qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots,
            norm_weight, A_log, dt_bias, out,
            H, min(conv_state.shape[0], state.shape[0]), -1 if null_slot is None else null_slot, float(norm_eps),
            float(lower_bound), float(scale),
            *qkv.stride(), *g_raw.stride(), *beta_logits.stride(), *out_gate.stride(), *conv_weight.stride(),
            0 if conv_bias is None else conv_bias.stride(0), *conv_state.stride(), *state.stride(),
            read_slots.stride(0), write_slots.stride(0), norm_weight.stride(0),
            0 if A_log is None else A_log.stride(0), *((0, 0) if dt_bias is None else dt_bias.stride()), *out.stride(),
            K=K, V=V, W=W, GROUP=HV // H, GATE=gate, DOUBLED=allow_neg_eigval,
            STORE=config.store, EARLY=early, **config.options, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
