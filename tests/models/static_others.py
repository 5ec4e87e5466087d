"""Decoders of `static_zoo` without registered buffers: Meta llama, functional and stacked caches, no cache at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .static_buffers import HEAD_DIM, KV_HEADS, LAYERS, REPEATS, Attention, Decoder, Feed

# -- Meta llama: [B, S, H, D] attributes, slices at a Python int, attention by hand --------------------------------


class SliceAttention(Attention):
    def allocate(self, batch: int, max_length: int) -> None:
        self.cache_k = torch.zeros(batch, max_length, KV_HEADS, HEAD_DIM)
        self.cache_v = torch.zeros(batch, max_length, KV_HEADS, HEAD_DIM)

    def caches(self) -> tuple[Tensor, ...]:
        return self.cache_k, self.cache_v

    def forward(self, x: Tensor, start: int, mask: Tensor | None) -> Tensor:
        q, k, v = self.project(x)
        batch, length = x.shape[:2]
        self.cache_k = self.cache_k.to(q)
        self.cache_v = self.cache_v.to(q)
        self.cache_k[:batch, start : start + length] = k
        self.cache_v[:batch, start : start + length] = v
        keys = _repeat(self.cache_k[:batch, : start + length]).transpose(1, 2)
        values = _repeat(self.cache_v[:batch, : start + length]).transpose(1, 2)
        q = q.transpose(1, 2)
        scores = torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(HEAD_DIM)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.finish(x, torch.matmul(scores, values))


def _repeat(x: Tensor) -> Tensor:
    batch, length, heads, dim = x.shape
    return x[:, :, :, None, :].expand(batch, length, heads, REPEATS, dim).reshape(batch, length, heads * REPEATS, dim)


class SliceDecoder(Decoder):
    layer = SliceAttention

    def forward(self, tokens: Tensor, start: int) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) + self.positions.weight[start : start + length]
        mask = None
        if length > 1:
            mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
            mask = torch.hstack([torch.zeros(length, start), mask]).type_as(x)
        for layer in self.layers:
            x = layer(x, start, mask)
        return self.head(x)


class Start(Feed):
    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        return self.step(tokens, at)


# -- functional index_copy: caches are arguments and results -----------------------------------------------------------


class FunctionalAttention(Attention):
    def forward(
        self, x: Tensor, input_pos: Tensor, mask: Tensor, cache: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        k, v = cache[0].index_copy(2, input_pos, k), cache[1].index_copy(2, input_pos, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.finish(x, out), (k, v)


class FunctionalDecoder(Decoder):
    layer = FunctionalAttention

    def start(self, batch: int, max_length: int) -> None:
        shape = (batch, KV_HEADS, max_length, HEAD_DIM)
        self.first = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(LAYERS)]

    def forward(self, tokens: Tensor, input_pos: Tensor, caches: Any) -> tuple[Tensor, Any]:
        mask = (torch.arange(caches[0][0].shape[2]) <= input_pos[:, None])[None, None]
        x = self.embed(tokens) + self.positions(input_pos)
        presents = []
        for layer, cache in zip(self.layers, caches):
            x, present = layer(x, input_pos, mask, cache)
            presents.append(present)
        return self.head(x), presents


class CachesInAndOut(Feed):
    def __init__(self, model: Any, step: Callable[..., Any]) -> None:
        super().__init__(model, step)
        self.pairs = model.first

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        logits, self.pairs = self.step(tokens, torch.arange(at, at + tokens.shape[1]), self.pairs)
        return logits

    def caches(self) -> list[Tensor]:
        return [tensor for pair in self.pairs for tensor in pair]


# -- one stacked tensor [L, 2, B, H, S, D] that grows by one cat -------------------------------------------------------


class StackedAttention(Attention):
    def forward(self, x: Tensor, past: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        new = torch.stack([k, v])
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)), new


class StackedDecoder(Decoder):
    layer = StackedAttention

    def forward(self, tokens: Tensor, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        seen = 0 if cache is None else cache.shape[4]
        query = torch.arange(seen, seen + tokens.shape[1])
        mask = torch.arange(seen + tokens.shape[1]) <= query[:, None]
        x = self.embed(tokens) + self.positions(query)
        news = []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, None if cache is None else cache[i], mask)
            news.append(new)
        stacked = torch.stack(news)
        return self.head(x), stacked if cache is None else torch.cat([cache, stacked], dim=4)


class StackedInAndOut(Feed):
    stacked: Tensor | None = None

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        logits, self.stacked = self.step(tokens, self.stacked if at else None)
        return logits

    def caches(self) -> list[Tensor]:
        return [] if self.stacked is None else [self.stacked]


# -- nanoGPT: no cache, everything is computed again -------------------------------------------------------------------


class PlainAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        k, v = k.repeat_interleave(REPEATS, dim=1), v.repeat_interleave(REPEATS, dim=1)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))


class PlainDecoder(Decoder):
    layer = PlainAttention

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, [-1]])


class Everything(Feed):
    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        self.tokens = torch.cat([self.tokens, tokens], 1) if at else tokens
        return self.step(self.tokens)
