"""What a model keeps between steps, and what it needs to know of one: pools, pages and `Step`.

The caller owns all of it. KDA layers hold a slot a sequence (convolution tail and recurrent state); QSA layers hold
pages of keys and values, pages of block keys, and a ring of raw index keys a sequence. One page table serves every
layer: page i of each layer belongs to the same tokens. Page 0 takes what padding rows write.
"""

from dataclasses import dataclass

import torch

PAGE_TOKENS = 64


@dataclass
class KDAState:
    """conv `[slots, C, W-1]`: raw inputs before the next token; recurrent `[slots, HV, V, K]` float32."""

    conv: torch.Tensor
    recurrent: torch.Tensor


@dataclass
class QSAState:
    """k_cache, v_cache `[pages, page_tokens, Hkv, D]`; block_keys `[pages, page_rows, Di]`; raw_ring `[requests, ring,
    Di]`: raw index keys, token p at entry p % ring."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_keys: torch.Tensor
    raw_ring: torch.Tensor

    def write(self, k: torch.Tensor, v: torch.Tensor, step: "Step") -> None:
        """Stores the step's keys and values at its rows' places; padding rows go to page 0."""
        self.k_cache[step.page, step.page_row] = k
        self.v_cache[step.page, step.page_row] = v


@dataclass(frozen=True)
class Step:
    """Metadata of one forward pass over T packed rows of N sequences, computed once and read by every layer.

    decode: every sequence has exactly one row (then cu_seqlens is not used). cu_seqlens `[N+1]`, slots `[N]`, fresh
    `[N]` (starts from zero state). Per row: row_request, positions (-1: padding), visible (complete blocks), page and
    page_row (place of its key), rope `[T, R]`. page_table `[requests, max_pages]` int32, -1 where nothing is mapped.
    """

    decode: bool
    cu_seqlens: torch.Tensor
    slots: torch.Tensor
    fresh: torch.Tensor
    row_request: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    page: torch.Tensor
    page_row: torch.Tensor
    page_table: torch.Tensor
    rope_table: torch.Tensor
    rope: torch.Tensor


class Pages:
    """Hands out pages to requests as they grow: host-side bookkeeping of one page table."""

    def __init__(self, requests: int, pages: int, max_pages: int):
        self.table = torch.full((requests, max_pages), -1, dtype=torch.int32)
        self.free = list(range(pages, 0, -1))  # page 0 is the padding rows'
        self.held = [0] * requests

    def grow(self, request: int, tokens: int) -> bool:
        """Maps enough pages for `tokens` tokens of a request; True if the table changed. Raises when none is left."""
        need, changed = -(-tokens // PAGE_TOKENS), False
        while self.held[request] < need:
            if not self.free or self.held[request] == self.table.shape[1]:
                raise ValueError(f"pages: request {request} needs {need} pages of {PAGE_TOKENS} tokens, none is left")
            self.table[request, self.held[request]] = self.free.pop()
            self.held[request] += 1
            changed = True
        return changed
