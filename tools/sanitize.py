"""Runs every implementation that has a kernel on the small cases of the ops, and nothing else: for `make sanitize`.

    python tools/sanitize.py [OP[:IMPL]]...

Every kernel takes one of them (a test sees to it) but the lists of `qsa_select`, which want 100 million scores: these
run on a call of their own, with keys of which few rows are done again and with keys of which all are, but not under
SANITIZER_TOOL=initcheck: it does not see what bulk copies write, and reports the thresholds, which read scores stored
so (110,080 reads, all of them in that area). Results are not looked at for the same reason; `thalweg check` does that.
Needs a GPU.
"""

import os
import sys

import torch

from thalweg import cases, inputs
from thalweg.bench.calls import IMPLS, OPS, captured


def main(*wanted: str) -> None:
    chosen = dict(word.partition(":")[::2] for word in wanted) or dict.fromkeys(OPS, "")
    for id, case in cases.SMALL.items():
        for impl in IMPLS[case.op] if case.op in chosen else ():
            if impl.syncs or chosen[case.op] not in ("", impl.name):
                continue
            args = case.make("cuda")
            reason = impl.why_not(captured(case.op, args))
            if reason is None:
                OPS[case.op](**args, impl=impl.name)
                torch.cuda.synchronize()
            print(f"{id}: {impl.name} {'ran' if reason is None else 'cannot take it: ' + reason}", flush=True)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    if hopper and chosen.get("qsa_select") in ("", "hopper") and os.environ.get("SANITIZER_TOOL") != "initcheck":
        lists()


def lists(rows: int = 150, blocks: int = 704) -> None:
    """`qsa_select` by lists of survivors; a padding row, and one that sees little."""
    from thalweg.qsa import select

    select.LISTED_SCORES = 0
    for law in ("plain", "equal"):
        args = inputs.index(inputs.Source("cuda", 0), inputs.Rows((4 * blocks,), rows))
        if law == "equal":
            args["block_keys"].copy_(args["block_keys"][:1, :1].expand_as(args["block_keys"]))
        args["row_request"][7], args["visible"][9] = -1, 3
        out = torch.empty(rows, 64, dtype=torch.int32, device="cuda")
        names = ("index_q", "block_keys", "page_table", "row_request", "visible")
        flags = select.select(*(args[name] for name in names), out, 64 << 20, hopper=True)
        assert flags is not None, "survivors were not listed"
        again = int((flags > 0).sum())
        print(f"lists, {law} keys: {again} of {rows} rows done again", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
