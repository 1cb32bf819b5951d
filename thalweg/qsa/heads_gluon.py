"""Scores of 64 keys by the rows of a tile in Gluon, for kernels that store them or compare them.

    score[b, r] = ((relu(q_r0 . key_b) + relu(q_r1 . key_b)) + relu(q_r2 . key_b)) + ...

Keys `[64, D]` are the left operand, in registers, the rows of a head the columns of one wgmma chain: `started` puts up
to four heads' chains in flight, `finished` waits for them in their order and adds. In between the keys' stage in shared
memory may be filled again. A lane holds all heads of its (key, row) pairs: nothing is shuffled, no head is padded.
"""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

KEYS = gl.constexpr(64)  # of a tile: the rows of one wgmma
NAN = gl.constexpr(tl.PropagateNan.ALL)


@gluon.jit
def here(x):
    """x, but unknown to the compiler: what is made of it is made here, and not kept in registers through the loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], gl.int32, is_pure=False, pack=1)


@gluon.jit
def seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v):
    """Request and visible blocks (0: nothing to score) of rows; a request out of range is padding."""
    b_request = gl.load(row_request + o_r * stride_rr, mask=o_r < R, other=-1)
    b_seen = gl.load(visible + o_r * stride_v, mask=o_r < R, other=0)
    b_seen = gl.minimum(gl.maximum(b_seen, 0), most).to(gl.int32)
    good = (b_request >= 0) & (b_request < requests) & (b_seen > least)
    return gl.where(good, b_request, -1).to(gl.int32), gl.where(good, b_seen, 0)


@gluon.jit
def page_row(p_table, i_tile, pages, pitch, stride_tp, PAGE: gl.constexpr):
    """The row, in the pool of keys, of the first key of a key tile; negative, and nowhere, on a hole."""
    i_page = gl.load(p_table + (i_tile * KEYS // PAGE).to(gl.int64) * stride_tp).to(gl.int64)
    good = (i_page >= 0) & (i_page < pages)
    return gl.where(good, i_page * pitch + i_tile * KEYS % PAGE, -KEYS).to(gl.int32)


@gluon.jit
def _product(b_k, s_q, BM: gl.constexpr):
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    b_none = gl.zeros([KEYS, BM], gl.float32, ACC)
    return warpgroup_mma(b_k, s_q.permute((1, 0)), b_none, use_acc=False, is_async=True)


@gluon.jit
def started(b_k, s_q, zero, HEADS: gl.constexpr, BM: gl.constexpr):
    """The products of keys `[64, D]` and the queries `[BM, D]` of the first heads, up to four, in flight."""
    w = ()
    for i_h in gl.static_range(HEADS if HEADS < 4 else 4):
        w = w + (_product(b_k, s_q.index(zero + i_h), BM),)
    return w


@gluon.jit
def finished(w, b_k, s_q, HEADS: gl.constexpr, BM: gl.constexpr):
    """Scores `[64, BM]`: relu of every head's product, added in the order of the heads."""
    b_s = gl.maximum(warpgroup_mma_wait((HEADS if HEADS < 4 else 4) - 1, [w[0]]), 0.0, propagate_nan=NAN)
    for i_h in gl.static_range(1, HEADS):
        if i_h + 3 < HEADS:
            w = w + (_product(b_k, s_q.index(i_h + 3), BM),)
        b_x, b_s = warpgroup_mma_wait(3 if HEADS - i_h > 4 else HEADS - i_h - 1, [w[i_h], b_s])
        b_s = b_s + gl.maximum(b_x, 0.0, propagate_nan=NAN)
    return b_s
