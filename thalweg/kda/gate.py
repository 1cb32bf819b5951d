"""The decay of a raw gate, inside kernels. Source: Kimi Linear (arXiv 2510.26692); forms as `kda_prefill` has them."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
FORGOTTEN = tl.constexpr(-1000.0)  # a log decay whose exp is zero: what is below it changes nothing but overflow


@triton.jit
def softplus(b_x):
    """log(1 + exp(b_x)), linear above 20."""
    b_e = tl.exp(tl.minimum(b_x, 20.0))
    b_u = 1.0 + b_e
    # log(1 + e) with all digits of a small e, which a slow gate is made of.
    b_plus = tl.where(b_u == 1.0, b_e, tl.log(b_u) * (b_e / tl.where(b_u == 1.0, 1.0, b_u - 1.0)))
    return tl.where(b_x > 20.0, b_x, b_plus)


@triton.jit
def log_decay(b_x, b_rate, b_bias, lower_bound, GATE: tl.constexpr):
    """Natural log of the decay, at most 0."""
    if GATE == "given":
        return b_x
    elif GATE == "soft":
        return -b_rate * softplus(b_x + b_bias)
    else:
        return lower_bound / (1.0 + tl.exp2((b_rate * -LOG2E) * (b_x + b_bias)))


@triton.jit
def log2_decay(b_x, b_rate, b_bias, lower_bound, GATE: tl.constexpr):
    """Log decay in base 2, not below what any product forgets."""
    return tl.maximum(log_decay(b_x, b_rate, b_bias, lower_bound, GATE), FORGOTTEN) * LOG2E
