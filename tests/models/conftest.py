"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import paged_inductor
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager


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


@pytest.fixture
def own_options(fresh: None) -> Iterator[None]:
    """For tests that configure the process: options are the default ones again behind them."""
    yield
    reset_config()


@pytest.fixture
def idle(fresh: None) -> Iterator[None]:
    """Nothing runs on behind the test."""
    yield
    assert not any(group.active for group in manager().groups)
