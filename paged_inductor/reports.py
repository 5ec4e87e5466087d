"""Reports of compiled graphs, kept for `explain()`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from .passes import GraphReport

__all__ = ["collect", "forget", "publish", "published"]

_lock = threading.Lock()
_recent: deque[tuple[Hashable, GraphReport]] = deque(maxlen=1000)
_collectors: list[list[GraphReport]] = []


def publish(owner: Hashable, report: GraphReport) -> None:
    """Record the report of a graph that was just compiled for `owner`: what one call of `page` made, or a label."""
    with _lock:
        _recent.append((owner, report))
        for collector in _collectors:
            collector.append(report)


def published(owner: Hashable) -> list[GraphReport]:
    """The reports of the graphs compiled so far for `owner` (of the last thousand graphs of the process)."""
    with _lock:
        return [report for other, report in _recent if other == owner]


def forget(owner: Hashable = None) -> None:
    """Drop the reports kept for `published`: those of `owner`, or all."""
    with _lock:
        kept = [] if owner is None else [entry for entry in _recent if entry[0] != owner]
        _recent.clear()
        _recent.extend(kept)


@contextmanager
def collect() -> Iterator[list[GraphReport]]:
    """The reports of the graphs compiled within the block."""
    reports: list[GraphReport] = []
    with _lock:
        _collectors.append(reports)
    try:
        yield reports
    finally:
        with _lock:
            _collectors.remove(reports)
