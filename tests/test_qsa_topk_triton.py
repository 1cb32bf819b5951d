"""`qsa_topk` and `qsa_select` on Triton, interpreted or on a GPU, against a plain sort and against the two ops."""

import itertools

import pytest
import qsa_oracle as slow
import torch

pytest.importorskip("triton")

from thalweg import cases
from thalweg.bench import check as checks
from thalweg.qsa import library, qsa_score, qsa_select, qsa_topk, reference, select, topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = topk.Config(4, 3, 2, 256, 4, "")  # rows of hundreds of blocks have groups and groups of groups
HELD = topk.Config(4, 1, 2, 256, 4, "")  # a program holds the row


def run(scores, visible, k, config=SMALL):
    out = torch.full((len(scores), k), -7, dtype=torch.int32, device=DEVICE)
    topk.topk(scores.to(DEVICE), torch.as_tensor(visible).to(DEVICE), out, config=config)
    return out.cpu()


def check(scores, visible, k, config=SMALL):
    ids = run(scores, visible, k, config)
    assert ids.tolist() == [slow.best(s, min(max(n, 0), len(s)), k) for s, n in zip(scores, visible)]


def hostile(law, R=4, N=300):
    x = torch.randn(R, N)
    return {
        "plain": x,
        "relu": x.relu(),
        "equal": torch.ones(R, N),
        "growing": torch.arange(N).float() * torch.tensor([1.0, -1.0, 1e-40, 1e35])[:, None],
        "clustered": x + 50.0 * (torch.arange(N) // 40 == 7),
        "doubled": x.round(decimals=1),
        "nan": torch.where(x > -1.7, torch.tensor([torch.nan, -torch.nan])[torch.arange(R) % 2, None], x),
        "infinite": torch.where(x > 1, torch.inf, -torch.inf),
        "crowded": 1 + 0.245 * torch.rand(R, N),
        "signed zeros": torch.where(x > 0, 0.0, -0.0),
    }[law]


def on_gpu(*values):
    return [pytest.param(value, marks=pytest.mark.gpu) for value in values]


@pytest.mark.parametrize("law", ("plain", "equal", "growing", "doubled", "nan", "signed zeros",
                                 *on_gpu("relu", "clustered", "infinite", "crowded")))  # fmt: skip
def test_b16_b17_b18_hostile_scores_are_exact(law):
    """No candidate is dropped, NaN of either sign loses to every number, ties take the lower id; rows that are held,
    rows of groups, rows that end within a group, in fewer groups than k."""
    for config in (SMALL, HELD) if law in ("nan", "equal") else (SMALL,):
        check(hostile(law), [300, 201, 64, 17], 16, config)


@pytest.mark.parametrize("config", (SMALL, HELD, topk.Config(16, 1, 1, 256, 1, "")), ids=("groups", "held", "wide"))
def test_budgets_and_rows_that_take_all(config):
    scores = torch.randn(5, 100).round(decimals=1)
    check(scores, [100, 64, 33, 32, -3], 32, config)
    check(scores[:2], [10**9, 65], 1, config)
    check(scores[:2], [99, 98], 97, config)
    check(scores[:2, :20], [20, 0], 40, config)
    assert run(scores[:0], [], 4, config).shape == (0, 4)


def test_a_group_of_nan_comes_after_every_number_and_before_no_lower_one():
    """Maxima of NaN alone, and of NaN and -inf: -inf counts as a number."""
    scores = torch.full((2, 64), torch.nan)
    scores[:, 40] = -torch.inf
    scores[1, 62:] = 1.0
    check(scores, [64, 63], 5)


def test_rows_that_do_not_fit_the_workspace_together():
    scores = torch.randn(5, 300)
    out = torch.empty(5, 16, dtype=torch.int32, device=DEVICE)
    words = topk.row_words(300, 16, SMALL)
    workspace = torch.full((2 * words + 3,), -1, dtype=torch.int32, device=DEVICE)
    visible = torch.full((5,), 300, device=DEVICE)
    topk.topk(scores.to(DEVICE), visible, out, workspace=workspace, config=SMALL)
    assert out.tolist() == [slow.best(s, 300, 16) for s in scores] and (workspace[-3:] == -1).all()


def test_any_strides_and_index_types(monkeypatch):
    monkeypatch.setattr(library, "INTERPRETED", True)
    scores, visible = torch.randn(5, 200), torch.tensor([200, 3, 150, 0, 9])
    want = [slow.best(s, n, 8) for s, n in zip(scores, visible)]
    wide = torch.full((5, 2, 200, 3), torch.nan, device=DEVICE)
    wide[:, 1, :, 2] = scores.to(DEVICE)
    out = torch.empty(8, 5, dtype=torch.int32, device=DEVICE).T
    spread = torch.stack([visible, visible * 0], 1).int().to(DEVICE)[:, 0]
    assert qsa_topk(wide[:, 1, :, 2], spread, 8, out=out, impl="triton") is out and out.tolist() == want
    for part in (scores.to(DEVICE)[:, 1:], scores.to(DEVICE).T.contiguous().T[:, 1:]):  # not aligned; strided
        assert qsa_topk(part, spread, 8, impl="triton").tolist() == qsa_topk(part, spread, 8, impl="reference").tolist()
    with pytest.raises(ValueError, match="takes k up to 4096, got 5000"):
        qsa_topk(scores.to(DEVICE), spread, 5000, impl="triton")


def requests(page=7):
    """Three requests with ties, zeros, a NaN that is visible, holes; padding rows; rows out of order."""
    keys = [(2 * torch.randn(n, 32)).round().bfloat16() for n in (100, 60, 5)]
    keys[0][70:90] = keys[0][50:51]
    pool, table = slow.paged(keys, page, holes={(0, 1)})
    pool[table[1, 0].long(), 0] = torch.nan
    owner = torch.tensor([0, 0, 1, 0, -1, 2, 1, 0, 3, 0])
    visible = torch.tensor([100, 99, 60, 16, 9, 5, 31, 93, 4, 0])
    q = torch.randn(10, 2, 32).round().bfloat16()  # exact dots: interpreted ones are rounded any way
    q[1] = -q[1].abs()
    return q, pool, table, owner, visible


@pytest.mark.parametrize("workspace", (1 << 13, 1 << 26))
def test_select_equals_score_then_topk(workspace, monkeypatch):
    """A few rows at a time, all; and the scores that the reference makes of exact dots."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    monkeypatch.setattr(topk, "choose", lambda shape, device: SMALL)
    call = requests()
    q, pool, table, owner, visible = (x.to(DEVICE) for x in call)
    capacity = table.shape[1] * 7
    want = reference.topk_blocks(qsa_score(*call, capacity, impl="reference"), visible.cpu(), 16)
    want[[4, 8]] = -1
    got = qsa_select(q, pool, table, owner, visible, 16, workspace_bytes=workspace, impl="triton")
    assert torch.equal(got.cpu(), want)
    if workspace > 1 << 20:
        scores = qsa_score(q, pool, table, owner, visible, capacity, impl="triton")
        again = qsa_topk(scores, visible.where((owner >= 0) & (owner < 3), 0), 16, impl="triton")
        assert torch.equal(again, got)


def test_select_without_pages_or_blocks(monkeypatch):
    monkeypatch.setattr(library, "INTERPRETED", True)
    q, pool, table, owner, visible = (x.to(DEVICE) for x in requests())
    for pages, columns in ((pool[:0], table), (pool[:, :0], table), (pool, table[:, :0])):
        args = (q, pages, columns, owner, visible, 16)
        assert torch.equal(qsa_select(*args, impl="triton"), qsa_select(*args, impl="reference"))


@pytest.mark.parametrize("id", ("check-topk", "check-select"))
def test_the_small_cases(id, monkeypatch):
    """As `thalweg check` judges them."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL[id], DEVICE, "triton")
    assert row.result == "ok", row


def test_b27_the_workspace_is_under_its_cap_at_every_context():
    """Scores, maxima and lists of the rows taken together; never less than one row."""
    for context in (8192, 32768, 131072, 262144, 1 << 20):
        for k in (16, 512, 2048):
            N, config = context // 4, topk.choose(topk.Shape(4096, context // 4, k), "sm_90")
            rows = select.rows_at_once(4096, N, k, 64 << 20, config)
            held = 4 * rows * (N + topk.row_words(N, k, config))
            assert held <= 64 << 20 and (rows == 4096 or rows < 64 or rows % 64 == 0) and rows > 1
    assert select.rows_at_once(4096, 65536, 512, 0, config) == 1
    config = topk.choose(topk.Shape(4096, 65536, 512), "sm_90")
    assert select.rows_at_once(4096, 65536, 512, 288 << 20, config) == 1024  # the default, at 256K tokens


def test_the_choice_of_a_configuration():
    """What a program holds is bounded whatever the row, and a segment is cut into whole groups at every level."""
    for rows, blocks, k in itertools.product(
        (1, 64, 4096), (1, 512, 8193, 65536, 262144, 1 << 25), (1, 512, 2048, 4096)
    ):
        config = topk.choose(topk.Shape(rows, blocks, k), "sm_90")
        held = 8192 if config.few else max(topk.TOP_HELD, 8 * k)
        assert -(-blocks // config.fan**config.levels) <= held and config.fan * k <= 16384
        assert config.segment % config.fan**config.levels == 0 and config.segment <= 16384
