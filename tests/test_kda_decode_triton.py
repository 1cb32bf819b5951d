"""The fused decode step on Triton against the float64 definition and the contract, interpreted or on a GPU."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

pytest.importorskip("triton")

from thalweg.kda import decode, decode_gluon, library, step_gluon

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = {"H": 1, "HV": 1, "K": 64, "V": 64}
ROWS = ("qkv", "g_raw", "beta_logits", "out_gate")


def run(call, out=None, **changes):
    """The launcher, on NaN-filled outputs and copies of the pools: returns out, state and conv_state."""
    call = {**call, **changes}
    given = {
        "write_slots": call["read_slots"], "A_log": None, "dt_bias": None, "lower_bound": -5.0,
        "scale": call["state"].shape[3] ** -0.5, "allow_neg_eigval": False, "null_slot": None, "conv_bias": None,
    }  # fmt: skip
    call = {**given, **call, "state": calls.copy(call["state"]), "conv_state": calls.copy(call["conv_state"])}
    if DEVICE != "cpu":
        call = {n: x.to(DEVICE) if torch.is_tensor(x) else x for n, x in call.items()}
    if out is None:
        out = torch.full(call["out_gate"].shape, torch.nan, dtype=call["qkv"].dtype, device=DEVICE)
    decode.decode(**call, out=out)
    return out.cpu(), call["state"].cpu(), call["conv_state"].cpu()


def check(call, out, state, conv_state):
    """Every row against the definition; every slot that no row names as it was."""
    for b, slot in enumerate(call["read_slots"].tolist()):
        wanted, history, after = calls.row_truth(call, b)
        assert oracle.error(out[b], wanted[0]) <= oracle.rounding(wanted[0], out.dtype)
        assert oracle.error(state[slot], after) <= oracle.rounding(after, state.dtype)
        assert torch.equal(conv_state[slot].double(), history)
    others = [s for s in range(state.shape[0]) if s not in call["read_slots"].tolist()]
    assert calls.same(state[others], call["state"][others])
    assert calls.same(conv_state[others], call["conv_state"][others])


@pytest.mark.parametrize("gate,dtype", (("given", F16), ("soft", F32), ("bounded", BF16)))
@pytest.mark.parametrize("state_dtype", (F32, BF16))
def test_equals_the_definition(gate, dtype, state_dtype):
    call = calls.layer(2, dtype=dtype, gate=gate, state_dtype=state_dtype, **SMALL)
    check(call, *run(call))


@pytest.mark.parametrize("K,V", ((64, 128), (128, 64), (128, 128)))
def test_dims(K, V):
    call = calls.layer(1, H=1, HV=1, K=K, V=V, dtype=BF16)
    check(call, *run(call))


@pytest.mark.parametrize("heads", ((1, 3), (2, 4)))
def test_b24_head_counts_and_shared_heads(heads):
    """Value heads that share a query head read its history before the one program that owns it rolls it, once."""
    call = calls.layer(2, H=heads[0], HV=heads[1], K=64, V=64)
    check(call, *run(call))


@pytest.mark.parametrize("W", (2, 8))
def test_conv_widths(W):
    call = calls.layer(1, W=W, dtype=BF16, **SMALL)
    check(call, *run(call))


def test_options():
    call = calls.layer(1, **SMALL)
    plain = run(call)[0]
    for changes in (
        {"scale": 2.0},
        {"allow_neg_eigval": True},
        {"lower_bound": -1.5},
        {"conv_bias": None},
        {"norm_eps": 0.5},
        {"A_log": None},
        {"dt_bias": None},
    ):
        changed = {**call, **changes}
        got = run(changed)
        check(changed, *got)
        assert not torch.equal(got[0], plain)


def test_float32_history_beside_narrow_tokens():
    call = calls.layer(2, dtype=BF16, **SMALL)
    narrow, wide = run(call), run(call, conv_state=call["conv_state"].float())
    assert calls.same(narrow[0], wide[0]) and calls.same(narrow[2].float(), wide[2])


def test_b03_slow_decay_and_beta_keep_their_digits():
    """(a) beta = sigmoid(0.5) from a bfloat16 logit; (b) 30 steps of a decay that bfloat16 would round to 1."""
    kinds = {"norm_weight": torch.ones(64), "norm_eps": 1e-6, "gate": "given"}
    qkv = torch.zeros(1, 192, dtype=BF16)
    qkv[0, 0] = qkv[0, 64] = 9.0
    qkv[0, 128:] = 1.0
    rows = {"qkv": qkv, "g_raw": torch.zeros(1, 1, 64).to(BF16), "out_gate": torch.zeros(1, 1, 64).to(BF16)}
    pools = {"conv_weight": torch.tensor([0.0, 1.0]).expand(192, 2), "conv_state": torch.zeros(1, 192, 1).to(BF16)}
    call = {**rows, **pools, **kinds, "state": torch.zeros(1, 1, 64, 64), "read_slots": torch.tensor([0])}
    _, state, _ = run(call, beta_logits=torch.tensor([[0.5]]).to(BF16))
    silu = 1 / (1 + torch.tensor(-1.0).exp())  # of v
    assert torch.allclose(state[0, 0, :, 0] / silu, torch.tensor(0.62246), atol=1e-5)
    call |= {"g_raw": torch.full((1, 1, 64), 0.99992).log(), "beta_logits": torch.full((1, 1), -200.0)}
    call["state"] = torch.ones(1, 1, 64, 64)
    for _ in range(30):
        call["state"] = run(call)[1]
    assert (call["state"] - 0.99992**30).abs().max() < 3e-6


def test_bits_of_a_row_do_not_depend_on_the_batch():
    call = calls.layer(3, dtype=BF16, **SMALL)
    together = run(call)
    for b in range(3):
        alone = run({**call, **{n: call[n][b : b + 1] for n in (*ROWS, "read_slots")}})
        assert calls.same(alone[0][0], together[0][b])
        assert calls.same(alone[1][b + 1], together[1][b + 1]) and calls.same(alone[2][b + 1], together[2][b + 1])
    assert not calls.same(together[0][0], together[0][1])


@pytest.mark.parametrize("bad", (-1, 8, 2**40, 7))
def test_b09_padding_rows(bad):
    """NaN in the padding rows and in every slot but the two live ones, in wider buffers."""
    call = calls.layer(4, dtype=BF16, **SMALL)
    guard = {n: torch.full((12, *call[n].shape[1:]), torch.nan, dtype=call[n].dtype) for n in ("state", "conv_state")}
    for name, buffer in guard.items():
        buffer[[5, 7]] = call[name][[1, 2]]
        call[name] = buffer[2:10]
    for name in ROWS:
        call[name][2:] = torch.nan
    live = {**call, "read_slots": torch.tensor([3, 5]), **{n: call[n][:2] for n in ROWS}}
    out, *pools = run(call, read_slots=torch.tensor([3, 5] + [bad] * 2), null_slot=7)
    check(live, out[:2], *pools)
    assert not out[2:].any()


@pytest.mark.parametrize("lists", (([1, -1], [1, 2]), ([1, 2], [1, -1]), ([1, 2], [1, 99])))
def test_a_row_needs_both_slots(lists):
    call = calls.layer(2, **SMALL)
    read, write = (torch.tensor(x) for x in lists)
    out, state, conv_state = run(call, read_slots=read, write_slots=write)
    assert not out[1].any() and out[0].any()
    assert calls.same(state[2], call["state"][2]) and calls.same(conv_state[2], call["conv_state"][2])


def test_a_slot_must_exist_in_both_pools():
    call = calls.layer(2, **SMALL)
    for short, whole in (("conv_state", "state"), ("state", "conv_state")):
        out, state, conv_state = run(call, **{short: call[short][:2]})
        assert out[0].any() and not out[1].any()
        assert calls.same((state if whole == "state" else conv_state)[2], call[whole][2])


def test_b10_null_slot_is_an_argument():
    call = calls.layer(2, **SMALL)
    call["state"][0], call["conv_state"][0] = 0.25, 0.5
    call["read_slots"] = torch.tensor([1, 0])
    out, state, conv_state = run(call, null_slot=0)
    assert not out[1].any()
    assert calls.same(state[0], call["state"][0]) and calls.same(conv_state[0], call["conv_state"][0])
    for null_slot in (None, -1):
        check(call, *run(call, null_slot=null_slot))


def test_b13_read_and_write_slots():
    """The history goes from the read slot, one input on, to the write slot; the read slot stays."""
    call = calls.layer(2, **SMALL)
    in_place = run(call)
    out, state, conv_state = run(call, write_slots=torch.tensor([3, 4]))
    assert calls.same(out, in_place[0])
    assert calls.same(state[:3], call["state"][:3]) and calls.same(conv_state[:3], call["conv_state"][:3])
    assert calls.same(state[[3, 4]], in_place[1][[1, 2]]) and calls.same(conv_state[[3, 4]], in_place[2][[1, 2]])


def test_b08_views_give_the_bits_of_contiguous_copies():
    call = calls.layer(2, gate="soft", **SMALL)
    strided = dict(call)
    for name in ROWS:
        sparse = torch.full((*call[name].shape[:-1], 2 * call[name].shape[-1] + 3), torch.nan, dtype=call[name].dtype)
        sparse[..., 1:-2:2] = call[name]
        strided[name] = sparse[..., 1:-2:2]
    for name, dims in (("conv_state", (1, 2)), ("state", (2, 3)), ("conv_weight", (0, 1))):
        strided[name] = call[name].transpose(*dims).contiguous().transpose(*dims)
    strided["read_slots"] = torch.stack([call["read_slots"], call["read_slots"] * 0 + 99], 1)[:, 0]
    buffer = torch.full((2, 1, 70), torch.nan, device=DEVICE)
    got, wanted = run(strided, out=buffer[..., 3:67]), run(call)
    assert all(calls.same(a, b) for a, b in zip(got, wanted))
    assert buffer[..., :3].isnan().all() and buffer[..., 67:].isnan().all()


def test_no_rows():
    call = calls.layer(0, **SMALL)
    out, state, _ = run(call)
    assert out.shape[0] == 0 and calls.same(state, call["state"])


def test_b31_what_changes_between_steps_is_not_compiled_in():
    said = getattr(decode.kernel, "kwargs", None) or vars(decode.kernel)
    names = {"slots", "null_slot", "stride_read", "stride_write"}
    assert names <= set(said["do_not_specialize"])
    assert {"read_slots", "write_slots"} <= set(said["do_not_specialize_on_alignment"])


def test_choices_do_not_depend_on_the_batch():
    """Or the bits of a row would."""
    assert "B" not in decode.Shape._fields and "heads" not in decode.Shape._fields
    for K in (64, 128):
        for V in (64, 128):
            assert decode.choose(decode.Shape(K, V), "sm_90").reason


def test_the_choice_for_hopper():
    """Parts of 32 rows; norms and loads first where programs are few; three places for parts where only so a
    fourth program fits and saves a wave; bulk stores where three fill their waves, or waves are many.
    """
    wanted = {
        (1, 128, F32): (4, 4, ".cs", 168, False, True),
        (132, 64, F32): (2, 2, ".cs", 168, False, True),
        (133, 128, F32): (4, 4, ".cs", 168, True, True),
        (264, 128, BF16): (4, 4, ".cs", 128, True, True),
        (265, 128, F32): (4, 3, "", 128, False, False),
        (528, 64, F32): (2, 2, "", 128, False, False),
        (529, 128, F32): (4, 4, "bulk", 168, False, False),
        (792, 128, F32): (4, 4, "bulk", 168, False, False),
        (793, 128, F32): (4, 3, "", 128, False, False),
        (1100, 64, F32): (2, 2, "", 128, False, False),
        (1101, 128, F32): (4, 4, "bulk", 168, False, False),
        (1100, 128, BF16): (4, 4, ".cs", 128, False, False),
        (1101, 64, BF16): (2, 2, "bulk", 128, False, False),
    }
    for shape, sizes in wanted.items():
        config = decode_gluon.choose(decode_gluon.Shape(*shape))
        assert config == decode_gluon.Config(*sizes, "") and config.reason


def hopper_call(**kinds):
    call = calls.layer(2, **{**SMALL, **kinds})
    return {**call, "out": torch.empty_like(call["out_gate"]), "write_slots": call["read_slots"]}


def test_b34_what_the_gluon_kernels_do_not_take_is_named():
    call = hopper_call()
    assert step_gluon.why_not(call, False) is None and step_gluon.why_not(hopper_call(HV=2), True) is None
    assert "query heads" in step_gluon.why_not(hopper_call(HV=2), False)
    assert "width 4" in step_gluon.why_not(hopper_call(W=3), True)
    for name in ("qkv", "g_raw", "out_gate", "conv_weight", "norm_weight", "conv_bias", "dt_bias", "out"):
        sparse = torch.empty(*call[name].shape[:-1], 2 * call[name].shape[-1])[..., ::2]
        assert step_gluon.why_not({**call, name: sparse}, True).startswith(f"{name} must be contiguous in its last")
    pool = torch.empty(5, 1, 64, 80)[..., :64]
    assert "whole heads" in step_gluon.why_not({**call, "state": pool}, True)
    assert "16-byte" in step_gluon.why_not({**call, "state": torch.empty(5 * 4096 + 1)[1:].view(5, 1, 64, 64)}, True)
    assert "pool" in step_gluon.why_not({**call, "state": torch.empty(0, 1, 64, 64)}, True)


@pytest.mark.parametrize("other", ("sm_80", "sm_89", "sm_120", "gfx942"))
def test_b26_kernels_of_one_architecture_are_chosen_there_only(other, monkeypatch):
    call = hopper_call()
    monkeypatch.setattr(library, "_without_triton", lambda tensor: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for own in ("sm_90", "gfx950"):
        monkeypatch.setattr(library, "arch", lambda device, own=own: own)
        assert library._decode_on(own)(call) is None
        monkeypatch.setattr(library, "arch", lambda device: other)
        assert library._decode_on(own)(call) == f"made for the {own} architecture"
