"""Whose blocks a tenant shares, and who finds its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from .tenants import Tenant

__all__ = ["SYSTEM", "Policy"]

SYSTEM = "system"
GLOBAL = "global"


@dataclass(frozen=True)
class Policy:
    """Whose blocks may be shared. scopes: where blocks are looked for, in this order. own: where new ones are entered,
    or None. salt: part of every name. priority: of the blocks, when it comes to eviction."""

    scopes: tuple[Hashable, ...] = ()
    own: Hashable = None
    salt: bytes = b""
    priority: float = 0

    @classmethod
    def of(cls, tenant: Tenant, registering: bool = False) -> Policy:
        """What a tenant says. registering: its prefixes are to be found by all that share "system"."""
        mine, priority = ("tenant", tenant.name), float(tenant.priority)
        if registering:
            return cls((SYSTEM, mine), SYSTEM, tenant.salt, float("inf"))
        if tenant.share == "system":
            return cls((SYSTEM,), None, tenant.salt, priority)
        if tenant.share == "tenant":
            return cls((SYSTEM, mine), mine, tenant.salt, priority)
        if tenant.share == "global":
            return cls((SYSTEM, mine, GLOBAL), GLOBAL, tenant.salt, priority)
        return cls(salt=tenant.salt)

    @property
    def shares(self) -> bool:
        """Whether anything is shared across calls."""
        return bool(self.scopes)
