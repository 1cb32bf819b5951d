"""How programs share the tiles of a score matrix: a line on which every row tile is as long as its work takes.

What a row tile costs is guessed from what its first and last row see; a wrong guess costs time, nothing else. Program p
of P owns the p-th of P equal pieces of the line.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thalweg.qsa.heads_gluon import KEYS

GUESSED = gl.constexpr(128)  # row tiles whose cost is guessed at once, four a lane
SCORED = gl.constexpr(8)  # cost of a tile that is scored
FILLED = gl.constexpr(4)  # of one that is filled with -inf


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def cost_of(head, tail, n, most, FILL: gl.constexpr):
    """Key tiles to score of row tiles whose first and last row see so much, and what each costs; at least 1."""
    guess = (gl.minimum(gl.maximum(gl.maximum(head, tail), 0), most).to(gl.int32) + KEYS - 1) // KEYS
    cost = guess * SCORED + 1
    if FILL:
        cost += (n - guess) * FILLED
    return guess, cost


@gluon.jit
def _costs(visible, stride_v, first, R, n, most, BM: gl.constexpr, FILL: gl.constexpr):
    """What each row tile costs; 0 past the last."""
    ROW: gl.constexpr = gl.BlockedLayout([GUESSED // 32], [32], [4], [0])
    o_r = (first + gl.arange(0, GUESSED, ROW)).to(gl.int64) * BM
    b_head = gl.load(visible + o_r * stride_v, mask=o_r < R, other=0)
    b_tail = gl.load(visible + gl.minimum(o_r + BM - 1, R - 1) * stride_v, mask=o_r < R, other=0)
    _, b_cost = cost_of(b_head, b_tail, n, most, FILL)
    return gl.where(o_r < R, b_cost, 0)


@gluon.jit
def piece(visible, stride_v, R, n, most, BM: gl.constexpr, FILL: gl.constexpr):
    """This program's piece of the line: where it begins and ends, its first row tile, where that begins."""
    i_p = gl.program_id(0)
    total = i_p * 0
    for first in range(0, (R + BM - 1) // BM, GUESSED):
        total += gl.sum(_costs(visible, stride_v, first, R, n, most, BM, FILL), 0)
    each = total // gl.num_programs(0)
    more = total % gl.num_programs(0)
    lo = each * i_p + gl.minimum(i_p, more)
    hi = lo + each + (i_p < more).to(gl.int32)
    past = i_p * 0
    begin = i_p * 0
    i_t = i_p * 0
    for first in range(0, (R + BM - 1) // BM, GUESSED):
        b_cost = _costs(visible, stride_v, first, R, n, most, BM, FILL)
        b_end = past + gl.associative_scan(b_cost, 0, _add)
        i_t += gl.sum((b_end <= lo).to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(b_end <= lo, b_end, 0), 0))
        past += gl.sum(b_cost, 0)
    return lo, hi, i_t, begin
