"""Slices along one dimension, in the spellings that people use."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import SymInt
from torch.fx import Node

from .tensors import argument, is_call, is_tensor, same_size, shape

__all__ = ["Slice", "cut", "one_slice"]

_WHOLE = 2**62  # from here on, a bound means the end


class Slice(NamedTuple):
    """Positions `first .. stop-1` of dimension `dim` of `source`. text: how it was written, as "-15:"."""

    source: Node
    dim: int
    first: int | SymInt
    stop: int | SymInt
    text: str


def one_slice(node: Node) -> Slice | None:
    """What a node takes of its operand, if it is a slice with step 1 of one dimension, or of none.

    Bounds are computed from the result's size, so that they hold whatever Dynamo clamped.
    """
    if not is_tensor(node) or not node.args or not is_tensor(node.args[0]):
        return None
    source: Node = node.args[0]  # type: ignore[assignment]
    if is_call(node, (torch.narrow,), ("narrow",)):
        dim, start = argument(node, 1, "dim"), argument(node, 2, "start")
        return _bounds(node, source, dim % len(shape(source)), start, start)
    part = cut(node)
    return None if part is None else _bounds(node, source, part[0], part[1].start, part[1].stop)


def cut(node: Node) -> tuple[int, slice] | None:
    """How a node is indexed, if by slices with step 1 of which one leaves something out, or none: the dimension, and
    the slice as it was written, whose bounds may be nodes. (0, `:`) for none."""
    if not is_tensor(node) or not is_call(node, (operator.getitem,)) or not is_tensor(node.args[0]):
        return None
    source: Node = node.args[0]
    index: Any = node.args[1]
    items = index if isinstance(index, tuple) else (index,)
    if any(item is not Ellipsis and not isinstance(item, slice) for item in items) or items.count(Ellipsis) > 1:
        return None
    rank = len(shape(source))
    if not rank:
        return None
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items = (*items[:at], *[slice(None)] * (rank - len(items) + 1), *items[at + 1 :])
    if any(item.step not in (None, 1) for item in items) or len(shape(node)) != rank:
        return None
    parts = [
        (dim, item)
        for dim, item in enumerate(items)
        if not _is_whole(item) and (dim in (1, 2) or not same_size(shape(source)[dim], shape(node)[dim]))
    ]
    if len(parts) > 1:
        parts = [(dim, item) for dim, item in parts if not same_size(shape(source)[dim], shape(node)[dim])]
    if len(parts) > 1:
        return None
    return parts[0] if parts else (0, slice(None))


def _is_whole(item: slice) -> bool:
    return item.start in (None, 0) and _is_end(item.stop) and item.step in (None, 1)


def _is_end(stop: object) -> bool:
    return stop is None or (isinstance(stop, int) and stop >= _WHOLE)


def _bounds(node: Node, source: Node, dim: int, start: object, stop: object) -> Slice | None:
    before, after = shape(source)[dim], shape(node)[dim]
    text = f"{'' if start is None else start}:{'' if _is_end(stop) else stop}"
    if start in (None, 0):
        return Slice(source, dim, 0, after, text)
    if _is_end(stop):
        return Slice(source, dim, before - after, before, text)
    if isinstance(start, int) and start > 0:
        return Slice(source, dim, start, start + after, text)
    return None
