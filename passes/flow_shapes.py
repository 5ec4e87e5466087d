"""Operations that lay values out in another way, and those that pick or join some of the features (see `flow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from .flow import TOKENS, Flow, Flows, NotShared, digest, dim_index, handles, reshaped
from .flow_experts import picked, put_back
from .flow_ops import looked_up
from .tensors import is_tensor

__all__: list[str] = []


def _kept(flow: Flow, labels: Sequence[str]) -> Flow:
    return replace(flow, labels=tuple(labels))


def _reordered(flows: Flows, x: Node, order: Sequence[int]) -> Flow:
    """The flow of `x` with its dimensions in another order; another way to compute, if features change places."""
    flow, sizes = flows.of(x), flows.sizes(x)
    features = [dim for dim in order if sizes[dim] != 1 and not flow.labels[dim]]
    if features != sorted(features):
        kept = [sizes[dim] for dim in sorted(features)]
        places = [sorted(features).index(dim) for dim in features]
        flow = replace(flows.resolved(flow), digest=digest("reordered", kept, places, flow.digest))
    return _kept(flow, [flow.labels[dim] for dim in order])


@handles("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
def _view(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    if node.target == "view" and args and isinstance(args[0], torch.dtype):
        raise NotShared(f"{node.name} reads bits as another type")
    before, after = flows.sizes(x), flows.sizes(node)
    pairs = put_back(flows, flow, before, after)
    if pairs is not None:
        return pairs
    labels = reshaped(before, flow.labels, after, flows.num_rows, flows.num_tokens)
    return _kept(flow, labels)


@handles("transpose", "swapaxes")
def _transpose(flows: Flows, node: Node, x: Node, a: int, b: int) -> Flow:
    order = list(range(len(flows.sizes(x))))
    a, b = dim_index(a, len(order)), dim_index(b, len(order))
    order[a], order[b] = order[b], order[a]
    return _reordered(flows, x, order)


@handles("permute")
def _permute(flows: Flows, node: Node, x: Node, *dims: Any) -> Flow:
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    return _reordered(flows, x, [dim_index(dim, len(order)) for dim in order])


@handles("t")
def _t(flows: Flows, node: Node, x: Node) -> Flow:
    return _reordered(flows, x, range(len(flows.sizes(x)))[::-1])


@handles("getattr")
def _attribute(flows: Flows, node: Node, x: Node, name: str) -> Flow:
    order = list(range(len(flows.sizes(x))))
    if name == "T" and len(order) == 2:
        return _reordered(flows, x, order[::-1])
    if name == "mT":
        return _reordered(flows, x, [*order[:-2], order[-1], order[-2]])
    raise NotShared(f"{node.name} is an attribute that is not understood")


@handles("expand", "expand_as", "broadcast_to")
def _expand(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    after = flows.sizes(node)
    return _kept(flow, flows.labelled(after, [""] * (len(after) - len(flow.labels)) + list(flow.labels)))


@handles("repeat_interleave")
def _repeat(flows: Flows, node: Node, x: Node, repeats: Any, dim: int | None = None, **kwargs: Any) -> Flow:
    flow = flows.resolved(flows.of(x))
    if is_tensor(repeats) or dim is None or flow.labels[dim]:
        raise NotShared(f"{node.name} repeats tokens")
    return flows.made(
        node, "repeat_interleave", [flow], flow.labels, dim_index(dim, len(flow.labels)) - len(flow.labels)
    )


@handles("getitem")
def _getitem(flows: Flows, node: Node, x: Any, index: Any) -> Any:
    value = flows.values.get(x)
    if is_tensor(index):
        pairs = picked(flows, node, x, index)
        return looked_up(flows, node, x, flows.of(index)) if pairs is None else pairs
    if isinstance(value, NotShared):
        raise value
    if isinstance(value, tuple):
        return value[index]
    flow = flows.of(x)
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(flow.labels) - taken)
    else:
        items += [slice(None)] * (len(flow.labels) - taken)
    if (rows := _consecutive(flows, node, flow, items)) is not None:
        return looked_up(flows, node, x, rows)
    labels, facts, dim, last = [], [], 0, flow.last
    for item in items:
        if item is None:
            labels.append("")
            continue
        label, size = flow.labels[dim], flows.sizes(x)[dim]
        dim += 1
        if isinstance(item, slice) and _whole(flows, item, size):
            labels.append(label)
        elif isinstance(item, list) and not label and all(type(each) is int for each in item) and _alone(item, items):
            facts.append((dim - 1 - len(flow.labels), tuple(item)))
            labels.append("")
        elif not isinstance(item, slice | int) or isinstance(item, bool):
            raise NotShared(f"{node.name} picks some of the positions")
        elif size == 1 and (isinstance(item, int) or flows.sizes(node)[len(labels)] == 1):  # all that is there
            labels += [""] * isinstance(item, slice)
        elif label:
            last = _last(item)
            if label != TOKENS or not last or (isinstance(item, slice) and flows.sizes(node)[len(labels)] != last):
                raise NotShared(f"{node.name} picks some of the positions")
            if last > 1:  # of one, each value is what it was
                facts.append((dim - 1 - len(flow.labels), _bounds(flows, item)))
            labels += [""] * isinstance(item, slice)
        else:
            facts.append((dim - 1 - len(flow.labels), _bounds(flows, item)))
            labels += [""] * isinstance(item, slice)
    if last:
        flow = replace(flows.resolved(flow), last=last)
    if not facts:
        return _kept(flow, labels)
    return replace(flows.made(node, "getitem", [flows.resolved(flow)], labels, *facts), last=last)


def _consecutive(flows: Flows, node: Node, flow: Flow, items: Sequence[Any]) -> Flow | None:
    """The indices of the rows that a slice takes of a weight, if these are as many as the tokens of the call, from its
    first position on; None of any other index."""
    rows = items[0]
    if flow.varies or any(flow.labels) or flow.offset is not None or not isinstance(rows, slice):
        return None
    if rows == slice(None) or rows.step not in (None, 1) or any(each != slice(None) for each in items[1:]):
        return None
    first = rows.start.meta.get("example_value") if isinstance(rows.start, Node) else rows.start or 0
    size = flows.sizes(node)[0]
    if (
        size != flows.num_tokens
        or not isinstance(first, int | torch.SymInt)
        or sympy.expand(flows.expr(first)) != flows.past
    ):
        return None
    return Flow(flows.labelled((size,), (TOKENS,)), b"", offset=flows.past)


def _whole(flows: Flows, item: slice, size: int) -> bool:
    if item.step not in (None, 1) or item.start not in (None, 0):
        return False
    stop = item.stop.meta.get("example_value") if isinstance(item.stop, Node) else item.stop
    return stop is None or (isinstance(stop, int | torch.SymInt) and flows.size(stop) == size)


def _alone(item: list[int], items: Sequence[Any]) -> bool:
    """Whether no other index is one that would change where the dimension of `item` is."""
    return all(each is item or each is None or isinstance(each, slice) for each in items)


def _last(item: slice | int) -> int:
    """How many last positions an index picks; 0 if it picks others."""
    if isinstance(item, int):
        return int(item == -1)
    first = item.start
    return -first if isinstance(first, int) and first < 0 and item.stop is None and item.step in (None, 1) else 0


def _bounds(flows: Flows, item: slice | int) -> object:
    if isinstance(item, int):
        return item
    return tuple(flows.scalar(bound) for bound in (item.start, item.stop, item.step))


@handles("split", "chunk", "unbind")
def _split(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> tuple[Flow, ...]:
    flow = flows.resolved(flows.of(x))
    name = str(getattr(node.target, "__name__", node.target))
    place = args[-1:] if name == "unbind" else args[1:2]
    dim = dim_index(kwargs.get("dim", place[0] if place else 0), len(flow.labels))
    if flow.labels[dim]:
        raise NotShared(f"{node.name} picks some of the positions")
    parts = []
    for i, part in enumerate(node.meta["example_value"]):
        labels = [label for d, label in enumerate(flow.labels) if name != "unbind" or d != dim]
        sizes = tuple(map(flows.size, part.shape))
        how = digest(name, dim - len(flow.labels), i, sizes[dim] if name != "unbind" else 0, flow.digest)
        parts.append(Flow(flows.labelled(sizes, labels), how, flow.varies, last=flow.last))
    return tuple(parts)


@handles("cat", "concat", "concatenate", "stack")
def _cat(flows: Flows, node: Node, tensors: Sequence[Node], dim: int = 0, axis: int | None = None) -> Flow:
    stacks = getattr(node.target, "__name__", "") == "stack"
    parts = [part for part in tensors if flows.sizes(part) != (0,)]
    operands = [flows.resolved(flows.of(part)) for part in parts]
    if len(operands) == 1 and not stacks:
        return operands[0]
    where = dim_index(dim if axis is None else axis, len(flows.sizes(node)))
    labels = [list(flow.labels) for flow in operands]
    if stacks:
        for own in labels:
            own.insert(where, "")
    if any(own[where] for own in labels):
        raise NotShared(f"{node.name} joins tokens to others")
    if any(own != labels[0] for own in labels):
        raise NotShared(f"{node.name} joins tokens with a tensor of the call's length")
    return flows.made(node, "cat", operands, labels[0], where - len(flows.sizes(node)))
