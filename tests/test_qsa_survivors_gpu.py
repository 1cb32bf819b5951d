"""qsa_select by lists of survivors, on a GPU: exact for hostile keys, the share of rows done again, what that takes."""

import pytest
import torch
from test_qsa_select_gpu import KEYS, call

from thalweg import timing
from thalweg.qsa import qsa_score, qsa_select, qsa_topk, score_gluon, select, survivors, survivors_gluon, topk

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
CAP = 288 << 20
SHAPES = ({"rows": (1100,), "blocks": 20000}, {"rows": (1500,), "blocks": 63744}, {"rows": (1100,), "blocks": 33000,
          "k": 64, "heads": 3}, {"rows": (2100,), "blocks": 40000, "k": 300, "page": 192})  # fmt: skip


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    """Survivors are listed at these shapes too."""
    monkeypatch.setattr(select, "LISTED_SCORES", 1024 * 16384)


def by_lists(args):
    """Ids, and what rows that were done again see, else 0."""
    out = torch.full((len(args["visible"]), args["k"]), -7, dtype=torch.int32, device="cuda")
    names = ("index_q", "block_keys", "page_table", "row_request", "visible")
    flags = select.select(*(args[n] for n in names), out, CAP, True)
    assert flags is not None, "these shapes are listed"
    return out, flags


def by_matrix(args):
    """The ids of score and top-k, some rows at a time."""
    blocks, ids = args["page_table"].shape[1] * args["block_keys"].shape[1], []
    for lo in range(0, len(args["visible"]), 512):
        part = {n: args[n][lo : lo + 512] for n in ("index_q", "row_request", "visible")}
        scores = qsa_score(**part, block_keys=args["block_keys"], page_table=args["page_table"], num_blocks=blocks)
        good = (part["row_request"] >= 0) & (part["row_request"] < args["page_table"].shape[0])
        ids.append(qsa_topk(scores, part["visible"].where(good, 0), args["k"]))
    return torch.cat(ids)


@pytest.mark.parametrize("law", KEYS)
def test_b16_b17_b18_hostile_keys_are_exact(law):
    for shape in SHAPES:
        args = call(law, **shape)
        ids, flags = by_lists(args)
        again = (flags > 0).float().mean().item()
        print(f"{law}, {shape}: {100 * again:.2f} % of rows done again")
        assert torch.equal(ids, by_matrix(args)), shape
        assert again < 0.01 or law in ("equal", "doubled")
        assert all(torch.equal(by_lists(args)[0], ids) for _ in range(19 if shape is SHAPES[0] else 3))


def test_all_rows_done_again():
    """Every score equal: each row by the exact way. What that takes, beside rows of which none is."""
    us = {}
    for law in ("plain", "equal"):
        args = call(law, (4096,), blocks=63744)
        _, flags = by_lists(args)
        args["out"] = torch.empty(4096, 512, dtype=torch.int32, device="cuda")
        us[law] = timing.timed([lambda args=args: qsa_select(**args)] * 4, graph=True).us
        print(f"{law} keys, 63,744 blocks: {(flags > 0).sum()} of 4,096 rows done again, {us[law]:.0f} us")
    assert us["equal"] < 6 * us["plain"]


def test_captured_and_replayed_with_other_keys():
    """One graph: plain keys, keys that all rows need the exact way for, plain keys again."""
    args, hostile = call("plain", (1100,), blocks=20000), call("equal", (1100,), blocks=20000)
    args["out"] = torch.empty(1100, 512, dtype=torch.int32, device="cuda")
    plain, stream = args["block_keys"].clone(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        qsa_select(**args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsa_select(**args)
    for keys in (plain, hostile["block_keys"], plain):
        args["block_keys"].copy_(keys)
        args["out"].fill_(-7)
        graph.replay()
        assert torch.equal(args["out"], by_matrix(args))


def test_b31_no_sync_and_no_new_kernels_in_steady_state():
    """After one call of each form that `choose` gives for a context: other counts of rows compile nothing."""
    kernels = (survivors.sample_kernel, survivors.threshold_kernel, survivors.flags_kernel, survivors.best_kernel,
               survivors_gluon.kernel, score_gluon.kernel, topk.maxima_kernel, topk.pick_kernel)  # fmt: skip

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    args, forms = call("plain", (4096,), blocks=20000), {}
    blocks = args["page_table"].shape[1] * args["block_keys"].shape[1]
    for n in range(900, 4097):
        c = survivors.choose(survivors.Shape(n, blocks, 512, 4, 128), "sm_90")
        width, longest = survivors._power(2 * c.splits), survivors._power(c.capacity)
        forms.setdefault((c.tile, width, min(c.held // width, longest), longest), n)
    assert len(forms) <= 4
    take = lambda n: {m: x[-n:] if m in ("index_q", "row_request", "visible") else x for m, x in args.items()}  # noqa: E731
    for n in forms.values():
        by_lists(take(n))
    before = compiled()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in (901, 1000, 1023, 1025, 1500, 2048, 3000, 3999, 4096):
            qsa_select(**take(n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


def test_ids_alone_and_packed():
    """10,240 rows in parts of 4,096, those of a part, and few rows, which are not listed."""
    args = call("plain", (10240,), blocks=17000)
    ids, _ = by_lists(args)
    for rows in (slice(4096, 8192), slice(5000, 6200), slice(9000, 9064), slice(77, 78)):
        part = {n: x[rows] if n in ("index_q", "row_request", "visible") else x for n, x in args.items()}
        assert torch.equal(qsa_select(**part), ids[rows])


def test_b27_memory_is_flat_at_the_cap():
    for blocks in (16384, 32768, 65536):
        args = call("plain", (4096,), blocks=blocks)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, flags = by_lists(args)
        most = torch.cuda.max_memory_allocated() - held
        print(f"{4 * blocks} tokens: {most / 2**20:.0f} MiB")
        assert flags.shape == (4096,) and most <= CAP + 4096 * 512 * 4 + (1 << 20)
        del args


def test_threshold_of_a_sample_lets_few_more_than_k_through():
    args = call("plain", (4096,), blocks=63744)
    config = survivors.choose(survivors.Shape(4096, 63744, 512, 4, 128), "sm_90")
    assert config.splits == 4 and config.stride == 32 and 2 * config.splits * config.capacity < 4096
    assert (by_lists(args)[1] > 0).sum() <= 8
