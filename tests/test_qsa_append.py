"""`qsa_append`: index queries, the raw-key ring and the block keys, against the slow oracle and against itself."""

import pytest
import qsa_oracle as slow
import torch

from thalweg.qsa import qsa_append, rope_table

R, THETA, P = 20, 1e4, 400  # 10 lanes: not a multiple of the three axes


class Index:
    """Pools of one test: NaN wherever nothing has been written."""

    def __init__(self, requests, length, Hi=2, Di=40, ratio=4, ring=None, page_rows=7, dtype=torch.float32):
        self.Hi, self.Di, self.ratio, self.requests = Hi, Di, ratio, requests
        pages = -(-length // (ratio * page_rows)) + 1
        self.table = (torch.randperm(requests * pages).view(requests, pages) + 1).int()
        self.keys = torch.full((requests * pages + 1, page_rows, Di), torch.nan, dtype=dtype)
        self.ring = torch.full((requests, ring or ratio, Di), torch.nan, dtype=dtype)
        self.axes = None
        self.weights = 0.3 * torch.randn(2, Di)
        self.rope = rope_table(P, R, THETA)

    def append(self, qk, positions, request, **options):
        positions = torch.as_tensor(positions)
        owner = torch.full_like(positions, request) if isinstance(request, int) else torch.as_tensor(request)
        return qsa_append(
            qk, *self.weights, self.rope, positions, owner, self.ring, self.keys, self.table, ratio=self.ratio,
            ring_positions=self.axes, **options,
        )  # fmt: skip

    def blocks(self, request, count):
        at = torch.arange(count)
        return self.keys[self.table[request, at // self.keys.shape[1]].long(), at % self.keys.shape[1]]

    def written(self):
        return int((~self.keys.isnan()).any(-1).sum())

    def copy(self):
        twin = object.__new__(Index)
        twin.__dict__.update(self.__dict__)
        twin.keys, twin.ring = self.keys.clone(), self.ring.clone()
        twin.axes = None if self.axes is None else self.axes.clone()
        return twin


def same_bits(a, b):
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("ratio, page_rows, Hi, Di", [(4, 7, 2, 40), (3, 1, 1, 24), (1, 196, 4, 128), (8, 64, 3, 64)])
def test_queries_and_block_keys_equal_the_slow_ones(ratio, page_rows, Hi, Di):
    lengths = [45, 0, 23]
    index = Index(3, 50, Hi, Di, ratio, page_rows=page_rows)
    qk = torch.randn(sum(lengths), (Hi + 1) * Di)
    positions = torch.cat([torch.arange(n) for n in lengths])
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    q = index.append(qk, positions, owner)
    want = slow.queries(qk.unflatten(-1, (-1, Di))[:, :-1], index.weights[0], positions.tolist(), R, THETA)
    torch.testing.assert_close(q.double(), want, rtol=1e-4, atol=1e-4)
    for request, n in enumerate(lengths):
        raw = qk[owner == request, -Di:]
        want = slow.block_keys(raw, index.weights[1], list(range(n)), R, THETA, ratio)
        torch.testing.assert_close(index.blocks(request, n // ratio).double(), want, rtol=1e-4, atol=1e-4)
        for p in range(max(0, n - index.ring.shape[1]), n):
            assert torch.equal(index.ring[request, p % index.ring.shape[1]], raw[p])
    assert index.written() == sum(n // ratio for n in lengths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_stage_is_rounded_to_the_pool_dtype(dtype):
    """Bit for bit with the rounding after mean, norm and RoPE, but for the few values that lie on a rounding edge."""
    index = Index(1, 400, Di=64, page_rows=50, dtype=dtype)
    qk = torch.randn(400, 192).to(dtype)
    q = index.append(qk, range(400), 0)
    want = slow.queries(qk.unflatten(-1, (3, 64))[:, :2], index.weights[0], range(400), R, THETA, dtype)
    assert (q == want).float().mean() > 0.995
    want = slow.block_keys(qk[:, -64:], index.weights[1], range(400), R, THETA, 4, dtype)
    assert (index.blocks(0, 100) == want).float().mean() > 0.995


@pytest.mark.parametrize("ring", [4, 5, 11])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 13])
def test_groups_completed_across_calls_have_the_bits_of_one_call(ring, step):
    index = Index(2, 42, ring=ring, dtype=torch.bfloat16)
    pieces, qk = index.copy(), torch.randn(42, 3 * 40).bfloat16()
    q = index.append(qk, range(42), 1)
    parts = [pieces.append(qk[i : i + step], range(i, min(i + step, 42)), 1) for i in range(0, 42, step)]
    assert same_bits(torch.cat(parts), q)
    assert same_bits(pieces.keys, index.keys)
    assert same_bits(pieces.ring, index.ring)


def test_a_group_takes_no_token_of_the_request_before_it():
    """Request 0 ends at position 6 of the call, request 1 goes on at 7: its other members are in its ring."""
    index, qk, history = Index(2, 20), torch.randn(8, 120), torch.randn(7, 120)
    index.append(history, range(7), 1)
    index.append(qk, range(8), [0] * 7 + [1])
    raw = torch.cat([history, qk[7:]])[:, -40:]
    want = slow.block_keys(raw, index.weights[1], range(8), R, THETA, 4)
    torch.testing.assert_close(index.blocks(1, 2).double(), want, rtol=1e-4, atol=1e-4)


def test_append_is_idempotent():
    index = Index(1, 30, ring=9, dtype=torch.bfloat16)
    qk = torch.randn(30, 120).bfloat16()
    index.append(qk[:25], range(25), 0)
    q = index.append(qk[25:], range(25, 30), 0)
    once = index.copy()
    assert same_bits(index.append(qk[25:], range(25, 30), 0), q)
    assert same_bits(index.keys, once.keys)
    assert same_bits(index.ring, once.ring)


@pytest.mark.parametrize("ring", [4, 6, 8])
@pytest.mark.parametrize("start", range(16, 20))
def test_rejected_tail_of_ring_minus_ratio_plus_one_is_rewritten(ring, start):
    rejected = ring - 4 + 1
    index = Index(1, 40, ring=ring, dtype=torch.bfloat16)
    qk, draft = torch.randn(30, 120).bfloat16(), torch.randn(rejected, 120).bfloat16()
    fresh = index.copy()
    fresh.append(qk, range(30), 0)
    index.append(qk[:start], range(start), 0)
    index.append(draft, range(start, start + rejected), 0)
    index.append(qk[start : start + 1], [start], 0)
    index.append(qk[start + 1 :], range(start + 1, 30), 0)
    assert same_bits(index.blocks(0, 7), fresh.blocks(0, 7))
    assert same_bits(index.ring, fresh.ring)


def test_a_longer_rejected_tail_has_overwritten_the_group():
    """The limit above is the real one: one token more and a member of the open group is gone."""
    index, start = Index(1, 40, ring=6), 19
    qk, draft = torch.randn(20, 120), torch.randn(4, 120)
    fresh = index.copy()
    fresh.append(qk, range(20), 0)
    index.append(qk[:start], range(start), 0)
    index.append(draft, range(start, start + 4), 0)
    index.append(qk[start:], [start], 0)
    assert not torch.equal(index.blocks(0, 5), fresh.blocks(0, 5))


def test_ring_rounds_raw_keys_before_the_mean():
    """A float32 key and a bfloat16 ring: whichever call completes the group, its members were rounded."""
    index = Index(1, 4)
    index.ring = index.ring.bfloat16()
    qk = torch.randn(4, 120)
    pieces = index.copy()
    index.append(qk, range(4), 0)
    pieces.append(qk[:3], range(3), 0)
    pieces.append(qk[3:], [3], 0)
    assert same_bits(pieces.keys, index.keys)
    want = slow.block_keys(qk[:, -40:].bfloat16(), index.weights[1], range(4), R, THETA, 4)
    torch.testing.assert_close(index.blocks(0, 1).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", [1, 3, 20])
def test_mrope_block_key_turns_by_the_axes_of_its_first_token(step):
    index = Index(1, 20, ring=5)
    index.axes = torch.full((1, 5, 3), -7, dtype=torch.int32)
    qk, axes = torch.randn(20, 120), torch.randint(0, 300, (20, 3))
    parts = []
    for i in range(0, 20, step):
        rows = slice(i, min(i + step, 20))
        parts.append(index.append(qk[rows], torch.arange(20)[rows], 0, rope_positions=axes[rows]))
    want = slow.queries(qk.unflatten(-1, (3, 40))[:, :2], index.weights[0], axes.tolist(), R, THETA)
    torch.testing.assert_close(torch.cat(parts).double(), want, rtol=1e-4, atol=1e-4)
    want = slow.block_keys(qk[:, -40:], index.weights[1], axes.tolist(), R, THETA, 4)
    torch.testing.assert_close(index.blocks(0, 5).double(), want, rtol=1e-4, atol=1e-4)
    assert index.axes[0].tolist() == axes[15:].tolist()


def test_padding_rows_write_nothing_and_give_zeros():
    """Negative positions, requests out of range, and NaN in their rows; live rows as if they were alone."""
    index = Index(2, 20, dtype=torch.bfloat16)
    alone, qk = index.copy(), torch.randn(12, 120).bfloat16()
    live = torch.tensor([0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    qk[~live] = torch.nan
    positions = torch.tensor([-1, 3, 0, 1, 2, 3, 7, -4, 2**40, 4, 5, 6])
    owner = torch.tensor([0, -1, 1, 1, 1, 1, 2, 0, 99, 1, 1, 1])
    q = index.append(qk, positions, owner)
    want = alone.append(qk[live], range(7), 1)
    assert same_bits(q[live], want)
    assert q[~live].count_nonzero() == 0
    assert same_bits(index.keys, alone.keys) and same_bits(index.ring, alone.ring)
    assert index.written() == 1 and index.ring[0].isnan().all()


def test_block_on_a_hole_or_past_the_table_is_skipped():
    index = Index(1, 20, page_rows=2)
    index.table = torch.tensor([[3, -1, 10**6, 2]], dtype=torch.int32)
    index.append(torch.randn(40, 120), range(40), 0)  # blocks 0..9; pages hold 0,1 | hole | past the pool | 6,7
    found = (~index.keys.isnan()).any(-1).nonzero().tolist()
    assert found == [[2, 0], [2, 1], [3, 0], [3, 1]]
    index.table = index.table[:, :0]
    index.append(torch.randn(4, 120), range(4), 0)  # no page at all
    for empty in (index.keys[:0], index.keys[:, :0]):
        other = Index(1, 20)
        other.keys = empty
        other.append(torch.randn(4, 120), range(4), 0)


def test_views_and_index_types_do_not_change_the_result():
    index = Index(2, 24, dtype=torch.bfloat16)
    qk = torch.randn(24, 120).bfloat16()
    other = index.copy()
    want = index.append(qk, range(24), 1)
    fused = torch.full((24, 400), torch.nan, dtype=torch.bfloat16)
    fused[:, 100:220] = qk
    keys = torch.full((40, *other.keys.shape), torch.nan, dtype=torch.bfloat16).transpose(0, 1)
    other.keys = keys[:, 3]
    other.ring = torch.full((40, 4, 2), torch.nan, dtype=torch.bfloat16).permute(2, 1, 0)
    positions = torch.stack([torch.arange(24), torch.full((24,), -1)], 1).int()[:, 0]
    out = torch.full((24, 2, 80), torch.nan, dtype=torch.bfloat16)[:, :, ::2]
    got = other.append(fused[:, 100:220], positions, torch.ones(24, dtype=torch.int32), out=out)
    assert got is out
    assert same_bits(got, want) and same_bits(other.keys, index.keys) and same_bits(other.ring, index.ring)
    assert keys[:, [0, 1, 2, *range(4, 40)]].isnan().all()


def test_no_rows():
    index = Index(1, 8)
    assert index.append(torch.empty(0, 120), torch.arange(0), 0).shape == (0, 2, 40)
    assert index.written() == 0 and index.ring.isnan().all()


@pytest.mark.parametrize("start", [0, 1, 2, 3, 63, 64])
@pytest.mark.parametrize("extend", [1, 2, 3])
def test_b19_extend_shorter_than_a_block(start, extend):
    """The block key appears exactly when its last token does: the mean of old and new keys; nothing else changes."""
    index = Index(3, 80, ring=4, page_rows=5)
    history, guarded = torch.randn(start, 120), torch.full((extend + 8, 120), torch.nan)
    if start:
        index.append(history, range(start), 1)
    before, new = index.copy(), torch.randn(extend, 120)
    guarded[4 : 4 + extend] = new
    index.append(guarded[4 : 4 + extend], range(start, start + extend), 1)
    done, total = start // 4, (start + extend) // 4
    assert index.written() == total
    assert same_bits(index.blocks(1, done), before.blocks(1, done))
    raw = torch.cat([history, new])[:, -40:]
    want = slow.block_keys(raw, index.weights[1], range(start + extend), R, THETA, 4)
    torch.testing.assert_close(index.blocks(1, total).double(), want, rtol=1e-4, atol=1e-4)
    assert index.ring[[0, 2]].isnan().all()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a.update(positions=[0, 1, 3], request=0), "positions must be one run of consecutive tokens"),
        (lambda a: a.update(positions=[0, 5, 1], request=[0, 1, 0]), "positions must be one run of consecutive tokens"),
        (
            lambda a: a.update(positions=[399, 400, 401], request=0),
            r"positions must be indices below 400.*\[400, 401\]",
        ),
        (lambda a: a.update(positions=[0, 1, 2], request=2), r"row_request must be indices below 2.*got \[2\]"),
    ],
)
def test_check_names_what_would_be_ignored(change, message):
    index, call = Index(2, 20), {}
    change(call)
    index.append(torch.randn(3, 120), **call)  # safe without
    with pytest.raises(ValueError, match="qsa_append: " + message):
        index.append(torch.randn(3, 120), **call, check=True)


def test_check_passes_padding_and_finds_a_page_past_the_pool(monkeypatch):
    index = Index(2, 20)
    index.append(torch.randn(4, 120), [7, 8, -1, -1], [1, 1, -1, 0], check=True)
    index.table[0, 1] = 10**6
    with pytest.raises(ValueError, match=r"qsa_append: page_table must be indices below \d+ .*got \[1000000\]"):
        index.append(torch.randn(1, 120), [0], 0, check=True)
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(ValueError, match="page_table"):
        index.append(torch.randn(1, 120), [0], 0)
