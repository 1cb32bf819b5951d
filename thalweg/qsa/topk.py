"""The k best blocks of each row of scores, exact, ids ascending, by maxima of groups: as fast for any scores.

Cut a row into groups of consecutive blocks and rank the groups by their best score, the lower group first where these
are equal. The k best blocks lie in the k first groups: a block outside them has k blocks before it, one in each. So,
with a tree of groups, `fan` in each, up to where a program can hold a level:

    maxima   the best score of every group of the levels from `stored` up, in one pass over the scores
    pick     a program a row: the k best groups of the top level, then the k best of their members, and so on down.
             Maxima of a level below `stored` are taken from the scores of the groups picked, 16 bytes at a time

On Hopper a few rows of up to 131,072 blocks, up to 512 of them, take the second kernel of `few_gluon` instead: the same
choice in a shorter chain of steps. The second kernel is launched beside the first and waits for it in itself.

No score is guessed at, no list can overflow and there is no second way for hostile scores. What is compared is an
integer of a score's order: -0.0 equals 0.0, NaN lies below everything. The k-th best of what a program holds is found
by counting. Rows with at most k blocks take all of them and read no score.

    scores       [R, N] float32, any strides
    visible      [R] int32 or int64; clipped to [0, N]; row_request [R], if given: rows out of range see nothing
    out          [R, k] int32, any strides: ascending, -1 behind
    workspace    int32, `row_words` a row; as many rows are worked on together as fit (`WORKSPACE` bytes by default)

Source: our own.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thalweg.device import arch, cdiv, current, next_power_of_2
from thalweg.qsa.rank import LOWEST, first, gumbel, order, put_best, seen

WORKSPACE = 96 << 20  # bytes; 4,096 rows of 65,536 blocks take 75 MB
HELD = 2048  # nodes of a row that a program holds; four times k where that is more
TOP_HELD = 4096  # of the top level, where there are many rows


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    k: int


@dataclass(frozen=True)
class Config:
    """Level i has groups of fan**i blocks; level 0 are the scores."""

    fan: int
    levels: int  # the top one
    stored: int  # the lowest one whose maxima are stored: 1 or 2
    segment: int  # scores a program of `maxima`; a multiple of the top's groups
    num_warps: int
    reason: str = field(compare=False)
    segment_warps: int = 4
    max_registers: int | None = None  # a lane; NVIDIA's only
    few: bool = False  # `few_gluon` and not `pick`: Hopper's
    early: bool = False  # the second kernel is launched beside the first, and waits in itself: Hopper's

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps} | ({"maxnreg": self.max_registers} if self.max_registers else {})


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device."""
    few, early = shape.rows <= 132, device == "sm_90"
    if few and early and shape.k <= 512 and HELD < shape.blocks <= 2**17:
        # 1 / 16 / 64 rows of 32,768: 8.1 / 9.5 / 11.6 us; 4 warps 8.9 / 10.5 / 13.1, 16 warps 9.6 / 12.4 / - before the
        # stores of a step were apart; of 65,536, 16 warps: 10.1 / 14.7 / 17.2; 8 warps 10.1 / 14.0 / 19.0, groups of
        # 16 11.8 / 12.9 / 18.1; 16 of 131,072: 21.9, groups of 16 15.6. Segments of 1,024 to 4,096: all the same.
        fan, warps = 8 if shape.blocks <= 2**16 else 16, 8 if shape.blocks <= 2**15 else 16
        return Config(fan, 1, 1, 2048, warps, "few rows: a short chain of steps", few=True, early=True)
    held = max(HELD, 4 * next_power_of_2(shape.k))
    fan = 16 if few and shape.k <= 512 and held < shape.blocks <= 16 * held else 4
    levels, top = 0, shape.blocks
    while top > (held if few else max(held, TOP_HELD)):
        levels, top = levels + 1, cdiv(top, fan)
    warps = 4 * held // HELD  # 16 nodes a lane
    if few:  # one row of 32,768: 11.5 us; 12.6 with 16 warps, 13.1 by fans of four
        segment, warps = max(1024, fan**levels), min(16, 2 * warps)
        stored = 1 if fan == 16 else 2
        return Config(fan, levels, stored, segment, warps, "few rows: a multiprocessor each", early=early)
    # P249K / P128K / P32K: 434 / 281 / 97 us; 2 warps 456 / 300 / 101, 8 warps 446 / 304 / 126. With 96 registers five
    # programs of four warps fit a multiprocessor where four do with the 109 that they would take: P128K 266 us for 278.
    registers = 96 if early and warps == 4 and top <= HELD else None  # the 4,096 of a wider top level would spill
    segment = max(4096, fan**levels)
    return Config(fan, levels, 2, segment, min(32, warps), "many rows: few warps each", 4, registers, early=early)


def above(blocks: int, config: Config) -> int:
    """Where, in a row's workspace, the maxima of the level above the lowest stored one begin; 0 if there is none."""
    more = config.levels > config.stored
    return _segments(blocks, config) * config.segment // config.fan**config.stored if more else 0


def _segments(blocks: int, config: Config) -> int:
    return cdiv(blocks, config.segment) if config.levels >= config.stored else 0


def row_words(blocks: int, k: int, config: Config) -> int:
    """int32 words of workspace a row: the maxima of the stored levels, and the groups picked last."""
    levels = range(config.stored, config.levels + 1)
    maxima = _segments(blocks, config) * sum(config.segment // config.fan**i for i in levels)
    return cdiv(maxima, 16) * 16 + max(16, next_power_of_2(k))


@triton.jit
def _put_maxima(b_x, p_maxima, i_segment, segments, FAN: tl.constexpr, STORED: tl.constexpr, LEVELS: tl.constexpr,
                SEGMENT: tl.constexpr):  # fmt: skip
    """Stores the maxima of a segment, level behind level. NaN gives way to any number in a maximum."""
    b_max = tl.max(tl.reshape(b_x, [SEGMENT // FAN**STORED, FAN**STORED]), 1)
    for i in tl.static_range(STORED, LEVELS + 1):
        if i > STORED:
            b_max = tl.max(tl.reshape(b_max, [SEGMENT // FAN**i, FAN]), 1)
        tl.store(p_maxima + i_segment * (SEGMENT // FAN**i) + tl.arange(0, SEGMENT // FAN**i), b_max)
        p_maxima += segments * (SEGMENT // FAN**i)


def _maxima_kernel(
    scores, visible, row_request, workspace,
    N, k, requests, segments,
    stride_r: tl.int64, stride_n, stride_v: tl.int64, stride_rr: tl.int64, stride_w: tl.int64,
    FAN: tl.constexpr, STORED: tl.constexpr, LEVELS: tl.constexpr, SEGMENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    i_row = (tl.program_id(0) // segments).to(tl.int64)
    i_segment = tl.program_id(0) % segments
    n = seen(visible, row_request, i_row, N, requests, stride_v, stride_rr)
    i_n = i_segment * SEGMENT
    if (n > k) & (i_n < n):
        p_x = scores + i_row * stride_r + (i_n + tl.arange(0, SEGMENT)) * stride_n
        p_maxima = (workspace + i_row * stride_w).to(tl.pointer_type(tl.float32), bitcast=True)
        # Not `if` and `else`: in `else` Triton 3.6 forgets how tensors are aligned.
        if i_n + SEGMENT <= n:
            _put_maxima(tl.load(p_x), p_maxima, i_segment, segments, FAN, STORED, LEVELS, SEGMENT)
        if i_n + SEGMENT > n:
            b_x = tl.load(p_x, mask=i_n + tl.arange(0, SEGMENT) < n, other=float("nan"))
            _put_maxima(b_x, p_maxima, i_segment, segments, FAN, STORED, LEVELS, SEGMENT)


@triton.jit
def _members(p_x, b_group, m_group, n, stride, SPAN: tl.constexpr, FIRST: tl.constexpr, FAN: tl.constexpr):
    """Scores `[groups, FAN]` of groups of SPAN blocks, those from block FIRST of each on. NaN past n.

    Groups are loaded whole, with a mask a group, so that four scores are one load. The last one of a row may be short:
    its scores `[FAN]` are loaded by themselves and come second, and third which of the groups it is.
    """
    o_f = FIRST + tl.arange(0, FAN)
    last = n // SPAN
    o_x = b_group[:, None] * SPAN + o_f[None, :]
    b_x = tl.load(p_x + o_x * stride, mask=(m_group & (b_group < last))[:, None], other=float("nan"))
    b_last = tl.load(p_x + (last * SPAN + o_f) * stride, mask=last * SPAN + o_f < n, other=float("nan"))
    return b_x, b_last, m_group & (b_group == last)


@triton.jit
def _best_member(p_x, b_group, m_group, n, stride, SPAN: tl.constexpr, FIRST: tl.constexpr, FAN: tl.constexpr):
    b_x, b_last, m_last = _members(p_x, b_group, m_group, n, stride, SPAN, FIRST, FAN)
    return tl.where(m_last, tl.max(b_last, 0), tl.max(b_x, 1))


@triton.jit
def _nodes(p_x, p_level, b_group, m_group, n, stride, STORED: tl.constexpr, LEVEL: tl.constexpr, FAN: tl.constexpr,
           SIZE: tl.constexpr):  # fmt: skip
    """Best scores `[SIZE]` of the members, on a level, of groups of the level above; p_level: its stored maxima."""
    if LEVEL >= STORED:  # NaN behind the row's last maximum
        o_f = tl.arange(0, FAN)
        b_x = tl.load(p_level + (b_group[:, None] * FAN + o_f[None, :]), mask=m_group[:, None], other=float("nan"))
    elif LEVEL == 0:
        b_x, b_last, m_last = _members(p_x, b_group, m_group, n, stride, FAN, 0, FAN)
        b_x = tl.where(m_last[:, None], b_last[None, :], b_x)
    else:  # joined like this a lane has the four members of a group
        tl.static_assert(FAN == 4 and LEVEL == 1)
        b_0 = _best_member(p_x, b_group, m_group, n, stride, 16, 0, 4)
        b_1 = _best_member(p_x, b_group, m_group, n, stride, 16, 4, 4)
        b_2 = _best_member(p_x, b_group, m_group, n, stride, 16, 8, 4)
        b_3 = _best_member(p_x, b_group, m_group, n, stride, 16, 12, 4)
        b_x = tl.join(tl.join(b_0, b_2), tl.join(b_1, b_3))
    return tl.reshape(b_x, [SIZE])


@triton.jit
def _level(p_stored, segments, FAN: tl.constexpr, STORED: tl.constexpr, LEVEL: tl.constexpr, SEGMENT: tl.constexpr):
    for i in tl.static_range(STORED, LEVEL):
        p_stored += segments * (SEGMENT // FAN**i)
    return p_stored


def _pick_kernel(
    scores, visible, row_request, out, workspace,
    N, k, requests, segments,
    stride_r: tl.int64, stride_n, stride_v: tl.int64, stride_rr: tl.int64, stride_or: tl.int64, stride_k,
    stride_w: tl.int64,
    FAN: tl.constexpr, STORED: tl.constexpr, LEVELS: tl.constexpr, SEGMENT: tl.constexpr, TOP: tl.constexpr,
    WIDE: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    n = seen(visible, row_request, i_row, N, requests, stride_v, stride_rr)
    p_x = scores + i_row * stride_r
    if EARLY:
        gdc_wait()
    if n > k:
        p_stored = (workspace + i_row * stride_w).to(tl.pointer_type(tl.float32), bitcast=True)
        p_list = workspace + (i_row + 1) * stride_w - WIDE
        count = (n + FAN**LEVELS - 1) // FAN**LEVELS
        b_group = tl.arange(0, TOP // FAN)
        b_id = tl.arange(0, TOP)
        p_level = _level(p_stored, segments, FAN, STORED, LEVELS, SEGMENT)
        b_x = _nodes(p_x, p_level, b_group, b_group * FAN < count, n, stride_n, STORED, LEVELS, FAN, TOP)
        b_key = order(b_x, b_id < count)
        least = tl.minimum(k, count)
        low = tl.min(b_key - 1) + 1  # without what is not there: it wraps round
        high = tl.max(b_key) + 1
        c = tl.minimum(tl.maximum(gumbel(b_x, b_id < count, least, count), low), high)
        if LEVELS == 0:
            put_best(
                b_key, tl.arange(0, TOP // 4) * 4, least, low, count, high, c, out + i_row * stride_or, stride_k, TOP
            )
        else:
            low = put_best(b_key, tl.arange(0, TOP // 4) * 4, least, low, count, high, c, p_list, 1, TOP)
        o_w = tl.arange(0, WIDE)
        for i in tl.static_range(1, LEVELS + 1):
            tl.debug_barrier()  # the list is whole
            low = tl.where(least < k, LOWEST + 1, low)  # at least k keys of this level reach it
            m_group = o_w < least
            b_group = tl.load(p_list + o_w, mask=m_group, other=0)
            count = (n + FAN ** (LEVELS - i) - 1) // FAN ** (LEVELS - i)
            b_id = b_group[:, None] * FAN + tl.arange(0, FAN)[None, :]
            m = tl.reshape(m_group[:, None] & (b_id < count), [WIDE * FAN])
            b_first = tl.reshape(b_group[:, None] * FAN + tl.arange(0, FAN // 4)[None, :] * 4, [WIDE * FAN // 4])
            p_level = _level(p_stored, segments, FAN, STORED, LEVELS - i, SEGMENT)
            b_x = _nodes(p_x, p_level, b_group, m_group, n, stride_n, STORED, LEVELS - i, FAN, WIDE * FAN)
            b_key = order(b_x, m)
            least = tl.minimum(k, count)
            n_low = tl.sum((b_key >= low).to(tl.int32))
            c = first(least, low, n_low, high)
            if i < LEVELS:
                tl.debug_barrier()  # the list has been read
                low = put_best(b_key, b_first, least, low, n_low, high, c, p_list, 1, WIDE * FAN)
            else:
                put_best(b_key, b_first, least, low, n_low, high, c, out + i_row * stride_or, stride_k, WIDE * FAN)
    if n <= k:
        for i_k in range(0, k, BK):
            o_k = i_k + tl.arange(0, BK)
            tl.store(out + i_row * stride_or + o_k * stride_k, tl.where(o_k < n, o_k, -1), mask=o_k < k)


# Counts change from step to step: none of their values may be compiled in. Whether rows are aligned is: it is what
# loads of four scores are made by.
STEPS = ["N", "k", "requests", "segments", "stride_v", "stride_rr"]
INDICES = ["visible", "row_request"]
maxima_kernel = triton.jit(_maxima_kernel, do_not_specialize=STEPS, do_not_specialize_on_alignment=INDICES)
pick_kernel = triton.jit(
    _pick_kernel, do_not_specialize=[*STEPS, "stride_or"], do_not_specialize_on_alignment=[*INDICES, "out"]
)


def _part(scores, visible, row_request, requests, out, workspace, config: Config, made: bool) -> None:
    (R, N), k = scores.shape, out.shape[1]
    segments = _segments(N, config)
    rows = (visible.stride(0), 0 if row_request is None else row_request.stride(0))
    build = {"FAN": config.fan, "STORED": config.stored, "LEVELS": config.levels, "SEGMENT": config.segment}
    made = made or segments == 0
    early = config.early and not made
    launch = {"launch_pdl": True} if early else {}
    if not made:
        maxima_kernel[(R * segments,)](
            scores, visible, row_request, workspace, N, k, requests, segments, *scores.stride(), *rows,
            workspace.stride(0), **build, EARLY=early, num_warps=config.segment_warps,
        )  # fmt: skip
    top = next_power_of_2(max(16, cdiv(N, config.fan**config.levels)))
    if config.few:
        from thalweg.qsa.few_gluon import few_kernel

        few_kernel[(R,)](
            scores, visible, row_request, out, workspace.view(torch.float32), workspace, N, k, requests,
            *scores.stride(), *rows, *out.stride(), workspace.stride(0), FAN=config.fan,
            TOP=max(top, 32 * config.num_warps), SLOTS=max(next_power_of_2(k), 32 * config.num_warps),
            W=config.num_warps, EARLY=early, num_warps=config.num_warps, enable_fp_fusion=False, **launch,
        )  # fmt: skip
        return
    pick_kernel[(R,)](
        scores, visible, row_request, out, workspace, N, k, requests, segments, *scores.stride(), *rows,
        *out.stride(), workspace.stride(0), **build, TOP=top, WIDE=max(16, next_power_of_2(k)),
        BK=min(1024, next_power_of_2(k)), EARLY=early, **config.options, **launch,
    )  # fmt: skip


def topk(
    scores: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    row_request: torch.Tensor | None = None,
    requests: int = 0,
    workspace: torch.Tensor | None = None,
    config: Config | None = None,
    made: bool = False,
) -> None:
    """Writes `out`; arguments as the module's docstring says. No sync. A given config overrides `choose`.

    made: the maxima are in the workspace already, which holds all rows; NaN behind a row's last one.
    """
    (R, N), k = scores.shape, out.shape[1]
    if R == 0:
        return
    config = config or choose(Shape(R, N, k), arch(scores.device))
    words = row_words(N, k, config)
    if workspace is None:
        rows = max(1, min(R, WORKSPACE // (4 * words)))
        workspace = torch.empty(rows * words, dtype=torch.int32, device=scores.device)
    rows = workspace.numel() // words
    workspace = workspace[: rows * words].view(rows, words)
    with current(scores.device):
        for lo in range(0, R, rows):
            part = slice(lo, lo + rows)
            owner = None if row_request is None else row_request[part]
            _part(scores[part], visible[part], owner, requests, out[part], workspace, config, made)
