"""Which chunk of which sequence a program owns, found on the device: no host sync, no index list, no workspace.

A pack of T tokens is cut by N + 1 offsets into N + 2 spans: what lies before the first sequence, the N sequences,
what lies behind the last one. Chunk j of span s (C tokens, the last one shorter) has the number

    start(s) // C + s + j

which never repeats, since a span of n tokens has at most n // C + 1 chunks and start(s + 1) = start(s) + n. So T and
N alone bound the grid (`grid`), a few programs find nothing to do, and a program finds its span from its number.
Offsets are read as every op reads them: clipped to [0, T], never decreasing.
"""

import triton
import triton.language as tl

OFFSETS = tl.constexpr(32)  # offsets read at once, one a lane: every warp holds them all, and none waits for another


def grid(tokens: int, sequences: int, chunk: int) -> int:
    """An upper bound of the chunk numbers of a pack, the two uncovered spans among them."""
    return tokens // chunk + sequences + 2


@triton.jit
def _offsets(cu_seqlens, stride, o_cu, N, T):
    b_cu = tl.load(cu_seqlens + o_cu.to(tl.int64) * stride, mask=o_cu <= N, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(b_cu, 0), T).to(tl.int32)


@triton.jit
def place(cu_seqlens, stride, i_chunk, N, T, C: tl.constexpr):
    """Returns the span of chunk number i_chunk (0 and N + 1 are what no sequence covers, sequence i is span i + 1), the
    span's first token, the one past its last, and the chunk's first token; cu_seqlens `[N + 1]` int32 or int64, element
    stride `stride`. A first token at or past the span's end: no such chunk.
    """
    # Offset l puts the start of span k + 1 past i_chunk for every k >= max(l, i_chunk - cu[l] // C): the span sought
    # is the first such k. This needs no sorted offsets, so clipped and never-decreasing comes out by itself.
    i_span = N + 1
    for first in range(0, N + 1, OFFSETS):
        o_cu = first + tl.arange(0, OFFSETS)
        b_past = tl.maximum(o_cu, i_chunk - _offsets(cu_seqlens, stride, o_cu, N, T) // C)
        i_span = tl.minimum(i_span, tl.min(tl.where(o_cu <= N, b_past, N + 1), 0))
    start = 0
    end = 0
    for first in range(0, tl.minimum(i_span, N) + 1, OFFSETS):
        o_cu = first + tl.arange(0, OFFSETS)
        b_cu = _offsets(cu_seqlens, stride, o_cu, N, T)
        start = tl.maximum(start, tl.max(tl.where(o_cu < i_span, b_cu, 0), 0))
        end = tl.maximum(end, tl.max(tl.where(o_cu <= i_span, b_cu, 0), 0))
    end = tl.where(i_span > N, T, end)
    return i_span, start, end, start + (i_chunk - start // C - i_span) * C


@triton.jit
def locate(cu_seqlens, stride, i_chunk, N, T, C: tl.constexpr):
    """Returns the first token of chunk number i_chunk, its count of tokens (at most 0: no such chunk), the sequence
    that covers it, and whether one does.
    """
    i_span, _, end, i_t = place(cu_seqlens, stride, i_chunk, N, T, C)
    return i_t, tl.minimum(end - i_t, C), i_span - 1, (i_span > 0) & (i_span <= N)


@triton.jit
def span(cu_seqlens, stride, i_n, N, T, C: tl.constexpr):
    """Returns the first token of sequence i_n, the one past its last, and the number of its first chunk: chunk j of
    the sequence has that number + j.
    """
    start = 0
    end = 0
    for first in range(0, i_n + 2, OFFSETS):
        o_cu = first + tl.arange(0, OFFSETS)
        b_cu = _offsets(cu_seqlens, stride, o_cu, N, T)
        start = tl.maximum(start, tl.max(tl.where(o_cu <= i_n, b_cu, 0), 0))
        end = tl.maximum(end, tl.max(tl.where(o_cu <= i_n + 1, b_cu, 0), 0))
    return start, end, start // C + i_n + 1
