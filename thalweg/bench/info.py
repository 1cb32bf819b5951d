"""What this machine has: versions, devices, and which implementations it can use."""

import importlib.util
import platform
from importlib import metadata
from typing import Any

import torch

from thalweg.bench.calls import IMPLS, captured, default_device
from thalweg.cases import SMALL


def version() -> str:
    try:
        return metadata.version("thalweg")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "source tree"


def _devices() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"device": "cpu", "name": platform.machine(), "threads": torch.get_num_threads()}]
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        row = {"device": f"cuda:{index}", "name": p.name, "memory_gib": round(p.total_memory / 2**30, 1)}
        rows.append(row | {"multiprocessors": p.multi_processor_count, "capability": f"{p.major}.{p.minor}"})
    return rows


def _implementations(device: str) -> list[dict[str, Any]]:
    """Each implementation of each op, and the first small case's reason why it cannot be used, if it takes none."""
    rows = []
    for op, impls in IMPLS.items():
        calls = [captured(op, case.make(device)) for case in SMALL.values() if case.op == op]
        for impl in impls:
            reasons = [impl.why_not(call) for call in calls]
            usable = any(reason is None for reason in reasons)
            row = {"op": op, "impl": impl.name, "usable": usable, "note": impl.note}
            rows.append(row | {"why_not": None if usable else reasons[0]})
    return rows


def info() -> dict[str, Any]:
    device = default_device()
    triton = metadata.version("triton") if importlib.util.find_spec("triton") else None
    versions = {"thalweg": version(), "python": platform.python_version(), "torch": torch.__version__, "triton": triton}
    return {
        "versions": versions | {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "devices": _devices(),
        "default_device": device,
        "implementations": _implementations(device),
    }
