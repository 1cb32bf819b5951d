"""kda_conv, solve_unit_lower, gated_rms_norm: the ops around the recurrence."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg.kda import solve_unit_lower

FLOAT = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def conv_call(lengths, C=21, W=4, dtype=torch.float32):
    """Arguments of kda_conv by name: sequence i lives in slot i + 1, every other slot is NaN."""
    N, T = len(lengths), sum(lengths)
    pool = torch.full((N + 3, C, W - 1), torch.nan).to(dtype)
    pool[1 : N + 1] = torch.randn(N, C, W - 1).to(dtype)
    return {
        "x": torch.randn(T, C).to(dtype),
        "weight": torch.randn(C, W).to(dtype),
        "bias": torch.randn(C).to(dtype),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        "conv_state": pool,
        "read_slots": torch.arange(1, N + 1, dtype=torch.int32),
    }


def check_conv(call, out, pool):
    bounds = call["cu_seqlens"].tolist()
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        wanted, history = oracle.conv(call["x"][lo:hi], call["weight"], call["bias"], call["conv_state"][i + 1])
        assert oracle.error(out[lo:hi], wanted) <= oracle.rounding(wanted, out.dtype)
        assert torch.equal(pool[i + 1].double(), history)
    others = [0, *range(len(bounds), pool.shape[0])]
    assert calls.same(pool[others], call["conv_state"][others])


CONV = calls.implementations("kda_conv")


@pytest.mark.parametrize("W, dtype", ((2, "bfloat16"), (3, "float32"), (4, "bfloat16"), (4, "float16"), (8, "float32")))
@pytest.mark.parametrize("conv", CONV)
def test_conv_equals_the_definition(conv, W, dtype):
    call = conv_call((9, 0, 1, 2, 66 if dtype == "float16" else 18), W=W, dtype=FLOAT[dtype])
    out, _, pool = calls.run(conv, call)
    assert out.dtype == FLOAT[dtype]
    check_conv(call, out, pool)
    call["bias"] = None
    check_conv(call, *calls.run(conv, call)[::2])


@pytest.mark.parametrize("conv", CONV)
def test_b13_short_chunk_writes_the_write_slot(conv):
    """Fewer tokens than the history holds: [a, b, c] then d, e is [c, d, e], in the write slot only."""
    a, b, c, d, e, f = (float(x) for x in range(1, 7))
    pool = torch.full((8, 1, 3), torch.nan)
    pool[2] = torch.tensor([a, b, c])
    weight, cu = torch.tensor([[1.0, 10.0, 100.0, 1000.0]]), torch.tensor([0, 2])
    out = conv(torch.tensor([[d], [e]]), weight, cu, pool, torch.tensor([2]), torch.tensor([6]))
    silu = torch.nn.functional.silu
    assert torch.allclose(out[:, 0], silu(torch.tensor([4321.0, 5432.0])))
    assert pool[6, 0].tolist() == [c, d, e] and pool[2, 0].tolist() == [a, b, c]
    out = conv(torch.tensor([[f]]), weight, torch.tensor([0, 1]), pool, torch.tensor([6]))
    assert torch.allclose(out[:, 0], silu(torch.tensor([6543.0]))) and pool[6, 0].tolist() == [d, e, f]
    assert pool[[0, 1, 3, 4, 5, 7]].isnan().all()


@pytest.mark.parametrize("conv", CONV)
def test_b05_one_token_leaves_zeros_before_it(conv):
    pool = torch.full((1, 2, 3), torch.nan)
    conv(
        torch.tensor([[7.0, 8.0]]), torch.randn(2, 4), torch.tensor([0, 1]), pool, torch.tensor([0]),
        fresh=torch.tensor([True]),
    )  # fmt: skip
    assert pool[0].tolist() == [[0.0, 0.0, 7.0], [0.0, 0.0, 8.0]]


@pytest.mark.parametrize("C", (1, 40))
@pytest.mark.parametrize("conv", CONV)
def test_conv_bits_do_not_depend_on_company_or_cuts_at_64(conv, C):
    call = conv_call((5, 1, 70), C=C)
    packed, _, pool = calls.run(conv, call)
    bounds = call["cu_seqlens"].tolist()
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone = {**call, "x": call["x"][lo:hi].clone(), "cu_seqlens": torch.tensor([0, hi - lo])}
        out, _, after = calls.run(conv, alone, read_slots=torch.tensor([i + 1]))
        assert calls.same(out, packed[lo:hi]) and calls.same(after[i + 1], pool[i + 1])
    state, outputs = calls.copy(call["conv_state"]), []
    for lo, hi in ((6, 70), (70, 76)):
        piece = {**call, "x": call["x"][lo:hi], "cu_seqlens": torch.tensor([0, hi - lo]), "conv_state": state}
        outputs.append(conv(**{**piece, "read_slots": torch.tensor([3])}))
    assert calls.same(torch.cat(outputs), packed[6:]) and calls.same(state[3], pool[3])


@pytest.mark.parametrize("conv", CONV)
def test_b14_conv_bits_do_not_depend_on_later_tokens(conv):
    call = conv_call((70,), C=7)
    whole = calls.run(conv, call)[0]
    for count in (1, 2, 63, 65):
        call["cu_seqlens"] = torch.tensor([0, count])
        assert calls.same(calls.run(conv, call)[0][:count], whole[:count])


@pytest.mark.parametrize("conv", CONV)
def test_b05_conv_of_an_empty_sequence_touches_nothing(conv):
    call = conv_call((0, 3))
    fresh, write = torch.tensor([True, False]), torch.tensor([4, 2])
    for changes in ({}, {"fresh": fresh}):
        _, _, pool = calls.run(conv, call, write_slots=write, **changes)
        assert calls.same(pool[[0, 1, 3, 4]], call["conv_state"][[0, 1, 3, 4]]) and pool[2].isfinite().all()


@pytest.mark.parametrize("splits", ((17, 5), (17, 1, 1, 1, 1, 1), (64, 1), (1, 2, 17)))
@pytest.mark.parametrize("conv", CONV)
def test_b14_conv_continues_in_calls_of_any_length(conv, splits):
    call = conv_call((sum(splits),))
    whole = calls.run(conv, call)
    state, outputs, lo = calls.copy(call["conv_state"]), [], 0
    for length in splits:
        piece = {**call, "x": call["x"][lo : lo + length], "cu_seqlens": torch.tensor([0, length]), "conv_state": state}
        outputs.append(conv(**piece))
        lo += length
    assert oracle.error(torch.cat(outputs), whole[0]) < 1e-6 and calls.same(state, whole[2])


@pytest.mark.parametrize("conv", CONV)
def test_b12_fresh_reads_nothing(conv):
    call = conv_call((5, 20))
    fresh = torch.tensor([True, False])
    zeros = calls.copy(call["conv_state"])
    zeros[1] = 0.0
    wanted, _, after = calls.run(conv, call, conv_state=zeros)
    call["conv_state"][1] = torch.nan
    out, _, pool = calls.run(conv, call, fresh=fresh)
    assert calls.same(out, wanted) and calls.same(pool, after)
    out, _, pool = calls.run(
        conv, call, fresh=fresh, read_slots=torch.tensor([-1, 2]), write_slots=torch.tensor([1, 2])
    )
    assert calls.same(out, wanted) and calls.same(pool, after)


@pytest.mark.parametrize("bad", (-1, 5, 3))
@pytest.mark.parametrize("conv", CONV)
def test_b09_b29_conv_padding(conv, bad):
    """A sequence on a bad slot and rows behind the last sequence: NaN there reaches nothing, outputs are zero."""
    call = conv_call((30, 5))
    call["x"] = torch.cat([call["x"], torch.full((9, 21), torch.nan)])
    call["x"][30:] = torch.nan
    out, _, pool = calls.run(conv, call, read_slots=torch.tensor([1, bad]), null_slot=3)
    clean = calls.run(conv, {**call, "x": call["x"][:30]}, cu_seqlens=torch.tensor([0, 30, 30]))
    assert calls.same(out[:30], clean[0]) and not out[30:].any() and calls.same(pool, clean[2])


@pytest.mark.parametrize("conv", CONV)
def test_b08_conv_views(conv):
    """A slice of a fused projection, a time-major pool, a strided weight: the bits of contiguous copies."""
    call = conv_call((30, 2, 9))
    wanted, _, after = calls.run(conv, call)
    fused = torch.full((41, 50), torch.nan)
    fused[:, 3:45:2] = call["x"]
    pool = call["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    strided = {**call, "x": fused[:, 3:45:2], "conv_state": pool, "weight": call["weight"].t().contiguous().t()}
    out, _, got = calls.run(conv, strided)
    assert calls.same(out, wanted) and calls.same(got, after)


def blocks(T, H, C, dtype=torch.float32):
    """Rows of lower blocks with NaN from the diagonal on, packed or dense alike: `[1, T, H, C]`."""
    lower = torch.randn(1, T, H, C).to(dtype)
    column, row = torch.arange(C), torch.arange(T) % C
    return lower.masked_fill((column >= row[:, None])[:, None], torch.nan)


def check_solve(lower, out, spans, C):
    """Every block of every (batch row, first token, end) against forward substitution; zeros everywhere else."""
    seen = torch.zeros(out.shape, dtype=torch.float64)
    for b, lo, hi in spans:
        for at in range(lo, hi, C):
            n = min(C, hi - at)
            for h in range(lower.shape[2]):
                seen[b, at : at + n, h, :n] = oracle.inverse(lower[b, at : at + n, h, :n])
    assert oracle.error(out, seen) <= oracle.rounding(seen, out.dtype)
    assert not out[seen == 0].any()


@pytest.mark.parametrize("C", (16, 32, 64))
@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("out_dtype", FLOAT)
def test_solver_dtypes_packed_with_partial_blocks(C, dtype, out_dtype):
    lower = 0.2 * blocks(C + 5, 2, C, FLOAT[dtype])
    out = solve_unit_lower(lower, torch.tensor([0, C + 5]), out_dtype=FLOAT[out_dtype])
    assert out.dtype == FLOAT[out_dtype]
    check_solve(lower, out, [(0, 0, C + 5)], C)
    assert solve_unit_lower(lower, torch.tensor([0, C + 5])).dtype == FLOAT[dtype]


def test_solver_packed_sequences():
    """Blocks start where sequences do; an empty sequence, a gap before and rows behind the last are zeros."""
    bounds = torch.tensor([3, 3, 40, 41, 60])
    lower = torch.full((1, 70, 2, 16), torch.nan)
    for lo, hi in ((3, 40), (40, 41), (41, 60)):
        lower[:, lo:hi] = blocks(hi - lo, 2, 16)
    out = solve_unit_lower(lower, bounds, out=torch.full_like(lower, torch.nan))
    check_solve(lower, out, [(0, 3, 40), (0, 40, 41), (0, 41, 60)], 16)


def test_solver_dense_rows_are_blocks_of_their_own():
    lower = torch.cat([blocks(35, 2, 16), blocks(35, 2, 16)])
    out = solve_unit_lower(lower)
    check_solve(lower, out, [(0, 0, 35), (1, 0, 35)], 16)
    assert calls.same(out[1:], solve_unit_lower(lower[1:]))  # and bits do not depend on the batch
    packed = solve_unit_lower(lower.flatten(0, 1)[None], torch.tensor([0, 35, 70]))
    assert calls.same(packed.view_as(out), out)


@pytest.mark.parametrize("precision", ("ieee", "tf32x3", "tf32"))
@pytest.mark.parametrize("workspace_bytes", (None, 0, 1 << 20))
def test_solver_precision_and_workspace_are_bounds(precision, workspace_bytes):
    lower = 0.2 * blocks(40, 2, 32)
    out = solve_unit_lower(lower, precision=precision, workspace_bytes=workspace_bytes)
    check_solve(lower, out, [(0, 0, 40)], 32)


@pytest.mark.parametrize("C", (16, 32, 64))
def test_b02_solver_near_parallel_keys(C):
    """Inverse times matrix is the identity within 1e-2 with float32 in and out, where a series would explode."""
    k = torch.nn.functional.normalize(torch.randn(1, 128) + 1e-3 * torch.randn(C, 128), dim=1)
    lower = 0.99 * (k @ k.t())
    out = solve_unit_lower(lower[None, :, None])[0, :, 0]
    eye = torch.eye(C)
    assert ((lower.tril(-1) + eye) @ out - eye).abs().max() < 1e-4


def test_solver_views_and_no_tokens():
    lower = blocks(20, 4, 16)
    wide = torch.full((1, 20, 9, 40), torch.nan)
    wide[:, :, ::2, :32:2] = torch.cat([lower, lower[:, :, :1]], 2)
    strided = wide[:, :, :8:2, :32:2]
    assert calls.same(solve_unit_lower(strided), solve_unit_lower(lower))
    assert solve_unit_lower(lower[:, :0]).shape == (1, 0, 4, 16)
    assert solve_unit_lower(lower[:0]).shape == (0, 20, 4, 16)


NORM = calls.implementations("gated_rms_norm")


@pytest.mark.parametrize("dtype", FLOAT)
@pytest.mark.parametrize("V", (1, 40, 128, 1000))
@pytest.mark.parametrize("norm", NORM)
def test_gated_norm_equals_the_definition(norm, dtype, V):
    rows = 70 if V < 1000 else 12
    o, gate = torch.randn(3, rows, V), torch.randn(3, rows, V).to(FLOAT[dtype])
    weight = torch.randn(V)
    out = norm(o, gate, weight, 1e-5)
    wanted = oracle.gated_norm(o, gate, weight, 1e-5)
    assert out.dtype == FLOAT[dtype] and oracle.error(out, wanted) <= oracle.rounding(wanted, out.dtype)
    assert not torch.equal(out, norm(o, gate, weight, 0.5))


@pytest.mark.parametrize("V", (5, 40, 600))
@pytest.mark.parametrize("norm", NORM)
def test_gated_norm_bits_do_not_depend_on_the_rows_around(norm, V):
    o, gate, weight = torch.randn(100, V), torch.randn(100, V), torch.randn(V)
    whole = norm(o, gate, weight, 1e-5)
    for lo, hi in ((0, 1), (37, 38), (37, 99), (99, 100)):
        assert calls.same(norm(o[lo:hi], gate[lo:hi], weight, 1e-5), whole[lo:hi])
    poisoned = o.clone()
    poisoned[50] = torch.nan
    out = norm(poisoned, gate, weight, 1e-5)
    assert calls.same(out[:50], whole[:50]) and calls.same(out[51:], whole[51:])


@pytest.mark.parametrize("norm", NORM)
def test_gated_norm_views_and_no_rows(norm):
    o, gate, weight = torch.randn(7, 3, 40), torch.randn(7, 3, 40), torch.randn(40)
    wanted = norm(o, gate, weight, 1e-5)
    fused = torch.full((7, 3, 100), torch.nan)
    fused[..., 1:81:2] = gate
    buffer = torch.full((7, 3, 50), torch.nan)
    got = norm(o.transpose(0, 1).contiguous().transpose(0, 1), fused[..., 1:81:2], weight, 1e-5, out=buffer[..., 4:44])
    assert calls.same(got, wanted) and buffer[..., :4].isnan().all() and buffer[..., 44:].isnan().all()
    assert norm(o[:0], gate[:0], weight, 1e-5).shape == (0, 3, 40)
