"""The spellings of writes into buffers: `index_copy_`, indexing by positions, slices, the functional `index_copy`.

Where the tokens go is kept as it was computed (`Start`), because only the caller's values say it: the runtime reads it
at every call.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Node

from .sites import Start
from .slices import one_slice
from .tensors import argument, is_call, is_tensor, same_size, shape

__all__ = ["Write", "read_write", "whole"]


class Write(NamedTuple):
    """One write of `new` to consecutive positions of dimension `dim` of `buffer`, from `start` on. positions: the
    tensor of them, if one is given. functional: it makes a tensor of its own, which `node` is."""

    node: Node
    buffer: Node
    dim: int
    new: Node
    start: Start
    positions: Node | None = None
    functional: bool = False


def read_write(node: Node) -> Write | None:
    """The write that a node is, if it is one of the spellings."""
    if is_call(node, (torch.index_copy,), ("index_copy", "index_copy_")):
        return _index_copy(node)
    if is_call(node, (operator.setitem,)):
        return _setitem(node)
    if is_call(node, (), ("copy_",)):
        return _copy(node)
    return None


def _index_copy(node: Node) -> Write | None:
    buffer = whole(node.args[0])
    dim, index, new = argument(node, 1, "dim"), argument(node, 2, "index"), argument(node, 3, "source")
    if buffer is None or not is_tensor(index) or not is_tensor(new):
        return None
    return _at_positions(node, buffer, dim % 4, index, new, functional=node.target in ("index_copy", torch.index_copy))


def _setitem(node: Node) -> Write | None:
    buffer, items, new = whole(node.args[0]), node.args[1], node.args[2]
    if buffer is None or not is_tensor(new):
        return None
    items = items if isinstance(items, tuple) else (items,)
    if any(item is None or item is Ellipsis or isinstance(item, int) for item in items):
        return None
    special = [dim for dim, item in enumerate(items) if not _is_all(item, shape(buffer)[dim])]
    if len(special) != 1:
        return None
    dim, item = special[0], items[special[0]]
    if is_tensor(item):
        return _at_positions(node, buffer, dim, item, new)
    if isinstance(item, slice) and item.step in (None, 1):
        return _at_slice(node, buffer, dim, item, new)
    return None


def _copy(node: Node) -> Write | None:
    """`buffer[:, :, a:b].copy_(new)`."""
    target, new = node.args[0], argument(node, 1, "src")
    part = one_slice(target) if is_tensor(target) else None
    if part is None or not is_tensor(new) or part.dim not in (1, 2):
        return None
    buffer = whole(part.source)
    if buffer is None or not same_size(shape(new)[part.dim], shape(target)[part.dim]):
        return None
    return Write(node, buffer, part.dim, new, Start(size=part.first))


def _is_all(item: object, size: int) -> bool:
    return isinstance(item, slice) and item.start in (None, 0) and item.stop in (None, size) and item.step in (None, 1)


def whole(node: object) -> Node | None:
    """A buffer, looking through slices that leave nothing out and conversions to what it is."""
    while is_tensor(node):
        part = one_slice(node)  # type: ignore[arg-type]
        if part is not None and all(map(same_size, shape(part.source), shape(node))):  # type: ignore[arg-type]
            node = part.source
        elif _converts_nothing(node):  # type: ignore[arg-type]
            node = node.args[0]  # type: ignore[union-attr]
        else:
            break
    return node if is_tensor(node) and len(shape(node)) == 4 else None  # type: ignore[arg-type, return-value]


def _converts_nothing(node: Node) -> bool:
    """Whether a node is its operand, by the rule that `to` makes no copy of what is as asked for."""
    if (
        not is_call(node, (), ("to", "type_as"))
        or not is_tensor(node.args[0])
        or node.kwargs.keys() - {"dtype", "device"}
    ):
        return False
    if any(isinstance(arg, bool) for arg in node.args):
        return False
    a, b = node.args[0].meta["example_value"], node.meta["example_value"]  # type: ignore[union-attr]
    return a.dtype == b.dtype and a.device == b.device


def _at_slice(node: Node, buffer: Node, dim: int, item: slice, new: Node) -> Write | None:
    """A slice that is as long as what is written to it: torch would broadcast a single token."""
    start, stop = (x.meta.get("example_value") if isinstance(x, Node) else x for x in (item.start, item.stop))
    start, stop = 0 if start is None else start, shape(buffer)[dim] if stop is None else stop
    for bound in (start, stop):
        if not isinstance(bound, (int, torch.SymInt)) or (isinstance(bound, int) and bound < 0):
            return None
    if dim not in (1, 2) or len(shape(new)) != 4 or not same_size(stop - start, shape(new)[dim]):
        return None
    return Write(node, buffer, dim, new, Start(size=start))


def _at_positions(node: Node, buffer: Node, dim: int, index: Node, new: Node, functional: bool = False) -> Write | None:
    value = index.meta["example_value"]
    if dim not in (1, 2) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    if len(shape(new)) != 4 or not same_size(value.shape[0], shape(new)[dim]):
        return None
    counter = _counter(index)
    start = Start(node=index) if counter is None else Start(node=counter, scalar=True)
    return Write(node, buffer, dim, new, start, index, functional)


def _counter(index: Node) -> Node | None:
    """c, if positions are `arange(n) + c` with a single integer c on the device."""
    if not is_call(index, (operator.add, torch.add), ("add",)) or len(index.args) != 2 or index.kwargs:
        return None
    for base, counter in (index.args, index.args[::-1]):
        if is_call(base, (torch.arange,)) and len(base.args) == 1 and is_tensor(counter):  # type: ignore[union-attr]
            value = counter.meta["example_value"]  # type: ignore[union-attr]
            if value.numel() == 1 and not value.dtype.is_floating_point:
                return counter  # type: ignore[return-value]
    return None
