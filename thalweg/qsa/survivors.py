"""The k best blocks of each row without a score matrix: what reaches a threshold that a sample of the keys gives.

A key of every `stride` consecutive blocks is scored first. The threshold of a row is the m-th best of its sample,

    m = k / stride + 4.5 sqrt(k / stride) + 4

so that about m x stride scores reach it and almost never fewer than k. `survivors_gluon` puts these into lists, and
the k best of the lists are the row's. A row is done again by the exact way, `exact`, where that cannot be said: fewer
than k reached the threshold, or a list was full. So the ids are those of score and top-k for any scores; what scores
look like decides only how long it takes. Nothing waits for the host: the exact way is launched always, and mostly finds
nothing to do.

    sample     the sampled keys, pages of 64; how many of a row's are visible
    threshold  a program a row
    flags      for each row what it sees if it must be done again, else 0
    best       a program a row: the k best of its lists, ids ascending

Source: our own.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import current
from thalweg.qsa import score_gluon, survivors_gluon
from thalweg.qsa.rank import LOWEST, first, gumbel, order, search, seen

SAMPLED = 2048  # keys of a row, at most
HELD = 2048  # entries of lists: 16 a lane
PROGRAMS = 264  # of survivors_gluon, that run at once on an H200
MARGIN = 4.5  # standard deviations of how many of the k best are in the sample


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    k: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Config:
    stride: int  # blocks of which one is sampled
    sampled: int  # keys of a request, a multiple of 64
    reach: int  # the threshold is the best but `reach` - 1 of the sample, or one that up to an eighth more reach
    tile: int  # rows
    splits: int  # programs of a row tile; each has two lists a row
    capacity: int  # of a list
    held: int  # entries of lists that a program takes whole where they fit; else all, by a launch of its own
    reason: str = field(compare=False)

    @property
    def row_words(self) -> int:
        """int32 words that a row takes: lists and their counts, threshold, samples seen, flags."""
        return 2 * self.splits * (2 * self.capacity + 1) + 4


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device that takes it."""
    stride = -(-shape.blocks // SAMPLED)
    sampled = -(-(shape.blocks // stride) // 64) * 64
    tile = score_gluon.choose(score_gluon.Shape(shape.rows, shape.blocks, shape.heads, shape.dim), device).rows
    splits = max(1, min(16, PROGRAMS // -(-shape.rows // tile)))
    wanted = shape.k / stride
    reach = int(wanted + MARGIN * wanted**0.5 + 4)
    most = 1.125 * reach
    most = (most + 5 * most**0.5) * stride / (2 * splits)
    capacity = -(-int(most + 5 * most**0.5 + 32) // 32) * 32
    held = triton.next_power_of_2(max(HELD, 4 * shape.k))
    reason = "one wave of programs; lists for five deviations of what a threshold lets through, and of a list's part"
    return Config(stride, sampled, reach, tile, splits, capacity, held, reason)


def _sample_kernel(
    keys, table, row_request, visible, sample, sample_table, sampled_seen, R, k, requests, most, pages, stride, sampled,
    stride_kp: tl.int64, stride_kr: tl.int64, stride_tr: tl.int64, stride_tp: tl.int64, stride_v: tl.int64,
    stride_rr: tl.int64,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs of 64 samples of a request, then programs of BLOCK rows."""
    i_p = tl.program_id(0)
    tiles = sampled // 64
    if i_p < requests * tiles:
        i_request = i_p // tiles
        o_s = i_p % tiles * 64 + tl.arange(0, 64)
        # Any of the `stride`, without a pattern that keys could have too.
        b_mix = (o_s.to(tl.uint32) + 1) * 0x9E3779B1
        b_mix = (b_mix ^ (b_mix >> 15)) * 0x85EBCA77
        o_b = o_s * stride + ((b_mix ^ (b_mix >> 13)) % stride.to(tl.uint32)).to(tl.int32)
        p_page = table + i_request.to(tl.int64) * stride_tr + (o_b // PAGE).to(tl.int64) * stride_tp
        b_page = tl.load(p_page, mask=o_b < most, other=-1).to(tl.int64)
        m = (b_page >= 0) & (b_page < pages)
        o_d = tl.arange(0, D)
        o_k = tl.where(m, b_page, 0) * stride_kp + (o_b % PAGE).to(tl.int64) * stride_kr
        b_k = tl.load(keys + o_k[:, None] + o_d[None, :], mask=m[:, None], other=float("nan"))
        tl.store(sample + (i_p.to(tl.int64) * 64 + tl.arange(0, 64)[:, None]) * D + o_d[None, :], b_k)
        tl.store(sample_table + i_p, i_p)
    if i_p >= requests * tiles:
        o_r = (i_p - requests * tiles) * BLOCK + tl.arange(0, BLOCK)
        b_n = tl.load(visible + o_r.to(tl.int64) * stride_v, mask=o_r < R, other=0).to(tl.int64)
        b_n = tl.minimum(tl.maximum(b_n, 0), most).to(tl.int32)
        b_request = tl.load(row_request + o_r.to(tl.int64) * stride_rr, mask=o_r < R, other=-1)
        m = (b_request >= 0) & (b_request < requests) & (b_n > k)  # nobody writes the scores of a row of no request
        tl.store(sampled_seen + o_r, tl.where(m, b_n // stride, 0), mask=o_r < R)


def _threshold_kernel(scores, sampled_seen, least_score, stride_s: tl.int64, reach, SIZE: tl.constexpr):
    """The reach-th best of a row's sample, or all numbers where it has not so many."""
    i_row = tl.program_id(0).to(tl.int64)
    n = tl.load(sampled_seen + i_row)
    o_s = tl.arange(0, SIZE)
    b_x = tl.load(scores + i_row * stride_s + o_s, mask=o_s < n, other=float("nan"))
    b_key = order(b_x, o_s < n)
    least = float("-inf")
    if n > reach:
        low = tl.min(b_key - 1) + 1  # without what is not there: it wraps round
        high = tl.max(b_key) + 1
        c = tl.minimum(tl.maximum(gumbel(b_x, o_s < n, reach, n), low), high)
        key, _ = search(b_key, reach, low, n, high, c, reach // 8)
        if key > LOWEST + 1:
            least = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
    tl.store(least_score + i_row, least)


def _flags_kernel(
    counts, visible, row_request, flags, again, R, N, k, requests, lists, capacity, stride_v: tl.int64,
    stride_rr: tl.int64,
    BLOCK: tl.constexpr, LISTS: tl.constexpr,
):  # fmt: skip
    """What a row sees if it must be done again, and if one of its BLOCK must: a tile of rows takes as long as one row,
    and the scorer guesses what it takes from its first and last row."""
    o_r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    o_l = tl.arange(0, LISTS)
    b_n = tl.load(visible + o_r * stride_v, mask=o_r < R, other=0).to(tl.int64)
    b_n = tl.minimum(tl.maximum(b_n, 0), N).to(tl.int32)
    b_request = tl.load(row_request + o_r * stride_rr, mask=o_r < R, other=-1)
    b_n = tl.where((b_request >= 0) & (b_request < requests), b_n, 0)
    m = (o_r < R)[:, None] & (o_l < lists)[None, :]
    b_count = tl.load(counts + o_r[:, None] * lists + o_l[None, :], mask=m, other=0)
    bad = ((tl.sum(b_count, 1) < k) | (tl.max(b_count, 1) > capacity)) & (b_n > k)
    tl.store(flags + o_r, tl.where(bad, b_n, 0), mask=o_r < R)
    any_bad = tl.max(bad.to(tl.int32)) > 0
    tl.store(again + o_r, tl.where(any_bad, b_n, 0), mask=o_r < R)


@triton.jit
def _put_lists(p_list, b_count, p_out, stride_k, k, capacity, LISTS: tl.constexpr, EACH: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Writes the ids of the k best of lists that hold at most EACH, ascending."""
    SIZE: tl.constexpr = LISTS * EACH
    o_e = tl.arange(0, EACH)
    b_entry = tl.load(
        p_list + tl.arange(0, LISTS)[:, None] * capacity + o_e[None, :], mask=o_e[None, :] < b_count[:, None], other=0
    )
    m = tl.reshape(o_e[None, :] < b_count[:, None], [SIZE])
    b_entry = tl.reshape(b_entry, [SIZE])
    b_key = order((b_entry >> 32).to(tl.int32).to(tl.float32, bitcast=True), m)
    b_id = b_entry.to(tl.int32)
    low = tl.min(b_key - 1) + 1  # without what is not there: it wraps round
    high = tl.max(b_key) + 1
    count = tl.sum(b_count)
    low, n_low = search(b_key, k, low, count, high, first(k, low, count, high))
    b_in = b_key >= low
    if n_low > k:  # of those equal to the last one the lowest blocks
        b_turn = tl.where(b_key == low, -b_id, LOWEST)
        equal = tl.sum((b_key == low).to(tl.int32))
        below = tl.min(b_turn - 1) + 1
        above = tl.max(b_turn) + 1
        left = equal - (n_low - k)
        last, _ = search(b_turn, left, below, equal, above, first(left, below, equal, above))
        b_in = b_in & ((b_key > low) | (b_turn >= last))
    b_at = tl.cumsum(b_in.to(tl.int32), 0) - 1
    tl.store(p_out + b_at * stride_k, b_id, mask=b_in)
    tl.debug_barrier()
    o_w = tl.arange(0, WIDE)
    b_best = tl.sort(tl.load(p_out + o_w * stride_k, mask=o_w < k, other=0x7FFFFFFF))
    tl.debug_barrier()
    tl.store(p_out + o_w * stride_k, b_best, mask=o_w < k)


def _best_kernel(
    lists, counts, flags, visible, row_request, out, N, k, requests, used, capacity, above,
    stride_v: tl.int64, stride_rr: tl.int64, stride_or: tl.int64, stride_k,
    LISTS: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows whose longest list holds more than `above` and at most EACH; above -1: also those that see at most k."""
    i_row = tl.program_id(0).to(tl.int64)
    n = seen(visible, row_request, i_row, N, requests, stride_v, stride_rr)
    p_out = out + i_row * stride_or
    o_w = tl.arange(0, WIDE)
    if (n <= k) & (above < 0):
        tl.store(p_out + o_w * stride_k, tl.where(o_w < n, o_w, -1), mask=o_w < k)
    if (n > k) & (tl.load(flags + i_row) == 0):
        o_l = tl.arange(0, LISTS)
        b_count = tl.load(counts + i_row * used + o_l, mask=o_l < used, other=0)
        most = tl.max(b_count)
        if (most > above) & (most <= EACH):
            p_list = lists + i_row * used * capacity
            _put_lists(p_list, b_count, p_out, stride_k, k, capacity, LISTS, EACH, WIDE)


INDICES = ["table", "row_request", "visible"]
sample_kernel = triton.jit(
    _sample_kernel,
    do_not_specialize=["R", "k", "requests", "most", "pages", "stride", "sampled", "stride_tr", "stride_tp",
                       "stride_v", "stride_rr"],
    do_not_specialize_on_alignment=INDICES,
)  # fmt: skip
threshold_kernel = triton.jit(_threshold_kernel, do_not_specialize=["reach"])
flags_kernel = triton.jit(
    _flags_kernel,
    do_not_specialize=["R", "N", "k", "requests", "lists", "capacity", "stride_v", "stride_rr"],
    do_not_specialize_on_alignment=["row_request", "visible"],
)
best_kernel = triton.jit(
    _best_kernel,
    do_not_specialize=["N", "k", "requests", "used", "above", "stride_v", "stride_rr", "stride_or"],
    do_not_specialize_on_alignment=["row_request", "visible", "out"],
)


def _power(n: int) -> int:
    return triton.next_power_of_2(n)


def select(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    rest: torch.Tensor,
    config: Config,
    exact: Callable[[torch.Tensor], None],
) -> torch.Tensor:
    """Writes `out`; arguments as in `select`. Returns how many blocks each row sees that `exact` did again, else 0.

    workspace: int32, `row_words` a row. rest: int32, `rest_bytes` for the sample, free again when `exact` is called.
    """
    (R, k), requests, c = out.shape, page_table.shape[0], config
    (pages, page, D), N, used = block_keys.shape, page_table.shape[1] * block_keys.shape[1], 2 * config.splits
    rows = (visible.stride(0), row_request.stride(0))
    ends = list(itertools.accumulate((0, 2 * used * c.capacity * R, used * R, R, R, R, R)))
    lists, counts, least_score, sampled_seen, flags, again = (workspace[a:b] for a, b in itertools.pairwise(ends))
    lists, counts, least_score = lists.view(torch.int64), counts.view(R, used), least_score.view(torch.float32)
    scores, table, sample = _sampling(rest, R, requests, D, block_keys.dtype, c)
    with current(out.device):
        sample_kernel[(table.numel() + -(-R // 1024),)](
            block_keys, page_table, row_request, visible, sample, table, sampled_seen, R, k, requests, N, pages,
            c.stride, c.sampled, *block_keys.stride()[:2], *page_table.stride(), *rows, D=D, PAGE=page, BLOCK=1024,
        )  # fmt: skip
        score_gluon.score(index_q, sample, table, row_request, sampled_seen, scores, fill=False)
        threshold_kernel[(R,)](scores, sampled_seen, least_score, c.sampled, c.reach, SIZE=_power(c.sampled))
        survivors_gluon.survivors(
            index_q, block_keys, page_table, row_request, visible, least_score, lists, counts, k, c.tile, c.capacity
        )
        flags_kernel[(-(-R // 64),)](
            counts, visible, row_request, flags, again, R, N, k, requests, used, c.capacity, *rows,
            BLOCK=64, LISTS=_power(used),
        )  # fmt: skip
        exact(again)
        above, width = -1, _power(used)
        for each in sorted({min(c.held // width, _power(c.capacity)), _power(c.capacity)}):
            best_kernel[(R,)](
                lists, counts, flags, visible, row_request, out, N, k, requests, used, c.capacity, above, *rows,
                *out.stride(), LISTS=width, EACH=each, WIDE=_power(k),
            )  # fmt: skip
            above = each
    return flags


def rest_bytes(R: int, requests: int, dim: int, config: Config) -> int:
    """Bytes that the sample and its scores take, of 16-bit keys."""
    return 4 * R * config.sampled + requests * config.sampled * (2 * dim + 4)


def _sampling(rest: torch.Tensor, R: int, requests: int, dim: int, dtype: torch.dtype, config: Config):
    """The scores of the sample `[R, sampled]`, its page table and its keys, within `rest` (int32)."""
    a = R * config.sampled
    b = a + requests * config.sampled * dim // 2
    tiles = requests * config.sampled // 64
    scores = rest[:a].view(torch.float32).view(R, config.sampled)
    sample = rest[a:b].view(dtype).view(tiles, 64, dim)
    return scores, rest[b : b + tiles].view(requests, -1), sample
