"""Random operations call attention with arguments of many kinds."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def formula(request: pytest.FixtureRequest) -> None:
    """Compiled code only where there is time for it: make fuzz."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":
        request.getfixturevalue("eager_formula")
