"""qsa_attend, ahead of time: whole rows, and units with the fold, at the models' shapes."""

import sys

import aot
import torch

# rows, query heads, KV heads, width, page, cache, gate
WANTED = {
    "prefill": (4096, 24, 2, 256, 64, torch.bfloat16, False),
    "prefill-784-gate": (4096, 12, 1, 256, 784, torch.bfloat16, True),
    "prefill-fp8": (4096, 24, 2, 256, 64, torch.float8_e4m3fn, False),
    "decode": (1, 24, 2, 256, 64, torch.bfloat16, False),
}


def builds(target):
    from thalweg.qsa import attention

    def launch(R, heads, kv_heads, D, page, cache, gated, **options):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q = empty(R, heads, D, dtype=torch.bfloat16)
        k, v = empty(9, page, kv_heads, 2, D, dtype=cache).unbind(3)
        gate = torch.empty_like(q) if gated else None
        attention.attend(q, k, v, empty(1, 2048), empty(R), empty(R), empty(R, 512), q, 4, D**-0.5, gate, **options)

    # On gfx950 scalars (strides) go to lanes of vector registers, which the count takes for memory.
    found, spilled = {}, 512 if target == "gfx950" else 0
    for name, shape in WANTED.items():
        found[f"attention {name}"] = aot.Build(lambda shape=shape: launch(*shape), (), 512, spilled)
    if target == "sm_90a":
        demands = {"attention_gluon": ("cp.async.cg.shared.global", "wgmma")}
        most = {"attention_gluon": 168}  # three programs a multiprocessor; Triton 3.9 places 4 words more
        newer = {"attention_gluon": 16}
        for name in ("prefill", "prefill-784-gate"):
            build = lambda shape=WANTED[name]: launch(*shape, hopper=True)  # noqa: E731
            found[f"attention {name} hopper"] = aot.Build(build, demands, most, newer_spilled=newer)
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
