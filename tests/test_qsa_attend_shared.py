"""`qsa_attend` over unions of tiles, interpreted or on a GPU: against float64, whatever is shared or left."""

import pytest
import torch
from test_qsa_attend import Cache

pytest.importorskip("triton")

from thalweg import cases, dispatch
from thalweg.bench import check as checks
from thalweg.bench.calls import IMPLS, captured
from thalweg.qsa import attention, library, qsa_attend, shared, union

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORST = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def run(cache, q, owner, positions, ids, limit=1.0, ratio=4, scale=None, tokens=32, **options):
    there = [x.to(DEVICE) for x in (q, *cache.pool.unbind(3), cache.table, owner, positions, ids)]
    options = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in options.items()}
    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
    config = union.Config(64 if DEVICE == "cuda" else 16, tokens, 128, 4, 2, limit, "")
    shared.attend(*there, out, ratio, scale or q.shape[-1] ** -0.5, config=config, **options)
    return out.cpu()


def check(cache, call, want, limits=(1.0,), **options):
    """limits: 1 shares every tile of one request, 0 none."""
    for limit in limits:
        got = run(cache, *call, limit=limit, **options)
        assert not got.isnan().any()
        assert (got.double() - want).norm() <= WORST[got.dtype] * want.norm()
    return got


def neighbours(cache, owner, positions, k, ratio=4):
    """Rows that select most of what the row before them did, in another order, and a block or two of their own."""
    q, owner, positions, ids = cache.rows(owner, positions, k, ratio)
    for row in range(1, len(ids)):
        visible = (positions[row] + 1) // ratio
        keep = ids[row - 1][(ids[row - 1] >= 0) & (ids[row - 1] < visible)][: k - 2]
        if owner[row] == owner[row - 1]:
            own = ids[row][(ids[row] >= 0) & ~torch.isin(ids[row], keep)][: k - len(keep)]
            ids[row] = torch.nn.functional.pad(torch.cat([own, keep]), (0, k - len(own) - len(keep)), value=-1)
    return q, owner, positions, ids


def test_equals_the_slow_one_over_poisoned_pages():
    """Open blocks of rows lie in one another's complete ones; a tile of two requests is not shared."""
    cache = Cache([70, 61], 7, q_heads=3, kv_heads=1)
    call = neighbours(cache, [0] * 6 + [1], [*range(62, 68), 58], 5)
    want = cache.want(*call)
    cache.poison(*call[1:])
    check(cache, call, want, (1.0, 0.0))


@pytest.mark.parametrize("tokens", (16, 32, 64))
def test_steps_of_any_number_of_tokens(tokens):
    """The bits of a row lie 32 tokens a word; half a word, one or two are a step's."""
    cache = Cache([400], 7, q_heads=3, kv_heads=1)
    call = neighbours(cache, [0] * 6, range(390, 396), 40)
    check(cache, call, cache.want(*call), tokens=tokens)


def test_union_is_the_sorted_blocks_of_the_rows_and_who_has_them():
    cache = Cache([700], 10)
    call = neighbours(cache, [0] * 7, [690, 691, 692, 693, 694, 2, 695], 40)
    q, owner, positions, ids = call
    config = union.Config(16, 32, 128, 4, 2, 0.8, "")
    there = [x.to(DEVICE) for x in (cache.table, owner, positions, ids)]
    made = union.lists(tuple(there), cache.pool[:, :, :, 0].to(DEVICE), 3, 4, config)
    assert made.rows == 5
    for tile, rows in enumerate((range(5), range(5, 7))):
        has = [{b for b in ids[r].tolist() if b >= 0} | {int(positions[r] + 1) // 4} for r in rows]
        has = [h - {int(positions[r] + 1) // 4} if (positions[r] + 1) % 4 == 0 else h for h, r in zip(has, rows)]
        blocks = sorted(set().union(*has))
        assert made.counts[tile] == len(blocks)
        slots = made.slots.cpu().view(2, -1)[tile, : 4 * len(blocks)]
        masks = made.masks.cpu().view(2, -1, 16)[tile]
        for j, token in enumerate(b * 4 + i for b in blocks for i in range(4)):
            seen = [token // 4 in h and token <= positions[r] for h, r in zip(has, rows)]
            assert [bool(masks[j // 32, r] >> (j % 32) & 1) for r in range(len(rows))] == seen
            assert slots[j] == (cache.table[0, token // 10] * 10 + token % 10 if any(seen) else -1)


def test_gate_holes_and_rows_with_nothing_to_attend_to():
    """Padding among the rows, blocks that are not visible, on holes, twice; an own block that was not selected."""
    holes = {(0, 0), (0, 1)}
    cache = Cache([40], 10, holes=holes)
    q, owner, positions, ids = cache.rows([0] * 6, [39, 18, 39, 38, 38, 3], 4)
    ids[0] = torch.tensor([1, 5, 8, 2**31 - 1])
    ids[1], ids[2], ids[3] = torch.tensor([0, 2, -1, -77]), torch.tensor([6, 7, 8, 9]), torch.tensor([8, 5, 6, 8])
    ids[5] = -1
    clean = ids.clone()
    clean[0, 3], clean[3, 3] = -1, -1  # a block given twice counts once here
    gate = torch.full_like(q, torch.nan)
    gate[0], gate[3] = torch.randn_like(q[0]), torch.randn_like(q[0])
    want = torch.zeros(6, 6, 24, dtype=torch.float64)
    for row in (0, 3):
        at = slice(row, row + 1)
        want[at] = cache.want(q[at], owner[at], positions[at], clean[at], holes=holes) * torch.sigmoid(
            gate[at].double()
        )
    owner[4], positions[2] = -1, -1
    got = check(cache, (q, owner, positions, ids), want, out_gate=gate)
    assert got[[1, 2, 4, 5]].count_nonzero() == 0


def test_b22_fp8_cache_with_scales():
    cache = Cache([90], 64, q_heads=4, kv_heads=1, D=64)
    factor = torch.tensor([0.5, 0.03])[:, None]
    cache.kv = [(x / factor).to(torch.float8_e4m3fn).double() * factor for x in cache.kv]
    call = neighbours(cache, [0] * 4, [86, 87, 88, 89], 5)
    want = cache.want(*call)
    cache.poison(*call[1:])
    cache.pool = (cache.pool / factor).to(torch.float8_e4m3fn)
    check(cache, call, want, k_scale=0.5, v_scale=0.03)


def test_it_is_taken_by_name_only():
    cache = Cache([20])
    q, owner, positions, ids = cache.rows([0], [19], 3)
    call = {"q": q, "k_cache": cache.pool[:, :, :, 0], "v_cache": cache.pool[:, :, :, 1], "page_table": cache.table}
    call = captured("qsa_attend", call | {"row_request": owner, "positions": positions, "block_ids": ids})
    lines = {v.name: v for v in dispatch.explain("qsa_attend", IMPLS["qsa_attend"], call)}
    assert not lines["shared"].chosen
    impl = {one.name: one for one in IMPLS["qsa_attend"]}["shared"]
    assert "neighbours" in impl.only_named


FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtypes", [(q, kv) for q in FLOATS for kv in (*FLOATS, torch.float8_e4m3fn)])
def test_b24_heads_past_a_tile_are_refused_before_anything_is_written(dtypes, monkeypatch):
    monkeypatch.setattr(library, "INTERPRETED", True)
    impl = {one.name: one for one in IMPLS["qsa_attend"]}["shared"]
    tall = union.choose(1, 32, attention.multiplied(*dtypes).itemsize, hopper=False).tall
    names = ("row_request", "positions", "block_ids")
    for heads in (tall, tall + 1):
        cache = Cache([20], q_heads=heads, kv_heads=1)
        q, *index = cache.rows([0], [19], 3)
        k, v = (x.to(dtypes[1]) for x in cache.pool.unbind(3))
        call = {"q": q.to(dtypes[0]), "k_cache": k, "v_cache": v, "page_table": cache.table, **dict(zip(names, index))}
        if heads == tall:
            assert impl.why_not(captured("qsa_attend", call)) is None
    out = torch.full_like(call["q"], 7)
    with pytest.raises(ValueError, match=f"takes up to {tall} query heads a KV head"):
        qsa_attend(**call, out=out, impl="shared")
    assert (out == 7).all()


def test_b27_lists_stay_under_their_cap_at_every_context():
    for tokens in (8192, 262144, 1 << 22):
        for k in (512, 2048):
            config = union.choose(12, 256, 2, hopper=True)
            planned = union.sizes(65600, 12, k, 4, tokens, config)
            tile = 1 + planned.rows * planned.words + 2 * planned.width + planned.size * 3 // 2
            assert planned.tiles >= 1 and 4 * planned.tiles * tile <= union.BYTES


@pytest.mark.parametrize("id", ("check-attend", "check-attend-fp8"))
def test_the_small_cases(id, monkeypatch):
    """As `thalweg check` judges them."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL[id], DEVICE, "shared")
    assert row.result == "ok", row
