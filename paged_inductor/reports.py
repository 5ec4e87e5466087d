"""Reports of compiled graphs, kept for `explain()`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from .passes import GraphReport

__all__ = ["collect", "forget", "publish", "published"]

_lock = threading.Lock()
_recent: deque[tuple[str, GraphReport]] = deque(maxlen=1000)
_collectors: list[list[GraphReport]] = []


def publish(label: str, report: GraphReport) -> None:
    """Record the report of a graph that was just compiled for the program called `label`."""
    with _lock:
        _recent.append((label, report))
        for collector in _collectors:
            collector.append(report)


def published(label: str) -> list[GraphReport]:
    """The reports of the graphs compiled so far for `label` (of the last thousand graphs of the process)."""
    with _lock:
        return [report for name, report in _recent if name == label]


def forget() -> None:
    """Drop the reports kept for `published`."""
    with _lock:
        _recent.clear()


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
