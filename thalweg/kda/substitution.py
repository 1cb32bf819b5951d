"""Inverses of unit lower triangular 16 x 16 tiles by forward substitution, inside kernels.

    row i of X = e_i - sum_{k<i} L[i, k] row k of X        float32, all tiles of a program at once

One lane owns a column, so that a step is one FMA on an entry of L that every lane of a tile reads: no reduction, no
shuffle, no barrier. Meant for programs of one warp. Transposed results are already laid out as the left operand of a
product.
"""

import torch
import triton
import triton.language as tl

from thalweg.device import arch, cdiv, current
from thalweg.kda.products import halves, product


@triton.jit
def _row(p_row, i: tl.constexpr, TILES: tl.constexpr):
    """The i entries left of the diagonal in row i of every tile, each `[TILES, 16]`: the same for all 16 columns."""
    o_four = tl.arange(0, 4)[None, None, :] + tl.zeros([1, 16, 1], tl.int32)
    entries = ()
    for first in tl.static_range(0, i, 4):
        b_four = tl.load(p_row + first + o_four).to(tl.float32)
        b_even, b_odd = tl.split(tl.reshape(b_four, [TILES, 16, 2, 2]))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        entries = entries + (b_0, b_1, b_2, b_3)
    return entries


@triton.jit
def _join(rows, HALF: tl.constexpr):
    joined = ()
    for i in tl.static_range(HALF):
        joined = joined + (tl.join(rows[i], rows[i + HALF]),)
    return joined


@triton.jit
def substitute(p_tile, stride_t, last, TILES: tl.constexpr):
    """Transposed inverses `[TILES, 16 columns, 16 rows]` of the unit lower tiles at p_tile `[TILES, 1, 1]`.

    Rows past `last` are read from row `last` instead: what they give is not stored and meets only zeros.
    """
    o_c = tl.arange(0, 16)[None, :]
    rows = ()
    for i in tl.static_range(16):
        entries = _row(p_tile + tl.minimum(i, last) * stride_t, i, TILES)
        b_row = tl.where(o_c == i, 1.0, tl.zeros([TILES, 16], tl.float32))
        for k in tl.static_range(i):
            b_row -= entries[k] * rows[k]
        rows = rows + (b_row,)
    b_tiles = tl.reshape(_join(_join(_join(_join(rows, 8), 4), 2), 1)[0], [TILES, 16, 16, 1])
    # A sum of one. Without it the compiler sees through the joins and takes operands of four packed values, which
    # what a product returns does not have: 160 shuffles and selects more at C = 64.
    return tl.sum(b_tiles, 3)


@triton.jit
def unstack(b, TILES: tl.constexpr):
    """`[TILES, 16, 16]` as a tuple of its tiles."""
    if TILES == 1:
        return (tl.reshape(b, [16, 16]),)
    elif TILES == 2:
        b_0, b_1 = tl.split(tl.permute(b, [1, 2, 0]))
        return b_0, b_1
    elif TILES > 4:
        b_0, b_1 = tl.split(tl.permute(tl.reshape(b, [2, TILES // 2, 16, 16]), [1, 2, 3, 0]))
        return unstack(b_0, TILES // 2) + unstack(b_1, TILES // 2)
    else:
        b_even, b_odd = tl.split(tl.permute(tl.reshape(b, [2, 2, 16, 16]), [2, 3, 0, 1]))
        b_0, b_2 = tl.split(b_even)
        b_1, b_3 = tl.split(b_odd)
        return b_0, b_1, b_2, b_3


@triton.jit
def _inverted(p_x, b_0, b_1, C: tl.constexpr):
    """Stores the scaled inverse of one block over its L; b_0, b_1: the transposed inverses of its diagonal tiles."""
    o_r = tl.arange(0, 16)[:, None]
    o_c = tl.arange(0, 16)[None, :]
    p_lower = p_x.to(tl.pointer_type(tl.float32), bitcast=True)
    b_10 = product(b_0, tl.load(p_lower + (16 + o_c) * C + o_r), tl.zeros([16, 16], tl.float32), "bf16x3")
    b_10 = product(b_10, -b_1, tl.zeros([16, 16], tl.float32), "bf16x3")
    b_beta0 = tl.load(p_lower + o_r * (C + 1))
    b_beta1 = tl.load(p_lower + (16 + o_r) * (C + 1))
    tl.debug_barrier()  # all of L has been read: what follows overwrites it
    p_x += o_r * C + o_c
    tiles = (b_0 * b_beta0, tl.zeros([16, 16], tl.float32), b_10 * b_beta0, b_1 * b_beta1)
    for i in tl.static_range(4):
        b_high, b_low = halves(tl.trans(tiles[i]))
        tl.store(p_x + (i // 2 * 16 * C + i % 2 * 16), b_high)
        tl.store(p_x + (C * C + i // 2 * 16 * C + i % 2 * 16), b_low)


def _kernel(pairs, count, C: tl.constexpr, BLOCKS: tl.constexpr):
    """`[3, C, C]` entries of pairs, C = 32: L with beta on its diagonal, in float32 -> inverse, two bf16 tiles."""
    i_first = tl.program_id(0).to(tl.int64) * BLOCKS
    i_tile = tl.arange(0, 2 * BLOCKS)[:, None, None]
    p_lower = pairs.to(tl.pointer_type(tl.float32), bitcast=True)
    p_tile = p_lower + tl.minimum(i_first + i_tile // 2, count - 1) * (3 * C * C // 2) + i_tile % 2 * (16 * C + 16)
    tiles = unstack(substitute(p_tile, C, 15, 2 * BLOCKS), 2 * BLOCKS)
    for i in tl.static_range(BLOCKS):
        if i_first + i < count:
            _inverted(pairs + (i_first + i) * (3 * C * C), tiles[2 * i], tiles[2 * i + 1], C)


kernel = triton.jit(_kernel, do_not_specialize=["count"])


def choose(device: str) -> int:
    """Blocks of one program."""
    # Measured with 16,384 blocks: 50 us with two, 82 with one. Interpreted, a program's steps cost the same for many.
    return 8 if device == "cpu" else 2


def invert(pairs: torch.Tensor) -> None:
    """Every entry of pairs `[count, HV, 3, 32, 32]` bf16, in place: the strictly lower part of L, and beta on its
    diagonal, in float32 where the first two tiles lie -> (I + L)^-1 diag(beta) as high + low bf16. The third tile is
    left alone; what lies above L's diagonal may be NaN. No sync, no allocation.
    """
    count, HV, _, C, _ = pairs.shape
    machine = arch(pairs.device)
    blocks = choose(machine)
    if machine.startswith("gfx"):
        # Hides that a tensor is below 2 GB: told so, AMD's pointer pass (Triton 3.6) takes minutes on unrolled rows.
        pairs = triton.reinterpret(pairs, pairs.dtype)
    with current(pairs.device):
        kernel[(cdiv(count * HV, blocks),)](pairs, count * HV, C=C, BLOCKS=blocks, num_warps=1, enable_fp_fusion=True)
