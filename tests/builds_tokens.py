"""The kernels of the split decode step, of verify and of commit, ahead of time: heads as Kimi K3 has them at TP 8."""

import sys

import aot
import torch

F32, BF16 = torch.float32, torch.bfloat16
# op, tokens, K, V, conv width, dtype of the state, gate
WANTED = (
    ("decode", 1, 128, 128, 4, F32, "bounded"),
    ("verify", 4, 128, 128, 4, F32, "bounded"),
    ("verify", 8, 128, 128, 4, F32, "soft"),
    ("verify", 2, 256, 128, 4, BF16, "given"),
    ("commit", 4, 128, 128, 4, F32, "bounded"),
)


def builds(target):
    from thalweg.kda import split, verify

    def empty(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(op, S, K, V, W, dtype, gate, B=32, H=12):
        lead, C = (B,) if op == "decode" else (B, S), 2 * H * K + H * V
        slots = empty(B, dtype=torch.int32)
        call = {"qkv": empty(*lead, C), "g_raw": empty(*lead, H, K), "beta_logits": empty(*lead, H)}
        call |= {"conv_weight": empty(C, W, dtype=F32), "conv_bias": None, "conv_state": empty(B, C, W - 1)}
        call |= {"state": empty(B, H, V, K, dtype=dtype), "read_slots": slots, "gate": gate, "lower_bound": -5.0}
        bare = gate == "given"
        call |= {"A_log": None if bare else empty(H, dtype=F32), "dt_bias": None if bare else empty(H, K, dtype=F32)}
        call |= {"allow_neg_eigval": False, "null_slot": None}
        if op != "verify":
            call |= {"write_slots": slots}
        if op == "commit":
            return verify.commit(**call, accepted=empty(B, dtype=torch.int32))
        call |= {"out_gate": empty(*lead, H, V), "norm_weight": empty(V, dtype=F32), "norm_eps": 1e-5, "scale": 0.1}
        return {"decode": split.decode, "verify": verify.verify}[op](**call, out=empty(*lead, H, V))

    return {
        " ".join(map(str, wanted)).replace("torch.", ""): aot.Build(lambda wanted=wanted: launch(*wanted))
        for wanted in WANTED
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
