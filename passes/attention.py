"""Match attention, however it is spelled, and the caches that its K and V come from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .base import GraphState, Pass
from .by_hand import check
from .caches import kept_outputs
from .flex import NotLowered, is_flex_attention, lower
from .hand_written import HandWritten, follow_scores
from .heads import MERGED, TILED, Heads, trace_heads
from .known import known_tensors
from .mask_effects import Writers
from .masks import MaskSpec, prove_mask
from .products import Product
from .sites import AttentionSite, CacheSite
from .symbols import decided_extremes
from .tensors import argument, expr, hint, is_call, is_tensor, same_size, shape

__all__ = ["LinkAttention", "MatchAttention", "ProveMasks", "equal_lengths"]

SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


class MatchAttention(Pass):
    """Find every SDPA call and every attention written by hand, and trace its K and V back to paged inputs or to
    tensors that the graph returns."""

    def apply(self, state: GraphState) -> int:
        self._returned = set(kept_outputs(state))
        self._axes = {node: site.axes for site in state.sites for node in site.nodes}
        self._writers = Writers(state.gm.graph)
        self._known: dict[str, Node] = {}
        for node in list(state.gm.graph.nodes):
            if is_call(node, SDPA):
                state.attentions.append(self._match(node))
            elif is_flex_attention(node):
                state.attentions.append(self._match_flex(state.gm, node))
            elif found := follow_scores(node, lambda product: not isinstance(self._key(product), str)):
                state.attentions.append(self._match_by_hand(found))
        return len(state.attentions)

    def _match(self, node: Node) -> AttentionSite:
        query, key, value = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
        site = AttentionSite(node, query, shape(query)[2] if is_tensor(query) and len(shape(query)) > 2 else 1)
        site.mask_node = argument(node, 3, "attn_mask")
        site.is_causal = bool(argument(node, 5, "is_causal", False))
        site.scale = node.kwargs.get("scale")  # type: ignore[assignment]
        site.reason = self._refuse(node, query, key, value)
        if site.reason:
            return site
        traced, tiles = [], []
        for operand in (key, value):
            result = self._trace(operand, list("BHSD"))
            if isinstance(result, str):
                site.reason = result
                return site
            cache, heads = result
            site.reason = _mismatch(heads, cache, hint(shape(query)[1]), bool(node.kwargs.get("enable_gqa")))
            site.reason = site.reason or heads.converted
            if not site.reason and heads.scale != 1:
                site.reason = f"{cache[0].name} is scaled between cache and attention"
            if site.reason:
                return site
            traced.append(cache)
            tiles.append(_tiles(heads, cache))
        site.tiled = tiles[0]
        if tiles[0] != tiles[1] or tiles[0] * _heads(traced[0]) not in (0, hint(shape(query)[1])):
            site.reason = "its keys and values repeat heads in different orders"
            return site
        mask = site.mask_node
        if site.tiled and is_tensor(mask) and len(shape(mask)) == 3 and not same_size(shape(mask)[0], 1):
            site.reason = "its mask has heads but no batch, and its keys repeat all heads in turn"
            return site
        site.candidates = (traced[0], traced[1])
        return site

    def _key(self, product: Product) -> tuple[tuple[Node, str], Heads] | str:
        return self._trace(product.right, product.right_axes("D", "S"))

    def _match_flex(self, gm: GraphModule, node: Node) -> AttentionSite:
        """As attention written by hand, which takes its place for as long as it may read pages."""
        query = argument(node, 0, "query")
        refused = AttentionSite(node, query, shape(query)[2], "flex_attention")
        try:
            inputs = [n for n in node.all_input_nodes if is_tensor(n)]
            changes = self._writers.between(inputs, node, gm.graph.output_node(), set())
            lowered = lower(gm, node, {} if changes else self._known)
        except NotLowered as reason:
            refused.reason = str(reason)
            return refused
        found = follow_scores(lowered.scores, lambda product: True)
        assert found is not None
        site = self._match_by_hand(found)
        site.form = site.form.replace("by hand", "flex_attention")
        site.lowered = lowered
        if site.reason:
            lowered.undo()
            refused.reason = site.reason
            return refused
        return site

    def _match_by_hand(self, found: HandWritten) -> AttentionSite:
        product = found.scores.product
        site = AttentionSite(found.output.node, product.left, shape(product.node)[-2], found.summary, found)
        key, value = self._key(product), self._trace(found.output.right, found.output.right_axes("S", "D"))
        if found.fault or isinstance(key, str) or isinstance(value, str):
            site.reason = found.fault or (key if isinstance(key, str) else str(value))
            return site
        (cache, key_heads), (values, value_heads) = key, value
        total = _heads(cache) * key_heads.repeats
        site.num_heads = next(iter(found.scores.heads), total)
        site.key_scale = key_heads.scale
        grouped = product.lead == 3
        site.reason = (
            _mismatch(key_heads, cache, site.num_heads, grouped)
            or _mismatch(value_heads, values, site.num_heads, grouped)
            or value_heads.converted
            or ("its keys repeat all heads in turn" if _tiles(key_heads, cache) else "")
            or ("its values repeat all heads in turn" if _tiles(value_heads, values) else "")
            or (f"{values[0].name} is scaled between cache and attention" if value_heads.scale != 1 else "")
            or check(found, cache, site.num_heads, bool(key_heads.converted), self._writers)
        )
        if not site.reason:
            site.candidates = (cache, values)
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

    def _trace(self, operand: Node, wanted: list[str]) -> tuple[tuple[Node, str], Heads] | str:
        """The cache that an operand with the `wanted` dimensions is, with the cache's axes; or why it is none."""
        reason = ""
        for layout in ("BHSD", "BSHD"):
            found = trace_heads(
                operand,
                lambda n: n in self._axes or n in self._returned,
                lambda n, layout=layout: self._axes.get(n, layout),
            )
            if isinstance(found, str):
                reason = reason or found
                continue
            node, heads = found
            seen = ["H" if axis == TILED else axis.replace(MERGED, "H") for axis in heads.axes]
            if len(shape(node)) == 4 and seen == wanted:
                return (node, self._axes.get(node, layout)), heads
            reason = reason or f"the dimensions {heads.axes} of its operands are not [{', '.join(wanted)}]"
        return reason


def _heads(cache: tuple[Node, str]) -> int:
    return hint(shape(cache[0])[cache[1].index("H")])


def _tiles(heads: Heads, cache: tuple[Node, str]) -> int:
    """How often all of a cache's heads come again, if that is another order than each of them so often; else 0."""
    return heads.repeats if TILED in heads.axes and heads.repeats > 1 and _heads(cache) > 1 else 0


def _mismatch(heads: Heads, cache: tuple[Node, str], heads_q: int, enable_gqa: bool) -> str:
    """Why a cache whose heads were repeated does not serve `heads_q` query heads, or ''."""
    cached = _heads(cache) * heads.repeats
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
        specs: dict[tuple[object, ...], MaskSpec] = {}  # layers share their masks
        equal = equal_lengths(state)
        equal |= {extreme: size.xreplace(equal) for extreme, size in decided_extremes(state.gm.graph).items()}
        facts = (equal, known_tensors(state))
        for attention in state.attentions:
            if not attention.paged or attention.key is None or attention.key.kind == "create":
                continue
            sizes = attention.num_queries, attention.kv_len
            key = (attention.mask_node, attention.is_causal, *map(expr, sizes))
            if key not in specs:
                specs[key] = prove_mask(attention.mask_node, attention.is_causal, *sizes, *facts)
            attention.mask = specs[key]
            proven += attention.mask.tensor is None
        return proven


def _unequal(attention: AttentionSite) -> str:
    """Why K and V are not equally long parts of their caches, or ''."""
    lengths = [shape(node)[axes.index("S")] for node, axes in attention.candidates or ()]
    sites = (attention.key, attention.value)
    parts = [node for node, _ in attention.candidates or () if not any(site and site.node is node for site in sites)]
    if parts and not same_size(*lengths):  # whole caches of one group are equally long
        return f"K and V are {lengths[0]} and {lengths[1]} tokens of their caches"
    return ""


def equal_lengths(state: GraphState) -> dict:
    """Symbols of lengths that are equal because their caches belong to one group: each to the group's first."""
    equal = {}
    for group in state.groups:
        if group.kind == "create":
            continue
        lengths = [expr(shape(site.past)[site.axes.index("S")]) for site in group.sites if site.past]
        equal.update({length: lengths[0] for length in lengths if length.is_symbol and length != lengths[0]})
    return equal
