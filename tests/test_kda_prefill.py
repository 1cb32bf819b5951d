"""kda_prefill: the numbers against the float64 definition, the bits against company, the memory against NaN."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg.kda import kda_decode, kda_prefill

RAGGED = (30, 0, 1, 65, 17)


def check(call, out, state):
    """Every sequence of an in-place call against the definition; every other slot and row unchanged."""
    bounds, slots = call["cu_seqlens"].tolist(), call["read_slots"].tolist()
    for lo, hi, slot in zip(bounds, bounds[1:], slots):
        before = call["state"][slot]
        wanted, after = calls.sequence_truth(call, lo, hi, before)
        if lo == hi:
            assert calls.same(state[slot], before)
            continue
        assert oracle.error(out[lo:hi], wanted) <= oracle.rounding(wanted, out.dtype)
        assert oracle.error(state[slot], after) <= oracle.rounding(after, state.dtype)
    others = [s for s in range(state.shape[0]) if s not in slots]
    assert calls.same(state[others], call["state"][others])


@pytest.mark.parametrize("gate", ("given", "soft", "bounded"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16))
def test_equals_the_definition(gate, dtype, state_dtype):
    call = calls.prefill(RAGGED, dtype=dtype, gate=gate, state_dtype=state_dtype)
    out, state, _ = calls.run(kda_prefill, call)
    assert out.dtype == dtype
    check(call, out, state)


def test_options():
    call = calls.prefill((70,))
    for changes in (
        {"scale": 2.0},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5},
        {"qk_l2norm": False, "q": 0.2 * call["q"], "k": 0.2 * call["k"]},
        {"A_log": None},
        {"dt_bias": None},
    ):
        changed = {**call, **changes}
        out, state, _ = calls.run(kda_prefill, changed)
        check(changed, out, state)
        assert not torch.equal(out, calls.run(kda_prefill, call)[0])  # each option is really read


@pytest.mark.parametrize("heads", ((1, 1), (1, 4), (3, 3), (3, 6), (6, 12), (5, 5)))
@pytest.mark.parametrize("dims", ((64, 64), (16, 40), (40, 16), (3, 5), (128, 256)))
def test_b24_head_counts_and_dims(heads, dims):
    call = calls.prefill((17,), H=heads[0], HV=heads[1], K=dims[0], V=dims[1])
    out, state, _ = calls.run(kda_prefill, call)
    check(call, out, state)


@pytest.mark.parametrize("x", (0.0, 1.0, 2.5, 3.0, 4.0, 5.0))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_b01_strong_decay_beside_weak(x, dtype):
    call = calls.prefill((16, 65), gate="given", dtype=dtype)
    even = torch.arange(24) % 2 == 0
    call["g_raw"] = torch.where(even, -x, -1e-3 if x else 0.0).expand(81, 4, 24).to(dtype)
    out, state, _ = calls.run(kda_prefill, call)
    check(call, out, state)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_b02_near_parallel_keys(dtype):
    call = calls.prefill((64,), K=128, V=40, gate="given", dtype=dtype)
    call["k"] = (torch.randn(1, 2, 128) + 1e-3 * torch.randn(64, 2, 128)).to(dtype)
    call["g_raw"] = torch.full((64, 4, 128), -1e-4).to(dtype)
    call["beta_logits"] = torch.full((64, 4), 4.6).to(dtype)  # beta = 0.99
    out, state, _ = calls.run(kda_prefill, call)
    wanted, after = calls.sequence_truth(call, 0, 64, call["state"][1])
    assert oracle.error(out, wanted) < 2 * oracle.rounding(wanted, dtype) and oracle.error(state[1], after) < 1e-4


@pytest.mark.parametrize("T", (1, 15, 16, 17, 63, 65, 127, 129))
def test_b06_lengths_that_are_no_multiple_of_the_chunk(T):
    """Two equal sequences, cut from a longer buffer that is NaN behind and between them."""
    call = calls.prefill((T, T))
    whole = calls.run(kda_prefill, call)
    check(call, *whole[:2])
    longer = dict(call)
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        buffer = torch.full((2 * T + 9, *call[name].shape[1:]), torch.nan)
        buffer[:T], buffer[T + 5 : 2 * T + 5] = call[name][:T], call[name][T:]
        longer[name] = buffer
    # The gap is a sequence of its own that is padding, as a batch of rows of one length has it.
    longer["cu_seqlens"] = torch.tensor([0, T, T + 5, 2 * T + 5])
    longer["read_slots"] = torch.tensor([1, -1, 2])
    out, state, _ = calls.run(kda_prefill, longer)
    assert calls.same(torch.cat([out[:T], out[T + 5 : 2 * T + 5]]), whole[0]) and calls.same(state, whole[1])
    assert not out[T : T + 5].any() and not out[2 * T + 5 :].any()


def test_b05_empty_and_one_token_sequences():
    for lengths in ((0, 0), (0, 0, 5, 0, 65), (1,), ()):
        call = calls.prefill(lengths)
        out, state, _ = calls.run(kda_prefill, call)
        assert out.shape[0] == sum(lengths)
        check(call, out, state)
    # An empty sequence touches nothing at all: neither a copy to another slot, nor zeros where it is fresh.
    call = calls.prefill((0, 3))
    _, state, _ = calls.run(kda_prefill, call, write_slots=torch.tensor([4, 2]), fresh=torch.tensor([True, False]))
    assert calls.same(state[[0, 1, 3, 4]], call["state"][[0, 1, 3, 4]])


def test_b05_one_token_prefill_is_one_decode_step():
    """Through a short conv that only passes the current token, decode and prefill take the same q, k, v."""
    call = calls.layer(1)
    call["conv_weight"] = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(256, 4)
    call["conv_bias"], call["norm_weight"] = None, torch.ones(40)
    out, state, conv_state = calls.run(kda_decode, call)
    assert calls.same(conv_state[1][:, 2], call["qkv"][0])
    y = torch.nn.functional.silu(call["qkv"])
    q, k, v = y[:, :48].view(1, 2, 24), y[:, 48:96].view(1, 2, 24), y[:, 96:].view(1, 4, 40)
    rest = {name: call[name] for name in ("g_raw", "beta_logits", "read_slots", "gate", "A_log", "dt_bias")}
    o, after, _ = calls.run(
        kda_prefill, {"q": q, "k": k, "v": v, "state": call["state"], **rest}, cu_seqlens=torch.tensor([0, 1])
    )
    assert oracle.error(state[1], after[1]) < 1e-6
    assert oracle.error(out, oracle.gated_norm(o, call["out_gate"], call["norm_weight"], 1e-5)) < 1e-6


def test_b04_state_is_v_by_k():
    """Keys e0 write e5 into the state; a query e0 reads it back only if the layout is [V, K] throughout."""
    for K, V in ((128, 128), (128, 64)):
        q, k, v = torch.zeros(65, 1, K), torch.zeros(65, 1, K), torch.zeros(65, 1, V)
        k[:64, 0, 0], v[:64, 0, 5], q[64, 0, 0] = 1.0, 1.0, 1.0
        logits = torch.full((65, 1), 100.0)
        logits[64] = -100.0
        state = torch.zeros(1, 1, V, K)
        out = kda_prefill(
            q, k, v, torch.zeros(65, 1, K), logits, torch.tensor([0, 65]), state, torch.tensor([0]),
            gate="given", scale=0.25, qk_l2norm=False,
        )  # fmt: skip
        assert torch.equal(out[64, 0], 0.25 * torch.eye(V)[5])
        assert state[0, 0, 5, 0] == 1.0 and state.abs().sum() == 1.0


def alone(call, i, **changes):
    """Sequence i of a call by itself: out and its state."""
    lo, hi = call["cu_seqlens"][i], call["cu_seqlens"][i + 1]
    part = {name: call[name][lo:hi].clone() for name in ("q", "k", "v", "g_raw", "beta_logits")}
    slot = call["read_slots"][i : i + 1]
    cu = torch.tensor([0, hi - lo])
    out, state, _ = calls.run(kda_prefill, {**call, **part}, cu_seqlens=cu, read_slots=slot, **changes)
    return out, state[slot[0]]


@pytest.mark.parametrize("dims", ({}, {"H": 1, "HV": 3, "K": 7, "V": 5}, {"H": 2, "HV": 2, "K": 128, "V": 128}))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bits_alone_are_the_bits_packed(dims, dtype):
    call = calls.prefill((66, 1, 64, 3, 130), dtype=dtype, **dims)
    packed, state, _ = calls.run(kda_prefill, call)
    bounds = call["cu_seqlens"].tolist()
    for i in range(5):
        out, after = alone(call, i)
        assert calls.same(out, packed[bounds[i] : bounds[i + 1]])
        assert calls.same(after, state[i + 1])


def pieces(call, cuts):
    """One sequence fed through the op a piece at a time: the outputs joined, and the state."""
    state, outputs = calls.copy(call["state"]), []
    for lo, hi in zip((0, *cuts), (*cuts, call["q"].shape[0])):
        part = {name: call[name][lo:hi] for name in ("q", "k", "v", "g_raw", "beta_logits")}
        outputs.append(kda_prefill(**{**call, **part, "state": state, "cu_seqlens": torch.tensor([0, hi - lo])}))
    return torch.cat(outputs), state


@pytest.mark.parametrize("dims", ({}, {"H": 1, "HV": 3, "K": 7, "V": 5}))
def test_bits_do_not_depend_on_cuts_at_64(dims):
    call = calls.prefill((200,), **dims)
    whole = calls.run(kda_prefill, call)
    for cuts in ((64,), (128,), (64, 128, 192)):
        out, state = pieces(call, cuts)
        assert calls.same(out, whole[0]) and calls.same(state, whole[1])


def test_bits_depend_on_other_cuts():
    """The control of the test above: 63 ends no chunk, the last digits differ and the test sees it."""
    call = calls.prefill((200,))
    whole = calls.run(kda_prefill, call)
    out, state = pieces(call, (63,))
    assert not calls.same(out, whole[0]) and not calls.same(state, whole[1])
    assert oracle.error(out, whole[0]) < 1e-5 and oracle.error(state[1], whole[1][1]) < 1e-5


@pytest.mark.parametrize("dims", ({}, {"H": 1, "HV": 3, "K": 7, "V": 5}))
def test_b14_bits_do_not_depend_on_later_tokens(dims):
    call = calls.prefill((130,), **dims)
    whole = calls.run(kda_prefill, call)[0]
    for count in (1, 2, 40, 63, 65, 129):
        call["cu_seqlens"] = torch.tensor([0, count])
        assert calls.same(calls.run(kda_prefill, call)[0][:count], whole[:count])


def test_bits_are_the_same_run_to_run():
    call = calls.prefill(RAGGED)
    first, second = calls.run(kda_prefill, call), calls.run(kda_prefill, call)
    assert calls.same(first[0], second[0]) and calls.same(first[1], second[1])


@pytest.mark.parametrize("splits", ((40, 5), (40, 1, 1, 1, 1, 1), (64, 1), (63, 2), (65, 64)))
def test_b14_cached_calls_of_any_length_use_the_state(splits):
    call = calls.prefill((sum(splits),))
    whole = calls.run(kda_prefill, call)
    cuts = torch.tensor(splits).cumsum(0).tolist()[:-1]
    out, state = pieces(call, cuts)
    assert oracle.error(out, whole[0]) < 1e-5 and oracle.error(state[1], whole[1][1]) < 1e-5


def test_b12_a_fresh_sequence_owes_nothing_to_the_slot():
    call = calls.prefill((100,))
    used, poisoned = calls.copy(call["state"]), torch.full_like(call["state"], torch.nan)
    kda_prefill(**{**call, "state": used})  # sequence A leaves its state in slot 1
    fresh = {"fresh": torch.tensor([True]), **{n: call[n].flip(0) for n in ("q", "k", "v", "g_raw", "beta_logits")}}
    outs = [kda_prefill(**{**call, **fresh, "state": pool}) for pool in (used, poisoned)]
    assert calls.same(*outs) and calls.same(used[1], poisoned[1])
    zeros = torch.zeros_like(call["state"])
    assert calls.same(kda_prefill(**{**call, **fresh, "state": zeros, "fresh": None}), outs[0])


@pytest.mark.parametrize("bad", (-1, -7, 5, 2**31 - 1, 3))
def test_b09_bad_slots_are_padding(bad):
    """Negative, past the pool, or the null slot (3 here): tokens and slots are not read, outputs are zero."""
    call = calls.prefill((30, 20), index=torch.int64)
    call["state"][3] = 1.0
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        call[name][30:] = torch.nan
    out, state, _ = calls.run(kda_prefill, call, read_slots=torch.tensor([1, bad]), null_slot=3)
    good, after, _ = calls.run(kda_prefill, call, cu_seqlens=torch.tensor([0, 30]), read_slots=torch.tensor([1]))
    assert calls.same(out[:30], good[:30]) and not out[30:].any()
    assert calls.same(state, after)
    for slots in (([1, 2], [1, bad]), ([1, bad], [1, 2])):
        read, write = (torch.tensor(s) for s in slots)
        split, pool, _ = calls.run(kda_prefill, call, read_slots=read, write_slots=write, null_slot=3)
        assert calls.same(split, out) and calls.same(pool, state)
    fresh = torch.tensor([False, True])
    write = torch.tensor([1, bad])
    split, pool, _ = calls.run(kda_prefill, call, write_slots=write, fresh=fresh, null_slot=3)
    assert calls.same(split, out) and calls.same(pool, state)


def test_b10_null_slot_is_an_argument():
    call = calls.prefill((5, 6))
    call["state"][0] = 0.25
    slots = torch.tensor([0, 2])
    out, state, _ = calls.run(kda_prefill, call, read_slots=slots, null_slot=0)
    assert calls.same(state[0], call["state"][0]) and not out[:5].any()
    out, state, _ = calls.run(kda_prefill, call, read_slots=slots, null_slot=None)
    wanted, after = calls.sequence_truth(call, 0, 5, call["state"][0])
    assert oracle.error(out[:5], wanted) < 1e-5 and oracle.error(state[0], after) < 1e-5


def test_b29_rows_behind_the_last_sequence():
    call = calls.prefill((30, 40, 0, 58))
    call["cu_seqlens"] = torch.tensor([0, 30, 70, 70], dtype=torch.int32)
    call["read_slots"] = call["read_slots"][:3]
    clean = calls.run(kda_prefill, {**call, **{n: call[n][:70] for n in ("q", "k", "v", "g_raw", "beta_logits")}})
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        call[name][70:] = torch.nan
    out, state, _ = calls.run(kda_prefill, call, out=torch.full((128, 4, 40), torch.nan))
    assert calls.same(out[:70], clean[0]) and not out[70:].any()
    assert calls.same(state, clean[1])


def test_rows_before_the_first_sequence():
    call = calls.prefill((30, 40))
    clean = calls.run(kda_prefill, call)
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        call[name] = torch.cat([torch.full_like(call[name][:7], torch.nan), call[name]])
    out, state, _ = calls.run(kda_prefill, call, cu_seqlens=call["cu_seqlens"] + 7)
    assert calls.same(out[7:], clean[0]) and not out[:7].any() and calls.same(state, clean[1])


@pytest.mark.parametrize(
    "offsets, read_as",
    (
        ((-5, 30, 70), (0, 30, 70)),
        ((0, 30, 2**31 - 1), (0, 30, 70)),
        ((0, 50, 20), (0, 50, 50)),
        ((90, 95, 99), (70, 70, 70)),
    ),
)
def test_offsets_are_clipped_and_never_decrease(offsets, read_as):
    call = calls.prefill((30, 40))
    out, state, _ = calls.run(kda_prefill, call, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))
    wanted, after, _ = calls.run(kda_prefill, call, cu_seqlens=torch.tensor(read_as))
    assert calls.same(out, wanted) and calls.same(state, after)


def test_read_and_write_slots():
    """A shared prefix in slot 1 starts two sequences; the slot they read stays as it was."""
    call = calls.prefill((70, 5))
    read, write = torch.tensor([1, 1]), torch.tensor([3, 4])
    out, state, _ = calls.run(kda_prefill, call, read_slots=read, write_slots=write)
    assert calls.same(state[:3], call["state"][:3])
    for lo, hi, slot in ((0, 70, 3), (70, 75, 4)):
        wanted, after = calls.sequence_truth(call, lo, hi, call["state"][1])
        assert oracle.error(out[lo:hi], wanted) < 1e-5 and oracle.error(state[slot], after) < 1e-5


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16))
def test_checkpoints_are_the_states_of_shorter_calls(state_dtype):
    call = calls.prefill((200, 64, 63), state_dtype=state_dtype)
    call["state"] = torch.cat([call["state"], torch.full((6, 4, 40, 24), torch.nan, dtype=state_dtype)])
    marks = torch.tensor([[6, 7, 8, 9], [10, -1, 11, 11], [11, 11, 11, 11]])
    plain = calls.run(kda_prefill, call)
    out, state, _ = calls.run(kda_prefill, call, checkpoint_slots=marks, checkpoint_every=64)
    assert calls.same(out, plain[0]) and calls.same(state[:4], plain[1][:4])
    for tokens, slot in ((64, 6), (128, 7), (192, 8)):
        short = calls.run(kda_prefill, call, cu_seqlens=torch.tensor([0, tokens]), read_slots=torch.tensor([1]))
        assert calls.same(state[slot], short[1][1])
    assert calls.same(state[10], state[2])  # a sequence that ends on the mark
    assert state[[9, 11]].isnan().all() and calls.same(state[[0, 4, 5]], call["state"][[0, 4, 5]])
    # Bad slots are skipped, a checkpoint every 128 tokens falls on the second mark.
    marks = torch.tensor([[6], [99], [-3]])
    _, wider, _ = calls.run(kda_prefill, call, checkpoint_slots=marks, checkpoint_every=128)
    assert calls.same(wider[6], state[7]) and calls.same(wider[:6], plain[1][:6])
    _, none, _ = calls.run(kda_prefill, call, checkpoint_slots=marks, checkpoint_every=64, null_slot=6)
    assert calls.same(none, plain[1])


def views(call):
    """The same values as views: q | k | v and the gates cut from wide rows, every other element, a transposed pool."""
    T = call["q"].shape[0]
    fused = torch.cat([call[n].flatten(1) for n in ("q", "k", "g_raw", "beta_logits")], 1)
    widths = [call[n][0].numel() for n in ("q", "k", "g_raw", "beta_logits")]
    parts = dict(zip(("q", "k", "g_raw", "beta_logits"), fused.split(widths, 1)))
    strided = {n: part.unflatten(1, call[n].shape[1:]) for n, part in parts.items()}
    sparse = torch.full((T, 4, 80), torch.nan)
    sparse[..., ::2] = call["v"]
    pool = call["state"].transpose(2, 3).contiguous().transpose(2, 3)
    indices = {n: torch.stack([call[n], call[n] * 0 - 1], 1)[:, 0] for n in ("cu_seqlens", "read_slots")}
    return {**call, **strided, "v": sparse[..., ::2], "state": pool, **indices}


def test_b08_views_give_the_bits_of_contiguous_copies():
    call = calls.prefill(RAGGED)
    strided = views(call)
    assert not any(strided[n].is_contiguous() for n in ("q", "k", "v", "g_raw", "beta_logits", "state", "cu_seqlens"))
    wanted, after, _ = calls.run(kda_prefill, call)
    buffer = torch.full((113, 4, 50), torch.nan)
    out, state, _ = calls.run(kda_prefill, strided, out=buffer[..., 5:45])
    assert calls.same(out, wanted) and calls.same(state, after)
    assert buffer[..., :5].isnan().all() and buffer[..., 45:].isnan().all()


def test_b23_dtypes_of_one_argument_do_not_stick_to_the_next_call():
    call = calls.prefill(RAGGED)
    kinds = {
        "g_raw": torch.bfloat16,
        "beta_logits": torch.float16,
        "cu_seqlens": torch.int64,
        "read_slots": torch.int64,
    }
    before = calls.run(kda_prefill, call)
    for name, dtype in kinds.items():
        changed = {**call, name: call[name].to(dtype)}
        out, state, _ = calls.run(kda_prefill, changed)
        check(changed, out, state)
        after = calls.run(kda_prefill, call)
        assert calls.same(after[0], before[0]) and calls.same(after[1], before[1])
