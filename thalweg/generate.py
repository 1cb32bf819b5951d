"""The work of `thalweg generate`: reads prompts, streams text, reports speed, checks decode against prefill."""

import codecs
import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from thalweg.model import PIECE, Decoder, Generation, Sampling, Session, Timing, encode

LONG = 8 * PIECE  # rows of a prefill from which its progress is shown


def read_prompts(prompts: Sequence[str], files: Sequence[Path]) -> list[bytes]:
    """Prompts of the command line, then files (`-` is standard input); UTF-8, none of them empty."""
    if not prompts and not files:
        raise ValueError("give a PROMPT or --file (see thalweg generate --help)")
    found = []
    for number, text in enumerate(prompts, 1):
        name = "prompt" if len(prompts) == 1 else f"prompt {number}"
        found.append((name, os.fsencode(text)))  # what the shell passed, byte for byte
    for path in files:
        found.append((str(path), sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()))
    for name, data in found:
        if not data:
            raise ValueError(f"{name}: empty, wanted at least one byte")
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name}: not UTF-8, byte 0x{data[error.start]:02x} at offset {error.start}") from None
    return [data for _, data in found]


@dataclass
class Written:
    """Bytes generated for each prompt, the timing, whether Ctrl-C came, and the decode = prefill line if asked for."""

    texts: list[bytearray]
    timing: Timing
    interrupted: bool = False
    verified: str | None = None


@dataclass
class Stream:
    """Puts text out as it comes: one prompt byte by byte, several each whole, in order, under a header line."""

    prompts: Sequence[bytes]
    out: TextIO
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    def put(self, byte: int) -> None:
        if len(self.prompts) == 1:
            self.out.write(self.decoder.decode(bytes([byte])))
            self.out.flush()

    def finish(self, texts: Sequence[bytearray]) -> None:
        if len(self.prompts) == 1:
            self.out.write(self.decoder.decode(b"", final=True) + "\n")
        else:
            for number, (prompt, text) in enumerate(zip(self.prompts, texts), 1):
                head = " ".join(prompt[-60:].decode("utf-8", "replace").split())
                self.out.write(f"--- {number}: ...{head}\n{text.decode('utf-8', 'replace')}\n")
        self.out.flush()


def progress_on(stream: TextIO, total: int) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """A callback for the rows done of a long prefill, and what ends it: a bar on a terminal, else a line a tenth."""
    if total < LONG:
        return (lambda done, total: None), (lambda: None)
    if not stream.isatty():
        shown = [0]

        def line(done: int, total: int) -> None:
            if done * 10 // total > shown[0]:
                shown[0] = done * 10 // total
                print(f"prefill {done} of {total} tokens", file=stream, flush=True)

        return line, lambda: None
    columns = TextColumn("prefill"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(file=stream), transient=True)
    task = bar.add_task("prefill", total=total)
    bar.start()

    def advance(done: int, total: int) -> None:
        bar.update(task, completed=done)
        if done == total:
            bar.stop()

    return advance, bar.stop


def generate(
    model: Decoder, prompts: Sequence[bytes], sampling: Sampling, impl: str | None, put: Callable[[int], None]
) -> Written:
    """Runs a generation to its end or to Ctrl-C; `put` is called with each byte of the first prompt."""
    on_prefill, stop = progress_on(sys.stderr, sum(len(prompt) + 1 for prompt in prompts))
    generation = Generation(model, prompts, sampling, impl, on_prefill=on_prefill)
    written = Written([bytearray() for _ in prompts], generation.timing)
    try:
        for prompt, byte in generation:
            written.texts[prompt].append(byte)
            if prompt == 0:
                put(byte)
    except KeyboardInterrupt:
        written.interrupted = True
    finally:
        stop()
    return written


def verify(model: Decoder, prompt: bytes, text: bytes, sampling: Sampling, impl: str | None) -> str:
    """Reads prompt and continuation in one prefill; says how many of the bytes its logits give again, draw for draw."""
    tokens = encode(bytes(prompt) + bytes(text))[:-1]
    logits = Session(model, [len(tokens)], impl).prefill([(0, tokens)], every_row=True)
    generator = torch.Generator().manual_seed(sampling.seed)
    same = sum(sampling.draw(row, generator) == byte for row, byte in zip(logits[len(prompt) :], text))
    verdict = "decode = prefill" if same == len(text) else "decode is NOT prefill"
    return f"{verdict}: {same} of {len(text)} bytes come out again when the whole text is read in one prefill"


def summary(timing: Timing) -> str:
    """One line: tokens, seconds and tokens/s of prefill and decode."""
    parts = []
    for name in ("prefill", "decode"):
        tokens, seconds = getattr(timing, f"{name}_tokens"), getattr(timing, f"{name}_seconds")
        rate = f", {tokens / seconds:.0f} tokens/s" if seconds else ""
        parts.append(f"{name} {tokens} tokens in {seconds:.2f} s{rate}")
    return "; ".join(parts)


def as_json(prompts: Sequence[bytes], written: Written, sampling: Sampling, device: str) -> dict[str, Any]:
    """What `--json` prints: one entry a prompt, the settings and the timing."""
    entries = [{"prompt_bytes": len(prompt), "text": text.decode("utf-8", "replace"), "new_tokens": len(text)}
               for prompt, text in zip(prompts, written.texts)]  # fmt: skip
    found = {"device": device, "sampling": vars(sampling), "timing": vars(written.timing),
             "interrupted": written.interrupted, "generations": entries}  # fmt: skip
    return found if written.verified is None else {**found, "verified": written.verified}


def write_whole(text: str) -> None:
    """Writes to standard output all or nothing: where it is a file and the disk is full, what was written is undone."""
    sys.stdout.flush()
    descriptor, data = sys.stdout.fileno(), text.encode("utf-8")
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    start = os.lseek(descriptor, 0, os.SEEK_CUR) if regular else 0
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        if regular:
            os.ftruncate(descriptor, start)
        raise
