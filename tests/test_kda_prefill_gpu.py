"""kda_prefill through its GPU implementations: the contract, the promises about bits, memory, graphs and launches."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

pytest.importorskip("triton")

from thalweg import kda
from thalweg.kda import kda_prefill_workspace, library, workspace

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
IMPLS = ("hopper", "triton")
TOKENS = ("q", "k", "v", "g_raw", "beta_logits")
LARGE = {"H": 1, "HV": 2, "K": 128, "V": 128, "dtype": BF16}


@pytest.fixture(params=IMPLS)
def impl(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    return request.param


def on_gpu(call, device="cuda"):
    return {n: x.to(device) if torch.is_tensor(x) else x for n, x in call.items()}


def run(call, impl, **changes):
    """Out, filled with NaN before, and a copy of the pool after a call."""
    call = {**call, **changes, "state": calls.copy(call["state"])}
    out = torch.full(call["v"].shape, torch.nan, dtype=call["v"].dtype, device=call["v"].device)
    kda.kda_prefill(**call, out=out, impl=impl)
    return out, call["state"]


def check(call, out, state, worst=5.5e-3):
    """Sequence by sequence against the definition in float64; every slot no sequence writes as it was."""
    host = {n: x.cpu() if torch.is_tensor(x) else x for n, x in call.items()}
    bounds, slots = host["cu_seqlens"].tolist(), host["read_slots"].tolist()
    for lo, hi, slot in zip(bounds, bounds[1:], slots):
        if lo == hi:
            assert calls.same(state[slot], call["state"][slot])
            continue
        wanted, after = calls.sequence_truth(host, lo, hi, host["state"][slot])
        assert oracle.error(out[lo:hi].cpu(), wanted) <= worst
        assert oracle.error(state[slot].cpu(), after) <= worst + oracle.rounding(after, state.dtype)
    others = [s for s in range(state.shape[0]) if s not in slots]
    assert calls.same(state[others], call["state"][others])


@pytest.mark.parametrize("gate", ("given", "soft", "bounded"))
@pytest.mark.parametrize("V,state", ((128, torch.float32), (64, BF16), (256, torch.float32)))
def test_equals_the_definition(impl, gate, V, state):
    """Lengths around every multiple of a chunk; an empty and a one-token sequence."""
    lengths = (1, 0, 31, 32, 33, 64, 65, 97)
    call = on_gpu(calls.prefill(lengths, gate=gate, state_dtype=state, **{**LARGE, "V": V}))
    check(call, *run(call, impl))


@pytest.mark.parametrize("H,HV", ((1, 1), (2, 2), (3, 3), (6, 6), (1, 4), (12, 12), (10, 20)))
def test_b24_head_counts(impl, H, HV):
    call = on_gpu(calls.prefill((40, 40), **{**LARGE, "H": H, "HV": HV}))
    check(call, *run(call, impl))


@pytest.mark.parametrize("K,V", ((64, 64), (128, 512), (256, 256), (256, 512), (24, 40)))
def test_b30_dims_fit_the_machine(K, V):
    """The implementation is left to the op."""
    call = on_gpu(calls.prefill((70, 3), **{**LARGE, "K": K, "V": V}))
    check(call, *run(call, None))


def test_b01_b02_wild_gates_and_equal_keys(impl):
    """Decay at the bound beside hardly any, and keys that are all one vector."""
    call = on_gpu(calls.prefill((256,), **LARGE))
    even = torch.arange(128, device="cuda") % 2 == 0
    wild = {**call, "g_raw": torch.where(even, 40.0, -9.0).expand(256, 2, 128).to(BF16), "A_log": None, "dt_bias": None}
    check(wild, *run(wild, impl))
    keys = torch.randn(1, 1, 128, device="cuda").expand(256, 1, 128).to(BF16)
    zeros = {"A_log": torch.zeros(2, device="cuda"), "dt_bias": torch.zeros(2, 128, device="cuda")}
    slow = {"g_raw": torch.full_like(call["g_raw"], -12.0), "beta_logits": torch.full_like(call["beta_logits"], 8.0)}
    call |= {"k": keys, "q": keys, **zeros, **slow}
    check(call, *run(call, impl), worst=8.5e-3)


def test_bits_alone_packed_in_pieces_and_cut_at_64_but_not_elsewhere(impl):
    call = on_gpu(calls.prefill((65, 1, 320, 31), **LARGE))
    out, state = run(call, impl)
    bounds = call["cu_seqlens"].tolist()
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone = {n: call[n][lo:hi].clone() for n in TOKENS}
        cu, slots = torch.tensor([0, hi - lo], device="cuda"), call["read_slots"][i : i + 1]
        got, after = run({**call, **alone}, impl, cu_seqlens=cu, read_slots=slots)
        assert calls.same(got, out[lo:hi]) and calls.same(after[i + 1], state[i + 1])
    least = kda_prefill_workspace(417, 4, 2, 128, 128, least=True)
    for size in (least, 2 * least):
        memory = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
        got, after = run(call, impl, workspace=memory)
        assert calls.same(got, out) and calls.same(after, state)
    for cut in (64, 256, 96):
        pool, outputs = calls.copy(call["state"]), []
        for lo, hi in ((66, 66 + cut), (66 + cut, 386)):
            piece = {n: call[n][lo:hi] for n in TOKENS}
            cu, slots = torch.tensor([0, hi - lo], device="cuda"), call["read_slots"][2:3]
            part = {**call, **piece, "cu_seqlens": cu, "read_slots": slots, "state": pool}
            outputs.append(kda.kda_prefill(**part, impl=impl))
        assert calls.same(torch.cat(outputs), out[66:386]) and calls.same(pool[3], state[3])
    piece = {n: call[n][66:129] for n in TOKENS}  # the control: 63 ends no chunk
    cu, slots = torch.tensor([0, 63], device="cuda"), call["read_slots"][2:3]
    pool = run({**call, **piece}, impl, cu_seqlens=cu, read_slots=slots)[1]
    rest = {n: call[n][129:386] for n in TOKENS}
    cu = torch.tensor([0, 257], device="cuda")
    got, after = run({**call, **rest, "state": pool}, impl, cu_seqlens=cu, read_slots=slots)
    assert not calls.same(got, out[129:386]) and not calls.same(after[3], state[3])


def test_b28_many_runs_give_the_same_bits(impl):
    """32,768 tokens in pieces on two streams; the machine is busy with other work in between."""
    call = on_gpu(calls.prefill((20000, 12768), **{**LARGE, "HV": 8}))
    memory = torch.empty(kda_prefill_workspace(32768, 2, 8, 128, 128) // 4, dtype=torch.uint8, device="cuda")
    first = run(call, impl, workspace=memory)
    for i in range(20):
        if i % 2:
            torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda")
        again = run(call, impl, workspace=memory)
        assert calls.same(again[0], first[0]) and calls.same(again[1], first[1])


def test_checkpoints_are_the_states_of_shorter_calls(impl):
    call = on_gpu(calls.prefill((200, 64), state_dtype=BF16, **LARGE))
    call["state"] = torch.cat([call["state"], torch.full_like(call["state"], torch.nan)])
    marks = torch.tensor([[6, 7, 8, 9], [-1, 99, 9, 9]], device="cuda")
    out, state = run(call, impl, checkpoint_slots=marks, checkpoint_every=64)
    plain = run(call, impl)
    assert calls.same(out, plain[0]) and calls.same(state[:5], plain[1][:5]) and state[9].isnan().all()
    for tokens, slot in ((64, 6), (128, 7), (192, 8)):
        cu, slots = torch.tensor([0, tokens], device="cuda"), call["read_slots"][:1]
        assert calls.same(state[slot], run(call, impl, cu_seqlens=cu, read_slots=slots)[1][1])
    marks = torch.tensor([[6, 9], [9, 9]], device="cuda")  # two blocks of 64 each
    wide = run(call, impl, checkpoint_slots=marks, checkpoint_every=128)[1]
    assert calls.same(wide[6], state[7]) and wide[9].isnan().all()


def test_b13_read_and_write_slots(impl):
    """Two sequences start from one slot, which stays as it was; a third moves on from its own."""
    call = on_gpu(calls.prefill((65, 40, 33), **LARGE))
    read, write = torch.tensor([1, 1, 3], device="cuda"), torch.tensor([4, 2, 3], device="cuda")
    out, state = run(call, impl, read_slots=read, write_slots=write)
    one = {**call, "state": torch.stack([call["state"][i] for i in (0, 1, 1, 3, 4, 5)])}
    wanted, after = run(one, impl)
    assert calls.same(out, wanted) and calls.same(state[[4, 2, 3]], after[[1, 2, 3]])
    assert calls.same(state[[0, 1, 5]], call["state"][[0, 1, 5]])


@pytest.mark.parametrize("splits", ((0, 0), (40, 5), (40, 1, 1, 1, 1, 1), (64, 1), (63, 2), (65, 64)))
def test_b05_b14_calls_of_any_length_go_on_from_the_state(impl, splits):
    whole = on_gpu(calls.prefill((sum(splits),), **LARGE))
    pool, outputs, lo = calls.copy(whole["state"]), [], 0
    for n in splits:
        piece = {name: whole[name][lo : lo + n] for name in TOKENS}
        cu = torch.tensor([0, n], device="cuda")
        outputs.append(kda.kda_prefill(**{**whole, **piece, "cu_seqlens": cu, "state": pool}, impl=impl))
        lo += n
    check(whole, torch.cat(outputs), pool)


def test_b08_views_of_every_kind(impl):
    """Tokens cut from one fused row, a pool with gaps; where `hopper` names what it cannot take, `triton` takes it."""
    call = on_gpu(calls.prefill((70, 5), **LARGE))
    wide = torch.full((75, 2 * 128 + 4 * 128 + 16), torch.nan, dtype=BF16, device="cuda")
    views, at = {}, 0
    for name in ("q", "k", "v", "g_raw", "beta_logits"):
        width = call[name][0].numel()
        views[name] = wide[:, at : at + width].unflatten(1, call[name].shape[1:]).copy_(call[name])
        at += width
    pool = torch.full((11, 3, 130, 128), torch.nan, device="cuda")
    views["state"] = pool[1::2, :2, 2:].copy_(call["state"])
    slots = torch.full((4,), -7, device="cuda")
    views["read_slots"] = slots[::2].copy_(call["read_slots"])
    wanted, after = run(call, impl)
    out, state = run({**call, **views}, impl)
    assert calls.same(out, wanted) and calls.same(state, after)
    every = {name: torch.stack([call[name]] * 2, -1).flatten(-2)[..., ::2] for name in TOKENS}
    every["state"] = call["state"].transpose(2, 3).contiguous().transpose(2, 3)
    check(call, *run({**call, **every}, "triton"))


def test_calls_behind_one_another_wait_for_each_other(impl):
    """Stages begin beside the ones in front of them: ten calls on one pool and workspace, with and without pauses."""
    call = on_gpu(calls.prefill((512,) * 4, **{**LARGE, "H": 8, "HV": 8}))
    call["workspace"] = torch.empty(kda_prefill_workspace(2048, 4, 8, 128, 128), dtype=torch.uint8, device="cuda")
    pools, outputs = [calls.copy(call["state"]) for _ in range(2)], [torch.empty_like(call["v"]) for _ in range(2)]
    for pause, pool, out in zip((True, False), pools, outputs):
        for _ in range(10):
            kda.kda_prefill(**{**call, "state": pool, "out": out}, impl=impl)
            if pause:
                torch.cuda.synchronize()
    assert calls.same(*pools) and calls.same(*outputs) and outputs[0].isfinite().all()


def padded(call, T, N, lengths, slots):
    """The call in buffers for T tokens and N sequences: NaN behind the last one, zero-length and null at the end."""
    used = sum(lengths)
    bigger = {n: torch.full((T, *call[n].shape[1:]), torch.nan, dtype=BF16, device="cuda") for n in TOKENS}
    for n in TOKENS:
        bigger[n][:used] = call[n][:used]
    cu = torch.tensor([0, *lengths, *[0] * (N - len(lengths))], device="cuda").cumsum(0).to(torch.int32)
    live = torch.tensor([*slots, *[-1] * (N - len(slots))], dtype=torch.int32, device="cuda")
    return {**call, **bigger, "cu_seqlens": cu, "read_slots": live}


def test_b11_b29_a_captured_graph_keeps_nothing_of_its_capture(impl):
    """Offsets, slots and tokens are refilled between replays; the tail of the buffers is NaN and of no length."""
    T, N = 512, 5
    source = on_gpu(calls.prefill((100, 200, 100), **LARGE))
    steps = [((100, 200, 100), (1, 2, 3)), ((400,), (3,)), ((1, 64, 0, 33), (2, 5, 1, 3))]
    source["state"] = 0.1 * torch.randn_like(source["state"])
    static = padded(source, T, N, *steps[0])
    pool, out = static["state"].clone(), torch.empty(T, 2, 128, dtype=BF16, device="cuda")
    memory = torch.empty(kda_prefill_workspace(T, N, 2, 128, 128, least=True), dtype=torch.uint8, device="cuda")
    static |= {"state": pool, "out": out, "workspace": memory}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kda.kda_prefill(**static, impl=impl)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kda.kda_prefill(**static, impl=impl)
    for lengths, slots in steps[1:] + steps[:1]:
        fresh = padded(source, T, N, lengths, slots)
        for n in (*TOKENS, "cu_seqlens", "read_slots"):
            static[n].copy_(fresh[n])
        pool.copy_(source["state"])
        out.fill_(torch.nan)
        memory.fill_(255)
        graph.replay()
        wanted, after = run(fresh, impl)
        assert calls.same(out, wanted) and calls.same(pool, after) and not out[sum(lengths) :].any()


def test_b31_no_sync_no_allocation_and_no_new_kernels(impl):
    """After one call of a kind: lengths, counts and strides of other calls compile nothing and wait for nothing."""
    from thalweg.kda import prepare, scan, scan_gluon

    def call_of(lengths):
        call = on_gpu(calls.prefill(lengths, **{**LARGE, "HV": 4}))
        T, N = sum(lengths), len(lengths)
        size = kda_prefill_workspace(T, N, 4, 128, 128, least=T % 2 == 0)
        memory = torch.empty(size, dtype=torch.uint8, device="cuda")
        return {**call, "out": torch.empty_like(call["v"]), "workspace": memory, "impl": impl}

    some = [call_of(n) for n in ((1,), (20, 3), (66, 1, 64), (5,) * 8, (1000, 17), (3,) * 17, (65, 0, 2), (16,) * 16)]
    for call in some[:2]:
        kda.kda_prefill(**call)
    kernels = [module.kernel for module in (prepare, scan, scan_gluon)]
    compiled = [len(kernel.device_caches[0][0]) for kernel in kernels]
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in some:
            kda.kda_prefill(**call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert [len(kernel.device_caches[0][0]) for kernel in kernels] == compiled


@pytest.mark.parametrize("lengths", ((100_000,), (30_000, 0, 69_000, 1000)))
def test_peak_memory_is_what_the_workspace_function_says(impl, lengths):
    HV = 16
    T, N = sum(lengths), len(lengths)
    call = {n: torch.randn(T, HV, 128, dtype=BF16, device="cuda") for n in ("q", "k", "v", "g_raw")}
    call |= {"beta_logits": torch.randn(T, HV, dtype=BF16, device="cuda"), "out": torch.empty_like(call["v"])}
    call |= {"state": torch.zeros(N, HV, 128, 128, device="cuda"), "read_slots": torch.arange(N, device="cuda")}
    call |= {"cu_seqlens": torch.tensor([0, *lengths], device="cuda").cumsum(0)}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kda.kda_prefill(**call, impl=impl)
    extra = torch.cuda.max_memory_allocated() - before
    stated = kda_prefill_workspace(T, N, HV, 128, 128)
    assert stated <= extra <= stated + 2**21 and stated <= workspace.LIMIT  # torch allocates in pieces of 2 MiB
    assert call["out"].isfinite().all()
    memory = torch.empty(stated // 3, dtype=torch.uint8, device="cuda")
    call["state"].zero_()
    wanted = call["out"].clone()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kda.kda_prefill(**call, impl=impl, workspace=memory)
    assert torch.cuda.max_memory_allocated() == before and calls.same(call["out"], wanted)


def test_b07_b23_rows_and_slots_past_2_31_elements(impl):
    """Tokens 36,864 elements apart, the last ones past 2^31; a pool whose last slot lies past 2^31."""
    T, pitch, call = 58_400, 36_864, on_gpu(calls.prefill((100,), **LARGE))
    wanted = run(call, impl)
    buffer = torch.empty(T, pitch, dtype=BF16, device="cuda")
    at, views = 0, {}
    for n in TOKENS:
        width = call[n][0].numel()
        part = buffer[:, at : at + width].unflatten(1, call[n].shape[1:])
        part[-100:] = call[n]
        views[n], at = part, at + -(-width // 8) * 8
    assert (T - 100) * pitch > 2**31
    cu = torch.tensor([T - 100, T], device="cuda")
    out, state = run({**call, **views}, impl, cu_seqlens=cu)
    assert calls.same(out[-100:], wanted[0]) and calls.same(state, wanted[1]) and not out[:-100].any()
    del buffer, views, part
    slots = 2**31 // call["state"][0].numel() + 2
    pool = torch.empty(slots, *call["state"].shape[1:], device="cuda")
    pool[-1] = call["state"][1]
    call |= {"state": pool, "read_slots": torch.tensor([slots - 1], device="cuda")}
    out = kda.kda_prefill(**call, impl=impl)
    assert calls.same(out, wanted[0]) and calls.same(pool[-1], wanted[1][1])


def test_b23_dtypes_do_not_stick_to_the_next_call(impl):
    call = on_gpu(calls.prefill((40, 3), **LARGE))
    before = run(call, impl)
    for name, dtype in (
        ("g_raw", torch.float32),
        ("beta_logits", torch.float32),
        ("state", BF16),
        ("cu_seqlens", torch.int64),
        ("read_slots", torch.int64),
    ):
        changed = {**call, name: call[name].to(dtype)}
        check(changed, *run(changed, impl))
        again = run(call, impl)
        assert calls.same(again[0], before[0]) and calls.same(again[1], before[1])


@pytest.mark.parametrize("bad", (-1, 99, 2**40, 6))
def test_b09_padding_is_passed_over(impl, bad):
    """NaN in all that a padding sequence holds reaches nothing; its rows are zeros, its slots as they were."""
    call = on_gpu(calls.prefill((100, 70, 33), index=torch.int64, **LARGE))
    for name in TOKENS:
        call[name][100:170] = torch.nan
    slots = torch.tensor([1, bad, 3], device="cuda")
    out, state = run(call, impl, read_slots=slots, null_slot=6)
    assert not out[100:170].any() and calls.same(state[[0, 2, 4, 5]], call["state"][[0, 2, 4, 5]])
    for lo, hi, slot in ((0, 100, 1), (170, 203, 3)):
        cu, own = torch.tensor([0, hi - lo], device="cuda"), torch.tensor([slot], device="cuda")
        alone = {n: call[n][lo:hi].clone() for n in TOKENS}
        got, after = run({**call, **alone}, impl, cu_seqlens=cu, read_slots=own)
        assert calls.same(got, out[lo:hi]) and calls.same(after[slot], state[slot])


@pytest.mark.parametrize(
    "K,dtype,worst",
    ((64, torch.float32, 5e-6), (128, torch.float32, 1e-5), (256, torch.float32, 1e-5), (128, F16, 4e-4)),
)
def test_float32_tiles_keep_their_digits(K, dtype, worst):
    """Beyond K = 64, where sums of float32 would spill, products are of three in tf32: 2^-21 of each is lost."""
    call = on_gpu(calls.prefill((130, 3), H=1, HV=2, K=K, V=64, dtype=dtype))
    check(call, *run(call, "triton"), worst=worst)


def test_equal_keys_leave_the_same_error_whatever_the_length(impl):
    """What a rounded key leaves beside its own direction would add up: 2.2e-2 of the state after 2,048 tokens."""
    call = on_gpu(calls.prefill((2048,), **LARGE))
    key = torch.randn(1, 1, 128, device="cuda").expand(2048, 1, 128).to(BF16).contiguous()
    call |= {"k": key, "q": key, "A_log": torch.zeros(2, device="cuda"), "dt_bias": torch.zeros(2, 128, device="cuda")}
    call |= {"g_raw": torch.full_like(call["g_raw"], -12.0), "beta_logits": torch.full_like(call["beta_logits"], 8.0)}
    check(call, *run(call, impl), worst=6e-3)


def test_b12_a_slot_used_before_leaves_nothing(impl):
    call = on_gpu(calls.prefill((100,), **LARGE))
    fresh = torch.ones(1, dtype=torch.bool, device="cuda")
    clean = run(call, impl, fresh=fresh)
    used = run(call, impl)[1]
    again = run({**call, "state": used}, impl, fresh=fresh)
    assert calls.same(again[0], clean[0]) and calls.same(again[1][1], clean[1][1])


def test_b32_another_device_than_the_current_one(impl):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call = calls.prefill((70, 5), **LARGE)
    here, there = run(on_gpu(call), impl), run(on_gpu(call, "cuda:1"), impl)
    assert torch.cuda.current_device() == 0
    assert calls.same(here[0].cpu(), there[0].cpu()) and calls.same(here[1].cpu(), there[1].cpu())


def test_the_op_takes_the_fastest_that_can(impl):
    call = on_gpu(calls.prefill((40,), **LARGE))
    assert calls.same(run(call, None)[0], run(call, "hopper" if impl == "hopper" else None)[0])
    if impl == "hopper":
        apart = {**call, "v": call["v"].transpose(0, 1).contiguous().transpose(0, 1)}
        with pytest.raises(ValueError, match="impl 'hopper' cannot take this call: v must have its heads side by side"):
            run(apart, "hopper")
        assert calls.same(run(apart, None)[0], run(call, "triton")[0])
        assert library.IMPLS["kda_prefill"][0].name == "hopper"
