"""Every kernel configuration that is chosen somewhere compiles for sm_90a and gfx950, with no GPU, and spills nothing.

`python tests/test_compile.py sm_90a` prints the registers of each as JSON lines.
"""

import sys
from pathlib import Path

import aot
import pytest

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}


def solve_builds(target):
    """solve_unit_lower: C, dtypes in and out, precision, packed or dense; heads as GLM-5.3-Flash has them."""
    import torch
    import triton

    from thalweg.kda import solve

    wanted = {
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
    builds = {}
    for C, source, out, precision, packed in wanted[target]:
        config = solve.choose(solve.Shape(C, 64, getattr(torch, out), precision), target.removesuffix("a"))
        tensor_cores = {"sm_90a": ("mma.sync.aligned.m16n8k",), "gfx950": ("v_mfma",)}[target]
        builds[f"solve {C} {source} {out} {precision} {'packed' if packed else 'dense'}"] = aot.Build(
            solve.kernel,
            {"lower": TYPES[source], "out": TYPES[out], "cu_seqlens": "*i32"},
            {"C": C, "HEADS": config.heads, "PRODUCTS": config.products} | ({} if packed else {"cu_seqlens": None}),
            config.options,
            tensor_cores if C > 16 and config.products != "ieee" else (),
            config.max_registers or 512,
            # At the cap the assembler of Triton 3.9 spills six to twelve words, that of 3.6 none.
            64 if config.max_registers and triton.__version__ >= "3.7" else 0,
        )
    return builds


def builds(target):
    return {**solve_builds(target)}


@pytest.mark.parametrize("target", aot.TARGETS)
def test_every_configuration_compiles_and_spills_nothing(target):
    pytest.importorskip("triton")
    rows = aot.run(__file__, target)
    assert rows and not aot.problems(rows)


def test_what_is_missing_and_what_does_not_compile_are_problems():
    clean = {"registers": 168, "spilled": 0, "shared": 0, "instructions": 9, "missing": []}
    rows = {"a": clean, "b": {"error": "no"}, "c": clean | {"missing": ["wgmma"]}}
    assert aot.problems(rows) == ["b: no", "c: wgmma"]


def test_the_gate_sees_spills_and_missing_instructions(tmp_path):
    """A kernel capped at 32 registers that needs more, compiled for real."""
    pytest.importorskip("triton")
    file = tmp_path / "tests" / "spilling.py"
    file.parent.mkdir()
    file.write_text(SPILLING)
    rows = aot.run(str(file), "sm_90a")
    assert rows["capped"]["spilled"] > 0 and rows["free"]["spilled"] == 0
    assert rows["capped"]["missing"] == [f"0 bytes spilled at most (it spills {rows['capped']['spilled']})"]
    assert rows["free"]["missing"] == ["wgmma", f"16 registers at most (it takes {rows['free']['registers']})"]
    assert rows["wgmma"]["missing"] == [] and rows["broken"]["error"]
    assert [line.split(":")[0] for line in aot.problems(rows)] == ["capped", "free", "broken"]


SPILLING = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import aot, triton, triton.language as tl

@triton.jit
def scaled(x, out, N: tl.constexpr):
    o = tl.arange(0, N)
    a = tl.load(x + o)  # held by the lanes until the sum of all is known
    tl.store(out + o, a / tl.sum(a))

@triton.jit
def product(x, out, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + o)
    tl.store(out + o, tl.dot(a, a))

def builds(target):
    wide = aot.Build(scaled, {{"x": "*fp32", "out": "*fp32"}}, {{"N": 2048}}, {{"num_warps": 1}}, ("wgmma",), 16)
    return {{
        "capped": aot.Build(wide.kernel, wide.types, wide.constants, {{"num_warps": 1, "maxnreg": 32}}),
        "free": wide,
        "wgmma": aot.Build(product, {{"x": "*bf16", "out": "*fp32"}}, {{"N": 64}}, {{"num_warps": 4}}, ("wgmma",)),
        "broken": aot.Build(product, {{"x": "*bf16", "out": "*fp32"}}, {{"N": 3}}),
    }}

if __name__ == "__main__":
    aot.main(builds, sys.argv[1])
"""


if __name__ == "__main__":
    aot.main(builds, sys.argv[1])
