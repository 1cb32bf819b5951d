"""Argument checks that several KDA ops share: shapes, dtypes and devices, on metadata only (nothing is read)."""

import torch

from thalweg.contract import ACTIVATIONS, INDEX, STATES, expect, refuse

GATES = ("given", "soft", "bounded")
FLOAT = (torch.float32,)


def expect_rows(op: str, N: int, read_slots, write_slots, device) -> int:
    expect(op, "read_slots", read_slots, (N,), INDEX, device, names="one a row")
    expect(op, "write_slots", write_slots, (N,), INDEX, device, names="one a row", optional=True)
    return N


def expect_conv(op: str, C: int, x, weight, bias, weight_name: str, bias_name: str, conv_state) -> None:
    expect(op, weight_name, weight, (C, None), ACTIVATIONS, x.device, names="[C, W]")
    if not 2 <= weight.shape[1] <= 8:
        refuse(op, weight_name, "[C, W] with W from 2 to 8", list(weight.shape))
    expect(op, bias_name, bias, (C,), ACTIVATIONS, x.device, names="[C]", optional=True)
    kinds = (x.dtype, torch.float32)
    expect(op, "conv_state", conv_state, (None, C, weight.shape[1] - 1), kinds, x.device, names="[slots, C, W - 1]")


def expect_gate(op: str, gate: str, A_log, dt_bias, lower_bound: float, HV: int, K: int, device) -> None:
    if gate not in GATES:
        refuse(op, "gate", "one of " + ", ".join(GATES), gate)
    if gate == "given" and (A_log is not None or dt_bias is not None):
        refuse(op, "A_log and dt_bias", "None where gate is given", "a tensor")
    if not lower_bound < 0:
        refuse(op, "lower_bound", "negative", lower_bound)
    expect(op, "A_log", A_log, (HV,), FLOAT, device, names="[HV]", optional=True)
    expect(op, "dt_bias", dt_bias, (HV, K), FLOAT, device, names="[HV, K]", optional=True)


def expect_drafts(op: str, qkv: torch.Tensor) -> tuple[int, int]:
    expect(op, "qkv", qkv, (None, None, None), ACTIVATIONS, qkv.device, names="[B, S, C]")
    if not 1 <= qkv.shape[1] <= 8:
        refuse(op, "qkv", "[B, S, C] with S from 1 to 8", list(qkv.shape))
    return qkv.shape[0], qkv.shape[1]


def expect_tokens(op: str, lead: tuple, qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state) -> None:
    """The arguments kda_decode, kda_verify and kda_commit share; lead is [B] or [B, S]."""
    device, C = qkv.device, qkv.shape[-1]
    expect(op, "state", state, (None, None, None, None), STATES, device, names="[slots, HV, V, K]")
    _, HV, V, K = state.shape
    H = (
        (C - HV * V) // (2 * K) if K else 0
    )  # no divmod: a compiler that traces symbolic sizes knows the two operators only
    if H < 1 or C != 2 * H * K + HV * V or HV % H:
        wanted = f"C = 2 H K + HV V wide with HV a multiple of H (HV, V, K = {HV}, {V}, {K} from state)"
        refuse(op, "qkv", wanted, f"C = {C}")
    expect(op, "g_raw", g_raw, (*lead, HV, K), ACTIVATIONS, device, names="[.., HV, K]")
    expect(op, "beta_logits", beta_logits, (*lead, HV), ACTIVATIONS, device, names="[.., HV]")
    expect_conv(op, C, qkv, conv_weight, conv_bias, "conv_weight", "conv_bias", conv_state)


def expect_norm(op: str, lead: tuple, qkv, out_gate, norm_weight, out, HV: int, V: int) -> torch.Tensor:
    """The gated norm's arguments; returns out, allocated if None."""
    expect(op, "out_gate", out_gate, (*lead, HV, V), ACTIVATIONS, qkv.device, names="[.., HV, V]")
    expect(op, "norm_weight", norm_weight, (V,), ACTIVATIONS, qkv.device, names="[V]")
    if out is None:
        out = torch.empty((*lead, HV, V), dtype=qkv.dtype, device=qkv.device)
    expect(op, "out", out, (*lead, HV, V), (qkv.dtype,), qkv.device, names="[.., HV, V]")
    return out
