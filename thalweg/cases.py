"""Named shapes of real models: seeded inputs of the public ops, their FLOPs and the bytes that must move.

Tests, benchmarks and `thalweg explain` share this list. A case makes the keyword arguments of one public op, on any
device; on the meta device nothing is allocated. The same case, seed and kind of device give the same values.

Ids: `solve-<tokens>x<heads>`, `conv-<tokens>-h<heads>` (or `-<sequences>x<tokens>-`), `norm-<tokens>-h<heads>`,
`prefill-<sequences>x<tokens>-h<heads>` (`-fast`: gates that forget within a chunk),
`decode-h<heads>-b<rows>` (`-bf16state`), `verify-` and `commit-h<heads>-b<rows>-s<drafts>`,
`append- score- topk- select-` and `attend-` with `p<context>` (one request, the last 4096 rows of a context in units of
1024 tokens), `mix` (16 requests x 512 rows, contexts 8K to 68K), `d<rows>` (one row a request at 128K; `-s2`, `-s3`: so
many new ones); attention picks blocks at random (`rnd`) or with 90 % shared by a request's rows (`ovl`). Pages hold 64
tokens or block keys; `-784` has pages of 784 tokens, 196 block keys. `check-*`: small ones for every op, with padding,
odd strides and NaN wherever nothing may be read; they are not for timing.
"""

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from thalweg import inputs
from thalweg.inputs import BF16, BUDGET, F32, RATIO, Rows, Source

CHUNK = 64
NAN = torch.nan


@dataclass(frozen=True)
class Case:
    """make(device, seed) -> keyword arguments of the public op `op`, in memory nothing else refers to.

    flops: of the usual form of the algorithm. bytes: each input read once where it is needed, each output written
    once. Both are 0 for cases that are not for timing.
    """

    id: str
    op: str
    note: str
    build: Callable[..., dict[str, Any]]
    flops: float = 0.0
    bytes: float = 0.0

    def make(self, device: object = "cpu", seed: int = 0) -> dict[str, Any]:
        return self.build(Source(device, seed))


# KDA


def _solve(id: str, note: str, lengths: list[int], heads: int) -> Case:
    matrices, C, B = sum(lengths) // CHUNK * heads, CHUNK, CHUNK // 16
    read = C * C * 4 * (B + 1) / (2 * B)  # the lower 16 x 16 blocks only
    return Case(
        id, "solve_unit_lower", note, lambda s: inputs.solve(s, lengths, heads), matrices * C**3 / 3,
        matrices * (read + C * C * 2),
    )  # fmt: skip


def _prefill(id: str, note: str, lengths: list[int], H: int, gates: str = "slow") -> Case:
    T, N, K, V = sum(lengths), len(lengths), 128, 128
    # A chunk: Aqk, Akk, w = T beta Kp over K; u = T beta v, A R over V; three products with the state; the inverse.
    flops = T * H * (6 * K * V + 2 * CHUNK * (3 * K + 2 * V) + CHUNK**2 / 3)
    moved = T * H * 2 * (3 * K + 2 * V + 1) + 2 * N * H * V * K * 4 + H * 4 * (K + 1)
    if gates == "equal":
        return Case(id, "kda_prefill", note, lambda s: inputs.equal_keys(s, T, H), flops, moved)
    return Case(id, "kda_prefill", note, lambda s: inputs.prefill(s, lengths, H, gates), flops, moved)


def _conv(id: str, note: str, lengths: list[int], C: int) -> Case:
    T, N, W = sum(lengths), len(lengths), 4
    moved = 2 * C * (2 * T + 2 * N * (W - 1)) + 4 * C * W
    return Case(id, "kda_conv", note, lambda s: inputs.conv(s, lengths, C, W), T * C * (2 * W + 4), moved)


def _norm(id: str, note: str, T: int, H: int) -> Case:
    V = 128
    moved = T * H * V * (4 + 2 + 2) + 4 * V
    return Case(id, "gated_rms_norm", note, lambda s: inputs.norm(s, T, H, V), 8.0 * T * H * V, moved)


def _decode(id: str, note: str, H: int, B: int, state_dtype: torch.dtype) -> Case:
    K = V = 128
    width = 2 * K + V
    row = 2 * V * K * state_dtype.itemsize + 2 * (width + K + 1 + 2 * V + 2 * 3 * width)
    moved = B * (H * row + 4) + H * 4 * (4 * width + K + 1) + 4 * V
    flops = B * H * (7 * V * K + 8 * width)
    return Case(id, "kda_decode", note, lambda s: inputs.token(s, [B], H, state_dtype=state_dtype), flops, moved)


def _drafts(op: str, note: str, H: int, B: int, S: int) -> Case:
    """kda_verify reads each state once, kda_commit (all S tokens accepted) reads and writes it."""
    K = V = 128
    width, commit = 2 * K + V, op == "commit"
    tokens = 2 * (width + K + 1) + (0 if commit else 2 * 2 * V)
    pools = (4 * V * K + 2 * 3 * width) * (2 if commit else 1)
    weights = H * 4 * (4 * width + K + 1) + (0 if commit else 4 * V)
    moved = B * (H * (pools + S * tokens) + (8 if commit else 4)) + weights
    flops = B * S * H * (7 * V * K + 8 * width)
    build = lambda s: inputs.commit(s, [S] * B, S, H) if commit else inputs.token(s, [B, S], H)  # noqa: E731
    return Case(f"{op}-h{H}-b{B}-s{S}", f"kda_{op}", note, build, flops, moved)


def _kda_cases() -> list[Case]:
    cases = [
        _solve("solve-8192x64", "16 x 512 tokens, 64 heads, float32 to bfloat16", [512] * 16, 64),
        _solve("solve-64x64", "one chunk, 64 heads, float32 to bfloat16", [64], 64),
    ]
    cases += [
        _conv("conv-8192-h64", "GLM-5.3-Flash, one prompt, q | k | v of 64 heads", [8192], 3 * 64 * 128),
        _conv("conv-16x512-h64", "the same in 16 sequences", [512] * 16, 3 * 64 * 128),
        _norm("norm-8192-h64", "GLM-5.3-Flash, float32 in, bfloat16 gate and out", 8192, 64),
    ]
    shapes = [
        ("prefill-1x8192-h64", "GLM-5.3-Flash, one prompt", [8192], 64),
        ("prefill-16x512-h64", "GLM-5.3-Flash, 16 short prompts", [512] * 16, 64),
        ("prefill-1x32768-h32", "Kimi-Linear-48B, one long prompt", [32768], 32),
        ("prefill-8x2048-h16", "GLM-5.3-Flash at TP 4, 8 prompts", [2048] * 8, 16),
    ]
    cases += [_prefill(id, f"{note}, slow gates", lengths, H) for id, note, lengths, H in shapes]
    cases += [_prefill(f"{id}-fast", f"{note}, fast gates", lengths, H, "fast") for id, note, lengths, H in shapes]
    cases.append(_prefill("prefill-equal-keys", "512 tokens with one key a head, 16 heads", [512], 16, "equal"))
    for op, S in itertools.product(("verify", "commit"), (4, 8)):
        cases.append(_drafts(op, f"Kimi K3 at TP 8, 32 rows of {S} drafts", 12, 32, S))
    models = {12: "Kimi K3 at TP 8", 24: "Kimi K3 at TP 4", 32: "Kimi-Linear-48B", 48: "Kimi K3 at TP 2"}
    models |= {64: "GLM-5.3-Flash", 96: "Kimi K3"}
    for state_dtype, suffix in ((F32, ""), (BF16, "-bf16state")):
        for H, model in models.items():
            for B in (1, 2, 4, 8, 16, 32, 64, 128):
                note = f"{model}, {B} rows, {'bfloat16' if suffix else 'float32'} state"
                cases.append(_decode(f"decode-h{H}-b{B}{suffix}", note, H, B, state_dtype))
    return cases


# QSA: index heads of 128, 24 query heads over 2 KV heads of 256 (Qwen3.8-Flash-Next)


def _index(ending: str, note: str, r: Rows) -> list[Case]:
    """score, topk and select. Scores past a row's visible blocks are not counted, although `qsa_score` writes them."""
    R, width = len(r.contexts) * r.rows, 4 * 128
    flops, read, ids = 2.0 * r.visible * width, sum(r.blocks) * 128 * 2 + R * width * 2, R * BUDGET * 4
    matrix = r.visible * 4
    return [
        Case(f"score-{ending}", "qsa_score", note, lambda s: inputs.score(s, r), flops, read + matrix),
        Case(f"topk-{ending}", "qsa_topk", note, lambda s: inputs.topk(s, r), 0.0, matrix + ids),
        Case(f"select-{ending}", "qsa_select", note, lambda s: inputs.index(s, r) | {"k": BUDGET}, flops, read + ids),
    ]


def _append(ending: str, note: str, r: Rows, ring: int = 8) -> Case:
    """The ring's old keys are read where a group that they began is completed, angles once a position."""
    R, width, complete, old = len(r.contexts) * r.rows, 4 * 128, 0, 0
    for context in r.contexts:
        began = (context - r.rows) % RATIO
        complete += (began + r.rows) // RATIO
        old += began if began + r.rows >= RATIO else 0
    angles = len({p for c in r.contexts for p in range(c - r.rows, c)})
    keys = R + old + min(r.rows, ring) * len(r.contexts) + complete  # raw in, old ones, into the ring, block keys
    moved = 2 * (2 * R * width + 128 * (keys + 2)) + 4 * (64 * angles + 2 * R + complete)
    return Case(f"append-{ending}", "qsa_append", note, lambda s: inputs.append(s, r, ring=ring), 0.0, moved)


def _attend(ending: str, note: str, r: Rows, shared: float) -> Case:
    R, D, heads = len(r.contexts) * r.rows, 256, 24
    tokens = [BUDGET * RATIO + (p + 1) % RATIO for c in r.contexts for p in range(c - r.rows, c)]
    most = r.rows * (BUDGET * RATIO + RATIO - 1)
    distinct = sum(tokens) if r.rows == 1 else sum(min(c, most) for c in r.contexts)
    moved = distinct * 2 * 2 * D * 2 + R * (2 * heads * D * 2 + BUDGET * 4)
    flops = 4.0 * sum(tokens) * heads * D
    return Case(f"attend-{ending}", "qsa_attend", note, lambda s: inputs.attend(s, r, shared), flops, moved)


def _qsa_cases() -> list[Case]:
    cases, unit = [], 1024
    prefill = {f"p{n}k": Rows((n * unit,), 4096) for n in (32, 128, 249)}
    mix = {"mix": Rows(tuple(n * unit for n in range(8, 72, 4)), 512)}
    decode = {f"d{n}": Rows((128 * unit,) * n, 1) for n in (1, 16, 64)}
    odd = {"p128k-784": Rows((128 * unit,), 4096, page=196, kv_page=784)}
    notes = {"p": "one request, last 4096 rows", "m": "16 requests x 512 rows at 8K to 68K", "d": "one row a request"}
    for ending, rows in (prefill | mix | decode | odd).items():
        note = f"{notes[ending[0]]}, pages of {rows.page} block keys"
        cases += _index(ending, note, rows)
        if ending != "p128k-784":
            cases.append(_append(ending, note, rows))
        if ending in ("p32k", "p249k"):
            continue
        note = f"{notes[ending[0]]}, pages of {rows.kv_page} tokens"
        if ending[0] == "d":
            cases.append(_attend(ending, note, rows, 0.0))
            continue
        stem, _, page = ending.partition("-")
        for kind, shared in (("rnd", 0.0), ("ovl", 0.9)):
            if not page or kind == "rnd":
                name = f"{stem}-{kind}" + (f"-{page}" if page else "")
                cases.append(_attend(name, f"{note}, {int(100 * shared)} % shared picks", rows, shared))
    for count, new in itertools.product((1, 16, 64), (2, 3)):
        rows = Rows((128 * unit + 1,) * count, new)  # completes a group that began in an earlier call
        cases.append(_append(f"d{count}-s{new}", f"{new} rows a request, pages of {rows.page} block keys", rows))
    return cases


# Small cases for every op: ragged, padded, strided, NaN where nothing may be read


def _pad(s: Source, tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """`tensor` with `rows` rows of NaN behind, as a view with odd strides of a wider buffer of NaN."""
    width = tensor[0].numel()
    buffer = s.full(NAN, tensor.shape[0] + rows, width + 8, dtype=tensor.dtype)
    buffer[: tensor.shape[0], :width] = tensor.flatten(1)
    return buffer[:, :width].unflatten(1, tensor.shape[1:])


def _padded(s: Source, args: dict, rows: int, names: str) -> dict:
    return args | {name: _pad(s, args[name], rows) for name in names.split()}


def _slots(s: Source, read: list[int], write: list[int] | None, **more: Any) -> dict:
    return {"read_slots": s.ints(read)} | ({} if write is None else {"write_slots": s.ints(write)}) | more


def _small_solve(s: Source) -> dict:
    args = inputs.solve(s, [70, 5, 64], 3)
    lower = args["lower"].masked_fill(args["lower"] == 0, NAN)
    return args | {"lower": _pad(s, lower[0], 3)[None], "cu_seqlens": s.offsets([70, 0, 5, 64])}


def _small_solve_dense(s: Source) -> dict:
    lower = s.normal(2, 40, 3, 16, scale=0.3, dtype=torch.float16)
    row = torch.arange(40, device=s.device) % 16
    unread = torch.arange(16, device=s.device) >= row[:, None, None]
    return {"lower": lower.masked_fill(unread, NAN), "out": s.full(NAN, 2, 40, 3, 16, dtype=torch.float16)}


def _small_solve_keys(s: Source) -> dict:
    """beta K K^T of nearly parallel keys: a series of powers of it blows up before it cancels."""
    k = s.normal(1, 64, dtype=F32) + s.normal(32, 64, scale=1e-3, dtype=F32)
    k = k / k.norm(dim=-1, keepdim=True)
    return {"lower": (0.99 * k @ k.T).tril(-1)[None, :, None, :], "cu_seqlens": s.offsets([32])}


def _small_conv(s: Source) -> dict:
    args = inputs.conv(s, [5, 0, 1, 130, 2], 24, slots=8)
    args["conv_state"][6] = NAN
    args |= {"bias": s.normal(24, dtype=F32), "fresh": s.ints([0, 0, 1, 0, 0], torch.bool), "null_slot": 0}
    return _padded(s, args, 3, "x") | _slots(s, [2, 1, 6, 4, 0], [5, 1, 3, 4, 7])


def _small_prefill(s: Source) -> dict:
    args = inputs.prefill(s, [1, 0, 70, 130, 3], 2, HV=4, K=32, V=48)
    args["state"] = s.normal(8, 4, 48, 32, scale=0.1, dtype=F32)
    args["state"][6] = NAN
    marks = [[-1, -1], [-1, -1], [1, -1], [7, 9], [-1, -1]]
    args |= {"fresh": s.ints([0, 0, 1, 0, 0], torch.bool), "checkpoint_slots": s.ints(marks), "checkpoint_every": 64}
    return _padded(s, args, 3, "q k v g_raw beta_logits") | _slots(s, [2, 3, 6, 4, -1], [5, 3, 0, 4, -1])


def _small_prefill_soft(s: Source) -> dict:
    args = inputs.prefill(s, [65, 17], 2, K=48, V=32, dtype=F32) | {"allow_neg_eigval": True}
    return args | {"gate": "soft", "dt_bias": s.uniform(-2.0, 3.0, 2, 48)}


def _small_prefill_given(s: Source) -> dict:
    """Log decays of -5 and -0.001 on alternate channels, which no single exponent anchor of a 64-token chunk spans."""
    args = inputs.prefill(s, [80], 2, K=64, V=32)
    decay = s.full(-5.0, 80, 2, 64, dtype=F32)
    decay[..., 1::2] = -1e-3
    return args | {"gate": "given", "g_raw": decay, "A_log": None, "dt_bias": None, "scale": 0.25}


def _small_tokens(s: Source, lead: list[int], HV: int = 4, K: int = 32, V: int = 48, **dims: Any) -> dict:
    """Rows 1 and 3 are padding: the null slot, and a slot past the pool."""
    args = inputs.token(s, lead, 2, HV=HV, K=K, V=V, slots=7, **dims)
    for name in ("qkv", "g_raw", "beta_logits", "out_gate"):
        args[name][1] = args[name][3] = NAN
    args["state"][0] = args["conv_state"][0] = NAN
    return _padded(s, args, 0, "qkv g_raw out_gate") | _slots(s, [3, 0, 5, 7, 1], None, null_slot=0)


def _small_decode_soft(s: Source) -> dict:
    args = inputs.token(s, [3], 3, K=64, V=32, dtype=torch.float16) | {"gate": "soft", "allow_neg_eigval": True}
    return args | {"conv_bias": s.normal(3 * 160, dtype=F32), "A_log": None, "write_slots": s.ints([0, -1, 2])}


def _small_commit(s: Source) -> dict:
    args = inputs.commit(s, [2, 4, 0, 9, 1], 4, 2, HV=4, K=32, V=48, slots=8)
    args["qkv"][0, 2:] = NAN
    return args | _slots(s, [3, 0, 5, 7, 1], [4, 0, 2, 7, -1], null_slot=None)


SMALL_ROWS = Rows((70, 9, 202), 5, page=3, kv_page=7)
SMALL_TILED = {"r": Rows((300, 710), 25), "dim": 64}  # rows, pages and heads that Hopper's scorer takes
SMALL_MANY = {"r": Rows((205, 150), 100, kv_page=7), "k": 24, "dim": 64}  # 400 programs: more than run at once


def _small_append(s: Source, axes: bool = False) -> dict:
    """Two padding rows behind: position -1, and a request that does not exist. axes: MRoPE positions."""
    args = inputs.append(s, SMALL_ROWS, heads=2, dim=32, rotary=12)
    args["index_qk"] = _pad(s, args["index_qk"], 2)
    args["positions"] = torch.cat([args["positions"], s.ints([-1, 8])])
    args["row_request"] = torch.cat([args["row_request"], s.ints([0, 3])])
    if not axes:
        return args
    args["rope_positions"] = args["positions"][:, None] + s.ints([0, 3, 5])
    return args | {"ring_positions": s.ints([[[p, p + 3, p + 5] for p in range(8)]] * 3)}


def _small_index(s: Source, r: Rows = SMALL_ROWS, dim: int = 32, **more: int) -> dict:
    """A spare page of NaN, page tails of NaN, a padding row, and a row of a request that does not exist."""
    args, page = inputs.index(s, r, heads=4, dim=dim), r.page
    keys = torch.cat([args["block_keys"], s.full(NAN, 1, page, dim)])
    for request, blocks in enumerate(r.blocks):
        tail = args["page_table"][request, blocks // page :][: 1 if blocks % page else 0].long()
        keys[tail, blocks % page :] = NAN
    args["visible"][4], args["row_request"][9] = 0, 3
    args["index_q"][4] = args["index_q"][9] = NAN
    return args | {"block_keys": keys} | more


def _small_topk(s: Source) -> dict:
    """Ties at zero, NaN of both signs, infinities, garbage past visible; the last rows see few or none."""
    scores = torch.relu(s.normal(9, 70, dtype=F32))
    scores[1, ::3], scores[2, 5:], scores[3], scores[4, 7], scores[5, :4] = NAN, -NAN, 0.0, torch.inf, -torch.inf
    visible = s.ints([70, 65, 60, 40, 70, 33, 5, 1, 0])
    hidden = torch.arange(70, device=s.device) >= visible[:, None]
    return {"scores": scores.masked_fill(hidden, torch.inf), "visible": visible, "k": 16}


def _small_attend(s: Source, fp8: bool = False, r: Rows = SMALL_ROWS, k: int = 8, dim: int = 32) -> dict:
    """A spare page and page tails of NaN, a page hole, a padding row; positions with and without an open tail."""
    args = inputs.attend(s, r, k=k, heads=4, kv_heads=2, dim=dim)
    cache = s.full(NAN, len(args["k_cache"]) + 1, 7, 2, 2, dim)
    cache[:-1, :, :, 0], cache[:-1, :, :, 1] = args["k_cache"], args["v_cache"]
    for request, context in enumerate(r.contexts):
        tail = args["page_table"][request, context // 7 :][: 1 if context % 7 else 0].long()
        cache[tail, context % 7 :] = NAN
    args["page_table"][-1, 4], args["positions"][3], args["q"][3] = -1, -1, NAN
    if fp8:
        cache, args["k_scale"], args["v_scale"] = cache.to(torch.float8_e4m3fn), 0.5, 2.0
    args |= {"k_cache": cache[:, :, :, 0], "v_cache": cache[:, :, :, 1]}
    return args | {"out_gate": s.normal(*args["q"].shape), "out": s.full(NAN, *args["q"].shape)}


def _small_cases() -> list[Case]:
    tiled, many = partial(_small_index, **SMALL_TILED), partial(_small_attend, **SMALL_MANY)
    small = {
        "solve_unit_lower": {"solve": _small_solve, "solve-dense": _small_solve_dense, "solve-keys": _small_solve_keys},
        "kda_conv": {"conv": _small_conv, "conv-w3": lambda s: inputs.conv(s, [70, 2], 40, W=3, dtype=F32)},
        "kda_prefill": {
            "prefill": _small_prefill,
            "prefill-fast": lambda s: inputs.prefill(s, [70, 1, 130], 1, "fast"),
            "prefill-soft": _small_prefill_soft,
            "prefill-given": _small_prefill_given,
            "prefill-equal-keys": lambda s: inputs.equal_keys(s, 128, 2, 64, 32),
        },
        "kda_decode": {
            "decode": partial(_small_tokens, lead=[5]),
            "decode-bf16state": partial(_small_tokens, lead=[5], state_dtype=BF16),
            "decode-soft": _small_decode_soft,
            "decode-fused": partial(_small_tokens, lead=[5], K=64, V=128),
            "decode-heads": partial(_small_tokens, lead=[5], HV=2, K=128, V=64, state_dtype=BF16),
        },
        "kda_verify": {"verify": lambda s: _small_tokens(s, [5, 4])},
        "kda_commit": {"commit": _small_commit},
        "gated_rms_norm": {"norm": lambda s: _padded(s, inputs.norm(s, 7, 3, 48), 0, "o gate")},
        "qsa_append": {"append": _small_append, "append-mrope": lambda s: _small_append(s, axes=True)},
        "qsa_score": {"score": partial(_small_index, num_blocks=60), "score-tiles": partial(tiled, num_blocks=180)},
        "qsa_topk": {"topk": _small_topk},
        "qsa_select": {"select": partial(_small_index, k=8), "select-tiles": partial(tiled, k=8)},
        "qsa_attend": {"attend": _small_attend, "attend-fp8": partial(_small_attend, fp8=True), "attend-many": many},
    }
    note = "small, with padding and NaN where nothing may be read"
    return [Case(f"check-{name}", op, note, build) for op, builds in small.items() for name, build in builds.items()]


TIMED: dict[str, Case] = {case.id: case for case in _kda_cases() + _qsa_cases()}
SMALL: dict[str, Case] = {case.id: case for case in _small_cases()}
CASES = TIMED | SMALL


def find(op: str, id: str) -> Case:
    """The case `id` of the op `op`. Raises ValueError, with near matches, for an unknown op or a case of another op."""
    ops = sorted({case.op for case in CASES.values()})
    if op not in ops:
        raise ValueError(f"op must be one of {', '.join(ops)}, got {op!r}{_near(op, ops)}")
    own = [case.id for case in CASES.values() if case.op == op]
    if id in own:
        return CASES[id]
    if id in CASES:
        raise ValueError(f"case {id} is one of {CASES[id].op}, not of {op}")
    raise ValueError(f"case must be one of the {len(own)} of {op}, got {id!r}{_near(id, own) or ', e.g. ' + own[0]}")


def _near(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    return f"; near: {', '.join(close)}" if close else ""
