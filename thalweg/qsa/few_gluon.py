"""The second kernel of the top-k where rows are few: a program a row, as few steps one after the other as we know.

`maxima` has stored the best score of every group of `fan` blocks. Here the k best groups are found among them, then the
k best blocks among the members of those groups, as in `pick`; a lane has a few groups. What counts is how long a chain
of dependent steps is, and what every warp does again for itself, so

    a step of a search tells all warps how many keys reach c, the lowest that does and the highest that does not, with
        one barrier before it is read and one before it is written again. That ends a search one key off its goal, and
        ends it among equal keys
    the first c and the first slope come from what scores look like: maxima by Gumbel's law, the tail above the worst
        group exponential
    places are made once, of the keys above the found one and of those equal to it together
    maxima are waited for in the kernel, which is launched beside the one that makes them

    scores, visible, row_request, out     as in `topk`; workspace: its rows, as float32 and as int32

Source: our own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thalweg.gluon import gdc_wait, thread_barrier

LOWEST = gl.constexpr(-(2**31))  # what is not there; one more: NaN
HIGHEST = gl.constexpr(0x7F800001)  # no number reaches it
MOST = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _order(b_x, m):
    """float32 as int32 of the same order: NaN below every number, what is not there (m false) below NaN."""
    b_i = (b_x + 0.0).to(gl.int32, bitcast=True)
    b_i = gl.where(b_x == b_x, b_i ^ ((b_i >> 31) & MOST), LOWEST + 1)
    return gl.where(m, b_i, LOWEST)


@gluon.jit
def _number(key):
    return (key ^ ((key >> 31) & MOST)).to(gl.float32, bitcast=True)


@gluon.jit
def _log2(x):
    """log2 of a positive float to 0.008: its exponent, and a parabola through its fraction."""
    bits = x.to(gl.int32, bitcast=True) - 0x3F800000
    part = (bits & 0x7FFFFF).to(gl.float32) * (1.0 / 8388608)
    return bits.to(gl.float32) * (1.0 / 8388608) + 0.344 * part * (1.0 - part)


@gluon.jit
def _lanes(b, W: gl.constexpr):
    """A value a lane, `[warps, 32]`."""
    return gl.convert_layout(gl.reshape(b, [W, 32]), gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0]))


@gluon.jit
def _sums(b_0, b_1, shared, W: gl.constexpr):
    """Sums of two float32 tensors `[lanes, n]`, in every lane."""
    ALL: gl.constexpr = gl.BlockedLayout([W], [32], [W], [0])
    shared[0].store(gl.sum(_lanes(gl.sum(b_0, 1), W), 1).to(gl.int32, bitcast=True))
    shared[1].store(gl.sum(_lanes(gl.sum(b_1, 1), W), 1).to(gl.int32, bitcast=True))
    b_0 = shared[0].load(ALL).to(gl.float32, bitcast=True)
    b_1 = shared[1].load(ALL).to(gl.float32, bitcast=True)
    return gl.sum(b_0, 0), gl.sum(b_1, 0)


@gluon.jit
def _reach(b_key, c, shared, W: gl.constexpr):
    """How many keys `[lanes, n]` reach c, the lowest that does, the highest that does not."""
    ALL: gl.constexpr = gl.BlockedLayout([W], [32], [W], [0])
    m = b_key >= c
    shared[0].store(gl.sum(_lanes(gl.sum(m.to(gl.int32), 1), W), 1))
    shared[1].store(gl.min(_lanes(gl.min(gl.where(m, b_key, MOST), 1), W), 1))
    shared[2].store(gl.max(_lanes(gl.max(gl.where(m, LOWEST, b_key), 1), W), 1))
    b_n, b_low, b_high = shared[0].load(ALL), shared[1].load(ALL), shared[2].load(ALL)
    return gl.sum(b_n, 0), gl.min(b_low, 0), gl.max(b_high, 0)


@gluon.jit
def _search(b_key, least, low, c, each, shared, W: gl.constexpr):
    """A key that at least `least` keys reach and at most `least` exceed; low is known to be reached by so many.

    c is looked at first, then where a line says: `each` further a key too many, then through the last two points. Every
    fourth time what is left is halved, which bounds the worst case. It lies in [low, top].
    """
    top = low * 0 + (HIGHEST - 1)
    c_last = c + 0  # a value of its own: of two names of one the compiler carries only one through the loop
    n_last = low * 0
    apart = low * 0
    i_step = low * 0
    going = low < top
    while going:
        n, lowest, highest = _reach(b_key, c, shared, W)
        apart = n - least
        low = gl.where(apart > 0, lowest, low)
        top = gl.where(apart < 0, highest, top)
        going = (apart * apart > 1) & (low < top)
        line = (c - c_last).to(gl.float32) / (n_last - n).to(gl.float32)
        each = gl.where((c != c_last) & (n != n_last), line, each)
        c_last = c
        n_last = n
        i_step += 1
        at = c.to(gl.float32)
        way = gl.minimum(gl.maximum(apart.to(gl.float32) * each, low.to(gl.float32) - at), top.to(gl.float32) - at)
        c = gl.where(i_step % 4 == 0, (low >> 1) + (top >> 1), c + way.to(gl.int32))
        c = gl.minimum(gl.maximum(c, low + 1), top)
    return gl.where((apart == 0) & (i_step > 0), c_last - 1, gl.where(apart == -1, top, low))


@gluon.jit
def _before(b_n, shared, W: gl.constexpr):
    """Numbers `[lanes]`: the sum of those before each lane, and of all."""
    B: gl.constexpr = gl.BlockedLayout([1, W], [1, 32], [W, 1], [1, 0])
    b_l = _lanes(b_n, W)
    b_w = gl.sum(b_l, 1)
    shared[0].store(b_w)
    b_all = shared[0].load(gl.SliceLayout(0, B))
    o_w = gl.arange(0, W, gl.SliceLayout(1, B))
    o_v = gl.arange(0, W, gl.SliceLayout(0, B))
    b_base = gl.sum(gl.where(o_v[None, :] < o_w[:, None], b_all[None, :], 0), 1)
    b_base = gl.convert_layout(b_base, gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])))
    b_at = gl.associative_scan(b_l, 1, _add) - b_l + b_base[:, None]
    return gl.reshape(b_at, [W * 32]), gl.sum(b_all, 0)


@gluon.jit
def _put(b_key, low, b_id, least, p_out, stride, shared, EACH: gl.constexpr, W: gl.constexpr):
    """Writes, in order, ids of the keys `[lanes, EACH]` above low and of the first that equal it, `least` in all."""
    b_f = ((b_key > low).to(gl.int32) << 16) + (b_key == low).to(gl.int32)
    b_at, total = _before(gl.sum(b_f, 1), shared, W)
    b_at = gl.convert_layout(b_at, gl.SliceLayout(1, gl.BlockedLayout([1, EACH], [32, 1], [W, 1], [1, 0])))
    left = least - (total >> 16)
    b_c = gl.associative_scan(b_f, 1, _add) - b_f + b_at[:, None]
    b_equal = b_c & 0xFFFF
    m = (b_f > 0xFFFF) | ((b_f == 1) & (b_equal < left))
    gl.store(p_out + ((b_c >> 16) + gl.minimum(b_equal, left)) * stride, b_id, mask=m)


@gluon.jit
def _best_groups(p_maxima, count, least, p_list, shared, TOP: gl.constexpr, W: gl.constexpr):
    """Lists the `least` best of `count` groups; returns a key that as many of them reach."""
    L: gl.constexpr = gl.BlockedLayout([1, TOP // (32 * W)], [32, 1], [W, 1], [1, 0])
    o_l = gl.arange(0, 32 * W, gl.SliceLayout(1, L))
    b_id = o_l[:, None] * (TOP // (32 * W)) + gl.arange(0, TOP // (32 * W), gl.SliceLayout(0, L))[None, :]
    # Four are loaded at once: behind the last one there is NaN.
    b_x = gl.load(p_maxima + b_id, mask=b_id // 4 * 4 < count, other=float("nan"))
    m = b_id < count
    b_key = _order(b_x, m)
    b_x = gl.where(m & (b_x == b_x), b_x, 0.0)
    total, squares = _sums(b_x, b_x * b_x, shared, W)
    size = count.to(gl.float32)
    mean = total / size
    spread = 0.7797 * gl.sqrt(gl.maximum(squares / size - mean * mean, 0.0))
    part = gl.minimum(least.to(gl.float32) / size, 0.999)
    tail = -0.6931 * _log2(1.0 - part)
    x = mean - spread * (0.6931 * _log2(tail) + 0.5772)
    y = x + spread * 64.0 / (size * (1.0 - part) * tail)  # 64 fewer reach it
    c = gl.minimum(gl.maximum(_order(x, x == x), LOWEST + 2), HIGHEST - 1)
    each = (_order(y, y == y) - c).to(gl.float32) * (1.0 / 64)
    low = _search(b_key, least, count * 0 + (LOWEST + 1), c, each, shared, W)
    _put(b_key, low, b_id, least, p_list, 1, shared, TOP // (32 * W), W)
    return gl.maximum(low, LOWEST + 1)


@gluon.jit
def _members(p_x, p_list, least, n, stride, FAN: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr):
    """Keys and ids of the members of the groups listed, `[lanes, n]`: a lane has whole groups, one after the other.

    Four are loaded at once, those of the row's last four that it does not see by themselves.
    """
    EACH: gl.constexpr = SLOTS // (32 * W)
    L: gl.constexpr = gl.BlockedLayout([EACH, FAN], [32, 1], [W, 1], [1, 0])
    o_w = gl.arange(0, SLOTS, gl.SliceLayout(1, L))
    b_group = gl.load(p_list + o_w, mask=o_w < least, other=0)
    b_id = b_group[:, None] * FAN + gl.arange(0, FAN, gl.SliceLayout(0, L))[None, :]
    m_group = (o_w < least)[:, None]
    whole = n // 4 * 4
    m = m_group & (b_id < n)
    b_x = gl.load(p_x + b_id * stride, mask=m_group & (b_id // 4 * 4 < whole), other=float("nan"))
    if whole < n:
        b_last = gl.load(p_x + b_id * stride, mask=m & (b_id >= whole), other=float("nan"))
        b_x = gl.where(b_id >= whole, b_last, b_x)
    ROWS: gl.constexpr = gl.BlockedLayout([1, EACH * FAN], [32, 1], [W, 1], [1, 0])
    b_key = gl.reshape(_order(b_x, m), [32 * W, EACH * FAN])
    return gl.convert_layout(b_key, ROWS), gl.convert_layout(gl.reshape(b_id, [32 * W, EACH * FAN]), ROWS)


def _few_kernel(
    scores, visible, row_request, out, maxima, lists,
    N, k, requests,
    stride_r: gl.int64, stride_n, stride_v: gl.int64, stride_rr: gl.int64, stride_or: gl.int64, stride_k,
    stride_w: gl.int64,
    FAN: gl.constexpr, TOP: gl.constexpr, SLOTS: gl.constexpr, W: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    i_row = gl.program_id(0).to(gl.int64)
    n = gl.load(visible + i_row * stride_v).to(gl.int64)
    n = gl.minimum(gl.maximum(n, 0), N).to(gl.int32)
    if row_request is not None:
        i_request = gl.load(row_request + i_row * stride_rr).to(gl.int64)
        n = gl.where((i_request >= 0) & (i_request < requests), n, 0)
    if EARLY:
        gdc_wait()
    p_out = out + i_row * stride_or
    if n > k:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        shared = (  # three and not one of three: no barrier between the stores
            gl.allocate_shared_memory(gl.int32, [W], PLAIN),
            gl.allocate_shared_memory(gl.int32, [W], PLAIN),
            gl.allocate_shared_memory(gl.int32, [W], PLAIN),
        )
        p_list = lists + ((i_row + 1) * stride_w - k)
        count = (n + FAN - 1) // FAN
        least = gl.minimum(k, count)
        low = _best_groups(maxima + i_row * stride_w, count, least, p_list, shared, TOP, W)
        low = gl.where(least < k, LOWEST + 1, low)  # else k keys reach it
        thread_barrier()  # the list is whole
        b_key, b_id = _members(scores + i_row * stride_r, p_list, least, n, stride_n, FAN, SLOTS, W)
        x = _number(low)
        m = b_key >= low
        size, over = _sums(m.to(gl.float32), gl.where(m, _number(b_key) - x, 0.0), shared, W)
        over = over / size
        x += over * _log2(size / k) * 0.6931
        y = x + over * 16.0 / k  # 16 fewer reach it
        c = gl.minimum(gl.maximum(_order(x, x == x), low + 1), HIGHEST - 1)
        each = (_order(y, y == y) - c).to(gl.float32) * (1.0 / 16)
        low = _search(b_key, k, low, c, each, shared, W)
        _put(b_key, low, b_id, k, p_out, stride_k, shared, SLOTS * FAN // (32 * W), W)
    if n <= k:
        for i_k in range(0, k, 32 * W):
            o_k = i_k + gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
            gl.store(p_out + o_k * stride_k, gl.where(o_k < n, o_k, -1), mask=o_k < k)


few_kernel = gluon.jit(
    _few_kernel,
    do_not_specialize=["N", "k", "requests", "stride_v", "stride_rr", "stride_or"],
    do_not_specialize_on_alignment=["visible", "row_request", "out", "lists"],
)
