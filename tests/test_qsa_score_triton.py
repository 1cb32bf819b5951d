"""`qsa_score` on Triton, interpreted or on a GPU: tiles and single rows, against float64 and each other."""

import pytest
import qsa_oracle as slow
import torch

pytest.importorskip("triton")

from thalweg import cases
from thalweg.bench import check as checks
from thalweg.qsa import library, qsa_score, reference_ops, score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROW = score.Config(1, 16, 48, 1, 4, 2, "")
OWNER, VISIBLE = [0, 0, 0, 1, 1, -1, 0, 2, 1, 10**9], [50, 3, 20, 41, 40, 9, 10**9, 9, 0, 5]


def tiles(group, keys=16, span=32, rows=16):
    return score.Config(rows, keys, span, group, 4, 2, "")


def inputs(page=7, heads=4, D=128, dtype=BF16, holes=(), law="normal", owner=OWNER, visible=VISIBLE, counts=(50, 41)):
    """Two requests; NaN in page tails, spare pages and padding rows. Interpreted dots are rounded any way."""
    keys = [torch.randn(n, D) for n in counts]
    q = torch.randn(len(owner), heads, D)
    if law == "heavy":
        q, keys = q * torch.randn_like(q).mul(2).exp(), [k * torch.randn_like(k).mul(2).exp() for k in keys]
    if law == "exact":  # dots are integers times a power of two: exact in any order, unlike their sum
        q = (3 * q).round() * torch.tensor([1.0, 2.0**-17, 2.0**-18, 2.0**-17])[:, None]
        keys = [(3 * k).round() for k in keys]
    pool, table = slow.paged([k.to(dtype) for k in keys], page, holes=holes)
    q = q.to(dtype)
    q[torch.tensor([o not in (0, 1) for o in owner])] = torch.nan
    return q, pool, table, torch.tensor(owner), torch.tensor(visible)


def run(call, N=60, config=None, **options):
    out = torch.full((len(call[0]), N), torch.nan, device=DEVICE)
    score.score(*(x.to(DEVICE) for x in call), out, config=config, **options)
    return out.cpu()


def truth(call, N=60):
    out = torch.full((len(call[0]), N), torch.nan)
    reference_ops.score(*call, out, N)
    return out


def check(got, call, worst=1e-6):
    want = truth(call, got.shape[1])
    assert torch.equal(got == -torch.inf, want == -torch.inf) and torch.equal(got.isnan(), want.isnan())
    finite = want.isfinite()
    assert (got - want)[finite].abs().max() <= worst * want[finite].abs().max()


def bits(x):
    return x.view(torch.int32)


@pytest.mark.parametrize("page", (7, 16, 48))
@pytest.mark.parametrize("config", (tiles(4), ROW), ids=("tiles", "row"))
def test_equals_the_definition(page, config):
    """Ragged requests in one tile, rows out of order, holes, padding, visible counts past the table."""
    call = inputs(page, holes={(0, 1)})
    check(run(call, config=config), call)


@pytest.mark.parametrize("heads,D,dtype,group", ((1, 128, BF16, 1), (3, 40, F16, 1), (6, 64, BF16, 2), (8, 64, F32, 4)))
def test_heads_widths_and_dtypes(heads, D, dtype, group):
    call = inputs(16, heads, D, dtype)
    check(run(call, config=tiles(group)), call)
    if dtype != F32:
        check(run(call, config=ROW), call)


@pytest.mark.parametrize("law", ("exact", *(pytest.param(law, marks=pytest.mark.gpu) for law in ("normal", "heavy"))))
def test_bits_of_rows_do_not_depend_on_kernel_or_batch(law):
    call = inputs(16, law=law)
    packed = run(call, config=tiles(4))
    for config in (ROW, tiles(1), tiles(2, keys=32), tiles(4, span=16)):
        assert torch.equal(bits(run(call, config=config)), bits(packed))
    order = torch.randperm(len(OWNER))
    again = run([x[order] if i in (0, 3, 4) else x for i, x in enumerate(call)], config=tiles(4))
    assert torch.equal(bits(again), bits(packed[order]))
    for row in (0, 4):
        alone = run([x[row : row + 1] if i in (0, 3, 4) else x for i, x in enumerate(call)], config=ROW)
        assert torch.equal(bits(alone[0]), bits(packed[row]))


def test_bits_negative_control():
    """Heads in another order give other bits: the comparison above can fail."""
    call = inputs(16, law="exact")
    assert not torch.equal(bits(run((call[0].flip(1), *call[1:]), config=ROW)), bits(run(call, config=ROW)))


def test_nan_keys_that_are_visible_score_nan_and_zeros_are_positive():
    q, pool, table, owner, visible = inputs(16)
    pool[table[0, 0].long(), 3] = torch.nan
    q[0] = -q[0].abs()
    pool[table[0, 1].long()] = pool[table[0, 1].long()].abs()
    call = (q, pool, table, owner, visible)
    for config in (tiles(4), ROW):
        got = run(call, config=config)
        check(got, call)
        assert bits(got[0, 16:32]).count_nonzero() == 0


def test_rows_with_little_to_see_are_skipped_and_nothing_is_written_past_visible():
    call = inputs(16, law="exact")
    want = run(call, config=tiles(4))
    for config in (tiles(4), ROW):
        got = run(call, config=config, least=40, fill=False)
        wanted = torch.full_like(want, torch.nan)
        for row in (0, 3, 6):
            n = min(VISIBLE[row], 60)
            wanted[row, :n] = want[row, :n]
        seen = ~wanted.isnan()
        assert torch.equal(bits(got)[seen], bits(wanted)[seen])
        for row in (1, 2, 4, 5, 7, 8, 9):
            assert got[row].isnan().all()


def test_views_index_types_and_empty_things(monkeypatch):
    monkeypatch.setattr(library, "INTERPRETED", True)
    q, pool, table, owner, visible = (x.to(DEVICE) for x in inputs(16))
    want = qsa_score(q, pool, table, owner, visible, 60, impl="triton")
    wide = torch.full((10, 5, 300), torch.nan, dtype=q.dtype, device=DEVICE)
    wide[:, 1:, 7:135] = q
    keys = torch.stack([pool, pool * torch.nan], 2)[:, :, 0]
    out = torch.empty(60, 10, device=DEVICE).T
    spread = torch.stack([owner, visible], 1)
    args = (wide[:, 1:, 7:135], keys, table.long(), spread[:, 0], spread[:, 1], 60)
    assert qsa_score(*args, out=out, impl="triton") is out and torch.equal(bits(out.contiguous()), bits(want))
    for pages in (pool[:0], pool[:, :0]):
        assert (qsa_score(q, pages, table, owner, visible, 60, impl="triton") == -torch.inf).all()
    assert qsa_score(q[:0], pool, table, owner[:0], visible[:0], 9, impl="triton").shape == (0, 9)
    assert qsa_score(q, pool, table, owner, visible, 0, impl="triton").shape == (10, 0)


def test_the_small_case_and_why_not(monkeypatch):
    """As `thalweg check` judges it; what it cannot take it names."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL["check-score"], DEVICE, "triton")
    assert row.result == "ok", row
    call = [x.to(DEVICE) for x in inputs(16)]
    with pytest.raises(ValueError, match="takes index_q and block_keys of one dtype, got torch.float16 and torch.bfl"):
        qsa_score(call[0].half(), *call[1:], 60, impl="triton")


def test_the_choice_of_a_configuration():
    shape = score.Shape(4096, 63744, 1, 4, 128, BF16)
    assert score.choose(shape, "sm_90") == score.Config(64, 64, 15936, 4, 4, 2, "")
    for heads in range(1, 17):
        config = score.choose(shape._replace(heads=heads), "sm_90")
        assert heads % config.group == 0 and config.group * config.rows <= 256 and config.span % config.keys == 0
        assert config.rows * heads * 128 * 2 <= max(score.QUERY_BYTES, 16 * heads * 256)
    assert score.choose(shape._replace(rows=64, requests=64), "sm_90").rows == 1
    assert score.choose(shape._replace(rows=64, requests=64, dtype=F32), "sm_90").rows > 1  # one kernel
