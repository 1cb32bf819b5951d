"""The QSA ops as a set: registration, compilation, devices, implementations, and errors that say what is wrong."""

import pytest
import torch

from thalweg import qsa
from thalweg.bench.calls import captured
from thalweg.qsa.api import IMPLS

OPS = ("qsa_append", "qsa_score", "qsa_topk", "qsa_select", "qsa_attend")


def inputs(op, rows=6, mrope=False, fp8=False, device="cpu"):
    """A small call of an op as keyword arguments of its public function."""
    make = torch.Generator().manual_seed(rows)

    def normal(*shape):
        return torch.randn(*shape, generator=make).bfloat16().to(device)

    table = torch.tensor([[2, 0, -1], [1, 3, 4]], dtype=torch.int32, device=device)
    owner = (torch.arange(rows, device=device) % 2).int()
    positions = torch.arange(rows, device=device) // 2 + 9
    paged = {"page_table": table, "row_request": owner}
    if op == "qsa_topk":
        return {"scores": normal(rows, 30).float(), "visible": positions, "k": 4}
    if op == "qsa_append":
        run = {"positions": torch.arange(rows, device=device) + 1, "row_request": torch.zeros_like(owner)}
        call = {"index_qk": normal(rows, 96), "q_norm_weight": normal(32), "k_norm_weight": normal(32)}
        call |= {"rope_table": qsa.rope_table(64, 16, device=device), "raw_ring": normal(2, 5, 32)}
        call |= {"block_keys": normal(5, 3, 32), "page_table": table} | run
        if mrope:
            call["rope_positions"] = torch.arange(3 * rows, device=device).view(rows, 3) % 60
            call["ring_positions"] = torch.zeros(2, 5, 3, dtype=torch.int32, device=device)
        return call
    if op == "qsa_attend":
        kv = normal(5, 6, 2, 2, 16)
        kv = kv.to(torch.float8_e4m3fn) if fp8 else kv
        call = {"q": normal(rows, 4, 16), "k_cache": kv[:, :, :, 0], "v_cache": kv[:, :, :, 1], "positions": positions}
        call |= {"block_ids": torch.tensor([[1, 0, -1]], device=device).repeat(rows, 1).int()} | paged
        return call | ({"k_scale": 0.5, "v_scale": 2.0} if fp8 else {"out_gate": normal(rows, 4, 16)})
    call = {"index_q": normal(rows, 2, 32), "block_keys": normal(5, 3, 32), "visible": positions // 2} | paged
    return call | ({"num_blocks": 8} if op == "qsa_score" else {"k": 3})


def library_call(op, call):
    """The same call as arguments of `torch.ops.thalweg.<op>`: `out` is given, defaults are filled in."""
    out = getattr(qsa, op)(**call)
    call = dict(call, out=torch.empty_like(out))
    defaults = {"ratio": 4, "eps": 1e-6, "workspace_bytes": 1 << 20, "scale": 0.25}
    names = [a.name for a in getattr(torch.ops.thalweg, op).default._schema.arguments if not a.kwarg_only]
    return tuple(call.get(name, defaults.get(name)) for name in names)


CALLS = [(op, {}) for op in OPS] + [("qsa_append", {"mrope": True}), ("qsa_attend", {"fp8": True})]


@pytest.mark.parametrize("op, options", CALLS[:-1])  # opcheck itself cannot compare float8 tensors
def test_b33_opcheck(op, options):
    """Schema, declared mutations, fake implementation and tracing with symbolic sizes."""
    torch.library.opcheck(getattr(torch.ops.thalweg, op).default, library_call(op, inputs(op, **options)))


@pytest.mark.parametrize("op, options", CALLS)
def test_b33_compiled_equals_eager(op, options):
    """fullgraph, the pools of the compiled call included; five calls that feed the state back."""
    compiled = torch.compile(getattr(qsa, op), fullgraph=True, backend="aot_eager")
    plain, traced = inputs(op, **options), inputs(op, **options)
    for _ in range(5):
        want, got = getattr(qsa, op)(**plain), compiled(**traced)
        assert torch.equal(got.float(), want.float())
        for name, tensor in plain.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(traced[name].float().nan_to_num(), tensor.float().nan_to_num()), name


def test_b31_row_counts_do_not_recompile():
    """After the first two row counts a step of any size runs the same compiled graph."""
    compiled = torch.compile(qsa.qsa_select, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (4, 6):
        compiled(**inputs("qsa_select", rows))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (2, 3, 5, 8, 16, 17):
            call = inputs("qsa_select", rows)
            assert torch.equal(compiled(**call), qsa.qsa_select(**call))


@pytest.mark.parametrize("op", OPS)
def test_b32_mixed_devices_raise(op):
    """Every tensor but the first moved to another device, one at a time: named, before anything runs."""
    call = inputs(op)
    names = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
    for name in names[1:]:
        moved = dict(call)
        moved[name] = moved[name].to("meta")
        with pytest.raises(ValueError, match=f"{op}: {name} must be .* on cpu, got .* on meta"):
            getattr(qsa, op)(**moved)


@pytest.mark.parametrize("op, options", CALLS)
def test_b34_every_argument_is_named_when_it_is_wrong(op, options):
    """Not a tensor, a dimension too many, the wrong kind of numbers: argument, what is wanted, what came."""
    call = inputs(op, **options)
    for name, value in call.items():
        if not isinstance(value, torch.Tensor):
            continue
        wrong = [[1, 2], value[None], value.to(torch.int16 if value.dtype.is_floating_point else torch.float64)]
        for bad in wrong:
            with pytest.raises(ValueError, match=f"^{op}: {name} must be .*, got .*"):
                getattr(qsa, op)(**dict(call, **{name: bad}))


def widen(name, dim, by):
    def change(call):
        x = call[name]
        shape = list(x.shape)
        shape[dim] += by
        call[name] = torch.zeros(shape, dtype=x.dtype)

    return change


def put(**values):
    return lambda call: call.update(values)


@pytest.mark.parametrize(
    "op, change, message",
    [
        ("qsa_append", widen("index_qk", 1, 2), r"index_qk must be \[T, \(Hi \+ 1\) \* 32\].*, got 98 columns"),
        ("qsa_append", widen("index_qk", 1, -64), r"index_qk must be .* with Hi at least 1, got 32 columns"),
        ("qsa_append", widen("k_norm_weight", 0, 1), r"k_norm_weight must be \[Di\] = \[32\] .*, got \[33\] bfloat16"),
        ("qsa_append", widen("rope_table", 1, 1), r"rope_table must be .* R even, at most 32, got \[64, 17\]"),
        ("qsa_append", widen("rope_table", 1, 18), r"rope_table must be .* R even, at most 32, got \[64, 34\]"),
        ("qsa_append", widen("raw_ring", 1, -2), r"raw_ring must be at least ratio = 4 entries deep, got 3"),
        ("qsa_append", widen("raw_ring", 0, 1), r"raw_ring must be \[requests, Rn, Di\] = \[2, any, 32\] .*, got \[3,"),
        ("qsa_append", widen("block_keys", 2, -1), r"block_keys must be .* = \[any, any, 32\] .*, got \[5, 3, 31\]"),
        (
            "qsa_append",
            widen("positions", 0, 1),
            r"positions must be \[rows\] = \[6\] int32/int64 on cpu, got \[7\] int64",
        ),
        ("qsa_append", put(ratio=0), r"ratio must be an int, at least 1, got 0"),
        ("qsa_append", put(rope_positions=torch.zeros(6, 3).int()), r"ring_positions must be given .*, got None"),
        ("qsa_append", put(out=torch.zeros(6, 2, 32)), r"out must be \[T, Hi, Di\] = .* bfloat16 .*, got .* float32"),
        ("qsa_score", put(num_blocks=-1), r"num_blocks must be an int, at least 0, got -1"),
        ("qsa_score", put(num_blocks=2.0), r"num_blocks must be an int, at least 0, got 2.0"),
        ("qsa_score", widen("block_keys", 2, 1), r"block_keys must be .* = \[any, any, 32\] .*, got \[5, 3, 33\]"),
        ("qsa_score", widen("visible", 0, -1), r"visible must be \[rows\] = \[6\] .*, got \[5\] int64"),
        ("qsa_score", put(out=torch.zeros(6, 9)), r"out must be \[R, num_blocks\] = \[6, 8\] .*, got \[6, 9\]"),
        ("qsa_topk", put(k=0), r"k must be an int, at least 1, got 0"),
        ("qsa_topk", put(k=True), r"k must be an int, at least 1, got True"),
        ("qsa_topk", put(scores=torch.zeros(6, 30).double()), r"scores must be .* float32 on cpu, got .* float64"),
        ("qsa_topk", put(out=torch.zeros(6, 4).long()), r"out must be .* int32 on cpu, got \[6, 4\] int64"),
        ("qsa_select", put(workspace_bytes=-1), r"workspace_bytes must be an int, at least 0, got -1"),
        ("qsa_select", widen("index_q", 1, -2), r"index_q must be .* Hi and Di at least 1, got \[6, 0, 32\]"),
        ("qsa_attend", widen("v_cache", 1, 1), r"v_cache must be the shape of k_cache = .*, got \[5, 7, 2, 16\]"),
        ("qsa_attend", widen("k_cache", 3, 1), r"k_cache must be .* = \[any, any, any, 16\] .*, got \[5, 6, 2, 17\]"),
        ("qsa_attend", put(k_scale=0.5), r"k_scale must be None unless the caches are float8_e4m3fn, got 0.5"),
        ("qsa_attend", widen("block_ids", 0, 1), r"block_ids must be \[R, k\] = \[6, any\] .*, got \[7, 3\]"),
        ("qsa_attend", widen("out_gate", 2, 1), r"out_gate must be \[R, Hq, D\] = .*, got \[6, 4, 17\]"),
        ("qsa_attend", put(ratio=2.5), r"ratio must be an int, at least 1, got 2.5"),
    ],
)
def test_b34_messages_name_argument_wanted_and_got(op, change, message):
    call = inputs(op)
    change(call)
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(qsa, op)(**call)


@pytest.mark.parametrize("op", OPS)
def test_a_named_implementation_runs_or_raises(op):
    call = inputs(op)
    for impl in IMPLS[op]:
        if impl.why_not(captured(op, call)) is None:
            getattr(qsa, op)(**call, impl=impl.name)
    with pytest.raises(ValueError, match=rf"{op}: impl must be one of .*reference.*, got 'fastest'"):
        getattr(qsa, op)(**call, impl="fastest")


@pytest.mark.parametrize(
    "op, name, dims",
    [
        ("qsa_append", "index_qk", (1, 0)),
        ("qsa_append", "block_keys", (2, 0, 1)),
        ("qsa_score", "index_q", (2, 0, 1)),
        ("qsa_select", "block_keys", (2, 0, 1)),
        ("qsa_attend", "q", (2, 1, 0)),
        ("qsa_attend", "out_gate", (1, 2, 0)),
        ("qsa_attend", "v_cache", (3, 0, 1, 2)),
        ("qsa_attend", "block_ids", (1, 0)),
    ],
)
def test_b07_what_a_kernel_counts_in_int32_is_held_to_it(op, name, dims):
    """A dimension laid out slowest in a large buffer: the kernels say why not, the reference takes it."""
    call = captured(op, inputs(op, mrope=op == "qsa_append"))
    x = call["q"] if name == "out_gate" else call[name]
    triton = next(impl for impl in IMPLS[op] if impl.name == "triton")
    last = 2**31 // (x.shape[dims[0]] - 1) + 1
    for stride, reason in ((last, f"span less than {2**31} "), (1, None)):
        strides = [stride if d == dims[0] else 8 * x.shape[dims[0]] for d in range(x.dim())]
        call[name] = torch.empty_strided(x.shape, strides, dtype=x.dtype, device="meta")
        got = triton.why_not(call)
        assert reason in got if reason else "span" not in (got or "")


@pytest.mark.parametrize("op", OPS)
def test_only_declared_arguments_change(op):
    """Pools and `out` are all that a call writes; with `check` nothing more."""
    call = inputs(op)
    before = {name: value.clone() for name, value in call.items() if isinstance(value, torch.Tensor)}
    mutated = {a.name for a in getattr(torch.ops.thalweg, op).default._schema.arguments if a.alias_info}
    getattr(qsa, op)(**call, check=True)
    changed = {name for name, value in before.items() if not torch.equal(value.float(), call[name].float())}
    assert changed <= mutated - {"out"}
    assert changed == ({"raw_ring", "block_keys"} if op == "qsa_append" else set())


@pytest.mark.parametrize(
    "op, values, message",
    [
        (
            "qsa_score",
            {"visible": torch.tensor([0, 9, 3, 12, 1, 0])},
            r"visible must be indices below 9 .*got \[9, 12\]",
        ),
        (
            "qsa_select",
            {"visible": torch.tensor([0, 9, 3, 12, 1, 0])},
            r"visible must be indices below 10 .*got \[12\]",
        ),
        ("qsa_topk", {"visible": torch.tensor([0, 31, 3, 30, 1, 0])}, r"visible must be indices below 31 .*got \[31\]"),
        ("qsa_select", {"row_request": torch.tensor([0, 1, 2, -1, 1, 0])}, r"row_request must be .* 2 .*got \[2\]"),
        ("qsa_score", {"page_table": torch.tensor([[5, -1, 0]] * 2)}, r"page_table must be .* 5 .*got \[5\]"),
    ],
)
def test_check_names_values_that_would_be_clipped(op, values, message):
    call = inputs(op) | values
    getattr(qsa, op)(**call)
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(qsa, op)(**call, check=True)
