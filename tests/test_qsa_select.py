"""`qsa_score`, `qsa_topk`, `qsa_select`: bits, ties, NaN, padding, holes, memory."""

import weakref

import pytest
import qsa_oracle as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from thalweg.qsa import qsa_score, qsa_select, qsa_topk, reference_ops

Hi, Di = 4, 128


def bits(x):
    return x.contiguous().view(torch.int32)


def requests_of(counts, page_rows=7, dtype=torch.bfloat16, holes=(), **options):
    """Block keys of requests with so many blocks: the sequences, their pool and page table."""
    keys = [torch.randn(n, Di).to(dtype) for n in counts]
    return keys, *slow.paged(keys, page_rows, holes=holes, **options)


@pytest.mark.parametrize("page_rows", [1, 7, 64, 196])
def test_score_bits_alone_packed_prefill_decode(page_rows):
    """One row's scores are the same int32 bits in every path, and those of exactly rounded dots added head by head."""
    counts = [300, 41, 1500]
    keys, pool, table = requests_of(counts, page_rows)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor([150, 41, 40]))
    visible = torch.cat([torch.arange(150) * 2, torch.arange(41), torch.arange(1460, 1500)])
    q = torch.randn(owner.numel(), Hi, Di).bfloat16()
    packed = qsa_score(q, pool, table, owner, visible, 1500)
    mixed = torch.randperm(owner.numel())
    again = qsa_score(q[mixed], pool, table, owner[mixed], visible[mixed], 1500)
    assert torch.equal(bits(again), bits(packed[mixed]))
    for row in [0, 1, 149, 150, 190, 191, 230]:
        one = slice(row, row + 1)
        alone = qsa_score(q[one], pool, table, owner[one], visible[one], 1500)
        assert torch.equal(bits(alone), bits(packed[one]))
        n = int(visible[row])
        want = slow.scores(q[row], keys[owner[row]][:n])
        assert torch.equal(bits(packed[row, :n]), bits(want))
        assert (packed[row, n:] == -torch.inf).all()
    decode = torch.tensor([149, 190, 230])  # one row a request
    step = qsa_score(q[decode], pool, table, owner[decode], visible[decode], 1500)
    assert torch.equal(bits(step), bits(packed[decode]))


def test_score_bits_negative_control():
    """Another order of the head sum does not have these bits: the comparison above can fail."""
    keys, pool, table = requests_of([1500])
    q = torch.randn(1, Hi, Di).bfloat16()
    got = qsa_score(q, pool, table, torch.tensor([0]), torch.tensor([1500]), 1500)[0]
    assert not torch.equal(bits(got), bits(slow.scores(q[0], keys[0], order=[3, 2, 1, 0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads, width", [(1, 128), (4, 128), (3, 40)])
def test_score_dtypes_and_sizes(dtype, heads, width):
    keys = torch.randn(30, width).to(dtype)
    pool, table = slow.paged([keys], 4)
    q = torch.randn(5, heads, width).to(dtype)
    got = qsa_score(q, pool, table, torch.zeros(5).int(), torch.full((5,), 30), 30)
    for row in range(5):
        torch.testing.assert_close(got[row], slow.scores(q[row], keys), rtol=1e-6, atol=1e-6)


def test_score_past_visible_holes_and_padding_is_minus_infinity():
    """NaN keys at and past `visible`, in page tails and in unmapped pages never reach a score."""
    keys, pool, table = requests_of([20, 20], page_rows=6, holes={(0, 1)})
    table[1, 2] = 10**6
    owner = torch.tensor([0, 0, 1, -1, 2, 1, 0])
    visible = torch.tensor([20, 9, 14, 20, 20, 0, -5])
    q = torch.randn(7, Hi, Di).bfloat16()
    q[3:] = torch.nan
    out = torch.full((30, 7), torch.nan).T
    got = qsa_score(q, pool, table, owner, visible, 30, out=out)
    assert got is out
    finite = [set(range(20)) - set(range(6, 12)), set(range(6)), set(range(12)), set(), set(), set(), set()]
    for row, blocks in enumerate(finite):
        assert set((got[row] != -torch.inf).nonzero().flatten().tolist()) == blocks
        for b in blocks:
            assert got[row, b] == slow.scores(q[row], keys[owner[row]])[b]


def test_score_columns_are_what_the_caller_asks_for():
    _, pool, table = requests_of([20], page_rows=6)
    q, row = torch.randn(1, Hi, Di).bfloat16(), torch.tensor([0])
    full = qsa_score(q, pool, table, row, torch.tensor([20]), 20)
    assert torch.equal(qsa_score(q, pool, table, row, torch.tensor([20]), 8), full[:, :8])
    more = qsa_score(q, pool, table, row, torch.tensor([20]), 50)
    assert torch.equal(more[:, :20], full) and (more[:, 20:] == -torch.inf).all()
    assert qsa_score(q, pool, table, row, torch.tensor([20]), 0).shape == (1, 0)
    assert qsa_score(q[:0], pool, table, row[:0], row[:0], 9).shape == (0, 9)
    for empty in (pool[:0], pool[:, :0]):
        assert (qsa_score(q, empty, table, row, torch.tensor([20]), 9) == -torch.inf).all()


def test_score_of_nothing_in_common_is_positive_zero():
    """relu makes zeros: all of them the same bits, whatever the sign of what was cut off."""
    keys = torch.cat([-torch.ones(3, Di), torch.zeros(2, Di), -1e-30 * torch.ones(2, Di)])
    pool, table = slow.paged([keys], 3)
    got = qsa_score(torch.ones(1, 1, Di) * 1e-20, pool, table, torch.tensor([0]), torch.tensor([7]), 7)
    assert bits(got).count_nonzero() == 0


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float("inf"), -float("inf"), float("nan"), -float("nan"), 1e-45])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_topk_equals_a_plain_sort(data):
    N, k, R = data.draw(st.integers(0, 24)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.lists(VALUES, min_size=N, max_size=N), min_size=R, max_size=R))
    visible = data.draw(st.lists(st.integers(-2, N + 2), min_size=R, max_size=R))
    scores = torch.tensor(rows, dtype=torch.float32).reshape(R, N)
    got = qsa_topk(scores, torch.tensor(visible), k)
    assert got.tolist() == [slow.best(row, n, k) for row, n in zip(rows, visible)]


@pytest.mark.parametrize("k", [1, 7, 64, 199, 200, 300])
def test_topk_of_ordinary_scores_ascending_and_padded(k):
    scores = torch.randn(6, 200).round(decimals=1)  # some ties
    visible = torch.tensor([200, 199, k, k + 1, 0, 37])
    got = qsa_topk(scores, visible, k)
    assert got.dtype == torch.int32 and got.tolist() == [slow.best(s, n, k) for s, n in zip(scores, visible)]
    wide = torch.full((6, 2, 200, 3), torch.nan)
    wide[:, 1, :, 2] = scores
    out = torch.empty(k, 6, dtype=torch.int32).T
    assert qsa_topk(wide[:, 1, :, 2], visible.int(), k, out=out) is out
    assert torch.equal(out, got)


def test_topk_does_not_select_past_visible():
    scores = torch.tensor([[1.0, 2.0, torch.inf, torch.nan, 9.0]])
    assert qsa_topk(scores, torch.tensor([2]), 4).tolist() == [[0, 1, -1, -1]]
    assert qsa_topk(scores[:0], torch.tensor([2])[:0], 4).shape == (0, 4)


@pytest.mark.parametrize("page_rows", [1, 7, 196])
@pytest.mark.parametrize("workspace", [0, 1 << 12, 1 << 16, 64 << 20])
@pytest.mark.parametrize("k", [1, 8, 64])
def test_select_equals_score_then_topk(page_rows, workspace, k):
    keys, pool, table = requests_of([190, 60, 5], page_rows, holes={(0, 0)})
    keys[0][100:120] = keys[0][50:51]  # ties; and NaN inside what is visible
    pool[table[1, 0].long(), 0] = torch.nan
    owner = torch.randint(-1, 3, (70,))
    visible = torch.stack([torch.randint(0, [190, 60, 5][r] + 1, ()) if r >= 0 else torch.tensor(0) for r in owner])
    q = torch.randn(70, Hi, Di).bfloat16()
    q[:4] = -q[:4].abs()  # many exact zeros
    capacity = table.shape[1] * page_rows
    scores = qsa_score(q, pool, table, owner, visible, capacity)
    want = qsa_topk(scores, visible, k)
    got = qsa_select(q, pool, table, owner, visible, k, workspace_bytes=workspace)
    assert got.dtype == torch.int32 and torch.equal(got, want)
    assert got[3:40].tolist() == [slow.best(s, n, k) for s, n in zip(scores[3:40], visible[3:40])]


def test_select_of_few_blocks_needs_no_scores():
    """Rows with at most k visible blocks take all of them, whatever the keys hold; padding rows give -1."""
    _, pool, table = requests_of([6, 6], page_rows=4)
    pool.fill_(torch.nan)
    q = torch.full((6, Hi, Di), torch.nan)
    owner, visible = torch.tensor([0, 1, 1, -1, 5, 0]), torch.tensor([6, 2, 0, 6, 6, 99])
    got = qsa_select(q, pool.float(), table, owner, visible, 12)
    capacity = table.shape[1] * 4
    rows = [range(6), range(2), [], [], [], range(capacity)]
    assert got.tolist() == [list(row) + [-1] * (12 - len(row)) for row in rows]
    out = torch.empty(6, 24, dtype=torch.int32)[:, ::2]
    assert qsa_select(q, pool.float(), table, owner, visible, 12, out=out) is out and torch.equal(out, got)


class Peak(TorchDispatchMode):
    """The most bytes that tensors made under it held at once."""

    def __init__(self):
        super().__init__()
        self.live, self.most, self.seen = 0, 0, set()  # seen: storages made under it and still alive

    def release(self, key, size):
        self.live -= size
        self.seen.discard(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)]
        results = func(*args, **(kwargs or {}))
        for x in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in {*self.seen, *given}:
                storage = x.untyped_storage()
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self.release, storage._cdata, storage.nbytes())
                self.most = max(self.most, self.live)
        return results


@pytest.mark.parametrize("ties", [False, True])
def test_b27_workspace_stays_under_its_cap_at_every_context(ties):
    """Temporaries of a selection: at most workspace_bytes and 4 MiB, at 8K as at 256K tokens."""
    cap, rows, most = 4 << 20, 48, []
    for context in (8192, 65536, 262144):
        blocks = context // 4
        pool = torch.randn(blocks // 64, 64, Di).bfloat16()
        table = torch.arange(blocks // 64).int()[None]
        q = torch.randn(rows, Hi, Di).bfloat16() * (0 if ties else 1)
        visible, out = torch.full((rows,), blocks), torch.empty(rows, 512, dtype=torch.int32)
        with Peak() as peak:
            reference_ops.select(q, pool, table, torch.zeros(rows).int(), visible, out, 512, cap)
        most.append(peak.most)
        if ties:
            assert out.tolist() == [list(range(512))] * rows
    assert max(most) <= cap + (4 << 20), most


@pytest.mark.parametrize("L, rows, k", [(4096, 33, 512), (16384, 1, 2048), (16385, 2, 512), (65504, 2, 2048)])
def test_b16_no_candidate_is_dropped(L, rows, k):
    """Scores crowded into [1, 1.245): the selected values are those of a sort, no id twice, the same each time."""
    scores = 1 + 0.245 * torch.rand(rows, L)
    ids = qsa_topk(scores, torch.full((rows,), L), k).long()
    assert (ids[:, 1:] > ids[:, :-1]).all()
    got = scores.gather(1, ids).sort(-1, descending=True).values
    assert torch.equal(got, scores.sort(-1, descending=True).values[:, :k])
    assert torch.equal(qsa_topk(scores, torch.full((rows,), L), k).long(), ids)


def test_b16_monotonic_ramp():
    L, k = 16448, 512
    scores = torch.stack([torch.arange(L, dtype=torch.float32), -torch.arange(L, dtype=torch.float32)])
    ids = qsa_topk(scores, torch.tensor([L, L]), k)
    assert ids.tolist() == [list(range(L - k, L)), list(range(k))]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("numbers", [0, 100, 512, 600])
def test_b17_nan_loses_to_every_number(sign, numbers):
    scores = torch.full((2, 4096), sign * torch.nan)
    at = torch.randperm(4096)[:numbers].sort().values
    scores[:, at] = torch.randn(2, numbers)
    scores[1, at[:50]] = -torch.inf
    ids = qsa_topk(scores, torch.tensor([4096, 4096]), 512).tolist()
    assert ids == [slow.best(row, 4096, 512) for row in scores]
    assert len(set(ids[0]) & set(at.tolist())) == min(numbers, 512)


def test_b18_ties_take_the_lower_block():
    """40 blocks all at 0.0, then 3 winners among 37 ties: the same set 20 times, at batch position 0 and 5."""
    keys = -torch.ones(40, Di).bfloat16()
    for winners, want in (([], [0, 1, 2, 3]), ([39, 17, 25], [0, 17, 25, 39])):
        for w in winners:
            keys[w] = 1.0
        pool, table = slow.paged([keys], 7)
        q = torch.rand(6, Hi, Di).bfloat16()
        for _ in range(20):
            ids = qsa_select(q, pool, table, torch.zeros(6).int(), torch.full((6,), 40), 4)
            assert ids.tolist() == [want] * 6


def test_b20_visibility_of_interleaved_requests_in_shuffled_pages():
    """Every position of two requests whose rows and pages are interleaved: the exact set of the oracle."""
    keys, pool, table = requests_of([10, 10], page_rows=3)
    positions = torch.arange(41).repeat_interleave(2)
    owner = torch.tensor([0, 1]).repeat(41)
    q = torch.randn(82, Hi, Di).bfloat16()
    ids = qsa_select(q, pool, table, owner, (positions + 1) // 4, 4)
    lost = 0
    for row, p in enumerate(positions.tolist()):
        want = slow.best(slow.scores(q[row], keys[owner[row]]), (p + 1) // 4, 4)
        assert ids[row].tolist() == want
        lost += (p + 1) % 4 == 0 and (p + 1) // 4 - 1 not in want
    assert lost  # without a tail the query's own block must compete, and somewhere it loses


def test_b21_future_blocks_are_not_selectable():
    keys, pool, table = requests_of([8], page_rows=8)
    q = torch.randn(32, Hi, Di).bfloat16()
    pool[table[0, 0].long(), 7] = (10 * q[5].float().mean(0)).bfloat16()
    ids = qsa_select(q, pool, table, torch.zeros(32).int(), (torch.arange(32) + 1) // 4, 2)
    assert [p for p in range(31) if 7 in ids[p]] == []
    for p in range(31):
        pool[table[0, 0].long(), (p + 1) // 4 :] = torch.nan
        assert torch.equal(
            qsa_select(q[p : p + 1], pool, table, torch.tensor([0]), torch.tensor([(p + 1) // 4]), 2)[0], ids[p]
        )
        pool[table[0, 0].long(), :7] = keys[0][:7]
