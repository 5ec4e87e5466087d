"""New views of the tokens of old ones: crops, selections, merges, forks and appends, shared by a cache's layers.

A loop does the same thing to every layer of a cache: crop all, reorder all. Each operation must give the layers one
common new view again, or they could no longer be stepped together. So a view remembers its recent children by what
was done; the next layer that does the same receives the same child, once per layer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

from .._errors import PoolMismatchError
from ..runtime import StepViews, View, manager

__all__ = ["append_view", "crop", "fork", "merge", "select"]

_REMEMBERED = 8  # distinct children of one view that are still looked for


def _child(parent: View, site: int, key: Hashable, make: Callable[[], View], alias: bool = False) -> View:
    """The child of `parent` made by `key` that `site` has not received yet; else a new one from `make`.

    Two calls for one site are two tensors, which must not see each other's in-place writes: they get two children,
    unless they are `alias`es by PyTorch's rules, too.
    """
    children = parent.children
    if children is None:
        children = parent.children = {}
    for ref in children.get(key, ()):
        view = ref()
        if view is not None and (alias or site not in view.taken):
            view.taken.add(site)
            return view
    view = make()
    view.taken = {site}
    if alias:
        family = parent.aliases
        if family is None:
            family = parent.aliases = weakref.WeakSet((parent,))
        family.add(view)
        view.aliases = family
    alive = [ref for ref in children.pop(key, ()) if ref() is not None]
    children[key] = [*alive[-_REMEMBERED:], weakref.ref(view)]
    while len(children) > _REMEMBERED:
        del children[next(iter(children))]
    return view


def crop(view: View, site: int, length: int) -> View:
    """The first `length` logical positions of every row: a slice, so it aliases `view`."""
    pad = [view.length - seen for seen in view.lengths]

    def make() -> View:
        lengths = [max(0, length - p) for p in pad]
        return manager().derive(view, view.rows, lengths, length)

    return view if length == view.length else _child(view, site, ("crop", length), make, alias=True)


def select(view: View, site: int, rows: Sequence[int], alias: bool) -> View:
    """Rows `rows` (repeats allowed) of the batch; `alias` for slices, which see later in-place writes."""

    def make() -> View:
        picked = [view.rows[i] for i in rows]
        return manager().derive(view, picked, [view.lengths[i] for i in rows], view.length)

    return _child(view, site, ("select", *rows), make, alias)


def fork(view: View, site: int) -> View:
    """A copy (on write) of the whole."""
    return _child(view, site, "fork", lambda: manager().derive(view, view.rows, view.lengths, view.length))


def merge(views: Sequence[View], sites: Sequence[int]) -> View:
    """The rows of all `views` as one batch; shorter rows become virtually left padded.

    `sites` are the layers' positions, one per view; all must agree. Raises `PoolMismatchError` if the views belong to
    different pools.
    """
    first = views[0]
    if any(view.group is not first.group for view in views) or len(set(sites)) != 1:
        raise PoolMismatchError(
            "the caches belong to different block pools or layers, so their rows cannot become one batch: join caches "
            "of one model and one layer, or join dense copies with tensor.dense()"
        )
    rows = [row for view in views for row in view.rows]
    lengths = [seen for view in views for seen in view.lengths]
    length = max(view.length for view in views)
    key = ("merge", *((id(row), seen) for row, seen in zip(rows, lengths)))  # the child keeps the rows alive
    return _child(first, sites[0], key, lambda: manager().derive(first, rows, lengths, length))


def append_view(view: View, site: int, count: int) -> StepViews:
    """Room for `count` more tokens per row. Whoever receives it first must execute the copies."""
    copies: list[tuple[int, int]] = []

    def make() -> View:
        step = manager().append(view, count)
        copies.extend(step.copies)
        return step.view

    return StepViews(_child(view, site, ("append", count), make), copies)
