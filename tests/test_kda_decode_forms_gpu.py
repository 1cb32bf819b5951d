"""The fused decode kernels on a GPU: shared query heads, early launches, dtypes, devices, slots used before."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import test_kda_decode_gpu as fused
import torch
from test_kda_decode_gpu import BF16, F32, ROWS, check, layer, run

from thalweg.kda import kda_decode
from thalweg.kda.library import IMPLS

pytestmark = pytest.mark.gpu
impl = fused.impl  # the fixture: each fused implementation


def shared(B, H, HV, **kinds):
    return calls.layer(B, H=H, HV=HV, **{"K": 128, "V": 128, "dtype": BF16, **kinds})


@pytest.mark.parametrize("B,H,HV", ((5, 1, 3), (20, 2, 8), (30, 16, 32), (40, 16, 64)))
@pytest.mark.parametrize("state", (F32, BF16))
def test_b24_value_heads_share_a_query_head(impl, B, H, HV, state):
    """15, 160, 960 and 2,560 states: every form; 20 runs in place give the bits of one that writes to other slots."""
    call = shared(B, H, HV, state_dtype=state)
    got = run(impl, call)
    if B < 30:
        check(call, *got)
    else:
        for b in (0, B - 1):
            wanted, history, after = calls.row_truth(call, b)
            assert oracle.error(got[0][b], wanted[0]) <= oracle.rounding(wanted[0], BF16)
            assert oracle.error(got[1][b + 1], after) <= oracle.rounding(after, state)
            assert torch.equal(got[2][b + 1].double(), history)
    wide = {n: torch.cat([x, x]) if n in ("state", "conv_state") else x for n, x in call.items()}
    out, states, histories = run(impl, wide, write_slots=call["read_slots"] + B + 3)
    assert calls.same(out, got[0])
    assert calls.same(states[B + 4 : 2 * B + 4], got[1][1 : B + 1])
    assert calls.same(histories[B + 4 : 2 * B + 4], got[2][1 : B + 1])
    for _ in range(20 if B < 30 else 3):
        assert all(calls.same(a, b) for a, b in zip(run(impl, call), got))


def test_b24_dims_and_odd_strides_of_shared_heads(impl):
    for K, V in ((64, 128), (128, 64), (64, 64)):
        call = calls.layer(3, H=2, HV=4, K=K, V=V, dtype=BF16, gate="soft")
        wide = torch.zeros(call["conv_weight"].shape[0], 6, dtype=BF16)
        wide[:, :4] = call["conv_weight"]
        got = run(impl, call)
        check(call, *got)
        assert all(calls.same(a, b) for a, b in zip(run(impl, call, conv_weight=wide[:, :4]), got))


@pytest.mark.parametrize("rows", (1, 100, 400))
def test_an_early_launch_gives_the_same_bits(impl, rows):
    """Behind a kernel that writes what the call reads, three layers in a row, in a graph, 30 times."""
    layers, source = [layer(rows) for _ in range(3)], layer(rows)
    results = []
    for early in (False, True):
        device = [{n: x.cuda() if torch.is_tensor(x) else x for n, x in one.items()} for one in layers]
        fresh = {n: source[n].cuda() for n in ROWS}
        outs = [torch.full_like(one["out_gate"], torch.nan) for one in device]

        def step(device=device, fresh=fresh, outs=outs, early=early):
            for one, out in zip(device, outs):
                for name in ROWS:
                    one[name].copy_(fresh[name])
                one["qkv"].mul_(2.0)
                kda_decode(**one, out=out, impl=impl, early=early)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(30):
            graph.replay()
        torch.cuda.synchronize()
        results.append([*outs, *(one[n] for one in device for n in ("state", "conv_state"))])
    assert all(calls.same(a.cpu(), b.cpu()) for a, b in zip(*results))


def test_b23_dtypes_of_one_call_do_not_stick_to_the_next(impl):
    """Other types of gates, beta, weights and slots in between: a call has the bits that it had before them. With wider
    types of the same values the sums may only run in another order.
    """
    call = layer(3)
    wanted, wide = run(impl, call), ("g_raw", "beta_logits", "conv_weight", "norm_weight", "out_gate")
    for names in ((), wide, wide[:1], (), wide[1:3], ()):
        changes = {name: call[name].float() for name in names}
        for slots in (torch.int64, torch.int32):
            out, state, history = run(impl, call, read_slots=call["read_slots"].to(slots), **changes)
            assert calls.same(history, wanted[2])
            assert oracle.error(state[1:4], wanted[1][1:4]) <= 1e-6 and oracle.error(out, wanted[0]) <= 4e-3
            assert names or (calls.same(out, wanted[0]) and calls.same(state, wanted[1]))


def test_b12_a_slot_used_before_leaves_nothing(impl):
    """Thirty steps of one request in slot 1, then another's state is put there: as on a pool nobody has used."""
    call, other = layer(1), layer(1)
    device = {n: x.cuda() if torch.is_tensor(x) else x for n, x in call.items()}
    for _ in range(30):
        kda_decode(**device, impl=impl)
    for pool in ("state", "conv_state"):
        device[pool][1] = other[pool][1].cuda()
    used = {**other, **{pool: device[pool].cpu() for pool in ("state", "conv_state")}}
    for got, wanted in zip(run(impl, used), run(impl, other)):
        row = 0 if got.shape[0] == 1 else 1
        assert calls.same(got[row], wanted[row])


def test_b32_mixed_devices_raise_and_another_device_than_the_current_one(impl):
    call = {n: x.cuda() if torch.is_tensor(x) else x for n, x in layer(2).items()}
    for name in ("state", "read_slots", "conv_weight"):
        with pytest.raises(ValueError, match=name):
            kda_decode(**{**call, name: call[name].cpu()}, impl=impl)
    assert torch.cuda.current_device() == 0
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = layer(2)
    there = {n: x.to("cuda:1") if torch.is_tensor(x) else x for n, x in call.items()}
    out = kda_decode(**there, impl=impl)
    assert torch.cuda.current_device() == 0
    assert all(calls.same(a.cpu(), b) for a, b in zip((out, there["state"], there["conv_state"]), run(impl, call)))


def test_what_a_call_gets_without_a_name():
    """The Hopper kernel where the card is one, shared query heads or not; the split chain for other dims."""
    hopper = next(one for one in IMPLS["kda_decode"] if one.name == "hopper")
    call = {"write_slots": None, "conv_bias": None, "A_log": None, "dt_bias": None}
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    for kinds, taken in (({"HV": 2}, True), ({"HV": 8}, True), ({"HV": 2, "W": 3}, False), ({"HV": 2, "K": 32}, False)):
        one = {**call, **shared(2, 2, **kinds)}
        one = {n: x.cuda() if torch.is_tensor(x) else x for n, x in one.items()}
        assert (hopper.why_not({**one, "out": torch.empty_like(one["out_gate"])}) is None) == taken
