"""QSA in plain torch: the oracle of every stage, on contiguous (unpaged) tensors.

Definition: the `qwen4_exp` model of transformers (its indexer and attention). An index block is r consecutive tokens
of a sequence; a query at position p sees the floor((p+1)/r) complete blocks, selects the best of them, and always
attends to the (p+1) mod r tokens of the open one. Ties go to the lower block id and NaN loses to every number: our
rule, everywhere.
"""

import torch

EPS = 1e-6


def wide(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype a reference computes in: float64 if any input is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def rope_table(positions: int, rotary_dim: int, theta: float = 1e7, device: object = None) -> torch.Tensor:
    """`[positions, rotary_dim]` float32: cos of rotary_dim/2 frequencies, then their sin."""
    lanes = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * (
        1.0 / theta ** (lanes / rotary_dim)
    )
    return torch.cat([angles.cos(), angles.sin()], -1)


def rope_rows(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows of a RoPE table `[P, R]` at positions `[T]` or `[T, 3]` -> `[T, R]`.

    With three axes (MRoPE, interleaved) frequency lane f takes its angle from axis f % 3. Positions are clipped to
    the table.
    """
    positions = positions.long().clamp(0, table.shape[0] - 1)
    if positions.dim() == 1:
        return table[positions]
    lane = torch.arange(table.shape[1], device=table.device)
    axis = (lane % (table.shape[1] // 2)) % 3
    return table[positions[:, axis], lane]


def apply_rope(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """NeoX rotation of the first R dims of `[T, ..., D]` by table rows `[T, R]`; computed wide, returned wide."""
    x, R = x.to(wide(x)), rows.shape[-1]
    rows = rows.to(x.dtype).reshape(rows.shape[0], *(1,) * (x.dim() - 2), R)
    cos, sin = rows[..., : R // 2], rows[..., R // 2 :]
    a, b = x[..., : R // 2], x[..., R // 2 : R]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., R:]], -1)


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """x / sqrt(mean x^2 + eps) * (1 + weight) over the last dimension; computed wide, returned wide."""
    x = x.to(wide(x))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1.0 + weight.to(x.dtype))


def index_query(
    raw: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, eps: float = EPS
) -> torch.Tensor:
    """Index queries `[T, Hi, Di]` from raw projections: norm, rounded to dtype, RoPE, rounded to dtype."""
    return apply_rope(gemma_norm(raw, weight, eps).to(dtype), rows).to(dtype)


def block_key(
    raw: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, dtype: torch.dtype, eps: float = EPS
) -> torch.Tensor:
    """Block keys `[N, Di]` of groups of raw keys `[N, r, Di]`; rows: RoPE rows at each group's first position.

    float32 mean over the group, rounded to dtype, norm, rounded, RoPE, rounded.
    """
    total = raw[:, 0].to(wide(raw))
    for member in range(1, raw.shape[1]):  # in token order, so that every implementation can give the same bits
        total = total + raw[:, member].to(total.dtype)
    pooled = (total / raw.shape[1]).to(dtype)
    return apply_rope(gemma_norm(pooled, weight, eps).to(dtype), rows).to(dtype)


def visible_blocks(positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """Complete blocks a query at each position sees: floor((p+1)/ratio); 0 for padding (p = -1)."""
    return (positions.clamp(min=-1) + 1) // ratio


def score(index_q: torch.Tensor, keys: torch.Tensor, acc: torch.dtype = torch.float64) -> torch.Tensor:
    """sum_h relu(q_h . k_b) for queries `[..., R, Hi, Di]` and block keys `[..., N, Di]` -> `[..., R, N]` float32.

    relu per head, heads added in float32 in their order. Dots of bf16 inputs are exact in float64 (16-bit products,
    fewer than 2^30 apart in practice) and rounded once to float32, so a row's bits do not depend on the other rows or
    on the matrix product's blocking; `acc=float32` gives that up for speed (training).
    """
    out_dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
    dots = index_q.flatten(-3, -2).to(acc) @ keys.to(acc).transpose(-1, -2)  # all heads in one product
    dots = dots.to(out_dtype).relu_().unflatten(-2, (-1, index_q.shape[-2]))
    total = dots[..., 0, :] + 0.0  # a zero score is always +0.0
    for head in range(1, index_q.shape[-2]):
        total += dots[..., head, :]
    return total


def topk_blocks(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The k best of each row's first `visible` scores `[R, N]`: ids `[R, k]` int32 ascending, unused -1 at the end.

    Exact and deterministic: score and id become one integer key (order-preserving bits of the float32 score above the
    complemented id), so no two are equal; NaN gets the lowest score.
    """
    R, N = scores.shape
    ids = torch.full((R, k), -1, dtype=torch.int32, device=scores.device)
    if N == 0 or k == 0:
        return ids
    scores = scores.to(torch.float32) + 0.0  # -0.0 and 0.0 tie
    bits = scores.view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(scores.isnan(), -(2**31))  # below -inf
    column, lowest = torch.arange(N, device=scores.device), torch.iinfo(torch.int64).min
    key = order.to(torch.int64).mul_(2**32).add_(2**32 - 1 - column)
    key.masked_fill_(column >= visible[:, None], lowest)
    best, where = key.topk(min(k, N), dim=-1, sorted=False)
    where = where.masked_fill(best == lowest, N).sort(-1).values
    ids[:, : where.shape[1]] = where.masked_fill(where == N, -1).to(torch.int32)
    return ids


def expand_blocks(block_ids: torch.Tensor, positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """Token positions `[R, k * ratio + ratio - 1]` int64 of selected blocks `[R, k]` and the open tail; unused -1.

    Worked example, ratio 4, p = 9, blocks [0, -1]: tokens 0 1 2 3, four unused, tail 8 9, one unused.
    """
    R = block_ids.shape[0]
    lane = torch.arange(ratio, device=block_ids.device)
    blocks = block_ids.long()[..., None]
    tokens = torch.where(blocks >= 0, blocks * ratio + lane, -1).reshape(R, -1)
    tail = (visible_blocks(positions, ratio) * ratio)[:, None] + lane[: ratio - 1]
    return torch.cat([tokens, torch.where(tail <= positions[:, None], tail, -1)], -1)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of each row over its own token list: q `[R, Hq, D]`, k, v `[N, Hkv, D]`, tokens `[R, M]` (-1 unused).

    Softmax wide; query head h reads KV head h // (Hq/Hkv). Unused entries are never multiplied in (no 0 x NaN); a row
    with no token gives zeros. Returns `[R, Hq, D]` wide.
    """
    dtype, used = wide(q, k, v), tokens >= 0
    if k.shape[0] == 0:
        return torch.zeros(q.shape, dtype=dtype, device=q.device)
    at = tokens.clamp(min=0)
    keys = k[at].to(dtype).masked_fill(~used[..., None, None], 0.0).transpose(1, 2)  # [R, Hkv, M, D]
    values = v[at].to(dtype).masked_fill(~used[..., None, None], 0.0).transpose(1, 2)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1))  # [R, Hkv, G, D]
    logits = scale * (grouped @ keys.transpose(-1, -2))
    logits = logits.masked_fill(~used[:, None, None, :], -torch.inf)
    weights = torch.softmax(logits, -1).masked_fill(~used.any(-1)[:, None, None, None], 0.0)
    return (weights @ values).flatten(1, 2)


def dense_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Causal attention of rows at `positions` `[R]` over tokens 0..p of k, v `[N, Hkv, D]`; the dense equivalent."""
    tokens = torch.arange(k.shape[0], device=q.device)
    return attend(q, k, v, torch.where(tokens <= positions[:, None], tokens, -1), scale)
