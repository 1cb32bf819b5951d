"""qsa_attend over unions of neighbours' blocks, ahead of time, at the models' shapes."""

import sys

import aot
import torch


def builds(target):
    from thalweg.qsa import union, union_gluon

    def launch(form, cfg, dtype=torch.bfloat16):
        def empty(*shape, dtype=torch.int32):
            return torch.empty(*shape, dtype=dtype, device="meta")

        q = empty(4096, 24, 256, dtype=dtype)
        k, v = empty(9, 64, 2, 2, 256, dtype=dtype).unbind(3)
        made = union.lists((empty(1, 2048), empty(4096), empty(4096), empty(4096, 512)), k, 12, 4, cfg)
        form((q, k, v), made, q, q, 4, (0.1, 1.0), *(() if form is union_gluon.attend else (dtype, cfg)))

    # On gfx950 scalars (strides) go to lanes of vector registers, which the count takes for memory.
    spilled = 512 if target == "gfx950" else 0
    plain, hopper = (union.choose(12, 256, 2, hopper=form) for form in (False, True))
    found = {"union": aot.Build(lambda: launch(union.attend, plain), (), 512, spilled)}
    if target == "sm_90a":
        single = union.choose(12, 256, 4, hopper=False)
        found["union float32"] = aot.Build(lambda: launch(union.attend, single, torch.float32))
        # Triton 3.9 places 16 words more than the 255 registers that two programs leave.
        demands, newer = {"union_gluon": ("wgmma", "cp.async.cg.shared.global")}, {"union_gluon": 64}
        found["union hopper"] = aot.Build(lambda: launch(union_gluon.attend, hopper), demands, newer_spilled=newer)
    return found


if __name__ == "__main__":
    aot.main(builds, *sys.argv[1:])
