"""The fused decode steps in Gluon, emulated on the CPU, against the definition: Hopper's in its forms, gfx950's."""

import gluon_emulator
import kda_calls as calls
import pytest
import torch

pytest.importorskip("triton")

from test_kda_decode_triton import BF16, F16, F32, ROWS, check

HOPPER, GFX950 = gluon_emulator.load("kda", "decode_gluon"), gluon_emulator.load("kda", "decode_gfx950")
CONFIGS = {
    "two parts": (2, 2, "", 168, True, True),
    "fewer places": (4, 3, ".cs", 128, False, False),
    "bulk stores": (4, 4, "bulk", 168, False, True),
}
FORMS = {
    name: lambda sizes=sizes, **call: HOPPER.decode(**call, config=HOPPER.Config(*sizes, ""))
    for name, sizes in CONFIGS.items()
} | {"gfx950": GFX950.decode}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def layer(B, H=2, K=64, V=64, **kinds):
    return calls.layer(B, H=H, HV=H, K=K, V=V, **kinds)


def run(form, call, **changes):
    """The launcher on NaN-filled outputs and copies of the pools: returns out, state and conv_state."""
    call = {**call, **changes}
    given = {
        "write_slots": call["read_slots"], "A_log": None, "dt_bias": None, "lower_bound": -5.0,
        "scale": call["state"].shape[3] ** -0.5, "allow_neg_eigval": False, "null_slot": None, "conv_bias": None,
    }  # fmt: skip
    call = {**given, **call, "state": calls.copy(call["state"]), "conv_state": calls.copy(call["conv_state"])}
    out = torch.full(call["out_gate"].shape, torch.nan, dtype=call["qkv"].dtype)
    form(**call, out=out)
    return out, call["state"], call["conv_state"]


@pytest.mark.parametrize("gate,dtype,state_dtype", (("given", F16, BF16), ("soft", F32, F32), ("bounded", BF16, F32)))
def test_equals_the_definition(form, gate, dtype, state_dtype):
    call = layer(2, dtype=dtype, gate=gate, state_dtype=state_dtype)
    check(call, *run(form, call))


@pytest.mark.parametrize("K,V", ((64, 128), (128, 64)))
def test_dims(form, K, V):
    call = layer(1, H=1, K=K, V=V, dtype=BF16)
    check(call, *run(form, call))


@pytest.mark.parametrize("name", ("bulk stores", "fewer places"))
@pytest.mark.parametrize("heads", ((1, 3), (2, 4)))
def test_b24_value_heads_share_a_query_head(name, heads):
    """History of q and k is read by every value head and rolled once, after the last."""
    call = calls.layer(2, H=heads[0], HV=heads[1], K=64, V=64, dtype=BF16)
    check(call, *run(FORMS[name], call))


def test_an_early_launch_does_the_same(form):
    if form is FORMS["gfx950"]:
        pytest.skip("Hopper's option")
    call = layer(2)
    assert all(calls.same(a, b) for a, b in zip(run(form, call), run(form, call, early=True)))


def test_options(form):
    call = layer(1, H=1)
    plain = run(form, call)[0]
    changes = ({"scale": 2.0}, {"allow_neg_eigval": True}, {"lower_bound": -1.5}, {"conv_bias": None})
    for change in (*changes, {"norm_eps": 0.5}, {"A_log": None}, {"dt_bias": None}):
        changed = {**call, **change}
        got = run(form, changed)
        check(changed, *got)
        assert not torch.equal(got[0], plain)


@pytest.mark.parametrize("bad", (-1, 8, 2**40, 7))
def test_b09_b10_padding_rows(form, bad):
    """NaN in the padding rows and in every slot but the two live ones, in wider buffers."""
    call = layer(3, H=1, dtype=BF16)
    guard = {n: torch.full((12, *call[n].shape[1:]), torch.nan, dtype=call[n].dtype) for n in ("state", "conv_state")}
    for name, buffer in guard.items():
        buffer[[5, 7]] = call[name][[1, 2]]
        call[name] = buffer[2:10]
    for name in ROWS:
        call[name][2:] = torch.nan
    live = {**call, "read_slots": torch.tensor([3, 5]), **{n: call[n][:2] for n in ROWS}}
    out, *pools = run(form, call, read_slots=torch.tensor([3, 5, bad]), null_slot=7)
    check(live, out[:2], *pools)
    assert not out[2:].any()


def test_b13_read_and_write_slots_and_rows_that_lack_one(form):
    call = layer(2, H=1)
    in_place = run(form, call)
    out, state, conv_state = run(form, call, write_slots=torch.tensor([3, 4]))
    assert calls.same(out, in_place[0])
    assert calls.same(state[:3], call["state"][:3]) and calls.same(conv_state[:3], call["conv_state"][:3])
    assert calls.same(state[[3, 4]], in_place[1][[1, 2]]) and calls.same(conv_state[[3, 4]], in_place[2][[1, 2]])
    for read, write in (([1, -1], [1, 2]), ([1, 2], [1, 99])):
        out, state, _ = run(form, call, read_slots=torch.tensor(read), write_slots=torch.tensor(write))
        assert not out[1].any() and out[0].any() and calls.same(state[2], call["state"][2])


def test_b08_views_of_one_projection_and_both_pool_orders(form):
    call = layer(2)
    fused = torch.cat([call[n].flatten(1) for n in ROWS], 1)
    parts = fused.split([call[n][0].numel() for n in ROWS], 1)
    strided = {n: part.unflatten(1, call[n].shape[1:]) for n, part in zip(ROWS, parts)}
    strided["conv_state"] = call["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    strided["conv_weight"] = torch.full((call["conv_weight"].shape[0], 7), torch.nan)[:, 2:6].copy_(call["conv_weight"])
    pool = torch.full((5, 5, 64, 64), torch.nan)
    pool[:, 1:3] = call["state"]
    strided["read_slots"] = torch.stack([call["read_slots"], call["read_slots"] * 0 + 99], 1)[:, 0]
    got = run(form, {**call, **strided, "state": pool[:, 1:3]})
    assert all(calls.same(a, b) for a, b in zip(got, run(form, call)))


def test_a_row_alone_and_no_rows(form):
    call = layer(2, dtype=BF16)
    together = run(form, call)
    alone = run(form, {**call, **{n: call[n][1:] for n in (*ROWS, "read_slots")}})
    assert calls.same(alone[0][0], together[0][1]) and calls.same(alone[1][2], together[1][2])
    assert run(form, layer(0))[0].shape[0] == 0


def test_the_emulator_refuses_what_hardware_would_not_survive():
    """The control: an address outside of the storage, and a tile that shared memory cannot be cut into."""
    flat = torch.zeros(4)
    p = gluon_emulator.pointer(flat) + torch.arange(5)
    with pytest.raises(AssertionError, match="outside"):
        gluon_emulator.LANGUAGE.load(p)
    assert gluon_emulator.LANGUAGE.load(p, mask=torch.arange(5) < 4, other=7.0).tolist() == [0, 0, 0, 0, 7]
    with pytest.raises(AssertionError, match="multiples"):
        gluon_emulator.Shared(flat).slice(1, 2)
