"""A view: what a batch of cached tensors means at one moment; and what the books keep of it."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from .sanitizer import Stack
from .table import Row
from .tenants import Tenant

if TYPE_CHECKING:
    from .group import CacheGroup
    from .schedule import Schedule

__all__ = ["Holding", "Pin", "View"]


@dataclass(slots=True)
class Holding:
    """What the books know of one view: they must not depend on the moment at which its memory is reclaimed."""

    rows: tuple[Row, ...]
    lengths: tuple[int, ...]
    label: str
    tenant: Tenant
    used: int = 0  # when a step last used it: a number that grows
    stack: Stack | None = None  # where it was made, if the sanitizer was on


@dataclass(slots=True)
class Pin:
    """Why a view's blocks must stay where they are. maker: the thread that made it for a step. steps: the threads whose
    steps use it now; none if its step is to begin. sources: blocks to be copied before. since: when it was made, by
    `time.monotonic`. kept: what a static view saw before, if that is to be copied: nobody else may own it any more."""

    maker: int
    steps: list[int] = field(default_factory=list)
    sources: frozenset[int] = frozenset()
    since: float = field(default_factory=time.monotonic)
    kept: View | None = None


_serials = count()


class View:
    """What a batch of cached tensors means at one moment: `lengths[i]` tokens of `rows[i]`, for every batch row.

    All the layers of a group share one view. `length` is its logical length. A row with fewer tokens starts later
    (virtual left padding); of a row with more tokens, which a sliding window makes, the oldest are hidden. The rows'
    blocks stay allocated for as long as the view lives; the last reference to
    it gives them back. `schedule` caches the kernels' tensors for this view.

    A `static` view is a buffer of `length` positions that is written in place: all its rows have the same number of
    tokens, which sit at its front; the positions behind them were not written yet, read as zeros and take no memory. Of
    more tokens than positions (the buffer slid) the oldest are hidden.
    `zeroed` are the sites of a static view that were zeroed since they were last written.

    `tenant` is who made it: the tenant of the code that did, or of the view that it was made from.
    `aliases` are the views that in-place writes through this one must reach (itself included), and `cells` say which
    of their batch rows are one place: positions with equal cells (None: every position is a place of its own).
    `children` are the views recently derived from this one, and `taken` the sites that have received it or must not
    receive it any more (all four kept by `tensor.derive`).
    """

    __slots__ = (
        "__weakref__",
        "aliases",
        "cells",
        "children",
        "group",
        "label",
        "length",
        "lengths",
        "rows",
        "schedule",
        "serial",
        "static",
        "taken",
        "tenant",
        "zeroed",
    )

    def __init__(
        self,
        group: CacheGroup,
        rows: tuple[Row, ...],
        lengths: tuple[int, ...],
        label: str,
        length: int,
        tenant: Tenant,
        static: bool = False,
    ) -> None:
        """`rows` at `lengths` must be registered already, under the manager's lock."""
        self.serial = next(_serials)
        self.group = group
        self.rows = rows
        self.lengths = lengths
        self.length = length
        self.label = label
        self.static = static
        self.tenant = tenant
        self.zeroed: set[int] = set()
        self.schedule: Schedule | None = None
        self.aliases: weakref.WeakSet[View] | None = None
        self.cells: tuple[int, ...] | None = None
        self.children: dict[Hashable, list[weakref.ref[View]]] | None = None
        self.taken: set[int] = set()
        group.holdings[self.serial] = Holding(rows, lengths, label, self.tenant)
        if group.sanitizer is not None:
            group.sanitizer.made(self)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # else the modules that are needed may be gone
            self.group.bury(self.serial)

    @property
    def pads(self) -> list[int]:
        """Logical position of every row's first token; negative where a window hides that many tokens."""
        pads = [self.length - seen for seen in self.lengths]
        return [min(0, pad) for pad in pads] if self.static else pads

    @property
    def ragged(self) -> bool:
        """Whether some row's first token is not at position 0."""
        return any(self.pads)

    @property
    def extent(self) -> int:
        """How many positions of a static view were written, from the first on."""
        return min(self.lengths[0], self.length) if self.lengths else 0
