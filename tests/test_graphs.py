"""A decode step as graphs: which stages are captured, that metadata and inputs reach a replay, and the same text."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import thalweg
from thalweg import dispatch, graphs
from thalweg.model import Decoder, Sampling, Session, encode

PROMPT = Path(__file__).with_name("text.txt").read_bytes()[:300]


def test_runs():
    assert graphs.runs([]) == []
    assert graphs.runs([True, True, False, True]) == [(0, 2, True), (2, 3, False), (3, 4, True)]


def test_the_dispatcher_says_what_ran_and_whether_it_syncs():
    o = torch.ones(2, 8)
    with dispatch.watched() as used:
        thalweg.gated_rms_norm(o, o, o[0], 1e-5)
        with dispatch.watched() as inner:
            thalweg.gated_rms_norm(o, o, o[0], 1e-5)
    assert [impl.name for impl in used] == ["reference"] * 2 and len(inner) == 1 and used[0].syncs
    thalweg.gated_rms_norm(o, o, o[0], 1e-5)
    assert len(used) == 2


class Recorded:
    """In place of a CUDA graph: a replay computes into the output that the capture made."""

    count = 0

    @classmethod
    def capture(cls, work, pool=None):
        cls.count += 1
        out = work().clone()
        return out, lambda: out.copy_(work())


def stages(syncing):
    """x + slots, x * 2 through an op, x + positions; the op is one that syncs or not."""
    impl = dispatch.Impl("any", "", lambda call: None, lambda **call: None, syncs=syncing)

    def op(x, step):
        for used in dispatch._watchers:
            used.append(impl)
        return x * 2

    return [lambda x, step: x + step.slots, op, lambda x, step: x + step.positions]


@pytest.fixture
def step():
    from thalweg.state import Step

    names = ("cu_seqlens", "slots", "fresh", "row_request", "positions", "visible", "page", "page_row", "page_table",
             "rope_table", "rope")  # fmt: skip
    return Step(True, **{name: torch.zeros(3, dtype=torch.int64) for name in names})


@pytest.mark.parametrize("syncing, captures", ((False, 1), (True, 2)))
def test_replays_take_new_inputs_and_metadata(syncing, captures, step, monkeypatch):
    monkeypatch.setattr(graphs, "capture", Recorded.capture)
    monkeypatch.setattr(graphs.Replay, "on_gpu", staticmethod(lambda x: True))
    monkeypatch.setattr(Recorded, "count", 0)
    replay, eager = graphs.Replay(stages(syncing)), graphs.Replay(stages(syncing), eager=True)
    kept = []
    for i in range(4):
        x = torch.arange(3) + 10 * i
        now = replace(step, slots=torch.tensor([i, 5, 2 * i]), positions=torch.full((3,), 100 * i))
        kept.append((replay(x, now), eager(x, now)))
    assert all(torch.equal(got, wanted) for got, wanted in kept)  # no later step wrote into an earlier one's output
    assert Recorded.count == captures
    other = replace(now, slots=torch.ones(2), positions=torch.ones(2))
    assert replay(torch.arange(2), other).tolist() == [3.0, 5.0]
    assert Recorded.count == captures  # another number of rows: seen once, not yet captured


def greedy(model, prompts, new, **how):
    """Texts at temperature 0 by steps of one session; rows that ended are padding."""
    session, sampling = Session(model, [len(p) + 1 + new for p in prompts], **how), Sampling(new)
    logits = session.prefill([(i, encode(p)) for i, p in enumerate(prompts)])
    texts = [[] for _ in prompts]
    for made in range(new):
        drawn = [sampling.draw(row, None) for row in logits]
        live = [made < new - 4 * i for i in range(len(prompts))]
        for text, token, on in zip(texts, drawn, live):
            text += [token] * on
        logits = session.step(torch.tensor(drawn), live)
        logits = torch.where(torch.tensor(live, device=logits.device)[:, None], logits, 0.0)
    return texts, session


@pytest.mark.gpu
@pytest.mark.parametrize("count", (1, 3))
def test_text_of_replayed_steps_is_that_of_eager_ones(count):
    model = Decoder.load(device="cuda")
    prompts = [PROMPT[40 * i :] for i in range(count)]
    wanted, _ = greedy(model, prompts, 40, eager=True)
    got, session = greedy(model, prompts, 40)
    assert got == wanted
    ((_, plan),) = session.replay.plans.values()
    captured = [i for first, last, run in plan if run is not None for i in range(first, last)]
    mixers = [i + 1 for i, kind in enumerate(model.config.blocks) if kind == "kda"]
    assert set(mixers) <= set(captured) and 0 in captured
