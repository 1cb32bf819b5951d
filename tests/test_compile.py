"""Every kernel configuration that is chosen somewhere compiles for sm_90a and gfx950, with no GPU, and spills nothing.

The builds lie in `builds_<file>.py`, one a kernel file. `python tests/builds_solve.py sm_90a` prints the registers of
each as JSON lines.
"""

from pathlib import Path

import aot
import pytest

pytest.importorskip("triton")
FILES = sorted(Path(__file__).parent.glob("builds_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("builds_"))
def test_every_configuration_compiles_and_spills_nothing(file):
    rows = aot.run(str(file))
    assert {name.split()[0] for name in rows} == set(aot.TUNED) and not aot.problems(rows)


@pytest.mark.parametrize("stage, kernels", (("prepare", 2), ("scan", 2), ("qsa_attention", 8)))
def test_b30_prefill_and_attention_fit_a_machine_with_99_kb_of_shared_memory(stage, kernels):
    """What `triton` would launch there: `aot.SHARED` is the bound, and `problems` says need and limit."""
    rows = aot.run(str(Path(__file__).parent / f"builds_{stage}.py"), "sm_120")
    assert len(rows) == kernels and not aot.problems(rows)


def test_what_is_missing_and_what_does_not_compile_are_problems():
    clean = {"registers": 168, "spilled": 0, "shared": 0, "instructions": 9, "missing": []}
    rows = {"a": clean, "b": {"error": "no"}, "c": clean | {"missing": ["wgmma"]}}
    assert aot.problems(rows) == ["b: no", "c: wgmma"]


def test_b30_the_gate_sees_spills_missing_instructions_and_shared_memory(tmp_path):
    """A kernel capped at 32 registers that needs more, compiled for real."""
    file = tmp_path / "builds_spilling.py"
    file.write_text(SPILLING)
    rows = {name.removeprefix("sm_90a "): row for name, row in aot.run(str(file), "sm_90a").items()}
    assert rows["capped"]["spilled"] > 0 and rows["free"]["spilled"] == 0
    assert rows["capped"]["missing"] == [f"0 bytes spilled at most (it spills {rows['capped']['spilled']})"]
    assert rows["free"]["missing"] == ["wgmma", f"16 registers at most (it takes {rows['free']['registers']})"]
    assert rows["wgmma"]["missing"] == [] and rows["broken"]["error"] and rows["idle"]["error"] == "launches nothing"
    assert rows["both: __main__ 1"]["missing"] == ["wgmma"] and rows["both: __main__ 2"]["missing"] == []
    assert rows["b30"]["missing"] == [f"232448 bytes of shared memory at most (it takes {rows['b30']['shared']})"]
    assert [line.split(":")[0] for line in aot.problems(rows)] == ["capped", "free", "broken", "idle", "b30", "both"]


def test_what_a_build_asks_of_the_kernels_of_each_file():
    build = aot.Build(print, {"scan": ("wgmma",)}, 128, {"prepare": 40})
    assert build.of("scan") == aot.Build(print, ("wgmma",), 128) and build.of("prepare") == aot.Build(
        print, (), 128, 40
    )
    assert build.of("conv") == aot.Build(print, (), 128)


def test_the_gate_compiles_gluon_for_both_targets(tmp_path):
    """Layouts of 32 lanes a warp and of 64."""
    file = tmp_path / "builds_gluon.py"
    file.write_text(GLUON)
    rows = aot.run(str(file))
    assert {*rows} == {"sm_90a scaled", "gfx950 scaled"} and not aot.problems(rows)
    assert all(row["registers"] and not row["spilled"] for row in rows.values())


HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import aot, torch, triton, triton.language as tl
"""
TAIL = """
if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
"""
SPILLING = f"""{HEAD}
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

@triton.jit
def piped(x, out, n, N: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b = tl.zeros([N, N], tl.float32)
    for i in tl.range(0, n, num_stages=9):  # eight pairs of tiles ahead
        b = tl.dot(tl.load(x + o + 2 * i * N * N), tl.load(x + o + (2 * i + 1) * N * N), b)
    tl.store(out + o, b)

def builds(target):
    x, out = (torch.empty(4096, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))

    def both():
        scaled[(1,)](out, out, N=64)
        scaled[(2,)](out, out, N=64)
        product[(1,)](x, out, N=64)

    return {{
        "capped": aot.Build(lambda: scaled[(1,)](out, out, N=2048, num_warps=1, maxnreg=32)),
        "free": aot.Build(lambda: scaled[(1,)](out, out, N=2048, num_warps=1), ("wgmma",), 16),
        "wgmma": aot.Build(lambda: product[(1,)](x, out, N=64, num_warps=4), ("wgmma",)),
        "broken": aot.Build(lambda: product[(1,)](x, out, N=3)),
        "idle": aot.Build(lambda: None),
        "b30": aot.Build(lambda: piped[(1,)](x, out, 7, N=128, num_warps=8)),
        "both": aot.Build(both, {{"__main__": ("wgmma",)}}),
    }}
{TAIL}"""
GLUON = f"""{HEAD}
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

@gluon.jit
def scaled(x, out, N: gl.constexpr, LANES: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([N // (4 * LANES)], [LANES], [4], [0])
    o = gl.arange(0, N, layout)
    a = gl.load(x + o)
    gl.store(out + o, a * 2.0)

def builds(target):
    x = torch.empty(4096, device="meta")
    lanes, demand = {{"sm_90a": (32, r"ld\\.global\\.v4"), "gfx950": (64, "_load_dwordx4")}}[target]
    return {{"scaled": aot.Build(lambda: scaled[(1,)](x, x, N=16 * lanes, LANES=lanes, num_warps=4), (demand,))}}
{TAIL}"""
