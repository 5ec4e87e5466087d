"""A model with a mistake that only paging brings to light, for the fuzzer to find; and other ways to call a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_inductor import PagedTensor

from ..models.zoo import Decoder


class Cache:
    """Reorders the rows of its first layer, and those of the second the wrong way round if they are paged."""

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs

    def reorder_cache(self, index: Tensor) -> None:
        first, *others = self.pairs
        moved = [tuple(x.index_select(0, index) for x in first)]
        for pair in others:
            wrong = index.flip(0) if isinstance(pair[0], PagedTensor) else index
            moved.append(tuple(x.index_select(0, wrong) for x in pair))
        self.pairs = moved

    def crop(self, count: int) -> None:
        self.pairs = [tuple(x[:, :, :count] for x in pair) for pair in self.pairs]


class Faulty(Decoder):
    """Keeps its cache in a `Cache`."""

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Cache]:
        logits, pairs = super().forward(tokens, None if cache is None else cache.pairs)
        return logits, Cache(pairs)


def step(model: Decoder, tokens: Tensor, cache: Any, mask: Tensor | None) -> tuple[Tensor, Any]:
    """A plain decoder that takes padding."""
    return model(tokens, cache, None if mask is None else mask.bool())


def greedy(model: Decoder, tokens: Tensor, mask: Tensor) -> Tensor:
    """A loop of the user's own."""
    past = None
    for part in tokens.split([tokens.shape[1] - 1, 1], 1) if tokens.shape[1] > 1 else [tokens]:
        logits, past = model(part, past)
    return torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], 1)
