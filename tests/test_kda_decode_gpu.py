"""The fused decode kernels on a GPU, against the float64 definition and the contract; graphs, drift, large pools."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg import cases, contract
from thalweg.device import arch
from thalweg.kda import kda_decode, reference

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = ("qkv", "g_raw", "beta_logits", "out_gate")
IMPLS = ("triton", "hopper")


@pytest.fixture(params=IMPLS)
def impl(request):
    if request.param == "hopper" and arch(torch.device("cuda")) != "sm_90":
        pytest.skip("made for sm_90")
    return request.param


def layer(B, H=3, K=128, V=128, **kinds):
    return calls.layer(B, H=H, HV=H, K=K, V=V, **{"dtype": BF16, **kinds})


def run(impl, call, **changes):
    """The op on the GPU, on copies of the pools and a NaN-filled out: out, state, conv_state on the CPU."""
    call = {**call, **changes}
    device = {n: x.cuda() if torch.is_tensor(x) else x for n, x in call.items()}
    for pool in ("state", "conv_state"):  # a pool's strides are kept, holes included
        device[pool] = torch.empty_strided(call[pool].shape, call[pool].stride(), dtype=call[pool].dtype, device="cuda")
        device[pool].copy_(call[pool])
    out = torch.full(call["out_gate"].shape, torch.nan, dtype=call["qkv"].dtype, device="cuda")
    kda_decode(**device, out=out, impl=impl)
    return out.cpu(), device["state"].cpu(), device["conv_state"].cpu()


def check(call, out, state, conv_state):
    for b, slot in enumerate(call["read_slots"].tolist()):
        wanted, history, after = calls.row_truth(call, b)
        assert oracle.error(out[b], wanted[0]) <= oracle.rounding(wanted[0], out.dtype)
        assert oracle.error(state[slot], after) <= oracle.rounding(after, state.dtype)
        assert state.dtype != F32 or oracle.error(state[slot], after) <= 1e-6
        assert torch.equal(conv_state[slot].double(), history)
    others = [s for s in range(state.shape[0]) if s not in call["read_slots"].tolist()]
    assert calls.same(state[others], call["state"][others])
    assert calls.same(conv_state[others], call["conv_state"][others])


@pytest.mark.parametrize("rows", (2, 9, 20, 44, 100))
@pytest.mark.parametrize("gate,dtype,state", (("given", F16, F32), ("soft", F32, BF16), ("bounded", BF16, F32)))
def test_every_form_equals_the_definition(impl, rows, gate, dtype, state):
    """6, 27, 60, 132 and 300 heads: less than one a multiprocessor, and more."""
    call = layer(rows, dtype=dtype, gate=gate, state_dtype=state)
    check(call, *run(impl, call))


@pytest.mark.parametrize("K,V", ((64, 64), (64, 128), (128, 64)))
@pytest.mark.parametrize("rows", (2, 20))
@pytest.mark.parametrize("state", (F32, BF16))
def test_dims(impl, K, V, rows, state):
    call = layer(rows, K=K, V=V, state_dtype=state)
    check(call, *run(impl, call))


@pytest.mark.parametrize("H", (1, 3, 6, 12, 16, 24, 48, 64, 96))
def test_b24_head_counts(impl, H):
    call = layer(1, H=H)
    check(call, *run(impl, call))


def test_b24_shared_heads_and_other_widths():
    for kinds in ({"H": 1, "HV": 3}, {"H": 2, "HV": 8}, {"H": 2, "HV": 2, "W": 3}, {"H": 2, "HV": 2, "W": 8}):
        call = calls.layer(5, K=128, V=128, dtype=BF16, **kinds)
        check(call, *run(None, call))


def test_options(impl):
    call = layer(2, dtype=F32)
    changes = ({"scale": 2.0}, {"allow_neg_eigval": True}, {"lower_bound": -1.5}, {"conv_bias": None})
    for change in (*changes, {"norm_eps": 0.5}, {"A_log": None}, {"dt_bias": None}, {"null_slot": 9}):
        changed = {**call, **change}
        check(changed, *run(impl, changed))
    wide = run(impl, layer(2), conv_state=layer(2)["conv_state"].float())
    assert wide[0].isfinite().all()


@pytest.mark.parametrize("bad", (-1, -(2**40), 23, 2**40, 7))
@pytest.mark.parametrize("live", (2, 20))
def test_b09_b10_padding_rows(impl, live, bad):
    """NaN in padding rows and in every slot but the live ones; the pools are views of wider buffers."""
    call = layer(live + 3)
    guard = {n: torch.full((30, *call[n].shape[1:]), torch.nan, dtype=call[n].dtype) for n in ("state", "conv_state")}
    slots = [s for s in range(1, 23) if s != 7][:live]
    for name, buffer in guard.items():
        buffer[[s + 4 for s in slots]] = call[name][1 : live + 1]
        call[name] = buffer[4:27]
    for name in ROWS:
        call[name][live:] = torch.nan
    only = {**call, "read_slots": torch.tensor(slots), **{n: call[n][:live] for n in ROWS}}
    out, *pools = run(impl, call, read_slots=torch.tensor([*slots, bad, bad, bad]), null_slot=7)
    check(only, out[:live], *pools)
    assert not out[live:].any()


def test_b13_read_and_write_slots(impl):
    call = layer(3)
    in_place = run(impl, call)
    call = {n: torch.cat([x, x]) if n in ("state", "conv_state") else x for n, x in call.items()}
    out, state, conv_state = run(impl, call, write_slots=torch.tensor([7, -1, 9]))
    assert calls.same(out[[0, 2]], in_place[0][[0, 2]]) and not out[1].any()
    for pool, before, there in ((state, call["state"], in_place[1]), (conv_state, call["conv_state"], in_place[2])):
        assert calls.same(pool[[7, 9]], there[[1, 3]])
        others = [s for s in range(12) if s not in (7, 9)]
        assert calls.same(pool[others], before[others])


@pytest.mark.parametrize("rows", (2, 20, 60))
def test_b08_views_of_one_projection_and_both_pool_orders(impl, rows):
    call = layer(rows)
    fused = torch.cat([call[n].flatten(1) for n in ROWS], 1)
    parts = fused.split([call[n][0].numel() for n in ROWS], 1)
    strided = {n: part.unflatten(1, call[n].shape[1:]) for n, part in zip(ROWS, parts)}
    strided["conv_state"] = call["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    pool = torch.full((rows + 3, 5, 128, 128), torch.nan)
    pool[:, 1:4] = call["state"]
    got = run(impl, {**call, **strided, "state": pool[:, 1:4]})
    assert all(calls.same(a, b) for a, b in zip(got, run(impl, call)))


def test_bits_do_not_depend_on_the_batch(impl):
    """Alone, among 60 to 900 heads and among 2,100: whatever is chosen, one row has the same bits. A float32 out shows
    them all, where one product of a sum fused instead of another changes a bfloat16 in 100,000.
    """
    call = layer(700, dtype=F32)
    names = (*ROWS, "read_slots")
    together = run(impl, call)
    assert all(calls.same(a, b) for a, b in zip(together, run(impl, call)))
    for count in (1, 20, 70, 120, 200, 300):
        got = run(impl, {**call, **{n: call[n][:count] for n in names}})
        assert calls.same(got[0], together[0][:count])
        assert calls.same(got[1][1 : count + 1], together[1][1 : count + 1])
        assert calls.same(got[2][1 : count + 1], together[2][1 : count + 1])


def test_b11_a_graph_replays_with_new_slots_and_shorter_batches(impl):
    call = layer(4)
    device = {n: x.cuda() if torch.is_tensor(x) else x for n, x in call.items()}
    device["read_slots"] = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    out = torch.full(call["out_gate"].shape, torch.nan, dtype=BF16, device="cuda")
    step = lambda: kda_decode(**device, out=out, impl=impl)  # noqa: E731
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for slots in ([1, 2, 3, 4], [4, 3, -1, -1], [-1] * 4, [2, -1, 5, 6]):
        before = {n: torch.nan_to_num(device[n].cpu(), 0.25) for n in ("state", "conv_state")}
        for name, x in before.items():
            device[name].copy_(x)
        device["read_slots"].copy_(torch.tensor(slots))
        graph.replay()
        live = [b for b in range(4) if slots[b] >= 0]
        only = {
            **call,
            **before,
            **{n: call[n][live] for n in ROWS},
            "read_slots": torch.tensor([slots[b] for b in live]),
        }
        check(only, out.cpu()[live], device["state"].cpu(), device["conv_state"].cpu())
        assert not out.cpu()[[b for b in range(4) if b not in live]].any()


def test_b31_no_sync_no_allocation_and_no_kernel_after_warm_up(impl):
    from thalweg.kda import decode, decode_gluon

    kernel = {"triton": decode.kernel, "hopper": decode_gluon.kernel}[impl]
    count = lambda: sum(len(caches[0]) for caches in kernel.device_caches.values())  # noqa: E731
    call = {n: x.cuda() if torch.is_tensor(x) else x for n, x in layer(40).items()}
    outs = {B: torch.empty_like(call["out_gate"][:B]) for B in range(1, 41)}
    part = lambda B: {**call, **{n: call[n][:B] for n in (*ROWS, "read_slots")}, "out": outs[B], "impl": impl}  # noqa: E731
    for B in (1, 16, 40):
        kda_decode(**part(B))
    made = lambda: torch.cuda.memory_stats()["allocation.all.allocated"]  # noqa: E731 (given back ones too)
    kernels, memory = count(), made()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for B in (1, 2, 3, 5, 8, 16, 17, 33, 40):
            kda_decode(**part(B))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert count() == kernels and made() == memory


def exact(args, history, S):
    """One token of one row of one layer in float64, from the formulas of the reference: history and state after it."""
    HV, V, K = S.shape
    y, history = reference.short_conv(args["qkv"].double(), args["conv_weight"].double(), None, history)
    qk, v = y[0].split((2 * HV * K, HV * V))
    q, k = reference.l2norm(qk.view(2, HV, K)).unbind()
    gates = (args[n].double() for n in ("A_log", "dt_bias"))
    g = reference.log_decay(args["g_raw"][0].double(), "bounded", *gates, -5.0)
    beta = reference.write_strength(args["beta_logits"][0].double(), False)
    return history, reference.step(q, k, v.view(HV, V), g, beta, S, K**-0.5)[1]


def test_b03_drift_over_4096_steps():
    """A float32 state within 1e-4 of float64 on the same inputs; a bfloat16 one is rounded at every step."""
    args = cases.CASES["decode-h12-b1"].make("cuda")
    history, S = args["conv_state"][0].double(), args["state"][0].double()
    pools = {}
    for impl in IMPLS if arch(torch.device("cuda")) == "sm_90" else IMPLS[:1]:
        for dtype in (F32, BF16):
            pools[impl, dtype] = {"state": args["state"].to(dtype, copy=True), "conv_state": args["conv_state"].clone()}
    for _ in range(4096):
        args |= {n: torch.randn_like(args[n]) for n in ROWS}
        history, S = exact(args, history, S)
        for (impl, _), pool in pools.items():
            kda_decode(**{**args, **pool}, impl=impl)
    for (impl, dtype), pool in pools.items():
        drift = oracle.error(pool["state"][0].cpu(), S.cpu())
        print(f"drift after 4096 steps: {impl} {dtype} {drift:.2e}")
        assert drift <= (1e-4 if dtype == F32 else 5e-2)


def test_b07_pools_past_2_31_elements(impl):
    """The last slot of a pool of 9 GB, and the second of the two slots whose distance needs 64 bits."""
    call = layer(2, H=2)
    slots, row = 2**31 // (2 * 128 * 128) + 9, call["qkv"].shape[1]
    state = torch.empty(slots, 2, 128, 128, device="cuda")
    history = torch.empty(slots, row, 3, dtype=BF16, device="cuda")
    where = torch.tensor([slots - 1, 3])
    state[where.cuda()], history[where.cuda()] = call["state"][1:3].cuda(), call["conv_state"][1:3].cuda()
    device = {n: x.cuda() if torch.is_tensor(x) else x for n, x in call.items()}
    device |= {"state": state, "conv_state": history, "read_slots": where.cuda()}
    out = kda_decode(**device, impl=impl)
    wanted = run(impl, call)
    assert calls.same(out.cpu(), wanted[0])
    assert calls.same(state[where.cuda()].cpu(), wanted[1][1:3])
    assert calls.same(history[where.cuda()].cpu(), wanted[2][1:3])


def test_no_rows_and_checked_slots(impl):
    call = layer(0)
    assert run(impl, call)[0].shape[0] == 0
    call = {n: x.cuda() if torch.is_tensor(x) else x for n, x in layer(2).items()}
    with pytest.raises(ValueError, match="write_slots must be distinct"):
        kda_decode(**{**call, "read_slots": torch.tensor([1, 1]).cuda()}, impl=impl, check=True)
    assert contract.live_slots(torch.tensor([1, 9]), 5, None) == [1, -1]
