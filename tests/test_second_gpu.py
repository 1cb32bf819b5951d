"""Every op on a GPU that is not the current one: the right result there, and the current device stays what it was."""

import pytest
import torch

from thalweg import cases
from thalweg.bench import check

pytestmark = pytest.mark.gpu
SHAPES = ("decode-h12-b8", "decode-h32-b8-bf16state", "prefill-equal-keys", "verify-h12-b32-s4", "append-d16-s3")


@pytest.mark.parametrize("id", [*cases.SMALL, *SHAPES])
def test_b32_every_implementation_runs_on_the_device_of_its_tensors(id):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    rows = list(check.check_case(cases.CASES[id], "cuda:1"))
    assert rows and all(row.result in ("ok", "skipped") for row in rows), rows
    assert any(row.result == "ok" for row in rows) and torch.cuda.current_device() == 0
