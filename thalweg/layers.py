"""KDALayer and QSALayer: the projections, norms and convolution around the ops, on packed tokens `[T, hidden]`.

Each layer has one fused input projection whose column ranges are handed to the ops as strided views, and a `forward`
that goes through the public ops alone. Training differentiates through the references instead, so `project` and
`output` are methods of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from thalweg import kda, qsa
from thalweg.state import PAGE_TOKENS, KDAState, QSAState, Step

Impls = str | Mapping[str, str] | None  # one implementation of every op, or of some ops by name


def named(impl: Impls, op: str) -> str | None:
    """The implementation that an op is asked for by name; None: its automatic choice."""
    return impl if impl is None or isinstance(impl, str) else impl.get(op)


@dataclass(frozen=True)
class Config:
    """Shape of the hybrid decoder. `blocks` names each block's mixer, "kda" or "qsa"; widths are in elements.

    budget: tokens a query may select (a multiple of ratio), not counting the open block. context: trained length.
    """

    vocab_size: int = 256
    hidden: int = 192
    blocks: tuple[str, ...] = ("kda", "kda", "kda", "qsa") * 2
    mlp: int = 368
    norm_eps: float = 1e-6
    kda_heads: int = 2
    kda_dim: int = 128
    kda_rank: int = 48
    conv_width: int = 4
    gate: str = "bounded"
    lower_bound: float = -5.0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    index_heads: int = 4
    index_dim: int = 128
    rotary_dim: int = 32
    rope_theta: float = 1e6
    ratio: int = 4
    budget: int = 256
    context: int = 8192

    def __post_init__(self):
        for f in fields(self):
            value, kind = getattr(self, f.name), type(f.default)
            if kind is float and type(value) is int:
                value = float(value)
            if type(value) is not kind:
                raise ValueError(f"{f.name} must be of type {kind.__name__}, got {value!r}")
            if kind is int and not 0 < value < 2**31:
                raise ValueError(f"{f.name} must be a positive integer below 2^31, got {value!r}")
        bad = [block for block in self.blocks if block not in ("kda", "qsa")]
        if bad or not self.blocks:
            raise ValueError(f"blocks must be a non-empty list of 'kda' and 'qsa', got {list(self.blocks)}")
        for name, wanted, ok in (
            ("norm_eps", "positive", 0 < self.norm_eps < 1),
            ("rope_theta", "finite and positive", 0 < self.rope_theta < float("inf")),
            ("lower_bound", "finite and negative", -float("inf") < self.lower_bound < 0),
            ("gate", "soft or bounded", self.gate in ("soft", "bounded")),
            ("conv_width", "from 2 to 8", 2 <= self.conv_width <= 8),
            ("heads", f"a multiple of kv_heads = {self.kv_heads}", self.heads % self.kv_heads == 0),
            ("budget", f"a multiple of ratio = {self.ratio}", self.budget % self.ratio == 0),
            ("ratio", f"a divisor of the page of {PAGE_TOKENS} tokens", PAGE_TOKENS % self.ratio == 0),
            ("rotary_dim", "even and within both heads",
             self.rotary_dim % 2 == 0 and self.rotary_dim <= min(self.head_dim, self.index_dim)),
        ):  # fmt: skip
            if not ok:
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")


class KDALayer(nn.Module):
    """Kimi Delta Attention: q|k|v, beta, decay and output gates (both low rank) -> conv -> KDA -> norm -> out."""

    def __init__(self, config: Config):
        super().__init__()
        H, D, rank = config.kda_heads, config.kda_dim, config.kda_rank
        self.config, self.widths = config, (3 * H * D, H, rank, rank)
        self.in_proj = nn.Linear(config.hidden, sum(self.widths), bias=False)
        self.decay_up = nn.Linear(rank, H * D, bias=False)
        self.gate_up = nn.Linear(rank, H * D, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(3 * H * D, config.conv_width) * config.conv_width**-0.5)
        self.A_log = nn.Parameter(torch.empty(H).uniform_(-0.5, 0.5))
        self.dt_bias = nn.Parameter(torch.empty(H, D).uniform_(-7.0, -1.0))
        self.norm_weight = nn.Parameter(torch.ones(D))
        self.out_proj = nn.Linear(H * D, config.hidden, bias=False)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[.., hidden]` -> qkv `[.., 3HD]`, raw gate `[.., H, D]`, beta logits `[.., H]`, output gate `[.., H, D]`."""
        H, D = self.config.kda_heads, self.config.kda_dim
        qkv, beta_logits, decay, gate = self.in_proj(x).split(self.widths, -1)
        return qkv, self.decay_up(decay).unflatten(-1, (H, D)), beta_logits, self.gate_up(gate).unflatten(-1, (H, D))

    def gate_arguments(self) -> dict[str, object]:
        """How the raw gate becomes a log decay: keyword arguments of every op that takes one."""
        config = self.config
        return {"gate": config.gate, "A_log": self.A_log.float(), "dt_bias": self.dt_bias.float(),
                "lower_bound": config.lower_bound}  # fmt: skip

    def forward(self, x: torch.Tensor, state: KDAState, step: Step, impl: Impls = None) -> torch.Tensor:
        H, D, eps = self.config.kda_heads, self.config.kda_dim, self.config.norm_eps
        qkv, g_raw, beta_logits, gate = self.project(x)
        gates = self.gate_arguments()
        if step.decode:
            o = kda.kda_decode(qkv, g_raw, beta_logits, gate, self.conv_weight, state.conv, state.recurrent, step.slots,
                               norm_weight=self.norm_weight, norm_eps=eps, **gates,
                               impl=named(impl, "kda_decode"))  # fmt: skip
        else:
            mixed = kda.kda_conv(qkv, self.conv_weight, step.cu_seqlens, state.conv, step.slots,
                                 fresh=step.fresh, impl=named(impl, "kda_conv"))  # fmt: skip
            q, k, v = mixed.unflatten(-1, (3, H, D)).unbind(-3)
            o = kda.kda_prefill(q, k, v, g_raw, beta_logits, step.cu_seqlens, state.recurrent, step.slots,
                                fresh=step.fresh, impl=named(impl, "kda_prefill"), **gates)  # fmt: skip
            o = kda.gated_rms_norm(o, gate, self.norm_weight, eps, impl=named(impl, "gated_rms_norm"))
        return self.out_proj(o.flatten(-2))


class QSALayer(nn.Module):
    """Qwen Sparse Attention: GQA over the blocks that the indexer selects, with an output gate."""

    def __init__(self, config: Config):
        super().__init__()
        D, Di = config.head_dim, config.index_dim
        q, kv = config.heads * D, config.kv_heads * D
        self.config, self.widths = config, (q, q, kv, kv, (config.index_heads + 1) * Di)
        self.in_proj = nn.Linear(config.hidden, sum(self.widths), bias=False)
        self.q_norm, self.k_norm = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D))
        self.index_q_norm, self.index_k_norm = nn.Parameter(torch.zeros(Di)), nn.Parameter(torch.zeros(Di))
        self.out_proj = nn.Linear(q, config.hidden, bias=False)

    def project(self, x: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[T, hidden]`, RoPE rows `[T, R]` -> q, gate `[T, Hq, D]`, k, v `[T, Hkv, D]`, index q|k `[T, (Hi+1) Di]`."""
        config = self.config
        q, gate, k, v, index_qk = self.in_proj(x).split(self.widths, -1)
        q, gate = (part.unflatten(-1, (config.heads, -1)) for part in (q, gate))
        k, v = (part.unflatten(-1, (config.kv_heads, -1)) for part in (k, v))
        q = qsa.apply_rope(qsa.gemma_norm(q, self.q_norm, config.norm_eps), rope).to(x.dtype)
        k = qsa.apply_rope(qsa.gemma_norm(k, self.k_norm, config.norm_eps), rope).to(x.dtype)
        return q, gate, k, v, index_qk

    def forward(self, x: torch.Tensor, state: QSAState, step: Step, impl: Impls = None) -> torch.Tensor:
        config = self.config
        q, gate, k, v, index_qk = self.project(x, step.rope)
        state.write(k, v, step)
        index_q = qsa.qsa_append(index_qk, self.index_q_norm, self.index_k_norm, step.rope_table, step.positions,
                                 step.row_request, state.raw_ring, state.block_keys, step.page_table,
                                 ratio=config.ratio, eps=config.norm_eps, impl=named(impl, "qsa_append"))  # fmt: skip
        blocks = qsa.qsa_select(index_q, state.block_keys, step.page_table, step.row_request, step.visible,
                                config.budget // config.ratio, impl=named(impl, "qsa_select"))  # fmt: skip
        o = qsa.qsa_attend(q, state.k_cache, state.v_cache, step.page_table, step.row_request, step.positions, blocks,
                           ratio=config.ratio, out_gate=gate, impl=named(impl, "qsa_attend"))  # fmt: skip
        return self.out_proj(o.flatten(-2))


class MLP(nn.Module):
    """Gated MLP: down(silu(gate x) * up x)."""

    def __init__(self, config: Config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden, 2 * config.mlp, bias=False)
        self.down_proj = nn.Linear(config.mlp, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm residual block: x + mixer(norm x), then x + mlp(norm x)."""

    def __init__(self, config: Config, kind: str):
        super().__init__()
        self.kind, self.eps = kind, config.norm_eps
        self.mixer = KDALayer(config) if kind == "kda" else QSALayer(config)
        self.mlp = MLP(config)
        self.mixer_norm = nn.Parameter(torch.ones(config.hidden))
        self.mlp_norm = nn.Parameter(torch.ones(config.hidden))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), self.eps)

    def forward(self, x: torch.Tensor, state: object, step: Step, impl: Impls = None) -> torch.Tensor:
        x = x + self.mixer(self.norm(x, self.mixer_norm), state, step, impl)
        return x + self.mlp(self.norm(x, self.mlp_norm))
