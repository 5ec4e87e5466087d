"""The part of a graph that one of its nodes is computed by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Graph, GraphModule, Node

__all__ = ["ancestors", "extracted"]


def ancestors(node: Node, follow: Callable[[Node], bool] = lambda node: True) -> list[Node]:
    """A node and all that it is computed from, in the order of their graph; without what `follow` denies, and what is
    found only behind that."""
    found: set[Node] = set()
    pending = [node]
    while pending:
        item = pending.pop()
        if item not in found and follow(item):
            found.add(item)
            pending += item.all_input_nodes
    return sorted(found)


def extracted(root: GraphModule, nodes: Sequence[Node], result: Node) -> GraphModule:
    """A function of the placeholders among `nodes`, in their order, that computes `result`. nodes: its `ancestors` in
    the graph of `root`."""
    part, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(copies[result])
    return GraphModule(root, part)
