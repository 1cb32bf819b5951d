"""solve_unit_lower, ahead of time: C, dtypes in and out, precision, packed or dense; 64 heads (GLM-5.3-Flash)."""

import sys

import aot
import torch

WANTED = {
    "sm_90a": [
        (64, "float32", "bfloat16", "ieee", True),
        (64, "float32", "bfloat16", "ieee", False),
        (64, "float32", "float32", "ieee", True),
        (64, "float32", "float32", "tf32x3", True),
        (32, "float32", "bfloat16", "ieee", True),
        (32, "bfloat16", "float32", "tf32", False),
        (16, "float32", "float32", "ieee", True),
    ],
    "gfx950": [
        (64, "float32", "bfloat16", "ieee", True),
        (32, "float32", "float32", "ieee", False),
    ],
}
TENSOR_CORES = {"sm_90a": ("mma.sync.aligned.m16n8k",), "gfx950": ("v_mfma",)}


def builds(target):
    from thalweg.kda import solve

    found = {}
    for C, source, result, precision, packed in WANTED[target]:
        lower, out = (torch.empty(1, 1000, 64, C, dtype=getattr(torch, d), device="meta") for d in (source, result))
        cu_seqlens = torch.empty(9, dtype=torch.int32, device="meta") if packed else None
        config = solve.choose(solve.Shape(C, 64, out.dtype, precision), target.removesuffix("a"))
        found[f"solve {C} {source} {result} {precision} {'packed' if packed else 'dense'}"] = aot.Build(
            lambda lower=lower, cu_seqlens=cu_seqlens, out=out, precision=precision: solve.solve_unit_lower(
                lower, cu_seqlens, out, precision
            ),
            TENSOR_CORES[target] if C > 16 and config.products != "ieee" else (),
            config.max_registers or 512,
            newer_spilled=64 if config.max_registers else 0,  # at the cap Triton 3.9 spills six to twelve words
        )
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
