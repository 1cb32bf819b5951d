"""Host side of the kernels around the recurrence: choices, counted rows, workspace, what is never compiled in."""

import kda_calls as calls
import pytest
import torch

pytest.importorskip("triton")

from thalweg.kda import conv, norm, split, steps, tokens, verify

DEVICES = ("sm_90", "gfx950", "cpu")


def merged(o, gate=None, out=None):
    gate, out = o if gate is None else gate, o if out is None else out
    return norm.rows(o, gate, out)


def test_rows_of_a_norm_are_counted_in_as_few_dimensions_as_strides_allow():
    whole, fused = torch.empty(7, 3, 5, 40), torch.empty(7, 3, 5, 100)[..., 1:41]
    assert merged(whole) == [(105, 40, 40, 40)]
    assert merged(whole, fused) == [(105, 40, 100, 40)]
    turned = whole.transpose(0, 1).contiguous().transpose(0, 1)
    assert merged(whole, turned) == [(7, 600, 200, 600), (3, 200, 1400, 200), (5, 40, 40, 40)]
    assert merged(torch.empty(40)) == [(1, 0, 0, 0)]


def test_how_rows_are_counted_depends_on_strides_and_not_on_sizes():
    """One token compiles nothing that two have not."""
    wide = torch.empty(9, 2, 3, 64)
    assert [len(merged(wide[:T, 0], torch.empty(9, 3, 64)[:T])) for T in (1, 2, 9)] == [2, 2, 2]
    assert [len(merged(torch.empty(T, 3, 64))) for T in (1, 2, 9)] == [1, 1, 1]
    apart = torch.empty(9, 2, 7, 6, 64)[:, :1, ::3, ::2]
    assert [row[0] for row in merged(apart)] == [9, 3, 3]  # ones are left out only where there is no room


@pytest.mark.parametrize("device", DEVICES)
def test_choices(device):
    for C in (1, 40, 512, 24576):
        config = conv.choose(conv.Shape(C), device)
        assert config.tokens >= 8 and config.tokens % config.rows == 0 and config.reason  # a history of 7 fits a chunk
        assert config.channels <= 512 and config.channels >= min(C, 512)
    for V in (1, 128, 1024):
        config = norm.choose(norm.Shape(V), device)
        assert config.rows >= 1 and config.reason and config.rows * V <= 4096
    for K, V, S in ((16, 8, 1), (128, 128, 4), (256, 256, 8)):
        assert tokens.choose(tokens.Shape(K, V, S), device).num_warps in (1, 2, 4, 8)
        for outputs in ("none", "raw", "normed") if steps.whole(K, V) else ("none", "raw"):
            config = steps.choose(steps.Shape(K, V, 4, outputs, S), device)
            assert config.reason and config.lanes <= tokens.padded(K) and config.num_warps <= 16
            assert config.values >= V or outputs != "normed"


@pytest.mark.parametrize("B, S, HV, K, V", ((3, 1, 2, 24, 40), (1, 8, 4, 128, 128), (2, 4, 1, 256, 256)))
def test_workspace_is_what_is_said(B, S, HV, K, V):
    handed = tokens.workspace(B, S, HV, K, V, torch.device("meta"))
    said = 4 * sum(x.numel() for x in handed)
    assert tokens.workspace_bytes(B, S, HV, K, V) == said
    assert verify.workspace_bytes(B, S, HV, K, V) == said + (0 if steps.whole(K, V) else 4 * B * S * HV * V)
    assert split.workspace_bytes(B, HV, K, V) == tokens.workspace_bytes(B, 1, HV, K, V) + 4 * B * HV * V
    assert handed.keys.shape == (B, HV, S, 4, tokens.padded(K)) and handed.pairs.shape == (B, HV, S, 2, 8)


def test_b31_what_changes_from_step_to_step_is_not_compiled_in():
    rows = {"slots", "null_slot", "stride_read", "stride_write"}
    for module, names, pointers in (
        (conv, rows | {"T", "N", "stride_cu", "stride_fresh"}, {"cu_seqlens", "read_slots", "write_slots", "fresh"}),
        (norm, rows | {"total", "size1", "size2"}, {"read_slots", "write_slots"}),
        (tokens, rows | {"stride_acc"}, {"read_slots", "write_slots", "accepted"}),
        (steps, rows | {"stride_acc"}, {"read_slots", "write_slots", "accepted"}),
    ):
        said = getattr(module.kernel, "kwargs", None) or vars(module.kernel)
        assert names <= set(said["do_not_specialize"]) and pointers <= set(said["do_not_specialize_on_alignment"])


@pytest.mark.parametrize("verify_drafts", calls.implementations("kda_verify"))
def test_b14_outputs_of_drafts_do_not_depend_on_later_ones(verify_drafts):
    call = calls.layer(1, 3, H=1, HV=2)
    out = calls.run(verify_drafts, call)[0]
    for name in ("qkv", "g_raw", "beta_logits", "out_gate"):
        call[name][:, 2] = torch.nan
    assert calls.same(calls.run(verify_drafts, call)[0][:, :2], out[:, :2])
