"""Views: how they are made, extended, written apart and given up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .group import CacheGroup
from .ledger import Ledger
from .schedule import Schedule
from .table import Row, append_rows, blocks_needed, register, unregister
from .unshare import Place, blocks_to_separate, separate, separations
from .view import View

__all__ = ["StepViews", "Views"]

T = TypeVar("T")


@dataclass(frozen=True)
class StepViews:
    """A view made for a step, and the block copies (source, destination) to execute before anything is written."""

    view: View
    copies: list[tuple[int, int]]


class Views(Ledger):
    """A ledger with operations on views. All of them hold the lock, and are made in full or not at all."""

    def create(self, group: CacheGroup, batch: int, count: int, label: str) -> StepViews:
        """A view of `batch` new rows of `count` tokens each, unwritten."""
        with self.locked():
            rows = tuple(Row([], 0) for _ in range(batch))
            return self._extend(group, rows, (0,) * batch, 0, count, label, None)

    def create_static(self, group: CacheGroup, batch: int, length: int, label: str) -> View:
        """A buffer of `length` positions for `batch` rows, of which none is written."""
        with self.locked():
            rows = tuple(Row([], 0) for _ in range(batch))
            for row in rows:
                register(row, 0)
            return View(group, rows, (0,) * batch, label, length, self.tenants.current(), static=True)

    def extend(self, view: View, extent: int) -> list[tuple[int, int]]:
        """Let a static view have `extent` positions written, in place; returns the block copies to execute. The new
        positions are not initialised. All or nothing."""
        group = view.group
        count = extent - view.extent
        copies: list[tuple[int, int]] = []
        changes: list[tuple[int, int, int]] = []
        none = (0,) * len(view.rows)

        def attempt() -> tuple[tuple[Row, ...], tuple[int, ...]]:
            copies.clear()
            changes.clear()
            group.pool.account = view.tenant
            rows, lengths = view.rows, view.lengths
            return append_rows(rows, lengths, count, group.pool, group.block_size, copies, changes.append, none)

        def needed() -> int:
            return blocks_needed(view.rows, view.lengths, count, group.pool, group.block_size, none)

        with self.locked():
            rows, lengths = self._budget.allocating(group, view.rows, needed, attempt, view.tenant)
            schedule = self._take_schedule(view)
            before = self._derive(view, view.rows, view.lengths, view.length) if copies else None
            group.relength(view, rows, lengths)
            if schedule is not None:
                schedule.advance(count, changes)
                view.schedule = schedule
            self._pin(view, copies)
            if before is not None:
                group.pins[view.serial].kept = before
        return copies

    def truncate(self, view: View, extent: int) -> None:
        """Let a static view have `extent` positions written, fewer than now: the others' blocks are given back."""
        with self.locked():
            view.group.unpin(view)
            for row in view.rows:
                register(row, extent)
            view.group.relength(view, view.rows, (extent,) * len(view.rows))

    def take_over(self, view: View, newer: View) -> None:
        """Let `view` see, in place, the newest tokens that `newer` sees: a buffer slides on."""
        with self.locked():
            for row, seen in zip(newer.rows, newer.lengths):
                register(row, seen)
            schedule = self._take_schedule(newer)
            view.group.relength(view, newer.rows, newer.lengths)
            view.schedule = schedule

    def append(self, view: View, count: int, later: bool = False) -> StepViews:
        """A view that sees `count` more tokens (unwritten) than `view`, which keeps its meaning. later: swapped blocks
        may stay where they are until the step begins."""
        with self.locked():
            return self._extend(view.group, view.rows, view.lengths, view.length, count, view.label, view, later)

    def _extend(
        self,
        group: CacheGroup,
        rows: tuple[Row, ...],
        lengths: tuple[int, ...],
        length: int,
        count: int,
        label: str,
        parent: View | None,
        later: bool = False,
    ) -> StepViews:
        block_size = group.block_size
        copies: list[tuple[int, int]] = []
        changes: list[tuple[int, int, int]] = []
        tenant = self.tenants.entered() or (parent.tenant if parent else self.tenants.current())
        if self._sanitizing and parent is not None:
            self._check((parent,))
        skips = [max(0, seen - length) // block_size for seen in lengths]  # blocks of which `length` leaves nothing

        def attempt() -> tuple[tuple[Row, ...], tuple[int, ...]]:
            copies.clear()
            changes.clear()
            group.pool.account = tenant
            return append_rows(rows, lengths, count, group.pool, block_size, copies, changes.append, skips)

        def needed() -> int:
            return blocks_needed(rows, lengths, count, group.pool, block_size, skips)

        later = later and not self._sanitizing and not any(skips)
        new_rows, new_lengths = self._budget.allocating(group, rows, needed, attempt, tenant, later)
        if any(source < 0 for source, _ in copies):  # of a tail that others see, too
            for row, seen in zip(new_rows, new_lengths):
                unregister(row, seen, group.pool, block_size)
            new_rows, new_lengths = self._budget.allocating(group, rows, needed, attempt, tenant)
        for row, skip in zip(rows, skips):
            for block in row.blocks[:skip]:
                group.pool.index.leave_behind(block)
            row.superseded |= skip > 0
        view = View(group, new_rows, new_lengths, label, length + count, tenant)
        if parent is not None and not any(skips) and (schedule := self._take_schedule(parent)):
            schedule.advance(count, changes)
            view.schedule = schedule
        self._pin(view, copies)
        return StepViews(view, copies)

    def _pin(self, view: View, copies: Sequence[tuple[int, int]]) -> None:
        """Keep a view that was made for a step, and what is to be copied for it, in place until the step ends."""
        view.group.pin(view, [source for source, _ in copies])
        view.group.holdings[view.serial].used = next(self._clock)
        self.counters.copies_on_write += len(copies)

    @staticmethod
    def _take_schedule(view: View) -> Schedule | None:
        """The schedule of a view that will hardly be used again; None if there is none, if blocks have moved since, or
        if a running step reads it."""
        if view.group.active:
            return None
        schedule, view.schedule = view.schedule, None
        if schedule is None or schedule.epoch != view.group.epoch:
            return None
        view.group.follow()  # kernels that were launched may still read the tensors
        return schedule

    def suffix(self, view: View, length: int) -> View:
        """A view of the last `length` logical positions. The tokens before them stay in their blocks; the next append
        leaves out the blocks of which nothing is seen."""
        with self.locked():
            for row, seen in zip(view.rows, view.lengths):
                register(row, seen)
            result = View(view.group, view.rows, view.lengths, view.label, length, view.tenant)
            result.schedule = self._take_schedule(view)
            return result

    def derive(self, view: View, rows: Sequence[Row], lengths: Sequence[int], length: int) -> View:
        """A view of tokens that `view` (which the caller keeps alive) sees: a fork, crop, selection or merge."""
        with self.locked():
            return self._derive(view, rows, lengths, length)

    def _derive(self, view: View, rows: Sequence[Row], lengths: Sequence[int], length: int) -> View:
        for row, seen in zip(rows, lengths):
            register(row, seen)
        tenant = self.tenants.entered() or view.tenant
        return View(view.group, tuple(rows), tuple(lengths), view.label, length, tenant, view.static)

    def allocate(self, group: CacheGroup, count: int, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which allocates `count` blocks. The caller holds `locked`."""
        return self._budget.allocating(group, (), lambda: count, attempt, self.tenants.current())

    def unshare(
        self, group: CacheGroup, places: Sequence[tuple[Sequence[Place], int, int]], label: str
    ) -> tuple[StepViews, list[tuple[Place, int]]] | None:
        """Prepare rows of their own for places that are to be overwritten in place; None if all have them already.

        `places` are (all (view, position) pairs that are one place and see one row, first token, stop). Returns a
        view of the new rows with the block copies to execute, and which of its rows each place gets. Nothing has
        changed until `rebind`: dropping the result is the rollback.
        """
        size = group.block_size
        with self.locked():
            if self._sanitizing:
                self._check({view for members, _, _ in places for view, _ in members})
            tasks = separations(places, group.pool, size)
            if not tasks:
                return None
            copies: list[tuple[int, int]] = []

            def attempt() -> list[Row]:
                copies.clear()
                group.pool.account = self.tenants.current()
                return separate(tasks, group.pool, size, copies)

            def needed() -> int:
                return blocks_to_separate(tasks, size)

            seen = [view.rows[position] for members, _, _ in places for view, position in members]
            rows = self._budget.allocating(group, seen, needed, attempt, self.tenants.current())
            for row in rows:
                register(row, row.length)
            lengths = tuple(row.length for row in rows)
            view = View(group, tuple(rows), lengths, label, max(lengths), self.tenants.current())
            self._pin(view, copies)
            return StepViews(view, copies), [(place, i) for i, task in enumerate(tasks) for place in task.places]

    def rebind(self, group: CacheGroup, own: View, moves: Sequence[tuple[Place, int]]) -> None:
        """Let places see rows of `own` in place of those they saw: all of them or, if interrupted, none."""
        with self.locked():
            before = [(view, view.rows) for (view, _), _ in moves]
            left = [(view.rows[position], view.lengths[position]) for (view, position), _ in moves]
            try:
                for (view, position), i in moves:
                    group.rebind(view, position, own.rows[i])
            except BaseException:
                for view, rows in before:
                    view.rows = group.holdings[view.serial].rows = rows
                raise
            for row, seen in left:
                unregister(row, seen, group.pool, group.block_size)

    @staticmethod
    def _check(views: Iterable[View], beginning: bool = False) -> None:
        """Have the sanitizer prove that what a step reads is alive; `beginning`: and what it will copy. Raises
        `SanitizerError`."""
        for view in views:
            sanitizer = view.group.sanitizer
            if sanitizer is not None:
                sanitizer.check(view)
                if beginning:
                    sanitizer.check_sources(view)
