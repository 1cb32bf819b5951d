"""Argument checks that several KDA ops share: shapes, dtypes and devices, on metadata only (nothing is read)."""

import torch

from thalweg import contract
from thalweg.contract import ACTIVATIONS, INDEX, STATES, expect, refuse

GATES = ("given", "soft", "bounded")
FLOAT = (torch.float32,)


def expect_offsets(op: str, cu_seqlens, device) -> int:
    """Returns N."""
    expect(op, "cu_seqlens", cu_seqlens, (None,), INDEX, device, names="[N + 1]")
    if cu_seqlens.shape[0] == 0:
        refuse(op, "cu_seqlens", "[N + 1] with N at least 0", [0])
    return cu_seqlens.shape[0] - 1


def expect_rows(op: str, N: int, read_slots, write_slots, null_slot, device) -> None:
    expect(op, "read_slots", read_slots, (N,), INDEX, device, names="one a row")
    expect(op, "write_slots", write_slots, (N,), INDEX, device, names="one a row", optional=True)
    contract.expect_int(op, "null_slot", null_slot, optional=True)


def expect_conv(op: str, C: int, x, weight, bias, weight_name: str, bias_name: str, conv_state) -> None:
    expect(op, weight_name, weight, (C, None), ACTIVATIONS, x.device, names="[C, W]")
    if not 2 <= weight.shape[1] <= 8:
        refuse(op, weight_name, "[C, W] with W from 2 to 8", list(weight.shape))
    expect(op, bias_name, bias, (C,), ACTIVATIONS, x.device, names="[C]", optional=True)
    kinds = (x.dtype, torch.float32)
    shape = (None, C, weight.shape[1] - 1)
    expect(op, "conv_state", conv_state, shape, kinds, x.device, names="[slots, C, W - 1]", pool=True)


def expect_state(op: str, state, HV: int | None, V: int | None, K: int | None, device) -> None:
    expect(op, "state", state, (None, HV, V, K), STATES, device, names="[slots, HV, V, K]", pool=True)
    if state.shape[1] == 0 or state.shape[3] == 0:
        refuse(op, "state", "[slots, HV, V, K] with HV and K at least 1", list(state.shape))


def expect_gate(
    op: str, gate: str, A_log, dt_bias, lower_bound: float, allow_neg_eigval: bool, HV: int, K: int, device
) -> None:
    contract.expect_choice(op, "gate", gate, GATES)
    if gate == "given" and (A_log is not None or dt_bias is not None):
        refuse(op, "A_log and dt_bias", "None where gate is given", "a tensor")
    contract.expect_number(op, "lower_bound", lower_bound, sign=-1)
    contract.expect_flag(op, "allow_neg_eigval", allow_neg_eigval)
    expect(op, "A_log", A_log, (HV,), FLOAT, device, names="[HV]", optional=True)
    expect(op, "dt_bias", dt_bias, (HV, K), FLOAT, device, names="[HV, K]", optional=True)


def expect_drafts(op: str, qkv: torch.Tensor) -> tuple[int, int]:
    expect(op, "qkv", qkv, (None, None, None), ACTIVATIONS, contract.device_of(qkv), names="[B, S, C]")
    if not 1 <= qkv.shape[1] <= 8:
        refuse(op, "qkv", "[B, S, C] with S from 1 to 8", list(qkv.shape))
    return qkv.shape[0], qkv.shape[1]


def expect_tokens(op: str, lead: tuple, qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state) -> None:
    """The arguments kda_decode, kda_verify and kda_commit share; lead is [B] or [B, S]."""
    device, C = qkv.device, qkv.shape[-1]
    expect_state(op, state, None, None, None, device)
    _, HV, V, K = state.shape
    H = (C - HV * V) // (2 * K)  # no divmod: a compiler that traces symbolic sizes knows the two operators only
    if H < 1 or C != 2 * H * K + HV * V or HV % H:
        wanted = f"C = 2 H K + HV V wide with HV a multiple of H (HV, V, K = {HV}, {V}, {K} from state)"
        refuse(op, "qkv", wanted, f"C = {C}")
    expect(op, "g_raw", g_raw, (*lead, HV, K), ACTIVATIONS, device, names="[.., HV, K]")
    expect(op, "beta_logits", beta_logits, (*lead, HV), ACTIVATIONS, device, names="[.., HV]")
    expect_conv(op, C, qkv, conv_weight, conv_bias, "conv_weight", "conv_bias", conv_state)


def expect_norm(op: str, lead: tuple, qkv, out_gate, norm_weight, norm_eps, out, HV: int, V: int) -> None:
    """The gated norm's arguments."""
    expect(op, "out_gate", out_gate, (*lead, HV, V), ACTIVATIONS, qkv.device, names="[.., HV, V]")
    expect(op, "norm_weight", norm_weight, (V,), ACTIVATIONS, qkv.device, names="[V]")
    contract.expect_number(op, "norm_eps", norm_eps, sign=1)
    expect(op, "out", out, (*lead, HV, V), (qkv.dtype,), qkv.device, names="[.., HV, V]", optional=True)
