"""KDA spelled out token by token in float64, sharing no code with the package: what its tests expect.

Tokens first, as the ops take them: q, k `[T, H, K]`, v `[T, HV, V]`, g (log decay) `[T, HV, K]`, beta `[T, HV]`. A
state is `[HV, V, K]` outside and `[K, V]` per head inside, where the formulas are those of a textbook delta rule.
"""

import torch


def unit(x):
    return x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()


def log_decay(g_raw, gate, A_log=None, dt_bias=None, lower_bound=-5.0):
    x = g_raw.double()
    if gate == "given":
        return x
    x = x if dt_bias is None else x + dt_bias.double()
    rate = 1.0 if A_log is None else A_log.double().exp()[:, None]
    if gate == "soft":
        return -rate * torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
    return lower_bound / (1 + torch.exp(-rate * x))


def strength(logits, doubled=False):
    return (2.0 if doubled else 1.0) / (1 + torch.exp(-logits.double()))


def delta_rule(q, k, v, g, beta, state, scale):
    """Returns o `[T, HV, V]` and the state after the last token."""
    group = v.shape[1] // q.shape[1]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    outputs = torch.zeros(v.shape, dtype=torch.float64)
    after = torch.zeros(state.shape, dtype=torch.float64)
    for head in range(v.shape[1]):
        S = state[head].double().t().clone()
        for t in range(v.shape[0]):
            key, query = k[t, head // group], q[t, head // group]
            S = torch.diag(g[t, head].exp()) @ S
            S = S + beta[t, head] * torch.outer(key, v[t, head] - S.t() @ key)
            outputs[t, head] = scale * (S.t() @ query)
        after[head] = S.t()
    return outputs, after


def conv(x, weight, bias, history):
    """x `[T, C]`, history `[C, W-1]` oldest first. Returns silu(conv) `[T, C]` and the history after."""
    W = weight.shape[1]
    seen = torch.cat([history.double().t(), x.double()])
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for tap in range(W):
            y[t] += weight[:, tap].double() * seen[t + tap]
        if bias is not None:
            y[t] += bias.double()
    return y / (1 + torch.exp(-y)), seen[x.shape[0] :].t()


def gated_norm(o, gate, weight, eps):
    o = o.double()
    return o / (o.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double() / (1 + torch.exp(-gate.double()))


def layer(tokens, weights, history, state):
    """The decode step repeated: what kda_decode does to a row, for T tokens of it. Returns out, history, state.

    tokens: qkv `[T, C]`, g_raw, beta_logits, out_gate. weights: the keyword arguments of kda_decode and conv_weight.
    """
    HV, V, K = state.shape
    y, history = conv(tokens["qkv"], weights["conv_weight"], weights.get("conv_bias"), history)
    T, width = y.shape[0], (y.shape[1] - HV * V) // 2
    q, k, v = y[:, :width], y[:, width : 2 * width], y[:, 2 * width :]
    names = ("A_log", "dt_bias", "lower_bound")
    g = log_decay(tokens["g_raw"], weights["gate"], **{n: weights[n] for n in names if n in weights})
    beta = strength(tokens["beta_logits"], weights.get("allow_neg_eigval", False))
    q, k = unit(q.reshape(T, -1, K)), unit(k.reshape(T, -1, K))
    o, state = delta_rule(q, k, v.reshape(T, HV, V), g, beta, state, weights.get("scale", K**-0.5))
    return gated_norm(o, tokens["out_gate"], weights["norm_weight"], weights["norm_eps"]), history, state


def inverse(block):
    """(I + strict_lower(block))^-1 of one `[n, n]` block by forward substitution, a row a time."""
    n = block.shape[0]
    result = torch.eye(n, dtype=torch.float64)
    for row in range(n):
        for col in range(row):
            result[row] -= block[row, col].double() * result[col]
    return result


def error(got, wanted):
    """Relative L2; inf where got is not finite."""
    got, wanted = got.double(), wanted.double()
    if not got.isfinite().all():
        return float("inf")
    return ((got - wanted).norm() / wanted.norm().clamp(min=1e-300)).item() if wanted.numel() else 0.0


def rounding(wanted, dtype):
    """Twice the error of rounding the truth once to dtype: what an op that rounds once on store may have, and 1e-5 for
    the float32 arithmetic before it."""
    return 2 * error(wanted.to(dtype), wanted) + 1e-5
