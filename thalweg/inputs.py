"""Seeded inputs of every public op, on any device; on the meta device nothing is allocated.

Each function returns keyword arguments of one op. The same seed and kind of device give the same values. Nothing here
is padded or poisoned: `cases` does that to its small cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

BF16, F32 = torch.bfloat16, torch.float32
RATIO, BUDGET = 4, 512  # tokens of a QSA block, blocks a query selects (Qwen3.8-Flash-Next)
GATES = {"slow": ((-0.5, 0.5), (-7.0, -1.0)), "fast": ((0.0, 1.0), (0.0, 1.0))}  # ranges of A_log and dt_bias


class Source:
    """Seeded values on one device."""

    def __init__(self, device: object = "cpu", seed: int = 0):
        self.device = torch.device(device)
        kind = "cpu" if self.device.type == "meta" else self.device
        self.generator = torch.Generator(kind).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=dtype, device=self.device)
        return values if scale == 1.0 else values.mul_(scale)

    def uniform(self, low: float, high: float, *shape: int) -> torch.Tensor:
        values = torch.rand(shape, generator=self.generator, dtype=F32, device=self.device)
        return values.mul_(high - low).add_(low)

    def full(self, value: float, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def ints(self, values: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def offsets(self, lengths: Sequence[int]) -> torch.Tensor:
        return self.ints([0, *accumulate(lengths)])

    def shuffled(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator, device=self.device)


def solve(s: Source, lengths: Sequence[int], heads: int, C: int = 64, dtype: torch.dtype = F32) -> dict:
    """Packed blocks; strictly lower entries 0.1 N(0, 1), zero on and above the diagonal."""
    lower = s.normal(1, sum(lengths), heads, C, scale=0.1, dtype=dtype)
    row = torch.cat([torch.arange(n, device=s.device) % C for n in lengths])
    lower.masked_fill_(torch.arange(C, device=s.device) >= row[None, :, None, None], 0.0)
    return {"lower": lower, "cu_seqlens": s.offsets(lengths), "out_dtype": BF16}


def gate(s: Source, HV: int, K: int, gates: str) -> dict:
    (a, b), (c, d) = GATES[gates]
    return {"gate": "bounded", "lower_bound": -5.0, "A_log": s.uniform(a, b, HV), "dt_bias": s.uniform(c, d, HV, K)}


def prefill(
    s: Source, lengths: Sequence[int], H: int, gates: str = "slow", HV: int = 0, K: int = 128, V: int = 128,
    dtype: torch.dtype = BF16,
) -> dict:  # fmt: skip
    T, N, HV = sum(lengths), len(lengths), HV or H
    return {
        "q": s.normal(T, H, K, dtype=dtype),
        "k": s.normal(T, H, K, dtype=dtype),
        "v": s.normal(T, HV, V, dtype=dtype),
        "g_raw": s.normal(T, HV, K, dtype=dtype),
        "beta_logits": s.normal(T, HV, dtype=dtype),
        "cu_seqlens": s.offsets(lengths),
        "state": s.normal(N, HV, V, K, scale=0.1, dtype=F32),
        "read_slots": s.ints(range(N)),
    } | gate(s, HV, K, gates)


def equal_keys(s: Source, T: int, H: int, K: int = 128, V: int = 128) -> dict:
    """All keys of a head one random vector, q = k, hardly any decay, beta almost 1: the hard case of the inverse."""
    args = prefill(s, [T], H, K=K, V=V)
    args["k"] = s.normal(1, H, K).repeat(T, 1, 1)
    return args | {
        "q": args["k"].clone(),
        "g_raw": s.full(-12.0, T, H, K),
        "beta_logits": s.full(8.0, T, H),
        "A_log": s.full(0.0, H, dtype=F32),
        "dt_bias": s.full(0.0, H, K, dtype=F32),
    }


def token(
    s: Source, lead: Sequence[int], H: int, HV: int = 0, K: int = 128, V: int = 128, slots: int = 0,
    state_dtype: torch.dtype = F32, dtype: torch.dtype = BF16,
) -> dict:  # fmt: skip
    """Arguments of kda_decode (lead is [B]) and kda_verify ([B, S])."""
    HV, slots = HV or H, slots or lead[0]
    C = 2 * H * K + HV * V
    return {
        "qkv": s.normal(*lead, C, dtype=dtype),
        "g_raw": s.normal(*lead, HV, K, dtype=dtype),
        "beta_logits": s.normal(*lead, HV, dtype=dtype),
        "out_gate": s.normal(*lead, HV, V, dtype=dtype),
        "conv_weight": s.normal(C, 4, scale=0.5, dtype=F32),
        "conv_state": s.normal(slots, C, 3, dtype=dtype),
        "state": s.normal(slots, HV, V, K, scale=0.1, dtype=state_dtype),
        "read_slots": s.ints(range(lead[0])),
        "norm_weight": s.normal(V, scale=0.1, dtype=F32).add_(1.0),
        "norm_eps": 1e-5,
    } | gate(s, HV, K, "slow")


def commit(s: Source, accepted: Sequence[int], S: int, H: int, **dims: int) -> dict:
    args = token(s, [len(accepted), S], H, **dims)
    for name in ("out_gate", "norm_weight", "norm_eps"):
        del args[name]
    return args | {"accepted": s.ints(accepted)}


def conv(s: Source, lengths: Sequence[int], C: int, W: int = 4, slots: int = 0, dtype: torch.dtype = BF16) -> dict:
    """The pool is time-major, passed transposed."""
    return {
        "x": s.normal(sum(lengths), C, dtype=dtype),
        "weight": s.normal(C, W, scale=0.5, dtype=F32),
        "cu_seqlens": s.offsets(lengths),
        "conv_state": s.normal(slots or len(lengths), W - 1, C, dtype=dtype).transpose(1, 2),
        "read_slots": s.ints(range(len(lengths))),
    }


def norm(s: Source, *shape: int, dtype: torch.dtype = BF16) -> dict:
    return {
        "o": s.normal(*shape, dtype=F32),
        "gate": s.normal(*shape, dtype=dtype),
        "weight": s.normal(shape[-1], scale=0.1, dtype=F32).add_(1.0),
        "eps": 1e-5,
    }


@dataclass(frozen=True)
class Rows:
    """The query rows of a step: the last `rows` tokens of each request's context."""

    contexts: tuple[int, ...]
    rows: int
    page: int = 64  # block keys of an index page
    kv_page: int = 64  # tokens of a KV page

    @property
    def blocks(self) -> list[int]:
        return [context // RATIO for context in self.contexts]

    @property
    def visible(self) -> int:
        """Visible blocks, summed over rows."""
        return sum((p + 1) // RATIO for c in self.contexts for p in range(c - self.rows, c))

    def table(self, s: Source, counts: Sequence[int]) -> torch.Tensor:
        """Page table of requests with `counts` pages each, in shuffled order, holes (-1) behind."""
        table = s.full(-1, len(counts), max(counts), dtype=torch.int32)
        order, at = s.shuffled(sum(counts)).to(torch.int32), 0
        for request, count in enumerate(counts):
            table[request, :count] = order[at : at + count]
            at += count
        return table

    def metadata(self, s: Source) -> tuple[torch.Tensor, torch.Tensor]:
        """row_request and positions."""
        request = torch.arange(len(self.contexts), dtype=torch.int32, device=s.device).repeat_interleave(
            self.rows, output_size=len(self.contexts) * self.rows
        )
        last = [torch.arange(c - self.rows, c, dtype=torch.int32, device=s.device) for c in self.contexts]
        return request, torch.cat(last)


def index(s: Source, r: Rows, heads: int = 4, dim: int = 128) -> dict:
    counts = [-(-blocks // r.page) for blocks in r.blocks]
    request, positions = r.metadata(s)
    return {
        "index_q": s.normal(len(positions), heads, dim),
        "block_keys": s.normal(sum(counts), r.page, dim),
        "page_table": r.table(s, counts),
        "row_request": request,
        "visible": (positions + 1) // RATIO,
    }


def score(s: Source, r: Rows, **dims: int) -> dict:
    return index(s, r, **dims) | {"num_blocks": max(r.blocks)}


def topk(s: Source, r: Rows, k: int = BUDGET, **dims: int) -> dict:
    """The scores of `score`, by plain matrix products."""
    args, N = index(s, r, **dims), max(r.blocks)
    scores = s.full(-torch.inf, len(args["visible"]), N, dtype=F32)
    for request, blocks in enumerate(r.blocks):
        pages = args["page_table"][request, : -(-blocks // r.page)].long()
        keys = args["block_keys"][pages].flatten(0, 1)[:blocks].float().T
        for at in range(request * r.rows, (request + 1) * r.rows, 256):
            rows = slice(at, min(at + 256, (request + 1) * r.rows))
            part = scores[rows, :blocks].zero_()
            for head in args["index_q"][rows].float().unbind(1):
                part += torch.relu(head @ keys)
    hidden = torch.arange(N, device=s.device) >= args["visible"][:, None]
    return {"scores": scores.masked_fill_(hidden, -torch.inf), "visible": args["visible"], "k": k}


def picks(s: Source, r: Rows, k: int, shared: float) -> torch.Tensor:
    """Ids `[R, k]` int32 of random visible blocks, ascending, -1 behind; a request's rows share this part of them."""
    ids, (_, positions) = [], r.metadata(s)
    for request, blocks in enumerate(r.blocks):
        common = s.shuffled(max(1, (r.contexts[request] - r.rows) // RATIO))[: int(shared * k)]
        for at in range(request * r.rows, (request + 1) * r.rows, 256):
            visible = ((positions[at : min(at + 256, (request + 1) * r.rows)] + 1) // RATIO)[:, None]
            draw = s.uniform(0.0, 1.0, len(visible), blocks)
            draw[:, common] += 2.0
            draw.masked_fill_(torch.arange(blocks, device=s.device) >= visible, -1.0)
            best = draw.topk(min(k, blocks), -1)
            order = best.indices.masked_fill(best.values < 0, blocks).sort(-1).values
            order = torch.nn.functional.pad(order, (0, k - order.shape[1]), value=blocks)
            ids.append(order.masked_fill(order == blocks, -1).to(torch.int32))
    return torch.cat(ids)


def attend(
    s: Source, r: Rows, shared: float = 0.0, k: int = BUDGET, heads: int = 24, kv_heads: int = 2, dim: int = 256
) -> dict:
    counts = [-(-context // r.kv_page) for context in r.contexts]
    request, positions = r.metadata(s)
    cache = s.normal(sum(counts), r.kv_page, kv_heads, 2, dim)
    return {
        "q": s.normal(len(positions), heads, dim),
        "k_cache": cache[:, :, :, 0],
        "v_cache": cache[:, :, :, 1],
        "page_table": r.table(s, counts),
        "row_request": request,
        "positions": positions,
        "block_ids": picks(s, r, k, shared),
    }


def append(s: Source, r: Rows, heads: int = 4, dim: int = 128, rotary: int = 64, ring: int = 8) -> dict:
    """The last `rows` tokens of each request, after a prefix whose raw keys fill the ring."""
    counts = [-(-blocks // r.page) for blocks in r.blocks]
    request, positions = r.metadata(s)
    lanes = torch.arange(0, rotary, 2, dtype=F32, device=s.device) / rotary
    angles = torch.arange(max(r.contexts), dtype=F32, device=s.device)[:, None] * 1e7**-lanes
    return {
        "index_qk": s.normal(len(positions), (heads + 1) * dim),
        "q_norm_weight": s.normal(dim, scale=0.1),
        "k_norm_weight": s.normal(dim, scale=0.1),
        "rope_table": torch.cat([angles.cos(), angles.sin()], -1),
        "positions": positions,
        "row_request": request,
        "raw_ring": s.normal(len(r.contexts), ring, dim),
        "block_keys": s.normal(sum(counts), r.page, dim),
        "page_table": r.table(s, counts),
    }
