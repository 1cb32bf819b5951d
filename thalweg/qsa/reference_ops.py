"""The `reference` implementation of the QSA ops: the math of `reference.py` behind pages, padding and the ring.

Plain torch on any device. Each runner writes every element of `out`. Index tensors are taken as they come: a request,
page, block or position out of range is padding or a hole, never an access. Temporaries are tiled, so that memory does
not grow with the number of rows or with the context.
"""

from collections.abc import Iterator

import torch

from thalweg.qsa import reference

ROW_TILE, KEY_TILE = 64, 1024  # rows x heads x keys x 8 bytes of float64 dots stay in cache
REQUESTS = 8  # whose keys are gathered and scored together
TOPK_BYTES = 32 << 20  # temporaries of one top-k step
GATHER_BYTES = 1 << 20  # float32 keys (and as much again of values) of one attention step


def page_slots(page_table: torch.Tensor, request: torch.Tensor, index: torch.Tensor, rows: int, pages: int):
    """Flat row in a pool `[pages, rows]` of entry `index` of each request, int64; -1 for holes and what is outside.

    request and index broadcast; request must be a valid row of the table. index -1 gives -1.
    """
    if page_table.shape[1] == 0 or pages * rows == 0:
        return torch.full(torch.broadcast_shapes(request.shape, index.shape), -1, device=page_table.device)
    column = torch.div(index, rows, rounding_mode="floor")
    page = page_table[request, column.clamp(0, page_table.shape[1] - 1)].long()
    inside = (column >= 0) & (column < page_table.shape[1]) & (page >= 0) & (page < pages)
    return torch.where(inside, page * rows + index % rows, -1)


def gather_rows(pool: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor | None = None) -> torch.Tensor:
    """Rows `[R, M]` (flat, all valid) of a pool `[pages, rows, heads, D]` -> `[R, M, heads, D]`.

    Where rows are evenly spaced and a row's heads lie within one pitch (a plain cache, or the key half of a combined
    one), whole pitches are copied, several times faster than element by element; then scratch, flat and of the pool's
    dtype, may take them: memory that is new to the process costs more than the copy.
    """
    pages, page_rows, heads, D = pool.shape
    page_pitch, pitch, head_pitch, one = pool.stride()
    span = (heads - 1) * head_pitch + D
    if one != 1 or span > pitch or (pages > 1 and page_pitch != page_rows * pitch):
        return pool[slots // page_rows, slots % page_rows]
    flat = pool.as_strided((pages * page_rows, span), (pitch, 1))
    if scratch is None or scratch.dtype != pool.dtype or scratch.numel() < slots.numel() * span:
        rows = flat.index_select(0, slots.flatten())
    else:
        rows = scratch[: slots.numel() * span].view(-1, span)
        torch.index_select(flat, 0, slots.flatten(), out=rows)
    return rows.as_strided((*slots.shape, heads, D), (slots.shape[1] * span, span, head_pitch, 1))


def live_rows(row_request: torch.Tensor, requests: int) -> torch.Tensor:
    return (row_request >= 0) & (row_request < requests)


def append(
    index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys, page_table, out,
    ratio, eps, rope_positions, ring_positions,
) -> None:  # fmt: skip
    """Runner of `qsa_append`: queries, then complete groups (the old ring is still readable), then the ring."""
    if index_qk.shape[0] == 0:
        return
    requests = page_table.shape[0]
    positions, request = positions.long(), row_request.long()
    live = live_rows(request, requests) & (positions >= 0)
    axes = positions if rope_positions is None else rope_positions.long()
    heads = index_qk.unflatten(-1, (-1, q_norm_weight.shape[0]))
    queries = reference.index_query(heads[:, :-1], q_norm_weight, reference.rope_rows(rope_table, axes), out.dtype, eps)
    out.copy_(queries.masked_fill_(~live[:, None, None], 0.0))
    raw = heads[:, -1].to(raw_ring.dtype)  # so that a key is the same whether it comes from this call or from the ring

    rows, slots, members, first = _complete_groups(
        raw, positions, request, live, axes, raw_ring, ring_positions, block_keys, page_table, ratio
    )
    if rows.numel():
        angles = reference.rope_rows(rope_table, first)
        keys = reference.block_key(members, k_norm_weight, angles, block_keys.dtype, eps)
        block_keys[slots // block_keys.shape[1], slots % block_keys.shape[1]] = keys
    _write_ring(raw, positions, request, live, axes, raw_ring, ring_positions)


def _complete_groups(
    raw, positions, request, live, axes, raw_ring, ring_positions, block_keys, page_table, ratio
):  # fmt: skip
    """The groups this call completes: their last rows `[G]`, pool rows `[G]`, raw keys `[G, ratio, Di]` and the RoPE
    position of their first token `[G]` or `[G, 3]`. A member of an earlier call is read from the ring."""
    rows = (live & (positions % ratio == ratio - 1)).nonzero().flatten()
    slots = page_slots(page_table, request[rows], positions[rows] // ratio, block_keys.shape[1], block_keys.shape[0])
    rows, slots = rows[slots >= 0], slots[slots >= 0]
    back = torch.arange(ratio - 1, -1, -1, device=raw.device)
    at, owner = positions[rows, None] - back, request[rows, None]
    source = (rows[:, None] - back).clamp(min=0)
    here = live[source] & (request[source] == owner) & (positions[source] == at)
    entry = at % raw_ring.shape[1]
    members = torch.where(here[..., None], raw[source], raw_ring[owner, entry])
    first = at[:, 0]
    if ring_positions is not None:
        old = ring_positions[owner[:, 0], entry[:, 0]].long()
        first = torch.where(here[:, :1], axes[source[:, 0]], old)
    return rows, slots, members, first


def _write_ring(raw, positions, request, live, axes, raw_ring, ring_positions) -> None:
    """Ring entry p % Rn of each request's last Rn rows of this call; no entry is written twice."""
    depth = raw_ring.shape[1]
    newest = torch.full((raw_ring.shape[0],), -1, dtype=torch.int64, device=raw.device)
    newest.scatter_reduce_(0, request[live], positions[live], "amax")
    rows = live.nonzero().flatten()
    rows = rows[positions[rows] > newest[request[rows]] - depth]
    entry = positions[rows] % depth
    raw_ring[request[rows], entry] = raw[rows]
    if ring_positions is not None:
        ring_positions[request[rows], entry] = axes[rows].to(ring_positions.dtype)


def _batches(row_request: torch.Tensor, wanted: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The wanted rows, as requests `[B]` with equally many rows each and their rows `[B, c]`; B is at most `most`."""
    rows = wanted.nonzero().flatten()
    if rows.numel() == 0:
        return
    owner, order = row_request[rows].sort(stable=True)
    requests, counts = owner.unique_consecutive(return_counts=True)
    lists = rows[order].split(counts.tolist())
    for count in counts.unique().tolist():
        for same in (counts == count).nonzero().flatten().split(most):
            yield requests[same], torch.stack([lists[i] for i in same.tolist()])


def _score_batch(index_q, block_keys, page_table, requests, rows, seen, out, out_rows) -> None:
    """Scores of rows `[B, c]` of B requests into `out[out_rows, :]`, which holds -inf; what nobody sees stays."""
    pages, page_rows = block_keys.shape[:2]
    if pages == 0:
        return
    B, tile = len(requests), max(1, ROW_TILE // len(requests))
    pieces = list(zip(rows.split(tile, 1), out_rows.split(tile, 1), seen.split(tile, 1)))
    ends = [(int(part.min()), int(part.max())) for _, _, part in pieces]
    furthest, step = max(most for _, most in ends), min(KEY_TILE, 4 * KEY_TILE // B)
    for lo in range(0, furthest, step):
        column = torch.arange(lo, min(lo + step, furthest), device=index_q.device)
        slots = page_slots(page_table, requests[:, None], column, page_rows, pages)
        holes, slots = (slots < 0)[:, None], slots.clamp(min=0)
        whole = not holes.any()
        keys = gather_rows(block_keys[:, :, None], slots)[:, :, 0].double()
        for (row, out_row, part), (least, most) in zip(pieces, ends):
            n = min(most - lo, column.numel())
            if n <= 0:
                continue
            scores = reference.score(index_q[row], keys[:, :n])
            if least < lo + n:
                scores.masked_fill_(column[:n] >= part[..., None], -torch.inf)
            if not whole:
                scores.masked_fill_(holes[..., :n], -torch.inf)
            out[out_row, lo : lo + n] = scores


def score(index_q, block_keys, page_table, row_request, visible, out, num_blocks) -> None:
    """Runner of `qsa_score`."""
    out.fill_(-torch.inf)
    capacity = page_table.shape[1] * block_keys.shape[1]
    seen = visible.long().clamp(0, min(num_blocks, capacity)) * live_rows(row_request, page_table.shape[0])
    for requests, rows in _batches(row_request, seen > 0, REQUESTS):
        _score_batch(index_q, block_keys, page_table, requests, rows, seen[rows], out, rows)


def _topk_rows(scores: torch.Tensor, seen: torch.Tensor, k: int, workspace_bytes: int) -> torch.Tensor:
    """`reference.topk_blocks` of rows `[R, N]` already -inf from `seen` on, by float32 top-k where that is decided.

    The k + 1 best values say whether the answer is unique: no NaN among them (NaN sorts first) and a step down after
    the k-th. Only rows where it is not pay for the integer keys that break ties (about 24 bytes a score).
    """
    N = scores.shape[1]
    column = torch.arange(k, device=scores.device)
    ids = torch.where(column < seen[:, None], column, -1)
    if k >= N:
        return ids
    best, where = scores.topk(k + 1, dim=-1)
    decided = (best[:, k - 1] > best[:, k]) & ~best[:, 0].isnan()
    ids = torch.where((seen > k)[:, None], where[:, :k].sort(-1).values, ids)
    for tied in ((seen > k) & ~decided).nonzero().flatten().split(max(1, workspace_bytes // (32 * N))):
        ids[tied] = reference.topk_blocks(scores[tied], seen[tied], k).long()
    return ids


def _rows_within(workspace_bytes: int, blocks: int, k: int) -> int:
    """Rows whose scores and ids fill half the workspace; breaking ties may take the other half."""
    return max(1, workspace_bytes // 2 // max(1, 4 * blocks + 32 * min(k, blocks)))


def topk(scores, visible, out, k) -> None:
    """Runner of `qsa_topk`."""
    R, N = scores.shape
    seen = visible.long().clamp(0, N)
    step = _rows_within(TOPK_BYTES, N, k)
    for lo in range(0, R, step):
        part = seen[lo : lo + step]
        n = int(part.max())
        masked = scores[lo : lo + step, :n].masked_fill(
            torch.arange(n, device=scores.device) >= part[:, None], -torch.inf
        )
        out[lo : lo + step] = _topk_rows(masked, part, k, TOPK_BYTES // 2).to(out.dtype)


def select(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes) -> None:
    """Runner of `qsa_select`: a row with at most k visible blocks is not scored, the others a few at a time."""
    capacity = page_table.shape[1] * block_keys.shape[1]
    seen = visible.long().clamp(0, capacity) * live_rows(row_request, page_table.shape[0])
    column = torch.arange(k, device=out.device)
    out.copy_(torch.where(column < seen[:, None], column, -1))
    if out.numel() == 0:
        return
    step = _rows_within(workspace_bytes, int(seen.max()), k)
    for requests, rows in _batches(row_request, seen > k, min(REQUESTS, step)):
        for part in rows.split(max(1, step // len(requests)), 1):
            ends = seen[part]
            scores = torch.full((part.numel(), int(ends.max())), -torch.inf, device=out.device)
            here = torch.arange(part.numel(), device=out.device).view_as(part)
            _score_batch(index_q, block_keys, page_table, requests, part, ends, scores, here)
            out[part.flatten()] = _topk_rows(scores, ends.flatten(), k, workspace_bytes // 2).to(out.dtype)


def _gather_tokens(cache: torch.Tensor, slots: torch.Tensor, scale: float | None, scratch) -> torch.Tensor:
    """Tokens `[R, M]` of a cache `[pages, page_tokens, Hkv, D]` -> `[R, M, Hkv, D]` float32, any strides."""
    if cache.dtype == torch.float8_e4m3fn:
        rows = gather_rows(cache.view(torch.uint8), slots).view(torch.float8_e4m3fn).float()
    else:
        rows = gather_rows(cache, slots, scratch).float()
    return rows if scale is None else rows * scale


def attend(
    q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, scale, out_gate, k_scale, v_scale
) -> None:  # fmt: skip
    """Runner of `qsa_attend`."""
    R, k = block_ids.shape
    pages, page_tokens, kv_heads, D = k_cache.shape
    width = k * ratio + ratio - 1
    if R == 0 or width == 0 or pages * page_tokens == 0 or page_table.numel() == 0:
        out.zero_()
        return
    live = live_rows(row_request, page_table.shape[0])
    at = torch.where(live, positions.long(), -1)
    request = torch.where(live, row_request.long(), 0)
    ids = block_ids.long()
    ids = torch.where(ids < reference.visible_blocks(at, ratio)[:, None], ids, -1)
    step = max(1, GATHER_BYTES // (4 * width * kv_heads * D))
    scratch = q.new_empty(min(step, R) * width * kv_heads * D, dtype=k_cache.dtype)
    for lo in range(0, R, step):
        part = slice(lo, lo + step)
        tokens = reference.expand_blocks(ids[part], at[part], ratio)
        slots = page_slots(page_table, request[part, None], tokens, page_tokens, pages)
        o = _attend_rows(q[part], k_cache, v_cache, slots, scale, k_scale, v_scale, scratch)
        if out_gate is not None:
            o = o * torch.sigmoid(out_gate[part].float())
        out[part] = o.masked_fill((slots < 0).all(-1)[:, None, None], 0.0).to(out.dtype)


def _attend_rows(q, k_cache, v_cache, slots, scale, k_scale, v_scale, scratch) -> torch.Tensor:
    """Attention of rows `[R, Hq, D]` over pool rows `[R, M]` (-1 unused), float32; rows without a token are garbage.

    An unused entry is filled with a token the row does attend to, at weight zero: nothing that was not selected is
    read, and no second pass over the gathered keys is needed to keep 0 x NaN out. KV heads one at a time: a product
    over both batch dimensions of a strided operand would copy it first.
    """
    unused = slots < 0
    filled = torch.where(unused, slots.amax(-1, keepdim=True).clamp(min=0), slots)
    keys = _gather_tokens(k_cache, filled, k_scale, scratch)
    grouped = q.float().unflatten(1, (keys.shape[2], -1))  # [R, Hkv, G, D]
    logits = torch.stack([torch.bmm(g, k.mT) for g, k in zip(grouped.unbind(1), keys.unbind(2))], 1).mul_(scale)
    weights = torch.softmax(logits.masked_fill_(unused[:, None, None, :], -torch.inf), -1)
    values = _gather_tokens(v_cache, filled, v_scale, scratch)
    return torch.cat([torch.bmm(w, v) for w, v in zip(weights.unbind(1), values.unbind(2))], 1)
