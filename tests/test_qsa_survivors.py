"""The lists of scores that reach a threshold, and selecting from them: kernels in Triton interpreted, those in Gluon
emulated, against the definition and against a plain sort."""

import gluon_emulator
import pytest
import qsa_oracle as slow
import torch

pytest.importorskip("triton")

from thalweg.qsa import reference_ops, survivors
from thalweg.qsa import select as select_op

LISTS = gluon_emulator.load("qsa", "survivors_gluon")


def put(b_s, p_end, b_least, b_first, layout):
    """What the assembly of `_put` does, in torch."""
    b_in = b_s >= b_least[..., None]
    b_at = b_in.cumsum(-1) - 1
    b_block = (b_first[..., None] + torch.arange(b_s.shape[-1])).broadcast_to(b_s.shape)
    entries = (b_s.contiguous().view(torch.int32).long() << 32) | b_block
    gluon_emulator._store(p_end.unsqueeze(-1) + b_at, entries, b_in)
    return b_in.sum(-1, dtype=torch.int32)


LISTS._put, LISTS._crosses = put, lambda p, capacity: p.offsets < 0
SCORES = gluon_emulator.load("qsa", "score_gluon")
BF16 = torch.bfloat16


def call(owner, visible, counts=(300, 130), law="plain", holes=(), D=64, heads=2):
    """Requests of `counts` blocks whose keys follow a law; NaN in page tails, spare pages and rows of no request."""
    keys = [torch.randn(n, D) for n in counts]
    for x in keys:
        if law == "growing":
            x *= torch.linspace(0.1, 4, len(x))[:, None]
        if law == "doubled":
            x[:] = x[::9].repeat_interleave(9, 0)[: len(x)]
        if law == "equal":
            x[:] = x[0]
        if law == "nan":
            x[torch.rand(len(x)) < 0.9] = torch.nan
    pool, table = slow.paged([x.to(BF16) for x in keys], 64, holes=holes)
    q = torch.randn(len(owner), heads, D).to(BF16)
    q[[o < 0 or o >= len(counts) for o in owner]] = torch.nan
    return q, pool, table, torch.tensor(owner), torch.tensor(visible)


RAGGED = (
    [0, 0, -1, 1, 1, 0, 1, 7, 1, 0] + [1] * 60 + [0] * 9,
    [300, 10**9, 40, 130, 64, 0, 1, 50, 65, 299] + [70 + i for i in range(60)] + [200] * 9,
)


@pytest.mark.parametrize("splits, capacity", [(1, 256), (3, 128), (1, 64)])
def test_lists_hold_what_reaches_the_threshold(splits, capacity):
    """Rows of two requests in a tile, holes; every list in ascending order; one that was full says so."""
    inputs = call(*RAGGED, holes={(0, 1)})
    R, least = len(inputs[0]), torch.randn(len(inputs[0])) * 3 + 4
    lists = torch.full((R, 2 * splits, capacity), -7)
    counts = torch.full((R, 2 * splits), -7, dtype=torch.int32)
    LISTS.survivors(*inputs, least, lists, counts, 9, 64, capacity)
    scores = torch.full((R, 320), torch.nan)
    reference_ops.score(*inputs, scores, 320)
    full = 0
    for r in range(R):
        whole = inputs[3][r] in (0, 1) and inputs[4][r] > 9
        wanted = (scores[r] >= least[r]).nonzero().flatten().tolist() if whole else []
        for i, count in enumerate(counts[r].tolist()):
            mine = [b for b in wanted if b // 64 % splits == i // 2 and b % 64 // 32 == i % 2]
            assert count == len(mine) or (count > capacity and len(mine) > capacity - 32)
            full += count > capacity
            if count <= capacity:
                entries = lists[r, i, :count]
                assert (entries & 0xFFFFFFFF).tolist() == mine
                torch.testing.assert_close(
                    (entries >> 32).int().view(torch.float32), scores[r, mine], rtol=0, atol=1e-3
                )
    assert (full > 0) == (capacity == 64)


@pytest.fixture
def emulated(monkeypatch):
    monkeypatch.setattr(survivors, "score_gluon", SCORES)
    monkeypatch.setattr(survivors, "survivors_gluon", LISTS)


def select(inputs, k, config, left=0):
    """By lists; the exact way, where rows ask for it, is the definition. Ids, and what rows that asked see.

    left: a word that memory held before.
    """
    R, requests = len(inputs[0]), len(inputs[2])
    out = torch.full((R, k), -7, dtype=torch.int32)
    memory = torch.full((R * config.row_words,), left, dtype=torch.int32)
    words = survivors.rest_bytes(R, requests, inputs[0].shape[2], config) // 4
    rest = torch.full((words,), left, dtype=torch.int32)

    def again(flags):
        rest.fill_(-1)  # the sample is no longer needed
        reference_ops.select(*inputs[:4], flags, out, k, 1 << 20)

    return out, survivors.select(*inputs, out, memory, rest, config, again)


FEW = ([0, 0, -1, 1, 1, 0, 7, 1, 0, 0], [300, 10**9, 40, 130, 16, 0, 1, 17, 299, 150])


@pytest.mark.parametrize("law, capacity, again", [
    ("plain", 96, False), ("plain", 32, True), ("growing", 96, False), ("doubled", 96, False), ("equal", 64, True),
    ("nan", 96, True),
])  # fmt: skip
def test_b16_b17_b18_ids_are_those_of_score_and_topk(law, capacity, again, emulated):
    """Ties, NaN, lists that overflow and thresholds that too few reach; rows that see at most k blocks; holes."""
    inputs = call(*FEW, law=law, holes={(0, 1)})
    want = torch.empty(len(inputs[0]), 16, dtype=torch.int32)
    reference_ops.select(*inputs, want, 16, 1 << 20)
    ids, flags = select(inputs, 16, survivors.Config(3, 128, 19, 64, 2, capacity, 64, ""))
    assert torch.equal(ids, want)
    assert bool((flags > 0).any()) == again, flags


SEEN = [300, 10**9, 300, 130, 16, 0, 10**9, 17, 299, 150]


@pytest.mark.parametrize("owner, seen", [(FEW[0], SEEN), ([-1, 7, 0] + 7 * [-1], SEEN), (10 * [0], [299] + 9 * [300])])
def test_threshold_is_of_scores_that_were_written(owner, seen, emulated, monkeypatch):
    """Whatever memory held: a threshold reads what the scorer of the sample wrote, and nothing else.

    Rows of no request see as much as the others; rows that see all, few, nothing; rows whose tile is stored in bulk.
    """
    inputs = call(owner, seen, holes={(0, 1)})
    word, written, found = 0, [], []
    threshold = survivors.threshold_kernel

    class Threshold:
        def __getitem__(self, grid):
            def run(scores, seen, least_score, *args, **options):
                there = scores.view(torch.int32) != word
                written.append((there | (torch.arange(scores.shape[1]) >= seen[:, None])).all().item())
                threshold[grid](scores, seen, least_score, *args, **options)
                found.append(least_score.clone())

            return run

    monkeypatch.setattr(survivors, "threshold_kernel", Threshold())
    want = torch.empty(len(inputs[0]), 16, dtype=torch.int32)
    reference_ops.select(*inputs, want, 16, 1 << 20)
    for word in (0x7FC0BEEF, 0x7F000001, -0x00FFFFFF):  # NaN; 1.7e38; -1.7e38
        ids, _ = select(inputs, 16, survivors.Config(3, 128, 19, 64, 2, 96, 64, ""), word)
        assert written.pop() and torch.equal(ids, want)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not found[0].isinf().all()


def test_lists_are_chosen_where_they_won():
    """By shape alone: many scores of one request, a workspace with room beside them, budgets that a program holds."""
    for R, N, k, requests, workspace, rows in (
        (4096, 63744, 512, 1, 288 << 20, 4096), (9000, 63744, 512, 1, 288 << 20, 4096),
        (4096, 32768, 512, 1, 288 << 20, 4096), (2048, 63744, 512, 1, 288 << 20, 2048),
        (4096, 16384, 512, 1, 288 << 20, 0), (1024, 63744, 512, 1, 288 << 20, 0),
        (4096, 63744, 512, 2, 288 << 20, 0), (4096, 63744, 512, 1, 96 << 20, 0), (4096, 63744, 2048, 1, 1 << 30, 0),
    ):  # fmt: skip
        assert select_op.lists_rows(R, N, k, requests, 4, 128, workspace, "sm_90") == rows
    config = survivors.choose(survivors.Shape(4096, 63744, 512, 4, 128), "sm_90")
    assert (config.stride, config.sampled, config.reach, config.tile, config.splits) == (
        32,
        1992 // 64 * 64 + 64,
        38,
        64,
        4,
    )
    assert config.capacity % 32 == 0 and 2 * config.splits * config.capacity * 8 * 4096 < 128 << 20
