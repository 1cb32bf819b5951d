"""Inverse of unit lower triangular blocks, `X = (I + strict_lower(L))^-1`: the solver of the KDA chunk form.

    diagonal tiles, 16 x 16:   row i of X = e_i - sum_{k<i} L[i, k] row k of X           fp32, all tiles at once
    tiles below them:          X_ij = -X_ii sum_{j<=k<i} L_ik X_kj                       fp32 tiles, row by row of tiles

One warp owns a block and one lane a column (of two tiles for C = 64), so that a substitution step is one FMA on an
entry of L that every lane of a tile reads: no reduction, no shuffle, no barrier. The products run transposed: what
one product returns, X_ij^T, is already laid out as the left operand of the next. One pass, no workspace.

    lower       [B, T, H, C]  float32, bfloat16, float16: row t of a block is lower[b, t, h, :], C in 16, 32, 64
    out         [B, T, H, C]  any of the three dtypes
    cu_seqlens  [N + 1] int32 or int64, B = 1: blocks are cut from the start of every sequence; absent: of every row b

Read: the strictly lower part (a load of four entries may touch the diagonal and what lies right of it, which changes
nothing: it may be NaN). Written: every row; zeros above the diagonal, right of a last block's n columns, and in rows
no sequence covers. A non-finite entry of the lower part leaves its own block undefined and no other.

Source: forward substitution by blocks; C = 64 blocks are those of Kimi Linear (arXiv 2510.26692), chunkwise form.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.contract import refuse
from thalweg.device import arch, cdiv, current
from thalweg.kda import chunks
from thalweg.kda.products import product
from thalweg.kda.substitution import substitute, unstack

OP = "solve_unit_lower"


class Shape(NamedTuple):
    """What a configuration depends on: neither T nor the number of sequences, so that a new length compiles nothing."""

    C: int
    H: int
    out_dtype: torch.dtype
    precision: str  # ieee, tf32x3 or tf32: how exact the products below the diagonal must be


@dataclass(frozen=True)
class Config:
    products: str  # bf16x3, or an input_precision of tl.dot
    heads: int  # blocks of neighbouring heads that one program owns
    num_warps: int
    reason: str = field(compare=False)
    max_registers: int | None = None  # a lane, NVIDIA only

    @property
    def options(self) -> dict[str, int | bool]:
        """Launch options. FP fusion is stated: Triton 3.10 changes its default, and bits with it."""
        cap = {"maxnreg": self.max_registers} if self.max_registers else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": True, **cap}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    nvidia = device.startswith("sm_")
    # 16 columns are half a warp: two heads fill it. Alone, loads are cut in pieces and shuffled: 760 instructions a
    # block against 210.
    heads = 2 if shape.C == 16 and shape.H > 1 else 1
    if shape.out_dtype != torch.float32 and not (shape.precision == "tf32" and nvidia):
        # 128 registers, 16 warps a multiprocessor: left alone the compiler takes 172, which is 8 warps.
        reason = "rounding the result to 16 bits hides the 2^-15 of three bf16 products"
        return Config("bf16x3", heads, 1, reason, 128 if nvidia and shape.C == 64 else None)
    if shape.precision == "tf32" and nvidia:
        return Config("tf32", heads, 1, "asked for: one tensor-core product")
    if shape.precision == "tf32x3" and nvidia:
        return Config("tf32x3", heads, 1, "asked for: an fp32 result keeps 2^-21, which three bf16 products do not")
    # One warp cannot hold the operands of an exact product at C = 64 (224 bytes spilled on sm_90); two can.
    warps = 2 if nvidia and shape.C == 64 else 1
    return Config("ieee", heads, warps, "fp32 result and exact fp32 products")


@triton.jit
def _block(p_in, p_out, stride_in, stride_out, n, diagonal, TILES: tl.constexpr, PRODUCTS: tl.constexpr):
    """Stores the inverse of one block of n rows; diagonal: the transposed inverses of its TILES diagonal tiles."""
    o_r = tl.arange(0, 16)[:, None]
    o_c = tl.arange(0, 16)[None, :]
    tiles = ()  # X_ij^T, row by row of tiles
    for i in tl.static_range(TILES):
        p_row = p_in + tl.minimum(i * 16 + o_c, n - 1) * stride_in + o_r
        lowers = ()  # L_ik^T: rows across
        for k in tl.static_range(i):
            lowers = lowers + (tl.load(p_row + k * 16).to(tl.float32),)
        for j in tl.static_range(i):
            b_acc = tl.zeros([16, 16], tl.float32)
            for k in tl.static_range(j, i):
                b_acc = product(tiles[k * (k + 1) // 2 + j], lowers[k], b_acc, PRODUCTS)
            tiles = tiles + (product(b_acc, -diagonal[i], tl.zeros([16, 16], tl.float32), PRODUCTS),)
        tiles = tiles + (diagonal[i],)
        p_row = p_out + (i * 16 + o_r) * stride_out + o_c
        m_row = i * 16 + o_r < n
        for j in tl.static_range(TILES):
            if j <= i:
                tl.store(p_row + j * 16, tl.trans(tiles[i * (i + 1) // 2 + j].to(p_out.dtype.element_ty)), m_row)
            else:
                tl.store(p_row + j * 16, tl.zeros([16, 16], p_out.dtype.element_ty), m_row)


def _kernel(
    lower, out, cu_seqlens, T, H, N, blocks,
    stride_lb: tl.int64, stride_lt, stride_lh, stride_ob: tl.int64, stride_ot, stride_oh, stride_cu,
    C: tl.constexpr, HEADS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = C // 16
    groups = tl.cdiv(H, HEADS)
    i_h = tl.program_id(0) % groups * HEADS
    i_block = tl.program_id(0) // groups
    if cu_seqlens is None:
        i_t = i_block % blocks * C
        n = tl.minimum(T - i_t, C)
        covered = True
        lower += (i_block // blocks) * stride_lb
        out += (i_block // blocks) * stride_ob
    else:
        i_t, n, _, covered = chunks.locate(cu_seqlens, stride_cu, i_block, N, T, C)
    lower += i_t.to(tl.int64) * stride_lt
    out += i_t.to(tl.int64) * stride_ot
    if not covered:
        o_r = tl.arange(0, C)[:, None]
        o_c = tl.arange(0, C)[None, :]
        for i in tl.static_range(HEADS):
            p_zeros = out + tl.minimum(i_h + i, H - 1).to(tl.int64) * stride_oh + o_r * stride_ot + o_c
            tl.store(p_zeros, tl.zeros([C, C], out.dtype.element_ty), o_r < n)
        return
    if n > 0:
        i_tile = tl.arange(0, HEADS * TILES)[:, None, None]
        i_head = tl.minimum(i_h + i_tile // TILES, H - 1).to(tl.int64)  # past H: the last head once more
        o_tile = i_tile % TILES * 16
        p_tile = lower + i_head * stride_lh + o_tile * stride_lt + o_tile
        diagonals = unstack(substitute(p_tile, stride_lt, n - 1 - o_tile, HEADS * TILES), HEADS * TILES)
        for i in tl.static_range(HEADS):
            i_head = tl.minimum(i_h + i, H - 1).to(tl.int64)
            _block(lower + i_head * stride_lh, out + i_head * stride_oh, stride_lt, stride_ot, n,
                   diagonals[i * TILES : (i + 1) * TILES], TILES, PRODUCTS)  # fmt: skip


# T, H, N and what follows from them change from step to step: none of their values may be compiled in.
kernel = triton.jit(
    _kernel,
    do_not_specialize=["T", "H", "N", "blocks", "stride_cu"],
    do_not_specialize_on_alignment=["cu_seqlens"],
)


def solve_unit_lower(
    lower: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    out: torch.Tensor,
    precision: str = "ieee",
    config: Config | None = None,
) -> None:
    """Launches the kernel: a program a block (and group of heads); arguments as the module's docstring says.

    No sync, no allocation, no workspace. A given config overrides `choose`. Raises ValueError for a layout that the
    kernel does not take: a last dimension that is not contiguous, rows 2^31 / C elements apart or more.
    """
    B, T, H, C = lower.shape
    for name, tensor in (("lower", lower), ("out", out)):
        if tensor.stride(3) != 1:
            refuse(OP, name, "contiguous in its last dimension", f"strides {tuple(tensor.stride())}")
        if tensor.stride(1) * C >= 2**31:
            refuse(OP, name, f"rows less than {2**31 // C} elements apart", f"strides {tuple(tensor.stride())}")
    if lower.numel() == 0:
        return
    machine = arch(lower.device)
    config = config or choose(Shape(C, H, out.dtype, precision), machine)
    if machine.startswith("gfx"):
        # Hides that a tensor is below 2 GB: where it is told so, AMD's pointer pass (Triton 3.6 and 3.9) follows the
        # unrolled rows of C = 32 and 64 for more than ten minutes.
        lower, out = (triton.reinterpret(x, x.dtype) for x in (lower, out))
    blocks = cdiv(T, C)
    packed = cu_seqlens is not None
    N = cu_seqlens.shape[0] - 1 if packed else 0
    numbers = chunks.grid(T, N, C) if packed else B * blocks
    with current(lower.device):
        kernel[(numbers * cdiv(H, config.heads),)](
            lower, out, cu_seqlens, T, H, N, blocks,
            lower.stride(0) if B > 1 else 0, lower.stride(1), lower.stride(2),
            out.stride(0) if B > 1 else 0, out.stride(1), out.stride(2),
            cu_seqlens.stride(0) if packed else 0,
            C=C, HEADS=config.heads, PRODUCTS=config.products, **config.options,
        )  # fmt: skip
