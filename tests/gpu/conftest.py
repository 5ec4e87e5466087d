"""Tests for a GPU: `pytest -m gpu`. Without one they run in the interpreter, on small sizes, so as not to rot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import paged_inductor
from paged_inductor.kernels.launch import INTERPRETED

from ..models.conftest import formula, fresh  # noqa: F401

HERE = "tests/gpu/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(HERE):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The GPU, or the CPU with the kernels in the interpreter."""
    if torch.cuda.is_available() and not INTERPRETED:
        yield torch.device("cuda")
        return
    if not INTERPRETED:
        pytest.skip("no GPU, and kernels are not interpreted")
    paged_inductor.configure(triton_on_cpu=True)
    yield torch.device("cpu")
    paged_inductor.configure(triton_on_cpu=False)
