"""`qsa_attend` on Triton, interpreted or on a GPU: whole rows and units, against float64 and each other."""

import pytest
import torch
from test_qsa_attend import Cache

pytest.importorskip("triton")

from thalweg import cases
from thalweg.bench import check as checks
from thalweg.qsa import attention, library

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS, OWNER, POSITIONS = [61, 7, 200], [0, 2, 1, 0], [60, 199, 6, 0]
WORST = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}  # weights and outputs of 16 bits


def run(cache, q, owner, positions, ids, whole=True, ratio=4, scale=None, tokens=16, **options):
    there = [x.to(DEVICE) for x in (q, *cache.pool.unbind(3), cache.table, owner, positions, ids)]
    options = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in options.items()}
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
    config = attention.Config(whole, tokens, 64, 4, 3, False, "")
    attention.attend(*there, out, ratio, scale or q.shape[-1] ** -0.5, config=config, **options)
    return out.cpu()


def same(a, b):
    """The same bits; interpreted, where numpy sums each column of a product in an order of its own, nearly so."""
    if DEVICE == "cuda":
        return torch.equal(a, b)
    return (a.double() - b.double()).norm() <= torch.finfo(a.dtype).eps * b.double().norm()


def check(cache, call, want, **options):
    """Whole rows and a program a unit: as near the truth as their dtype lets them be, and the same bits."""
    whole, split = (run(cache, *call, whole=form, **options) for form in (True, False))
    assert same(whole, split) and not whole.isnan().any()
    assert (whole.double() - want).norm() <= WORST[whole.dtype] * want.norm()
    return whole


def on_gpu(*values):
    return [pytest.param(*value, marks=pytest.mark.gpu) for value in values]


@pytest.mark.parametrize("page,dtype", ((7, torch.bfloat16), (784, torch.float32), *on_gpu((64, torch.float16))))
def test_equals_the_slow_one_over_poisoned_pages(page, dtype):
    cache = Cache(LENGTHS, page, dtype=dtype)
    call = cache.rows(OWNER, POSITIONS, 13)
    want = cache.want(*call)
    cache.poison(*call[1:])
    check(cache, call, want)


@pytest.mark.parametrize("ratio,k", ((3, 4), (4, 0), *on_gpu((1, 9), (8, 1))))
def test_any_ratio_and_budget(ratio, k):
    cache = Cache(LENGTHS, 10)
    call = cache.rows(OWNER, POSITIONS, k, ratio)
    want = cache.want(*call, ratio=ratio, scale=0.3)
    cache.poison(*call[1:], ratio=ratio)
    check(cache, call, want, ratio=ratio, scale=0.3)


def test_bits_do_not_depend_on_company_or_the_order_of_pages():
    cache = Cache([150], 8, q_heads=2, kv_heads=1)
    call = cache.rows([0] * 6, list(range(144, 150)), 12)
    want, order = run(cache, *call), torch.randperm(6)
    assert torch.equal(run(cache, *(x[order] for x in call)), want[order])
    assert same(run(cache, *(x[2:3] for x in call), whole=False)[0], want[2])
    shuffle = torch.randperm(len(cache.pool))
    cache.pool, place = cache.pool[shuffle], shuffle.argsort().int()
    cache.table = torch.where(cache.table >= 0, place[cache.table.clamp(min=0).long()], -1)
    assert torch.equal(run(cache, *call), want)


@pytest.mark.parametrize("scales", ((None, None), (0.5, 0.03)))
def test_b22_fp8_cache_with_nan_in_what_is_not_selected(scales):
    cache = Cache([200, 90], 64, q_heads=4, kv_heads=1, D=64)
    k_scale, v_scale = (s or 1.0 for s in scales)
    factor = torch.tensor([k_scale, v_scale])[:, None]
    cache.kv = [(x / factor).to(torch.float8_e4m3fn).double() * factor for x in cache.kv]
    call = cache.rows([0, 1, 0], [199, 88, 130], 7)
    want = cache.want(*call)
    cache.poison(*call[1:])
    cache.pool = (cache.pool / factor).to(torch.float8_e4m3fn)
    assert cache.pool.float().isnan().any()
    check(cache, call, want, k_scale=scales[0], v_scale=scales[1])


def test_gate_holes_and_rows_with_nothing_to_attend_to():
    """Padding, blocks that are not visible, blocks on holes, an own block that was not selected."""
    holes = {(0, 0), (0, 1)}
    cache = Cache([40, 5], 10, holes=holes)
    q, owner, positions, ids = cache.rows([0, 0, 0, 1, 1, 1], [39, 18, 39, 4, 4, 3], 4)
    ids[0] = torch.tensor([1, 5, 8, 2**31 - 1])  # on a hole; half on a hole; whole; never visible
    ids[1], ids[2] = torch.tensor([0, 2, -1, -77]), torch.tensor([6, 7, 8, 10])
    ids[5] = -1
    gate = torch.full_like(q, torch.nan)
    gate[0] = torch.randn_like(q[0])
    clean = torch.where(ids[:1] == 2**31 - 1, -1, ids[:1])
    want = cache.want(q[:1], owner[:1], positions[:1], clean, holes=holes) * torch.sigmoid(gate[:1].double())
    owner[3:5], positions[3:5], ids[3:5] = torch.tensor([2, -1]), 38, torch.tensor([6, 7, 8, -1])
    positions[2] = -1
    got = check(cache, (q, owner, positions, ids), torch.cat([want, torch.zeros(5, 6, 24)]), out_gate=gate)
    assert got[1:].count_nonzero() == 0


def test_positions_and_ids_past_everything_are_harmless():
    cache = Cache([60], 9)
    q, owner, positions, ids = cache.rows([0, 0], [59, 59], 4)
    positions[1], ids[1, 0] = 2**40, 2**31 - 2
    got = run(cache, q, owner, positions, ids)
    assert got.isfinite().all() and same(got, run(cache, q, owner, positions, ids, whole=False))


@pytest.mark.parametrize("heads", ((24, 2), (12, 1), (5, 5), (40, 1)))
def test_b24_head_counts(heads):
    cache = Cache([80], 16, *heads, 64)
    call = cache.rows([0], [78], 6)
    check(cache, call, cache.want(*call))


def test_b30_every_choice_fits_the_shared_memory_of_its_device():
    """As many steps of keys and values as wait at once beside the queries; fewer where an element is wider."""
    for group in (1, 3, 12, 24):
        for D in (64, 128, 256):
            for size in (2, 4):
                shape = attention.Shape(4096, 2, group, D, size, size)
                for device, most in (("sm_90", 227 << 10), ("gfx950", 160 << 10)):
                    config, few = attention.choose(shape, device), attention.choose(shape._replace(rows=1), device)
                    assert config.whole and not few.whole
                    assert (few.tokens, few.columns) == (config.tokens, config.columns)  # the order of sums
                    assert 2 * config.num_stages * config.tokens * D * size <= most


@pytest.mark.parametrize("id", ("check-attend", "check-attend-fp8"))
def test_the_small_cases(id, monkeypatch):
    """As `thalweg check` judges them."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL[id], DEVICE, "triton")
    assert row.result == "ok", row
