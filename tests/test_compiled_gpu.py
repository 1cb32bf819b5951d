"""Steps under `torch.compile(mode="reduce-overhead")` on a GPU: what one leaves behind is what the next one finds."""

import kda_calls as calls
import pytest
import torch
from test_kda_ops import conv_call
from test_qsa import inputs
from torch._dynamo.utils import counters

from thalweg import kda, qsa

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


def on_cuda(call):
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in call.items()}


def stepped(op, call, pools, varied, scratch=(), steps=5):
    """Outputs and pools of eager and compiled steps, each on pools of its own; inputs differ from step to step.

    Pools and scratch memory stay where they are, which is what lets a graph be recorded that writes them.
    """
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(op, fullgraph=True, mode="reduce-overhead")
    ours, theirs = (call | {name: call[name].clone() for name in (*pools, *scratch)} for _ in range(2))
    for name in (*pools, *scratch):
        torch._dynamo.mark_static_address(ours[name], guard=False)
    for step in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        now = {name: call[name].roll(step, 0).contiguous() for name in varied}
        got, want = compiled(**ours | now).clone(), op(**theirs | now)
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), step
        for name in pools:
            assert torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()), (step, name)
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.parametrize("dims", ({}, {"H": 12, "HV": 12, "K": 128, "V": 128, "dtype": torch.bfloat16}), ids=str)
def test_b33_decode_steps_under_graph_trees(dims):
    call = on_cuda(calls.layer(5, **dims))
    stepped(kda.kda_decode, call, ("state", "conv_state"), ("qkv", "g_raw", "beta_logits", "out_gate"))


@pytest.mark.parametrize("impl", ("hopper", "triton"))
@pytest.mark.parametrize("least", (False, True), ids=("own-memory", "pieces-in-given-memory"))
def test_b33_prefill_steps_under_graph_trees(impl, least):
    """Each call goes on from the states that the one before it left; in the least memory in pieces on two streams."""
    if impl == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for sm_90")
    lengths = (65, 0, 130, 1, 200)
    call = on_cuda(calls.prefill(lengths, H=1, HV=2, K=128, V=128, dtype=torch.bfloat16)) | {"impl": impl}
    if least:
        size = kda.kda_prefill_workspace(sum(lengths), len(lengths), 2, 128, 128, least=True)
        call["workspace"] = torch.empty(size, dtype=torch.uint8, device="cuda")
    tokens = ("q", "k", "v", "g_raw", "beta_logits")
    stepped(kda.kda_prefill, call, ("state",), tokens, ("workspace",) if least else ())


def test_b33_conv_steps_under_graph_trees():
    call = on_cuda(conv_call((5, 0, 1, 70), C=130, dtype=torch.bfloat16)) | {"impl": "triton"}
    stepped(kda.kda_conv, call, ("conv_state",), ("x",))


def test_b33_solver_under_graph_trees():
    call = {"lower": torch.randn(1, 200, 2, 64, device="cuda"), "cu_seqlens": torch.tensor([0, 70, 200], device="cuda")}
    stepped(kda.solve_unit_lower, call | {"impl": "triton", "out_dtype": torch.bfloat16}, (), ("lower",))


@pytest.mark.parametrize("op, pools, varied", (
    ("qsa_append", ("raw_ring", "block_keys"), ("index_qk",)),
    ("qsa_select", (), ("index_q",)),
    ("qsa_attend", (), ("q",)),
))  # fmt: skip
def test_b33_qsa_steps_under_graph_trees(op, pools, varied):
    stepped(getattr(qsa, op), inputs(op, device="cuda"), pools, varied)
