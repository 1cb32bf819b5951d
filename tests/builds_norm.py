"""gated_rms_norm, ahead of time: V, dtype of o, a gate that is a view of wider rows or not, with slot lists or not."""

import sys

import aot
import torch

WANTED = (
    (128, torch.float32, False, False),
    (128, torch.float32, True, True),
    (1000, torch.bfloat16, True, False),
)


def builds(target):
    from thalweg.kda import norm

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(V, dtype, view, rows, B=100, HV=64):
        gate = empty(B, 2 * HV * V)[:, HV * V :].unflatten(1, (HV, V)) if view else empty(B, HV, V)
        slots = (empty(B, dtype=torch.int32), empty(B, dtype=torch.int32), 99, None) if rows else None
        weight = empty(V, dtype=torch.float32)
        norm.gated_rms_norm(empty(B, HV, V, dtype=dtype), gate, weight, 1e-5, empty(B, HV, V), slots)

    return {
        " ".join(map(str, ("norm", *wanted))).replace("torch.", ""): aot.Build(lambda wanted=wanted: launch(*wanted))
        for wanted in WANTED
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
