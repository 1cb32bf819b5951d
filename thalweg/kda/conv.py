"""Short convolution of packed tokens: causal, one filter a channel, SiLU, each sequence continued from its history.

    y_t = silu(bias + sum_j weight[:, j] x_(t - W + 1 + j)),  j = 0 .. W - 1, tokens before the first from the history

Every sequence is cut in chunks of 64 tokens from its start, found on the device (`chunks`). A program owns a chunk and
a block of channels, reads each token once and keeps the W - 1 before it in registers.

    x            [T, C]       bfloat16, float16, float32; any strides
    weight       [C, W]       W from 2 to 8; bias [C] or None: any of the three dtypes, any strides
    cu_seqlens   [N + 1]      int32 or int64
    conv_state   [slots, C, W - 1]  of x's dtype or float32, any strides, mutated: the last raw inputs, oldest first
    read_slots, write_slots [N], fresh [N] bool or None: any strides
    out          [T, C]       of x's dtype; zeros where a row is padding or no sequence covers a token

In place without a race: a chunk holds more tokens than a history, so that the program of a sequence's first chunk is
the only one that reads the old history of its channels, and it alone writes the new one, once all of it is read: from
the sequence's last tokens, wherever they lie, and in front of fewer than W - 1 tokens from the old one.

A bad slot (negative, past the pool, null_slot) is padding; a fresh sequence has zeros before it and looks at its write
slot only. An empty sequence touches nothing. Bits do not depend on company, nor on cuts anywhere.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, cdiv, current, next_power_of_2
from thalweg.kda import chunks
from thalweg.kda.slots import good


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences, so that a new length compiles nothing."""

    channels: int


@dataclass(frozen=True)
class Config:
    tokens: int  # of a chunk; more than a history holds
    rows: int  # tokens whose loads are in flight together; divides tokens
    channels: int  # of a program
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int | bool]:
        return {"num_warps": self.num_warps, "enable_fp_fusion": True}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    if device == "cpu":
        return Config(16, 2, min(512, next_power_of_2(shape.channels)), 1, "interpreted: chunks worth crossing")
    lanes = 64 if device.startswith("gfx") else 32
    width = min(512, next_power_of_2(shape.channels))
    # 8192 x 24576 in bf16: 227 us; with eight channels a lane 256 to 284, as fewer programs fit beside one another.
    return Config(64, 4, width, max(1, width // (4 * lanes)), "four channels a lane")


@triton.jit
def _past(p_x, p_history, first, anew, m_c, stride_xt, stride_sw, W: tl.constexpr):
    """The W - 1 inputs before the chunk whose first token is at p_x, oldest first, as float32."""
    window = ()
    for j in tl.static_range(W - 1):
        b_old = tl.load(p_history + j * stride_sw, mask=m_c & first & (not anew), other=0.0).to(tl.float32)
        b_x = tl.load(p_x + (j - W + 1) * stride_xt, mask=m_c & (not first), other=0.0).to(tl.float32)
        window = window + (tl.where(first, b_old, b_x),)
    return window


@triton.jit
def _roll(p_x, p_history, p_write, tokens, anew, m_c, stride_xt, stride_sw, W: tl.constexpr):
    """Writes the history after `tokens` tokens of a sequence that starts at p_x."""
    window = ()
    for j in tl.static_range(W - 1):
        i_t = (tokens - (W - 1) + j).to(tl.int64)
        b_old = tl.load(p_history + (i_t + W - 1) * stride_sw, mask=m_c & (i_t < 0) & (not anew), other=0.0)
        b_x = tl.load(p_x + i_t * stride_xt, mask=m_c & (i_t >= 0), other=0.0)
        window = window + (tl.where(i_t < 0, b_old.to(tl.float32), b_x.to(tl.float32)),)
    tl.debug_barrier()  # lanes may hold a channel in different places of different loads: all read, then all write
    for j in tl.static_range(W - 1):
        tl.store(p_write + j * stride_sw, window[j].to(p_write.dtype.element_ty), m_c)


def _kernel(
    x, weight, bias, cu_seqlens, conv_state, read_slots, write_slots, fresh, out, T, N, channels, slots, null_slot,
    stride_xt: tl.int64, stride_xc, stride_wc, stride_ww, stride_b, stride_cu,
    stride_s: tl.int64, stride_sc, stride_sw, stride_read, stride_write, stride_fresh,
    stride_ot: tl.int64, stride_oc,
    W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(channels, BC)
    o_c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    i_span, start, end, i_t = chunks.place(cu_seqlens, stride_cu, tl.program_id(0) // blocks, N, T, C)
    n = tl.minimum(end - i_t, C)
    m_c = o_c < channels
    o_c = o_c.to(tl.int64)
    p_out = out + i_t.to(tl.int64) * stride_ot + o_c * stride_oc
    covered = (i_span > 0) & (i_span <= N) & (n > 0)
    i_n = i_span.to(tl.int64) - 1
    read = tl.load(read_slots + i_n * stride_read, mask=covered, other=0).to(tl.int64)
    write = tl.load(write_slots + i_n * stride_write, mask=covered, other=0).to(tl.int64)
    anew = False
    if fresh is not None:
        anew = tl.load(fresh + i_n * stride_fresh, mask=covered, other=0) != 0
    live = covered & good(write, slots, null_slot) & (anew | good(read, slots, null_slot))
    if live:
        first = i_t == start
        p_x = x + i_t.to(tl.int64) * stride_xt + o_c * stride_xc
        p_history = conv_state + read * stride_s + o_c * stride_sc
        window = _past(p_x, p_history, first, anew, m_c, stride_xt, stride_sw, W)
        # Taps as a tile of whole filters: a load a tap would touch every filter's line once for each of them.
        BW: tl.constexpr = triton.next_power_of_2(W)
        o_w = tl.arange(0, BW)[None, :]
        p_w = weight + o_c[:, None] * stride_wc + o_w * stride_ww
        b_w = tl.load(p_w, mask=m_c[:, None] & (o_w < W), other=0.0).to(tl.float32)
        taps = ()
        for j in tl.static_range(W):
            taps = taps + (tl.sum(tl.where(o_w == j, b_w, 0.0), 1),)
        b_bias = tl.zeros([BC], tl.float32)
        if bias is not None:
            b_bias = tl.load(bias + o_c * stride_b, mask=m_c, other=0.0).to(tl.float32)
        p_row = p_x
        for i in range(0, n, ROWS):
            rows = ()
            for r in tl.static_range(ROWS):
                rows = rows + (tl.load(p_row + r * stride_xt, mask=m_c & (i + r < n), other=0.0),)
            for r in tl.static_range(ROWS):
                window = window + (rows[r].to(tl.float32),)
                b_y = b_bias
                for j in tl.static_range(W):
                    b_y += taps[j] * window[r + j]
                b_y = b_y / (1.0 + tl.exp(-b_y))
                tl.store(p_out + r * stride_ot, b_y.to(out.dtype.element_ty), m_c & (i + r < n))
            window = window[ROWS:]
            p_row += ROWS * stride_xt
            p_out += ROWS * stride_ot
        if first:
            p_write = conv_state + write * stride_s + o_c * stride_sc
            _roll(p_x, p_history, p_write, end - start, anew, m_c, stride_xt, stride_sw, W)
    else:
        for _ in range(n):
            tl.store(p_out, tl.zeros([BC], out.dtype.element_ty), m_c)
            p_out += stride_ot


# What changes from step to step: none of these values may be compiled in. Strides that are usually 1 have no type: it
# would keep that from the compiler, and loads would be cut in single elements (ten times as long).
kernel = triton.jit(
    _kernel,
    do_not_specialize=["T", "N", "slots", "null_slot", "stride_cu", "stride_read", "stride_write", "stride_fresh"],
    do_not_specialize_on_alignment=["cu_seqlens", "read_slots", "write_slots", "fresh"],
)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor,
    bias: torch.Tensor | None,
    fresh: torch.Tensor | None,
    null_slot: int | None,
    out: torch.Tensor,
    config: Config | None = None,
) -> None:
    """Launches the kernel; arguments as the module's docstring says. No sync, no allocation, one launch.

    A given config overrides `choose`.
    """
    (T, C), N = x.shape, cu_seqlens.shape[0] - 1
    if T == 0 or C == 0:
        return
    config = config or choose(Shape(C), arch(x.device))
    with current(x.device):
        kernel[(chunks.grid(T, N, config.tokens) * cdiv(C, config.channels),)](
            x, weight, bias, cu_seqlens, conv_state, read_slots, write_slots, fresh, out,
            T, N, C, conv_state.shape[0], -1 if null_slot is None else null_slot, *x.stride(), *weight.stride(),
            bias.stride(0) if bias is not None else 0, cu_seqlens.stride(0), *conv_state.stride(),
            read_slots.stride(0), write_slots.stride(0), fresh.stride(0) if fresh is not None else 0, *out.stride(),
            W=weight.shape[1], C=config.tokens, BC=config.channels, ROWS=config.rows, **config.options,
        )  # fmt: skip
