"""Settings shared by every test: one torch thread, a fixed seed, and the `gpu` mark."""

import pytest
import torch

torch.set_num_threads(1)  # small tensors: a second thread costs more than it gives, most of all beside other workers


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
