"""The command: what it prints, its exit codes, and one clear line for everything a user can get wrong."""

import json
import os
import subprocess
import sys

import pytest
import torch

from thalweg import cli
from thalweg.bench import calls, oracle
from thalweg.bench import check as checks
from thalweg.cases import SMALL
from thalweg.dispatch import Impl


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, one line on standard error that holds the words, nothing on standard output."""
    code, out, err = result
    assert (code, out) == (2, "") and err.startswith("thalweg: ") and err.count("\n") == 1, result
    assert all(word in err for word in words), err


@pytest.mark.parametrize("command", ["bench", "check", "explain", "generate", "info"])
def test_help_has_an_example_that_starts_with_the_command(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0 and f"Example: thalweg {command}" in out
    assert command in run("--help")[1]


def test_check_passes_and_names_every_op(run):
    code, out, err = run("check", "--device", "cpu")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["op", "case"]
    assert {line.split()[0] for line in lines[1:-2]} == set(calls.OPS)
    skipped = sum(len(calls.IMPLS[case.op]) - 1 for case in SMALL.values())  # all but the last resort want a GPU
    assert len(lines) == 3 + len(SMALL) + skipped
    assert lines[-1] == f"{len(SMALL)} ok, 0 failed, {skipped} skipped on cpu"
    assert all("takes CUDA tensors" in line for line in lines[1:-2] if "skipped" in line and "gfx950" not in line)


def test_check_as_json_of_some_ops(run):
    code, out, _ = run("check", "qsa_topk", "kda_conv", "--json", "--device", "cpu", "--impl", "reference")
    report = json.loads(out)
    assert code == 0 and report["ok"] and report["device"] == "cpu"
    assert [row["op"] for row in report["rows"]] == ["kda_conv", "kda_conv", "qsa_topk"]
    assert all(row["result"] == "ok" and row["error"] <= row["bound"] for row in report["rows"])


def test_check_fails_with_exit_code_1(run, monkeypatch):
    monkeypatch.setitem(calls.OPS, "qsa_topk", lambda **args: calls.qsa.qsa_topk(**args).flip(-1))
    code, out, _ = run("check", "qsa_topk", "--device", "cpu")
    assert code == 1 and "FAILED" in out and "0 ok, 1 failed" in out
    code, out, _ = run("check", "qsa_topk", "--device", "cpu", "--json")
    assert code == 1 and json.loads(out)["ok"] is False


def spoil(tensor: torch.Tensor) -> None:
    """Negates the largest entry; of a selection, turns a row around."""
    if not tensor.dtype.is_floating_point:
        tensor[0] = tensor[0].flip(-1)
        return
    largest = tensor.abs().nan_to_num(0.0, posinf=0.0).flatten().argmax()
    at = torch.unravel_index(largest, tensor.shape)
    tensor[at] = -tensor[at]


@pytest.mark.parametrize("id", [*SMALL])
def test_check_catches_one_wrong_entry(id, monkeypatch):
    """Of the output and of each mutated argument in turn."""
    case = SMALL[id]
    honest = calls.OPS[case.op]
    for name in oracle.expected(case.op, case.make(), oracle.TRUTH):

        def spoiled(name=name, **args):
            out = honest(**args)
            spoil(args[name] if name in args and name != "out" else out)
            return out

        if name == "visible":
            continue
        monkeypatch.setitem(calls.OPS, case.op, spoiled)
        rows = checks.check_case(case, "cpu", "reference")
        assert [row.result for row in rows] == ["FAILED"], name


def test_check_reports_an_implementation_that_raises_and_one_that_cannot(run, monkeypatch):
    def fail(**call):
        raise RuntimeError("no\nsuch luck")

    impls = (Impl("never", "", lambda call: "needs another machine", fail), calls.IMPLS["gated_rms_norm"][-1])
    monkeypatch.setitem(calls.IMPLS, "gated_rms_norm", impls)
    code, out, _ = run("check", "gated_rms_norm", "--device", "cpu")
    assert code == 0 and "skipped" in out and "needs another machine" in out and "1 ok, 0 failed, 1 skipped" in out
    monkeypatch.setitem(calls.OPS, "gated_rms_norm", fail)
    monkeypatch.setattr(checks, "captured", lambda op, args: args)
    code, out, _ = run("check", "gated_rms_norm", "--device", "cpu", "--impl", "reference")
    assert code == 1 and "no such luck" in out


def test_explain_names_the_chosen_implementation_and_the_others(run, monkeypatch):
    impls = (Impl("other", "", lambda call: "needs a GPU", lambda **call: None), calls.IMPLS["kda_decode"][-1])
    monkeypatch.setitem(calls.IMPLS, "kda_decode", impls)
    code, out, err = run("explain", "kda_decode", "decode-h12-b8", "--device", "cpu")
    assert (code, err) == (0, "")
    first, header, other, reference = out.splitlines()
    assert first == "kda_decode on decode-h12-b8 (Kimi K3 at TP 8, 8 rows, float32 state), cpu"
    assert other.split(maxsplit=3) == ["other", "passed", "over", "needs a GPU"]
    assert reference.split()[:2] == ["reference", "chosen"]
    report = json.loads(run("explain", "kda_decode", "decode-h12-b8", "--device", "cpu", "--json")[1])
    assert [row["chosen"] for row in report["implementations"]] == [False, True]
    refused(run("explain", "kda_decode", "decode-h12-b8", "--impl", "other", "--device", "cpu"), "needs a GPU")


def test_explain_and_info_say_everywhere_what_was_never_timed(run):
    for command in (("explain", "kda_decode", "decode-h12-b8", "--device", "cpu"), ("info",)):
        (line,) = [line for line in run(*command)[1].splitlines() if "gfx950" in line]
        assert "compiled for it, not timed on it" in line


@pytest.mark.parametrize("id", ["attend-d64", "prefill-1x32768-h32", "topk-p32k", "solve-8192x64", "check-commit"])
def test_explain_of_large_cases_allocates_nothing(run, id):
    from thalweg.cases import CASES

    assert run("explain", CASES[id].op, id, "--device", "cpu")[0] == 0


def test_info_names_versions_devices_and_implementations(run):
    code, out, _ = run("info", "--json")
    report = json.loads(out)
    assert code == 0 and report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert {row["op"] for row in report["implementations"]} == set(calls.OPS)
    for row in report["implementations"]:
        assert row["usable"] == (row["why_not"] is None)
        assert row["usable"] or row["impl"] != "reference"
    code, out, _ = run("info")
    assert code == 0 and torch.__version__ in out and "kda_prefill" in out


def test_info_says_why_an_implementation_cannot_be_used(run, monkeypatch):
    impls = (Impl("other", "fast", lambda call: "needs a GPU", lambda **call: None), calls.IMPLS["kda_decode"][-1])
    monkeypatch.setitem(calls.IMPLS, "kda_decode", impls)
    assert any("other" in line and "needs a GPU" in line for line in run("info")[1].splitlines())


def test_bad_arguments_are_refused_in_one_line(run):
    refused(run(), "Missing command", "thalweg --help")
    refused(run("frobnicate"), "frobnicate")
    refused(run("check", "--bogus"), "--bogus", "thalweg check --help")
    refused(run("check", "kda"), "op must be one of", "'kda'")
    refused(run("check", "--impl", "nope"), "impl must be one of", "'nope'")
    refused(run("check", "--seed", "many"), "--seed")
    for seed in ("-1", "99999999999999999999"):
        refused(run("check", "--seed", seed), "--seed")
        refused(run("bench", "qsa_topk", "--seed", seed), "--seed")
    refused(run("check", "--device", "abacus"), "device must be cpu, cuda or cuda:N, got 'abacus'")
    refused(run("check", "--device", "meta"), "device must be")
    refused(run("check", "--device", "cuda:999"), "device cuda:999 is not there")
    refused(run("explain"), "issing argument", "thalweg explain --help")
    refused(run("explain", "kda_decode"), "issing argument")
    refused(run("explain", "kda_decod", "x"), "near: kda_decode")
    refused(run("explain", "kda_decode", "decode-h12-b9"), "near: decode-h12-b")
    refused(run("explain", "kda_decode", "decode-h12-b8", "--impl", "nope"), "impl must be one of", "'nope'")
    refused(run("info", "extra"), "extra")


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "thalweg: stopped\n"),
        (ValueError("two\nlines"), 2, "thalweg: two lines\n"),
        (FileNotFoundError(2, "No such file", "missing.txt"), 2, "thalweg: [Errno 2] No such file: 'missing.txt'\n"),
        (BrokenPipeError(32, "Broken pipe"), 1, ""),
    ],
)
def test_what_a_command_raises_becomes_one_line(run, monkeypatch, raised, code, line):
    def raises():
        raise raised

    monkeypatch.setattr("thalweg.bench.info.info", raises)
    if isinstance(raised, BrokenPipeError):
        monkeypatch.setattr(os, "dup2", lambda source, target: None)  # leave the test's own output alone
    assert run("info") == (code, "", line)


def test_a_bug_is_not_hidden(monkeypatch):
    def raises():
        raise RuntimeError("bug")

    monkeypatch.setattr("thalweg.bench.info.info", raises)
    with pytest.raises(RuntimeError, match="bug"):
        cli.main(["info"])


def test_piped_output_is_plain_text_with_one_line_a_row():
    command = [sys.executable, "-m", "thalweg", "explain", "kda_prefill", "check-prefill", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, timeout=120, env={**os.environ, "COLUMNS": "40"})
    assert done.returncode == 0 and done.stderr == b""
    lines = 2 + len(calls.IMPLS["kda_prefill"])  # what was asked, the header, an implementation a row
    assert done.stdout.isascii() and b"\x1b" not in done.stdout and done.stdout.count(b"\n") == lines


@pytest.mark.gpu
def test_check_passes_on_the_gpu(run):
    code, out, _ = run("check", "--device", "cuda")
    assert code == 0, out
