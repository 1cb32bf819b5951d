"""Registration of the KDA ops with `torch.library`: each op's schema, its implementations, its host-side value checks.

The public functions, with the contract, are in `api`; they validate shapes and dtypes, allocate `out` and call these.
"""

import torch

from thalweg import contract, dispatch
from thalweg.device import arch
from thalweg.kda import reference_ops

INTERPRETED = False  # the tests interpret kernels on CPU tensors; Triton's interpreter as it is gets bfloat16 wrong


def _without_triton(tensor: torch.Tensor) -> str | None:
    return dispatch.without_triton(tensor, INTERPRETED)


def _solve_why_not(call) -> str | None:
    for name in ("lower", "out"):
        strides, C = call[name].stride(), call[name].shape[-1]
        if strides[3] != 1:
            return f"{name} must be contiguous in its last dimension, got strides {tuple(strides)}"
        if strides[1] * C >= 2**31:
            return f"{name} must have rows less than {2**31 // C} elements apart, got strides {tuple(strides)}"
    return _without_triton(call["lower"])


def _solve(lower, cu_seqlens, precision, workspace_bytes, out) -> None:
    from thalweg.kda import solve

    solve.solve_unit_lower(lower, cu_seqlens, out, precision)


def _prefill_why_not(call) -> str | None:
    for name in ("q", "k", "v", "g_raw", "out"):
        stride = call[name].stride(0)
        if stride >= 2**25:
            return f"{name} must have tokens less than {2**25} elements apart, got strides {tuple(call[name].stride())}"
    if not 1 <= call["q"].shape[2] <= 256 or not call["q"].shape[1]:
        return f"takes K from 1 to 256 and at least one head, got q {list(call['q'].shape)}"
    return _without_triton(call["q"])


def _prefill(**call) -> None:
    from thalweg.kda import prefill

    prefill.prefill(**call)


def _prefill_hopper_why_not(call) -> str | None:
    reason = _prefill_why_not(call)
    if reason is not None:
        return reason
    if not torch.cuda.is_available() or arch(call["q"].device) != "sm_90":
        return "made for the sm_90 architecture"
    K, V, dtype = call["q"].shape[2], call["v"].shape[2], call["v"].dtype
    if K != 128 or V % 64 or dtype != torch.bfloat16:
        return f"takes K = 128, V a multiple of 64 and bfloat16 values, got K {K}, V {V} and {dtype}"
    for name in ("v", "out"):
        x, strides, HV = call[name], call[name].stride(), call[name].shape[1]
        rows = strides[2] == 1 and (HV == 1 or strides[1] == V) and strides[0] >= HV * V
        if not rows or strides[0] % 8 or not contract.aligned(x):
            return f"{name} must have its heads side by side in rows of whole 16 bytes, got strides {tuple(strides)}"
    return None


def _prefill_hopper(**call) -> None:
    from thalweg.kda import prefill, prepare, prepare_gluon, scan_gluon

    portable = prepare_gluon.why_not(call) is not None
    stage = prepare.prepare if portable else prepare_gluon.prepare
    prefill.prefill(**call, prepare=stage, scan=scan_gluon.scan)


DECODE_DIMS = (64, 128)


def _decode_why_not(call) -> str | None:
    reason, (_, _, V, K) = _without_triton(call["qkv"]), call["state"].shape
    if reason is not None:
        return reason
    if K not in DECODE_DIMS or V not in DECODE_DIMS:
        return f"takes K and V of 64 or 128, got {K} and {V}"
    for name, first in (("qkv", 1), ("conv_state", 1), ("state", 2), ("conv_weight", 0), ("g_raw", 2), ("out_gate", 2)):
        x = call[name]
        if sum(stride * (size - 1) for stride, size in zip(x.stride()[first:], x.shape[first:])) >= 2**31:
            return f"{name} must have rows and heads of less than 2^31 elements, got strides {tuple(x.stride())}"
    return None


def _waits(run):
    """`run` of an implementation that waits for what is in front of it, whatever the caller allows."""
    return lambda early, **call: run(**call)


def _decode(**call) -> None:
    from thalweg.kda import decode

    decode.decode(**call)


def _conv(**call) -> None:
    from thalweg.kda import conv

    conv.conv(**call)


def _norm_why_not(call) -> str | None:
    for name in ("o", "gate", "out"):
        if call[name].dim() > 4:
            return f"takes up to 4 dimensions, got {name} {list(call[name].shape)}"
    if call["o"].numel() // call["o"].shape[-1] >= 2**31 - 2**12:
        return f"takes less than {2**31 - 2**12} rows, got o {list(call['o'].shape)}"
    return _without_triton(call["o"])


def _norm(**call) -> None:
    from thalweg.kda import norm

    norm.gated_rms_norm(**call)


def _tokens_why_not(call) -> str | None:
    _, _, V, K = call["state"].shape
    if K > 256 or V > 256:
        return f"takes K and V up to 256, got state {list(call['state'].shape)}"
    return _without_triton(call["qkv"])


def _split(**call) -> None:
    from thalweg.kda import split

    split.decode(**call)


def _verify(**call) -> None:
    from thalweg.kda import verify

    verify.verify(**call)


def _commit(**call) -> None:
    from thalweg.kda import verify

    verify.commit(**call)


def _decode_on(name: str, untimed: bool = False):
    """why_not of a kernel for one architecture, made of the parts in `step_gluon`; untimed: it says so everywhere."""

    def why_not(call) -> str | None:
        if untimed and not (torch.cuda.is_available() and arch(call["qkv"].device) == name):
            return f"made for the {name} architecture; compiled for it, not timed on it"
        reason = _decode_why_not(call)
        if reason is not None:
            return reason
        if not torch.cuda.is_available() or arch(call["qkv"].device) != name:
            return f"made for the {name} architecture"
        from thalweg.kda import step_gluon

        return step_gluon.why_not(call, groups=name == "sm_90")

    return why_not


def _decode_hopper(**call) -> None:
    from thalweg.kda import decode_gluon

    decode_gluon.decode(**call)


def _decode_gfx950(**call) -> None:
    from thalweg.kda import decode_gfx950

    decode_gfx950.decode(**call)


# Two passes (diagonals, then merge) take 176 us of 8192 x 64 on an H200 and a workspace; one pass takes 54 and none.
SOLVE_NOTE = "one pass in Triton: no workspace, so one form at any budget, length and number of chunks"

# Fastest first, the portable last resort last.
IMPLS: dict[str, tuple[dispatch.Impl, ...]] = {
    "solve_unit_lower": (
        dispatch.Impl("triton", SOLVE_NOTE, _solve_why_not, _solve),
        *dispatch.reference(reference_ops.solve_unit_lower),
    ),
    "kda_conv": (
        dispatch.Impl("triton", "one launch, each token read once", lambda call: _without_triton(call["x"]), _conv),
        *dispatch.reference(reference_ops.conv),
    ),
    "kda_prefill": (
        dispatch.Impl(
            "hopper",
            "as triton, in Gluon: the scan, and prepare where a bound lets one anchor serve a chunk",
            _prefill_hopper_why_not,
            _prefill_hopper,
        ),
        dispatch.Impl("triton", "chunks of 32, prepared in parallel, then scanned", _prefill_why_not, _prefill),
        *dispatch.reference(reference_ops.prefill),
    ),
    "kda_decode": (
        dispatch.Impl("hopper", "one fused step in Gluon: states in bulk copies", _decode_on("sm_90"), _decode_hopper),
        dispatch.Impl(
            "gfx950",
            "one fused step in Gluon for CDNA4; compiled for the chip, not timed on it",
            _decode_on("gfx950", untimed=True),
            _waits(_decode_gfx950),
        ),
        dispatch.Impl("triton", "one fused step in Triton", _decode_why_not, _decode),
        dispatch.Impl("triton-split", "three kernels: tokens, state, norm", _tokens_why_not, _waits(_split)),
        *dispatch.reference(_waits(reference_ops.decode)),
    ),
    "kda_verify": (
        dispatch.Impl("triton", "all tokens in one pass over the state", _tokens_why_not, _verify),
        *dispatch.reference(reference_ops.verify),
    ),
    "kda_commit": (
        dispatch.Impl("triton", "all tokens in one pass over the state", _tokens_why_not, _commit),
        *dispatch.reference(reference_ops.commit),
    ),
    "gated_rms_norm": (
        dispatch.Impl("triton", "one pass over whole rows", _norm_why_not, _norm),
        *dispatch.reference(reference_ops.gated_rms_norm),
    ),
}


def _check_slots(op, read_slots, write_slots, fresh, pool: int, null_slot: int | None) -> list:
    """Slots in range, one writer a slot, and no row reads what another row of the call writes."""
    contract.index_values(op, "read_slots", read_slots, pool, null_slot)
    contract.index_values(op, "write_slots", write_slots, pool, null_slot)
    live = reference_ops.rows(read_slots, write_slots, fresh, pool, null_slot)
    contract.unique_writes(op, "write_slots", torch.tensor([-1 if row is None else row[1] for row in live]), pool, None)
    writer = {row[1]: i for i, row in enumerate(live) if row is not None}
    mixed = sorted({row[0] for i, row in enumerate(live) if row is not None and writer.get(row[0], i) != i})
    if mixed:
        contract.refuse(op, "read_slots", "slots that no other row of the call writes", mixed[:8])
    return live


def _check_solve(lower, cu_seqlens, **_) -> None:
    if cu_seqlens is not None:
        contract.offset_values("solve_unit_lower", cu_seqlens, lower.shape[1])


def _check_conv(x, cu_seqlens, conv_state, read_slots, write_slots, fresh, null_slot, **_) -> None:
    contract.offset_values("kda_conv", cu_seqlens, x.shape[0])
    _check_slots("kda_conv", read_slots, write_slots, fresh, conv_state.shape[0], null_slot)


def _check_prefill(
    q, cu_seqlens, state, read_slots, write_slots, fresh, checkpoint_slots, checkpoint_every, null_slot, **_
) -> None:
    op, pool = "kda_prefill", state.shape[0]
    contract.offset_values(op, cu_seqlens, q.shape[0])
    live = _check_slots(op, read_slots, write_slots, fresh, pool, null_slot)
    if checkpoint_slots is None:
        return
    contract.index_values(op, "checkpoint_slots", checkpoint_slots, pool, null_slot)
    bounds, marks = contract.offsets(cu_seqlens, q.shape[0]), []
    for i, row in enumerate(live):
        reached = (bounds[i + 1] - bounds[i]) // checkpoint_every
        marks += [] if row is None else contract.live_slots(checkpoint_slots[i, :reached], pool, null_slot)
    used = {slot for row in live if row is not None for slot in row}
    marks = torch.tensor([*marks, *used])
    contract.unique_writes(op, "checkpoint_slots", marks, pool, None)


def _check_decode(conv_state, state, read_slots, write_slots, null_slot, **_) -> None:
    _check_slots("kda_decode", read_slots, write_slots, None, min(conv_state.shape[0], state.shape[0]), null_slot)


def _check_verify(conv_state, state, read_slots, null_slot, **_) -> None:
    contract.index_values("kda_verify", "read_slots", read_slots, min(conv_state.shape[0], state.shape[0]), null_slot)


def _check_commit(qkv, conv_state, state, accepted, read_slots, write_slots, null_slot, **_) -> None:
    _check_slots("kda_commit", read_slots, write_slots, None, min(conv_state.shape[0], state.shape[0]), null_slot)
    counts = accepted.tolist()
    if any(count < 0 or count > qkv.shape[1] for count in counts):
        contract.refuse("kda_commit", "accepted", f"counts in [0, {qkv.shape[1]}]", counts)


_GATE = "str gate, Tensor? A_log, Tensor? dt_bias, float lower_bound"
_TOKENS = "Tensor qkv, Tensor g_raw, Tensor beta_logits"
_END = "*, str? impl=None, bool check=False) -> ()"

solve_unit_lower = dispatch.define(
    "solve_unit_lower(Tensor lower, Tensor? cu_seqlens, str precision, int? workspace_bytes, Tensor(a!) out, " + _END,
    IMPLS["solve_unit_lower"],
    _check_solve,
)
kda_conv = dispatch.define(
    "kda_conv(Tensor x, Tensor weight, Tensor cu_seqlens, Tensor(a!) conv_state, Tensor read_slots, "
    "Tensor write_slots, Tensor? bias, Tensor? fresh, int? null_slot, Tensor(b!) out, " + _END,
    IMPLS["kda_conv"],
    _check_conv,
)
kda_prefill = dispatch.define(
    "kda_prefill(Tensor q, Tensor k, Tensor v, Tensor g_raw, Tensor beta_logits, Tensor cu_seqlens, "
    f"Tensor(a!) state, Tensor read_slots, Tensor write_slots, {_GATE}, float scale, bool allow_neg_eigval, "
    "bool qk_l2norm, Tensor? fresh, Tensor? checkpoint_slots, int checkpoint_every, int? null_slot, "
    "Tensor(b!)? workspace, Tensor(c!) out, " + _END,
    IMPLS["kda_prefill"],
    _check_prefill,
)
kda_decode = dispatch.define(
    f"kda_decode({_TOKENS}, Tensor out_gate, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
    "Tensor(b!) state, Tensor read_slots, Tensor write_slots, Tensor norm_weight, float norm_eps, "
    f"{_GATE}, float scale, bool allow_neg_eigval, int? null_slot, bool early, Tensor(c!) out, " + _END,
    IMPLS["kda_decode"],
    _check_decode,
)
kda_verify = dispatch.define(
    f"kda_verify({_TOKENS}, Tensor out_gate, Tensor conv_weight, Tensor? conv_bias, Tensor conv_state, "
    "Tensor state, Tensor read_slots, Tensor norm_weight, float norm_eps, "
    f"{_GATE}, float scale, bool allow_neg_eigval, int? null_slot, Tensor(a!) out, " + _END,
    IMPLS["kda_verify"],
    _check_verify,
)
kda_commit = dispatch.define(
    f"kda_commit({_TOKENS}, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
    "Tensor(b!) state, Tensor accepted, Tensor read_slots, Tensor write_slots, "
    f"{_GATE}, bool allow_neg_eigval, int? null_slot, " + _END,
    IMPLS["kda_commit"],
    _check_commit,
)
gated_rms_norm = dispatch.define(
    "gated_rms_norm(Tensor o, Tensor gate, Tensor weight, float eps, Tensor(a!) out, " + _END,
    IMPLS["gated_rms_norm"],
    lambda **_: None,
)
