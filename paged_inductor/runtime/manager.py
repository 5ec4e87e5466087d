"""The manager: every cache group of the process, their common byte budget, and the steps that use them.

A step is a transaction. `append`/`create` make the *new* view that the step will fill; until the caller hands it
out, dropping it is the rollback: its blocks return to the pool, and older views never noticed.

Locking: one lock for the books, held for microseconds. Kernels run outside it, between `begin` and `end`, which
keep arenas in place; growing or trimming a group's arenas waits until none of its steps runs.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import torch

from .._config import config
from .._errors import IntegrityError, KVBudgetExceeded
from .group import CacheGroup, SiteSpec, View
from .memory import free_bytes
from .pool import OutOfBlocks
from .schedule import Schedule
from .table import Row, append_rows, blocks_needed, fork_row, private_blocks, register, unregister

__all__ = ["Manager", "Place", "StepViews", "manager"]

T = TypeVar("T")
Place = tuple[View, int]
"""A batch row of a view."""


def _row(place: Place) -> Row:
    view, position = place
    return view.rows[position]


@dataclass
class Counters:
    """Running totals since the process started or `reset()` was called."""

    copies_on_write: int = 0
    arena_growths: int = 0
    steps: int = 0
    dense_fallbacks: int = 0
    materializations: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepViews:
    """A view made for a step, and the block copies (source, destination) to execute before anything is written."""

    view: View
    copies: list[tuple[int, int]]


class Manager:
    """Owner of all cache groups. Use the process's one from `manager()`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._groups: dict[tuple[tuple[SiteSpec, ...], int], CacheGroup] = {}
        self._default_budget: int | None = None
        self.counters = Counters()

    # -- locking ---------------------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the books; on leaving, release what views that died meanwhile held."""
        try:
            with self._lock, self._reconciling():
                self._drain()
                yield
        finally:
            self._collect()

    @contextmanager
    def _reconciling(self) -> Iterator[None]:
        """Rebuild the books when anything but a lack of blocks, which leaves them balanced, interrupts the caller."""
        try:
            yield
        except (OutOfBlocks, KVBudgetExceeded):
            raise
        except BaseException:
            for group in self._groups.values():
                group.reconcile()
            raise

    def _drain(self) -> None:
        for group in self._groups.values():
            if group.has_dead:
                group.drain()

    def _collect(self) -> None:
        """Release dead views' blocks now if nobody holds the books; else the holder does it on leaving."""
        while any(group.has_dead for group in tuple(self._groups.values())) and self._lock.acquire(blocking=False):
            try:
                with self._reconciling():
                    self._drain()
            finally:
                self._lock.release()

    # -- groups and budget -----------------------------------------------------------------------------------

    def group(self, sites: tuple[SiteSpec, ...], block_size: int) -> CacheGroup:
        """The group that stores these sites; made at the first call. Caches of equal models share it."""
        key = (sites, block_size)
        group = self._groups.get(key)
        if group is None:
            with self.locked():
                group = self._groups.get(key)
                if group is None:
                    group = self._groups[key] = CacheGroup(sites, block_size, self._collect)
        return group

    @property
    def groups(self) -> list[CacheGroup]:
        return list(self._groups.values())

    def budget(self, device: torch.device) -> int:
        """Bytes that all arenas together may take."""
        configured = config().kv_budget
        if configured is not None:
            return configured
        if self._default_budget is None:
            self._default_budget = free_bytes(device) // 2
        return self._default_budget

    def _reserved(self) -> int:
        return sum((group.pool.capacity - 1) * group.block_bytes for group in self._groups.values())

    def _grow(self, group: CacheGroup, needed: Callable[[], int]) -> None:
        """Have `needed()` free blocks in a group, or raise `KVBudgetExceeded` with nothing changed."""
        with self._resizing(group):  # the lock is not given up any more from here on
            if self._find(group, needed()):
                return
            gc.collect()  # compilers leave caches of their first call in reference cycles
            self._drain()
            if not self._find(group, needed()):
                raise self._exceeded(group, needed())

    def _find(self, group: CacheGroup, needed: int) -> bool:
        """Grow a group's arenas, at the expense of other groups' free blocks if need be; whether that sufficed."""
        shortage = needed - group.pool.num_free
        if shortage <= 0:
            return True
        capacity = group.pool.capacity
        budget = self.budget(group.sites[0].device)
        wanted = max(shortage, capacity // 2)
        if wanted * group.block_bytes > budget - self._reserved():
            for other in self._groups.values():
                if other is not group and other.active == 0 and not other.resizing:
                    other.shrink()
        allowed = (budget - self._reserved()) // group.block_bytes
        if allowed < shortage:
            return False
        group.grow(capacity + min(wanted, allowed))
        self.counters.arena_growths += 1
        return True

    @contextmanager
    def _resizing(self, group: CacheGroup) -> Iterator[None]:
        """Wait until no step of `group` runs, and let none begin."""
        while group.resizing:
            self._idle.wait()
        group.resizing = True
        try:
            while group.active:
                self._idle.wait()
            yield
        finally:
            group.resizing = False
            self._idle.notify_all()

    def _exceeded(self, group: CacheGroup, needed: int) -> KVBudgetExceeded:
        budget = self.budget(group.sites[0].device)
        spare = max(0, budget - self._reserved()) // group.block_bytes
        missing = needed - group.pool.num_free - spare
        held: dict[str, int] = {}
        for other in self._groups.values():
            seen: set[int] = set()
            for holding in other.holdings.values():
                blocks = {block for row in holding.rows for block in row.blocks} - seen
                seen |= blocks
                held[holding.label] = held.get(holding.label, 0) + len(blocks) * other.block_bytes
        holders = sorted(held.items(), key=lambda item: -item[1])
        listing = ", ".join(f"{label}: {size / 2**20:.1f} MiB" for label, size in holders) or "nobody"
        return KVBudgetExceeded(
            f"the KV budget of {budget / 2**20:.1f} MiB is exhausted: this step needs {missing} more block(s) of "
            f"{group.block_bytes / 2**10:.1f} KiB. Held now by {listing}. Existing caches are intact: drop some "
            'of them, shorten the batch, or raise the limit with paged_inductor.configure(kv_budget="…GiB")',
            holders,
        )

    def _allocating(self, group: CacheGroup, needed: Callable[[], int], attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which allocates `needed()` blocks; arenas grow if that many are not free."""
        while True:
            try:
                return attempt()
            except OutOfBlocks:
                self._grow(group, needed)

    # -- views -----------------------------------------------------------------------------------------------

    def create(self, group: CacheGroup, batch: int, count: int, label: str) -> StepViews:
        """A view of `batch` new rows of `count` tokens each, unwritten."""
        with self.locked():
            rows = tuple(Row([], 0) for _ in range(batch))
            return self._extend(group, rows, (0,) * batch, 0, count, label, None)

    def append(self, view: View, count: int) -> StepViews:
        """A view that sees `count` more tokens (unwritten) than `view`, which keeps its meaning."""
        with self.locked():
            return self._extend(view.group, view.rows, view.lengths, view.length, count, view.label, view)

    def _extend(
        self,
        group: CacheGroup,
        rows: tuple[Row, ...],
        lengths: tuple[int, ...],
        length: int,
        count: int,
        label: str,
        parent: View | None,
    ) -> StepViews:
        block_size = group.block_size
        copies: list[tuple[int, int]] = []
        changes: list[tuple[int, int, int]] = []

        def attempt() -> tuple[tuple[Row, ...], tuple[int, ...]]:
            copies.clear()
            changes.clear()
            return append_rows(rows, lengths, count, group.pool, block_size, copies, changes.append)

        def needed() -> int:
            return blocks_needed(rows, lengths, count, group.pool, block_size)

        new_rows, new_lengths = self._allocating(group, needed, attempt)
        view = View(group, new_rows, new_lengths, label, length + count)
        if parent is not None and parent.schedule is not None and not group.active:  # no running step reads it
            schedule, parent.schedule = parent.schedule, None
            schedule.advance(count, changes)
            view.schedule = schedule
        if copies:
            self.counters.copies_on_write += len(copies)
        return StepViews(view, copies)

    def derive(self, view: View, rows: Sequence[Row], lengths: Sequence[int], length: int) -> View:
        """A view of tokens that `view` (which the caller keeps alive) sees: a fork, crop, selection or merge."""
        with self.locked():
            for row, seen in zip(rows, lengths):
                register(row, seen)
            return View(view.group, tuple(rows), tuple(lengths), view.label, length)

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
            tasks: list[tuple[Sequence[Place], Row, int, int, int]] = []
            others: dict[int, int] = {}
            for members, first, stop in places:
                row = _row(members[0])
                left = others.get(id(row), sum(row.live.values()))
                touched = row.blocks[first // size : -(-stop // size)]
                if left != len(members) or any(group.pool.refcount(block) != 1 for block in touched):
                    others[id(row)] = left - len(members)
                    longest = max(view.lengths[position] for view, position in members)
                    tasks.append((members, row, longest, first, stop))
            if not tasks:
                return None
            copies: list[tuple[int, int]] = []

            def attempt() -> list[Row]:
                copies.clear()
                own: list[Row] = []
                try:
                    for _, row, longest, first, stop in tasks:
                        own.append(fork_row(row, longest, group.pool, size, copies, first, stop))
                except OutOfBlocks:
                    for made in own:
                        for block in made.blocks:
                            group.pool.release(block)
                    raise
                return own

            def needed() -> int:
                return sum(len(private_blocks(longest, size, first, stop)) for _, _, longest, first, stop in tasks)

            rows = self._allocating(group, needed, attempt)
            for row in rows:
                register(row, row.length)
            lengths = tuple(row.length for row in rows)
            view = View(group, tuple(rows), lengths, label, max(lengths))
            self.counters.copies_on_write += len(copies)
            return StepViews(view, copies), [(place, i) for i, task in enumerate(tasks) for place in task[0]]

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

    # -- steps -----------------------------------------------------------------------------------------------

    def begin(self, groups: Sequence[CacheGroup]) -> None:
        """Keep the arenas of `groups` in place until `end`. All of a step's views must have been made before."""
        with self.locked():
            while any(group.resizing for group in groups):
                self._idle.wait()
            for group in groups:
                group.active += 1
            self.counters.steps += 1

    def end(self, groups: Sequence[CacheGroup]) -> None:
        with self._lock:
            for group in groups:
                group.active -= 1
                if not group.active and group.resizing:
                    self._idle.notify_all()
        self._collect()

    @contextmanager
    def using(self, *groups: CacheGroup) -> Iterator[None]:
        """`begin` and `end` around a block of code."""
        self.begin(groups)
        try:
            yield
        finally:
            self.end(groups)

    def schedule(self, view: View) -> Schedule:
        """The kernels' tensors for `view`, cached with it."""
        schedule = view.schedule
        if schedule is None:
            with self.locked():
                schedule = view.schedule = Schedule(view)
        return schedule

    # -- books -----------------------------------------------------------------------------------------------

    def trim(self) -> int:
        """Give the free blocks at the arenas' ends back to the operating system or device; returns the bytes."""
        freed = 0
        with self.locked():
            for group in self.groups:
                with self._resizing(group):
                    freed += group.shrink() * group.block_bytes
        return freed

    def count_materialization(self, name: str) -> int:
        """Add one to an operation's count of dense copies; returns the new count."""
        try:
            with self._lock:
                counts = self.counters.materializations
                counts[name] = counts.get(name, 0) + 1
                return counts[name]
        finally:
            self._collect()

    def forget_unused(self) -> None:
        """Give back the free blocks of idle groups, and forget the counters.

        Groups stay known, because compiled programs hold them and may use them again.
        """
        with self.locked():
            for group in self._groups.values():
                if not group.active and not group.resizing:
                    group.shrink()
            self.counters = Counters()
            self._default_budget = None

    def check_integrity(self) -> str:
        """Prove that the books balance. Returns the terms as text; raises `IntegrityError` with every fault."""
        lines, faults = [], []
        with self.locked():
            for group in self._groups.values():
                pool = group.pool
                found = group.check()
                line = (
                    f"{len(group.sites)} sites, block of {group.block_bytes} B: {pool.num_free} free + "
                    f"{pool.num_used} used + 0 swapped = {pool.capacity - 1} total, {group.active} running"
                )
                lines.append(line)
                faults += [f"{line}: {fault}" for fault in found]
        if faults:
            raise IntegrityError("; ".join(faults))
        return "\n".join(lines) or "no caches"


@cache
def manager() -> Manager:
    """The process's manager."""
    return Manager()
