"""Remove what nobody reads, as far as it is known to have no effect.

FX's own dead-code elimination must not run on a graph from Dynamo: it takes calls of in-place methods, such as
`x.mul_(2)` and `out.index_add_(...)`, for dead when their results are not used.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .heads import moves_heads
from .tensors import is_call

__all__ = ["prune"]

_QUERIES = ("numel", "size", "dim", "stride", "element_size", "is_contiguous")


def prune(graph: Graph) -> int:
    """Erase unused size queries, arithmetic on sizes, and unused operations between caches and attention; returns how many."""
    erased = 0
    for node in reversed(graph.nodes):
        if not node.users and _is_pure(node):
            graph.erase_node(node)
            erased += 1
    return erased


def _is_pure(node: Node) -> bool:
    return is_call(node, (getattr,), _QUERIES) or moves_heads(node) or _is_size_arithmetic(node)


def _is_size_arithmetic(node: Node) -> bool:
    value, module = node.meta.get("example_value"), getattr(node.target, "__module__", None)
    numbers = isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)
    return node.op == "call_function" and numbers and (module == "_operator" or node.target is torch.sym_sum)
