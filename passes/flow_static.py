"""Positions at which steps write into static caches, for the proof of sharing: they count the row's tokens.

The runtime reads the first position at every call, and verifies that it is the same in all caches (see `Start`). So a
tensor of these positions, or a counter of what was written, is an index along the tokens, whatever the graph says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import sympy
import torch
from torch.fx import Graph, Node

from .base import GraphState
from .flow import TOKENS, Flow, Flows, NotShared
from .mask_effects import Writers
from .sites import CacheSite
from .tensors import expr, is_call

__all__ = ["StaticStart"]


@dataclass
class StaticStart:
    """Where the static caches of a graph, all of them, are written.

    past: how many tokens they held before: the first position, as long as they are written from their beginning on.
    equal: what stands for it elsewhere. indices: tensors of the positions; counters: of the first one alone.
    """

    past: sympy.Expr
    equal: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    indices: set[Node] = field(default_factory=set)
    counters: set[Node] = field(default_factory=set)

    @classmethod
    def of(cls, state: GraphState) -> StaticStart:
        """Raises `NotShared`."""
        sites = [site for group in state.groups for site in group.sites]
        if any(site.functional for site in sites):
            raise NotShared("it makes new static caches instead of writing into them")
        if len({site.past is None for site in sites}) > 1:
            raise NotShared("some of its static caches are begun, others extended")
        born = sites[0].past is None
        past = sympy.S.Zero if born else _number(sites)
        start = cls(past, {group.start: past for group in state.groups if group.start is not None})
        for site in sites:
            if site.start is not None and site.start.node is not None:
                (start.counters if site.start.scalar else start.indices).add(site.start.node)
        return start

    def enter(self, flows: Flows, graph: Graph) -> None:
        """Let `flows` know what the positions are, and which writes move counters on behind all that reads them."""
        for node in self.indices:
            flows.values[node] = Flow(flows.labelled(flows.sizes(node), (TOKENS,)), b"", offset=self.past)
        for node in self.counters:
            flows.values[node] = Flow(("",) * len(flows.sizes(node)), b"", offset=self.past)
        flows.operands.update({node: [] for node in (*self.indices, *self.counters)})
        writers = Writers(graph)
        for counter in self.counters:
            aliases = writers.aliases(graph.nodes, counter)
            for writer in writers.all_of([counter]):
                readers = {user for node in aliases for user in node.users} - {writer}
                if is_call(writer, (), ("add_",)) and all(
                    reader < writer or reader.op == "output" for reader in readers
                ):
                    flows.written.add(writer)


def _number(sites: Iterable[CacheSite]) -> sympy.Expr:
    """The first position, as an expression if the graph has it as a number, else as a symbol."""
    starts = [site.start for site in sites if site.start is not None]
    sizes = {expr(start.size) for start in starts if start.size is not None}
    if len(sizes) == 1 and all(start.node is None for start in starts):
        return sizes.pop()
    if sizes:
        raise NotShared("its static caches are written at positions that are found in several ways")
    return sympy.Symbol("start", integer=True, nonnegative=True)


def shows_as_told(mask: Node, rows: int, tokens: int, keys: int, flows: Flows) -> bool:
    """Whether a mask is an input of truth values [rows or 1, 1, tokens, keys], which can be looked at in every call."""
    if mask.op != "placeholder" or mask.meta["example_value"].dtype != torch.bool:
        return False
    sizes = flows.sizes(mask)
    return len(sizes) == 4 and sizes[0] in (1, rows) and sizes[1:] == (1, tokens, keys)
