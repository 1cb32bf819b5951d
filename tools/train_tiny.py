"""Trains the tiny byte-level checkpoint that ships in thalweg/assets, through the references with torch autograd.

    python tools/train_tiny.py --corpus /path/to/lib/python3.12 --out thalweg/assets/tiny

Text: the `.py`, `.txt` and `.rst` files of a Python standard library; a file is held out when the first byte of the
SHA-256 of its relative path is under 13 (about 5 %). Two phases: dense attention at a short context, then QSA
selection at the full one. The indexer is trained in both towards the dense attention's own distribution over blocks
(its input is detached: it never pulls on the rest of the model).
"""

import argparse
import hashlib
import json
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from thalweg.kda import reference as kda
from thalweg.layers import Config, KDALayer, QSALayer
from thalweg.model import Decoder, save
from thalweg.qsa import reference as qsa

HELD_OUT_BELOW = 13
LARGEST_FILE = 400_000  # bytes; larger ones are generated tables
KL_ROWS = 128  # query rows a sequence whose block distribution the indexer learns from, each step


def read_corpus(root: Path) -> tuple[bytes, bytes, dict[str, int]]:
    """Training and held-out bytes (files joined by byte 0), and their counts."""
    files = sorted(p for p in root.rglob("*") if p.suffix in (".py", ".txt", ".rst") and "site-packages" not in p.parts)
    parts: dict[bool, list[tuple[bytes, bytes]]] = {False: [], True: []}
    for path in files:
        data = path.read_bytes()
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        name = hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
        if 0 < len(data) <= LARGEST_FILE and b"\0" not in data:
            parts[name[0] < HELD_OUT_BELOW].append((name, data))
    seen = {data for _, data in parts[False]}
    parts[True] = [item for item in parts[True] if item[1] not in seen]
    train, held = (b"".join(b"\0" + data for _, data in sorted(parts[flag])) for flag in (False, True))
    return train, held, {"train_files": len(parts[False]), "held_files": len(parts[True])}


def kda_mix(layer: KDALayer, x: torch.Tensor) -> torch.Tensor:
    """The layer on `[B, T, hidden]` from zero state, through the oracles."""
    config = layer.config
    qkv, g_raw, beta_logits, gate = layer.project(x)
    mixed, _ = kda.short_conv(qkv, layer.conv_weight, None, None)
    heads = mixed.unflatten(-1, (3, config.kda_heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
    q, k, v = kda.l2norm(heads[0]), kda.l2norm(heads[1]), heads[2]
    g = kda.log_decay(g_raw, **layer.gate_arguments()).transpose(1, 2)
    beta = kda.write_strength(beta_logits).transpose(1, 2)
    with torch.autocast(x.device.type, enabled=False):  # the chunk form stays float32 (TF32 products)
        o = kda.chunked(q, k, v, g, beta, None, config.kda_dim**-0.5)[0]
    o = kda.gated_norm(o.transpose(1, 2), gate, layer.norm_weight, config.norm_eps)
    return layer.out_proj(o.flatten(-2).to(x.dtype))


def block_scores(layer: QSALayer, x: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Index scores `[B, rows, N]` of some rows against every complete block, over sqrt(Di); -inf if not visible."""
    config, T = layer.config, x.shape[1]
    raw = F.linear(x.detach(), layer.in_proj.weight[-layer.widths[-1] :]).unflatten(-1, (config.index_heads + 1, -1))
    index_q = qsa.gemma_norm(raw[:, rows, :-1], layer.index_q_norm, config.norm_eps)
    index_q = qsa.apply_rope(index_q.transpose(0, 1), rope[rows]).transpose(0, 1)
    pooled = raw[:, :, -1].float().unflatten(1, (-1, config.ratio)).mean(2)
    keys = qsa.gemma_norm(pooled, layer.index_k_norm, config.norm_eps)
    keys = qsa.apply_rope(keys.transpose(0, 1), rope[:: config.ratio]).transpose(0, 1)
    scores = qsa.score(index_q, keys, torch.float32) * config.index_dim**-0.5
    seen = torch.arange(T // config.ratio, device=x.device) < ((rows + 1) // config.ratio)[:, None]
    return scores.masked_fill(~seen, -torch.inf)


def qsa_mix(layer: QSALayer, x: torch.Tensor, rope: torch.Tensor, sparse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer on `[B, T, hidden]` and the indexer's loss (KL to the dense attention's mass over blocks)."""
    config, (B, T, _) = layer.config, x.shape
    q, gate, k, v, _ = layer.project(x.flatten(0, 1), rope.repeat(B, 1))
    q, gate, k, v = (part.unflatten(0, (B, T)).transpose(1, 2) for part in (q, gate, k, v))
    k, v = (part.repeat_interleave(config.heads // config.kv_heads, 1) for part in (k, v))
    token, row = torch.arange(T, device=x.device), torch.arange(T, device=x.device)[:, None]
    if sparse:
        with torch.no_grad():
            chosen = select_mask(block_scores(layer, x, rope, token), config)
            tail = (token >= (row + 1) // config.ratio * config.ratio) & (token <= row)
            mask = (chosen.repeat_interleave(config.ratio, -1) | tail)[:, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    rows = torch.randint(config.ratio, T, (KL_ROWS,), device=x.device)
    with torch.no_grad():
        logits = (q[:, :, rows].float() @ k.float().transpose(-1, -2)) * config.head_dim**-0.5
        mass = logits.masked_fill(token > rows[:, None], -torch.inf).softmax(-1).sum(1)
        mass = mass.unflatten(-1, (-1, config.ratio)).sum(-1)
        seen = torch.arange(T // config.ratio, device=x.device) < ((rows + 1) // config.ratio)[:, None]
        target = mass * seen
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    logp = block_scores(layer, x, rope, rows).log_softmax(-1).masked_fill(~seen, 0.0)
    loss = (target * (target.clamp(min=1e-9).log() - logp)).sum(-1).mean()
    return layer.out_proj((o * torch.sigmoid(gate)).transpose(1, 2).flatten(-2)), loss


def select_mask(scores: torch.Tensor, config: Config) -> torch.Tensor:
    """Blocks each row attends to: its budget's best (ties at the cut kept: training only)."""
    k = min(config.budget // config.ratio, scores.shape[-1])
    return (scores >= scores.topk(k, -1).values[..., -1:]) & (scores > -torch.inf)


def forward(model: Decoder, tokens: torch.Tensor, sparse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[B, T, vocab]` and the summed indexer loss."""
    x, index_loss = model.embed(tokens), 0.0
    config = model.config
    rope = qsa.rope_table(tokens.shape[1], config.rotary_dim, config.rope_theta, tokens.device)
    for block in model.blocks:
        h = block.norm(x, block.mixer_norm)
        if block.kind == "kda":
            mixed = kda_mix(block.mixer, h)
        else:
            mixed, loss = qsa_mix(block.mixer, h, rope, sparse)
            index_loss = index_loss + loss
        x = x + mixed
        x = x + block.mlp(block.norm(x, block.mlp_norm))
    return model.logits(x), index_loss


@torch.no_grad()
def bits_per_byte(model: Decoder, data: bytes, window: int, sparse: bool, device: str) -> float:
    """Each byte of `data` predicted once, with at least window/2 bytes before it (fewer only at the start)."""
    stream = torch.frombuffer(bytearray(b"\0" + data), dtype=torch.uint8).long().to(device)
    last = len(stream) - 1 - window
    starts = torch.tensor([*range(0, last, window // 2), last], device=device)
    known = torch.cat([starts.new_zeros(1), starts[:-1] + window])  # bytes up to here are already predicted
    total = 0.0
    for at, before in zip(starts.split(65536 // window), known.split(65536 // window)):
        piece = stream[at[:, None] + torch.arange(window + 1, device=device)]
        logits, _ = forward(model, piece[:, :-1], sparse)
        losses = F.cross_entropy(logits.float().flatten(0, 1), piece[:, 1:].flatten(), reduction="none")
        target = at[:, None] + torch.arange(1, window + 1, device=device)
        total += losses.unflatten(0, piece[:, 1:].shape)[target > before[:, None]].sum().item()
    return total / len(data) / math.log(2)


def order5_bits(train: bytes, held: bytes) -> float:
    """Bits a byte of an interpolated (Witten-Bell) order-5 byte model counted on the training text."""
    t, h = np.frombuffer(train, np.uint8).astype(np.int64), np.frombuffer(held, np.uint8).astype(np.int64)
    p = np.full(len(h), 1 / 256)
    for order in range(6):
        ct, ch = np.zeros(len(t), np.int64), np.zeros(len(h), np.int64)
        for back in range(1, order + 1):
            ct[back:] |= t[:-back] << (8 * back)
            ch[back:] |= h[:-back] << (8 * back)
        pairs, n = np.unique(ct | t, return_counts=True)
        contexts, first = np.unique(pairs >> 8, return_index=True)
        seen, kinds = np.add.reduceat(n, first), np.diff(np.append(first, len(pairs)))

        def look(keys, values, wanted):
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            return np.where(keys[at] == wanted, values[at], 0)

        c, total, d = look(pairs, n, ch | h), look(contexts, seen, ch >> 8), look(contexts, kinds, ch >> 8)
        p = np.where(total > 0, (c + d * p) / np.maximum(total + d, 1), p)
    return float(-np.log2(p).mean())


def optimizers(model: Decoder, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the blocks' matrices, AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if n.endswith(("proj.weight", "up.weight"))]
    ids = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


class Gradient:
    """Loss and gradients of one batch shape; on a GPU one captured graph, since a step launches ~25,000 kernels."""

    def __init__(self, model: Decoder, rows: int, length: int, sparse: bool, index_weight: float, device: str):
        self.model, self.sparse, self.index_weight, self.device = model, sparse, index_weight, device
        self.batch = torch.zeros(rows, length + 1, dtype=torch.long, device=device)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        self.graph = None
        if device == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    self.compute()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.losses = self.compute()

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch._foreach_zero_([p.grad for p in self.model.parameters()])
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda", cache_enabled=False):
            logits, index_loss = forward(self.model, self.batch[:, :-1], self.sparse)
        loss = F.cross_entropy(logits.float().flatten(0, 1), self.batch[:, 1:].flatten())
        (loss + self.index_weight * index_loss).backward()
        return loss.detach(), index_loss.detach()

    def __call__(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.batch.copy_(batch)
        if self.graph is None:
            return self.compute()
        self.graph.replay()
        return self.losses


def train(model: Decoder, text: bytes, args: argparse.Namespace, device: str) -> list[dict]:
    """Runs both phases; returns the log, one row every 50 steps. The schedule follows steps, or minutes if given."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    opts, log, started, gradient = optimizers(model, args.lr), [], time.time(), None
    done, step = 0.0, 0
    while done < 1.0:
        sparse = done >= args.dense_share
        T = model.config.context if sparse else args.short_context
        if gradient is None or gradient.sparse != sparse:
            gradient = None  # the first graph's memory goes back before the second is captured
            gradient = Gradient(model, args.batch_tokens // T, T, sparse, args.index_weight, device)
        starts = torch.randint(0, len(data) - T - 1, (args.batch_tokens // T,), device=device)
        loss, index_loss = gradient(data[starts[:, None] + torch.arange(T + 1, device=device)].long())
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / 100) * min(1.0, (1 - done) / 0.6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        if step % 50 == 0:
            row = {"step": step, "bpb": round(loss.item() / math.log(2), 4), "index_kl": round(index_loss.item(), 4),
                   "sparse": sparse, "seconds": round(time.time() - started, 1)}  # fmt: skip
            log.append(row)
            print(json.dumps(row), flush=True)
        step += 1
        if args.minutes and step % 10 == 0:
            loss.item()  # the clock below must not run ahead of the device
            done = (time.time() - started) / (60 * args.minutes)
        elif not args.minutes:
            done = step / args.steps
    args.steps = step
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, help="lib/pythonX.Y of an interpreter")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=0.0, help="instead of --steps: follow the clock")
    parser.add_argument("--batch-tokens", type=int, default=65536)
    parser.add_argument("--short-context", type=int, default=2048)
    parser.add_argument("--dense-share", type=float, default=0.6, help="share of the steps before selection is on")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--index-weight", type=float, default=0.1)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON that overrides Config's defaults")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    text, held, report = read_corpus(args.corpus)
    model = Decoder(Config(**args.config)).to(device)
    started = time.time()
    log = train(model, text, args, device)
    seconds = time.time() - started
    save(model, args.out)
    torch.set_float32_matmul_precision("highest")
    model = Decoder.load(args.out, device=device, dtype=torch.float32)
    report |= {"train_bytes": len(text), "held_bytes": len(held)}
    report["parameters"] = sum(p.numel() for p in model.parameters())
    for window in (args.short_context, model.config.context):
        report[f"bpb_dense_{window}"] = bits_per_byte(model, held, window, False, device)
        report[f"bpb_sparse_{window}"] = bits_per_byte(model, held, window, True, device)
    report["xz_bpb"] = 8 * len(lzma.compress(held, preset=9 | lzma.PRESET_EXTREME)) / len(held)
    report["order5_bpb"] = order5_bits(text, held)
    report |= {"seconds": round(seconds), "steps": args.steps, "seed": args.seed, "torch": torch.__version__}
    report["held_sha256"] = hashlib.sha256(held).hexdigest()
    (args.out / "training.json").write_text(json.dumps({"report": report, "log": log}, indent=1))
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
