"""Fetching ahead: swapped blocks come back while an earlier step runs.

A thread that uses caches in turn will probably use them in the same order again: whatever followed a cache the last
time is brought back as soon as that cache is used. Callers who know better say so: see `prefetch`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from weakref import ref

from .arrival import missing
from .group import CacheGroup
from .table import Lineage, Row
from .view import View

__all__ = ["Ahead"]

_Rows = tuple[tuple[CacheGroup, tuple["ref[Row]", ...]], ...]


class Ahead:
    """Knows the order in which caches are used, and has the next one fetched by a thread of its own."""

    def __init__(self, fetch: Callable[[CacheGroup, Sequence[Row], Sequence[Row]], None]) -> None:
        """fetch: brings the swapped blocks of rows of a group back, but not at the expense of others."""
        self._fetch = fetch
        self._executor = ThreadPoolExecutor(1, "paged_inductor_fetch")
        self._thread = threading.local()

    def began(self, views: Sequence[View]) -> None:
        """A step of this thread begins with `views`. Obligation: the caller holds the manager's lock."""
        lead = next((row.lineage for view in views for row in view.rows), None)
        if lead is None:
            return
        lead.used = _rows(views)
        last: ref[Lineage] | None = getattr(self._thread, "last", None)
        previous = last() if last is not None else None
        if lead is previous:
            return
        self._thread.last = ref(lead)
        if previous is not None:
            previous.next = ref(lead)
        following = lead.next() if lead.next is not None else None
        if following is not None:
            self._submit(following.used, lead.used)

    def fetch(self, views: Iterable[View]) -> None:
        """Have the swapped blocks of `views` brought back soon."""
        self._submit(_rows(views), ())

    def _submit(self, rows: _Rows, kept: _Rows) -> None:
        if any(row.away for _, members in rows for row in _alive(members)):
            with suppress(RuntimeError):  # the interpreter is about to end
                self._executor.submit(self._run, rows, kept)

    def _run(self, rows: _Rows, kept: _Rows) -> None:
        stay = [row for _, members in kept for row in _alive(members)]
        for group, members in rows:
            if missing(_alive(members)):
                self._fetch(group, _alive(members), stay)


def _alive(members: Iterable[ref[Row]]) -> list[Row]:
    return [row for each in members if (row := each()) is not None]


def _rows(views: Iterable[View]) -> _Rows:
    return tuple((view.group, tuple(ref(row) for row in dict.fromkeys(view.rows))) for view in views)
