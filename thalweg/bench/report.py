"""Rows of `run` as a table, as JSON lines in `results/`, and what they are stamped with."""

import dataclasses
import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

COLUMNS = ("case", "implementation", "us", "min", "max", "floor us", "x floor", "error", "", "note")
ROOT = Path(__file__).parents[2]


def stamp(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit of a run; machine: driver and clocks, as the driver's own tool says them."""
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton, "commit": commit(), "machine": machine(device)}


def commit() -> str:
    """THALWEG_COMMIT where it is set (a copy of a tree), else the source tree's, with a + where files differ."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return None if done.returncode else done.stdout.strip()

    if os.environ.get("THALWEG_COMMIT"):
        return os.environ["THALWEG_COMMIT"]
    try:
        found = git("rev-parse", "--short", "HEAD") if (ROOT / ".git").exists() else None
    except OSError:
        found = None
    if found is None:
        return "unknown"
    return found + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine(device: torch.device) -> str:
    """Driver and clocks of a CUDA device at work, "" where nobody says."""
    if device.type != "cuda":
        return ""
    x = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
    into = torch.empty_like(x)
    for _ in range(1500):  # a third of a second: an idle device has clocks of its own
        torch.mm(x, x, out=into)
    asked = "driver_version,clocks.sm,clocks.max.sm,clocks.mem"
    number = torch.cuda.current_device() if device.index is None else device.index
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", "-i", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    said = [part.strip() for part in done.stdout.strip().split(",")]
    if done.returncode or len(said) != 4:
        return ""
    return f"driver {said[0]}, SM clock {said[1]} of {said[2]} MHz, memory {said[3]} MHz"


def line(row: Any) -> dict[str, Any]:
    """A row as it is saved: one whose ok is false carries no time."""
    return {k: v for k, v in dataclasses.asdict(row).items() if row.ok or not k.startswith("us")}


def save(row: Any) -> Path:
    """Puts a row into `results/<gpu>.jsonl` of the source tree (of the current folder elsewhere), in the place of an
    older one of the same case and implementation; returns the path."""
    folder = (ROOT if (ROOT / "results").is_dir() else Path.cwd()) / "results"
    name = row.gpu.lower().removeprefix("nvidia ").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    kept = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [held for held in kept if (json.loads(held)["case"], json.loads(held)["impl"]) != (row.case, row.impl)]
    part = path.with_suffix(".tmp")  # a reader sees the old rows or the new ones
    part.write_text("".join(kept) + json.dumps(line(row)) + "\n")
    os.replace(part, path)
    return path


def cells(row: Any) -> tuple[str, ...]:
    """A row of the table, in the order of COLUMNS."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"

    times = number(row.floor_us and row.us and row.us / row.floor_us)
    error = "" if row.err is None else f"{row.err:.2e}" if row.err % 1 or row.err == 0 else f"{row.err:.0f} wrong rows"
    result = "ok" if row.ok else "FAILED"
    shown = [number(x) for x in (row.us, row.us_min, row.us_max, row.floor_us)]
    return row.case, row.impl, *shown, times, error, result, row.note.partition("; driver")[0]
