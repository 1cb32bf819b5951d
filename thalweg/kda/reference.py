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
TILE = 16  # rows that share one exponent anchor
EPS = 1e-6


def wide(*tensors: torch.Tensor | None) -> torch.dtype:
    """The dtype a reference computes in: float64 if any input is float64, else float32."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


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
    y = sum(weight[:, i].to(dtype) * padded[..., i : i + T, :].to(dtype) for i in range(W))
    if bias is not None:
        y = y + bias.to(dtype)
    return F.silu(y), padded[..., T:, :].transpose(-1, -2)


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Inverse of I + strict_lower(lower) for `[..., C, C]`; the diagonal and the upper part are not read."""
    strict = lower.to(wide(lower)).tril(-1)
    eye = torch.eye(lower.shape[-1], dtype=strict.dtype, device=strict.device)
    return torch.linalg.solve_triangular(strict + eye, eye.expand_as(strict), upper=False, unitriangular=True)


def step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token: decay, delta write, read. q, k, g `[..., K]`, v `[..., V]`, beta `[...]`, state `[..., V, K]`."""
    state = state * g.exp()[..., None, :]
    delta = beta[..., None] * (v - (state * k[..., None, :]).sum(-1))
    state = state + delta[..., :, None] * k[..., None, :]
    return scale * (state * q[..., None, :]).sum(-1), state


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor | None, scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, token by token: q, k, g `[..., T, K]`, v `[..., T, V]`, beta `[..., T]` -> o `[..., T, V]`, state."""
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

    g_cum `[.., C, K]`: gate cumulated inside the chunk. Aqk `[.., C, C]`: scale q_i . k_j exp(G_i - G_j), i >= j.
    Akk `[.., C, C]`: beta_i k_i . k_j exp(G_i - G_j), i > j. inverse `[.., C, C]`: (I + Akk)^-1.
    """

    g_cum: torch.Tensor
    Aqk: torch.Tensor
    Akk: torch.Tensor
    inverse: torch.Tensor


def decayed_scores(q: torch.Tensor, k: torch.Tensor, g_cum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_c x_ic k_jc exp(G_ic - G_jc) for i >= j, x = q and x = k: two `[..., C, C]`, zero above the diagonal.

    Every exponent is at most 0 for g <= 0: rows of a 16-row tile meet earlier columns through an anchor at the tile's
    first row, and the tile's own columns by direct differences. No gate, however strong, overflows or brings a
    forgotten key back.
    """
    C = q.shape[-2]
    rows = []
    for lo in range(0, C, TILE):
        hi = min(lo + TILE, C)
        G, anchor = g_cum[..., lo:hi, :], g_cum[..., lo : lo + 1, :]
        both = torch.stack([q[..., lo:hi, :], k[..., lo:hi, :]], -3)
        early = k[..., :lo, :] * (anchor - g_cum[..., :lo, :]).exp()
        left = (both * (G - anchor).exp()[..., None, :, :]) @ early[..., None, :, :].transpose(-1, -2)
        later = torch.ones(hi - lo, hi - lo, dtype=torch.bool, device=q.device).triu(1)[..., None]
        decay = (G[..., :, None, :] - G[..., None, :, :]).masked_fill(later, -torch.inf).exp()
        own = (decay * k[..., None, lo:hi, :]) @ both.movedim(-3, -1)  # [.., 16, 16, 2]
        row = torch.cat([left, own.movedim(-1, -3)], -1)
        rows.append(F.pad(row, (0, C - hi)))
    return torch.cat(rows, -2).unbind(-3)


def chunk_terms(
    q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, scale: float
) -> Terms:
    """Intermediates of whole chunks: q, k, g `[..., C, K]`, beta `[..., C]`."""
    g_cum = g.cumsum(-2)
    Aqk, Akk = decayed_scores(q, k, g_cum)
    Akk = (beta[..., :, None] * Akk).tril(-1)
    return Terms(g_cum, scale * Aqk, Akk, unit_lower_inverse(Akk))


def chunked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    state: torch.Tensor | None, scale: float, chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor, Terms]:
    """The chunk form of `recurrence`, same arguments; returns o, the state after the last token, and the terms.

    Per chunk: R = inverse (beta v - beta (k exp G) S); o = scale (q exp G) S + Aqk R; S <- S exp(G_C) +
    (k exp(G_C - G))^T R. The last chunk is filled up with k = v = beta = g = 0, which changes nothing.
    """
    dtype, T = wide(q, k, v, g, beta, state), q.shape[-2]
    fill = -T % chunk
    q, k, v, g = (F.pad(x.to(dtype), (0, 0, 0, fill)).unflatten(-2, (-1, chunk)) for x in (q, k, v, g))
    beta = F.pad(beta.to(dtype), (0, fill)).unflatten(-1, (-1, chunk))
    if state is None:
        state = v.new_zeros(*v.shape[:-3], v.shape[-1], k.shape[-1])
    state, outputs = state.to(dtype), []
    terms = chunk_terms(q, k, g, beta, scale)
    grown, last = terms.g_cum.exp(), terms.g_cum[..., -1:, :]
    read, write, keep = scale * q * grown, beta[..., None] * k * grown, k * (last - terms.g_cum).exp()
    target, total = beta[..., None] * v, last.exp()
    for n in range(q.shape[-3]):
        flat = state.transpose(-1, -2)
        R = terms.inverse[..., n, :, :] @ (target[..., n, :, :] - write[..., n, :, :] @ flat)
        outputs.append(read[..., n, :, :] @ flat + terms.Aqk[..., n, :, :] @ R)
        state = state * total[..., n, :, :] + R.transpose(-1, -2) @ keep[..., n, :, :]
    o = torch.cat(outputs, -2)[..., :T, :] if outputs else torch.zeros_like(v).flatten(-3, -2)
    return o, state, terms
