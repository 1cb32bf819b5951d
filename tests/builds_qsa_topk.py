"""qsa_topk and qsa_select on Hopper, ahead of time: many rows and few, budgets of 2,048 and 8,192 tokens."""

import sys

import aot
import torch

WANTED = {
    "prefill": (4096, 63744, 512),
    "prefill 128K": (4096, 32768, 512),
    "decode": (16, 32768, 512),
    "decode long": (4, 65536, 512),
    "wide": (64, 65536, 2048),
}


def builds(target):
    from thalweg.qsa import select, topk

    def launch(R, N, k):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        topk.topk(empty(R, N, dtype=torch.float32), empty(R), empty(R, k))

    def select_prefill():
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q, keys = empty(4096, 4, 128, dtype=torch.bfloat16), empty(9, 64, 128, dtype=torch.bfloat16)
        call = (q, keys, empty(1, 996), empty(4096), empty(4096), empty(4096, 512), 288 << 20)
        select.select(*call, hopper=True)

    # Triton 3.9 spills two words where 3.6 takes 128 registers, and six under the cap of 96.
    found = {
        f"topk {name}": aot.Build(lambda shape=shape: launch(*shape), newer_spilled=24 * ("prefill" in name))
        for name, shape in WANTED.items()
    }
    if target == "sm_90a":  # the scorer that makes maxima, and what takes them
        found["select prefill"] = aot.Build(select_prefill, most_registers=255)
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
