"""KDA, the public ops: what each takes, writes and refuses. The formulas are in `reference`, in the same names; their
source is Kimi Linear (arXiv 2510.26692), for the bounded gate Kimi K3.

Common to all. Activations are bfloat16, float16 or float32, with any strides. State is a pool `[slots, HV, V, K]`, K
last, float32 or bfloat16, read and advanced in place in float32 and rounded once when it is stored. Index tensors are
int32 or int64 on the tensors' device, with any strides, and never trusted: `cu_seqlens [N + 1]` is clipped to [0, T]
and read as non-decreasing; tokens no sequence covers get zero outputs and spread nothing; an empty sequence touches
nothing at all. `read_slots` and `write_slots` name each row's pool entry before and after (one list: in place); a slot
that is negative, at or past the pool, or equal to `null_slot` makes its row padding: nothing read, nothing written,
outputs zero. A slot that one row writes must not be read or written by another row of the call.

`impl` names an implementation, which then runs or raises; None takes the first that can. `check=True` (None: the
environment variable THALWEG_CHECK) reads the index tensors on the host and raises on every value that would have been
clipped, on slots past the pool and on slots shared against the rule above. `out` must not share memory with another
argument, nor overlap itself; nor may a pool overlap itself. Bad arguments raise ValueError, as
`op: argument must be WANTED, got GOT`, before anything runs. No gradient is recorded.

Bits. A row's results do not depend on the other rows of the call, nor on when it runs; in `kda_prefill` and `kda_conv`
also not on cuts at multiples of 64 tokens (the state carried in a float32 pool), nor a token's output on later tokens.
"""

import torch

from thalweg import contract
from thalweg.contract import ACTIVATIONS, INDEX, checking, device_of, expect, refuse
from thalweg.kda import arguments, library
from thalweg.kda.arguments import expect_gate, expect_norm, expect_offsets, expect_rows, expect_state, expect_tokens
from thalweg.kda.library import IMPLS as IMPLS
from thalweg.kda.reference import CHUNK
from thalweg.kda.workspace import least_bytes

PRECISIONS = ("ieee", "tf32x3", "tf32")
BOOL = (torch.bool,)


def solve_unit_lower(
    lower: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    workspace_bytes: int | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Inverses of unit lower triangular blocks: (I + strict_lower(block))^-1.

    lower: packed `[1, T, H, C]` with cu_seqlens, or dense `[B, T, H, C]` without; C is 16, 32 or 64. Each sequence (or
    batch row) is cut in blocks of C tokens from its start; row t of its block is `lower[b, t, h, :]`. The strictly
    lower part is read, the diagonal taken as one, the upper part ignored (it may hold NaN).
    out: same shape, dtype out_dtype (any activation dtype; default lower's). A last block of n < C rows has its n x n
    inverse in columns 0..n-1 and zeros right of it. Tokens no sequence covers: zeros.
    precision: "ieee", "tf32x3" or "tf32" products; the least an implementation may use. workspace_bytes: how much
    float32 workspace it may take, by default the size of lower in float32; 0 always works.

    Example: C = 16, cu_seqlens [0, 20] holds two blocks: tokens 0..15, and tokens 16..19 with 4 x 4 of its columns.
    Source: the UT transform of Kimi Linear (arXiv 2510.26692), section on the chunkwise form.
    """
    op, device = "solve_unit_lower", device_of(lower)
    expect(op, "lower", lower, (None, None, None, None), ACTIVATIONS, device, names="[B, T, H, C]")
    if lower.shape[3] not in (16, 32, 64):
        refuse(op, "lower", "[B, T, H, C] with C 16, 32 or 64", list(lower.shape))
    if cu_seqlens is not None:
        expect_offsets(op, cu_seqlens, device)
        if lower.shape[0] != 1:
            refuse(op, "lower", "[1, T, H, C] where cu_seqlens is given", list(lower.shape))
    contract.expect_choice(op, "precision", precision, PRECISIONS)
    contract.expect_int(op, "workspace_bytes", workspace_bytes, 0, optional=True)
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype in ACTIVATIONS):
        refuse(op, "out_dtype", "None, bfloat16, float16 or float32", out_dtype)
    kinds = ACTIVATIONS if out_dtype is None else (out_dtype,)
    expect(op, "out", out, tuple(lower.shape), kinds, device, names="[B, T, H, C]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty(lower.shape, dtype=lower.dtype if out_dtype is None else out_dtype, device=device)
    library.solve_unit_lower(
        lower, cu_seqlens, precision, workspace_bytes, out, impl=impl, check=checking(op, impl, check)
    )
    return out


def kda_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    cu_seqlens: torch.Tensor,
    conv_state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    fresh: torch.Tensor | None = None,
    null_slot: int | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """Causal depthwise convolution of packed tokens with SiLU, continuing each sequence from its last inputs.

    x `[T, C]`; weight `[C, W]`, W from 2 to 8, tap W-1 meets the current token; bias `[C]`; cu_seqlens `[N + 1]`.
    conv_state: pool `[slots, C, W-1]` of x's dtype or float32, mutated: the last W-1 raw inputs, oldest first, never
    the convolved value. Any strides: a time-major pool `[slots, W-1, C]` is passed transposed.
    read_slots, write_slots `[N]`; fresh `[N]` bool: where true the history is zeros, the read slot is not looked at,
    and the write slot alone decides on padding. A sequence shorter than W-1 keeps the newest of the old history.
    out `[T, C]` of x's dtype.

    Example, W = 4: slot 2 holds [a, b, c]; x = [d, e] read from 2 and written to 6 leaves [c, d, e] in slot 6 and slot
    2 as it was.
    """
    op, device = "kda_conv", device_of(x)
    expect(op, "x", x, (None, None), ACTIVATIONS, device, names="[T, C]")
    C = x.shape[1]
    arguments.expect_conv(op, C, x, weight, bias, "weight", "bias", conv_state)
    N = expect_offsets(op, cu_seqlens, device)
    expect_rows(op, N, read_slots, write_slots, null_slot, device)
    expect(op, "fresh", fresh, (N,), BOOL, device, names="[N]", optional=True)
    expect(op, "out", out, tuple(x.shape), (x.dtype,), device, names="[T, C]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=device)
    write_slots = read_slots if write_slots is None else write_slots
    library.kda_conv(
        x, weight, cu_seqlens, conv_state, read_slots, write_slots, bias, fresh, null_slot, out, impl=impl,
        check=checking(op, impl, check),
    )  # fmt: skip
    return out


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    cu_seqlens: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor | None = None,
    *,
    gate: str = "bounded",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    scale: float | None = None,
    allow_neg_eigval: bool = False,
    qk_l2norm: bool = True,
    fresh: torch.Tensor | None = None,
    checkpoint_slots: torch.Tensor | None = None,
    checkpoint_every: int = 0,
    null_slot: int | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """KDA over packed sequences, each continued from its state, which is advanced in place.

    q, k `[T, H, K]`; v `[T, HV, V]`, HV a multiple of H: value head h uses query and key head h // (HV // H).
    g_raw `[T, HV, K]`: raw gate, natural log once activated; beta_logits `[T, HV]`: logits, sigmoid is taken here.
    gate: "given" (g_raw is the log decay, at most 0), "soft" (-exp(A_log) softplus(g_raw + dt_bias)) or "bounded"
    (lower_bound sigmoid(exp(A_log) (g_raw + dt_bias))); A_log `[HV]` and dt_bias `[HV, K]` float32, absent means 0.
    scale: K^-0.5 by default. allow_neg_eigval doubles beta. qk_l2norm: x / sqrt(sum x^2 + 1e-6) of q and k here.
    state: pool `[slots, HV, V, K]`, mutated. read_slots, write_slots `[N]`. fresh `[N]` bool: where true the state is
    zeros, the read slot is not looked at, and the write slot alone decides on padding.
    checkpoint_slots `[N, M]` with checkpoint_every, a multiple of 64: the state after (j + 1) * checkpoint_every tokens
    of this call's part of sequence i goes to slot [i, j] of the pool too; bad slots and states not reached are skipped.
    out `[T, HV, V]` of v's dtype. workspace: uint8 scratch that spares the call its own, of `kda_prefill_workspace`
    bytes or fewer, aligned to 16 bytes, of one call at a time; with it and `out` a GPU call allocates nothing.

    Per token: S <- S exp(g); S <- S + beta (v - S k) k^T; o = scale S q, read after the write.
    Example: cu_seqlens [0, 3, 3, 70], read_slots [5, 1, 0], write_slots [5, 2, -1]: tokens 0..2 advance slot 5; the
    empty sequence leaves slots 1 and 2 alone; tokens 3..69 are padding, zero in out.
    """
    op, device = "kda_prefill", device_of(q)
    expect(op, "q", q, (None, None, None), ACTIVATIONS, device, names="[T, H, K]")
    T, H, K = q.shape
    if H == 0 or K == 0:
        refuse(op, "q", "[T, H, K] with H and K at least 1", list(q.shape))
    expect(op, "k", k, (T, H, K), ACTIVATIONS, device, names="[T, H, K]")
    expect(op, "v", v, (T, None, None), ACTIVATIONS, device, names="[T, HV, V]")
    _, HV, V = v.shape
    if HV % H or HV < H:
        refuse(op, "v", f"[T, HV, V] with HV a multiple of H = {H}", list(v.shape))
    expect(op, "g_raw", g_raw, (T, HV, K), ACTIVATIONS, device, names="[T, HV, K]")
    expect(op, "beta_logits", beta_logits, (T, HV), ACTIVATIONS, device, names="[T, HV]")
    expect_state(op, state, HV, V, K, device)
    expect_gate(op, gate, A_log, dt_bias, lower_bound, allow_neg_eigval, HV, K, device)
    N = expect_offsets(op, cu_seqlens, device)
    expect_rows(op, N, read_slots, write_slots, null_slot, device)
    expect(op, "fresh", fresh, (N,), BOOL, device, names="[N]", optional=True)
    expect(op, "checkpoint_slots", checkpoint_slots, (N, None), INDEX, device, names="[N, M]", optional=True)
    contract.expect_number(op, "scale", scale, optional=True)
    contract.expect_flag(op, "qk_l2norm", qk_l2norm)
    contract.expect_int(op, "checkpoint_every", checkpoint_every, 0, contract.COUNT)
    if checkpoint_every % CHUNK or (checkpoint_every > 0) != (checkpoint_slots is not None):
        refuse(op, "checkpoint_every", f"a multiple of {CHUNK} with checkpoint_slots, else 0", checkpoint_every)
    expect(op, "out", out, (T, HV, V), (v.dtype,), device, names="[T, HV, V]", optional=True)
    expect(op, "workspace", workspace, (None,), (torch.uint8,), device, names="[bytes]", optional=True)
    if contract.given(workspace):
        least = least_bytes(T, N, HV, K, V, v.dtype)
        if not workspace.is_contiguous() or workspace.shape[0] < least:
            refuse(op, "workspace", f"contiguous, of at least {least} bytes", list(workspace.shape))
        contract.expect_apart(op, locals(), "workspace")
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty(v.shape, dtype=v.dtype, device=device)
    write_slots = read_slots if write_slots is None else write_slots
    library.kda_prefill(
        q, k, v, g_raw, beta_logits, cu_seqlens, state, read_slots, write_slots, gate, A_log, dt_bias, lower_bound,
        K**-0.5 if scale is None else scale, allow_neg_eigval, qk_l2norm, fresh, checkpoint_slots, checkpoint_every,
        null_slot, workspace, out, impl=impl, check=checking(op, impl, check),
    )  # fmt: skip
    return out


def kda_decode(
    qkv: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    conv_bias: torch.Tensor | None = None,
    gate: str = "bounded",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    scale: float | None = None,
    allow_neg_eigval: bool = False,
    null_slot: int | None = None,
    early: bool = False,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """One token a row through the whole KDA layer core: conv, SiLU, norms, gate, recurrence, gated RMSNorm.

    qkv `[B, C]`, C = 2 H K + HV V: the packed projections q | k | v, before the convolution (H follows from C).
    g_raw `[B, HV, K]`, beta_logits `[B, HV]`, gate, A_log, dt_bias, lower_bound, scale, allow_neg_eigval: as in
    `kda_prefill`; q and k are always L2-normalised. conv_weight `[C, W]`, conv_bias `[C]` and conv_state
    `[slots, C, W-1]`, mutated: as in `kda_conv`. state `[slots, HV, V, K]`, mutated. The slots `[B]` address both.
    out_gate `[B, HV, V]`, norm_weight `[V]`, norm_eps: the gated norm of `gated_rms_norm`.
    out `[B, HV, V]` of qkv's dtype. Nothing between qkv and out is rounded below float32.
    early: the launch may begin before the kernel in front of it in the stream ends (programmatic dependent launch, by
    `hopper` and `triton` from compute capability 9.0 on). That kernel must then write no pool, slot list or weight
    (conv_*, A_log, dt_bias, norm_weight); the other inputs it may write, and out it may read. Same bits.

    Example: read_slots [3, -1] advances slot 3 of both pools by row 0; row 1 is padding and its outputs are zero.
    """
    op, device = "kda_decode", device_of(qkv)
    expect(op, "qkv", qkv, (None, None), ACTIVATIONS, device, names="[B, C]")
    lead = (qkv.shape[0],)
    expect_tokens(op, lead, qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state)
    HV, V, K = state.shape[1:]
    expect_gate(op, gate, A_log, dt_bias, lower_bound, allow_neg_eigval, HV, K, device)
    contract.expect_number(op, "scale", scale, optional=True)
    contract.expect_flag(op, "early", early)
    expect_rows(op, lead[0], read_slots, write_slots, null_slot, device)
    expect_norm(op, lead, qkv, out_gate, norm_weight, norm_eps, out, HV, V)
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty((*lead, HV, V), dtype=qkv.dtype, device=device)
    write_slots = read_slots if write_slots is None else write_slots
    library.kda_decode(
        qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, write_slots,
        norm_weight, norm_eps, gate, A_log, dt_bias, lower_bound, K**-0.5 if scale is None else scale,
        allow_neg_eigval, null_slot, early, out, impl=impl, check=checking(op, impl, check),
    )  # fmt: skip
    return out


def kda_verify(
    qkv: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    read_slots: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    norm_eps: float,
    conv_bias: torch.Tensor | None = None,
    gate: str = "bounded",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    scale: float | None = None,
    allow_neg_eigval: bool = False,
    null_slot: int | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """`kda_decode` of S draft tokens a row, 1 to 8, with both pools left as they are.

    qkv `[B, S, C]`, g_raw `[B, S, HV, K]`, beta_logits `[B, S, HV]`, out_gate `[B, S, HV, V]`, out `[B, S, HV, V]`;
    everything else as in `kda_decode`. Equal, to rounding, to S calls of it on a copy of the pools: with a bfloat16
    pool the state is rounded after every token, as it would be in the pool. `kda_commit` then keeps the accepted ones.
    """
    op = "kda_verify"
    lead, device = arguments.expect_drafts(op, qkv), qkv.device
    expect_tokens(op, lead, qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state)
    HV, V, K = state.shape[1:]
    expect_gate(op, gate, A_log, dt_bias, lower_bound, allow_neg_eigval, HV, K, device)
    contract.expect_number(op, "scale", scale, optional=True)
    expect_rows(op, lead[0], read_slots, None, null_slot, device)
    expect_norm(op, lead, qkv, out_gate, norm_weight, norm_eps, out, HV, V)
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty((*lead, HV, V), dtype=qkv.dtype, device=device)
    library.kda_verify(
        qkv, g_raw, beta_logits, out_gate, conv_weight, conv_bias, conv_state, state, read_slots, norm_weight,
        norm_eps, gate, A_log, dt_bias, lower_bound, K**-0.5 if scale is None else scale, allow_neg_eigval, null_slot,
        out, impl=impl, check=checking(op, impl, check),
    )  # fmt: skip
    return out


def kda_commit(
    qkv: torch.Tensor,
    g_raw: torch.Tensor,
    beta_logits: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    accepted: torch.Tensor,
    read_slots: torch.Tensor,
    write_slots: torch.Tensor | None = None,
    *,
    conv_bias: torch.Tensor | None = None,
    gate: str = "bounded",
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float = -5.0,
    allow_neg_eigval: bool = False,
    null_slot: int | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> None:
    """Advances both pools by the first accepted[b] of the S tokens that `kda_verify` was given; returns nothing.

    accepted `[B]` int32 or int64 on the device, clipped to [0, S]; where it is 0 nothing is written. All else as in
    `kda_verify`. The pools are then what accepted[b] calls of `kda_decode` leave: bitwise by the reference, and where
    sums run in another order a float32 state within 1e-6; the history is always bitwise theirs.
    """
    op = "kda_commit"
    lead, device = arguments.expect_drafts(op, qkv), qkv.device
    expect_tokens(op, lead, qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state)
    expect_gate(op, gate, A_log, dt_bias, lower_bound, allow_neg_eigval, state.shape[1], state.shape[3], device)
    expect_rows(op, lead[0], read_slots, write_slots, null_slot, device)
    expect(op, "accepted", accepted, (lead[0],), INDEX, device, names="[B]")
    write_slots = read_slots if write_slots is None else write_slots
    library.kda_commit(
        qkv, g_raw, beta_logits, conv_weight, conv_bias, conv_state, state, accepted, read_slots, write_slots, gate,
        A_log, dt_bias, lower_bound, allow_neg_eigval, null_slot, impl=impl, check=checking(op, impl, check),
    )  # fmt: skip


def gated_rms_norm(
    o: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    impl: str | None = None,
    check: bool | None = None,
) -> torch.Tensor:
    """o / sqrt(mean o^2 + eps) * weight * sigmoid(gate) over the last dimension; eps is added to the mean.

    o, gate `[..., V]` of one shape, V at most 1024; weight `[V]` (not 1 + w); out `[..., V]` of gate's dtype.
    """
    op, device = "gated_rms_norm", device_of(o)
    shape = (None,) * max(1, o.dim() if isinstance(o, torch.Tensor) else 1)
    expect(op, "o", o, shape, ACTIVATIONS, device, names="[..., V]")
    if not 1 <= o.shape[-1] <= 1024:
        refuse(op, "o", "[..., V] with V from 1 to 1024", list(o.shape))
    expect(op, "gate", gate, tuple(o.shape), ACTIVATIONS, device, names="[..., V]")
    expect(op, "weight", weight, (o.shape[-1],), ACTIVATIONS, device, names="[V]")
    contract.expect_number(op, "eps", eps, sign=1)
    expect(op, "out", out, tuple(o.shape), (gate.dtype,), device, names="[..., V]", optional=True)
    if contract.given(out):
        contract.expect_apart(op, locals())
    if out is None:
        out = torch.empty(o.shape, dtype=gate.dtype, device=device)
    library.gated_rms_norm(o, gate, weight, eps, out, impl=impl, check=checking(op, impl, check))
    return out
