"""`qsa_score` in Gluon, emulated on the CPU, against the definition: several requests in a tile, holes, odd rows."""

import re

import gluon_emulator
import pytest
import qsa_oracle as slow
import torch

pytest.importorskip("triton")

from thalweg.qsa import reference_ops

HOPPER = gluon_emulator.load("qsa", "score_gluon")
BF16, F16 = torch.bfloat16, torch.float16


def inputs(owner, visible, counts=(300, 130), page=64, heads=2, D=64, dtype=BF16, holes=(), index=torch.int64):
    """Requests of `counts` blocks; NaN in page tails, spare pages and rows of no request."""
    keys = [torch.randn(n, D).to(dtype) for n in counts]
    pool, table = slow.paged(keys, page, holes=holes)
    q = torch.randn(len(owner), heads, D).to(dtype)
    q[[o < 0 or o >= len(counts) for o in owner]] = torch.nan
    return q, pool, table.to(index), torch.tensor(owner, dtype=index), torch.tensor(visible, dtype=index)


def run(call, N, out=None, programs=3, rows=64, **options):
    out = torch.full((len(call[0]), N), torch.nan) if out is None else out
    HOPPER.score(*call, out, config=HOPPER.Config(rows, programs, 4, ""), **options)
    return out


def truth(call, N):
    out = torch.full((len(call[0]), N), torch.nan)
    reference_ops.score(*call, out, N)
    return out


def check(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3, equal_nan=True)  # scores up to 100; -inf where wanted


CAUSAL = ([0] * 70, [231 + i for i in range(70)])
RAGGED = (
    [0, 0, -1, 1, 1, 0, 1, 7, 1, 0] + [1] * 60 + [0] * 9,
    [300, 10**9, 40, 130, 64, 0, 1, 50, 65, 299] + [70 + i for i in range(60)] + [200] * 9,
)
BACKWARD = ([0] * 66 + [1] * 64, [300 - 4 * i for i in range(66)] + [2 * i for i in range(64)])
PACKS = {"causal": CAUSAL, "ragged": RAGGED, "backward": BACKWARD, "alone": ([1], [77]), "blind": ([-1, 0], [9, 0])}


@pytest.mark.parametrize("programs", (1, 5))
@pytest.mark.parametrize("pack", PACKS)
def test_equals_the_definition(pack, programs):
    """Tiles of one request and of several, padding in between, guesses that are wrong, fewer and more programs."""
    call = inputs(*PACKS[pack])
    check(run(call, 308, programs=programs), truth(call, 308))
    assert torch.equal(bits(run(call, 308, programs=programs)), bits(run(call, 308, programs=2 * programs + 1)))


@pytest.mark.parametrize(
    "heads,D,rows,dtype", ((1, 64, 64, BF16), (3, 128, 64, F16), (5, 64, 32, BF16), (9, 64, 16, F16))
)
def test_b24_head_counts_widths_and_dtypes(heads, D, rows, dtype):
    """Head counts that tensor parallelism leaves, 64 rows a tile or fewer; a row sees a part of the first tile."""
    call = inputs([1] * 20 + [0] * 3, [30 + 5 * i for i in range(20)] + [7, 0, 64], heads=heads, D=D, dtype=dtype)
    check(run(call, 132, rows=rows), truth(call, 132))


@pytest.mark.parametrize("page", (64, 192))
def test_holes_pages_of_several_tiles_and_index_types(page):
    call = inputs(*RAGGED, page=page, holes={(0, 1), (1, 0)}, index=torch.int32)
    call[1][call[2][0, 0].long(), 3] = torch.nan  # a key that is visible: NaN, as any number
    check(run(call, 300), truth(call, 300))
    call[2][0, 0] = 10**6  # past the pool: a hole
    check(run(call, 300), truth(call, 300))


def test_b22_nan_that_is_not_visible_reaches_nothing():
    call = inputs(*CAUSAL)
    call[1][call[2][0, 4].long(), 44:] = torch.nan
    assert run(call, 300)[:, :231].isfinite().all()


@pytest.mark.parametrize("pack", ("causal", "ragged"))
@pytest.mark.parametrize("aligned", (True, False))
def test_without_fill_nothing_is_written_past_visible(pack, aligned):
    """Rows that see at most `least` are left alone; with rows of whole 16 bytes and without."""
    call = inputs(*PACKS[pack])
    want, rows = truth(call, 307), len(call[0])
    whole = run(call, 307, torch.full((rows, 308 if aligned else 311), torch.nan)[:, :307])
    check(whole, want)
    got = run(call, 307, torch.full((rows, 308 if aligned else 311), torch.nan)[:, :307], least=64, fill=False)
    owner, visible = call[3], call[4].clamp(0, 307)
    scored = (owner >= 0) & (owner < 2) & (visible > 64)
    hidden = ~scored[:, None] | (torch.arange(307) >= visible[:, None])
    assert torch.equal(bits(got), bits(whole.masked_fill(hidden, torch.nan)))


def test_views():
    """Queries cut from a wider buffer, pages with something else between their rows, columns apart."""
    q, pool, table, owner, visible = inputs(*RAGGED)
    want = run((q, pool, table, owner, visible), 300)
    wide = torch.full((len(q), 5, 96), torch.nan, dtype=q.dtype)
    wide[:, 1:3, 16:80] = q
    keys = torch.stack([pool, pool * torch.nan], 2)[:, :, 0]
    spread = torch.stack([owner, visible], 1)
    call = (wide[:, 1:3, 16:80], keys, torch.stack([table, table], 2)[..., 0], spread[:, 0], spread[:, 1])
    assert torch.equal(bits(run(call, 300)), bits(want))
    assert torch.equal(bits(run(call, 300, torch.empty(300, len(q)).T).contiguous()), bits(want))


@pytest.mark.parametrize(
    "change,reason",
    (
        ({"index_q": torch.zeros(70, 2, 64)}, "takes bfloat16 and float16, got torch.float32"),
        ({"index_q": torch.zeros(70, 17, 64, dtype=BF16)}, "takes up to 16 heads of 64 or 128, got 17 of 64"),
        ({"block_keys": torch.zeros(9, 196, 64, dtype=BF16)}, "takes pages of a multiple of 64 .*, got 9 pages of 196"),
        ({"block_keys": torch.zeros(0, 64, 64, dtype=BF16)}, "takes pages of a multiple of 64 .*, got 0 pages of 64"),
        ({"out": torch.empty(70, 2**20, device="meta")}, "takes up to 1048512 blocks, .*got 70 x 1048576"),
        ({"index_q": torch.zeros(70, 2, 65, dtype=BF16)[..., 1:]}, "index_q must have rows of whole 16 bytes"),
        (
            {"block_keys": torch.zeros(9, 64, 68, dtype=BF16)[..., 4:]},
            "block_keys must have pages a whole number of rows",
        ),
    ),
)
def test_b34_what_it_cannot_take_it_names(change, reason):
    q, pool, *_ = inputs(*CAUSAL)
    call = {"index_q": q, "block_keys": pool, "out": torch.empty(70, 300)}
    assert HOPPER.why_not(call) is None
    assert re.match(reason, HOPPER.why_not(call | change))


def bits(x):
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("pack", ("causal", "ragged"))
def test_maxima_of_16_and_of_64_blocks(pack):
    """What a select asks for: of the blocks that a row sees; NaN gives way, a hole is -inf; -7 in rows not scored."""
    call = inputs(*PACKS[pack], holes={(0, 1)})
    call[1][call[2][0, 0].long(), 16:32] = torch.nan
    maxima = torch.full((len(call[0]), 64), -7.0)
    out = run(call, 304, maxima=maxima, above=32, fill=False, least=20)
    for scores, got, owner, seen in zip(truth(call, 304), maxima, *(x.tolist() for x in call[3:])):
        seen = min(seen, (304, 192)[owner]) if owner in (0, 1) else 0
        for size, at in ((16, 0), (64, 32)):
            groups = scores[: seen if seen > 20 else 0].split(size)
            best = [max(g[~g.isnan()], default=torch.tensor(torch.nan)) for g in groups if len(g)]
            if best:
                check(got[at : at + len(best)], torch.stack(best))
        assert seen > 20 or (got == -7.0).all()
    assert not out.isneginf().all()
