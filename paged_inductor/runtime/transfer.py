"""Transfers: copies of blocks between tiers of memory that are under way while nobody holds the books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arrival import Arrival
    from .table import Row
    from .tiers import Extent

__all__ = ["Transfer"]


@dataclass(eq=False)
class Transfer:
    """One copy.

    extents: what is read or written. rows: whose blocks must stay where they are meanwhile. leaving: blocks whose
    copies will take their places; whoever uses or frees one meanwhile takes it out. coming: new block -> the swapped
    block whose tokens it will get. thread: who copies, or whose step has it copied while it runs: by `arrival`, which
    that step ends.
    """

    extents: Sequence[Extent] = ()
    rows: Sequence[Row] = ()
    leaving: set[int] = field(default_factory=set)
    coming: dict[int, int] = field(default_factory=dict)
    thread: int = field(default_factory=get_ident)
    arrival: Arrival | None = None
