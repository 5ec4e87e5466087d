"""A manager for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paged_inductor._config import reset_config
from paged_inductor.runtime import Manager


@pytest.fixture
def runtime() -> Iterator[Manager]:
    """Its books are checked at the end."""
    own = Manager()
    yield own
    reset_config()
    own.check_integrity()
