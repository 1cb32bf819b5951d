"""The Triton solver: inverses of unit lower triangular blocks against float64, interpreted or on a GPU."""

import itertools

import kda_oracle as oracle
import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from thalweg import cases, contract, dispatch  # noqa: E402
from thalweg.bench import check as checks  # noqa: E402
from thalweg.kda import chunks, library, solve, solve_unit_lower  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRODUCTS = {"ieee": 2e-7, "tf32x3": 2e-6, "bf16x3": 4e-5, "tf32": 2e-3}  # error of float32 results, at most


def unread(T, C, starts=(0,)):
    """`[T, 1, C]`: true on and right of the diagonal of every block, blocks starting anew at each of starts."""
    row = torch.arange(T)
    first = torch.tensor([max((s for s in starts if s <= t), default=0) for t in range(T)], dtype=torch.int64)
    return (torch.arange(C) >= ((row - first) % C)[:, None])[:, None]


def blocks(B, T, H, C, dtype=torch.float32, scale=0.2, starts=(0,)):
    """`[B, T, H, C]` with NaN wherever the strictly lower part of a block is not."""
    return (scale * torch.randn(B, T, H, C)).to(dtype).masked_fill(unread(T, C, starts), torch.nan)


def truth(lower, spans):
    """Every block of every (batch row, first token, end) solved in float64; zeros everywhere else."""
    B, T, H, C = lower.shape
    wanted = torch.zeros(lower.shape, dtype=torch.float64)
    for b, lo, hi in spans:
        for at in range(lo, hi, C):
            n = min(C, hi - at)
            strict = lower[b, at : at + n, :, :n].double().transpose(0, 1).tril(-1)
            eye = torch.eye(n, dtype=torch.float64).expand(H, n, n)
            inverse = torch.linalg.solve_triangular(strict + eye, eye, upper=False, unitriangular=True)
            wanted[b, at : at + n, :, :n] = inverse.transpose(0, 1)
    return wanted


def run(lower, bounds=None, dtype=torch.float32, out=None, **kwargs):
    """The launcher, on NaN-filled outputs."""
    lower = lower.to(DEVICE)
    out = torch.full(lower.shape, torch.nan, dtype=dtype, device=DEVICE) if out is None else out
    solve.solve_unit_lower(lower, None if bounds is None else bounds.to(DEVICE), out, **kwargs)
    return out.cpu()


def check(out, wanted, worst=1e-6):
    """Close to the truth, by no more than its rounding beyond `worst`; exact zeros where the inverse has them."""
    error = oracle.error(out, wanted)
    rounding = oracle.error(wanted.to(out.dtype), wanted)
    assert error <= 1.02 * rounding + worst, (error, rounding)
    assert not out[wanted == 0].any()


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(nan=1e9), b.nan_to_num(nan=1e9))


@pytest.mark.parametrize("C", (16, 32, 64))
@pytest.mark.parametrize("source,target", (("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")))
def test_sizes_and_dtypes_with_a_partial_block(C, source, target):
    """NaN above every diagonal: the upper part is not used, and the rows behind the last token are not read."""
    lower = blocks(1, C + 5, 1, C, FLOAT[source])
    bounds = torch.tensor([0, C + 5], dtype=torch.int32)
    check(run(lower, bounds, FLOAT[target]), truth(lower, [(0, 0, C + 5)]), 3e-5)


@pytest.mark.parametrize("n", (1, 15, 16, 17, 33, 63))
def test_b06_partial_blocks(n):
    """n rows of a 64 block: their n x n inverse, zeros right of it; the memory behind is another sequence's, or NaN."""
    lower = blocks(1, n, 1, 64)
    behind = torch.cat([lower, torch.full((1, 8, 1, 64), torch.nan)], 1)
    out = run(behind, torch.tensor([0, n]))
    check(out, truth(behind, [(0, 0, n)]))


def test_packed_sequences():
    """Blocks start where sequences do; an empty sequence, a one-token one, a gap before, rows behind: zeros, from NaN.

    Three heads, of which a program of 16-column blocks takes two: the last pair has one.
    """
    bounds = torch.tensor([3, 3, 40, 41, 60, 60])
    lower = blocks(1, 70, 3, 16, starts=(3, 40, 41, 60))
    lower[:, :3], lower[:, 60:] = torch.nan, torch.nan
    out = run(lower, bounds)
    check(out, truth(lower, [(0, 3, 40), (0, 40, 41), (0, 41, 60)]))
    assert not out[:, :3].any() and not out[:, 60:].any()
    strided = torch.stack([bounds, -bounds], 1)[:, 0]
    assert same(run(lower, strided), out) and same(run(lower, strided.to(torch.int32)), out)


def test_offsets_are_clipped_and_read_as_never_decreasing():
    raw = torch.tensor([-7, 20, 5, 2**40, 33])
    lower = blocks(1, 40, 1, 32, starts=(0, 20))
    read = contract.offsets(raw, 40)
    assert read == [0, 20, 20, 40, 40]
    check(run(lower, raw), truth(lower, [(0, lo, hi) for lo, hi in zip(read, read[1:])]))


def test_b05_no_tokens_no_heads_no_sequences():
    for shape in ((1, 0, 2, 16), (0, 20, 2, 16), (1, 20, 0, 16)):
        assert run(torch.empty(shape)).shape == shape
    assert not run(torch.full((1, 20, 2, 16), torch.nan), torch.tensor([0])).any()
    assert not run(torch.full((1, 20, 1, 16), torch.nan), torch.tensor([0, 0, 0])).any()


def test_dense_rows_equal_packed_sequences_bit_for_bit():
    """Each batch row is cut from its own start, 35 tokens in blocks of 32."""
    lower = blocks(2, 35, 1, 32)
    out = run(lower, dtype=torch.bfloat16)
    check(out, truth(lower, [(0, 0, 35), (1, 0, 35)]))
    packed = run(lower.flatten(0, 1)[None], torch.tensor([0, 35, 70]), torch.bfloat16)
    assert same(packed.view_as(out), out)


def test_b28_bits_do_not_depend_on_company():
    """A sequence alone, and between others with another head; run twice."""
    lower = blocks(1, 70, 1, 64)
    alone = run(lower, torch.tensor([0, 70]), torch.bfloat16)
    others = torch.cat([blocks(1, 9, 1, 64), lower, blocks(1, 3, 1, 64)], 1)
    among = torch.cat([others, blocks(1, 82, 1, 64)], 2)
    bounds = torch.tensor([0, 9, 79, 82])
    first = run(among, bounds, torch.bfloat16)
    assert same(first[:, 9:79, :1], alone) and same(run(among, bounds, torch.bfloat16), first)


def test_b02_near_parallel_keys():
    """beta K K^T of nearly equal keys that hardly decay: powers of it grow before they cancel."""
    k = torch.nn.functional.normalize(torch.randn(1, 128) + 1e-3 * torch.randn(64, 128), dim=1)
    lower = (0.99 * (k @ k.t()))[None, :, None]
    wanted = truth(lower, [(0, 0, 64)])
    check(run(lower), wanted)
    half = run(lower, dtype=torch.bfloat16)
    check(half, wanted, 3e-5)
    product = (lower[0, :, 0].double().tril(-1) + torch.eye(64)) @ half[0, :, 0].double()
    assert (product - torch.eye(64)).abs().max() < 1e-2


def wild(kind):
    if kind == "zero":
        return torch.zeros(64, 64)
    if kind == "minus one":  # the inverse holds powers of two up to 2^62
        return -torch.ones(64, 64)
    if kind == "signs":
        return torch.randint(0, 2, (64, 64)).float() * 2 - 1
    if kind == "near one":
        return 1 - 1e-3 * torch.rand(64, 64)
    lower = torch.zeros(64, 64)  # huge: chains of two entries at most, so that the inverse is within float32
    lower[1::2, ::2] = 1e15 * torch.randn(32, 32)
    return lower


@pytest.mark.parametrize("kind", ("zero", "minus one", "signs", "near one", "huge"))
def test_wild_entries(kind):
    lower = wild(kind)[None, :, None]
    wanted = truth(lower, [(0, 0, 64)])
    for dtype in (torch.float32, torch.bfloat16):
        out = run(lower, dtype=dtype)
        check(out, wanted, 3e-5 if dtype == torch.bfloat16 else 1e-6)
        assert kind not in ("zero", "minus one") or same(out.double(), wanted)


def test_a_block_that_is_not_finite_harms_no_other():
    lower = blocks(1, 96, 2, 32)
    clean = run(lower)
    lower[0, 40, 1, 3], lower[0, 50, 1, 2] = torch.nan, torch.inf
    out = run(lower)
    assert not out[0, 32:64, 1].isfinite().all()
    out[0, 32:64, 1] = clean[0, 32:64, 1]
    assert same(out, clean)


def test_b08_views_with_odd_strides():
    """Rows and heads of a wider tensor, heads backwards; what lies between is neither read nor written."""
    wide = torch.full((1, 20, 5, 70), torch.nan)
    lower = blocks(1, 20, 2, 32)
    wide[:, :, 1::2, 3:35] = lower
    out = torch.full((1, 20, 3, 41), torch.nan, device=DEVICE)
    view = out[:, :, ::2, 5:37]
    run(wide[:, :, 1::2, 3:35], out=view)
    check(view.cpu(), truth(lower, [(0, 0, 20)]))
    assert out.isnan().sum() == out.numel() - view.numel()


def test_b34_layouts_that_are_refused():
    lower = torch.zeros(1, 4, 1, 32)
    with pytest.raises(ValueError, match=r"solve_unit_lower: lower must be contiguous in its last dimension, got"):
        solve.solve_unit_lower(lower[..., ::2], None, torch.empty(1, 4, 1, 16))
    far = torch.empty(1, device="meta").as_strided((1, 4, 1, 32), (0, 2**26, 32, 1))
    with pytest.raises(ValueError, match=r"solve_unit_lower: out must be rows less than 67108864 elements apart, got"):
        solve.solve_unit_lower(lower, None, far)


@pytest.mark.parametrize("products", PRODUCTS)
def test_products_are_as_exact_as_they_say(products):
    """Each kind of product by itself, results kept in float32. (Interpreted, tf32 is as exact as ieee.)"""
    lower = blocks(1, 64, 1, 64)
    config = solve.Config(products, 1, 2 if products == "ieee" else 1, "")
    check(run(lower, config=config), truth(lower, [(0, 0, 64)]), PRODUCTS[products])


def test_the_public_op_takes_it_by_name(monkeypatch):
    """On a GPU by itself; on a CPU only where kernels are interpreted, and never for a layout it cannot take."""
    lower = blocks(1, 20, 1, 16).to(DEVICE)
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="takes CUDA tensors, got cpu ones"):
            solve_unit_lower(lower, impl="triton")
        monkeypatch.setattr(library, "INTERPRETED", True)
    for workspace_bytes in (None, 0):
        out = solve_unit_lower(lower, out_dtype=torch.bfloat16, workspace_bytes=workspace_bytes, impl="triton")
        check(out.cpu(), truth(lower.cpu(), [(0, 0, 20)]), 3e-5)
    assert same(solve_unit_lower(lower, out_dtype=torch.bfloat16).cpu(), out.cpu())
    wide = torch.stack([lower, lower], -1)[..., 0]
    with pytest.raises(ValueError, match="lower must be contiguous in its last dimension, got strides"):
        solve_unit_lower(wide, impl="triton")
    check(solve_unit_lower(wide).cpu(), truth(lower.cpu(), [(0, 0, 20)]), 1e-5)


@pytest.mark.parametrize("precision", ("ieee", "tf32x3", "tf32"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_precision_modes_of_the_public_op(precision, dtype, monkeypatch):
    monkeypatch.setattr(library, "INTERPRETED", True)
    lower = blocks(1, 36, 1, 32)
    out = solve_unit_lower(lower.to(DEVICE), out_dtype=dtype, precision=precision, impl="triton")
    worst = PRODUCTS["tf32" if precision == "tf32" else "bf16x3"] if dtype != torch.float32 else PRODUCTS[precision]
    check(out.cpu(), truth(lower, [(0, 0, 36)]), worst)


@pytest.mark.parametrize("T", (1, 64, 8192))
@pytest.mark.parametrize("workspace_bytes", (None, 0, 1, 2**40))
def test_one_form_at_any_budget_length_and_occupancy(workspace_bytes, T, monkeypatch):
    """`explain` states it: a split form would want a budget, enough chunks and a least length; this one wants none."""
    monkeypatch.setattr(library, "INTERPRETED", True)  # stands for a CUDA device here
    call = {"lower": torch.empty(1, T, 2, 64, device="meta"), "out": torch.empty(1, T, 2, 64, device="meta")}
    call |= {"cu_seqlens": None, "precision": "ieee", "workspace_bytes": workspace_bytes}
    first, last = dispatch.explain("solve_unit_lower", library.IMPLS["solve_unit_lower"], call)
    assert first.chosen and first.reason.startswith(
        "one pass in Triton: no workspace, so one form at any budget, length"
    )
    assert last.name == "reference" and last.reason == "can take the call, but triton was preferred"


@pytest.mark.parametrize("id", ("check-solve", "check-solve-dense", "check-solve-keys"))
def test_the_small_cases(id, monkeypatch):
    """As `thalweg check` judges them."""
    monkeypatch.setattr(library, "INTERPRETED", True)
    (row,) = checks.check_case(cases.SMALL[id], DEVICE, "triton")
    assert row.result == "ok", row


def test_the_choice_of_a_configuration():
    """Pure, for any device: 16-bit results by bf16 products, exact ones where asked for, tf32 on NVIDIA only."""

    def chosen(C=64, H=64, out=torch.bfloat16, precision="ieee", device="sm_90"):
        return solve.choose(solve.Shape(C, H, out, precision), device)

    for device in ("sm_90", "sm_80", "sm_120", "gfx950", "cpu"):
        nvidia = device.startswith("sm_")
        assert chosen(device=device).products == chosen(precision="tf32x3", device=device).products == "bf16x3"
        assert chosen(out=torch.float32, device=device).products == "ieee"
        for precision in ("tf32x3", "tf32"):
            config = chosen(out=torch.float32, precision=precision, device=device)
            assert config.products == (precision if nvidia else "ieee") and config.reason
        assert chosen(out=torch.float32, device=device).num_warps == (2 if nvidia else 1)
    assert [chosen(C=C).heads for C in (16, 32, 64)] == [2, 1, 1] and chosen(C=16, H=1).heads == 1


def test_lengths_and_counts_are_not_compiled_in():
    """B31: a new T, N or H compiles nothing; nor does an offset list at another address."""
    said = getattr(solve.kernel, "kwargs", None) or vars(solve.kernel)  # an interpreted kernel keeps what it was told
    assert set(said["do_not_specialize"]) == {"T", "H", "N", "blocks", "stride_cu"}
    assert said["do_not_specialize_on_alignment"] == ["cu_seqlens"]


@triton.jit
def _located(cu_seqlens, out, stride, N, T, C: tl.constexpr):
    i_t, n, i_n, covered = chunks.locate(cu_seqlens, stride, tl.program_id(0), N, T, C)
    p_out = out + tl.program_id(0) * 4
    tl.store(p_out, i_t)
    tl.store(p_out + 1, n)
    tl.store(p_out + 2, covered.to(tl.int32))
    tl.store(p_out + 3, i_n)


@pytest.mark.parametrize(
    "bounds",
    ([0, 70], [0], [3, 3, 40, 41, 60, 60], [0, 16, 32, 48, 64, 70], [-4, 12, 7, 90, 33], [0] * 80 + [5] * 60 + [70]),
    ids=("one", "none", "ragged", "full", "wild", "many"),
)
def test_every_chunk_has_one_program(bounds):
    """All chunks of all sequences, and of the uncovered rows, each once; the other programs find nothing."""
    T, C, cu_seqlens = 70, 16, torch.tensor(bounds)
    read = contract.offsets(cu_seqlens, T)
    wanted = [
        (at, min(C, hi - at), int(0 <= i < len(read) - 1), i)
        for i, (lo, hi) in enumerate(zip([0, *read], [*read, T]), -1)
        for at in range(lo, hi, C)
    ]
    count = chunks.grid(T, len(bounds) - 1, C)
    out = torch.full((count, 4), -9, dtype=torch.int32, device=DEVICE)
    _located[(count,)](cu_seqlens.to(DEVICE), out, 1, len(bounds) - 1, T, C)
    found = [tuple(row) for row in out.tolist() if row[1] > 0]
    assert sorted(found) == sorted(wanted)


@pytest.mark.gpu
def test_b31_new_lengths_neither_compile_nor_synchronize():
    """After one call of each kind, T and N sweep through odd values; a sync would raise."""
    lower = blocks(1, 200, 3, 64).cuda()
    out = torch.empty_like(lower)
    bounds = {n: torch.linspace(0, 200, n + 1).to(torch.int32).cuda() for n in (1, 2, 3, 5, 8, 16, 17)}
    solve.solve_unit_lower(lower, bounds[1], out)
    solve.solve_unit_lower(lower, None, out)
    compiled = len(solve.kernel.device_caches[lower.device.index][0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for T in (*range(1, 21), 63, 64, 65, 66, 200):
            solve.solve_unit_lower(lower[:, :T], None, out[:, :T])
        for offsets in bounds.values():
            solve.solve_unit_lower(lower, offsets, out)
            solve.solve_unit_lower(lower[:, 1:], offsets[1:], out[:, 1:])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(solve.kernel.device_caches[lower.device.index][0]) == compiled


@pytest.mark.gpu
def test_b11_a_captured_launch_reads_offsets_that_are_refilled():
    lower = (0.2 * torch.randn(1, 100, 2, 32)).cuda()
    bounds, out = torch.tensor([0, 50, 100, 100], device="cuda"), torch.full_like(lower, torch.nan)
    solve.solve_unit_lower(lower, bounds, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        solve.solve_unit_lower(lower, bounds, out)
    for offsets in ([0, 33, 40, 100], [7, 7, 60, 60]):
        bounds.copy_(torch.tensor(offsets))
        out.fill_(torch.nan)
        graph.replay()
        wanted = torch.full_like(lower, torch.nan)
        solve.solve_unit_lower(lower, torch.tensor(offsets, device="cuda"), wanted)
        assert same(out.cpu(), wanted.cpu())
        check(out.cpu(), truth(lower.cpu(), [(0, lo, hi) for lo, hi in zip(offsets, offsets[1:])]))


@pytest.mark.gpu
def test_b07_rows_past_2_31_elements():
    """The last tokens of tensors of 4.3 GB: row and head offsets do not fit 32 bits."""
    T, pitch = 58400, 36864
    lower, out = (torch.empty(1, T, pitch, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    view, into = (x.view(1, T, pitch // 64, 64)[:, :, -2:] for x in (lower, out))
    view[:, -100:] = 0.2 * torch.randn(1, 100, 2, 64, device="cuda")
    solve.solve_unit_lower(view, torch.tensor([T - 100, T], device="cuda"), into)
    tail = view[:, -100:].cpu()
    check(into[:, -100:].cpu(), truth(tail, [(0, 0, 100)]), 3e-5)
    assert not into[:, :-100].any()


@pytest.mark.gpu
def test_b32_launches_on_the_device_of_its_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    lower = blocks(1, 40, 2, 16)
    out = torch.empty(lower.shape, device="cuda:1")
    solve.solve_unit_lower(lower.to("cuda:1"), None, out)
    check(out.cpu(), truth(lower, [(0, 0, 40)]))
    assert torch.cuda.current_device() == 0


# Products follow from the precision for float32 results alone: every mode with them, every dtype with one.
AS_COMPILED = [(C, precision, "float32", "float32") for C in (16, 32, 64) for precision in ("ieee", "tf32x3", "tf32")]
AS_COMPILED += [(16, "ieee", *kinds) for kinds in itertools.product(FLOAT, repeat=2)]
AS_COMPILED += [(64, "tf32", *kinds) for kinds in (("float32", "bfloat16"), ("bfloat16", "float16"))]


@pytest.mark.gpu
@pytest.mark.parametrize("C, precision, source, target", AS_COMPILED)
def test_precisions_layouts_and_dtypes_as_compiled(C, precision, source, target):
    worst = PRODUCTS[precision] if target == "float32" else PRODUCTS["tf32" if precision == "tf32" else "bf16x3"]
    for packed in (True, False):
        lower, bounds = blocks(1, C + 5, 3, C, FLOAT[source]), torch.tensor([0, C + 5]) if packed else None
        at = None if bounds is None else bounds.to(DEVICE)
        out = solve_unit_lower(lower.to(DEVICE), at, out_dtype=FLOAT[target], precision=precision, impl="triton")
        check(out.cpu(), truth(lower, [(0, 0, C + 5)]), max(worst, 1e-6))
