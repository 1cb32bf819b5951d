"""The parts of the fused decode step in Gluon, layouts given by the kernel: its formulas and arguments are `decode`'s.

A state tile [V, K] lies with 8 lanes along K, 16 bytes of a row and two rows in a lane: LS, its rows' vectors LV, its
columns' LK. A head's channels q | k | gate | v lie one a lane, each with its four taps: LT, one value a channel LC. So
a channel is read, and its history rolled, by one lane, and a sum over K takes three exchanges between lanes.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES = gl.constexpr(8)  # that share a row of the state
ROW_GROUP = gl.constexpr(8)  # rows whose squares are summed first, whatever warps and parts there are


def why_not(call: dict[str, Any], groups: bool) -> str | None:
    """What the kernels made of these parts cannot take, of what `decode` can; metadata only.

    groups: whether the kernel lets value heads share a query head.
    """
    HV, V, K = call["state"].shape[1:]
    if not groups and call["qkv"].shape[1] != HV * (2 * K + V):
        return "takes as many query heads as value heads"
    if call["conv_weight"].shape[1] != 4:
        return f"takes convolutions of width 4, got {call['conv_weight'].shape[1]}"
    names = ("qkv", "g_raw", "out_gate", "conv_weight", "norm_weight", "state", "out", "conv_bias", "A_log", "dt_bias")
    for name in names:
        x = call[name]
        if x is not None and x.stride(-1) != 1 and x.shape[-1] != 1:
            return f"{name} must be contiguous in its last dimension, got strides {tuple(x.stride())}"
    state, unit = call["state"], 16 // call["state"].element_size()
    slot, head, row, _ = state.stride()
    if row != K or slot % K or head % K or state.storage_offset() % unit or min(slot, head) < 0:
        return f"state must hold whole heads [{V}, {K}], 16-byte aligned, got strides {tuple(state.stride())}"
    if not state.shape[0] or (state.shape[0] * slot + HV * head) // K >= 2**31:
        return f"the state pool must have from 1 to 2^31 rows, got {list(state.shape)}"
    if call["qkv"].shape[0] >= 2**16:
        return f"takes at most {2**16 - 1} rows, got {call['qkv'].shape[0]}"
    return None


def arguments(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    norm_eps, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot, out, desc,
) -> tuple[tuple, dict[str, Any]]:  # fmt: skip
    """The positional and constant arguments of both kernels, from those of the op."""
    HV, V, K = state.shape[1:]
    H = (qkv.shape[1] - HV * V) // (2 * K)
    positional = (
        qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots,
        norm_weight, A_log, dt_bias, out, desc,
        H, min(conv_state.shape[0], state.shape[0]), -1 if null_slot is None else null_slot, float(norm_eps),
        float(lower_bound), float(scale),
        qkv.stride(0), *g_raw.stride()[:2], *beta_logits.stride(), *out_gate.stride()[:2], conv_weight.stride(0),
        *conv_state.stride(), *state.stride()[:2], read_slots.stride(0), write_slots.stride(0),
        0 if dt_bias is None else dt_bias.stride(0), *out.stride()[:2],
    )  # fmt: skip
    width = 1 << ((3 * K + V - 1) // V * V + V - 1).bit_length()
    packed = conv_weight.stride(0) == conv_weight.shape[1]
    return positional, {
        "K": K, "V": V, "C": width, "GROUP": HV // H, "GATE": gate, "DOUBLED": allow_neg_eigval, "PACKED": packed,
    }  # fmt: skip


# What changes from step to step or with the caller's buffers: none of these values may be compiled in.
UNSPECIALIZED = {
    "do_not_specialize": ["slots", "null_slot", "stride_read", "stride_write", "stride_bh", "stride_bb"],
    "do_not_specialize_on_alignment": ["read_slots", "write_slots", "beta_logits", "A_log"],
}


@gluon.constexpr_function
def first_value(K, V):
    """Where v starts behind q | k | gate: tiles are cut out of shared memory at multiples of their size."""
    return (3 * K + V - 1) // V * V


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def _log_decay(b_x, rate, b_bias, lower_bound, GATE: gl.constexpr):
    """Natural log of the decay of a raw gate, at most 0."""
    if GATE == "given":
        return b_x
    elif GATE == "soft":
        b_x += b_bias
        b_e = gl.exp(gl.minimum(b_x, 20.0))
        b_u = 1.0 + b_e
        # log(1 + e) with all digits of a small e, which a slow gate is made of.
        b_plus = gl.where(b_u == 1.0, b_e, gl.log(b_u) * (b_e / gl.where(b_u == 1.0, 1.0, b_u - 1.0)))
        return -rate * gl.where(b_x > 20.0, b_x, b_plus)
    else:
        return lower_bound * sigmoid(rate * (b_x + b_bias))


@gluon.jit
def _decay(b_g):
    """exp(b_g). The hardware's exp2 may be off by 2^-22, which 4,096 steps of a slow channel add up: 2^-24 near 1."""
    b_near = 1.0 + b_g * (1.0 / 6.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 5.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 4.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 3.0)
    b_near = 1.0 + b_g * b_near * (1.0 / 2.0)
    return gl.where(b_g > -0.25, 1.0 + b_g * b_near, gl.exp(b_g))


@gluon.jit
def good(slot, slots, null_slot):
    return (slot >= 0) & (slot < slots) & (slot != null_slot)


@gluon.jit
def row_slots(read_slots, write_slots, i_b, stride_read, stride_write, slots, null_slot):
    """A row's slots, and whether it is live."""
    read = gl.load(read_slots + i_b * stride_read).to(gl.int64)
    write = gl.load(write_slots + i_b * stride_write).to(gl.int64)
    return read, write, good(read, slots, null_slot) & good(write, slots, null_slot)


@gluon.jit
def _channels(i_q, i_h, H, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LC: gl.constexpr):
    """Of a head's q | k | gate | v: the channel of qkv, whether it is one, whether it is of the gate, and which."""
    o_c = gl.arange(0, C, layout=LC)
    gate = (o_c >= 2 * K) & (o_c < 3 * K)
    o_y = gl.where(o_c < K, i_q * K + o_c, (H + i_q) * K + o_c - K)
    FIRST: gl.constexpr = first_value(K, V)
    o_y = gl.where(o_c < 2 * K, o_y, 2 * H * K + i_h * V + o_c - FIRST)
    return o_y, (o_c < 2 * K) | ((o_c >= FIRST) & (o_c < FIRST + V)), gate, o_c - 2 * K


@gluon.jit
def token(
    qkv, g_raw, beta_logits, i_b, i_q, i_h, H, stride_xb, stride_gb, stride_gh, stride_bb, stride_bh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LC: gl.constexpr,
):  # fmt: skip
    """What a head's convolution and gate read of a row: x, gate, beta."""
    o_y, conv, gate, o_g = _channels(i_q, i_h, H, K, V, C, LC)
    b_x = gl.load(qkv + i_b * stride_xb + o_y, mask=conv, other=0.0)
    b_g = gl.load(g_raw + i_b * stride_gb + i_h * stride_gh + o_g, mask=gate, other=0.0)
    return b_x, b_g, gl.load(beta_logits + i_b * stride_bb + i_h * stride_bh)


@gluon.jit
def weights(
    conv_weight, conv_bias, A_log, dt_bias, i_q, i_h, H, stride_wc, stride_dh,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, PACKED: gl.constexpr, LC: gl.constexpr, LT: gl.constexpr,
):  # fmt: skip
    """What is the same for every row: taps, conv bias, the gate's bias and rate."""
    o_y, conv, gate, o_g = _channels(i_q, i_h, H, K, V, C, LC)
    o_w = gl.arange(0, 4, layout=gl.SliceLayout(0, LT))
    m_w = conv[:, None] & (o_w < 4)[None, :]
    if PACKED:  # one load a channel
        b_w = gl.load(conv_weight + (o_y * 4)[:, None] + o_w[None, :], mask=m_w, other=0.0)
    else:
        b_w = gl.load(conv_weight + o_y.to(gl.int64)[:, None] * stride_wc + o_w[None, :], mask=m_w, other=0.0)
    b_cb = gl.zeros([C], gl.float32, LC)
    if conv_bias is not None:
        b_cb = gl.load(conv_bias + o_y, mask=conv, other=0.0).to(gl.float32)
    b_db = gl.zeros([C], gl.float32, LC)
    if dt_bias is not None:
        b_db = gl.load(dt_bias + i_h * stride_dh + o_g, mask=gate, other=0.0)
    rate = 0.0
    if A_log is not None:
        rate = gl.load(A_log + i_h)
    return b_w, b_cb, b_db, rate


@gluon.jit
def history(
    conv_state, read, i_q, i_h, H, live, stride_cs, stride_cc, stride_ct,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LC: gl.constexpr, LT: gl.constexpr,
):  # fmt: skip
    """The last three inputs of a live row's channels of a head, [C, 4]: column 3 is for the new one."""
    o_y, conv, _, _ = _channels(i_q, i_h, H, K, V, C, LC)
    o_w = gl.arange(0, 4, layout=gl.SliceLayout(0, LT))
    p = conv_state + read * stride_cs + o_y.to(gl.int64)[:, None] * stride_cc + o_w[None, :] * stride_ct
    return gl.load(p, mask=(conv & live)[:, None] & (o_w < 3)[None, :], other=0.0)


@gluon.jit
def roll(
    conv_state, b_x, b_h, write, i_q, i_h, H, last, stride_cs, stride_cc, stride_ct,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, LC: gl.constexpr, LT: gl.constexpr,
):  # fmt: skip
    """The history one input on: what was read, stored one column to the left. Where not `last`, only that of v: other
    value heads have yet to read that of q and k, by the same lanes.
    """
    o_y, conv, _, _ = _channels(i_q, i_h, H, K, V, C, LC)
    o_w = gl.arange(0, 4, layout=gl.SliceLayout(0, LT))
    b_h = gl.where((o_w == 3)[None, :], b_x.to(conv_state.dtype.element_ty)[:, None], b_h)
    p = conv_state + write * stride_cs + o_y.to(gl.int64)[:, None] * stride_cc + (o_w - 1)[None, :] * stride_ct
    conv &= (gl.arange(0, C, layout=LC) >= 2 * K) | last
    gl.store(p, b_h, mask=conv[:, None] & (o_w > 0)[None, :])


@gluon.jit
def mixed(
    b_x, b_h, b_w, b_cb, b_g, b_db, rate, lower_bound, HAS_RATE: gl.constexpr, GATE: gl.constexpr, K: gl.constexpr,
    C: gl.constexpr, LC: gl.constexpr, LT: gl.constexpr,
):  # fmt: skip
    """silu(conv) of q, k and v, decays in the gate's place."""
    o_c = gl.arange(0, C, layout=LC)
    o_w = gl.arange(0, 4, layout=gl.SliceLayout(0, LT))
    b_h = gl.where((o_w == 3)[None, :], b_x.to(gl.float32)[:, None], b_h.to(gl.float32))
    b_y = gl.sum(b_h * b_w.to(gl.float32), 1) + b_cb
    b_y = b_y * sigmoid(b_y)
    if HAS_RATE:
        rate = gl.exp(rate)
    else:
        rate = 1.0
    b_a = _decay(_log_decay(b_g.to(gl.float32), rate, b_db, lower_bound, GATE))
    return gl.where((o_c >= 2 * K) & (o_c < 3 * K), b_a, b_y)


@gluon.jit
def vectors(m_y, scale, K: gl.constexpr, LK: gl.constexpr):
    """q, k and decay from shared memory; what normalises q (scale included) and k, and k . q of the normalised."""
    b_q = m_y.slice(0, K).load(LK)
    b_k = m_y.slice(K, K).load(LK)
    b_a = m_y.slice(2 * K, K).load(LK)
    rq = gl.rsqrt(gl.sum(b_q * b_q, 0) + 1e-6) * scale
    rk = gl.rsqrt(gl.sum(b_k * b_k, 0) + 1e-6)
    return b_q, b_k, b_a, rq, rk, gl.sum(b_k * b_q, 0) * rq * rk


@gluon.jit
def write_strength(beta, DOUBLED: gl.constexpr):
    beta = sigmoid(beta.to(gl.float32))
    if DOUBLED:
        beta = beta * 2.0
    return beta


@gluon.jit
def advance(b_s, b_q, b_k, b_a, rq, rk, kq, beta, b_v, ROWS: gl.constexpr):
    """Steps ROWS rows of the state: the state, o, and sums of o's squares in an order that depends neither on warps nor
    on parts. q and k come as they are: their norms are scalars of a row's sums, which need not wait for them.
    """
    b_s = b_s.to(gl.float32) * b_a[None, :]
    b_d = beta * (b_v - rk * gl.sum(b_s * b_k[None, :], 1))
    # Of two products in a sum the compiler fuses either, and not the same one in every configuration.
    b_o = gl.fma(rq, gl.sum(b_s * b_q[None, :], 1), b_d * kq)
    b_s = b_s + (b_d * rk)[:, None] * b_k[None, :]
    return b_s, b_o, gl.sum(gl.reshape(b_o * b_o, [ROWS // ROW_GROUP, ROW_GROUP]), 1)


@gluon.jit
def inverse_rms(m_n, norm_eps, V: gl.constexpr, ALL: gl.constexpr):
    """What o is normalised by, when the sums of squares of all of it lie in shared memory."""
    return gl.rsqrt(gl.sum(m_n.load(ALL), 0) * (1.0 / V) + norm_eps)


def pool_rows(state: torch.Tensor) -> int:
    """Rows of K elements from the pool's first element to its last one."""
    slots, HV, V, K = state.shape
    return ((slots - 1) * state.stride(0) + (HV - 1) * state.stride(1)) // K + V
