"""The mask's subgraph as symbolic tensors: functions from index expressions to values.

Nothing is computed ahead: a SymTensor is a shape, a dtype and `at`, which maps one sympy index per dimension
to the Value found there. Handlers (mask_ops, mask_index) build `at` of a node from that of its operands.
Shapes and dtypes always come from the fake tensors that Dynamo recorded, so a handler cannot invent them. A
node that no handler understands is an opaque tensor: at every index an Unknown that may vary with the symbols
of that index.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .mask_logic import FALSE, TRUE, Leaf, Unknown, leq, refute
from .mask_values import Cases, NotUnderstood, Sizes, Value, as_cases, as_pred, cast, constant

# One element of the mask. Dummies, so that no symbol of the program can be mistaken for them.
B, H, Q, K = (sympy.Dummy(n, integer=True, nonnegative=True) for n in "bhqk")
INDICES = frozenset((B, H, Q, K))

Index = tuple[sympy.Expr, ...]
At = Callable[[Index], Value]
Handler = Callable[..., At]

FUNCTIONS: dict[Any, Handler] = {}
METHODS: dict[str, Handler] = {}
# Arguments whose effect is already in the recorded fake tensor, or that have none on values.
_NEUTRAL = {
    "device",
    "dtype",
    "layout",
    "pin_memory",
    "requires_grad",
    "memory_format",
    "non_blocking",
    "copy",
}


def handles(functions: tuple[Any, ...] = (), methods: tuple[str, ...] = ()) -> Callable[[Handler], Handler]:
    """Decorator: registers handler(program, out, *args, **kwargs) for torch functions and tensor methods."""

    def register(handler: Handler) -> Handler:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        METHODS.update(dict.fromkeys(methods, handler))
        return handler

    return register


@dataclass
class SymTensor:
    """`at` needs one index per dimension, each within the dimension's size wherever its value is used."""

    name: str
    shape: tuple[sympy.Expr, ...]
    dtype: torch.dtype
    at: At
    scalar: bool = False  # a Python number: it does not take part in dtype promotion the way tensors do

    def cases(self, index: Index, dtype: torch.dtype, sizes: Sizes) -> Cases:
        """The numbers at index, converted to dtype."""
        value = self.at(index)
        if dtype == torch.bool:
            return as_cases(as_pred(value))
        cases = as_cases(value)
        return cases if dtype == self.dtype else tuple((g, cast(n, dtype, sizes)) for g, n in cases)


def same(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Equal for certain."""
    return bool(a == b or sympy.expand(a - b) == 0)


def broadcast(index: Index, to: tuple[sympy.Expr, ...], x: SymTensor) -> Index:
    """The index into x that an index into a tensor of shape `to`, which x broadcasts to, reads."""
    if len(x.shape) > len(to):
        raise NotUnderstood(f"{x.name} has more dimensions than its result")
    lead = len(to) - len(x.shape)
    out = []
    for i, size in enumerate(x.shape):
        if size == 1:
            out.append(sympy.S.Zero)
        elif same(size, to[lead + i]):
            out.append(index[lead + i])
        else:
            raise NotUnderstood(f"{x.name} broadcast from {size} to {to[lead + i]}")
    return tuple(out)


@dataclass
class Program:
    """Interprets nodes of one graph. `equal` maps symbols to what they are known to equal; `sizes` bounds the index
    symbols; `known` says what some nodes hold; `visited` collects the nodes whose values were used; `least` the least
    values of symbols that were met, by the graph's guards."""

    equal: Mapping[sympy.Symbol, sympy.Expr]
    known: Mapping[Node, At] = field(default_factory=dict)
    sizes: Mapping[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    visited: dict[Node, SymTensor] = field(default_factory=dict)
    least: dict[sympy.Symbol, int] = field(default_factory=dict)

    @property
    def domain(self) -> list[sympy.Expr]:
        """What `sizes` and `least` say, each bound as an expression that is <= 0."""
        bounds = [symbol + 1 - size for symbol, size in self.sizes.items()]
        return bounds + [bound - symbol for symbol, bound in self.least.items()]

    def size(self, value: int | torch.SymInt) -> sympy.Expr:
        """A size as an expression, in which equal symbols are one."""
        expr = value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)
        if isinstance(value, torch.SymInt):
            for symbol in expr.free_symbols - self.equal.keys() - free_unbacked_symbols(expr):
                known = value.node.shape_env.var_to_range.get(symbol)
                if known is not None and known.lower.is_Integer and known.lower > 2:  # else it may be no guard's
                    self.least[symbol] = int(known.lower)
        return sympy.expand(expr.xreplace(dict(self.equal)))

    def nonnegative(self, expr: sympy.Expr) -> bool:
        """Whether `expr` is proven to be >= 0 for all indices in range."""
        return refute([leq(expr + 1)], self.domain)

    def number(self, arg: object) -> sympy.Expr | float | bool:
        """A Python or symbolic scalar argument; data-dependent ones are not understood."""
        if isinstance(arg, Node):
            arg = arg.meta.get("example_value")
        if isinstance(arg, bool | float):
            return arg
        if isinstance(arg, int | torch.SymInt):
            expr = self.size(arg)
            if free_unbacked_symbols(expr):
                raise NotUnderstood(f"data-dependent number {expr}")
            return expr
        raise NotUnderstood(f"argument of type {type(arg).__name__}")

    def integer(self, arg: object) -> sympy.Expr:
        """As `number`, where only an integer will do."""
        number = self.number(arg)
        if not isinstance(number, sympy.Expr):
            raise NotUnderstood(f"{number} where an integer was expected")
        return number

    def tensor(self, arg: object) -> SymTensor:
        """A node, or a Python or symbolic scalar, as a symbolic tensor."""
        if isinstance(arg, Node) and isinstance(arg.meta.get("example_value"), torch.Tensor):
            if arg not in self.visited:
                self.visited[arg] = self._interpret(arg, arg.meta["example_value"])
            return self.visited[arg]
        number = self.number(arg)
        if isinstance(number, bool):
            return SymTensor(str(number), (), torch.bool, lambda _: TRUE if number else FALSE, scalar=True)
        if isinstance(number, float):
            # kept as it is; converted, and checked for rounding, where its use decides the dtype
            return SymTensor(str(number), (), torch.float64, lambda _: ((TRUE, constant(number)),), scalar=True)
        return SymTensor(str(number), (), torch.int64, lambda _: ((TRUE, number),), scalar=True)

    def _interpret(self, node: Node, example: torch.Tensor) -> SymTensor:
        out = SymTensor(node.name, tuple(map(self.size, example.shape)), example.dtype, lambda _: TRUE)
        if node in self.known:
            out.at = self.known[node]
            return out
        read: At | None = None
        why = _describe(node)
        handler = FUNCTIONS.get(node.target) if node.op == "call_function" else METHODS.get(str(node.target))
        if node.op in ("call_function", "call_method") and handler is not None and example.layout == torch.strided:
            kwargs = {k: v for k, v in node.kwargs.items() if k not in _NEUTRAL}
            try:
                inspect.signature(handler).bind(self, out, *node.args, **kwargs)
                read = handler(self, out, *node.args, **kwargs)
            except NotUnderstood as error:
                why = f"{error} (at {node.name})"
            except TypeError:
                why = f"the arguments of {node.name} are not understood"
        memo: dict[Index, Value] = {}

        def at(index: Index) -> Value:
            if index not in memo:
                if len(index) != len(out.shape):
                    raise NotUnderstood(f"{len(index)} indices into {node.name}")
                memo[index] = self._read(out, read, index, why)
            return memo[index]

        out.at = at
        return out

    def _read(self, out: SymTensor, read: At | None, index: Index, why: str) -> Value:
        if read is not None:
            try:
                value = read(index)
                return as_pred(value) if out.dtype == torch.bool else as_cases(value)
            except NotUnderstood as error:
                why = f"{error} (at {out.name})"
        return self.unknown(out, index, {s for i in index for s in i.free_symbols}, why)

    def unknown(self, out: SymTensor, index: Index, deps: set[sympy.Symbol], why: str) -> Value:
        """An element of out that nothing is known about, but which indices it may vary with."""
        value = Unknown((out.name, index), frozenset(deps & INDICES), why)
        return Leaf(value) if out.dtype == torch.bool else ((TRUE, value),)


def _describe(node: Node) -> str:
    if node.op == "placeholder":
        return f"graph input {node.name}"
    if node.op == "get_attr":
        return f"graph constant {node.target}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name} at {node.name}"
