"""A block whose key a query points at is found at every depth of a context, and its value comes out of attention.

append -> select -> attend over one request of T tokens, paged in random order, the index keys turned by RoPE; the
needles lie in the lanes that are not.
"""

import pytest
import torch

from thalweg.qsa import qsa_append, qsa_attend, qsa_select, rope_table

BF16 = torch.bfloat16
Di, D, ROTARY, PAGE = 128, 64, 64, 64


def needles(T, count, device, impl, piece, k=16):
    """Whether each of `count` needles, spread over the whole depth, is among the selected, and the outputs."""
    make = torch.Generator().manual_seed(T)
    depth = (torch.linspace(0, T - 4, count).long() // 4 * 4).to(device)
    content = torch.zeros(count, Di)
    content[:, ROTARY:] = torch.randn(count, Di - ROTARY, generator=make)
    content = content.to(device, BF16)
    index_qk = torch.zeros(T, 2 * Di, dtype=BF16, device=device)
    index_qk[:, Di:] = torch.randn(T, Di, generator=make).to(device, BF16)
    for i in range(4):
        index_qk[depth + i, Di:] = content
    rope, weight = rope_table(T, ROTARY, device=device), torch.zeros(Di, dtype=BF16, device=device)
    pages = torch.randperm(T // (4 * PAGE), generator=make).int()[None].to(device)
    keys = torch.full((pages.numel(), PAGE, Di), torch.nan, dtype=BF16, device=device)
    ring = torch.full((1, 8, Di), torch.nan, dtype=BF16, device=device)
    at = torch.arange(T, device=device)
    for lo in range(0, T, piece):
        rows = at[lo : lo + piece]
        qsa_append(index_qk[rows], weight, weight, rope, rows, rows * 0, ring, keys, pages, impl=impl)
    owner, last = torch.zeros(count, dtype=torch.int32, device=device), torch.full((count,), T - 1, device=device)
    ids = qsa_select(content[:, None], keys, pages, owner, (last + 1) // 4, k, impl=impl)
    kv = torch.zeros(T // PAGE, PAGE, 1, 2, D, dtype=BF16, device=device)
    table = torch.randperm(T // PAGE, generator=make).int()[None].to(device)
    place = table[0, depth // PAGE].long()
    lane = torch.arange(count, device=device) % D
    kv[place, depth % PAGE, 0, 0, lane], kv[place, depth % PAGE, 0, 1, lane] = 100.0, 1.0
    q = torch.zeros(count, 4, D, dtype=BF16, device=device)
    q[torch.arange(count), :, lane] = 8.0
    out = qsa_attend(q, kv[:, :, :, 0], kv[:, :, :, 1], table, owner, last, ids, impl=impl)
    found = (ids == depth[:, None] // 4).any(1)
    return found, out.gather(2, lane[:, None, None].expand(-1, 4, 1)).squeeze(-1)


def test_a_needle_is_found_at_every_depth():
    found, out = needles(8192, 48, "cpu", "reference", 1000)
    assert found.all() and (out > 0.99).all()


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ("triton", None))
def test_a_needle_is_found_at_every_depth_of_256k_tokens(impl):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    found, out = needles(262144, 256, "cuda", impl, 8192)
    print(f"{(torch.cuda.max_memory_allocated() - held) / 2**20:.0f} MiB")
    assert found.all() and (out > 0.99).all()
