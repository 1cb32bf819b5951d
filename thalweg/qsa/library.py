"""Registration of the QSA ops with `torch.library`: each op's schema, its implementations, its host-side value checks.

The public functions, with the contract, are in `api`; they validate shapes and dtypes, allocate `out` and call these.
Without `check` the ops are safe on the same values: they are clipped, or taken as padding or holes.
"""

from types import SimpleNamespace

import torch

from thalweg.contract import index_values, refuse
from thalweg.device import arch
from thalweg.dispatch import Impl, define, reference, without_triton
from thalweg.qsa import reference_ops

INTERPRETED = False  # the tests interpret kernels on CPU tensors; Triton's interpreter as it is gets bfloat16 wrong
MOST_K = 4096  # a program of the top-k holds four times as many nodes
MOST_BLOCKS = 2**25  # of a row; a program that takes maxima takes at least one group of the top level
WITHIN = 2**31  # elements that a tile's offsets may span
ATTEND_WITHIN = {"q": (1, 2), "out": (1, 2), "out_gate": (1, 2), "k_cache": (3,), "v_cache": (3,), "block_ids": (1,)}


def _without_triton(tensor: torch.Tensor) -> str | None:
    return without_triton(tensor, INTERPRETED)


def _span(tensor: torch.Tensor | None, *dims: int) -> int:
    """Elements from the first to the last along some dimensions; kernels add these offsets up in int32."""
    return 0 if tensor is None else sum((tensor.shape[d] - 1) * tensor.stride(d) for d in dims)


def _far(call, dims: dict[str, tuple[int, ...]]) -> str | None:
    """Which argument is too far apart along those of its dimensions that a kernel counts in int32."""
    for name, along in dims.items():
        x = call[name]
        if x is None or (x.is_contiguous() and x.numel() < WITHIN):
            continue
        if _span(x, *along) >= WITHIN:
            return f"{name} must span less than {WITHIN} elements within a row, got strides {call[name].stride()}"
    return None


def _scored_why_not(call) -> str | None:
    q, keys, table = call["index_q"], call["block_keys"], call["page_table"]
    if q.dtype != keys.dtype:
        return f"takes index_q and block_keys of one dtype, got {q.dtype} and {keys.dtype}"
    if q.shape[1] > 32 or q.shape[2] > 256:
        return f"takes up to 32 heads of up to 256, got {list(q.shape[1:])}"
    if 64 * q.stride(0) + _span(q, 1, 2) >= WITHIN or _span(keys, 1, 2) >= WITHIN:
        return f"64 rows of index_q and a page of block_keys must span less than {WITHIN} elements"
    if table.shape[1] * keys.shape[1] >= 2**30:
        return f"takes page tables of less than {2**30} blocks, got {table.shape[1]} x {keys.shape[1]}"
    return _without_triton(q)


def _score_why_not(call) -> str | None:
    out = call["out"]
    if 64 * out.stride(0) + 64 * out.stride(1) >= WITHIN or call["num_blocks"] >= 2**30:
        return f"64 rows of out must span less than {WITHIN} elements, got strides {tuple(out.stride())}"
    return _scored_why_not(call)


def _score_hopper_why_not(call) -> str | None:
    return _score_why_not(call) or _tiles_hopper_why_not(call)


def _tiles_hopper_why_not(call) -> str | None:
    if not torch.cuda.is_available() or arch(call["index_q"].device) != "sm_90":
        return "made for the sm_90 architecture"
    from thalweg.qsa import score, score_gluon

    R, requests = call["index_q"].shape[0], call["page_table"].shape[0]
    if requests * score.FEW >= R:
        return f"made for tiles of rows: more than {score.FEW} rows a request, got {R} rows of {requests}"
    return score_gluon.why_not(call)


def _topk_why_not(call) -> str | None:
    scores, out = call["scores"], call["out"]
    if call["k"] > MOST_K:
        return f"takes k up to {MOST_K}, got {call['k']}"
    if scores.shape[1] > MOST_BLOCKS:
        return f"takes up to {MOST_BLOCKS} blocks a row, got {scores.shape[1]}"
    if scores.shape[1] * scores.stride(1) >= WITHIN or call["k"] * out.stride(1) >= WITHIN:
        return f"a row must span less than {WITHIN} elements, got strides {scores.stride()} and {out.stride()}"
    return _without_triton(scores)


def _select_why_not(call) -> str | None:
    if call["k"] > MOST_K:
        return f"takes k up to {MOST_K}, got {call['k']}"
    if call["k"] * call["out"].stride(1) >= WITHIN:
        return f"a row of out must span less than {WITHIN} elements, got strides {call['out'].stride()}"
    blocks = call["page_table"].shape[1] * call["block_keys"].shape[1]
    if blocks > MOST_BLOCKS:
        return f"takes page tables of up to {MOST_BLOCKS} blocks, got {blocks}"
    return _scored_why_not(call)


def _select_hopper_why_not(call) -> str | None:
    scores = (call["out"].shape[0], call["page_table"].shape[1] * call["block_keys"].shape[1])
    return _select_why_not(call) or _tiles_hopper_why_not(call | {"out": SimpleNamespace(shape=scores)})


def _score(index_q, block_keys, page_table, row_request, visible, out, num_blocks) -> None:
    from thalweg.qsa import score

    score.score(index_q, block_keys, page_table, row_request, visible, out)


def _score_hopper(index_q, block_keys, page_table, row_request, visible, out, num_blocks) -> None:
    from thalweg.qsa import score_gluon

    score_gluon.score(index_q, block_keys, page_table, row_request, visible, out)


def _topk(scores, visible, out, k) -> None:
    from thalweg.qsa import topk

    topk.topk(scores, visible, out)


def _select(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes) -> None:
    from thalweg.qsa import select

    select.select(index_q, block_keys, page_table, row_request, visible, out, workspace_bytes)


def _select_hopper(index_q, block_keys, page_table, row_request, visible, out, k, workspace_bytes) -> None:
    from thalweg.qsa import select

    select.select(index_q, block_keys, page_table, row_request, visible, out, workspace_bytes, hopper=True)


def _append_why_not(call) -> str | None:
    Di = call["q_norm_weight"].shape[0]
    if Di > 1024:
        return f"takes heads of up to 1024, got {Di}"
    vectors = ("index_qk", "q_norm_weight", "k_norm_weight", "rope_table", "raw_ring", "block_keys", "out")
    return _far(call, dict.fromkeys(vectors, (-1,))) or _without_triton(call["index_qk"])


def _append(**call) -> None:
    from thalweg.qsa import append

    append.append(**call)


def _attend_why_not(call) -> str | None:
    q, k, table = call["q"], call["k_cache"], call["page_table"]
    if q.shape[2] > 256 or q.shape[1] > 64 * k.shape[2]:
        return f"takes up to 64 query heads a KV head, of up to 256, got q {list(q.shape)} and {k.shape[2]} KV heads"
    if table.shape[1] * k.shape[1] >= 2**30 or call["block_ids"].shape[1] * call["ratio"] >= 2**30:
        return f"takes page tables and lists of less than {2**30} tokens, got {table.shape[1]} pages of {k.shape[1]}"
    if k.shape[0] * k.shape[1] >= WITHIN:
        return f"takes pools of less than {WITHIN} tokens, got {k.shape[0]} pages of {k.shape[1]}"
    return _far(call, ATTEND_WITHIN) or _without_triton(q)


def _attend_hopper_why_not(call) -> str | None:
    q, k_cache, v_cache = call["q"], call["k_cache"], call["v_cache"]
    if not torch.cuda.is_available() or arch(q.device) != "sm_90":
        return _without_triton(q) or "made for the sm_90 architecture"
    from thalweg.qsa import attention, gather

    if q.shape[0] * k_cache.shape[2] < attention.MANY:
        return f"made for rows times KV heads of {attention.MANY} on, got {q.shape[0]} x {k_cache.shape[2]}"
    return _attend_why_not(call) or gather.why_not_gluon(q, k_cache, v_cache, attention.MOST)


def _attend_hopper(**call) -> None:
    from thalweg.qsa import attention

    attention.attend(**call, hopper=True)


def _attend(**call) -> None:
    from thalweg.qsa import attention

    attention.attend(**call)


def _shared_why_not(call) -> str | None:
    q, cache, k, capacity = call["q"], call["k_cache"], call["block_ids"].shape[1], _tokens(call)
    if not 0 < call["ratio"] <= 16 or capacity // call["ratio"] >= 2**26:
        wanted = f"takes blocks of up to 16 tokens, less than {2**26} of them"
        return f"{wanted}, got {capacity} tokens in blocks of {call['ratio']}"
    if k >= MOST_K:
        return f"takes less than {MOST_K} blocks a row, got {k}"
    reason = _attend_why_not(call)
    if reason is not None:
        return reason
    from thalweg.qsa import attention, union

    group, dtype = q.shape[1] // cache.shape[2], attention.multiplied(q.dtype, cache.dtype)
    tall = union.choose(group, q.shape[2], dtype.itemsize, hopper=False).tall  # a tile holds a row's heads at least
    if group > tall:
        kinds = f"{q.dtype} queries and {cache.dtype} caches"
        return f"takes up to {tall} query heads a KV head of {kinds}, got {group}"
    return None


def _tokens(call) -> int:
    return call["page_table"].shape[1] * call["k_cache"].shape[1]


def _shared(**call) -> None:
    from thalweg.qsa import shared

    shared.attend(**call)


def _impls(last, why_not, run, note: str) -> tuple[Impl, ...]:
    """Fastest first, the portable last resort last."""
    return Impl("triton", note, why_not, run), *reference(last)


IMPLS: dict[str, tuple[Impl, ...]] = {
    "qsa_append": _impls(
        reference_ops.append, _append_why_not, _append, "one kernel: programs of tokens, of block keys, of requests"
    ),
    "qsa_score": (
        Impl(
            "hopper",
            "tiles of rows in Gluon: a chain of wgmma a head, bulk copies, work shared by its cost",
            _score_hopper_why_not,
            _score_hopper,
        ),
        *_impls(
            reference_ops.score, _score_why_not, _score, "tiles of rows, or one row a program; keys read once a tile"
        ),
    ),
    "qsa_topk": _impls(
        reference_ops.topk,
        _topk_why_not,
        _topk,
        "maxima of groups, then a program a row goes down the best of them; exact for any scores",
    ),
    "qsa_select": (
        Impl(
            "hopper",
            "in Gluon: lists of what reaches a sampled threshold, or score, which makes the top-k's maxima, and topk",
            _select_hopper_why_not,
            _select_hopper,
        ),
        *_impls(
            reference_ops.select, _select_why_not, _select, "score and topk, as many rows at a time as fit their cap"
        ),
    ),
    "qsa_attend": (
        Impl(
            "hopper",
            "gathers row by row in Gluon: keys and values asked for apart, each while the other is worked on",
            _attend_hopper_why_not,
            _attend_hopper,
        ),
        Impl("triton", "gathers row by row; few rows split over programs, same bits", _attend_why_not, _attend),
        Impl(
            "shared",
            "neighbouring rows fetch the union of their blocks once",
            _shared_why_not,
            _shared,
            only_named="a row's last bits depend on its neighbours",
        ),
        *reference(reference_ops.attend),
    ),
}


def _check_pages(op, page_table, pages, row_request) -> None:
    index_values(op, "page_table", page_table, pages)
    index_values(op, "row_request", row_request, page_table.shape[0])


def _check_append(positions, row_request, rope_table, block_keys, page_table, rope_positions, **_) -> None:
    """Also: a request's rows are one run of consecutive positions."""
    op = "qsa_append"
    _check_pages(op, page_table, block_keys.shape[0], row_request)
    if rope_positions is None:
        index_values(op, "positions", positions, rope_table.shape[0])
    index_values(op, "rope_positions", rope_positions, rope_table.shape[0])
    last: dict[int, tuple[int, int]] = {}
    for row, (request, position) in enumerate(zip(row_request.tolist(), positions.tolist())):
        if request < 0 or position < 0:
            continue
        if last.get(request, (row - 1, position - 1)) != (row - 1, position - 1):
            wanted = "one run of consecutive tokens a request"
            refuse(op, "positions", wanted, f"{position} at row {row} after {last[request][1]} of request {request}")
        last[request] = (row, position)


def _check_score(block_keys, page_table, row_request, visible, num_blocks, **_) -> None:
    _check_pages("qsa_score", page_table, block_keys.shape[0], row_request)
    index_values("qsa_score", "visible", visible, min(num_blocks, page_table.shape[1] * block_keys.shape[1]) + 1)


def _check_topk(scores, visible, **_) -> None:
    index_values("qsa_topk", "visible", visible, scores.shape[1] + 1)


def _check_select(block_keys, page_table, row_request, visible, **_) -> None:
    _check_pages("qsa_select", page_table, block_keys.shape[0], row_request)
    index_values("qsa_select", "visible", visible, page_table.shape[1] * block_keys.shape[1] + 1)


def _check_attend(k_cache, page_table, row_request, positions, block_ids, ratio, **_) -> None:
    """Also: a row's blocks are visible to it and differ."""
    op = "qsa_attend"
    _check_pages(op, page_table, k_cache.shape[0], row_request)
    index_values(op, "positions", positions, page_table.shape[1] * k_cache.shape[1])
    for row, (position, ids) in enumerate(zip(positions.tolist(), block_ids.tolist())):
        used = [block for block in ids if block >= 0]
        if position >= 0 and (len(set(used)) < len(used) or any(block >= (position + 1) // ratio for block in used)):
            wanted = f"distinct and below {(position + 1) // ratio} at position {position}"
            refuse(op, "block_ids", wanted, f"{used[:8]} in row {row}")


append = define(
    "qsa_append(Tensor index_qk, Tensor q_norm_weight, Tensor k_norm_weight, Tensor rope_table, Tensor positions, "
    "Tensor row_request, Tensor(a!) raw_ring, Tensor(b!) block_keys, Tensor page_table, Tensor(c!) out, int ratio, "
    "float eps, Tensor? rope_positions, Tensor(d!)? ring_positions, *, str? impl=None, bool check=False) -> ()",
    IMPLS["qsa_append"],
    _check_append,
)
score = define(
    "qsa_score(Tensor index_q, Tensor block_keys, Tensor page_table, Tensor row_request, Tensor visible, "
    "Tensor(a!) out, SymInt num_blocks, *, str? impl=None, bool check=False) -> ()",
    IMPLS["qsa_score"],
    _check_score,
)
topk = define(
    "qsa_topk(Tensor scores, Tensor visible, Tensor(a!) out, SymInt k, *, str? impl=None, bool check=False) -> ()",
    IMPLS["qsa_topk"],
    _check_topk,
)
select = define(
    "qsa_select(Tensor index_q, Tensor block_keys, Tensor page_table, Tensor row_request, Tensor visible, "
    "Tensor(a!) out, SymInt k, int workspace_bytes, *, str? impl=None, bool check=False) -> ()",
    IMPLS["qsa_select"],
    _check_select,
)
attend = define(
    "qsa_attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor row_request, Tensor positions, "
    "Tensor block_ids, Tensor(a!) out, int ratio, float scale, Tensor? out_gate, float? k_scale, float? v_scale, *, "
    "str? impl=None, bool check=False) -> ()",
    IMPLS["qsa_attend"],
    _check_attend,
)
