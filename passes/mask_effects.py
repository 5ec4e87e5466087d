"""Which values of a graph are changed in place, looking through aliases.

The mask interpreter reads every node as a value that never changes. That holds for a node when nothing in the
graph writes to it or to a tensor that may share its memory; `written` finds the first such writer. Effects
come from the operators' schemas; whatever has none is assumed to write to all tensors it gets.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from .. import ops
from .tensors import is_tensor

_INPLACE = (
    *("iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift"),
    *("isub", "itruediv", "ixor", "setitem"),
)
_INPLACE_OPERATORS = frozenset(getattr(operator, name) for name in _INPLACE)
_PLANS = (ops.plan_step, ops.plan_window, ops.plan_mask, ops.plan_static, ops.arrived)
_HOMES = (torch, torch._C._nn, F, torch.linalg, torch.special, torch.functional)


class Writers:
    """The in-place writes of a graph, found in one scan. It must not gain writes or aliases afterwards."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[object, object] = {}
        self._writers: list[tuple[Node, Node]] = []
        for node in graph.nodes:
            if node.op == "get_attr":
                self._parent[self._find(node)] = self._find(("attribute", node.target))
            aliased, changed = _effects(node)
            for other in aliased:
                self._parent[self._find(node)] = self._find(other)
            self._writers += [(node, other) for other in changed]

    def _find(self, x: object) -> object:
        while self._parent.setdefault(x, x) is not x:
            x = self._parent[x]
        return x

    def all_of(self, nodes: Iterable[Node]) -> list[Node]:
        """The nodes that may change the value of one of `nodes`, in order."""
        groups = {self._find(n) for n in nodes}
        return list(dict.fromkeys(writer for writer, target in self._writers if self._find(target) in groups))

    def aliases(self, nodes: Iterable[Node], node: Node) -> set[Node]:
        """Those of `nodes` that may share memory with `node`, itself included."""
        home = self._find(node)
        return {other for other in nodes if self._find(other) is home}

    def spoils(self, nodes: Iterable[Node], result: Node) -> Node | None:
        """A node that may change what `result` was computed from by way of `nodes`: that writes to one of them before
        another has read it, or to `result` itself."""
        members: dict[object, list[Node]] = {}
        for node in nodes:
            members.setdefault(self._find(node), []).append(node)
        computed = {node for group in members.values() for node in group}
        for writer, target in self._writers:
            group = self._find(target)
            for node in members.get(group, ()):
                if node is result or any(
                    user in computed and self._find(user) is not group and writer < user for user in node.users
                ):
                    return writer
        return None

    def of(self, nodes: Iterable[Node]) -> Node | None:
        """A node that may change the value of one of `nodes`, if there is any."""
        return next(iter(self.all_of(nodes)), None)

    def between(self, nodes: Iterable[Node], first: Node, last: Node, ignored: Set[Node]) -> Node | None:
        """As `of`, among the nodes after `first` and before `last` that are not `ignored`."""
        groups = {self._find(n) for n in nodes}
        for writer, target in self._writers:
            if self._find(target) in groups and writer not in ignored and first < writer < last:
                return writer
        return None


def written(graph: Graph, nodes: Iterable[Node]) -> Node | None:
    """A node of `graph` that may change the value of one of `nodes`, if there is any."""
    return Writers(graph).of(nodes)


def _effects(node: Node) -> tuple[list[Node], list[Node]]:
    """The inputs that the result may share memory with, and the inputs that are written to."""
    numbers = int | float | torch.SymInt
    everything = [n for n in node.all_input_nodes if not isinstance(n.meta.get("example_value"), numbers)]
    if node.op in ("placeholder", "get_attr", "output"):
        return [], []
    own = [n for n in everything if node.args and n is node.args[0]]
    if node.op == "call_method":
        name = str(node.target)
        inplace = name.endswith("_") and not name.endswith("__")
        inplace |= name == "__setitem__" or getattr(operator, name.strip("_"), None) in _INPLACE_OPERATORS
        if inplace:
            return own, own
        return _by_schema(node, name) or (own, [])
    if node.op == "call_function":
        target: Any = node.target
        if getattr(target, "__module__", None) == "_operator":
            if target in _INPLACE_OPERATORS:
                return own, own
            return (own if target is operator.getitem else []), []
        if target is getattr:
            return own, []
        if target in (torch.ops.higher_order.flex_attention, ops.attention, ops.gather):
            return [], []
        if target is ops.cache_write:
            return [], own
        if target is ops.cache_write_kv:
            return [], [node for node in node.args[:2] if isinstance(node, Node)]
        if target in _PLANS:
            return everything, []
        if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return _of_schemas(node, _schemas(target))
        name = getattr(target, "__name__", "")
        inplace = bool(node.kwargs.get("inplace")) or (_is_python(target) and any(a is True for a in node.args))
        if any(getattr(home, name, None) is target for home in _HOMES) and not inplace:
            found = _by_schema(node, name)
            if found:
                return found
    return everything, everything


def _is_python(function: object) -> bool:
    return hasattr(function, "__code__")  # nn.functional's own functions may take inplace by position


def _by_schema(node: Node, name: str) -> tuple[list[Node], list[Node]] | None:
    packet = getattr(torch.ops.aten, name, None)
    return _of_schemas(node, _schemas(packet)) if isinstance(packet, torch._ops.OpOverloadPacket) else None


@lru_cache(maxsize=1024)
def _schemas(op: Any) -> tuple[Any, ...]:
    if isinstance(op, torch._ops.OpOverload):
        return (op._schema,)
    return tuple(getattr(op, overload)._schema for overload in op.overloads())


def _of_schemas(node: Node, schemas: tuple[Any, ...]) -> tuple[list[Node], list[Node]]:
    """The union over all overloads: which one runs is not known."""
    aliased: dict[Node, None] = {}
    changed: dict[Node, None] = {}
    for schema in schemas:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None:
                continue
            by_position = i < len(node.args) and not argument.kwarg_only
            given = node.kwargs.get(argument.name, node.args[i] if by_position else None)
            if isinstance(argument.type, torch.ListType) and is_tensor(given):
                continue  # an operation on Python's lists
            for other in _nodes(given):
                aliased[other] = None
                if argument.alias_info.is_write:
                    changed[other] = None
    return list(aliased), list(changed)


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes(item)
