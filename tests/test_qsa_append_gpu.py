"""`qsa_append` on a GPU: rejected tails and short extends of many requests, captured graphs, no syncs, large pools."""

import pytest
import torch

from thalweg.qsa import qsa_append, rope_table

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
Di, HEADS, ROTARY, RING, PAGE, LONGEST = 128, 4, 64, 8, 16, 1024


def pools(requests, device="cuda"):
    """Everything but the rows: pools of NaN, pages in random order."""
    pages = LONGEST // (4 * PAGE)
    table = torch.randperm(requests * pages, device=device).view(requests, pages).int()
    return {
        "q_norm_weight": torch.randn(Di, device=device).mul(0.1).to(BF16),
        "k_norm_weight": torch.randn(Di, device=device).mul(0.1).to(BF16),
        "rope_table": rope_table(LONGEST, ROTARY, device=device),
        "raw_ring": torch.full((requests, RING, Di), torch.nan, dtype=BF16, device=device),
        "block_keys": torch.full((requests * pages, PAGE, Di), torch.nan, dtype=BF16, device=device),
        "page_table": table,
    }


def rows(text, spans, padding=0):
    """The rows of (request, start, stop) of `text` `[requests, LONGEST, width]`, and as many padding rows behind."""
    at = torch.cat([torch.arange(lo, hi) for _, lo, hi in spans] + [torch.full((padding,), -1)]).cuda()
    owner = torch.cat([torch.full((hi - lo,), r) for r, lo, hi in spans] + [torch.full((padding,), -1)]).int().cuda()
    return {"index_qk": text[owner.long(), at], "positions": at, "row_request": owner}


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_rejected_tails_and_extends_of_one_to_three_rows_give_the_bits_of_one_call():
    """24 requests grow by 1 to 3 drafts a step, of which some are rejected and written again with other content."""
    N, steps = 24, 60
    text = torch.randn(N, LONGEST, (HEADS + 1) * Di, device="cuda").to(BF16)
    whole = pools(N)
    grown = {name: x.clone() for name, x in whole.items()}
    length, make = [0] * N, torch.Generator().manual_seed(0)
    for _ in range(steps):
        drafts = torch.randint(1, 4, (N,), generator=make).tolist()
        kept = [int(torch.randint(0, n + 1, (1,), generator=make)) for n in drafts]
        wrong = text.clone()
        for r, (n, k) in enumerate(zip(drafts, kept)):
            wrong[r, length[r] + k : length[r] + n] = 3.0
        spans = [(r, length[r], length[r] + n) for r, n in enumerate(drafts)]
        qsa_append(**grown, **rows(wrong, spans, padding=3), impl="triton")
        length = [at + k for at, k in zip(length, kept)]
    spans = [(r, 0, length[r]) for r in range(N)]
    qsa_append(**whole, **rows(text, spans), impl="triton")
    # What a rejected token left behind in the newest entries and blocks is overwritten when its place comes.
    qsa_append(**grown, **rows(text, [(r, max(0, n - 3), n) for r, n in enumerate(length)]), impl="triton")
    for r, n in enumerate(length):
        for b in range(n // 4):
            place = whole["page_table"][r, b // PAGE], b % PAGE
            assert same(grown["block_keys"][place], whole["block_keys"][place])
        for p in range(max(0, n - 4), n):
            assert same(grown["raw_ring"][r, p % RING], whole["raw_ring"][r, p % RING])
    before = {name: whole[name].clone() for name in ("raw_ring", "block_keys")}
    for _ in range(20):  # written again, the same bits
        qsa_append(**whole, **rows(text, spans), impl="triton")
    assert all(same(whole[name], x) for name, x in before.items())


def test_b11_a_captured_step_takes_what_the_buffers_hold_when_it_is_replayed():
    N = 4
    text = torch.randn(N, LONGEST, (HEADS + 1) * Di, device="cuda").to(BF16)
    first = pools(N)
    qsa_append(**first, **rows(text, [(r, 0, 5 + 2 * r) for r in range(N)]), impl="triton")
    held = rows(text, [(r, 5 + 2 * r, 8 + 2 * r) for r in range(N)])
    out = torch.empty(3 * N, HEADS, Di, dtype=BF16, device="cuda")
    eager = {name: x.clone() for name, x in first.items()}
    qsa_append(**{name: x.clone() for name, x in first.items()}, **held, out=out, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsa_append(**first, **held, out=out, impl="triton")
    for spans, padding in (
        ([(3, 11, 14), (0, 5, 6)], 8),
        ([(2, 9, 12), (1, 7, 10), (0, 6, 9), (3, 12, 15)], 0),
        ([], 12),
    ):
        now = rows(text, spans, padding) if spans else {name: x * 0 - 1 for name, x in held.items()}
        for name, x in held.items():
            x.copy_(now[name])
        graph.replay()
        assert same(out, qsa_append(**eager, **now, impl="triton"))
        assert all(same(first[name], eager[name]) for name in ("raw_ring", "block_keys"))
    assert out.count_nonzero() == 0


def test_b31_no_sync_no_allocation_and_no_new_kernels():
    from thalweg.qsa import append

    N = 16
    text = torch.randn(N, LONGEST, (HEADS + 1) * Di, device="cuda").to(BF16)
    call = pools(N)
    calls = [rows(text, [(r, 0, n) for r in range(m)]) for m, n in ((1, 1), (1, 2), (2, 3), (16, 1), (3, 300), (7, 5))]
    outs = [torch.empty(len(c["positions"]), HEADS, Di, dtype=BF16, device="cuda") for c in calls]
    for given, out in zip(calls[:2], outs):
        qsa_append(**call, **given, out=out, impl="triton")

    def compiled():
        return sum(len(cache[0]) for cache in append.kernel.device_caches.values())

    before = compiled()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given, out in zip(calls, outs):
            qsa_append(**call, **given, out=out, impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before and torch.cuda.max_memory_allocated() == held


def test_b07_rows_and_pages_past_2_31_elements():
    """Rows cut from a wide projection, block keys in the last pages of a pool; 65,600 rows of one request."""
    T, columns = 65600, 33000
    wide = torch.zeros(T, columns, dtype=BF16, device="cuda")
    qk = wide[:, -(HEADS + 1) * Di :].copy_(torch.randn(T, (HEADS + 1) * Di, device="cuda"))
    pages = T // 4 // PAGE + 1
    keys = torch.zeros(2**31 // (PAGE * Di) + pages, PAGE, Di, dtype=BF16, device="cuda")
    table = torch.arange(len(keys) - pages, len(keys), device="cuda").int()[None]
    ring, at = torch.zeros(1, RING, Di, dtype=BF16, device="cuda"), torch.arange(T, device="cuda")
    weight, angles = torch.zeros(Di, dtype=BF16, device="cuda"), rope_table(T, ROTARY, device="cuda")

    def run(rows, keys, table, ring):
        args = qk[rows], weight, weight, angles, at[rows], torch.zeros_like(at[rows]), ring, keys, table
        return qsa_append(*args, impl="triton")

    out = run(slice(None), keys, table, ring)
    small, last = (
        torch.zeros(pages, PAGE, Di, dtype=BF16, device="cuda"),
        torch.arange(pages, device="cuda").int()[None],
    )
    again = run(slice(T - 400, T), small, last, torch.zeros_like(ring))
    assert same(out[-400:], again)
    held = keys[table[0].long()].flatten(0, 1)
    assert same(held[(T - 396) // 4 : T // 4], small.flatten(0, 1)[(T - 396) // 4 : T // 4])
    assert keys[: 2**31 // (PAGE * Di)].count_nonzero() == 0 and held.count_nonzero() > T // 4 * Di // 2
    assert same(ring[0, at[-RING:] % RING], qk[-RING:, -Di:].contiguous())
