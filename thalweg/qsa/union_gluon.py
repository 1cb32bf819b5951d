"""Attention of tiles over their unions, for Hopper in Gluon: `union`'s lists, formula and result.

A program is one warpgroup: 64 rows of the product (rows of a tile x query heads of a KV head), steps of 64 tokens, two
programs a multiprocessor. A step's keys and values lie in shared memory once: the next keys are asked for when the
scores of these are known, the next values when these are summed, so that copies run while the other half is worked on.
A lane copies 16 bytes of four tokens: four slots are all it holds.

    q            [R, Hq, D], k_cache, v_cache [pages, page_tokens, Hkv, D]   one 16-bit dtype, D contiguous and 16-byte
                 aligned, pages evenly spaced; D 64, 128 or 256
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from thalweg.gluon import copy_async, thread_barrier

TALL, STEP = 64, 64


@gluon.jit
def _fetch(s_x, p, b_slot, stride_t, o_d):
    """Asks for the rows of slots; zeros where there is none."""
    p_x = p + (b_slot.to(gl.int64) * stride_t)[:, None] + o_d[None, :]
    copy_async(s_x, p_x, (b_slot >= 0)[:, None])
    async_copy.commit_group()


def _kernel(
    q, k_cache, v_cache, counts, slots, masks, out_gate, out, R, ratio, size, group, scale, v_scale,
    stride_qr, stride_qh, stride_qd, stride_kt, stride_kh, stride_vt, stride_vh,
    stride_gr, stride_gh, stride_gd, stride_or, stride_oh, stride_od,
    ROWS: gl.constexpr, D: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """A program a tile and KV head."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // D, D // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = q.dtype.element_ty
    i_t = gl.program_id(0).to(gl.int64)
    i_h = gl.program_id(1)
    n = gl.load(counts + i_t) * ratio
    if n == 0:
        return
    s_k = gl.allocate_shared_memory(dtype, [BN, D], SHARED)
    s_v = gl.allocate_shared_memory(dtype, [BN, D], SHARED)
    o_n = gl.arange(0, BN, gl.SliceLayout(1, LOAD))
    o_d = gl.arange(0, D, gl.SliceLayout(0, LOAD))
    p_k = k_cache + i_h.to(gl.int64) * stride_kh
    p_v = v_cache + i_h.to(gl.int64) * stride_vh
    p_slots = slots + i_t * size
    b_slot = gl.load(p_slots + o_n, mask=o_n < n, other=-1)
    _fetch(s_k, p_k, b_slot, stride_kt, o_d)
    _fetch(s_v, p_v, b_slot, stride_vt, o_d)
    b_slot = gl.load(p_slots + o_n + BN, mask=o_n + BN < n, other=-1)
    # Queries, while those are on their way.
    o_m = gl.arange(0, BM, gl.SliceLayout(1, LINE))
    o_c = gl.arange(0, D, gl.SliceLayout(0, LINE))
    i_r = i_t * ROWS + o_m // group
    m_q = (o_m < ROWS * group) & (i_r < R)
    p_q = q + i_r * stride_qr + (i_h * group + o_m % group) * stride_qh
    b_q = gl.load(p_q[:, None] + o_c[None, :] * stride_qd, mask=m_q[:, None], other=0.0)
    s_q = gl.allocate_shared_memory(dtype, [BM, D], SHARED, b_q)
    o_r = gl.arange(0, BM, ROW) // group
    o_s = gl.arange(0, BN, gl.SliceLayout(0, SCORES))
    p_masks = masks + i_t * (size // 32) * 16 + o_r
    m_r = o_r < ROWS
    b_low = gl.load(p_masks, mask=m_r, other=0)
    b_high = gl.load(p_masks + 16, mask=m_r & (n > 32), other=0)
    b_none = gl.zeros([BM, BN], gl.float32, SCORES)
    b_o = gl.zeros([BM, D], gl.float32, SUMS)
    b_m = gl.full([BM], float("-inf"), gl.float32, ROW)
    b_l = gl.zeros([BM], gl.float32, ROW)
    for i_j in range(0, n, BN):
        async_copy.wait_group(1)  # the keys; values may still be on their way
        fence_async_shared()
        thread_barrier()
        w_s = warpgroup_mma(s_q, s_k.permute((1, 0)), b_none, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, [w_s])
        thread_barrier()  # every warp is done with the keys
        _fetch(s_k, p_k, b_slot, stride_kt, o_d)
        b_word = gl.where((o_s < 32)[None, :], b_low[:, None], b_high[:, None])
        b_s = gl.where(((b_word >> (o_s & 31)[None, :]) & 1) != 0, b_s * scale, float("-inf"))
        p_masks += BN // 2
        b_low = gl.load(p_masks, mask=m_r & (i_j + BN < n), other=0)
        b_high = gl.load(p_masks + 16, mask=m_r & (i_j + BN + 32 < n), other=0)
        b_new = gl.maximum(b_m, gl.max(b_s, 1))
        b_base = gl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = gl.exp2(b_s - b_base[:, None])
        b_decay = gl.exp2(b_m - b_base)
        b_l = b_l * b_decay + gl.sum(b_p, 1)
        b_m = b_new
        b_o = b_o * gl.convert_layout(b_decay, gl.SliceLayout(1, SUMS))[:, None]
        b_p = gl.convert_layout(b_p.to(dtype), LEFT)
        async_copy.wait_group(1)  # the values; the next keys may still be on their way
        fence_async_shared()
        thread_barrier()
        w_o = warpgroup_mma(b_p, s_v, b_o, is_async=True)
        b_next = gl.load(p_slots + o_n + i_j + 2 * BN, mask=o_n + i_j + 2 * BN < n, other=-1)
        b_o = warpgroup_mma_wait(0, [w_o])
        thread_barrier()
        _fetch(s_v, p_v, b_slot, stride_vt, o_d)
        b_slot = b_next
    async_copy.wait_group(0)
    b_scale = gl.where(b_l > 0.0, v_scale / gl.where(b_l > 0.0, b_l, 1.0), 0.0)
    b_scale = gl.convert_layout(b_scale, gl.SliceLayout(1, SUMS))
    b_o = b_o * b_scale[:, None]
    # A zero that the compiler cannot know: else the places of rows and heads are held all through the loop.
    zero = gl.minimum(gl.load(counts + i_t, volatile=True), 0)
    if out_gate is not None:
        o_g = gl.arange(0, BM, gl.SliceLayout(1, SUMS)) + zero
        o_e = gl.arange(0, D, gl.SliceLayout(0, SUMS))
        i_g = i_t * ROWS + o_g // group
        p_g = out_gate + i_g * stride_gr + (i_h * group + o_g % group) * stride_gh
        m_g = (o_g < ROWS * group) & (i_g < R)
        b_gate = gl.load(p_g[:, None] + o_e[None, :] * stride_gd, mask=m_g[:, None], other=0.0).to(gl.float32)
        b_o = gl.where((b_scale > 0.0)[:, None], b_o / (1.0 + gl.exp2(b_gate * -1.4426950408889634)), 0.0)
    s_q.store(b_o.to(dtype))  # queries are done with; whole lines leave from here
    thread_barrier()
    o_m = gl.arange(0, BM, gl.SliceLayout(1, LINE)) + zero
    i_r = i_t * ROWS + o_m // group
    m_q = (o_m < ROWS * group) & (i_r < R)
    p_o = out + i_r * stride_or + (i_h * group + o_m % group) * stride_oh
    gl.store(p_o[:, None] + o_c[None, :] * stride_od, s_q.load(LINE).to(out.dtype.element_ty), mask=m_q[:, None])


kernel = gluon.jit(_kernel, do_not_specialize=["R", "size"])


def attend(heavy, made, out_gate, out: torch.Tensor, ratio: int, scales) -> None:
    """As `union.attend`."""
    q, k_cache, v_cache = heavy
    R, heads, D = q.shape
    kv_heads, tiles = k_cache.shape[2], made.counts.shape[0]
    kernel[(tiles, kv_heads)](
        *heavy, made.counts, made.slots, made.masks, out_gate, out, R, ratio, made.slots.shape[0] // tiles,
        heads // kv_heads, *scales, *q.stride(), *k_cache.stride()[1:3], *v_cache.stride()[1:3],
        *((0, 0, 0) if out_gate is None else out_gate.stride()), *out.stride(),
        ROWS=made.rows, D=D, BM=TALL, BN=STEP, num_warps=4,
    )  # fmt: skip
