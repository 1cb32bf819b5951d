"""The pass over the state of a decode step, of verified or of committed tokens: one read of it, at most one write.

The second kernel of the chains `split` and `verify`. With what `tokens` hands over, a run of SPAN tokens from S is

    x_t = S (D_t k_t)       delta_t = beta_t (v_t - x_t) - sum_{s<t} pairs_ts delta_s
    y_t = S (D_t scale q_t)     o_t = y_t + sum_{s<=t} pairs'_ts delta_s
    S   <- S diag(D_n) + sum_s delta_s (decayed k_s)^T

so all products with S of a run are independent of one another, and the chain from token to token is over vectors of V.
A program owns a slice of V of one row and value head.

    keys, pairs, values       as `tokens` hands them over
    state        [slots, HV, V, K]  float32 or bfloat16, any strides; with `store` mutated: rounded once a run
    read_slots, write_slots [B]; accepted [B] or None (all)
    out          [B, S, HV, V] where outputs are wanted: "raw" (o_t, for a norm that follows; rows on a bad slot are
                 left alone) or "normed" (gated RMS norm, zeros on a bad slot; the slice is all of V then)
    out_gate     [B, S, HV, V], norm_weight [V]: of "normed"

The state lies in registers as [V, KH, KL], K = KH x KL: the lanes of a warp cover KL channels of several rows, and a
lane holds all KH pieces of its row, so that most of a sum over K is made inside a lane and few lanes exchange theirs.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import triton
import triton.language as tl

from thalweg.device import arch, cdiv, current, next_power_of_2
from thalweg.kda.slots import good


class Shape(NamedTuple):
    """What a configuration depends on: not the number of rows."""

    K: int
    V: int
    itemsize: int  # bytes of an element of the state
    outputs: str  # none, raw, normed
    span: int  # tokens of a run


@dataclass(frozen=True)
class Config:
    values: int  # of V a program
    lanes: int  # KL: neighbouring channels of K, the others of a row lie in the same lanes
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    BK, BV = max(16, next_power_of_2(shape.K)), next_power_of_2(shape.V)
    # More lanes than channels: only then does the compiler load vectors of K where the state lies. With as many it
    # moves the state to where they lie, through shared memory: 3,112 instructions against 376 for a slice of 64 x 128.
    warps = max(1, 2 * BK // (64 if device.startswith("gfx") else 32))
    if shape.outputs == "normed":
        # 4 tokens of 32 rows: 28.1 us with 16 and 32.2 with 32 lanes; 8 tokens: 58 and 51.
        return Config(BV, min(BK, 16 if shape.span <= 4 else 32), warps, "a whole head: its norm needs all of V")
    return Config(min(BV, 64), min(BK, 32), warps, "slices of V: more programs at small batches")


def whole(K: int, V: int) -> bool:
    """Whether a program can hold all of a head's state, and so norm its outputs."""
    return max(16, next_power_of_2(K)) * next_power_of_2(V) <= 2**14


@triton.jit
def _read(b_s, p_key):
    """S times a vector of K, for every row of the slice: over the pieces in a lane first."""
    return tl.sum(tl.sum(b_s * tl.load(p_key), 1), 1)


def _kernel(
    keys, pairs, values, state, read_slots, write_slots, accepted, out_gate, norm_weight, out,
    HV, slots, null_slot, eps, inverse,
    stride_s: tl.int64, stride_sh: tl.int64, stride_sv: tl.int64, stride_sk,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gv,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64, stride_ov, stride_n,
    stride_read, stride_write, stride_acc,
    S: tl.constexpr, SPAN: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    KL: tl.constexpr, OUT: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    SLICES: tl.constexpr = (V + BV - 1) // BV
    KH: tl.constexpr = BK // KL
    i_v = tl.program_id(0) % SLICES * BV
    i_hv = (tl.program_id(0) // SLICES % HV).to(tl.int64)
    i_b = (tl.program_id(0) // SLICES // HV).to(tl.int64)
    read = tl.load(read_slots + i_b * stride_read).to(tl.int64)
    write = tl.load(write_slots + i_b * stride_write).to(tl.int64)
    n = S
    if accepted is not None:
        n = tl.minimum(tl.maximum(tl.load(accepted + i_b * stride_acc), 0), S).to(tl.int32)
    live = good(read, slots, null_slot) & good(write, slots, null_slot) & (n > 0)
    o_n = (i_v + tl.arange(0, BV)).to(tl.int64)
    m_n = o_n < V
    p_out = out
    if OUT != "none":
        p_out += i_b * stride_ob + i_hv * stride_oh + o_n * stride_ov
    if live:
        o_v = i_v + tl.arange(0, BV)[:, None, None]
        o_h = tl.arange(0, KH)[None, :, None]
        o_l = tl.arange(0, KL)[None, None, :]
        p_state = state + i_hv * stride_sh + o_v * stride_sv + (o_h * KL + o_l).to(tl.int64) * stride_sk
        m_s = (o_v < V) & (o_h * KL + o_l < K)
        b_s = tl.load(p_state + read * stride_s, mask=m_s, other=0.0).to(tl.float32)
        p_key = keys + (i_b * HV + i_hv) * (S * 4 * BK) + o_h * KL + o_l
        p_pair = pairs + (i_b * HV + i_hv) * (S * 16)
        p_value = values + (i_b * HV + i_hv) * (S * V) + o_n
        if OUT == "normed":
            p_gate = out_gate + i_b * stride_gb + i_hv * stride_gh + o_n * stride_gv
            b_w = tl.load(norm_weight + o_n * stride_n, mask=m_n, other=0.0).to(tl.float32)
        for r in tl.static_range(S // SPAN):
            deltas = ()
            for i in tl.static_range(SPAN):
                p_t = p_key + (r * SPAN + i) * (4 * BK)
                p_a = p_pair + (r * SPAN + i) * 16
                b_v = tl.load(p_value + (r * SPAN + i) * V, mask=m_n, other=0.0)
                b_x = b_v - _read(b_s, p_t)
                b_x *= tl.load(p_a + i)
                for s in tl.static_range(i):
                    b_x -= tl.load(p_a + s) * deltas[s]
                deltas = deltas + (b_x,)
                if OUT != "none":
                    b_o = _read(b_s, p_t + BK)
                    for s in tl.static_range(i + 1):
                        b_o += tl.load(p_a + 8 + s) * deltas[s]
                    if OUT == "normed":
                        b_g = tl.load(p_gate + (r * SPAN + i) * stride_gs, mask=m_n, other=0.0).to(tl.float32)
                        b_o = tl.where(m_n, b_o, 0.0)
                        b_o *= tl.rsqrt(tl.sum(b_o * b_o, 0) * inverse + eps) * b_w / (1.0 + tl.exp(-b_g))
                    tl.store(p_out + (r * SPAN + i) * stride_os, b_o.to(out.dtype.element_ty), m_n)
            if STORE or r + 1 < S // SPAN:
                b_s *= tl.load(p_key + (r * SPAN + SPAN - 1) * (4 * BK) + 3 * BK)
                for i in tl.static_range(SPAN):
                    b_s += deltas[i][:, None, None] * tl.load(p_key + (r * SPAN + i) * (4 * BK) + 2 * BK)
                if SPAN < S:
                    b_s = b_s.to(state.dtype.element_ty).to(tl.float32)
        if STORE:
            if KH * KL * BV < 4096:
                tl.debug_barrier()  # a small tile may lie in several lanes at once: all read, then one writes
            tl.store(p_state + write * stride_s, b_s.to(state.dtype.element_ty), m_s)
    elif OUT == "normed":
        for t in tl.static_range(S):
            tl.store(p_out + t * stride_os, tl.zeros([BV], out.dtype.element_ty), m_n)


# What changes from step to step: none of these values may be compiled in. Strides that are usually 1 have no type: it
# would keep that from the compiler, and loads would be cut in single elements (ten times as long).
kernel = triton.jit(
    _kernel,
    do_not_specialize=["HV", "slots", "null_slot", "stride_read", "stride_write", "stride_acc"],
    do_not_specialize_on_alignment=["read_slots", "write_slots", "accepted"],
)


def advance(
    handed, state, slots: int, read_slots, write_slots, accepted, *, span: int, null_slot, store: bool,
    out=None, out_gate=None, norm_weight=None, norm_eps: float = 1.0, config: Config | None = None,
) -> None:  # fmt: skip
    """Launches the kernel; arguments as the module's docstring says. No sync, no allocation.

    out without out_gate is "raw", with it "normed". slots: size of the smaller pool. A given config overrides `choose`.
    """
    keys, pairs, values = handed
    B, HV, S, V = values.shape
    K = state.shape[3]
    outputs = "none" if out is None else "raw" if out_gate is None else "normed"
    config = config or choose(Shape(K, V, state.element_size(), outputs, span), arch(state.device))
    zero = (0, 0, 0, 0)
    with current(state.device):
        kernel[(B * HV * cdiv(V, config.values),)](
            keys, pairs, values, state, read_slots, write_slots, accepted, out_gate, norm_weight, out,
            HV, slots, -1 if null_slot is None else null_slot, float(norm_eps), 1.0 / V, *state.stride(),
            *(zero if out_gate is None else out_gate.stride()), *(zero if out is None else out.stride()),
            0 if norm_weight is None else norm_weight.stride(0), read_slots.stride(0), write_slots.stride(0),
            0 if accepted is None else accepted.stride(0),
            S=S, SPAN=span, K=K, V=V, BK=keys.shape[-1], BV=config.values, KL=config.lanes, OUT=outputs, STORE=store,
            **config.options,
        )  # fmt: skip
