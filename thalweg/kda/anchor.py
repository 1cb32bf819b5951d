"""Where a chunk's exponents are taken from, when its gate is bounded.

G, the gate cumulated inside a chunk, lies between 0 and CHUNK lower_bound. Taken from the middle M of that range,
exp(G - M) and exp(M - G) stay within e^80, and M depends on no token. M is a whole number of octaves: what is scaled by
exp(M) keeps all its digits.
"""

import math

import torch

from thalweg.kda.workspace import CHUNK

OCTAVES = math.log2(math.e)
SPAN = 80.0  # natural-log decay that exp of both signs stands in bf16 and float32


def anchored(out_dtype: torch.dtype, gate: str, lower_bound: float, unit: bool, scale: float) -> bool:
    """Whether one anchor a chunk is exact enough: a bound that keeps both signs within e^80, rows of q and k at most 1
    (unit), a sane scale, and bf16 results: adding M costs an exponent its last digits, which a float32 result would
    show.
    """
    bounded = gate == "bounded" and 0 <= -lower_bound * CHUNK <= 2 * SPAN
    return out_dtype == torch.bfloat16 and bounded and unit and 2**-10 <= scale <= 2**10


def frame(lower_bound: float, scale: float) -> tuple[float, float, float, float, float, float]:
    """The bound and M in octaves; what q is scaled by (at most 1, unless M is at its lowest and the scale small); the
    powers of two that take the score operands Kp and Qp, and the product of q and k, to what is handed over.
    """
    M = round(lower_bound * OCTAVES * CHUNK / 2)
    octaves = max(math.ceil(math.log2(scale)), -126 - M)
    return lower_bound * OCTAVES, float(M), scale * 2.0**-octaves, 2.0**M, 2.0 ** (M + octaves), 2.0**octaves
