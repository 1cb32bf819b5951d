"""A small hybrid decoder of KDA and QSA blocks over bytes: load, save, prefill, step, generate.

Everything that mixes tokens goes through the public ops. A `Session` owns the caches of the sequences in flight; a
packed prefill takes any pieces of any of them, a step takes one token of each, with padding rows for those that ended.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib import resources
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from thalweg import qsa
from thalweg.graphs import Replay
from thalweg.layers import Block, Config, Impls
from thalweg.state import PAGE_TOKENS, KDAState, Pages, QSAState, Step

END = 0  # the byte that stands before every text and after it
PIECE = 1024  # rows of one prefill pass: a multiple of the KDA chunk, so that cuts do not change a sequence's bits
MOST_NEW_TOKENS = 262_144  # the caches of a prompt are laid out for all it may become
RING = 16  # raw index keys kept a sequence: a rejected tail of up to RING - ratio tokens can be rewritten


def default_checkpoint() -> Path:
    """Folder of the checkpoint that ships with the package."""
    return Path(str(resources.files("thalweg"))) / "assets" / "tiny"


class Decoder(nn.Module):
    """Embedding, pre-norm blocks, norm, tied head."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        nn.init.normal_(self.embed.weight, std=config.hidden**-0.5)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.blocks)
        self.norm = nn.Parameter(torch.ones(config.hidden))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` after the last block -> `[..., vocab]`."""
        return self.blocks[0].norm(x, self.norm) @ self.embed.weight.to(x.dtype).T

    @staticmethod
    def load(path: Path | str | None = None, device: object = "cpu", dtype: torch.dtype = torch.float32) -> "Decoder":
        """Loads `config.json` and `model.safetensors` from a folder (None: the checkpoint in the package).

        Raises OSError for what cannot be read and ValueError, naming the file, for what is not such a checkpoint.
        """
        folder = default_checkpoint() if path is None else Path(path)
        config, weights = folder / "config.json", folder / "model.safetensors"
        try:
            values = json.loads(config.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("not a JSON object")
            unknown = sorted(set(values) - {f.name for f in fields(Config)})
            if unknown:
                raise ValueError(f"unknown keys {unknown[:4]}")
            with torch.device("meta"):  # sizes are only believed once the weights have them
                model = Decoder(Config(**{**values, "blocks": tuple(values.get("blocks", Config.blocks))}))
        except (ValueError, TypeError, RuntimeError, RecursionError) as error:
            raise ValueError(f"{config}: not a Thalweg config: {error}") from None
        if not weights.is_file():
            raise FileNotFoundError(f"{weights}: no such file")
        try:
            tensors = load_file(weights)
            odd = [name for name, t in tensors.items() if not (t.is_floating_point() and t.isfinite().all())]
            if odd:
                raise ValueError(f"{odd[0]} is not made of finite floating-point numbers")
            model.load_state_dict({name: t.to(dtype) for name, t in tensors.items()}, assign=True)
        except (SafetensorError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"{weights}: does not fit {config.name}: {reason}") from None
        return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def save(model: Decoder, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors` (matrices in bfloat16, vectors in float32) into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, p in model.named_parameters():
        dtype = torch.bfloat16 if p.dim() == 2 and min(p.shape) > 8 else torch.float32
        tensors[name] = p.detach().to("cpu", dtype).contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n", encoding="utf-8")


@contextmanager
def few_threads(rows: int) -> Iterator[None]:
    """One CPU thread for the products of a few rows: handing out their halves costs more than it saves (61 against
    54 tokens/s on 2 quiet cores), and far more when something else wants the second core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if rows <= 8 else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Session:
    """Sequences in flight on one model: caches for `capacity[i]` tokens of each sequence i, lengths, page table.

    On a GPU its steps are replayed as CUDA graphs where the implementations allow it; eager: never.
    """

    def __init__(self, model: Decoder, capacity: Sequence[int], impl: Impls = None, eager: bool = False):
        config, weight = model.config, model.embed.weight
        self.model, self.impl, self.device = model, impl, weight.device
        self.lengths = [0] * len(capacity)
        needed = [-(-tokens // PAGE_TOKENS) for tokens in capacity]
        self.pages = Pages(len(capacity), sum(needed), max(needed))
        self.page_table = self.pages.table.to(self.device)
        self.rope_table = qsa.rope_table(max(capacity), config.rotary_dim, config.rope_theta, self.device)
        self.states = [self._state(kind, len(capacity), sum(needed) + 1, weight.dtype) for kind in config.blocks]
        mixers = [partial(self._block, i) for i in range(len(config.blocks))]
        self.replay = Replay([self._embed, *mixers, self._logits], eager)

    def _state(self, kind: str, sequences: int, pages: int, dtype: torch.dtype) -> KDAState | QSAState:
        c, H, D = self.model.config, self.model.config.kda_heads, self.model.config.kda_dim
        if kind == "kda":
            conv = torch.zeros(sequences, 3 * H * D, c.conv_width - 1, dtype=dtype, device=self.device)
            return KDAState(conv, torch.zeros(sequences, H, D, D, dtype=torch.float32, device=self.device))
        caches = torch.zeros(2, pages, PAGE_TOKENS, c.kv_heads, c.head_dim, dtype=dtype, device=self.device)
        keys = torch.zeros(pages, PAGE_TOKENS // c.ratio, c.index_dim, dtype=torch.bfloat16, device=self.device)
        ring = torch.zeros(sequences, max(RING, c.ratio), c.index_dim, dtype=torch.bfloat16, device=self.device)
        return QSAState(caches[0], caches[1], keys, ring)

    def _step(self, pieces: list[tuple[int, int]], decode: bool) -> Step:
        """Metadata of one pass over `count` next tokens of each sequence; sequence -1 is a padding row."""
        sequences, counts = (torch.tensor(part) for part in zip(*pieces))
        starts = torch.tensor([self.lengths[i] if i >= 0 else -1 for i, _ in pieces])
        for (i, count), start in zip(pieces, starts.tolist()):
            if i >= 0 and self.pages.grow(i, start + count):
                self.page_table = self.pages.table.to(self.device, non_blocking=True)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        row_request = sequences.repeat_interleave(counts)
        positions = torch.arange(len(row_request)) + (starts - offsets[:-1]).repeat_interleave(counts)
        page = self.pages.table[row_request, (positions // PAGE_TOKENS).clamp(min=0)].long()
        page = page.masked_fill(positions < 0, 0)
        fresh = ((sequences >= 0) & (starts == 0)).long()
        visible = qsa.visible_blocks(positions, self.model.config.ratio)
        host = offsets, sequences, fresh, row_request, positions, visible, page, positions.clamp(min=0) % PAGE_TOKENS
        copied = torch.cat(host).to(self.device, non_blocking=True)  # one copy, not one each
        parts = copied.split([len(part) for part in host])
        cu_seqlens, slots, fresh, row_request, positions, visible, page, page_row = parts
        return Step(
            decode=decode,
            cu_seqlens=cu_seqlens,
            slots=slots,
            fresh=fresh > 0,
            row_request=row_request,
            positions=positions,
            visible=visible,
            page=page,
            page_row=page_row,
            page_table=self.page_table,
            rope_table=self.rope_table,
            rope=qsa.rope_rows(self.rope_table, positions),
        )  # fmt: skip

    def _embed(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        return self.model.embed(tokens)

    def _block(self, i: int, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.model.blocks[i](x, self.states[i], step, self.impl)

    def _logits(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        return self.model.logits(x)

    def _advance(self, pieces: list[tuple[int, int]]) -> None:
        for sequence, count in pieces:
            if sequence >= 0:
                self.lengths[sequence] += count

    @torch.inference_mode()
    def prefill(self, pieces: list[tuple[int, torch.Tensor]], every_row: bool = False) -> torch.Tensor:
        """Packs the next tokens of some sequences into one pass; logits of each piece's last row `[pieces, vocab]`.

        pieces: (sequence, int64 tokens); a piece may be empty only if no logits of it are used. every_row: logits of
        all rows `[T, vocab]`.
        """
        counts = [len(tokens) for _, tokens in pieces]
        spans = [(sequence, count) for (sequence, _), count in zip(pieces, counts)]
        step, x = self._step(spans, decode=False), torch.cat([tokens for _, tokens in pieces]).to(self.device)
        x = self._embed(x, step)
        for i in range(len(self.states)):
            x = self._block(i, x, step)
        self._advance(spans)
        return self.model.logits(x if every_row else x[torch.tensor(counts).cumsum(0).to(x.device) - 1])

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor, live: Sequence[bool] | None = None) -> torch.Tensor:
        """One token of every sequence `[sequences]`; a row that is not live is padding. Logits `[sequences, vocab]`."""
        pieces = [(i if live is None or live[i] else -1, 1) for i in range(len(self.lengths))]
        with few_threads(len(pieces)):
            logits = self.replay(tokens.to(self.device, non_blocking=True), self._step(pieces, decode=True))
        self._advance(pieces)
        return logits


@dataclass
class Sampling:
    """temperature 0 is greedy; top_p in (0, 1]; a prompt's draws depend on the seed alone, not on its company."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.max_new_tokens <= MOST_NEW_TOKENS:
            raise ValueError(f"max_new_tokens must be in [0, {MOST_NEW_TOKENS}], got {self.max_new_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be in [0, 2^63), got {self.seed}")

    def draw(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """The next token from one row of logits `[vocab]`, on the host."""
        if not logits.isfinite().all():
            raise ValueError("the model's logits are not finite")
        if self.temperature == 0.0:
            return int(logits.argmax())
        scaled = (logits.double().cpu() - logits.max().item()) / self.temperature  # at most 0, however cold
        probs, order = torch.softmax(scaled, -1).sort(descending=True, stable=True)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= self.top_p, 0.0)
        return int(order[torch.multinomial(probs, 1, generator=generator)])

    def draws(self, logits: torch.Tensor, generators: Sequence[torch.Generator], live: Sequence[bool]) -> list[int]:
        """The next token of each row of `[rows, vocab]`; END for one that is not live."""
        if self.temperature == 0.0 and logits.isfinite().all():  # all rows at once: a row costs 20 us
            return [token if on else END for token, on in zip(logits.argmax(-1).tolist(), live)]
        return [self.draw(row, g) if on else END for row, g, on in zip(logits, generators, live)]


@dataclass
class Timing:
    """Tokens and seconds of a generation: prefill until the first logits of every prompt, then the steps."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def encode(text: bytes) -> torch.Tensor:
    """Tokens of a text: the byte that stands before every text, then its bytes."""
    return torch.frombuffer(bytearray(bytes([END]) + text), dtype=torch.uint8).long()


def prefill_pieces(lengths: Sequence[int], piece: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cuts prompts into passes of at most `piece` rows, (sequence, start, stop); cuts are at multiples of `piece`."""
    passes: list[tuple[int, int, int]] = []
    rows = 0
    for sequence, length in enumerate(lengths):
        for start in range(0, length, piece):
            stop = min(start + piece, length)
            if rows + stop - start > piece:
                yield passes
                passes, rows = [], 0
            passes, rows = [*passes, (sequence, start, stop)], rows + stop - start
    if passes:
        yield passes


@dataclass
class Generation:
    """Iterates over (prompt index, byte) as they come; `timing` is filled in on the way."""

    model: Decoder
    prompts: Sequence[bytes]
    sampling: Sampling
    impl: Impls = None
    piece: int = PIECE
    on_prefill: Callable[[int, int], None] | None = None  # rows done, rows in all
    timing: Timing = field(default_factory=Timing)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        tokens = [encode(prompt) for prompt in self.prompts]
        session = Session(self.model, [len(t) + self.sampling.max_new_tokens for t in tokens], self.impl)
        logits = self._prefill(session, tokens)
        generators = [torch.Generator().manual_seed(self.sampling.seed) for _ in tokens]
        live = [True] * len(tokens)
        for made in range(self.sampling.max_new_tokens):
            drawn = self.sampling.draws(logits, generators, live)
            live = [on and token != END for on, token in zip(live, drawn)]
            yield from ((i, token) for i, token in enumerate(drawn) if live[i])
            if not any(live) or made + 1 == self.sampling.max_new_tokens:
                return
            started = time.perf_counter()
            logits = session.step(torch.tensor(drawn), live).cpu()  # a GPU is waited for
            self.timing.decode_tokens += sum(live)
            self.timing.decode_seconds += time.perf_counter() - started

    def _prefill(self, session: Session, tokens: list[torch.Tensor]) -> torch.Tensor:
        started, done, total = time.perf_counter(), 0, sum(len(t) for t in tokens)
        last: list[torch.Tensor] = [torch.empty(0)] * len(tokens)
        for spans in prefill_pieces([len(t) for t in tokens], self.piece):
            logits = session.prefill([(i, tokens[i][start:stop]) for i, start, stop in spans])
            for row, (i, _, _) in zip(logits.cpu(), spans):
                last[i] = row
            done += sum(stop - start for _, start, stop in spans)
            self.timing.prefill_tokens, self.timing.prefill_seconds = done, time.perf_counter() - started
            if self.on_prefill is not None:
                self.on_prefill(done, total)
        return torch.stack(last)


def bits_per_byte(model: Decoder, text: bytes, piece: int = PIECE, impl: Impls = None) -> float:
    """Mean bits the model needs for each byte of a text, read as one sequence through the ops."""
    tokens = encode(text)
    session, total = Session(model, [len(tokens)], impl), 0.0
    for [(_, start, stop)] in prefill_pieces([len(tokens) - 1], piece):
        logits = session.prefill([(0, tokens[start:stop])], every_row=True)
        target = tokens[start + 1 : stop + 1].to(logits.device)
        total += torch.nn.functional.cross_entropy(logits.float(), target, reduction="sum").item()
    return total / len(text) / 0.6931471805599453
