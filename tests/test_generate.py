"""`thalweg generate` and `thalweg bench` as a user meets them: text, JSON, bad input, Ctrl-C, a full disk."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.test_model import broken_checkpoints
from thalweg.cli import main

ROOT = Path(__file__).parents[1]


def run(capfd, *arguments):
    """Exit code, standard output, standard error of the command."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    out, err = capfd.readouterr()
    return stop.value.code, out, err


def refused(capfd, *arguments):
    code, out, err = run(capfd, *arguments)
    assert code == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err, (code, out, err)
    return err


def test_text_speed_and_the_decode_is_prefill_line(capfd):
    options = ("--max-new-tokens", "20", "--verify", "--temperature", "1")
    code, out, err = run(capfd, "generate", "def read(path):\n    ", *options)
    assert code == 0 and out.endswith("\n") and len(out.encode()) <= 21
    assert "tokens/s" in err and "decode = prefill: 20 of 20 bytes" in err


def test_json_of_several_prompts(capfd, tmp_path):
    path = tmp_path / "prompt.py"
    path.write_text("import sys\n")
    code, out, err = run(capfd, "generate", "a = ", "b = ", "--file", str(path), "--max-new-tokens", "5", "--json")
    found = json.loads(out)
    assert code == 0 and [g["prompt_bytes"] for g in found["generations"]] == [4, 4, 11]
    assert found["timing"]["prefill_tokens"] == 4 + 4 + 11 + 3 and not found["interrupted"]


def test_several_prompts_are_headed(capfd):
    code, out, _ = run(capfd, "generate", "x = 1", "y = 2", "--max-new-tokens", "3")
    assert code == 0 and out.count("--- ") == 2


def test_bad_input_is_one_line_and_exit_2(capfd, tmp_path):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    assert "PROMPT or --file" in refused(capfd, "generate")
    assert "prompt: empty" in refused(capfd, "generate", "")
    assert "empty.txt: empty" in refused(capfd, "generate", "--file", str(empty))
    assert "byte 0xe9 at offset 3" in refused(capfd, "generate", "--file", str(latin))
    assert "not UTF-8" in refused(capfd, "generate", "caf\udce9")
    assert "standard input" in refused(capfd, "generate", "--file", "-", "--file", "-")
    assert "missing.txt" in refused(capfd, "generate", "--file", str(tmp_path / "missing.txt"))
    assert str(tmp_path) in refused(capfd, "generate", "--file", str(tmp_path))
    for name, value in (
        ("--max-new-tokens", "-1"),
        ("--max-new-tokens", "many"),
        ("--temperature", "-0.5"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-p", "2"),
        ("--max-new-tokens", "99999999999"),
        ("--seed", "-3"),
        ("--seed", "99999999999999999999999"),
        ("--device", ""),
        ("--device", "tpu"),
        ("--impl", "fastest"),
    ):
        assert name.strip("-").split("-")[0] in refused(capfd, "generate", "x", name, value).lower()


def test_broken_checkpoints_are_one_line_and_exit_2(capfd, tmp_path):
    refused(capfd, "generate", "x", "--checkpoint", str(tmp_path / "nowhere"))
    for _, path in broken_checkpoints(tmp_path):
        assert path.name in refused(capfd, "generate", "x", "--checkpoint", str(path))


def test_a_full_disk_is_one_line_and_exit_2():
    command = [sys.executable, "-m", "thalweg", "generate", "x", "--max-new-tokens", "2", "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and "No space left" in lines[-1] and "Traceback" not in done.stderr


def test_closed_streams_are_one_line_and_exit_2():
    for closed, said in (("<&-", "standard input is closed"), (">&-", "standard output is closed")):
        command = f"{sys.executable} -m thalweg generate --file - {closed}"
        done = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_keeps_what_was_written():
    command = [sys.executable, "-u", "-m", "thalweg", "generate", "def f(", "--max-new-tokens", "100000"]
    command += ["--temperature", "1"]
    # A background job's children inherit SIGINT as ignored; a user's terminal does not.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, preexec_fn=heard) as process:
        try:
            first = process.stdout.read(5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and len(first) == 5 and out.endswith(b"\n")
    assert b"tokens/s" in err and b"Traceback" not in err


def test_bench_prints_speed_and_memory(capfd, monkeypatch):
    monkeypatch.setattr("thalweg.bench.endtoend.CASES", {"e2e-small": (2, 100, 4)})
    code, out, _ = run(capfd, "bench", "e2e", "--json")
    [row] = json.loads(out)
    assert code == 0 and row["prefill_tokens"] == 202 and row["decode_tokens_per_second"] > 0 and row["peak_mb"] > 0
    assert "e2e-small" in refused(capfd, "bench", "e2e", "--case", "e2e-none")
    assert "op must be" in refused(capfd, "bench", "nothing")
