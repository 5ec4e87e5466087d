"""What is said when memory is short: who holds it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from .._errors import KVBudgetExceeded, QuotaExceeded
from .group import CacheGroup
from .pool import Account

__all__ = ["budget_exceeded", "quota_exceeded"]

_DROP = "drop some of them, shorten the batch, "


def budget_exceeded(
    groups: Iterable[CacheGroup], limit: int, missing: int, block_bytes: int, refused: str = ""
) -> KVBudgetExceeded:
    """The error for `missing` blocks that the budget of `limit` bytes does not allow, or for which the device gives no
    memory: `refused` says how."""
    holders = _holders(groups)
    what = f"the device gives no memory within the KV budget of {_mib(limit)} ({refused})"
    if not refused:
        what = f"the KV budget of {_mib(limit)} is exhausted"
    return KVBudgetExceeded(
        f"{what}: this step needs {missing} more block(s) of "
        f"{block_bytes / 2**10:.1f} KiB. Held now by {_listing(holders)}. Existing caches are intact: {_DROP}"
        'raise the limit with paged_inductor.configure(kv_budget="…GiB"), or let caches that are not in use be swapped '
        'out with configure(swap_disk="…GiB") or configure(swap_host="…GiB")',
        holders,
    )


def quota_exceeded(groups: Iterable[CacheGroup], account: Account, more: int) -> QuotaExceeded:
    """The error for `more` bytes that an account's limit does not allow."""
    name = getattr(account, "name", "?")
    holders = _holders(groups, account)
    return QuotaExceeded(
        f"tenant {name!r} holds {_mib(account.used)} of its quota of {_mib(account.limit)}, this step needs "
        f"{_mib(more)} more. Held by {_listing(holders)}. Its caches are intact, and no other tenant's were touched: "
        f"{_DROP}"
        f'or raise the quota with paged_inductor.tenant({name!r}, quota="…GiB")',
        holders,
    )


def _holders(groups: Iterable[CacheGroup], account: Account | None = None) -> list[tuple[str, int]]:
    """(label, bytes) of the live caches, or of those that an account pays for, largest first."""
    held: dict[str, int] = {}
    for group in groups:
        seen: set[int] = set()
        for holding in group.holdings.values():
            if account is None or holding.tenant is account:
                blocks = {block for row in holding.rows for block in row.blocks if block > 0} - seen
                seen |= blocks
                held[holding.label] = held.get(holding.label, 0) + len(blocks) * group.block_bytes
    return sorted(held.items(), key=lambda item: -item[1])


def _listing(holders: list[tuple[str, int]]) -> str:
    return ", ".join(f"{label}: {_mib(size)}" for label, size in holders) or "nobody"


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"
