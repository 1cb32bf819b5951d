"""Speculation on Triton, on one page: 1 to 8 draft tokens a row, looked at (`verify`), then kept or not (`commit`).

    tokens   all tokens' convolution, gates, decayed keys and scores; commit: history advanced    float32 workspace
    steps    one pass over the state for all tokens: outputs (verify), or the state advanced by the accepted (commit)
    norm     verify only, where a head's state is too large for one program

With a float32 pool a row's tokens are one run (`tokens`): the state is read once and the chain from token to token is
over vectors. With a bfloat16 pool they are runs of one, as the state is rounded after every token. Counts of accepted
tokens are read on the device; where one is 0 neither pool is touched.
"""

import torch

from thalweg.kda.norm import gated_rms_norm
from thalweg.kda.steps import advance, whole
from thalweg.kda.tokens import prepare_tokens, workspace
from thalweg.kda.tokens import workspace_bytes as tokens_bytes


def workspace_bytes(B: int, S: int, HV: int, K: int, V: int) -> int:
    """What a call of verify or commit allocates beside its outputs: for K = V = 128 about 2.6 KB a token and head."""
    return tokens_bytes(B, S, HV, K, V) + (0 if whole(K, V) else 4 * B * S * HV * V)


def _span(S: int, state: torch.Tensor) -> int:
    return S if state.dtype == torch.float32 else 1


def verify(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, norm_weight, norm_eps,
    gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot, out,
) -> None:  # fmt: skip
    """Arguments as the public op's. No host sync."""
    (B, S, HV, K), V, slots = g_raw.shape, state.shape[2], min(conv_state.shape[0], state.shape[0])
    if B == 0 or V == 0:
        return
    span, handed = _span(S, state), workspace(B, S, HV, K, V, qkv.device)
    prepare_tokens(
        qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, slots, read_slots, read_slots, None, handed,
        span=span, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        allow_neg_eigval=allow_neg_eigval, null_slot=null_slot, query=True, roll=False,
    )  # fmt: skip
    call = handed, state, slots, read_slots, read_slots, None
    if whole(K, V):
        advance(*call, span=span, null_slot=null_slot, store=False, out=out, out_gate=out_gate,
                norm_weight=norm_weight, norm_eps=norm_eps)  # fmt: skip
        return
    o = torch.empty(B, S, HV, V, dtype=torch.float32, device=qkv.device)
    advance(*call, span=span, null_slot=null_slot, store=False, out=o)
    gated_rms_norm(o, out_gate, norm_weight, norm_eps, out, (read_slots, read_slots, slots, null_slot))


def commit(
    qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state, accepted, read_slots, write_slots, gate, A_log,
    dt_bias, lower_bound, allow_neg_eigval, null_slot,
) -> None:  # fmt: skip
    """Arguments as the public op's. No host sync."""
    (B, S, HV, K), V, slots = g_raw.shape, state.shape[2], min(conv_state.shape[0], state.shape[0])
    if B == 0:
        return
    span, handed = _span(S, state), workspace(B, S, HV, K, V, qkv.device)
    prepare_tokens(
        qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, slots, read_slots, write_slots, accepted, handed,
        span=span, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=1.0,
        allow_neg_eigval=allow_neg_eigval, null_slot=null_slot, query=False, roll=True,
    )  # fmt: skip
    advance(handed, state, slots, read_slots, write_slots, accepted, span=span, null_slot=null_slot, store=True)
