"""`tenant(...)`: whose caches are made in a block of code, and what they may hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ._config import parse_bytes, require_choice
from ._errors import ConfigurationError
from .runtime import manager
from .runtime.tenants import SHARES, Tenant, entered

__all__ = ["tenant"]


@contextmanager
def tenant(
    name: str,
    *,
    quota: int | str | None = None,
    priority: int | None = None,
    share: str | None = None,
    salt: str | bytes | None = None,
) -> Iterator[Tenant]:
    """Caches that are made or extended inside this block, by this thread or asyncio task, belong to tenant `name`.

    What is given applies to the tenant from now on, everywhere; what is None stays as it was. quota: bytes of blocks
    that it may hold, as 2**30 or "1GiB"; "none" for no limit (the default). priority: whose caches stay in memory and
    whose steps go first when memory is short; higher is more; 0 by default. share: which cached prefixes its caches may
    use: "none" (default), "system" (registered ones), "tenant" (also its own) or "global" (also those of other tenants
    that say "global"). salt: text that separates its prefixes from equal tokens elsewhere.

    Over its quota, the tenant's own caches that are not in use are swapped out, if there is where to; then the step
    raises `QuotaExceeded`. Other tenants are not concerned. Raises `ConfigurationError` for a value outside its range.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"tenant name {name!r} is not allowed: give a text that is not empty")
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise ConfigurationError(f"priority={priority!r} is not allowed: give an int, 0 for the usual one")
    if salt is not None and not isinstance(salt, (str, bytes)):  # of a number, bytes() makes that many zeros
        raise ConfigurationError(f"salt={salt!r} is not allowed: give a text or bytes")
    limit = None if quota is None else float("inf") if quota == "none" else float(parse_bytes(quota, "quota"))
    if share is not None:
        require_choice("share", share, SHARES)
    who = manager().tenants.named(name)
    if limit is not None:
        who.limit = limit
    if priority is not None:
        who.priority = priority
    if share is not None:
        who.share = share
    if salt is not None:
        who.salt = salt.encode() if isinstance(salt, str) else salt
    token = entered.set(name)
    try:
        yield who
    finally:
        entered.reset(token)
