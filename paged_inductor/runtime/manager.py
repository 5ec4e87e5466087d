"""The manager: every cache group of the process, their common byte budget, and the steps that use them.

A step is a transaction. `append`/`create` make the *new* view that the step will fill; until the caller hands it
out, dropping it is the rollback: its blocks return to the pool, and older views never noticed.

Locking: one lock for the books, held for microseconds. Kernels run outside it, between `begin` and `end`, which
keep arenas in place; growing or trimming a group's arenas waits until none of its steps runs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from threading import get_ident
from typing import TypeVar

from .._config import on_change
from .._errors import IntegrityError, KVBudgetExceeded, SwapError
from .budget import Budget, Preempted
from .counters import Counters
from .group import CacheGroup, SiteSpec, View
from .numa import Nodes, this_host
from .pool import Account, OutOfBlocks
from .schedule import Schedule
from .swap import SwapSpace, missing
from .table import Row, append_rows, blocks_needed, register, unregister
from .tenants import Tenants
from .unshare import Place, blocks_to_separate, separate, separations

__all__ = ["Manager", "StepViews", "manager"]

T = TypeVar("T")


@dataclass(frozen=True)
class StepViews:
    """A view made for a step, and the block copies (source, destination) to execute before anything is written."""

    view: View
    copies: list[tuple[int, int]]


class Manager:
    """Owner of all cache groups. Use the process's one from `manager()`."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        """nodes: of a host that has several memory nodes."""
        self._nodes = nodes
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._groups: dict[tuple[tuple[SiteSpec, ...], int], CacheGroup] = {}
        self.counters = Counters()
        self._sanitizing = False
        self.tenants = Tenants()
        self.swap = SwapSpace(self.counters)
        self._budget = Budget(self._groups.values(), self._idle, self.counters, self.swap)
        self._clock = count()

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
        except (OutOfBlocks, KVBudgetExceeded, SwapError, Preempted):
            raise
        except BaseException:
            for group in self._groups.values():
                group.reconcile()
            swapped = {block for group in self._groups.values() for row in group.live_rows() for block in row.blocks}
            self.swap.reconcile(swapped)
            self._recount()
            raise

    def _recount(self) -> None:
        """Add up what every account pays for."""
        charges = [group.pool.charges() for group in self._groups.values()]
        for account in [*self.tenants.accounts().values(), *(account for charged in charges for account in charged)]:
            account.used = 0
        for charged in charges:
            for account, size in charged.items():
                account.used += size

    def _drain(self) -> None:
        for group in self._groups.values():
            if group.has_dead:
                group.drain()
                self.swap.forget_dropped(group)

    def _collect(self) -> None:
        """Release dead views' blocks now if nobody holds the books; else the holder does it on leaving."""
        while any(group.has_dead for group in tuple(self._groups.values())) and self._lock.acquire(blocking=False):
            try:
                with self._reconciling():
                    self._drain()
            finally:
                self._lock.release()

    # -- groups ----------------------------------------------------------------------------------------------

    def group(self, sites: tuple[SiteSpec, ...], block_size: int) -> CacheGroup:
        """The group that stores these sites; made at the first call. Caches of equal models share it."""
        key = (sites, block_size)
        group = self._groups.get(key)
        if group is None:
            with self.locked():
                group = self._groups.get(key)
                if group is None:
                    group = self._groups[key] = CacheGroup(sites, block_size, self._collect, self._nodes)
                    group.sanitize(self._sanitizing)
        return group

    @property
    def groups(self) -> list[CacheGroup]:
        """All groups, in the order in which they were made."""
        return list(self._groups.values())

    @property
    def budget_bytes(self) -> int | None:
        """Bytes that all arenas together may take; None if that is not decided yet."""
        return self._budget.known_limit

    # -- views -----------------------------------------------------------------------------------------------

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
            rows, lengths = self._budget.allocating(group, view.rows, needed, attempt, view.tenant.priority)
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

        new_rows, new_lengths = self._budget.allocating(group, rows, needed, attempt, tenant.priority)
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
        return schedule if schedule is None or schedule.epoch == view.group.epoch else None

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
        return self._budget.allocating(group, (), lambda: count, attempt, self.tenants.current().priority)

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
            rows = self._budget.allocating(group, seen, needed, attempt, self.tenants.current().priority)
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

    # -- steps -----------------------------------------------------------------------------------------------

    def begin(self, views: Sequence[View]) -> None:
        """Have the blocks of `views` in the arenas, and keep both in place until `end`.

        All of a step's views must have been made before. Raises as `append`.
        """
        me, entered = get_ident(), []
        try:
            with self.locked():
                while True:
                    while any(view.group.resizing for view in views):
                        self._idle.wait()
                    if not any(missing(view.rows) for view in views):
                        break
                    self._bring_back(views)
                if self._sanitizing:
                    self._check(views, beginning=True)
                now = next(self._clock)
                for view in views:
                    group = view.group
                    group.pin(view)
                    entered.append(view)
                    group.pins[view.serial].steps.append(me)
                    group.holdings[view.serial].used = now
                self.counters.steps += 1
        except BaseException:
            self._leave(entered)
            with self._lock:
                for view in views:
                    view.group.unpin(view)
            raise
        if self._nodes is not None and views:
            self._nodes.bind(views[0].group.node)

    def _bring_back(self, views: Sequence[View]) -> None:
        """Bring the swapped blocks of a step's views back: all of them, or none may be swapped out again meanwhile."""
        for view in views:
            pin = partial(self._pin, view, ())
            self._budget.allocating(view.group, view.rows, lambda: 0, pin, view.tenant.priority)

    def end(self, views: Sequence[View]) -> None:
        """Undo `begin`: arenas may be replaced when no other step uses them, and blocks moved."""
        if self._nodes is not None and views:
            self._nodes.unbind()
        try:
            self._leave(views)
        except BaseException:  # interrupted: none of this thread's steps goes on
            self._leave(views, every=True)
            raise
        self._collect()
        if self._sanitizing:
            with self.locked():
                self._check(views)

    def _leave(self, views: Sequence[View], every: bool = False) -> None:
        """This thread's latest step, or every one, uses `views` no more."""
        me = get_ident()
        with self._lock:
            for view in views:
                pin = view.group.pins.get(view.serial)
                if pin is None:
                    continue
                while me in pin.steps:
                    pin.steps.remove(me)
                    if not every:
                        break
                if not pin.steps:
                    del view.group.pins[view.serial]
            if self._budget.waiting or any(view.group.resizing for view in views):
                self._idle.notify_all()

    @property
    def running_steps(self) -> int:
        """Steps under way."""
        most: Counter[int] = Counter()  # of each thread
        for group in self.groups:
            for pin in list(group.pins.values()):
                most |= Counter(pin.steps)
        return most.total()

    @contextmanager
    def using(self, *views: View) -> Iterator[None]:
        """`begin` and `end` around a block of code."""
        self.begin(views)
        try:
            yield
        finally:
            self.end(views)

    def preemptible(self) -> AbstractContextManager[None]:
        """Inside, `append` and `begin` may raise `Preempted` in this thread: it then drops the views that it made,
        waits for others, and begins anew."""
        return self._budget.preemptible()

    def wait_for_others(self) -> None:
        """Let other steps go on for a moment. Obligation: this thread has dropped the views that it made."""
        with self.locked():
            self._budget.wait_for_others()

    def schedule(self, view: View) -> Schedule:
        """The kernels' tensors for `view`, cached with it. Obligation: a step uses it, between `begin` and `end`."""
        schedule = view.schedule
        if schedule is None or schedule.epoch != view.group.epoch:
            with self.locked():
                schedule = view.schedule = Schedule(view)
        if self._sanitizing:
            with self.locked():
                self._check((view,))
        return schedule

    # -- debug mode ------------------------------------------------------------------------------------------

    def sanitize(self, on: bool) -> None:
        """Watch every block from now on, or no longer. Waits for running steps."""
        with self.locked():
            if on != self._sanitizing:
                self._sanitizing = on
                for group in self._groups.values():
                    with self._budget.resizing(group):
                        group.sanitize(on)

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

    # -- books -----------------------------------------------------------------------------------------------

    def trim(self) -> int:
        """Move live blocks together, and give the free ones back to the operating system or device; returns the bytes.

        Waits for running steps.
        """
        freed = 0
        with self.locked():
            for group in self.groups:
                with self._budget.resizing(group):
                    freed += group.compact_and_shrink() * group.block_bytes
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
        """Give back the free blocks at the ends of idle groups' arenas; forget the counters, the prefixes and the
        default budget.

        Groups stay known, because compiled programs hold them and may use them again.
        """
        with self.locked():
            for group in self._groups.values():
                group.pool.forget_names()
                if not group.active and not group.resizing:
                    group.shrink()
            self.counters.clear()
            self._budget.forget()

    def check_integrity(self) -> str:
        """Prove that the books balance. Returns the terms as text; raises `IntegrityError` with every fault."""
        lines, faults = [], []
        charged: dict[Account, int] = {}
        with self.locked():
            for group in self._groups.values():
                pool = group.pool
                found = group.check()
                for account, size in pool.charges().items():
                    charged[account] = charged.get(account, 0) + size
                line = (
                    f"{len(group.sites)} sites, block of {group.block_bytes} B: {pool.num_free} free + "
                    f"{pool.num_cached} cached + {pool.num_used} used = {pool.capacity - 1} in all, "
                    f"{pool.num_swapped} swapped; {group.active} running"
                )
                lines.append(line)
                faults += [f"{line}: {fault}" for fault in found]
            faults += self.swap.check(self._groups.values())
            for name, account in self.tenants.accounts().items():
                if account.used != charged.get(account, 0):
                    faults.append(f"{name} pays for {charged.get(account, 0)} B, not {account.used}")
        if faults:
            raise IntegrityError("; ".join(faults))
        return "\n".join(lines) or "no caches"


@cache
def manager() -> Manager:
    """The process's manager."""
    made = Manager(this_host())
    on_change(lambda options: made.sanitize(options.sanitize))
    return made
