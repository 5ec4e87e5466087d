"""Insertion of calls into a graph, with the metadata that other passes read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .tensors import is_tensor

__all__ = ["Emitter"]


class Emitter:
    """Inserts calls before a node; each new node knows its value's shape and dtype, and no guard is added."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._before = graph, before
        self.inserted: list[Node] = []

    def __call__(self, function: Callable[..., Tensor], *args: object, **kwargs: object) -> Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(function, args, kwargs)
        node.meta["example_value"] = self.example(function, *args, **kwargs)
        self.inserted.append(node)
        return node

    def method(self, name: str, *args: object, **kwargs: object) -> Node:
        """A call of a tensor's method."""
        with self._graph.inserting_before(self._before):
            node = self._graph.call_method(name, args, kwargs)
        node.meta["example_value"] = self.example(getattr(Tensor, name), *args, **kwargs)
        self.inserted.append(node)
        return node

    def example(self, function: Callable[..., Tensor], *args: object, **kwargs: object) -> Tensor:
        """What a call gives for the example values of its arguments."""
        mode = next(a for a in self._before.all_input_nodes if is_tensor(a)).meta["example_value"].fake_mode
        given: Any = (args, kwargs)
        values = torch.fx.map_arg(given, lambda node: node.meta["example_value"])
        with mode, mode.shape_env.suppress_guards():
            return function(*values[0], **values[1])

    @staticmethod
    def device(node: Node) -> torch.device:
        """Where a node's value lives."""
        return node.meta["example_value"].device
