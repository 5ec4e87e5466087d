"""The byte budget: arenas grow up to one limit for the process, at the expense of other groups' free blocks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from .._config import config
from .._errors import KVBudgetExceeded, QuotaExceeded
from .counters import Counters
from .group import CacheGroup
from .memory import free_bytes
from .pool import OutOfBlocks, OverQuota
from .tenants import Tenant

__all__ = ["Budget"]

T = TypeVar("T")


class Budget:
    """Finds free blocks for a group, or says who holds them.

    Obligation for every method: the caller holds the manager's lock. `allocating` and `resizing` give it up while they
    wait for running steps.
    """

    def __init__(self, groups: Collection[CacheGroup], idle: threading.Condition, counters: Counters) -> None:
        """groups: a live view of all groups. idle: of the manager's lock; notified when a group's last step ends."""
        self._groups = groups
        self._idle = idle
        self._counters = counters
        self._default: int | None = None

    def allocating(self, group: CacheGroup, needed: Callable[[], int], attempt: Callable[[], T]) -> T:
        """The result of `attempt`, which allocates `needed()` blocks; arenas grow if that many are not free.

        Both are called again after every wait, because other threads may have changed the books. Raises
        `KVBudgetExceeded` with nothing changed.
        """
        while True:
            try:
                return attempt()
            except OverQuota:
                raise self._over_quota(group, needed()) from None
            except OutOfBlocks:
                self._grow(group, needed)

    @contextmanager
    def resizing(self, group: CacheGroup) -> Iterator[None]:
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

    @property
    def limit(self) -> int | None:
        """Bytes that all arenas together may take; None if nothing was configured and no cache has grown yet."""
        configured = config().kv_budget
        return self._default if configured is None else configured

    def forget(self) -> None:
        """Measure the free memory again when the default limit is next needed."""
        self._default = None

    def _limit(self, device: torch.device) -> int:
        """Bytes that all arenas together may take."""
        configured = config().kv_budget
        if configured is not None:
            return configured
        if self._default is None:
            self._default = free_bytes(device) // 2
        return self._default

    def _reserved(self) -> int:
        return sum((group.pool.capacity - 1) * group.block_bytes for group in self._groups)

    def _grow(self, group: CacheGroup, needed: Callable[[], int]) -> None:
        """Have `needed()` free blocks in a group, or raise `KVBudgetExceeded` with nothing changed."""
        with self.resizing(group):  # the lock is not given up any more from here on
            if self._find(group, needed()):
                return
            gc.collect()  # compilers leave caches of their first call in reference cycles
            for other in self._groups:
                other.drain()
            if not self._find(group, needed()):
                raise self._exceeded(group, needed())

    def _find(self, group: CacheGroup, needed: int) -> bool:
        """Grow a group's arenas, at the expense of other groups' free blocks if need be; whether that sufficed."""
        shortage = needed - group.pool.num_free
        if shortage <= 0:
            return True
        capacity = group.pool.capacity
        limit = self._limit(group.sites[0].device)
        wanted = max(shortage, capacity // 2)
        if wanted * group.block_bytes > limit - self._reserved():
            for other in self._groups:
                if other is not group and other.active == 0 and not other.resizing:
                    other.shrink()
        allowed = (limit - self._reserved()) // group.block_bytes
        if allowed < shortage:
            return False
        group.grow(capacity + min(wanted, allowed))
        self._counters.arena_growths += 1
        return True

    def _over_quota(self, group: CacheGroup, needed: int) -> QuotaExceeded:
        tenant = group.pool.account
        assert isinstance(tenant, Tenant)
        holders = self._holders(tenant)
        used, limit, more = tenant.used, tenant.limit, needed * group.block_bytes
        return QuotaExceeded(
            f"tenant {tenant.name!r} holds {_mib(used)} of its quota of {_mib(limit)}, this step needs {_mib(more)} "
            f"more. Held by {_listing(holders)}. Its caches are intact, and no other tenant's were touched: drop some "
            "of them, shorten the batch, or raise the quota with "
            f'paged_inductor.tenant({tenant.name!r}, quota="…GiB")',
            holders,
        )

    def _holders(self, tenant: Tenant | None = None) -> list[tuple[str, int]]:
        """(label, bytes) of the live caches, or of one tenant's, largest first."""
        held: dict[str, int] = {}
        for group in self._groups:
            seen: set[int] = set()
            for holding in group.holdings.values():
                if tenant is None or holding.tenant is tenant:
                    blocks = {block for row in holding.rows for block in row.blocks if block > 0} - seen
                    seen |= blocks
                    held[holding.label] = held.get(holding.label, 0) + len(blocks) * group.block_bytes
        return sorted(held.items(), key=lambda item: -item[1])

    def _exceeded(self, group: CacheGroup, needed: int) -> KVBudgetExceeded:
        limit = self._limit(group.sites[0].device)
        spare = max(0, limit - self._reserved()) // group.block_bytes
        missing = needed - group.pool.num_free - spare
        holders = self._holders()
        return KVBudgetExceeded(
            f"the KV budget of {_mib(limit)} is exhausted: this step needs {missing} more block(s) of "
            f"{group.block_bytes / 2**10:.1f} KiB. Held now by {_listing(holders)}. Existing caches are intact: "
            'drop some of them, shorten the batch, or raise the limit with paged_inductor.configure(kv_budget="…GiB")',
            holders,
        )


def _listing(holders: list[tuple[str, int]]) -> str:
    return ", ".join(f"{label}: {_mib(size)}" for label, size in holders) or "nobody"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
