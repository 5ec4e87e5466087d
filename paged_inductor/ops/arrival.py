"""Where a step waits for the tokens of a layer: swapped blocks may still be on their way when it begins."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .operator import operator
from .plan import StepPlan

__all__ = ["arrived", "arriving"]

Wait = Callable[[int, Sequence[int]], object]


class _Here(threading.local):
    """The current thread: what its step waits by, if anything is on its way."""

    wait: Wait | None = None


_here = _Here()


@contextmanager
def arriving(wait: Wait | None) -> Iterator[None]:
    """Inside, a graph that this thread runs calls `wait(group, sites)` before it touches these sites of its cache
    group. None: everything is there."""
    before, _here.wait = _here.wait, wait
    try:
        yield
    finally:
        _here.wait = before


def arrived(plan: StepPlan, new: Tensor, group: int, sites: list[int]) -> StepPlan:
    """The plan for whatever writes or reads some sites of a cache group: it exists once their tokens are in place.

    new [B, H, n, D] or [B, n, H, D]: what is about to be written there, so that a compiler cannot have the step wait
    before it has computed the layers before. The order follows from the table alone, which is copied: an operator that
    said that it changes arenas would have compilers copy these.
    """
    table = _arrived(plan.block_table, new[0, 0, 0, 0], group, sites)
    return plan._replace(block_table=table)


def _another_table(table: Tensor, after: Tensor, group: int, sites: list[int]) -> Tensor:
    return torch.empty_like(table)


@operator(_another_table)
def _arrived(table: Tensor, after: Tensor, group: int, sites: list[int]) -> Tensor:
    if _here.wait is not None:
        _here.wait(group, sites)
    return table.clone()
