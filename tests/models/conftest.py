"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import paged_inductor


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    paged_inductor.reset()
    yield
    paged_inductor.check_integrity()
