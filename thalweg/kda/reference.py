"""KDA in plain torch: the oracle of every stage, differentiable, in float64 when any input is float64, else float32.

Shapes are heads-first, `[..., T, K]` with any leading batch and head dimensions, so that one sequence, a batch and a
pack (cut by the caller) use the same code. State is `[..., V, K]`, K contiguous. Gates are natural logarithms.
Source: Kimi Linear (arXiv 2510.26692), sections on KDA and its chunkwise form; the bounded gate is Kimi K3's.

Each chunk is computed with the same shapes whatever surrounds it, so the bits of a sequence do not depend on what it
is packed with, nor on cuts at multiples of the chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

CHUNK = 64
EPS = 1e-6


def wide(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype a reference computes in: float64 if any input is float64, else float32."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def l2norm(x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """x / sqrt(sum x^2 + eps) over the last dimension; eps is added to the sum."""
    x = x.to(wide(x))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def log_decay(
    g_raw: torch.Tensor,
    gate: str,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
) -> torch.Tensor:
    """Log decay of a raw gate `[..., HV, K]`; A_log `[HV]` and dt_bias `[HV, K]` may be absent (0).

    given: g_raw itself. soft: -exp(A_log) softplus(g_raw + dt_bias), unbounded below, softplus linear above 20.
    bounded: lower_bound * sigmoid(exp(A_log) (g_raw + dt_bias)), in [lower_bound, 0].
    """
    dtype = wide(g_raw, A_log, dt_bias)
    x = g_raw.to(dtype)
    if gate == "given":
        return x
    if dt_bias is not None:
        x = x + dt_bias.to(dtype)
    rate = torch.ones((), dtype=dtype, device=x.device) if A_log is None else A_log.to(dtype).exp()[:, None]
    if gate == "soft":
        return -rate * F.softplus(x, threshold=20.0)
    if gate == "bounded":
        return lower_bound * torch.sigmoid(rate * x)
    raise ValueError(f"gate must be given, soft or bounded, got {gate!r}")


def write_strength(beta_logits: torch.Tensor, allow_neg_eigval: bool = False) -> torch.Tensor:
    """beta = sigmoid(logit), doubled where negative eigenvalues of I - beta k k^T are allowed."""
    beta = torch.sigmoid(beta_logits.to(wide(beta_logits)))
    return 2.0 * beta if allow_neg_eigval else beta


def gated_norm(o: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """o / sqrt(mean o^2 + eps) * weight * sigmoid(gate) over the last dimension (V); eps is added to the mean."""
    dtype = wide(o, gate, weight)
    o, gate, weight = o.to(dtype), gate.to(dtype), weight.to(dtype)
    return o * torch.rsqrt(o.square().mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, history: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution with SiLU of `[..., T, C]`; one step is T = 1.

    weight `[C, W]`, tap W-1 meets the current token; bias `[C]`; history `[..., C, W-1]` are the raw inputs before
    the first token, oldest first (None: zeros). Returns y `[..., T, C]` and the history after the last token, raw
    inputs in x's dtype (never the convolved value).
    """
    T, W = x.shape[-2], weight.shape[1]
    if history is None:
        history = x.new_zeros(*x.shape[:-2], x.shape[-1], W - 1)
    padded = torch.cat([history.to(x.dtype).transpose(-1, -2), x], -2)
    dtype = wide(x, weight)
    taps, inputs = weight.to(dtype).t().contiguous(), padded.to(dtype)
    y = taps[0] * inputs[..., :T, :] if bias is None else torch.addcmul(bias.to(dtype), taps[0], inputs[..., :T, :])
    for i in range(1, W):
        y = torch.addcmul(y, taps[i], inputs[..., i : i + T, :])
    return F.silu(y), padded[..., T:, :].transpose(-1, -2)


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + strict_lower(lower) for `[..., C, C]`; the diagonal and the upper part are not read."""
    strict = lower.to(wide(lower)).tril(-1)
    eye = torch.eye(lower.shape[-1], dtype=strict.dtype, device=strict.device)
    return torch.linalg.solve_triangular(strict + eye, eye.expand_as(strict), upper=False, unitriangular=True)


def step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: decay, delta write, read. q, k, g `[..., K]`, v `[..., V]`, beta `[...]`, state `[..., V, K]`."""
    state = state * g.exp()[..., None, :]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = torch.addcmul(state, delta[..., None], k[..., None, :])
    return scale * (state * q[..., None, :]).sum(-1), state


def recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token: q, k, g `[..., T, K]`, v `[..., T, V]`, beta `[..., T]`; returns o and state."""
    dtype = wide(q, k, v, g, beta, state)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if state is None:
        state = v.new_zeros(*v.shape[:-2], v.shape[-1], k.shape[-1])
    state, outputs = state.to(dtype), []
    for t in range(q.shape[-2]):
        o, state = step(q[..., t, :], k[..., t, :], v[..., t, :], g[..., t, :], beta[..., t], state, scale)
        outputs.append(o)
    return (torch.stack(outputs, -2) if outputs else torch.zeros_like(v)), state


class Terms(NamedTuple):
    """What the chunk form computes before the scan, one entry a chunk: `[..., N, C, ...]`.

    g_cum `[.., C, K]`: gate cumulated inside the chunk, rows 0 .. i. g_tail `[.., C, K]`: gate of rows i + 1 .. C - 1.
    Aqk `[.., C, C]`: scale q_i . k_j exp(G_i - G_j), i >= j. Akk `[.., C, C]`: beta_i k_i . k_j exp(G_i - G_j), i > j.
    inverse `[.., C, C]`: (I + Akk)^-1.
    """

    g_cum: torch.Tensor
    g_tail: torch.Tensor
    Aqk: torch.Tensor
    Akk: torch.Tensor
    inverse: torch.Tensor


def decay(g: torch.Tensor) -> torch.Tensor:
    """exp of a log decay (at most 0), never below exp(-80) = 2e-35: a sum holds no digit of that in float64 either, and
    an exp whose result is under the smallest normal float32 takes ten times as long on a CPU."""
    return g.clamp(min=-80.0).exp()


def decayed_scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two `[..., C, C]`, zero above the diagonal: sum_c x_ic k_jc exp(G_ic - G_jc), i >= j, for x = q and for x = k;
    then g_cum (G) and g_tail of `Terms`. q, k, g `[..., C, K]`, C a power of two.

    Blocks of 1, 2, 4 ... rows are joined in pairs. The later half meets the earlier one at the boundary between them:
    row i has decayed since the boundary by its g_cum, row j until the boundary by its g_tail, both inside its own half.
    So every exponent is a sum of gates over the rows it spans, at most 0, never a difference: no gate, however strong,
    overflows, costs a weak neighbour its digits, or brings a forgotten key back.
    """
    lead, (C, K) = q.shape[:-2], q.shape[-2:]
    q, k, g_cum = (x.reshape(-1, C, K) for x in (q, k, g))
    g_tail, B = torch.zeros_like(g_cum), q.shape[0]
    rows = torch.stack([q, k], 2)  # [B, C, 2, K]: any block of rows is one contiguous operand
    scores = q.new_zeros(B, C, 2, C)
    scores.as_strided((B, C, 2), (2 * C * C, 2 * C + 1, C)).copy_((rows * k[:, :, None]).sum(-1))  # the diagonal
    half = 1
    while half < C:
        n = C // (2 * half)
        pairs = (B, n, 2, half, K)
        (cum, since), (until, tail) = g_cum.view(pairs).unbind(2), g_tail.view(pairs).unbind(2)
        early = k.view(pairs).select(2, 0) * decay(until)
        late = rows.view(B, n, 2, half, 2, K).select(2, 1) * decay(since)[:, :, :, None]
        met = torch.bmm(late.view(-1, 2 * half, K), early.view(-1, half, K).mT)
        # Rows of the later half against columns of the earlier one, for all n pairs down the diagonal.
        strides = (2 * C * C, 2 * half * (2 * C + 1), 2 * C, C, 1)
        scores.as_strided((B, n, half, 2, half), strides, 2 * C * half).copy_(met.view(B, n, half, 2, half))
        g_cum = torch.cat([cum, since + cum[:, :, -1:]], 2).view(B, C, K)
        g_tail = torch.cat([until + since[:, :, -1:], tail], 2).view(B, C, K)
        half *= 2
    of_q, of_k = scores.view(*lead, C, 2, C).unbind(-2)
    return of_q, of_k, g_cum.view(g.shape), g_tail.view(g.shape)


def chunk_terms(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float) -> Terms:
    """Intermediates of whole chunks: q, k, g `[..., C, K]`, beta `[..., C]`."""
    Aqk, Akk, g_cum, g_tail = decayed_scores(q, k, g)
    Akk = (beta[..., :, None] * Akk).tril(-1)
    return Terms(g_cum, g_tail, scale * Aqk, Akk, unit_lower_inverse(Akk))


def chunked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None,
    scale: float,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, Terms]:
    """The chunk form of `recurrence`, same arguments; returns o, the state after the last token, and the terms.

    Per chunk: R = inverse (beta (v - (k exp G) S)); o = scale (q exp G) S + Aqk R; S <- S exp(G_C) +
    (k exp(G_C - G))^T R. The last chunk is filled up with k = v = beta = g = 0, which changes nothing. chunk is a
    power of two.
    """
    dtype, T = wide(q, k, v, g, beta, state), q.shape[-2]
    fill = -T % chunk
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta[..., None]))
    if fill:
        q, k, v, g, beta = (F.pad(x, (0, 0, 0, fill)) for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.unflatten(-2, (-1, chunk)) for x in (q, k, v, g, beta))
    if state is None:
        state = v.new_zeros(*v.shape[:-3], v.shape[-1], k.shape[-1])
    state, outputs = state.to(dtype), []
    terms = chunk_terms(q, k, g, beta[..., 0], scale)
    grown = decay(terms.g_cum)
    steps = (q * grown, k * grown, k * decay(terms.g_tail), grown[..., -1:, :], v, beta, terms.Aqk, terms.inverse)
    for read, known, keep, total, target, strength, Aqk, inverse in zip(*(x.unbind(-3) for x in steps)):
        flat = state.transpose(-1, -2)
        R = inverse @ (strength * (target - known @ flat))
        outputs.append(scale * (read @ flat) + Aqk @ R)
        state = state * total + R.transpose(-1, -2) @ keep
    o = torch.cat(outputs, -2)[..., :T, :] if outputs else torch.zeros_like(v).flatten(-3, -2)
    return o, state, terms
