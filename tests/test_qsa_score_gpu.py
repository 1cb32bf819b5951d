"""`qsa_score` on a GPU: bits of tiles and single rows in both languages, visibility, captures, large offsets."""

import pytest
import torch

from thalweg.device import arch
from thalweg.qsa import library, qsa_score, reference_ops

pytest.importorskip("triton")

from test_qsa_gpu import BF16, PACKS, index_call, part

pytestmark = pytest.mark.gpu
N = 3000
NAMES = ("index_q", "block_keys", "page_table", "row_request", "visible")


def hopper(call, N=N, out=None, **options):
    from thalweg.qsa import score_gluon

    return launched(score_gluon, call, N, out, **options)


def tiles(call, N=N, out=None, **options):
    from thalweg.qsa import score

    wide = score.Shape(4096, N, 1, *call["index_q"].shape[1:], call["index_q"].dtype)
    return launched(score, call, N, out, config=score.choose(wide, arch(call["index_q"].device)), **options)


def single(call, N=N, out=None, **options):
    from thalweg.qsa import score

    return launched(score, call, N, out, config=score.Config(1, 64, 1024, 1, 4, 4, ""), **options)


def launched(module, call, N, out, **options):
    out = torch.full((len(call["index_q"]), N), torch.nan, device="cuda") if out is None else out
    module.score(*(call[name] for name in NAMES), out, **options)
    return out


def forms(call):
    """What can take these arguments: Hopper's tiles where the card and the pages fit, portable tiles, single rows."""
    pages = call["block_keys"].shape[1] % 64 == 0 and call["index_q"].shape[2] in (64, 128)
    return ([hopper] if pages and torch.cuda.get_device_capability() == (9, 0) else []) + [tiles, single]


def bits(x):
    return x.contiguous().view(torch.int32)


@pytest.fixture(params=("hopper", "triton"))
def impl(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    return request.param


@pytest.mark.parametrize("page", (64, 196))
@pytest.mark.parametrize("law", ("normal", "heavy"))
@pytest.mark.parametrize("rows", PACKS, ids=str)
def test_bits_of_a_row_in_every_form_and_pack(rows, law, page):
    """Packed, reversed and alone, in tiles and one row a program; heads in another order give other bits."""
    call = index_call(rows, law, page=page)
    packed = bits(single(call))
    back = torch.arange(sum(rows) - 1, -1, -1, device="cuda")
    for form in forms(call):
        assert torch.equal(bits(form(call)), packed)
        assert torch.equal(bits(form(part(call, back)))[back], packed)
        for row in {0, sum(rows) // 2, sum(rows) - 1}:
            assert torch.equal(bits(form(part(call, slice(row, row + 1))))[0], packed[row])
        flipped = form(call | {"index_q": call["index_q"].flip(1)})
        assert not torch.equal(bits(flipped), packed)


WIDTHS = ((1, 128), (2, 64), (3, 128), (6, 128), (8, 64), (12, 128), (16, 64), (2, 256), (5, 40))


@pytest.mark.parametrize("heads,D", WIDTHS)
def test_b24_head_counts_and_widths(heads, D):
    call = index_call((70, 9, 130), heads=heads, D=D, page=64)
    want = torch.full((209, N), torch.nan)
    reference_ops.score(*(call[n].cpu() for n in NAMES), want, N)
    packed = bits(single(call))
    for form in forms(call):
        got = form(call)
        assert torch.equal(bits(got), packed)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5 * float(want[want.isfinite()].max()))


def test_b20_what_a_row_sees_at_every_position():
    """Positions 0 to 40 of two sequences, their rows in turn: exactly the complete blocks, and none on holes."""
    call = index_call((41, 41), blocks=200)
    order = torch.arange(82, device="cuda").view(2, 41).T.flatten()
    call = part(call, order) | {"visible": (torch.arange(82, device="cuda") // 2 + 1) // 4}
    call["page_table"][1, 1:] = -1
    call["visible"][81] = 130
    for form in forms(call):
        got = form(call, 130)
        want = torch.arange(130, device="cuda") < call["visible"][:, None]
        want[1::2, 64:] = False
        assert torch.equal(got > -torch.inf, want) and not got.isnan().any()


def test_b21_b22_blocks_that_a_row_does_not_see_do_not_reach_it():
    call = index_call((130, 70), blocks=700)
    call["visible"] = call["visible"] // 2 + torch.arange(200, device="cuda") % 5
    packed = [bits(form(call, 700)) for form in forms(call)]
    pages, seen = call["page_table"], [int(call["visible"][call["row_request"] == r].max()) for r in (0, 1)]
    for r in (0, 1):
        page = int(pages[r, seen[r] // 64])
        call["block_keys"][page, seen[r] % 64 :] = torch.nan
        behind = pages[r, seen[r] // 64 + 1 :]
        call["block_keys"][behind[behind >= 0].long()] = torch.nan
    for form, want in zip(forms(call), packed):
        assert torch.equal(bits(form(call, 700)), want)


def test_b11_a_captured_call_scores_what_the_buffers_hold_when_it_is_replayed(impl):
    call = index_call((100, 41))
    out = torch.empty(141, N, device="cuda")
    qsa_score(**call, num_blocks=N, out=out, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        qsa_score(**call, num_blocks=N, out=out, impl=impl)
    call["visible"].copy_(torch.randint(0, N, (141,), device="cuda"))
    call["row_request"].copy_(torch.randint(-1, 2, (141,), device="cuda"))
    call["index_q"].normal_()
    call["page_table"][0, 3] = -1
    graph.replay()
    assert torch.equal(bits(out), bits(single(call)))


def test_b31_b27_no_sync_no_allocation_no_new_kernels_and_the_same_bits_twenty_times(impl):
    from thalweg.qsa import score, score_gluon

    kernels = (score.tiles_kernel, score.row_kernel, score_gluon.kernel)

    def compiled():
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    call = index_call((1000,))
    out = torch.empty(1000, N, device="cuda")
    want = qsa_score(**call, num_blocks=N, out=out, impl=impl).clone()
    before, held = compiled(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in (*range(5, 20), 33, 63, 64, 65, 66, 999):
            qsa_score(**part(call, slice(0, n)), num_blocks=N, out=out[:n], impl=impl)
        assert torch.cuda.max_memory_allocated() <= held + (1 << 20)  # row slices of index tensors, nothing like scores
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiled() == before
    for _ in range(20):
        assert torch.equal(bits(qsa_score(**call, num_blocks=N, out=out, impl=impl)), bits(want))


def test_b07_65600_rows_of_262144_tokens_in_a_pool_past_2_31_elements(impl):
    """17 GB of scores; the last row and the last blocks are those of a call of their own."""
    pages = 263000
    pool = torch.zeros(pages, 64, 128, dtype=BF16, device="cuda")
    pool[-1024:] = torch.randn(1024, 64, 128, device="cuda")
    table = torch.arange(pages - 1024, pages, device="cuda").int()[None]
    R, blocks = 65600, 65536
    q = torch.randn(64, 4, 128, device="cuda").to(BF16).repeat(R // 64, 1, 1)
    rows = {"row_request": torch.zeros(R, dtype=torch.int32, device="cuda")}
    call = {"index_q": q, "block_keys": pool, "page_table": table, **rows}
    call["visible"] = torch.full((R,), blocks, dtype=torch.int32, device="cuda")
    out = torch.empty(R, blocks, device="cuda")
    qsa_score(**call, num_blocks=blocks, out=out, impl=impl)
    want = single(part(call, slice(0, 64)), blocks)
    for at in (0, 32768, R - 64):
        assert torch.equal(bits(out[at : at + 64]), bits(want))
    assert want[:, -64:].count_nonzero() > 1000


def test_b32_tensors_on_another_device_than_the_current_one(impl):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = {n: x.to("cuda:1") for n, x in index_call((70,)).items()}
    got = qsa_score(**call, num_blocks=N, impl=impl)
    assert got.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(got.cpu(), single(index_call((70,))).cpu())


def test_b33_compiled_equals_eager(impl):
    compiled = torch.compile(qsa_score, fullgraph=True, backend="aot_eager")
    call = index_call((70,))
    assert torch.equal(
        bits(compiled(**call, num_blocks=N, impl=impl)), bits(qsa_score(**call, num_blocks=N, impl=impl))
    )


def test_b26_b34_what_the_hopper_kernel_does_not_take_it_names_and_the_portable_one_takes():
    call = index_call((70,), page=196)
    with pytest.raises(ValueError, match="impl 'hopper' cannot take this call"):
        qsa_score(**call, num_blocks=N, impl="hopper")
    assert torch.equal(bits(qsa_score(**call, num_blocks=N)), bits(single(call)))
    assert library.IMPLS["qsa_score"][0].name == "hopper" and not library.IMPLS["qsa_score"][0].only_named
