"""What is said when memory is short: who holds it, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from .._amounts import size
from .._config import config
from .._errors import KVBudgetExceeded, QuotaExceeded
from .group import CacheGroup
from .pool import Account

__all__ = ["budget_exceeded", "quota_exceeded"]


def budget_exceeded(
    groups: Iterable[CacheGroup], limit: int, missing: int, block_bytes: int, refused: str = "", unswapped: str = ""
) -> KVBudgetExceeded:
    """The error for `missing` blocks that the budget of `limit` bytes does not allow, or for which the device gives no
    memory: `refused` says how. unswapped: why the system did not take what was to be swapped out."""
    holders = _holders(groups)
    what = f"the device gives no memory within the KV budget of {size(limit)} ({refused})"
    if not refused:
        what = f"the KV budget of {size(limit)} is exhausted"
    return KVBudgetExceeded(
        f"{what}: this step needs {missing} more block(s) of {size(block_bytes)}. "
        f"{_held('Held now by', holders, 'Existing caches are intact')} the batch, "
        f'raise the limit with paged_inductor.configure(kv_budget="…GiB"), or {_swapping(unswapped)}',
        holders,
    )


def _swapping(unswapped: str) -> str:
    """What swapping could do, or why it did not."""
    options = config()
    if unswapped:
        return f"mend what keeps caches that are not in use from being swapped out ({unswapped})"
    if options.swap_disk or options.swap_host:
        have = f"they have swap_disk={size(options.swap_disk)}, swap_host={size(options.swap_host or 0)}"
        return f"give the caches that are not in use more room elsewhere ({have}), unless all are in use"
    return (
        'let caches that are not in use be swapped out with configure(swap_disk="…GiB") or configure(swap_host="…GiB")'
    )


def quota_exceeded(groups: Iterable[CacheGroup], account: Account, more: int, unswapped: str = "") -> QuotaExceeded:
    """The error for `more` bytes that an account's limit does not allow. unswapped: as of `budget_exceeded`."""
    name = getattr(account, "name", "?")
    holders = _holders(groups, account)
    intact = "Its caches are intact, and no other tenant's were touched"
    raising = f'raise the quota with paged_inductor.tenant({name!r}, quota="…GiB")'
    advice = f"{raising}, or {_swapping(unswapped)}" if unswapped else f"or {raising}"
    return QuotaExceeded(
        f"tenant {name!r} holds {size(account.used)} of its quota of {size(account.limit)}, this step needs "
        f"{size(more)} more. "
        f"{_held('Held by', holders, intact)} the batch, {advice}",
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


def _held(by: str, holders: list[tuple[str, int]], intact: str) -> str:
    """Who holds memory, if anybody does, and the first of the next steps."""
    if not holders:
        return "Shorten"
    listing = ", ".join(f"{label}: {size(held)}" for label, held in holders)
    return f"{by} {listing}. {intact}: drop some of them, shorten"
