"""KDA ops as torch.library ops: opcheck, compilation, what is refused and how, host-side checks on demand."""

import inspect

import kda_calls as calls
import pytest
import torch

from thalweg import kda
from thalweg.kda import library

OPS = tuple(library.IMPLS)


def example(op):
    """Public arguments of op by name, small, every optional tensor given."""
    call = calls.layer(2) if op == "kda_decode" else calls.layer(2, 3)
    if op == "kda_prefill":
        marks = {"checkpoint_slots": torch.tensor([[3], [4]]), "checkpoint_every": 64}
        call = {**calls.prefill((70, 3)), **marks, "fresh": torch.tensor([False, True])}
    elif op == "kda_conv":
        pool, cu, slots = torch.randn(5, 9, 3), torch.tensor([0, 66, 70]), torch.tensor([1, 2])
        call = {"x": torch.randn(70, 9), "weight": torch.randn(9, 4), "cu_seqlens": cu, "conv_state": pool}
        call = {**call, "read_slots": slots, "bias": torch.randn(9), "fresh": torch.tensor([False, True])}
    elif op == "kda_commit":
        call = {**call, "accepted": torch.tensor([2, 0])}
        call = {name: call[name] for name in inspect.signature(kda.kda_commit).parameters if name in call}
    elif op == "solve_unit_lower":
        call = {"lower": torch.randn(1, 20, 2, 16).tril(-1), "cu_seqlens": torch.tensor([0, 20])}
    elif op == "gated_rms_norm":
        call = {"o": torch.randn(3, 2, 8), "gate": torch.randn(3, 2, 8), "weight": torch.randn(8), "eps": 1e-5}
    return call


def registered(op):
    """Arguments of the torch.library op that the public op makes of `example(op)`."""
    seen = []

    class Spy:
        def __call__(self, *args, **kwargs):
            seen.append((args, kwargs))

    real, spy = getattr(library, op), Spy()
    setattr(library, op, spy)
    try:
        getattr(kda, op)(**example(op))
    finally:
        setattr(library, op, real)
    return real, *seen[0]


@pytest.mark.parametrize("op", OPS)
def test_b33_opcheck(op):
    real, args, kwargs = registered(op)
    torch.library.opcheck(real, args, kwargs)


@pytest.mark.parametrize("op", OPS)
def test_b33_fullgraph_compiled_equals_eager(op):
    """Bits of the outputs and of every argument, whether mutated or not, over two calls on the same pools."""
    torch._dynamo.reset()
    names = list(example(op))
    public = getattr(kda, op)
    compiled = torch.compile(lambda *args: public(**dict(zip(names, args))), backend="aot_eager", fullgraph=True)
    call = example(op)
    eager, traced = ({n: calls.copy(x) if torch.is_tensor(x) else x for n, x in call.items()} for _ in range(2))
    for _ in range(2):
        wanted, got = public(**eager), compiled(*traced.values())
        assert calls.same(got, wanted)
        assert all(calls.same(traced[n], eager[n]) for n in names if torch.is_tensor(eager[n]))


def test_b31_one_graph_serves_every_batch_size():
    torch._dynamo.reset()
    graphs = []
    names = list(calls.layer(2))

    def step(*args):
        return kda.kda_decode(**dict(zip(names, args)))

    compiled = torch.compile(step, backend=lambda g, _: graphs.append(g) or g, fullgraph=True, dynamic=True)
    for B in (2, 3, 5, 8):
        call = calls.layer(B)
        wanted = calls.run(kda.kda_decode, call)[0]
        assert calls.same(compiled(*(calls.copy(x) if torch.is_tensor(x) else x for x in call.values())), wanted)
    assert len(graphs) == 1


@pytest.mark.parametrize("op", OPS)
def test_out_is_used_and_returned(op):
    call = example(op)
    if op == "kda_commit":
        assert "out" not in inspect.signature(kda.kda_commit).parameters
        return
    wanted = calls.run(getattr(kda, op), call)[0]
    out = torch.full_like(wanted, torch.nan)
    assert calls.run(getattr(kda, op), call, out=out)[0] is out and calls.same(out, wanted)
    with pytest.raises(ValueError, match=f"^{op}: out must be .*, got "):
        getattr(kda, op)(**call, out=out[..., 1:])
    with pytest.raises(ValueError, match=f"^{op}: out must be .*, got .* float64 on cpu"):
        getattr(kda, op)(**call, out=out.double())


@pytest.mark.parametrize("op", OPS)
def test_named_implementation_runs_or_raises(op):
    assert calls.same(*(calls.run(getattr(kda, op), example_of(op), impl=name)[0] for name in ("reference", None)))
    with pytest.raises(ValueError, match=f"^{op}: impl must be one of .*reference, got 'fast'"):
        calls.run(getattr(kda, op), example(op), impl="fast")


def example_of(op):
    torch.manual_seed(1)
    return example(op)


@pytest.mark.parametrize("op", OPS)
def test_no_gradient_is_recorded(op):
    call = example(op)
    for name in ("A_log", "conv_weight", "weight", "norm_weight", "q", "qkv", "lower", "o"):
        if name in call:
            call[name] = call[name].clone().requires_grad_()
    out, state, conv_state = calls.run(getattr(kda, op), call)
    assert not any(x is not None and x.requires_grad for x in (out, state, conv_state))


BAD = (
    (
        "kda_conv",
        {"x": torch.zeros(70, 130)},
        r"weight must be \[C, W\] = \[130, any\] .*, got \[9, 4\] float32 on cpu",
    ),
    ("kda_conv", {"weight": torch.zeros(9, 9)}, r"weight must be \[C, W\] with W from 2 to 8, got \[9, 9\]"),
    ("kda_conv", {"weight": torch.zeros(9, 3)}, r"conv_state must be .* = \[any, 9, 2\] .*, got \[5, 9, 3\]"),
    ("kda_conv", {"conv_state": torch.zeros(5, 9, 3).bfloat16()}, r"conv_state must be .* float32/float32 .*bfloat16"),
    ("kda_conv", {"bias": torch.zeros(8)}, r"bias must be \[C\] = \[9\] .*, got \[8\]"),
    ("kda_conv", {"fresh": torch.zeros(2)}, r"fresh must be \[N\] = \[2\] bool on cpu, got \[2\] float32 on cpu"),
    ("kda_conv", {"read_slots": torch.zeros(3).long()}, r"read_slots must be one a row = \[2\] .*, got \[3\] int64"),
    ("kda_prefill", {"q": torch.zeros(73, 2, 24).double()}, r"q must be .* bfloat16/float16/float32 .* float64 on cpu"),
    ("kda_prefill", {"k": torch.zeros(73, 2, 25)}, r"k must be \[T, H, K\] = \[73, 2, 24\] .*, got \[73, 2, 25\]"),
    ("kda_prefill", {"k": None}, r"k must be .*, got NoneType None"),
    ("kda_prefill", {"v": torch.zeros(73, 3, 40)}, r"v must be .* HV a multiple of H = 2, got \[73, 3, 40\]"),
    ("kda_prefill", {"g_raw": torch.zeros(73, 2, 24)}, r"g_raw must be .* \[73, 4, 24\] .*, got \[73, 2, 24\]"),
    ("kda_prefill", {"beta_logits": torch.zeros(73, 4, 1)}, r"beta_logits must be \[T, HV\] = \[73, 4\] .*, got"),
    ("kda_prefill", {"state": torch.zeros(5, 4, 24, 40)}, r"state must be .* = \[any, 4, 40, 24\] float32/bfloat16"),
    (
        "kda_prefill",
        {"state": torch.zeros(5, 4, 40, 24).half()},
        r"state must be .* float32/bfloat16 .* float16 on cpu",
    ),
    ("kda_prefill", {"cu_seqlens": torch.tensor([0.0, 70.0, 73.0])}, r"cu_seqlens must be .* int32/int64 .* float32"),
    ("kda_prefill", {"cu_seqlens": torch.zeros(3, 1).long()}, r"cu_seqlens must be \[N \+ 1\] = .*, got \[3, 1\]"),
    ("kda_prefill", {"read_slots": torch.zeros(2).short()}, r"read_slots must be .* int32/int64 .*, got \[2\] int16"),
    ("kda_prefill", {"write_slots": torch.zeros(1).long()}, r"write_slots must be .* \[2\] .*, got \[1\]"),
    ("kda_prefill", {"gate": "hard"}, r"gate must be one of given, soft, bounded, got hard"),
    ("kda_prefill", {"gate": "given"}, r"A_log and dt_bias must be None where gate is given, got a tensor"),
    ("kda_prefill", {"lower_bound": 5.0}, r"lower_bound must be a finite number below 0, got 5.0"),
    ("kda_prefill", {"A_log": torch.zeros(4).bfloat16()}, r"A_log must be \[HV\] = \[4\] float32 .* bfloat16"),
    ("kda_prefill", {"dt_bias": torch.zeros(4)}, r"dt_bias must be \[HV, K\] = \[4, 24\] float32 .*, got \[4\]"),
    ("kda_prefill", {"checkpoint_every": 100}, r"checkpoint_every must be a multiple of 64 .*, got 100"),
    ("kda_prefill", {"checkpoint_every": 0}, r"checkpoint_every must be .*, got 0"),
    ("kda_prefill", {"checkpoint_slots": None}, r"checkpoint_every must be .*, got 64"),
    ("kda_decode", {"qkv": torch.zeros(2, 257)}, r"qkv must be C = 2 H K \+ HV V wide .*, got C = 257"),
    ("kda_decode", {"qkv": torch.zeros(2, 160)}, r"qkv must be C = 2 H K \+ HV V wide .*, got C = 160"),
    ("kda_decode", {"out_gate": torch.zeros(2, 4, 41)}, r"out_gate must be .*, got \[2, 4, 41\] float32 on cpu"),
    ("kda_decode", {"norm_weight": torch.zeros(41)}, r"norm_weight must be \[V\] = \[40\] .*, got \[41\]"),
    ("kda_decode", {"conv_weight": torch.zeros(255, 4)}, r"conv_weight must be \[C, W\] = \[256, any\] .*, got \[255"),
    ("kda_verify", {"qkv": torch.zeros(2, 9, 256)}, r"qkv must be \[B, S, C\] with S from 1 to 8, got \[2, 9, 256\]"),
    ("kda_verify", {"g_raw": torch.zeros(2, 4, 24)}, r"g_raw must be .* = \[2, 3, 4, 24\] .*, got \[2, 4, 24\]"),
    ("kda_commit", {"accepted": torch.zeros(3).long()}, r"accepted must be \[B\] = \[2\] int32/int64 .*, got \[3\]"),
    (
        "solve_unit_lower",
        {"lower": torch.zeros(1, 20, 2, 24)},
        r"lower must be .* C 16, 32 or 64, got \[1, 20, 2, 24\]",
    ),
    (
        "solve_unit_lower",
        {"lower": torch.zeros(2, 20, 2, 16)},
        r"lower must be \[1, T, H, C\] where cu_seqlens is given",
    ),
    ("solve_unit_lower", {"precision": "bf16"}, r"precision must be one of ieee, tf32x3, tf32, got bf16"),
    ("solve_unit_lower", {"workspace_bytes": -1}, r"workspace_bytes must be None or an int, at least 0, got -1"),
    ("solve_unit_lower", {"out_dtype": torch.float64}, r"out_dtype must be None, bfloat16, float16 or float32, got"),
    ("gated_rms_norm", {"gate": torch.zeros(3, 2, 9)}, r"gate must be .* = \[3, 2, 8\] .*, got \[3, 2, 9\]"),
    ("gated_rms_norm", {"o": torch.zeros(2, 1025)}, r"o must be .* V from 1 to 1024, got \[2, 1025\]"),
    ("gated_rms_norm", {"o": torch.zeros(())}, r"o must be .*, got \[\] float32 on cpu"),
)


@pytest.mark.parametrize("op, change, message", BAD, ids=lambda x: "-".join(x) if isinstance(x, dict) else None)
def test_b34_refusals_name_argument_got_and_wanted(op, change, message):
    call = {**example(op), **change}
    before = {n: x.clone() for n, x in call.items() if torch.is_tensor(x)}
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        getattr(kda, op)(**call)
    assert all(calls.same(call[n], x) for n, x in before.items())


@pytest.mark.parametrize("op", OPS)
def test_b34_mixed_devices(op):
    """Every tensor argument in turn on another device: refused by name before anything runs."""
    call = example(op)
    for name in call:
        if torch.is_tensor(call[name]) and name not in ("q", "qkv", "x", "lower", "o"):
            with pytest.raises(ValueError, match=f"^{op}: {name} must be .* on cpu, got .* on meta"):
                getattr(kda, op)(**{**call, name: call[name].to("meta")})


CHECKED = (
    (
        "kda_prefill",
        {"cu_seqlens": torch.tensor([0, 70, 80])},
        r"cu_seqlens must be .* in \[0, 73\], got \[0, 70, 80\]",
    ),
    (
        "kda_prefill",
        {"cu_seqlens": torch.tensor([0, 70, 60])},
        r"cu_seqlens must be non-decreasing .*, got \[0, 70, 60\]",
    ),
    ("kda_prefill", {"read_slots": torch.tensor([1, 5])}, r"read_slots must be indices below 5 .*, got \[5\]"),
    ("kda_prefill", {"write_slots": torch.tensor([9, 1])}, r"write_slots must be indices below 5 .*, got \[9\]"),
    (
        "kda_prefill",
        {"write_slots": torch.tensor([2, 2])},
        r"write_slots must be distinct .*, got repeated slots \[2\]",
    ),
    (
        "kda_prefill",
        {"write_slots": torch.tensor([2, 0]), "fresh": None},
        r"read_slots must be slots that no other row of the call writes, got \[2\]",
    ),
    (
        "kda_prefill",
        {"checkpoint_slots": torch.tensor([[7], [4]])},
        r"checkpoint_slots must be indices below 5 .* \[7\]",
    ),
    ("kda_prefill", {"checkpoint_slots": torch.tensor([[1], [4]])}, r"checkpoint_slots must be distinct .* \[1\]"),
    ("kda_conv", {"cu_seqlens": torch.tensor([-1, 66, 70])}, r"cu_seqlens must be .*, got \[-1, 66, 70\]"),
    ("kda_conv", {"read_slots": torch.tensor([1, 1])}, r"write_slots must be distinct among live rows, got .* \[1\]"),
    ("kda_decode", {"read_slots": torch.tensor([5, 1])}, r"read_slots must be indices below 5 .*, got \[5\]"),
    ("kda_decode", {"write_slots": torch.tensor([2, 1])}, r"read_slots must be slots that no other row .* \[1, 2\]"),
    ("kda_verify", {"read_slots": torch.tensor([5, 1])}, r"read_slots must be indices below 5 .*, got \[5\]"),
    ("kda_commit", {"accepted": torch.tensor([4, 0])}, r"accepted must be counts in \[0, 3\], got \[4, 0\]"),
    ("kda_commit", {"accepted": torch.tensor([3, -1])}, r"accepted must be counts in \[0, 3\], got \[3, -1\]"),
    ("solve_unit_lower", {"cu_seqlens": torch.tensor([0, 21])}, r"cu_seqlens must be .* in \[0, 20\], got \[0, 21\]"),
)


@pytest.mark.parametrize("op, change, message", CHECKED, ids=lambda x: "-".join(x) if isinstance(x, dict) else None)
def test_check_reads_the_values(op, change, message, monkeypatch):
    """With check=True, or THALWEG_CHECK=1 and check left alone, a value that would be clipped raises; else it runs."""
    call, public = {**example(op), **change}, getattr(kda, op)
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        calls.run(public, call, check=True)
    calls.run(public, call)
    monkeypatch.setenv("THALWEG_CHECK", "1")
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        calls.run(public, call)
    calls.run(public, call, check=False)


@pytest.mark.parametrize("op", OPS)
def test_check_lets_good_values_and_padding_pass(op):
    call = example(op)
    calls.run(getattr(kda, op), call, check=True)
    if "read_slots" in call:
        calls.run(getattr(kda, op), call, check=True, read_slots=torch.tensor([-1, -1]))
        calls.run(getattr(kda, op), call, check=True, read_slots=torch.tensor([4, 4]), null_slot=4)
