"""Take the making of masks out of a decode step that is to be replayed.

A mask tensor is as long as the cache, so a recording can neither make it nor take it as it is. Where it is made of the
step's inputs alone, the host makes it before the step, as long as the table and with its end at the table's end: what
stands in front of the row's first key is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from .. import ops
from .base import GraphState
from .mask_effects import Writers
from .tensors import expr, is_call, is_tensor, shape

__all__ = ["MaskProgram", "masks_to_hold"]

_MOST_NODES = 200  # a mask that takes more is a model's work, not a mask's
_OPERATIONS = (  # write to nothing, or to arenas only
    ops.plan_step,
    ops.plan_window,
    ops.plan_mask,
    ops.attention,
    ops.cache_write,
    ops.gather,
)


@dataclass(frozen=True)
class MaskProgram:
    """What makes a mask. grows: it is as long as the cache. positions: of its arguments among those of the step. nodes:
    of the graph it was taken from."""

    run: Callable[..., Tensor]
    grows: bool
    positions: tuple[int, ...]
    nodes: frozenset[Node]

    def __call__(self, args: Sequence[Any], capacity: int) -> Tensor:
        """The mask for a step with `args`; of one that grows, the keys are the last of `capacity`."""
        mask = self.run(*(args[i] for i in self.positions))
        if not self.grows:
            return mask.contiguous()
        hidden = False if mask.dtype == torch.bool else float("-inf")
        padded = mask.new_full((*mask.shape[:-1], capacity), hidden)
        padded[..., capacity - mask.shape[-1] :] = mask
        return padded


def masks_to_hold(state: GraphState, symbols: set[sympy.Basic]) -> dict[Node, MaskProgram]:
    """What makes the masks that depend on lengths (made of `symbols`), by the `plan_mask` that takes each. Those that
    are made of more than the step's inputs are left out."""
    found: dict[Node, MaskProgram] = {}
    made: dict[Node, MaskProgram | None] = {}
    writers: Writers | None = None
    for node in state.gm.graph.nodes:
        if not is_call(node, (ops.plan_mask,)):
            continue
        mask = node.args[0]
        if mask not in made:
            writers = writers or Writers(state.gm.graph)
            made[mask] = _program(state, mask, symbols, writers)
        program = made[mask]
        if program is not None:
            found[node] = program
    return found


def _program(state: GraphState, mask: Node, symbols: set[sympy.Basic], writers: Writers) -> MaskProgram | None:
    nodes = _ancestors(mask)
    grows = bool(expr(shape(mask)[-1]).free_symbols & symbols)
    if not grows and not any(_depends(node, symbols) for node in nodes):
        return None
    if len(nodes) > _MOST_NODES or any(node.is_impure() for node in nodes if node.op != "placeholder"):
        return None
    inputs = [node for node in nodes if node.op == "placeholder"]
    names = [node.name for node in state.captured]
    for node in inputs:
        value = node.meta.get("example_value")
        if node not in state.captured or node in state.inputs or isinstance(value, torch.nn.Parameter):
            return None
    if any(writer.target not in _OPERATIONS for writer in writers.all_of(filter(is_tensor, nodes))):
        return None
    graph, copies = Graph(), dict[Node, Node]()
    for node in state.gm.graph.nodes:  # in order
        if node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[mask])
    run = GraphModule(state.gm, graph)
    ordered = [node.name for node in state.gm.graph.find_nodes(op="placeholder") if node in nodes]
    return MaskProgram(run, grows, tuple(map(names.index, ordered)), frozenset(nodes))


def _depends(node: Node, symbols: set[sympy.Basic]) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, SymInt) and bool(expr(value).free_symbols & symbols)


def _ancestors(node: Node) -> set[Node]:
    """A node, and all that it is computed from."""
    found, todo = {node}, [node]
    while todo:
        new = [source for source in todo.pop().all_input_nodes if source not in found]
        found.update(new)
        todo += new
    return found
