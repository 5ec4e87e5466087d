"""Sizes of a graph as functions of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import SymInt
from torch.fx import Node
from torch.utils._sympy.printers import PythonPrinter

from .passes.symbols import UnknownSize

__all__ = ["size_reader"]


def size_reader(size: int | SymInt, placeholders: Sequence[Node]) -> Callable[[Sequence[Any]], int]:
    """A function that computes `size` from the graph's arguments, given in the order of `placeholders`.

    Raises `UnknownSize` if a symbol of it appears in no argument.
    """
    if not isinstance(size, SymInt):
        return lambda args: size
    expression = size.node.expr
    names = {symbol: f"({_origin(symbol, placeholders)})" for symbol in expression.free_symbols}
    text = PythonPrinter().doprint(expression.xreplace({s: type(s)(f"__{i}__") for i, s in enumerate(names)}))
    for i, code in enumerate(names.values()):
        text = text.replace(f"__{i}__", code)
    return eval(f"lambda args: {text}", {"__builtins__": {"max": max, "min": min}})


def _origin(symbol: Any, placeholders: Sequence[Node]) -> str:
    for i, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if isinstance(value, SymInt) and value.node.expr == symbol:
            return f"args[{i}]"
    for i, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        if not isinstance(value, torch.Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, SymInt) and size.node.expr == symbol:
                return f"args[{i}].shape[{dim}]"
    raise UnknownSize(f"no argument of the graph has size {symbol}")
