"""How attention reads a static cache: the positions written so far, if the rest is provably hidden, else all."""

from __future__ import annotations

import sympy
import torch
from torch import SymInt
from torch.fx import Graph, Node

from .. import ops
from .sites import AttentionSite
from .symbols import fake_like, size_node
from .tensors import expr, same_size

__all__ = ["StaticReads"]


class StaticReads:
    """Plans to read static caches by; layers share them. They stand behind the plan of the group's writes.

    whole: for the plan of each group's writes, the arguments of the plan of everything that was ever written, and the
    position of the first token.
    """

    def __init__(self) -> None:
        self.whole: dict[Node, tuple[tuple[object, ...], Node | int]] = {}
        self._made: dict[object, Node] = {}

    def plan(self, graph: Graph, attention: AttentionSite, plan: Node, start: sympy.Expr) -> tuple[Node, Node | None]:
        """The plan for an attention, and the mask tensor that must be applied (None: only its proven bounds).

        plan: of the group's writes. start: stands for the first position that this step writes.
        """
        spec, kv_len = attention.mask, attention.kv_len
        assert spec is not None
        if _ends_here(attention) or (spec.tensor is None and _is_written(attention, start)):
            return plan, spec.tensor
        mask = attention.mask_node
        if mask is None:
            mask = _explicit(graph, attention, self._made)
        return self.whole_plan(graph, plan, kv_len), mask

    def whole_plan(self, graph: Graph, plan: Node, kv_len: int | SymInt) -> Node:
        """The plan for the first `kv_len` positions of buffers, whether they were written or not."""
        key, part = ("whole", plan), ("whole", plan, expr(kv_len))
        arguments, row_start = self.whole[plan]
        if key not in self._made:
            with graph.inserting_before(plan.next):
                self._made[key] = graph.call_function(ops.plan_step, arguments)
        if part not in self._made:
            whole = self._made[key]
            with graph.inserting_before(whole.next):
                self._made[part] = graph.call_function(ops.plan_static, (whole, size_node(graph, kv_len), row_start))
        return self._made[part]


def _ends_here(attention: AttentionSite) -> bool:
    """Whether an attention's keys end with the newest token, by what the graph itself knows."""
    site = attention.key
    assert site is not None and site.start is not None
    start = site.start.size
    return start is not None and same_size(attention.kv_len, start + site.new_tokens)


def _is_written(attention: AttentionSite, start: sympy.Expr) -> bool:
    """Whether every key that the proven bounds let a query see was written by now.

    Written are `start + new tokens` positions, where the start is often known to the caller only, but never negative.
    """
    site, spec = attention.key, attention.mask
    assert site is not None and site.start is not None and spec is not None
    count, kv_len = expr(site.new_tokens), expr(attention.kv_len)
    if site.start.size is not None:
        count = count + expr(site.start.size)
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
        query = attention.query.meta["example_value"]
        made = [graph.call_function(torch.ones, (size,), {"dtype": torch.bool, "device": query.device})]
        if attention.is_causal:
            made.append(graph.call_method("tril", (made[0],)))
        for node in made:
            node.meta["example_value"] = fake_like(sizes, (sizes[1], 1), torch.bool, query.device, query.fake_mode)
        plans[key] = made[-1]
    return plans[key]
