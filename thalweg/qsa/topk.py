"""The k best blocks of each row of scores, exact, ids ascending; one program a row at a time.

A score becomes an integer of the same order (-0.0 equals 0.0, NaN below everything). Then, for a row with n > k blocks:

    1. n above `capacity`: a threshold is guessed from `samples` scores spread over the row, so that more than k and
       fewer than `capacity` should reach it; one pass over the row writes a bit a score, those that do;
    2. if fewer than k or more than `capacity` do, the exact k-th value is found by its digits, four passes of 256-bin
       counts, and the bits are rewritten: all above it, and of those equal to it the first ones. Nothing is dropped and
       nothing depends on luck but the time;
    3. the bits become a list of ids, ascending because the bits are;
    4. the k-th best of the list is found by bisection; what is above it, and of what equals it the first ones, is
       written in order.

Rows with at most k blocks take all of them and read no score.

    scores       [R, N] float32, any strides
    visible      [R] int32 or int64; clipped to [0, N]; row_request [R], if given: rows out of range see nothing
    out          [R, k] int32, any strides: ascending, -1 behind
    workspace    bits and lists of the programs that run at once, whatever R is: `workspace_words`
    fallbacks    [1] int32 or None: counts the rows that took step 2

Source: our own; a sampled threshold before an exact selection is as old as quickselect.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.device import arch, current

LOWEST = tl.constexpr(-(2**31))
PROGRAMS = 1056  # eight a multiprocessor of an H200
EXACT = tl.constexpr(1024)  # scores a step of the exact search


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    blocks: int
    k: int


@dataclass(frozen=True)
class Config:
    capacity: int  # of a list
    samples: int
    chunk: int  # scores a step
    words: int  # of bits turned into ids at a step
    programs: int
    num_warps: int
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps}


def choose(shape: Shape, device: str) -> Config:
    """The configuration for a shape on a device."""
    capacity = max(512, triton.next_power_of_2(3 * min(shape.k, 1 << 15)))
    warps = 8 if capacity <= 2048 else 16
    if shape.rows <= 2 * 132:
        return Config(capacity, 4096, 16384, 1024, PROGRAMS, warps, "few rows: as wide as a core feeds")
    return Config(capacity, 4096, 4096, 1024, PROGRAMS, warps, "many rows: several programs a core")


def workspace_words(shape: Shape, config: Config) -> int:
    """int32 words of workspace that `topk` needs: a bit a score and a list, for each program."""
    return min(shape.rows, config.programs) * (_bit_words(shape.blocks, config) + config.capacity)


def _bit_words(blocks: int, config: Config) -> int:
    return triton.cdiv(triton.cdiv(blocks, config.chunk) * config.chunk // 32, config.words) * config.words


@triton.jit
def _order(b_x):
    """float32 as int32 of the same order; NaN lowest."""
    b_i = (b_x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(b_x == b_x, b_i ^ ((b_i >> 31) & 0x7FFFFFFF), LOWEST)


@triton.jit
def _ones(b_w):
    """Set bits of each int32."""
    b_w = b_w - ((b_w >> 1) & 0x55555555)
    b_w = (b_w & 0x33333333) + ((b_w >> 2) & 0x33333333)
    b_w = (b_w + (b_w >> 4)) & 0x0F0F0F0F
    return ((b_w * 0x01010101) >> 24) & 0xFF


@triton.jit
def _search(b_key, least, most, low, n_low, high):
    """The greatest c in [low, high) that `least` keys reach, or the first found that at most `most` of them do.

    n_low keys reach low, none reaches high. A step is taken where the logarithm of the count would meet `least` on a
    straight line, right for the tail of most distributions; every third step halves what is left, so that the worst
    case is that of bisection.
    """
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    n_low = n_low.to(tl.float32)
    n_high = n_low * 0.0 + 0.5
    i_step = n_low.to(tl.int32) * 0
    goal = least.to(tl.float32)
    while low + 1 < high:
        part = tl.log(n_low / goal) / tl.log(n_low / n_high)
        part = tl.where(i_step % 3 == 2, 0.5, tl.minimum(tl.maximum(part, 0.0), 1.0))
        c = low + ((high - low).to(tl.float32) * part).to(tl.int64)
        c = tl.minimum(tl.maximum(c, low + 1), high - 1)
        n = tl.sum((b_key >= c.to(tl.int32)).to(tl.int32))
        reached = n >= least
        high = tl.where(reached, tl.where(n <= most, c + 1, high), c)
        low = tl.where(reached, c, low)
        n_low = tl.where(reached, n.to(tl.float32), n_low)
        n_high = tl.where(reached, n_high, tl.maximum(n.to(tl.float32), 0.5))
        i_step += 1
    return low.to(tl.int32)


@triton.jit
def _guess(p_row, n, k, stride_n, SAMPLES: tl.constexpr):
    """A key that more than k of n scores should reach: the rank k has among samples, and 4.5 deviations."""
    o_g = tl.arange(0, SAMPLES // 4)
    o_s = (((o_g * n) // (SAMPLES // 4)) & -4)[:, None] + tl.arange(0, 4)[None, :]
    b_key = _order(tl.load(p_row + o_s * stride_n, mask=o_s < n, other=float("nan")))
    expected = k.to(tl.float32) * SAMPLES / n.to(tl.float32)
    rank = tl.minimum(expected + 4.5 * tl.sqrt(expected) + 4.0, SAMPLES - 1.0).to(tl.int32)
    low = tl.min(b_key)
    return _search(b_key, rank, rank + rank // 8, low, rank * 0 + SAMPLES, tl.max(b_key).to(tl.int64) + 1)


@triton.jit
def _words(b_bit, CHUNK: tl.constexpr):
    """Bits `[CHUNK / 32, 32]` as int32 words, the first bit lowest."""
    return tl.sum(b_bit.to(tl.int32) << tl.arange(0, 32)[None, :], 1)


@triton.jit
def _mark(p_row, p_bits, n, threshold, stride_n, CHUNK: tl.constexpr):
    """A bit a score: whether it reaches the threshold. NaN does not, whatever the threshold."""
    o_w = tl.arange(0, CHUNK // 32)
    o_n = o_w[:, None] * 32 + tl.arange(0, 32)[None, :]
    whole = n // CHUNK * CHUNK
    b_i = threshold ^ ((threshold >> 31) & 0x7FFFFFFF)
    value = b_i.to(tl.float32, bitcast=True)
    # The next scores are on their way while these are looked at. (Pipelined by the compiler the loop is 4 x slower.)
    b_next = tl.load(p_row + o_n * stride_n, mask=o_n < whole, other=float("nan"))
    for i_n in range(0, whole, CHUNK):
        b_x = b_next
        i_next = tl.multiple_of(tl.minimum(i_n + CHUNK, whole - CHUNK), CHUNK)
        b_next = tl.load(p_row + (i_next + o_n) * stride_n)
        tl.store(p_bits + i_n // 32 + o_w, _words(b_x >= value, CHUNK))
    if whole < n:
        m_n = whole + o_n < n
        b_x = tl.load(p_row + (whole + o_n) * stride_n, mask=m_n, other=float("nan"))
        tl.store(p_bits + whole // 32 + o_w, _words(b_x >= value, CHUNK))


@triton.jit
def _mark_exact(p_row, p_bits, n, k, stride_n, CHUNK: tl.constexpr):
    """The bits of exactly k scores: above the k-th value, and the first of those equal to it."""
    o_n = tl.arange(0, CHUNK)
    o_b = tl.arange(0, 256)
    prefix = tl.zeros([], tl.int32)
    need = k
    for i_digit in range(4):  # not unrolled: it is big, and seldom run
        shift = 24 - 8 * i_digit
        b_count = tl.zeros([256], tl.int32)
        for i_n in range(0, n, CHUNK):
            m_n = i_n + o_n < n
            b_x = tl.load(p_row + (i_n + o_n) * stride_n, mask=m_n, other=0.0)
            b_u = _order(b_x) ^ LOWEST  # unsigned order
            b_high = (b_u >> shift >> 8) & ((1 << (8 * i_digit)) - 1)
            b_count += tl.histogram((b_u >> shift) & 255, 256, mask=m_n & (b_high == prefix))
        b_above = tl.sum(b_count) - tl.cumsum(b_count, 0)
        digit = tl.max(tl.where((b_above < need) & (b_above + b_count >= need), o_b, 0))
        need -= tl.sum(tl.where(o_b == digit, b_above, 0))
        prefix = (prefix << 8) | digit
    kth = prefix ^ LOWEST
    found = tl.zeros([], tl.int32)  # equal ones so far
    for i_n in range(0, n, CHUNK):
        m_n = i_n + o_n < n
        b_key = _order(tl.load(p_row + (i_n + o_n) * stride_n, mask=m_n, other=0.0))
        b_equal = (m_n & (b_key == kth)).to(tl.int32)
        b_take = (m_n & (b_key > kth)) | ((b_equal > 0) & (found + tl.cumsum(b_equal, 0) <= need))
        found += tl.sum(b_equal)
        b_w = _words(tl.reshape(b_take.to(tl.int32), [CHUNK // 32, 32]), CHUNK)
        tl.store(p_bits + i_n // 32 + tl.arange(0, CHUNK // 32), b_w)


@triton.jit
def _list(p_bits, p_ids, words, W: tl.constexpr, CAP: tl.constexpr):
    """Writes the positions of the first CAP set bits, ascending; returns how many are set."""
    o_w = tl.arange(0, W)
    base = tl.zeros([], tl.int32)
    for i_w in range(0, words, W):
        b_w = tl.load(p_bits + i_w + o_w, mask=i_w + o_w < words, other=0)
        b_n = _ones(b_w)
        b_at = base + tl.cumsum(b_n, 0) - b_n
        for _ in range(tl.max(b_n)):
            b_low = b_w & -b_w
            tl.store(p_ids + b_at, (i_w + o_w) * 32 + _ones(b_low - 1), mask=(b_w != 0) & (b_at < CAP))
            b_at += (b_w != 0).to(tl.int32)
            b_w = b_w ^ b_low
        base += tl.sum(b_n)
    return base


@triton.jit
def _write_best(p_row, p_ids, listed, p_out, total, k, stride_n, stride_k, CAP: tl.constexpr):
    """The k best of `total` candidates, in their order; candidate i is block p_ids[i] if listed, else i."""
    o_c = tl.arange(0, CAP)
    m_c = o_c < total
    b_id = tl.where(listed, tl.load(p_ids + o_c, mask=m_c & listed, other=0), o_c)
    b_key = _order(tl.load(p_row + b_id * stride_n, mask=m_c, other=float("nan")))
    low = tl.min(tl.where(m_c, b_key, 0x7FFFFFFF))
    kth = _search(tl.where(m_c, b_key, LOWEST), k, k, low, total, tl.max(b_key).to(tl.int64) + 1)
    b_above = m_c & (b_key > kth)
    b_equal = m_c & (b_key == kth)
    need = k - tl.sum(b_above.to(tl.int32))
    if tl.sum(b_equal.to(tl.int32)) > need:
        b_equal = b_equal & (tl.cumsum(b_equal.to(tl.int32), 0) <= need)
    b_take = b_above | b_equal
    b_at = tl.cumsum(b_take.to(tl.int32), 0) - 1
    tl.store(p_out + b_at * stride_k, b_id, mask=b_take)


def _kernel(
    scores, visible, row_request, out, workspace, fallbacks,
    R, N, k, requests, bit_words,
    stride_r: tl.int64, stride_n, stride_v: tl.int64, stride_rr: tl.int64, stride_or: tl.int64, stride_k,
    CAP: tl.constexpr, SAMPLES: tl.constexpr, CHUNK: tl.constexpr, W: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    p_bits = workspace + tl.program_id(0).to(tl.int64) * (bit_words + CAP)
    p_ids = p_bits + bit_words
    for i_r in range(tl.program_id(0), R, tl.num_programs(0)):
        i_row = tl.full([], 1, tl.int64) * i_r
        n = tl.load(visible + i_row * stride_v).to(tl.int64)
        n = tl.minimum(tl.maximum(n, 0), N).to(tl.int32)
        if row_request is not None:
            i_request = tl.load(row_request + i_row * stride_rr).to(tl.int64)
            n = tl.where((i_request >= 0) & (i_request < requests), n, 0)
        p_row = scores + i_row * stride_r
        p_out = out + i_row * stride_or
        # The work lies in `if` and not in `else`: there Triton 3.6 forgets how tensors are aligned.
        if n > k:
            total = n
            if n > CAP:
                tl.debug_barrier()  # the list and the bits of the row before have been read
                threshold = _guess(p_row, n, k, stride_n, SAMPLES)
                _mark(p_row, p_bits, n, threshold, stride_n, CHUNK)
                tl.debug_barrier()
                words = (n + CHUNK - 1) // CHUNK * (CHUNK // 32)
                total = _list(p_bits, p_ids, words, W, CAP)
                if (total < k) | (total > CAP):
                    if fallbacks is not None:
                        tl.atomic_add(fallbacks, 1)
                    tl.debug_barrier()
                    _mark_exact(p_row, p_bits, n, k, stride_n, EXACT)
                    tl.debug_barrier()
                    total = _list(p_bits, p_ids, words, W, CAP)
                tl.debug_barrier()
            _write_best(p_row, p_ids, n > CAP, p_out, total, k, stride_n, stride_k, CAP)
        if n <= k:
            for i_k in range(0, k, BK):
                o_k = i_k + tl.arange(0, BK)
                tl.store(p_out + o_k * stride_k, tl.where(o_k < n, o_k, -1), mask=o_k < k)


# Counts change from step to step: none of their values may be compiled in. Whether rows are aligned is: it is what
# loads of four scores are made by.
kernel = triton.jit(
    _kernel,
    do_not_specialize=["R", "N", "k", "requests", "bit_words", "stride_v", "stride_rr", "stride_or"],
    do_not_specialize_on_alignment=["visible", "row_request", "out"],
)


def topk(
    scores: torch.Tensor,
    visible: torch.Tensor,
    out: torch.Tensor,
    row_request: torch.Tensor | None = None,
    requests: int = 0,
    workspace: torch.Tensor | None = None,
    fallbacks: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Writes `out`; arguments as the module's docstring says. No sync. A given config overrides `choose`."""
    (R, N), k = scores.shape, out.shape[1]
    if R == 0:
        return
    shape = Shape(R, N, k)
    config = config or choose(shape, arch(scores.device))
    if workspace is None:
        workspace = torch.empty(workspace_words(shape, config), dtype=torch.int32, device=scores.device)
    with current(scores.device):
        kernel[(min(R, config.programs),)](
            scores, visible, row_request, out, workspace, fallbacks, R, N, k, requests, _bit_words(N, config),
            *scores.stride(), visible.stride(0), 0 if row_request is None else row_request.stride(0), *out.stride(),
            CAP=config.capacity, SAMPLES=config.samples, CHUNK=config.chunk, W=config.words,
            BK=min(1024, triton.next_power_of_2(k)),
            **config.options,
        )  # fmt: skip
