"""The byte budget: one limit for all arenas of the process, and quotas of tenants.

Who needs blocks gets them, in this order: from the free ones; by growing the arenas, at the expense of other groups'
free blocks; from the cached ones; by swapping out caches that no running step reads; by waiting for running steps to
end. A step never waits while it holds blocks for its own other caches: it is *preempted* then, gives them back, and
begins anew.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

from .._config import config
from .._errors import KVBudgetExceeded, SwapError
from .arrival import missing
from .counters import Counters
from .group import CacheGroup
from .memory import free_bytes, is_out_of_memory
from .pool import Account, OutOfBlocks, OverQuota
from .shortage import budget_exceeded, quota_exceeded
from .swap import SwapSpace
from .table import Row
from .tenants import Tenant
from .waiters import Waiters

__all__ = ["Budget"]

T = TypeVar("T")


class Budget:
    """Finds free blocks for a group, or says who holds them.

    Obligation for every method: the caller holds the manager's lock. `allocating` and `resizing` give it up while they
    wait for running steps, and while blocks are swapped.
    """

    def __init__(
        self, groups: Collection[CacheGroup], idle: threading.Condition, counters: Counters, swap: SwapSpace
    ) -> None:
        """groups: a live view of all groups. idle: of the manager's lock; notified when steps end."""
        self._groups = groups
        self._idle = idle
        self._counters = counters
        self._swap = swap
        self.waiters = Waiters(groups, idle, counters)
        self._default: int | None = None
        self._refused: dict[
            int, str
        ] = {}  # what threads were told when arenas that the budget allows could not be made

    def allocating(
        self,
        group: CacheGroup,
        rows: Sequence[Row],
        needed: Callable[[], int],
        attempt: Callable[[], T],
        tenant: Tenant,
        later: bool = False,
    ) -> T:
        """The result of `attempt`, which allocates `needed()` blocks that `tenant` pays for, and for which the blocks
        of `rows` must be in place; if they may come back `later`, there is room for them, too.

        All are looked at again after every wait, because other threads may have changed the books. Raises
        `KVBudgetExceeded`, `QuotaExceeded` or `SwapError` with nothing changed, and `Preempted` where a `preemptible`
        step would have to wait while it holds blocks.
        """

        def wanted() -> int:
            return needed() + len(missing(rows))

        waiters = self.waiters
        collected = False
        self._refused.pop(threading.get_ident(), None)

        def wait() -> None:
            waiters.wait(tenant.priority, partial(group.mark_used, rows), lambda: self._exceeded(group, wanted()))

        try:
            while True:
                arrival = self._swap.arrival(group, rows)
                if arrival is not None:  # a step within a step
                    self._swap.await_back(arrival)
                if self._swap.coming(group, rows):
                    waiters.wait_for_others()
                    continue
                if (wanted() or waiters.had_its_turn()) and waiters.must_wait():
                    wait()
                    continue
                try:
                    start = time.monotonic()
                    if later:
                        if group.pool.num_free < wanted():
                            raise OutOfBlocks
                    elif self._swap.back(group, rows):
                        waiters.came_back(time.monotonic() - start)
                    return attempt()
                except OverQuota as over:
                    self._meet_quota(group, over.account, rows, needed() if over.account is tenant else 0)
                except OutOfBlocks:
                    if self._make_room(group, wanted, rows):
                        continue
                    try:
                        wait()
                    except KVBudgetExceeded:
                        if collected:
                            raise
                        collected = True
                        gc.collect()  # compilers leave caches of their first call in reference cycles
        finally:
            if not waiters.restartable:  # else it has its turn until its step begins
                waiters.leave()

    def fetch(self, group: CacheGroup, rows: Sequence[Row], kept: Sequence[Row]) -> int:
        """Bring the swapped blocks of `rows` back before they are used, at the expense of cached blocks and of caches
        of no higher priority, but not of `kept`; returns how many. Nothing is done while anybody waits for memory or
        for the arenas."""
        if len(self.waiters) or group.resizing or self._swap.coming(group, rows):
            return 0
        shortage = len(missing(rows)) - group.pool.num_free
        if shortage > 0 and self._evict(group, shortage) < shortage:
            wanted = set(rows)
            highest = max(
                (h.tenant.priority for h in group.holdings.values() if not wanted.isdisjoint(h.rows)), default=0
            )
            self._swap.out(group, len(missing(rows)) - group.pool.num_free, [*rows, *kept], highest=highest)
        if self._swap.coming(group, rows):
            return 0
        try:
            return self._swap.back(group, rows)
        except (OutOfBlocks, SwapError):  # who needs them will wait, or be told
            return 0

    @contextmanager
    def resizing(self, group: CacheGroup) -> Iterator[None]:
        """Wait until no step of `group` runs, and let none begin."""
        while group.resizing:
            self._idle.wait()
        try:
            group.resizing = True
            while group.active:
                self._idle.wait()
            yield
        finally:
            group.resizing = False
            self._idle.notify_all()

    @property
    def known_limit(self) -> int | None:
        """As `limit`, but None if nothing was configured and no cache has grown yet."""
        configured = config().kv_budget
        return self._default if configured is None else configured

    def forget(self) -> None:
        """Measure the free memory again when the default limit is next needed."""
        self._default = None

    # -- room ------------------------------------------------------------------------------------------------

    def limit(self, device: torch.device) -> int:
        """Bytes that all arenas together may take."""
        known = self.known_limit
        if known is None:
            known = self._default = free_bytes(device) // 2
        return known

    def _spare(self, group: CacheGroup) -> int:
        """Bytes that arenas may still grow by."""
        reserved = sum((group.pool.capacity - 1) * group.block_bytes for group in self._groups)
        return self.limit(group.sites[0].device) - reserved

    def _make_room(self, group: CacheGroup, wanted: Callable[[], int], rows: Sequence[Row]) -> bool:
        """Have `wanted()` free blocks in a group, as far as that can be had without waiting for others; whether more
        are free than before."""
        pool, shortage = group.pool, wanted() - group.pool.num_free
        behind = pool.index.num_behind
        if shortage > 0 and behind - shortage >= pool.num_used:  # a window's past must not pile up while memory lasts
            pool.evict_behind(shortage)
            self._counters.evictions += shortage
            return True
        if self._can_grow(group, wanted()):
            with self.resizing(group):  # the lock is not given up any more from here on
                if self._grow(group, wanted()):
                    return True
        for other in self._groups:
            other.drain()
            self._swap.forget_dropped(other)
        shortage = wanted() - group.pool.num_free
        if shortage <= 0 or self._evict(group, shortage) or self._swap.out(group, shortage, rows):
            return True
        return self._squeeze_others(group, shortage)

    def _evict(self, group: CacheGroup, count: int) -> int:
        """Make up to `count` cached blocks free; returns how many."""
        evicted = group.pool.evict(count)
        self._counters.evictions += evicted
        return evicted

    def _can_grow(self, group: CacheGroup, wanted: int) -> bool:
        shortage = (wanted - group.pool.num_free) * group.block_bytes
        others = sum(other.pool.num_free * other.block_bytes for other in self._groups if other is not group)
        return shortage <= self._spare(group) + others

    def _grow(self, group: CacheGroup, wanted: int) -> bool:
        """Grow a group's arenas, at the expense of other groups' free blocks if need be; whether that sufficed."""
        shortage = wanted - group.pool.num_free
        if shortage <= 0:
            return True
        capacity = group.pool.capacity
        more = max(shortage, capacity // 2)
        if more * group.block_bytes > self._spare(group):
            for other in self._groups:
                if other is not group and other.active == 0 and not other.resizing:
                    other.shrink()
        allowed = self._spare(group) // group.block_bytes
        for count in dict.fromkeys((min(more, allowed), shortage)):
            if shortage <= count <= allowed:
                try:
                    group.grow(capacity + count)
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    told = str(error).strip().partition("\n")[0] or type(error).__name__
                    self._refused[threading.get_ident()] = told
                else:
                    self._refused.pop(threading.get_ident(), None)
                    self._counters.arena_growths += 1
                    return True
        return False

    def _squeeze_others(self, group: CacheGroup, shortage: int) -> bool:
        """Swap out other groups' cold blocks, and give their memory to this group."""
        for other in list(self._groups):  # others may make groups while blocks are swapped
            spare = self._spare(group)
            if other is group or other.active or other.resizing or other.pins:
                continue
            bytes_short = shortage * group.block_bytes - spare - other.pool.num_free * other.block_bytes
            if bytes_short > 0:
                self._swap.out(other, -(-bytes_short // other.block_bytes), ())
                if other.active or other.resizing or other.pins:  # others have begun meanwhile
                    continue
            self._evict(other, other.pool.num_cached)
            other.compact_and_shrink()
            if self._spare(group) >= shortage * group.block_bytes:
                with self.resizing(group):
                    return self._grow(group, shortage + group.pool.num_free)
        return False

    def _meet_quota(self, group: CacheGroup, account: Account, rows: Sequence[Row], needed: int) -> None:
        """Swap out what an account pays for until `needed` blocks, and those of the swapped blocks of `rows` that it
        pays for, are within its limit; raises `QuotaExceeded`."""
        wanted = needed + sum(group.pool.payer(block) is account for block in missing(rows))
        moved = False
        for other in [group, *(other for other in self._groups if other is not group)]:
            excess = account.used + wanted * group.block_bytes - account.limit
            if excess <= 0:
                return
            moved |= self._swap.out(other, int(-(-excess // other.block_bytes)), rows, account) > 0
        if not moved and account.used + wanted * group.block_bytes > account.limit:
            if self.waiters.others_transfer():  # what they move cannot be moved now
                self.waiters.wait_for_others()
                return
            more = wanted * group.block_bytes
            raise quota_exceeded(self._groups, account, more, self._swap.storage.refusals())

    def _exceeded(self, group: CacheGroup, wanted: int) -> KVBudgetExceeded:
        spare = max(0, self._spare(group)) // group.block_bytes
        limit = self.limit(group.sites[0].device)
        refused = self._refused.get(threading.get_ident(), "")
        missing_blocks = wanted - group.pool.num_free - (0 if refused else spare)
        return budget_exceeded(
            self._groups, limit, missing_blocks, group.block_bytes, refused, self._swap.storage.refusals()
        )
