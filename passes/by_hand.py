"""Match attention written by hand to an `AttentionSite`, and make one node of it once it is certain to read pages."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .base import GraphState, Pass
from .emit import Emitter
from .hand_written import HandWritten
from .mask_effects import Writers
from .mask_values import HUGE
from .products import Product
from .score_form import BiasStep
from .sites import AttentionSite
from .tensors import is_call, is_tensor, same_size, shape

__all__ = ["NormalizeAttention", "attention", "check", "sink_logits"]


def attention(query: Tensor) -> Tensor:
    """Stands in a graph for an attention that is about to be rewritten; it is never run."""
    raise NotImplementedError("this node is replaced before the graph runs")


def check(found: HandWritten, key: tuple[Node, str], heads: int, converted: bool, writers: Writers) -> str:
    """Why a hand-written attention on `key` (node, axes), with `heads` query heads, cannot be one operation, or ''.

    converted: whether the scores are computed in a wider dtype than the cache's.
    """
    scores, product = found.scores, found.scores.product
    cache, axes = key
    if scores.heads - {heads}:
        return f"its scores are laid out for {sorted(scores.heads)} heads, its keys for {heads}"
    sizes = shape(product.left)
    lead = [sizes[dim] for dim in product.left_order[: product.lead]]
    if not all(map(same_size, lead, shape(product.node))):
        return "its queries are broadcast to its keys"
    if product.lead > 1 and not same_size(lead[0], shape(cache)[axes.index("B")]):
        return "query and key differ in batch size"
    if converted and _narrow(product.left, cache) is None:
        return f"its scores are wider than its cache of {cache.meta['example_value'].dtype}"
    if scores.sink is not None and sink_logits(scores.sink, heads, scores.lead) is None:
        return f"its sink {scores.sink.name} is not one number a head"
    operands = [product.left, product.right, found.output.right, *(step.tensor for step in scores.bias if step.tensor)]
    operands += [tensor for tensor, _ in scores.query_factors] + ([scores.sink] if scores.sink is not None else [])
    writer = writers.between(operands, found.chain[0], found.chain[-1], set(found.chain))
    return f"{writer.name} writes to its operands in place" if writer is not None else ""


def _narrow(query: Node, cache: Node) -> Node | None:
    """What was widened to become the query, if it had the cache's dtype."""
    source = query.args[0] if is_call(query, (), ("to", "float", "type", "double", "type_as")) else None
    same = is_tensor(source) and source.meta["example_value"].dtype == cache.meta["example_value"].dtype
    return source if same else None  # type: ignore[return-value]


def sink_logits(sink: Node, heads: int, lead: int) -> Node | None:
    """The tensor of `heads` numbers that `sink` [*lead, Q, 1] broadcasts over batch and queries; None if it is none."""
    node: object = sink
    while is_tensor(node):
        assert isinstance(node, Node)
        sizes = shape(node)
        if all(isinstance(size, int) for size in sizes) and math.prod(sizes) == heads:
            per_head = sizes[-4:-2] if lead == 3 else sizes[-3:-2]
            return node if math.prod(per_head) == heads and per_head else None
        if not is_call(
            node, (torch.broadcast_to,), ("expand", "expand_as", "repeat", "broadcast_to", "contiguous", "to")
        ):
            return None
        node = node.args[0]
    return None


class NormalizeAttention(Pass):
    """Make one node of each attention that is written by hand and will read pages: its query [B, H, Q, D] and its
    mask are computed as tensors of their own, and what lies between the two products vanishes."""

    def apply(self, state: GraphState) -> int:
        self._masks: dict[tuple[object, ...], Node | None] = {}
        self._writers = Writers(state.gm.graph)
        found = 0
        for site in state.attentions:
            if site.paged and site.by_hand is not None and site.key is not None and site.key.kind != "create":
                self._normalize(state.gm.graph, site, site.by_hand)
                found += 1
        for site in reversed(state.attentions):
            if site.lowered is not None and not site.lowered.scores._erased:  # it was not made one node
                site.node = site.lowered.undo()
        return found

    def _normalize(self, graph: Graph, site: AttentionSite, found: HandWritten) -> None:
        assert site.key is not None and site.value is not None
        scores, product, output = found.scores, found.scores.product, found.output
        heads = site.num_heads
        emit = Emitter(graph, output.node)
        query = emit(torch.permute, product.left, product.left_order) if product.moves_left else product.left
        for tensor, divides in scores.query_factors:
            query = emit(torch.div if divides else torch.mul, query, tensor)
        query = _grouped(emit, query, product.lead, heads)
        dtype = site.key.node.meta["example_value"].dtype
        if query.meta["example_value"].dtype != dtype:
            query = emit.method("to", query, dtype)
        site.query, site.scale, site.softcap = query, scores.scale * site.key_scale, scores.softcap
        site.mask_node = self._mask(emit, scores.bias, heads)
        if scores.sink is not None:
            logits = sink_logits(scores.sink, heads, scores.lead)
            assert logits is not None
            site.sinks = emit.method("flatten", logits)
        with graph.inserting_before(output.node):
            node = graph.call_function(attention, (query,))
        sizes = (*shape(query)[:3], site.value.size("D"))
        node.meta["example_value"] = emit.example(query.meta["example_value"].new_empty, sizes)
        site.node = node
        result = _as_written(emit, node, output)
        result.meta = dict(output.node.meta)
        output.node.replace_all_uses_with(result)
        for link in reversed(found.chain):
            graph.erase_node(link)
        if site.lowered is not None:
            site.lowered.commit(site.mask_node)

    def _mask(self, emit: Emitter, steps: list[BiasStep], heads: int) -> Node | None:
        """What is added to the scores or selects among them, as one tensor; one for all layers that share it."""
        key = (heads, *steps)
        if key in self._masks:
            return self._masks[key]
        mask: Node | None = None
        for step in steps:
            mask = _apply(emit, step, mask, heads)
        if not self._writers.of([step.tensor for step in steps if step.tensor is not None]):
            self._masks[key] = mask  # else it may change between two layers
        return mask


def _as_written(emit: Emitter, node: Node, output: Product) -> Node:
    """The attention's result [B, H, Q, D] laid out and typed as the product that it replaces."""
    dtype = output.node.meta["example_value"].dtype
    if node.meta["example_value"].dtype != dtype:
        node = emit.method("to", node, dtype)
    if output.lead == 1:
        node = emit.method("flatten", node, 0, 1)
    elif output.lead == 3:
        sizes = shape(output.node)
        groups = [sizes[output.out_order.index(dim)] for dim in (1, 2)]
        node = emit.method("unflatten", node, 1, tuple(groups))
    if output.out_order != tuple(range(len(output.out_order))):
        node = emit(torch.permute, node, output.out_order)
    return node


def _apply(emit: Emitter, step: BiasStep, mask: Node | None, heads: int) -> Node | None:
    """`mask` (None, bool or float) after one more step.

    Scores that were replaced by a finite number get the lowest one added: the score vanishes in it, so that a row of
    nothing else is uniform, as it was.
    """
    low, value = -math.inf, step.value
    is_bool = mask is not None and mask.meta["example_value"].dtype == torch.bool
    if step.kind == "mul":
        return mask if mask is None or is_bool else emit(torch.mul, mask, value)
    if step.kind == "floor":
        if mask is None:
            return None
        mask = emit(torch.where, mask, 0.0, low) if is_bool else mask
        least = emit(torch.full, (), value, dtype=mask.meta["example_value"].dtype, device=emit.device(mask))
        return emit(torch.maximum, mask, least)
    assert step.tensor is not None
    tensor = _broadcast(emit, step, heads)
    if step.kind in ("add", "sub"):
        if not tensor.meta["example_value"].is_floating_point():
            tensor = emit.method("to", tensor, torch.float32)
        tensor = emit(torch.neg, tensor) if step.kind == "sub" else tensor
        if mask is None:
            return tensor
        return emit(torch.where, mask, tensor, low) if is_bool else emit(torch.add, mask, tensor)
    shown = step.kind == "show"
    if value == low and (mask is None or is_bool):
        visible = tensor if shown else emit(torch.logical_not, tensor)
        return visible if mask is None else emit(torch.logical_and, mask, visible)
    lowest = torch.finfo(torch.float32).min
    value = low if value == low else max(value, lowest) if value <= HUGE else lowest
    if mask is not None and not is_bool and mask.meta["example_value"].dtype != torch.float32:
        mask = emit.method("to", mask, torch.float32)  # other dtypes cannot hold it
    rest = 0.0 if mask is None else emit(torch.where, mask, 0.0, low) if is_bool else mask
    return emit(torch.where, tensor, rest, value) if shown else emit(torch.where, tensor, value, rest)


def _grouped(emit: Emitter, node: Node, lead: int, heads: int) -> Node:
    """`node`, laid out with `lead` dimensions of batch and heads before its last two, as [B, H, ...]."""
    if lead == 2:
        return node
    return emit.method("unflatten", node, 0, (-1, heads)) if lead == 1 else emit.method("flatten", node, 1, 2)


def _broadcast(emit: Emitter, step: BiasStep, heads: int) -> Node:
    """The tensor of a step, which is broadcast to scores, as one that is broadcast to [B, H, Q, S]."""
    node = step.tensor
    assert node is not None
    sizes = shape(node)
    if step.lead == 2 or len(sizes) <= 2 or (step.lead == 1 and sizes[0] == 1):
        return node
    if step.lead == 3:
        for _ in range(5 - len(sizes)):
            node = emit.method("unsqueeze", node, 0)
        if any(size != 1 for size in shape(node)[1:3]):
            node = emit.method("expand", node, -1, *step.groups, -1, -1)
    return _grouped(emit, node, step.lead, heads)
