"""Linear layers on one row: same values, and only where every dimension before the last is 1."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paged_inductor import ops
from paged_inductor.passes.base import GraphState
from paged_inductor.passes.linear import RewriteSingleRowLinears


def captured(function: object, *args: Tensor) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: object) -> object:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)  # type: ignore[call-overload]
    return graphs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_values_and_places(dtype: torch.dtype, bias: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 1, 48).to(dtype), torch.randn(24, 48).to(dtype)
    offset = torch.randn(24).to(dtype) if bias else None

    def function(x: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor:
        return F.linear(x, weight, offset)

    gm = captured(function, x, weight, offset)  # type: ignore[arg-type]
    state = GraphState(gm, {})
    assert RewriteSingleRowLinears().apply(state) == (rows == 1)
    gm.recompile()
    assert any(node.target is ops.single_row_linear for node in gm.graph.nodes) == (rows == 1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    (out,) = gm(*(value for value in (x, weight, offset) if value is not None))
    torch.testing.assert_close(out, F.linear(x, weight, offset), rtol=tolerance, atol=tolerance * 10)
