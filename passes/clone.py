"""A copy of Dynamo's graph that may be edited: Dynamo reads its own placeholders after the backend returns."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

__all__ = ["clone"]


def clone(gm: GraphModule) -> GraphModule:
    """A graph module with the same submodules and parameters and a copied graph; node metadata is shared shallowly."""
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for node, copy in copies.items():
        source = getattr(node, "_dynamo_source", None)
        if source is not None:
            copy._dynamo_source = source  # type: ignore[attr-defined]
    result = GraphModule(gm, graph)
    result.meta = dict(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        result._param_name_to_source = gm._param_name_to_source
    return result
