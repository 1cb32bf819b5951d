"""The scan of kda_prefill, ahead of time, in Triton and in Gluon: 8,192 tokens, 64 heads (GLM-5.3-Flash)."""

import sys

import aot
import torch

WANTED = {
    "sm_90a": [(128, 128, False), (128, 128, True), (64, 64, False)],
    "gfx950": [(128, 128, False), (64, 64, False)],
}
TENSOR_CORES = {"sm_90a": ("wgmma.mma_async", r"cp.async.bulk.tensor.3d"), "gfx950": ("v_mfma",)}


def launched(scan, K, V, marks):
    """A launch of a scan on bfloat16 tokens, with checkpoints or without."""

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    count, T, HV = 259, 8192, 64
    tiles = (empty(count, HV, 3, 32, n, dtype=torch.bfloat16) for n in (K, 32))
    decays, carry = (empty(*shape, dtype=torch.float32) for shape in ((count, HV, K), (2, HV, V, K)))
    v, out = (empty(T, HV, V, dtype=torch.bfloat16) for _ in range(2))
    state, slots = empty(9, HV, V, K, dtype=torch.float32), empty(1)
    scan(
        *tiles, decays, v, empty(2), state, slots, slots, carry, out, 0, 0, fresh=None, null_slot=None,
        checkpoint_slots=empty(1, 4) if marks else None, checkpoint_every=64 * marks,
    )  # fmt: skip


def builds(target):
    import triton

    from thalweg.kda import scan, scan_gluon

    later, found = triton.__version__ >= "3.7", {}
    for K, V, marks in WANTED[target]:
        name = f"{K} x {V}" + " checkpoints" * marks
        # Checkpoints: addresses of the state live through the loop, a few words of them in memory. The assembler of
        # Triton 3.9 spills 88 and 48 bytes, that of 3.6 none and 24.
        spilled = 96 if later and target == "sm_90a" else 40 * marks
        found[f"scan {name}"] = aot.Build(
            lambda K=K, V=V, marks=marks: launched(scan.scan, K, V, marks), TENSOR_CORES[target], 512, spilled,
            480 if target == "gfx950" else None,  # Triton 3.9 spills 424 bytes there
        )  # fmt: skip
        if target == "sm_90a" and K == 128:
            found[f"scan_gluon {name}"] = aot.Build(
                lambda K=K, V=V, marks=marks: launched(scan_gluon.scan, K, V, marks),
                ("wgmma.mma_async", "setmaxnreg", "cp.async.bulk.tensor.2d.global", "stmatrix"),
                128,
            )
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
