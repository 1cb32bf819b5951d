"""Decayed scores and the inverse of a chunk by halves, inside kernels: what stands any gate.

Rows meet in halves: 16 rows with the 16 before, 8 with 8, ... 1 with 1, each row decayed to the boundary between its
half and the other. Every exponent is a sum of gates over the rows it spans, never a difference, and at most 0. The
inverse grows by the same halves: forward substitution by blocks.
"""

import triton
import triton.language as tl

from thalweg.kda.products import product, sums


@triton.jit
def half_scores(b_q, b_k, b_g, n, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """q k^T and k k^T, decayed, of all pairs of rows i > j, and q k^T of i = j; zeros above. b_g in base 2.

    A loop, not unrolled: halves of h >= n rows do not meet, and the compiler would interleave what is unrolled.
    """
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    b_Aqk = tl.where(o_i == o_j, tl.sum(b_q * b_k, 1)[:, None], 0.0)
    b_Akk = tl.zeros([C, C], tl.float32)
    h = 1
    while h < n:
        later = (o_i & h) != 0
        b_span = ((o_i & -h) == (o_j & -h)) & ((later & (o_j <= o_i)) | (((o_i & h) == 0) & (o_j > o_i)))
        b_w = tl.exp2(sums(tl.where(b_span, 1.0, 0.0), b_g, PRODUCTS))
        b_kw = b_k * b_w
        meet = (o_i > o_j) & ((o_i ^ o_j) >= h) & ((o_i ^ o_j) < 2 * h)
        b_zero = tl.zeros([C, C], tl.float32)
        b_Aqk += tl.where(meet, product(b_q * b_w, tl.trans(b_kw), b_zero, PRODUCTS), 0.0)
        b_Akk += tl.where(meet, product(b_kw, tl.trans(b_kw), b_zero, PRODUCTS), 0.0)
        h *= 2
    return b_Aqk, b_Akk


@triton.jit
def unit_lower_inverse(b_lower, n, C: tl.constexpr, PRODUCTS: tl.constexpr):
    """(I + b_lower)^-1 of a strictly lower `[C, C]` tile, zero from row n on."""
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    apart = o_i ^ o_j
    b_x = tl.where(o_i == o_j, 1.0, 0.0) - tl.where(apart == 1, b_lower, 0.0)
    h = 2
    while h < n:
        b_between = tl.where((apart >= h) & (apart < 2 * h), b_lower, 0.0)
        b_y = product(b_between, b_x, tl.zeros([C, C], tl.float32), PRODUCTS)
        b_x = product(-b_x, b_y, b_x, PRODUCTS)
        h *= 2
    return b_x
