"""Every implementation of every op on this machine, over the small cases, against the float64 oracle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thalweg import accuracy
from thalweg.accuracy import Comparison
from thalweg.bench.calls import IMPLS, OPS, captured
from thalweg.bench.oracle import TRUTH, TWIN, Tensors, expected
from thalweg.cases import SMALL, Case


@dataclass(frozen=True)
class Row:
    """One implementation on one case: result is ok, FAILED or skipped; error and bound are the worst output's."""

    op: str
    case: str
    impl: str
    result: str
    output: str = ""
    error: float | None = None
    bound: float | None = None
    reason: str = ""


def check(ops: Sequence[str], device: str, impl: str | None = None, seed: int = 0) -> Iterator[Row]:
    """Rows for these ops (none: all) in order. Raises ValueError for an unknown op or implementation name."""
    unknown = [op for op in ops if op not in IMPLS]
    if unknown:
        raise ValueError(f"op must be one of {', '.join(IMPLS)}, got {unknown[0]!r}")
    names = {candidate.name for op in ops or IMPLS for candidate in IMPLS[op]}
    if impl is not None and impl not in names:
        raise ValueError(f"impl must be one of {', '.join(sorted(names))}, got {impl!r}")
    for case in SMALL.values():
        if not ops or case.op in ops:
            yield from check_case(case, device, impl, seed)


def check_case(case: Case, device: str, only: str | None = None, seed: int = 0) -> Iterator[Row]:
    """A row for each implementation of the case's op, or for the one named `only`."""
    args = case.make(device, seed)
    truth, twin = (expected(case.op, args, dtype) for dtype in (TRUTH, TWIN))
    call = captured(case.op, args)
    for impl in IMPLS[case.op]:
        if only is not None and impl.name != only:
            continue
        reason = impl.why_not(call)
        if reason is not None:
            yield Row(case.op, case.id, impl.name, "skipped", reason=reason)
            continue
        args = case.make(device, seed)
        try:
            out = OPS[case.op](**args, impl=impl.name)
        except (RuntimeError, ValueError) as error:  # reported as a failure of the row, with its reason
            yield Row(case.op, case.id, impl.name, "FAILED", reason=" ".join(str(error).split()))
            continue
        yield _judged(case, impl.name, _written(truth, args, out), truth, twin)


def _written(truth: Tensors, args: dict[str, Any], out: torch.Tensor | None) -> Tensors:
    return {name: out if name in ("out", "scores") else args[name] for name in truth if name != "visible"}


def _judged(case: Case, impl: str, got: Tensors, truth: Tensors, twin: Tensors) -> Row:
    """The row of the output that uses most of what it may."""
    if "scores" in truth:
        wrong = accuracy.wrong_selections(got["scores"], truth["scores"], truth["visible"])
        results = {"out": Comparison(float(wrong), 0.0)}
    else:
        results = {name: accuracy.compare(got[name], truth[name], twin[name]) for name in truth}
    name = max(results, key=lambda output: _used(results[output]))
    worst = results[name]
    reason = "" if worst.ok else f"worst row {worst.row_error:.2e}, at most {worst.row_bound:.2e}"
    return Row(case.op, case.id, impl, "ok" if worst.ok else "FAILED", name, worst.error, worst.bound, reason)


def _used(c: Comparison) -> float:
    """The larger of error / bound and row_error / row_bound; an error where none is allowed counts as infinite."""
    pairs = ((c.error, c.bound), (c.row_error, c.row_bound))
    return max((error / bound if bound else float("inf") if error else 0.0) for error, bound in pairs)
