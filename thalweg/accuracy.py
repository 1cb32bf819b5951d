"""How far a result is from the truth, how far it may be, and how selections compare.

Truth is a float64 computation of the definition from the same inputs. A twin is an honest torch computation of the
same thing in the precision an implementation has: products on operands of the activations' dtype, accumulated in
float32, results stored in the result's dtype. The one tolerance rule:

    error <= 2 * max(error of the twin, error of the truth itself rounded to the result's dtype)

with error the relative L2 distance to the truth in float64. A twin that is exact (a copied history, a slot nobody
writes) therefore demands an exact result. A second number keeps one wrong row from hiding among thousands of right
ones: the worst row's error, which may be 8 times the twin's, since a maximum wanders more than a norm.
"""

from dataclasses import dataclass

import torch

FACTOR = 2.0
ROW_FACTOR = 8.0


@dataclass(frozen=True)
class Comparison:
    """error and row_error of a result against the truth, and the most that each may be."""

    error: float
    bound: float
    row_error: float = 0.0
    row_bound: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error <= self.bound and self.row_error <= self.row_bound


def _difference(got: torch.Tensor, truth: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Difference and truth in float64; where the truth is infinite or NaN the difference is 0 if got is the same."""
    if got.shape != truth.shape:
        raise ValueError(f"shapes {list(got.shape)} and {list(truth.shape)} cannot be compared")
    got, truth = got.to(torch.float64), truth.to(torch.float64)
    special = ~truth.isfinite()
    same = (got == truth) | (got.isnan() & truth.isnan())
    difference = torch.where(special, torch.where(same, 0.0, torch.inf), got - truth)
    return difference.masked_fill(difference.isnan(), torch.inf), truth.masked_fill(special, 0.0)


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """||got - truth|| / ||truth|| in float64; the plain norm where the truth is zero, 0 for empty tensors.

    inf if got is not finite where the truth is, or not the same where the truth is infinite or NaN.
    """
    difference, truth = _difference(got, truth)
    norm = truth.norm().item()
    return difference.norm().item() / (norm or 1.0)


def row_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The worst row (last dimension): ||got - truth|| over the row's norm or, if larger, the rows' rms norm."""
    difference, truth = _difference(got, truth)
    if not truth.numel():
        return 0.0
    rows = truth.norm(dim=-1) if truth.dim() else truth.abs()
    usual = rows.square().mean().sqrt()
    worst = difference.norm(dim=-1) if truth.dim() else difference.abs()
    return (worst / rows.maximum(usual).masked_fill(usual == 0, 1.0)).max().item()


def compare(got: torch.Tensor, truth: torch.Tensor, twin: torch.Tensor) -> Comparison:
    """The tolerance rule of this module. Integers must equal the truth: error is then the number of wrong rows."""
    if not got.dtype.is_floating_point:
        return Comparison(float(wrong_rows(got, truth)), 0.0)
    if _difference(twin, truth)[0].isinf().any():
        raise ValueError("the twin is not finite where the truth is: it can bound nothing")
    rounded = truth.to(got.dtype)
    bound = FACTOR * max(relative_error(twin, truth), relative_error(rounded, truth))
    row_bound = ROW_FACTOR * max(row_error(twin, truth), row_error(rounded, truth))
    return Comparison(relative_error(got, truth), bound, row_error(got, truth), row_bound)


def wrong_rows(got: torch.Tensor, truth: torch.Tensor) -> int:
    """Rows (last dimension) that are not equal, of integer tensors."""
    if got.shape != truth.shape:
        raise ValueError(f"shapes {list(got.shape)} and {list(truth.shape)} cannot be compared")
    return int((got != truth).any(-1).sum())


def wrong_selections(ids: torch.Tensor, scores: torch.Tensor, visible: torch.Tensor, slack: float = 1e-5) -> int:
    """Rows of a selection `[R, k]` that are not a best k of `scores` `[R, N]` (float64 truth, finite where visible).

    A row is right when its ids are ascending, distinct and visible, unused ones (-1) last, min(k, visible) in number,
    and their scores, sorted, are within `slack` (relative to the row's largest) of the best ones: implementations
    round scores differently, so blocks closer than that may change places.
    """
    R, k = ids.shape
    N = scores.shape[1]
    visible = visible.clamp(0, N)[:, None].to(torch.int64)
    ids = ids.to(torch.int64)
    used = torch.arange(k, device=ids.device) < visible
    shaped = ((ids >= 0) & (ids < visible)) == used
    shaped[:, 1:] &= ~used[:, 1:] | (ids[:, 1:] > ids[:, :-1])
    shaped &= used | (ids == -1)
    hidden = torch.arange(N, device=ids.device) >= visible
    scores = scores.to(torch.float64).masked_fill(hidden, -torch.inf)
    picked = scores.gather(1, ids.clamp(0, max(N - 1, 0))) if N else scores.new_zeros(R, k)
    picked = picked.masked_fill(~used, -torch.inf).sort(-1, descending=True).values
    best = scores.topk(min(k, N), -1).values
    largest = scores.masked_fill(hidden, 0.0).abs().amax(-1, keepdim=True) if N else scores.new_zeros(R, 1)
    near = (picked[:, : best.shape[1]] - best).abs() <= slack * largest
    near |= picked[:, : best.shape[1]] == best
    return R - int((shaped.all(-1) & near.all(-1)).sum())
