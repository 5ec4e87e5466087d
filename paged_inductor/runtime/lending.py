"""Shared prefixes: rows whose tokens are known point to the blocks that hold these tokens already.

After a step succeeded, `settle` names the blocks that it filled, and lets its rows share those that exist under these
names. Before a prompt is computed, `lend` makes a view of what of it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .group import CacheGroup
from .manager import Manager
from .policy import SYSTEM, Policy
from .pool import OverQuota
from .prefixes import BlockName, RowNames, child_digest, encode_key
from .table import Row, register
from .tenants import Tenant
from .view import View

__all__ = ["Tokens", "lend", "settle"]


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of one row. deviations: what else is given at a token, by position among `ids`, where it is
    not the usual. hidden: those that a mask hides, by position in the row."""

    ids: Sequence[int]
    deviations: Mapping[int, bytes] = field(default_factory=dict)
    hidden: Sequence[int] = ()


def settle(manager: Manager, view: View, names: Sequence[RowNames | None], policy: Policy) -> None:
    """A step succeeded: its rows are known by `names` (None: not known).

    Blocks that it filled, and that exist under their names, in the scopes of `policy` or in another row of the view,
    are replaced by those; the others are entered. Obligation: nobody else has the view yet, and no step uses it.
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
            for j in range(first, len(known.digests)):
                own, digest = row.blocks[j], known.digests[j]
                if own < 0:  # swapped out since the step ended
                    continue
                block = here.setdefault(digest, own)
                found = index.find(policy.scopes, digest)
                if found is not None and found != own:
                    block = found
                if block == own:
                    if policy.own is not None and own not in index:
                        parent = known.digests[j - 1] if j else known.root
                        index.add(own, BlockName(policy.own, digest, parent, known.keys[j], policy.priority))
                elif _may_replace(group, row, j) and _replace(manager, group, row, j, block, policy):
                    replaced = True
                    private &= _private(row, j * size)
                if policy.own == SYSTEM and row.blocks[j] in index:
                    index.widen(row.blocks[j], SYSTEM, policy.priority)
        if replaced:
            view.schedule = None
        if not private:
            group.epoch += 1  # other views' tables are stale


def _may_replace(group: CacheGroup, row: Row, j: int) -> bool:
    """Whether no running step reads block `j` of a row."""
    return _private(row, j * group.block_size) or row.blocks[j] not in group.pinned_blocks()


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
    prompts: Sequence[Tokens],
    longest: int,
    policy: Policy,
    label: str,
) -> list[View] | None:
    """Views, one of each group, of the tokens that all `prompts`, the rows of a batch, find in the index: as many from
    the first on as every row does, but at most `longest`. None if that is none. roots: of the groups."""
    tenant = manager.tenants.current()
    with manager.locked():
        rows = [
            [_find(group, root, prompt, longest, policy) for prompt in prompts] for group, root in zip(groups, roots)
        ]
        length = min(found.length for group_rows in rows for found in group_rows)
        manager.counters.prefix_queries += sum(min(len(prompt.ids), longest) for prompt in prompts)
        if length <= 0:
            return None
        manager.counters.prefix_hits += length * len(prompts)
        views: list[View] = []
        for group, group_rows in zip(groups, rows):
            made = _make_rows(manager, group, group_rows, length, tenant, policy)
            if made is None:
                return None  # the views made so far die here
            for row in made:
                register(row, length)
            views.append(View(group, tuple(made), (length,) * len(made), label, length, tenant))
        return views


@dataclass
class _Found:
    """A prompt's blocks in the index, how many of its tokens they hold, and these tokens' names."""

    blocks: list[int]
    length: int
    names: RowNames


def _find(group: CacheGroup, root: bytes, prompt: Tokens, longest: int, policy: Policy) -> _Found:
    index, size = group.pool.index, group.block_size
    ids, deviations = prompt.ids, prompt.deviations
    blocks: list[int] = []
    digests: list[bytes] = []
    keys: list[bytes] = []
    parent = root
    for first in range(0, len(ids) - size + 1, size):
        own = {at - first: v for at, v in deviations.items() if first <= at < first + size} if deviations else {}
        key = encode_key(ids[first : first + size], own)
        digest = child_digest(parent, key)
        block = index.find(policy.scopes, digest)
        if block is None:
            break
        blocks.append(block)
        digests.append(digest)
        keys.append(key)
        parent = digest
        if len(blocks) * size >= longest:
            break
    length = len(blocks) * size
    hidden = tuple(at for at in prompt.hidden if at < length)
    names = RowNames(root, tuple(digests), tuple(keys), hidden=hidden)
    rest = ids[length : min(length + size, longest)]
    if len(rest):
        own = (
            {at - length: v for at, v in deviations.items() if length <= at < length + len(rest)} if deviations else {}
        )
        partly = index.find_partly(policy.scopes, parent, rest, own, size)
        if partly is not None:
            block, count = partly
            blocks.append(block)
            own = {at: v for at, v in own.items() if at < count}
            later = [at for at in prompt.hidden if length <= at < length + count]
            names = names.extended(rest[:count], own, later, size)
            length += count
    return _Found(blocks, min(length, longest), names)


def _make_rows(
    manager: Manager, group: CacheGroup, found: Sequence[_Found], length: int, tenant: Tenant, policy: Policy
) -> list[Row] | None:
    """Rows of `length` tokens in the found blocks; None if the tenant's quota does not suffice."""
    pool, size = group.pool, group.block_size
    pool.account = tenant
    rows: list[Row] = []
    try:
        for each in found:
            row = Row([], length)
            rows.append(row)
            for block in each.blocks[: -(-length // size)]:
                pool.share(block, manager.tenants.common)
                pool.index.raise_priority(block, policy.priority)
                row.blocks.append(block)
            row.names = each.names.first(length, size)
    except OverQuota:
        for row in rows:
            for block in reversed(row.blocks):
                pool.release(block)
        return None
    return rows
