"""Small hand-written models with caches that grow by `torch.cat`, in the forms that people write.

Weights are large and untied, so that logits differ clearly from token to token: a wrong cache changes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Form:
    """One spelling of a decoder layer's cache and attention.

    layout: the cache's axes. gqa: how KV heads are repeated. mask: what is given to SDPA. store: where K and V live
    between calls. breaks: a graph break between the cache update and the attention.
    """

    layout: str = "BHSD"
    heads_q: int = 4
    heads_kv: int = 2
    gqa: str = "enable_gqa"
    mask: str = "bool"
    store: str = "tuple"
    breaks: bool = False

    @property
    def name(self) -> str:
        parts = [self.layout, f"{self.heads_q}x{self.heads_kv}", self.gqa, self.mask, self.store]
        return "-".join(parts + ["breaks"] * self.breaks)


class Layer(nn.Module):
    """Attention and a small MLP around one cache."""

    def __init__(self, form: Form, dim: int, head_dim: int) -> None:
        super().__init__()
        self.form, self.head_dim = form, head_dim
        self.q = nn.Linear(dim, form.heads_q * head_dim, bias=False)
        self.k = nn.Linear(dim, form.heads_kv * head_dim, bias=False)
        self.v = nn.Linear(dim, form.heads_kv * head_dim, bias=False)
        self.o = nn.Linear(form.heads_q * head_dim, dim, bias=False)
        self.mlp = nn.Linear(dim, dim)
        self.cache: Any = None

    def forward(self, x: Tensor, past: Any, mask: Tensor | None, is_causal: bool) -> tuple[Tensor, Any]:
        form, (batch, length, _) = self.form, x.shape
        q = self.q(x).view(batch, length, form.heads_q, self.head_dim).transpose(1, 2)
        k = self.k(x).view(batch, length, form.heads_kv, self.head_dim)
        v = self.v(x).view(batch, length, form.heads_kv, self.head_dim)
        if form.layout == "BHSD":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        if form.store == "attribute":
            past = self.cache
        if past is not None:
            dim = -2 if form.layout == "BHSD" else 1
            k, v = torch.cat([past[0], k], dim=dim), torch.cat((past[1], v), dim)
        present = (k, v)
        if form.store == "attribute":
            self.cache = present
        if form.breaks:
            torch._dynamo.graph_break()
        if form.layout == "BSHD":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        repeats = form.heads_q // form.heads_kv
        if form.gqa == "expand":
            k, v = _expand_heads(k, repeats), _expand_heads(v, repeats)
        elif form.gqa == "repeat_interleave":
            k, v = k.repeat_interleave(repeats, dim=1), torch.repeat_interleave(v, repeats, 1)
        elif form.gqa == "tile":
            k, v = _tiled_heads(k, repeats), _tiled_heads(v, repeats)
        elif form.gqa == "repeat":
            k, v = k.repeat(1, repeats, 1, 1), v.repeat((1, repeats, 1, 1))
        enable = {"enable_gqa": True} if form.gqa == "enable_gqa" and repeats > 1 else {}
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, **enable)
        x = x + self.o(out.transpose(1, 2).reshape(batch, length, -1))
        return x + torch.tanh(self.mlp(x)), present


def _tiled_heads(x: Tensor, repeats: int) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, None].expand(batch, repeats, heads, length, dim).reshape(batch, repeats * heads, length, dim)


def _expand_heads(x: Tensor, repeats: int) -> Tensor:
    batch, heads, length, dim = x.shape
    return x[:, :, None].expand(batch, heads, repeats, length, dim).reshape(batch, heads * repeats, length, dim)


class Decoder(nn.Module):
    """Embedding, layers, logits. `forward(tokens, past)` returns (logits, presents)."""

    def __init__(self, form: Form, layers: int = 2, vocab: int = 61, dim: int = 24, head_dim: int = 8) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(512, dim)
        self.layers = nn.ModuleList(Layer(form, dim, head_dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.requires_grad_(False)

    def forward(self, tokens: Tensor, past: Any = None, padding: Tensor | None = None) -> tuple[Tensor, Any]:
        seen = 0
        if self.form.store == "attribute":
            past = [layer.cache for layer in self.layers]
            past = None if past[0] is None else past
        if past is not None:
            seen = past[0][0].shape[2 if self.form.layout == "BHSD" else 1]
        length = tokens.shape[1]
        position = torch.arange(seen, seen + length, device=tokens.device)
        x = self.embed(tokens) + self.positions(position)
        mask, is_causal = self._mask(seen, length, padding)
        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, None if past is None else past[i], mask, is_causal)
            presents.append(present)
        return self.head(x), presents if self.form.store == "list" else tuple(presents)

    def _mask(self, seen: int, length: int, padding: Tensor | None) -> tuple[Tensor | None, bool]:
        if self.form.mask == "none_or_is_causal":
            return None, length > 1 and seen == 0
        key = torch.arange(seen + length)
        query = torch.arange(length)[:, None] + seen
        if self.form.mask == "is_causal_or_bool" and seen == 0:
            return None, True
        visible = (key <= query)[None, None]
        if padding is not None:
            visible = visible & padding[:, None, None, : seen + length]
        if self.form.mask == "float":
            return torch.zeros(visible.shape).masked_fill(~visible, float("-inf")), False
        return visible, False

    def clear(self) -> None:
        for layer in self.layers:
            layer.cache = None


def generate(
    step: Callable[..., tuple[Tensor, Any]], prompt: Tensor, new_tokens: int, chunks: tuple[int, ...] = ()
) -> tuple[Tensor, Any]:
    """Greedy decoding by an ordinary loop: prefill (in `chunks`, the rest at once), then token by token.

    Returns all tokens, and the last cache.
    """
    past, at = None, 0
    with torch.no_grad():
        for size in (*chunks, prompt.shape[1] - sum(chunks)):
            logits, past = step(prompt[:, at : at + size], past)
            at += size
    return decode(step, prompt, logits, past, new_tokens)


def decode(
    step: Callable[..., tuple[Tensor, Any]], tokens: Tensor, logits: Tensor, past: Any, new_tokens: int
) -> tuple[Tensor, Any]:
    """The second half of `generate`: go on from the logits and the cache of `tokens`."""
    with torch.no_grad():
        for _ in range(new_tokens):
            nxt = logits[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, nxt], 1)
            logits, past = step(nxt, past)
    return tokens, past
