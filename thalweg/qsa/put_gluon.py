"""What becomes of a tile of scores on Hopper: rows that do not see a block, lanes that store, maxima, -inf.

Tiles are `[KEYS, BM]` in registers and `[BM, KEYS]` in shared memory and in the matrix. i_t counts tiles of BM rows.
s_rows holds, for the rows of a tile, the request that each is scored for (-1: none) and how many blocks it sees.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from thalweg.gluon import bulk_store, thread_barrier
from thalweg.qsa.heads_gluon import KEYS, here, seen
from thalweg.qsa.share_gluon import guess_of, piece


@gluon.jit
def fill_tile(out, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on, BM: gl.constexpr):
    """-inf in a tile: in all rows where they are of one request, else in those of `owner` (-1: that see nothing)."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    o_n = gl.arange(0, KEYS, gl.SliceLayout(0, WIDE))
    i_r = i_t.to(gl.int64) * BM
    p_out = out + (i_r * stride_or + i_tile.to(gl.int64) * KEYS * stride_on)
    b_s = gl.full([8, KEYS], float("-inf"), gl.float32, WIDE)
    for i in gl.static_range(BM // 8):  # in no hurry: registers are what tiles that are scored need
        o_m = here(i * 8 + gl.arange(0, 8, gl.SliceLayout(1, WIDE)))
        m = alone | (s_rows.index(0).slice(i * 8, 8).load(gl.SliceLayout(1, WIDE)) == owner)
        m = gl.expand_dims(m & (i_r + o_m < R), 1) & gl.expand_dims(i_tile * KEYS + o_n < N, 0)
        gl.store(p_out + (gl.expand_dims(o_m * stride_or, 1) + gl.expand_dims(o_n * stride_on, 0)), b_s, mask=m)


@gluon.jit
def _hidden(b_s, s_rows, i_tile, there, PAST: gl.constexpr, ACC: gl.constexpr):
    """PAST where a row does not see the block, -inf in other rows on a hole."""
    o_n = here(i_tile * KEYS) + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    b_seen = s_rows.index(1).load(gl.SliceLayout(0, ACC))
    m = gl.expand_dims(o_n, 1) < gl.expand_dims(b_seen, 0)
    return gl.where(m & there, b_s, gl.where(m, float("-inf"), PAST))


@gluon.jit
def put_maxima(maxima, s_o, s_rows, i_t, i_tile, owner, R, stride_m, above, BM: gl.constexpr):
    """The best of each 16 and of all 64 scores of a tile, in the rows that belong to `owner`."""
    ROWS: gl.constexpr = 32 if BM > 32 else BM  # at once: what a lane holds counts while products are in flight
    ROW: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])  # 16 scores of a row a lane
    BEST: gl.constexpr = gl.SliceLayout(2, gl.BlockedLayout([1, 1, 16], [8, 4, 1], [4, 1, 1], [2, 1, 0]))
    above = here(above)
    for i in gl.static_range(BM // ROWS):
        b_s = gl.reshape(s_o.slice(i * ROWS, ROWS).load(ROW), [ROWS, 4, 16])
        b_16 = gl.convert_layout(gl.max(b_s, 2), BEST)
        o_m = here(i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BEST)))
        m = s_rows.index(0).slice(i * ROWS, ROWS).load(gl.SliceLayout(1, BEST)) == owner
        m = m & (i_t * BM + o_m < R)
        p = maxima + (i_t.to(gl.int64) * BM * stride_m + i_tile * 4)
        o_16 = gl.expand_dims(o_m * stride_m, 1) + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, BEST)), 0)
        gl.store(p + o_16, b_16, mask=gl.expand_dims(m, 1))
        gl.store(p + (o_m * stride_m + (above - 3 * i_tile)), gl.max(b_16, 1), mask=m & (above > 0))


@gluon.jit
def _put_lanes(
    out, b_s, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on,
    BM: gl.constexpr, FILL: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Scores of the rows that belong to `owner`, lane by lane; without FILL as far as each row sees."""
    zero = here(0 * i_t)
    o_n = zero + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    o_m = zero + gl.arange(0, BM, gl.SliceLayout(0, ACC))
    p_out = out + (i_t.to(gl.int64) * BM * stride_or + i_tile.to(gl.int64) * KEYS * stride_on)
    p_out += gl.expand_dims(o_n * stride_on, 1) + gl.expand_dims(o_m * stride_or, 0)
    b_owner = s_rows.index(0).load(gl.SliceLayout(0, ACC))
    if FILL:
        m = gl.expand_dims(i_tile * KEYS + o_n < N, 1)
        m = m & gl.expand_dims((i_t * BM + o_m < R) & (alone | (b_owner == owner)), 0)
    else:
        b_seen = s_rows.index(1).load(gl.SliceLayout(0, ACC))
        m = gl.expand_dims(i_tile * KEYS + o_n, 1) < gl.expand_dims(gl.where(b_owner == owner, b_seen, 0), 0)
    gl.store(p_out, b_s, mask=m)


@gluon.jit
def put(
    tiles, out, b_s, s_o, s_rows, i_t, i_tile, owner, alone, whole, there, R, N, stride_or, stride_on,
    BM: gl.constexpr, FILL: gl.constexpr, BULK: gl.constexpr, MAXIMA: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """A tile of scores, by way of shared memory in bulk where all of it may be written, else lane by lane.

    whole: how many blocks all rows see; there: the tile is no hole. With MAXIMA they are left in shared memory, NaN
    where a row does not see the block.
    """
    PAST: gl.constexpr = float("nan") if MAXIMA else float("-inf")
    plain = (i_tile * KEYS + KEYS <= whole) & there
    bulk = (alone if FILL else plain) & BULK
    if not plain:
        b_s = _hidden(b_s, s_rows, i_tile, there, PAST, ACC)
    if BULK:  # noqa: SIM102 - known when this is compiled, unlike bulk
        if bulk | MAXIMA:
            s_o.permute((1, 0)).store(b_s)
            fence_async_shared()
    thread_barrier()
    if BULK:  # noqa: SIM102 - known when this is compiled, unlike bulk
        if bulk:
            bulk_store(tiles, [i_t * BM, i_tile * KEYS], s_o)
    if not bulk:
        _put_lanes(out, b_s, s_rows, i_t, i_tile, owner, alone, R, N, stride_or, stride_on, BM, FILL, ACC)


@gluon.jit
def fill_rest(
    out, tiles, s_none, row_request, visible, R, N, programs, requests, most, least,
    stride_rr, stride_v, stride_or, stride_on, BM: gl.constexpr, BULK: gl.constexpr,
):  # fmt: skip
    """-inf behind what a row tile of twice BM rows sees, unless a row of it sees more than was guessed."""
    LANES: gl.constexpr = gl.BlockedLayout([2 * BM // 32], [32], [1], [0])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    R = here(R)
    N = here(N)
    n = (N + KEYS - 1) // KEYS
    at, to, i_t, begin = piece(visible, stride_v, R, n, most, programs, 2 * BM, True, 1)
    while at < to:
        first = i_t.to(gl.int64) * (2 * BM)
        guess = guess_of(visible, stride_v, first, R, most, 2 * BM)
        o_r = first + here(gl.arange(0, 2 * BM, LANES))
        _, b_seen = seen(row_request, visible, o_r, R, requests, most, least, stride_rr, stride_v)
        i_lo = guess + at - begin
        i_hi = gl.minimum(guess + to - begin, n)
        begin += n - guess
        if gl.max(b_seen, 0) <= guess * KEYS:
            if BULK:
                for i_tile in range(i_lo, i_hi):
                    bulk_store(tiles, [i_t * (2 * BM), i_tile * KEYS], s_none)
                    bulk_store(tiles, [i_t * (2 * BM) + BM, i_tile * KEYS], s_none)
            else:
                o_m = gl.arange(0, 4, gl.SliceLayout(1, WIDE))
                o_n = gl.arange(0, 2 * KEYS, gl.SliceLayout(0, WIDE))
                o_s = gl.expand_dims(o_m * stride_or, 1) + gl.expand_dims(o_n * stride_on, 0)
                b_s = gl.full([4, 2 * KEYS], float("-inf"), gl.float32, WIDE)
                count = gl.minimum(R - first, 2 * BM).to(gl.int32)
                last = gl.minimum(i_hi * KEYS, N)
                for i_r in range(0, count, 4):
                    for i_n in range(i_lo * KEYS, last, 2 * KEYS):
                        p_out = out + ((first + i_r) * stride_or + i_n.to(gl.int64) * stride_on)
                        m = gl.expand_dims(i_r + o_m < count, 1) & gl.expand_dims(i_n + o_n < last, 0)
                        gl.store(p_out + o_s, b_s, mask=m)
        at = begin
        i_t += 1
    if BULK:
        tma.store_wait(0)
