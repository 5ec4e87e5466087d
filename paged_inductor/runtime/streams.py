"""Steps and their swapped blocks: all of them come back first, or those of one view while the step runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from .arrival import Arrival, missing
from .insist import insist
from .view import View
from .views import Views

__all__ = ["Streams"]


class Streams(Views):
    """Views with what of them is on its way. `_bring_back` and `_brought_back` are called with the lock held."""

    def _bring_back(self, views: Sequence[View]) -> None:
        """Bring the swapped blocks of a step's views back: all of them, or none may be swapped out again meanwhile."""
        for view in views:
            pin = partial(self._pin, view, ())
            self._budget.allocating(view.group, view.rows, lambda: 0, pin, view.tenant)

    def _brought_back(self, lacking: Sequence[View], views: Sequence[View], later: Collection[View]) -> bool:
        """Bring the swapped blocks of a step's views back, but for those of the last one, if it is among `later`: they
        begin to come back when nothing else is missing. Whether the step can begin; if not, look again."""
        *others, last = sorted(lacking, key=lambda view: (view in later, len(missing(view.rows))))
        if last not in later or self._sanitizing:
            self._bring_back(lacking)
            return False
        if others:
            self._bring_back(others)
            return False

        def attempt() -> bool:
            if any(view.group.resizing or (view is not last and missing(view.rows)) for view in views):
                return False  # others used the time that was spent waiting for room
            if missing(last.rows):
                self.swap.begin_back(last.group, last.rows)
            return True

        return self._budget.allocating(last.group, last.rows, lambda: 0, attempt, last.tenant, later=True)

    def arrival(self, view: View) -> Arrival | None:
        """What this thread's step has to wait for before it touches a site of `view`; None if all is there."""
        return self.swap.arrival(view.group, view.rows)

    def complete(self, views: Sequence[View]) -> None:
        """Wait until the blocks of this thread's step are all there. Raises `SwapError` if they cannot be read."""
        for view in views:
            arrival = self.arrival(view)
            if arrival is not None:
                arrival.join()
                with self.locked():
                    self.swap.end_back(arrival)
                    self._budget.waiters.came_back(arrival.seconds)

    def _end_back(self, views: Sequence[View]) -> None:
        """Let nothing be on its way any more for a step that failed, also if interrupted."""

        def end() -> None:
            for view in views:
                while (arrival := self.arrival(view)) is not None:
                    view.schedule = None  # it has the new blocks
                    arrival.stop()
                    with self.locked():
                        self.swap.end_back(arrival)

        insist(end)
