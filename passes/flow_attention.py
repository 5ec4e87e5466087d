"""The flow of an attention's result: each token sees exactly those up to itself, or the proof of sharing fails."""

from __future__ import annotations

import math
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from .base import GraphState
from .by_hand import sink_logits
from .flow import BATCH, TOKENS, Flow, Flows, NotShared, digest
from .flow_static import shows_as_told
from .hand_written import HandWritten
from .known import known_tensors
from .mask_values import HUGE
from .masks import MaskSpec, prove_mask
from .sites import AttentionSite, CacheSite
from .tensors import expr, shape

__all__ = ["AttentionFlows", "new_tokens"]


class AttentionFlows:
    """The attentions of a graph whose caches all begin (creates), are all extended, or are all static.

    mask: the input that hides tokens from all behind them, if an attention met one. windows: of attentions that are
    understood, see `Sharing`.
    """

    def __init__(self, state: GraphState, flows: Flows, creates: bool, static: bool) -> None:
        self.state, self.flows, self.creates, self.static = state, flows, creates, static
        self.mask: Node | None = None
        self.windows: dict[Node, int | None] = {}
        self.specs: dict[tuple[object, ...], MaskSpec] = {}

    def stored(self, site: CacheSite) -> Flow:
        """The flow of a site's new tokens, laid out as a cache."""
        node = new_tokens(site)
        flow = self.flows.resolved(self.flows.of(node))
        wanted = tuple({"B": BATCH, "S": TOKENS}.get(axis, "") for axis in site.axes)
        if flow.labels != self.flows.labelled(self.flows.sizes(node), wanted):
            raise NotShared(f"{node.name} is not one vector a token")
        return flow

    def flow(self, site: AttentionSite) -> Flow:
        """The flow of an attention's result; raises `NotShared`."""
        if site.lowered is not None:
            raise NotShared(f"the attention {site.node.name} is flex_attention")
        if not site.paged or site.key is None or site.value is None:
            raise NotShared(f"the attention {site.node.name} reads something else than the caches")
        if site.by_hand is not None and self.creates:
            return self._by_hand(site, site.by_hand)
        lead, order = (BATCH, ""), range(4)
        scale = site.scale if site.scale is not None else float(self.flows.size(shape(site.query)[3])) ** -0.5
        self.windows[site.node] = self._window(site, site.mask_node)
        facts = (int(self.flows.size(shape(site.query)[1])), scale, site.softcap)
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
        self.windows[site.node] = self._window(site, mask)
        facts = (site.num_heads, scores.scale * site.key_scale, scores.softcap)
        finite = any(step.kind == "show" and step.value != -math.inf for step in scores.bias)
        if finite and self.mask is not None:
            raise NotShared(f"a row of {site.node.name} that is hidden as a whole sees all tokens")
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
        dim] of the query, and which of these each of the result's own is. facts: heads, scale, softcap."""
        assert site.key is not None and site.value is not None
        flows = self.flows
        labels = (*lead, TOKENS, "")
        flow, sizes = flows.resolved(flows.of(query)), flows.sizes(query)
        wanted = flows.labelled([sizes[dim] for dim in query_order], labels)
        if tuple(flow.labels[dim] for dim in query_order) != wanted:
            raise NotShared(f"the queries {query.name} are not one vector a token")
        operands = [flow, self.stored(site.key), self.stored(site.value)]
        flows.operands[site.node] = [query, new_tokens(site.key), new_tokens(site.value)]
        if sinks is not None:
            operands.append(flows.resolved(flows.of(sinks)))
            flows.operands[site.node].append(sinks)
        value = site.node.meta["example_value"]
        how = digest("attention", value.dtype, int(site.value.size("D")), *facts, *(each.digest for each in operands))
        return Flow(flows.labelled(flows.sizes(site.node), [labels[dim] for dim in order]), how, True, last=flow.last)

    def _window(self, site: AttentionSite, mask: Node | None) -> int | None:
        """How many tokens a query sees, itself included, if not all up to itself; raises unless it sees exactly these,
        but for those that an input hides from all."""
        queries, keys = site.num_queries, site.kv_len
        spec = site.mask or self._proven(mask, site.is_causal, queries, keys)
        if self.static and spec.tensor is not None and spec.columns is None:
            self._told(site, mask, spec)
            return None
        before = self.flows.expr(keys) - self.flows.expr(queries)
        past = self.flows.past if self.static else before
        exact = spec.causal_offset is not None and self._is_past(spec.causal_offset, past)
        last = spec.causal_offset is None and self.flows.size(queries) == 1 and sympy.expand(before - past) == 0
        if not exact and not last:
            raise NotShared(f"the mask of {site.node.name} is not proven to hide later tokens only ({spec.proof})")
        if spec.tensor is not None:
            if not spec.padding or spec.columns is None or self.mask not in (None, spec.columns):
                raise NotShared(f"the mask of {site.node.name} is not understood as a whole ({spec.proof})")
            self.mask = spec.columns
            column = spec.first_column if self.static else before + spec.first_column
            column = sympy.expand(column.xreplace(dict(self.flows.equal)))
            if self.static and column != 0:
                raise NotShared(f"the mask of {site.node.name} does not begin with the cache")
            if column != 0:
                self.flows.assume("totals", column)  # column k is token k
        if spec.window is None:
            return None
        if not sympy.sympify(spec.window).is_Integer:
            raise NotShared(f"the window of {site.node.name} depends on a length")
        return int(spec.window)

    def _told(self, site: AttentionSite, mask: Node | None, spec: MaskSpec) -> None:
        """An attention over whole buffers, whose mask is an input that each call looks at."""
        flows, keys = self.flows, self.flows.size(site.kv_len)
        if (
            mask is None
            or site.is_causal
            or self.mask not in (None, mask)
            or not shows_as_told(mask, flows.num_rows, flows.num_tokens, keys, flows)
        ):
            raise NotShared(f"the mask of {site.node.name} is not understood as a whole ({spec.proof})")
        self.mask = mask

    def _is_past(self, offset: sympy.Expr, past: sympy.Expr) -> bool:
        off_by = sympy.expand(offset.xreplace(dict(self.flows.equal)) - past)
        if off_by != 0 and not self.creates and not self.static and self.flows.known_at_calls(off_by):
            self.flows.assume("zeros", off_by)
            return True
        return off_by == 0

    def _proven(
        self, mask: Node | None, is_causal: bool, queries: int | torch.SymInt, keys: int | torch.SymInt
    ) -> MaskSpec:
        key = (mask, is_causal, expr(queries), expr(keys))
        if key not in self.specs:
            facts = (self.flows.equal, known_tensors(self.state))
            self.specs[key] = prove_mask(mask, is_causal, queries, keys, *facts)
        return self.specs[key]


def new_tokens(site: CacheSite) -> Node:
    """What a step stores in a cache."""
    node = site.node if site.kind == "create" else site.new
    assert node is not None
    return node
