"""The `thalweg` command. Every subcommand's work is done elsewhere; this module parses, prints and sets exit codes.

Exit codes: 0 done, 1 a check failed, 2 bad input or a file that cannot be read or written (one line on standard
error), 130 stopped by Ctrl-C.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="thalweg",
    help="Attention kernels of KDA and QSA for inference of hybrid language models.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
SEEDS = 2**63 - 1
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Dtype = Annotated[str, typer.Option(help="Of weights and activations: float32 or bfloat16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: cuda where there is one.")]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits; what a user can cause is one line on standard error, never a traceback."""
    # Before torch is imported: waiting threads sleep instead of spinning. On 2 cores shared with one busy process a
    # prefill of 2,048 bytes took 2.6 s so, and more than 60 s otherwise.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if sys.stdout is None:  # a shell's >&-
        sys.exit(2 if sys.stderr is None else _fail("standard output is closed", 2))
    usage = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    try:
        code = app(args=None if argv is None else list(argv), prog_name="thalweg", standalone_mode=False)
        sys.stdout.flush()
        if code == 130:
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        code = _fail("stopped", 130)
    except usage as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "thalweg"
        code = _fail(f"{error.format_message().rstrip('.')} (see {command} --help)", 2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be written, nor need be
        code = 1
    except (ValueError, OSError) as error:
        code = _fail(str(error), 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    print("thalweg: " + " ".join(message.split()), file=sys.stderr)
    return code


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns; where standard output is no terminal, plain text and one line a row however wide."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(columns, *cells)]
        for row in [columns, *cells]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
        return
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in cells:
        table.add_row(*row)
    Console(markup=False, highlight=False, emoji=False).print(table)


def device_named(name: str | None) -> str:
    """The device to use; ValueError when it is not one of this machine's."""
    import torch

    from thalweg.bench.calls import default_device

    name = default_device() if name is None else name
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (":" in name and not index.isdecimal()):
        raise ValueError(f"device must be cpu, cuda or cuda:N, got {name!r}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(index or 0) >= count:
        raise ValueError(f"device {name} is not there: this machine has {count} of kind {kind}")
    return name


def dtype_named(name: str):
    """The torch dtype of --dtype."""
    import torch

    if name not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be float32 or bfloat16, got {name!r}")
    return getattr(torch, name)


@app.callback()
def _thalweg() -> None:
    pass


@app.command(epilog="Example: thalweg check kda_prefill qsa_attend --device cpu")
def check(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Ops to check; all by default.")] = None,
    device: Device = None,
    impl: Annotated[str | None, typer.Option(help="Only the implementation of this name.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Seed of the inputs.")] = 0,
    as_json: Json = False,
) -> None:
    """Check every op and implementation on this machine against its float64 oracle; exit 1 if one fails."""
    device = device_named(device)
    from thalweg.bench.check import check as checked

    rows = list(checked(ops or [], device, impl, seed))
    failed = sum(row.result == "FAILED" for row in rows)
    if as_json:
        print_json({"device": device, "ok": not failed, "rows": [asdict(row) for row in rows]})
    else:
        numbers = [["" if value is None else f"{value:.2e}" for value in (row.error, row.bound)] for row in rows]
        table = [
            (row.op, row.case, row.impl, row.result, row.output, *pair, row.reason) for row, pair in zip(rows, numbers)
        ]
        print_table(("op", "case", "implementation", "result", "worst output", "error", "at most", ""), table)
        ok = sum(row.result == "ok" for row in rows)
        print(f"\n{ok} ok, {failed} failed, {len(rows) - ok - failed} skipped on {device}")
    if failed:
        raise typer.Exit(1)


@app.command(epilog="Example: thalweg explain kda_decode decode-h12-b8")
def explain(
    op: Annotated[str, typer.Argument(help="A public op, as kda_prefill.")],
    case: Annotated[str, typer.Argument(help="One of its named shapes, as prefill-1x8192-h64.")],
    impl: Annotated[str | None, typer.Option(help="Ask for this implementation by name.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say which implementation would run OP on CASE here, and why each other one would not."""
    device = device_named(device)
    from thalweg import cases
    from thalweg.bench.calls import explained

    found = cases.find(op, case)
    verdicts = explained(found, device, impl)
    if as_json:
        print_json({"op": op, "case": case, "device": device, "implementations": [asdict(v) for v in verdicts]})
        return
    print(f"{op} on {case} ({found.note}), {device}")
    rows = [(v.name, "chosen" if v.chosen else "passed over", v.reason) for v in verdicts]
    print_table(("implementation", "", "reason"), rows)


@app.command(epilog="Example: thalweg info --json")
def info(as_json: Json = False) -> None:
    """Versions, devices, and which implementations this machine can use, with the reason where it cannot."""
    from thalweg.bench.info import info as gathered

    found = gathered()
    if as_json:
        print_json(found)
        return
    print_table(("version", ""), [(name, value or "absent") for name, value in found["versions"].items()])
    print()
    details = [", ".join(f"{k} {v}" for k, v in device.items() if k != "device") for device in found["devices"]]
    print_table(("device", ""), [(d["device"], text) for d, text in zip(found["devices"], details)])
    print()
    rows = [(i["op"], i["impl"], i["note"] if i["usable"] else i["why_not"]) for i in found["implementations"]]
    usable = ["usable" if i["usable"] else "not usable" for i in found["implementations"]]
    table = [(op, name, state, text) for (op, name, text), state in zip(rows, usable)]
    print_table(("op", "implementation", f"on {found['default_device']}", ""), table)


@app.command(epilog='Example: thalweg generate "def main():" --max-new-tokens 200 --temperature 0.8 --seed 1')
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="One or several texts.")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A prompt from a file (- is standard input).")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Bytes to write at most, each prompt.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest byte.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest bytes that hold this share.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder of a checkpoint; default: the one shipped.")] = None,
    device: Device = None,
    impl: Annotated[str | None, typer.Option(help="Run every op through this implementation.")] = None,
    dtype: Dtype = "float32",
    check: Annotated[bool, typer.Option("--verify", help="Read the whole text again in one prefill, compare.")] = False,
    as_json: Json = False,
) -> None:
    """Continue PROMPT with the tiny model, text on standard output, speed on standard error."""
    device = device_named(device)
    from thalweg import generate as work
    from thalweg.model import Decoder, Sampling

    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    texts = work.read_prompts(prompts or [], file or [])
    model = Decoder.load(checkpoint, device, dtype_named(dtype))
    stream = work.Stream(texts, sys.stdout)
    written = work.generate(model, texts, sampling, impl, (lambda byte: None) if as_json else stream.put)
    if not as_json:
        stream.finish(written.texts)
    print(work.summary(written.timing), file=sys.stderr)
    if check and not written.interrupted:
        lines = [work.verify(model, prompt, text, sampling, impl) for prompt, text in zip(texts, written.texts)]
        written.verified = "\n".join(lines)
        print(written.verified, file=sys.stderr)
    if as_json:
        work.write_whole(json.dumps(work.as_json(texts, written, sampling, device), indent=2) + "\n")
    if written.interrupted:
        raise typer.Exit(130)


@app.command(epilog="Example: thalweg bench kda_decode --case 'decode-h12-*' --save")
def bench(
    op: Annotated[str, typer.Argument(help="A public op, or e2e: the whole model, prefill and decode.")] = "e2e",
    case: Annotated[list[str] | None, typer.Option(help="Only this case, or those it fits (*); repeatable.")] = None,
    impl: Annotated[
        str | None, typer.Option(help="Only this implementation, or peer (fla); e2e: or op=name,...")
    ] = None,
    device: Device = None,
    seed: Annotated[int, typer.Option(min=0, max=SEEDS, help="Seed of the inputs.")] = 0,
    dtype: Annotated[str, typer.Option(help="Of e2e: float32 or bfloat16.")] = "float32",
    save: Annotated[bool, typer.Option("--save", help="Keep the rows in results/<gpu>.jsonl.")] = False,
    as_json: Json = False,
) -> None:
    """Time an op on named shapes, each result compared with float64 first; exit 1 if one of ours is wrong."""
    device = device_named(device)
    if op == "e2e":
        if save:
            raise ValueError("--save takes rows of one op, not of e2e")
        _bench_model(case or [], device, impl, dtype, as_json)
        return
    if dtype != "float32":
        raise ValueError(f"--dtype is of e2e; cases of {op} have their own")
    from thalweg.bench import report
    from thalweg.bench.run import Bench

    rows = []
    for row in Bench(op, case or [], device, impl, seed).rows():
        rows.append(row)
        if save:
            path = report.save(row)
    if as_json:
        print_json([report.line(row) for row in rows])
    else:
        print_table(report.COLUMNS, [report.cells(row) for row in rows])
    if save and rows:
        print(f"{len(rows)} rows saved in {path}", file=sys.stderr)
    if any(not row.ok and not row.peer for row in rows):
        raise typer.Exit(1)


def _bench_model(cases: Sequence[str], device: str, impl: str | None, dtype: str, as_json: bool) -> None:
    from thalweg.bench import endtoend

    named, wide = endtoend.named(impl), dtype_named(dtype)
    rows = [asdict(endtoend.run(name, device, named, dtype=wide)) for name in cases or endtoend.CASES]
    if as_json:
        print_json(rows)
    else:
        print_table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])
