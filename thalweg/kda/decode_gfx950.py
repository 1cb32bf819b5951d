"""The fused decode step of KDA for gfx950 (CDNA4), in Gluon: the formulas and arguments of `decode`.

It compiles for the chip and has not been timed, nor run, on one. Its arithmetic is that of `decode_gluon`, which runs
on Hopper: both are made of `step_gluon`, and differ in what is below only. A wave has 64 lanes, so 8 along K leave 8
beside each other with two rows each: a panel of 16 rows. A program has four waves and all panels of a state under way
at once; they are read and written once, 16 bytes a lane, and pass by the caches (nt).

It takes what `decode_gluon` takes.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thalweg.device import current
from thalweg.gluon import thread_barrier
from thalweg.kda import step_gluon as step

WAVE = gl.constexpr(64)


class Shape(NamedTuple):
    V: int


@dataclass(frozen=True)
class Config:
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape) -> Config:
    """The configuration for a shape; not measured."""
    return Config(max(1, shape.V // 32), "two panels a wave, at most 256 registers a lane: two waves a SIMD")


def _kernel(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    A_log, dt_bias, out, desc,
    H, slots, null_slot, norm_eps, lower_bound, scale,
    stride_xb: gl.int64, stride_gb: gl.int64, stride_gh: gl.int64, stride_bb: gl.int64, stride_bh: gl.int64,
    stride_zb: gl.int64, stride_zh: gl.int64, stride_wc, stride_cs: gl.int64, stride_cc: gl.int64, stride_ct: gl.int64,
    stride_s: gl.int64, stride_sh: gl.int64, stride_read: gl.int64, stride_write: gl.int64, stride_dh,
    stride_ob: gl.int64, stride_oh: gl.int64,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr, DOUBLED: gl.constexpr,
    PACKED: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    LANES: gl.constexpr = step.LANES
    VEC: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
    LS: gl.constexpr = gl.BlockedLayout([2, VEC], [WAVE // LANES, LANES], [num_warps, 1], [1, 0])
    LK: gl.constexpr = gl.SliceLayout(0, LS)
    LV: gl.constexpr = gl.SliceLayout(1, LS)
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [WAVE, 1], [num_warps, 1], [1, 0])
    LC: gl.constexpr = gl.SliceLayout(1, LT)
    GROUPS: gl.constexpr = V // step.ROW_GROUP
    ALL: gl.constexpr = gl.BlockedLayout([GROUPS], [WAVE], [num_warps], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    i_b = gl.program_id(1).to(gl.int64)
    i_h = gl.program_id(0)
    read, write, live = step.row_slots(read_slots, write_slots, i_b, stride_read, stride_write, slots, null_slot)
    b_x, b_g, beta = step.token(
        qkv, g_raw, beta_logits, i_b, i_h, i_h, H, stride_xb, stride_gb, stride_gh, stride_bb, stride_bh, K, V, C, LC
    )  # fmt: skip
    b_w, b_cb, b_db, rate = step.weights(
        conv_weight, conv_bias, A_log, dt_bias, i_h, i_h, H, stride_wc, stride_dh, K, V, C, PACKED, LC, LT
    )  # fmt: skip
    o_v = gl.arange(0, V, layout=LV)
    b_z = gl.load(out_gate + i_b * stride_zb + i_h * stride_zh + o_v)
    b_n = gl.load(norm_weight + o_v)
    p_o = out + i_b * stride_ob + i_h * stride_oh + o_v
    o_s = o_v[:, None] * K + gl.arange(0, K, layout=LK)[None, :]
    if live:
        p_s = state + i_h * stride_sh
        b_h = step.history(conv_state, read, i_h, i_h, H, live, stride_cs, stride_cc, stride_ct, K, V, C, LC, LT)
        b_s = gl.load(p_s + read * stride_s + o_s, cache_modifier=".cg")  # nt in the text, as .cs is of stores
        m_y = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
        m_n = gl.allocate_shared_memory(gl.float32, [GROUPS], PLAIN)
        RATE: gl.constexpr = A_log is not None
        m_y.store(step.mixed(b_x, b_h, b_w, b_cb, b_g, b_db, rate, lower_bound, RATE, GATE, K, C, LC, LT))
        thread_barrier()
        b_q, b_k, b_a, rq, rk, kq = step.vectors(m_y, scale, K, LK)
        b_v = m_y.slice(step.first_value(K, V), V).load(LV)
        b_s, b_o, b_g2 = step.advance(b_s, b_q, b_k, b_a, rq, rk, kq, step.write_strength(beta, DOUBLED), b_v, V)
        gl.store(p_s + write * stride_s + o_s, b_s.to(state.dtype.element_ty), cache_modifier=".cs")
        step.roll(
            conv_state, b_x, b_h, write, i_h, i_h, H, True, stride_cs, stride_cc, stride_ct, K, V, C, LC, LT
        )  # fmt: skip
        m_n.store(b_g2)
        thread_barrier()
        b_o = b_o * step.inverse_rms(m_n, norm_eps, V, ALL) * b_n.to(gl.float32) * step.sigmoid(b_z.to(gl.float32))
        gl.store(p_o, b_o.to(out.dtype.element_ty))
    else:
        gl.store(p_o, gl.zeros([V], out.dtype.element_ty, LV))


kernel = gluon.jit(_kernel, **step.UNSPECIALIZED)


def decode(*, config: Config | None = None, **call) -> None:
    """Launches the kernel, a program a row and head; call: the op's arguments. No sync, no allocation."""
    state, out = call["state"], call["out"]
    B, HV, V = out.shape
    if B == 0:
        return
    config = config or choose(Shape(V))
    positional, constants = step.arguments(**call, desc=None)
    with current(state.device):
        kernel[(HV, B)](*positional, **constants, **config.options)
