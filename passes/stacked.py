"""Take caches apart that are one tensor for all layers, or for K and V, such as [L, 2, B, H, S, D].

The dimensions in front of a cache's own four are called *leading*. A graph that stacks its caches and indexes the stack
by integers is the same as one with a graph input and an output for each cache; that one the other passes understand.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node

from .caches import joined
from .clone import clone
from .mask_effects import Writers
from .tensors import argument, is_call, is_tensor, shape

__all__ = ["Stack", "Unstacked", "unstack"]

_MAX_PARTS = 1024
_RANK = 4


class Stack(NamedTuple):
    """A stacked input or output of the captured graph: its position, and the sizes of its leading dimensions."""

    position: int
    lead: tuple[int, ...]


@dataclass(frozen=True)
class Unstacked:
    """A graph in which each of the stacks among its inputs and outputs is as many tensors, in row-major order."""

    gm: GraphModule
    inputs: list[Stack]
    outputs: list[Stack]


@dataclass(frozen=True)
class _Parts:
    """A node of the graph as the tensors that it stacks."""

    lead: tuple[int, ...]
    nodes: list[Node]


def unstack(gm: GraphModule, stacks: Mapping[str, tuple[int, ...]]) -> Unstacked | None:
    """A copy of `gm` without stacked caches; None if it has none, or one that is written to in place.

    stacks: the placeholders that receive stacked handles, by name, with their leading dimensions. Dense ones that the
    graph joins new tokens to and returns are taken apart, too.
    """
    if not stacks and not any(_is_stacked(output) for output in gm.graph.output_node().args[0]):  # type: ignore[union-attr]
        return None
    copy = clone(gm)
    return _Unstacker(copy, stacks).run()


def _is_stacked(node: object) -> bool:
    """Whether a node may be a stack of caches."""
    if (
        not is_tensor(node)
        or not _RANK < len(shape(node)) <= _RANK + 2
        or not node.meta["example_value"].is_floating_point()
    ):
        return False
    lead = shape(node)[:-_RANK]
    return all(isinstance(size, int) for size in lead) and 0 < prod(lead) <= _MAX_PARTS


def _is_made(node: object) -> bool:
    """Whether a node may be a stack of caches that is made in the graph."""
    return _is_stacked(node) and (is_call(node, (torch.stack,)) or joined(node) is not None)  # type: ignore[arg-type]


def _roots(node: Node) -> Iterator[Node]:
    """What a stack is made of that holds several caches and is made in one piece, as by a fused projection."""
    for part in node.all_input_nodes:
        while is_call(part, (operator.getitem,)) and is_tensor(part.args[0]) and _is_stacked(part.args[0]):
            part = part.args[0]  # type: ignore[assignment]
        if _is_stacked(part) and part.op != "placeholder" and not _is_made(part):
            yield part


class _Unstacker:
    def __init__(self, gm: GraphModule, stacks: Mapping[str, tuple[int, ...]]) -> None:
        self._gm = gm
        self._graph = gm.graph
        self._stacks = stacks
        self._writers = Writers(gm.graph)
        self._parts: dict[Node, _Parts] = {}

    def run(self) -> Unstacked | None:
        placeholders = self._graph.find_nodes(op="placeholder")
        inputs = self._stacked_inputs(placeholders)
        made = [node for node in self._graph.nodes if _is_made(node)]
        if self._writers.of([*inputs, *made, *(part for node in made for part in node.all_input_nodes)]):
            return None
        for node, lead in inputs.items():
            self._parts[node] = self._split_input(node, lead)
        for root in dict.fromkeys(root for node in made for root in _roots(node)):
            lead = tuple(int(size) for size in shape(root)[:-_RANK])
            self._parts[root] = _Parts(lead, self._picks(root, lead))
        for node in list(self._graph.nodes):
            self._follow(node)
        outputs = list(self._graph.output_node().args[0])  # type: ignore[arg-type]
        kept = [(i, self._parts[node]) for i, node in enumerate(outputs) if node in self._parts]
        if not inputs and not kept:
            return None
        flat = [part for node in outputs for part in (self._parts[node].nodes if node in self._parts else [node])]
        self._graph.output_node().args = (tuple(flat),)
        self._drop(inputs)
        self._gm.recompile()
        position = {node: i for i, node in enumerate(placeholders)}
        return Unstacked(
            self._gm,
            [Stack(position[node], lead) for node, lead in inputs.items()],
            [Stack(i, parts.lead) for i, parts in kept],
        )

    def _stacked_inputs(self, placeholders: Sequence[Node]) -> dict[Node, tuple[int, ...]]:
        """Stacked handles, and dense tensors that the graph joins tokens to and returns."""
        grown = set()
        for output in self._graph.output_node().args[0]:  # type: ignore[union-attr]
            if _is_stacked(output) and (join := joined(output)) and join[1] >= len(shape(output)) - _RANK:
                grown.add(join[0][0])
        inputs = {}
        for node in placeholders:
            if node.name in self._stacks:
                inputs[node] = self._stacks[node.name]
            elif node in grown:
                inputs[node] = tuple(int(size) for size in shape(node)[:-_RANK])
        return inputs

    def _split_input(self, node: Node, lead: tuple[int, ...]) -> _Parts:
        nodes: list[Node] = []
        value = node.meta["example_value"].flatten(0, len(lead) - 1)
        for i in range(prod(lead)):
            with self._graph.inserting_after(nodes[-1] if nodes else node):
                part = self._graph.placeholder(f"{node.name}_{i}")
            part.meta["example_value"] = value[i]
            part._dynamo_source = ConstantSource(part.name)  # type: ignore[attr-defined]
            nodes.append(part)
        return _Parts(lead, nodes)

    # -- what a node stacks ----------------------------------------------------------------------------------

    def _follow(self, node: Node) -> None:
        """Note the parts of a node that stacks, joins or picks from stacks; whoever picks one part gets that."""
        if node in self._parts:
            return
        if is_call(node, (torch.stack,)):
            found = self._stack(node)
        elif _is_stacked(node) and (join := joined(node)):
            found = self._join(node, *join)
        else:
            found = self._pick(node)
        if found is None:
            return
        if found.lead:
            self._parts[node] = found
        else:
            node.replace_all_uses_with(found.nodes[0])
            self._graph.erase_node(node)

    def _stack(self, node: Node) -> _Parts | None:
        parts = argument(node, 0, "tensors")
        if not _is_stacked(node) or argument(node, 1, "dim", 0) != 0 or "out" in node.kwargs:
            return None
        if all(part in self._parts for part in parts):
            inner = self._parts[parts[0]].lead
            return _Parts((len(parts), *inner), [leaf for part in parts for leaf in self._parts[part].nodes])
        if any(part in self._parts or len(shape(part)) != _RANK for part in parts):
            return None
        return _Parts((len(parts),), list(parts))

    def _join(self, node: Node, parts: list[Node], dim: int) -> _Parts | None:
        """Caches joined along one of their own dimensions: one by one."""
        lead = tuple(int(size) for size in shape(node)[:-_RANK])
        if dim < len(lead) or not any(part in self._parts for part in parts):
            return None
        if any(part in self._parts and self._parts[part].lead != lead for part in parts):
            return None
        columns = [self._parts[part].nodes if part in self._parts else self._picks(part, lead) for part in parts]
        return _Parts(lead, [self._joined_before(node, list(own), dim - len(lead)) for own in zip(*columns)])

    def _picks(self, node: Node, lead: tuple[int, ...]) -> list[Node]:
        nodes: list[Node] = []
        for place in torch.cartesian_prod(*map(torch.arange, lead)).view(-1, len(lead)).tolist():
            with self._graph.inserting_after(nodes[-1] if nodes else node):
                pick = self._graph.call_function(operator.getitem, (node, tuple(place)))
            pick.meta["example_value"] = node.meta["example_value"][tuple(place)]
            nodes.append(pick)
        return nodes

    def _joined_before(self, node: Node, parts: list[Node], dim: int) -> Node:
        """The concatenation of `parts`: that of a layer, if it has joined them for its attention and left them so."""
        for user in parts[0].users:
            if (same := joined(user)) and same == (parts, dim) and not self._writers.of([user]):
                return user
        with self._graph.inserting_before(node):
            result = self._graph.call_function(torch.cat, (parts, dim))
        result.meta["example_value"] = torch.cat([part.meta["example_value"] for part in parts], dim)
        return result

    def _pick(self, node: Node) -> _Parts | None:
        """Parts picked by integers and whole slices."""
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or source not in self._parts or node in self._parts[source].nodes:
            return None
        parts = self._parts[source]
        places = torch.arange(len(parts.nodes)).view(list(parts.lead))
        if is_call(node, (operator.getitem,)):
            index: Any = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            own = index[len(parts.lead) :]
            if not all(isinstance(i, (int, slice)) for i in index) or any(i != slice(None) for i in own):
                return None
            if any(
                not isinstance(bound, int | None) for i in index if isinstance(i, slice) for bound in (i.start, i.stop)
            ):
                return None
            picked = places[index[: len(parts.lead)]]
        elif is_call(node, (torch.select,), ("select",)):
            dim, at = argument(node, 1, "dim"), argument(node, 2, "index")
            if not isinstance(at, int) or dim % len(shape(source)) >= len(parts.lead):
                return None
            picked = places.select(dim % len(shape(source)), at)
        elif is_call(node, (torch.unbind,), ("unbind",)) and argument(node, 1, "dim", 0) % len(shape(source)) == 0:
            for user in list(node.users):  # each of its results is a pick of its own
                user.args = (source, user.args[1])
            return None
        else:
            return None
        if picked.numel() == 0:
            return None
        return _Parts(tuple(picked.shape), [parts.nodes[i] for i in picked.flatten().tolist()])

    # -- what is left ----------------------------------------------------------------------------------------

    def _drop(self, inputs: Mapping[Node, tuple[int, ...]]) -> None:
        """Erase the stacks that nobody reads any more; who still reads a stacked input gets its parts, stacked."""
        for node in reversed(list(self._graph.nodes)):
            if node in inputs:
                if node.users:
                    self._restack(node, self._parts[node])
                self._graph.erase_node(node)
            elif not node.users and (node in self._parts or is_call(node, (torch.unbind,), ("unbind",))):
                self._graph.erase_node(node)

    def _restack(self, node: Node, parts: _Parts) -> None:
        last = self._graph.find_nodes(op="placeholder")[-1]
        with self._graph.inserting_after(last):
            flat = self._graph.call_function(torch.stack, (parts.nodes,))
        with self._graph.inserting_after(flat):
            whole = self._graph.call_method("unflatten", (flat, 0, parts.lead))
        value: Tensor = node.meta["example_value"]
        flat.meta["example_value"] = value.flatten(0, len(parts.lead) - 1)
        whole.meta["example_value"] = value
        node.replace_all_uses_with(whole)
