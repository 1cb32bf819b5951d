"""Attention row by row, for Hopper in Gluon: `attention`'s slots, units, arithmetic and bits.

A program is a row and KV head. A unit's keys and values lie in shared memory once: the next keys are asked for when the
scores of these are known, the next values when these are summed, so that copies run while the other half is worked on;
three programs a multiprocessor. A lane copies 16 bytes of four tokens: four slots are all it holds.

Products are those of a warp group, tokens or columns their tall side, heads the other: queries, keys, values and
weights are read from shared memory once, where four warps of 16 x 8 products read the queries four times (8,192 rows:
3.98 ms, now 3.87). What is left is what L2 gives: copies alone take as long, all else without them two thirds.

With ids ascending, programs that began together sweep the same keys, which then come out of L2. Left alone they drift
apart (4,096 rows of 128K: 2.48 ms; on picks of 8K, all in L2, 2.0); so a program waits, its first unit already asked
for, until nearly all of the waves before it are done: 2.06 ms. The wait is bounded, and nothing but time depends on it.

    q            [R, Hq, D], k_cache, v_cache [pages, page_tokens, Hkv, D]   one 16-bit dtype; caches contiguous in D,
                 16-byte aligned, pages evenly spaced; D 64, 128 or 256, at most 16 query heads a KV head
    slots        [rows, width] int32, as in `attention`
    done         [1] int32, zero: counts programs that are done; or None, where none waits
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from thalweg.gluon import copy_async, thread_barrier

UNIT = 64
# Programs that run at once, how many of them may be behind when the next begin, and how often one looks (0.6 us each).
# 4,096 rows of 128K / 8,192 of 8K to 68K, ms: none behind 2.08 / 3.84, 20 2.06 / 3.85, 40 2.06 / 3.86, 80 2.10 / 3.87.
WAVE, SLACK, TRIES = 3 * 132, 20, gl.constexpr(200)
MOST_REGISTERS = 168  # three programs a multiprocessor


@gluon.jit
def _fetch(s_x, p, b_slot, stride_t, o_d):
    """Asks for the rows of slots; zeros where there is none."""
    p_x = p + (b_slot.to(gl.int64) * stride_t)[:, None] + o_d[None, :]
    copy_async(s_x, p_x, (b_slot >= 0)[:, None])
    async_copy.commit_group()


@gluon.jit
def _wait_turn(done, WAVE: gl.constexpr, SLACK: gl.constexpr):
    """Waits until most of the programs of the waves before are done; not for ever, and no result depends on it."""
    i_p = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    wanted = i_p // WAVE * WAVE - SLACK
    tries = 0
    while (gl.load(done, volatile=True) < wanted) & (tries < TRIES):
        tries += 1


def _kernel(
    q, k_cache, v_cache, row_request, positions, slots, out_gate, out, first, requests, width, group, scale, v_scale,
    stride_qr, stride_qh, stride_qd, stride_kt, stride_kh, stride_vt, stride_vh, stride_rr, stride_p,
    stride_gr, stride_gh, stride_gd, stride_or, stride_oh, stride_od, taken, done,
    D: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, WAVE: gl.constexpr, SLACK: gl.constexpr,
):  # fmt: skip
    """A program a row and KV head. `first` is the row of the first slots."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    NARROW: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, MMA)
    BM: gl.constexpr = 16
    dtype: gl.constexpr = q.dtype.element_ty
    i_s = gl.program_id(0).to(gl.int64)
    i_r = first + i_s
    if taken is not None and gl.load(taken + i_r // ROWS) > 0:
        return
    i_h = gl.program_id(1)
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LOAD))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    o_s = gl.arange(0, BN, gl.SliceLayout(1, MMA))
    s_k = gl.allocate_shared_memory(dtype, [BN, D], SHARED)
    s_v = gl.allocate_shared_memory(dtype, [BN, D], SHARED)
    p_k = k_cache + i_h.to(gl.int64) * stride_kh
    p_v = v_cache + i_h.to(gl.int64) * stride_vh
    p_slots = slots + i_s * width
    request = gl.load(row_request + i_r * stride_rr)
    live = (request >= 0) & (request < requests) & (gl.load(positions + i_r * stride_p) >= 0)
    hi = gl.where(live, width, 0)
    b_slot = gl.load(p_slots + o_n)
    b_seen = gl.load(p_slots + o_s)
    _fetch(s_k, p_k, b_slot, stride_kt, o_d)
    _fetch(s_v, p_v, b_slot, stride_vt, o_d)
    b_slot = gl.load(p_slots + o_n + BN, mask=o_n + BN < hi, other=-1)
    # Queries, while those are on their way.
    o_m = gl.arange(0, BM, gl.SliceLayout(1, LINE))
    o_c = gl.arange(0, D, gl.SliceLayout(0, LINE))
    p_q = q + i_r * stride_qr + (i_h * group + o_m) * stride_qh
    b_q = gl.load(p_q[:, None] + o_c[None, :] * stride_qd, mask=(o_m < group)[:, None], other=0.0)
    s_q = gl.allocate_shared_memory(dtype, [BM, D], SHARED, b_q)
    s_p = gl.allocate_shared_memory(dtype, [BN, BM], NARROW)
    b_to = gl.zeros([D, BM], gl.float32, MMA)
    b_tm = gl.full([BM], float("-inf"), gl.float32, ROW)
    b_tl = gl.zeros([64, BM], gl.float32, MMA)
    b_none = gl.zeros([BN, BM], gl.float32, MMA)
    b_nones = gl.zeros([D, BM], gl.float32, MMA)
    b_ones = gl.full([64, BN], 1.0, dtype, gl.DotOperandLayout(0, MMA, 2))
    if done is not None and hi > 0:
        _wait_turn(done, WAVE, SLACK)
    for i_j in range(0, hi, BN):
        async_copy.wait_group(1)  # the keys; values may still be on their way
        fence_async_shared()
        thread_barrier()
        w_s = warpgroup_mma(s_k, s_q.permute((1, 0)), b_none, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, [w_s])
        thread_barrier()  # every warp is done with the keys
        _fetch(s_k, p_k, b_slot, stride_kt, o_d)
        b_s = gl.where((b_seen >= 0)[:, None], b_s * scale, float("-inf"))
        b_seen = gl.load(p_slots + o_s + i_j + BN, mask=o_s + i_j + BN < hi, other=-1)
        b_next = gl.load(p_slots + o_n + i_j + 2 * BN, mask=o_n + i_j + 2 * BN < hi, other=-1)
        b_m = gl.max(b_s, 0)
        b_p = gl.exp2(b_s - gl.where(b_m == float("-inf"), 0.0, b_m)[None, :])
        s_p.store(b_p.to(dtype))
        b_new = gl.maximum(b_tm, b_m)
        b_base = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_a = gl.exp2(b_tm - b_base)[None, :]
        b_b = gl.exp2(b_m - b_base)[None, :]
        b_tm = b_new
        async_copy.wait_group(1)  # the values; the next keys may still be on their way
        fence_async_shared()
        thread_barrier()
        w_l = warpgroup_mma(b_ones, s_p, b_none, use_acc=False, is_async=True)
        w_o = warpgroup_mma(s_v.permute((1, 0)), s_p, b_nones, use_acc=False, is_async=True)
        b_l, b_o = warpgroup_mma_wait(0, [w_l, w_o])
        thread_barrier()
        _fetch(s_v, p_v, b_slot, stride_vt, o_d)
        b_tl = _add(b_tl, b_l, b_a, b_b)
        b_to = _add(b_to, b_o, b_a, b_b)
        b_slot = b_next
    async_copy.wait_group(0)
    if done is not None:
        gl.atomic_add(done, 1, sem="relaxed")
    b_l = gl.max(b_tl, 0)[None, :]
    b_o = b_to * (v_scale / gl.where(b_l > 0.0, b_l, 1.0))
    if out_gate is not None:
        o_g = gl.arange(0, BM, ROW)
        o_e = gl.arange(0, D, gl.SliceLayout(1, MMA))
        p_g = out_gate + i_r * stride_gr + (i_h * group + o_g) * stride_gh
        p_g = p_g[None, :] + o_e[:, None] * stride_gd
        b_gate = gl.load(p_g, mask=(o_g < group)[None, :], other=0.0).to(gl.float32)
        b_o = b_o * (1 / (1 + gl.exp(-b_gate)))
    # Queries are done with; whole lines leave from their place.
    s_q.permute((1, 0)).store(gl.where(b_l == 0.0, 0.0, b_o).to(dtype))
    thread_barrier()
    p_o = out + i_r * stride_or + (i_h * group + o_m) * stride_oh
    b_o = s_q.load(LINE).to(out.dtype.element_ty)
    gl.store(p_o[:, None] + o_c[None, :] * stride_od, b_o, mask=(o_m < group)[:, None])


@gluon.jit
def _add(b_to, b_o, b_a, b_b):
    return gl.fma(b_to, b_a.broadcast_to(b_to.shape), b_o * b_b)


kernel = gluon.jit(
    _kernel,
    do_not_specialize=["first", "width", "requests", "stride_rr", "stride_p", "done"],
    do_not_specialize_on_alignment=["row_request", "positions"],
)


def rows(heavy, row_request, positions, slots, out_gate, out, first: int, part: int, requests: int, width: int,
         scales, taken, tile: int, done, wave: int = WAVE, slack: int = SLACK) -> None:  # fmt: skip
    """`part` rows from `first` on, whose slots are given. done: a zero, which counts programs, or None."""
    q, k_cache, v_cache = heavy
    kv_heads = k_cache.shape[2]
    kernel[(part, kv_heads)](
        *heavy, row_request, positions, slots, out_gate, out, first, requests, width, q.shape[1] // kv_heads, *scales,
        *q.stride(), *k_cache.stride()[1:3], *v_cache.stride()[1:3], row_request.stride(0), positions.stride(0),
        *((0, 0, 0) if out_gate is None else out_gate.stride()), *out.stride(), taken, done,
        D=q.shape[2], BN=UNIT, ROWS=tile, WAVE=wave, SLACK=slack, num_warps=4, maxnreg=MOST_REGISTERS,
    )  # fmt: skip
