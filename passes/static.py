"""Match static caches: buffers of a maximal length that a step writes its tokens into."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from .base import GraphState, Pass
from .mask_effects import Writers
from .sites import CacheSite
from .slices import one_slice
from .static_writes import Write, read_write, whole
from .subgraph import ancestors
from .tensors import is_call, is_tensor, same_size

__all__ = ["ChooseAdoption", "ForgetUnmatched", "MatchStatic", "born_as_zeros"]


class MatchStatic(Pass):
    """Buffers that come in or are born here as zeros, and are written once at consecutive positions."""

    def apply(self, state: GraphState) -> int:
        graph = state.gm.graph
        for node in list(graph.nodes):
            if _is_buffer(state, buffer := whole(node)) and buffer is not node:
                node.replace_all_uses_with(buffer)  # a slice that leaves nothing out
                graph.erase_node(node)
        order = {node: i for i, node in enumerate(graph.nodes)}
        writers = Writers(graph)
        found = 0
        for node in list(graph.nodes):
            write = read_write(node)
            if write is None or not self._fits(state, write, writers, order):
                continue
            if not write.functional:
                node.replace_all_uses_with(write.buffer, delete_user_cb=lambda user, node=node: user is not node)
            state.sites.append(self._site(state, write, order))
            found += 1
        return found

    @staticmethod
    def _site(state: GraphState, write: Write, order: dict[Node, int]) -> CacheSite:
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
    def _fits(state: GraphState, write: Write, writers: Writers, order: dict[Node, int]) -> bool:
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
    return any(read_write(other) is None and not is_call(other, (), ("copy_",)) for other in user.users)


def _unchanged(write: Write, writers: Writers, order: dict[Node, int]) -> bool:
    """Whether positions are computed, and read, before anything they are computed from is written to."""
    assert write.start.node is not None
    seen = [] if write.positions is None else ancestors(write.positions, is_tensor)
    first = min((order[writer] for writer in writers.all_of(seen)), default=len(order))
    aliased = bool(writers.all_of([write.positions])) if write.positions is not None else False
    computed = all(order[node] < first for node in seen if node.op != "placeholder")
    return computed and (not aliased or order[write.node] < first)
