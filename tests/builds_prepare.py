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
}
TENSOR_CORES = {"sm_90a": (r"wgmma|mma\.sync",), "gfx950": ("v_mfma",)}


def launch(K, V, dtype, gate, fused, parameters):
    from thalweg.kda.prepare import prepare
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
        lower_bound=-5.0, scale=K**-0.5, allow_neg_eigval=False, qk_l2norm=True,
    )  # fmt: skip


def builds(target):
    import thalweg.kda.prepare  # noqa: F401  what the launch uses must be imported before it

    return {
        " ".join(("prepare", *map(str, wanted[:4]), *(["fused"] if wanted[4] else []))): aot.Build(
            lambda wanted=wanted: launch(*wanted),
            TENSOR_CORES[target],
            # Some 90 scalar registers of the 102 of gfx950 go to lanes of a vector register, none to memory.
            most_spilled=400 if target == "gfx950" and wanted[3] == "soft" else 0,
        )
        for wanted in WANTED[target]
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
