"""The workspace of kda_prefill: what is stated, how a pack is cut, and what is refused. Host arithmetic; no kernel."""

import kda_calls as calls
import pytest
import torch

from thalweg import kda
from thalweg.kda import kda_prefill_workspace, workspace

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = ((8192, 1, 64), (8192, 16, 64), (32768, 1, 32), (16384, 8, 16), (100_000, 16, 64), (10, 1, 1))


@pytest.mark.parametrize("T,N,HV", SHAPES)
@pytest.mark.parametrize("K,V,dtype", ((128, 128, BF16), (24, 40, F32), (256, 64, BF16)))
def test_a_plan_covers_the_pack_and_keeps_the_bound(T, N, HV, K, V, dtype):
    """Given more, less and the least, every chunk number has its place and no byte is needed beyond what was given."""
    stated = kda_prefill_workspace(T, N, HV, K, V, dtype)
    least = kda_prefill_workspace(T, N, HV, K, V, dtype, least=True)
    assert least <= stated <= workspace.LIMIT
    for given in (None, 10 * stated, stated, (stated + least) // 2, least):
        plan = workspace.plan(T, N, HV, K, V, dtype, given)
        assert plan.total == T // 32 + N + 2 and plan.bytes <= (stated if given is None else given) and plan.reason
        assert 1 <= plan.count <= plan.total and (plan.buffers == 2 or plan.count == plan.total)
    with pytest.raises(ValueError, match=f"at least {least} bytes wanted, got {least - 1}"):
        workspace.plan(T, N, HV, K, V, dtype, least - 1)


def test_a_plan_depends_on_shapes_alone_and_grows_with_them():
    for T, N, HV in SHAPES:
        smaller = workspace.least_bytes(T // 2, N, HV, 128, 128, BF16)
        assert smaller <= workspace.least_bytes(T, N, HV, 128, 128, BF16)
        assert workspace.plan(T, N, HV, 128, 128, BF16) == workspace.plan(T, N, HV, 128, 128, BF16)


def test_pieces_are_cut_where_the_scan_leaves_the_machine_idle():
    def count(T, N, HV, V=128):
        return workspace.pieces(T // 32 + N + 2, N, HV, V)[0]

    assert count(32768, 1, 32) == workspace.PIECES == count(8192, 1, 64, V=64)
    assert count(8192, 1, 64) == count(32768, 2, 16) == count(64, 1, 32) == 1


def test_entry_bytes_are_those_of_the_tiles():
    for K, dtype, low in ((128, BF16, True), (24, F32, False), (200, torch.float16, False)):
        wide, size = workspace.width(K), 2 if low else 4
        tiles = 3 * 32 * wide * size + (3 if low else 2) * 32 * 32 * size + 4 * wide
        assert workspace.entry_bytes(3, K, dtype) == 3 * tiles and wide >= K and wide & (wide - 1) == 0


def test_a_workspace_is_refused_by_name():
    call = calls.prefill((40,), H=1, HV=1, K=16, V=16, dtype=BF16)
    least = kda_prefill_workspace(40, 1, 1, 16, 16, least=True)
    memory = torch.zeros(2 * least, dtype=torch.uint8)
    plain = kda.kda_prefill(**{**call, "state": call["state"].clone()})
    given = kda.kda_prefill(**{**call, "state": call["state"].clone()}, workspace=memory[:least])
    assert calls.same(given, plain)
    for bad in (memory[: least - 1], memory[::2], memory.view(torch.int8), memory.view(2, -1), call["q"], 5):
        with pytest.raises(ValueError, match="kda_prefill: workspace must be"):
            kda.kda_prefill(**call, workspace=bad)
    shared = memory.view(BF16)[: 40 * 16].view(40, 1, 16)
    with pytest.raises(ValueError, match="kda_prefill: workspace must be in memory of its own, got memory shared"):
        kda.kda_prefill(**{**call, "q": shared}, workspace=memory)


def test_b33_a_workspace_is_traced():
    compiled = torch.compile(kda.kda_prefill, fullgraph=True, backend="eager")
    memory = torch.zeros(10**6, dtype=torch.uint8)
    for T in (40, 33):
        call = calls.prefill((T,), H=1, HV=1, K=16, V=16, dtype=BF16)
        outs = [
            run(**{**call, "state": call["state"].clone()}, workspace=memory) for run in (kda.kda_prefill, compiled)
        ]
        assert calls.same(*outs)


@pytest.mark.parametrize("changes", ({"T": -1}, {"K": 0}, {"HV": True}, {"V": 2.0}))
def test_wrong_counts_are_refused(changes):
    with pytest.raises(ValueError, match=f"kda_prefill_workspace: {next(iter(changes))} must be a count"):
        kda_prefill_workspace(**{"T": 1, "N": 1, "HV": 1, "K": 16, "V": 16, **changes})
