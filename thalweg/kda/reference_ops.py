"""The KDA ops in plain torch on any device: pools, slots and offsets around the formulas of `reference`.

Every function writes into `out` and the pools it is given, and returns nothing. Index values are clipped or taken as
padding here, never trusted. Work is cut into tiles of one fixed shape (a chunk of 64 tokens filled up with zeros, one
decode row, 64 norm rows), because the bits of a torch product, of a reduction and of the tail of a vectorised loop may
depend on the whole tensor's shape. That, and not speed, is what makes a row's bits independent of its company.
"""

from functools import partial

import torch

from thalweg import contract
from thalweg.kda import reference

Row = tuple[int, int] | None  # (slot to read or -1: zeros, slot to write); None: padding


def rows(
    read_slots: torch.Tensor, write_slots: torch.Tensor, fresh: torch.Tensor | None, pool: int, null_slot: int | None
) -> list[Row]:
    """Host copy of the slot lists. A row is padding when its write slot is bad, or its read slot unless it is fresh."""
    reads = contract.live_slots(read_slots, pool, null_slot)
    writes = reads if write_slots is read_slots else contract.live_slots(write_slots, pool, null_slot)
    if fresh is not None:
        anew = fresh.tolist()
        return [
            None if write < 0 or (read < 0 and not new) else (-1 if new else read, write)
            for read, write, new in zip(reads, writes, anew)
        ]
    return [None if read < 0 or write < 0 else (read, write) for read, write in zip(reads, writes)]


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Contiguous float32: torch takes another loop, with other last digits, through a strided view."""
    return x.float().contiguous()


def _tile(x: torch.Tensor, at: int, count: int) -> torch.Tensor:
    """x `[T, H, D]` from row `at`: float32 `[H, 64, D]`, rows past `count` are zero whatever lies behind them."""
    tile = x.new_zeros(x.shape[1], reference.CHUNK, x.shape[2], dtype=torch.float32)
    tile[:, :count] = x[at : at + count].transpose(0, 1)
    return tile


def prefill(
    q, k, v, g_raw, beta_logits, cu_seqlens, state, read_slots, write_slots, gate, A_log, dt_bias, lower_bound, scale,
    allow_neg_eigval, qk_l2norm, fresh, checkpoint_slots, checkpoint_every, null_slot, workspace, out,
) -> None:  # fmt: skip
    bounds = contract.offsets(cu_seqlens, q.shape[0])
    marks = None
    if checkpoint_slots is not None:
        flat = contract.live_slots(checkpoint_slots.flatten(), state.shape[0], null_slot)
        width = checkpoint_slots.shape[1]
        marks = [flat[i * width : (i + 1) * width] for i in range(checkpoint_slots.shape[0])]
    out.zero_()
    for i, row in enumerate(rows(read_slots, write_slots, fresh, state.shape[0], null_slot)):
        lo, hi = bounds[i], bounds[i + 1]
        if row is None or lo >= hi:
            continue
        read, write = row
        S = torch.zeros_like(state[write], dtype=torch.float32) if read < 0 else _plain(state[read])
        for at in range(lo, hi, reference.CHUNK):
            count = min(reference.CHUNK, hi - at)
            o, S = _chunk(
                q, k, v, g_raw, beta_logits, at, count, S, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval,
                qk_l2norm,
            )  # fmt: skip
            out[at : at + count] = o[:, :count].transpose(0, 1)
            done = at + count - lo
            if marks and done % checkpoint_every == 0 and done // checkpoint_every <= len(marks[i]):
                slot = marks[i][done // checkpoint_every - 1]
                if slot >= 0:
                    state[slot] = S
        state[write] = S


def _chunk(
    q, k, v, g_raw, beta_logits, at, count, S, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, qk_l2norm
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """At most 64 tokens of one sequence: o `[HV, 64, V]` (rows past `count` mean nothing) and the state after them."""
    group = v.shape[1] // q.shape[1]
    q, k, v, g = (_tile(x, at, count) for x in (q, k, v, g_raw))
    beta = _tile(beta_logits[..., None], at, count)[..., 0]
    if qk_l2norm:
        q, k = reference.l2norm(torch.stack([q, k])).unbind()
    if group > 1:
        q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    # Activated at full width, then cut: a raw gate of 0 is a decay, which must not reach the state; a zero key cannot.
    g = reference.log_decay(g.transpose(0, 1), gate, A_log, dt_bias, lower_bound).transpose(0, 1)
    beta = reference.write_strength(beta, allow_neg_eigval)
    if count < reference.CHUNK:
        g[:, count:] = 0.0
    o, S, _ = reference.chunked(q, k, v, g, beta, S, scale)
    return o, S


def conv(x, weight, cu_seqlens, conv_state, read_slots, write_slots, bias, fresh, null_slot, out) -> None:
    bounds = contract.offsets(cu_seqlens, x.shape[0])
    past = weight.shape[1] - 1
    weight, bias = weight.float(), None if bias is None else bias.float()
    out.zero_()
    for i, row in enumerate(rows(read_slots, write_slots, fresh, conv_state.shape[0], null_slot)):
        lo, hi = bounds[i], bounds[i + 1]
        if row is None or lo >= hi:
            continue
        read, write = row
        history = weight.new_zeros(x.shape[1], past) if read < 0 else _plain(conv_state[read])
        for at in range(lo, hi, reference.CHUNK):
            count = min(reference.CHUNK, hi - at)
            tile = weight.new_zeros(reference.CHUNK, x.shape[1])
            tile[:count] = x[at : at + count]
            y, _ = reference.short_conv(tile, weight, bias, history)
            out[at : at + count] = y[:count]
            seen = torch.cat([history, tile[:count].t()], 1)
            history = seen[:, seen.shape[1] - past :]
        conv_state[write] = history


def _token(
    qkv, g_raw, beta_logits, history, S, *, conv_weight, conv_bias, gate, A_log, dt_bias, lower_bound, scale,
    allow_neg_eigval,
):  # fmt: skip
    """One token of one row, all float32: o `[HV, V]`, the history and the state after it."""
    HV, V, K = S.shape
    y, history = reference.short_conv(qkv.float()[None], conv_weight, conv_bias, history)
    qk, v = y[0].tensor_split((qkv.shape[0] - HV * V,))
    q, k = reference.l2norm(qk.view(2, -1, K)).unbind()
    if q.shape[0] != HV:
        q, k = q.repeat_interleave(HV // q.shape[0], 0), k.repeat_interleave(HV // k.shape[0], 0)
    g = reference.log_decay(g_raw, gate, A_log, dt_bias, lower_bound)
    beta = reference.write_strength(beta_logits, allow_neg_eigval)
    o, S = reference.step(q, k, v.view(HV, V), g, beta, S, scale)
    return o, history, S


def _layer(conv_weight, conv_bias, **rest):
    """`_token` with what all rows and tokens of a call share."""
    return partial(
        _token, conv_weight=conv_weight.float(), conv_bias=None if conv_bias is None else conv_bias.float(), **rest
    )


def decode(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots, norm_weight,
    norm_eps, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot, out,
) -> None:  # fmt: skip
    token = _layer(
        conv_weight, conv_bias, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    g_raw, beta_logits, out_gate, norm_weight = (_plain(x) for x in (g_raw, beta_logits, out_gate, norm_weight))
    for b, row in enumerate(rows(read_slots, write_slots, None, _pool(conv_state, state), null_slot)):
        if row is None:
            out[b] = 0
            continue
        read, write = row
        o, history, S = token(qkv[b], g_raw[b], beta_logits[b], _plain(conv_state[read]), _plain(state[read]))
        out[b] = reference.gated_norm(o, out_gate[b], norm_weight, norm_eps)
        conv_state[write] = history
        state[write] = S


def verify(
    qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, norm_weight, norm_eps,
    gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval, null_slot, out,
) -> None:  # fmt: skip
    token = _layer(
        conv_weight, conv_bias, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=scale,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    g_raw, beta_logits, out_gate, norm_weight = (_plain(x) for x in (g_raw, beta_logits, out_gate, norm_weight))
    for b, row in enumerate(rows(read_slots, read_slots, None, _pool(conv_state, state), null_slot)):
        if row is None:
            out[b] = 0
            continue
        history, S = _plain(conv_state[row[0]]), _plain(state[row[0]])
        for s in range(qkv.shape[1]):
            o, history, S = token(qkv[b, s], g_raw[b, s], beta_logits[b, s], history, S)
            out[b, s] = reference.gated_norm(o, out_gate[b, s], norm_weight, norm_eps)
            S = _stored(S, state)


def commit(
    qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state, accepted, read_slots, write_slots, gate, A_log,
    dt_bias, lower_bound, allow_neg_eigval, null_slot,
) -> None:  # fmt: skip
    token = _layer(
        conv_weight, conv_bias, gate=gate, A_log=A_log, dt_bias=dt_bias, lower_bound=lower_bound, scale=1.0,
        allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    g_raw, beta_logits = _plain(g_raw), _plain(beta_logits)
    counts = accepted.clamp(0, qkv.shape[1]).tolist()
    for b, row in enumerate(rows(read_slots, write_slots, None, _pool(conv_state, state), null_slot)):
        if row is None or counts[b] == 0:
            continue
        read, write = row
        history, S = _plain(conv_state[read]), _plain(state[read])
        for s in range(counts[b]):
            _, history, S = token(qkv[b, s], g_raw[b, s], beta_logits[b, s], history, S)
            S = _stored(S, state)
        conv_state[write] = history
        state[write] = S


def _stored(S: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """S as a token-by-token run would read it back from the pool: a bfloat16 pool rounds after every token."""
    return S.to(state.dtype).float()


def _pool(conv_state: torch.Tensor, state: torch.Tensor) -> int:
    """One slot list addresses both pools, so a slot must exist in both."""
    return min(conv_state.shape[0], state.shape[0])


def gated_rms_norm(o, gate, weight, eps, out) -> None:
    V = o.shape[-1]
    # Whole vectors, and under the size at which torch splits a loop over threads: no row meets a loop's tail.
    height = reference.CHUNK if V <= 512 else reference.CHUNK // 2
    flat_o, flat_gate, weight = o.reshape(-1, V), gate.reshape(-1, V), weight.float()
    result = torch.empty(flat_o.shape, dtype=torch.float32, device=o.device)
    for at in range(0, flat_o.shape[0], height):
        count = min(height, flat_o.shape[0] - at)
        tiles = torch.zeros(2, height, V, dtype=torch.float32, device=o.device)
        tiles[0, :count], tiles[1, :count] = flat_o[at : at + count], flat_gate[at : at + count]
        result[at : at + count] = reference.gated_norm(tiles[0], tiles[1], weight, eps)[:count]
    out.copy_(result.view(out.shape))


def solve_unit_lower(lower, cu_seqlens, precision, workspace_bytes, out) -> None:
    """Block by block. `precision` and `workspace_bytes` bound faster implementations; this one is exact, needs none."""
    size = lower.shape[-1]
    bounds = [0, lower.shape[1]] if cu_seqlens is None else contract.offsets(cu_seqlens, lower.shape[1])
    out.zero_()
    for row, into in zip(lower, out):
        for lo, hi in zip(bounds, bounds[1:]):
            for at in range(lo, hi, size):
                count = min(size, hi - at)
                tile = row.new_zeros(row.shape[1], size, size, dtype=torch.float32)
                tile[:, :count] = row[at : at + count].transpose(0, 1)
                inverse = reference.unit_lower_inverse(tile)
                into[at : at + count] = inverse[:, :count].transpose(0, 1)
