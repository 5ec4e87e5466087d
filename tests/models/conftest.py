"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import paged_inductor


@pytest.fixture
def formula(eager_formula: None) -> None:
    """What serves one query on the CPU. Modules that need the compiled code override this."""


@pytest.fixture(autouse=True)
def fresh(formula: None) -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # what earlier tests leave behind, until the next module begins: see tests/conftest.py
    paged_inductor.reset()
    yield
    paged_inductor.check_integrity()
