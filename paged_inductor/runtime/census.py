"""What the live views see, counted: tokens, shared blocks, sequences, and who pays for what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .group import CacheGroup
from .pool import Account
from .table import Row
from .tenants import Tenant

__all__ = ["Census", "Holdings", "census", "held_by", "parts_of", "sequences"]


@dataclass(frozen=True)
class Census:
    """The tokens of one group.

    tokens: live ones, each physical one once. resident: those of them that are in the arenas (the others are swapped
    out). shared: blocks that more than one sequence sees.
    """

    tokens: int
    resident: int
    shared: int


@dataclass
class Holdings:
    """What one account pays for, over all groups: blocks in the arenas, and blocks and bytes in another tier."""

    blocks: int = 0
    swapped_blocks: int = 0
    swapped_bytes: int = 0


def census(group: CacheGroup) -> Census:
    """Count a group's tokens, in time proportional to its live blocks. The caller holds the manager's lock."""
    filled: dict[int, int] = {}
    seen: dict[int, int] = {}
    for holding in group.holdings.values():
        for row in set(holding.rows):
            if holding.rows.count(row) > 1:
                seen.update((block, 2) for block in row.blocks)
    for row in group.live_rows():
        for j, block in enumerate(row.blocks):
            filled[block] = max(filled.get(block, 0), min(group.block_size, row.length - j * group.block_size))
            seen[block] = seen.get(block, 0) + 1
    resident = sum(count for block, count in filled.items() if block > 0)
    return Census(sum(filled.values()), resident, sum(count > 1 for count in seen.values()))


def sequences(groups: Iterable[CacheGroup], resident: bool = False) -> int:
    """How many sequences are alive; `resident`: and not swapped out. The caller holds the manager's lock.

    A model whose layers are in several groups has each of its sequences in all of them, so of a label's groups the
    largest counts.
    """
    most: dict[str, int] = {}
    for group in groups:
        rows: dict[str, set[int]] = {}
        for holding in group.holdings.values():
            here = (row for row in holding.rows if not (resident and _swapped(row)))
            rows.setdefault(holding.label, set()).update(map(id, here))
        for label, found in rows.items():
            most[label] = max(most.get(label, 0), len(found))
    return sum(most.values())


def _swapped(row: Row) -> bool:
    """Whether some of a row's blocks are in another tier: caches move as a whole, but for prefixes that others use."""
    return bool(row.blocks) and (row.blocks[0] < 0 or row.blocks[-1] < 0)


def held_by(groups: Iterable[CacheGroup]) -> dict[Account, Holdings]:
    """What every account pays for. The caller holds the manager's lock."""
    found: dict[Account, Holdings] = {}
    for group in groups:
        size = group.block_bytes
        for account, charged in group.pool.charges().items():
            found.setdefault(account, Holdings()).blocks += charged // size
        for account, count in group.pool.swapped_by().items():
            holdings = found.setdefault(account, Holdings())
            holdings.swapped_blocks += count
            holdings.swapped_bytes += count * size
    return found


def parts_of(common: Account, groups: Iterable[CacheGroup]) -> dict[Tenant, float]:
    """Each tenant's part of the bytes that `common` pays for: a block is divided evenly among the tenants that have it.
    The caller holds the manager's lock."""
    found: dict[Tenant, float] = {}
    if not common.used:
        return found
    for group in groups:
        users: dict[int, set[Tenant]] = {}
        for holding in group.holdings.values():
            for block in {block for row in holding.rows for block in row.blocks if block > 0}:
                if group.pool.payer(block) is common:
                    users.setdefault(block, set()).add(holding.tenant)
        for tenants in users.values():
            for tenant in tenants:
                found[tenant] = found.get(tenant, 0) + group.block_bytes / len(tenants)
    return found
