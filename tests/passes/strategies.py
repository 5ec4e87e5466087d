"""Random mask programs: the same FX graph is read by the prover (symbolic sizes) and run (concrete sizes)."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

BATCH = 2
FLOAT_MIN = {d: torch.finfo(d).min for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


class Recorder:
    """Builds a graph the way Dynamo does: nodes that carry fake tensors and SymInts in meta["example_value"].

    sizes: for q_len and the number of past keys, either a number or None for a symbol.
    """

    def __init__(self, q: int | None, past: int | None) -> None:
        self.graph, self.env = Graph(), ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2, constraint_sizes=[None] * 2)
        hint = self.mode.from_tensor(torch.empty(11, 7), symbolic_context=context, source=ConstantSource("x"))
        self.symbols = dict(zip(("q", "past"), hint.shape, strict=True))
        self.free = [name for name, size in (("q", q), ("past", past)) if size is None]
        self.inputs = {name: self._placeholder(name, self.symbols[name]) for name in self.free}
        self.q: Any = self.inputs.get("q", q)
        self.past: Any = self.inputs.get("past", past)
        self.kv = self(operator.add, self.q, self.past)

    def _placeholder(self, name: str, value: object) -> Node:
        node = self.graph.placeholder(name)
        node.meta["example_value"] = value
        return node

    def padding(self, dtype: torch.dtype = torch.bool) -> Node:
        """A graph input [BATCH, kv] whose values nobody knows."""
        name = f"opaque{len(self.graph.find_nodes(op='placeholder'))}"
        with self.mode:
            return self._placeholder(name, torch.empty(BATCH, self.value(self.kv), dtype=dtype))

    def value(self, arg: Any) -> Any:
        if isinstance(arg, tuple | list):
            return type(arg)(map(self.value, arg))
        if isinstance(arg, slice):
            return slice(self.value(arg.start), self.value(arg.stop), arg.step)
        return arg.meta["example_value"] if isinstance(arg, Node) else arg

    def __call__(self, target: Callable | str, *args: Any, **kwargs: Any) -> Any:
        """A call of a function, or of the method of that name."""
        values = self.value(args)
        method = isinstance(target, str)
        if not any(isinstance(n, Node) for n in _flat(args)) and not method and target is operator.add:
            return target(*values)
        with self.mode, enable_python_dispatcher():
            result = getattr(values[0], target)(*values[1:], **kwargs) if method else target(*values, **kwargs)
        node = self.graph.create_node("call_method" if method else "call_function", target, args, kwargs)
        node.meta["example_value"] = result
        return node

    def runs(self, mask: Node, grid: list[tuple[int, int]]) -> Iterator[tuple[dict[str, int], torch.Tensor]]:
        """The mask's value for each concrete (q, past) that the graph's guards allow."""
        self.graph.output(mask)
        module = GraphModule({}, self.graph)
        guards = [g.expr for g in self.env.guards]
        for q, past in grid:
            q = q if "q" in self.free else self.q
            past = past if "past" in self.free else self.past
            sizes = {"q": q, "past": past}
            values = {self.symbols[n].node.expr: size for n, size in sizes.items()}
            if not all(bool(g.xreplace(values)) for g in guards):
                continue
            generator = torch.Generator().manual_seed(q * 31 + past)
            inputs = []
            for p in self.graph.find_nodes(op="placeholder"):
                if p.name in sizes:
                    inputs.append(sizes[p.name])
                else:
                    coin = torch.rand(BATCH, q + past, generator=generator) > 0.4
                    inputs.append(coin.to(p.meta["example_value"].dtype))
            yield sizes, Interpreter(module).run(*inputs)


def _flat(args: Any) -> Iterator[Any]:
    for a in args:
        yield from _flat(a) if isinstance(a, tuple | list) else (a,)


@dataclass(frozen=True)
class Sizes:
    q: int | None
    past: int | None


sizes = st.builds(Sizes, st.sampled_from([None, 1, 4]), st.sampled_from([None, 0, 3]))


# --- spellings of known masks ----------------------------------------------------------------------


def rows_columns(rec: Recorder, shape: str, shift: Any) -> tuple[Node, Node]:
    """Query positions (shifted) and key positions, broadcastable against each other."""
    i = rec(operator.add, rec(torch.arange, rec.q), shift)
    j = rec(torch.arange, rec.kv)
    if shape == "none":
        return rec(operator.getitem, i, (None, None, slice(None), None)), rec(
            operator.getitem, j, (None, None, None, slice(None))
        )
    if shape == "view":
        return rec("view", i, -1, 1), rec("view", j, 1, -1)
    return rec(torch.unsqueeze, i, 1), rec("unsqueeze", j, 0)


SHAPES = ["none", "view", "unsqueeze"]


def below(rec: Recorder, how: str, shape: str, bound: Any) -> Node:
    """key <= query + bound, spelled in one of several ways."""
    if how in ("tril", "triu"):
        ones = rec(torch.ones, (rec.q, rec.kv), dtype=torch.bool)
        if how == "tril":
            return rec("tril", ones, bound)
        return rec(operator.invert, rec(torch.triu, ones, rec(operator.add, bound, 1)))
    i, j = rows_columns(rec, shape, bound)
    if how == "ge":
        return rec(operator.ge, i, j)
    if how == "not gt":
        return rec(torch.logical_not, rec("gt", j, i))
    if how == "lt":
        return rec(torch.lt, j, rec(operator.add, i, 1))
    if how == "difference":
        return rec(operator.ge, rec(operator.sub, i, j), 0)
    if how == "min":
        return rec(operator.eq, rec(torch.minimum, i, j), j)
    return rec(operator.le, j, i)


BELOW = ["tril", "triu", "ge", "not gt", "lt", "difference", "min", "le"]


def dressed(rec: Recorder, how: str, m: Node, dtype: torch.dtype) -> Node:
    """The boolean mask m in a form that SDPA takes."""
    low = FLOAT_MIN[dtype] if how.endswith("min") else -math.inf
    if how.startswith("where"):
        return rec(torch.where, m, rec(torch.zeros, (), dtype=dtype), low)
    if how.startswith("fill"):
        zeros = rec(torch.zeros_like, m, dtype=dtype)
        return rec("masked_fill", zeros, rec(operator.invert, m), low)
    if how == "times min":
        return rec(operator.mul, rec(operator.sub, 1.0, rec("to", m, dtype)), low)
    if how == "expand":
        return rec("expand", m, BATCH, 1, rec.q, rec.kv)
    if how == "and true":
        return rec(operator.and_, rec("new_ones", m, ()), m)
    return rec("to", rec("long", m), torch.bool) if how == "convert" else m


DRESSED = ["where", "where min", "fill", "fill min", "times min", "expand", "and true", "convert", "bool"]


# --- wild programs ---------------------------------------------------------------------------------


@st.composite
def integers(draw: st.DrawFn, rec: Recorder, depth: int = 2) -> Node:
    """An integer tensor that broadcasts to [q, kv]."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        shift = draw(st.sampled_from([0, 1, -2, rec.past, rec.q]))
        return rows_columns(rec, draw(st.sampled_from(["view", "unsqueeze"])), shift)[draw(st.integers(0, 1))]
    x = draw(integers(rec, depth - 1))
    op = draw(st.sampled_from(["add", "sub", "mul", "//", "%", "neg", "abs", "pair", "max", "int32"]))
    if op == "pair":
        return rec(draw(st.sampled_from([operator.add, operator.sub])), x, draw(integers(rec, depth - 1)))
    if op in ("neg", "abs"):
        return rec(torch.neg if op == "neg" else torch.abs, x)
    if op == "max":
        return rec(torch.maximum, x, draw(integers(rec, depth - 1)))
    if op == "int32":
        return rec("int", x)
    fn = {"//": operator.floordiv, "%": torch.remainder}.get(op) or getattr(operator, op)
    return rec(fn, x, draw(st.sampled_from([1, 2, 3, 8])))


@st.composite
def booleans(draw: st.DrawFn, rec: Recorder, depth: int = 3) -> Node:
    """A boolean tensor that broadcasts to [q, kv] (or, with padding, to [BATCH, 1, q, kv])."""
    kind = draw(st.sampled_from(["compare", "below", "logic", "logic", "not", "move", "where", "opaque"]))
    if depth == 0 or kind == "compare":
        op = draw(st.sampled_from(["lt", "le", "gt", "ge", "eq", "ne"]))
        other = draw(st.one_of(integers(rec), st.integers(-2, 4)))
        return rec(getattr(operator, op), draw(integers(rec)), other)
    if kind == "below":
        bound = draw(st.sampled_from([0, 1, -1, 2, rec.past]))
        return below(rec, draw(st.sampled_from(BELOW)), draw(st.sampled_from(["view", "unsqueeze"])), bound)
    if kind == "logic":
        op = draw(st.sampled_from([operator.and_, operator.or_, torch.logical_xor, torch.logical_and]))
        return rec(op, draw(booleans(rec, depth - 1)), draw(booleans(rec, depth - 1)))
    if kind == "not":
        return rec(operator.invert, draw(booleans(rec, depth - 1)))
    if kind == "where":
        return rec(torch.where, *(draw(booleans(rec, depth - 1)) for _ in range(3)))
    if kind == "opaque":
        dtype = draw(st.sampled_from([torch.bool, torch.int64]))
        return rec("to", rec(operator.getitem, rec.padding(dtype), (slice(None), None, None)), torch.bool)
    return draw(moved(rec, draw(booleans(rec, depth - 1))))


@st.composite
def moved(draw: st.DrawFn, rec: Recorder, m: Node) -> Node:
    """m [.., q, kv] after slicing, padding, joining, transposing twice or being looked up."""
    m = rec("expand", m, BATCH, 1, rec.q, rec.kv)
    how = draw(st.sampled_from(["slice", "negative", "pad", "cat", "transpose", "lookup", "adjacent", "narrow"]))
    everything = slice(None)
    if how == "slice":
        wide = rec(torch.nn.functional.pad, m, (1, 2), value=draw(st.booleans()))
        start = draw(st.integers(0, 2))
        return rec(operator.getitem, wide, (Ellipsis, slice(start, rec(operator.add, rec.kv, start))))
    if how == "negative":
        wide = rec(torch.cat, [m, m], -2)
        return rec(
            operator.getitem,
            rec(torch.ones_like, wide) if draw(st.booleans()) else wide,
            (everything, everything, slice(None, rec.q)),
        )
    if how == "pad":
        part = rec("narrow", m, -1, 0, rec.q)
        return rec(torch._C._nn.pad, part, (rec.past, 0), "constant", draw(st.booleans()))
    if how == "cat":
        head = rec(torch.full, (BATCH, 1, rec.q, rec.past), draw(st.booleans()))
        return rec(torch.cat, (head, rec(operator.getitem, m, (Ellipsis, slice(0, rec.q)))), dim=-1)
    if how == "transpose":
        return rec("permute", rec("transpose", m, 2, 3), 0, 1, 3, 2)
    at = rec(torch.arange, rec.q)
    if how == "lookup":
        return rec(operator.getitem, m, (everything, everything, at))
    if how == "adjacent":
        b = rec("view", rec(torch.arange, BATCH), -1, 1)
        joined = rec(operator.getitem, m, (b, 0, rec("unsqueeze", at, 0)))
        return rec("unsqueeze", joined, 1)
    return rec("narrow", m, 2, 0, rec.q)


@st.composite
def masks(draw: st.DrawFn, rec: Recorder) -> Node:
    """A whole random mask, boolean or float, float ones sometimes being sums of several."""
    m = draw(booleans(rec))
    how = draw(st.sampled_from(["bool", "bool", "and true", "convert", "where", "where min", "fill", "times min"]))
    dtype = draw(st.sampled_from(list(FLOAT_MIN)))
    mask = dressed(rec, how, m, dtype)
    if draw(st.booleans()) and mask.meta["example_value"].dtype != torch.bool:
        mask = rec(operator.add, mask, dressed(rec, "where", draw(booleans(rec)), dtype))
    if draw(st.booleans()):
        mask = rec("expand", mask, BATCH, draw(st.sampled_from([1, 3])), rec.q, rec.kv)
    return mask
