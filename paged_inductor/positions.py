"""Where a step writes into static caches: read from its arguments at every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .passes import Start
from .sizes import size_reader

__all__ = ["start_reader"]


def start_reader(
    start: Start, gm: GraphModule, count: Callable[[Sequence[Any]], int]
) -> Callable[[Sequence[Any]], int]:
    """A function that computes the first position from the arguments of `gm`, the graph as captured.

    count: computes how many tokens a call writes. The function returns -1 if the positions of a call are not
    consecutive. Raises `UnknownSize` for a size that appears in no argument.
    """
    captured = gm.graph.find_nodes(op="placeholder")
    if start.node is None:
        assert start.size is not None
        return size_reader(start.size, captured)
    node = next(node for node in gm.graph.nodes if node.name == start.node.name)  # the passes work on a copy
    evaluate = _evaluator(gm, node, captured)
    if start.scalar:
        return lambda args: int(evaluate(args))

    def first(args: Sequence[Any]) -> int:
        positions = evaluate(args).tolist()
        begin = positions[0] if positions else -1
        return begin if positions == list(range(begin, begin + count(args))) else -1

    return first


def _evaluator(gm: GraphModule, node: Node, captured: Sequence[Node]) -> Callable[[Sequence[Any]], torch.Tensor]:
    """A function that computes a node of the graph from its arguments, running no more of it than that takes."""
    position = {placeholder: i for i, placeholder in enumerate(captured)}
    if node in position:
        at = position[node]
        return lambda args: args[at]
    needed: set[Node] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        if item not in needed:
            needed.add(item)
            pending += item.all_input_nodes
    part, copies = Graph(), {}
    for item in gm.graph.nodes:
        if item in needed:
            copies[item] = part.node_copy(item, lambda n: copies[n])
    part.output(copies[node])
    run = GraphModule(gm, part)
    inputs = [position[item] for item in gm.graph.nodes if item in needed and item.op == "placeholder"]
    return lambda args: run(*(args[i] for i in inputs))
