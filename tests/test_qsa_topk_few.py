"""The top-k of few rows in Gluon: emulated on the CPU, as it is on Hopper, against a plain sort."""

import sys

import gluon_emulator
import pytest
import qsa_oracle as slow
import torch

pytest.importorskip("triton")

from test_qsa_topk_triton import DEVICE, check, hostile, on_gpu, run

from thalweg.qsa import topk

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
# Groups of 8 and 16; lanes without a group, with one, with one maximum and with eight.
FEW, WIDE = topk.Config(8, 1, 1, 256, 2, "", few=True), topk.Config(16, 1, 1, 256, 1, "", few=True)


@pytest.fixture(autouse=True)
def few_gluon(monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setitem(sys.modules, "thalweg.qsa.few_gluon", gluon_emulator.load("qsa", "few_gluon"))
    elif not ON_HOPPER:
        pytest.skip("made for the sm_90 architecture")


@pytest.mark.parametrize("law", ("plain", "equal", "growing", "doubled", "nan", "signed zeros",
                                 *on_gpu("relu", "clustered", "infinite", "crowded")))  # fmt: skip
@pytest.mark.parametrize("config", (FEW, WIDE), ids=("groups of 8", "of 16"))
def test_b16_b17_b18_hostile_scores_are_exact(law, config):
    """Rows that end with a group, within four, within fewer groups than k; one that takes all."""
    check(hostile(law, 4, 600), [600, 403, 264, 15], 16, config)
    check(hostile(law, 4, 600), [17, 18, 150, 599], 16, config)


@pytest.mark.parametrize("k", (1, 31, 64))
def test_budgets(k):
    """A lane more or less; ties at the last place, in the last group and between groups."""
    scores = torch.randn(4, 300).round(decimals=1)
    check(scores, [300, 299, k + 1, k], k, FEW)
    check(scores[:, :200].relu(), [200, 10**9, 100, -3], k, FEW)


def test_a_group_of_nan_comes_after_every_number_and_before_no_lower_one():
    scores = torch.full((3, 128), torch.nan)
    scores[:, 80] = -torch.inf
    scores[1, 126:] = 1.0
    scores[2, 2:5] = torch.inf
    check(scores, [128, 127, 126], 5, FEW)


def test_a_search_ends_in_a_bounded_number_of_steps(monkeypatch):
    """Halved every fourth step: 33 bits end within 4 x 33, whatever the scores; looked for where they are far apart."""
    if DEVICE != "cpu":
        pytest.skip("steps are counted in the emulator")
    module, steps = sys.modules["thalweg.qsa.few_gluon"], []
    reach = module._reach
    monkeypatch.setattr(module, "_reach", lambda *args: steps.append(1) or reach(*args))
    for power in (0.02, 1.0, 30.0):
        scores = torch.randn(1, 600)
        scores = scores.sign() * (scores.abs() * power).exp().clamp(max=3e38)
        steps.clear()
        check(scores, [600], 64, FEW)
        assert 2 <= len(steps) <= 60, (power, len(steps))


def test_padding_strides_and_requests():
    """Rows of no request see nothing; scores that are not aligned, strided out; what is past visible is not read."""
    scores, visible = torch.randn(4, 300), torch.tensor([300, 200, 290, 257])
    wide = torch.full((4, 2, 303), torch.nan, device=DEVICE)
    wide[:, 1, 3:] = scores.to(DEVICE)
    for row, n in enumerate(visible.tolist()):
        wide[row, 1, 3 + n :] = torch.inf
    out = torch.full((16, 4), -7, dtype=torch.int32, device=DEVICE).T
    owner = torch.tensor([0, 1, 2, -1], device=DEVICE)
    topk.topk(wide[:, 1, 3:], visible.int().to(DEVICE), out, owner, 2, config=FEW)
    want = [slow.best(s, n, 16) for s, n in zip(scores, visible.tolist())]
    assert out.tolist() == [*want[:2], [-1] * 16, [-1] * 16]


def test_the_same_ids_as_the_other_way():
    scores, visible = torch.randn(3, 500).round(decimals=1), [500, 433, 200]
    other = topk.Config(4, 2, 2, 256, 4, "")
    assert torch.equal(run(scores, visible, 16, FEW), run(scores, visible, 16, other))
