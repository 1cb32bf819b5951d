"""The public ops by name, and the call that each of them hands to its implementations."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from thalweg import dispatch
from thalweg.cases import Case
from thalweg.kda import api as kda
from thalweg.qsa import api as qsa

IMPLS: dict[str, tuple[dispatch.Impl, ...]] = {**kda.IMPLS, **qsa.IMPLS}
OPS: dict[str, Callable[..., Any]] = {op: getattr(kda if op in kda.IMPLS else qsa, op) for op in IMPLS}


class _Captured(TorchFunctionMode):
    """Notes the arguments of a library op, by name, instead of running it."""

    def __init__(self):
        super().__init__()
        self.call: dict[str, Any] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "namespace", None) != "thalweg":
            return func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        given = dict(zip([argument.name for argument in arguments], args)) | (kwargs or {})
        self.call = {a.name: given.get(a.name, a.default_value) for a in arguments if a.name not in ("impl", "check")}


def captured(op: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """What the public op, given keyword arguments `args`, asks its implementations to run. Nothing is computed.

    Raises ValueError when the op refuses the arguments.
    """
    with _Captured() as mode:
        OPS[op](**args, check=False)
    return mode.call


def explained(case: Case, device: str, impl: str | None = None) -> list[dispatch.Verdict]:
    """Which implementation would run a case on a device, and why not the others. Nothing is allocated or run."""
    with FakeTensorMode():
        call = captured(case.op, case.make(device))
        return dispatch.explain(case.op, IMPLS[case.op], call, impl)


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
