"""Running totals, for `stats()`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .latency import Latencies

__all__ = ["Counters"]


@dataclass
class Counters:
    """Running totals since the process started or `reset()` was called. Changed under the manager's lock.

    swaps_out, swaps_in: blocks moved to another tier of memory and back; swap_bytes_*, swap_seconds_*: what that moved,
    and how long it took; swaps_ahead: those of swaps_in that came back before their step began. prefix_queries,
    prefix_hits: tokens looked up among the cached prefixes, and found there.
    evictions: cached blocks without owners that were given to somebody else. preempted_steps: steps that had to wait
    for others, or to give their caches up to them. materializations: dense copies, by operation. latencies: of the
    compiled steps that succeeded.
    """

    copies_on_write: int = 0
    arena_growths: int = 0
    steps: int = 0
    graph_recordings: int = 0
    dense_fallbacks: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    swaps_ahead: int = 0
    swap_bytes_out: int = 0
    swap_bytes_in: int = 0
    swap_seconds_out: float = 0.0
    swap_seconds_in: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    evictions: int = 0
    preempted_steps: int = 0
    materializations: dict[str, int] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)

    def clear(self) -> None:
        """Start again at zero."""
        for name, value in vars(Counters()).items():
            setattr(self, name, value)
