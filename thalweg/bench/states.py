"""What an op that advances states in place is held against: states read and written through their slots, nothing else.

    state[write_slots[b], h] = state[read_slots[b], h] / 2      a program a row and head, as a fused decode step has

This is the kernel that targets for decode are multiples of. It keeps the shape of the work (slots, then 64 KB, then a
store) where an addition to one flat tensor would not: at 12 states an H200 takes 2.1 us for that and 3.6 for this, of
which a chain of two loads is most. Eight warps and plain stores; sixteen and `.cs` stores would take 3.0, and 1 to 2 %
less than these from 200 states on.

    state [slots, HV, V, K]     float32 or bfloat16, mutated; whole heads contiguous, V K a power of two
    read_slots, write_slots [B] int32 or int64; a row with a slot outside the pool is left alone
"""

from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl

from thalweg import timing
from thalweg.device import current


def _kernel(
    state, read_slots, write_slots, slots, stride_s: tl.int64, stride_sh: tl.int64, BLOCK: tl.constexpr
):  # fmt: skip
    p_s = state + tl.program_id(0).to(tl.int64) * stride_sh + tl.arange(0, BLOCK)
    read = tl.load(read_slots + tl.program_id(1)).to(tl.int64)
    write = tl.load(write_slots + tl.program_id(1)).to(tl.int64)
    live = (read >= 0) & (read < slots) & (write >= 0) & (write < slots)
    b_s = tl.load(p_s + read * stride_s, mask=live)
    tl.store(p_s + write * stride_s, (b_s.to(tl.float32) * 0.5).to(b_s.dtype), mask=live)


kernel = triton.jit(_kernel, do_not_specialize=["slots"], do_not_specialize_on_alignment=["read_slots", "write_slots"])


def halve(state: torch.Tensor, read_slots: torch.Tensor, write_slots: torch.Tensor) -> None:
    """Launches the kernel; arguments as the module's docstring says."""
    slots, HV, V, K = state.shape
    with current(state.device):
        kernel[(HV, read_slots.shape[0])](
            state, read_slots, write_slots, slots, *state.stride()[:2], BLOCK=V * K, num_warps=8
        )


def floor(sets: Sequence[Mapping[str, torch.Tensor]]) -> timing.Timing:
    """Times the states of a rotation: `sets` are the arguments of its calls, each with a pool of its own, as the op is
    timed on them. What pools apart cost is the floor's as it is the op's: an H200 takes 3.4 us for 12 states of one
    pool in turn, 3.6 where every set has its own.
    """
    calls = [(one["state"], one["read_slots"], one.get("write_slots", one["read_slots"])) for one in sets]
    return timing.timed([lambda call=call: halve(*call) for call in calls], calls[0][0].device)
