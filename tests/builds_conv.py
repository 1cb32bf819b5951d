"""kda_conv, ahead of time: width, dtypes of tokens and pool, fresh flags and bias or neither; q | k | v of 64 heads."""

import sys

import aot
import torch

WANTED = (
    (4, torch.bfloat16, torch.bfloat16, True),
    (4, torch.bfloat16, torch.bfloat16, False),
    (4, torch.float32, torch.float32, True),
    (8, torch.bfloat16, torch.float32, True),
    (2, torch.float16, torch.float16, False),
)


def builds(target):
    from thalweg.kda import conv

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def launch(W, dtype, pool, whole, T=1000, N=8, C=24576):
        x, out = (empty(T, C, dtype=dtype) for _ in range(2))
        state = empty(N, W - 1, C, dtype=pool).transpose(1, 2)
        bias, fresh = (empty(C, dtype=dtype), empty(N, dtype=torch.bool)) if whole else (None, None)
        weight = empty(C, W, dtype=torch.float32)
        conv.conv(x, weight, empty(N + 1), state, empty(N), empty(N), bias, fresh, None, out)

    return {
        " ".join(map(str, ("conv", *wanted))).replace("torch.", ""): aot.Build(lambda wanted=wanted: launch(*wanted))
        for wanted in WANTED
    }


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
