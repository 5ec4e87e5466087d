"""Where a step that began before its old tokens were back waits for them: once for each layer."""

from __future__ import annotations

from torch.fx import Node

from .. import ops
from .base import GraphState

__all__ = ["wait_for_layers"]


def wait_for_layers(state: GraphState, g: int, plans: dict[int, Node]) -> None:
    """Have the writes and reads of group `g`'s layers wait for their old tokens: K's and V's of an attention at once,
    before the first of them is written to. plans: the plan to write and read each site by, by the site's id; replaced
    by one that is there when the site's tokens are."""
    graph, sites = state.gm.graph, state.groups[g].sites
    layers = {id(site): {i} for i, site in enumerate(sites)}
    for attention in state.attentions:
        pair = [id(site) for site in (attention.key, attention.value) if id(site) in layers]
        together = set().union(*(layers[site] for site in pair))
        layers |= {id(sites[i]): together for i in together}
    order = {node: n for n, node in enumerate(graph.nodes)}
    waits: dict[tuple[int, ...], Node] = {}
    for site in sites:
        layer = tuple(sorted(layers[id(site)]))
        if layer not in waits:
            first = min((sites[i] for i in layer), key=lambda site: order[site.node])
            with graph.inserting_before(first.node):
                waits[layer] = graph.call_function(ops.arrived, (plans[id(site)], first.new, g, list(layer)))
        plans[id(site)] = waits[layer]
