"""The best of the keys that a program holds: integers of a score's order, the k-th found by counting.

Keys are int32 tensors `[SIZE]`, SIZE a power of two: LOWEST what is not there, one more NaN, then the numbers in their
order, -0.0 equal to 0.0. Device functions that `topk` shares between the levels of its tree, and `survivors` uses.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def seen(visible, row_request, i_row, N, requests, stride_v, stride_rr):
    """Blocks that a row sees, within [0, N]; none of a request out of range."""
    n = tl.load(visible + i_row * stride_v).to(tl.int64)
    n = tl.minimum(tl.maximum(n, 0), N).to(tl.int32)
    if row_request is not None:
        i_request = tl.load(row_request + i_row * stride_rr).to(tl.int64)
        n = tl.where((i_request >= 0) & (i_request < requests), n, 0)
    return n


@triton.jit
def order(b_x, m):
    """float32 as int32 of the same order: NaN below every number, what is not there (m false) below NaN."""
    b_i = (b_x + 0.0).to(tl.int32, bitcast=True)
    b_i = tl.where(b_x == b_x, b_i ^ ((b_i >> 31) & 0x7FFFFFFF), LOWEST + 1)
    return tl.where(m, b_i, LOWEST)


@triton.jit
def _log2(x):
    """log2 of a positive float to 0.09: its exponent, and its fraction as if that were a logarithm."""
    return (x.to(tl.int32, bitcast=True) - 0x3F800000).to(tl.float32) * (1.0 / 8388608)


@triton.jit
def search(b_key, least, low, n_low, high, c, slack=0):
    """The greatest key in [low, high) that `least` keys reach, or one found that up to `slack` more reach; and how many
    reach it.

    n_low keys reach low, at least `least`; none reaches high. c is looked at first, then where the line through the
    last two points meets `least`, on the logarithm of the count: right for the tail of most distributions. Every fourth
    time low is raised to the lowest key that reaches it, and the next key tried (equal scores end there), or what is
    left is halved: that bounds the worst case.
    """
    goal = _log2(least.to(tl.float32))
    x_last = low
    y_last = _log2(n_low.to(tl.float32))
    i_step = least * 0
    gap = (high - low).to(tl.uint32)
    off = (c - low).to(tl.uint32)
    while (n_low > least + slack) & (gap > 1):
        if i_step % 4 == 3:
            off = gap // 2
            if i_step % 8 == 3:
                lowest = tl.min(tl.where(b_key >= low, b_key, 0x7FFFFFFF))
                gap -= (lowest - low).to(tl.uint32)
                low = lowest
                off = off * 0 + 1
        c = low + tl.minimum(tl.maximum(off, 1), tl.maximum(gap, 2) - 1).to(tl.int32)
        n = tl.sum((b_key >= c).to(tl.int32))
        reached = n >= least
        y = _log2(tl.maximum(n.to(tl.float32), 0.5))
        way = (goal - y) * (c - x_last).to(tl.float32) / (y - y_last)
        x_last = c
        y_last = y
        gap = tl.where(reached, gap - (c - low).to(tl.uint32), (c - low).to(tl.uint32))
        low = tl.where(reached, c, low)
        n_low = tl.where(reached, n, n_low)
        width = gap.to(tl.float32)
        way = tl.where(reached, way, width + way)
        off = tl.where((way >= 0.0) & (way <= width), way, 0.5 * width).to(tl.uint32)
        i_step += 1
    return low, n_low


@triton.jit
def first(least, low, n_low, high):
    """A first key for `search`, on a line to half a key at high."""
    part = _log2(n_low.to(tl.float32) / least.to(tl.float32)) / _log2(2.0 * n_low.to(tl.float32))
    return low + ((high - low).to(tl.uint32).to(tl.float32) * part).to(tl.uint32).to(tl.int32)


@triton.jit
def gumbel(b_x, m, least, count):
    """Where `least` of `count` maxima would be reached if their mean and deviation were those of a Gumbel law."""
    b_x = tl.where(m & (b_x == b_x), b_x, 0.0)
    size = count.to(tl.float32)
    mean = tl.sum(b_x) / size
    deviation = tl.sqrt(tl.maximum(tl.sum(b_x * b_x) / size - mean * mean, 0.0))
    part = tl.minimum(least.to(tl.float32) / size, 0.999)
    place = -_log2(-_log2(1.0 - part) * 0.6931) * 0.6931 - 0.5772
    c = mean + 0.7797 * place * deviation
    return order(c, c == c)


@triton.jit
def _quads(b_flag, SIZE: tl.constexpr):
    """Flags `[SIZE]` as four int32 tensors `[SIZE / 4]`, of the first, second, third and fourth of each four."""
    b_even, b_odd = tl.split(tl.reshape(b_flag.to(tl.int32), [SIZE // 4, 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@triton.jit
def _before(b_0, b_1, b_2, b_3):
    """How many flags are set before each four."""
    b_n = b_0 + b_1 + b_2 + b_3
    return tl.cumsum(b_n, 0) - b_n


@triton.jit
def put_best(b_key, b_first, least, low, n_low, high, c, p_out, stride, SIZE: tl.constexpr):
    """Writes the ids of the `least` best keys in their order. Returns a key that all of them reach.

    Keys come in fours of consecutive ids from b_first `[SIZE / 4]` on: a lane has a four, which makes counting cheap.
    """
    low, n_low = search(b_key, least, low, n_low, high, c)
    if n_low > least:  # of those equal to the last one the first are taken
        b_0, b_1, b_2, b_3 = _quads(b_key == low, SIZE)
        b_left = tl.sum(b_0 + b_1 + b_2 + b_3) - (n_low - least) - _before(b_0, b_1, b_2, b_3)
        b_even = tl.join((b_left > 0).to(tl.int32), (b_left > b_0 + b_1).to(tl.int32))
        b_odd = tl.join((b_left > b_0).to(tl.int32), (b_left > b_0 + b_1 + b_2).to(tl.int32))
        b_taken = tl.reshape(tl.join(b_even, b_odd), [SIZE]) > 0
        b_key = tl.where((b_key > low) | b_taken, b_key, LOWEST)
    b_0, b_1, b_2, b_3 = _quads(b_key >= low, SIZE)
    b_at = _before(b_0, b_1, b_2, b_3)
    tl.store(p_out + b_at * stride, b_first, mask=b_0 > 0)
    tl.store(p_out + (b_at + b_0) * stride, b_first + 1, mask=b_1 > 0)
    tl.store(p_out + (b_at + b_0 + b_1) * stride, b_first + 2, mask=b_2 > 0)
    tl.store(p_out + (b_at + b_0 + b_1 + b_2) * stride, b_first + 3, mask=b_3 > 0)
    return low
