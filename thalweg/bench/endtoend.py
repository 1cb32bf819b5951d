"""End-to-end speed of the model that ships with the package: prefill, decode and peak memory of this process."""

import resource
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from thalweg.bench.calls import IMPLS
from thalweg.layers import Impls
from thalweg.model import Decoder, Generation, Sampling

CASES = {"e2e-4096": (1, 4096, 128), "e2e-8x512": (8, 512, 64)}  # prompts, bytes of each, new tokens of each
LONG = {f"e2e-4k-1k-b{count}": (count, 4096, 1024) for count in (2, 4, 8, 16, 32)}  # by name only


@dataclass(frozen=True)
class Row:
    """Medians over the repeats. wall_tokens_per_second: new tokens over the time of the whole run, prefill and drawing
    them included. peak_mb: largest resident size of the whole process so far, in 10^6 bytes."""

    case: str
    device: str
    dtype: str
    prefill_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    wall_tokens_per_second: float
    peak_mb: int


def prompt(size: int, number: int = 0) -> bytes:
    """`size` bytes of real text: this package's own sources, joined; another start for each number."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return (text[number * size :] + text)[:size]


def named(text: str | None) -> Impls:
    """What --impl says: one name for every op, or op=name, several of them with commas between."""
    if text is None or "=" not in text:
        return text
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    unknown = [op for op in pairs if op not in IMPLS]
    if unknown:
        raise ValueError(f"op must be one of {', '.join(IMPLS)}, got {unknown[0]!r}")
    return pairs


def run(case: str, device: str, impl: Impls = None, repeats: int = 3, dtype: torch.dtype = torch.float32) -> Row:
    """Times one case; ValueError for a name that is none. Long cases run once, warm up on a shorter text, and take the
    likeliest byte: drawing by probability is the host's work and would hide the rest."""
    if case not in CASES | LONG:
        raise ValueError(f"case must be one of {', '.join(CASES | LONG)}, got {case!r}")
    count, size, new = (CASES | LONG)[case]
    model, runs, walls = Decoder.load(device=device, dtype=dtype), [], []
    prompts = [prompt(size, number) for number in range(count)]
    for repeat in range((1 if case in LONG else repeats) + 1):
        tokens = 8 if case in LONG and not repeat else new
        sampling = Sampling(tokens, 0.0 if case in LONG else 1.0, seed=repeat)
        generation = Generation(model, prompts, sampling, impl)
        started = time.perf_counter()
        made = sum(1 for _ in generation)
        if repeat:  # the first one warms up
            runs.append(generation.timing)
            walls.append(made / (time.perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    if torch.device(device).type == "cuda":
        peak += torch.cuda.max_memory_allocated()
    seconds = median(t.prefill_seconds for t in runs)
    decode = median(t.decode_tokens / max(t.decode_seconds, 1e-9) for t in runs)
    read = runs[0].prefill_tokens
    rates = round(read / seconds), round(decode, 1), round(median(walls), 1)
    return Row(case, device, str(dtype).removeprefix("torch."), read, round(seconds, 3), *rates, peak // 10**6)
