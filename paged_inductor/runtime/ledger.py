"""The ledger: all cache groups, who pays for them, and the lock that every entry is made under."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from .._errors import KVBudgetExceeded, SwapError
from .budget import Budget
from .counters import Counters
from .group import CacheGroup
from .numa import Nodes
from .pool import Account, OutOfBlocks
from .site import SiteSpec
from .swap import SwapSpace
from .tenants import Tenants
from .waiters import Preempted

__all__ = ["Ledger"]


class Ledger:
    """What views and steps are entered in."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        """nodes: of a host that has several memory nodes."""
        self._nodes = nodes
        self._lock = threading.RLock()  # knows its owner, which interruptions make uncertain otherwise; never nested
        self._idle = threading.Condition(self._lock)
        self._groups: dict[tuple[tuple[SiteSpec, ...], int], CacheGroup] = {}
        self.counters = Counters()
        self.prefixes_forgotten = 0  # how often all of them were
        self._sanitizing = False
        self.tenants = Tenants()
        self.swap = SwapSpace(self._groups.values(), self._idle, self.counters, nodes)
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
            self.swap.storage.reconcile(swapped)
            self._recount()
            raise

    def _recount(self) -> None:
        """Add up what every account pays for."""
        charged = self._charged()
        for account in self.tenants.accounts().values():
            account.used = 0
        for account, size in charged.items():
            account.used = size

    def _charged(self) -> dict[Account, int]:
        """Bytes that each account pays for, added up over all pools."""
        charged: dict[Account, int] = {}
        for group in self._groups.values():
            for account, size in group.pool.charges().items():
                charged[account] = charged.get(account, 0) + size
        return charged

    def _drain(self) -> None:
        for group in self._groups.values():
            if group.has_dead:
                group.drain()
            if group.pool.dropped:
                self.swap.forget_dropped(group)

    def _collect(self) -> None:
        """Release dead views' blocks now if nobody holds the books; else the holder does it on leaving."""
        while any(group.has_dead for group in tuple(self._groups.values())):
            if self._lock._is_owned() or not self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
                return
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
