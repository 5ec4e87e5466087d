"""Match attention: SDPA calls, and the caches that their K and V come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import Node

from .base import AttentionSite, CacheSite, GraphState, Pass
from .caches import kept_outputs
from .heads import Heads, trace_heads
from .masks import prove_mask
from .tensors import argument, expr, hint, is_call, is_tensor, same_size, shape

__all__ = ["LinkAttention", "MatchAttention", "ProveMasks"]

SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


class MatchAttention(Pass):
    """Find every SDPA call, and trace its K and V back to paged inputs or to tensors that the graph returns."""

    def apply(self, state: GraphState) -> int:
        returned = set(kept_outputs(state))
        axes = {node: site.axes for site in state.sites for node in site.nodes}
        for node in state.gm.graph.nodes:
            if is_call(node, SDPA):
                state.attentions.append(self._match(node, axes, returned))
        return len(state.attentions)

    def _match(self, node: Node, axes: dict[Node, str], returned: set[Node]) -> AttentionSite:
        query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
        site = AttentionSite(node, query)
        site.mask_node = argument(node, 3, "attn_mask")
        site.is_causal = bool(argument(node, 5, "is_causal", False))
        site.scale = node.kwargs.get("scale")  # type: ignore[assignment]
        site.reason = self._refuse(node, query, key, value)
        if site.reason:
            return site
        traced = []
        for operand in (key, value):
            result = self._trace(operand, axes, returned, hint(shape(query)[1]), bool(node.kwargs.get("enable_gqa")))
            if isinstance(result, str):
                site.reason = result
                return site
            traced.append(result)
        site.candidates = (traced[0], traced[1])
        return site

    @staticmethod
    def _refuse(node: Node, query: Node, key: Node, value: Node) -> str:
        if any(not is_tensor(operand) or len(shape(operand)) != 4 for operand in (query, key, value)):
            return "its operands are not all 4-D tensors"
        if argument(node, 4, "dropout_p", 0.0) != 0.0:
            return f"dropout_p is {argument(node, 4, 'dropout_p')}, not 0"
        if not same_size(shape(query)[0], shape(key)[0]):
            return "query and key differ in batch size"
        return ""

    @staticmethod
    def _trace(
        operand: Node, axes: dict[Node, str], returned: set[Node], heads_q: int, enable_gqa: bool
    ) -> tuple[Node, str] | str:
        """The cache that an operand is, and the cache's axes; or why it is none."""
        reason = ""
        for layout in ("BHSD", "BSHD"):
            found = trace_heads(
                operand, lambda n: n in axes or n in returned, lambda n, layout=layout: axes.get(n, layout)
            )
            if isinstance(found, str):
                reason = reason or found
                continue
            node, heads = found
            fault = _fault(node, heads, axes.get(node, layout), heads_q, enable_gqa)
            if not fault:
                return node, axes.get(node, layout)
            reason = reason or fault
        return reason


def _fault(node: Node, heads: Heads, axes: str, heads_q: int, enable_gqa: bool) -> str:
    """Why a traced path is not [B, heads, S, D] with grouped heads, or ''."""
    if len(heads.axes) != 4 or [axis[0] for axis in heads.axes] != list("BHSD") or len(shape(node)) != 4:
        return f"the dimensions {heads.axes} of its operands are not [B, H, S, D]"
    cached = hint(shape(node)[axes.index("H")]) * heads.repeats
    if cached not in (heads_q, 1) and not (enable_gqa and heads_q % cached == 0):  # one head broadcasts
        return f"{cached} key heads do not match {heads_q} query heads"
    return ""


class LinkAttention(Pass):
    """Attention whose K and V are both paged caches of one group will read pages."""

    def apply(self, state: GraphState) -> int:
        group_of = {id(site): i for i, group in enumerate(state.groups) for site in group.sites}
        for attention in state.attentions:
            if attention.candidates is None:
                continue
            sites = [state.site_of(node) for node, _ in attention.candidates]
            if sites[0] is None or sites[1] is None:
                attention.reason = attention.reason or "its K and V are not kept by the program"
                continue
            attention.key, attention.value = sites[0], sites[1]
            attention.key.role, attention.value.role = "key", "value"
            attention.reason = self._refuse(attention.key, attention.value, group_of) or _unequal(attention)
            attention.paged = not attention.reason
        return sum(attention.paged for attention in state.attentions)

    @staticmethod
    def _refuse(key: CacheSite, value: CacheSite, group_of: dict[int, int]) -> str:
        if key.size("H") != value.size("H"):
            return f"K and V have {key.size('H')} and {value.size('H')} heads"
        if "create" in (key.kind, value.kind):
            return "" if key.kind == value.kind else "one of K and V is dense"
        if group_of[id(key)] != group_of[id(value)]:
            return "K and V belong to different caches"
        return ""


class ProveMasks(Pass):
    """Say what each paged attention's mask means; what is not proven is passed on as a tensor."""

    def apply(self, state: GraphState) -> int:
        proven = 0
        for attention in state.attentions:
            if not attention.paged or attention.key is None or attention.key.kind == "create":
                continue
            attention.mask = prove_mask(
                attention.mask_node,
                attention.is_causal,
                shape(attention.query)[2],
                attention.kv_len,
                _equal_lengths(state),
            )
            proven += attention.mask.tensor is None
        return proven


def _unequal(attention: AttentionSite) -> str:
    """Why K and V are not equally long parts of their caches, or ''."""
    lengths = [shape(node)[axes.index("S")] for node, axes in attention.candidates or ()]
    if attention.key is not None and attention.key.kind == "static" and not same_size(*lengths):
        return f"K and V are {lengths[0]} and {lengths[1]} tokens of their caches"
    return ""


def _equal_lengths(state: GraphState) -> dict:
    """Symbols of lengths that are equal because their caches belong to one group: each to the group's first."""
    equal = {}
    for group in state.groups:
        if group.kind == "create":
            continue
        lengths = [expr(shape(site.past)[site.axes.index("S")]) for site in group.sites if site.past]
        equal.update({length: lengths[0] for length in lengths if length.is_symbol and length != lengths[0]})
    return equal
