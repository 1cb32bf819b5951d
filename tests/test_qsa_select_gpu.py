"""qsa_topk and qsa_select on a GPU: hostile scores and keys are exact and take the time that plain ones take."""

import pytest
import torch

from thalweg import inputs, timing
from thalweg.qsa import few_gluon, qsa_score, qsa_select, qsa_topk, score, score_gluon, topk
from thalweg.qsa.reference import topk_blocks

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SCORES = ("relu", "equal", "growing", "falling", "clustered", "doubled", "nan", "infinite", "crowded")
KEYS = ("plain", "growing", "clustered", "doubled", "equal", "nan", "holes")


def scores(law, R, N):
    x = torch.randn(R, N, device="cuda")
    at = torch.arange(N, device="cuda")
    return {
        "relu": x.relu(),
        "equal": torch.ones_like(x),
        "growing": at.float().expand(R, N).contiguous(),
        "falling": -at.float().expand(R, N).contiguous(),
        "clustered": x + 50.0 * (at // 700 == 3),
        "doubled": x.round(decimals=1),
        "nan": x.masked_fill(x > -1.7, torch.nan),
        "infinite": torch.full_like(x, -torch.inf).masked_fill(x > 1, torch.inf),
        "crowded": 1 + 0.245 * torch.rand_like(x),
    }[law]


@pytest.mark.parametrize("law", SCORES)
def test_b16_b17_b18_hostile_scores_are_exact(law):
    """One level of groups to three, budgets of 2,048 to 8,192 tokens, rows that end anywhere: each row as a stable sort
    has it, 20 times over."""
    for R, N, k in (
        (33, 65504, 512),
        (33, 65504, 2048),
        (64, 32768, 512),
        (200, 8192, 512),
        (200, 20001, 512),
        (5, 262144, 1),
    ):
        x, visible = scores(law, R, N), N - 9 * torch.arange(R, device="cuda")
        visible[1:5] = torch.tensor([0, 17, k, k + 1])
        want = topk_blocks(x, visible, k)
        for _ in range(20 if N == 65504 else 2):
            assert torch.equal(qsa_topk(x, visible, k, impl="triton"), want), (R, N, k)


def test_no_scores_take_longer_than_others():
    """There is no second way: what ties and clusters cost is a few more steps of counting. (1.2 x on a quiet card.)"""
    us, visible = {}, torch.full((1024,), 32768, dtype=torch.int32, device="cuda")
    for law in SCORES:
        x, out = scores(law, 1024, 32768), torch.empty(1024, 512, dtype=torch.int32, device="cuda")
        us[law] = timing.timed([lambda x=x, out=out: qsa_topk(x, visible, 512, out=out, impl="triton")] * 4).us
    print("top-512 of 1,024 rows of 32,768, us:", {law: round(t, 1) for law, t in us.items()})
    assert max(us.values()) < 6 * us["relu"]  # tests share the card


def call(law, rows=(700,), page=64, heads=4, k=512, blocks=9000):
    """Requests of `blocks` blocks and fewer, whose keys follow a law, scored by their last rows; padding among them."""
    s = inputs.Source("cuda", sum(rows))
    contexts = tuple(4 * (blocks - 37 * i) + 3 for i in range(len(rows)))
    args = inputs.index(s, inputs.Rows(contexts, max(rows), page=page), heads, 128)
    keep = [i * max(rows) + j for i, n in enumerate(rows) for j in range(max(rows) - n, max(rows))]
    args |= {name: args[name][keep] for name in ("index_q", "row_request", "visible")}
    keys, table = args["block_keys"], args["page_table"]
    at = torch.empty(keys.shape[:2], device="cuda")  # where in its request a key is, 0 to 1
    for row in table:
        place = torch.arange(len(row) * page, device="cuda").view(-1, page) / (len(row) * page)
        at[row[row >= 0].long()] = place[row >= 0]
    if law in ("growing", "clustered"):
        strength = at if law == "growing" else ((at > 0.4) & (at < 0.5)).float()
        keys.copy_((keys.float() * (0.1 + 4 * strength[..., None])).to(BF16))
    if law == "doubled":
        keys.copy_(keys[:, :1].expand_as(keys))  # every key of a page the same: ties of 64
    if law == "equal":
        keys.copy_(keys[:1, :1].expand_as(keys))
    if law == "nan":
        keys[torch.rand(keys.shape[:2], device="cuda") < 0.97] = torch.nan
    if law == "holes":
        table[:, 5:-2] = table[:, 5:-2].where(torch.rand(table[:, 5:-2].shape, device="cuda") < 0.9, -1)
    args["row_request"][7], args["visible"][9] = -1, 3
    return args | {"k": k}


def want(args):
    blocks = args["page_table"].shape[1] * args["block_keys"].shape[1]
    s = qsa_score(**{n: x for n, x in args.items() if n != "k"}, num_blocks=blocks, impl="triton")
    requests = args["page_table"].shape[0]
    ids = topk_blocks(s, args["visible"].clamp(0, blocks), args["k"])
    good = (args["row_request"] >= 0) & (args["row_request"] < requests)
    return ids.masked_fill(~good[:, None], -1)


@pytest.mark.parametrize("impl", ("hopper", "triton"))
@pytest.mark.parametrize("law", KEYS)
def test_hostile_keys_are_exact(law, impl):
    """Rows of one request and of several in a tile; all rows at once and few; budgets, heads; two and three levels."""
    shapes = (
        {}, {"rows": (65, 2, 131, 64)}, {"rows": (90,), "blocks": 66000}, {"blocks": 1500}, {"k": 64, "heads": 3},
        {"rows": (70, 300), "blocks": 2 * 17000, "k": 2048},
    )  # fmt: skip
    for shape in shapes:
        args = call(law, **shape)
        ids = want(args)
        for workspace in (8 << 20, 1 << 30):
            assert torch.equal(qsa_select(**args, workspace_bytes=workspace, impl=impl), ids), (shape, workspace)


def test_b31_no_sync_and_no_new_kernels_in_steady_state():
    """What a call gets without a name: rows alone, in tiles, and the top-k of few rows and of many."""
    kernels = (score.row_kernel, score.tiles_kernel, score_gluon.kernel, topk.maxima_kernel, topk.pick_kernel,
               few_gluon.few_kernel)  # fmt: skip

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    args = call("plain", (999,))
    take = lambda n: {m: x[:n] if m in ("index_q", "row_request", "visible") else x for m, x in args.items()}  # noqa: E731
    for n in (1, 4, 5, 16, 17, 64, 65, 132, 133, 999):
        qsa_select(**take(n))
    before = compiled()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in (1, 2, 3, 5, 8, 15, 16, 17, 18, 33, 64, 65, 66, 131, 300, 998):
            qsa_select(**take(n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before


@pytest.mark.parametrize("impl", ("hopper", "triton"))
def test_ids_in_prefill_decode_packed_and_alone(impl):
    """10,500 rows; 20 runs."""
    args = call("plain", (3500, 3500, 3500), blocks=3000)
    ids = qsa_select(**args, impl=impl)
    for _ in range(19):
        assert torch.equal(qsa_select(**args, impl=impl), ids)
    for step in (64, 16, 1):
        for lo in range(0, 10500, 1511):
            rows = slice(lo, lo + step)
            part = {n: x[rows] if n in ("index_q", "row_request", "visible") else x for n, x in args.items()}
            assert torch.equal(qsa_select(**part), ids[rows])


@pytest.mark.parametrize("impl", ("hopper", "triton"))
def test_b27_memory_of_4096_rows_is_flat_at_the_cap(impl):
    cap = 96 << 20
    for blocks in (2048, 4096, 16384, 65536):
        args = call("plain", (4096,), blocks=blocks)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        qsa_select(**args, workspace_bytes=cap, impl=impl)
        most = torch.cuda.max_memory_allocated() - held
        print(f"{impl}, {4 * blocks} tokens: {most / 2**20:.0f} MiB")
        assert most <= cap + 4096 * 512 * 4 + (4 << 20)
        del args
