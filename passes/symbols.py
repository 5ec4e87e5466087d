"""Sizes in a rewritten graph: as nodes computed from the graph's inputs, and as fresh symbols for new inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, statically_known_true
from torch.utils._sympy.functions import FloorDiv, Max, Min

from .tensors import expr

__all__ = ["UnknownSize", "decided_extremes", "fake_like", "fresh_size", "size_node"]


class UnknownSize(Exception):
    """A size cannot be computed from the graph's integer inputs."""


def fresh_size(shape_env: ShapeEnv, name: str, value: int) -> SymInt:
    """A new dynamic size of a new graph input, worth `value` (at least 2) at the first call.

    Its source names no user value, so that Dynamo makes no guard of it.
    """
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return shape_env.create_symintnode(symbol, hint=value, source=source)  # type: ignore[return-value]


def size_node(graph: Graph, size: int | SymInt | sympy.Expr) -> int | Node:
    """A node (inserted at the graph's insertion point) or a constant that computes `size` from integer inputs.

    Raises `UnknownSize` if a symbol of it is not an integer input of the graph, or it is not made of sums, products,
    quotients, minima and maxima.
    """
    inputs: dict[sympy.Expr, Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, SymInt):
            inputs.setdefault(value.node.expr, node)
    return _emit(graph, expr(size) if isinstance(size, (int, SymInt)) else size, inputs)


def _emit(graph: Graph, value: sympy.Expr, inputs: dict[sympy.Expr, Node]) -> int | Node:
    if value in inputs:
        return inputs[value]
    if value.is_Integer:
        return int(value)
    function = _FUNCTIONS.get(type(value))
    if function is None:
        raise UnknownSize(f"size {value} is not an input of the graph")
    terms = [_emit(graph, term, inputs) for term in value.args]
    result = terms[0]
    for term in terms[1:]:
        result = graph.call_function(function, (result, term))
        result.meta["example_value"] = function(*(_value(arg) for arg in result.args))
    return result


_MAXIMA, _MINIMA = (sympy.Max, Max), (sympy.Min, Min)
_FUNCTIONS: dict[type, Callable[[Any, Any], Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    **dict.fromkeys(_MAXIMA, torch.sym_max),
    **dict.fromkeys(_MINIMA, torch.sym_min),
}


def _value(item: object) -> object:
    return item.meta["example_value"] if isinstance(item, Node) else item


def fake_like(
    size: tuple[int | SymInt, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    mode: FakeTensorMode,
) -> torch.Tensor:
    """A fake tensor of `mode` for a new input; strides in elements."""
    with mode:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)


def decided_extremes(graph: Graph) -> dict[sympy.Expr, sympy.Expr]:
    """The maxima and minima of two sizes, among those in the graph, of which its guards say which one they are."""
    decided: dict[sympy.Expr, sympy.Expr] = {}
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if not isinstance(value, SymInt):
            continue
        for extreme in value.node.expr.atoms(*_MAXIMA, *_MINIMA) - decided.keys():
            if len(extreme.args) != 2:
                continue
            a, b = (value.node.shape_env.create_symintnode(arg, hint=None) for arg in extreme.args)
            if statically_known_true(a >= b):
                decided[extreme] = extreme.args[0 if isinstance(extreme, _MAXIMA) else 1]
            elif statically_known_true(a <= b):
                decided[extreme] = extreme.args[1 if isinstance(extreme, _MAXIMA) else 0]
    return decided
