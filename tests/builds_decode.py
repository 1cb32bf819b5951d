"""The fused decode step, ahead of time: K, V, W, query and value heads, gate, types, the memory order of the pool."""

import sys

import aot
import torch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WANTED = (  # K, V, W, H, HV, gate, state, activations, weights, channel-major pool
    (128, 128, 4, 12, 12, "bounded", F32, BF16, F32, True),
    (128, 128, 4, 32, 32, "soft", BF16, F16, F16, False),
    (128, 128, 4, 16, 64, "bounded", F32, BF16, BF16, False),
    (64, 64, 3, 3, 3, "given", F32, F32, F32, True),
)
WIDE = {
    "sm_90a": (r"ld\.global\S*v4", r"st\.global\.cs\S*v4"),
    "gfx950": ("_load_dwordx4", "_store_dwordx4"),
}


def call(K, V, W, H, HV, gate, state, dtype, weights, channels, B=5):
    """Arguments of the launcher, on the meta device."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    C, slots, given = 2 * H * K + HV * V, empty(B, dtype=torch.int32), gate == "given"
    return {
        "qkv": empty(B, C),
        "g_raw": empty(B, HV, K),
        "beta_logits": empty(B, HV),
        "out_gate": empty(B, HV, V),
        "conv_weight": empty(C, W, dtype=weights),
        "conv_bias": empty(C, dtype=weights) if given else None,
        "conv_state": empty(9, C, W - 1) if channels else empty(9, W - 1, C).transpose(1, 2),
        "state": empty(9, HV, V, K, dtype=state),
        "read_slots": slots,
        "write_slots": slots,
        "norm_weight": empty(V, dtype=weights),
        "norm_eps": 1e-5,
        "gate": gate,
        "A_log": None if given else empty(HV, dtype=F32),
        "dt_bias": None if given else empty(HV, K, dtype=F32),
        "lower_bound": -5.0,
        "scale": K**-0.5,
        "allow_neg_eigval": given,
        "null_slot": None,
        "out": empty(B, HV, V),
    }


HOPPER = (  # rows times heads, H, HV; K, V, gate, state, activations, weights, channel-major pool
    (12, 12, 12, 128, 128, "bounded", F32, BF16, F32, True),
    (192, 12, 12, 128, 128, "bounded", F32, BF16, F32, True),
    (512, 12, 12, 128, 128, "bounded", F32, BF16, F32, True),
    (512, 12, 12, 128, 128, "bounded", BF16, BF16, BF16, True),
    (4096, 12, 12, 128, 128, "soft", BF16, F16, F16, False),
    (4096, 6, 24, 128, 128, "bounded", F32, BF16, BF16, False),
    (12, 12, 12, 64, 128, "bounded", F32, BF16, BF16, True),
)


def hopper():
    from thalweg.kda import decode_gluon

    found = {}
    for heads, H, HV, K, V, gate, state, *rest in HOPPER:
        config = decode_gluon.choose(decode_gluon.Shape(heads, V, state))
        args = call(K, V, 4, H, HV, gate, state, *rest)
        found[f"decode_gluon {heads} {H} {HV} {K} {V} {gate} {state}".replace("torch.", "")] = aot.Build(
            lambda args=args, config=config, early=K == 64: decode_gluon.decode(**args, config=config, early=early),
            (r"cp\.async\.bulk\.tensor", r"bulk\.tensor\S*global\.shared" if heads > 1100 else r"st\.global\S*v4"),
            config.max_registers,
        )
    return found


GFX950 = (  # K, V, gate, state, activations, weights, channel-major pool
    (128, 128, "bounded", F32, BF16, F32, True),
    (128, 128, "soft", BF16, BF16, BF16, False),
    (64, 64, "given", F32, F16, F32, False),
)


def gfx950():
    """State 16 bytes a lane and past the caches (nt); registers for two waves a SIMD."""
    from thalweg.kda import decode_gfx950

    demands = (r"global_load_dwordx4 .* nt\n", r"global_store_dwordx4 .* nt\n", r"Occupancy: [2-8]\n", "_dpp ")
    found = {}
    for K, V, gate, state, *rest in GFX950:
        args = call(K, V, 4, 12, 12, gate, state, *rest)
        name = f"decode_gfx950 {K} {V} {gate} {state}".replace("torch.", "")
        found[name] = aot.Build(lambda args=args: decode_gfx950.decode(**args), demands, 256)
    return found


def builds(target):
    from thalweg.kda import decode

    found = {}
    for wanted in WANTED:
        name = " ".join(str(x).removeprefix("torch.") for x in wanted)
        found[f"decode {name}"] = aot.Build(lambda w=wanted: decode.decode(**call(*w)), WIDE[target])
    return found | (hopper() if target == "sm_90a" else gfx950())


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
