"""What in a decode step depends on the cache's length, and whether it can be had without the length on the host."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import ops
from .base import GraphState
from .held_masks import MaskProgram
from .mask_effects import Writers
from .slices import cut
from .tensors import expr, is_call, is_tensor, shape

__all__ = ["Bound", "LengthUses", "NotHeld", "Rows", "find_uses", "mentions", "range_length"]

_ARITHMETIC = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    torch.add: operator.add,
    torch.sub: operator.sub,
    torch.mul: operator.mul,
}
_ARITHMETIC_METHODS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_ON_TENSORS = (operator.add, operator.sub, operator.mul, operator.floordiv)  # mean the same there as on numbers
_ROUNDING = (torch.float16, torch.bfloat16)  # would round a tensor that holds the length, but not the number


class NotHeld(Exception):
    """Why a step cannot be repeated at another length."""


@dataclass(frozen=True)
class Bound:
    """A causal bound: an argument (its name or position) of an attention or of its plan. plan: the step's. distance:
    from the end of the plan's keys, at any length."""

    node: Node
    where: int | str
    plan: Node
    distance: int


@dataclass(frozen=True)
class Rows:
    """A slice `start : start + count` of dimension dim of a tensor, which begins at a number made of the length."""

    node: Node
    dim: int
    start: Node
    count: int


@dataclass
class LengthUses:
    """numbers made of the length; sums of a tensor and such a number, with the operation; ranges and rows that begin
    at one; plans of the step, whose keys end there; plans of so many positions of buffers; bounds of attention."""

    numbers: set[Node] = field(default_factory=set)
    sums: list[tuple[Node, Callable[[Any, Any], Any]]] = field(default_factory=list)
    ranges: list[Node] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    plans: list[Node] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)


def find_uses(
    state: GraphState, symbols: set[sympy.Basic], held: Mapping[Node, MaskProgram], writers: Writers
) -> LengthUses:
    """All uses of the lengths that are made of `symbols`; raises `NotHeld` if there is one of no known kind. held: the
    masks that will be made elsewhere, by their plans. writers: of the graph."""
    found = LengthUses()
    added = {new.node for new in state.new_inputs}
    elsewhere = _only_for(held)
    for node in state.gm.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            if isinstance(value, SymInt) and expr(value).free_symbols & symbols:
                found.numbers.add(node)
            elif node not in added | elsewhere and is_tensor(node) and mentions(value, symbols):
                raise NotHeld(f"the input {node.name} grows with the cache")
        elif node not in elsewhere and found.numbers & set(node.all_input_nodes):
            _classify(node, found, writers)
    _check_readers(state.gm.graph, found, held)
    return found


def _only_for(held: Mapping[Node, MaskProgram]) -> set[Node]:
    """The nodes of the masks' programs that nothing else reads."""
    nodes = {node for program in held.values() for node in program.nodes}
    while shared := {node for node in nodes if any(user not in nodes and user not in held for user in node.users)}:
        nodes -= shared
    return nodes


def _classify(node: Node, found: LengthUses, writers: Writers) -> None:
    """Find a place for a node that takes a number made of the length. Attention and its plans are `_check_readers`'."""
    if node.op == "output":
        return  # numbers are returned by the host
    inputs = [source for source in node.all_input_nodes if source in found.numbers]
    if isinstance(node.meta.get("example_value"), SymInt) and node.op == "call_function":
        found.numbers.add(node)
        return
    if is_call(node, (ops.plan_step,)) and inputs == [node.args[2]]:
        found.plans.append(node)
        return
    if is_call(node, (ops.plan_static,)) and inputs == [node.args[1]]:
        found.parts.append(node)
        return
    if is_call(node, (ops.attention, ops.plan_window)) and inputs == [_bound_of(node)[1]]:
        return
    if all(map(_is_arithmetic, inputs)):
        if is_call(node, (torch.arange,)) and isinstance(range_length(node), int):
            found.ranges.append(node)
            return
        rows = _rows(node, found.numbers)
        returned = any(user.op == "output" for user in node.users)
        if rows is not None and not returned and not writers.of([node]):  # a copy of the rows is not the table
            found.rows.append(rows)
            return
        operation = _operation(node)
        if operation is not None:
            found.sums.append((node, operation))
            return
    raise NotHeld(f"{node.name} needs the cache's length on the host")


def _check_readers(graph: Graph, found: LengthUses, held: Mapping[Node, MaskProgram]) -> None:
    """Writes may read a step's plan, and attention whose bounds move with the end of its keys; masks and dense copies
    are as long as the cache."""
    source = {plan: plan for plan in found.plans}
    for node in graph.nodes:
        if is_call(node, (ops.plan_static,)):
            _check_buffer(node, node in found.parts, held)
            continue
        plans = [plan for plan in node.all_input_nodes if plan in source]
        if not plans and is_call(node, (ops.attention, ops.plan_window)) and _bound_of(node)[1] in found.numbers:
            raise NotHeld(f"the causal bound of {node.name} moves, but not the end of its cache")
        if not plans or node in held or is_call(node, (ops.cache_write,)):
            continue
        if not is_call(node, (ops.attention, ops.plan_window)):
            raise NotHeld(f"{node.name} is as long as the cache")
        where, bound = _bound_of(node)
        if is_call(node, (ops.plan_window,)):
            source[node] = source[plans[0]]
        if bound is not None:
            found.bounds.append(Bound(node, where, source[plans[0]], _distance(node, bound, source[plans[0]])))


def _check_buffer(plan: Node, in_part: bool, held: Mapping[Node, MaskProgram]) -> None:
    """What reads buffers may be as long as they are; in_part: only masks can say where to end."""
    for node in plan.users:
        if is_call(node, (ops.plan_mask,)):
            program = held.get(node)
            if in_part and not (program is not None and program.grows and program.buffer):
                raise NotHeld(f"{node.name} is as long as what is read of a buffer")
        elif not is_call(node, (ops.attention,)):
            raise NotHeld(f"{node.name} is as long as what was written of a buffer")


def _rows(node: Node, numbers: set[Node]) -> Rows | None:
    """The slice that a node is, if it has as many rows at every length."""
    part = cut(node)
    if part is None:
        return None
    dim, item = part
    count = shape(node)[dim]
    if item.start not in numbers or not isinstance(count, int):
        return None
    unclamped = statically_known_true(item.start.meta["example_value"] >= 0)
    return Rows(node, dim, item.start, count) if unclamped else None


def _bound_of(node: Node) -> tuple[int | str, Any]:
    """Where an attention, or its plan, has its causal bound, and the bound."""
    if is_call(node, (ops.attention,)):
        return "causal_offset", node.kwargs.get("causal_offset")
    return 1, node.args[1]


def _distance(node: Node, bound: object, plan: Node) -> int:
    end = plan.args[2]
    assert isinstance(end, Node)
    size = bound.meta["example_value"] if isinstance(bound, Node) else bound
    distance = sympy.expand(expr(size) - expr(end.meta["example_value"]))
    if not distance.is_Integer:
        raise NotHeld(f"the causal bound of {node.name} does not move with the cache's end")
    return int(distance)


def range_length(node: Node) -> int | None:
    """How many numbers an arange has, if it begins at the length, and has as many at every length."""
    if len(node.args) != 2 or node.kwargs.keys() - {"dtype", "device"} or node.kwargs.get("dtype") in _ROUNDING:
        return None
    start, stop = (arg.meta["example_value"] if isinstance(arg, Node) else arg for arg in node.args)
    if not isinstance(start, SymInt) or not isinstance(stop, (int, SymInt)):
        return None
    count = sympy.expand(expr(stop) - expr(start))
    return int(count) if count.is_Integer else None


def _operation(node: Node) -> Callable[[Any, Any], Any] | None:
    """The operation of a sum, difference or product of a tensor and a number, where a tensor of no dimensions in the
    number's place gives the same dtype and values."""
    if node.op == "call_method":
        operation = _ARITHMETIC_METHODS.get(str(node.target))
    else:
        operation = _ARITHMETIC.get(node.target)  # type: ignore[arg-type]
    if operation is None or len(node.args) != 2 or node.kwargs:
        return None
    tensors = [arg for arg in node.args if is_tensor(arg)]
    if len(tensors) != 1 or tensors[0].meta["example_value"].dtype in _ROUNDING:
        return None
    return operation if len(shape(tensors[0])) or tensors[0].meta["example_value"].dtype == torch.int64 else None


def _is_arithmetic(number: Node) -> bool:
    """Whether a number is made of inputs by operations that tensors have, too."""
    if number.op == "placeholder":
        return True
    return number.target in _ON_TENSORS and all(map(_is_arithmetic, number.all_input_nodes))


def mentions(value: torch.Tensor, symbols: set[Any]) -> bool:
    """Whether sizes or strides of a tensor are made of any of `symbols`."""
    return any(expr(size).free_symbols & symbols for size in (*value.shape, *value.stride()))
