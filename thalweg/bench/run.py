"""Implementations and peers on the named cases: correct first, then timed, on the same inputs.

A candidate runs once on fresh inputs at full size and its results are compared with float64 (`oracle`), by the one
tolerance rule; only then is it timed (`timing`), on as many copies of the inputs as a rotation needs. Weights are
copied too: in a model a layer finds its own out of the cache at every step. (On an H200 12 heads of `kda_decode` take
4.1 us with weights of their own and 3.8 where all calls share them.) Beside them
stands a floor measured in the same run: what the case's bytes take when they are only copied or, of an op that advances
states in place, what its states take when they are only read and written through their slots (`states`, on a GPU).
"""

import copy
import datetime
import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from thalweg import accuracy, cases, dispatch, timing
from thalweg.bench import oracle, peers, report
from thalweg.bench.calls import IMPLS, OPS, captured
from thalweg.cases import Case

SMALL_BYTES = 2**26  # what a case may move at most where there is no GPU
KNOWN_BYTES_PER_US = {"NVIDIA H200": 4.3e6}  # the floors of the log; elsewhere a copy is measured
PEERS_ERROR = 1e-2  # a peer is right within the rule or within this: many round to 16 bits between their kernels
PART_OF_MEMORY = 0.6  # of what is free, for the copies of one rotation
INPLACE = ("kda_decode", "kda_commit")  # what they move is their states, read and written


@dataclass(frozen=True)
class Row:
    """One candidate on one case, as a line of `results/*.jsonl`.

    us, us_min, us_max: median, smallest and largest sample, None where ok is false. floor_us: the bytes that must move
    at the memory's speed. err: the worst relative L2 distance to float64 over outputs and mutated arguments; of a
    selection, the number of wrong rows. ok: within the tolerance rule; of a peer, somebody else's kernel, within
    PEERS_ERROR.
    """

    case: str
    impl: str
    us: float | None
    us_min: float | None
    us_max: float | None
    floor_us: float | None
    err: float | None
    ok: bool
    peer: bool
    gpu: str
    torch: str
    triton: str | None
    commit: str
    date: str
    note: str


@dataclass(frozen=True)
class Candidate:
    """bind(args) makes one call on these arguments, which it may change. graph: as in `timing.timed`."""

    name: str
    peer: bool
    graph: bool | None
    bind: Callable[[dict[str, Any]], peers.Bound]


def ours(op: str, impl: dispatch.Impl) -> Candidate:
    """An implementation, through the public op. One that reads device memory on the host fits no graph."""

    def bind(args: dict[str, Any]) -> peers.Bound:
        kept: dict[str, torch.Tensor] = {}

        def call() -> None:
            given = {"out": kept["out"]} if "out" in kept else {}
            out = OPS[op](**{**args, **given}, impl=impl.name, check=False)
            if out is not None:
                kept["out"] = out

        return peers.Bound(call, lambda: {**args, **kept, "scores": kept.get("out")})

    return Candidate(impl.name, False, False if impl.syncs else None, bind)


def wanted(op: str, patterns: Sequence[str], device: str) -> list[Case]:
    """The timed cases of an op that match the patterns (none: all), small ones by their full name.

    Raises ValueError for an unknown op, for a pattern that fits no case, and where there is no GPU for cases too large.
    """
    if op not in OPS:
        raise ValueError(f"op must be e2e or one of {', '.join(OPS)}, got {op!r}")
    own = {case.id: case for case in cases.TIMED.values() if case.op == op}
    found: dict[str, Case] = {}
    for pattern in patterns or ["*"]:
        matched = {id: own[id] for id in fnmatch.filter(own, pattern)}
        found |= matched or {pattern: cases.find(op, pattern)}
    if torch.device(device).type == "cuda":
        return list(found.values())
    if not patterns:
        smallest = min(found.values(), key=lambda case: case.bytes)
        raise ValueError(f"no GPU here: name small cases of {op} (--case), e.g. {smallest.id}")
    for case in found.values():
        if case.bytes > SMALL_BYTES:
            raise ValueError(f"no GPU here: {case.id} moves {case.bytes / 1e6:.0f} MB, at most {SMALL_BYTES >> 20} do")
    return list(found.values())


def candidates(case: Case, args: dict[str, Any], impl: str | None) -> list[Candidate]:
    """What can run a case: our implementations, then peers. The reference only where it is named or nothing else can.

    Raises ValueError when the named one cannot take the case.
    """
    call = captured(case.op, args)
    there = {peer.key: peer for peer in peers.PEERS if peer.op == case.op}
    if impl is not None:
        if impl in there:
            reason = there[impl].why_not(args)
            if reason is not None:
                raise ValueError(f"{case.op}: peer {impl!r} cannot take this call: {reason}")
            return [_peer(there[impl])]
        return [ours(case.op, dispatch.pick(case.op, IMPLS[case.op], call, impl))]
    able = [one for one in IMPLS[case.op] if one.why_not(call) is None]
    able = able[:-1] if len(able) > 1 and able[-1].name == "reference" else able
    able = [ours(case.op, one) for one in able]
    return able + [_peer(peer) for peer in there.values() if peer.why_not(args) is None]


def _peer(peer: peers.Peer) -> Candidate:
    return Candidate(peer.label(), True, peer.graph, peer.bind)


class Bench:
    """Rows of one op on one device."""

    def __init__(self, op: str, patterns: Sequence[str], device: str, impl: str | None = None, seed: int = 0):
        self.device, self.impl, self.seed = torch.device(device), impl, seed
        self.cases = wanted(op, patterns, device)
        known = [one.name for one in IMPLS[op]] + [peer.key for peer in peers.PEERS if peer.op == op]
        if impl is not None and impl not in known:
            raise ValueError(f"impl must be one of {', '.join(known)}, got {impl!r}")
        self.stamp = report.stamp(self.device) | {"date": datetime.date.today().isoformat()}
        self.speed = KNOWN_BYTES_PER_US.get(self.stamp["gpu"])
        self.rmw_us: float | None = None  # of the case at hand

    def rows(self) -> Iterator[Row]:
        for case in self.cases:
            yield from self.of(case)

    def of(self, case: Case) -> Iterator[Row]:
        """The floors of a case, then its candidates in order."""
        args = case.make(self.device, self.seed)
        able = candidates(case, args, self.impl)
        yield from self._floors(case, args)
        rows = oracle.sampled_rows(case.op, args)
        part = oracle.taken(case.op, args, rows)
        truth, twin = (oracle.expected(case.op, part, dtype) for dtype in (oracle.TRUTH, oracle.TWIN))
        for one in able:
            try:
                yield self._measured(case, args, one, rows, truth, twin)
            except Exception as error:  # whatever a kernel raises is the result of its row
                yield self._row(case, one.name, one.peer, None, False, f"{type(error).__name__}: {error}"[:300])
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measured(self, case: Case, args: dict, one: Candidate, rows, truth: dict, twin: dict) -> Row:
        if one.peer:  # some tune themselves on their first call, on the state that they are given
            one.bind(copy.deepcopy(args)).call()
        bound = one.bind(copy.deepcopy(args))
        bound.call()
        error, ok = compared(case.op, bound.results(), rows, truth, twin)
        ok = ok or (one.peer and "scores" not in truth and error <= PEERS_ERROR)
        note = "" if rows is None else f"{len(rows)} rows checked; "
        if not ok:
            return self._row(case, one.name, one.peer, error, False, note + "farther from float64 than the rule allows")
        del bound
        sets = self._sets(case, args)
        calls = [one.bind(copy.deepcopy(args)) for _ in range(sets)]
        for bound in calls:
            bound.call()  # allocates what it returns, once
        measured = timing.timed([bound.call for bound in calls], self.device, one.graph)
        note += f"{measured.method}, {sets} sets, {measured.samples} samples"
        if self.rmw_us:
            note = f"{measured.us / self.rmw_us:.3f} x rmw; {note}"
        return self._row(case, one.name, one.peer, error, True, note, measured)

    def _sets(self, case: Case, args: dict) -> int:
        """Copies of the arguments that a rotation needs, as far as memory goes."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in args.values() if _is(x)}
        size = max(1, sum(storages.values()))
        sets = timing.sets_needed(int(case.bytes) or size)
        if self.device.type != "cuda":
            return min(sets, 16)
        free = torch.cuda.mem_get_info(self.device)[0]
        return max(1, min(sets, int(PART_OF_MEMORY * free / (2 * size))))

    def _floors(self, case: Case, args: dict) -> Iterator[Row]:
        """What moving the case's bytes, or its states, takes here, and nothing else."""
        self.rmw_us = None
        if not case.bytes:
            return
        if self.speed is None:
            moved = 2**28 if self.device.type == "cuda" else 2**26
            self.speed = moved / timing.floor_copy(moved, self.device).us
        if case.op in INPLACE and self.device.type == "cuda" and dispatch.installed("triton"):
            from thalweg.bench import states

            measured = states.floor([copy.deepcopy(args) for _ in range(self._sets(case, args))])
            self.rmw_us = measured.us
            yield self._row(case, "rmw floor", False, 0.0, True, "only the states, through their slots", measured)
            return
        measured = timing.floor_copy(int(case.bytes), self.device)
        yield self._row(case, "copy floor", False, 0.0, True, "the case's bytes, half read, half written", measured)

    def _row(self, case: Case, name: str, peer: bool, error, ok: bool, note: str, measured=None) -> Row:
        us = (None,) * 3 if measured is None else (measured.us, measured.us_min, measured.us_max)
        floor = case.bytes / self.speed if case.bytes and self.speed else None
        us, floor = tuple(None if x is None else round(x, 3) for x in us), None if floor is None else round(floor, 3)
        stamp = {name: self.stamp[name] for name in ("gpu", "torch", "triton", "commit", "date")}
        note = "; ".join(filter(None, (note, self.stamp["machine"])))
        error = None if error is None else float(f"{error:.3g}")
        return Row(case.id, name, *us, floor, error, ok, peer, **stamp, note=note)


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def compared(op: str, got: dict, rows: torch.Tensor | None, truth: dict, twin: dict) -> tuple[float, bool]:
    """The worst error of what a candidate left behind (of some rows of it), and whether all of it is right."""
    if "scores" in truth:
        ids = got["scores"] if rows is None else got["scores"][rows]
        wrong = accuracy.wrong_selections(ids, truth["scores"], truth["visible"])
        return float(wrong), wrong == 0
    found = {}
    for name in truth:
        value = got[name] if rows is None or name not in ("out",) else got[name][rows]
        found[name] = accuracy.compare(value, truth[name], twin[name])
    return max(c.error for c in found.values()), all(c.ok for c in found.values())
