"""Debug mode: what a freed block held is destroyed, and whoever still reads it is told who freed it.

Every block has a *generation*, which counts how often it was freed. A row's table carries the generations of its blocks
from when they were put there. Before and after every step, and whenever a table is taken, they must agree with the
pool's, and the tensor that kernels read must agree with the row. Freed blocks are filled with NaN in all arenas, as are
new ones, so that a read that goes around the tables shows, too.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .._errors import SanitizerError
from .pool import ZERO_BLOCK
from .table import Row

if TYPE_CHECKING:
    from .group import CacheGroup
    from .view import View

__all__ = ["Frame", "Sanitizer", "Stack", "shown", "stack"]

_DEEPEST = 12
_HERE = os.path.abspath(__file__)
_OTHERS = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(_HERE), torch.__file__, os.__file__))


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


Stack = tuple[Frame, ...]
"""Innermost first."""


def stack() -> Stack:
    """Where the program is now. Frames of torch, of the standard library and of this package are left out, unless there
    are no others."""
    frames: list[Frame] = []
    frame = sys._getframe(1)
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    own = [found for found in frames if not found.file.startswith((*_OTHERS, "<"))]
    return tuple((own or frames)[:_DEEPEST])


def shown(found: Stack | None) -> str:
    """A stack for people, one frame a line."""
    if not found:
        return "    (before the sanitizer was on)"
    return "\n".join(f"    {frame.file}:{frame.line} in {frame.function}" for frame in found)


class Sanitizer:
    """Watches the blocks of one group. The caller of every method holds the manager's lock."""

    def __init__(self, group: CacheGroup) -> None:
        self._group = group
        self._generations: defaultdict[int, int] = defaultdict(int)
        self._freed: dict[int, Stack] = {}
        for row in group.live_rows():
            row.stamps = None
            self.stamp((row,))
        pool = group.pool
        self.poison(b for b in range(1, pool.capacity) if not pool.refcount(b) and b not in pool.index)

    # -- blocks ----------------------------------------------------------------------------------------------

    def freed(self, block: int) -> None:
        """A block has lost its last owner."""
        if sys.is_finalizing():  # nobody reads any more, and torch cannot write
            return
        self._generations[block] += 1
        self._freed[block] = stack()
        self.poison((block,))

    def freed_twice(self, block: int) -> None:
        """Somebody gives back a block that is free. Raises `SanitizerError`, always."""
        raise SanitizerError(
            f"block {block} is released, but it is free already (generation {self._generations[block]}); it was freed "
            f"before at\n{shown(self._freed.get(block))}\nand is released again at\n{shown(stack())}"
        )

    def poison(self, blocks: Iterable[int]) -> None:
        """Destroy the contents of blocks, in all arenas."""
        index = list(blocks)
        if not index:
            return
        self._group.follow()
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            for arena in self._group.arenas:
                poison = float("nan") if arena.is_floating_point() else torch.iinfo(arena.dtype).max
                for block in index:
                    arena[block].fill_(poison)

    # -- tables ----------------------------------------------------------------------------------------------

    def stamp(self, rows: Iterable[Row]) -> None:
        """Note the generations of blocks that were put into rows since they were last stamped."""
        for row in rows:
            if row.stamps is None:
                row.stamps = []
            row.stamps += [self._generations[block] for block in row.blocks[len(row.stamps) :]]

    def renamed(self, row: Row, before: Iterable[int], renamed: Mapping[int, int]) -> None:
        """A row's blocks were `before`; those in `renamed` have moved."""
        if row.stamps is not None:
            for j, block in enumerate(before):
                if block in renamed and j < len(row.stamps):
                    row.stamps[j] = self._generations[renamed[block]]

    def check(self, view: View) -> None:
        """Prove that a view's tables are those of live blocks. Raises `SanitizerError` for the first that is not."""
        size = self._group.block_size
        for i, (row, seen) in enumerate(zip(view.rows, view.lengths)):
            blocks = row.blocks[: -(-seen // size)]
            if len(blocks) * size < seen:
                raise SanitizerError(f"row {i} of {_name(view)} has {len(blocks)} blocks for {seen} tokens")
            for j, (block, stamp) in enumerate(zip(blocks, row.stamps or ())):
                now = self._generations[block]
                if block > 0 and (stamp != now or not self._group.pool.refcount(block)):
                    raise self._stale(view, i, j, block, stamp, now)
            self._check_schedule(view, i, blocks)
        self._check_zero_page(view)

    def check_sources(self, view: View) -> None:
        """Prove that the blocks that are to be copied for a view have owners. Raises `SanitizerError`."""
        pin = self._group.pins.get(view.serial)
        for block in pin.sources if pin is not None else ():
            if block > 0 and not self._group.pool.refcount(block):
                raise SanitizerError(
                    f"block {block}, which is to be copied for {_name(view)}, is free: it was freed at\n"
                    f"{shown(self._freed.get(block))}"
                )

    def _check_schedule(self, view: View, i: int, blocks: list[int]) -> None:
        schedule = view.schedule
        if schedule is None or schedule.epoch != self._group.epoch:  # it will be made anew
            return
        for j, (block, given) in enumerate(zip(blocks, schedule.blocks(i))):
            if block != given:
                raise SanitizerError(
                    f"the kernels' table of {_name(view)} is stale: row {i} has block {block} for tokens "
                    f"{j * self._group.block_size} and after, but the table says block {given}, which was freed last "
                    f"at\n{shown(self._freed.get(given))}"
                )

    def _check_zero_page(self, view: View) -> None:
        self._group.follow()
        for site, arena in enumerate(self._group.arenas):
            if bool(arena[ZERO_BLOCK].ne(0).any()):
                raise SanitizerError(
                    f"something wrote to the zero page of site {site}, by the time of a step with {_name(view)}: a "
                    "write went to a table entry that has no block"
                )

    def _stale(self, view: View, i: int, j: int, block: int, stamp: int, now: int) -> SanitizerError:
        first = j * self._group.block_size
        return SanitizerError(
            f"stale read: row {i} of {_name(view)} has block {block} for tokens {first} and after, of generation "
            f"{stamp}, but the block's is {now}: it was freed while the row still had it. It was freed last at\n"
            f"{shown(self._freed.get(block))}\nand is read at\n{shown(stack())}"
        )

    # -- views -----------------------------------------------------------------------------------------------

    def made(self, view: View) -> None:
        """A view was made, whose rows are stamped and whose maker is remembered."""
        self.stamp(view.rows)
        self._group.holdings[view.serial].stack = stack()


def _name(view: View) -> str:
    return f"a cache of {view.label} (tenant {view.tenant.name!r}, {view.length} tokens)"
