"""KDA prefill on Triton, on one page: prepare every chunk, then scan them in order.

    prepare   q k g_raw beta_logits -> factors (-Kp, Qp, Ke), pairs (inverse, Aqk), decays    parallel over chunks
    scan      factors pairs decays v, state -> out, state advanced in place                   serial over chunks

What is handed over lies in a workspace of `workspace_bytes`, at most about LIMIT: longer packs go through it in groups
of chunk numbers, one launch of each stage a group. A cut between two groups goes through one sequence at most, whose
state crosses it in float32, so that no bit depends on where cuts fall.
"""

import torch
import triton

from thalweg.device import arch
from thalweg.kda import chunks
from thalweg.kda.prepare import CHUNK, prepare, products
from thalweg.kda.scan import scan

LIMIT = 2**30  # bytes of workspace; one chunk of all heads is always taken, however large


def _entry_bytes(HV: int, K: int, out_dtype: torch.dtype) -> int:
    """Bytes that one chunk of all heads hands over."""
    width = max(16, triton.next_power_of_2(K))
    if out_dtype == torch.bfloat16:
        return HV * (2 * 3 * CHUNK * (width + CHUNK) + 4 * width)
    return HV * (4 * CHUNK * (3 * width + 2 * CHUNK) + 4 * width)


def groups(T: int, N: int, HV: int, K: int, out_dtype: torch.dtype, limit: int = LIMIT) -> tuple[int, int]:
    """Chunk numbers of a pack of T tokens in N sequences, and how many go through the workspace at once."""
    total = chunks.grid(T, N, CHUNK)
    launches = -(-total // max(1, limit // _entry_bytes(HV, K, out_dtype)))
    return total, -(-total // launches)


def workspace_bytes(T: int, N: int, HV: int, K: int, V: int, out_dtype: torch.dtype, limit: int = LIMIT) -> int:
    """What a call allocates beside its outputs, freed when it returns."""
    total, count = groups(T, N, HV, K, out_dtype, limit)
    return count * _entry_bytes(HV, K, out_dtype) + (2 * HV * V * K * 4 if count < total else 0)


def prefill(
    q, k, v, g_raw, beta_logits, cu_seqlens, state, read_slots, write_slots, gate, A_log, dt_bias, lower_bound, scale,
    allow_neg_eigval, qk_l2norm, fresh, checkpoint_slots, checkpoint_every, null_slot, out, limit=LIMIT,
) -> None:  # fmt: skip
    """Arguments as the public op's. No host sync."""
    (T, _, K), (HV, V) = q.shape, v.shape[1:]
    if T == 0 or HV == 0 or V == 0:
        return
    total, count = groups(T, cu_seqlens.shape[0] - 1, HV, K, out.dtype, limit)
    width = max(16, triton.next_power_of_2(K))
    low = products(out.dtype, arch(q.device)) == "bf16"
    empty = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=q.device)  # noqa: E731
    kind = torch.bfloat16 if low else torch.float32
    factors = empty(count, HV, 3, CHUNK, width, dtype=kind)
    pairs = empty(count, HV, 3 if low else 2, CHUNK, CHUNK, dtype=kind)
    decays = empty(count, HV, width, dtype=torch.float32)
    carry = empty(2, HV, V, K, dtype=torch.float32) if count < total else decays
    for turn, first in enumerate(range(0, total, count)):
        prepare(
            q, k, g_raw, beta_logits, cu_seqlens, out, factors, pairs, decays, first, gate=gate, A_log=A_log,
            dt_bias=dt_bias, lower_bound=lower_bound, scale=scale, allow_neg_eigval=allow_neg_eigval,
            qk_l2norm=qk_l2norm,
        )  # fmt: skip
        scan(
            factors, pairs, decays, v, cu_seqlens, state, read_slots, write_slots, carry, out, first, turn % 2,
            fresh=fresh, checkpoint_slots=checkpoint_slots, checkpoint_every=checkpoint_every, null_slot=null_slot,
        )  # fmt: skip
