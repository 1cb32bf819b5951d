"""What each QSA op refuses: shapes, dtypes and devices from metadata alone, index values on request.

`expect_*` raise ValueError before anything is launched and can be traced by torch.compile. `check_*` read index
tensors on the host; the ops call them with `check=True`, and every op stays safe on the same values without it.
"""

import torch

from thalweg.contract import ACTIVATIONS, INDEX, expect, index_values, refuse

CACHES = (*ACTIVATIONS, torch.float8_e4m3fn)


def _at_least(op: str, argument: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        refuse(op, argument, f"an int, at least {least}", repr(value))


def _device(tensor: object) -> object:
    return getattr(tensor, "device", None)  # a non-tensor is refused, by name, by the first `expect`


def _expect_rows(op: str, rows: int, device: torch.device, **metadata: torch.Tensor) -> None:
    for argument, tensor in metadata.items():
        expect(op, argument, tensor, (rows,), INDEX, device, names="[rows]")


def expect_append(
    index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys, page_table, out,
    ratio, rope_positions, ring_positions,
) -> None:  # fmt: skip
    op, device = "qsa_append", _device(index_qk)
    expect(op, "index_qk", index_qk, (None, None), ACTIVATIONS, device, names="[T, (Hi + 1) * Di]")
    expect(op, "q_norm_weight", q_norm_weight, (None,), ACTIVATIONS, device, names="[Di]")
    T, width, Di = *index_qk.shape, q_norm_weight.shape[0]
    if Di == 0 or width % Di or width < 2 * Di:
        refuse(op, "index_qk", f"[T, (Hi + 1) * {Di}] with Hi at least 1", f"{width} columns")
    expect(op, "k_norm_weight", k_norm_weight, (Di,), ACTIVATIONS, device, names="[Di]")
    expect(op, "rope_table", rope_table, (None, None), (torch.float32,), device, names="[P, R]")
    if rope_table.shape[0] == 0 or rope_table.shape[1] % 2 or rope_table.shape[1] > Di:
        refuse(op, "rope_table", f"[P, R] with P at least 1 and R even, at most {Di}", list(rope_table.shape))
    _expect_rows(op, T, device, positions=positions, row_request=row_request)
    _at_least(op, "ratio", ratio, 1)
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    expect(op, "raw_ring", raw_ring, (page_table.shape[0], None, Di), ACTIVATIONS, device, names="[requests, Rn, Di]")
    if raw_ring.shape[1] < ratio:
        refuse(op, "raw_ring", f"at least ratio = {ratio} entries deep", raw_ring.shape[1])
    expect(op, "block_keys", block_keys, (None, None, Di), ACTIVATIONS, device, names="[pages, page_rows, Di]")
    expect(op, "rope_positions", rope_positions, (T, 3), INDEX, device, names="[T, 3]", optional=True)
    if (rope_positions is None) != (ring_positions is None):
        given = "None" if ring_positions is None else "a tensor"
        refuse(op, "ring_positions", "given if and only if rope_positions is", given)
    shape = (raw_ring.shape[0], raw_ring.shape[1], 3)
    expect(op, "ring_positions", ring_positions, shape, INDEX, device, names="[requests, Rn, 3]", optional=True)
    expect(op, "out", out, (T, width // Di - 1, Di), (block_keys.dtype,), device, names="[T, Hi, Di]", optional=True)


def _expect_scored(op, index_q, block_keys, page_table, row_request, visible) -> None:
    device = _device(index_q)
    expect(op, "index_q", index_q, (None, None, None), ACTIVATIONS, device, names="[R, Hi, Di]")
    R, heads, Di = index_q.shape
    if heads == 0 or Di == 0:
        refuse(op, "index_q", "[R, Hi, Di] with Hi and Di at least 1", list(index_q.shape))
    expect(op, "block_keys", block_keys, (None, None, Di), ACTIVATIONS, device, names="[pages, page_rows, Di]")
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    _expect_rows(op, R, device, row_request=row_request, visible=visible)


def expect_score(index_q, block_keys, page_table, row_request, visible, out, num_blocks) -> None:
    op = "qsa_score"
    _expect_scored(op, index_q, block_keys, page_table, row_request, visible)
    _at_least(op, "num_blocks", num_blocks, 0)
    shape = (index_q.shape[0], num_blocks)
    expect(op, "out", out, shape, (torch.float32,), index_q.device, names="[R, num_blocks]", optional=True)


def expect_topk(scores, visible, out, k) -> None:
    op, device = "qsa_topk", _device(scores)
    expect(op, "scores", scores, (None, None), (torch.float32,), device, names="[R, N]")
    _expect_rows(op, scores.shape[0], device, visible=visible)
    _at_least(op, "k", k, 1)
    expect(op, "out", out, (scores.shape[0], k), (torch.int32,), device, names="[R, k]", optional=True)


def expect_select(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes) -> None:
    op = "qsa_select"
    _expect_scored(op, index_q, block_keys, page_table, row_request, visible)
    _at_least(op, "k", k, 1)
    _at_least(op, "workspace_bytes", workspace_bytes, 0)
    expect(op, "out", out, (index_q.shape[0], k), (torch.int32,), index_q.device, names="[R, k]", optional=True)


def expect_attend(
    q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, out_gate, k_scale, v_scale
) -> None:  # fmt: skip
    op, device = "qsa_attend", _device(q)
    expect(op, "q", q, (None, None, None), ACTIVATIONS, device, names="[R, Hq, D]")
    R, heads, D = q.shape
    expect(op, "k_cache", k_cache, (None, None, None, D), CACHES, device, names="[pages, page_tokens, Hkv, D]")
    if heads == 0 or D == 0 or k_cache.shape[2] == 0 or heads % k_cache.shape[2]:
        refuse(op, "q", f"[R, Hq, D] with Hq a multiple of Hkv = {k_cache.shape[2]}", list(q.shape))
    expect(op, "v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), device, names="the shape of k_cache")
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    _expect_rows(op, R, device, row_request=row_request, positions=positions)
    expect(op, "block_ids", block_ids, (R, None), INDEX, device, names="[R, k]")
    _at_least(op, "ratio", ratio, 1)
    expect(op, "out_gate", out_gate, (R, heads, D), ACTIVATIONS, device, names="[R, Hq, D]", optional=True)
    for argument, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None and k_cache.dtype != torch.float8_e4m3fn:
            refuse(op, argument, "None unless the caches are float8_e4m3fn", f"{value!r} with {k_cache.dtype}")
    expect(op, "out", out, (R, heads, D), (q.dtype,), device, names="[R, Hq, D]", optional=True)


def _check_pages(op, page_table, pages, row_request) -> None:
    index_values(op, "page_table", page_table, pages)
    index_values(op, "row_request", row_request, page_table.shape[0])


def check_append(positions, row_request, rope_table, block_keys, page_table, rope_positions, **_) -> None:
    """Also: a request's rows are one run of consecutive positions."""
    op = "qsa_append"
    _check_pages(op, page_table, block_keys.shape[0], row_request)
    if rope_positions is None:
        index_values(op, "positions", positions, rope_table.shape[0])
    index_values(op, "rope_positions", rope_positions, rope_table.shape[0])
    last: dict[int, tuple[int, int]] = {}
    for row, (request, position) in enumerate(zip(row_request.tolist(), positions.tolist())):
        if request < 0 or position < 0:
            continue
        if last.get(request, (row - 1, position - 1)) != (row - 1, position - 1):
            wanted = "one run of consecutive tokens a request"
            refuse(op, "positions", wanted, f"{position} at row {row} after {last[request][1]} of request {request}")
        last[request] = (row, position)


def check_score(block_keys, page_table, row_request, visible, num_blocks, **_) -> None:
    _check_pages("qsa_score", page_table, block_keys.shape[0], row_request)
    index_values("qsa_score", "visible", visible, min(num_blocks, page_table.shape[1] * block_keys.shape[1]) + 1)


def check_topk(scores, visible, **_) -> None:
    index_values("qsa_topk", "visible", visible, scores.shape[1] + 1)


def check_select(block_keys, page_table, row_request, visible, **_) -> None:
    _check_pages("qsa_select", page_table, block_keys.shape[0], row_request)
    index_values("qsa_select", "visible", visible, page_table.shape[1] * block_keys.shape[1] + 1)


def check_attend(k_cache, page_table, row_request, positions, block_ids, ratio, **_) -> None:
    """Also: a row's blocks are visible to it and differ."""
    op = "qsa_attend"
    _check_pages(op, page_table, k_cache.shape[0], row_request)
    index_values(op, "positions", positions, page_table.shape[1] * k_cache.shape[1])
    for row, (position, ids) in enumerate(zip(positions.tolist(), block_ids.tolist())):
        used = [block for block in ids if block >= 0]
        if position >= 0 and (len(set(used)) < len(used) or any(block >= (position + 1) // ratio for block in used)):
            wanted = f"distinct and below {(position + 1) // ratio} at position {position}"
            refuse(op, "block_ids", wanted, f"{used[:8]} in row {row}")
