"""Which implementation runs, and why: `Impl`, `pick`, `explain`, and the registration of an op with `torch.library`.

An op has an ordered tuple of implementations, fastest first, the portable last resort last. Each states in one line
why it cannot take a call (`why_not`), or None when it can. An automatic choice takes the first that can; a named
implementation runs or raises, and never falls back.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

_LIBRARY = torch.library.Library("thalweg", "DEF")


@dataclass(frozen=True)
class Impl:
    """One implementation of an op.

    name: what a caller writes as `impl=`. note: what it is, in a few words. why_not(call): None when it can take the
    call (argument name -> value, tensors may be on the meta device), else the line of the contract that it cannot
    hold. run(**call): computes, writing into the call's `out` and the arguments the op's schema marks as mutated.
    syncs: it reads device memory on the host, and so cannot be captured in a CUDA graph.
    only_named: why an automatic choice passes it over even where it can take the call.
    """

    name: str
    note: str
    why_not: Callable[[Mapping[str, Any]], str | None]
    run: Callable[..., None]
    syncs: bool = False
    only_named: str | None = None


@dataclass(frozen=True)
class Verdict:
    """One line of `explain`: an implementation, whether it was chosen, and the reason."""

    name: str
    chosen: bool
    reason: str


@cache
def installed(module: str) -> bool:
    """Whether a module can be imported. Looked up once: every call asks, and a search of the path takes 0.3 ms."""
    return importlib.util.find_spec(module) is not None


def without_triton(tensor: torch.Tensor, interpreted: bool) -> str | None:
    """Why no Triton kernel can run on this tensor. interpreted: the tests run kernels on CPU tensors."""
    if not installed("triton"):
        return "Triton is not installed"
    if tensor.device.type != "cuda" and not interpreted:
        return f"takes CUDA tensors, got {tensor.device} ones"
    return None


def reference(run: Callable[..., None]) -> tuple[Impl, ...]:
    """The last implementation of every op, as it stands behind the others."""
    note = "plain torch, exact float32 arithmetic, any device"
    return (Impl("reference", note, lambda call: None, run, syncs=True),)


def pick(op: str, impls: tuple[Impl, ...], call: Mapping[str, Any], name: str | None = None) -> Impl:
    """Returns the implementation for `call`: the named one, or the first that can take it.

    Raises ValueError when the named one does not exist or cannot take the call, or when none can.
    """
    if name is not None:
        for impl in impls:
            if impl.name == name:
                reason = impl.why_not(call)
                if reason is None:
                    return impl
                raise ValueError(f"{op}: impl {name!r} cannot take this call: {reason}")
        known = ", ".join(impl.name for impl in impls)
        raise ValueError(f"{op}: impl must be one of {known}, got {name!r}")
    reasons = []
    for impl in impls:
        reason = impl.only_named or impl.why_not(call)
        if reason is None:
            return impl
        reasons.append(f"{impl.name}: {reason}")
    raise ValueError(f"{op}: no implementation can take this call ({'; '.join(reasons)})")


def explain(op: str, impls: tuple[Impl, ...], call: Mapping[str, Any], name: str | None = None) -> list[Verdict]:
    """Returns one Verdict an implementation, in order of preference; the same decision as `pick`, nothing is run."""
    chosen = pick(op, impls, call, name).name
    verdicts = []
    for impl in impls:
        reason = impl.why_not(call)
        if impl.name == chosen:
            reason = f"{impl.note}; named by the caller" if name else f"{impl.note}; first that can take the call"
        elif reason is None and impl.only_named:
            reason = f"only by name: {impl.only_named}"
        elif reason is None:
            reason = f"can take the call, but {name or chosen} was " + ("named" if name else "preferred")
        verdicts.append(Verdict(impl.name, impl.name == chosen, reason))
    return verdicts


_watchers: list[list[Impl]] = []


@contextmanager
def watched() -> Iterator[list[Impl]]:
    """Notes the implementation of every op that runs inside; one that also checks values counts as one that syncs."""
    used: list[Impl] = []
    _watchers.append(used)
    try:
        yield used
    finally:
        _watchers[:] = [other for other in _watchers if other is not used]


def define(schema: str, impls: tuple[Impl, ...], check: Callable[..., None]) -> Callable[..., None]:
    """Registers `thalweg::<op>` from a schema that returns nothing, and returns the callable.

    Every schema ends in `*, str? impl=None, bool check=False` and marks what it mutates, `out` among it: an op may not
    return an alias of its input, so results are written. `check(**call)` reads index tensors on the host and raises on
    values the op would otherwise clip or take as padding. `Library.impl` is used because a call through it costs about
    3 us against 4.3 us for `custom_op` (torch 2.13, CPU). Inference only: no gradient is recorded.
    """
    parsed = torch._C.parse_schema(schema)
    op = parsed.name
    names = [argument.name for argument in parsed.arguments]
    defaults = {a.name: a.default_value for a in parsed.arguments if a.has_default_value()}

    def body(*args, **kwargs):
        call = {**defaults, **dict(zip(names, args)), **kwargs}
        name, checking = call.pop("impl"), call.pop("check")
        if checking:
            check(**call)
        impl = pick(op, impls, call, name)
        for used in _watchers:
            used.append(replace(impl, syncs=impl.syncs or checking))
        with torch.inference_mode():  # beyond no_grad it spares what views keep for autograd: 15 % of a chunk
            impl.run(**call)

    _LIBRARY.define(schema)
    _LIBRARY.impl(op, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"thalweg::{op}", lambda *args, **kwargs: None, lib=_LIBRARY)
    return getattr(torch.ops.thalweg, op).default
