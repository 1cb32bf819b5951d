"""The measures of error and the tolerance rule, on values whose errors are known."""

import math

import pytest
import torch

from thalweg import accuracy

NAN, INF = math.nan, math.inf


def test_relative_error_is_the_l2_distance_over_the_norm():
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert accuracy.relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert accuracy.relative_error(torch.tensor([0.0, 0.5]), torch.zeros(2)) == 0.5
    assert accuracy.relative_error(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("got", [NAN, INF, -INF])
def test_what_is_not_finite_where_the_truth_is_has_infinite_error(got):
    assert accuracy.relative_error(torch.tensor([1.0, got]), torch.ones(2)) == INF
    assert accuracy.row_error(torch.tensor([[1.0, got]]), torch.ones(1, 2)) == INF


def test_infinities_and_nan_of_the_truth_must_be_met_exactly():
    truth = torch.tensor([1.0, -INF, NAN])
    assert accuracy.relative_error(truth, truth) == 0.0
    for wrong in ([1.0, INF, NAN], [1.0, -1e30, NAN], [1.0, -INF, 0.0], [1.0, NAN, NAN]):
        assert accuracy.relative_error(torch.tensor(wrong), truth) == INF


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[3\]"):
        accuracy.relative_error(torch.zeros(2), torch.zeros(3))


def test_bound_is_twice_the_error_of_the_twin_or_of_rounding():
    truth = torch.linspace(1, 2, 1000, dtype=torch.float64)
    twin = truth * 1.01
    result = accuracy.compare((truth * 1.019).float(), truth, twin)
    assert result.bound == pytest.approx(0.02) and result.ok
    assert not accuracy.compare((truth * 1.021).float(), truth, twin).ok
    exact_twin = accuracy.compare(truth.bfloat16(), truth, truth)
    assert exact_twin.error == pytest.approx(exact_twin.bound / 2) and exact_twin.ok


def test_an_exact_twin_demands_an_exact_result():
    truth = torch.arange(8.0, dtype=torch.float64)
    got = truth.bfloat16()
    assert accuracy.compare(got, truth, got).ok
    got[3] = got[3].nextafter(got[4])
    assert not accuracy.compare(got, truth, truth.bfloat16()).ok


def test_one_wrong_row_cannot_hide_among_many():
    """Fails when only the norm over everything is looked at."""
    truth = torch.randn(200_000, 4, dtype=torch.float64)
    twin = truth.bfloat16()
    got = twin.clone()
    got[77] *= 0.5
    result = accuracy.compare(got, truth, twin)
    assert result.error <= result.bound and result.row_error > result.row_bound and not result.ok


def test_a_broken_twin_bounds_nothing():
    with pytest.raises(ValueError, match="twin"):
        accuracy.compare(torch.ones(2), torch.ones(2), torch.tensor([1.0, NAN]))


def test_integers_must_be_equal():
    truth = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32)
    got = truth.clone()
    assert accuracy.compare(got, truth, truth).ok
    got[1, 0] = 9
    result = accuracy.compare(got, truth, truth)
    assert result.error == 1.0 and not result.ok


SCORES = torch.tensor([[5.0, 1.0, 4.0, 4.0, 9.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ids", "visible", "wrong"),
    [
        ([0, 2, 4], 5, 0),
        ([0, 3, 4], 5, 0),  # a tie: either block is a best one
        ([0, 1, 4], 5, 1),
        ([0, 2, 3], 5, 1),
        ([2, 0, 4], 5, 1),  # not ascending
        ([0, 0, 4], 5, 1),  # twice
        ([0, 2, 3], 4, 0),
        ([0, 2, 4], 4, 1),  # not visible
        ([0, 1, -1], 2, 0),
        ([0, -1, 1], 2, 1),  # unused entries are not last
        ([0, -1, -1], 2, 1),  # too few
        ([-1, -1, -1], 0, 0),
        ([0, -1, -1], 0, 1),
    ],
)
def test_selections_are_judged_by_their_properties(ids, visible, wrong):
    ids, visible = torch.tensor([ids], dtype=torch.int32), torch.tensor([visible])
    scores = SCORES.masked_fill(torch.arange(5) >= visible, -INF)
    assert accuracy.wrong_selections(ids, scores, visible) == wrong


def test_selections_may_differ_only_within_the_slack():
    scores = torch.tensor([[1.0, 1.0 + 1e-7, 1.0 + 1e-3]], dtype=torch.float64)
    visible = torch.tensor([3])
    for ids, wrong in (([0, 2], 0), ([1, 2], 0), ([0, 1], 1)):
        assert accuracy.wrong_selections(torch.tensor([ids]), scores, visible) == wrong
    assert accuracy.wrong_selections(torch.tensor([[0, 2]]), scores, visible, slack=0.0) == 1
    assert accuracy.wrong_selections(torch.full((2, 4), -1), torch.zeros(2, 0), torch.zeros(2)) == 0
