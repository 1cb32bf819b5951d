"""qsa_attend over unions of neighbours' blocks, ahead of time, at the models' shapes."""

import sys

import aot
import torch


def builds(target):
    from thalweg.qsa import union

    def launch(R, heads, kv_heads, D, gated):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q = empty(R, heads, D, dtype=torch.bfloat16)
        k, v = empty(9, 64, kv_heads, 2, D, dtype=torch.bfloat16).unbind(3)
        config = union.choose(heads // kv_heads, D, 2, hopper=False)
        made = union.lists((empty(1, 2048), empty(R), empty(R), empty(R, 512)), k, heads // kv_heads, 4, config)
        union.attend((q, k, v), made, q if gated else None, q, 4, (0.1, 1.0), torch.bfloat16, config)

    spilled = 512 if target == "gfx950" else 0  # scalars in lanes of vector registers, counted as memory
    return {
        "union": aot.Build(lambda: launch(4096, 24, 2, 256, False), (), 512, spilled),
        "union gate": aot.Build(lambda: launch(4096, 12, 1, 256, True), (), 512, spilled),
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
