"""Questions about FX nodes that several passes ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import sympy
import torch
from torch import SymInt
from torch.fx import Node

__all__ = ["argument", "expr", "hint", "is_call", "is_tensor", "same_size", "shape", "source_name"]


def is_tensor(node: object) -> TypeGuard[Node]:
    """Whether `node` is an FX node whose value is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def shape(node: Node) -> Sequence[int | SymInt]:
    """The shape of a tensor node's value."""
    return node.meta["example_value"].shape


def expr(size: int | SymInt) -> sympy.Expr:
    """A size as a sympy expression."""
    return size.node.expr if isinstance(size, SymInt) else sympy.Integer(size)


def hint(size: int | SymInt) -> int:
    """The value a size had when the graph was captured."""
    return int(size.node.hint) if isinstance(size, SymInt) else int(size)


def same_size(a: int | SymInt, b: int | SymInt) -> bool:
    """Whether two sizes are equal for certain. Adds no guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    x, y = expr(a), expr(b)
    return x == y or sympy.simplify(x - y) == 0


def source_name(node: Node) -> str:
    """Where an input of the graph comes from, as an expression of the captured function's locals; '' if unknown."""
    name = getattr(getattr(node, "_dynamo_source", None), "name", "")
    return name() if callable(name) else name


def is_call(node: object, functions: Sequence[Any], methods: Sequence[str] = ()) -> bool:
    """Whether `node` calls one of `functions`, or one of the tensor methods named in `methods`."""
    if not isinstance(node, Node):
        return False
    if node.op == "call_function":
        return any(node.target is function for function in functions)
    return node.op == "call_method" and node.target in methods


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """A call's argument, whether it was given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)
