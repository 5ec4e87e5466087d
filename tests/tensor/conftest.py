"""Random operations call attention with arguments of many kinds, served by formulas and as on a GPU."""

from __future__ import annotations

import os

import pytest

from ..models.replaying import let_twins_serve


@pytest.fixture(autouse=True)
def formula(request: pytest.FixtureRequest) -> None:
    """Compiled code only where there is time for it: make fuzz."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":
        request.getfixturevalue("eager_formula")


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    let_twins_serve(monkeypatch)
