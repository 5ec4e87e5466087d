"""Block tables: rows of blocks, in plain Python.

A `Row` is one sequence's append-only block table. A view (`group.View`) is what a batch of cached tensors means at one
moment: for each batch row a `Row` and a number of visible tokens. Views are cheap (O(rows)); forks, crops, merges and
reorders only make new views. Tokens are written once and shared by every view that sees them.

Invariants (`check_rows` proves the first, and that every owner of a block is counted):
- a row's blocks hold exactly the tokens of the longest live view of it: `len(blocks) == ceil(length / block_size)`;
- full blocks are shared by any number of rows; a partly filled one, too, after a crop, but then nobody writes to it;
- tokens visible through a view are not overwritten by appends through another view.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from .names import RowNames
from .pool import BlockPool

__all__ = [
    "Lineage",
    "Row",
    "append_rows",
    "blocks_needed",
    "check_rows",
    "fork_row",
    "private_blocks",
    "register",
    "unregister",
]


class Lineage:
    """What a row has in common with those that were forked from it: probably one conversation.

    used: what the latest step with one of these rows used (see `ahead`). next: whose step came after that one, in the
    same thread.
    """

    __slots__ = ("__weakref__", "next", "used")

    def __init__(self) -> None:
        self.used: Any = ()
        self.next: ref[Lineage] | None = None


class Row:
    """One sequence: its physical blocks, its length in tokens, and the lengths that live views see.

    `live` maps a visible length to the number of (view, batch position) pairs that see that many tokens. `away`: some
    of the blocks may be swapped. `skipped` blocks were left out at its front: it begins behind their tokens. `names`
    are those of its first tokens (the skipped ones included), as far as they are known (see `lending`); None if nothing
    is known. `stamps` are the blocks' generations from when they were put here, as far as the sanitizer noted them;
    None without one. `lineage`: of the row that this one was forked from, or a new one. `superseded`: a window moved
    on from it, to a row that has its last tokens, too.
    """

    __slots__ = (
        "__weakref__",
        "away",
        "blocks",
        "length",
        "lineage",
        "live",
        "names",
        "skipped",
        "stamps",
        "superseded",
    )

    def __init__(
        self, blocks: list[int], length: int, away: bool = False, lineage: Lineage | None = None, skipped: int = 0
    ) -> None:
        self.blocks = blocks
        self.length = length
        self.skipped = skipped
        self.away = away
        self.lineage = lineage or Lineage()
        self.live: dict[int, int] = {}
        self.names: RowNames | None = None
        self.stamps: list[int] | None = None
        self.superseded = False

    def forget_names(self, length: int, block_size: int) -> None:
        """Tokens from `length` on are about to be written: what is known of them is not true any more."""
        self.names = self.first_names(length, block_size)

    def first_names(self, length: int, block_size: int) -> RowNames | None:
        """What is known of the first `length` tokens and those left out before them."""
        return self.names and self.names.first(self.skipped * block_size + length, block_size)


def register(row: Row, length: int) -> None:
    """Record that one more view position sees `length` tokens of `row`."""
    live = row.live
    live[length] = live.get(length, 0) + 1


def unregister(row: Row, length: int, pool: BlockPool, block_size: int) -> None:
    """Undo `register`; when the longest view of the row dies, the blocks beyond the next longest are released."""
    live = row.live
    count = live[length] - 1
    if count:
        live[length] = count
        return
    del live[length]
    if length == row.length:
        row.length = longest = max(live) if live else 0
        keep = -(-longest // block_size)
        blocks = row.blocks
        if row.stamps is not None:
            del row.stamps[keep:]
        while len(blocks) > keep:
            pool.release(blocks.pop())


def fork_row(
    row: Row,
    length: int,
    pool: BlockPool,
    block_size: int,
    copies: list[tuple[int, int]],
    first: int,
    stop: int,
    skip: int = 0,
) -> Row:
    """A new row with the first `length` tokens of `row`, of which tokens `first .. stop-1` may be written.

    Blocks with such tokens and a partly filled tail block are allocated anew and appended to `copies` as (source,
    destination), which the caller executes before anything is written; all other blocks are shared. The first `skip`
    blocks are left out: the new row begins behind them. The new row is not registered. On `OutOfBlocks` nothing stays
    allocated.
    """
    names = row.first_names(min(length, first) if first < stop else length, block_size)
    blocks = row.blocks[skip : -(-length // block_size)]
    length, first, stop = (max(0, token - skip * block_size) for token in (length, first, stop))
    fresh: dict[int, int] = {}
    try:
        for j in private_blocks(length, block_size, first, stop):
            fresh[j] = pool.allocate()
    except BaseException:
        for block in fresh.values():
            pool.release(block)
        raise
    copies.extend((blocks[j], block) for j, block in fresh.items())
    for j, block in enumerate(blocks):
        if j in fresh:
            blocks[j] = fresh[j]
        else:
            pool.retain(block)
    result = Row(blocks, length, row.away, row.lineage, row.skipped + skip)
    result.names = names
    return result


def private_blocks(length: int, block_size: int, first: int, stop: int) -> list[int]:
    """Which blocks of `length` tokens must belong to one row, if that row writes tokens `first .. stop-1`."""
    written = range(first // block_size, -(-stop // block_size)) if first < stop else range(0)
    tail = length // block_size
    return [*written] if length % block_size == 0 or tail in written else [*written, tail]


def blocks_needed(
    rows: Sequence[Row], lengths: Sequence[int], count: int, pool: BlockPool, block_size: int, skips: Sequence[int]
) -> int:
    """How many blocks `append_rows` will allocate."""
    needed = 0
    extended: set[int] = set()
    for row, old, skip in zip(rows, lengths, skips):
        needed += -(-(old + count) // block_size) - -(-old // block_size)
        if skip or id(row) in extended or _must_fork(row, old, pool, block_size):
            needed += bool(old % block_size)
        else:
            extended.add(id(row))
    return needed


def _must_fork(row: Row, length: int, pool: BlockPool, block_size: int) -> bool:
    """Whether tokens behind the first `length` of `row` are seen by others, here or in a tail block that is shared or
    has a name."""
    if row.length != length:
        return True
    return length % block_size != 0 and (pool.refcount(row.blocks[-1]) != 1 or row.blocks[-1] in pool.index)


def append_rows(
    rows: Sequence[Row],
    lengths: Sequence[int],
    count: int,
    pool: BlockPool,
    block_size: int,
    copies: list[tuple[int, int]],
    on_block: Callable[[tuple[int, int, int]], object],
    skips: Sequence[int],
) -> tuple[tuple[Row, ...], tuple[int, ...]]:
    """Make room for `count` more tokens behind `lengths[i]` tokens of `rows[i]`, and register the longer lengths.

    A row is extended in place when its view is the newest (no live view sees more) and its partly filled tail block
    has no other owner; otherwise it is forked, and only the tail block is copied. Of rows with `skips[i]`, that many
    blocks at the front are left out. `on_block((i, j, block))` is called for every table entry `j` of batch position
    `i` that differs from the old view's, unless blocks are left out. All or nothing: on `OutOfBlocks` everything is
    undone.
    """
    new_rows: list[Row] = []
    new_lengths: list[int] = []
    try:
        for i, row in enumerate(rows):
            old = lengths[i]
            if skips[i] or _must_fork(row, old, pool, block_size):
                row = fork_row(row, old, pool, block_size, copies, old, old, skips[i])
                old -= skips[i] * block_size
                if old % block_size:
                    on_block((i, old // block_size, row.blocks[-1]))
            row.forget_names(old, block_size)
            new = old + count
            blocks = row.blocks
            row.length = new
            live = row.live
            live[new] = live.get(new, 0) + 1
            new_rows.append(row)
            new_lengths.append(new)
            while len(blocks) * block_size < new:
                blocks.append(pool.allocate())
                on_block((i, len(blocks) - 1, blocks[-1]))
    except BaseException:
        for row, length in zip(new_rows, new_lengths):
            unregister(row, length, pool, block_size)
        raise
    return tuple(new_rows), tuple(new_lengths)


def check_rows(rows: Sequence[Row], pool: BlockPool, block_size: int) -> list[str]:
    """Inconsistencies between the rows that are alive and the pool, as sentences (empty when sound)."""
    faults = []
    owners: dict[int, int] = {}
    for row in rows:
        longest = max(row.live, default=0)
        if row.length != longest:
            faults.append(f"a row of {row.length} tokens is seen up to token {longest}")
        if len(row.blocks) != -(-row.length // block_size):
            faults.append(f"a row of {row.length} tokens has {len(row.blocks)} blocks of {block_size}")
        for block in row.blocks:
            owners[block] = owners.get(block, 0) + 1
    for block, count in owners.items():
        if pool.refcount(block) != count:
            faults.append(f"block {block} is in {count} row(s) but has {pool.refcount(block)} owners")
    swapped = sum(block < 0 for block in owners)
    coming = sum(len(transfer.coming) for transfer in pool.transfers)
    if len(owners) - swapped + coming != pool.num_used or swapped != pool.num_swapped:
        faults.append(
            f"{pool.num_used} blocks are used and {pool.num_swapped} swapped, but live rows hold "
            f"{len(owners) - swapped} and {swapped}, and transfers {coming}"
        )
    return faults
