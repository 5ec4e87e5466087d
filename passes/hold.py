"""Take the cache's length out of a decode step's host side, so that one recording of the step serves every length.

A CUDA graph repeats its launches with the arguments that they were recorded with. A decode step has one argument that
differs from call to call: the cache's length, as an integer. This pass leaves no launch that depends on it:

- attention over whole rows counts keys from the end of the *table* instead of the end of the longest row. That changes
  only when the table grows, and means the same: rows are virtually left padded anyway, and a tensor says how many of
  their first tokens a window hides;
- mask tensors that are made of the step's inputs are made before the step (`held_masks`);
- positions, `arange(length, length + n)` and sums with the length, are computed from a tensor that holds it, and rows
  of tables, `cos[length : length + n]`, are looked up there.

Of static caches, the positions that were written are such lengths. Attention over a whole buffer asks the lengths of
its rows, which are tensors anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from .. import ops
from .base import GraphState, HeldInput, Pass
from .held_masks import MaskProgram, buffer_length, inputs_written, masks_to_hold
from .held_numbers import WRITTEN, drop_unread, plain_numbers, return_numbers
from .length_uses import LengthUses, NotHeld, find_uses, range_length
from .mask_effects import Writers
from .prune import prune
from .sites import CacheGroupSites
from .symbols import fake_like, size_node
from .tensors import expr, is_call, shape
from .unread_masks import drop_masks

__all__ = ["HoldLengths"]

MOST_TOKENS = 16  # of a step; the kernels for decode take as many


class HoldLengths(Pass):
    """See the module. Does nothing where a step depends on the length in another way, and then says why in
    `state.not_held`; only steps that add a fixed number of tokens to their caches, at most `MOST_TOKENS`, are looked
    at."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._mode = fake_mode

    def apply(self, state: GraphState) -> int:
        sites = [site for group in state.groups for site in group.sites]
        born = any(site.kind == "create" or (site.kind == "static" and site.past is None) for site in sites)
        if born or all(site.kind == "read" for site in sites):
            return 0
        try:
            self._hold(state)
        except NotHeld as why:
            state.not_held = str(why)
        return len(state.held)

    def _hold(self, state: GraphState) -> None:
        graph = state.gm.graph
        symbols: set[sympy.Basic] = set()
        for group in state.groups:
            for site in group.sites:
                if not isinstance(site.new_tokens, int) or site.new_tokens > MOST_TOKENS:
                    return  # a chunk of a prompt, which is not worth a recording
                if group.kind in ("append", "read"):
                    symbols |= expr(site.size("S")).free_symbols
                elif site.start is not None and site.start.size is not None:
                    symbols |= expr(site.start.size).free_symbols
        for new in state.new_inputs:
            if new.kind in WRITTEN:
                symbols |= expr(new.node.meta["example_value"]).free_symbols
        if not symbols and not all(map(_is_steady, state.groups)):
            return  # captured for one length only: runs once
        symbols |= plain_numbers(state)
        drop_masks(graph)
        writers = Writers(graph)
        masks = masks_to_hold(state, symbols, writers)
        self._replace(state, find_uses(state, symbols, masks, writers), masks)

    def _replace(self, state: GraphState, found: LengthUses, masks: Mapping[Node, MaskProgram]) -> None:
        graph = state.gm.graph
        return_numbers(state, found.numbers)
        self._replace_masks(state, masks)
        groups = {node: state.group_of(node.args[0]) for node in graph.nodes if is_call(node, (ops.plan_step,))}
        widths = {group: self._sizes(state, group) for group in dict.fromkeys(groups.values())}
        capacities = {plan: self._capacity(graph, plan, widths[groups[plan]]) for plan in found.plans}
        for bound in found.bounds:
            with graph.inserting_before(bound.node):
                moved = graph.call_function(operator.add, (capacities[bound.plan], bound.distance))
            if isinstance(bound.where, int):
                bound.node.update_arg(bound.where, moved)
            else:
                bound.node.update_kwarg(bound.where, moved)
        hidden = {group: self._hidden(state, group) for group in dict.fromkeys(groups[plan] for plan in found.plans)}
        for plan in found.plans:
            plan.update_arg(2, capacities[plan])
            plan.update_kwarg("hidden", hidden[groups[plan]])
        for plan in found.parts:
            plan.update_arg(1, buffer_length(state, plan))
        tensors: dict[Node, Node] = {}
        for node in found.ranges:
            start = node.args[0]
            with graph.inserting_before(node):
                count = graph.call_function(torch.arange, (range_length(node),), dict(node.kwargs))
                begin = self._tensor(state, start, _device(node), tensors)
                total = graph.call_function(operator.add, (count, begin))
            _put(total, node)
        for node, operation in found.sums:
            device = _device(node)
            with graph.inserting_before(node):
                operands = [
                    self._tensor(state, operand, device, tensors) if operand in found.numbers else operand
                    for operand in node.args
                ]
                total = graph.call_function(operation, tuple(operands))
            _put(total, node)
        for row in found.rows:
            with graph.inserting_before(row.node):
                start = self._tensor(state, row.start, _device(row.node), tensors)
                index = graph.call_function(torch.arange, (row.count,), {"device": _device(row.node)})
                index = graph.call_function(operator.add, (index, start))
                part = graph.call_function(torch.index_select, (row.node.args[0], row.dim, index))
            _put(part, row.node)
        prune(graph)
        drop_unread(state)
        state.written = inputs_written(state)
        state.gm.recompile()

    def _replace_masks(self, state: GraphState, masks: Mapping[Node, MaskProgram]) -> None:
        """Let attention take masks that are as long as the table."""
        graph = state.gm.graph
        inputs: dict[tuple[object, int, int], Node] = {}
        for node, program in masks.items():
            mask, plan = node.args
            assert isinstance(mask, Node) and isinstance(plan, Node)
            while not is_call(plan, (ops.plan_step,)):  # a plan of bounds, made of the step's
                plan = plan.all_input_nodes[0]
            table, block_size = plan.args[0], plan.args[4]
            group = state.group_of(table)
            if (program.run, group, program.buffer) not in inputs:
                value = mask.meta["example_value"]
                size = tuple(value.shape)
                if program.grows:
                    length = program.buffer or shape(table)[1] * block_size  # type: ignore[arg-type,operator]
                    size = (*size[:-1], length)
                like = self._contiguous(size, value)
                inputs[program.run, group, program.buffer] = self._add(state, "mask", group, like, program)
            node.update_arg(0, inputs[program.run, group, program.buffer])
        made = {node for program in masks.values() for node in program.nodes}
        for node in reversed(graph.nodes):
            if node in made and node.op != "placeholder" and not node.users:
                graph.erase_node(node)

    def _contiguous(self, size: tuple[int | SymInt, ...], like: torch.Tensor) -> torch.Tensor:
        strides: list[int | SymInt] = [1]
        for length in reversed(size[1:]):
            strides.insert(0, strides[0] * length)
        return fake_like(size, tuple(strides), like.dtype, like.device, self._mode)

    def _sizes(self, state: GraphState, group: int) -> Node:
        """Numbers that the recording is keyed by: the width of a group's table, which is returned, and its blocks."""
        width = self._add(state, "width", group, shape(_input(state, "table", group))[1])
        self._add(state, "blocks", group, shape(_input(state, "arena", group))[0])
        return width

    def _hidden(self, state: GraphState, group: int) -> Node:
        """How many first tokens of a group's rows are not seen: the length, which would say it, is the table's now."""
        lens = _input(state, "lens", group).meta["example_value"]
        return self._add(state, "hidden", group, self._contiguous(tuple(lens.shape), lens))

    @staticmethod
    def _capacity(graph: Graph, plan: Node, width: Node) -> Node:
        """How many tokens a row of the plan's table has room for."""
        with graph.inserting_before(plan):
            return size_node(graph, expr(width.meta["example_value"]) * plan.args[4])  # type: ignore[return-value,operator]

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
    def _add(
        state: GraphState,
        kind: str,
        index: int,
        value: torch.Tensor | int | SymInt,
        make: MaskProgram | None = None,
    ) -> Node:
        graph = state.gm.graph
        with graph.inserting_after(state.placeholders[-1]):
            node = graph.placeholder(f"held_{kind}_{index}_{len(state.held)}")
        node.meta["example_value"] = value
        node._dynamo_source = ConstantSource(node.name)  # type: ignore[attr-defined]  # AOTAutograd demands one
        state.held.append(HeldInput(kind, index, node, make))
        return node


def _input(state: GraphState, kind: str, group: int) -> Node:
    """The first input of a kind that the rewrite added for a group."""
    return next(new.node for new in state.new_inputs if new.kind == kind and new.group == group)


def _is_steady(group: CacheGroupSites) -> bool:
    """Whether a step leaves its caches as long as they were: windows that are full."""
    kept = [(output, site.size("S") - site.new_tokens) for site in group.sites for output in site.outputs]
    steady = all(output.stop is not None and output.stop - output.first == before for output, before in kept)
    return group.kind in ("slide", "read") or (bool(kept) and steady)


def _put(node: Node, place: Node) -> None:
    """Let a node take another's place."""
    node.meta = dict(place.meta)
    place.replace_all_uses_with(node)
    place.graph.erase_node(place)


def _device(node: Node) -> torch.device:
    return node.meta["example_value"].device
