"""Faults that others' kernels have met, on `solve_unit_lower` and `kda_prefill` by each of their implementations.

`hopper` takes K = 128 only: its tests are in test_kda_prefill_gpu.

B01, B02, B08, B12 to B14, B24 and B29 of prefill, and what wants a GPU (B07, B28, B30 to B32), lie with its other
tests; those of the convolution in test_kda_ops.
"""

from pathlib import Path

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg import kda
from thalweg.kda import library

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SOLVE = calls.implementations("solve_unit_lower")
PREFILL = calls.implementations("kda_prefill", but=("hopper",))  # K = 128 only: test_kda_prefill_gpu
SMALL = {"H": 1, "HV": 1, "K": 16, "V": 32, "dtype": BF16}
WORST = 5.5e-3  # bf16 products


def inverse(lower):
    """Inverses of the blocks `[1, T, H, C]` of one sequence, in float64."""
    T, H, C = lower.shape[1:]
    wanted = torch.zeros(lower.shape, dtype=torch.float64)
    for at in range(0, T, C):
        n = min(C, T - at)
        strict = lower[0, at : at + n, :, :n].double().transpose(0, 1).tril(-1)
        eye = torch.eye(n, dtype=torch.float64)
        inverses = torch.linalg.solve_triangular(strict + eye, eye.expand(H, n, n), upper=False, unitriangular=True)
        wanted[0, at : at + n, :, :n] = inverses.transpose(0, 1)
    return wanted


def run(prefill, call, **changes):
    """out and state of a call on a copy of its pool."""
    call = {**call, **changes, "state": calls.copy(call["state"])}
    return prefill(**call), call["state"]


def check(call, out, state):
    """Every sequence against the definition, every other slot and row as it was."""
    bounds, slots = call["cu_seqlens"].tolist(), call["read_slots"].tolist()
    for lo, hi, slot in zip(bounds, bounds[1:], slots):
        if lo == hi:
            assert calls.same(state[slot], call["state"][slot])
            continue
        wanted, after = calls.sequence_truth(call, lo, hi, call["state"][slot])
        assert oracle.error(out[lo:hi], wanted) <= WORST and oracle.error(state[slot], after) <= WORST
    others = [s for s in range(len(state)) if s not in slots]
    assert calls.same(state[others], call["state"][others])


@pytest.mark.parametrize("C", (16, 32, 64))
@pytest.mark.parametrize("solve", SOLVE)
def test_b02_inverse_of_near_parallel_keys(solve, C):
    """I + strict_lower(beta K K^T): finite, and times the matrix within 1e-2 of I."""
    k = torch.nn.functional.normalize(torch.randn(1, 128) + 1e-3 * torch.randn(C, 128), dim=1)
    lower = (0.99 * (k @ k.t()))[None, :, None]
    for dtype in (F32, BF16):
        out = solve(lower, out_dtype=dtype)[0, :, 0].double()
        product = (lower[0, :, 0].double().tril(-1) + torch.eye(C)) @ out
        assert (product - torch.eye(C)).abs().max() < (1e-2 if dtype == BF16 else 1e-5)


@pytest.mark.parametrize("prefill", PREFILL)
def test_b04_state_is_v_by_k(prefill):
    """Keys e0 write e5 into the state; a query e0 reads it back only if the layout is [V, K] throughout."""
    K, V = 16, 32
    q, k, v = (torch.zeros(65, 1, D, dtype=BF16) for D in (K, K, V))
    k[:64, 0, 0], v[:64, 0, 5], q[64, 0, 0] = 1.0, 1.0, 1.0
    logits = torch.full((65, 1), 100.0)
    logits[64] = -100.0
    call = {"q": q, "k": k, "v": v, "g_raw": torch.zeros(65, 1, K, dtype=BF16), "beta_logits": logits}
    call |= {"cu_seqlens": torch.tensor([0, 65]), "read_slots": torch.tensor([0]), "state": torch.zeros(1, 1, V, K)}
    out, state = run(prefill, call, gate="given", scale=0.25, qk_l2norm=False)
    assert torch.equal(out[64, 0].float(), 0.25 * torch.eye(V)[5])
    assert state[0, 0, 5, 0] == 1.0 and state.abs().sum() == 1.0


@pytest.mark.parametrize("solve", SOLVE)
def test_b05_nothing_to_solve(solve):
    for shape, bounds in (((1, 0, 2, 16), [0, 0, 0]), ((1, 5, 2, 16), [0, 0, 0]), ((1, 5, 2, 16), [0])):
        out = solve(torch.full(shape, torch.nan), torch.tensor(bounds))
        assert out.shape == shape and not out.any()
    assert torch.equal(solve(torch.full((1, 1, 1, 16), torch.nan))[0, 0, 0], torch.eye(16)[0])


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("lengths", ((0, 0), (0, 5, 0, 35, 0), (1,)))
def test_b05_empty_and_one_token_sequences(prefill, lengths):
    call = calls.prefill(lengths, **SMALL)
    check(call, *run(prefill, call))


@pytest.mark.parametrize("prefill", PREFILL)
def test_b05_one_token_prefill_is_one_step(prefill):
    """From a fresh state: S = beta v k^T and o = scale S q, whatever the slot held."""
    call = calls.prefill((1,), **SMALL)
    out, state = run(prefill, call, fresh=torch.tensor([True]), state=torch.full_like(call["state"], torch.nan))
    call["state"] = torch.zeros_like(call["state"])
    check(call, out, state.nan_to_num())


@pytest.mark.parametrize("T", (15, 16, 17, 63, 65))
@pytest.mark.parametrize("prefill", PREFILL)
def test_b06_lengths_that_are_no_multiple_of_the_chunk(prefill, T):
    """The tensors are views into a longer buffer of NaN; two sequences, of which the second ends with the view."""
    call = calls.prefill((3, T), **SMALL)
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        longer = torch.full((T + 70, *call[name].shape[1:]), torch.nan, dtype=call[name].dtype)
        longer[: T + 3] = call[name]
        call[name] = longer[: T + 3]
    check(call, *run(prefill, call))


@pytest.mark.parametrize("solve", SOLVE)
def test_b23_dtypes_of_one_argument_do_not_stick_to_the_next_call(solve):
    """Input, output and offsets of every kind in one process; the first call again gives its bits again."""
    lower, bounds = 0.3 * torch.randn(1, 7, 1, 16), torch.tensor([0, 7])
    first = solve(lower, bounds)
    for source in (BF16, F16, F32):
        for target in (F16, F32, BF16):
            given = lower.to(source)
            out, wanted = solve(given, bounds.to(torch.int32), out_dtype=target), inverse(given)
            assert oracle.error(out, wanted) <= oracle.error(wanted.to(target), wanted) * 1.02 + 3e-5
            assert calls.same(solve(given, bounds, out_dtype=target), out)
    assert calls.same(solve(lower, bounds), first)


@pytest.mark.parametrize("prefill", PREFILL)
def test_b23_dtypes_of_gates_and_indices_do_not_stick(prefill):
    call = calls.prefill((9,), **SMALL)
    before = run(prefill, call)
    for name, dtype in (("g_raw", F32), ("beta_logits", F16), ("cu_seqlens", torch.int64), ("read_slots", torch.int64)):
        changed = {**call, name: call[name].to(dtype)}
        check(changed, *run(prefill, changed))
        after = run(prefill, call)
        assert calls.same(after[0], before[0]) and calls.same(after[1], before[1])


@pytest.mark.parametrize("H", (1, 2, 3, 6, 12, 20, 24))
@pytest.mark.parametrize("solve", SOLVE)
def test_b24_head_counts_of_the_solver(solve, H):
    """A program takes two heads of 16 columns; odd counts have one left over."""
    lower = 0.3 * torch.randn(1, 7, H, 16)
    assert oracle.error(solve(lower), inverse(lower)) < 1e-6


def test_b25_no_kernel_is_tuned_by_running_it():
    """Tables are made offline: a trial launch would advance a live pool."""
    sources = [path.read_text() for path in Path(kda.__file__).parents[1].rglob("*.py") if "bench" not in path.parts]
    assert len(sources) > 20 and not any("autotune" in text or "do_bench" in text for text in sources)


@pytest.mark.parametrize("arch", ("sm_80", "sm_89", "sm_120", "sm_121", "gfx950", "gfx942"))
def test_b26_the_solver_is_portable(arch):
    """On no architecture a form made for another: no register cap, no tf32 where there is none."""
    from thalweg.kda import solve

    for out in (BF16, F16, F32):
        for precision in ("ieee", "tf32x3", "tf32"):
            config = solve.choose(solve.Shape(64, 8, out, precision), arch)
            if arch.startswith("gfx"):
                assert config.max_registers is None and config.products in ("ieee", "bf16x3")
            assert config.products != "tf32" or precision == "tf32"


@pytest.mark.parametrize("solve", SOLVE)
def test_b28_the_same_bits_each_time(solve):
    """Twice, and beside other sequences; the scratch of the call before holds other values."""
    lower = 0.3 * torch.randn(1, 20, 1, 16)
    first = solve(lower, out_dtype=BF16)
    solve(torch.full_like(lower, 7.0))
    assert calls.same(solve(lower, out_dtype=BF16), first)


def test_b34_what_the_solver_refuses_is_named():
    lower = torch.zeros(1, 20, 2, 16)
    for args, words in (
        ({"lower": lower[..., :15]}, "lower must be .* with C 16, 32 or 64"),
        ({"lower": lower, "out_dtype": torch.float64}, "out_dtype must be"),
        ({"lower": lower, "cu_seqlens": torch.tensor([0.0, 20.0])}, "cu_seqlens must be"),
        (
            {"lower": lower.expand(2, -1, -1, -1), "cu_seqlens": torch.tensor([0, 20])},
            "lower must be .* where cu_seqlens is given",
        ),
        ({"lower": lower, "precision": "bf16"}, "precision must be"),
        ({"lower": lower, "workspace_bytes": -1}, "workspace_bytes must be"),
        ({"lower": lower, "out": torch.zeros(1, 20, 2, 32)}, "out must be"),
    ):
        with pytest.raises(ValueError, match=f"solve_unit_lower: {words}"):
            kda.solve_unit_lower(**args)


def test_every_implementation_is_asked():
    assert [impl.name for impl in library.IMPLS["solve_unit_lower"]] == ["triton", "reference"]
    assert {param.id for param in PREFILL} | {"hopper"} == {impl.name for impl in library.IMPLS["kda_prefill"]}
