"""KDA prefill on a GPU, on one page: prepare every chunk, then scan them in order.

    prepare   q k g_raw beta_logits -> factors (-Kp, Qp, Ke), pairs (inverse, Aqk), decays    parallel over chunks
    scan      factors pairs decays v state -> out, state advanced in place                   serial over chunks

What is handed over lies in a workspace, through which a pack goes in pieces (`workspace`): piece i is prepared on the
caller's stream while piece i - 1 is scanned on a second one of higher priority, whose few programs leave most of each
multiprocessor idle. The second stream forks from the caller's and joins it again before the call returns, by events
alone, so that a CUDA graph can capture both. A cut between pieces goes through one sequence at most, whose state
crosses it in float32: no bit depends on where cuts fall.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from thalweg import contract
from thalweg.kda import prepare, scan
from thalweg.kda.workspace import CHUNK, Plan, width
from thalweg.kda.workspace import plan as planned

Stage = Callable[..., None]
Tiles = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@lru_cache(maxsize=64)
def _second_stream(device: int, stream: int) -> torch.cuda.Stream:
    """One for each stream that calls: what another thread captures or runs on its own stream stays out of ours."""
    return torch.cuda.Stream(device, priority=-1)


def _carve(memory: torch.Tensor, plan: Plan, HV: int, K: int, V: int, low: bool) -> tuple[list[Tiles], torch.Tensor]:
    """The buffers of a plan in uint8 `memory`, each (factors, pairs, decays), and the carried states behind them."""
    kind, wide = torch.bfloat16 if low else torch.float32, width(K)
    shapes = (
        ((plan.count, HV, 3, CHUNK, wide), kind),
        ((plan.count, HV, 3 if low else 2, CHUNK, CHUNK), kind),
        ((plan.count, HV, wide), torch.float32),
    )
    at, buffers = 0, []
    for _ in range(plan.buffers):
        tiles = []
        for shape, dtype in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            tiles.append(memory[at : at + size].view(dtype).view(shape))
            at += size
        buffers.append(tuple(tiles))
    if not plan.carry:
        return buffers, buffers[0][2]
    return buffers, memory[at : at + plan.carry].view(torch.float32).view(2, HV, V, K)


def _pipeline(device: torch.device, plan: Plan, first: Callable[[int], None], second: Callable[[int], None]) -> None:
    """first(i) and second(i) of every piece: first(i + 1) beside second(i) where there are two buffers and a GPU."""
    pieces = -(-plan.total // plan.count)
    if plan.buffers == 1 or device.type != "cuda":
        for i in range(pieces):
            first(i)
            second(i)
        return
    here = torch.cuda.current_stream(device)
    beside = _second_stream(here.device_index, here.cuda_stream)
    beside.wait_stream(here)
    scanned: list[torch.cuda.Event] = []
    try:
        for i in range(pieces):
            if i >= plan.buffers:
                here.wait_event(scanned[i - plan.buffers])
            first(i)
            beside.wait_stream(here)
            with torch.cuda.stream(beside):
                second(i)
            scanned.append(beside.record_event())
    finally:  # what second reads must outlive it, whatever happens here
        here.wait_stream(beside)


def prefill(
    q, k, v, g_raw, beta_logits, cu_seqlens, state, read_slots, write_slots, gate, A_log, dt_bias, lower_bound, scale,
    allow_neg_eigval, qk_l2norm, fresh, checkpoint_slots, checkpoint_every, null_slot, workspace, out,
    *, prepare: Stage = prepare.prepare, scan: Stage = scan.scan, cut: int | None = None,
) -> None:  # fmt: skip
    """Arguments as the public op's; stages and pieces as asked. No host sync."""
    (T, _, K), (HV, V) = q.shape, v.shape[1:]
    if T == 0 or HV == 0 or V == 0:
        return
    given = None if workspace is None else workspace.numel()
    plan = planned(T, cu_seqlens.shape[0] - 1, HV, K, V, out.dtype, given, cut)
    if workspace is None:
        workspace = torch.empty(plan.bytes, dtype=torch.uint8, device=q.device)
    elif workspace.data_ptr() % 16:
        contract.refuse("kda_prefill", "workspace", "aligned to 16 bytes", hex(workspace.data_ptr()))
    buffers, carry = _carve(workspace, plan, HV, K, V, out.dtype == torch.bfloat16)

    def prepare_piece(i: int) -> None:
        prepare(
            q, k, g_raw, beta_logits, cu_seqlens, out, *buffers[i % plan.buffers], i * plan.count, gate=gate,
            A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, allow_neg_eigval=allow_neg_eigval,
            qk_l2norm=qk_l2norm, read_slots=read_slots, write_slots=write_slots, fresh=fresh, slots=state.shape[0],
            null_slot=null_slot,
        )  # fmt: skip

    def scan_piece(i: int) -> None:
        scan(
            *buffers[i % plan.buffers], v, cu_seqlens, state, read_slots, write_slots, carry, out, i * plan.count,
            i % 2, fresh=fresh, checkpoint_slots=checkpoint_slots, checkpoint_every=checkpoint_every,
            null_slot=null_slot,
        )  # fmt: skip

    _pipeline(q.device, plan, prepare_piece, scan_piece)
