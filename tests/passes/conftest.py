"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

from tests.models.conftest import formula, fresh  # noqa: F401
