"""The scan of kda_prefill, ahead of time, in Triton and in Gluon: 8,192 tokens, 64 heads (GLM-5.3-Flash)."""

import sys

import aot
import torch

# K, V, dtype, whether there are checkpoints
WANTED = {
    "sm_90a": [
        (128, 128, "bfloat16", False),
        (128, 128, "bfloat16", True),
        (64, 64, "bfloat16", False),
        (256, 128, "bfloat16", True),
        (128, 128, "float16", True),
        (64, 128, "float32", True),
        (256, 128, "float32", False),
    ],
    "gfx950": [(128, 128, "bfloat16", False), (64, 64, "bfloat16", False), (128, 128, "float32", False)],
    "sm_120": [(128, 128, "bfloat16", True), (256, 128, "bfloat16", False)],
}


def demanded(target, K, dtype):
    """Tensor cores wherever products are not of float32."""
    if target == "gfx950":
        return ("v_mfma",) if dtype == "bfloat16" else ()
    if target == "sm_120":
        return (r"mma\.sync",)
    if dtype == "bfloat16" and K <= 128:
        return ("wgmma.mma_async", r"cp.async.bulk.tensor.3d")
    return () if (K, dtype) == (64, "float32") else (r"mma\.sync",)


def launched(scan, K, V, dtype, marks):
    """A launch of a scan, with checkpoints or without."""

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    count, T, HV = 259, 8192, 64
    given = getattr(torch, dtype)
    kind, pairs = (given, 3) if given == torch.bfloat16 else (torch.float32, 2)
    tiles = (empty(count, HV, n, 32, width, dtype=kind) for n, width in ((3, K), (pairs, 32)))
    decays, carry = (empty(*shape, dtype=torch.float32) for shape in ((count, HV, K), (2, HV, V, K)))
    v, out = (empty(T, HV, V, dtype=given) for _ in range(2))
    state, slots = empty(9, HV, V, K, dtype=torch.float32), empty(1)
    scan(
        *tiles, decays, v, empty(2), state, slots, slots, carry, out, 0, 0, fresh=None, null_slot=None,
        checkpoint_slots=empty(1, 4) if marks else None, checkpoint_every=64 * marks,
    )  # fmt: skip


def builds(target):
    from thalweg.gluon import BARRIERS
    from thalweg.kda import scan, scan_gluon

    # Barriers of the copying warps alone (0), which are what racecheck reports.
    quiet = () if BARRIERS.value else (r"\A(?!(?s:.)*bar\.sync\s+0\b)",)
    found = {}
    for K, V, dtype, marks in WANTED[target]:
        name = f"{K} x {V} {dtype}" + " checkpoints" * marks
        found[f"scan {name}"] = aot.Build(
            lambda args=(K, V, dtype, marks): launched(scan.scan, *args), demanded(target, K, dtype),
            # Nothing is tuned for sm_120, whose products of 16 columns leave more in registers: it is to run, no more.
            most_spilled=2048 if target == "sm_120" else 0,
            # Triton 3.9 spills 260 bytes at 128 x 128 on gfx950, and a few words of addresses for checkpoints.
            newer_spilled={"gfx950": 272, "sm_120": 2048}.get(target, 40 * marks),
        )  # fmt: skip
        if target == "sm_90a" and (K, dtype) == (128, "bfloat16"):
            found[f"scan_gluon {name}"] = aot.Build(
                lambda args=(K, V, dtype, marks): launched(scan_gluon.scan, *args),
                ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor.2d.global", "stmatrix", *quiet),
                128,
                newer_spilled=8,  # two registers kept through the loop, for the state's store
            )
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
