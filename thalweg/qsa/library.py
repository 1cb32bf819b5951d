"""Registration of the QSA ops with `torch.library`: each op's schema, its implementations, its host-side value checks.

The public functions, with the contract, are in `api`; they validate shapes and dtypes, allocate `out` and call these.
Without `check` the ops are safe on the same values: they are clipped, or taken as padding or holes.
"""

from thalweg.contract import index_values, refuse
from thalweg.dispatch import Impl, define
from thalweg.qsa import reference_ops


def _reference(run) -> tuple[Impl, ...]:
    note = "plain torch, exact float32 arithmetic, any device"
    return (Impl(name="reference", note=note, why_not=lambda call: None, run=run, syncs=True),)


IMPLS: dict[str, tuple[Impl, ...]] = {
    "qsa_append": _reference(reference_ops.append),
    "qsa_score": _reference(reference_ops.score),
    "qsa_topk": _reference(reference_ops.topk),
    "qsa_select": _reference(reference_ops.select),
    "qsa_attend": _reference(reference_ops.attend),
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
