"""The k best blocks of each row of scores, exact, ids ascending, by maxima of groups: time does not depend on the scores.

Cut a row into groups of `group` consecutive blocks and rank the groups by their best score, the lower group first
where these are equal. The k best blocks lie in the k first groups: a block outside them has k blocks before it, one in
each. So, with groups of groups until few enough are left at the top:

    maxima   the best score of every group of every level, in one pass over the scores
    pick     a program a row: the k best groups of the top level, then the k best of their members, and so on down

No score is guessed at, no list can overflow and there is no second way for hostile scores. What is compared is an
integer of a score's order: -0.0 equals 0.0, NaN lies below everything. The k-th best of what a program holds is found
by interpolation between counts. Rows with at most k blocks take all of them and read no score.

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

from thalweg.device import arch, current

LOWEST = tl.constexpr(-(2**31))
WORKSPACE = 96 << 20  # bytes; 4,096 rows of 65,536 blocks take 75 MB
HELD = 8192  # values of a row that a program holds
MOST_HELD = 16384  # where k asks for it


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    k: int


@dataclass(frozen=True)
class Config:
    group: int
    levels: int  # of groups; 0: a program holds the row
    segment: int  # scores a program of `maxima`; a power of group or a multiple of it
    segment_warps: int
    num_warps: int
    reason: str = field(compare=False)
    maxnreg: int | None = None


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device."""
    wide = triton.next_power_of_2(shape.k)
    held = HELD if 4 * wide <= HELD else MOST_HELD
    group = min(64, max(2, held // wide))
    levels, top = 0, shape.blocks
    while top > held:
        levels, top = levels + 1, triton.cdiv(top, group)
    if shape.rows <= 132:
        return Config(group, levels, max(1024, group**levels), 4, 16, "few rows: a multiprocessor each")
    return Config(group, levels, max(4096, group**levels), 4, 8, "many rows: several a multiprocessor")


def _segments(blocks: int, config: Config) -> int:
    return triton.cdiv(blocks, config.segment) if config.levels else 0


def row_words(blocks: int, k: int, config: Config) -> int:
    """int32 words of workspace a row: the maxima of all levels, and the groups picked last."""
    maxima = sum(_segments(blocks, config) * config.segment // config.group**i for i in range(1, config.levels + 1))
    return triton.cdiv(maxima, 4) * 4 + triton.next_power_of_2(k)


@triton.jit
def _order(b_x):
    """float32 as int32 of the same order; NaN lowest."""
    b_i = (b_x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(b_x == b_x, b_i ^ ((b_i >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _seen(visible, row_request, i_row, N, requests, stride_v, stride_rr):
    n = tl.load(visible + i_row * stride_v).to(tl.int64)
    n = tl.minimum(tl.maximum(n, 0), N).to(tl.int32)
    if row_request is not None:
        i_request = tl.load(row_request + i_row * stride_rr).to(tl.int64)
        n = tl.where((i_request >= 0) & (i_request < requests), n, 0)
    return n


@triton.jit
def _put_maxima(b_x, p_maxima, i_segment, segments, GROUP: tl.constexpr, LEVELS: tl.constexpr, SEGMENT: tl.constexpr):
    """Stores the maxima of a segment, level behind level. NaN gives way to any number in a maximum."""
    b_max = b_x
    for i in tl.static_range(1, LEVELS + 1):
        b_max = tl.max(tl.reshape(b_max, [SEGMENT // GROUP**i, GROUP]), 1)
        p_level = p_maxima + i_segment * (SEGMENT // GROUP**i)
        tl.store(p_level + tl.arange(0, SEGMENT // GROUP**i), _order(b_max))
        p_maxima += segments * (SEGMENT // GROUP**i)


def _maxima_kernel(
    scores, visible, row_request, workspace,
    N, k, requests, segments,
    stride_r: tl.int64, stride_n, stride_v: tl.int64, stride_rr: tl.int64, stride_w: tl.int64,
    GROUP: tl.constexpr, LEVELS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    i_row = (tl.program_id(0) // segments).to(tl.int64)
    i_segment = tl.program_id(0) % segments
    n = _seen(visible, row_request, i_row, N, requests, stride_v, stride_rr)
    i_n = i_segment * SEGMENT
    if (n > k) & (i_n < n):
        p_x = scores + i_row * stride_r + (i_n + tl.arange(0, SEGMENT)) * stride_n
        p_maxima = workspace + i_row * stride_w
        # Not `if` and `else`: in `else` Triton 3.6 forgets how tensors are aligned.
        if i_n + SEGMENT <= n:
            _put_maxima(tl.load(p_x), p_maxima, i_segment, segments, GROUP, LEVELS, SEGMENT)
        if i_n + SEGMENT > n:
            b_x = tl.load(p_x, mask=i_n + tl.arange(0, SEGMENT) < n, other=float("nan"))
            _put_maxima(b_x, p_maxima, i_segment, segments, GROUP, LEVELS, SEGMENT)


@triton.jit
def _search(b_key, least, low, n_low, high, first):
    """The greatest c in [low, high) that `least` keys reach, or the first found that exactly `least` of them do.

    n_low keys reach low, none reaches high; `first` is looked at first. Then a step is taken where the logarithm of the
    count would meet `least` on a straight line, right for the tail of most distributions; every third step halves what
    is left, so that the worst case is that of bisection.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    n_low = n_low.to(tl.float32)
    n_high = n_low * 0.0 + 0.5
    i_step = least * 0
    goal = least.to(tl.float32)
    c = first.to(tl.int64)
    while (low + 1 < high) & (n_low != goal):
        c = tl.minimum(tl.maximum(c, low + 1), high - 1)
        n = tl.sum((b_key >= c.to(tl.int32)).to(tl.int32))
        reached = n >= least
        high = tl.where(reached, high, c)
        low = tl.where(reached, c, low)
        n_low = tl.where(reached, n.to(tl.float32), n_low)
        n_high = tl.where(reached, n_high, tl.maximum(n.to(tl.float32), 0.5))
        part = tl.log(n_low / goal) / tl.log(n_low / n_high)
        part = tl.where(i_step % 3 == 2, 0.5, tl.minimum(tl.maximum(part, 0.0), 1.0))
        c = low + ((high - low).to(tl.float32) * part).to(tl.int64)
        i_step += 1
    return low.to(tl.int32)


@triton.jit
def _best(b_key, b_id, m, least, k, floor, p_out, stride, SIZE: tl.constexpr):
    """Writes the ids of the `least` best of the keys where m, in their order; at least so many of them reach floor.

    Returns a key that at least k of the blocks in what was written reach.
    """
    b_key = tl.reshape(tl.where(m, b_key, LOWEST), [SIZE])
    b_id = tl.reshape(b_id, [SIZE])
    m = tl.reshape(m, [SIZE])
    n_low = tl.sum((m & (b_key >= floor)).to(tl.int32))
    b_mean = tl.sum(tl.where(b_key >= floor, b_key, 0).to(tl.float32)) / n_low
    low = _search(b_key, least, floor, n_low, tl.max(b_key).to(tl.int64) + 1, b_mean)
    b_take = m & (b_key >= low)
    extra = tl.sum(b_take.to(tl.int32)) - least
    if extra > 0:  # of those equal to the last one the first are taken
        b_equal = (m & (b_key == low)).to(tl.int32)
        b_take = b_take & ((b_equal == 0) | (tl.cumsum(b_equal, 0) <= tl.sum(b_equal) - extra))
    b_at = tl.cumsum(b_take.to(tl.int32), 0) - 1
    tl.store(p_out + b_at * stride, b_id, mask=b_take)
    return tl.where(least < k, LOWEST, low)


@triton.jit
def _lowest(b_key, m):
    return tl.min(tl.reshape(tl.where(m, b_key, 0x7FFFFFFF), [b_key.numel]))


@triton.jit
def _members(p_scores, b_group, m_group, n, stride, GROUP: tl.constexpr):
    """Keys and ids `[groups, GROUP]` of the scores in groups, and which of them there are: the last may be short."""
    o_g = tl.arange(0, GROUP)
    b_id = b_group[:, None] * GROUP + o_g[None, :]
    m_whole = m_group & (b_group * GROUP + GROUP <= n)  # one mask a group, so that a group is loaded whole
    b_x = tl.load(p_scores + b_id * stride, mask=m_whole[:, None], other=float("nan"))
    last = n // GROUP
    b_last = tl.load(p_scores + (last * GROUP + o_g) * stride, mask=last * GROUP + o_g < n, other=float("nan"))
    b_x = tl.where((b_group == last)[:, None], b_last[None, :], b_x)
    return _order(b_x), b_id, m_group[:, None] & (b_id < n)


def _pick_kernel(
    scores, visible, row_request, out, workspace,
    N, k, requests, segments,
    stride_r: tl.int64, stride_n, stride_v: tl.int64, stride_rr: tl.int64, stride_or: tl.int64, stride_k,
    stride_w: tl.int64,
    GROUP: tl.constexpr, LEVELS: tl.constexpr, SEGMENT: tl.constexpr, TOP: tl.constexpr, WIDE: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    n = _seen(visible, row_request, i_row, N, requests, stride_v, stride_rr)
    p_scores = scores + i_row * stride_r
    p_out = out + i_row * stride_or
    # The work lies in `if` and not in `else`: there Triton 3.6 forgets how tensors are aligned.
    if n > k:
        if LEVELS == 0:
            o_g = tl.arange(0, TOP // 16)
            b_key, b_id, m = _members(p_scores, o_g, o_g * 16 < n, n, stride_n, 16)
            _best(b_key, b_id, m, k, k, _lowest(b_key, m), p_out, stride_k, TOP)
        else:
            p_list = workspace + i_row * stride_w + stride_w - WIDE
            p_level = workspace + i_row * stride_w
            for i in tl.static_range(1, LEVELS):
                p_level += segments * (SEGMENT // GROUP**i)
            count = (n + GROUP**LEVELS - 1) // GROUP**LEVELS
            o_t = tl.arange(0, TOP)
            m = o_t < count
            b_key = tl.load(p_level + o_t, mask=m, other=LOWEST)
            least = tl.minimum(k, count)
            floor = _best(b_key, o_t, m, least, k, _lowest(b_key, m), p_list, 1, TOP)
            tl.debug_barrier()
            o_w = tl.arange(0, WIDE)
            for i in tl.static_range(1, LEVELS):
                p_level -= segments * (SEGMENT // GROUP ** (LEVELS - i))
                count = (n + GROUP ** (LEVELS - i) - 1) // GROUP ** (LEVELS - i)
                b_group = tl.load(p_list + o_w, mask=o_w < least, other=0)
                b_id = b_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
                b_key = tl.load(p_level + b_id, mask=(o_w < least)[:, None], other=LOWEST)
                m = (o_w < least)[:, None] & (b_id < count)
                least = tl.minimum(k, count)
                tl.debug_barrier()
                floor = _best(b_key, b_id, m, least, k, floor, p_list, 1, WIDE * GROUP)
                tl.debug_barrier()
            b_group = tl.load(p_list + o_w, mask=o_w < least, other=0)
            b_key, b_id, m = _members(p_scores, b_group, o_w < least, n, stride_n, GROUP)
            _best(b_key, b_id, m, k, k, floor, p_out, stride_k, WIDE * GROUP)
    if n <= k:
        for i_k in range(0, k, BK):
            o_k = i_k + tl.arange(0, BK)
            tl.store(p_out + o_k * stride_k, tl.where(o_k < n, o_k, -1), mask=o_k < k)


# Counts change from step to step: none of their values may be compiled in. Whether rows are aligned is: it is what
# loads of four scores are made by.
STEPS = ["N", "k", "requests", "segments", "stride_v", "stride_rr"]
INDICES = ["visible", "row_request"]
maxima_kernel = triton.jit(_maxima_kernel, do_not_specialize=STEPS, do_not_specialize_on_alignment=INDICES)
pick_kernel = triton.jit(
    _pick_kernel, do_not_specialize=[*STEPS, "stride_or"], do_not_specialize_on_alignment=[*INDICES, "out"]
)


def _part(scores, visible, row_request, requests, out, workspace, config: Config) -> None:
    (R, N), k = scores.shape, out.shape[1]
    segments = _segments(N, config)
    rows = (visible.stride(0), 0 if row_request is None else row_request.stride(0))
    build = {"GROUP": config.group, "LEVELS": config.levels, "SEGMENT": config.segment}
    if segments:
        maxima_kernel[(R * segments,)](
            scores, visible, row_request, workspace, N, k, requests, segments, *scores.stride(), *rows,
            workspace.stride(0), **build, num_warps=config.segment_warps,
        )  # fmt: skip
    top = triton.next_power_of_2(max(16, triton.cdiv(N, config.group**config.levels)))
    pick_kernel[(R,)](
        scores, visible, row_request, out, workspace, N, k, requests, segments, *scores.stride(), *rows,
        *out.stride(), workspace.stride(0), **build, TOP=top, WIDE=triton.next_power_of_2(k),
        BK=min(1024, triton.next_power_of_2(k)), num_warps=config.num_warps, maxnreg=config.maxnreg,
    )  # fmt: skip


def topk(
    scores: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    row_request: torch.Tensor | None = None,
    requests: int = 0,
    workspace: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Writes `out`; arguments as the module's docstring says. No sync. A given config overrides `choose`."""
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
            _part(scores[part], visible[part], owner, requests, out[part], workspace, config)
