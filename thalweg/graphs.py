"""A decode step as CUDA graphs: what the host launches is a few replays, whatever the number of kernels.

A step is a chain of stages, each `stage(x, step) -> x`. The first time they run as they are, and the dispatcher says
which of them went through an implementation that reads device memory on the host: such a stage cannot be captured. The
second time every run of stages that can be is captured as one graph over buffers of its own (all of the step, where all
can), and from then on replayed; the others run between them as they are. Metadata is copied into one set of buffers, so
nothing of the time of capture survives in a replay.

Where the tensors are not on a GPU, every call runs as it is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from thalweg.dispatch import watched
from thalweg.state import Step

Stage = Callable[[torch.Tensor, Step], torch.Tensor]


def runs(flags: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Maximal runs of equal flags: (first, one past the last, flag)."""
    found: list[tuple[int, int, bool]] = []
    for i, flag in enumerate(flags):
        if found and found[-1][2] == flag:
            found[-1] = (found[-1][0], i + 1, flag)
        else:
            found.append((i, i + 1, flag))
    return found


@dataclass
class Captured:
    """A captured run of stages: `replay` computes `out` from what `x` holds."""

    x: torch.Tensor
    out: torch.Tensor
    replay: Callable[[], None]


def capture(work: Callable[[], torch.Tensor], pool: object = None) -> tuple[torch.Tensor, Callable[[], None]]:
    """A CUDA graph of `work`, which has run before: its output buffer and its replay. Nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = work()
    return out, graph.replay


def _copied(step: Step) -> Step:
    """The metadata in buffers of its own; the RoPE table, which no step changes, is shared."""
    tensors = {f.name: getattr(step, f.name) for f in fields(step)}
    return replace(step, **{n: t.clone() for n, t in tensors.items() if torch.is_tensor(t) and n != "rope_table"})


def _fill(held: Step, step: Step) -> None:
    for f in fields(step):
        into, value = getattr(held, f.name), getattr(step, f.name)
        if torch.is_tensor(value) and into is not value:
            into.copy_(value)


class Replay:
    """Calls the stages in order; on a GPU through graphs, from the second call with as many rows on.

    One capture for each number of rows. eager: never capture.
    """

    def __init__(self, stages: Sequence[Stage], eager: bool = False):
        self.stages, self.eager = list(stages), eager
        self.seen: dict[int, list[tuple[bool, torch.Tensor]]] = {}  # by rows: a stage can be captured; like its input
        self.plans: dict[int, tuple[Step, list[tuple[int, int, Captured | None]]]] = {}

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        """The last stage's output, in memory of its own."""
        rows = x.shape[0]
        if self.eager or not self.on_gpu(x):
            return self._run(0, len(self.stages), x, step)
        if rows not in self.seen:
            return self._first(x, step)
        if rows not in self.plans:
            self.plans[rows] = self._plan(step, self.seen[rows])
        held, plan = self.plans[rows]
        _fill(held, step)
        for first, last, captured in plan:
            if captured is None:
                x = self._run(first, last, x, held)
                continue
            captured.x.copy_(x)
            captured.replay()
            x = captured.out
        return x.clone()

    @staticmethod
    def on_gpu(x: torch.Tensor) -> bool:
        return x.is_cuda

    def _run(self, first: int, last: int, x: torch.Tensor, step: Step) -> torch.Tensor:
        for stage in self.stages[first:last]:
            x = stage(x, step)
        return x

    def _first(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        rows, seen = x.shape[0], []
        for stage in self.stages:
            like = torch.zeros_like(x)
            with watched() as used:
                x = stage(x, step)
            seen.append((not any(impl.syncs for impl in used), like))
        self.seen[rows] = seen
        return x

    def _plan(self, step: Step, seen: list[tuple[bool, torch.Tensor]]):
        """Buffers for the metadata, and every run of stages, captured where it can be."""
        held, plan = _copied(step), []
        pool = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        for first, last, free in runs([free for free, _ in seen]):
            if free:
                x = seen[first][1]
                out, again = capture(lambda f=first, t=last, x=x: self._run(f, t, x, held), pool)
            plan.append((first, last, Captured(x, out, again) if free else None))
        return held, plan
