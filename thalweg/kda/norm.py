"""Gated RMS norm: o / sqrt(mean o^2 + eps) * weight * sigmoid(gate) over the last dimension.

    o, gate      [..., V]     bfloat16, float16, float32; any strides, rows counted in at most three dimensions (`rows`)
    weight       [V]
    out          [..., V]
    read_slots, write_slots [B] or None, for o [B, .., HV, V], the last stage of a decode chain: where a slot is bad
                 (negative, at or past the pool, null_slot) nothing of row b is read and zeros are written

A program owns a few whole rows and reads each element once; sums are float32.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.contract import refuse
from thalweg.device import arch, cdiv, current, next_power_of_2

LEADING = 3  # dimensions of rows that the kernel counts in
TOO_MANY = f"rows that can be counted in {LEADING} dimensions"


class Shape(NamedTuple):
    """What a configuration depends on: not the number of rows, so that another one compiles nothing."""

    V: int


@dataclass(frozen=True)
class Config:
    rows: int  # of a program
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    width = next_power_of_2(shape.V)
    return Config(max(1, 4096 // width), 4, "32 elements a lane: enough loads in flight, no spills")


def rows(o: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Sizes and strides of the dimensions that all three tensors' rows can be counted in, outermost first.

    Neighbours are merged where the outer stride is the inner one's times its size, in all three: what remains depends
    on strides, not on sizes. Only where that leaves more than LEADING are dimensions of size 1 left out.
    """
    merged: list[tuple[int, int, int, int]] = []
    for size, *strides in zip(o.shape[:-1], o.stride(), gate.stride(), out.stride()):
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1][1:], strides)):
            merged[-1] = (merged[-1][0] * size, *strides)
        else:
            merged.append((size, *strides))
    if len(merged) > LEADING:
        merged = [row for row in merged if row[0] != 1]
    return merged or [(1, 0, 0, 0)]


def _kernel(
    o, gate, weight, out, read_slots, write_slots, total, size1, size2, slots, null_slot, eps, inverse,
    stride_o0: tl.int64, stride_g0: tl.int64, stride_y0: tl.int64,
    stride_o1: tl.int64, stride_g1: tl.int64, stride_y1: tl.int64,
    stride_o2: tl.int64, stride_g2: tl.int64, stride_y2: tl.int64,
    stride_ov, stride_gv, stride_yv, stride_w, stride_read, stride_write,
    V: tl.constexpr, BV: tl.constexpr, ROWS: tl.constexpr, DIMS: tl.constexpr,
):  # fmt: skip
    o_r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i_0 = o_r.to(tl.int64)
    i_1 = i_0 * 0
    i_2 = i_0 * 0
    if DIMS == 2:
        i_0 = (o_r // size1).to(tl.int64)
        i_1 = (o_r % size1).to(tl.int64)
    elif DIMS == 3:
        i_0 = (o_r // size2 // size1).to(tl.int64)
        i_1 = (o_r // size2 % size1).to(tl.int64)
        i_2 = (o_r % size2).to(tl.int64)
    o_v = tl.arange(0, BV).to(tl.int64)[None, :]
    m_out = (o_r < total)[:, None] & (o_v < V)
    m = m_out
    if read_slots is not None:
        b_read = tl.load(read_slots + i_0 * stride_read, mask=o_r < total, other=-1).to(tl.int64)
        b_write = tl.load(write_slots + i_0 * stride_write, mask=o_r < total, other=-1).to(tl.int64)
        b_live = (b_read >= 0) & (b_read < slots) & (b_read != null_slot)
        b_live = b_live & (b_write >= 0) & (b_write < slots) & (b_write != null_slot)
        m = m & b_live[:, None]
    p_o = o + (i_0 * stride_o0 + i_1 * stride_o1 + i_2 * stride_o2)[:, None] + o_v * stride_ov
    p_g = gate + (i_0 * stride_g0 + i_1 * stride_g1 + i_2 * stride_g2)[:, None] + o_v * stride_gv
    p_y = out + (i_0 * stride_y0 + i_1 * stride_y1 + i_2 * stride_y2)[:, None] + o_v * stride_yv
    b_o = tl.load(p_o, mask=m, other=0.0).to(tl.float32)
    b_g = tl.load(p_g, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_v * stride_w, mask=o_v < V, other=0.0).to(tl.float32)
    b_y = b_o * tl.rsqrt(tl.sum(b_o * b_o, 1) * inverse + eps)[:, None] * b_w / (1.0 + tl.exp(-b_g))
    tl.store(p_y, b_y.to(out.dtype.element_ty), m_out)


# What changes from step to step: none of these values may be compiled in. Strides that are usually 1 have no type: it
# would keep that from the compiler, and loads would be cut in single elements (ten times as long).
kernel = triton.jit(
    _kernel,
    do_not_specialize=["total", "size1", "size2", "slots", "null_slot", "stride_read", "stride_write"],
    do_not_specialize_on_alignment=["read_slots", "write_slots"],
)


def gated_rms_norm(
    o: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    slots: tuple[torch.Tensor, torch.Tensor, int, int | None] | None = None,
    config: Config | None = None,
) -> None:
    """Launches the kernel; arguments as the module's docstring says. No sync, no allocation.

    slots: read_slots, write_slots, the pool's size and null_slot, where o is `[B, .., HV, V]`. A given config overrides
    `choose`. Raises ValueError where rows cannot be counted in three dimensions.
    """
    V = o.shape[-1]
    if o.numel() == 0:
        return
    leading = rows(o, gate, out)
    if slots is not None:  # the slots' rows are the first dimension, whatever merges
        leading = list(zip(o.shape, o.stride(), gate.stride(), out.stride()))[:-1]
    if len(leading) > LEADING:
        refuse("gated_rms_norm", "o, gate and out", TOO_MANY, f"{len(leading)} that do not merge")
    config, dims = config or choose(Shape(V), arch(o.device)), len(leading)
    (n0, *first), (n1, *second), (n2, *third) = leading + [(1, 0, 0, 0)] * (LEADING - dims)
    read, write, pool, null = slots or (None, None, 0, None)
    with current(o.device):
        kernel[(cdiv(n0 * n1 * n2, config.rows),)](
            o, gate, weight, out, read, write, n0 * n1 * n2, n1, n2, pool, -1 if null is None else null, float(eps),
            1.0 / V, *first, *second, *third, o.stride(-1), gate.stride(-1), out.stride(-1), weight.stride(0),
            read.stride(0) if slots else 0, write.stride(0) if slots else 0,
            V=V, BV=next_power_of_2(V), ROWS=config.rows, DIMS=dims, **config.options,
        )  # fmt: skip
