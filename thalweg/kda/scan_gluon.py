"""The serial pass of KDA prefill on Hopper: `scan` with the chain of products kept apart from everything beside it.

    y = -Kp S      R = inverse v + inverse y      S <- exp(Gc) S + R^T Ke      each waits for the one before
    o = Qp S + Aqk R                                                           beside them, stored a chunk later

Formulas, arguments and contract are those of `scan`, whose bf16 form this is; transposed, so that what changes is the
left operand of its products and stays in registers. v is no part of what is rounded here, y alone is: errors at slow
gates 3.4e-3 (output) and 1.7e-3 (state), 3.7e-3 and 2.4e-3 if v - Kp S is rounded. Warps of their own copy the tiles,
up to STAGES chunks ahead; four others compute.

What one warp a scheduler issues counts as much as what the tensor cores do, and a product of 32 columns takes them
little less than one of 64: so Kp and Qp, and the halves of the inverse, share one product each. In order:

    S [Kp | Qp], v [high | low] | last o stored, stage freed | y [high | low] | S decayed | halves of R | R Ke, Aqk R

The copying warps come first, and pass no barrier but those of all threads: the first warps of a `warp_specialize` give
the others orders through a word of shared memory, and where they have passed more barriers than those others, racecheck
takes that for a race, whatever lies in between (`tools/racecheck_orders.cu`). Only those that compute need any.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from thalweg.device import arch, current
from thalweg.gluon import BARRIERS, bulk_load, bulk_store, no_barriers, thread, thread_barrier

COMPUTING = gl.constexpr(224)  # registers a lane of the computing warps; the others keep 32, at 24 they spill look-ups
OFFSETS = gl.constexpr(128)  # sequence offsets read at once, four a lane


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences."""

    K: int
    V: int
    out_dtype: torch.dtype


@dataclass(frozen=True)
class Config:
    values: int  # of V a program
    stages: int
    num_warps: int  # of those that copy, a group, so that as many others may issue a wgmma; two of them do copy
    max_registers: int  # a lane on average: the copying warps give most of theirs to the others
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "maxnreg": self.max_registers, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device that takes it: sm_90, K = 128, bfloat16."""
    return Config(64, 3, 4, 128, "64 rows are one wgmma; three stages of 35 KB leave room for two programs")


@gluon.jit
def _span(cu_seqlens, stride, i_n, N, T, C: gl.constexpr):
    """`chunks.span`: first token of sequence i_n, the one past its last, the number of its first chunk."""
    ROW: gl.constexpr = gl.BlockedLayout([OFFSETS // 32], [32], [4], [0])  # each warp holds all: none waits
    start, end = 0, 0
    for first in range(0, i_n + 2, OFFSETS):
        o_cu = first + gl.arange(0, OFFSETS, ROW)
        b_cu = gl.load(cu_seqlens + o_cu.to(gl.int64) * stride, mask=o_cu <= N, other=0).to(gl.int64)
        b_cu = gl.minimum(gl.maximum(b_cu, 0), T).to(gl.int32)
        start = gl.maximum(start, gl.max(gl.where(o_cu <= i_n, b_cu, 0), 0))
        end = gl.maximum(end, gl.max(gl.where(o_cu <= i_n + 1, b_cu, 0), 0))
    return start, end, start // C + i_n + 1


@gluon.jit
def _good(slot, slots, null_slot):
    return (slot >= 0) & (slot < slots) & (slot != null_slot)


@gluon.jit
def _work(
    cu_seqlens, read_slots, write_slots, fresh, T, N, first, count, HV, slots, null_slot,
    stride_cu, stride_read, stride_write, stride_fresh, V: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """What a program does, looked up by each set of warps for itself: slice of V, head and sequence; first token, count
    of tokens, number of the first chunk; chunks of this launch, from the first to the one past the last; where its
    state is read (-1: it begins with zeros) and written (-1: padding).
    """
    i_v = gl.program_id(0) % (V // 64)
    i_hv = gl.program_id(0) // (V // 64) % HV
    # The last sequences first: what was handed over for them is still in the L2 (565 us for 569 at 16 x 512).
    i_n = N - 1 - gl.program_id(0) // (V // 64) // HV
    read = gl.load(read_slots + i_n.to(gl.int64) * stride_read).to(gl.int64)
    write = gl.load(write_slots + i_n.to(gl.int64) * stride_write).to(gl.int64)
    anew = False
    if fresh is not None:
        anew = gl.load(fresh + i_n.to(gl.int64) * stride_fresh) != 0
    live = _good(write, slots, null_slot) & (anew | _good(read, slots, null_slot))
    start, end, base = _span(cu_seqlens, stride_cu, i_n, N, T, C)
    i_first = gl.maximum(first - base, 0)
    i_last = gl.minimum(first + count - base, (end - start + C - 1) // C)
    return (
        i_v, i_hv, i_n, start, end - start, base, i_first, i_last, gl.where(anew, -1, read), gl.where(live, write, -1)
    )  # fmt: skip


@no_barriers
def _begin(full, free, STAGES: gl.constexpr):
    """Seen by all when `warp_specialize` begins, with a barrier of all threads."""
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()


@no_barriers
def _copy(
    kq, ke, xx, aqk, decays, v, tiles, full, free, row, token, o_hv, HV, n, C: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copies the tiles of n chunks, each into the next free stage. The second warp copies half of a tile 128 wide: a
    stage is full when both have, so neither runs ahead. The others must not wait: nobody waits for them, and two phases
    late they would wait for ever. They come by where there are barriers.
    """
    s_kq, s_ke, s_x, s_a, s_d, s_v = tiles
    for i in range(n):
        s = i % STAGES
        bar = full.index(s)
        mbarrier.wait(free.index(s), (i // STAGES & 1) ^ 1, pred=thread() < 64)
        mbarrier.expect(bar, 3 * C * 128 * 2 + 3 * C * C * 2 + 128 * 4 + C * 64 * 2)
        i_row = row + i * HV
        bulk_load(kq, [i_row * (3 * C), 0], bar, s_kq.index(s))
        bulk_load(v, [token + i * C, o_hv], bar, s_v.index(s))
        bulk_load(xx, [i_row * (3 * C), 0], bar, s_x.index(s))
        bulk_load(decays, [i_row, 0], bar, s_d.index(s))
        bulk_load(ke, [i_row * (3 * C) + 2 * C, 0], bar, s_ke.index(s))
        bulk_load(aqk, [i_row * (3 * C) + 2 * C, 0], bar, s_a.index(s))


@gluon.jit
def _produce(
    kq, ke, xx, aqk, decays, v, tiles, full, free, cu_seqlens, read_slots, write_slots, fresh,
    T, N, first, count, HV, slots, null_slot, stride_cu, stride_read, stride_write, stride_fresh,
    V: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of the program's chunks. Nothing that depends on memory is handed over between the warps: Triton
    would pass it through shared memory.
    """
    i_v, i_hv, i_n, start, tokens, base, i_first, i_last, read, write = _work(
        cu_seqlens, read_slots, write_slots, fresh, T, N, first, count, HV, slots, null_slot,
        stride_cu, stride_read, stride_write, stride_fresh, V, C,
    )  # fmt: skip
    n = gl.where((write >= 0) & ((thread() < 64) | BARRIERS), i_last - i_first, 0)
    row, token = (base + i_first - first) * HV + i_hv, start + i_first * C
    _copy(kq, ke, xx, aqk, decays, v, tiles, full, free, row, token, i_hv * V + i_v * 64, HV, n, C, STAGES)


@gluon.jit
def _clear_tail(s_v, left, RHS: gl.constexpr, C: gl.constexpr):
    """Rows of v past the end of the sequence may hold anything; the product multiplies them by zeros."""
    o_c = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, RHS)), 0)
    b_v = s_v.permute((1, 0)).load(RHS)
    thread_barrier()
    s_v.permute((1, 0)).store(gl.where(o_c < left, b_v, 0.0))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _halves(b, LEFT: gl.constexpr):
    """b = high + low in bf16, high cut off and not rounded: one instruction a pair, and 2^-16 of b is lost."""
    b_high = (b.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return gl.convert_layout(b_high.to(gl.bfloat16), LEFT), gl.convert_layout((b - b_high).to(gl.bfloat16), LEFT)


@gluon.jit
def _apart(b, HALF: gl.constexpr):
    """The two halves of the columns of b."""
    b0, b1 = gl.split(gl.permute(gl.reshape(b, [b.shape[0], 2, b.shape[1] // 2]), (0, 2, 1)))
    return gl.convert_layout(b0, HALF), gl.convert_layout(b1, HALF)


@gluon.jit
def _mark(b_s, p_state, stride_s, past, tokens, checkpoint_slots, slots, null_slot, every, marks, stride_mj):
    """Stores the state after `past` chunks where that is a checkpoint."""
    C: gl.constexpr = 32
    j = past // (every // C) - 1
    if (past % (every // C) == 0) & (past * C <= tokens) & (j < marks):
        mark = gl.load(checkpoint_slots + j.to(gl.int64) * stride_mj).to(gl.int64)
        if _good(mark, slots, null_slot):
            gl.store(p_state + mark * stride_s, b_s.to(p_state.dtype.element_ty))


@gluon.jit
def _advance(
    b_s, tiles, full, free, s_o, p_out, n, i_first, tokens, token, o_hv,
    p_state, stride_s, checkpoint_slots, slots, null_slot, every, marks, stride_mj,
    STATE: gl.constexpr, RHS: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The state after n chunks, and the outputs of the last one; those of the others are stored here."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, RHS, 2)
    LEFT_S: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    s_kq, s_ke, s_x, s_a, s_d, s_v = tiles
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * C, 16])
    b_none = gl.zeros([64, 2 * C], gl.float32, BOTH)
    b_zero = gl.zeros([64, C], gl.float32, RHS)
    b_o = b_zero
    for i in range(n):
        s = i % STAGES
        left = tokens - (i_first + i) * C
        b_sb = gl.convert_layout(b_s.to(gl.bfloat16), LEFT_S)
        mbarrier.wait(full.index(s), i // STAGES & 1)
        if left < C:
            _clear_tail(s_v.index(s), left, RHS, C)
        w_c = warpgroup_mma(b_sb, s_kq.index(s).permute((1, 0)), b_none, use_acc=False, is_async=True)
        w_r = warpgroup_mma(
            s_v.index(s).permute((1, 0)), s_x.index(s).permute((1, 0)), b_none, use_acc=False, is_async=True
        )
        if i > 0:
            s_o.index(i % 2).permute((1, 0)).store(b_o.to(gl.bfloat16))
            fence_async_shared()
            tma.store_wait(0)
            thread_barrier()
            bulk_store(p_out, [token + (i - 1) * C, o_hv], s_o.index(i % 2))
            mbarrier.arrive(free.index((i + STAGES - 1) % STAGES))
        b_y, b_q = _apart(warpgroup_mma_wait(1, [w_c]), RHS)
        b_y = gl.convert_layout(b_y.to(gl.bfloat16), LEFT)
        w_r = warpgroup_mma(b_y, s_x.index(s).permute((1, 0)), w_r, is_async=True)
        b_s = b_s * s_d.index(s).load(STATE)
        b_r, b_rl = _apart(warpgroup_mma_wait(0, [w_r]), RHS)
        b_high, b_low = _halves(b_r + b_rl, LEFT)
        w_s = warpgroup_mma(b_low, s_ke.index(s), b_s, is_async=True)
        w_s = warpgroup_mma(b_high, s_ke.index(s), w_s, is_async=True)
        w_o = warpgroup_mma(b_low, s_a.index(s).permute((1, 0)), b_zero, use_acc=False, is_async=True)
        w_o = warpgroup_mma(b_high, s_a.index(s).permute((1, 0)), w_o, is_async=True)
        b_s, b_o = warpgroup_mma_wait(0, [w_s, w_o])
        b_o = b_o + b_q
        if checkpoint_slots is not None:
            _mark(
                b_s, p_state, stride_s, i_first + i + 1, tokens, checkpoint_slots, slots, null_slot, every, marks,
                stride_mj,
            )  # fmt: skip
    return b_s, b_o


@gluon.jit
def _consume(
    tiles, full, free, s_o, p_out, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots, carry, out,
    T, N, first, count, HV, slots, null_slot, every, marks, turn, stride_cu, stride_s, stride_sh, stride_sv, stride_sk,
    stride_read, stride_write, stride_fresh, stride_mn, stride_mj, stride_ot, stride_oh, stride_od,
    V: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Everything but the copies."""
    BV: gl.constexpr = 64
    K: gl.constexpr = 128
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    RHS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    i_v, i_hv, i_n, start, tokens, base, i_first, i_last, read, write = _work(
        cu_seqlens, read_slots, write_slots, fresh, T, N, first, count, HV, slots, null_slot,
        stride_cu, stride_read, stride_write, stride_fresh, V, C,
    )  # fmt: skip
    o_v = i_v * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, STATE)), 1)
    o_k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, STATE)), 0)
    o_rv = i_v * BV + gl.expand_dims(gl.arange(0, BV, gl.SliceLayout(1, RHS)), 1)
    o_c = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, RHS)), 0)
    out += start.to(gl.int64) * stride_ot + i_hv.to(gl.int64) * stride_oh
    if (i_first < i_last) & (write >= 0):
        # Rows first, in 64 bits: what is left is a constant distance from a lane's first channel.
        p_state = state + i_hv.to(gl.int64) * stride_sh + o_v.to(gl.int64) * stride_sv + o_k * stride_sk
        p_carry = carry + (i_hv.to(gl.int64) * V + o_v) * K + o_k
        flip = HV.to(gl.int64) * V * K
        if i_first > 0:
            b_s = gl.load(p_carry + turn * flip)
        else:
            b_s = gl.load(p_state + read * stride_s, mask=(o_v >= 0) & (read >= 0), other=0.0).to(gl.float32)
        if checkpoint_slots is not None:
            checkpoint_slots += i_n.to(gl.int64) * stride_mn
        b_s, b_o = _advance(
            b_s, tiles, full, free, s_o, p_out, i_last - i_first, i_first, tokens, start + i_first * C,
            i_hv * V + i_v * BV, p_state, stride_s, checkpoint_slots, slots, null_slot, every, marks, stride_mj,
            STATE, RHS, C, STAGES,
        )  # fmt: skip
        o_row = i_last * C - C + o_c
        o_out = o_row.to(gl.int64) * stride_ot + o_rv * stride_od
        gl.store(out + o_out, b_o.to(out.dtype.element_ty), mask=(o_row < tokens) & (o_rv >= 0))
        if i_last * C < tokens:
            gl.store(p_carry + (1 - turn) * flip, b_s)
        else:
            gl.store(p_state + write * stride_s, b_s.to(state.dtype.element_ty))
        tma.store_wait(0)
    else:
        for i in range(i_first, i_last):
            o_row = i * C + o_c
            o_out = o_row.to(gl.int64) * stride_ot + o_rv * stride_od
            gl.store(out + o_out, gl.zeros([BV, C], out.dtype.element_ty, RHS), mask=(o_row < tokens) & (o_rv >= 0))


def _kernel(
    kq, ke, xx, aqk, decays, v, p_out, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots, carry, out,
    T, N, first, count, HV, slots, null_slot, every, marks, turn, stride_cu, stride_s: gl.int64, stride_sh: gl.int64,
    stride_sv, stride_sk, stride_read, stride_write, stride_fresh, stride_mn, stride_mj,
    stride_ot, stride_oh: gl.int64, stride_od,
    V: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    s_kq = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, 128], WIDE)
    s_ke = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, 128], WIDE)
    s_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, C], NARROW)
    s_a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], NARROW)
    s_d = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], decays.layout)
    s_v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, 64], WIDE)
    s_o = gl.allocate_shared_memory(gl.bfloat16, [2, C, 64], WIDE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    _begin(full, free, STAGES)
    tiles = (s_kq, s_ke, s_x, s_a, s_d, s_v)
    gl.warp_specialize(
        [
            (_produce, (
                kq, ke, xx, aqk, decays, v, tiles, full, free, cu_seqlens, read_slots, write_slots, fresh, T, N, first,
                count, HV, slots, null_slot, stride_cu, stride_read, stride_write, stride_fresh, V, C, STAGES,
            )),
            (_consume, (
                tiles, full, free, s_o, p_out, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots,
                carry, out, T, N, first, count, HV, slots, null_slot, every, marks, turn, stride_cu, stride_s,
                stride_sh, stride_sv, stride_sk, stride_read, stride_write, stride_fresh, stride_mn, stride_mj,
                stride_ot, stride_oh, stride_od, V, C, STAGES,
            )),
        ],
        [4], [COMPUTING],
    )  # fmt: skip


# What changes from step to step: none of these values may be compiled in.
kernel = gluon.jit(
    _kernel,
    do_not_specialize=["T", "N", "HV", "first", "count", "slots", "null_slot", "every", "marks", "turn", "stride_cu",
                       "stride_read", "stride_write", "stride_fresh", "stride_mn", "stride_mj"],
    do_not_specialize_on_alignment=["cu_seqlens", "read_slots", "write_slots", "fresh", "checkpoint_slots"],
)  # fmt: skip


def _tiles(x: torch.Tensor, rows: int, columns: int, swizzle: int) -> TensorDescriptor:
    """A view of rows of a 2-D tensor, copied in tiles."""
    layout = gl.NVMMASharedLayout(swizzle, 8 * x.element_size(), 2)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


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
    """Launches the kernel, a program a sequence, head and slice of V; arguments as `scan.scan` takes them.

    No sync, no allocation. A given config overrides `choose`.
    """
    (T, HV, V), N = v.shape, cu_seqlens.shape[0] - 1
    count, _, _, C, K = factors.shape
    if N == 0:
        return
    config = config or choose(Shape(K, V, out.dtype), arch(v.device))
    flat = [x.as_strided((T, HV * V), (x.stride(0), 1)) for x in (v, out)]
    marks = checkpoint_slots.shape[1] if checkpoint_slots is not None else 0
    with current(v.device):
        kernel[(N * HV * (V // config.values),)](
            _tiles(factors.view(-1, K), 2 * C, K, 128), _tiles(factors.view(-1, K), C, K, 128),
            _tiles(pairs.view(-1, C), 2 * C, C, 64), _tiles(pairs.view(-1, C), C, C, 64),
            _tiles(decays.view(-1, K), 1, K, 0), *(_tiles(x, C, config.values, 128) for x in flat), cu_seqlens, state,
            read_slots, write_slots, fresh, checkpoint_slots, carry, out,
            T, N, first, count, HV, state.shape[0], -1 if null_slot is None else null_slot, checkpoint_every or 1,
            marks, turn, cu_seqlens.stride(0), *state.stride(), read_slots.stride(0), write_slots.stride(0),
            fresh.stride(0) if fresh is not None else 0,
            *(checkpoint_slots.stride() if checkpoint_slots is not None else (0, 0)), *out.stride(),
            V=V, C=C, STAGES=config.stages, **config.options,
        )  # fmt: skip
