"""What the proof of sharing accepts of static caches, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor

VOCAB, DIM, HEADS, LENGTH, COUNT = 31, 16, 2, 40, 9


class Buffers(nn.Module):
    """Two layers that write into buffers where a counter says; the parts that the tests vary are functions."""

    def __init__(self, **parts: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)) for _ in range(2))
        self.places = nn.Parameter(torch.randn(64, DIM))
        self.requires_grad_(False)
        self.parts = parts

    def forward(self, ids: Tensor, cache: dict[str, Tensor], extra: Tensor | None = None) -> Tensor:
        count, at = ids.shape[1], cache["at"]
        default = lambda m, ids, at, extra: m.embed(ids) + m.places[torch.arange(ids.shape[1]) + at]  # noqa: E731
        x = self.parts.get("embed", default)(self, ids, at, extra)
        places = torch.arange(count) + at
        causal = torch.arange(LENGTH) <= places[:, None]
        mask = self.parts.get("mask", lambda m, causal, extra: causal)(self, causal, extra)
        self.parts.get("move", lambda at, count: at.add_(count))(at, count)
        x = self.parts.get("after", lambda m, x, at: x)(self, x, at)
        for i, (q, k, v, o) in enumerate(self.layers):
            query, key, value = (f(x).view(-1, count, HEADS, DIM // HEADS).transpose(1, 2) for f in (q, k, v))
            keys, values = cache[f"k{i}"], cache[f"v{i}"]
            keys.index_copy_(2, places, key)
            values.index_copy_(2, places, value)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = x + o(out.transpose(1, 2).reshape(-1, count, DIM))
        return x


def empty(rows: int) -> dict[str, Tensor]:
    made = {name: torch.zeros(rows, HEADS, LENGTH, DIM // HEADS) for name in ("k0", "v0", "k1", "v1")}
    return {**made, "at": torch.zeros((), dtype=torch.int64)}


def reasons(model: Buffers, extras: Callable[[int, int], Tensor | None] = lambda old, count: None) -> list[str]:
    """Why each graph over handles does not share; "" if it does. The results are those of a dense model."""
    twin = copy.deepcopy(model)
    paged_inductor.page(model, inner="eager")
    ids = torch.arange(2 * COUNT).view(2, COUNT) % VOCAB
    mine, theirs = empty(2), empty(2)
    with torch.no_grad():
        for _ in range(2):  # buffers become handles in the first round
            for cache in (mine, theirs):
                cache["at"].zero_()
            for old, part in ((0, ids), (COUNT, ids[:, :1]), (COUNT + 1, ids[:, :3])):
                extra = extras(old, part.shape[1])
                torch.testing.assert_close(model(part, mine, extra), twin(part, theirs, extra), rtol=1e-4, atol=1e-4)
    graphs = [graph for graph in paged_inductor.explain(model).graphs if all(site.paged for site in graph.sites)]
    assert graphs
    return [graph.sharing for graph in graphs]


def told(old: int, count: int) -> Tensor:
    mask = torch.ones(2, 1, count, LENGTH, dtype=torch.bool).tril(old)
    mask[0, ..., :2] = False
    return mask


def moved_view(m: Buffers, x: Tensor, at: Tensor) -> Tensor:
    """Reads the counter behind its move by way of a view."""
    return x + m.places[torch.arange(x.shape[1]) + at.view(1)]


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"embed": lambda m, ids, at, extra: m.embed(ids)},
        {"embed": lambda m, ids, at, extra: m.embed(ids) + m.places.index_select(0, torch.arange(ids.shape[1]) + at)},
        {"embed": lambda m, ids, at, extra: m.embed(ids) + m.places[at + torch.arange(ids.shape[1])[None]]},
    ],
    ids=["counted", "plain", "index_select", "batched"],
)
def test_what_is_counted_is_shared(parts: dict[str, Any]) -> None:
    assert set(reasons(Buffers(**parts))) == {""}


def test_masks_that_are_told_are_looked_at() -> None:
    assert set(reasons(Buffers(mask=lambda m, causal, extra: extra), told)) == {""}


@pytest.mark.parametrize(
    ("parts", "extras", "reason"),
    [
        ({"embed": lambda m, ids, at, extra: m.embed(ids) * (at + 1)}, None, "the call's first position enters"),
        ({"embed": lambda m, ids, at, extra: m.embed(ids) + m.places[at]}, None, "the call's first position enters"),
        ({"after": lambda m, x, at: x + m.places[torch.arange(x.shape[1]) + at]}, None, "writes in place"),
        ({"after": moved_view}, None, "writes in place"),
        ({"move": lambda at, count: at.mul_(1).add_(count)}, None, "writes in place"),
        ({"mask": lambda m, causal, extra: extra}, lambda old, count: told(old, count).float(), "not understood"),
        ({"mask": lambda m, causal, extra: extra & True}, told, "not understood"),
        ({"mask": lambda m, causal, extra: causal | True}, None, "not proven to hide"),
        ({"mask": lambda m, causal, extra: torch.arange(LENGTH)[None] <= LENGTH}, None, "not proven to hide"),
    ],
    ids=[
        "factor",
        "one place",
        "moved before",
        "a view of it moved before",
        "moved twice",
        "bias",
        "computed",
        "all",
        "all shown",
    ],
)
def test_what_does_not_say_is_refused(parts: dict[str, Any], extras: Any, reason: str) -> None:
    found = reasons(Buffers(**parts), extras or (lambda old, count: None))
    assert any(reason in each for each in found), found
