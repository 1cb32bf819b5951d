"""End-to-end speed of the model that ships with the package: prefill, decode and peak memory of this process."""

import resource
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from thalweg.model import Decoder, Generation, Sampling

CASES = {"e2e-4096": (1, 4096, 128), "e2e-8x512": (8, 512, 64)}  # prompts, bytes of each, new tokens of each


@dataclass(frozen=True)
class Row:
    """Medians over the repeats. peak_mb: largest resident size of the whole process so far, in 10^6 bytes."""

    case: str
    device: str
    prefill_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    peak_mb: int


def prompt(size: int, number: int = 0) -> bytes:
    """`size` bytes of real text: this package's own sources, joined; another start for each number."""
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py")))
    return (text[number * size :] + text)[:size]


def run(case: str, device: str, impl: str | None = None, repeats: int = 3) -> Row:
    """Times one case; ValueError for a name that is none."""
    if case not in CASES:
        raise ValueError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    count, size, new = CASES[case]
    model, runs = Decoder.load(device=device), []
    for repeat in range(repeats + 1):
        prompts = [prompt(size, number) for number in range(count)]
        generation = Generation(model, prompts, Sampling(new, temperature=1.0, seed=repeat), impl)
        for _ in generation:
            pass
        if repeat:  # the first one warms up
            runs.append(generation.timing)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
    if torch.device(device).type == "cuda":
        peak += torch.cuda.max_memory_allocated()
    seconds = median(t.prefill_seconds for t in runs)
    decode = median(t.decode_tokens / max(t.decode_seconds, 1e-9) for t in runs)
    tokens = runs[0].prefill_tokens
    return Row(case, device, tokens, round(seconds, 3), round(tokens / seconds), round(decode, 1), peak // 10**6)
