"""Shared prefixes: rows whose tokens are known point to the blocks that hold these tokens already.

After a step succeeded, `settle` names the blocks that it filled, and lets its rows share those that exist under these
names. Before a prompt is computed, `lend` makes a view of what of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .group import CacheGroup
from .manager import Manager
from .names import BlockName, RowNames
from .policy import SYSTEM, Policy
from .pool import OverQuota
from .search import Search, Tokens
from .table import Row, register
from .tenants import Tenant
from .view import View

__all__ = ["Lent", "lend", "settle"]


class Lent(NamedTuple):
    """Views, one of each group, of the first `length` tokens of a batch's rows."""

    views: Sequence[View]
    length: int

    def used(self, manager: Manager) -> None:
        """Count the tokens as found: what goes on from them was right to."""
        with manager.locked():
            manager.counters.prefix_hits += self.length * len(self.views[0].rows)


def settle(manager: Manager, view: View, names: Sequence[RowNames | None], policy: Policy) -> None:
    """A step succeeded: its rows are known by `names` (None: not known).

    Blocks that it filled, and that exist under their names, in the scopes of `policy` or in another row of the view,
    are replaced by those; the others are entered. Obligation: nobody else has the view yet, unless it is static, and
    this thread's steps do not use it.
    """
    group = view.group
    size = group.block_size
    here: dict[bytes, int] = {}
    private = True
    replaced = False
    with manager.locked():
        index = group.pool.index
        group.pool.account = view.tenant
        for row, known in zip(view.rows, names):
            if known is None:
                continue
            first = len(row.names.digests) if row.names is not None and policy.own != SYSTEM else 0
            if policy.shares:
                row.names = known
            for at in range(max(first, row.skipped), len(known.digests)):
                j = at - row.skipped
                own, digest = row.blocks[j], known.digests[at]
                if own < 0:  # swapped out since the step ended
                    continue
                block = here.setdefault(digest, own)
                found = index.find(policy.scopes, digest)
                if found is not None and found != own:
                    block = found
                if block == own:
                    if policy.own is not None and own not in index:
                        parent = known.digests[at - 1] if at else known.root
                        index.add(own, BlockName(policy.own, digest, parent, known.keys[at], policy.priority))
                elif _may_replace(view, row, j) and _replace(manager, group, row, j, block, policy):
                    replaced = True
                    private &= _private(row, j * size)
                if policy.own == SYSTEM and row.blocks[j] in index:
                    index.widen(row.blocks[j], SYSTEM, policy.priority)
        if replaced:
            view.schedule = None
        if not private:
            group.epoch += 1  # other views' tables are stale


def _may_replace(view: View, row: Row, j: int) -> bool:
    """Whether no running step reads block `j` of a row of a view that was filled."""
    alone = not view.static and _private(row, j * view.group.block_size)
    return alone or row.blocks[j] not in view.group.pinned_blocks()


def _private(row: Row, first: int) -> bool:
    """Whether only the newest view of a row sees tokens from `first` on."""
    return row.live[row.length] == 1 and all(seen <= first or seen == row.length for seen in row.live)


def _replace(manager: Manager, group: CacheGroup, row: Row, j: int, block: int, policy: Policy) -> bool:
    pool = group.pool
    if block in pool.index:
        try:
            pool.share(block, manager.tenants.common)
        except OverQuota:
            return False
        pool.index.raise_priority(block, policy.priority)
    else:  # of another row of this view
        pool.retain(block)
    own = row.blocks[j]
    before = list(row.blocks) if group.sanitizer is not None else []
    row.blocks[j] = block
    if group.sanitizer is not None:
        group.sanitizer.renamed(row, before, {own: block})
    pool.release(own)
    return True


def lend(
    manager: Manager,
    groups: Sequence[CacheGroup],
    roots: Sequence[bytes],
    kept: Sequence[int | None],
    prompts: Sequence[Tokens],
    longest: int,
    policy: Policy,
    label: str,
    buffer: int | None = None,
) -> Lent | None:
    """Views of the tokens that all `prompts`, the rows of a batch, find in the index: as many from the first on as
    every row does, but at most `longest`. None if that is none.

    roots: of the groups. kept: how many of the last tokens each group's view shows at most; None for all. buffer: the
    views are static, of that many positions.
    """
    tenant = manager.tenants.current()
    with manager.locked():
        searches = [
            [Search(group.pool.index, policy.scopes, root, prompt, group.block_size, most) for prompt in prompts]
            for group, root, most in zip(groups, roots, kept)
        ]
        length = _common_length(searches, kept, longest)
        manager.counters.prefix_queries += sum(min(len(prompt.ids), longest) for prompt in prompts)
        if length <= 0:
            return None
        views: list[View] = []
        for group, found, most in zip(groups, searches, kept):
            rows = _make_rows(manager, group, found, length, tenant, policy)
            if rows is None:
                return None  # the views made so far die here
            for row in rows:
                register(row, row.length)
            visible = buffer or (length if most is None else min(length, most))
            lengths = tuple(row.length for row in rows)
            views.append(View(group, tuple(rows), lengths, label, visible, tenant, static=buffer is not None))
        return Lent(views, length)


def _common_length(searches: Sequence[Sequence[Search]], kept: Sequence[int | None], longest: int) -> int:
    """How many tokens, at most `longest`, all of `searches` find."""
    order = sorted(range(len(searches)), key=lambda g: kept[g] is not None)  # those that look from the front come first
    length, before = longest, -1
    while length != before:
        before = length
        for g in order:
            for search in searches[g]:
                length = search.longest(length)
    return length


def _make_rows(
    manager: Manager, group: CacheGroup, found: Sequence[Search], length: int, tenant: Tenant, policy: Policy
) -> list[Row] | None:
    """Rows that end with token `length` of the found prompts; None if the tenant's quota does not suffice."""
    pool, size = group.pool, group.block_size
    pool.account = tenant
    rows: list[Row] = []
    try:
        for each in found:
            skipped, blocks = each.blocks(length)
            row = Row([], length - skipped * size, skipped=skipped)
            rows.append(row)
            for block in blocks:
                pool.share(block, manager.tenants.common)
                pool.index.raise_priority(block, policy.priority)
                row.blocks.append(block)
            row.names = each.names(length)
    except OverQuota:
        for row in rows:
            for block in reversed(row.blocks):
                pool.release(block)
        return None
    return rows
