"""KDA prefill on Triton against the float64 definition and the contract, interpreted or on a GPU."""

from pathlib import Path

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

pytest.importorskip("triton")

from thalweg import accuracy, cases, contract, inputs, kda
from thalweg.bench import oracle as bench_oracle
from thalweg.kda import anchor, library, prefill, prepare, scan, substitution, workspace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOKENS = ("q", "k", "v", "g_raw", "beta_logits")
SMALL = {"H": 1, "HV": 2, "K": 32, "V": 16, "dtype": BF16}
WORST = {BF16: 5.5e-3, F16: 4e-4, F32: 2e-6}  # error at most: products of bf16, of tf32x3 or float32


def run(call, cut=None, memory=None, out=None, **changes):
    """The launcher, on NaN-filled outputs and a copy of the pool: returns out and the pool.

    cut: into how many pieces at least. memory: bytes of workspace, filled with NaN; None lets the call allocate.
    """
    call = {**call, **changes}
    given = {
        "write_slots": call["read_slots"], "A_log": None, "dt_bias": None, "lower_bound": -5.0, "fresh": None,
        "scale": call["q"].shape[2] ** -0.5, "allow_neg_eigval": False, "qk_l2norm": True, "checkpoint_slots": None,
        "checkpoint_every": 0, "null_slot": None,
    }  # fmt: skip
    state = calls.copy(call["state"])
    call = {**given, **call, "state": state}
    if DEVICE != "cpu":
        call = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in call.items()}
    if out is None:
        out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=DEVICE)
    if memory is not None:
        memory = torch.full((memory,), 255, dtype=torch.uint8, device=DEVICE)
    prefill.prefill(**call, workspace=memory, out=out, cut=cut)
    return out.cpu(), call["state"].cpu()


def check(call, out, state, worst=None):
    """Every sequence against the definition; every other slot and row as it was."""
    bounds, slots = contract.offsets(call["cu_seqlens"], call["q"].shape[0]), call["read_slots"].tolist()
    worst = worst or WORST[out.dtype]
    for lo, hi, slot in zip(bounds, bounds[1:], slots):
        before = call["state"][slot]
        if lo == hi:
            assert calls.same(state[slot], before)
            continue
        wanted, after = calls.sequence_truth(call, lo, hi, before)
        assert oracle.error(out[lo:hi], wanted) <= worst
        assert oracle.error(state[slot], after) <= worst + oracle.rounding(after, state.dtype)
    others = [s for s in range(state.shape[0]) if s not in slots]
    assert calls.same(state[others], call["state"][others])


@pytest.mark.parametrize("gate", ("given", "soft", "bounded"))
def test_equals_the_definition(gate):
    call = calls.prefill((33, 0, 1, 64), gate=gate, **SMALL)
    check(call, *run(call))


@pytest.mark.parametrize("dtype,gate,state", ((F16, "bounded", F32), (F32, "soft", BF16), (F32, "bounded", F32)))
def test_dtypes_and_odd_dims(dtype, gate, state):
    """K = 24 and V = 40 are no power of two: tiles are padded, and the padding is masked everywhere."""
    call = calls.prefill((35,), H=1, HV=1, dtype=dtype, gate=gate, state_dtype=state, index=torch.int64)
    check(call, *run(call))


@pytest.mark.parametrize("K,V", ((64, 128), (128, 64), (256, 64), (64, 256)))
def test_dims(K, V):
    call = calls.prefill((34,), H=1, HV=1, K=K, V=V, dtype=BF16)
    check(call, *run(call))


def test_options():
    call = calls.prefill((20,), **SMALL)
    plain = run(call)[0]
    for changes in (
        {"scale": 2.0},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5},
        {"lower_bound": -30.0},
        {"qk_l2norm": False, "q": 0.2 * call["q"], "k": 0.2 * call["k"]},
        {"A_log": None},
        {"dt_bias": None},
    ):
        changed = {**call, **changes}
        out, state = run(changed)
        check(changed, out, state)
        assert not torch.equal(out, plain)


@pytest.mark.parametrize("x", (0.0, 2.5, 5.0, 80.0, 1e5))
def test_b01_strong_decay_beside_weak(x):
    """Given gates have no bound: every exponent is at most 0, and weak channels keep their digits."""
    call = calls.prefill((40,), gate="given", **SMALL)
    call["g_raw"] = torch.where(torch.arange(32) % 2 == 0, -x, -1e-3 if x else 0.0).expand(40, 2, 32).to(BF16)
    check(call, *run(call))


def test_b01_bounded_gates_at_their_bound():
    call = calls.prefill((64,), **{**SMALL, "HV": 1})
    even = torch.arange(32) % 2 == 0
    call["g_raw"] = torch.where(even, 40.0, -9.0).expand(64, 1, 32).to(BF16)
    call |= {"A_log": None, "dt_bias": None}
    check(call, *run(call))


@pytest.mark.parametrize("same", (True, False), ids=("equal", "near"))
def test_b02_parallel_keys(same):
    """R and the inverse rounded to bf16 once would leave 1.4e-2."""
    call = calls.prefill((128,), H=1, HV=1, K=64, V=32, dtype=BF16)
    call["k"] = (torch.randn(1, 1, 64) + (0.0 if same else 1e-3) * torch.randn(128, 1, 64)).to(BF16)
    call |= {"q": call["k"].clone(), "A_log": torch.zeros(1), "dt_bias": torch.zeros(1, 64)}
    call |= {"g_raw": torch.full((128, 1, 64), -12.0, dtype=BF16)}
    call |= {"beta_logits": torch.full((128, 1), 8.0, dtype=BF16)}
    check(call, *run(call), worst=8.5e-3)


def test_bits_alone_packed_and_in_pieces():
    """Down to a workspace of one chunk a piece: the state crosses every cut in float32, whatever the pool holds."""
    call = calls.prefill((65, 1, 96), state_dtype=BF16, **{**SMALL, "HV": 1})
    packed, state = run(call)
    bounds = call["cu_seqlens"].tolist()
    least = workspace.least_bytes(162, 3, 1, 32, 16, BF16)
    for cut, memory in ((3, None), (None, least)):
        out, after = run(call, cut, memory)
        assert calls.same(out, packed) and calls.same(after, state)
    for i in (0, 2):
        lo, hi = bounds[i], bounds[i + 1]
        alone = {n: call[n][lo:hi].clone() for n in TOKENS}
        slots = call["read_slots"][i : i + 1]
        out, after = run({**call, **alone}, cu_seqlens=torch.tensor([0, hi - lo]), read_slots=slots)
        assert calls.same(out, packed[lo:hi]) and calls.same(after[i + 1], state[i + 1])


def pieces(call, cut):
    state, outputs = call["state"], []
    for lo, hi in ((0, cut), (cut, call["q"].shape[0])):
        part = {n: call[n][lo:hi] for n in TOKENS}
        out, state = run({**call, **part, "state": state}, cu_seqlens=torch.tensor([0, hi - lo]))
        outputs.append(out)
    return torch.cat(outputs), state


def test_bits_do_not_depend_on_cuts_at_64_but_on_others():
    call = calls.prefill((130,), **{**SMALL, "HV": 1})
    whole = run(call)
    for cut in (64, 128):
        out, state = pieces(call, cut)
        assert calls.same(out, whole[0]) and calls.same(state, whole[1])
    out, state = pieces(call, 63)  # the control: 63 ends no chunk
    assert not calls.same(out, whole[0]) and not calls.same(state, whole[1])


def test_b14_bits_do_not_depend_on_later_tokens():
    call = calls.prefill((70,), **{**SMALL, "HV": 1})
    whole = run(call)[0]
    for count in (1, 17, 33):
        assert calls.same(run(call, cu_seqlens=torch.tensor([0, count]))[0][:count], whole[:count])


def test_b29_rows_no_sequence_covers_and_wild_offsets():
    """NaN in front and behind; offsets negative, past the end, decreasing."""
    call = calls.prefill((3, 33, 20, 0, 6), **SMALL)
    for lo, hi in ((0, 3), (56, 62)):
        for n in TOKENS:
            call[n][lo:hi] = torch.nan
    call["cu_seqlens"] = torch.tensor([3, 36, 20, 56, 56])
    call["read_slots"] = torch.tensor([1, 2, 3, 4])
    out, state = run(call)
    check(call, out, state)
    assert not out[:3].any() and not out[56:].any()
    wild = run(call, cu_seqlens=torch.tensor([-3, 2**40, 7]), read_slots=torch.tensor([-1, 9]))
    assert not wild[0].any() and calls.same(wild[1], call["state"])


@pytest.mark.parametrize("bad", (-1, -(2**40), 5, 2**40, 3))
def test_b09_bad_slots_are_padding(bad):
    call = calls.prefill((30, 20), index=torch.int64, **{**SMALL, "HV": 1})
    call["state"][3] = 1.0
    for n in TOKENS:
        call[n][30:] = torch.nan
    out, state = run(call, read_slots=torch.tensor([1, bad]), null_slot=3)
    check({**call, "cu_seqlens": torch.tensor([0, 30]), "read_slots": torch.tensor([1])}, out, state)
    assert not out[30:].any()
    for read, write, fresh in (([1, 2], [1, bad], None), ([1, bad], [1, 2], None), ([1, bad], [1, bad], [False, True])):
        fresh = None if fresh is None else torch.tensor(fresh)
        other = run(call, read_slots=torch.tensor(read), write_slots=torch.tensor(write), fresh=fresh, null_slot=3)
        assert calls.same(other[0], out) and calls.same(other[1], state)


@pytest.mark.parametrize("gate", ("soft", "bounded"))
def test_b09_chunks_of_padding_are_not_prepared(gate):
    """What would be handed over for them stays as it was; the inverse finds zeros where it looks at all of them."""
    call = calls.prefill((40, 33, 32, 5), gate=gate, **{**SMALL, "HV": 1})
    count, gates = 110 // 32 + 6, {n: call.get(n) for n in ("gate", "A_log", "dt_bias")}
    shapes = (((count, 1, 3, 32, 32), BF16), ((count, 1, 3, 32, 32), BF16), ((count, 1, 32), F32))
    factors, pairs, decays = (torch.full(shape, torch.nan, dtype=dtype, device=DEVICE) for shape, dtype in shapes)
    call = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in call.items()}
    rows = {"read_slots": [1, 9, -1, 0], "write_slots": [1, 2, 3, 4], "fresh": [False, False, True, False]}
    rows = {n: torch.tensor(x, device=DEVICE) for n, x in rows.items()}
    out = torch.full(call["v"].shape, torch.nan, dtype=BF16, device=DEVICE)
    prepare.prepare(
        *(call[n] for n in TOKENS if n != "v"), call["cu_seqlens"], out, factors, pairs, decays, 0, **gates, **rows,
        lower_bound=-5.0, scale=0.1, allow_neg_eigval=False, qk_l2norm=True, slots=7, null_slot=0,
    )  # fmt: skip
    live = [1, 2, 5]  # numbers of the chunks of sequences 0 and 2; 3 and 4, and 7, are of padding
    assert factors[live].isfinite().all() and pairs[live].isfinite().all() and decays[live].isfinite().all()
    others = [i for i in range(count) if i not in live]
    assert factors[others].isnan().all() and decays[others].isnan().all() and out.isnan().all()
    assert pairs[others, :, 2].isnan().all() and not pairs[others, :, :2].nan_to_num(0.0).any()


def test_b12_fresh_and_moved_sequences():
    """A fresh sequence owes nothing to its slots; one slot starts two sequences and stays as it was."""
    call = calls.prefill((33, 5), **{**SMALL, "HV": 1})
    fresh = torch.tensor([True, False])
    out, state = run(call, read_slots=torch.tensor([-1, 2]), write_slots=torch.tensor([4, 3]), fresh=fresh)
    zeros = torch.zeros_like(call["state"][0])
    for lo, hi, slot, start in ((0, 33, 4, zeros), (33, 38, 3, call["state"][2])):
        wanted, after = calls.sequence_truth(call, lo, hi, start)
        assert oracle.error(out[lo:hi], wanted) < 5.5e-3 and oracle.error(state[slot], after) < 5.5e-3
    assert calls.same(state[:3], call["state"][:3])


def test_checkpoints_are_the_states_of_shorter_calls():
    call = calls.prefill((130, 64), **{**SMALL, "HV": 1})
    call["state"] = torch.cat([call["state"], torch.full((4, 1, 16, 32), torch.nan)])
    marks = torch.tensor([[5, 6, 8], [7, 8, 8]])
    out, state = run(call, checkpoint_slots=marks, checkpoint_every=64)
    plain = run(call)
    assert calls.same(out, plain[0]) and calls.same(state[:5], plain[1][:5])
    for tokens, slot in ((64, 5), (128, 6)):
        short = run(call, cu_seqlens=torch.tensor([0, tokens]), read_slots=torch.tensor([1]))
        assert calls.same(state[slot], short[1][1])
    assert calls.same(state[7], state[2]) and state[8].isnan().all()
    marks = torch.tensor([[5, 8], [8, 8]])  # of two blocks of 64 each: one is reached, by the first sequence
    other = run(call, checkpoint_slots=marks, checkpoint_every=128)[1]
    assert calls.same(other[5], state[6]) and other[6:].isnan().all() and calls.same(other[:5], plain[1][:5])
    marks = torch.tensor([[5], [99]])
    assert calls.same(run(call, checkpoint_slots=marks, checkpoint_every=64, null_slot=5)[1], plain[1])


def test_b08_views_give_the_bits_of_contiguous_copies():
    call = calls.prefill((33, 9), **SMALL)
    wanted, after = run(call)
    fused = torch.cat([call[n].flatten(1) for n in ("q", "k", "g_raw", "beta_logits")], 1)
    widths = [call[n][0].numel() for n in ("q", "k", "g_raw", "beta_logits")]
    strided = dict(zip(("q", "k", "g_raw", "beta_logits"), fused.split(widths, 1)))
    strided = {n: part.unflatten(1, call[n].shape[1:]) for n, part in strided.items()}
    wide = torch.full((42, 2, 32), torch.nan, dtype=BF16)
    wide[..., ::2] = call["v"]
    pool = call["state"].transpose(2, 3).contiguous().transpose(2, 3)
    indices = {n: torch.stack([call[n], call[n] * 0 - 1], 1)[:, 0] for n in ("cu_seqlens", "read_slots")}
    buffer = torch.full((42, 2, 26), torch.nan, dtype=BF16, device=DEVICE)
    out, state = run({**call, **strided, "v": wide[..., ::2], "state": pool, **indices}, out=buffer[..., 5:21])
    assert calls.same(out, wanted) and calls.same(state, after)
    assert buffer[..., :5].isnan().all() and buffer[..., 21:].isnan().all()


def test_no_tokens_and_no_sequences():
    call = calls.prefill((), **SMALL)
    assert run(call)[0].shape[0] == 0
    call = calls.prefill((5,), **SMALL)
    out, state = run(call, cu_seqlens=torch.tensor([0]), read_slots=torch.tensor([], dtype=torch.int32))
    assert not out.any() and calls.same(state, call["state"])


@pytest.mark.parametrize("device", ("sm_90", "gfx950", "cpu"))
def test_choices(device):
    def anchored(gate="bounded", bound=-5.0, unit=True, dtype=BF16, scale=0.1):
        return prepare.choose(prepare.Shape(128, dtype, gate, bound, unit, scale, True), device).anchored

    assert anchored() and not anchored(bound=-5.1) and not anchored("soft") and not anchored("given")
    assert not anchored(unit=False) and not anchored(dtype=F32) and not anchored(scale=1e5) and not anchored(bound=1.0)
    for dtype, form in ((BF16, "bf16"), (F32, "ieee"), (F16, "tf32x3" if device == "sm_90" else "ieee")):
        config = prepare.choose(prepare.Shape(64, dtype, "soft", -5.0, True, 0.1, True), device)
        assert config.products == scan.choose(scan.Shape(64, 128, dtype), device).products == form and config.reason
    wide = scan.choose(scan.Shape(128, 128, F32), device)  # where float32 sums would spill
    assert wide.products == ("tf32x3" if device == "sm_90" else "ieee") and wide.channels == 32 and wide.reason


def test_the_inverse_of_an_odd_number_of_blocks_in_place():
    """NaN above the diagonals, and in the third tile, which stays as it is."""
    lower = (0.3 * torch.randn(3, 1, 32, 32)).tril(-1)
    beta = torch.rand(3, 1, 32)
    pairs = torch.full((4, 1, 3, 32, 32), torch.nan, dtype=BF16)  # the last entry lies behind the three
    given = lower + torch.diag_embed(beta)
    given[:, :, torch.ones(32, 32).triu(1).bool()] = torch.nan
    pairs[:3].view(3, 1, -1)[..., :2048].view(torch.float32).copy_(given.flatten(2))
    pairs = pairs.to(DEVICE)
    substitution.invert(pairs[:3])
    wanted = torch.stack([oracle.inverse(lower[i, 0]) * beta[i, 0] for i in range(3)])
    pairs = pairs.cpu()
    assert oracle.error(pairs[:3, 0, 0].double() + pairs[:3, 0, 1].double(), wanted) < 1e-4
    assert pairs[:3, :, 2].isnan().all() and pairs[3].isnan().all()


@pytest.mark.parametrize("bound", (-5.0, -1.5, 0.0))
@pytest.mark.parametrize("scale", (2**-10, 128**-0.5, 1.0, 3.0, 2**10))
def test_the_anchor_frames_every_exponent(bound, scale):
    """Operands of the scores stay finite, powers of two are exact in bf16, and undoing them gives the scale back."""
    octaves, M, unit, down_k, down_q, up_q = anchor.frame(bound, scale)
    assert round(M) == M and abs(M - 16 * octaves) <= 0.5 and max(-M, M - 32 * octaves) <= 116 and 0 < unit <= 1
    for power in (down_k, down_q):
        assert torch.tensor(power, dtype=BF16).item() == power and power >= 2**-126
    assert unit * up_q == scale and down_k == 2.0**M and down_q == down_k * up_q


def test_b31_lengths_and_counts_are_not_compiled_in():
    for module, names in (
        (prepare, {"T", "N", "first", "stride_cu"}),
        (scan, {"T", "N", "first", "count", "slots", "turn", "marks", "stride_cu", "stride_read", "stride_write"}),
    ):
        said = getattr(module.kernel, "kwargs", None) or vars(module.kernel)
        assert names <= set(said["do_not_specialize"]) and "cu_seqlens" in said["do_not_specialize_on_alignment"]


def test_what_the_hopper_form_takes(monkeypatch):
    """bf16, K = 128, values and outputs that bulk copies can move; the rest is refused with the reason."""
    monkeypatch.setattr(library, "arch", lambda device: "sm_90")
    monkeypatch.setattr(library, "INTERPRETED", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def why(v=None, K=128, V=128, dtype=BF16):
        v = torch.zeros(5, 2, V, dtype=dtype) if v is None else v
        q = torch.zeros(5, 1, K, dtype=dtype)
        call = {"q": q, "k": q, "v": v, "g_raw": torch.zeros(5, 2, K), "out": torch.empty(5, 2, V, dtype=dtype)}
        return library.IMPLS["kda_prefill"][0].why_not(call)

    wide = torch.zeros(5, 4, 128, dtype=BF16)
    assert why() is None and why(V=64) is None and why(wide[:, 1:3]) is None
    for reason in (why(K=64), why(V=40), why(dtype=F16)):
        assert reason.startswith("takes K = 128, V a multiple of 64 and bfloat16 values, got K")
    odd = torch.zeros(5 * 256 + 4, dtype=BF16)
    bytes_apart = torch.frombuffer(bytearray(5 * 512 + 32), dtype=torch.uint8)
    off = (2 - bytes_apart.data_ptr()) % 16
    for v in (
        wide[:, ::2],
        wide.transpose(0, 1).contiguous().transpose(0, 1)[:, :2],
        torch.zeros(5, 128, 2, dtype=BF16).transpose(1, 2),
        odd[:1280].as_strided((5, 2, 128), (257, 128, 1)),
        odd[4:].view(5, 2, 128),
        bytes_apart[off : off + 5 * 512].view(BF16).view(5, 2, 128),
        torch.zeros(1, 2, 128, dtype=BF16).expand(5, 2, 128),
    ):
        assert why(v).startswith("v must have its heads side by side in rows of whole 16 bytes, got strides")


def test_b25_nothing_tries_itself_out_on_a_live_pool():
    """No kernel is tuned by running it, and the first call of a process is as right as any (every test here)."""
    for module in (prefill, prepare, scan, library):
        text = Path(module.__file__).read_text()
        assert "autotune" not in text and "do_bench" not in text


def test_errors_of_output_and_state_at_slow_gates_are_no_worse_than_flas():
    """Each by itself: 4.9e-3 and 3.8e-3 are FLA's on an H200; the rows in results hold the larger of the two."""
    call = inputs.prefill(inputs.Source(seed=0), [256], 1, "slow")
    truth = bench_oracle.expected("kda_prefill", call, bench_oracle.TRUTH)
    out, state = run({**call, "gate": "bounded"})
    assert accuracy.relative_error(out, truth["out"]) <= 4.9e-3
    assert accuracy.relative_error(state, truth["state"]) <= 3.8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ("hopper", "triton"))
@pytest.mark.parametrize("id, most_out, most_state", (("8x2048-h16", 4.9e-3, 3.8e-3), ("equal-keys", 8.5e-3, 8.5e-3)))
def test_errors_of_what_is_timed_are_no_worse_than_flas(impl, id, most_out, most_state):
    """The named cases as `thalweg bench` times them, output and state each by itself."""
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    call = cases.CASES[f"prefill-{id}"].make("cuda", 0)
    truth = bench_oracle.expected("kda_prefill", call, bench_oracle.TRUTH)
    out = kda.kda_prefill(**call, impl=impl)
    errors = [accuracy.relative_error(*pair) for pair in ((out, truth["out"]), (call["state"], truth["state"]))]
    assert errors[0] <= most_out and errors[1] <= most_state, errors
