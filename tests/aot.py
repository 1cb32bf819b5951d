"""Compiles Triton and Gluon kernels ahead of time, with no GPU, and reads what the compiler says about them.

A `Build` is a call of a launcher on tensors of the meta device, which have shapes, strides and no memory. Here every
kernel that it launches is compiled for a target as that launch would compile it there, types, constants, options and
what Triton specializes included, and nothing runs. `report` gives registers, spilled bytes, shared memory and what the
machine's program lacks of what the build demands.

The builds of a kernel file lie in `tests/builds_<file>.py`: a function `builds(target) -> {name: Build}` that imports
the kernel module inside, and `if __name__ == "__main__": aot.main(builds, *sys.argv[1:])`. Triton must compile there
(TRITON_INTERPRET unset), so `run` has that file run in a process of its own.
"""

import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

PINNED = (3, 6)
SHARED = {"sm_90a": 227 * 1024, "gfx950": 160 * 1024, "sm_120": 99 * 1024}  # bytes a program may have
TARGETS = {"sm_90a": ("cuda", 90, 32), "gfx950": ("hip", "gfx950", 64), "sm_120": ("cuda", 120, 32)}
TUNED = ("sm_90a", "gfx950")  # every kernel is compiled for these; sm_120 stands for machines with little shared memory


@dataclass(frozen=True)
class Build:
    """launch: calls a launcher, or launches a kernel, on meta tensors.

    demands: regular expressions that the text of each program (PTX, amdgcn) must contain, as "wgmma" or "v_mfma".
    most_registers: a lane, where one more costs a warp its place on the machine. most_spilled: bytes a lane; anything
    but 0 wants a reason beside it. newer_spilled: the same where Triton is newer than the one that kernels are tuned on
    (PINNED), whose compiler places registers its own way; None: as most_spilled. Where a launch is of several kernels,
    each of these may be a dict by the name of the file that the kernel lies in ("scan"), others getting the default.
    """

    launch: Callable[[], object]
    demands: tuple[str, ...] | Mapping[str, tuple[str, ...]] = ()
    most_registers: int | Mapping[str, int] = 512
    most_spilled: int | Mapping[str, int] = 0
    newer_spilled: int | Mapping[str, int] | None = None

    def of(self, file: str) -> "Build":
        """The build of the kernels of one file."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        mine = {f.name: given[f.name].get(file, f.default) for f in fields(self) if isinstance(given[f.name], Mapping)}
        return Build(**given | mine)


@dataclass(frozen=True)
class Report:
    """registers a lane, bytes of local memory a lane (what does not fit registers goes there), shared bytes a program.

    instructions: of the program, as it lies in memory. missing: what the build demands and the program lacks.
    occupancy: waves a SIMD, where the compiler says it (AMD's).
    """

    registers: int
    spilled: int
    shared: int
    instructions: int
    missing: tuple[str, ...] = ()
    occupancy: int | None = None


class _Driver:
    """As much of a driver as compiling takes: what the machine is. Each target is a device of its own."""

    def __init__(self, target: str):
        from triton.backends.compiler import GPUTarget

        self.index, self.target = [*TARGETS].index(target), GPUTarget(*TARGETS[target])

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0


def kernels(launch: Callable[[], object], target: str) -> list[Any]:
    """What `launch` launches, compiled for a target, each kernel and specialization once; raises what Triton raises."""
    import triton
    from triton.runtime.jit import JITFunction

    import thalweg.device

    found, run, arch = {}, JITFunction.run, thalweg.device.arch

    def compiled(self, *args, grid, warmup, **kwargs):
        result = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[id(result)] = result
        return result

    def named(device):
        return target.removesuffix("a")

    # Launchers ask `arch` which machine a tensor is on; modules have taken the name, or will.
    takers = [m for n, m in list(sys.modules.items()) if n.startswith("thalweg.") and getattr(m, "arch", None) is arch]
    triton.runtime.driver.set_active(_Driver(target))
    try:
        JITFunction.run = compiled
        for module in takers:
            module.arch = named
        launch()
    finally:
        JITFunction.run = run
        for module in [m for n, m in sys.modules.items() if n.startswith("thalweg.")]:
            if getattr(module, "arch", None) is named:
                module.arch = arch
    return list(found.values())


def _text_bytes(elf: bytes) -> int:
    """Bytes of machine code in a 64-bit ELF file: of its sections named .text.KERNEL."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    # Name, flags and the like, offset, size of each section.
    sections = [struct.unpack_from("<I20xQQ", elf, start + i * size) for i in range(count)]
    return sum(length for name, _, length in sections if elf.startswith(b".text.", sections[names][1] + name))


def _nvidia(kernel) -> tuple[int, int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(tool), "--dump-resource-usage", cubin.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    # 16 bytes an instruction since compute capability 7.0; the disassembler, which says the same, takes a second.
    return registers, stack + local, _text_bytes(kernel.asm["cubin"]) // 16


def _amd(kernel) -> tuple[int, int, int]:
    text = kernel.asm["amdgcn"]
    names = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")  # scalars spill to lanes, not to memory
    registers, scratch, vector = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    return registers, max(scratch, 4 * vector), len(re.findall(r"^\t[a-z]\w+ ", text, re.MULTILINE))


def _newer() -> bool:
    import triton

    return tuple(map(int, triton.__version__.split(".")[:2])) > PINNED


def file_of(kernel) -> str:
    return kernel.src.fn.__module__.rpartition(".")[2]


def report(build: Build, kernel, target: str) -> Report:
    """What the compiler says about one kernel of a build."""
    build = build.of(file_of(kernel))
    most_spilled = build.most_spilled
    if _newer() and build.newer_spilled is not None:
        most_spilled = build.newer_spilled
    nvidia = TARGETS[target][0] == "cuda"
    registers, spilled, instructions = (_nvidia if nvidia else _amd)(kernel)
    text = kernel.asm["ptx" if nvidia else "amdgcn"]
    missing = tuple(demand for demand in build.demands if not re.search(demand, text))
    if registers > build.most_registers:
        missing += (f"{build.most_registers} registers at most (it takes {registers})",)
    if spilled > most_spilled:
        missing += (f"{most_spilled} bytes spilled at most (it spills {spilled})",)
    shared = kernel.metadata.shared
    if shared > SHARED[target]:
        missing += (f"{SHARED[target]} bytes of shared memory at most (it takes {shared})",)
    waves = None if nvidia else int(re.search(r"; Occupancy: (\d+)", text)[1])
    return Report(registers, spilled, shared, instructions, missing, waves)


def main(builds: Callable[[str], Mapping[str, Build]], *targets: str) -> None:
    """Compiles every build of the targets (none: TUNED); prints one JSON object a kernel: its name, and the report's
    fields or an error. A build that launches several kernels has a row for each. Where Triton is newer than PINNED
    and no target is named, only the first build of each: that the file compiles there, in a sixth of the time.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the package of this tree, installed or not
    for target in targets or TUNED:
        wanted = list(builds(target).items())
        for name, build in wanted[:1] if _newer() and not targets else wanted:
            try:
                rows = [(file_of(k), asdict(report(build, k, target))) for k in kernels(build.launch, target)]
                rows = rows or [("", {"error": "launches nothing"})]
            except Exception as error:  # whatever a compiler raises is this build's result
                rows = [("", {"error": f"{type(error).__name__}: {error}"[-2000:]})]
            for number, (file, row) in enumerate(rows):
                suffix = f": {file} {number + 1}" if len(rows) > 1 else ""
                print(json.dumps({"name": f"{target} {name}{suffix}", **row}), flush=True)


def serve() -> None:
    """Runs files for `run`, each in a fork of this process, which has imported what takes seconds: [file, target...,
    where its output goes] as a line of JSON in, its exit code as a line out.
    """
    import runpy

    import torch  # noqa: F401
    import triton.experimental.gluon  # noqa: F401

    sys.path.insert(0, str(Path(__file__).parent))
    for line in sys.stdin:
        *sys.argv, output = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(f"{output}.err", os.O_WRONLY | os.O_CREAT, 0o600), 2)
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT, 0o600), 1)
                runpy.run_path(sys.argv[0], run_name="__main__")
                sys.stdout.flush()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@cache
def _server() -> subprocess.Popen:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    return subprocess.Popen(command, **pipes)  # it ends with this process, which holds its input


def run(file: str, *targets: str) -> dict[str, dict[str, Any]]:
    """Runs `python FILE TARGET...`, which must call `main`, in a process of its own; the rows it printed, by name."""
    with tempfile.TemporaryDirectory() as folder:
        output, server = Path(folder) / "rows", _server()
        server.stdin.write(json.dumps([file, *targets, str(output)]) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        if code != "0":
            error = Path(f"{output}.err")
            raise RuntimeError(f"exit code {code}: {error.read_text()[-4000:] if error.exists() else ''}")
        rows = [json.loads(line) for line in output.read_text().splitlines() if line.startswith("{")]
    return {row.pop("name"): row for row in rows}


def problems(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is wrong with each build: it does not compile, or lacks what it demands (no spills, some instruction)."""
    wrong = {name: row.get("error") or ", ".join(row["missing"]) for name, row in rows.items()}
    return [f"{name}: {what}" for name, what in wrong.items() if what]


if __name__ == "__main__":
    serve()
