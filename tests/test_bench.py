"""`thalweg bench OP`: correct before it is timed, rows as the results folder holds them, one line for what is wrong."""

import dataclasses
import json

import pytest
import torch

from thalweg import cases
from thalweg.bench import calls, oracle, peers, report
from thalweg.bench import run as bench
from thalweg.cases import Case
from thalweg.dispatch import Impl
from thalweg.timing import Timing

KEYS = ["case", "impl", "us", "us_min", "us_max", "floor_us", "err", "ok", "peer"]
KEYS += ["gpu", "torch", "triton", "commit", "date", "note"]


@pytest.fixture
def quick(monkeypatch):
    """Times without timing: what was timed is noted."""
    timed = []

    def noted(calls, device, graph=None):
        timed.append((len(calls), graph))
        for call in calls:
            call()
        return Timing(3.0, 2.0, 4.0, "wall", len(calls), 9)

    monkeypatch.setattr(bench.timing, "timed", noted)
    return timed


def test_every_op_has_rows_on_a_small_case(quick):
    for op in calls.OPS:
        case = next(case.id for case in cases.SMALL.values() if case.op == op)
        rows = list(bench.Bench(op, [case], "cpu").rows())
        assert [(row.case, row.impl, row.ok, row.us) for row in rows] == [(case, "reference", True, 3.0)]
        assert rows[0].floor_us is None and not rows[0].peer


def test_rows_of_a_timed_case_stand_beside_its_floor(quick, monkeypatch):
    monkeypatch.setattr(bench, "KNOWN_BYTES_PER_US", {"cpu": 1e6})
    for op, id in (("kda_decode", "decode-h12-b1"), ("solve_unit_lower", "solve-64x64")):
        quick.clear()
        first, row = bench.Bench(op, [id], "cpu").rows()
        assert (first.impl, first.us, row.impl) == ("copy floor", 3.0, "reference")
        assert (row.us, row.us_min, row.us_max) == (3.0, 2.0, 4.0)
        assert first.floor_us == row.floor_us == round(cases.TIMED[id].bytes / 1e6, 3)
        assert row.ok and 0 < row.err < 1e-2 and quick[-1] == (16, False)
        assert [field.name for field in dataclasses.fields(row)] == KEYS


def test_patterns_name_cases_each_once():
    found = [case.id for case in bench.wanted("kda_decode", ["decode-h12-b?", "decode-h12-b1", "check-decode"], "cpu")]
    assert found == ["decode-h12-b1", "decode-h12-b2", "decode-h12-b4", "decode-h12-b8", "check-decode"]


def wrong(op, monkeypatch):
    """An implementation `wrong` of an op, first in order, that negates what the reference writes to out."""
    reference = calls.IMPLS[op][-1]

    def run(**call):
        reference.run(**call)
        call["out"].neg_()

    found = (Impl("wrong", "", lambda call: None, run), reference)
    monkeypatch.setitem(calls.IMPLS, op, found)
    monkeypatch.setitem(
        calls.OPS, op, lambda impl=None, check=None, **args: honest(op, run if impl == "wrong" else reference.run, args)
    )


def honest(op, run, args):
    call = {"out": args.pop("out", None), "cu_seqlens": None, "precision": "ieee", "workspace_bytes": None, **args}
    like = call.pop("out_dtype", None) or args["lower"].dtype
    call["out"] = torch.empty(args["lower"].shape, dtype=like) if call["out"] is None else call["out"]
    run(**call)
    return call["out"]


def test_a_wrong_result_has_no_time_and_fails(run, monkeypatch, quick):
    wrong("solve_unit_lower", monkeypatch)
    monkeypatch.setattr(bench, "captured", lambda op, args: args)
    rows = list(bench.Bench("solve_unit_lower", ["check-solve-dense"], "cpu").rows())
    assert [(row.impl, row.ok, row.us) for row in rows] == [("wrong", False, None)] and not quick
    assert "us" not in report.line(rows[0]) and report.line(rows[0])["err"] == pytest.approx(2.0, rel=0.01)
    command = ("bench", "solve_unit_lower", "--case", "check-solve-dense", "--device", "cpu")
    code, out, _ = run(*command)
    assert code == 1 and "FAILED" in out
    assert run(*command, "--impl", "reference")[0] == 0


def test_what_a_kernel_raises_is_a_row(monkeypatch, quick):
    def fail(**args):
        raise RuntimeError("out of registers")

    call = bench.captured("qsa_topk", cases.SMALL["check-topk"].make())
    monkeypatch.setitem(calls.OPS, "qsa_topk", fail)
    monkeypatch.setattr(bench, "captured", lambda op, args: call)
    (row,) = bench.Bench("qsa_topk", ["check-topk"], "cpu").rows()
    assert not row.ok and row.us is None and row.err is None and row.note == "RuntimeError: out of registers"


def test_a_peer_tunes_itself_before_it_is_judged(monkeypatch, quick):
    """It gets throw-away inputs first: what it does to them on its very first call is not looked at."""
    called = []

    def bind(args):
        called.append(0)

        def call():
            if called == [0]:
                args["lower"].fill_(7.0)
            called[-1] += 1
            kept["out"] = calls.OPS["solve_unit_lower"](args["lower"], impl="reference") + offset

        kept = {}
        return peers.Bound(call, lambda: kept)

    offset = 0.0
    able = peers.Peer("them", "solve_unit_lower", "torch", "inverse", lambda args: None, bind)
    unable = dataclasses.replace(able, key="others", why_not=lambda args: "needs another machine")
    monkeypatch.setattr(peers, "PEERS", (able, unable))
    _, row = bench.Bench("solve_unit_lower", ["check-solve-dense"], "cpu").rows()
    assert row.peer and row.ok and row.impl == f"torch {torch.__version__} inverse"
    assert called[:2] == [1, 1] and len(called) == 2 + quick[-1][0]
    offset = 3e-3  # more than the rule allows, less than what is asked of a peer
    (row,) = bench.Bench("solve_unit_lower", ["check-solve-dense"], "cpu", "them").rows()
    assert row.ok and 1e-3 < row.err < 1e-2
    offset = 1.0
    (row,) = bench.Bench("solve_unit_lower", ["check-solve-dense"], "cpu", "them").rows()
    assert row.peer and not row.ok
    with pytest.raises(ValueError, match="peer 'others' cannot take this call: needs another machine"):
        list(bench.Bench("solve_unit_lower", ["check-solve-dense"], "cpu", "others").rows())


def test_every_set_has_weights_of_its_own(monkeypatch, quick):
    """A layer's weights are cold at every step of a model: no two calls of a rotation share any tensor."""
    sets = []

    def bind(args):
        sets.append({x.data_ptr() for x in args.values() if isinstance(x, torch.Tensor)})
        return peers.Bound(lambda: kept.update(out=calls.OPS["kda_decode"](**args)), lambda: {**args, **kept})

    kept = {}
    peer = peers.Peer("them", "kda_decode", "torch", "decode", lambda args: None, bind)
    monkeypatch.setattr(peers, "PEERS", (peer,))
    (row,) = bench.Bench("kda_decode", ["check-decode"], "cpu", "them").rows()
    timed = sets[-quick[-1][0] :]
    assert row.ok and len(timed) > 1 and len(set().union(*timed)) == sum(map(len, timed))


def test_peers_say_what_they_cannot_take():
    args = {op: cases.SMALL[id].make() for op, id in (("prefill", "check-prefill"), ("decode", "check-decode-soft"))}
    for peer in peers.PEERS:
        case = next(case for case in cases.TIMED.values() if case.op == peer.op)
        with torch.device("meta"):
            assert peer.package == "fla-core" and case.op in calls.OPS
    assert "one float32 state a sequence" in peers._fla_prefill_why_not(args["prefill"])
    assert "bounded gate" in peers._fla_decode_why_not(args["decode"])
    plain = cases.TIMED["decode-h12-b1"].make()
    assert peers._fla_decode_why_not(plain) in ("fla-core is not installed", "takes CUDA tensors, got cpu ones")


def test_rows_checked_of_many(monkeypatch, quick):
    """QSA at full size is judged on 64 rows; a wrong one among them shows."""
    monkeypatch.setattr(oracle, "SAMPLED", 5)
    for op, id in (("qsa_score", "check-score"), ("qsa_attend", "check-attend"), ("qsa_topk", "check-topk")):
        args = cases.SMALL[id].make()
        rows = oracle.sampled_rows(op, args)
        assert rows[0] == 0 and rows[-1] == len(args[oracle.BY_ROW[op][0]]) - 1 and len(rows) == 5
        whole, part = (oracle.expected(op, a, oracle.TRUTH) for a in (args, oracle.taken(op, args, rows)))
        for name, value in part.items():
            assert torch.equal(value, whole[name][rows]) or name == "visible"
        (row,) = bench.Bench(op, [id], "cpu").rows()
        assert row.ok and row.note.startswith("5 rows checked; ")
    assert oracle.sampled_rows("kda_decode", {}) is None


def test_the_truth_of_long_prefills_is_the_chunk_form(monkeypatch):
    args = cases.SMALL["check-prefill"].make()
    by_token = oracle.expected("kda_prefill", args, oracle.TRUTH)
    monkeypatch.setattr(oracle, "LONG", 0)
    by_chunk = oracle.expected("kda_prefill", args, oracle.TRUTH)
    for name, value in by_token.items():
        assert torch.allclose(value, by_chunk[name], rtol=1e-11, atol=1e-12, equal_nan=True)


def test_saved_rows_are_lines_of_the_results_file(run, tmp_path, monkeypatch, quick):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    (tmp_path / "results").mkdir()
    monkeypatch.setenv("THALWEG_COMMIT", "abc1234")
    command = ("bench", "qsa_topk", "--case", "check-topk", "--device", "cpu", "--save")
    code, _, err = run(*command)
    assert code == 0 and err == f"1 rows saved in {tmp_path / 'results' / 'cpu.jsonl'}\n"
    path = tmp_path / "results" / "cpu.jsonl"
    first = json.loads(path.read_text())
    other = json.dumps(first | {"impl": "another"}) + "\n"
    path.write_text(json.dumps(first | {"us": 1e9}) + "\n" + other)  # an older row of it, and one of another
    code, out, _ = run(*command, "--json")
    kept, row = path.read_text().splitlines(keepends=True)
    assert kept == other and json.loads(row) == json.loads(out)[0] == first and [*first] == KEYS
    assert (first["commit"], first["gpu"], first["torch"]) == ("abc1234", "cpu", torch.__version__)
    assert [x.name for x in path.parent.iterdir()] == ["cpu.jsonl"]


def test_the_table_shows_no_time_of_a_wrong_row():
    good = bench.Row("c", "i", 4.0, 3.5, 5000.0, 2.0, 3e-3, True, False, "g", "t", None, "x", "d", "n; driver 1")
    assert report.cells(good) == ("c", "i", "4.00", "3.50", "5000", "2.00", "2.00", "3.00e-03", "ok", "n")
    bad = dataclasses.replace(good, us=None, us_min=None, us_max=None, err=3.0, ok=False)
    assert report.cells(bad) == ("c", "i", "", "", "", "2.00", "", "3 wrong rows", "FAILED", "n")


def test_what_cannot_be_measured_is_one_line(run):
    for argv, word in (
        (("bench", "kda"), "op must be e2e or one of"),
        (("bench", "kda_decode", "--case", "decode-h12-b9", "--device", "cpu"), "near: decode-h12-b"),
        (("bench", "kda_decode", "--case", "prefill-*", "--device", "cpu"), "case must be one of"),
        (("bench", "kda_decode", "--device", "cpu"), "no GPU here: name small cases of kda_decode (--case), e.g. dec"),
        (("bench", "kda_prefill", "--case", "prefill-1x8192-h64", "--device", "cpu"), "moves 681 MB"),
        (("bench", "kda_decode", "--case", "check-decode", "--device", "cpu", "--impl", "nope"), "impl must be one of"),
        (("bench", "kda_prefill", "--case", "check-prefill", "--device", "cpu", "--impl", "triton"), "CUDA tensors"),
        (("bench", "e2e", "--save", "--device", "cpu"), "--save takes rows of one op"),
        (
            ("bench", "e2e", "--case", "e2e-1", "--device", "cpu"),
            "case must be one of e2e-4096, e2e-8x512, e2e-4k-1k-b",
        ),
        (("bench", "e2e", "--dtype", "float16", "--device", "cpu"), "dtype must be float32 or bfloat16, got 'float16'"),
        (("bench", "qsa_topk", "--dtype", "bfloat16", "--device", "cpu"), "--dtype is of e2e"),
        (("bench", "e2e", "--impl", "kda=triton", "--device", "cpu"), "op must be one of solve_unit_lower, "),
    ):
        code, out, err = run(*argv)
        assert (code, out) == (2, "") and err.startswith("thalweg: ") and err.count("\n") == 1 and word in err, err


def test_a_case_of_another_op_is_none(monkeypatch):
    with pytest.raises(ValueError, match="score-p32k is one of qsa_score"):
        bench.wanted("kda_decode", ["score-p32k"], "cuda")
    monkeypatch.setitem(cases.TIMED, "x", Case("x", "kda_conv", "", lambda s: {}, 0.0, 1.0))
    assert [case.id for case in bench.wanted("kda_conv", ["x"], "cpu")] == ["x"]


@pytest.mark.gpu
@pytest.mark.parametrize("op,id", (("solve_unit_lower", "solve-64x64"), ("kda_decode", "decode-h12-b1")))
def test_bench_on_the_gpu(op, id):
    """Ours, and FLA where it is installed, are right and timed by a graph."""
    floor, *rows = bench.Bench(op, [id], "cuda").rows()
    assert floor.us > 0 and rows and all(row.ok and row.us > 0 for row in rows), rows
