"""Compiles Triton kernels ahead of time, with no GPU, and reads what the compiler says about them.

A `Build` is a kernel with the types and constants of one real launch. What Triton would specialize at a launch with
aligned tensors is taken from the kernel itself: pointers and integers are divisible by 16 unless the kernel says
`do_not_specialize`. `compiled` returns registers, spilled bytes, shared memory and the text of the machine's program.

This needs a process in which Triton compiles (TRITON_INTERPRET unset), so `run` starts one that imports the module
with the list of builds and calls `main`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

TARGETS = {"sm_90a": ("cuda", 90, 32), "gfx950": ("hip", "gfx950", 64)}


@dataclass(frozen=True)
class Build:
    """kernel: what `triton.jit` returned. types: of the arguments that are no plain integers ("*fp32", "*i64", ...).

    constants: the constexpr arguments, and None for a tensor that is absent. options: num_warps and the like.
    demands: regular expressions that the program's text (PTX, amdgcn) must contain, as "wgmma" or "v_mfma".
    most_registers: a lane, where one more costs a warp its place on the machine. most_spilled: bytes a lane; anything
    but 0 wants a reason beside it.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    demands: tuple[str, ...] = ()
    most_registers: int = 512
    most_spilled: int = 0


@dataclass(frozen=True)
class Report:
    """registers a lane, bytes of local memory a lane (what does not fit registers goes there), shared bytes a program.

    instructions: of the program, as it lies in memory. missing: what the build demands and the program lacks.
    """

    registers: int
    spilled: int
    shared: int
    instructions: int
    missing: tuple[str, ...] = ()


def _source(build: Build):
    from triton.compiler import ASTSource

    signature, attributes = {}, {}
    for i, parameter in enumerate(build.kernel.params):
        if parameter.is_constexpr or parameter.name in build.constants:
            signature[parameter.name] = "constexpr"
            continue
        signature[parameter.name] = build.types.get(parameter.name) or parameter.annotation_type or "i32"
        if not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(build.kernel, signature, constexprs=dict(build.constants), attrs=attributes)


def _nvidia(compiled) -> tuple[int, int, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage, sass = (
            subprocess.run([str(tools / tool), *flags, cubin.name], capture_output=True, text=True, check=True).stdout
            for tool, *flags in (("cuobjdump", "--dump-resource-usage"), ("nvdisasm", "-c"))
        )
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local, len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE))


def _amd(compiled) -> tuple[int, int, int]:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count")
    registers, scratch, vector, scalar = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    return registers, scratch + 4 * (vector + scalar), len(re.findall(r"^\t[a-z]\w+ ", text, re.MULTILINE))


def compiled(build: Build, target: str) -> Report:
    """Compiles a build for "sm_90a" or "gfx950"; raises what Triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget

    result = triton.compile(_source(build), target=GPUTarget(*TARGETS[target]), options=dict(build.options))
    nvidia = TARGETS[target][0] == "cuda"
    registers, spilled, instructions = (_nvidia if nvidia else _amd)(result)
    text = result.asm["ptx" if nvidia else "amdgcn"]
    missing = tuple(demand for demand in build.demands if not re.search(demand, text))
    if registers > build.most_registers:
        missing += (f"{build.most_registers} registers at most (it takes {registers})",)
    if spilled > build.most_spilled:
        missing += (f"{build.most_spilled} bytes spilled at most (it spills {spilled})",)
    return Report(registers, spilled, result.metadata.shared, instructions, missing)


def main(builds: Callable[[str], Mapping[str, Build]], target: str) -> None:
    """Compiles every build of a target; prints one JSON object a line: name, and the report's fields or an error."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the package of this tree, installed or not
    for name, build in builds(target).items():
        try:
            row = asdict(compiled(build, target))
        except Exception as error:  # whatever a compiler raises is this build's result
            row = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({"name": name, **row}), flush=True)


def run(file: str, target: str) -> dict[str, dict[str, Any]]:
    """Runs `python FILE TARGET`, which must call `main`, in a process of its own; the rows it printed, by name."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, file, target], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


def problems(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with each build: it does not compile, or lacks what it demands (no spills, some instruction)."""
    wrong = {name: row.get("error") or ", ".join(row["missing"]) for name, row in rows.items()}
    return [f"{name}: {what}" for name, what in wrong.items() if what]
