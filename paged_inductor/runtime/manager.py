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
from .table import Row, append_rows, fork_row, register

__all__ = ["Manager", "StepViews", "manager"]

T = TypeVar("T")


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
        with self._lock:
            self._drain()
            try:
                yield
            except (OutOfBlocks, KVBudgetExceeded):
                raise  # raised with the books balanced
            except BaseException:
                for group in self._groups.values():
                    group.reconcile()
                raise
        self._collect()

    def _drain(self) -> None:
        for group in self._groups.values():
            if group.has_dead:
                group.drain()

    def _collect(self) -> None:
        """Release dead views' blocks now if nobody holds the books; else the holder does it on leaving."""
        while any(group.has_dead for group in tuple(self._groups.values())) and self._lock.acquire(blocking=False):
            try:
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

    def _grow(self, group: CacheGroup, shortage: int) -> None:
        """Add at least `shortage` blocks to a group, or raise `KVBudgetExceeded` with nothing changed."""
        while group.resizing:
            self._idle.wait()
            if group.pool.num_free >= shortage:
                return
        capacity = group.pool.capacity
        budget = self.budget(group.sites[0].device)
        wanted = max(shortage, capacity // 2)
        if wanted * group.block_bytes > budget - self._reserved():
            for other in self._groups.values():
                if other is not group and other.active == 0 and not other.resizing:
                    other.shrink()
        allowed = (budget - self._reserved()) // group.block_bytes
        if allowed < shortage:
            gc.collect()  # compilers leave caches of their first call in reference cycles
            self._drain()
            if group.pool.num_free >= shortage:
                return
            raise self._exceeded(group, shortage, budget)
        self._resize(group, capacity + min(wanted, allowed))

    def _resize(self, group: CacheGroup, capacity: int) -> None:
        group.resizing = True
        try:
            while group.active:
                self._idle.wait()
            group.resize(capacity)
            group.pool.grow(capacity)
            self.counters.arena_growths += 1
        finally:
            group.resizing = False
            self._idle.notify_all()

    def _exceeded(self, group: CacheGroup, shortage: int, budget: int) -> KVBudgetExceeded:
        held: dict[str, int] = {}
        for other in self._groups.values():
            seen: set[int] = set()
            for view in other.live_views():
                blocks = {block for row in view.rows for block in row.blocks} - seen
                seen |= blocks
                held[view.label] = held.get(view.label, 0) + len(blocks) * other.block_bytes
        holders = sorted(held.items(), key=lambda item: -item[1])
        listing = ", ".join(f"{label}: {size / 2**20:.1f} MiB" for label, size in holders) or "nobody"
        return KVBudgetExceeded(
            f"the KV budget of {budget / 2**20:.1f} MiB is exhausted: this step needs {shortage} more block(s) of "
            f"{group.block_bytes / 2**10:.1f} KiB. Held now by {listing}. Existing caches are intact: drop some "
            'of them, shorten the batch, or raise the limit with paged_inductor.configure(kv_budget="…GiB")',
            holders,
        )

    def _allocating(self, group: CacheGroup, shortage: int, attempt: Callable[[], T]) -> T:
        while True:
            try:
                return attempt()
            except OutOfBlocks:
                self._grow(group, max(1, shortage - group.pool.num_free))

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

        shortage = len(rows) * (-(-count // block_size) + 1)
        new_rows, new_lengths = self._allocating(group, shortage, attempt)
        view = View(group, new_rows, new_lengths, label, length + count)
        if parent is not None and parent.schedule is not None:
            view.schedule = parent.schedule
            parent.schedule = None
            view.schedule.advance(count, changes)
        if copies:
            self.counters.copies_on_write += len(copies)
        return StepViews(view, copies)

    def derive(self, view: View, rows: Sequence[Row], lengths: Sequence[int], length: int) -> View:
        """A view of tokens that `view` (which the caller keeps alive) sees: a fork, crop, selection or merge."""
        with self.locked():
            for row, seen in zip(rows, lengths):
                register(row, seen)
            return View(view.group, tuple(rows), tuple(lengths), view.label, length)

    def unshare(self, views: Sequence[View], row: Row, first: int, stop: int) -> list[tuple[int, int]]:
        """Before tokens `first..stop-1` of `row` are overwritten in place through the alias family `views`.

        If anyone outside the family sees those blocks, the family gets a row of its own in its place. Returns
        the block copies to execute first.
        """
        with self.locked():
            group = views[0].group
            size = group.block_size
            inside = sum(view.rows.count(row) for view in views)
            touched = row.blocks[first // size : -(-stop // size)]
            if inside == sum(row.live.values()) and all(group.pool.refcount(block) == 1 for block in touched):
                return []
            copies: list[tuple[int, int]] = []
            longest = max(seen for view in views for r, seen in zip(view.rows, view.lengths) if r is row)

            def attempt() -> Row:
                copies.clear()
                return fork_row(row, longest, group.pool, size, copies, touched=first)

            own = self._allocating(group, len(row.blocks), attempt)
            for view in views:
                group.rebind(view, row, own)
            self.counters.copies_on_write += len(copies)
            return copies

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
            for group in self._groups.values():
                while group.resizing:
                    self._idle.wait()
                group.resizing = True
                try:
                    while group.active:
                        self._idle.wait()
                    freed += group.shrink() * group.block_bytes
                finally:
                    group.resizing = False
                    self._idle.notify_all()
        return freed

    def count_materialization(self, name: str) -> int:
        """Add one to an operation's count of dense copies; returns the new count."""
        with self._lock:
            counts = self.counters.materializations
            counts[name] = counts.get(name, 0) + 1
            return counts[name]

    def forget_unused(self) -> None:
        """Drop the groups without live views, and the counters."""
        with self.locked():
            self._groups = {
                key: group for key, group in self._groups.items() if group.active or group.live_views()
            }
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
