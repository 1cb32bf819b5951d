"""Steps under `torch.compile(mode="reduce-overhead")` on a GPU: what one leaves behind is what the next one finds."""

import kda_calls as calls
import pytest
import torch
from test_qsa import inputs

from thalweg import kda, qsa

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu


def on_cuda(call):
    return {name: x.cuda() if torch.is_tensor(x) else x for name, x in call.items()}


def stepped(op, call, pools, varied, steps=5):
    """Outputs and pools of eager and compiled steps, each on pools of its own; inputs differ from step to step."""
    compiled = torch.compile(op, fullgraph=True, mode="reduce-overhead")
    ours, theirs = (call | {name: call[name].clone() for name in pools} for _ in range(2))
    for step in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        now = {name: call[name].roll(step, 0).contiguous() for name in varied}
        got, want = compiled(**ours | now).clone(), op(**theirs | now)
        assert torch.equal(got.nan_to_num(), want.nan_to_num()), step
        for name in pools:
            assert torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num()), (step, name)


@pytest.mark.parametrize("dims", ({}, {"H": 12, "HV": 12, "K": 128, "V": 128, "dtype": torch.bfloat16}), ids=str)
def test_b33_decode_steps_under_graph_trees(dims):
    torch._dynamo.reset()
    call = on_cuda(calls.layer(5, **dims))
    stepped(kda.kda_decode, call, ("state", "conv_state"), ("qkv", "g_raw", "beta_logits", "out_gate"))


@pytest.mark.parametrize("op, pools, varied", (
    ("qsa_append", ("raw_ring", "block_keys"), ("index_qk",)),
    ("qsa_select", (), ("index_q",)),
    ("qsa_attend", (), ("q",)),
))  # fmt: skip
def test_b33_qsa_steps_under_graph_trees(op, pools, varied):
    torch._dynamo.reset()
    stepped(getattr(qsa, op), inputs(op, device="cuda"), pools, varied)
