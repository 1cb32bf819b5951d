"""The prepare stage of KDA prefill, ahead of time: K, V, dtype, gate, strides; 32 heads (Kimi-Linear)."""

import sys

import aot
import torch

# K, V, dtype, gate, whether q, k and the gate are views of a fused projection, whether A_log and dt_bias are there
WANTED = {
    "sm_90a": [
        (128, 128, "bfloat16", "bounded", False, True),
        (128, 128, "bfloat16", "bounded", True, False),
        (64, 128, "bfloat16", "bounded", False, True),
        (256, 64, "bfloat16", "bounded", False, True),
        (128, 128, "bfloat16", "soft", False, True),
        (128, 128, "float16", "bounded", False, True),
    ],
    "gfx950": [
        (128, 128, "bfloat16", "bounded", False, True),
        (128, 128, "bfloat16", "soft", False, True),
    ],
    "sm_120": [(256, 64, "bfloat16", "bounded", False, True)],
}


def launch(prepare, K, V, dtype, gate, fused, parameters):
    from thalweg.kda.workspace import CHUNK

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    T, H, low = 1000, 32, getattr(torch, dtype)
    tiles, kind = (3, low) if dtype == "bfloat16" else (2, torch.float32)
    q, k, g_raw = (empty(T, H, K, dtype=low) for _ in range(3))
    if fused:
        q, k, g_raw = (x.unflatten(1, (H, K)) for x in empty(T, 3 * H * K, dtype=low).chunk(3, 1))
    prepare(
        q, k, g_raw, empty(T, H, dtype=low), empty(9, dtype=torch.int32), empty(T, H, V, dtype=low),
        empty(40, H, 3, CHUNK, K, dtype=kind), empty(40, H, tiles, CHUNK, CHUNK, dtype=kind), empty(40, H, K), 0,
        gate=gate, A_log=empty(H) if parameters else None, dt_bias=empty(H, K) if parameters else None,
        lower_bound=-5.0, scale=K**-0.5, allow_neg_eigval=False, qk_l2norm=True, fresh=None, slots=9, null_slot=None,
        read_slots=empty(8, dtype=torch.int32), write_slots=empty(8, dtype=torch.int32),
    )  # fmt: skip


def demanded(target, wanted):
    """Instructions of the stage's own file and of the inverse."""
    if target == "gfx950":
        return {"prepare": ("v_mfma",), "substitution": ("v_mfma",)}
    if target == "sm_120":
        return (r"mma\.sync",)
    own = ("wgmma.mma_async",) if wanted[2:4] == ("bfloat16", "bounded") else (r"mma\.sync",)
    return {"prepare": own, "prepare_gluon": (*own, "cp.async", r"mul.rn.bf16x2"), "substitution": (r"mma\.sync",)}


def builds(target):
    from thalweg.kda import prepare, prepare_gluon

    found = {}
    for wanted in WANTED[target]:
        name = " ".join((*map(str, wanted[:4]), "fused" * wanted[4]))
        stages = {"prepare": prepare}
        if target == "sm_90a" and (wanted[0], *wanted[2:4]) == (128, "bfloat16", "bounded"):
            stages["prepare_gluon"] = prepare_gluon
        for stage, module in stages.items():
            found[f"{stage} {name}"] = aot.Build(
                lambda module=module, wanted=wanted: launch(module.prepare, *wanted),
                demanded(target, wanted),
                {"prepare_gluon": 128},
                # Under the cap of 128 registers the assembler of Triton 3.9 spills a dozen words, that of 3.6 none.
                newer_spilled={"prepare": 64},
            )
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
