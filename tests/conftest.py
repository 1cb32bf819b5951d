"""Settings shared by every test: one torch thread, a fixed seed, the `gpu` mark, kernels interpreted without a GPU."""

import gc
import importlib.util
import os

import pytest
import torch

torch.set_num_threads(1)  # small tensors: a second thread costs more than it gives, most of all beside other workers

# Triton reads the variable when a function is decorated, its own functions when it is imported. It is set back: an op
# that picks an implementation by itself must not pick an interpreted kernel.
if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    import bf16_interpreter
    import triton

    bf16_interpreter.install()
    triton.knobs.runtime.interpret = True
    os.environ.pop("TRITON_INTERPRET", None)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish():
    """What is imported stays: to look through it for cycles again and again took a quarter of the interpreted tests."""
    if not torch.cuda.is_available():  # there what holds a GPU's memory is to go soon
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)


def pytest_unconfigure():
    gc.unfreeze()  # else Triton's bindings tell of leaks at the end


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def run(capsys):
    """The command: run(*arguments) gives its exit code, standard output and standard error."""
    from thalweg import cli

    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(argv)
        captured = capsys.readouterr()
        return stopped.value.code, captured.out, captured.err

    return run
