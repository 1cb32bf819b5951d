"""Slots of a pool, inside kernels."""

import triton
import triton.language as tl


@triton.jit
def good(slot, slots, null_slot) -> tl.tensor:
    """Whether a slot may be read or written: inside a pool of `slots`, and not the reserved one."""
    return (slot >= 0) & (slot < slots) & (slot != null_slot)


@triton.jit
def row(read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh):
    """Row i_n of a call: the slot it reads, the slot it writes, whether it begins with zeros, and whether it is live,
    which is no padding. A row that begins with zeros may read any slot.
    """
    read = tl.load(read_slots + i_n.to(tl.int64) * stride_read).to(tl.int64)
    write = tl.load(write_slots + i_n.to(tl.int64) * stride_write).to(tl.int64)
    anew = False
    if fresh is not None:
        anew = tl.load(fresh + i_n.to(tl.int64) * stride_fresh) != 0
    return read, write, anew, good(write, slots, null_slot) & (anew | good(read, slots, null_slot))


@triton.jit
def live(read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh):
    """1 where row i_n is no padding, else 0."""
    return row(read_slots, write_slots, fresh, i_n, slots, null_slot, stride_read, stride_write, stride_fresh)[3].to(
        tl.int32
    )
