"""qsa_score, ahead of time: tiles and single rows at the models' shapes."""

import sys

import aot
import torch

# rows, contexts of blocks, requests, heads, width, page, dtype
WANTED = {
    "prefill": (4096, 63744, 1, 4, 128, 64, torch.bfloat16),
    "prefill-196": (4096, 32768, 1, 4, 128, 196, torch.bfloat16),
    "float32": (512, 4096, 1, 4, 128, 64, torch.float32),
    "decode-64": (64, 32768, 64, 4, 128, 64, torch.bfloat16),
}
# Bytes a lane of blocks looked up one by one: before the loop, where 64 KiB of queries pass through registers. Half as
# many rows a tile spill nothing and are a quarter slower. Triton 3.9: up to 408.
SPILLED = {"prefill-196": 120}
TENSOR_CORES = {"sm_90a": ("wgmma",), "gfx950": ("v_mfma",)}


def builds(target):
    from thalweg.qsa import score, score_gluon

    def launch(score, R, N, requests, heads, D, page, dtype):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q, keys = empty(R, heads, D, dtype=dtype), empty(9, page, D, dtype=dtype)
        table = empty(requests, -(-N // page))
        score(q, keys, table, empty(R), empty(R), empty(R, N, dtype=torch.float32))

    found = {}
    for name, shape in WANTED.items():
        demands = TENSOR_CORES[target] if shape[-1] != torch.float32 and shape[0] > 64 else ()
        spilled = SPILLED.get(name, 0)
        found[f"score {name}"] = aot.Build(lambda shape=shape: launch(score.score, *shape), demands, 512, spilled, 512)
    if target == "sm_90a":  # 255 registers leave room for two programs a multiprocessor
        demands = ("wgmma.mma_async.*m64n64k16", r"cp.async.bulk.tensor.2d.shared", r"cp.async.bulk.tensor.2d.global")
        for name in ("prefill",):  # 3.9 spills before the loop too
            found[f"score_gluon {name}"] = aot.Build(
                lambda name=name: launch(score_gluon.score, *WANTED[name]), demands, 255, 0, 512
            )
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
