"""The timing protocol: what can be decided, counted and summed up without a GPU, and a CPU run of the whole."""

import time

import pytest
import torch

from thalweg import timing


def test_sets_together_are_larger_than_the_cache_they_must_leave():
    for size in (2**20, 3 * 2**20 + 1, 100 * 2**20):
        sets = timing.sets_needed(size)
        assert (sets - 1) * size >= timing.ROTATED > (sets - 3) * size  # one set's turn comes after that of all others
    assert timing.sets_needed(10**10) == 2
    assert timing.sets_needed(4) == timing.sets_needed(0) == timing.MOST_SETS
    assert timing.ROTATED >= 5 * 60 * 10**6  # an H200 has 60 MB of L2


@pytest.mark.parametrize("round_us", (0.0, 3.0, 450.0, 1999.0, 2e4, 3e6))
def test_a_sample_is_long_enough_and_all_of_them_are_not_too_long(round_us):
    plan = timing.plan(round_us, "cuda")
    assert plan.method == ("events" if round_us >= timing.LONG_US else "graph")
    least, most = timing.SAMPLES
    assert least <= plan.samples <= most and plan.warm >= 1
    assert plan.rounds * max(round_us, 1e-3) >= timing.GRAPH_US or round_us >= timing.GRAPH_US
    assert plan.samples == least or plan.samples * plan.rounds * round_us <= timing.BUDGET_US


def test_the_caller_may_insist_on_a_method():
    assert timing.plan(20_000.0, "cuda", calls=286).method == "graph"  # launches of 70 us each, not long calls
    assert timing.plan(3.0, "cuda", graph=False).method == "events"
    assert timing.plan(1e6, "cuda", graph=True).method == "graph"
    assert timing.plan(3.0, "cpu", graph=True).method == "wall"


def test_a_long_call_whose_launches_are_most_of_it_goes_into_a_graph():
    assert timing.plan(4_000.0, "cuda", calls=2, launch_us=900.0).method == "events"
    assert timing.plan(4_000.0, "cuda", calls=2, launch_us=3_900.0).method == "graph"  # the host's 4 ms, not the GPU's
    assert timing.plan(4_000.0, "cuda", graph=False, calls=2, launch_us=3_900.0).method == "events"


def test_median_and_extremes_are_of_one_call():
    result = timing.summary([40.0, 80.0, 44.0, 48.0, 36.0], 4, "graph")
    assert result == timing.Timing(11.0, 9.0, 20.0, "graph", 4, 5)
    assert result.spread == 1.0
    assert timing.summary([0.0], 1, "wall").spread == 0.0


def test_calls_take_turns(monkeypatch):
    """Every set equally often and in order; the clock is only read around whole rounds."""
    monkeypatch.setattr(timing, "GRAPH_US", 20.0)
    monkeypatch.setattr(timing, "WARM_US", 0.0)
    turns = []
    result = timing.timed([lambda i=i: turns.append(i) for i in range(3)], "cpu")
    assert turns[: len(turns) // 3 * 3] == [0, 1, 2] * (len(turns) // 3) and len(turns) % 3 == 0
    assert result.calls % 3 == 0 and result.samples * result.calls <= len(turns)
    assert 0 < result.us_min <= result.us <= result.us_max and result.method == "wall"


def test_no_calls():
    with pytest.raises(ValueError, match="calls must hold at least one call, got none"):
        timing.timed([], "cpu")


def test_the_copy_floor_moves_the_bytes_it_says(monkeypatch):
    """Half read, half written, on buffers of their own."""
    seen = []

    def once(calls, device):
        seen.append([call() for call in calls])
        return timing.summary([1.0], 1, "wall")

    monkeypatch.setattr(timing, "timed", once)
    monkeypatch.setattr(timing, "ROTATED", 2**16)
    timing.floor_copy(2**13, "cpu")
    results = seen.pop()
    assert len(results) == timing.sets_needed(2**13) == 9
    assert {result.numel() * result.element_size() for result in results} == {2**12}
    assert len({result.data_ptr() for result in results}) == 9


@pytest.mark.gpu
@pytest.mark.parametrize("graph", (True, False))
def test_a_copy_is_not_faster_than_memory_and_scales(graph):
    x = [torch.zeros(2, 8 * 2**20, device="cuda") for _ in range(7)]
    result = timing.timed([lambda pair=pair: pair[1].copy_(pair[0]) for pair in x], graph=graph)
    assert result.method == ("graph" if graph else "events")
    assert x[0].numel() * 4 / (result.us * 1e-6) < 8e12
    small, large = timing.floor_copy(2**20), timing.floor_copy(2**28)
    assert small.us_min > 0.2 and large.us > 10 * small.us


@pytest.mark.gpu
def test_a_call_that_a_slow_host_makes_long_is_timed_in_a_graph(monkeypatch):
    """On a GPU that does nothing else: a round ends when the host has launched it."""
    x = torch.zeros(2**20, device="cuda")

    def call():
        end = time.perf_counter() + 1.5e-3
        while time.perf_counter() < end:
            pass
        x.neg_()

    monkeypatch.setattr(timing, "_events", lambda work: timing._wall([work], 1))
    assert timing.timed([call, call]).method == "graph"
    assert timing.timed([call, call], graph=False).method == "events"
