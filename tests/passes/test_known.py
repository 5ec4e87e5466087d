"""Masks that are proven with the help of what is known of graph inputs: write positions and triangular buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor, nn

from paged_inductor.passes.known import _positions, _triangle
from paged_inductor.passes.masks import MaskSpec, prove_mask
from paged_inductor.triangles import Triangles, triangle

START = sympy.Symbol("start", integer=True, nonnegative=True)
LENGTH, COUNT, AT = 12, 3, 5


def prove(function: Callable[..., Tensor], *args: Any, known: dict[int, Any]) -> MaskSpec:
    """What is proven of function(*args), of which `known[i]` says what argument i holds."""
    found: list[MaskSpec] = []

    def backend(gm: Any, examples: Any) -> Any:
        inputs = gm.graph.find_nodes(op="placeholder")
        of_argument = {id(x): node for node, x in zip(inputs, examples)}
        facts = {of_argument[id(args[i])]: fact for i, fact in known.items()}
        (result,) = gm.graph.output_node().args[0]
        found.append(prove_mask(result, False, COUNT, LENGTH, known=facts))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*args)
    return found[0]


POSITIONS = torch.arange(AT, AT + COUNT)
TRIANGLE = torch.ones(LENGTH, LENGTH).tril()
MASKS: dict[str, tuple[Callable[..., Tensor], list[Tensor], dict[int, Any]]] = {
    "rows of a triangle": (
        lambda t, p: t[None, None, p],
        [TRIANGLE.bool(), POSITIONS],
        {0: _triangle(torch.bool, 0.0), 1: _positions(START, scalar=False)},
    ),
    "rows of an additive triangle": (
        lambda t, p: t.index_select(0, p),
        [torch.zeros(LENGTH, LENGTH).masked_fill(TRIANGLE == 0, -torch.inf), POSITIONS],
        {0: _triangle(torch.float32, -torch.inf), 1: _positions(START, scalar=False)},
    ),
    "ones and zeros": (
        lambda t, p: torch.where(t[p] == 1, 0.0, -torch.inf),
        [TRIANGLE, POSITIONS],
        {0: _triangle(torch.float32, 0.0), 1: _positions(START, scalar=False)},
    ),
    "compared with a counter": (
        lambda c: torch.arange(LENGTH) <= (torch.arange(COUNT) + c)[:, None],
        [torch.tensor(AT)],
        {0: _positions(START, scalar=True)},
    ),
    "a counter of one dimension": (
        lambda c: torch.arange(LENGTH)[None, :] <= torch.arange(COUNT)[:, None] + c,
        [torch.tensor([AT])],
        {0: _positions(START, scalar=True)},
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_offset_is_where_the_step_writes(name: str) -> None:
    function, args, known = MASKS[name]
    spec = prove(function, *args, known=known)
    assert spec.tensor is None
    assert spec.causal_offset == START
    assert spec.window is None


def test_a_counter_that_was_moved_on_before_is_not_what_it_was() -> None:
    def late(counter: Tensor) -> Tensor:
        counter.add_(COUNT)
        return torch.arange(LENGTH) <= (torch.arange(COUNT) + counter)[:, None]

    spec = prove(late, torch.tensor(AT), known={0: _positions(START, scalar=True)})
    assert spec.tensor is not None
    assert "in place" in spec.proof


def test_a_counter_may_be_moved_on_after() -> None:
    def early(counter: Tensor) -> Tensor:
        mask = torch.arange(LENGTH) <= (torch.arange(COUNT) + counter)[:, None]
        counter.add_(COUNT)
        return mask

    assert prove(early, torch.tensor(AT), known={0: _positions(START, scalar=True)}).causal_offset == START


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_triangles_are_recognised(dtype: torch.dtype) -> None:
    assert triangle(TRIANGLE.to(dtype)) == 0
    assert triangle(TRIANGLE.to(dtype)[None, None]) == 0
    for i, j in ((3, 4), (4, 3), (0, 11), (11, 0)):
        other = TRIANGLE.to(dtype, copy=True)
        other[i, j] = 1 - other[i, j].to(torch.int64)
        assert triangle(other) is None
    lowest = torch.finfo(torch.bfloat16).min
    assert triangle(torch.zeros(4, 4).masked_fill(TRIANGLE[:4, :4] == 0, lowest)) == lowest
    for other in (TRIANGLE[:4], torch.ones(4, 4), torch.zeros(4, 4), TRIANGLE.T, nn.Linear(4, 4).weight, 3, None):
        assert triangle(other) is None


def test_triangles_are_proven_again_when_they_may_have_changed() -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("mask"), graph.placeholder("other")]
    mask, other = TRIANGLE.clone(), torch.rand(3, 3)
    triangles = Triangles(nodes, [mask, other])
    assert triangles.numbers == {"mask": 0.0}
    assert triangles.hold([mask, other])
    assert triangles.hold([TRIANGLE.clone(), other])
    mask[3, 1] = 0
    assert not triangles.hold([mask, other])
    mask[3, 1] = 1
    assert triangles.hold([mask, other])
