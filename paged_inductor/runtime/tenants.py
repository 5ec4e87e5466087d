"""Tenants: who a cache belongs to, what they may hold, and whom they share with."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from .pool import Account

__all__ = ["SHARES", "Tenant", "Tenants", "entered"]

SHARES = ("none", "system", "tenant", "global")


class Tenant(Account):
    """Someone who holds caches. used, limit: bytes of blocks (see `Account`); the limit is the quota.

    priority: whose caches stay and whose steps go first: higher is more. share: whose cached prefixes its new caches
    may use: nobody's ("none"), those registered for all ("system"), also its own ("tenant"), or also those of all
    tenants that share globally ("global"). salt: separates its prefixes' names from those of equal tokens elsewhere.
    """

    __slots__ = ("name", "priority", "salt", "share")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.priority = 0
        self.share = "none"
        self.salt = b""


entered: ContextVar[str | None] = ContextVar("paged_inductor_tenant", default=None)
"""The name of the tenant whose `with` block runs in this thread or asyncio task."""


class Tenants:
    """All tenants of a manager, by name. They are not forgotten: caches may outlive the code that named them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._default = Tenant("default")
        self._by_name = {"default": self._default}
        self.common = Account()
        """Pays, without a limit, for blocks that several tenants share."""

    def named(self, name: str) -> Tenant:
        """The tenant of that name; made at the first call."""
        with self._lock:
            return self._by_name.setdefault(name, Tenant(name))

    def entered(self) -> Tenant | None:
        """Whose `with` block this code runs in, if it runs in one."""
        name = entered.get()
        return None if name is None else self.named(name)

    def current(self) -> Tenant:
        """Who makes the caches that are made here and now."""
        return self.entered() or self._default

    def accounts(self) -> dict[str, Account]:
        """Everybody who pays for blocks, by name."""
        return {**{f"tenant {tenant.name}": tenant for tenant in self.all()}, "the common account": self.common}

    def all(self) -> list[Tenant]:
        """Every tenant, in the order in which they were first named; the default one is the first."""
        with self._lock:
            return list(self._by_name.values())
