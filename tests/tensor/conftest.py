"""Random operations call attention with arguments of many kinds, served by formulas and as on a GPU."""

from __future__ import annotations

import os

import pytest

from paged_inductor.ops import dispatch, library

from ..models.replaying import Twins


@pytest.fixture(autouse=True)
def formula(request: pytest.FixtureRequest) -> None:
    """Compiled code only where there is time for it: make fuzz."""
    if os.environ.get("HYPOTHESIS_PROFILE") != "fuzz":
        request.getfixturevalue("eager_formula")


@pytest.fixture(autouse=True)
def twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels serve, their twins do."""
    for module in (library, dispatch):
        monkeypatch.setattr(module, "kernels", Twins())
