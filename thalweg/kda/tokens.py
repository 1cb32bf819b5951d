"""Everything of 1 to 8 tokens a row that does not need the state: convolution, norms, gate, decayed keys and scores.

The first kernel of the chains `split` and `verify`. Tokens are taken in runs of SPAN (all of them, or one by one): with
a_t = exp g_t and D_t = a_1 ... a_t inside the run, the steps of the recurrence over a run that begins with state S are

    delta_t = beta_t (v_t - S (D_t k_t)) - sum_{s<t} beta_t k_t . (a_{s+1} ... a_t k_s) delta_s
    o_t     = S (D_t scale q_t) + sum_{s<=t} scale q_t . (a_{s+1} ... a_t k_s) delta_s
    S       <- S diag(D_n) + sum_s delta_s (a_{s+1} ... a_n k_s)^T

and what stands beside S and delta is made here. Decays are products of the a's they span, each at most 1: nothing
overflows, and nothing is a difference of sums. A run of one token is the decode step itself.

    qkv          [B, S, C]    C = 2 H K + HV V, before the convolution; bfloat16, float16, float32; any strides
    g_raw        [B, S, HV, K]   raw gate; beta_logits [B, S, HV]; A_log [HV], dt_bias [HV, K] float32 or None
    conv_weight  [C, W]; conv_bias [C] or None
    conv_state   [slots, C, W - 1]  of qkv's dtype or float32; with `roll` advanced by the accepted tokens
    read_slots, write_slots [B]; accepted [B] or None (all): tokens past the count are not read
  handed over, float32:
    keys         [B, HV, S, 4, BK]  D_t k_t; D_t scale q_t; k_t decayed to its run's end; D_n (with its run's last
                                    token); BK is K rounded up to a power of two, zeros there
    pairs        [B, HV, S, 2, 8]   row t: beta_t k_t . (.. k_s), beta_t on the diagonal; scale q_t . (.. k_s), s <= t
    values       [B, HV, S, V]      v_t

A row on a bad slot, or with nothing accepted, hands over nothing. A program owns the channels of a key head, or of a
value head, and with them their history: it alone reads and writes it, all of it read before any is written.

Source: Kimi Linear (arXiv 2510.26692); the run form is its chunk form without an inverse.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, current, next_power_of_2
from thalweg.kda.gate import log_decay
from thalweg.kda.slots import good


class Workspace(NamedTuple):
    """What is handed over; `make` allocates it, `bytes` says how much that is."""

    keys: torch.Tensor
    pairs: torch.Tensor
    values: torch.Tensor


def workspace_bytes(B: int, S: int, HV: int, K: int, V: int) -> int:
    """Bytes of a Workspace: for K = V = 128 about 2.6 KB a token and value head."""
    return 4 * B * HV * S * (4 * padded(K) + 16 + V)


def padded(K: int) -> int:
    return max(16, next_power_of_2(K))


def workspace(B: int, S: int, HV: int, K: int, V: int, device: torch.device) -> Workspace:
    sizes = [B * HV * S * n for n in (4 * padded(K), 16, V)]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    keys, pairs, values = buffer.split(sizes)
    lead = (B, HV, S)
    return Workspace(keys.view(*lead, 4, padded(K)), pairs.view(*lead, 2, 8), values.view(*lead, V))


class Shape(NamedTuple):
    """What a configuration depends on: not the number of rows."""

    K: int
    V: int
    S: int


@dataclass(frozen=True)
class Config:
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    width = max(padded(shape.K), next_power_of_2(shape.V))
    if shape.S == 1:
        return Config(max(1, width // 32), "one channel a lane: 3.6 us against 5.0 for one row of 12 heads")
    return Config(max(1, width // 128), "four channels a lane: the many sums of several tokens stay inside a warp")


@triton.jit
def _window(
    p_x, p_history, p_weight, bias, o_bias, m, n, stride_xs, stride_sw, stride_ww, S: tl.constexpr, W: tl.constexpr
):
    """What the convolution of the channels that the pointers `[BC]` name needs: the W - 1 inputs before the first token
    and the S tokens, those from n on zero and not read; the taps; bias + o_bias, or zeros.
    """
    window = ()
    for j in tl.static_range(W - 1):
        window = window + (tl.load(p_history + j * stride_sw, mask=m, other=0.0).to(tl.float32),)
    for s in tl.static_range(S):
        window = window + (tl.load(p_x + s * stride_xs, mask=m & (s < n), other=0.0).to(tl.float32),)
    taps = ()
    for j in tl.static_range(W):
        taps = taps + (tl.load(p_weight + j * stride_ww, mask=m, other=0.0).to(tl.float32),)
    b_bias = tl.zeros([m.shape[0]], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_bias, mask=m, other=0.0).to(tl.float32)
    return window, taps, b_bias


@triton.jit
def _convolved(window, taps, b_bias, S: tl.constexpr, W: tl.constexpr):
    """silu(convolution) of the S tokens."""
    outputs = ()
    for s in tl.static_range(S):
        b_y = b_bias
        for j in tl.static_range(W):
            b_y += taps[j] * window[s + j]
        outputs = outputs + (b_y / (1.0 + tl.exp(-b_y)),)
    return outputs


@triton.jit
def _roll(p_write, window, m, n, stride_sw, S: tl.constexpr, W: tl.constexpr):
    """Writes the history after n of the window's S tokens, n from 1 to S."""
    tl.debug_barrier()  # a channel's history may have been read by other lanes than those that write it
    for j in tl.static_range(W - 1):
        b_x = window[j + 1]
        for i in tl.static_range(2, S + 1):
            b_x = tl.where(n == i, window[j + i], b_x)
        tl.store(p_write + j * stride_sw, b_x.to(p_write.dtype.element_ty), m)


@triton.jit
def _gates(p_g, p_beta, A_log, dt_bias, o_a, o_d, m, n, stride_gs, stride_bs, S: tl.constexpr):
    """Raw gates and beta logits of the S tokens of a value head, its A_log and dt_bias (zeros if absent)."""
    raw = ()
    logits = ()
    for t in tl.static_range(S):
        raw = raw + (tl.load(p_g + t * stride_gs, mask=m & (t < n), other=0.0),)
        logits = logits + (tl.load(p_beta + t * stride_bs, mask=t < n, other=0.0),)
    b_a = 0.0
    if A_log is not None:
        b_a = tl.load(A_log + o_a)
    b_d = tl.zeros([m.shape[0]], tl.float32)
    if dt_bias is not None:
        b_d = tl.load(dt_bias + o_d, mask=m, other=0.0)
    return raw, logits, b_a, b_d


@triton.jit
def _hand_over(
    queries, unit_keys, raw, logits, b_a, b_d, p_keys, p_pairs, o_k, n, lower_bound,
    S: tl.constexpr, SPAN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, DOUBLED: tl.constexpr,
    QUERY: tl.constexpr,
):  # fmt: skip
    """Activates the gates of a value head and hands over its keys and pairs, run by run."""
    b_rate = tl.exp(b_a)
    decays = ()
    betas = ()
    for t in tl.static_range(S):
        b_g = tl.exp(log_decay(raw[t].to(tl.float32), b_rate, b_d, lower_bound, GATE))
        decays = decays + (tl.where(t < n, b_g, 1.0),)
        b_beta = tl.sigmoid(logits[t].to(tl.float32)) * (2.0 if DOUBLED else 1.0)
        betas = betas + (tl.where(t < n, b_beta, 0.0),)
    for r in tl.static_range(S // SPAN):
        _run(queries, unit_keys, decays, betas, p_keys, p_pairs, o_k, r * SPAN, SPAN, BK, QUERY)


@triton.jit
def _run(
    queries, unit_keys, decays, betas, p_keys, p_pairs, o_k,
    FIRST: tl.constexpr, SPAN: tl.constexpr, BK: tl.constexpr, QUERY: tl.constexpr,
):  # fmt: skip
    """Hands over tokens FIRST .. FIRST + SPAN - 1, one run."""
    kept = ()  # the run's keys, decayed to the token at hand
    b_d = decays[FIRST]
    for i in tl.static_range(SPAN):
        if i > 0:
            b_d *= decays[FIRST + i]
        p_t = p_keys + (FIRST + i) * (4 * BK) + o_k
        tl.store(p_t, unit_keys[FIRST + i] * b_d)
        faded = ()
        for s in tl.static_range(i):
            faded = faded + (kept[s] * decays[FIRST + i],)
            tl.store(p_pairs + (FIRST + i) * 16 + s, betas[FIRST + i] * tl.sum(unit_keys[FIRST + i] * faded[s], 0))
        tl.store(p_pairs + (FIRST + i) * 16 + i, betas[FIRST + i])
        kept = faded + (unit_keys[FIRST + i],)
        if QUERY:
            tl.store(p_t + BK, queries[FIRST + i] * b_d)
            for s in tl.static_range(i + 1):
                tl.store(p_pairs + (FIRST + i) * 16 + 8 + s, tl.sum(queries[FIRST + i] * kept[s], 0))
    for i in tl.static_range(SPAN):
        tl.store(p_keys + (FIRST + i) * (4 * BK) + 2 * BK + o_k, kept[i])
    tl.store(p_keys + (FIRST + SPAN - 1) * (4 * BK) + 3 * BK + o_k, b_d)


def _kernel(
    qkv, g_raw, beta_logits, conv_weight, conv_bias, A_log, dt_bias, conv_state, read_slots, write_slots, accepted,
    keys, pairs, values, H, HV, slots, null_slot, lower_bound, scale,
    stride_xb: tl.int64, stride_xs: tl.int64, stride_xc, stride_gb: tl.int64, stride_gs: tl.int64,
    stride_gh: tl.int64, stride_gd, stride_bb: tl.int64, stride_bs: tl.int64, stride_bh,
    stride_wc, stride_ww, stride_bias, stride_a, stride_dh: tl.int64,
    stride_dd, stride_s: tl.int64, stride_sc, stride_sw,
    stride_read, stride_write, stride_acc,
    S: tl.constexpr, SPAN: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, GATE: tl.constexpr, DOUBLED: tl.constexpr, QUERY: tl.constexpr, ROLL: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    i_part = tl.program_id(0) % (H + HV)
    i_b = (tl.program_id(0) // (H + HV)).to(tl.int64)
    read = tl.load(read_slots + i_b * stride_read).to(tl.int64)
    write = tl.load(write_slots + i_b * stride_write).to(tl.int64)
    n = S
    if accepted is not None:
        n = tl.minimum(tl.maximum(tl.load(accepted + i_b * stride_acc), 0), S).to(tl.int32)
    live = good(read, slots, null_slot) & good(write, slots, null_slot) & (n > 0)
    if live:
        qkv += i_b * stride_xb
        p_read = conv_state + read * stride_s
        p_write = conv_state + write * stride_s
        g_raw += i_b * stride_gb
        beta_logits += i_b * stride_bb
        if i_part < H:
            o_k = tl.arange(0, BK).to(tl.int64)
            m_k = o_k < K
            o_q = i_part * K + o_k
            o_c = H * K + o_q
            # All loads first: none waits for the sums.
            window_q, taps_q, b_bq = _window(
                qkv + o_q * stride_xc, p_read + o_q * stride_sc, conv_weight + o_q * stride_wc, conv_bias,
                o_q * stride_bias, m_k, n, stride_xs, stride_sw, stride_ww, S, W,
            )  # fmt: skip
            window_k, taps_k, b_bk = _window(
                qkv + o_c * stride_xc, p_read + o_c * stride_sc, conv_weight + o_c * stride_wc, conv_bias,
                o_c * stride_bias, m_k, n, stride_xs, stride_sw, stride_ww, S, W,
            )  # fmt: skip
            i_hv = i_part.to(tl.int64) * GROUP
            raw, logits, b_a, b_d = _gates(
                g_raw + i_hv * stride_gh + o_k * stride_gd, beta_logits + i_hv * stride_bh, A_log, dt_bias,
                i_hv * stride_a, i_hv * stride_dh + o_k * stride_dd, m_k, n, stride_gs, stride_bs, S,
            )  # fmt: skip
            y_q = _convolved(window_q, taps_q, b_bq, S, W)
            y_k = _convolved(window_k, taps_k, b_bk, S, W)
            queries = ()
            unit_keys = ()
            for t in tl.static_range(S):
                b_q = tl.where(m_k & (t < n), y_q[t], 0.0)
                b_k = tl.where(m_k & (t < n), y_k[t], 0.0)
                queries = queries + (b_q * (tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * scale),)
                unit_keys = unit_keys + (b_k * tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6),)
            keys += (i_b * HV + i_hv) * (S * 4 * BK)
            pairs += (i_b * HV + i_hv) * (S * 16)
            _hand_over(queries, unit_keys, raw, logits, b_a, b_d, keys, pairs, o_k, n, lower_bound,
                       S, SPAN, BK, GATE, DOUBLED, QUERY)  # fmt: skip
            if GROUP > 1:
                for _ in range(1, GROUP):
                    i_hv += 1
                    keys += S * 4 * BK
                    pairs += S * 16
                    raw_j, logits_j, b_aj, b_dj = _gates(
                        g_raw + i_hv * stride_gh + o_k * stride_gd, beta_logits + i_hv * stride_bh, A_log, dt_bias,
                        i_hv * stride_a, i_hv * stride_dh + o_k * stride_dd, m_k, n, stride_gs, stride_bs, S,
                    )  # fmt: skip
                    _hand_over(queries, unit_keys, raw_j, logits_j, b_aj, b_dj, keys, pairs, o_k, n, lower_bound,
                               S, SPAN, BK, GATE, DOUBLED, QUERY)  # fmt: skip
            if ROLL:
                _roll(p_write + o_q * stride_sc, window_q, m_k, n, stride_sw, S, W)
                _roll(p_write + o_c * stride_sc, window_k, m_k, n, stride_sw, S, W)
        else:
            i_v = i_part - H
            o_v = tl.arange(0, BV).to(tl.int64)
            m_v = o_v < V
            o_r = 2 * H * K + i_v * V + o_v
            window, taps, b_bias = _window(
                qkv + o_r * stride_xc, p_read + o_r * stride_sc, conv_weight + o_r * stride_wc, conv_bias,
                o_r * stride_bias, m_v, n, stride_xs, stride_sw, stride_ww, S, W,
            )  # fmt: skip
            y_v = _convolved(window, taps, b_bias, S, W)
            p_v = values + (i_b * HV + i_v) * (S * V) + o_v
            for t in tl.static_range(S):
                tl.store(p_v + t * V, y_v[t], m_v)
            if ROLL:
                _roll(p_write + o_r * stride_sc, window, m_v, n, stride_sw, S, W)


# What changes from step to step: none of these values may be compiled in. Strides that are usually 1 have no type: it
# would keep that from the compiler, and loads would be cut in single elements (ten times as long).
kernel = triton.jit(
    _kernel,
    do_not_specialize=["H", "HV", "slots", "null_slot", "stride_read", "stride_write", "stride_acc"],
    do_not_specialize_on_alignment=["read_slots", "write_slots", "accepted"],
)


def prepare_tokens(
    qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, slots: int, read_slots, write_slots, accepted,
    handed: Workspace, *, span: int, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot,
    query: bool, roll: bool, config: Config | None = None,
) -> None:  # fmt: skip
    """Launches the kernel; arguments as the module's docstring says. No sync, no allocation.

    slots: size of the smaller pool. span: tokens of a run, 1 or S. query: scaled queries and their scores are wanted.
    roll: the history is advanced. A given config overrides `choose`.
    """
    B, HV, S, V = handed.values.shape
    K = g_raw.shape[-1]
    H = (qkv.shape[-1] - HV * V) // (2 * K)
    config = config or choose(Shape(K, V, S), arch(qkv.device))
    zero = (0, 0)
    with current(qkv.device):
        kernel[(B * (H + HV),)](
            qkv, g_raw, beta_logits, conv_weight, conv_bias, A_log, dt_bias, conv_state, read_slots, write_slots,
            accepted, *handed, H, HV, slots, -1 if null_slot is None else null_slot, float(lower_bound), float(scale),
            *qkv.stride(), *g_raw.stride(), *beta_logits.stride(), *conv_weight.stride(),
            conv_bias.stride(0) if conv_bias is not None else 0, A_log.stride(0) if A_log is not None else 0,
            *(dt_bias.stride() if dt_bias is not None else zero), *conv_state.stride(), read_slots.stride(0),
            write_slots.stride(0), accepted.stride(0) if accepted is not None else 0,
            S=S, SPAN=span, K=K, V=V, W=conv_weight.shape[1], BK=padded(K), BV=next_power_of_2(V), GATE=gate,
            DOUBLED=allow_neg_eigval, QUERY=query, ROLL=roll, GROUP=HV // H, **config.options,
        )  # fmt: skip
