"""A handle beside the dense tensor that torch's own rules make of the same operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import paged_inductor.ops as ops
from paged_inductor.tensor import PagedTensor

__all__ = ["Boom", "Pair", "attention", "broken"]


class Boom(Exception):
    """Raised in the middle of a step, on purpose."""


@dataclass(eq=False)
class Pair:
    """`paged` must always equal `dense`. `base` is the dense tensor (in the order `axes`) that `dense` is a view of,
    and `pads` its rows' virtual left padding, which reads as zeros whatever is written there (negative: the row's
    oldest tokens are hidden)."""

    paged: Tensor
    dense: Tensor
    base: Tensor
    pads: list[int]
    axes: str

    @classmethod
    def of(cls, paged: PagedTensor, dense: Tensor, axes: str) -> Pair:
        view = paged._view
        return cls(paged, dense, dense, [view.length - seen for seen in view.lengths], axes)

    def both(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """The same derivation on both sides."""
        return Pair.of(function(self.paged), function(self.dense), self.axes)  # type: ignore[arg-type]

    def part(self, function: Callable[[Tensor], Tensor]) -> Pair:
        """A view that is no cache of its own."""
        return Pair(function(self.paged), function(self.dense), self.base, self.pads, self.axes)

    def write(self, function: Callable[[Tensor], object]) -> None:
        """The same in-place write on both sides."""
        function(self.paged)
        function(self.dense)
        rows, tokens = self.axes.index("B"), self.axes.index("S") - 1
        for i, pad in enumerate(self.pads):
            if pad > 0:
                self.base.select(rows, i).narrow(tokens, 0, pad).zero_()

    def check(self) -> None:
        assert tuple(self.paged.shape) == tuple(self.dense.shape)
        assert self.paged.numel() == self.dense.numel()
        values = self.paged.dense() if isinstance(self.paged, PagedTensor) else self.paged
        assert torch.equal(values, self.dense)


def attention(
    query: Tensor, key: Tensor, value: Tensor, pads: list[int], mask: Tensor | None, is_causal: bool
) -> Tensor:
    """SDPA by its definition, in float64; without a mask, padding is invisible. Who sees nothing gets zeros."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = query.double() @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    num_queries, num_keys = scores.shape[-2:]
    if mask is None:
        visible = torch.arange(num_keys) >= torch.tensor(pads)[:, None]
        mask = visible[:, None, None, :]
        if is_causal:
            mask = mask & torch.ones(num_queries, num_keys, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (F.softmax(scores, -1).nan_to_num(0.0) @ value).to(query.dtype)


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Let the operation `name` (cache_write, execute_copies, …) raise `Boom`."""

    def fail(*args: object, **kwargs: object) -> None:
        raise Boom(name)

    with mock.patch.object(ops, name, new=fail):
        yield
