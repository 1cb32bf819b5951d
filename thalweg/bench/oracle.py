"""What each public op should give, computed sequence by sequence from the formulas of the references.

`expected(op, args, TRUTH)` is the definition in float64, token by token; `expected(op, args, TWIN)` is the honest
low-precision computation of the same thing that `accuracy` derives its tolerance from: chunked, products on operands
of the activations' dtype, float32 sums, results in the dtype the op stores. Both return what the op writes: "out" and
every mutated argument, by name. Padding, slots and pages are read here on the host, independently of the op's code.
At full size the truth of `kda_prefill` is the chunk form in float64 (past LONG tokens), and of ops over thousands of
independent rows some rows are enough: `sampled_rows` names them, `taken` gives the arguments of a call on just those.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from thalweg.kda import reference as kda
from thalweg.qsa import reference as qsa

TRUTH, TWIN = torch.float64, torch.float32
Args = dict[str, Any]
Tensors = dict[str, torch.Tensor]
LONG = 2048  # tokens of a call
SAMPLED = 64  # rows
BY_ROW = {  # ops whose rows know nothing of each other, and their arguments with one entry a row
    "qsa_score": ("index_q", "row_request", "visible"),
    "qsa_topk": ("scores", "visible"),
    "qsa_select": ("index_q", "row_request", "visible"),
    "qsa_attend": ("q", "row_request", "positions", "block_ids", "out_gate"),
}


def expected(op: str, args: Args, dtype: torch.dtype) -> Tensors:
    """The outputs of `op` for keyword arguments `args` (which are not changed), in `dtype`: TRUTH or TWIN."""
    return EXPECTED[op](args, dtype)


def sampled_rows(op: str, args: Args) -> torch.Tensor | None:
    """Numbers of SAMPLED rows spread over a call, the first and the last among them; None: all are to be checked."""
    if op not in BY_ROW:
        return None
    first = args[BY_ROW[op][0]]
    if len(first) <= SAMPLED:
        return None
    return torch.linspace(0, len(first) - 1, SAMPLED, device=first.device, dtype=torch.float64).round().long()


def taken(op: str, args: Args, rows: torch.Tensor | None) -> Args:
    """The arguments of a call on these rows alone; rows as `sampled_rows` gives them."""
    if rows is None:
        return args
    return args | {name: args[name][rows] for name in BY_ROW[op] if args.get(name) is not None}


def _result(values: torch.Tensor, like: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """A computed output as it is compared: the truth stays wide, the twin is rounded to what the op stores."""
    return values if dtype == TRUTH else values.to(like)


def _pool(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return pool.to(TRUTH) if dtype == TRUTH else pool.clone()


def _cast(dtype: torch.dtype, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(dtype) for t in tensors]


def _live(slot: int, pool: torch.Tensor, null: int | None) -> bool:
    return 0 <= slot < pool.shape[0] and slot != null


def _rows(args: Args, pool: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, slot to read or -1 for zeros, slot to write) of the rows that are not padding."""
    null, reads = args.get("null_slot"), args["read_slots"].tolist()
    writes = reads if args.get("write_slots") is None else args["write_slots"].tolist()
    fresh = [False] * len(reads) if args.get("fresh") is None else args["fresh"].tolist()
    rows = [(i, -1 if new else r, w) for i, (r, w, new) in enumerate(zip(reads, writes, fresh))]
    return [(i, r, w) for i, r, w in rows if _live(w, pool, null) and (r == -1 and fresh[i] or _live(r, pool, null))]


def solve_unit_lower(args: Args, dtype: torch.dtype) -> Tensors:
    lower, like = args["lower"], args.get("out_dtype") or args["lower"].dtype
    B, T, H, C = lower.shape
    cu = args.get("cu_seqlens")
    spans = [(0, T)] if cu is None else list(zip(cu.tolist(), cu.tolist()[1:]))
    out = torch.zeros(lower.shape, dtype=dtype, device=lower.device)
    for start, end in spans:
        for at in range(start, end, C):
            n = min(C, end - at)
            block = lower[:, at : at + n, :, :n].transpose(1, 2).to(dtype)
            out[:, at : at + n, :, :n] = kda.unit_lower_inverse(block).transpose(1, 2)
    return {"out": _result(out, like, dtype)}


def kda_conv(args: Args, dtype: torch.dtype) -> Tensors:
    x, cu, pool = args["x"], args["cu_seqlens"].tolist(), _pool(args["conv_state"], dtype)
    out = torch.zeros(x.shape, dtype=dtype, device=x.device)
    weight, bias = _cast(dtype, args["weight"], args.get("bias"))
    for i, read, write in _rows(args, pool):
        if cu[i] == cu[i + 1]:
            continue
        history = None if read < 0 else args["conv_state"][read].to(dtype)
        span = slice(cu[i], cu[i + 1])
        out[span], pool[write] = kda.short_conv(x[span].to(dtype), weight, bias, history)
    return {"out": _result(out, x.dtype, dtype), "conv_state": pool}


def _gate(args: Args, dtype: torch.dtype, span: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log decay `[.., HV, K]` and beta `[.., HV]` of some tokens."""
    g_raw, beta, A_log, dt_bias = _cast(
        dtype, args["g_raw"][span], args["beta_logits"][span], args.get("A_log"), args.get("dt_bias")
    )
    g = kda.log_decay(g_raw, args.get("gate", "bounded"), A_log, dt_bias, args.get("lower_bound", -5.0))
    return g, kda.write_strength(beta, args.get("allow_neg_eigval", False))


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, S: torch.Tensor,
    scale: float, low: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The chunk form on at most 64 tokens `[HV, C, ..]`, each product's operands rounded by `low`."""
    count = q.shape[-2]
    q, k, v, g, beta = (F.pad(x, (*(0, 0) * (x.dim() - 2), 0, 64 - count)).contiguous() for x in (q, k, v, g, beta))
    terms = kda.chunk_terms(low(q), low(k), g, beta, scale)
    grown, last = terms.g_cum.exp(), terms.g_cum[..., -1:, :]
    flat = low(S.transpose(-1, -2))
    target = beta[..., None] * v - low(beta[..., None] * k * grown) @ flat
    R = low(low(terms.inverse) @ low(target))
    o = low(scale * q * grown) @ flat + low(terms.Aqk) @ R
    return o[:, :count], S * last.exp() + R.transpose(-1, -2) @ low(k * (last - terms.g_cum).exp())


def kda_prefill(args: Args, dtype: torch.dtype) -> Tensors:
    q, k, v, cu, pool = args["q"], args["k"], args["v"], args["cu_seqlens"].tolist(), _pool(args["state"], dtype)
    out = torch.zeros(v.shape, dtype=dtype, device=v.device)
    group, scale = v.shape[1] // q.shape[1], args.get("scale") or q.shape[-1] ** -0.5
    norm = kda.l2norm if args.get("qk_l2norm", True) else lambda x: x
    every, marks = args.get("checkpoint_every", 0), args.get("checkpoint_slots")
    for i, read, write in _rows(args, pool):
        S = torch.zeros_like(pool[0], dtype=dtype) if read < 0 else args["state"][read].to(dtype)
        for at in range(cu[i], cu[i + 1], 64):
            span = slice(at, min(at + 64, cu[i + 1]))
            heads = [norm(x[span].to(dtype)).repeat_interleave(group, 1).transpose(0, 1) for x in (q, k)]
            values, (g, beta) = v[span].to(dtype).transpose(0, 1), _gate(args, dtype, span)
            tokens = (*heads, values, g.transpose(0, 1), beta.T)
            if dtype == TRUTH:
                exact = kda.recurrence if len(q) <= LONG else kda.chunked
                o, S = exact(*(x.contiguous() for x in tokens), S, scale)[:2]
            else:
                o, S = _chunk(*tokens, S, scale, lambda x: x.to(v.dtype).to(dtype))
            out[span] = o.transpose(0, 1)
            done = span.stop - cu[i]
            if every and done % every == 0 and done // every <= marks.shape[1]:
                slot = int(marks[i, done // every - 1])
                if _live(slot, pool, args.get("null_slot")):
                    pool[slot] = S
        if cu[i] < cu[i + 1]:
            pool[write] = S
    return {"out": _result(out, v.dtype, dtype), "state": pool}


def _token(args: Args, dtype: torch.dtype, at: Any, history: torch.Tensor, S: torch.Tensor) -> tuple:
    """One token of one row through conv, norms, gate and recurrence: o `[HV, V]`, history, state."""
    HV, V, K = S.shape
    qkv, weight, bias = _cast(dtype, args["qkv"][at], args["conv_weight"], args.get("conv_bias"))
    y, history = kda.short_conv(qkv[None], weight, bias, history)
    keys = (y.shape[1] - HV * V) // 2
    q, k = (kda.l2norm(y[0, lo : lo + keys].view(-1, K)) for lo in (0, keys))
    q, k = (x.repeat_interleave(HV // x.shape[0], 0) for x in (q, k))
    g, beta = _gate(args, dtype, at)
    o, S = kda.step(q, k, y[0, 2 * keys :].view(HV, V), g, beta, S, args.get("scale") or K**-0.5)
    return o, history, S.to(args["state"].dtype).to(dtype) if S.dtype != TRUTH else S


def _normed(args: Args, dtype: torch.dtype, o: torch.Tensor, at: Any) -> torch.Tensor:
    gate, weight = _cast(dtype, args["out_gate"][at], args["norm_weight"])
    return kda.gated_norm(o, gate, weight, args["norm_eps"])


def _start(args: Args, dtype: torch.dtype, slot: int) -> list[torch.Tensor]:
    return _cast(dtype, args["conv_state"][slot], args["state"][slot])


def kda_decode(args: Args, dtype: torch.dtype) -> Tensors:
    history, state = _pool(args["conv_state"], dtype), _pool(args["state"], dtype)
    out = torch.zeros(args["out_gate"].shape, dtype=dtype, device=state.device)
    for b, read, write in _rows(args, state):
        o, history[write], state[write] = _token(args, dtype, b, *_start(args, dtype, read))
        out[b] = _normed(args, dtype, o, b)
    return {"out": _result(out, args["qkv"].dtype, dtype), "conv_state": history, "state": state}


def kda_verify(args: Args, dtype: torch.dtype) -> Tensors:
    out = torch.zeros(args["out_gate"].shape, dtype=dtype, device=args["state"].device)
    for b, read, _ in _rows(args, args["state"]):
        history, S = _start(args, dtype, read)
        for s in range(out.shape[1]):
            o, history, S = _token(args, dtype, (b, s), history, S)
            out[b, s] = _normed(args, dtype, o, (b, s))
    pools = {name: _pool(args[name], dtype) for name in ("conv_state", "state")}
    return {"out": _result(out, args["qkv"].dtype, dtype)} | pools


def kda_commit(args: Args, dtype: torch.dtype) -> Tensors:
    history, state = _pool(args["conv_state"], dtype), _pool(args["state"], dtype)
    accepted = args["accepted"].clamp(0, args["qkv"].shape[1]).tolist()
    for b, read, write in _rows(args, state):
        if not accepted[b]:
            continue
        tail, S = _start(args, dtype, read)
        for s in range(accepted[b]):
            _, tail, S = _token(args, dtype, (b, s), tail, S)
        history[write], state[write] = tail, S
    return {"conv_state": history, "state": state}


def gated_rms_norm(args: Args, dtype: torch.dtype) -> Tensors:
    o, gate, weight = _cast(dtype, args["o"], args["gate"], args["weight"])
    return {"out": _result(kda.gated_norm(o, gate, weight, args["eps"]), args["gate"].dtype, dtype)}


def _gathered(pages: torch.Tensor, table: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `entries` of one request's paged tensor, and whether each lies on a page that exists."""
    page, row = entries // pages.shape[1], entries % pages.shape[1]
    inside = (entries >= 0) & (page < table.shape[0])
    page = table[page.clamp(0, table.shape[0] - 1)].long()
    held = inside & (page >= 0) & (page < pages.shape[0])
    values = pages[page.clamp(0, pages.shape[0] - 1), row]
    if values.dtype == torch.float8_e4m3fn:  # few operations take it
        values = values.float()
    return values.masked_fill(~held.view(-1, *(1,) * (values.dim() - 1)), 0.0), held


def qsa_append(args: Args, dtype: torch.dtype) -> Tensors:
    """Row after row as far as indices go: which row an entry of the ring holds; then all rows and groups at once."""
    keys, ring, ratio, eps = args["block_keys"], args["raw_ring"].clone(), args.get("ratio", 4), args.get("eps", 1e-6)
    Di, weights, device = keys.shape[2], (args["q_norm_weight"], args["k_norm_weight"]), keys.device
    low = TRUTH if dtype == TRUTH else keys.dtype  # the truth is not rounded between the steps
    raw = args["index_qk"].unflatten(1, (-1, Di))
    axes, old_at = args.get("rope_positions"), args.get("ring_positions")
    at = args["positions"][:, None].expand(-1, 3) if axes is None else axes
    old_at = None if old_at is None else old_at.clone()
    pages, page_rows = args["page_table"].tolist(), keys.shape[1]
    live, held, groups = [], {}, []
    for row, (p, request) in enumerate(zip(args["positions"].tolist(), args["row_request"].tolist())):
        if p < 0 or not 0 <= request < ring.shape[0]:
            continue
        live.append(row)
        held[request, p % ring.shape[1]] = row
        page, entry = divmod(p // ratio, page_rows)
        page = pages[request][page] if page < len(pages[request]) else -1
        if p % ratio == ratio - 1 and 0 <= page < keys.shape[0]:
            entries = [m % ring.shape[1] for m in range(p - ratio + 1, p + 1)]
            groups.append((page, entry, p - ratio + 1, request, entries, [held.get((request, e), -1) for e in entries]))
    pool, out = _pool(keys, dtype), torch.zeros(raw.shape[0], raw.shape[1] - 1, Di, dtype=low, device=device)
    table, (wq, wk) = args["rope_table"].to(dtype), _cast(dtype, *weights)
    out[live] = qsa.index_query(raw[live, :-1].to(dtype), wq, qsa.rope_rows(table, at[live]), low, eps)
    if groups:
        page, entry, first, request, entries, rows = (torch.tensor(part, device=device) for part in zip(*groups))
        new = rows >= 0
        old = ring[request[:, None], entries]
        members = torch.where(new[..., None], raw[rows.clamp(min=0), -1].to(ring.dtype), old)
        first = first[:, None].expand(-1, 3)
        if old_at is not None:
            first = torch.where(new[:, :1], axes[rows[:, 0].clamp(min=0)], old_at[request, entries[:, 0]])
        pool[page, entry] = qsa.block_key(members.to(dtype), wk, qsa.rope_rows(table, first), low, eps)
    for (request, entry), row in held.items():
        ring[request, entry] = raw[row, -1]
        if old_at is not None:
            old_at[request, entry] = axes[row]
    result = {"out": _result(out, keys.dtype, dtype), "raw_ring": ring, "block_keys": pool}
    return result if old_at is None else result | {"ring_positions": old_at}


def _summed(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores with float32 dots summed one product after another. A library's product sums in many short pieces, which
    errs half as much: an accident of its blocking, not what float32 sums can be held to."""
    dots = q.new_zeros(q.shape[0], keys.shape[0])
    for lane, of_keys in enumerate(keys.to(q.dtype).T.contiguous()):
        dots += q[:, lane, None] * of_keys
    total = torch.zeros_like(dots[0])
    for head in dots.relu_():
        total += head
    return total


def qsa_score(args: Args, dtype: torch.dtype) -> Tensors:
    q, N = args["index_q"].to(dtype), args["num_blocks"]
    out = torch.full((q.shape[0], N), -torch.inf, dtype=dtype, device=q.device)
    for row, (request, seen) in enumerate(zip(args["row_request"].tolist(), args["visible"].clamp(0, N).tolist())):
        if seen and 0 <= request < args["page_table"].shape[0]:
            blocks = torch.arange(seen, device=q.device)
            keys, held = _gathered(args["block_keys"], args["page_table"][request], blocks)
            part = qsa.score(q[row][None], keys.to(dtype), dtype)[0] if dtype == TRUTH else _summed(q[row], keys)
            out[row, :seen] = part.masked_fill(~held, -torch.inf)
    return {"out": out}


def qsa_topk(args: Args, dtype: torch.dtype) -> Tensors:
    return {"out": qsa.topk_blocks(args["scores"], args["visible"], args["k"])}


def qsa_select(args: Args, dtype: torch.dtype) -> Tensors:
    """The scores, from which `check` judges a selection: implementations round them differently."""
    capacity = args["page_table"].shape[1] * args["block_keys"].shape[1]
    scores = qsa_score(args | {"num_blocks": capacity}, dtype)["out"]
    bad = (args["row_request"] < 0) | (args["row_request"] >= args["page_table"].shape[0])
    return {"scores": scores, "visible": args["visible"].masked_fill(bad, 0)}


def qsa_attend(args: Args, dtype: torch.dtype) -> Tensors:
    q, table, ratio = args["q"], args["page_table"], args.get("ratio", 4)
    scale, gate = args.get("scale") or q.shape[-1] ** -0.5, args.get("out_gate")
    out, positions = torch.zeros(q.shape, dtype=dtype, device=q.device), args["positions"]
    blocks = args["block_ids"].long()
    blocks = blocks.masked_fill(blocks >= qsa.visible_blocks(positions, ratio)[:, None], -1)
    tokens = qsa.expand_blocks(blocks, positions, ratio)
    for row, request in enumerate(args["row_request"].tolist()):
        if positions[row] < 0 or not 0 <= request < table.shape[0]:
            continue
        (k, held), (v, _) = (_gathered(args[c], table[request], tokens[row]) for c in ("k_cache", "v_cache"))
        k, v = k.to(dtype) * (args.get("k_scale") or 1.0), v.to(dtype) * (args.get("v_scale") or 1.0)
        used = torch.arange(len(held), device=q.device).masked_fill(~held, -1)
        out[row] = qsa.attend(q[row][None].to(dtype), k, v, used[None], scale)[0]
    if gate is not None:
        out = out * torch.sigmoid(gate.to(dtype))
    return {"out": _result(out, q.dtype, dtype)}


EXPECTED: dict[str, Callable[[Args, torch.dtype], Tensors]] = {
    function.__name__: function
    for function in (
        solve_unit_lower, kda_conv, kda_prefill, kda_decode, kda_verify, kda_commit, gated_rms_norm, qsa_append,
        qsa_score, qsa_topk, qsa_select, qsa_attend,
    )
}  # fmt: skip
