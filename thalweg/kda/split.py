"""One decode step of KDA as three kernels, on one page: what takes every call that the contract allows and fused
kernels do not.

    tokens   qkv g_raw beta_logits, history advanced -> v, decayed keys and queries, beta     float32 workspace
    steps    state advanced in place -> o                                                     float32 workspace
    norm     o out_gate -> out, zeros in padding rows

Nothing is rounded below float32 on the way: what is handed over is float32, `workspace_bytes` of it.
"""

import torch

from thalweg.kda.norm import gated_rms_norm
from thalweg.kda.steps import advance
from thalweg.kda.tokens import prepare_tokens, workspace
from thalweg.kda.tokens import workspace_bytes as tokens_bytes


def workspace_bytes(B: int, HV: int, K: int, V: int) -> int:
    """What a call allocates beside its outputs: for K = V = 128 about 3.1 KB a row and value head."""
    return tokens_bytes(B, 1, HV, K, V) + 4 * B * HV * V


def decode(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    norm_eps, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot, out,
) -> None:  # fmt: skip
    """Arguments as the public op's. No host sync."""
    (B, HV, K), V, slots = g_raw.shape, state.shape[2], min(conv_state.shape[0], state.shape[0])
    if B == 0 or V == 0:
        return
    handed = workspace(B, 1, HV, K, V, qkv.device)
    o = torch.empty(B, HV, V, dtype=torch.float32, device=qkv.device)
    prepare_tokens(
        qkv[:, None], g_raw[:, None], beta_logits[:, None], conv_weight, conv_bias, conv_state, slots, read_slots,
        write_slots, None, handed, span=1, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound,
        scale=scale, allow_neg_eigval=allow_neg_eigval, null_slot=null_slot, query=True, roll=True,
    )  # fmt: skip
    advance(
        handed, state, slots, read_slots, write_slots, None, span=1, null_slot=null_slot, store=True, out=o[:, None]
    )
    gated_rms_norm(o, out_gate, norm_weight, norm_eps, out, (read_slots, write_slots, slots, null_slot))
