"""How attention reads a static cache: the positions written so far, if the rest is provably hidden, else all."""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from .. import ops
from .base import AttentionSite
from .symbols import size_node
from .tensors import expr, same_size

__all__ = ["plan_reads"]


def plan_reads(
    graph: Graph, attention: AttentionSite, plan: Node, plans: dict[object, Node], start: sympy.Expr
) -> tuple[Node, Node | None]:
    """The plan to read a static cache by, and the mask tensor that must be applied (None: only its proven bounds).

    Nodes are inserted at the graph's insertion point; `plans` remembers those that layers share; `start` stands for the
    first position that this step writes.
    """
    spec, kv_len = attention.mask, attention.kv_len
    assert spec is not None
    if spec.tensor is None and _is_written(attention, start):
        return plan, None
    key = (plan, expr(kv_len))
    if key not in plans:
        plans[key] = graph.call_function(ops.plan_static, (plan, size_node(graph, kv_len)))
    mask = attention.mask_node
    if mask is None:
        mask = _explicit(graph, attention, plans)
    return plans[key], mask


def _is_written(attention: AttentionSite, start: sympy.Expr) -> bool:
    """Whether every key that the proven bounds let a query see was written by now.

    Written are `start + new tokens` positions, where the start is often known to the caller only, but never negative.
    """
    site, spec = attention.key, attention.mask
    assert site is not None and site.start is not None and spec is not None
    count, kv_len = expr(site.new_tokens), expr(attention.kv_len)
    if site.start.size is not None:
        count = count + expr(site.start.size)
        if same_size(attention.kv_len, site.start.size + site.new_tokens):
            return True
    if spec.causal_offset is None:
        return False
    stop = spec.causal_offset + expr(attention.num_queries)  # one more than the last key that is seen
    written = any((bound - stop).expand().is_nonnegative for bound in (count, count + start))
    return written and (same_size(attention.kv_len, site.size("S")) or bool((kv_len - stop).expand().is_nonnegative))


def _explicit(graph: Graph, attention: AttentionSite, plans: dict[object, Node]) -> Node:
    """A mask tensor for an attention that has none, [Q, S]."""
    sizes = (attention.num_queries, attention.kv_len)
    key = ("mask", attention.is_causal, *map(expr, sizes))
    if key not in plans:
        size = tuple(size_node(graph, n) for n in sizes)
        device = attention.query.meta["example_value"].device
        mask = graph.call_function(torch.ones, (size,), {"dtype": torch.bool, "device": device})
        plans[key] = graph.call_method("tril", (mask,)) if attention.is_causal else mask
    return plans[key]
