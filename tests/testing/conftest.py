"""Every test starts with empty books and no compiled code."""

from __future__ import annotations

from ..models.conftest import formula, fresh  # noqa: F401
