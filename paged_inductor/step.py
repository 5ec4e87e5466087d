"""One call of a compiled graph, as the runtime sees it: the view it fills, and how to undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .positions import StartReader
from .runtime import CacheGroup, Schedule, StepViews, View, manager
from .tensor import derive
from .tensor.inplace import reserve

__all__ = ["Slide", "StaticWrites", "Step", "commit", "undo"]


@dataclass
class Step:
    """The view that a call reads and fills, and the block copies to execute before.

    extent: of a static view, how many positions are written after this call. before: how many were, if the view is
    older than the call. target: the view of the buffer that slides on to `view` once the call succeeded.
    """

    view: View
    copies: Sequence[tuple[int, int]] = field(default_factory=list)
    extent: int | None = None
    before: int | None = None
    target: View | None = None

    @classmethod
    def of(cls, step: StepViews) -> Step:
        """A step that makes a new view: dropping it undoes it."""
        return cls(step.view, step.copies)

    def inputs(self, schedule: Schedule) -> dict[str, Any]:
        """What a compiled graph may take of its group, but for the arenas: by the kinds of `passes.NewInput`. schedule:
        that of the view."""
        inputs: dict[str, Any] = {
            "table": schedule.block_table,
            "lens": schedule.seq_lens,
            "num_chunks": schedule.num_chunks,
            "row_chunks": schedule.row_chunks,
            "shared_prefix": schedule.shared_prefix,
        }
        if self.extent is not None:
            row_start = min(self.view.pads, default=0)  # of all rows
            if self.extent != self.view.extent:  # written before the end, as after a crop
                inputs["lens"] = torch.full_like(schedule.seq_lens, self.extent - row_start)
            inputs |= {"extent": self.extent, "written_lens": schedule.seq_lens, "written": self.view.extent}
            inputs["row_start"] = row_start
        return inputs


@dataclass(frozen=True)
class StaticWrites:
    """Writes of one step into static caches. starts: read the first position from a call's arguments, all of which must
    agree. length: reads that of the buffers. functional: the step makes new buffers. complete: it writes all sites of
    the group.
    """

    starts: list[StartReader]
    length: Callable[[Sequence[Any]], int]
    functional: bool
    complete: bool

    def start(
        self, group: CacheGroup, view: View | None, batch: int, count: int, args: Sequence[Any], label: str
    ) -> Step | None:
        """Make room for `count` tokens in `view`, or in a new one; None if the positions do not allow it."""
        first = self.first(args)
        stop = first + count
        length = self.length(args) if view is None else view.length
        if first < 0 or stop > length:
            return None
        before = None if view is None or self.functional else view.extent
        if view is None:
            view = manager().create_static(group, batch, length, label)
        elif self.functional:
            view = manager().derive(view, view.rows, view.lengths, view.length)
        reserve(view, first, stop, self.complete)
        return Step(view, extent=stop, before=before)

    def first(self, args: Sequence[Any]) -> int:
        """The first position that a call writes; -1 if it is not the same in all caches."""
        first = self.starts[0](args)
        return first if all(start(args) == first for start in self.starts[1:]) else -1

    def succeeded(self, args: Sequence[Any], first: int) -> None:
        """The call for `args`, which wrote from position `first` on, succeeded."""
        for start in self.starts:
            start.succeeded(args, first)


@dataclass(frozen=True)
class Slide:
    """Steps that push the oldest tokens out of full buffers. stop: reads from a call's arguments how many positions
    must have been written before."""

    stop: Callable[[Sequence[Any]], int]

    def start(self, view: View, count: int, args: Sequence[Any]) -> Step | None:
        """A view of `count` more tokens than `view`, which is to take its place; None if the buffer is not as full."""
        written = view.extent if view.static else view.length
        if written != self.stop(args) or len(set(view.pads)) > 1:
            return None
        step = manager().append(view, count)
        return Step(step.view, step.copies, target=view)


def commit(steps: Iterable[Step]) -> None:
    """After success: buffers slide on."""
    for step in steps:
        if step.target is not None:
            manager().take_over(step.target, step.view)
            derive.written(step.target)


def undo(steps: Iterable[Step]) -> None:
    """After a failure: positions that were to be written for the first time are unwritten again."""
    for step in steps:
        if step.before is not None and step.before < step.view.extent:
            manager().truncate(step.view, step.before)
