"""What the public ops of both families refuse alike: arguments that are no tensors, shared memory, bad scalars."""

import inspect
import itertools

import numpy
import pytest
import test_kda_contract as kda_ops
import test_qsa as qsa_ops
import torch

from thalweg import contract, kda, qsa

OPS = (*kda_ops.OPS, *qsa_ops.OPS)
WITH_OUT = tuple(op for op in OPS if op != "kda_commit")
POOLS = ("state", "conv_state", "raw_ring", "block_keys", "ring_positions", "k_cache", "v_cache")


def public(op):
    """An op and a small call of it by name."""
    if op in kda_ops.OPS:
        return getattr(kda, op), kda_ops.example_of(op)
    return getattr(qsa, op), qsa_ops.inputs(op, mrope=op == "qsa_append", fp8=op == "qsa_attend")


def refused(op, changes, message):
    """The call is refused with this message, and no argument of it has changed."""
    run, call = public(op)
    call = {**call, **changes(call)} if callable(changes) else {**call, **changes}
    before = {name: x.clone() for name, x in call.items() if torch.is_tensor(x)}
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        run(**call)
    assert all(torch.equal(call[n].float().nan_to_num(), x.float().nan_to_num()) for n, x in before.items())


# Tensors


@pytest.mark.parametrize("op", OPS)
def test_b34_every_tensor_argument_that_is_none(op):
    """The first argument too, whose device and sizes the others are held to."""
    for name, value in public(op)[1].items():
        if torch.is_tensor(value):
            for bad in (3, [1, 2], "x", numpy.zeros((2, 3)), object):
                refused(op, {name: bad}, rf"{name} must be .*, got ")
            refused(op, {name: torch.zeros(())}, rf"{name} must be .*, got \[\] float32 on cpu$")
    first, *_ = inspect.signature(public(op)[0]).parameters
    refused(op, {first: None}, rf"{first} must be \S+.* bfloat16/float16/float32|scores must be .*, got NoneType None$")


@pytest.mark.parametrize("op", OPS)
def test_tensors_whose_values_do_not_lie_in_memory_at_their_strides(op):
    """Sparse, opaque, nested, negated when they are read (a kernel would read the sign that is not there)."""
    run, call = public(op)
    for name, value in call.items():
        if not torch.is_tensor(value) or value.dtype == torch.float8_e4m3fn:
            continue
        odd = {"sparse_coo": value.to_sparse()}
        if value.is_floating_point():
            odd |= {"lazily negated": torch._neg_view(value), "_mkldnn": value.float().to_mkldnn()}
        if value.dim() > 1:
            odd["nested"] = torch.nested.nested_tensor(list(value), layout=torch.jagged)
        for kind, bad in odd.items():
            with pytest.raises(ValueError, match=rf"^{op}: {name} must be .*, got a {kind} tensor$"):
                run(**call | {name: bad})


@pytest.mark.parametrize("op", ("kda_conv", "kda_prefill", "solve_unit_lower"))
def test_b34_offsets_without_an_entry(op):
    refused(op, {"cu_seqlens": torch.zeros(0).long()}, r"cu_seqlens must be \[N \+ 1\] with N at least 0, got \[0\]")
    if op != "solve_unit_lower":
        refused(op, {"cu_seqlens": None}, r"cu_seqlens must be \[N \+ 1\] = .*, got NoneType None$")


def empty(**dims):
    """Every tensor named loses its dimension."""
    return lambda call: {name: call[name].narrow(dim, 0, 0) for name, dim in dims.items()}


@pytest.mark.parametrize(
    "op, changes, message",
    [
        ("kda_prefill", empty(q=1, k=1), r"q must be \[T, H, K\] with H and K at least 1, got \[73, 0, 24\]"),
        ("kda_prefill", empty(q=2, k=2, g_raw=2, state=3), r"q must be .* H and K at least 1, got \[73, 2, 0\]"),
        ("kda_prefill", empty(v=1, g_raw=1, state=1), r"v must be .* a multiple of H = 2, got \[73, 0, 40\]"),
        ("kda_decode", empty(g_raw=1, state=1), r"state must be .* with HV and K at least 1, got \[5, 0, 40, 24\]"),
        ("kda_verify", empty(g_raw=3, state=3), r"state must be .* with HV and K at least 1, got \[5, 4, 40, 0\]"),
        ("kda_commit", empty(g_raw=2, state=1), r"state must be .* with HV and K at least 1, got \[5, 0, 40, 24\]"),
    ],
)
def test_b34_no_heads_and_no_columns(op, changes, message):
    refused(op, changes, message)


def test_no_tokens_no_rows_and_no_values_are_work_done():
    run, call = public("kda_prefill")
    call.update(checkpoint_slots=None, checkpoint_every=0)
    for dims, shape in (({"v": 2, "state": 2}, (73, 4, 0)), (dict.fromkeys("qkv", 0), (0, 4, 40))):
        changes = empty(**dims, **({} if "state" in dims else {"g_raw": 0, "beta_logits": 0}))(call)
        assert run(**{**call, **changes}).shape == shape
    rows = ("qkv", "g_raw", "beta_logits", "out_gate", "read_slots")
    run, call = public("kda_decode")
    assert run(**{**call, **empty(**dict.fromkeys(rows, 0))(call)}).shape == (0, 4, 40)


# Memory


@pytest.mark.parametrize("op", WITH_OUT)
def test_out_must_not_share_memory(op):
    """With any tensor argument, each in turn made to begin inside the memory of `out`, not only at its start."""
    run, call = public(op)
    wanted = run(**public(op)[1])
    for name, value in call.items():
        if torch.is_tensor(value):
            size = wanted.numel() * wanted.element_size()
            memory = torch.zeros(size + value.numel() * value.element_size() + 16, dtype=torch.uint8)
            out = memory[:size].view(wanted.dtype).view(wanted.shape)
            start = (size - 1) // 16 * 16
            twin = memory[start : start + value.numel() * value.element_size()].view(value.dtype).view(value.shape)
            twin.copy_(value)
            refused(op, {name: twin, "out": out}, f"out must be in memory of its own, got memory shared with {name}$")


@pytest.mark.parametrize("pool", ("raw_ring", "block_keys", "ring_positions"))
def test_what_an_append_writes_must_not_share_memory(pool):
    """With any other tensor argument, which begins in the last 16 bytes of the pool; beside it is no fault."""
    run, call = public("qsa_append")
    size = call[pool].numel() * call[pool].element_size()
    for name, value in call.items():
        if torch.is_tensor(value) and name != pool:
            for start in (size - 16, size):
                memory = torch.zeros(size + value.numel() * value.element_size() + 16, dtype=torch.uint8)
                mine = memory[:size].view(call[pool].dtype).view(call[pool].shape)
                twin = memory[start : start + value.numel() * value.element_size()].view(value.dtype).view(value.shape)
                twin.copy_(value)
                if start == size:
                    run(**{**call, name: twin, pool: mine})
                else:
                    message = f"({pool}|{name}) must be in memory of its own, got memory shared with ({name}|{pool})$"
                    refused("qsa_append", {name: twin, pool: mine}, message)


@pytest.mark.parametrize("op", WITH_OUT)
def test_out_and_pools_must_not_overlap_themselves(op):
    run, call = public(op)
    out = run(**public(op)[1])
    overlapping = {"out": out, **{name: call[name] for name in POOLS if name in call}}
    for name, tensor in overlapping.items():
        for strides in ((0,) * tensor.dim(), (*(1,) * (tensor.dim() - 1), 1)):
            twin = torch.zeros(tensor.numel() + 64, dtype=tensor.dtype).as_strided(tensor.shape, strides)
            message = rf"{name} must be a tensor that does not overlap itself, got \[.*\] with strides \(.*\)$"
            with pytest.raises(ValueError, match=f"^{op}: {message}"):
                run(**{**call, name: twin})


def test_out_may_lie_beside_the_inputs_in_one_buffer():
    """Disjoint columns of one row pitch, interleaved columns and disjoint rows."""
    run, call = public("kda_prefill")
    T, HV, V = call["v"].shape
    wanted, state = run(**{**call, "state": call["state"].clone()}), call["state"]
    columns = torch.zeros(T, 3 * HV * V + 5)
    interleaved, rows = torch.zeros(T, HV, V, 2), torch.zeros(2 * T, HV, V)
    pairs = (
        (columns[:, : HV * V].view(T, HV, V), columns[:, HV * V : 2 * HV * V].view(T, HV, V)),
        (columns[:, HV * V + 3 : 2 * HV * V + 3].view(T, HV, V), columns[:, : HV * V].view(T, HV, V)),
        (interleaved[..., 0], interleaved[..., 1]),
        (rows[T:], rows[:T]),
    )
    for v, out in pairs:
        v.copy_(call["v"])
        assert torch.equal(run(**{**call, "v": v, "out": out, "state": state.clone()}), wanted)


def test_shared_memory_is_found_exactly():
    """Against the addresses listed one by one: random sizes, strides, offsets and element sizes in one buffer."""
    make = torch.Generator().manual_seed(0)
    base, seen = torch.zeros(600, dtype=torch.uint8), set()

    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=make))]

    def view():
        flat = base.view(pick(torch.uint8, torch.bfloat16, torch.float32))
        shape = [pick(0, *(1, 2, 3, 4) * 4) for _ in range(pick(0, 1, 2, 3))]
        return flat.as_strided(shape, [pick(0, 1, 1, 2, 3, 4, 5, 8, 12) for _ in shape], pick(*range(40)))

    def addresses(x):
        steps = itertools.product(*(range(n) for n in x.shape))
        at = [x.data_ptr() + x.element_size() * sum(i * s for i, s in zip(step, x.stride())) for step in steps]
        return at, {a + i for a in at for i in range(x.element_size())}

    for _ in range(1500):
        a, b = view(), view()
        (starts, used), (_, other) = addresses(a), addresses(b)
        assert contract.overlaps_itself(a) == (len(set(starts)) < len(starts))
        assert contract.share_memory(a, b) == bool(used & other)
        seen.add((contract.overlaps_itself(a), bool(used & other)))
    assert len(seen) == 4


# Scalars

NUMBERS = {"scale": 0, "norm_eps": 1, "eps": 1, "lower_bound": -1, "k_scale": 1, "v_scale": 1}
INTS = {"null_slot": -(2**63), "checkpoint_every": 0, "ratio": 1, "k": 1, "num_blocks": 0, "workspace_bytes": 0}
FLAGS = ("allow_neg_eigval", "qk_l2norm", "check")
CHOICES = ("gate", "precision", "impl")


def scalars(names):
    pairs = [(op, name) for op in OPS for name in names if name in inspect.signature(public(op)[0]).parameters]
    return pytest.mark.parametrize(
        "op, name", [pair for pair in pairs if not torch.is_tensor(public(pair[0])[1].get(pair[1]))]
    )


@scalars(NUMBERS)
def test_b34_numbers(op, name):
    sign = ("", " above 0", " below 0")[NUMBERS[name]]
    wrong = [float("nan"), float("inf"), -float("inf"), True, "1", [1.0], torch.tensor(1.0), 1j, 10**400]
    for bad in wrong + ([-float(NUMBERS[name]), 0, 0.0, -0.0] if sign else []):
        refused(op, {name: bad}, rf"{name} must be (None or )?a finite number{sign}, got ")
    for bad in (1e300, -3e38, 10**40, *((1e-60, -1e-45) if sign else ())):
        refused(
            op, {name: bad if not sign else -abs(bad) if NUMBERS[name] < 0 else abs(bad)}, f"{name} must be within 2"
        )
    run, call = public(op)
    for good in (1, 0.5, numpy.float32(0.5), numpy.float64(2), numpy.float16(1), numpy.int64(1)):
        run(**{**call, name: -good if NUMBERS[name] < 0 else good})
    for good in (0, -1.5) if not sign else ():
        run(**{**call, name: good})


def test_b34_scales_whose_product_float32_does_not_hold():
    refused(
        "qsa_attend", {"scale": 1e20, "k_scale": 1e20}, r"scale \* k_scale must be within 2\*\*126 in size, as float32"
    )


@scalars(INTS)
def test_b34_ints(op, name):
    message = rf"{name} must be (None or )?an int, (at least|at most|in the int64 range)"
    for bad in (True, 1.0, "1", [1], torch.tensor(1), 2**63, 10**30, INTS[name] - 1):
        refused(op, {name: bad}, message)


@scalars(FLAGS)
def test_b34_flags(op, name):
    for bad in (0, 1, "yes", [True], torch.tensor(True), *(() if name == "check" else (None,))):
        refused(op, {name: bad}, rf"{name} must be (None, )?True or False, got ")


@scalars(CHOICES)
def test_b34_names(op, name):
    wanted = "None or the name of an implementation" if name == "impl" else "one of "
    for bad in (0, True, ["soft"], b"soft", torch.tensor(1), *(() if name == "impl" else (None, "other"))):
        refused(op, {name: bad}, rf"{name} must be {wanted}.*, got ")


def test_b34_out_dtype():
    for bad in (torch.float64, torch.int32, "bfloat16", float, torch.zeros(2, 2)):  # in one line, whatever it is
        refused("solve_unit_lower", {"out_dtype": bad}, "out_dtype must be None, bfloat16, float16 or float32, got .*$")


def test_b31_symbolic_numbers_are_traced():
    """Numbers and counts that vary from call to call: the checks hold on symbols, and refuse what is out of range."""
    x, scores = torch.randn(3, 8), torch.randn(3, 30)

    def step(eps, k):
        y = kda.gated_rms_norm(x, x, x[0], eps, out=torch.empty_like(x))
        return y, qsa.qsa_topk(scores, torch.full((3,), 30), k)

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=False):
        compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
        for eps, k in ((1e-5, 3), (0.5, 4), (0.25, 7)):
            assert all(torch.equal(a, b) for a, b in zip(compiled(eps, k), step(eps, k)))
