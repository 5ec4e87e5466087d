"""Integers among the inputs and outputs of a step that is to be replayed: which are lengths, and which may stay."""

from __future__ import annotations

import sympy
import torch
from torch import SymInt
from torch.fx import Node

from .base import GraphState
from .length_uses import mentions
from .tensors import expr, is_tensor, shape

__all__ = ["WRITTEN", "drop_unread", "plain_numbers", "return_numbers"]

WRITTEN = ("extent", "written")  # inputs of static caches: lengths


def drop_unread(state: GraphState) -> None:
    """Take inputs out that nothing reads any more: a recording is made for each value of an integer."""
    for node in state.placeholders:  # tensors as long as the cache, which masks were made of
        unread = node in state.captured and node not in state.inputs and not node.users
        if unread and is_tensor(node) and any(isinstance(size, SymInt) for size in shape(node)):
            state.dropped.add(node.name)
            state.gm.graph.erase_node(node)
    unread_inputs = [new for new in state.new_inputs if new.kind in WRITTEN and not new.node.users]
    for new in unread_inputs:
        state.new_inputs.remove(new)
        state.gm.graph.erase_node(new.node)
    for node in state.placeholders:
        value = node.meta.get("example_value")
        if isinstance(value, SymInt) and not node.users and node in state.captured:
            others = [other.meta.get("example_value") for other in state.placeholders if other is not node]
            if not any(isinstance(other, torch.Tensor) and mentions(other, {expr(value)}) for other in others):
                state.dropped.add(node.name)
                state.gm.graph.erase_node(node)


def return_numbers(state: GraphState, numbers: set[Node]) -> None:
    """Numbers made of the length are returned by the host: it has the length."""
    output = state.gm.graph.output_node()
    kept: list[object] = []
    positions: list[int] = []
    for position, node in zip(state.dense_outputs, state.outputs):
        if isinstance(node, Node) and node in numbers:
            state.host_outputs[position] = node.meta["example_value"]
        else:
            positions.append(position)
            kept.append(node)
    state.dense_outputs = positions
    output.args = (tuple(kept),)  # type: ignore[assignment]


def plain_numbers(state: GraphState) -> set[sympy.Basic]:
    """Integer inputs that are no size of a tensor: lengths by another name, as a count of the tokens seen."""
    values = [node.meta.get("example_value") for node in state.captured]
    numbers = {symbol for value in values if isinstance(value, SymInt) for symbol in expr(value).free_symbols}
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return {number for number in numbers if not any(mentions(value, {number}) for value in tensors)}
