"""The kernels around the recurrence (convolution, norm) compile for sm_90a and gfx950 and spill nothing.

`python tests/test_compile_layer.py sm_90a` prints the registers of each as JSON lines.
"""

import sys

import aot
import pytest

ROWS = {"read_slots": "*i32", "write_slots": "*i32", "cu_seqlens": "*i32", "fresh": "*i1"}


def conv_builds(target):
    """kda_conv: width, dtypes of tokens and pool, with fresh flags and bias or without, q | k | v of 64 heads."""
    from thalweg.kda import conv

    builds = {}
    for W, kind, size, pool, whole in (
        (4, "*bf16", 2, "*bf16", True),
        (4, "*bf16", 2, "*bf16", False),
        (4, "*fp32", 4, "*fp32", True),
        (8, "*bf16", 2, "*fp32", True),
        (2, "*fp16", 2, "*fp16", False),
    ):
        config = conv.choose(conv.Shape(24576, size), target.removesuffix("a"))
        fixed = {"W": W, "C": config.tokens, "BC": config.channels, "ROWS": config.rows}
        fixed |= {"stride_xc": 1, "stride_oc": 1, "stride_ww": 1, "stride_b": 1}
        builds[f"conv {W} {kind} {pool} {whole}"] = aot.Build(
            conv.kernel,
            {"x": kind, "out": kind, "weight": "*fp32", "bias": "*fp32", "conv_state": pool, **ROWS},
            fixed | ({} if whole else {"fresh": None, "bias": None}),
            config.options,
        )
    return builds


def norm_builds(target):
    """gated_rms_norm: V, dtype of o, dimensions of rows, with slot lists or without."""
    from thalweg.kda import norm

    builds = {}
    for V, kind, dims, slots in ((128, "*fp32", 1, False), (128, "*fp32", 2, True), (1000, "*bf16", 3, False)):
        config = norm.choose(norm.Shape(V), target.removesuffix("a"))
        fixed = {"V": V, "BV": 1 << (V - 1).bit_length(), "ROWS": config.rows, "DIMS": dims}
        fixed |= {"stride_ov": 1, "stride_gv": 1, "stride_yv": 1, "stride_w": 1}
        types = {"o": kind, "gate": "*bf16", "weight": "*fp32", "out": "*bf16", "eps": "fp32", "inverse": "fp32"}
        absent = {} if slots else {"read_slots": None, "write_slots": None}
        builds[f"norm {V} {kind} {dims} {slots}"] = aot.Build(
            norm.kernel, {**types, **ROWS}, fixed | absent, config.options
        )
    return builds


def builds(target):
    return {**conv_builds(target), **norm_builds(target)}


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_configuration_compiles_and_spills_nothing(target):
    pytest.importorskip("triton")
    rows = aot.run(__file__, target)
    assert rows and not aot.problems(rows)


if __name__ == "__main__":
    aot.main(builds, sys.argv[1])
