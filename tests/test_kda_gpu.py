"""The KDA reference on CUDA tensors: the same numbers as on the CPU, and the same promises about bits."""

import kda_calls as calls
import kda_oracle as oracle
import pytest
import torch

from thalweg import kda

pytestmark = pytest.mark.gpu


def on_cuda(call):
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in call.items()}


def pools(op, call):
    """Out and the pools after op, on copies."""
    call = {name: x.clone() if torch.is_tensor(x) else x for name, x in call.items()}
    return getattr(kda, op)(**call), call.get("state"), call.get("conv_state")


@pytest.mark.parametrize("op", ("kda_prefill", "kda_decode", "kda_verify"))
def test_cuda_equals_cpu(op):
    call = calls.prefill((30, 0, 1, 65, 130)) if op == "kda_prefill" else calls.layer(3, 4)
    call = calls.token(call, 0) if op == "kda_decode" else call
    for here, there in zip(pools(op, call), pools(op, on_cuda(call))):
        if here is not None:
            assert torch.equal(here.isnan(), there.cpu().isnan())
            assert oracle.error(there.cpu().nan_to_num(), here.nan_to_num()) < 1e-5


def test_cuda_prefill_bits_do_not_depend_on_company_or_cuts():
    call = on_cuda(calls.prefill((66, 1, 200)))
    out, state, _ = pools("kda_prefill", call)
    names = ("q", "k", "v", "g_raw", "beta_logits")
    bounds = call["cu_seqlens"].tolist()
    for i, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
        alone = {name: call[name][lo:hi] for name in names}
        cu, slots = torch.tensor([0, hi - lo]).cuda(), call["read_slots"][i : i + 1]
        got, after, _ = pools("kda_prefill", {**call, **alone, "cu_seqlens": cu, "read_slots": slots})
        assert calls.same(got, out[lo:hi]) and calls.same(after[i + 1], state[i + 1])
    pool, outputs = call["state"].clone(), []
    for lo, hi in ((67, 131), (131, 267)):
        piece = {name: call[name][lo:hi] for name in names}
        cu, slots = torch.tensor([0, hi - lo]).cuda(), call["read_slots"][2:]
        outputs.append(kda.kda_prefill(**{**call, **piece, "cu_seqlens": cu, "read_slots": slots, "state": pool}))
    assert calls.same(torch.cat(outputs), out[67:]) and calls.same(pool[3], state[3])


def test_cuda_decode_bits_do_not_depend_on_the_batch():
    call = on_cuda(calls.layer(5))
    out, state, conv_state = pools("kda_decode", call)
    names = ("qkv", "g_raw", "beta_logits", "out_gate", "read_slots")
    for b in range(5):
        got, after, history = pools("kda_decode", {**call, **{name: call[name][b : b + 1] for name in names}})
        assert calls.same(got[0], out[b]) and calls.same(after[b + 1], state[b + 1])
        assert calls.same(history[b + 1], conv_state[b + 1])


def test_cuda_solver_norm_and_conv():
    lower, o, weight = 0.2 * torch.randn(1, 70, 2, 32), torch.randn(70, 2, 40), torch.randn(40)
    assert oracle.error(kda.solve_unit_lower(lower.cuda()).cpu(), kda.solve_unit_lower(lower)) < 1e-5
    got = kda.gated_rms_norm(o.cuda(), o.cuda(), weight.cuda(), 1e-5).cpu()
    assert oracle.error(got, kda.gated_rms_norm(o, o, weight, 1e-5)) < 1e-5
    x, taps, pool = torch.randn(70, 12), torch.randn(12, 4), torch.randn(2, 12, 3)
    rest = (torch.tensor([0, 2, 70]), pool, torch.tensor([0, 1]))
    wanted, after = kda.kda_conv(x, taps, rest[0], pool.clone(), rest[2]), pool.cuda()
    got = kda.kda_conv(x.cuda(), taps.cuda(), rest[0].cuda(), after, rest[2].cuda())
    assert oracle.error(got.cpu(), wanted) < 1e-5
