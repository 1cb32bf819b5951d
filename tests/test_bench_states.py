"""The floor of ops that advance states in place: states read and written through their slots, in rows that say so."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton")

from thalweg import cases, timing
from thalweg.bench import run as bench
from thalweg.bench import states


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_states_are_halved_into_their_write_slots(dtype):
    pool = torch.randn(6, 3, 4, 32)[:, 1:].to(dtype)
    wanted = pool.clone()
    wanted[4], wanted[2] = pool[1] / 2, pool[2] / 2
    read, write = torch.tensor([1, -1, 2, 6, 3]), torch.tensor([4, 0, 2, 0, 2**40])
    states.halve(pool, read, write)
    assert torch.equal(pool, wanted)


@pytest.mark.parametrize("apart", (True, False))
def test_the_floor_takes_the_sets_that_the_op_takes(monkeypatch, apart):
    """Each set's own pool, once, through its slots (a case may have one list for both), and nothing else of it."""
    sets = [{"state": torch.ones(9, 2, 16, 32), "read_slots": torch.tensor([n, 7 + (not apart)]), "v": None}
            | ({"write_slots": torch.tensor([n, 8])} if apart else {}) for n in range(4)]  # fmt: skip
    monkeypatch.setattr(timing, "timed", lambda calls, device: [call() for call in calls])
    states.floor(sets)
    for n, one in enumerate(sets):
        halved = (one["state"] == 0.5).all((1, 2, 3))
        assert halved.nonzero().flatten().tolist() == [n, 8]


@pytest.mark.gpu
def test_decode_rows_say_how_far_they_are_from_it():
    floor, *rows = bench.Bench("kda_decode", ["decode-h12-b1"], "cuda", "triton").rows()
    assert floor.impl == "rmw floor" and floor.us_min > 1.0
    ratio = float(rows[0].note.partition(" x rmw")[0])
    assert ratio == pytest.approx(rows[0].us / floor.us, abs=2e-3) and ratio > 1
    assert floor.us > 0.9 * cases.TIMED["decode-h12-b1"].bytes / 4.3e6
    assert {field.name for field in dataclasses.fields(floor)} == {field.name for field in dataclasses.fields(rows[0])}
