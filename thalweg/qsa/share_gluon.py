"""How programs share the tiles of a score matrix: lines on which every row tile is as long as its work takes.

Key tiles to score lie on one line, those behind them on another. How many a row tile has of each is guessed from what
its first and last row see; a wrong guess costs time, nothing else. Program p of P owns the p-th of P equal pieces of
each line.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from thalweg.qsa.heads_gluon import KEYS, here

GUESSED = gl.constexpr(128)  # row tiles whose cost is guessed at once, four a lane


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def guess_of(visible, stride_v, o_r, R, most, TILE: gl.constexpr):
    """Key tiles to score in the row tile whose first row is o_r, by what its first and its last row see."""
    head = gl.load(visible + o_r * stride_v, mask=o_r < R, other=0)
    tail = gl.load(visible + gl.minimum(o_r + TILE - 1, R - 1) * stride_v, mask=o_r < R, other=0)
    return (gl.minimum(gl.maximum(gl.maximum(head, tail), 0), most).to(gl.int32) + KEYS - 1) // KEYS


@gluon.jit
def _costs(visible, stride_v, first, R, n, most, TILE: gl.constexpr, REST: gl.constexpr, WARPS: gl.constexpr):
    """What each row tile costs; 0 past the last."""
    ROW: gl.constexpr = gl.BlockedLayout([GUESSED // 32], [32], [WARPS], [0])  # each warp holds all: none waits
    o_r = here(first + gl.arange(0, GUESSED, ROW)).to(gl.int64) * TILE
    b_guess = guess_of(visible, stride_v, o_r, R, most, TILE)
    return gl.where(o_r < R, n - b_guess if REST else b_guess + 1, 0)


@gluon.jit
def piece(visible, stride_v, R, n, most, programs, TILE: gl.constexpr, REST: gl.constexpr, WARPS: gl.constexpr):
    """This program's piece of a line: where it begins and ends, its first row tile, where that begins.

    A row tile is as long as its key tiles to score, by the guess, and one more; with REST as those behind them.
    """
    i_p = here(gl.program_id(0))
    programs = here(programs)
    total = i_p * 0
    for first in range(0, (R + TILE - 1) // TILE, GUESSED):
        total += gl.sum(_costs(visible, stride_v, first, R, n, most, TILE, REST, WARPS), 0)
    each = total // programs
    more = total % programs
    lo = each * i_p + gl.minimum(i_p, more)
    hi = lo + each + (i_p < more).to(gl.int32)
    past = i_p * 0
    begin = i_p * 0
    i_t = i_p * 0
    for first in range(0, (R + TILE - 1) // TILE, GUESSED):
        b_cost = _costs(visible, stride_v, first, R, n, most, TILE, REST, WARPS)
        b_end = past + gl.associative_scan(b_cost, 0, _add)
        i_t += gl.sum((b_end <= lo).to(gl.int32), 0)
        begin = gl.maximum(begin, gl.max(gl.where(b_end <= lo, b_end, 0), 0))
        past += gl.sum(b_cost, 0)
    return lo, hi, i_t, begin


@gluon.jit
def part_of(visible, stride_v, i_t, at, to, begin, b_seen, R, n, most, part, TILE: gl.constexpr):
    """Key tiles of a row tile that this program takes, from the first to the one past the last; the next tile's begin.

    Part 0: of those guessed to be scored. Part 1: all others, where a row sees more than was guessed; they are taken by
    the program that has the last piece of the row tile.
    """
    guess = guess_of(visible, stride_v, i_t.to(gl.int64) * TILE, R, most, TILE)
    i_lo = gl.minimum(at - begin, guess)
    i_hi = gl.minimum(to - begin, guess)
    if part == 1:
        i_lo = guess
        i_hi = gl.where((to - begin > guess) & (gl.max(b_seen, 0) > guess * KEYS), n, guess)
    return i_lo, i_hi, begin + guess + 1


@gluon.jit
def owned(b_request, b_seen, i_lo):
    """Requests of the rows that see something from i_lo on, else -1; the first of them; whether it is the only one."""
    b_todo = gl.where(b_seen > i_lo * KEYS, b_request, -1)
    owner = gl.max(b_todo, 0)
    return b_todo, owner, gl.min(gl.where(b_todo >= 0, b_todo, owner), 0) == owner


@gluon.jit
def end(b_todo, b_seen, owner, i_lo, i_hi):
    """The key tile past the last one that a row of `owner` sees."""
    last = gl.max(gl.where((b_todo == owner) & (owner >= 0), b_seen, 0), 0)
    return gl.minimum(gl.maximum((last + KEYS - 1) // KEYS, i_lo), i_hi)
