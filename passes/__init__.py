"""The FX passes: find KV caches and attention in a captured graph, prove masks, rewrite to paged operations.

They are imported as `paged_inductor.passes`, and know neither the runtime nor a backend.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from .attention import LinkAttention, MatchAttention, ProveMasks
from .base import GraphState, HeldInput, NewInput, Pass, PassResult, Sharing
from .by_hand import NormalizeAttention
from .caches import GroupCaches, MatchAppends, MatchCreates
from .clone import clone
from .hold import HoldLengths
from .linear import RewriteSingleRowLinears
from .lint import Lint
from .pairs import PairWrites
from .prove_sharing import ProveSharing
from .prune import prune
from .report import GraphReport, SiteReport, report
from .rewrite import ArenaLayouts, Rewrite
from .sites import AttentionSite, CacheGroupSites, CacheSite, KeptOutput, PagedInput, Start
from .slides import MatchSlides
from .static import ChooseAdoption, ForgetUnmatched, MatchStatic

__all__ = [
    "AttentionSite",
    "CacheGroupSites",
    "CacheSite",
    "GraphReport",
    "GraphState",
    "HeldInput",
    "KeptOutput",
    "NewInput",
    "PagedInput",
    "PassResult",
    "Sharing",
    "SiteReport",
    "Start",
    "page_graph",
]


def pipeline(
    fake_mode: FakeTensorMode, block_size: int, arena_layout: ArenaLayouts, single_row_linears: bool, hold: bool
) -> list[Pass]:
    """The passes in order."""
    return [
        MatchSlides(),
        MatchStatic(),
        ForgetUnmatched(),
        MatchAppends(),
        MatchAttention(),
        MatchCreates(),
        GroupCaches(),
        LinkAttention(),
        NormalizeAttention(),
        ProveMasks(),
        ProveSharing(),
        ChooseAdoption(),
        Rewrite(fake_mode, block_size, arena_layout, streams=not hold),
        *([HoldLengths(fake_mode)] if hold else []),
        *([RewriteSingleRowLinears()] if single_row_linears else []),
        PairWrites(),
        Lint(),
    ]


def page_graph(
    gm: GraphModule,
    inputs: dict[str, PagedInput],
    fake_mode: FakeTensorMode,
    block_size: int,
    arena_layout: ArenaLayouts,
    single_row_linears: bool = False,
    triangles: Mapping[str, float] | None = None,
    hold: bool = False,
) -> tuple[GraphState, GraphReport]:
    """A rewritten copy of `gm` (which stays as it is), and the report of what was found.

    inputs: the placeholders that receive paged tensors, by name. fake_mode: the one that `gm` was captured with.
    block_size: of caches born in this graph. arena_layout: see `Rewrite`. single_row_linears: whether linear layers on
    one row become formulas for a compiler to vectorise. triangles: see `GraphState`. hold: see `HoldLengths`.
    A graph without caches is otherwise only copied, and so is one
    that has `state.adoptions`.
    """
    copy = clone(gm)
    prune(copy.graph)  # Dynamo leaves size queries behind that would pass for readers of the caches
    state = GraphState(
        copy,
        {node: inputs[node.name] for node in copy.graph.find_nodes(op="placeholder") if node.name in inputs},
        triangles=triangles or {},
    )
    for step in pipeline(fake_mode, block_size, arena_layout, single_row_linears, hold):
        step(state)
        if state.adoptions:  # the graph will be captured anew, with handles in their places
            break
    return state, report(state)
