"""Linear layers applied to a single row, as in a decode step of one sequence: each becomes a row of dot products."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import ops
from .base import GraphState, Pass
from .tensors import argument, is_call, is_tensor, shape

__all__ = ["RewriteSingleRowLinears"]

_LINEAR = (F.linear, torch._C._nn.linear)


class RewriteSingleRowLinears(Pass):
    """Replace `linear(x, weight, bias)` where all of x's dimensions but the last are 1."""

    def apply(self, state: GraphState) -> int:
        graph, found = state.gm.graph, 0
        for node in graph.nodes:
            if not is_call(node, _LINEAR):
                continue
            x, weight, bias = (argument(node, i, name) for i, name in enumerate(("input", "weight", "bias")))
            if not (is_tensor(x) and is_tensor(weight) and (bias is None or is_tensor(bias))):
                continue
            dtypes = {operand.meta["example_value"].dtype for operand in (x, weight, bias) if operand is not None}
            if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point or len(shape(weight)) != 2:
                continue
            if any(not isinstance(size, int) or size != 1 for size in shape(x)[:-1]):
                continue
            node.target, node.args, node.kwargs = ops.single_row_linear, (x, weight, bias), {}
            found += 1
        return found
