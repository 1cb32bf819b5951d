"""What an op that advances states in place is held against: states read and written through their slots, nothing else.

    state[write_slots[b], h] = state[read_slots[b], h] / 2      a program a row and head, as a fused decode step has

It keeps the shape of the work (a slot, then 64 KB, then a store) where an addition to one flat tensor would not: at
12 states of 64 KB on an H200 that takes 2.1 us and this 3.3, of which one program's chain of loads is what is left.

    state [slots, HV, V, K]     float32 or bfloat16, mutated; whole heads contiguous, V K a power of two
    read_slots, write_slots [B] int32 or int64; a row with a slot outside the pool is left alone
"""

import torch
import triton
import triton.language as tl

from thalweg import timing
from thalweg.device import current

WARPS, STORE = 4, ""  # the fastest of 4, 8 and 16 warps and of both stores on an H200, at most shapes


def _kernel(
    state, read_slots, write_slots, HV, slots, stride_s: tl.int64, stride_sh: tl.int64, BLOCK: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0) // HV
    p_s = state + (tl.program_id(0) % HV).to(tl.int64) * stride_sh + tl.arange(0, BLOCK)
    read = tl.load(read_slots + i_b).to(tl.int64)
    write = tl.load(write_slots + i_b).to(tl.int64)
    if (read >= 0) & (read < slots) & (write >= 0) & (write < slots):
        b_s = tl.load(p_s + read * stride_s)
        tl.store(p_s + write * stride_s, (b_s.to(tl.float32) * 0.5).to(b_s.dtype), cache_modifier=STORE)


kernel = triton.jit(_kernel, do_not_specialize=["slots"], do_not_specialize_on_alignment=["read_slots", "write_slots"])


def halve(state: torch.Tensor, read_slots: torch.Tensor, write_slots: torch.Tensor) -> None:
    """Launches the kernel; arguments as the module's docstring says."""
    slots, HV, V, K = state.shape
    with current(state.device):
        kernel[(read_slots.shape[0] * HV,)](
            state, read_slots, write_slots, HV, slots, *state.stride()[:2], V * K, STORE, num_warps=WARPS
        )


def floor(state: torch.Tensor, rows: int) -> timing.Timing:
    """Times the states of `rows` rows of a pool shaped like `state`, as a case of that many rows is timed.

    Every call has slots of its own in one pool, together larger than the cache.
    """
    _, HV, V, K = state.shape
    calls = timing.sets_needed(2 * rows * HV * V * K * state.element_size())
    pool = torch.zeros((calls * rows, HV, V, K), dtype=state.dtype, device=state.device)
    slots = torch.arange(calls * rows, dtype=torch.int32, device=state.device).view(calls, rows)
    return timing.timed([lambda own=own: halve(pool, own, own) for own in slots], state.device)
