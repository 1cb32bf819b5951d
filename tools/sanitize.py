"""Runs every implementation that has a kernel on the small cases of the ops, and nothing else: for `make sanitize`.

    python tools/sanitize.py [OP[:IMPL]]...

Results are not looked at, `thalweg check` does that: initcheck does not see what bulk copies write, and would report
whoever reads it. Needs a GPU.
"""

import sys

import torch

from thalweg import cases
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


if __name__ == "__main__":
    main(*sys.argv[1:])
