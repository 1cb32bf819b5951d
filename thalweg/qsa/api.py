"""The public QSA ops. Every op: shapes and units below, index data never trusted, one error before any launch.

Names: T rows of an append, R rows (queries) of the others, Hi index heads of Di, Hq query heads over Hkv KV heads of D,
ratio r tokens a block (at most 65536), k blocks selected. Row metadata: `row_request` `[R]` is the row of the page
table, `positions` `[R]` the token's position (-1 padding), `visible` `[R]` its complete blocks,
floor((position + 1) / r) (0 padding).
Pages: entry i of a request lies at row i % page_size of page `page_table[request, i // page_size]`; -1 is a hole, any
page size works. Index tensors are int32 or int64 and may be strided; activations bfloat16, float16 or float32 with any
strides. A request out of range is padding, a page out of range a hole.

Definition: the `qwen4_exp` model (its indexer and attention); ties and NaN are ours: the lower block id wins a tie and
NaN loses to every number. Rows do not influence one another: a row's result has the same bits alone or in any batch.
Every op: `impl` names an implementation (no fallback), `check=True` or `THALWEG_CHECK=1` reads index tensors on the
host and raises ValueError on values that would be ignored; ValueError also for shapes, dtypes, devices and options.
What an op writes (`out`, a ring, the block keys of an append) must not share memory with another argument, nor overlap
itself; nor may block keys or a cache that it reads overlap itself.
"""

import torch

from thalweg import contract
from thalweg.contract import ACTIVATIONS, COUNT, INDEX, checking, device_of, expect, expect_int, refuse
from thalweg.qsa import library
from thalweg.qsa.library import IMPLS as IMPLS

CACHES = (*ACTIVATIONS, torch.float8_e4m3fn)
RATIO = 1 << 16  # the most tokens a block may have: the tokens of an open block are listed


def _expect_rows(op: str, rows: int, device: torch.device, **metadata: torch.Tensor) -> None:
    for argument, tensor in metadata.items():
        expect(op, argument, tensor, (rows,), INDEX, device, names="[rows]")


def _expect_pool(op: str, argument: str, pool: torch.Tensor, shape, dtypes, device, names: str) -> None:
    expect(op, argument, pool, shape, dtypes, device, names=names, pool=True)


def _expect_append(
    index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys, page_table, out,
    ratio, eps, rope_positions, ring_positions,
) -> None:  # fmt: skip
    op, device = "qsa_append", device_of(index_qk)
    expect(op, "index_qk", index_qk, (None, None), ACTIVATIONS, device, names="[T, (Hi + 1) * Di]")
    expect(op, "q_norm_weight", q_norm_weight, (None,), ACTIVATIONS, device, names="[Di]")
    T, width, Di = *index_qk.shape, q_norm_weight.shape[0]
    if Di == 0 or width % Di or width < 2 * Di:
        refuse(op, "index_qk", f"[T, (Hi + 1) * {Di}] with Hi at least 1", f"{width} columns")
    expect(op, "k_norm_weight", k_norm_weight, (Di,), ACTIVATIONS, device, names="[Di]")
    expect(op, "rope_table", rope_table, (None, None), (torch.float32,), device, names="[P, R]")
    if rope_table.shape[0] == 0 or rope_table.shape[1] % 2 or rope_table.shape[1] > Di:
        refuse(op, "rope_table", f"[P, R] with P at least 1 and R even, at most {Di}", list(rope_table.shape))
    _expect_rows(op, T, device, positions=positions, row_request=row_request)
    expect_int(op, "ratio", ratio, 1, RATIO)
    contract.expect_number(op, "eps", eps, sign=1)
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    _expect_pool(op, "raw_ring", raw_ring, (page_table.shape[0], None, Di), ACTIVATIONS, device, "[requests, Rn, Di]")
    if raw_ring.shape[1] < ratio:
        refuse(op, "raw_ring", f"at least ratio = {ratio} entries deep", raw_ring.shape[1])
    _expect_pool(op, "block_keys", block_keys, (None, None, Di), ACTIVATIONS, device, "[pages, page_rows, Di]")
    expect(op, "rope_positions", rope_positions, (T, 3), INDEX, device, names="[T, 3]", optional=True)
    if (rope_positions is None) != (ring_positions is None):
        got = "None" if ring_positions is None else "a tensor"
        refuse(op, "ring_positions", "given if and only if rope_positions is", got)
    shape = (raw_ring.shape[0], raw_ring.shape[1], 3)
    if ring_positions is not None:
        _expect_pool(op, "ring_positions", ring_positions, shape, INDEX, device, "[requests, Rn, 3]")
    expect(op, "out", out, (T, width // Di - 1, Di), (block_keys.dtype,), device, names="[T, Hi, Di]", optional=True)
    if contract.given(raw_ring):
        call = dict(locals())
        for written in ("out", "raw_ring", "block_keys", "ring_positions"):
            if call[written] is not None:
                contract.expect_apart(op, call, written)


def _expect_scored(op, index_q, block_keys, page_table, row_request, visible) -> None:
    device = device_of(index_q)
    expect(op, "index_q", index_q, (None, None, None), ACTIVATIONS, device, names="[R, Hi, Di]")
    R, heads, Di = index_q.shape
    if heads == 0 or Di == 0:
        refuse(op, "index_q", "[R, Hi, Di] with Hi and Di at least 1", list(index_q.shape))
    _expect_pool(op, "block_keys", block_keys, (None, None, Di), ACTIVATIONS, device, "[pages, page_rows, Di]")
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    _expect_rows(op, R, device, row_request=row_request, visible=visible)


def _expect_score(index_q, block_keys, page_table, row_request, visible, out, num_blocks) -> None:
    op = "qsa_score"
    _expect_scored(op, index_q, block_keys, page_table, row_request, visible)
    expect_int(op, "num_blocks", num_blocks, 0, COUNT)
    shape = (index_q.shape[0], num_blocks)
    expect(op, "out", out, shape, (torch.float32,), index_q.device, names="[R, num_blocks]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())


def _expect_topk(scores, visible, out, k) -> None:
    op, device = "qsa_topk", device_of(scores)
    expect(op, "scores", scores, (None, None), (torch.float32,), device, names="[R, N]")
    _expect_rows(op, scores.shape[0], device, visible=visible)
    expect_int(op, "k", k, 1, COUNT)
    expect(op, "out", out, (scores.shape[0], k), (torch.int32,), device, names="[R, k]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())


def _expect_select(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes) -> None:
    op = "qsa_select"
    _expect_scored(op, index_q, block_keys, page_table, row_request, visible)
    expect_int(op, "k", k, 1, COUNT)
    expect_int(op, "workspace_bytes", workspace_bytes, 0)
    expect(op, "out", out, (index_q.shape[0], k), (torch.int32,), index_q.device, names="[R, k]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())


def _expect_attend(
    q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, scale, out_gate, k_scale, v_scale
) -> None:  # fmt: skip
    op, device = "qsa_attend", device_of(q)
    expect(op, "q", q, (None, None, None), ACTIVATIONS, device, names="[R, Hq, D]")
    R, heads, D = q.shape
    _expect_pool(op, "k_cache", k_cache, (None, None, None, D), CACHES, device, "[pages, page_tokens, Hkv, D]")
    if heads == 0 or D == 0 or k_cache.shape[2] == 0 or heads % k_cache.shape[2]:
        refuse(op, "q", f"[R, Hq, D] with Hq a multiple of Hkv = {k_cache.shape[2]}", list(q.shape))
    _expect_pool(op, "v_cache", v_cache, tuple(k_cache.shape), (k_cache.dtype,), device, "the shape of k_cache")
    expect(op, "page_table", page_table, (None, None), INDEX, device, names="[requests, max_pages]")
    _expect_rows(op, R, device, row_request=row_request, positions=positions)
    expect(op, "block_ids", block_ids, (R, None), INDEX, device, names="[R, k]")
    expect_int(op, "ratio", ratio, 1, RATIO)
    expect(op, "out_gate", out_gate, (R, heads, D), ACTIVATIONS, device, names="[R, Hq, D]", optional=True)
    contract.expect_number(op, "scale", scale, optional=True)
    for argument, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        contract.expect_number(op, argument, value, sign=1, optional=True)
        if value is not None and k_cache.dtype != torch.float8_e4m3fn:
            refuse(op, argument, "None unless the caches are float8_e4m3fn", f"{value!r} with {k_cache.dtype}")
    if scale is not None and k_scale is not None:
        contract.expect_number(op, "scale * k_scale", float(scale) * float(k_scale))
    expect(op, "out", out, (R, heads, D), (q.dtype,), device, names="[R, Hq, D]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())


def qsa_append(
    index_qk: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    row_request: torch.Tensor,
    raw_ring: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    *,
    ratio: int = 4,
    eps: float = 1e-6,
    rope_positions: torch.Tensor | None = None,
    ring_positions: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Index queries of new tokens; keeps their raw keys in a ring and writes the block keys that become complete.

    index_qk `[T, (Hi + 1) * Di]`: Hi raw queries, then the raw key. Norm weights `[Di]` (Gemma: 1 + w). rope_table
    `[P, R]` float32 from `rope_table`; positions past it are clipped. A request's rows are one run of consecutive
    tokens. raw_ring `[requests, Rn, Di]` (mutated): token p at entry p % Rn, the call's last Rn rows of a request.
    Rn is at least ratio; up to Rn - ratio + 1 rejected tokens can be written again. block_keys `[pages, page_rows, Di]`
    (mutated): block b of a request at entry b of its pages, written when token ratio * b + ratio - 1 arrives, from this
    call's rows or, for tokens of earlier calls, the ring; skipped on a hole. Writing tokens again gives the same bits.
    rope_positions `[T, 3]` (MRoPE; default: positions on all axes) needs ring_positions `[requests, Rn, 3]` (mutated).
    Returns queries `[T, Hi, Di]` in block_keys' dtype; padding rows give zeros and write nothing.

    Query: norm, rounded, RoPE, rounded. Block key: raw keys rounded to the ring's dtype, float32 mean over the group,
    rounded, norm, rounded, RoPE at the group's first token, rounded.
    """
    _expect_append(
        index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys, page_table,
        out, ratio, eps, rope_positions, ring_positions,
    )  # fmt: skip
    if out is None:
        Di = q_norm_weight.shape[0]
        shape = (index_qk.shape[0], index_qk.shape[1] // Di - 1, Di)
        out = torch.empty(shape, dtype=block_keys.dtype, device=index_qk.device)
    library.append(
        index_qk, q_norm_weight, k_norm_weight, rope_table, positions, row_request, raw_ring, block_keys, page_table,
        out, ratio, eps, rope_positions, ring_positions, impl=impl, check=checking("qsa_append", impl, check),
    )  # fmt: skip
    return out


def qsa_score(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    num_blocks: int,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Block scores `[R, num_blocks]` float32: sum over heads of relu(q_h . key_b), heads added in their order.

    index_q `[R, Hi, Di]`, block_keys `[pages, page_rows, Di]`. -inf at and past a row's `visible` (clipped to
    [0, num_blocks]), on holes and in padding rows; nothing there reaches a result. Not scaled by 1/sqrt(Di), which
    cannot change a ranking. From one implementation a row's scores are the same int32 bits alone, in a pack, in prefill
    and in decode (promised for 16-bit inputs; float32 inputs may differ in the last bit on rare occasions).
    """
    _expect_score(index_q, block_keys, page_table, row_request, visible, out, num_blocks)
    if out is None:
        out = torch.empty((index_q.shape[0], num_blocks), dtype=torch.float32, device=index_q.device)
    library.score(
        index_q, block_keys, page_table, row_request, visible, out, num_blocks, impl=impl,
        check=checking("qsa_score", impl, check),
    )  # fmt: skip
    return out


def qsa_topk(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Ids `[R, k]` int32 of each row's k best among its first `visible` scores, ascending; unused entries -1, last.

    scores `[R, N]` float32; visible is clipped to [0, N], and nothing at or past it is selected, whatever it holds.
    Exact: the lower id wins a tie, -0.0 equals 0.0, -inf is a number, NaN (either sign) loses to every number and is
    taken only when numbers run out. Worked example, k = 3, visible = 5: scores 1 7 NaN 1 1 give ids 0 1 3.
    """
    _expect_topk(scores, visible, out, k)
    if out is None:
        out = torch.empty((scores.shape[0], k), dtype=torch.int32, device=scores.device)
    library.topk(scores, visible, out, k, impl=impl, check=checking("qsa_topk", impl, check))
    return out


def qsa_select(
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    *,
    workspace_bytes: int = 288 << 20,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Ids `[R, k]` int32 of each row's k best blocks: `qsa_score` then `qsa_topk`, without the score matrix.

    The ids equal those of the two ops (num_blocks the capacity of the page table) for every row whose request is in
    range; other rows give -1. Rows with at most k visible blocks are not scored, all are selected. workspace_bytes
    caps the scores and what top-k needs besides, at any context; on top come tiles of a few MiB and `[R, k]` ids, and
    never less than one row is held (4.4 bytes a block of the page table's capacity). 1,024 rows of 65,536 blocks fit
    the default.
    """
    _expect_select(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes)
    if out is None:
        out = torch.empty((index_q.shape[0], k), dtype=torch.int32, device=index_q.device)
    library.select(
        index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes, impl=impl,
        check=checking("qsa_select", impl, check),
    )  # fmt: skip
    return out


def qsa_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    row_request: torch.Tensor,
    positions: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    ratio: int = 4,
    scale: float | None = None,
    out_gate: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Attention `[R, Hq, D]` in q's dtype of each row over its selected blocks and the tokens of its open block.

    q `[R, Hq, D]`; query head h reads KV head h // (Hq / Hkv). k_cache, v_cache `[pages, page_tokens, Hkv, D]`, any
    strides (both halves of `[pages, page_tokens, Hkv, 2, D]` work), one dtype: an activation dtype, or float8_e4m3fn
    with k_scale, v_scale (stored value times scale; None is 1). block_ids `[R, k]`: blocks of ratio tokens, any order,
    distinct, -1 unused; ids that are not complete at the row's position are ignored. A row at position p attends
    to tokens ratio * floor((p+1) / ratio) .. p besides, so to none when (p+1) % ratio == 0: then its own block must be
    selected. Tokens on holes are skipped. Softmax of scale * q . k (scale default D**-0.5) in float32, times
    sigmoid(out_gate `[R, Hq, D]`) if given, rounded once. A row with nothing to attend to, and padding, gives zeros.
    No other token is multiplied in, so NaN elsewhere in the pages does no harm.

    A row's bits depend on nothing but the row, except in impl="shared", which is taken by name only: neighbouring rows
    fetch the union of their blocks once, each token with weight zero for the rows that did not select it. There a
    row's last bits depend on its neighbours (not on the run), and NaN in a token that a neighbour attends to spreads.
    """
    _expect_attend(
        q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, scale, out_gate, k_scale,
        v_scale,
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    library.attend(
        q, k_cache, v_cache, page_table, row_request, positions, block_ids, out, ratio, scale, out_gate, k_scale,
        v_scale, impl=impl, check=checking("qsa_attend", impl, check),
    )  # fmt: skip
    return out
