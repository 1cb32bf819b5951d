"""Products of float32 tiles on tensor cores, inside kernels: what is rounded, and to what.

    bf16        both operands rounded to bf16, one product: 2^-9 of each operand is lost
    bf16x3      operands as pairs of bf16, high high + high low + low high: about 2^-15 is lost
    tf32x3 ...  an `input_precision` of tl.dot: tf32x3 loses about 2^-21, ieee what float32 sums lose

Sums are float32 in every form. bf16x3 runs wherever bf16 does; tf32x3 is NVIDIA's.
"""

import triton
import triton.language as tl


@triton.jit
def halves(b):
    """b = high + low in bf16: 2^-16 of b is lost. High is b cut off, not rounded: two integer operations a value where
    a conversion of one value is slow, and low is exact before it is rounded.
    """
    b_bits = b.to(tl.int32, bitcast=True)
    b_high = (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    b_low = b - (b_bits & -65536).to(tl.float32, bitcast=True)
    return b_high, b_low.to(tl.bfloat16)


@triton.jit
def product(b_a, b_b, b_acc, PRODUCTS: tl.constexpr):
    """b_acc + b_a b_b of float32 operands, as the module's docstring says."""
    if PRODUCTS == "bf16":
        return tl.dot(b_a.to(tl.bfloat16), b_b.to(tl.bfloat16), b_acc)
    elif PRODUCTS == "bf16x3":
        b_ah, b_al = halves(b_a)
        b_bh, b_bl = halves(b_b)
        b_acc = tl.dot(b_ah, b_bl, b_acc)
        b_acc = tl.dot(b_al, b_bh, b_acc)
        return tl.dot(b_ah, b_bh, b_acc)
    else:
        return tl.dot(b_a, b_b, b_acc, input_precision=PRODUCTS)


@triton.jit
def sums(b_ones, b_b, PRODUCTS: tl.constexpr):
    """b_ones b_b, where b_ones holds -1, 0 and 1 only: sums of rows of b_b, exact to 2^-17 of each row at least."""
    b_acc = tl.zeros([b_ones.shape[0], b_b.shape[1]], tl.float32)
    if PRODUCTS == "bf16":
        b_high, b_low = halves(b_b)
        b_acc = tl.dot(b_ones.to(tl.bfloat16), b_low, b_acc)
        return tl.dot(b_ones.to(tl.bfloat16), b_high, b_acc)
    else:
        return tl.dot(b_ones.to(tl.float32), b_b, b_acc, input_precision="ieee")
