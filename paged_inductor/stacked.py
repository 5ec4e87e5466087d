"""A program whose caches are one tensor for several layers: it runs as one with a tensor for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from .passes.stacked import Unstacked
from .program import make_dense
from .tensor import PagedStack, PagedTensor
from .tensor.stacked import joined, parts

__all__ = ["StackedProgram"]


class StackedProgram:
    """Takes stacks apart before a call, and makes stacks of what comes back."""

    run: Callable[..., Any]

    def __init__(self, unstacked: Unstacked) -> None:
        """Obligation: `run`, the compiled form of `unstacked.gm`, is set before the first call."""
        self._inputs = {stack.position: stack.lead for stack in unstacked.inputs}
        self._outputs = {stack.position: stack.lead for stack in unstacked.outputs}

    def flat(self, args: Sequence[Any]) -> list[Any]:
        """The arguments of the graph without stacks, for those of the captured graph."""
        flat: list[Any] = []
        for i, value in enumerate(args):
            flat += parts(value, len(self._inputs[i])) if i in self._inputs else [value]
        return flat

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        values = iter(self.run(*self.flat(args)))
        results: list[Any] = []
        for value in values:
            lead = self._outputs.get(len(results))
            if lead is None:
                results.append(value)
                continue
            stacked = [value, *(next(values) for _ in range(prod(lead) - 1))]
            results.append(_stack(stacked, lead))
        return tuple(results)


def _stack(values: Sequence[Any], lead: Sequence[int]) -> Any:
    if all(isinstance(value, PagedTensor) for value in values) and len({value.shape for value in values}) == 1:
        return PagedStack(values, lead)
    return joined(list(map(make_dense, values)), lead)
