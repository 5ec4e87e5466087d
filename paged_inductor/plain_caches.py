"""Caches that are plain Python structures of tensors, as hand-written models return them: ((k, v), (k, v), ...)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .runtime import View
from .tensor import PagedTensor
from .tensor.handle import Form, plain

__all__ = ["Leaf", "Results", "Structure", "returned", "structure_of"]

Leaf = tuple[int, Form] | int
"""What a leaf of a model's result is: a handle, by its group's number and its form, or another output of the graph."""


class Results(NamedTuple):
    """How a model's result is nested, and what its leaves are (None for a None)."""

    spec: TreeSpec
    leaves: Sequence[Leaf | None]


class Structure(NamedTuple):
    """How the handles of a cache are nested. leaves: the number of the group, and the form, of each."""

    spec: TreeSpec
    leaves: Sequence[tuple[int, Form]]

    def filled(self, views: Sequence[View]) -> Any:
        """A cache of handles of `views`, one of each group."""
        return tree_unflatten([PagedTensor(views[group], form) for group, form in self.leaves], self.spec)


def structure_of(value: Any, known: Sequence[tuple[int, Form]], groups: Sequence[object]) -> Structure | None:
    """The structure of a cache that a model is given; None if it is none with exactly the handles that are `known` of
    what the model returned before. groups: of these."""
    handles, spec = tree_flatten(value)
    if not handles or not all(isinstance(handle, PagedTensor) for handle in handles):
        return None
    leaves = []
    for handle in handles:
        found = [(g, form) for g, form in known if form is handle._form and groups[g] is handle._view.group]
        if len(found) != 1:
            return None
        leaves += found
    return Structure(spec, leaves) if len(set(leaves)) == len(leaves) == len(known) else None


def returned(result: Any, outputs: Sequence[Any], views: Sequence[View]) -> Results | None:
    """What a model's result is made of; None if that is anything but outputs of a graph. views: of the groups that the
    graph filled, whose handles are outputs, too."""
    values, spec = tree_flatten(result)
    leaves = tuple(_leaf(value, outputs, views) for value in values)
    if any(leaf is None and value is not None for leaf, value in zip(leaves, values)):
        return None
    return Results(spec, leaves)


def _leaf(value: Any, outputs: Sequence[Any], views: Sequence[View]) -> Leaf | None:
    if isinstance(value, PagedTensor):
        found = [g for g, view in enumerate(views) if view is value._view]
        form = value._form
        return (found[0], form) if found and form is plain(*form[:2]) else None
    if isinstance(value, Tensor):
        return next((i for i, output in enumerate(outputs) if output is value), None)
    return None
