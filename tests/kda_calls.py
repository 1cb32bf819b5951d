"""Seeded calls of the KDA ops for the tests, and what they must leave behind, worked out by the float64 oracle.

A pool holds NaN in every slot that no row of the call names, so whatever reads one shows.
"""

import importlib.util
import inspect

import kda_oracle as oracle
import pytest
import torch

from thalweg import kda
from thalweg.kda import library


def _heads(HV, K, gate):
    if gate == "given":
        return {"gate": gate}
    return {"gate": gate, "A_log": 0.5 * torch.randn(HV), "dt_bias": torch.randn(HV, K) - 1.0}


def _pool(slots, live, shape, dtype):
    pool = torch.full((slots, *shape), torch.nan).to(dtype)
    pool[live] = (0.5 * torch.randn(len(live), *shape)).to(dtype)
    return pool


def prefill(
    lengths, H=2, HV=4, K=24, V=40, dtype=torch.float32, gate="bounded", state_dtype=torch.float32, index=torch.int32
):
    """Arguments of kda_prefill by name: sequence i lives in slot i + 1 of a pool with two slots to spare."""
    T, N = sum(lengths), len(lengths)
    g_raw = torch.randn(T, HV, K)
    call = {
        "q": torch.randn(T, H, K).to(dtype),
        "k": torch.randn(T, H, K).to(dtype),
        "v": torch.randn(T, HV, V).to(dtype),
        "g_raw": (-g_raw.abs() if gate == "given" else g_raw).to(dtype),
        "beta_logits": torch.randn(T, HV).to(dtype),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=index),
        "state": _pool(N + 3, list(range(1, N + 1)), (HV, V, K), state_dtype),
        "read_slots": torch.arange(1, N + 1, dtype=index),
    }
    return {**call, **_heads(HV, K, gate)}


def layer(B, S=None, H=2, HV=4, K=24, V=40, W=4, dtype=torch.float32, gate="bounded", state_dtype=torch.float32):
    """Arguments of kda_decode (S None), or of kda_verify, by name; row b lives in slot b + 1 of both pools."""
    lead, C, live = (B,) if S is None else (B, S), 2 * H * K + HV * V, list(range(1, B + 1))
    g_raw = torch.randn(*lead, HV, K)
    call = {
        "qkv": torch.randn(*lead, C).to(dtype),
        "g_raw": (-g_raw.abs() if gate == "given" else g_raw).to(dtype),
        "beta_logits": torch.randn(*lead, HV).to(dtype),
        "out_gate": torch.randn(*lead, HV, V).to(dtype),
        "conv_weight": torch.randn(C, W).to(dtype),
        "conv_bias": torch.randn(C).to(dtype),
        "conv_state": _pool(B + 3, live, (C, W - 1), dtype),
        "state": _pool(B + 3, live, (HV, V, K), state_dtype),
        "read_slots": torch.arange(1, B + 1, dtype=torch.int32),
        "norm_weight": torch.randn(V).to(dtype),
        "norm_eps": 1e-5,
    }
    return {**call, **_heads(HV, K, gate)}


def run(op, call, **changes):
    """op on copies of the pools: returns (out, state, conv_state), None for a pool the op does not have."""
    call = {**call, **changes}
    for pool in ("state", "conv_state"):
        if pool in call:
            call[pool] = copy(call[pool])
    return op(**call), call.get("state"), call.get("conv_state")


def commit(call, accepted, op=kda.kda_commit, **changes):
    """kda_commit (or `op`, one implementation) of a kda_verify call on copies of the pools: (state, conv_state)."""
    call = {**call, "accepted": torch.tensor(accepted, dtype=torch.int32), **changes}
    for unused in ("out_gate", "norm_weight", "norm_eps"):
        call.pop(unused)
    _, state, conv_state = run(op, call)
    return state, conv_state


def copy(x):
    """A copy with x's strides, holes included."""
    twin = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return twin.copy_(x)


def same(a, b):
    """Equal bit for bit, NaN equal to NaN."""
    if a is None or b is None:
        return a is b
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = kinds[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


def sequence_truth(call, lo, hi, state):
    """o and state of tokens lo..hi of a kda_prefill call from `state`, by the oracle."""
    names = ("A_log", "dt_bias", "lower_bound")
    part = {name: call[name][lo:hi] for name in ("q", "k", "v", "g_raw", "beta_logits")}
    norm = oracle.unit if call.get("qk_l2norm", True) else torch.Tensor.double
    g = oracle.log_decay(part["g_raw"], call["gate"], **{n: call[n] for n in names if n in call})
    beta = oracle.strength(part["beta_logits"], call.get("allow_neg_eigval", False))
    scale = call.get("scale") or call["q"].shape[2] ** -0.5
    return oracle.delta_rule(norm(part["q"]), norm(part["k"]), part["v"], g, beta, state, scale)


def token(call, s):
    """Token s of every row of a kda_verify call, as a kda_decode call on the same pools."""
    names = ("qkv", "g_raw", "beta_logits", "out_gate")
    return {**call, **{name: call[name][:, s] for name in names}}


def row_truth(call, b, tokens=None):
    """out, history and state of row b of a kda_decode or kda_verify call, by the oracle."""
    names = ("qkv", "g_raw", "beta_logits", "out_gate")
    rows = {name: call[name][b][:tokens] if call["qkv"].dim() == 3 else call[name][b : b + 1] for name in names}
    slot = int(call["read_slots"][b])
    return oracle.layer(rows, call, call["conv_state"][slot], call["state"][slot])


def moved(x):
    """x on the GPU with its strides, its offset and whatever lies around it."""
    return torch.empty(0, dtype=x.dtype, device="cuda").set_(
        x.untyped_storage().cuda(), x.storage_offset(), x.shape, x.stride()
    )


def through(op, impl):
    """The public op by one implementation, for CPU tensors: interpreted, or on a GPU on copies, written back."""
    names = list(inspect.signature(op).parameters)

    def run(*args, **call):
        call = {**dict(zip(names, args)), "impl": impl, **call}
        if impl == "reference" or not torch.cuda.is_available():
            library.INTERPRETED, before = True, library.INTERPRETED
            try:
                return op(**call)
            finally:
                library.INTERPRETED = before
        there = {name: moved(x) if torch.is_tensor(x) else x for name, x in call.items()}
        out = op(**there)
        for name, x in call.items():
            if torch.is_tensor(x):
                x.untyped_storage().copy_(there[name].untyped_storage())
        return call.get("out") if call.get("out") is not None or out is None else out.cpu()

    run.impl = impl
    return run


def implementations(name, but=()):
    """For `parametrize`: the op `name` by each of its implementations; what cannot run here is skipped.

    but: names of those that take only part of the contract, and have tests of their own.
    """
    found = []
    for impl in (impl for impl in library.IMPLS[name] if impl.name not in but):
        language = "gluon" if "gluon" in impl.name else impl.name.split("-")[0]
        here = {"reference": True, "triton": importlib.util.find_spec("triton")}.get(
            language, torch.cuda.is_available()
        )
        marks = [] if here else pytest.mark.skip(reason=f"{impl.name} cannot be interpreted")
        found.append(pytest.param(through(getattr(kda, name), impl.name), id=impl.name, marks=marks))
    return found
