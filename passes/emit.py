"""Insertion of calls into a graph, with the metadata that other passes read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .symbols import size_node
from .tensors import is_tensor

__all__ = ["Emitter"]


class Emitter:
    """Inserts calls before a node; each new node knows its value's shape and dtype, and no guard is added.

    known: calls inserted before, which are not repeated. inserted: the new nodes, in order.
    """

    def __init__(self, graph: Graph, before: Node, known: dict[str, Node] | None = None) -> None:
        self._graph, self._before = graph, before
        self._known = {} if known is None else known
        self.inserted: list[Node] = []

    def __call__(self, function: Callable[..., Tensor], *args: object, **kwargs: object) -> Node:
        return self._insert("call_function", function, function, args, kwargs)

    def method(self, name: str, *args: object, **kwargs: object) -> Node:
        """A call of a tensor's method."""
        return self._insert("call_method", name, getattr(Tensor, name), args, kwargs)

    def _insert(self, op: str, target: Any, function: Callable[..., Tensor], args: Any, kwargs: Any) -> Node:
        key = f"{target} {args} {kwargs}"
        node = self._known.get(key)
        if node is None or node._erased:
            with self._graph.inserting_before(self._before):
                node = self._known[key] = self._graph.create_node(op, target, args, kwargs)
            node.meta["example_value"] = self.example(function, *args, **kwargs)
            self.inserted.append(node)
        return node

    def example(self, function: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        """What a call gives for the example values of its arguments."""
        mode = next(a for a in self._before.all_input_nodes if is_tensor(a)).meta["example_value"].fake_mode
        given: Any = (args, kwargs)
        values = torch.fx.map_arg(given, lambda node: node.meta["example_value"])
        with mode, mode.shape_env.suppress_guards():
            return function(*values[0], **values[1])

    def size(self, size: int | torch.SymInt) -> int | Node:
        """A size; raises `UnknownSize` if it cannot be computed from the graph's inputs."""
        key = f"size {size}"
        if key not in self._known:
            with self._graph.inserting_before(self._before):
                node = size_node(self._graph, size)
            if not isinstance(node, Node):
                return node
            self._known[key] = node
        return self._known[key]

    @staticmethod
    def device(node: Node) -> torch.device:
        """Where a node's value lives."""
        return node.meta["example_value"].device
