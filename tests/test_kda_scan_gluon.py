"""Parts of the Gluon scan of prefill, emulated on a CPU: where it leaves checkpoints."""

import gluon_emulator as to
import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("every", (64, 128, 192))
def test_checkpoints_lie_every_so_many_chunks(every):
    """After 1 to 12 chunks of a sequence of 300 tokens, with two marks; a slot past the pool is none."""
    scan = to.load("kda", "scan_gluon")
    for past in range(1, 13):
        state, marks = torch.full((4, 2, 2), torch.nan), torch.tensor([[1, 9], [2, 3]])
        for row in (0, 1):
            p_state = to.pointer(state) + to.tensor([[0, 1], [2, 3]])
            b_s, n = to.tensor(torch.ones(2, 2)), to.tensor(past)
            scan._mark(b_s, p_state, 4, n, 300, to.pointer(marks[row]), 4, -1, every, 2, 1)
        tokens = past * 32
        reached = tokens // every if tokens % every == 0 and tokens <= 300 else 0
        assert {s for s in range(4) if state[s].isfinite().all()} == {1: {1, 2}, 2: {3}}.get(reached, set())
