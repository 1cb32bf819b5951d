"""`qsa_append` on Triton, interpreted or on a GPU: call by call beside the reference, on pools full of NaN."""

import pytest
import torch
from test_qsa_append import THETA, Index, P, R

pytest.importorskip("triton")

from thalweg import cases
from thalweg.bench import check as checks
from thalweg.qsa import append, library, rope_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Both:
    """The pools twice: one for the reference, one for Triton."""

    def __init__(self, *args, axes=False, **options):
        self.want = Index(*args, **options)
        if axes:
            self.want.axes = torch.full((*self.want.ring.shape[:2], 3), -7, dtype=torch.int32)
        self.got = self.want.copy()

    def append(self, qk, positions, request, rope_positions=None):
        """One call; the reference's queries and Triton's."""
        want = self.want.append(qk, positions, request, rope_positions=rope_positions, impl="reference")
        g, positions = self.got, torch.as_tensor(positions)
        owner = torch.full_like(positions, request) if isinstance(request, int) else torch.as_tensor(request)
        pools = [g.ring, g.keys, g.axes]
        there = [None if x is None else x.to(DEVICE) for x in pools]
        given = [x.to(DEVICE) for x in (qk, *g.weights, rope_table(P, R, THETA), positions, owner)]
        axes = None if rope_positions is None else rope_positions.to(DEVICE)
        out = torch.full(want.shape, torch.nan, dtype=want.dtype, device=DEVICE)
        append.append(*given, there[0], there[1], g.table.to(DEVICE), out, g.ratio, 1e-6, axes, there[2])
        for x, y in zip(pools, there):
            if x is not None:
                x.copy_(y)
        return want, out.cpu()

    def check(self):
        """Rings to the bit; block keys but for roundings at an edge; nothing else was written."""
        assert torch.equal(self.want.ring.nan_to_num(), self.got.ring.nan_to_num())
        if self.want.axes is not None:
            assert torch.equal(self.want.axes, self.got.axes)
        near(self.got.keys, self.want.keys)


def near(got, want):
    """NaN where it is NaN; 16-bit values may lie one step apart where float32 sums differ in their last bit."""
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.nan_to_num().double(), want.nan_to_num()
    step = torch.finfo(want.dtype).eps
    error = (got - want.double()).abs()
    assert (error <= 2 * max(step, 1e-6) * (want.double().abs() + 0.2)).all()
    assert step < 1e-5 or (error > 0).float().mean() < 0.01


@pytest.mark.parametrize("ratio,ring,Di,dtype", ((4, 4, 40, torch.bfloat16), (3, 7, 24, torch.float32)))
def test_groups_within_calls_and_across_them(ratio, ring, Di, dtype):
    """Two requests in ragged pieces; what a call needs of the ring is read before it is overwritten."""
    both, at = Both(2, 60, 2, Di, ratio, ring=ring, dtype=dtype), [0, 0]
    for pieces in ((5, 0), (1, 3), (2, 1), (9, 2), (1, 1), (0, 7)):
        rows = [range(at[r], at[r] + n) for r, n in enumerate(pieces)]
        owner = [r for r, n in enumerate(pieces) for _ in range(n)]
        qk = torch.randn(len(owner), 3 * Di).to(dtype)
        want, got = both.append(qk, [p for run in rows for p in run], owner)
        near(got, want)
        both.check()
        at = [start + n for start, n in zip(at, pieces)]


def test_pieces_and_one_call_give_the_same_bits():
    whole, pieces = Both(1, 20, ring=5, dtype=torch.bfloat16), Both(1, 20, ring=5, dtype=torch.bfloat16)
    pieces.got.table, pieces.got.weights = whole.got.table, whole.got.weights
    qk = torch.randn(18, 120).bfloat16()
    _, one = whole.append(qk, range(18), 0)
    parts = [pieces.append(qk[i : i + 3], range(i, i + 3), 0)[1] for i in range(0, 18, 3)]
    assert torch.equal(torch.cat(parts), one) and torch.equal(pieces.got.ring, whole.got.ring)
    assert torch.equal(pieces.got.keys.nan_to_num(), whole.got.keys.nan_to_num())
    again = pieces.append(qk[16:], range(16, 18), 0)[1]  # a tail once more: idempotent
    assert torch.equal(again, one[16:]) and torch.equal(pieces.got.keys.nan_to_num(), whole.got.keys.nan_to_num())


@pytest.mark.parametrize("start,extend", ((0, 1), (2, 1), (3, 1), (3, 2), (63, 3), (62, 1)))
def test_b19_extend_shorter_than_a_block(start, extend):
    both = Both(3, 80, ring=4, page_rows=5)
    both.want.ring[1] = torch.randn(4, 40)
    both.got.ring.copy_(both.want.ring)
    guarded = torch.full((extend + 8, 120), torch.nan)
    guarded[4 : 4 + extend] = torch.randn(extend, 120)
    near(*reversed(both.append(guarded[4 : 4 + extend], range(start, start + extend), 1)))
    both.check()
    assert both.got.written() == (start + extend) // 4 - start // 4


def test_mrope_turns_by_the_axes_of_the_first_token():
    both, axes = Both(1, 20, ring=5, axes=True), torch.randint(0, 300, (9, 3))
    for rows in (slice(0, 2), slice(2, 9)):
        near(*reversed(both.append(torch.randn(9, 120)[rows], torch.arange(9)[rows], 0, axes[rows])))
    both.check()


def test_padding_holes_and_rows_that_lie_apart():
    both = Both(2, 20, page_rows=2, dtype=torch.bfloat16)
    both.want.table = both.got.table = torch.tensor([[3, -1, 10**6], [2, 1, 0]], dtype=torch.int32)
    positions = torch.tensor([-1, 3, 0, 1, 2, 3, 7, -4, 2**40, 4, 5, 6])
    owner = torch.tensor([0, -1, 1, 1, 1, 1, 2, 0, 99, 1, 1, 1])
    qk = torch.randn(12, 120).bfloat16()
    qk[owner != 1] = torch.nan
    want, got = both.append(qk, positions, owner)
    near(got, want)
    assert got[owner != 1].count_nonzero() == 0
    both.append(torch.randn(13, 120).bfloat16(), range(13), 0)
    both.check()


@pytest.mark.parametrize("id", ("check-append", "check-append-mrope"))
def test_the_small_cases(id, monkeypatch):
    """As `thalweg check` judges them."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL[id], DEVICE, "triton")
    assert row.result == "ok", row
