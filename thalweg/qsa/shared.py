"""Attention of many rows, neighbours together where they selected much the same: unions of tiles, then what is left.

A tile of neighbouring rows is attended to over the union of its blocks (`union`) where that is smaller than what its
rows fetch alone by enough; the rows of the other tiles each fetch their own (`attention`). What a tile does is decided
on the device, from its actual union.

    arguments and result     as in `attention`; a row's last bits depend on its neighbours
"""

import torch

from thalweg.device import arch, current
from thalweg.qsa import attention, gather, union


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
    config: union.Config | None = None,
) -> None:
    """Writes `out`. No sync."""
    (R, heads, D), kv_heads, k = q.shape, k_cache.shape[2], block_ids.shape[1]
    scales = (k_scale, v_scale)
    if k_cache.numel() == 0 or page_table.numel() == 0 or k == 0 or R == 0:
        attention.attend(q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, scale,
                         out_gate, *scales)  # fmt: skip
        return
    dtype, group = attention.multiplied(q.dtype, k_cache.dtype), heads // kv_heads
    config = config or union.choose(group, D, dtype.itemsize, _hopper(q, k_cache, v_cache, union.MOST))
    base = scale * attention.LOG2E * (1.0 if k_scale is None else k_scale), 1.0 if v_scale is None else float(v_scale)
    planned = union.sizes(R, group, k, ratio, page_table.shape[1] * k_cache.shape[1], config)
    step = planned.tiles * planned.rows
    with current(q.device):
        for lo in range(0, R, step):
            at = slice(lo, lo + step)
            heavy, gate = (q[at], k_cache, v_cache), None if out_gate is None else out_gate[at]
            index = page_table, row_request[at], positions[at], block_ids[at]
            made = union.lists(index, k_cache, group, ratio, config)
            if config.num_stages:
                union.attend(heavy, made, gate, out[at], ratio, base, dtype, config)
            else:
                from thalweg.qsa import union_gluon

                union_gluon.attend(heavy, made, gate, out[at], ratio, base)
            taken, gluon = (made.counts, made.rows), _hopper(q, k_cache, v_cache, attention.MOST)
            attention.attend(*heavy, *index, out[at], ratio, scale, gate, *scales, taken=taken, hopper=gluon)
            del made  # before the next part's


def _hopper(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, most: int) -> bool:
    """Whether a kernel in Gluon, of at most so many query heads a KV head, takes them."""
    return arch(q.device) == "sm_90" and gather.why_not_gluon(q, k_cache, v_cache, most) is None
