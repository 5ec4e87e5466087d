"""Take the cache's length out of a decode step's host side, so that one recording of the step serves every length.

A CUDA graph repeats its launches with the arguments that they were recorded with. A decode step has one argument that
differs from call to call: the cache's length, as an integer. This pass leaves no launch that depends on it:

- attention over whole rows counts keys from the end of the *table* instead of the end of the longest row, which means
  the same, because rows are virtually left padded anyway, and changes only when the table grows;
- positions, `arange(length, length + n)` and sums with the length, are computed from a tensor that holds it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from .. import ops
from .base import GraphState, HeldInput, Pass
from .prune import prune
from .symbols import fake_like, size_node
from .tensors import expr, is_call, is_tensor, shape

__all__ = ["HoldLengths"]

_SUMS = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
}
_SUM_METHODS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}


# What masks are made of; once a mask is proven, nothing reads it.
_MASK_FUNCTIONS = {
    torch.arange,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.where,
    operator.getitem,
    *(getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "invert")),
    *_SUMS,
}
_MASK_METHODS = {"unsqueeze", "expand", "view", "reshape", "to", "bool", "masked_fill", "logical_not", *_SUM_METHODS}


class _NotHeld(Exception):
    """Why a step cannot be repeated at another length."""


@dataclass
class _Findings:
    """What depends on the length: numbers made of it; sums of a tensor and such a number, with the operation; ranges
    that begin at one; attention and plans with bounds in terms of it."""

    numbers: set[Node] = field(default_factory=set)
    sums: list[tuple[Node, Callable[[Any, Any], Any]]] = field(default_factory=list)
    ranges: list[Node] = field(default_factory=list)
    bounds: list[tuple[Node, int | str]] = field(default_factory=list)
    plans: list[Node] = field(default_factory=list)


class HoldLengths(Pass):
    """See the module. Does nothing where a step depends on the length in another way, and then says why in
    `state.not_held`; only steps that append a fixed number of tokens are looked at."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._mode = fake_mode

    def apply(self, state: GraphState) -> int:
        if any(group.kind == "create" for group in state.groups) or not state.groups:
            return 0
        try:
            self._hold(state)
        except _NotHeld as why:
            state.not_held = str(why)
        return len(state.held)

    def _hold(self, state: GraphState) -> None:
        graph = state.gm.graph
        symbols: set[sympy.Basic] = set()
        for group in state.groups:
            if group.kind != "append":
                raise _NotHeld(f"{group.sites[0].name} is a cache of kind {group.kind}, not one that grows")
            for site in group.sites:
                if not isinstance(site.new_tokens, int):
                    return  # a chunk of a prompt, of any length
                symbols |= expr(site.size("S")).free_symbols
        if not symbols:
            return  # captured for one length only: runs once
        _drop_masks(graph)
        found = self._find(state, symbols)
        self._check_plans(graph, found)
        self._replace(state, found)

    # -- what depends on the length ----------------------------------------------------------------------------

    def _find(self, state: GraphState, symbols: set[sympy.Basic]) -> _Findings:
        found = _Findings()
        added = {new.node for new in state.new_inputs}
        for node in state.gm.graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "placeholder":
                if isinstance(value, SymInt) and expr(value).free_symbols & symbols:
                    found.numbers.add(node)
                elif node not in added and is_tensor(node) and _mentions(value, symbols):
                    raise _NotHeld(f"the input {node.name} grows with the cache")
                continue
            if not found.numbers & set(node.all_input_nodes):
                continue
            self._classify(node, found)
        return found

    @staticmethod
    def _classify(node: Node, found: _Findings) -> None:
        """Find a place for a node that takes a number made of the length."""
        inputs = [source for source in node.all_input_nodes if source in found.numbers]
        if isinstance(node.meta.get("example_value"), SymInt) and node.op == "call_function":
            found.numbers.add(node)
            return
        if is_call(node, (ops.plan_step,)):
            if inputs == [node.args[2]]:
                found.plans.append(node)
                return
        elif is_call(node, (ops.attention,)):
            if inputs == [node.kwargs.get("causal_offset")]:
                found.bounds.append((node, "causal_offset"))
                return
        elif is_call(node, (ops.plan_window,)):
            if inputs == [node.args[1]]:
                found.bounds.append((node, 1))
                return
        elif is_call(node, (torch.arange,)):
            if not node.kwargs.get("out") and len(node.args) == 2 and isinstance(_range_length(node), int):
                found.ranges.append(node)
                return
        else:
            operation = _sum_operation(node)
            if operation is not None:
                found.sums.append((node, operation))
                return
        raise _NotHeld(f"{node.name} needs the cache's length on the host")

    @staticmethod
    def _check_plans(graph: Graph, found: _Findings) -> None:
        """Attention and writes may read a step's plan; masks and dense copies are as long as the cache."""
        plans = set(found.plans) | {node for node, where in found.bounds if where == 1}
        for node in graph.nodes:
            if not plans & set(node.all_input_nodes):
                continue
            if not is_call(node, (ops.attention, ops.cache_write, ops.plan_window)):
                raise _NotHeld(f"{node.name} is as long as the cache")
        for node, where in found.bounds:
            plan = node.args[3] if where == "causal_offset" else node.args[0]
            source = plan.args[0] if is_call(plan, (ops.plan_window,)) else plan  # type: ignore[union-attr, arg-type]
            _distance(_bound(node, where), source)

    # -- rewriting ---------------------------------------------------------------------------------------------

    def _replace(self, state: GraphState, found: _Findings) -> None:
        graph = state.gm.graph
        capacities: dict[Node, Node] = {}
        distances = [(node, where, *self._bound_of(node, where)) for node, where in found.bounds]
        for plan in found.plans:
            capacities[plan] = self._capacity(state, plan)
        for node, where, plan, distance in distances:
            with graph.inserting_before(node):
                bound = graph.call_function(operator.add, (capacities[plan], distance))
            if isinstance(where, int):
                node.update_arg(where, bound)
            else:
                node.update_kwarg(where, bound)
        for plan in found.plans:
            plan.update_arg(2, capacities[plan])
        tensors: dict[Node, Node] = {}
        for node in found.ranges:
            start = node.args[0]
            with graph.inserting_before(node):
                count = graph.call_function(torch.arange, (_range_length(node),), dict(node.kwargs))
                begin = self._tensor(state, start, _device(node), tensors)
                total = graph.call_function(operator.add, (count, begin))
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)
        for node, operation in found.sums:
            device = _device(node)
            with graph.inserting_before(node):
                operands = [
                    self._tensor(state, operand, device, tensors) if operand in found.numbers else operand
                    for operand in node.args
                ]
                total = graph.call_function(operation, tuple(operands))
            total.meta = dict(node.meta)
            node.replace_all_uses_with(total)
            graph.erase_node(node)
        prune(graph)
        self._drop_numbers(state)
        state.gm.recompile()

    @staticmethod
    def _bound_of(node: Node, where: int | str) -> tuple[Node, int]:
        """The step's plan that a bound belongs to, and how far the bound is from the end of its keys."""
        plan = node.args[3] if where == "causal_offset" else node.args[0]
        plan = plan.args[0] if is_call(plan, (ops.plan_window,)) else plan  # type: ignore[union-attr, assignment]
        return plan, _distance(_bound(node, where), plan)  # type: ignore[return-value, arg-type]

    def _capacity(self, state: GraphState, plan: Node) -> Node:
        """How many tokens a row of the plan's table has room for, as a number that the recording is keyed by."""
        table, block_size = plan.args[0], plan.args[4]
        group = next(new.group for new in state.new_inputs if new.node is table)
        arena = next(new.node for new in state.new_inputs if new.kind == "arena" and new.group == group)
        width = self._add(state, "width", group, shape(table)[1])  # type: ignore[arg-type]
        self._add(state, "blocks", group, shape(arena)[0])
        with state.gm.graph.inserting_before(plan):
            return size_node(state.gm.graph, expr(width.meta["example_value"]) * block_size)  # type: ignore[return-value]

    def _tensor(self, state: GraphState, number: Any, device: torch.device, known: dict[Node, Node]) -> Any:
        """A number made of the length, as a tensor of no dimensions."""
        if not isinstance(number, Node):
            return number
        if number.op != "placeholder":
            parts = tuple(self._tensor(state, part, device, known) for part in number.args)
            return state.gm.graph.call_function(number.target, parts)  # type: ignore[arg-type]
        if number not in known:
            position = [node.name for node in state.captured].index(number.name)
            value = fake_like((), (), torch.int64, device, self._mode)
            known[number] = self._add(state, "length", position, value)
        return known[number]

    @staticmethod
    def _add(state: GraphState, kind: str, index: int, value: torch.Tensor | int | SymInt) -> Node:
        graph = state.gm.graph
        with graph.inserting_after(state.placeholders[-1]):
            node = graph.placeholder(f"held_{kind}_{index}")
        node.meta["example_value"] = value
        node._dynamo_source = ConstantSource(node.name)  # type: ignore[attr-defined]  # AOTAutograd demands one
        state.held.append(HeldInput(kind, index, node))
        return node

    @staticmethod
    def _drop_numbers(state: GraphState) -> None:
        """Integers that nothing reads any more must not be inputs: a recording is made for each of their values."""
        for node in state.placeholders:
            value = node.meta.get("example_value")
            if isinstance(value, SymInt) and not node.users and node in state.captured:
                others = [other.meta.get("example_value") for other in state.placeholders if other is not node]
                if not any(isinstance(other, torch.Tensor) and _mentions(other, {expr(value)}) for other in others):
                    state.dropped.add(node.name)
                    state.gm.graph.erase_node(node)


def _drop_masks(graph: Graph) -> None:
    """Erase unread results of operations that have no effect but their result."""
    for node in reversed(graph.nodes):
        functions = node.op == "call_function" and node.target in _MASK_FUNCTIONS
        methods = node.op == "call_method" and node.target in _MASK_METHODS
        if not node.users and (functions or methods) and "out" not in node.kwargs:
            graph.erase_node(node)


def _mentions(value: torch.Tensor, symbols: set[Any]) -> bool:
    return any(expr(size).free_symbols & symbols for size in (*value.shape, *value.stride()))


def _bound(node: Node, where: int | str) -> Node:
    bound = node.args[where] if isinstance(where, int) else node.kwargs[where]
    assert isinstance(bound, Node)
    return bound


def _distance(bound: Node, plan: Node) -> int:
    """How far a bound is from the end of the plan's keys; raises `_NotHeld` if that depends on the length."""
    end = plan.args[2]
    assert isinstance(end, Node)
    distance = sympy.expand(expr(bound.meta["example_value"]) - expr(end.meta["example_value"]))
    if not distance.is_Integer:
        raise _NotHeld(f"the bound {bound.name} does not move with the cache's end")
    return int(distance)


def _range_length(node: Node) -> object:
    """How many numbers an arange has, if it is the same for every length."""
    start, stop = (arg.meta["example_value"] if isinstance(arg, Node) else arg for arg in node.args)
    if not isinstance(start, SymInt) or not isinstance(stop, (int, SymInt)):
        return None
    count = sympy.expand(expr(stop) - expr(start))
    return int(count) if count.is_Integer else None


def _sum_operation(node: Node) -> Callable[[Any, Any], Any] | None:
    """The operation of a sum, difference or product of a tensor and a number, where a tensor of no dimensions in the
    number's place gives the same dtype."""
    operation = _SUM_METHODS.get(node.target) if node.op == "call_method" else _SUMS.get(node.target)  # type: ignore[arg-type]
    if operation is None or len(node.args) != 2 or node.kwargs:
        return None
    tensors = [arg for arg in node.args if is_tensor(arg)]
    if len(tensors) != 1 or not (len(shape(tensors[0])) or tensors[0].meta["example_value"].dtype == torch.int64):
        return None
    return operation


def _device(node: Node) -> torch.device:
    return node.meta["example_value"].device
