"""qsa_append, ahead of time: the model's indexer, text and MRoPE positions."""

import sys

import aot
import torch


def builds(target):
    from thalweg.qsa import append

    def launch(mrope, given=torch.bfloat16):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        T, D, low = 512, 128, torch.bfloat16
        weight, axes = empty(D, dtype=given), (empty(T, 3), empty(4, 8, 3)) if mrope else (None, None)
        append.append(
            empty(T, 5 * D, dtype=given), weight, weight, empty(1000, 64, dtype=torch.float32), empty(T), empty(T),
            empty(4, 8, D, dtype=low), empty(9, 64, D, dtype=low), empty(4, 30), empty(T, 4, D, dtype=low), 4, 1e-6,
            *axes,
        )  # fmt: skip

    # On gfx950 scalars (strides) go to lanes of vector registers, which the count takes for memory.
    spilled = 64 if target == "gfx950" else 0
    kinds = {"text": (False,), "mrope": (True,), "float32 to bfloat16": (False, torch.float32)}
    return {
        f"append {name}": aot.Build(lambda kind=kind: launch(*kind), (), 512, spilled) for name, kind in kinds.items()
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
