"""In-place writes: which rows others see, too, and copies of those rows to write to instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .pool import BlockPool, OutOfBlocks
from .table import Row, fork_row, private_blocks
from .view import View

__all__ = ["Place", "Separation", "blocks_to_separate", "separate", "separations"]

Place = tuple[View, int]
"""A batch row of a view."""


class Separation(NamedTuple):
    """A row to be copied before its tokens `first .. stop-1` are overwritten.

    places: all (view, position) pairs that are one place: they see `row`, and will see the copy. length: how many of
    the row's tokens the longest of them sees.
    """

    places: Sequence[Place]
    row: Row
    length: int
    first: int
    stop: int


def separations(
    places: Sequence[tuple[Sequence[Place], int, int]], pool: BlockPool, block_size: int
) -> list[Separation]:
    """What must be copied before `places`, each (places that are one, first token, stop), are written to. What is known
    of these tokens is forgotten."""
    found: list[Separation] = []
    others: dict[int, int] = {}
    for members, first, stop in places:
        view, position = members[0]
        row = view.rows[position]
        left = others.get(id(row), sum(row.live.values()))
        row.forget_names(first, block_size)
        touched = row.blocks[first // block_size : -(-stop // block_size)]
        if left != len(members) or any(pool.refcount(block) != 1 or block in pool.index for block in touched):
            others[id(row)] = left - len(members)
            longest = max(view.lengths[position] for view, position in members)
            found.append(Separation(members, row, longest, first, stop))
    return found


def blocks_to_separate(tasks: Sequence[Separation], block_size: int) -> int:
    """How many blocks `separate` will allocate."""
    return sum(len(private_blocks(task.length, block_size, task.first, task.stop)) for task in tasks)


def separate(tasks: Sequence[Separation], pool: BlockPool, block_size: int, copies: list[tuple[int, int]]) -> list[Row]:
    """One new row for each task, not registered; `copies` gets the block copies to execute.

    All or nothing: on `OutOfBlocks` nothing stays allocated.
    """
    own: list[Row] = []
    try:
        for task in tasks:
            own.append(fork_row(task.row, task.length, pool, block_size, copies, task.first, task.stop))
    except OutOfBlocks:
        for row in own:
            for block in row.blocks:
                pool.release(block)
        raise
    return own
