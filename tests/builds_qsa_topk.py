"""qsa_topk, ahead of time: many rows and few, budgets of 2,048 and 8,192 tokens."""

import sys

import aot
import torch

WANTED = {
    "prefill": (4096, 63744, 512),
    "decode": (16, 32768, 512),
    "wide": (64, 65536, 2048),
}


def builds(target):
    from thalweg.qsa import topk

    def launch(R, N, k):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        topk.topk(empty(R, N, dtype=torch.float32), empty(R), empty(R, k))

    # On gfx950 scalars (strides) go to lanes of vector registers, which the count takes for memory.
    spilled = 512 if target == "gfx950" else 0
    return {
        f"topk {name}": aot.Build(lambda shape=shape: launch(*shape), (), 512, spilled)
        for name, shape in WANTED.items()
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
