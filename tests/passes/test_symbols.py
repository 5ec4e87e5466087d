"""Sizes of a graph: what its guards say of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from paged_inductor.passes.symbols import decided_extremes


@pytest.mark.parametrize(("least", "decided"), [(0, []), (10, []), (11, ["c", "11"]), (12, ["c", "11"])])
def test_only_guards_decide_extremes(least: int, decided: list[str]) -> None:
    """Never the sizes of the first call, for which both would be decided."""
    found: list[list[str]] = []

    def fn(x: Tensor) -> Tensor:
        count = x.shape[0]
        if count < least:
            return x
        return x.sum() + torch.ones(max(count, 11)).sum() + torch.ones(min(count, 11)).sum()

    def backend(gm: GraphModule, args: object) -> object:
        (symbol,) = {s for node in gm.graph.nodes for s in _symbols(node.meta.get("example_value"))}
        found.append([str(value).replace(str(symbol), "c") for value in decided_extremes(gm.graph).values()])
        return gm.forward

    x = torch.zeros(20)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(fn, backend=backend)(x)
    assert [sorted(values) for values in found] == [sorted(decided)]


def _symbols(value: object) -> set[object]:
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()
