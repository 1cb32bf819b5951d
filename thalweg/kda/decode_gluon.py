"""The fused decode step of KDA for Hopper, in Gluon: the formulas and arguments of `decode`, made of `step_gluon`.

A program a head. Its state comes to shared memory in bulk copies, in parts of 32 rows, each stepped and stored while
the next ones arrive. Four warps and few registers: three programs share a multiprocessor, four at bfloat16, and one's
arithmetic hides the others' memory. Bulk copies pass by the queue of ordinary loads, which returns in order: a history
asked for behind a state of 64 KB would wait for it. Heads lie along the first axis of the grid, so that programs that
run at the same time read neighbouring memory.

Beyond `decode` it wants: HV = H, W = 4, last dimensions contiguous, whole heads of state 16-byte aligned.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from thalweg.device import current
from thalweg.gluon import bulk_load, thread_barrier
from thalweg.kda import step_gluon as step


class Shape(NamedTuple):
    heads: int  # rows times heads
    V: int
    state_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    """parts: of a state that come and go one after another. store: cache modifier of the state's stores."""

    parts: int
    store: str
    max_registers: int  # a lane, where one more costs a program its place
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": 4, "maxnreg": self.max_registers, "enable_fp_fusion": True}


def choose(shape: Shape) -> Config:
    """The configuration for a shape; a row's bits are the same in all of them."""
    # Three programs a multiprocessor fit in shared memory at float32 and 168 registers, four at bfloat16 and 128.
    registers = 128 if shape.state_dtype == torch.bfloat16 else 168
    if shape.heads < 2000:
        return Config(shape.V // 32, ".cs", registers, "32 rows a part: the first are worked on soon")
    return Config(shape.V // 32, "", registers, "plain stores are 1 % faster from 2,000 heads on")


def _kernel(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    A_log, dt_bias, out, desc,
    H, slots, null_slot, norm_eps, lower_bound, scale,
    stride_xb: gl.int64, stride_gb: gl.int64, stride_gh: gl.int64, stride_bb: gl.int64, stride_bh: gl.int64,
    stride_zb: gl.int64, stride_zh: gl.int64, stride_wc, stride_cs: gl.int64, stride_cc: gl.int64, stride_ct: gl.int64,
    stride_s: gl.int64, stride_sh: gl.int64, stride_read: gl.int64, stride_write: gl.int64, stride_dh,
    stride_ob: gl.int64, stride_oh: gl.int64,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GATE: gl.constexpr, DOUBLED: gl.constexpr, PARTS: gl.constexpr,
    STORE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """desc: the state pool as rows of K, in blocks of ROWS rows."""
    ROWS: gl.constexpr = V // PARTS
    FIRST: gl.constexpr = step.first_value(K, V)
    LANES: gl.constexpr = step.LANES
    VEC: gl.constexpr = 128 // state.dtype.element_ty.primitive_bitwidth
    LS: gl.constexpr = gl.BlockedLayout([2, VEC], [32 // LANES, LANES], [num_warps, 1], [1, 0])
    LK: gl.constexpr = gl.SliceLayout(0, LS)
    LV: gl.constexpr = gl.SliceLayout(1, LS)
    LT: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [num_warps, 1], [1, 0])
    LC: gl.constexpr = gl.SliceLayout(1, LT)
    LO: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    GROUPS: gl.constexpr = V // step.ROW_GROUP
    ALL: gl.constexpr = gl.BlockedLayout([GROUPS], [32], [num_warps], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BYTES: gl.constexpr = ROWS * K * (state.dtype.element_ty.primitive_bitwidth // 8)
    i_b = gl.program_id(1).to(gl.int64)
    i_h = gl.program_id(0)
    read, write, live = step.row_slots(read_slots, write_slots, i_b, stride_read, stride_write, slots, null_slot)
    m_s = gl.allocate_shared_memory(state.dtype.element_ty, [PARTS, ROWS, K], desc.layout)
    m_b = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(m_b.index(part), count=1)
    fence_async_shared()
    # Asked for before the branch, in front of the barriers around the bulk copies: the compiler moves loads down to
    # their uses otherwise, behind waits for others.
    b_x, b_w, b_g, b_cb, b_db, beta, rate = step.row_inputs(
        qkv, g_raw, beta_logits, conv_weight, conv_bias, A_log, dt_bias, i_b, i_h, H,
        stride_xb, stride_gb, stride_gh, stride_bb, stride_bh, stride_wc, stride_dh, K, V, C, LC, LT,
    )  # fmt: skip
    o_o = gl.arange(0, V, layout=LO)
    b_z = gl.load(out_gate + i_b * stride_zb + i_h * stride_zh + o_o)
    b_n = gl.load(norm_weight + o_o)
    p_o = out + i_b * stride_ob + i_h * stride_oh + o_o
    o_v = gl.arange(0, ROWS, layout=LV)
    p_s = state + i_h * stride_sh + o_v[:, None] * K + gl.arange(0, K, layout=LK)[None, :]
    b_h = step.history(conv_state, read, i_h, H, live, stride_cs, stride_cc, stride_ct, K, V, C, LC, LT)
    row = (read * (stride_s // K) + i_h * (stride_sh // K)).to(gl.int32)
    for part in gl.static_range(PARTS):
        mbarrier.expect(m_b.index(part), BYTES, pred=live)
        bulk_load(desc, [row + part * ROWS, 0], m_b.index(part), m_s.index(part), pred=live)
    if live:
        m_y = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
        m_o = gl.allocate_shared_memory(gl.float32, [V], PLAIN)
        m_n = gl.allocate_shared_memory(gl.float32, [GROUPS], PLAIN)
        RATE: gl.constexpr = A_log is not None
        m_y.store(step.mixed(b_x, b_h, b_w, b_cb, b_g, b_db, rate, lower_bound, RATE, GATE, K, C, LC, LT))
        thread_barrier()
        b_q, b_k, b_a, kq = step.vectors(m_y, scale, K, LK)
        p_s += write * stride_s
        for part in gl.static_range(PARTS):
            mbarrier.wait(m_b.index(part), 0)
            m_v = m_y.slice(FIRST + part * ROWS, ROWS)
            m_p = m_n.slice(part * (GROUPS // PARTS), GROUPS // PARTS)
            step.advance(
                m_s.index(part).load(LS), b_q, b_k, b_a, kq, beta, p_s + part * ROWS * K, m_v,
                m_o.slice(part * ROWS, ROWS), m_p, LV, ROWS, DOUBLED, STORE,
            )  # fmt: skip
        step.roll(conv_state, b_x, b_h, write, i_h, H, stride_cs, stride_cc, stride_ct, K, V, C, LC, LT)
        thread_barrier()
        gl.store(p_o, step.normed(b_z, b_n, m_o, m_n, norm_eps, V, LO, ALL).to(out.dtype.element_ty))
    else:
        gl.store(p_o, gl.zeros([V], out.dtype.element_ty, LO))


kernel = gluon.jit(_kernel, **step.UNSPECIALIZED)


def decode(*, config: Config | None = None, **call) -> None:
    """Launches the kernel, a program a row and head; call: the op's arguments. No sync, no allocation.

    A given config overrides `choose`.
    """
    state, out = call["state"], call["out"]
    B, HV, V = out.shape
    if B == 0:
        return
    config = config or choose(Shape(B * HV, V, state.dtype))
    K, layout = state.shape[3], gl.NVMMASharedLayout(128, 8 * state.element_size(), 2)
    desc = TensorDescriptor(state, [step.pool_rows(state), K], [K, 1], [V // config.parts, K], layout)
    positional, constants = step.arguments(**call, desc=desc)
    with current(state.device):
        kernel[(HV, B)](*positional, **constants, PARTS=config.parts, STORE=config.store, **config.options)
