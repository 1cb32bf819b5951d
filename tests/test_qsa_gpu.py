"""QSA on a GPU: bits over ragged packs, captured graphs, no syncs, long contexts, pools past 2^31 elements."""

import inspect
from pathlib import Path

import pytest
import torch

from thalweg import inputs, layers, qsa
from thalweg.model import Decoder, Session, encode
from thalweg.qsa import qsa_score, qsa_select, qsa_topk
from thalweg.qsa.reference import topk_blocks

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
PER_ROW = ("index_q", "row_request", "visible")
PACKS = ((1,), (5,), (64,), (63, 1), (65, 2, 3), (1, 1, 1, 1), (200,), (17, 130, 9))


def index_call(rows, law="normal", heads=4, D=128, page=64, k=None, blocks=3000):
    """One request a number of rows, contexts of about `blocks` blocks, pages in random order."""
    s = inputs.Source("cuda", sum(rows))
    contexts = tuple(4 * (blocks - 37 * i) + 3 for i in range(len(rows)))
    call = inputs.index(s, inputs.Rows(contexts, max(rows), page=page), heads, D)
    keep = [i * max(rows) + j for i, n in enumerate(rows) for j in range(max(rows) - n, max(rows))]
    call |= {name: call[name][keep] for name in PER_ROW}
    if law == "heavy":
        for name in ("index_q", "block_keys"):
            x = call[name].float()
            call[name] = (x * torch.randn_like(x).mul(2).exp()).to(BF16)
    return call if k is None else call | {"k": k}


def part(call, rows):
    return {name: x[rows] if name in PER_ROW else x for name, x in call.items()}


@pytest.mark.parametrize("law", ("normal", "heavy"))
@pytest.mark.parametrize("rows", PACKS, ids=str)
def test_score_bits_over_ragged_packs(rows, law):
    """In one call, reversed, and each alone: one program a row, or tiles."""
    call = index_call(rows, law, page=196 if len(rows) == 2 else 64)
    packed = qsa_score(**call, num_blocks=3000, impl="triton").view(torch.int32)
    back = torch.arange(sum(rows) - 1, -1, -1, device="cuda")
    again = qsa_score(**part(call, back), num_blocks=3000, impl="triton").view(torch.int32)
    assert torch.equal(again[back], packed)
    for row in {0, sum(rows) // 2, sum(rows) - 1}:
        alone = qsa_score(**part(call, slice(row, row + 1)), num_blocks=3000, impl="triton").view(torch.int32)
        assert torch.equal(alone[0], packed[row])
    flipped = qsa_score(**call | {"index_q": call["index_q"].flip(1)}, num_blocks=3000, impl="triton")
    assert not torch.equal(flipped.view(torch.int32), packed)  # heads in another order


@pytest.fixture(scope="module")
def read():
    """The calls of qsa_select that the shipped model makes while it reads 6,000 bytes, one a block and pass."""
    calls, select = [], layers.qsa.qsa_select
    with pytest.MonkeyPatch.context() as patch:
        names = ("index_q", "block_keys", "page_table", "row_request", "visible", "k")
        patch.setattr(
            layers.qsa, "qsa_select", lambda *args, **more: calls.append(dict(zip(names, args))) or select(*args)
        )
        session = Session(Decoder.load(device="cuda"), [6001])
        tokens = encode(Path(__file__).with_name("text.txt").read_bytes())
        session.prefill([(0, tokens[:3000])])
        session.prefill([(0, tokens[3000:6000])])
    return calls


def test_score_and_selection_bits_of_what_a_model_reads(read):
    """Queries and keys of a trained indexer: packed, reversed, alone; ids alone and packed; another order of heads."""
    assert len(read) == 4
    for call in read[-2:]:
        scored = {name: x for name, x in call.items() if name != "k"} | {"num_blocks": 1500}
        packed, R = qsa_score(**scored).view(torch.int32), len(call["visible"])
        back = torch.arange(R - 1, -1, -1, device="cuda")
        assert torch.equal(qsa_score(**part(scored, back)).view(torch.int32)[back], packed)
        ids = qsa_select(**call)
        for row in range(0, R, 97):
            rows = slice(row, row + 1)
            assert torch.equal(qsa_score(**part(scored, rows)).view(torch.int32), packed[rows])
            assert torch.equal(qsa_select(**part(call, rows)), ids[rows])
        flipped = qsa_score(**scored | {"index_q": call["index_q"].flip(1)})
        assert not torch.equal(flipped.view(torch.int32), packed)


def test_ids_are_the_same_in_prefill_decode_packed_and_alone_and_every_time():
    call = index_call((3500, 3500, 3500), k=512)
    ids = qsa_select(**call, impl="triton")
    for _ in range(20):
        assert torch.equal(qsa_select(**call, impl="triton"), ids)
    for step in (16, 1):
        for lo in range(0, 10500, 1511):
            rows = slice(lo, lo + step)
            assert torch.equal(qsa_select(**part(call, rows), impl="triton"), ids[rows])


def test_b16_b18_topk_of_crowded_scores_and_ties():
    scores = 1 + 0.245 * torch.rand(33, 65504, device="cuda")
    scores[3], scores[4, 40:] = 0.0, 0.5
    visible = torch.full((33,), 65504, device="cuda")
    for k in (512, 2048):
        want = topk_blocks(scores, visible, k)
        for _ in range(20):
            assert torch.equal(qsa_topk(scores, visible, k, impl="triton"), want)


def test_b11_a_captured_step_reads_what_the_buffers_hold_when_it_is_replayed():
    call = index_call((1, 1, 1, 1), k=64)
    out = torch.empty(4, 64, dtype=torch.int32, device="cuda")
    qsa_select(**call, out=out, impl="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsa_select(**call, out=out, impl="triton")
    call["visible"].copy_(torch.tensor([700, 30, 0, 2500]))
    call["row_request"].copy_(torch.tensor([3, 1, 0, -1]))
    call["index_q"].normal_()
    graph.replay()
    assert torch.equal(out, qsa_select(**call, impl="reference")) or torch.equal(out, qsa_select(**call, impl="triton"))
    assert (out[2:] == -1).all() and out[1].tolist() == [*range(30), *[-1] * 34]


def test_b31_no_sync_and_no_new_kernels_in_steady_state():
    from thalweg.qsa import score, topk

    kernels = (score.tiles_kernel, score.row_kernel, topk.maxima_kernel, topk.pick_kernel)

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    call = index_call((1000,), k=64)
    for n in (1, 16, 17, 1000):
        qsa_select(**part(call, slice(0, n)), impl="triton")
    before = compiled()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in (1, 2, 3, 5, 8, 15, 16, 18, 33, 64, 65, 999):
            qsa_select(**part(call, slice(0, n)), impl="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


def test_b27_memory_of_a_long_prefill_is_flat():
    """4,096 rows at 8K to 256K tokens: what select takes beside its output stays under the cap, and is given back."""
    most, reserved = [], []
    for blocks in (2048, 4096, 8192, 16384, 32768, 65536):
        call = index_call((4096,), k=512, blocks=blocks)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            qsa_select(**call)
            most.append(torch.cuda.max_memory_allocated() - held)
            reserved.append(torch.cuda.memory_reserved() - kept)
        print(f"{blocks // 256}K tokens: {most[-1] / 2**20:.1f} MiB allocated, {reserved[-1] / 2**20:.0f} reserved")
        assert reserved[-1] == reserved[-2]
    most_allowed = inspect.signature(qsa_select).parameters["workspace_bytes"].default + 4096 * 512 * 4
    assert max(most) <= most_allowed + (1 << 20) and max(reserved) <= most_allowed + (24 << 20)


def test_b07_offsets_past_int32():
    """65,600 rows of scores (past 2^31 elements in all) and a key pool of 2^31 elements more."""
    pool = torch.zeros(262400, 64, 128, dtype=BF16, device="cuda")
    pool[-520:] = torch.randn(520, 64, 128, device="cuda")
    table = torch.arange(262400 - 520, 262400, device="cuda").int()[None]
    R, N = 65600, 33280
    q = torch.randn(1, 4, 128, device="cuda").to(BF16).expand(R, 4, 128)
    owner, visible = torch.zeros(R, dtype=torch.int32, device="cuda"), torch.full((R,), N, device="cuda")
    scores = qsa_score(q, pool, table, owner, visible, N, impl="triton")
    assert torch.equal(scores[0], scores[-1]) and scores[0].count_nonzero() > N // 2
    ids = qsa_topk(scores, visible, 64, impl="triton")
    del scores
    assert (ids == ids[:1]).all()
    assert torch.equal(ids[:1], qsa_select(q[:1], pool, table, owner[:1], visible[:1], 64, impl="triton"))


def test_b32_tensors_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = {n: x.to("cuda:1") if torch.is_tensor(x) else x for n, x in index_call((3,), k=16).items()}
    ids = qsa_select(**call, impl="triton")
    assert ids.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="qsa_select: page_table must be"):
        qsa.qsa_select(**call | {"page_table": call["page_table"].to("cuda:0")}, impl="triton")
