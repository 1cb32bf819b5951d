"""Convolution, norm, split decode step, verify, commit on a GPU: long offsets, graphs, no syncs, no recompiles."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg import kda

pytestmark = pytest.mark.gpu
POOLS = ("state", "conv_state")


def on_cuda(call):
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in call.items()}


def draft_commit(call):
    """Arguments of kda_commit from those of kda_verify."""
    return {name: x for name, x in call.items() if name not in ("out_gate", "norm_weight", "norm_eps", "out")}


def conv_call(lengths, C=640, W=4):
    N, T = len(lengths), sum(lengths)
    call = {"x": torch.randn(T, C).bfloat16(), "weight": torch.randn(C, W), "conv_state": torch.randn(N + 2, C, W - 1)}
    call |= {"cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)}
    return on_cuda(call | {"read_slots": torch.arange(1, N + 1, dtype=torch.int32)})


def test_b07_conv_offsets_past_2_to_the_31():
    """256 columns of 36,864 over 58,400 rows: the last rows lie 2.15e9 elements from the first."""
    buffer = torch.empty(58_400, 36_864, dtype=torch.bfloat16, device="cuda")
    x = buffer[:, :256].normal_()
    weight, pool = torch.randn(256, 4, device="cuda"), torch.zeros(1, 256, 3, dtype=torch.bfloat16, device="cuda")
    cu, slots = torch.tensor([0, 58_400], device="cuda"), torch.tensor([0], device="cuda")
    out = torch.empty_like(buffer)[:, 36_608:]
    kda.kda_conv(x, weight, cu, pool, slots, out=out, impl="triton")
    history = x[-103:-100].t().cpu()
    wanted, after = oracle.conv(x[-100:].cpu(), weight.cpu(), None, history)
    assert oracle.error(out[-100:].cpu(), wanted) <= oracle.rounding(wanted, torch.bfloat16)
    assert torch.equal(pool[0].cpu().double(), after)


def test_b07_slots_past_2_to_the_31():
    """The history and the state of the last slot of pools of more than 2^31 elements."""
    call = on_cuda(calls.layer(1, 3, H=2, HV=2, K=64, V=128, dtype=torch.bfloat16))
    state = torch.empty(2**31 // (2 * 64 * 128) + 2, 2, 128, 64, dtype=torch.bfloat16, device="cuda")
    last = state.shape[0] - 1
    state[last] = call["state"][1]
    histories = torch.empty(last + 1, *call["conv_state"].shape[1:], dtype=torch.bfloat16, device="cuda")
    histories[last] = call["conv_state"][1]
    call["state"] = call["state"].bfloat16()
    small = {**call, "read_slots": torch.tensor([1], device="cuda")}
    big = {**call, "state": state, "conv_state": histories, "read_slots": torch.tensor([last], device="cuda")}
    for name, change in (("kda_verify", lambda c: c), ("kda_commit", draft_commit)):
        op, extra = getattr(kda, name), {"impl": "triton"}
        if name == "kda_commit":
            extra["accepted"] = torch.tensor([2], device="cuda")
        got, wanted = op(**change(big), **extra), op(**change(small), **extra)
        assert got is None or calls.same(got, wanted)
        assert calls.same(state[last], call["state"][1]) and calls.same(histories[last], call["conv_state"][1])


@pytest.mark.parametrize("time_major", (False, True))
def test_b28_in_place_histories_do_not_race(time_major):
    """Many sequences of 1 to 70 tokens, read slot = write slot: 20 runs give the same bits, those of other slots."""
    call = conv_call([1, 2, 3, 4, 63, 64, 65, 70] * 16, C=1000)
    if time_major:
        call["conv_state"] = call["conv_state"].transpose(1, 2).contiguous().transpose(1, 2)
    N = 128
    apart = torch.cat([call["conv_state"], torch.full_like(call["conv_state"], torch.nan)])
    wanted = kda.kda_conv(**{**call, "conv_state": apart}, write_slots=call["read_slots"] + N + 2, impl="triton")
    for _ in range(20):
        pool = call["conv_state"].clone(memory_format=torch.preserve_format)
        out = kda.kda_conv(**{**call, "conv_state": pool}, impl="triton")
        assert calls.same(out, wanted) and calls.same(pool[1 : N + 1], apart[N + 3 : 2 * N + 3])


@pytest.mark.parametrize("HV", (2, 8))
def test_b28_in_place_decode_does_not_race(HV):
    call = on_cuda(calls.layer(64, H=2, HV=HV, K=128, V=128, dtype=torch.bfloat16))
    first = None
    for _ in range(20):
        pools = {name: call[name].clone() for name in POOLS}
        got = (kda.kda_decode(**{**call, **pools}, impl="triton-split"), *pools.values())
        first = first or got
        assert all(calls.same(a, b) for a, b in zip(got, first))


def captured(step):
    """A CUDA graph of step(), which has run twice before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_b29_conv_graph_takes_other_offsets_and_slots():
    """Captured for 130 tokens and 4 sequences; replayed with fewer, an unused tail of empty ones, rows behind: NaN."""
    call = conv_call([40, 30, 59, 1])
    out, start = torch.empty_like(call["x"]), call["conv_state"].clone()
    graph = captured(lambda: kda.kda_conv(**call, out=out, impl="triton"))
    call["conv_state"].copy_(start)
    call["cu_seqlens"].copy_(torch.tensor([0, 30, 70, 70, 70]))
    call["read_slots"].copy_(torch.tensor([5, 2, -1, 3]))
    call["x"][70:] = torch.nan
    graph.replay()
    eager = {**call, "conv_state": start.clone()}
    wanted = kda.kda_conv(**eager, impl="reference")
    assert oracle.error(out.cpu(), wanted.cpu()) < 1e-2 and not out[70:].any()
    assert calls.same(call["conv_state"], eager["conv_state"])


@pytest.mark.parametrize("state_dtype", (torch.float32, torch.bfloat16))
def test_b11_verify_and_commit_graph_keeps_nothing_of_capture(state_dtype):
    """Captured with slots A and accepts [2, 1]; replayed with slots B and [1, 1], then with a shorter batch of B."""
    call = on_cuda(calls.layer(2, 4, H=2, HV=2, K=64, V=64, dtype=torch.bfloat16, state_dtype=state_dtype))
    for name in POOLS:
        call[name] = torch.cat([call[name], call[name][1:3] * 0.5]).contiguous()  # slots 5 and 6: B
    accepted, out = torch.tensor([2, 1], device="cuda"), torch.empty_like(call["out_gate"])
    names = ("qkv", "g_raw", "beta_logits", "out_gate")

    def step():
        kda.kda_verify(**call, out=out, impl="triton")
        kda.kda_commit(**draft_commit(call), accepted=accepted, impl="triton")

    graph = captured(step)
    for slots, counts in (([5, 6], [1, 1]), ([6, -1], [3, 4]), ([5, 6], [0, 4])):
        call["read_slots"].copy_(torch.tensor(slots))
        accepted.copy_(torch.tensor(counts))
        for name in names:
            call[name].copy_(torch.randn_like(call[name]))
            if -1 in slots:
                call[name][1] = torch.nan
        eager = {**call, **{name: call[name].clone() for name in POOLS}}
        wanted = kda.kda_verify(**eager, impl="triton").clone()
        kda.kda_commit(**draft_commit(eager), accepted=accepted, impl="triton")
        before = {name: call[name].clone() for name in POOLS}
        graph.replay()
        assert calls.same(out, wanted) and all(calls.same(call[name], eager[name]) for name in POOLS)
        idle = [s for s in range(7) if s not in [slot for slot, count in zip(slots, counts) if count]]
        assert all(calls.same(call[name][idle], before[name][idle]) for name in POOLS)


def test_decode_graph_of_the_split_chain():
    call = on_cuda(calls.layer(4, H=3, HV=3, K=128, V=128, dtype=torch.bfloat16))
    out = torch.empty_like(call["out_gate"])
    graph = captured(lambda: kda.kda_decode(**call, out=out, impl="triton-split"))
    for slots in ([4, 3, 2, 1], [2, -1, -1, 1], [-1] * 4):
        call["read_slots"].copy_(torch.tensor(slots))
        call["qkv"].copy_(torch.randn_like(call["qkv"]))
        eager = {**call, **{name: call[name].clone() for name in POOLS}}
        wanted = kda.kda_decode(**eager, impl="triton-split")
        graph.replay()
        assert calls.same(out, wanted) and all(calls.same(call[name], eager[name]) for name in POOLS)


def compiled_kernels():
    from thalweg.kda import conv, norm, steps, tokens

    kernels = (conv.kernel, norm.kernel, steps.kernel, tokens.kernel)
    return sum(len(caches[0]) for kernel in kernels for caches in kernel.device_caches.values())


def test_b31_no_sync_and_no_recompile_in_steady_state():
    def sweep(N, T):
        cuts = torch.linspace(0, T, N + 1).int().tolist()
        conv = conv_call([hi - lo for lo, hi in zip(cuts, cuts[1:])])
        layer = on_cuda(calls.layer(N, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16))
        drafts = on_cuda(calls.layer(N, 4, H=2, HV=2, K=128, V=128, dtype=torch.bfloat16))
        o, gate, weight = (
            torch.randn(T, 2, 128).cuda(),
            torch.randn(T, 2, 200).cuda()[..., :128],
            torch.ones(128).cuda(),
        )
        accepted = torch.full((N,), 2).cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kda.kda_conv(**conv, impl="triton")
            kda.gated_rms_norm(o, gate[..., :128], weight, 1e-5, impl="triton")
            kda.kda_decode(**layer, impl="triton-split")
            kda.kda_verify(**drafts, impl="triton")
            kda.kda_commit(**draft_commit(drafts), accepted=accepted, impl="triton")
        finally:
            torch.cuda.set_sync_debug_mode("default")

    sweep(2, 40)
    before = compiled_kernels()
    for N in (1, 2, 3, 5, 8, 16, 17, 32):
        for T in (1, 16, 63, 64, 65, 1000):
            sweep(N, T)
    assert compiled_kernels() == before


def test_b32_runs_on_the_device_of_its_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = {name: x.to("cuda:1") if torch.is_tensor(x) else x for name, x in calls.layer(2, 3).items()}
    out = kda.kda_verify(**call, impl="triton")
    assert torch.cuda.current_device() == 0 and out.isfinite().all()
    with pytest.raises(ValueError, match="on cuda:1"):
        kda.kda_verify(**{**call, "state": call["state"].to("cuda:0")}, impl="triton")


def test_b03_long_decode_drifts_no_further_than_rounding():
    """512 steps of the split chain against the definition on the same inputs."""
    call = calls.layer(1, 1, H=1, HV=1, K=64, V=64, dtype=torch.bfloat16)
    steps = calls.layer(1, 512, H=1, HV=1, K=64, V=64, dtype=torch.bfloat16)
    names = ("qkv", "g_raw", "beta_logits", "out_gate")
    here = on_cuda({**call, **{name: steps[name] for name in names}})
    for t in range(512):
        kda.kda_decode(**{**here, **{name: here[name][:, t] for name in names}}, impl="triton-split")
    rows = {name: steps[name][0] for name in names}
    _, history, after = oracle.layer(rows, call, call["conv_state"][1], call["state"][1])
    assert oracle.error(here["state"][1].cpu(), after) < 1e-5
    assert torch.equal(here["conv_state"][1].cpu().double(), history)
