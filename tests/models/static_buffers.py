"""What the small decoders of `static_zoo` share, and those with registered buffers: gpt-fast, litgpt, torchtune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 61, 24, 4, 2, 8, 2
REPEATS = HEADS // KV_HEADS


class Feed:
    """The step of a form's loop: `feed(tokens, at)` calls `step`, the model or its compiled form, for tokens [B, S]
    that stand at a position, and returns logits [B, S, vocabulary].
    """

    def __init__(self, model: Any, step: Callable[..., Any]) -> None:
        self.model, self.step = model, step

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        raise NotImplementedError

    def caches(self) -> list[Tensor]:
        """The caches as they are now."""
        return self.model.caches()


class Attention(nn.Module):
    """Projections of one layer, and its MLP; a form adds the cache and the attention.

    K and V come out as [B, S, H, D]. `allocate(batch, max_length)` makes empty caches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(DIM, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(DIM, KV_HEADS * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Linear(DIM, DIM)

    def allocate(self, batch: int, max_length: int) -> None:
        pass

    def caches(self) -> tuple[Tensor, ...]:
        return ()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, HEADS, HEAD_DIM)
        k = self.k(x).view(batch, length, KV_HEADS, HEAD_DIM)
        return q, k, self.v(x).view(batch, length, KV_HEADS, HEAD_DIM)

    def finish(self, x: Tensor, out: Tensor) -> Tensor:
        """x [B, S, DIM] and the attention's result [B, H, S, D] -> the layer's result."""
        x = x + self.o(out.transpose(1, 2).reshape(*x.shape[:2], -1))
        return x + torch.tanh(self.mlp(x))


class Decoder(nn.Module):
    """Embeddings, layers of one kind, logits. `start(batch, max_length)` before the first token of new sequences."""

    layer: type[Attention] = Attention

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(256, DIM)
        self.layers = nn.ModuleList(self.layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.requires_grad_(False)

    def start(self, batch: int, max_length: int) -> None:
        for layer in self.layers:
            layer.allocate(batch, max_length)

    def caches(self) -> list[Tensor]:
        """K and V of each layer, as they are now. Empty for forms whose caches live in the loop."""
        return [tensor for layer in self.layers for tensor in layer.caches()]


# -- gpt-fast: registered buffers, setitem at a tensor of positions, attention over the whole buffer ----------------


class BufferCache(nn.Module):
    """Buffers [B, H, max_length, D]. A form says how they are written."""

    def __init__(self, batch: int, max_length: int) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(batch, KV_HEADS, max_length, HEAD_DIM), persistent=False)
        self.register_buffer("v_cache", torch.zeros(batch, KV_HEADS, max_length, HEAD_DIM), persistent=False)

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, input_pos] = k
        v_out[:, :, input_pos] = v
        return k_out, v_out


class BufferAttention(Attention):
    cache_class: type[BufferCache] = BufferCache

    def allocate(self, batch: int, max_length: int) -> None:
        self.kv_cache = self.cache_class(batch, max_length)

    def caches(self) -> tuple[Tensor, ...]:
        return self.kv_cache.k_cache, self.kv_cache.v_cache

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        k, v = self.kv_cache.update(input_pos, k, v)
        k, v = k.repeat_interleave(REPEATS, dim=1), v.repeat_interleave(REPEATS, dim=1)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0))


class BufferDecoder(Decoder):
    layer = BufferAttention

    def start(self, batch: int, max_length: int) -> None:
        super().start(batch, max_length)
        self.register_buffer("causal_mask", torch.ones(max_length, max_length).tril().bool(), persistent=False)

    def forward(self, tokens: Tensor, input_pos: Tensor) -> Tensor:
        mask = self.causal_mask[None, None, input_pos]
        x = self.embed(tokens) + self.positions(input_pos)
        for layer in self.layers:
            x = layer(x, input_pos, mask)
        return self.head(x)


class RunningPosition(Feed):
    """One tensor of the position, moved on in place between single-token steps."""

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        length = tokens.shape[1]
        if length > 1:
            self.position = torch.tensor([at + length])
            return self.step(tokens, torch.arange(at, at + length))
        logits = self.step(tokens, self.position)
        self.position += 1
        return logits


class Positions(Feed):
    """New positions at each step."""

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        return self.step(tokens, torch.arange(at, at + tokens.shape[1]))


# -- litgpt: index_copy_ into a slice of the batch, mask by index_select -------------------------------------------


class IndexCopyCache(BufferCache):
    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        batch = k.shape[0]
        k = self.k_cache[:batch].index_copy_(-2, input_pos, k)
        return k, self.v_cache[:batch].index_copy_(-2, input_pos, v)


class IndexCopyAttention(BufferAttention):
    cache_class = IndexCopyCache

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor, seen: int | None) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        k, v = self.kv_cache.update(input_pos, k, v)
        if seen is not None:
            k, v = k[..., :seen, :], v[..., :seen, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=False, enable_gqa=True)
        return self.finish(x, out)


class IndexCopyDecoder(BufferDecoder):
    layer = IndexCopyAttention

    def forward(self, tokens: Tensor, input_pos: Tensor, seen: int | None = None) -> Tensor:
        mask = self.causal_mask[None, None].index_select(2, input_pos)
        if seen is not None:
            mask = mask[..., :seen]
        x = self.embed(tokens) + self.positions.weight.index_select(0, input_pos)
        for layer in self.layers:
            x = layer(x, input_pos, mask, seen)
        return self.head(x)


class PositionsAndLength(Feed):
    """The loop says how many tokens the buffers hold, so that the attention reads no more."""

    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        end = at + tokens.shape[1]
        return self.step(tokens, torch.arange(at, end), end)


# -- torchtune: the position is a buffer of the cache, moved on in place -----------------------------------------------


class CountingCache(BufferCache):
    def __init__(self, batch: int, max_length: int) -> None:
        super().__init__(batch, max_length)
        self.register_buffer("cache_pos", torch.arange(max_length), persistent=False)

    def update(self, input_pos: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        length = k.shape[2]
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, self.cache_pos[:length]] = k
        v_out[:, :, self.cache_pos[:length]] = v
        self.cache_pos.add_(length)
        return k_out, v_out


class CountingAttention(BufferAttention):
    cache_class = CountingCache

    def forward(self, x: Tensor, input_pos: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in self.project(x))
        k, v = self.kv_cache.update(input_pos, k, v)
        shape = (k.shape[0], KV_HEADS, REPEATS, k.shape[2], HEAD_DIM)
        k, v = k.unsqueeze(2).expand(shape).flatten(1, 2), v.unsqueeze(2).expand(shape).flatten(1, 2)
        return self.finish(x, F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]))


class CountingDecoder(Decoder):
    """The caller gives positions [B, S] and the rows of its causal mask, [B, S, max_length]."""

    layer = CountingAttention

    def forward(self, tokens: Tensor, mask: Tensor, input_pos: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(input_pos)
        for layer in self.layers:
            x = layer(x, input_pos, mask)
        return self.head(x)


class MaskRows(Feed):
    def __call__(self, tokens: Tensor, at: int) -> Tensor:
        batch, length = tokens.shape
        longest = self.model.caches()[0].shape[2]
        causal = torch.ones(longest, longest).tril().bool()
        input_pos = torch.arange(at, at + length).repeat(batch, 1)
        return self.step(tokens, mask=causal[input_pos], input_pos=input_pos)
