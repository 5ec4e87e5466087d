"""What is left of masks that were proven: results that nobody reads any more, of operations that are known to have no
other effect."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph

__all__ = ["drop_masks"]

_MASK_FUNCTIONS = {
    torch.arange,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.where,
    torch.tril,
    torch.triu,
    torch.logical_and,
    torch.logical_or,
    torch.logical_not,
    torch.sym_sum,
    operator.getitem,
    *(getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert")),
    *(operator.add, operator.sub, operator.mul, torch.add, torch.sub, torch.mul),
}
_MASK_METHODS = {
    *("unsqueeze", "expand", "view", "reshape", "to", "bool", "masked_fill", "logical_not", "size", "float"),
    *("lt", "le", "gt", "ge", "eq", "ne", "tril", "triu", "type_as", "expand_as", "view_as", "repeat", "contiguous"),
    *("add", "sub", "mul"),
}


def drop_masks(graph: Graph) -> None:
    """Erase them."""
    for node in reversed(graph.nodes):
        functions = node.op == "call_function" and node.target in _MASK_FUNCTIONS
        methods = node.op == "call_method" and node.target in _MASK_METHODS
        if not node.users and (functions or methods) and "out" not in node.kwargs:
            graph.erase_node(node)
