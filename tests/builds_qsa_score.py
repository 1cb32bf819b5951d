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
TENSOR_CORES = {"sm_90a": ("wgmma",), "gfx950": ("v_mfma",)}


def builds(target):
    from thalweg.qsa import score

    def launch(R, N, requests, heads, D, page, dtype):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q, keys = empty(R, heads, D, dtype=dtype), empty(9, page, D, dtype=dtype)
        table = empty(requests, -(-N // page))
        score.score(q, keys, table, empty(R), empty(R), empty(R, N, dtype=torch.float32))

    found = {}
    for name, shape in WANTED.items():
        demands = TENSOR_CORES[target] if shape[-1] != torch.float32 and shape[0] > 64 else ()
        # The queries of a tile, 64 KiB, pass through registers once before the loop: 88 to 320 bytes with Triton 3.6,
        # 656 to 832 with 3.9.
        # Exact float32 products take all the registers there are.
        spilled = 1024 if demands or shape[-1] == torch.float32 else 0
        found[f"score {name}"] = aot.Build(lambda shape=shape: launch(*shape), demands, 512, spilled)
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
