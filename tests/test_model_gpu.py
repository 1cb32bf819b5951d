"""The shipped model on a GPU: the text of the kernels is that of the reference, the steps are graphs, one each."""

from pathlib import Path

import pytest
import torch

from thalweg.model import Decoder, Generation, Sampling, Session, encode

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
TEXT = Path(__file__).with_name("text.txt").read_bytes()
NEW = 96
ROUNDING = {torch.float32: 0.02, torch.bfloat16: 0.1}  # of the spread of the logits


@pytest.fixture(scope="module", params=(torch.float32, torch.bfloat16), ids=str)
def model(request):
    return Decoder.load(device="cuda", dtype=request.param)


def written(model, prompts, impl):
    texts = [bytearray() for _ in prompts]
    for i, byte in Generation(model, prompts, Sampling(NEW), impl):
        texts[i].append(byte)
    return [bytes(text) for text in texts]


def last_logits(model, text, impl):
    return Session(model, [len(text) + 1], impl).prefill([(0, encode(text))])[0].double()


def test_text_at_temperature_0_is_that_of_the_reference(model):
    """Prompts from within the budget to far past it; where two texts part, their next bytes tie within rounding."""
    prompts = [TEXT[i * 50 : i * 50 + size] for i, size in enumerate((40, 255, 300, 700, 1100, 1500))]
    for prompt, got, want in zip(prompts, written(model, prompts, None), written(model, prompts, "reference")):
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        if at is None:
            assert len(got) == len(want)
            continue
        ours, theirs = (last_logits(model, prompt + want[:at], impl) for impl in (None, "reference"))
        rounding, apart = (ours - theirs).abs().max().item(), theirs[want[at]] - theirs[got[at]]
        print(f"{len(prompt)} bytes: parts at {at}, {apart:.1e} apart, rounding {rounding:.1e} of {theirs.std():.1e}")
        assert 0 <= apart <= 2 * rounding and rounding <= ROUNDING[model.embed.weight.dtype] * theirs.std()


def test_every_stage_of_a_step_is_in_one_graph(model):
    session = Session(model, [400, 400])
    session.prefill([(0, encode(TEXT[:300])), (1, encode(TEXT[:9]))])
    for live in ([True, True], [True, False], [False, True]):
        session.step(torch.tensor([97, 98]), live)
    ((_, plan),) = session.replay.plans.values()
    assert [(first, last) for first, last, _ in plan] == [(0, len(model.config.blocks) + 2)]
    assert plan[0][2] is not None


def test_a_step_does_not_wait_for_the_gpu(model):
    session = Session(model, [400])
    session.prefill([(0, encode(TEXT[:300]))])
    for _ in range(3):
        session.step(torch.tensor([97]))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):  # a page is added on the way
            session.step(torch.tensor([97]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
