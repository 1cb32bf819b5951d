"""The one timing protocol: how long a call takes when it is launched back to back and finds nothing in the cache.

A benchmark hands over the same call on several sets of buffers, together larger than ROTATED bytes, so that a set has
left the L2 cache when its turn comes again. What is timed is a round of those calls:

    graph   a CUDA graph of whole rounds, replayed: the launch costs what a graph node costs, for us and for peers
    events  the calls themselves between two CUDA events, where a call is so long that launching hides behind it (the
            host's time for a round is measured, not guessed), or where a call cannot be captured and the caller says so
    wall    the calls themselves on a CPU

A sample is the time of a graph or round divided by its calls; the result is the median of the samples, with the
smallest and the largest beside it. `floor_copy` times, by the same protocol, what any kernel that moves so many bytes
is held against; what one that advances states is held against lies in `bench.states`.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROTATED = 320 * 2**20  # bytes of all sets together: more than five times an H200's L2
MOST_SETS = 1024  # of tiny calls; a graph with more nodes takes long to make and shows nothing new
LONG_US = 1_000.0  # a call this long is timed without a graph, if launching hides behind the call before
HIDDEN = 0.7  # of a round: what the host takes to launch it and no more than that hides
GRAPH_US = 2_000.0  # a graph is at least this long, so that starting it is no part of the time
SAMPLES = (9, 50)  # fewest and most
BUDGET_US = 1_000_000.0  # what the samples may take together, beyond the fewest
WARM_US = 50_000.0  # of replays before the first sample: clocks rise

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, smallest and largest of `samples` samples of `calls` calls each."""

    us: float
    us_min: float
    us_max: float
    method: str
    calls: int
    samples: int

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (self.us_max - self.us_min) / self.us if self.us else 0.0


@dataclass(frozen=True)
class Plan:
    """How a round of calls is timed: method, rounds in one sample, samples, rounds to run before them."""

    method: str
    rounds: int
    samples: int
    warm: int


def sets_needed(bytes_of_one: int) -> int:
    """How many sets of buffers make a rotation, when one call reads and writes `bytes_of_one` bytes."""
    return min(MOST_SETS, max(2, math.ceil(ROTATED / max(bytes_of_one, 1)) + 1))


def plan(round_us: float, device_type: str, graph: bool | None = None, calls: int = 1, launch_us: float = 0.0) -> Plan:
    """The plan for rounds of `calls` calls that take about `round_us`; graph: True or False where the caller insists.

    It is the call and not the round that must be long: 286 calls of 7 us, launched one by one, take 20 ms of launching.
    And launching must hide behind it: launch_us is what the host took to launch the round, and where that is most of
    the round, the round took so long for the host's sake.
    """
    round_us = max(round_us, 1e-3)
    if device_type != "cuda":
        method = "wall"
    elif graph is None:
        method = "events" if round_us / calls >= LONG_US and launch_us <= HIDDEN * round_us else "graph"
    else:
        method = "graph" if graph else "events"
    rounds = max(1, math.ceil(GRAPH_US / round_us))
    samples = min(SAMPLES[1], max(SAMPLES[0], int(BUDGET_US / (rounds * round_us))))
    return Plan(method, rounds, samples, min(SAMPLES[1], math.ceil(WARM_US / (rounds * round_us))))


def summary(sample_us: Sequence[float], calls: int, method: str) -> Timing:
    """Timing from the microseconds of whole samples of `calls` calls each."""
    each = [us / calls for us in sample_us]
    return Timing(statistics.median(each), min(each), max(each), method, calls, len(each))


def timed(calls: Sequence[Call], device: object = "cuda", graph: bool | None = None) -> Timing:
    """Times a rotation: the same call on as many sets of buffers as `sets_needed` says.

    graph: None decides by the length of a round; True and False insist. A call that synchronizes or allocates outside
    the graph's pool cannot be captured: that raises, and False is the answer. Calls may change their buffers.
    """
    device = torch.device(device)
    if not calls:
        raise ValueError("calls must hold at least one call, got none")
    if device.type != "cuda":
        _run(calls, 1)
        how = plan(_wall(calls, 1), device.type, graph)
        _run(calls, how.warm if how.rounds > 1 else 0)
        return summary([_wall(calls, how.rounds) for _ in range(how.samples)], how.rounds * len(calls), how.method)
    with torch.cuda.device(device):
        return _timed_cuda(calls, graph)


def _timed_cuda(calls: Sequence[Call], graph: bool | None) -> Timing:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(calls, 2)  # compiles, fills caching allocators
        launch_us = 0.0

        def launched():
            nonlocal launch_us
            launch_us = _wall(calls, 1)

        how = plan(_events(launched), "cuda", graph, len(calls), launch_us)
        if how.method == "events":
            repeat = lambda: _run(calls, how.rounds)  # noqa: E731
        else:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                _run(calls, how.rounds)
            repeat = captured.replay
        for _ in range(how.warm):
            repeat()
        samples = [_events(repeat) for _ in range(how.samples)]
    torch.cuda.current_stream().wait_stream(stream)
    return summary(samples, how.rounds * len(calls), how.method)


def _run(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()


def _wall(calls: Sequence[Call], rounds: int) -> float:
    start = time.perf_counter()
    _run(calls, rounds)
    return (time.perf_counter() - start) * 1e6


def _events(work: Call) -> float:
    """Microseconds between two events on the current stream, around `work`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def floor_copy(bytes_moved: int, device: object = "cuda") -> Timing:
    """Reads half of `bytes_moved` bytes and writes them, negated, elsewhere: a copy that stays a kernel.

    `copy_` becomes the driver's own copy; as a node of a graph it moves 2.7 TB/s on an H200, this one 4.2.
    """
    count, sets = max(1, bytes_moved // 8), sets_needed(bytes_moved)
    pairs = [torch.zeros(2, count, dtype=torch.float32, device=device) for _ in range(sets)]
    return timed([lambda pair=pair: torch.neg(pair[0], out=pair[1]) for pair in pairs], device)
