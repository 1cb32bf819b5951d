"""Attention of each row over the tokens of its selected blocks and of its open block, gathered row by row.

    o[r, h] = sum_t softmax_t(scale q[r, h] . k[t]) v[t]          over the row's tokens t, times sigmoid(out_gate)

A row's list has k * ratio + ratio - 1 entries: its blocks in the order given, then the open block; entries that are
unused, on holes or not yet visible are masked and never fetched. The list is cut into units of UNIT entries. Each is
attended to by itself (sum, maximum, weight), and units are folded into the row one after the other, by the same
arithmetic whether a program takes all units of a row and KV head (many rows) or one each (few rows, then a second
kernel folds): a row's bits do not depend on how many rows there are. All query heads of a KV head share what is
fetched.

    q            [R, Hq, D]                          bfloat16, float16 or float32; any strides
    k_cache      [pages, page_tokens, Hkv, D]        an activation dtype or float8_e4m3fn; any strides; v_cache alike
    page_table   [requests, max_pages], row_request [R], positions [R], block_ids [R, k]   int32 or int64
    out_gate     [R, Hq, D] or None
    out          [R, Hq, D]                          in q's dtype; zeros where there is nothing to attend to
    partial      [R, Hkv, units, G * BD + 2 * BG] float32: sum, maximum (base 2) and weight of each unit
    slots        [rows, width] int32: place in the pool of each entry, -1 masked; with many rows it is made first, by a
                 kernel of its own, so that keys and values are one look-up away and can be fetched ahead
    done         [1] int32 behind them: how many programs of the kernel in Gluon are done

Source: flash attention (arXiv 2205.14135) and its split form, over gathered tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from thalweg.device import arch, cdiv, current, next_power_of_2
from thalweg.qsa import gather

LOG2E = 1.4426950408889634
MANY = 88  # rows times KV heads from which a program takes a row: at 32 and 64 rows 60, 112 us by units, 77, 86 whole
MOST = 16  # query heads of a KV head that the kernel in Gluon takes
FOLD_AHEAD, FOLD_WARPS = 36, 4  # units on their way at once at most, warps of a head
SLOTS_BYTES = 128 << 20  # of slots at once; more rows are attended to in parts


class Shape(NamedTuple):
    """What a configuration depends on."""

    rows: int
    kv_heads: int
    group: int  # query heads of a KV head
    dim: int
    itemsize: int  # of a cached element as it is multiplied
    stored: int  # the same as it is stored


@dataclass(frozen=True)
class Config:
    """tokens and columns are a choice of arithmetic, the order of sums: they depend on no row count."""

    whole: bool  # a program takes all units of a row and KV head; else one, and a second kernel folds
    tokens: int  # of a unit
    columns: int  # of keys and values that are products of their own
    num_warps: int
    num_stages: int
    early: bool  # the second kernel starts beside the first and waits for it (Hopper): 1 us less
    reason: str = field(compare=False)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def choose(shape: Shape, device: str, whole: bool = False) -> Config:
    """The configuration for a shape on a device ("sm_90", "gfx950"; "cpu" under the interpreter)."""
    width = max(16, next_power_of_2(shape.dim))
    tokens = 64
    while tokens > 16 and 2 * tokens * width * shape.itemsize > 1 << 16:
        tokens //= 2
    # Few rows: 8.3 us with 128 columns, 9.4 with 64. Many: 2.5 and 2.7 ms at 128K. An 8-bit cache spills with 128.
    columns, programs = min(width, 128 if shape.stored > 1 else 64), shape.rows * shape.kv_heads
    if whole or programs >= MANY:
        return Config(True, tokens, columns, 4, 2, False, "many rows: a program a row and KV head")
    return Config(False, tokens, columns, 8, 1, device == "sm_90", "few rows: a program a unit, then the fold")


def _slots_kernel(
    table, row_request, positions, block_ids, slots, first, k, ratio, capacity, pages, requests, units,
    stride_tr: tl.int64, stride_tp: tl.int64, stride_rr: tl.int64, stride_p: tl.int64, stride_ir: tl.int64, stride_ik,
    taken, done, PAGE: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A program a row; EACH entries lie side by side in a page and are looked up once. Sets `done` to zero."""
    i_r = tl.program_id(0).to(tl.int64)
    if done is not None:
        tl.store(done, 0, mask=i_r == 0)
    if taken is not None and tl.load(taken + (first + i_r) // ROWS) > 0:
        return
    i_request, position = gather.row(
        row_request, positions, first + i_r, ratio, capacity, requests, stride_rr, stride_p
    )
    p_ids = block_ids + (first + i_r) * stride_ir
    o_e = tl.arange(0, EACH)
    for i_s in range(0, units * (UNIT // EACH), BN):
        o_j = (i_s + tl.arange(0, BN)) * EACH
        b_id = tl.load(p_ids + (o_j // ratio) * stride_ik, mask=o_j < k * ratio, other=-1)
        b_page, b_row, m_j = gather.slots(
            b_id, table + i_request * stride_tr, o_j, position, k, ratio, capacity, pages, stride_tp, PAGE
        )
        b_slot = tl.where(m_j, b_page.to(tl.int32) * PAGE + b_row, -1)[:, None] + o_e[None, :]
        m_e = m_j[:, None]
        if EACH > 1:  # of the open block, the tokens up to the row's own
            m_e = m_e & ((o_j < k * ratio)[:, None] | (o_e < (position + 1) % ratio)[None, :])
        p_slots = slots + i_r * units * UNIT + o_j[:, None] + o_e[None, :]
        tl.store(p_slots, tl.where(m_e, b_slot, -1), mask=(o_j < units * UNIT)[:, None])


def _whole_kernel(
    q, k_cache, v_cache, row_request, positions, slots, out_gate, out,
    first, ratio, capacity, requests, width, group, scale, v_scale,
    stride_qr: tl.int64, stride_qh, stride_qd, stride_kp: tl.int64, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_vp: tl.int64, stride_vt, stride_vh: tl.int64, stride_vd, stride_rr: tl.int64, stride_p: tl.int64,
    stride_gr: tl.int64, stride_gh, stride_gd, stride_or: tl.int64, stride_oh, stride_od,
    taken, D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    FLAT: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program a row and KV head. `first` is the row of the first slots."""
    i_s = tl.program_id(0).to(tl.int64)
    i_r = first + i_s
    if taken is not None and tl.load(taken + i_r // ROWS) > 0:
        return
    i_h = tl.program_id(1)
    o_g = tl.arange(0, BG)
    o_n = tl.arange(0, BN)
    o_c = tl.arange(0, BC)
    NC: tl.constexpr = BD // BC
    _, position = gather.row(row_request, positions, i_r, ratio, capacity, requests, stride_rr, stride_p)
    b_q = gather.query(
        q + i_r * stride_qr + i_h * group * stride_qh, o_g, stride_qh, stride_qd, group, D, BD, BC, DTYPE
    )
    p_k = k_cache + i_h * stride_kh
    p_v = v_cache + i_h * stride_vh
    hi = tl.where(position >= 0, width, 0)
    p_slots = slots + i_s * width + o_n
    b_to = ()
    for _ in tl.static_range(NC):
        b_to = b_to + (tl.zeros([BG, BC], tl.float32),)
    b_tm = tl.full([BG], float("-inf"), tl.float32)
    b_tl = tl.zeros([BG, BC], tl.float32)
    b_slot = tl.load(p_slots)
    for i_j in tl.range(0, hi, BN, num_stages=STAGES):
        m_j = b_slot >= 0
        b_page, b_row = 0, b_slot
        if not FLAT:
            b_page, b_row = (b_slot // PAGE).to(tl.int64), b_slot % PAGE
        b_k = gather.rows(p_k, b_page, b_row, m_j, stride_kp, stride_kt, stride_kd, D, BD, BC, DTYPE)
        b_v = gather.rows(p_v, b_page, b_row, m_j, stride_vp, stride_vt, stride_vd, D, BD, BC, DTYPE)
        # A unit ahead and held by the lanes: keys and values of the next unit can be asked for at once.
        b_slot = tl.load(p_slots + i_j + BN, mask=o_n + i_j + BN < hi, other=-1)
        b_o, b_m, b_l = gather.unit(b_q, b_k, b_v, m_j, scale, NC, DTYPE)
        b_tm, b_a, b_b = gather.fold(b_tm, b_m)
        b_tl = gather.add(b_tl, b_l, b_a[:, None], b_b[:, None])
        b_sum = ()
        for i_c in tl.static_range(NC):
            b_sum = b_sum + (gather.add(b_to[i_c], b_o[i_c], b_a[:, None], b_b[:, None]),)
        b_to = b_sum
    o_h = i_h * group + o_g
    for i_c in tl.static_range(NC):
        o_d = o_c + i_c * BC
        p_gate = None
        if out_gate is not None:
            p_gate = out_gate + i_r * stride_gr + o_h[:, None] * stride_gh + o_d[None, :] * stride_gd
        p_out = out + i_r * stride_or + o_h[:, None] * stride_oh + o_d[None, :] * stride_od
        gather.finish(p_out, p_gate, b_to[i_c], b_tl, v_scale, (o_g < group)[:, None] & (o_d < D)[None, :])


def _unit_kernel(
    q, k_cache, v_cache, table, row_request, positions, block_ids, partial,
    k, ratio, capacity, pages, requests, group, scale,
    stride_qr: tl.int64, stride_qh, stride_qd, stride_kp: tl.int64, stride_kt, stride_kh: tl.int64, stride_kd,
    stride_vp: tl.int64, stride_vt, stride_vh: tl.int64, stride_vd, stride_tr: tl.int64, stride_tp: tl.int64,
    stride_rr: tl.int64, stride_p: tl.int64, stride_ir: tl.int64, stride_ik,
    D: tl.constexpr, BD: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
    DTYPE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a unit, KV head and row."""
    if EARLY:
        gdc_launch_dependents()
    i_u = tl.program_id(0)
    i_h = tl.program_id(1)
    i_r = tl.program_id(2).to(tl.int64)
    o_g = tl.arange(0, BG)
    o_j = i_u * BN + tl.arange(0, BN)
    # All that needs nothing else is asked for first.
    b_id = tl.load(block_ids + i_r * stride_ir + (o_j // ratio) * stride_ik, mask=o_j < k * ratio, other=-1)
    b_q = gather.query(
        q + i_r * stride_qr + i_h * group * stride_qh, o_g, stride_qh, stride_qd, group, D, BD, BC, DTYPE
    )
    i_request, position = gather.row(row_request, positions, i_r, ratio, capacity, requests, stride_rr, stride_p)
    b_page, b_row, m_j = gather.slots(
        b_id, table + i_request * stride_tr, o_j, position, k, ratio, capacity, pages, stride_tp, PAGE
    )
    b_k = gather.rows(k_cache + i_h * stride_kh, b_page, b_row, m_j, stride_kp, stride_kt, stride_kd, D, BD, BC, DTYPE)
    b_v = gather.rows(v_cache + i_h * stride_vh, b_page, b_row, m_j, stride_vp, stride_vt, stride_vd, D, BD, BC, DTYPE)
    b_o, b_m, b_l = gather.unit(b_q, b_k, b_v, m_j, scale, BD // BC, DTYPE)
    i_p = (i_r * tl.num_programs(1) + i_h) * tl.num_programs(0) + i_u
    gather.put(partial + i_p * (group * BD + 2 * BG), b_o, b_m, b_l, o_g, group, BD, BC, BG)


def _fold_kernel(
    partial, out_gate, out, units, group, v_scale, stride_gr: tl.int64, stride_gh, stride_gd, stride_or: tl.int64,
    stride_oh, stride_od, D: tl.constexpr, BD: tl.constexpr, BG: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program a query head and row; AHEAD units are loaded together.

    EARLY: it is launched beside the kernel that writes them, and waits here until that one is done.
    """
    if EARLY:
        gdc_wait()
    i_q = tl.program_id(0)
    i_r = tl.program_id(1).to(tl.int64)
    i_g = i_q % group
    o_d = tl.arange(0, BD)
    m_o = o_d < D
    size = group * BD + 2 * BG
    partial += (i_r * (tl.num_programs(0) // group) + i_q // group) * units * size
    b_to = tl.zeros([BD], tl.float32)
    b_tm = tl.full([], float("-inf"), tl.float32)
    b_tl = tl.full([], 0.0, tl.float32)
    for i_u in range(0, units, AHEAD):
        b_o, b_m, b_l = (), (), ()
        for i_a in tl.static_range(AHEAD):
            there = i_u + i_a < units
            p_u = partial + (i_u + i_a) * size
            b_o = b_o + (tl.load(p_u + i_g * BD + o_d, mask=m_o & there, other=0.0),)
            b_m = b_m + (tl.load(p_u + group * BD + i_g, mask=there, other=float("-inf")),)
            b_l = b_l + (tl.load(p_u + group * BD + BG + i_g, mask=there, other=0.0),)
        for i_a in tl.static_range(AHEAD):
            b_tm, b_a, b_b = gather.fold(b_tm, b_m[i_a])
            b_tl = gather.add(b_tl, b_l[i_a], b_a, b_b)
            b_to = gather.add(b_to, b_o[i_a], b_a, b_b)
    p_gate = None
    if out_gate is not None:
        p_gate = out_gate + i_r * stride_gr + i_q * stride_gh + o_d * stride_gd
    gather.finish(out + i_r * stride_or + i_q * stride_oh + o_d * stride_od, p_gate, b_to, b_tl, v_scale, m_o)


# Counts and the strides that follow them change from step to step: none of their values may be compiled in.
STEPS = ["k", "capacity", "pages", "requests", "stride_tr", "stride_tp", "stride_rr", "stride_p", "stride_ir"]
INDICES = ["table", "row_request", "positions", "block_ids"]
WHOLE = ["first", "width", "capacity", "requests", "stride_rr", "stride_p"]
slots_kernel = triton.jit(
    _slots_kernel, do_not_specialize=[*STEPS, "first", "units"], do_not_specialize_on_alignment=[*INDICES, "done"]
)
whole_kernel = triton.jit(
    _whole_kernel, do_not_specialize=WHOLE, do_not_specialize_on_alignment=["row_request", "positions"]
)
unit_kernel = triton.jit(_unit_kernel, do_not_specialize=STEPS, do_not_specialize_on_alignment=INDICES)
fold_kernel = triton.jit(_fold_kernel, do_not_specialize=["units"])


def multiplied(q: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """The dtype of the products: an 8-bit cache is exact in any other; two different ones meet in float32."""
    return q if cache in (q, torch.float8_e4m3fn) else torch.float32


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    ratio: int,
    scale: float,
    out_gate: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    config: Config | None = None,
    taken: tuple[torch.Tensor, int] | None = None,
    hopper: bool = False,
) -> None:
    """Writes `out`; arguments as the module's docstring says. No sync. A given config overrides `choose`.

    taken: counts `[tiles]` int32 and rows of a tile; rows of tiles that count more than 0 are left as they are.
    hopper: many rows go to the kernel in Gluon, which takes the call (`gather.why_not_gluon`); same bits.
    """
    (R, heads, D), kv_heads = q.shape, k_cache.shape[2]
    if R == 0:
        return
    if k_cache.numel() == 0 or page_table.numel() == 0 or block_ids.shape[1] + ratio == 1:
        out.zero_()
        return
    sizes = multiplied(q.dtype, k_cache.dtype).itemsize, k_cache.dtype.itemsize
    shape = Shape(R, kv_heads, heads // kv_heads, D, *sizes)
    config = config or choose(shape, arch(q.device), whole=taken is not None)
    scales = scale * LOG2E * (1.0 if k_scale is None else k_scale), 1.0 if v_scale is None else float(v_scale)
    index = page_table, row_request, positions, block_ids
    with current(q.device):
        if config.whole:
            _many((q, k_cache, v_cache), index, out_gate, out, ratio, scales, config, taken or (None, 1), hopper)
        else:
            _few((q, k_cache, v_cache), index, out_gate, out, ratio, scales, config)


def _widths(q: torch.Tensor, kv_heads: int, config: Config) -> dict[str, int]:
    tall = max(16, next_power_of_2(q.shape[1] // kv_heads))
    width = max(16, next_power_of_2(q.shape[2]))
    return {"D": q.shape[2], "BD": width, "BG": tall, "BC": min(width, config.columns), "BN": config.tokens}


def _many(heavy, index, out_gate, out, ratio: int, scales, config: Config, taken, hopper: bool) -> None:
    """The slots of rows, then a program a row and KV head; as many rows at once as have room."""
    page_table, row_request, positions, block_ids = index
    (R, k), (requests, columns), (pages, page_tokens) = block_ids.shape, page_table.shape, heavy[1].shape[:2]
    units, (counts, tile) = cdiv(k * ratio + ratio - 1, config.tokens), taken
    width = units * config.tokens
    # Tokens of a block lie side by side, unless it may begin in one page and end in the next.
    each = ratio if config.tokens % ratio == 0 == page_tokens % ratio else 1
    rows = max(1, min(R, SLOTS_BYTES // (4 * width)))
    slots = torch.empty(rows * width + 1, dtype=torch.int32, device=out.device)
    done = slots[-1:] if hopper and counts is None else None
    for first in range(0, R, rows):
        part = min(rows, R - first)
        slots_kernel[(part,)](
            *index, slots, first, k, ratio, columns * page_tokens, pages, requests, units, *page_table.stride(),
            row_request.stride(0), positions.stride(0), *block_ids.stride(), counts, done, PAGE=page_tokens,
            BN=1024 // each, ROWS=tile, UNIT=config.tokens, EACH=each, num_warps=4,
        )  # fmt: skip
        here = first, part, requests, width
        if hopper:
            from thalweg.qsa import attention_gluon

            attention_gluon.rows(heavy, row_request, positions, slots, out_gate, out, *here, scales, counts, tile, done)
        else:
            _whole(heavy, row_request, positions, slots, out_gate, out, *here, ratio, columns, scales, config, taken)


def _whole(heavy, row_request, positions, slots, out_gate, out, first: int, part: int, requests: int, width: int,
           ratio: int, columns: int, scales, config: Config, taken) -> None:  # fmt: skip
    """`part` rows from `first` on, whose slots are given."""
    (q, k_cache, v_cache), (counts, tile) = heavy, taken
    page_tokens, kv_heads = k_cache.shape[1:3]
    gate_strides = (0, 0, 0) if out_gate is None else out_gate.stride()
    flat = all(x.stride(0) == page_tokens * x.stride(1) for x in (k_cache, v_cache))
    whole_kernel[(part, kv_heads)](
        *heavy, row_request, positions, slots, out_gate, out, first, ratio, columns * page_tokens, requests, width,
        q.shape[1] // kv_heads, *scales, *q.stride(), *k_cache.stride(), *v_cache.stride(), row_request.stride(0),
        positions.stride(0), *gate_strides, *out.stride(), counts, **_widths(q, kv_heads, config), PAGE=page_tokens,
        FLAT=flat, STAGES=config.num_stages, DTYPE=gather.DTYPES[multiplied(q.dtype, k_cache.dtype)], ROWS=tile,
        **config.options,
    )  # fmt: skip


def _few(heavy, index, out_gate, out, ratio: int, scales, config: Config) -> None:
    """A program a unit, KV head and row."""
    (q, k_cache, v_cache), (page_table, row_request, positions, block_ids) = heavy, index
    R, (pages, page_tokens, kv_heads, _) = q.shape[0], k_cache.shape
    (requests, columns), k = page_table.shape, block_ids.shape[1]
    units, group = cdiv(k * ratio + ratio - 1, config.tokens), q.shape[1] // kv_heads
    widths = _widths(q, kv_heads, config)
    floats = R * kv_heads * units * (group * widths["BD"] + 2 * widths["BG"])
    partial = torch.empty(floats, dtype=torch.float32, device=q.device)
    unit_kernel[(units, kv_heads, R)](
        *heavy, *index, partial, k, ratio, columns * page_tokens, pages, requests, group, scales[0],
        *q.stride(), *k_cache.stride(), *v_cache.stride(), *page_table.stride(), row_request.stride(0),
        positions.stride(0), *block_ids.stride(), **widths, PAGE=page_tokens,
        DTYPE=gather.DTYPES[multiplied(q.dtype, k_cache.dtype)], EARLY=config.early, **config.options,
    )  # fmt: skip
    _folded(partial, units, out_gate, out, scales[1], group, widths, config.early)


def _folded(
    partial, units: int, out_gate, out, v_scale: float, group: int, widths: dict[str, int], early: bool
) -> None:
    """`out` from what is known of the units."""
    gate_strides = (0, 0, 0) if out_gate is None else out_gate.stride()
    sizes = {name: widths[name] for name in ("D", "BD", "BG")}
    fold_kernel[(out.shape[1], out.shape[0])](
        partial, out_gate, out, units, group, v_scale, *gate_strides, *out.stride(), **sizes,
        AHEAD=cdiv(units, cdiv(units, FOLD_AHEAD)), EARLY=early, num_warps=FOLD_WARPS,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
