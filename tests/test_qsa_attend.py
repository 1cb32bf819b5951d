"""`qsa_attend`: against slow float64 attention over token lists, on every kind of cache; poison, holes, bits."""

import pytest
import qsa_oracle as slow
import torch

from thalweg.qsa import qsa_attend, qsa_select


class Cache:
    """Sequences of keys and values `[N, Hkv, D]`, and their pages: NaN wherever no token lies."""

    def __init__(self, lengths, page=7, q_heads=6, kv_heads=2, D=24, dtype=torch.bfloat16, holes=()):
        self.kv = [torch.randn(n, kv_heads, 2, D).to(dtype) for n in lengths]
        self.pool, self.table = slow.paged(self.kv, page, holes=holes)
        self.page, self.q_heads, self.D, self.dtype = page, q_heads, D, dtype

    def rows(self, owner, positions, k, ratio=4):
        """Random queries and k distinct random blocks of those each sees, -1 filled, in random order."""
        q, ids = torch.randn(len(owner), self.q_heads, self.D).to(self.dtype), torch.full((len(owner), k), -1)
        for row, p in enumerate(positions):
            chosen = torch.randperm((p + 1) // ratio)[:k]
            ids[row, torch.randperm(k)[: len(chosen)]] = chosen
        return q, torch.tensor(owner), torch.tensor(positions), ids.int()

    def attend(self, q, owner, positions, ids, **options):
        k, v = self.pool[:, :, :, 0], self.pool[:, :, :, 1]
        return qsa_attend(q, k, v, self.table, owner, positions, ids, **options)

    def want(self, q, owner, positions, ids, ratio=4, scale=None, holes=()):
        rows = []
        for x, r, p, blocks in zip(q, owner.tolist(), positions.tolist(), ids.tolist()):
            where = slow.tokens(blocks, p, ratio)
            where = [t for t in where if (r, t // self.page) not in holes]
            keys, values = self.kv[r].unbind(2)
            rows.append(slow.attend(x, keys, values, where, scale or self.D**-0.5))
        return torch.stack(rows)

    def poison(self, owner, positions, ids, ratio=4):
        """NaN in every token that no row attends to."""
        keep = torch.zeros(self.pool.shape[:2], dtype=torch.bool)
        for r, p, blocks in zip(owner.tolist(), positions.tolist(), ids.tolist()):
            for t in slow.tokens(blocks, p, ratio):
                keep[self.table[r, t // self.page].long(), t % self.page] = True
        self.pool[~keep] = torch.nan


def close(got, want):
    """Equal to float64 up to the rounding of the output: half a unit in the last place, and float32 sums."""
    step = torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs()
    assert (error <= step * want.abs() + 2e-6 * (1 + want.abs())).all(), error.max()


LENGTHS, OWNER = [61, 7, 200], [0, 2, 1, 2, 0, 0, 2]
POSITIONS = [60, 199, 6, 3, 0, 59, 130]


@pytest.mark.parametrize("page", [1, 7, 64, 196, 784])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attend_equals_the_slow_one_over_poisoned_pages(page, dtype):
    cache = Cache(LENGTHS, page, dtype=dtype)
    call = cache.rows(OWNER, POSITIONS, 5)
    want = cache.want(*call)
    cache.poison(*call[1:])
    got = cache.attend(*call)
    assert got.dtype == dtype
    close(got, want)


@pytest.mark.parametrize("ratio, k", [(1, 9), (3, 4), (8, 1), (4, 0)])
def test_attend_any_ratio_and_budget(ratio, k):
    cache = Cache(LENGTHS, 10)
    call = cache.rows(OWNER, POSITIONS, k, ratio)
    want = cache.want(*call, ratio=ratio, scale=0.3)
    cache.poison(*call[1:], ratio=ratio)
    close(cache.attend(*call, ratio=ratio, scale=0.3), want)


def test_attend_is_dense_causal_attention_when_the_budget_covers_the_context():
    """Through selection: index queries and keys play no part when every visible block fits the budget."""
    cache, T = Cache([90], 16, dtype=torch.float32), 90
    q = torch.randn(T, 6, 24)
    positions, owner = torch.arange(T), torch.zeros(T).int()
    keys = torch.full((8, 4, 32), torch.nan)
    ids = qsa_select(torch.randn(T, 2, 32), keys, torch.arange(8).int()[None], owner, (positions + 1) // 4, 22)
    got = cache.attend(q, owner, positions, ids)
    k, v = (x.repeat_interleave(3, 1).transpose(0, 1)[None] for x in cache.kv[0].unbind(2))
    dense = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, is_causal=True)
    torch.testing.assert_close(got, dense[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_attend_on_any_cache_strides():
    """Halves of one tensor, two tensors, heads before tokens, heads of a larger pool, D strided: one result."""
    cache = Cache(LENGTHS, 8)
    call = cache.rows(OWNER, POSITIONS, 6)
    want = cache.attend(*call)
    k, v = (x.contiguous() for x in cache.pool.unbind(3))

    def within(x, *index):
        big = torch.full((2, *x.shape[:2], 5, 2 * x.shape[3]), torch.nan, dtype=x.dtype)
        big[index].copy_(x)
        return big[index]

    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    some_heads = [within(x, 1, ..., slice(1, 3), slice(0, 24)) for x in (k, v)]
    odd_heads = [within(x, 0, ..., slice(0, 4, 2), slice(24, 48)) for x in (k, v)]
    reverse = [within(x, 0, ..., slice(0, 4, 2), slice(0, 48, 2)) for x in (k, v)]
    sparse_pages = [torch.stack([x, x * torch.nan], 1)[:, 0] for x in (k, v)]
    for pair in ((k, v), head_first, some_heads, odd_heads, reverse, sparse_pages, (k, cache.pool[:, :, :, 1])):
        got = qsa_attend(call[0], *pair, cache.table, *call[1:])
        assert torch.equal(got, want)


def test_attend_bits_do_not_depend_on_company():
    cache = Cache([400, 90], 16, q_heads=4, D=64)
    owner = [0] * 200 + [1] * 60
    call = cache.rows(owner, [*range(200, 400), *range(30, 90)], 16)
    packed, order = cache.attend(*call), torch.randperm(260)
    assert torch.equal(cache.attend(*(x[order] for x in call)), packed[order])
    for row in (0, 1, 77, 199, 200, 259):
        assert torch.equal(cache.attend(*(x[row : row + 1] for x in call))[0], packed[row])
    for lo in range(0, 260, 7):
        assert torch.equal(cache.attend(*(x[lo : lo + 7] for x in call)), packed[lo : lo + 7])


def test_attend_bits_do_not_depend_on_the_order_of_pages():
    cache = Cache([150], 8)
    call = cache.rows([0] * 20, list(range(130, 150)), 9)
    want, shuffle = cache.attend(*call), torch.randperm(len(cache.pool))
    cache.pool = cache.pool[shuffle]
    place = shuffle.argsort().int()
    cache.table = torch.where(cache.table >= 0, place[cache.table.clamp(min=0).long()], -1)
    assert torch.equal(cache.attend(*call), want)


@pytest.mark.parametrize("scales", [(None, None), (0.5, 0.03)])
def test_attend_fp8_cache_is_its_values_times_the_scales(scales):
    cache = Cache(LENGTHS, 12)
    call = cache.rows(OWNER, POSITIONS, 5)
    k_scale, v_scale = (s or 1.0 for s in scales)
    stored = [(x / torch.tensor([k_scale, v_scale])[:, None]).to(torch.float8_e4m3fn) for x in cache.kv]
    cache.kv = [x.double() * torch.tensor([k_scale, v_scale])[:, None] for x in stored]
    cache.poison(*call[1:])
    pool = cache.pool.to(torch.float8_e4m3fn)
    for r, x in enumerate(stored):
        at = torch.arange(len(x))
        page, row = cache.table[r, at // 12].long(), at % 12
        live = ~cache.pool[page, row].isnan().flatten(1).any(-1)
        pool.view(torch.uint8)[page[live], row[live]] = x.view(torch.uint8)[live]
    assert pool.float().isnan().any()
    cache.pool = pool
    close(cache.attend(*call, k_scale=scales[0], v_scale=scales[1]), cache.want(*call))


@pytest.mark.parametrize("gate_dtype", [torch.bfloat16, torch.float32])
def test_attend_out_gate_is_applied_before_the_only_rounding(gate_dtype):
    cache = Cache(LENGTHS)
    call = cache.rows(OWNER, POSITIONS, 5)
    gate = (3 * torch.randn(len(OWNER), 6, 48)).to(gate_dtype)[:, :, ::2]
    out = torch.full((6, 24, len(OWNER)), torch.nan, dtype=torch.bfloat16).permute(2, 0, 1)
    got = cache.attend(*call, out_gate=gate, out=out)
    assert got is out
    close(got, cache.want(*call) * torch.sigmoid(gate.double()))


def test_attend_rows_of_padding_and_with_nothing_to_attend_to_are_zeros():
    holes = {(0, 0), (0, 1)}
    cache = Cache([40, 5], 10, holes=holes)
    q, owner, positions, ids = cache.rows([0, 0, 0, 1, 1, 1], [39, 18, 39, 4, 4, 3], 3)
    ids[0] = torch.tensor([1, 5, 8])  # tokens 4..7 on a hole, 20..23, 32..35
    ids[1], ids[2] = torch.tensor([0, 2, -1]), torch.tensor([6, 7, 8])  # the first: all on holes, its tail too
    ids[5] = -1  # (p + 1) % 4 == 0 and its own block was not selected
    want = cache.want(q[:1], owner[:1], positions[:1], ids[:1], holes=holes)
    owner[3:5], positions[3:5], ids[3:5] = torch.tensor([2, -1]), 38, torch.tensor([6, 7, 8])  # requests out of range
    positions[2] = -1
    gate = torch.full_like(q, torch.nan)
    gate[0] = 40.0  # sigmoid(40) is 1
    got = cache.attend(q, owner, positions, ids, out_gate=gate)
    close(got[:1], want)
    assert got[1:].count_nonzero() == 0 and not got.isnan().any()


def test_attend_ignores_blocks_that_are_not_visible():
    """Ids at or past the open block, and any negative one, are unused: no token of the future, none twice."""
    cache = Cache([60], 9)
    q, owner, positions, ids = cache.rows([0, 0, 0], [29, 30, 31], 4)
    clean = ids.clone()
    for row, p in enumerate(positions.tolist()):
        ids[row, :2] = torch.tensor([(p + 1) // 4, 2**31 - 1])
        ids[row, 2], clean[row, :3] = -77, -1
    assert torch.equal(cache.attend(q, owner, positions, ids), cache.attend(q, owner, positions, clean))
    close(cache.attend(q, owner, positions, ids), cache.want(q, owner, positions, clean))


def test_attend_index_types_and_strides():
    cache = Cache(LENGTHS)
    q, owner, positions, ids = cache.rows(OWNER, POSITIONS, 5)
    want = cache.attend(q, owner, positions, ids)
    spread = torch.stack([owner, positions], 1).int()
    wide = torch.full((5, len(OWNER), 2), 9)
    wide[:, :, 1] = ids.T
    cache.table = torch.stack([cache.table.long(), cache.table.long() * 0 - 1], 2)[..., 0]
    fused = torch.full((len(OWNER), 300), torch.nan, dtype=q.dtype)
    fused[:, 7:151] = q.flatten(1)
    got = cache.attend(fused[:, 7:151].unflatten(1, (6, 24)), spread[:, 0], spread[:, 1], wide[:, :, 1].T)
    assert torch.equal(got, want)


def test_attend_no_rows_and_empty_pools():
    cache = Cache([20])
    call = cache.rows([0], [19], 3)
    assert cache.attend(*(x[:0] for x in call)).shape == (0, 6, 24)
    cache.pool = cache.pool[:0]
    assert cache.attend(*call).count_nonzero() == 0
    cache.table = cache.table[:, :0]
    assert cache.attend(*call).count_nonzero() == 0


@pytest.mark.parametrize("fp8", [False, True])
def test_b22_page_tails_and_unselected_rows_hold_nan(fp8):
    """Page 64, 729 tokens, three requests on unordered pages, NaN in every key and value that is not selected."""
    cache = Cache([729] * 3, 64, q_heads=4, kv_heads=1, D=64)
    call = cache.rows([2, 0, 1, 2, 1], [728, 728, 728, 727, 64], 4)
    if fp8:
        cache.kv = [x.to(torch.float8_e4m3fn).to(torch.bfloat16) for x in cache.kv]
        cache.pool = cache.pool.to(torch.float8_e4m3fn).to(torch.bfloat16)
    want = cache.want(*call)
    cache.poison(*call[1:])
    if fp8:
        cache.pool = cache.pool.to(torch.float8_e4m3fn)
    got = cache.attend(*call)
    assert got.isfinite().all()
    close(got, want)


@pytest.mark.parametrize("heads", [(24, 2), (12, 1), (6, 1), (20, 20), (3, 3), (1, 1)])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_b24_head_counts_and_widths(heads, D):
    cache = Cache([80], 16, *heads, D)
    call = cache.rows([0, 0, 0], [79, 78, 40], 6)
    close(cache.attend(*call), cache.want(*call))


def test_b24_heads_that_do_not_divide_are_refused():
    cache = Cache([8], q_heads=5)
    with pytest.raises(ValueError, match=r"qsa_attend: q must be .* a multiple of Hkv = 2, got \[1, 5, 24\]"):
        cache.attend(*cache.rows([0], [7], 1))


@pytest.mark.parametrize("page", [64, 128])
def test_b30_wide_heads_on_ordinary_pages(page):
    """D = 256 at the model's budget of 2048 tokens: runs within bounded memory, whatever the row count."""
    cache = Cache([2600], page, 24, 2, 256)
    call = cache.rows([0] * 5, [2599, 2598, 2597, 2596, 100], 512)
    close(cache.attend(*call), cache.want(*call))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c.update(ids=torch.tensor([[0, 1, 1]])), r"block_ids must be distinct and below 5 .*\[0, 1, 1\]"),
        (lambda c: c.update(ids=torch.tensor([[5, 0, -1]])), r"block_ids must be distinct and below 5 .*\[5, 0\]"),
        (lambda c: c.update(owner=torch.tensor([1])), r"row_request must be indices below 1 .*got \[1\]"),
        (lambda c: c.update(positions=torch.tensor([21])), r"positions must be indices below 21 .*got \[21\]"),
    ],
)
def test_attend_check_names_what_would_be_ignored(change, message):
    cache = Cache([20])
    cache.table = cache.table[:, :3]
    call = dict(zip(("q", "owner", "positions", "ids"), cache.rows([0], [19], 3)))
    assert torch.equal(cache.attend(**call, check=True), cache.attend(**call))
    change(call)
    cache.attend(**call)  # safe without
    with pytest.raises(ValueError, match="qsa_attend: " + message):
        cache.attend(**call, check=True)
