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


def test_every_call_of_the_floor_has_slots_of_its_own(monkeypatch):
    """Together they are the whole rotation, each once, and a call moves the states of its rows."""
    seen = []
    monkeypatch.setattr(states, "halve", lambda pool, read, write: seen.append((pool.shape, read.tolist())))
    monkeypatch.setattr(timing, "ROTATED", 2**16)
    monkeypatch.setattr(timing, "timed", lambda calls, device: [call() for call in calls])
    states.floor(torch.zeros(9, 2, 16, 32), 2)
    calls = timing.sets_needed(2 * 2 * 2 * 16 * 32 * 4)
    assert {shape for shape, _ in seen} == {(2 * calls, 2, 16, 32)} and len(seen) == calls > 2
    assert sorted(slot for _, slots in seen for slot in slots) == list(range(2 * calls))


@pytest.mark.gpu
def test_decode_rows_say_how_far_they_are_from_it():
    floor, *rows = bench.Bench("kda_decode", ["decode-h12-b1"], "cuda", "triton").rows()
    assert floor.impl == "rmw floor" and floor.us_min > 1.0
    ratio = float(rows[0].note.partition(" x rmw")[0])
    assert ratio == pytest.approx(rows[0].us / floor.us, abs=2e-3) and ratio > 1
    assert floor.us > 0.9 * cases.TIMED["decode-h12-b1"].bytes / 4.3e6
    assert {field.name for field in dataclasses.fields(floor)} == {field.name for field in dataclasses.fields(rows[0])}
