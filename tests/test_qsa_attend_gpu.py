"""`qsa_attend` on a GPU at the models' shapes: truth, bits, captured graphs, no syncs, large pools, memory."""

import pytest
import torch

from thalweg import inputs
from thalweg.qsa import attention, attention_gluon, qsa_attend, qsa_select, shared, union, union_gluon

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PER_ROW = ("q", "row_request", "positions", "block_ids", "out_gate")
FORMS = ("triton", "shared")
FP16, FP32 = torch.float16, torch.float32


def rows_of(contexts=(16384,), rows=300, shared_part=0.0, page=64, **shape):
    return inputs.attend(inputs.Source("cuda", 7), inputs.Rows(contexts, rows, kv_page=page), shared_part, **shape)


def part(call, rows):
    return {name: x[rows] if name in PER_ROW and x is not None else x for name, x in call.items()}


def near(got, want, worst=4e-3):
    assert got.isfinite().all() and (got.double() - want.double()).norm() <= worst * want.double().norm()


def poisoned(call):
    """NaN in every token that no row attends to."""
    ids, positions, table = call["block_ids"].long(), call["positions"].long()[:, None], call["page_table"].long()
    page, lanes = call["k_cache"].shape[1], torch.arange(4, device="cuda")
    tokens = (ids[:, :, None] * 4 + lanes).flatten(1)
    tokens = torch.where(ids.repeat_interleave(4, 1) >= 0, tokens, -1)
    tail = (positions + 1) // 4 * 4 + lanes
    tokens = torch.cat([tokens, torch.where(tail <= positions, tail, -1)], 1)
    pages = torch.gather(table[call["row_request"].long()], 1, tokens.clamp(min=0) // page)
    keep = torch.zeros(call["k_cache"].shape[:2], dtype=torch.bool, device="cuda")
    keep[pages[tokens >= 0], (tokens % page)[tokens >= 0]] = True
    for name in ("k_cache", "v_cache"):
        call[name][~keep] = torch.nan
    return call


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(
    "heads,kv_heads,dim", ((24, 2, 64), (24, 2, 128), (24, 2, 256), (12, 1, 256), (6, 1, 128), (8, 8, 64), (5, 1, 256))
)
def test_b24_heads_and_widths_over_poisoned_pages(heads, kv_heads, dim, impl):
    call = poisoned(rows_of((9001, 3000), 46, 0.9, heads=heads, kv_heads=kv_heads, dim=dim))
    gate = torch.randn_like(call["q"])
    want = qsa_attend(**call, out_gate=gate, impl="reference")
    near(qsa_attend(**call, out_gate=gate, impl=impl), want)
    near(qsa_attend(**part(call, slice(0, 3)), out_gate=gate[:3], impl=impl), want[:3])


@pytest.mark.parametrize("heads,kv_heads", ((24, 2), (16, 1), (24, 1), (32, 1), (64, 1)))
@pytest.mark.parametrize("dtype,dim", ((FP16, 256), (FP16, 64), (BF16, 256), (FP32, 256), (FP32, 128)))
def test_b24_shared_tiles_of_any_height_and_dtype(heads, kv_heads, dtype, dim):
    """Tiles of 5 rows down to 1, in Gluon and not; float32 products take 32 heads a KV head and say so."""
    call = poisoned(rows_of((9001, 3000), 46, 0.9, heads=heads, kv_heads=kv_heads, dim=dim))
    call |= {name: call[name].to(dtype) for name in ("q", "k_cache", "v_cache")}
    if dtype == FP32 and heads // kv_heads > 32:
        with pytest.raises(ValueError, match="takes up to 32 query heads a KV head of torch.float32 queries"):
            qsa_attend(**call, impl="shared")
        return
    want = qsa_attend(**call, impl="reference")
    near(qsa_attend(**call, impl="shared"), want, {BF16: 4e-3, FP16: 5e-4, FP32: 1e-5}[dtype])
    near(qsa_attend(**call), want, {BF16: 4e-3, FP16: 5e-4, FP32: 1e-5}[dtype])


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize(
    "cache,page", ((BF16, 64), (BF16, 128), (BF16, 784), (FP8, 64), (FP8, 784), (torch.float32, 64))
)
def test_b22_b30_pages_and_kinds_of_cache(cache, page, impl):
    call = rows_of((9001, 3001), 50, 0.9, page=page)
    if cache == FP8:
        call |= {"k_scale": 0.5, "v_scale": 0.03}
    if cache == torch.float32:
        call["q"] = call["q"].float()
    call = poisoned(call)
    call |= {name: call[name].to(cache) for name in ("k_cache", "v_cache")}
    worst = 1e-5 if cache == torch.float32 else 4e-3
    want = qsa_attend(**call, impl="reference")
    near(qsa_attend(**call, impl=impl), want, worst)
    near(qsa_attend(**part(call, slice(0, 2)), impl=impl), want[:2], worst)


@pytest.mark.parametrize("page,heads,kv_heads,dim,dtype", (
    (64, 24, 2, 256, BF16), (784, 12, 1, 256, BF16), (64, 16, 1, 128, FP16), (100, 8, 8, 64, BF16),
    (64, 5, 1, 256, FP16),
))  # fmt: skip
def test_bits_in_gluon_are_those_of_triton_whole_and_by_units(page, heads, kv_heads, dim, dtype):
    """Over poison, holes, padding, lists out of order and gates; strided queries and outputs."""
    call = poisoned(rows_of((9001, 3000), 100, 0.5, page=page, heads=heads, kv_heads=kv_heads, dim=dim))
    call |= {name: call[name].to(dtype) for name in ("k_cache", "v_cache")}
    call["q"] = torch.randn(heads, 200, 2 * dim, device="cuda").to(dtype).transpose(0, 1)[:, :, ::2]
    call["page_table"][0, ::5], call["block_ids"][20], call["positions"][7], call["row_request"][9] = -1, -1, -1, 5
    call["block_ids"][30:60] = call["block_ids"][30:60].flip(1)
    out = torch.full((200, dim, heads), torch.nan, device="cuda", dtype=dtype).transpose(1, 2)
    for gate in (None, torch.randn_like(call["q"]).float()):
        want = qsa_attend(**call, out_gate=gate, impl="triton")
        assert torch.equal(qsa_attend(**call, out_gate=gate, impl="hopper", out=out), want)
        assert torch.equal(qsa_attend(**call, out_gate=gate), want)
        few = slice(5, 15)
        call_few = part(call, few) | {"out_gate": None if gate is None else gate[few]}
        assert torch.equal(qsa_attend(**call_few, impl="triton"), want[few])
        assert want.isfinite().all() and want[[7, 9]].count_nonzero() == 0


def test_bits_of_a_row_are_the_same_alone_in_a_batch_and_every_time():
    call = rows_of((40000, 70000), 2000)
    want = qsa_attend(**call, impl="triton")
    order = torch.randperm(4000, device="cuda")
    assert torch.equal(qsa_attend(**part(call, order)), want[order])
    for step in (1, 16, 43, 44, 64, 500):
        for lo in (0, 1999, 4000 - step):
            at = slice(lo, lo + step)
            assert torch.equal(qsa_attend(**part(call, at)), want[at])
    for _ in range(20):
        assert torch.equal(qsa_attend(**call), want)
    other = call | {"block_ids": call["block_ids"].flip(1)}  # the order of a list is the order of its sums
    assert not torch.equal(qsa_attend(**other, impl="triton"), want)


def test_shared_tiles_are_deterministic_and_leave_what_is_not_worth_it():
    call = rows_of((40000, 70000), 1003, 0.9)
    call["block_ids"][:500] = rows_of((40000,), 500)["block_ids"]  # independent picks: left to the other kernel
    want, first = qsa_attend(**call, impl="reference"), qsa_attend(**call, impl="shared")
    near(first, want)
    for _ in range(20):
        assert torch.equal(qsa_attend(**call, impl="shared"), first)
    alone = qsa_attend(**call, impl="triton")
    same = (alone == first).flatten(1).all(1)
    assert same[:490].all() and not same[510:].all()


def test_equals_dense_causal_attention_when_the_budget_covers_the_context():
    T, heads, kv_heads, D = 1027, 24, 2, 256
    call = rows_of((T,), T, heads=heads, kv_heads=kv_heads, dim=D)
    keys, seen = torch.full((17, 16, 32), torch.nan, device="cuda", dtype=BF16), (call["positions"] + 1) // 4
    table = torch.arange(17, device="cuda").int()[None]
    index_q = torch.randn(T, 2, 32, device="cuda", dtype=BF16)
    call["block_ids"] = qsa_select(index_q, keys, table, call["row_request"], seen, 512, impl="reference")
    pages = call["page_table"][0].long()
    k, v = (call[n][pages[pages >= 0]].flatten(0, 1)[:T].double() for n in ("k_cache", "v_cache"))
    k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
    q = call["q"].double().transpose(0, 1)
    dense = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    for impl in FORMS:
        near(qsa_attend(**call, impl=impl), dense.transpose(0, 1))


@pytest.mark.parametrize("impl", FORMS)
def test_holes_padding_and_rows_with_nothing_to_attend_to(impl):
    call = rows_of((4000,), 50, 0.9)
    call["page_table"][0, ::3] = -1
    call["positions"][7], call["row_request"][8], call["row_request"][9] = -1, 1, -1
    call["q"][7:10] = torch.nan
    call["positions"][20], call["block_ids"][20] = 2047, -1
    want = qsa_attend(**call, impl="reference")
    near(qsa_attend(**call, impl=impl), want)
    assert qsa_attend(**call, impl=impl)[[7, 8, 9, 20]].count_nonzero() == 0


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("rows", (4, 200))
def test_b11_a_captured_step_reads_what_the_buffers_hold_when_it_is_replayed(rows, impl):
    call, other = rows_of((16384,), rows, 0.9), rows_of((12000,), rows)
    out = torch.empty_like(call["q"])
    qsa_attend(**call, out=out, impl=impl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsa_attend(**call, out=out, impl=impl)
    for name in PER_ROW[:-1]:
        call[name].copy_(other[name])
    call["positions"][-2:] = -1
    graph.replay()
    assert torch.equal(out, qsa_attend(**call, impl=impl)) and out[-2:].count_nonzero() == 0


def test_b31_no_sync_and_no_new_kernels_in_steady_state():
    kernels = (attention.slots_kernel, attention.whole_kernel, attention.unit_kernel, attention.fold_kernel,
               attention_gluon.kernel, union.mark_kernel, union.union_kernel, union.expand_kernel, union_gluon.kernel,
               union.tiles_kernel)  # fmt: skip

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    call = rows_of((16384,), 1000, 0.9)
    for impl in (*FORMS, None):
        for n in (1, 64, 1000):
            qsa_attend(**part(call, slice(0, n)), impl=impl)
    before = compiled()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for impl in (*FORMS, None):
            for n in (1, 2, 3, 5, 8, 15, 16, 17, 33, 65, 999):
                at = slice(1, 1 + n)
                qsa_attend(**part(call, at), impl=impl)
                qsa_attend(**part(call, at) | {"page_table": call["page_table"][:, :250]}, impl=impl)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


@pytest.mark.parametrize("impl", (*FORMS, None))
def test_b27_b07_memory_is_capped_and_offsets_are_64_bits(impl):
    """65,600 rows; a pool of more than 2^31 elements, of which the last are attended to."""
    pages = 36000
    kv = torch.zeros(pages, 64, 2, 2, 256, dtype=BF16, device="cuda")
    kv[-1000:].normal_()
    call = rows_of((64000,), 4100, 0.9)
    call |= {"k_cache": kv[:, :, :, 0], "v_cache": kv[:, :, :, 1]}
    call["page_table"] = torch.arange(pages - 1000, pages, device="cuda").int()[None]
    want = qsa_attend(**call, impl=impl)
    sample = torch.arange(0, 4100, 129, device="cuda")
    near(want[sample], qsa_attend(**part(call, sample), impl="reference"))
    many = part(call, torch.arange(65600, device="cuda") % 4100)
    out = torch.empty_like(many["q"])
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    qsa_attend(**many, out=out, impl=impl)
    extra = torch.cuda.max_memory_allocated() - held
    print(f"{impl}: 65,600 rows take {extra / 2**20:.0f} MiB")
    assert extra <= attention.SLOTS_BYTES + (union.BYTES + (1 << 20) if impl == FORMS[1] else 0)
    assert torch.equal(out[:4100], want) and torch.equal(out[4100 * 15 : 4100 * 16], want)


def test_b32_tensors_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = {n: x.to("cuda:1") if torch.is_tensor(x) else x for n, x in rows_of(rows=3).items()}
    for impl in FORMS:
        assert qsa_attend(**call, impl=impl).device == torch.device("cuda:1") and torch.cuda.current_device() == 0


def test_each_configuration_gives_what_the_chosen_one_does():
    call = rows_of((16384,), 60, 0.9)
    want, out = qsa_attend(**call, impl="reference"), torch.empty_like(call["q"])
    arguments = *call.values(), out, 4, 256**-0.5
    for tokens, columns, stages in ((16, 64, 4), (32, 128, 3), (64, 64, 2)):
        attention.attend(*arguments, config=attention.Config(True, tokens, columns, 4, stages, False, ""))
        whole = out.clone()
        near(whole, want)
        for form, warps, early in ((False, 4, False), (False, 8, True), (True, 8, False)):
            attention.attend(*arguments, config=attention.Config(form, tokens, columns, warps, 2, early, ""))
            assert torch.equal(out, whole), (tokens, columns, form, warps)
    for tall, tokens, columns, warps in ((64, 32, 256, 4), (64, 64, 64, 8), (128, 64, 128, 8), (128, 32, 64, 8)):
        shared.attend(*arguments, config=union.Config(tall, tokens, columns, warps, 2, 1.0, ""))
        near(out, want)
