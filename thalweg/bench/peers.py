"""Other people's kernels on the inputs of our cases, where their packages are installed beside us.

A peer gets what it is fastest with: layouts it wants (made before the clock starts), the fusions it offers, its own
state, advanced where it can in place. Its results are brought back to our layouts and judged like ours.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

Args = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bound:
    """call(): runs once. results(): what the last call left behind, by our names, in our layouts."""

    call: Callable[[], object]
    results: Callable[[], Tensors]


@dataclass(frozen=True)
class Peer:
    """key: what --impl calls it. what: the function it is, for the table. why_not(args): None where it can take them.

    graph: as in `timing.timed`.
    """

    key: str
    op: str
    package: str
    what: str
    why_not: Callable[[Args], str | None]
    bind: Callable[[Args], Bound]
    graph: bool | None = None

    def label(self) -> str:
        return f"{self.package} {metadata.version(self.package)} {self.what}"


def _without_fla(tensor: torch.Tensor) -> str | None:
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed"
    return None if tensor.device.type == "cuda" else f"takes CUDA tensors, got {tensor.device} ones"


def _one_to_one(args: Args) -> bool:
    """Every row reads and writes the slot of its own number, all pool entries in order."""
    reads, writes = args["read_slots"], args.get("write_slots")
    same = torch.equal(reads, torch.arange(len(reads), dtype=reads.dtype, device=reads.device))
    return same and writes is None and len(reads) == len(args["state"]) and args.get("fresh") is None


@functools.lru_cache(maxsize=8)
def _offsets(bounds: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cu_seqlens on the device and on the host. The same objects each time: FLA keeps what it derives from them."""
    on_host = torch.tensor(bounds)
    return on_host.to(device), on_host


def _fla_solve_why_not(args: Args) -> str | None:
    return _without_fla(args["lower"])


def _fla_solve(args: Args) -> Bound:
    from fla.ops.utils.index import prepare_chunk_indices
    from fla.ops.utils.solve_tril import solve_tril

    lower, cu = args["lower"].contiguous(), args.get("cu_seqlens")
    cu = None if cu is None else cu.long()
    chunks = None if cu is None else prepare_chunk_indices(cu, lower.shape[-1])
    kept: Tensors = {}

    def call() -> None:
        kept["out"] = solve_tril(lower, cu, chunks, args.get("out_dtype") or lower.dtype)

    return Bound(call, lambda: kept)


def _fla_prefill_why_not(args: Args) -> str | None:
    if args.get("gate") != "bounded" or args["A_log"] is None or args["dt_bias"] is None:
        return "measured with the bounded gate, A_log and dt_bias only"
    if args.get("checkpoint_slots") is not None or not _one_to_one(args) or args["state"].dtype != torch.float32:
        return "measured with one float32 state a sequence, in order, only"
    return _without_fla(args["q"])


def _fla_prefill(args: Args) -> Bound:
    from fla.ops.kda import chunk_kda

    tokens = [args[name][None].contiguous() for name in ("q", "k", "v", "g_raw", "beta_logits")]
    cu, on_host = _offsets(tuple(args["cu_seqlens"].tolist()), args["q"].device)
    given = {
        "scale": args.get("scale"), "initial_state": args["state"], "output_final_state": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True, "lower_bound": args["lower_bound"], "A_log": args["A_log"],
        "dt_bias": args["dt_bias"].flatten().contiguous(), "state_v_first": True, "cu_seqlens": cu,
        "cu_seqlens_cpu": on_host,
    }  # fmt: skip
    kept: Tensors = {}

    def call() -> None:
        with torch.inference_mode():
            out, kept["state"] = chunk_kda(*tokens, **given)
            kept["out"] = out[0]

    return Bound(call, lambda: kept)


def _fla_decode_why_not(args: Args) -> str | None:
    if args.get("gate") != "bounded" or args["A_log"] is None or args.get("conv_bias") is not None:
        return "measured with the bounded gate and no bias of the convolution only"
    if not _one_to_one(args) or args["state"].dtype != torch.float32 or len(args["conv_state"]) != len(args["state"]):
        return "measured with one float32 state a row, in order, only"
    return _without_fla(args["qkv"])


def _fla_decode(args: Args) -> Bound:
    """Three convolutions, the recurrent step with norms and gate inside, the gated norm: five launches."""
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_fwd
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    qkv, history, state = args["qkv"], args["conv_state"], args["state"]
    HV, V, K = state.shape[1:]
    keys = (qkv.shape[1] - HV * V) // 2
    H, B, kept = keys // K, len(qkv), {}
    wide = torch.cat([torch.zeros_like(history[:, :, :1]), history], 2)  # its caches hold the current token too
    parts = [slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, None)]
    caches = [wide[:, part].contiguous() for part in parts]
    weights = [args["conv_weight"][part].contiguous() for part in parts]
    inputs = [qkv[:, part] for part in parts]
    g, beta = args["g_raw"][:, None].contiguous(), args["beta_logits"][:, None].contiguous()
    given = {
        "A_log": args["A_log"], "dt_bias": args["dt_bias"].flatten().contiguous(), "initial_state": state,
        "scale": args.get("scale"), "inplace_final_state": True, "state_v_first": True,
        "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
        "lower_bound": args["lower_bound"],
    }  # fmt: skip
    gate = args["out_gate"].reshape(B * HV, V)

    def call() -> None:
        with torch.inference_mode():
            q, k, v = (
                causal_conv1d_update(x, cache, weight=weight, activation="silu")[0]
                for x, cache, weight in zip(inputs, caches, weights)
            )
            o, _ = fused_recurrent_kda_fwd(
                q.view(B, 1, H, K), k.view(B, 1, H, K), v.view(B, 1, HV, V), g, beta, **given
            )
            kept["out"] = layer_norm_gated_fwd(
                o.view(B * HV, V), gate, args["norm_weight"], None, "sigmoid", args["norm_eps"], is_rms_norm=True
            )[0].view(B, HV, V)

    def results() -> Tensors:
        return kept | {"state": state, "conv_state": torch.cat([cache[:, :, 1:] for cache in caches], 1)}

    return Bound(call, results)


PEERS = (
    Peer("fla", "solve_unit_lower", "fla-core", "solve_tril", _fla_solve_why_not, _fla_solve),
    Peer("fla", "kda_prefill", "fla-core", "chunk_kda", _fla_prefill_why_not, _fla_prefill),
    Peer("fla", "kda_decode", "fla-core", "conv, fused_recurrent_kda, gated norm", _fla_decode_why_not, _fla_decode),
)
