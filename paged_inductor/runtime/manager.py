"""The manager: every cache group of the process, their common byte budget, and the steps that use them.

A step is a transaction. `append`/`create` make the *new* view that the step will fill; until the caller hands it
out, dropping it is the rollback: its blocks return to the pool, and older views never noticed.

Locking: one lock for the books, held for microseconds, and given up while blocks are swapped. Kernels run outside it,
between `begin` and `end`, which keep arenas in place; growing or trimming a group's arenas waits until none of its
steps runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import get_ident

import torch

from .._config import on_change
from .._errors import IntegrityError
from .ahead import Ahead
from .arrival import missing
from .group import CacheGroup
from .numa import Nodes, this_host
from .schedule import Schedule
from .streams import Streams
from .table import Row
from .view import View
from .views import StepViews

__all__ = ["Manager", "StepViews", "manager"]


class Manager(Streams):
    """Owner of all cache groups. Use the process's one from `manager()`."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        """nodes: of a host that has several memory nodes."""
        super().__init__(nodes)
        self._ahead = Ahead(self._fetch)

    # -- steps -----------------------------------------------------------------------------------------------

    def begin(self, views: Sequence[View], later: Collection[View] = ()) -> None:
        """Have the blocks of `views` in the arenas, and keep both in place until `end`.

        All of a step's views must have been made before. Raises as `append`. Swapped blocks of one of `later` may still
        be on their way when this returns: see `arrival`.
        """
        me, entered = get_ident(), []
        try:
            with self.locked():
                while True:
                    while any(view.group.resizing for view in views):
                        self._idle.wait()
                    lacking = [view for view in views if missing(view.rows)]
                    if not lacking or self._brought_back(lacking, views, later):
                        break
                if self._sanitizing:
                    self._check(views, beginning=True)
                now = next(self._clock)
                for view in views:
                    group = view.group
                    group.pin(view)
                    entered.append(view)
                    group.pins[view.serial].steps.append(me)
                    group.holdings[view.serial].used = now
                    group.follow()
                self.counters.steps += 1
                self._budget.waiters.began()
                if self.swap.used:
                    self._ahead.began(views)
        except BaseException:
            try:
                self._end_back(views)
            finally:
                self._leave(entered)
                with self._lock:
                    for view in views:
                        view.group.unpin(view)
            raise
        if self._nodes is not None and views:
            self._nodes.bind(views[0].group.node)

    def _fetch(self, group: CacheGroup, rows: Sequence[Row], kept: Sequence[Row]) -> None:
        """Bring swapped blocks of `rows` back before their step begins, but not at the expense of `kept`."""
        with self.locked():
            fetched = self._budget.fetch(group, rows, kept)
            if fetched:
                self.counters.swaps_ahead += fetched
                group.mark_used(rows, next(self._clock))  # or they would be the coldest again

    def prefetch(self, views: Sequence[View]) -> None:
        """Have the swapped blocks of `views` brought back by another thread, as far as there is room."""
        self._ahead.fetch(views)

    def end(self, views: Sequence[View]) -> None:
        """Undo `begin`: arenas may be replaced when no other step uses them, and blocks moved."""
        if self._nodes is not None and views:
            self._nodes.unbind()
        try:
            self._end_back(views)
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
                view.group.launched()
                while me in pin.steps:
                    pin.steps.remove(me)
                    if not every:
                        break
                if not pin.steps:
                    del view.group.pins[view.serial]
            if len(self._budget.waiters) or any(view.group.resizing for view in views):
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
        return self._budget.waiters.preemptible()

    def impatient(self) -> AbstractContextManager[None]:
        """Inside, `append`, `unshare` and `begin` raise `Preempted` in this thread where they would have to wait."""
        return self._budget.waiters.impatient()

    @property
    def restartable(self) -> bool:
        """Whether this thread is `preemptible`."""
        return self._budget.waiters.restartable

    def wait_for_others(self) -> None:
        """Let other steps go on for a moment. Obligation: this thread has dropped the views that it made."""
        with self.locked():
            self._budget.waiters.wait_for_others()

    def schedule(self, view: View) -> Schedule:
        """The kernels' tensors for `view`, cached with it. Obligation: a step uses it, between `begin` and `end`."""
        schedule, group = view.schedule, view.group
        if schedule is None or schedule.epoch != group.epoch:
            with self.locked():
                arrival = self.arrival(view)
                schedule = view.schedule = Schedule(view, arrival.blocks if arrival is not None else None)
        if group.order is not None and group.order.several:
            with self.locked():
                group.follow()  # another stream may still be filling the tensors
                group.order.keep(schedule.tensors)
        if self._sanitizing:
            with self.locked():
                self._check((view,))
        return schedule

    def hidden(self, view: View, schedule: Schedule) -> torch.Tensor:
        """`Schedule.hidden` of a view whose schedule it is. Obligation: as for `schedule`."""
        group = view.group
        with self.locked():
            group.follow()
            tensor = schedule.hidden(view.length)
            if group.order is not None:
                group.order.keep([tensor])
        return tensor

    # -- debug mode ------------------------------------------------------------------------------------------

    def sanitize(self, on: bool) -> None:
        """Watch every block from now on, or no longer. Waits for running steps."""
        with self.locked():
            if on != self._sanitizing:
                self._sanitizing = on
                for group in self.groups:
                    with self._budget.resizing(group):
                        group.sanitize(on)

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

    def forget_prefixes(self) -> None:
        """Nothing is known of the tokens of any block from now on."""
        with self.locked():
            self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        for group in self._groups.values():
            group.forget_names()
        self.prefixes_forgotten += 1

    def forget_unused(self) -> None:
        """Give back the free blocks at the ends of idle groups' arenas; forget the counters, the prefixes and the
        default budget.

        Groups stay known, because compiled programs hold them and may use them again.
        """
        with self.locked():
            self._forget_prefixes()
            for group in self._groups.values():
                if not group.active and not group.resizing:
                    group.shrink()
            self.counters.clear()
            self._budget.forget()

    def check_integrity(self) -> str:
        """Prove that the books balance. Returns the terms as text; raises `IntegrityError` with every fault."""
        lines, faults = [], []
        with self.locked():
            charged = self._charged()
            for group in self._groups.values():
                pool = group.pool
                found = group.check()
                line = (
                    f"{len(group.sites)} sites, block of {group.block_bytes} B: {pool.num_free} free + "
                    f"{pool.num_cached} cached + {pool.num_used} used = {pool.capacity - 1} in all, "
                    f"{pool.num_swapped} swapped; {group.active} running"
                )
                lines.append(line)
                faults += [f"{line}: {fault}" for fault in found]
            faults += self.swap.storage.check()
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
