"""Fixtures of all tests: the device axis (and its dtypes), the `gpu` and `slow` markers, a tiny model."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# What the operators are built for on each device (DESIGN: fp32 and bf16 on CPU, bf16 and fp16 on CUDA).
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
MARKS = {"cpu": (), "cuda": (pytest.mark.gpu,)}

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores Ctrl-C for what it runs in the background


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runslow", action="store_true", help="also run the tests marked slow")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: on a busy machine two threads wait for each other longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Qwen3."""
    from tests.tiny import save_tiny

    return save_tiny(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device` alone: cpu, cuda. `device` and `dtype`: every dtype that the device has."""
    if "device" not in metafunc.fixturenames:
        return
    if "dtype" not in metafunc.fixturenames:
        params = [pytest.param(d, id=d, marks=MARKS[d]) for d in DTYPES]
        metafunc.parametrize("device", params)
        return
    pairs = [(d, t) for d in DTYPES for t in DTYPES[d]]
    params = [pytest.param(d, t, id=f"{d}-{str(t).removeprefix('torch.')}", marks=MARKS[d]) for d, t in pairs]
    metafunc.parametrize("device, dtype", params)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA GPU: torch.cuda.is_available() is False")
    if not config.getoption("--runslow"):
        skips["slow"] = pytest.mark.skip(reason="slow: run it with --runslow")
    for item in items:
        for marker, skip in skips.items():
            if marker in item.keywords:
                item.add_marker(skip)
