"""Match static caches: buffers of a maximal length that a step writes its tokens into.

Every write is one of `index_copy_`, indexing by positions, a slice, or the functional `index_copy`. Where the tokens go
is kept as it was computed (`Start`), because only the caller's values say it: the runtime reads it at every call.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.fx import Node

from .base import CacheSite, GraphState, Pass, Start
from .mask_effects import Writers
from .slices import one_slice
from .tensors import argument, is_call, is_tensor, same_size, shape

__all__ = ["ChooseAdoption", "ForgetUnmatched", "MatchStatic", "born_as_zeros"]


class _Write(NamedTuple):
    """One write of `new` to consecutive positions of dimension `dim` of `buffer`, from `start` on. positions: the
    tensor of them, if one is given. functional: it makes a tensor of its own, which `node` is."""

    node: Node
    buffer: Node
    dim: int
    new: Node
    start: Start
    positions: Node | None = None
    functional: bool = False


class MatchStatic(Pass):
    """Buffers that come in or are born here as zeros, and are written once at consecutive positions."""

    def apply(self, state: GraphState) -> int:
        graph = state.gm.graph
        for node in list(graph.nodes):
            if _is_buffer(state, buffer := _whole(node)) and buffer is not node:
                node.replace_all_uses_with(buffer)  # a slice that leaves nothing out
                graph.erase_node(node)
        order = {node: i for i, node in enumerate(graph.nodes)}
        writers = Writers(graph)
        found = 0
        for node in list(graph.nodes):
            write = _read(node)
            if write is None or not self._fits(state, write, writers, order):
                continue
            if not write.functional:
                node.replace_all_uses_with(write.buffer, delete_user_cb=lambda user, node=node: user is not node)
            state.sites.append(self._site(state, write, order))
            found += 1
        return found

    @staticmethod
    def _site(state: GraphState, write: _Write, order: dict[Node, int]) -> CacheSite:
        facts = state.inputs.get(write.buffer)
        site = CacheSite(
            "static",
            write.node if write.functional else write.buffer,
            facts.axes if facts else _axes(write.dim),
            "index_copy" if write.functional else "write in place",
            past=write.buffer if facts else None,
            new=write.new,
            write=write.node,
            start=write.start,
        )
        site.adopted = facts is None and write.buffer.op == "placeholder"
        for user in site.node.users:
            part = one_slice(user)
            if part is not None and part.dim == write.dim and part.first == 0 and order[user] > order[write.node]:
                site.parts.append(user)
        return site

    @staticmethod
    def _fits(state: GraphState, write: _Write, writers: Writers, order: dict[Node, int]) -> bool:
        buffer, new = write.buffer, write.new
        facts = state.inputs.get(buffer)
        value, tokens = buffer.meta["example_value"], new.meta["example_value"]
        if facts is not None and (not facts.static or facts.axes.index("S") != write.dim):
            return False
        if not _is_buffer(state, buffer):
            return False
        if value.dim() != 4 or tokens.dim() != 4 or tokens.requires_grad or value.requires_grad:
            return False
        if not value.dtype.is_floating_point or value.dtype.itemsize not in (2, 4):
            return False
        others = [dim for dim in range(4) if dim != write.dim]
        if not all(same_size(value.shape[dim], tokens.shape[dim]) for dim in others):
            return False
        if not all(isinstance(value.shape[dim], int) for dim in (3 - write.dim, 3)):
            return False
        if any(buffer in (site.node, site.past) for site in state.sites):
            return False
        made = write.node if write.functional else buffer if facts is None and buffer.op != "placeholder" else None
        if made is not None and not any(output in (made, write.node) for output in state.outputs):
            return False  # nobody keeps it
        wanted = [] if write.functional else [write.node]
        early = [user for user in buffer.users if user is not write.node and order[user] < order[write.node]]
        if write.functional:
            early = [user for user in buffer.users if user is not write.node]
        if writers.all_of([buffer]) != wanted or any(map(_reads, early)):
            return False
        return write.start.node is None or _unchanged(write, writers, order)


class ForgetUnmatched(Pass):
    """Static inputs whose writes were not understood, or that are not written, are none of the passes' business. But
    those that are full and not written, such as keys of an encoder's output, are what any cache is."""

    def apply(self, state: GraphState) -> int:
        known = {site.past for site in state.sites}
        writers = Writers(state.gm.graph)
        others = [node for node, facts in state.inputs.items() if facts.static and node not in known]
        for node in others:
            if state.inputs[node].full and writers.of([node]) is None:
                state.inputs[node] = replace(state.inputs[node], static=False)
            else:
                del state.inputs[node]
        return len(others)


class ChooseAdoption(Pass):
    """Dense buffers that a paged attention reads are to become handles; others stay what they are."""

    def apply(self, state: GraphState) -> int:
        read = {id(site) for a in state.attentions if a.paged for site in (a.key, a.value)}
        state.adoptions = [site for site in state.sites if site.adopted and id(site) in read]
        if not state.adoptions:
            state.sites = [site for site in state.sites if not site.adopted]
            for group in state.groups:
                group.sites = [site for site in group.sites if not site.adopted]
            state.groups = [group for group in state.groups if group.sites]
        return len(state.adoptions)


def _is_buffer(state: GraphState, node: Node | None) -> bool:
    if node is None or not is_tensor(node):
        return False
    if node in state.inputs:
        return state.inputs[node].static
    return node.op == "placeholder" or born_as_zeros(node)


def born_as_zeros(node: Node) -> bool:
    """Whether a tensor is made by this graph, of zeros."""
    return is_call(node, (torch.zeros, torch.zeros_like), ("new_zeros",))


def _axes(dim: int) -> str:
    return "BHSD" if dim == 2 else "BSHD"


def _reads(user: Node) -> bool:
    """Whether a user of a buffer reads its values: slices that only lead to the write do not."""
    part = one_slice(user)
    if part is None:
        return True
    return any(_read(other) is None and not is_call(other, (), ("copy_",)) for other in user.users)


def _unchanged(write: _Write, writers: Writers, order: dict[Node, int]) -> bool:
    """Whether positions are computed, and read, before anything they are computed from is written to."""
    assert write.start.node is not None
    seen: set[Node] = set()
    pending = [write.positions] if write.positions is not None else []
    while pending:
        node = pending.pop()
        if node not in seen and is_tensor(node):
            seen.add(node)
            pending += node.all_input_nodes
    first = min((order[writer] for writer in writers.all_of(seen)), default=len(order))
    aliased = bool(writers.all_of([write.positions])) if write.positions is not None else False
    computed = all(order[node] < first for node in seen if node.op != "placeholder")
    return computed and (not aliased or order[write.node] < first)


# -- spellings of a write ------------------------------------------------------------------------------------


def _read(node: Node) -> _Write | None:
    """The write that a node is, if it is one of the spellings."""
    if is_call(node, (torch.index_copy,), ("index_copy", "index_copy_")):
        return _index_copy(node)
    if is_call(node, (operator.setitem,)):
        return _setitem(node)
    if is_call(node, (), ("copy_",)):
        return _copy(node)
    return None


def _index_copy(node: Node) -> _Write | None:
    buffer = _whole(node.args[0])
    dim, index, new = argument(node, 1, "dim"), argument(node, 2, "index"), argument(node, 3, "source")
    if buffer is None or not is_tensor(index) or not is_tensor(new):
        return None
    return _at_positions(node, buffer, dim % 4, index, new, functional=node.target in ("index_copy", torch.index_copy))


def _setitem(node: Node) -> _Write | None:
    buffer, items, new = _whole(node.args[0]), node.args[1], node.args[2]
    if buffer is None or not is_tensor(new):
        return None
    items = items if isinstance(items, tuple) else (items,)
    if any(item is None or item is Ellipsis or isinstance(item, int) for item in items):
        return None
    special = [dim for dim, item in enumerate(items) if not _is_all(item, shape(buffer)[dim])]
    if len(special) != 1:
        return None
    dim, item = special[0], items[special[0]]
    if is_tensor(item):
        return _at_positions(node, buffer, dim, item, new)
    if isinstance(item, slice) and item.step in (None, 1):
        return _at_slice(node, buffer, dim, item.start, new)
    return None


def _copy(node: Node) -> _Write | None:
    """`buffer[:, :, a:b].copy_(new)`."""
    target, new = node.args[0], argument(node, 1, "src")
    part = one_slice(target) if is_tensor(target) else None
    if part is None or not is_tensor(new) or part.dim not in (1, 2):
        return None
    buffer = _whole(part.source)
    if buffer is None or not same_size(shape(new)[part.dim], shape(target)[part.dim]):
        return None
    return _Write(node, buffer, part.dim, new, Start(size=part.first))


def _is_all(item: object, size: int) -> bool:
    return isinstance(item, slice) and item.start in (None, 0) and item.stop in (None, size) and item.step in (None, 1)


def _whole(node: object) -> Node | None:
    """A buffer, looking through slices that leave nothing out and conversions to what it is."""
    while is_tensor(node):
        part = one_slice(node)  # type: ignore[arg-type]
        if part is not None and all(map(same_size, shape(part.source), shape(node))):  # type: ignore[arg-type]
            node = part.source
        elif _converts_nothing(node):  # type: ignore[arg-type]
            node = node.args[0]  # type: ignore[union-attr]
        else:
            break
    return node if is_tensor(node) and len(shape(node)) == 4 else None  # type: ignore[arg-type, return-value]


def _converts_nothing(node: Node) -> bool:
    """Whether a node is its operand, by the rule that `to` makes no copy of what is as asked for."""
    if (
        not is_call(node, (), ("to", "type_as"))
        or not is_tensor(node.args[0])
        or node.kwargs.keys() - {"dtype", "device"}
    ):
        return False
    if any(isinstance(arg, bool) for arg in node.args):
        return False
    a, b = node.args[0].meta["example_value"], node.meta["example_value"]  # type: ignore[union-attr]
    return a.dtype == b.dtype and a.device == b.device


def _at_slice(node: Node, buffer: Node, dim: int, start: object, new: Node) -> _Write | None:
    value = start.meta.get("example_value") if isinstance(start, Node) else start
    value = 0 if value is None else value
    if dim not in (1, 2) or not isinstance(value, (int, torch.SymInt)) or (isinstance(value, int) and value < 0):
        return None
    return _Write(node, buffer, dim, new, Start(size=value))


def _at_positions(
    node: Node, buffer: Node, dim: int, index: Node, new: Node, functional: bool = False
) -> _Write | None:
    value = index.meta["example_value"]
    if dim not in (1, 2) or value.dim() != 1 or value.dtype not in (torch.int64, torch.int32):
        return None
    if len(shape(new)) != 4 or not same_size(value.shape[0], shape(new)[dim]):
        return None
    counter = _counter(index)
    start = Start(node=index) if counter is None else Start(node=counter, scalar=True)
    return _Write(node, buffer, dim, new, start, index, functional)


def _counter(index: Node) -> Node | None:
    """c, if positions are `arange(n) + c` with a single integer c on the device."""
    if not is_call(index, (operator.add, torch.add), ("add",)) or len(index.args) != 2 or index.kwargs:
        return None
    for base, counter in (index.args, index.args[::-1]):
        if is_call(base, (torch.arange,)) and len(base.args) == 1 and is_tensor(counter):  # type: ignore[union-attr]
            value = counter.meta["example_value"]  # type: ignore[union-attr]
            if value.numel() == 1 and not value.dtype.is_floating_point:
                return counter  # type: ignore[return-value]
    return None
