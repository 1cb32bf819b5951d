"""Which implementation runs and why: named ones never fall back, an automatic choice has a last resort."""

import pytest
import torch

from thalweg import cases, device, dispatch, kda_prefill
from thalweg.bench.calls import IMPLS, captured, explained
from thalweg.dispatch import Impl

CALL = {"size": 7}


def impl(name: str, reason: str | None = None, run=None) -> Impl:
    return Impl(name, f"the {name} one", lambda call: reason, run or (lambda **call: None))


FAST, PLAIN, ODD = impl("fast", "size must be even, got 7"), impl("plain"), impl("odd")


def test_automatic_choice_takes_the_first_that_can():
    assert dispatch.pick("op", (FAST, PLAIN, ODD), CALL) is PLAIN
    assert dispatch.pick("op", (ODD, FAST, PLAIN), CALL) is ODD


def test_named_choice_runs_or_raises_and_never_falls_back():
    assert dispatch.pick("op", (FAST, PLAIN, ODD), CALL, "odd") is ODD
    with pytest.raises(ValueError, match=r"^op: impl 'fast' cannot take this call: size must be even, got 7$"):
        dispatch.pick("op", (FAST, PLAIN), CALL, "fast")


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"^op: impl must be one of fast, plain, got 'slow'$"):
        dispatch.pick("op", (FAST, PLAIN), CALL, "slow")
    with pytest.raises(ValueError, match="got ''"):
        dispatch.pick("op", (FAST, PLAIN), CALL, "")


def test_when_none_can_every_reason_is_given():
    with pytest.raises(ValueError, match=r"no implementation can take this call \(fast: size must be even, got 7\)"):
        dispatch.pick("op", (FAST,), CALL)


def test_explain_names_the_chosen_one_and_why_each_other_was_passed_over():
    verdicts = dispatch.explain("op", (FAST, PLAIN, ODD), CALL)
    assert [(v.name, v.chosen) for v in verdicts] == [("fast", False), ("plain", True), ("odd", False)]
    assert verdicts[0].reason == "size must be even, got 7"
    assert verdicts[1].reason == "the plain one; first that can take the call"
    assert verdicts[2].reason == "can take the call, but plain was preferred"


def test_explain_of_a_named_choice():
    verdicts = dispatch.explain("op", (FAST, PLAIN, ODD), CALL, "odd")
    assert [v.chosen for v in verdicts] == [False, False, True]
    assert verdicts[1].reason == "can take the call, but odd was named"
    assert verdicts[2].reason == "the odd one; named by the caller"
    with pytest.raises(ValueError, match="cannot take this call"):
        dispatch.explain("op", (FAST, PLAIN), CALL, "fast")


def test_explain_agrees_with_pick_on_every_call():
    for reasons in ((None, None), ("no", None), (None, "no")):
        impls = tuple(impl(name, reason) for name, reason in zip(("a", "b"), reasons))
        chosen = [v.name for v in dispatch.explain("op", impls, CALL) if v.chosen]
        assert chosen == [dispatch.pick("op", impls, CALL).name]


def test_explain_runs_nothing():
    def run(**call):
        raise AssertionError("ran")

    dispatch.explain("op", (impl("only", run=run),), CALL)


@pytest.fixture(scope="module")
def probe():
    """A library op of two implementations that note what they were called with."""
    seen = []

    def why_not(call):
        return None if call["x"].dtype == torch.float32 else f"x must be float32, got {call['x'].dtype}"

    def run(name):
        def body(x, scale, out):
            seen.append((name, scale))
            out.copy_(x * scale)

        return body

    impls = (Impl("single", "float32", why_not, run("single")), Impl("any", "any", lambda call: None, run("any")))

    def check(x, scale, **_):
        seen.append(("check", scale))
        if scale < 0:
            raise ValueError("dispatch_probe: scale must be positive, got -1.0")

    schema = (
        "dispatch_probe(Tensor x, float scale, Tensor(a!) out, *, str? impl=None, bool check=False) -> ()"  # as an op's
    )
    return dispatch.define(schema, impls, check), seen


def test_a_defined_op_runs_the_picked_implementation(probe):
    op, seen = probe
    for dtype, impl_name, ran in ((torch.float32, None, "single"), (torch.float64, None, "any"), (None, "any", "any")):
        x, out = torch.ones(3, dtype=dtype), torch.empty(3, dtype=dtype)
        seen.clear()
        op(x, 2.0, out, impl=impl_name)
        assert seen == [(ran, 2.0)] and (out == 2.0).all()
    with pytest.raises(ValueError, match="impl 'single' cannot take this call: x must be float32"):
        op(torch.ones(3, dtype=torch.float64), 2.0, torch.empty(3, dtype=torch.float64), impl="single")


def test_values_are_checked_only_when_asked_and_before_anything_runs(probe):
    op, seen = probe
    x, out = torch.ones(3), torch.zeros(3)
    seen.clear()
    op(x, -1.0, out)
    assert seen == [("single", -1.0)]
    with pytest.raises(ValueError, match="scale must be positive"):
        op(x, -1.0, out.zero_(), check=True)
    assert seen[-1] == ("check", -1.0) and (out == 0).all()


def test_a_defined_op_declares_what_it_writes(probe):
    op, _ = probe
    torch.library.opcheck(op, (torch.ones(3), 2.0, torch.empty(3)))


def test_an_implementation_that_must_be_named_is_never_chosen():
    impls = (
        Impl("odd", "", lambda call: None, print, only_named="its bits vary"),
        Impl("plain", "", lambda c: None, print),
    )
    assert dispatch.pick("op", impls, {}).name == "plain" and dispatch.pick("op", impls, {}, "odd").name == "odd"
    assert dispatch.explain("op", impls, {})[0].reason == "only by name: its bits vary"
    with pytest.raises(ValueError, match="odd: its bits vary"):
        dispatch.pick("op", impls[:1], {})


@pytest.mark.parametrize("op", [*IMPLS])
def test_every_op_has_a_portable_last_resort(op):
    assert IMPLS[op][-1].name == "reference"
    for case in cases.SMALL.values():
        if case.op == op:
            assert IMPLS[op][-1].why_not(captured(op, case.make("meta"))) is None


@pytest.mark.parametrize("op", [*IMPLS])
def test_names_of_implementations_are_distinct_and_described(op):
    names = [impl.name for impl in IMPLS[op]]
    assert len(set(names)) == len(names) and all(impl.note for impl in IMPLS[op])


def test_public_ops_refuse_an_unknown_implementation_and_change_nothing():
    args = cases.SMALL["check-prefill-fast"].make()
    before = args["state"].clone()
    with pytest.raises(ValueError, match="kda_prefill: impl must be one of .*reference, got 'fastest'"):
        kda_prefill(**args, impl="fastest")
    assert torch.equal(args["state"], before)


def test_captured_calls_name_every_argument_and_compute_nothing():
    args = cases.SMALL["check-prefill"].make()
    before = args["state"].clone()
    call = captured("kda_prefill", args)
    assert call["q"] is args["q"] and call["gate"] == "bounded" and call["checkpoint_every"] == 64
    assert {"impl", "check"}.isdisjoint(call)
    assert torch.equal(args["state"].nan_to_num(7.0), before.nan_to_num(7.0))
    with pytest.raises(ValueError, match="kda_prefill: k must be"):
        captured("kda_prefill", args | {"k": args["k"][1:]})


def test_explaining_a_case_sees_the_device_it_would_run_on(monkeypatch):
    seen = []
    on_cpu = Impl("probe", "probe", lambda call: seen.append(call["q"].device.type) or "no", lambda **call: None)
    monkeypatch.setitem(IMPLS, "kda_prefill", (on_cpu, *IMPLS["kda_prefill"]))
    verdicts = explained(cases.CASES["prefill-1x32768-h32"], "cpu")
    assert seen[0] == "cpu" and verdicts[0].reason == "no" and verdicts[-1].chosen


def test_a_repeated_call_searches_no_path(monkeypatch):
    """Every call asks whether Triton is there: the search of the path is done once."""
    import importlib.util

    calls = {
        op: captured(op, case.make("cpu")) for op, case in {case.op: case for case in cases.SMALL.values()}.items()
    }
    searches = []
    search = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda *names: searches.append(names) or search(*names))
    dispatch.installed.cache_clear()
    for _ in range(2):
        for op, call in calls.items():
            dispatch.explain(op, IMPLS[op], call)
    assert searches == [("triton",)]


@pytest.mark.parametrize("arch", ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx950"))
def test_b26_a_kernel_made_for_one_architecture_is_taken_there_only(arch, monkeypatch):
    """The scan with Hopper's own instructions; everywhere else the portable one, and by name never."""
    from thalweg.kda import library

    case = cases.CASES["prefill-1x8192-h64"]
    monkeypatch.setattr(library, "arch", lambda device: arch)
    monkeypatch.setattr(library, "INTERPRETED", True)  # stands for a CUDA device here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    verdicts = {v.name: v for v in explained(case, "cpu")}
    assert verdicts["hopper"].chosen == (arch == "sm_90") and verdicts["triton"].chosen == (arch != "sm_90")
    if arch != "sm_90":
        assert verdicts["hopper"].reason == "made for the sm_90 architecture"
        with pytest.raises(ValueError, match="impl 'hopper' cannot take this call: made for the sm_90 architecture"):
            explained(case, "cpu", "hopper")


def test_sizes_of_launches_are_those_of_triton():
    triton = pytest.importorskip("triton")
    for n in (*range(1, 70), 2047, 2048, 2049, 2**31 - 1, 2**40):
        assert device.next_power_of_2(n) == triton.next_power_of_2(n)
        assert all(device.cdiv(n, size) == triton.cdiv(n, size) for size in (1, 2, 3, 64, 100))
    assert device.next_power_of_2(0) == 1 and device.cdiv(0, 64) == 0
