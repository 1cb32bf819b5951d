"""Slots of a pool, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def good(slot, slots, null_slot) -> tl.tensor:
    """Whether a slot may be read or written: inside a pool of `slots`, and not the reserved one."""
    return (slot >= 0) & (slot < slots) & (slot != null_slot)
