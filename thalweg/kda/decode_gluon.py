"""The fused decode step of KDA for Hopper, in Gluon: the formulas and arguments of `decode`, made of `step_gluon`.

A program a query head of a row, and its value heads one after another. A state comes to shared memory in bulk copies,
in parts of 32 rows, each stepped and stored while the next ones arrive. Four warps and few registers: three or four
programs share a multiprocessor, and one's arithmetic hides the others' memory. Bulk copies pass by the queue of
ordinary loads, which returns in order: a history asked for behind a state of 64 KB would wait for it. Parts lie in
shared memory as in the pool, unswizzled, so that a copy is one run of memory (of swizzled ones, of 128-byte pieces, it
takes 4 % more time). Heads lie along the first axis of the grid, so that programs that run at the same time read
neighbouring memory. What the last norm takes of weights and gates is made while the state is on its way, a channel a
lane, and waits in shared memory: eight values a lane made behind the last part would take as long as half a part.

Beyond `decode` it wants: W = 4, last dimensions contiguous, whole heads of state 16-byte aligned.

early: the launch may begin before the kernel in front of it in the stream has ended. Slots, weights, histories and
states are then asked for at once, and everything else, and every store, waits for that kernel.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from thalweg.device import current
from thalweg.gluon import bulk_load, bulk_store, gdc_launch_dependents, gdc_wait, thread_barrier, zero_behind_barrier
from thalweg.kda import step_gluon as step


class Shape(NamedTuple):
    heads: int  # rows times heads
    V: int
    state_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    """parts: of a state that come and go one after another. buffers: places of shared memory for them, each used again
    when its part has been read. store: cache modifier of the state's stores, or "bulk": by bulk copies too, which
    takes a place for every part.
    """

    parts: int
    buffers: int
    store: str
    max_registers: int  # a lane, where one more costs a program its place
    ahead: bool  # what needs no slot is asked for before the slots arrive
    norms_first: bool  # norms of q and k are made before, not behind, the wait for the first part
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": 4, "maxnreg": self.max_registers, "enable_fp_fusion": True}


def choose(shape: Shape) -> Config:
    """The configuration for a shape; a row's bits are the same in all of them. Measured on an H200."""
    parts = shape.V // 32
    # Three programs a multiprocessor fit in shared memory at float32 and 168 registers, four at bfloat16 and 128.
    narrow = shape.state_dtype == torch.bfloat16
    registers = 128 if narrow else 168
    if shape.heads <= 132:
        why = "a program a multiprocessor: what it waits for shows; 3.80 us and not 3.95 at 12 heads, with norms first"
        return Config(parts, parts, ".cs", registers, False, True, why)
    if shape.heads <= 264:
        why = (
            "two programs a multiprocessor, all of a state at once: 11.3 us and not 11.5 at 256 heads, with loads ahead"
        )
        return Config(parts, parts, ".cs", registers, True, True, why)
    if narrow and shape.heads <= 1100:
        return Config(
            parts, parts, ".cs", registers, False, False, "four programs fit: all of a state at once, 9.2 us at 384"
        )
    if shape.heads <= 528 or 792 < shape.heads <= 1100:
        why = (
            "48 KB a program: four a multiprocessor, a wave less (512: 20.4 us and not 22.1, 1,024: 38.9 and not 39.6)"
        )
        return Config(parts, min(parts, 3), "", 128, False, False, why)
    why = "three fill their waves, or waves are many (768: 29.9 us and not 30.3, 2,048: 73.5 and 74.4)"
    return Config(parts, parts, "bulk", registers, False, False, why)


@gluon.jit
def _in_rows_order(parts, GROUPS: gl.constexpr):
    """Sums of groups of rows, part by part, as one vector: 1, 2 or 4 parts."""
    PARTS: gl.constexpr = len(parts)
    if PARTS == 1:
        return parts[0]
    elif PARTS == 2:
        return gl.reshape(gl.permute(gl.join(parts[0], parts[1]), [1, 0]), [GROUPS])
    else:
        b_n = gl.join(gl.join(parts[0], parts[1]), gl.join(parts[2], parts[3]))
        return gl.reshape(gl.permute(b_n, [2, 1, 0]), [GROUPS])


def _kernel(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    A_log, dt_bias, out, desc,
    H, slots, null_slot, norm_eps, lower_bound, scale,
    stride_xb: gl.int64, stride_gb: gl.int64, stride_gh: gl.int64, stride_bb: gl.int64, stride_bh: gl.int64,
    stride_zb: gl.int64, stride_zh: gl.int64, stride_wc, stride_cs: gl.int64, stride_cc: gl.int64, stride_ct: gl.int64,
    stride_s: gl.int64, stride_sh: gl.int64, stride_read: gl.int64, stride_write: gl.int64, stride_dh,
    stride_ob: gl.int64, stride_oh: gl.int64,
    K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, GROUP: gl.constexpr, GATE: gl.constexpr, DOUBLED: gl.constexpr,
    PACKED: gl.constexpr, PARTS: gl.constexpr, BUFFERS: gl.constexpr, STORE: gl.constexpr,
    AHEAD: gl.constexpr, NORMS_FIRST: gl.constexpr, EARLY: gl.constexpr, num_warps: gl.constexpr,
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
    GROUPS: gl.constexpr = V // step.ROW_GROUP
    LO: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    ALL: gl.constexpr = gl.BlockedLayout([GROUPS], [32], [num_warps], [0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BYTES: gl.constexpr = ROWS * K * (state.dtype.element_ty.primitive_bitwidth // 8)
    RATE: gl.constexpr = A_log is not None
    i_b = gl.program_id(1).to(gl.int64)
    i_q = gl.program_id(0)
    if not AHEAD:
        read, write, live = step.row_slots(read_slots, write_slots, i_b, stride_read, stride_write, slots, null_slot)
    # Objects of their own: the compiler puts a barrier of all threads between uses of parts of one.
    m_s, m_b = (), ()
    for _ in gl.static_range(BUFFERS):
        m_s = m_s + (gl.allocate_shared_memory(state.dtype.element_ty, [ROWS, K], desc.layout),)
    for part in gl.static_range(PARTS):
        m_b = m_b + (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(m_b[part], count=1)
    fence_async_shared()
    thread_barrier()  # before any other load: the fence would wait for it
    if GROUP == 1:  # now, and not when it is known whether the row is live: loads would wait for that
        for part in gl.static_range(PARTS):
            mbarrier.expect(m_b[part], BYTES)
    if AHEAD:
        s_read = gl.load(read_slots + i_b * stride_read)
        s_write = gl.load(write_slots + i_b * stride_write)
    m_y = gl.allocate_shared_memory(gl.float32, [C], PLAIN)
    m_n = gl.allocate_shared_memory(gl.float32, [GROUPS], PLAIN)
    m_w = gl.allocate_shared_memory(gl.float32, [V], PLAIN)
    m_z = gl.allocate_shared_memory(gl.float32, [V], PLAIN)
    o_o = gl.arange(0, V, layout=LO)
    o_v = gl.arange(0, ROWS, layout=LV)
    o_s = o_v[:, None] * K + gl.arange(0, K, layout=LK)[None, :]
    for j in range(GROUP):
        i_h = i_q * GROUP + j
        p_z = out_gate + i_b * stride_zb + i_h * stride_zh + o_o
        b_n = gl.load(norm_weight + o_o)
        if not EARLY:
            b_x, b_g, beta = step.token(
                qkv, g_raw, beta_logits, i_b, i_q, i_h, H,
                stride_xb, stride_gb, stride_gh, stride_bb, stride_bh, K, V, C, LC,
            )  # fmt: skip
            b_z = gl.load(p_z)
        b_w, b_cb, b_db, rate = step.weights(
            conv_weight, conv_bias, A_log, dt_bias, i_q, i_h, H, stride_wc, stride_dh, K, V, C, PACKED, LC, LT
        )  # fmt: skip
        if AHEAD:  # all that needs no slot has been asked for before anything waits for the slots
            zero = zero_behind_barrier(i_q)
            read = s_read + zero
            write = s_write + zero
            live = step.good(read, slots, null_slot) & step.good(write, slots, null_slot)
            read = read.to(gl.int64)
            write = write.to(gl.int64)
        b_h = step.history(conv_state, read, i_q, i_h, H, live, stride_cs, stride_cc, stride_ct, K, V, C, LC, LT)
        row = (read * (stride_s // K) + i_h * (stride_sh // K)).to(gl.int32)
        if GROUP > 1:
            for part in gl.static_range(PARTS):
                mbarrier.expect(m_b[part], BYTES, pred=live)
        for part in gl.static_range(BUFFERS):
            bulk_load(desc, [row + part * ROWS, 0], m_b[part], m_s[part], pred=live)
        if EARLY:
            gdc_wait()
            gdc_launch_dependents()
            b_x, b_g, beta = step.token(
                qkv, g_raw, beta_logits, i_b, i_q, i_h, H,
                stride_xb, stride_gb, stride_gh, stride_bb, stride_bh, K, V, C, LC,
            )  # fmt: skip
            b_z = gl.load(p_z)
        p_o = out + i_b * stride_ob + i_h * stride_oh + o_v
        if live:
            step.roll(
                conv_state, b_x, b_h, write, i_q, i_h, H, j == GROUP - 1, stride_cs, stride_cc, stride_ct,
                K, V, C, LC, LT,
            )  # fmt: skip
            m_y.store(step.mixed(b_x, b_h, b_w, b_cb, b_g, b_db, rate, lower_bound, RATE, GATE, K, C, LC, LT))
            # Now, while the state is on its way, and by one lane each: the last part's norm waits for nothing else.
            m_w.store(b_n.to(gl.float32))
            m_z.store(step.sigmoid(b_z.to(gl.float32)))
            thread_barrier()
            b_q, b_k, b_a, rq, rk, kq = step.vectors(m_y, scale, K, LK)
            b_beta = step.write_strength(beta, DOUBLED)
            b_o, b_sums = (), ()
            p_s = state + write * stride_s + i_h * stride_sh + o_s
            new = (write * (stride_s // K) + i_h * (stride_sh // K)).to(gl.int32)
            for part in gl.static_range(PARTS):
                if NORMS_FIRST and part == 0:  # + 0, which the compiler cannot know: norms and beta before the wait
                    mbarrier.wait(m_b[part], j % 2 + (rk + kq * kq + b_beta < 0.0).to(gl.int32))
                else:
                    mbarrier.wait(m_b[part], j % 2)
                b_s = m_s[part % BUFFERS].load(LS)
                if part + BUFFERS < PARTS:
                    thread_barrier()  # all of it has been read: another part may come
                    bulk_load(desc, [row + (part + BUFFERS) * ROWS, 0], m_b[part + BUFFERS], m_s[part % BUFFERS])
                b_v = m_y.slice(FIRST + part * ROWS, ROWS).load(LV)
                b_s, b_r, b_sum = step.advance(b_s, b_q, b_k, b_a, rq, rk, kq, b_beta, b_v, ROWS)
                b_s = b_s.to(state.dtype.element_ty)
                if STORE == "bulk":
                    m_s[part].store(b_s)
                    fence_async_shared()
                    thread_barrier()
                    bulk_store(desc, [new + part * ROWS, 0], m_s[part])
                else:
                    gl.store(p_s + part * ROWS * K, b_s, cache_modifier=STORE)
                b_o, b_sums = b_o + (b_r,), b_sums + (b_sum,)
            m_n.store(_in_rows_order(b_sums, GROUPS))
            thread_barrier()
            inverse = step.inverse_rms(m_n, norm_eps, V, ALL)
            for part in gl.static_range(PARTS):
                b_r = b_o[part] * inverse * m_w.slice(part * ROWS, ROWS).load(LV)
                b_r *= m_z.slice(part * ROWS, ROWS).load(LV)
                gl.store(p_o + part * ROWS, b_r.to(out.dtype.element_ty))
            if STORE == "bulk":
                tma.store_wait(0)  # memory of a program that ends belongs to another
            if GROUP > 1:
                thread_barrier()  # everything of this head has been read: the next one's may come
        else:
            for part in gl.static_range(PARTS):
                gl.store(p_o + part * ROWS, gl.zeros([ROWS], out.dtype.element_ty, LV))


kernel = gluon.jit(_kernel, **step.UNSPECIALIZED)


def decode(*, config: Config | None = None, **call) -> None:
    """Launches the kernel, a program a row and query head; call: the op's arguments. No sync, no allocation.

    A given config overrides `choose`.
    """
    state, out, early = call["state"], call["out"], call.pop("early", False)
    B, HV, V = out.shape
    if B == 0:
        return
    config = config or choose(Shape(B * HV, V, state.dtype))
    K, layout = state.shape[3], gl.NVMMASharedLayout(0, 8 * state.element_size(), 2)
    desc = TensorDescriptor(state, [step.pool_rows(state), K], [K, 1], [V // config.parts, K], layout)
    positional, constants = step.arguments(**call, desc=desc)
    options = config.options | ({"launch_pdl": True} if early else {})
    with current(state.device):
        kernel[(HV // constants["GROUP"], B)](
            *positional, **constants, PARTS=config.parts, BUFFERS=config.buffers, STORE=config.store,
            AHEAD=config.ahead, NORMS_FIRST=config.norms_first, EARLY=early, **options,
        )  # fmt: skip
