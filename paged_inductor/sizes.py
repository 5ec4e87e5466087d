"""Sizes of a graph as functions of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.fx import Node
from torch.utils._sympy.printers import PythonPrinter

from .passes.symbols import UnknownSize

__all__ = ["shape_check", "size_reader"]


def size_reader(size: int | SymInt | sympy.Expr, placeholders: Sequence[Node]) -> Callable[[Sequence[Any]], int]:
    """A function that computes `size` from the graph's arguments, given in the order of `placeholders`.

    Raises `UnknownSize` if a symbol of it appears in no argument.
    """
    if isinstance(size, int):
        return lambda args: size
    expression = size.node.expr if isinstance(size, SymInt) else size
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


def shape_check(shape: Sequence[int | SymInt]) -> Callable[[Sequence[int]], bool]:
    """A function that says whether a graph that was captured with an input of `shape` is one for given sizes, too: by
    what was assumed of sizes until now."""
    symbols = [size.node.expr if isinstance(size, SymInt) else size for size in shape]
    environments = [size.node.shape_env for size in shape if isinstance(size, SymInt)]
    guards = [guard.expr for guard in environments[0].guards] if environments else []
    ranges = environments[0].var_to_range if environments else {}

    def admits(sizes: Sequence[int]) -> bool:
        bound: dict[Any, int] = {}
        if len(sizes) != len(symbols):
            return False
        for symbol, size in zip(symbols, sizes):
            free = getattr(symbol, "is_Symbol", False)
            if (bound.setdefault(symbol, size) if free else symbol) != size:
                return False
            if free and not ranges[symbol].lower <= size <= ranges[symbol].upper:
                return False
        relevant = (guard for guard in guards if not guard.free_symbols.isdisjoint(bound))
        return all(guard.xreplace({s: sympy.Integer(v) for s, v in bound.items()}) == True for guard in relevant)  # noqa: E712

    return admits
