"""Take the making of masks out of a decode step that is to be replayed.

A mask tensor is as long as the cache, so a recording can neither make it nor take it as it is. Where it is made of the
step's inputs alone, the host makes it before the step, as long as the table and with its end at the table's end: what
stands in front of the row's first key is hidden. For the first so many positions of a buffer, it is made as long as
the buffer: the positions behind are hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .. import ops
from .base import GraphState
from .mask_effects import Writers
from .subgraph import ancestors, extracted
from .tensors import expr, is_call, is_tensor, shape

__all__ = ["MaskProgram", "buffer_length", "inputs_written", "masks_to_hold"]

_MOST_NODES = 200  # a mask that takes more is a model's work, not a mask's


@dataclass(frozen=True)
class MaskProgram:
    """What makes a mask.

    grows: it is as long as the cache, or as what is read of a buffer. positions: of its arguments among those of the
    step. nodes: of the graph it was taken from. buffer: the length of the buffer whose first positions are seen; 0 if
    there is none.
    """

    run: Callable[..., Tensor]
    grows: bool
    positions: tuple[int, ...]
    nodes: frozenset[Node]
    buffer: int = 0

    def __call__(self, args: Sequence[Any], capacity: int) -> Tensor:
        """The mask for a step with `args`; of one that grows, the keys are the last of `capacity`, or the first of its
        buffer."""
        mask = self.run(*(args[i] for i in self.positions))
        if not self.grows:
            return mask.contiguous()
        hidden = False if mask.dtype == torch.bool else float("-inf")
        length = self.buffer or capacity
        first = 0 if self.buffer else capacity - mask.shape[-1]
        padded = mask.new_full((*mask.shape[:-1], length), hidden)
        padded[..., first : first + mask.shape[-1]] = mask
        return padded


def masks_to_hold(state: GraphState, symbols: set[sympy.Basic], writers: Writers) -> dict[Node, MaskProgram]:
    """What makes the masks that depend on lengths (made of `symbols`), by the `plan_mask` that takes each. Those that
    are made of more than the step's inputs are left out. writers: of the graph."""
    found: dict[Node, MaskProgram] = {}
    made: dict[tuple[Node, int], MaskProgram | None] = {}
    alike: dict[str, Callable[..., Tensor]] = {}
    cast = _autocast(state.gm.graph)
    for node in state.gm.graph.nodes:
        if not is_call(node, (ops.plan_mask,)):
            continue
        mask, plan = node.args
        buffer = buffer_length(state, plan)
        if (mask, buffer) not in made:
            made[mask, buffer] = _program(state, mask, symbols, writers, buffer, alike)
        program = made[mask, buffer]
        if program is not None and not program.nodes & cast:
            found[node] = program
    return found


def buffer_length(state: GraphState, plan: Node) -> int:
    """The length of the buffers whose first positions a plan reads; 0 if it is no such plan, or the length varies."""
    if not is_call(plan, (ops.plan_static,)):
        return 0
    table = plan.all_input_nodes[0].args[0]
    group = state.group_of(table)
    length = state.groups[group].sites[0].size("S")
    return length if isinstance(length, int) else 0


def inputs_written(state: GraphState) -> list[int]:
    """Positions of the inputs that a rewritten graph still has and writes to: counters of tokens."""
    writers, alive = Writers(state.gm.graph), set(state.placeholders)
    return [i for i, node in enumerate(state.captured) if node in alive and is_tensor(node) and writers.of([node])]


def _autocast(graph: Graph) -> set[Node]:
    """The nodes in regions that cast by themselves, which a program would leave."""
    depth, inside = 0, set()
    for node in graph.nodes:
        if node.target is torch.amp.autocast_mode._exit_autocast:
            depth -= 1
        if depth and node.op != "placeholder":
            inside.add(node)
        if node.target is torch.amp.autocast_mode._enter_autocast:
            depth += 1
    return inside


def _program(
    state: GraphState,
    mask: Node,
    symbols: set[sympy.Basic],
    writers: Writers,
    buffer: int,
    alike: dict[str, Callable[..., Tensor]],
) -> MaskProgram | None:
    """alike: the programs known so far, by their text: models make the same mask in every layer."""
    nodes = ancestors(mask)
    grows = bool(expr(shape(mask)[-1]).free_symbols & symbols)
    if not grows and (shape(mask)[-1] == 1 or not any(_depends(node, symbols) for node in nodes)):
        return None  # one value for all keys would show those in front of the row's first, too
    if len(nodes) > _MOST_NODES or any(node.is_impure() for node in nodes if node.op != "placeholder"):
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    names = [node.name for node in state.captured]
    if any(node not in state.captured or node in state.inputs for node in inputs):
        return None
    if writers.of(filter(is_tensor, nodes)):
        return None
    text = _text(nodes)
    if text not in alike:
        alike[text] = extracted(state.gm, nodes, mask)
    positions = tuple(names.index(node.name) for node in inputs)
    return MaskProgram(alike[text], grows, positions, frozenset(nodes), buffer)


def _text(nodes: Sequence[Node]) -> str:
    """What some nodes compute, whatever they are called."""
    place = {node: f"%{i}" for i, node in enumerate(nodes)}
    lines = [(node.op, node.target, *map_arg((node.args, node.kwargs), place.__getitem__)) for node in nodes]  # type: ignore[misc]
    return repr(lines)


def _depends(node: Node, symbols: set[sympy.Basic]) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, SymInt) and bool(expr(value).free_symbols & symbols)
