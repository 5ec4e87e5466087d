"""Mixtures of experts: pairs of a token and one of its experts, sorted by expert, multiplied in groups, and put back
(see `flow`). Sorting mixes positions, but each pair is computed by itself, and gets its own place again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from .flow import BATCH, TOKENS, Flow, Flows, NotShared, digest, dim_index, handles, made_name
from .tensors import is_tensor

__all__ = ["picked", "put_back"]

_FIRST_LABEL = 0xE000  # labels of pairs are characters of private use: sorted ones, and those put back


@dataclass(frozen=True)
class _Order:
    """Where sorted pairs come from. chosen: the sorted experts, [tokens, slots]. label: of the dimension of pairs."""

    chosen: Node
    slots: int
    label: str

    @property
    def restored(self) -> str:
        """The label of the pairs' dimension when they are in their places again."""
        return chr(ord(self.label) + 1)


def _row_label(flows: Flows) -> str:
    """The label of a dimension of all tokens of all rows."""
    return BATCH * (flows.num_rows != 1) + TOKENS * (flows.num_tokens != 1)


def _of_tokens(flows: Flows, x: Node) -> Flow:
    """The flow of a tensor of one entry a token."""
    flow = flows.resolved(flows.of(x))
    if flow.labels[0] != _row_label(flows) or any(flow.labels[1:]):
        raise NotShared(f"{x.name} is not one entry a token")
    return flow


def _pairs(x: Node) -> Node:
    """The [tokens, slots] tensor that a flat one was."""
    if made_name(x) in ("reshape", "view", "flatten") and is_tensor(x.args[0]):
        before = x.args[0]
        if len(before.meta["example_value"].shape) == 2 and len(x.meta["example_value"].shape) == 1:
            return before
    raise NotShared(f"{x.name} is not one entry for each pair of a token and an expert")


@handles("topk")
def _topk(flows: Flows, node: Node, x: Node, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> tuple[Flow, ...]:
    flow = flows.resolved(flows.of(x))
    dim = dim_index(kwargs.pop("dim", dim), len(flow.labels))
    if flow.labels[dim]:
        raise NotShared(f"{node.name} joins all positions, or all rows")
    facts = [flows.scalar(k), dim - len(flow.labels), *map(flows.scalar, args), *sorted(kwargs.items())]
    return tuple(
        Flow(flow.labels, digest("topk", part, *facts, flow.digest), flow.varies, last=flow.last) for part in range(2)
    )


@handles("sort")
def _sort(flows: Flows, node: Node, x: Node, **kwargs: Any) -> tuple[Flow, _Order]:
    if kwargs:
        raise NotShared(f"{node.name} may mix positions")
    chosen = _pairs(x)
    flow = _of_tokens(flows, chosen)
    label = chr(
        _FIRST_LABEL + 2 * sum(isinstance(v, tuple) and isinstance(v[-1], _Order) for v in flows.values.values())
    )
    return Flow((label,), digest("expert", flow.digest), True), _Order(chosen, flows.sizes(chosen)[1], label)


def picked(flows: Flows, node: Node, x: Node, index: Node) -> Flow | None:
    """The flow of entries that are sorted by expert, or put back; None if an index is another one."""
    order = flows.values.get(index)
    if isinstance(order, _Order):
        pairs = _pairs(x)
        flow = _of_tokens(flows, pairs)
        if flows.sizes(pairs)[1] != order.slots:
            raise NotShared(f"{node.name} may mix positions")
        flows.operands[node] = [pairs, order.chosen]
        return Flow((order.label,), digest("slot", flow.digest, flows.of(order.chosen).digest), True)
    if made_name(index) in ("floordiv", "floor_divide"):
        order = flows.values.get(index.args[0])
        if isinstance(order, _Order) and index.args[1] == order.slots:
            flow = _of_tokens(flows, x)
            flows.operands[node] = [x, order.chosen]
            chosen = flows.of(order.chosen).digest
            return Flow((order.label, *flow.labels[1:]), digest("token", flow.digest, chosen), True)
    order = _inverted(flows, index)
    if order is None:
        return None
    flow = flows.of(x)
    if flow.labels[0] != order.label:
        raise NotShared(f"{node.name} may mix positions")
    flows.operands[node] = [x, order.chosen]
    return replace(flow, labels=(order.restored, *flow.labels[1:]))


def _inverted(flows: Flows, index: Node) -> _Order | None:
    """The order that an index undoes: `index[order] = arange(...)`, or a sort of it."""
    order = flows.values.get(index.args[0]) if index.args and isinstance(index.args[0], Node) else None
    if not isinstance(order, _Order):
        return None
    if made_name(index) == "argsort" and len(index.args) == 1 and not index.kwargs:
        return order
    writes = [user for user in index.users if made_name(user) == "setitem"]
    others = [user for user in index.users if user not in writes]
    if made_name(index) != "empty_like" or len(writes) != 1 or any(made_name(user) != "getitem" for user in others):
        return None
    _, where, places = writes[0].args
    if where is not index.args[0] or not isinstance(places, Node) or flows.sizes(places) != flows.sizes(index):
        return None
    counted = made_name(places) == "arange" and len(places.args) == 1 and places.kwargs.keys() <= {"device", "dtype"}
    return order if counted and all(writes[0] < user for user in others) else None


def put_back(flows: Flows, flow: Flow, before: Sequence[int], after: Sequence[int]) -> Flow | None:
    """The flow of pairs in their places that are viewed as [tokens, slots, ...]; None if `flow` is not of such."""
    orders = (v[-1] for v in flows.values.values() if isinstance(v, tuple) and isinstance(v[-1], _Order))
    order = next((order for order in orders if flow.labels[:1] == (order.restored,)), None)
    if order is None:
        return None
    tokens = flows.num_rows * flows.num_tokens
    if tuple(after) != (tokens, order.slots, *before[1:]):
        raise NotShared("pairs of tokens and experts are laid out in another way")
    return replace(flow, labels=(_row_label(flows), "", *flow.labels[1:]))


@handles("grouped_mm_fallback", "grouped_mm", "_grouped_mm")
def _grouped(flows: Flows, node: Node, x: Node, weight: Node, offs: Node) -> Flow:
    flow, weights = flows.resolved(flows.of(x)), flows.resolved(flows.of(weight))
    experts = flows.sizes(weight)[0]
    if weights.varies or any(weights.labels) or any(flow.labels[1:]) or _groups(flows, offs, experts) != flow.labels[0]:
        raise NotShared(f"{node.name} may mix positions")
    return flows.made(node, "grouped_mm", [flow, weights], flow.labels)


def _groups(flows: Flows, offs: Node, experts: int) -> str:
    """The label of the sorted pairs whose groups end at `offs`: the running sum of how many pairs each expert has."""
    if made_name(offs) != "cumsum" or dict(offs.kwargs).get("dim", offs.args[-1]) not in (0, -1):
        return ""
    counts = offs.args[0]
    facts = {"bins": experts, "min": 0, "max": experts - 1}
    if not isinstance(counts, Node) or made_name(counts) != "histc" or dict(counts.kwargs) != facts:
        return ""
    ids = counts.args[0]
    while isinstance(ids, Node) and made_name(ids) in ("float", "int", "to"):
        ids = ids.args[0]
    if not isinstance(ids, Node) or made_name(ids) != "getitem" or ids.args[1] != 0:
        return ""
    found = flows.values.get(ids.args[0])  # type: ignore[call-overload]
    return found[1].label if isinstance(found, tuple) and isinstance(found[-1], _Order) else ""
