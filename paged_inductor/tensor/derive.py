"""New views of the tokens of old ones: crops, selections, merges, forks and appends, shared by a cache's layers.

A loop does the same thing to every layer of a cache: crop all, reorder all. Each operation must give the layers one
common new view again, or they could no longer be stepped together. So a view remembers its recent children by what
was done; the next layer that does the same receives the same child, once per layer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import count as counter
from typing import TypeVar

from .. import ops
from .._errors import PoolMismatchError
from ..runtime import Preempted, Row, StepViews, View, manager

__all__ = [
    "allocating",
    "append_view",
    "can_merge",
    "crop",
    "expanded",
    "filled",
    "fork",
    "locked",
    "merge",
    "places",
    "select",
    "suffix",
    "written",
]

T = TypeVar("T")
_REMEMBERED = 8  # distinct children of one view that are still looked for
_cells = counter()

locked = threading.RLock()
"""Held while a view's children, aliases or cells are read or changed; taken before the manager's lock, never after."""


def _child(
    parent: View,
    site: int,
    key: Hashable,
    make: Callable[[], View],
    alias: Sequence[int] | None = None,
    rows: tuple[Row, ...] | None = None,
) -> View:
    """The child of `parent` made by `key` that `site` has not received yet; else a new one from `make`.

    Two calls for one site are two tensors, which must not see each other's in-place writes: they get two children,
    unless they are aliases by PyTorch's rules, too: `alias` are the positions of the parent's rows that an aliasing
    child shows. `rows`: what the child must still see to be the one that is looked for.
    """
    with locked:
        return _locked_child(parent, site, (key, alias is not None), make, alias, rows)


def _locked_child(
    parent: View,
    site: int,
    key: Hashable,
    make: Callable[[], View],
    alias: Sequence[int] | None,
    rows: tuple[Row, ...] | None,
) -> View:
    children = parent.children
    if children is None:
        children = parent.children = {}
    for ref in children.get(key, ()):
        view = ref()
        if view is None or (alias is None and site in view.taken) or (rows is not None and view.rows != rows):
            continue
        view.taken.add(site)
        return view
    view = make()
    view.taken = {site}
    if alias is not None:
        if parent.aliases is None or parent.cells is None:
            parent.aliases = weakref.WeakSet((parent,))
            parent.cells = tuple(next(_cells) for _ in parent.rows)
        view.cells = tuple(parent.cells[i] for i in alias)
        view.aliases = parent.aliases
        view.aliases.add(view)
    alive = [ref for ref in children.pop(key, ()) if ref() is not None]
    children[key] = [*alive[-_REMEMBERED:], weakref.ref(view)]
    while len(children) > _REMEMBERED:
        del children[next(iter(children))]
    return view


def crop(view: View, site: int, length: int) -> View:
    """The first `length` logical positions of every row: a slice, so it aliases `view`."""

    def make() -> View:
        lengths = [max(0, length - pad) for pad in view.pads]
        return manager().derive(view, view.rows, lengths, length)

    return view if length == view.length else _child(view, site, ("crop", length), make, range(len(view.rows)))


def suffix(view: View, site: int, length: int) -> View:
    """The last `length` logical positions of every row: a slice, so it aliases `view`."""
    if length == view.length:
        return view
    return _child(view, site, ("suffix", length), lambda: manager().suffix(view, length), range(len(view.rows)))


def select(view: View, site: int, rows: Sequence[int], alias: bool) -> View:
    """Rows `rows` (repeats allowed) of the batch; `alias` for slices, which see later in-place writes."""

    def make() -> View:
        picked = [view.rows[i] for i in rows]
        return manager().derive(view, picked, [view.lengths[i] for i in rows], view.length)

    return _child(view, site, ("select", *rows), make, rows if alias else None)


def fork(view: View, site: int) -> View:
    """A copy (on write) of the whole."""
    return _child(view, site, "fork", lambda: manager().derive(view, view.rows, view.lengths, view.length))


def can_merge(views: Sequence[View]) -> bool:
    """Whether rows of `views` can be padded to one length. Tokens that a window hides would come to light in front of
    a longer row's first; and static buffers must be equally long and written equally far."""
    if any(view.static for view in views):
        return len({(view.static, view.length, view.extent) for view in views}) == 1
    longest = max(view.length for view in views)
    return all(view.length == longest or max(view.lengths, default=0) <= view.length for view in views)


def merge(views: Sequence[View], sites: Sequence[int]) -> View:
    """The rows of all `views` as one batch; shorter rows become virtually left padded.

    `sites` are the layers' positions, one per view; all must agree. Raises `PoolMismatchError` if the views belong to
    different pools. Obligation: `can_merge(views)`.
    """
    first = views[0]
    if any(view.group is not first.group for view in views) or len(set(sites)) != 1:
        raise PoolMismatchError(
            "the caches belong to different block pools or layers, so their rows cannot become one batch: join caches "
            "of one model and one layer, or join dense copies with tensor.dense()"
        )
    rows = tuple(row for view in views for row in view.rows)
    lengths = [seen for view in views for seen in view.lengths]
    length = max(view.length for view in views)
    key = ("merge", *((id(row), seen) for row, seen in zip(rows, lengths)), length)
    return _child(first, sites[0], key, lambda: manager().derive(first, rows, lengths, length), rows=rows)


def append_view(view: View, site: int, count: int) -> StepViews:
    """Room for `count` more tokens per row, ready to be written: the blocks to copy are copied already."""

    def make() -> View:
        step = manager().append(view, count)
        with manager().using(step.view):
            ops.execute_copies(view.group.arenas, step.copies)
        return step.view

    return StepViews(allocating(lambda: _child(view, site, ("append", count), make)), [])


def allocating(make: Callable[[], T]) -> T:
    """`make()`, which allocates blocks while it holds `locked`. It does not wait for memory with that, which others may
    need to end their steps: it begins anew then, or the step does of which it is a part."""
    runtime = manager()
    in_step = runtime.restartable
    with runtime.preemptible():
        while True:
            try:
                with locked, runtime.impatient():
                    return make()
            except Preempted:
                if in_step:
                    raise
            runtime.wait_for_others()


def filled(view: View, site: int) -> None:
    """`site`'s newest tokens were written only now: what was derived from `view` before, and has blocks of its own
    since, lacks them. `site` must not receive it."""
    if view.children is None:
        return
    with locked:
        pending = [view]
        while pending:
            parent = pending.pop()
            shared = set(map(id, parent.rows))
            for child in [ref() for refs in (parent.children or {}).values() for ref in refs]:
                if child is None:
                    continue
                if shared.issuperset(map(id, child.rows)):
                    pending.append(child)
                else:
                    child.taken.add(site)


def written(view: View) -> None:
    """Some of `view` was overwritten in place: what was derived before shows the old values."""
    with locked:
        for member in view.aliases or (view,):
            member.children = None


def expanded(view: View) -> bool:
    """Whether several batch rows of `view` are one place."""
    return view.cells is not None and len(set(view.cells)) < len(view.cells)


def places(view: View) -> list[list[tuple[View, int]]]:
    """For every batch row of `view`, all (view, position) pairs that are the same place. The caller holds `locked`."""
    if view.aliases is None or view.cells is None:
        return [[(view, i)] for i in range(len(view.rows))]
    shown: dict[int, list[tuple[View, int]]] = {}
    for member in view.aliases:
        for i, cell in enumerate(member.cells or ()):
            shown.setdefault(cell, []).append((member, i))
    return [shown[cell] for cell in view.cells]
