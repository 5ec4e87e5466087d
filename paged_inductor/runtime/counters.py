"""Running totals, for `stats()`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Counters"]


@dataclass
class Counters:
    """Running totals since the process started or `reset()` was called. materializations: by operation."""

    copies_on_write: int = 0
    arena_growths: int = 0
    steps: int = 0
    graph_recordings: int = 0
    dense_fallbacks: int = 0
    materializations: dict[str, int] = field(default_factory=dict)

    def clear(self) -> None:
        """Start again at zero."""
        for name, value in vars(Counters()).items():
            setattr(self, name, value)
