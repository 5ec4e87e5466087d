"""What is known of a graph's tensors from elsewhere, for the mask prover: where steps write, and triangular buffers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import sympy
import torch
from torch.fx import Node

from .base import GraphState
from .mask_logic import TRUE, leq, negate
from .mask_program import At, Index
from .mask_values import Value

__all__ = ["known_tensors"]


def known_tensors(state: GraphState) -> dict[Node, At]:
    """Readers of the tensors whose values are known.

    Positions of writes into static caches: each call verifies that they are consecutive from `group.start` on, which
    all caches of a group share. Lower triangles: each call verifies that they still are.
    """
    known: dict[Node, At] = {}
    for group in state.groups:
        for site in group.sites:
            if group.start is not None and site.start is not None and site.start.node is not None:
                known[site.start.node] = _positions(group.start, site.start.scalar)
    for node in _inputs(state, state.triangles):
        known[node] = _triangle(node.meta["example_value"].dtype, state.triangles[node.name])
    return known


def _inputs(state: GraphState, names: Iterable[str]) -> list[Node]:
    wanted = set(names)
    return [node for node in state.placeholders if node.name in wanted]


def _positions(start: sympy.Symbol, scalar: bool) -> At:
    return lambda index: ((TRUE, start if scalar else start + index[0]),)


def _triangle(dtype: torch.dtype, below: float) -> At:
    """Ones (True) on and below the diagonal and zeros above, or zeros and the number `below` above."""

    def at(index: Index) -> Value:
        inside = leq(index[-1] - index[-2])
        if dtype == torch.bool:
            return inside
        one, zero = (sympy.S.One, sympy.S.Zero) if below == 0 else (sympy.S.Zero, float(below))
        return ((inside, one), (negate(inside), zero))

    assert not math.isnan(below)
    return at
