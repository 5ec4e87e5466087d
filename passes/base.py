"""The contract of a pass, and the state that passes hand on."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import SymInt
from torch.fx import GraphModule, Node

from .sites import AttentionSite, CacheGroupSites, CacheSite, PagedInput

__all__ = ["GraphState", "HeldInput", "NewInput", "Pass", "PassResult", "Sharing"]

log = logging.getLogger("paged_inductor.passes")


@dataclass
class GraphState:
    """A graph on its way through the pipeline.

    inputs: the placeholders that receive paged tensors. new_inputs: those that the rewrite added, in order.
    dense_outputs: positions among the captured graph's outputs that the rewritten one still returns, in order.
    triangles: inputs that are lower triangles, by name, with the number above the diagonal (see `known`).
    adoptions: static caches that came in dense and should be handles from now on. sharing: what the caches depend on.
    held: inputs that took the place of the cache's length, after all others (see `hold`); dropped: inputs that are none
    any more: integers, and what held masks are made of; host_outputs: numbers that the rewritten graph does not return
    either, by position: the caller computes them from the inputs; not_held: why a step still depends on the length;
    written: positions of the inputs that a step with held inputs writes to, beside its arenas: unless they stay in
    place, Inductor records no such step.
    captured: the inputs as captured. history: one result per pass.
    """

    gm: GraphModule
    inputs: dict[Node, PagedInput]
    sites: list[CacheSite] = field(default_factory=list)
    groups: list[CacheGroupSites] = field(default_factory=list)
    attentions: list[AttentionSite] = field(default_factory=list)
    new_inputs: list[NewInput] = field(default_factory=list)
    dense_outputs: list[int] = field(default_factory=list)
    triangles: Mapping[str, float] = field(default_factory=dict)
    adoptions: list[CacheSite] = field(default_factory=list)
    sharing: Sharing | None = None
    held: list[HeldInput] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    host_outputs: dict[int, int | SymInt] = field(default_factory=dict)
    not_held: str = ""
    written: list[int] = field(default_factory=list)
    captured: tuple[Node, ...] = ()
    history: list[PassResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.captured = tuple(self.placeholders)

    @property
    def placeholders(self) -> list[Node]:
        """The graph's inputs, in order."""
        return self.gm.graph.find_nodes(op="placeholder")

    @property
    def outputs(self) -> tuple[object, ...]:
        """What the graph returns: nodes and constants."""
        return tuple(self.gm.graph.output_node().args[0])

    def group_of(self, table: object) -> int:
        """The group whose block table an input is."""
        return next(new.group for new in self.new_inputs if new.node is table)

    def site_of(self, node: Node) -> CacheSite | None:
        """The site whose old and new tokens `node` holds, if there is one."""
        return next((site for site in self.sites if node in site.nodes), None)


@dataclass(frozen=True)
class Sharing:
    """What K and V of a graph depend on, by position: the graph's inputs, by name.

    reason: why the tokens alone do not say what they are, or "": then the rest is meaningful. ids: integers [B, S], the
    tokens. positions, others: integers [B, S], [1, S] or [S], of which those at a token belong to it. mask: [B,
    kv_len], of which column k belongs to token k: 1 if it can be seen. weights: parameters and buffers. whole: small
    tensors that belong to no position. digest: equal for graphs that compute K and V in the same way, windows apart.
    starts: it begins new caches. order: of each group of the graph, its place among them, which is the same in all
    graphs of a model. windows: of each attention, the place of the group that it reads, and how many tokens a query
    sees, itself included (None: all that it is shown). zeros, totals: sizes of the graph that must be 0, or the number
    of tokens before this call, for all this to hold. results: equal for graphs that compute everything else that they
    return in the same way, from the tokens up to the last positions, of which they look at `last`; b"" if that is not
    proven.
    """

    reason: str = ""
    ids: str = ""
    positions: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    mask: str = ""
    weights: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    digest: bytes = b""
    starts: bool = False
    order: tuple[int, ...] = ()
    windows: tuple[tuple[int, int | None], ...] = ()
    zeros: tuple[sympy.Expr, ...] = ()
    totals: tuple[sympy.Expr, ...] = ()
    results: bytes = b""
    last: int = 0


@dataclass(frozen=True)
class NewInput:
    """A placeholder that the rewrite added for group `group`.

    kind: "table", "lens", then if it is static "extent" (the positions up to the last one that this step writes, unless
    the graph can say it itself), "written_lens" and "written" (of all that were written) and where kernels serve
    "row_start" (the position of the first token), then if it has attention with one query "num_chunks" and
    "row_chunks" on the CPU, and where kernels serve "shared_prefix" (unless it is static), then one "arena" per site,
    in the order of `site`.
    """

    kind: str
    group: int
    site: int
    node: Node


@dataclass(frozen=True)
class HeldInput:
    """A placeholder that came in the place of the cache's length.

    kind: "length": an int64 tensor of no dimensions that holds the captured integer input at position `index`; "width"
    and "blocks": the integers that are the table's width and the arenas' number of blocks, of group `index`; "hidden":
    int32 [B], how many of each row's first tokens are not seen, of group `index`; "mask": a mask as long as the table
    of group `index`, or as the buffer whose first positions are read, or as it was, which `make(arguments, tokens that
    the table has room for)` returns.
    """

    kind: str
    index: int
    node: Node
    make: Callable[[Sequence[Any], int], torch.Tensor] | None = None


@dataclass(frozen=True)
class PassResult:
    """What a pass did. matches: how many places it matched or changed. seconds: how long it took."""

    name: str
    matches: int
    seconds: float


class Pass(ABC):
    """One step of the pipeline. A pass knows no backend; its author writes `apply`."""

    def __call__(self, state: GraphState) -> None:
        start = time.perf_counter()
        matches = self.apply(state)
        result = PassResult(type(self).__name__, matches, time.perf_counter() - start)
        state.history.append(result)
        log.debug("%s: %d matches in %.4f s", result.name, matches, result.seconds)

    @abstractmethod
    def apply(self, state: GraphState) -> int:
        """Do the pass's work on `state`; returns the number of matches."""
