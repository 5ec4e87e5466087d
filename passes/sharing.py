"""ProveSharing: which inputs of a graph make K and V what they are, position by position.

Caches of equal tokens are equal only if nothing else enters them: so every operation between the inputs and the stored
tokens must be known to keep positions and rows apart (`flow_ops`), and every attention on the way must let a token see
exactly those up to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import sympy
import torch
from torch.fx import Node

from . import flow_ops  # noqa: F401  (it registers its handlers)
from .attention import equal_lengths
from .base import AttentionSite, CacheSite, GraphState, Pass, Sharing
from .by_hand import sink_logits
from .flow import BATCH, TOKENS, Flow, Flows, NotShared, digest
from .hand_written import HandWritten
from .known import known_tensors
from .mask_effects import Writers
from .mask_values import HUGE
from .masks import MaskSpec, prove_mask
from .tensors import expr, shape

__all__ = ["ProveSharing"]

_SMALL = 64  # elements of an input that is hashed whole


class ProveSharing(Pass):
    """Say what the caches of a graph depend on, or why the tokens alone do not say what is in them."""

    def apply(self, state: GraphState) -> int:
        if not state.sites:
            return 0
        try:
            state.sharing = _Proof(state).result()
        except NotShared as reason:
            state.sharing = Sharing(reason=str(reason))
        return int(not state.sharing.reason)


class _Proof:
    def __init__(self, state: GraphState) -> None:
        kinds = {group.kind for group in state.groups}
        if kinds not in ({"create"}, {"append"}):
            raise NotShared(f"its caches are of kind {' and '.join(sorted(kinds))}, not all begun or all extended here")
        self.state = state
        self.creates = kinds == {"create"}
        lead = state.groups[0].sites[0]
        equal = equal_lengths(state)
        past = sympy.S.Zero
        if lead.past is not None:
            past = sympy.expand(expr(shape(lead.past)[lead.axes.index("S")]).xreplace(equal))
        self.flows = Flows(lead.size("B"), lead.new_tokens, past, equal)
        self.roles: dict[Node, str] = {}
        self.mask: Node | None = None
        self.specs: dict[tuple[object, ...], MaskSpec] = {}

    def result(self) -> Sharing:
        """The proof's outcome; raises `NotShared`."""
        flows, graph = self.flows, self.state.gm.graph
        attentions = {node: site for site in self.state.attentions for node in (site.node, site.result)}
        for node in graph.nodes:
            try:
                if node.op == "placeholder":
                    self._input(node)
                elif node.op == "get_attr":
                    raise NotShared(f"{node.name} is a constant of the graph")
                elif node in attentions:
                    flows.values[node] = self._attention(attentions[node])
                else:
                    flows.compute(node)
            except NotShared as reason:
                flows.values[node] = reason
        digests = []
        for site in self.state.sites:
            flow = self._stored(site)
            digests.append(digest(site.axes, flow.digest))
        return self._sharing(digest(*digests))

    def _sharing(self, how: bytes) -> Sharing:
        visited = self._visited()
        attentions = {site.node for site in self.state.attentions}  # some are stand-ins that have no schema
        for writer in Writers(self.state.gm.graph).all_of(visited):
            if writer not in attentions:
                raise NotShared(f"{writer.name} writes in place to what K and V come from")
        role = {node: self.roles[node] for node in self.state.placeholders if node in visited and node in self.roles}
        aligned = [node for node, kind in role.items() if kind == "aligned"]
        ids = [node for node in aligned if len(shape(node)) == 2 and "pos" not in node.name]
        if not ids or self.flows.sizes(ids[0])[0] != self.flows.num_rows:
            raise NotShared("no token ids make its K and V")
        positions = [node.name for node in aligned if "pos" in node.name]
        return Sharing(
            ids=ids[0].name,
            positions=tuple(positions),
            others=tuple(node.name for node in aligned if node is not ids[0] and node.name not in positions),
            mask=self.mask.name if self.mask is not None else "",
            weights=tuple(node.name for node, kind in role.items() if kind == "weight"),
            whole=tuple(node.name for node, kind in role.items() if kind == "whole"),
            digest=how,
            starts=self.creates and self.flows.num_tokens > 1,
        )

    def _visited(self) -> set[Node]:
        visited: set[Node] = set()
        pending = [_new(site) for site in self.state.sites]
        while pending:
            node = pending.pop()
            if node not in visited:
                visited.add(node)
                pending += self.flows.operands.get(node, ())
        return visited

    def _input(self, node: Node) -> None:
        value, flows = node.meta.get("example_value"), self.flows
        if not isinstance(value, torch.Tensor):
            return
        if node in self.state.inputs:
            raise NotShared(f"the cache {node.name} is read by something else than an attention")
        if _is_weight(node):
            self.roles[node] = "weight"
            flows.values[node] = Flow(("",) * value.dim(), digest("weight", node.name))
            return
        sizes = flows.sizes(node)
        if value.dtype.is_floating_point or value.dtype.is_complex:
            if sizes:
                raise NotShared(f"the input {node.name} holds floating-point numbers, not token ids")
        elif sizes in ((flows.num_rows, flows.num_tokens), (1, flows.num_tokens), (flows.num_tokens,)):
            if len(sizes) == 1 and flows.num_rows == flows.num_tokens > 1:
                raise NotShared(f"the input {node.name} may run along the tokens or along the rows")
            self.roles[node] = "aligned"
            labels = flows.labelled(sizes, (BATCH, TOKENS)[2 - len(sizes) :])
            flows.values[node] = Flow(labels, digest("input", node.name), varies=True)
            return
        if prod(sizes) > _SMALL:
            raise NotShared(f"the input {node.name} of shape {list(shape(node))} is not one number a token")
        self.roles[node] = "whole"
        flows.values[node] = Flow(("",) * len(sizes), digest("whole", node.name))

    def _stored(self, site: CacheSite) -> Flow:
        """The flow of a site's new tokens, laid out as a cache."""
        node = _new(site)
        flow = self.flows.resolved(self.flows.of(node))
        wanted = tuple({"B": BATCH, "S": TOKENS}.get(axis, "") for axis in site.axes)
        if flow.labels != self.flows.labelled(self.flows.sizes(node), wanted):
            raise NotShared(f"{node.name} is not one vector a token")
        return flow

    def _attention(self, site: AttentionSite) -> Flow:
        if site.lowered is not None:
            raise NotShared(f"the attention {site.node.name} is flex_attention")
        if not site.paged or site.key is None or site.value is None:
            raise NotShared(f"the attention {site.node.name} reads something else than the caches")
        if site.by_hand is not None and self.creates:
            return self._by_hand(site, site.by_hand)
        lead, order = (BATCH, ""), range(4)
        scale = site.scale if site.scale is not None else float(self.flows.size(shape(site.query)[3])) ** -0.5
        facts = (int(self.flows.size(shape(site.query)[1])), scale, site.softcap, self._window(site, site.mask_node))
        return self._attended(site, site.query, order, lead, order, site.sinks, facts)

    def _by_hand(self, site: AttentionSite, found: HandWritten) -> Flow:
        """An attention over the new tokens only, which stays as it was written."""
        scores, product, output = found.scores, found.scores.product, found.output
        lead = {2: (BATCH, ""), 3: (BATCH, "", "")}.get(product.lead)
        if lead is None or output.lead != product.lead or scores.query_factors:
            raise NotShared(f"the queries of {site.node.name} are not understood")
        mask: Node | None = None
        if scores.bias:
            (step, *more) = scores.bias
            shows = step.kind == "show" and step.value <= HUGE
            if more or step.tensor is None or step.lead != 2 or not (shows or step.kind == "add"):
                raise NotShared(f"what is added to the scores of {site.node.name} is not one mask")
            mask = step.tensor
        sinks = None if scores.sink is None else sink_logits(scores.sink, site.num_heads, scores.lead)
        facts = (site.num_heads, scores.scale * site.key_scale, scores.softcap, self._window(site, mask))
        return self._attended(site, product.left, product.left_order, lead, output.out_order, sinks, facts)

    def _attended(
        self,
        site: AttentionSite,
        query: Node,
        query_order: Sequence[int],
        lead: tuple[str, ...],
        order: Sequence[int],
        sinks: Node | None,
        facts: tuple[object, ...],
    ) -> Flow:
        """The flow of an attention's result. query_order, order: which of its own dimensions are [*lead, tokens, head
        dim] of the query, and which of these each of the result's own is. facts: heads, scale, softcap, window."""
        assert site.key is not None and site.value is not None
        flows = self.flows
        labels = (*lead, TOKENS, "")
        flow, sizes = flows.resolved(flows.of(query)), flows.sizes(query)
        wanted = flows.labelled([sizes[dim] for dim in query_order], labels)
        if tuple(flow.labels[dim] for dim in query_order) != wanted:
            raise NotShared(f"the queries {query.name} are not one vector a token")
        operands = [flow, self._stored(site.key), self._stored(site.value)]
        flows.operands[site.node] = [query, _new(site.key), _new(site.value)]
        if sinks is not None:
            operands.append(flows.resolved(flows.of(sinks)))
            flows.operands[site.node].append(sinks)
        value = site.node.meta["example_value"]
        how = digest("attention", value.dtype, int(site.value.size("D")), *facts, *(each.digest for each in operands))
        return Flow(flows.labelled(flows.sizes(site.node), [labels[dim] for dim in order]), how, True)

    def _window(self, site: AttentionSite, mask: Node | None) -> int | None:
        """How many tokens a query sees, itself included, if not all up to itself; raises unless it sees exactly these,
        but for those that an input hides from all."""
        queries, keys = site.num_queries, site.kv_len
        spec = site.mask or self._proven(mask, site.is_causal, queries, keys)
        one = self.flows.size(queries) == 1
        exact = spec.causal_offset is not None and self._is_past(spec.causal_offset, queries, keys)
        if not exact and not (one and spec.causal_offset is None):
            raise NotShared(f"the mask of {site.node.name} is not proven to hide later tokens only ({spec.proof})")
        if spec.tensor is not None:
            if not spec.padding or spec.columns is None or self.mask not in (None, spec.columns):
                raise NotShared(f"the mask of {site.node.name} is not understood as a whole ({spec.proof})")
            self.mask = spec.columns
        if spec.window is None:
            return None
        if not sympy.sympify(spec.window).is_Integer:
            raise NotShared(f"the window of {site.node.name} depends on a length")
        return int(spec.window)

    def _is_past(self, offset: sympy.Expr, queries: int | torch.SymInt, keys: int | torch.SymInt) -> bool:
        before = self.flows.expr(keys) - self.flows.expr(queries)
        return sympy.expand(offset.xreplace(dict(self.flows.equal)) - before) == 0

    def _proven(
        self, mask: Node | None, is_causal: bool, queries: int | torch.SymInt, keys: int | torch.SymInt
    ) -> MaskSpec:
        key = (mask, is_causal, expr(queries), expr(keys))
        if key not in self.specs:
            facts = (self.flows.equal, known_tensors(self.state))
            self.specs[key] = prove_mask(mask, is_causal, queries, keys, *facts)
        return self.specs[key]


def _new(site: CacheSite) -> Node:
    node = site.node if site.kind == "create" else site.new
    assert node is not None
    return node


def _is_weight(node: Node) -> bool:
    """Whether an input is a parameter or a buffer of a module."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name
    return node.type is torch.nn.Parameter or "._parameters[" in name or "._buffers[" in name
