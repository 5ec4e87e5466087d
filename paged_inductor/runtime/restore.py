"""Rows and views that come from somewhere else, such as a file: with their shared blocks shared again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .group import CacheGroup
from .manager import Manager
from .pool import OutOfBlocks
from .table import Row, register
from .view import View

__all__ = ["SavedView", "restore"]


class SavedView(NamedTuple):
    """A view in numbers. rows: positions among the saved tables. lengths: tokens seen of each."""

    rows: Sequence[int]
    lengths: Sequence[int]
    length: int
    static: bool


def restore(
    runtime: Manager,
    group: CacheGroup,
    tables: Sequence[Sequence[int]],
    views: Sequence[SavedView],
    num_blocks: int,
    label: str,
) -> tuple[list[int], list[View]]:
    """Blocks for `num_blocks` saved ones, and the views of them. tables: of each row, positions among the saved blocks.

    Returns the blocks' ids, whose contents the caller writes, and the views, which keep them. Raises as
    `Manager.append`.
    """

    def attempt() -> list[int]:
        ids: list[int] = []
        group.pool.account = runtime.tenants.current()
        try:
            for _ in range(num_blocks):
                ids.append(group.pool.allocate())
        except OutOfBlocks:
            for block in ids:
                group.pool.release(block)
            raise
        return ids

    with runtime.locked():
        ids = runtime.allocate(group, num_blocks, attempt)
        rows = [Row([ids[i] for i in table], 0) for table in tables]
        for row in rows:
            for block in row.blocks:
                group.pool.retain(block)
        made = []
        for saved in views:
            seen = tuple(rows[i] for i in saved.rows)
            for row, length in zip(seen, saved.lengths):
                register(row, length)
                row.length = max(row.length, length)
            tenant = runtime.tenants.current()
            view = View(group, seen, tuple(saved.lengths), label, saved.length, tenant, saved.static)
            group.pin(view)
            made.append(view)
        for block in ids:
            group.pool.release(block)  # the rows own them
    return ids, made
