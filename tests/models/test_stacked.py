"""Models that keep one tensor for K and V, or for all layers: the eager model's tokens, with all of it in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor
from paged_inductor import PagedTensor, configure
from paged_inductor._config import reset_config
from paged_inductor.tensor import PagedStack

VOCAB, HEADS, HEAD_DIM, LAYERS = 61, 3, 8, 2
DIM = HEADS * HEAD_DIM


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    configure(on_materialize="error")
    yield
    reset_config()


class Stacked(nn.Module):
    """A decoder; a subclass says how its caches are stacked: `empty` makes one, `keys`, `values` read a layer's and
    `joined` adds the new tokens [L, 2, B, H, S, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(128, DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)
        self.requires_grad_(False)

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        seen = 0 if cache is None else self.length(cache)
        query = torch.arange(seen, seen + tokens.shape[1])
        mask = torch.arange(seen + tokens.shape[1]) <= query[:, None]
        x = self.embed(tokens) + self.positions(query)
        news = []
        for i, qkv in enumerate(self.qkv):
            new = qkv(x).view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)  # [3, B, H, S, D]
            keys, values = new[1], new[2]
            if cache is not None:
                old_keys, old_values = self.layer(cache, i)
                keys, values = torch.cat([old_keys, keys], -2), torch.cat([old_values, values], -2)
            out = F.scaled_dot_product_attention(new[0], keys, values, attn_mask=mask)
            x = x + torch.tanh(out.transpose(1, 2).reshape(x.shape))
            news.append((new[1:], keys, values))
        return self.head(x), self.joined(cache, news)

    def length(self, cache: Any) -> int:
        return cache.shape[-2]

    def layer(self, cache: Any, i: int) -> Any:
        raise NotImplementedError

    def joined(self, cache: Any, news: list[Any]) -> Any:
        raise NotImplementedError


class OneTensor(Stacked):
    """[L, 2, B, H, S, D], new tokens as a slice of a fused projection."""

    def layer(self, cache: Any, i: int) -> Any:
        return cache[i, 0], cache[i, 1]

    def joined(self, cache: Any, news: list[Any]) -> Any:
        new = torch.stack([new for new, _, _ in news])
        return new if cache is None else torch.cat((cache, new), dim=-2)


class Unbound(OneTensor):
    def layer(self, cache: Any, i: int) -> Any:
        return cache.unbind(0)[i].unbind()

    def joined(self, cache: Any, news: list[Any]) -> Any:
        return torch.stack([torch.stack((keys, values)) for _, keys, values in news])


class KeysApart(OneTensor):
    """Two tensors [L, B, H, S, D]."""

    def length(self, cache: Any) -> int:
        return cache[0].shape[3]

    def layer(self, cache: Any, i: int) -> Any:
        return cache[0][i], cache[1].select(0, i)

    def joined(self, cache: Any, news: list[Any]) -> Any:
        new = torch.stack([n[0] for n, _, _ in news]), torch.stack([n[1] for n, _, _ in news])
        return new if cache is None else tuple(torch.cat([c, n], 3) for c, n in zip(cache, new))


class PairPerLayer(OneTensor):
    """[2, B, H, S, D] for each layer, as in the first GPT-2."""

    def length(self, cache: Any) -> int:
        return cache[0].size(-2)

    def layer(self, cache: Any, i: int) -> Any:
        return cache[i][0], cache[i][1]

    def joined(self, cache: Any, news: list[Any]) -> Any:
        return [torch.stack([keys, values]) for _, keys, values in news]


class KeysFirst(OneTensor):
    """[2, L, B, H, S, D], all layers' keys picked at once."""

    def layer(self, cache: Any, i: int) -> Any:
        keys, values = cache[0], cache[1:][0]
        return keys[i], values[i - LAYERS]

    def joined(self, cache: Any, news: list[Any]) -> Any:
        keys, values = torch.stack([k for _, k, _ in news]), torch.stack([v for _, _, v in news])
        return torch.stack([keys, values])


def leaves(cache: Any) -> list[Any]:
    return [cache] if isinstance(cache, Tensor) else list(cache)


def generate(step: Callable[..., Any], cache: Any = None, change: Callable[[Any], Any] = lambda cache: cache) -> Any:
    prompt = torch.randint(0, VOCAB, (3, 6), generator=torch.Generator().manual_seed(5))
    tokens = prompt
    with torch.no_grad():
        for i in range(24):
            logits, cache = step(prompt, cache)
            prompt = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, prompt], 1)
            if i == 12:
                cache = change(cache)
    return tokens, cache


FORMS = [OneTensor, Unbound, KeysApart, PairPerLayer, KeysFirst]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verify", [False, True])
def test_tokens_are_equal_and_all_of_the_cache_is_paged(form: type[Stacked], verify: bool) -> None:
    torch.manual_seed(2)
    model = form()
    expected, dense = generate(model)
    assert all(row[6:].unique().numel() > 5 for row in expected)
    paged_inductor.page(model, inner="eager", verify=verify)
    before = paged_inductor.stats()
    tokens, cache = generate(model)
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedStack) for tensor in leaves(cache))
    assert paged_inductor.stats().dense_fallbacks == before.dense_fallbacks
    for ours, theirs in zip(leaves(cache), leaves(dense), strict=True):
        torch.testing.assert_close(ours.dense(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_step_makes_pages(form: type[Stacked]) -> None:
    torch.manual_seed(2)
    model = paged_inductor.page(form(), inner="eager")
    with torch.no_grad():
        _, cache = model(torch.tensor([[1, 2, 3]]))
    assert all(isinstance(tensor, PagedStack) for tensor in leaves(cache))


def reordered(cache: Any) -> Any:
    order = torch.tensor([2, 0, 0])
    if isinstance(cache, Tensor):
        return cache.index_select(cache.dim() - 4, order)
    return [tensor.index_select(tensor.dim() - 4, order) for tensor in cache]


def cropped(cache: Any) -> Any:
    return cache[..., :-4, :] if isinstance(cache, Tensor) else [tensor[..., :-4, :] for tensor in cache]


@pytest.mark.parametrize("change", [reordered, cropped])
@pytest.mark.parametrize("form", [OneTensor, PairPerLayer, KeysApart])
def test_rows_reordered_and_tokens_cropped_by_the_loop(form: type[Stacked], change: Any) -> None:
    torch.manual_seed(2)
    model = form()
    expected, _ = generate(model, change=change)
    paged_inductor.page(model, inner="eager")
    before = paged_inductor.stats().dense_fallbacks
    tokens, cache = generate(model, change=change)
    assert torch.equal(tokens, expected)
    assert all(isinstance(tensor, PagedStack) for tensor in leaves(cache))
    assert paged_inductor.stats().dense_fallbacks == before


def test_a_dense_cache_to_begin_with_becomes_paged() -> None:
    torch.manual_seed(2)
    model = OneTensor()
    empty = torch.zeros(LAYERS, 2, 3, HEADS, 0, HEAD_DIM)
    expected, _ = generate(model, empty)
    tokens, cache = generate(paged_inductor.page(model, inner="eager"), empty)
    assert torch.equal(tokens, expected)
    assert isinstance(cache, PagedStack)


class Edited(OneTensor):
    """It writes into the stack that it returns."""

    def joined(self, cache: Any, news: list[Any]) -> Any:
        result = super().joined(cache, news)
        result[0, 1].mul_(0.5)
        return result


def test_a_stack_that_is_written_to_stays_dense_and_right() -> None:
    torch.manual_seed(2)
    model = Edited()
    expected, dense = generate(model)
    tokens, cache = generate(paged_inductor.page(model, inner="eager"))
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(cache, dense, rtol=1e-4, atol=1e-4)


class PartsToo(OneTensor):
    """It also returns parts of the stack."""

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        logits, joined = super().forward(tokens, None if cache is None else cache[0])
        return logits, (joined, joined[1], joined[0, 1], joined.unbind()[1][0])


def test_parts_of_a_stack_are_returned() -> None:
    torch.manual_seed(2)
    model = PartsToo()
    expected, dense = generate(model)
    tokens, cache = generate(paged_inductor.page(model, inner="eager"))
    assert torch.equal(tokens, expected)
    assert [type(tensor) for tensor in cache] == [PagedStack, PagedStack, PagedTensor, PagedTensor]
    for ours, theirs in zip(cache, dense, strict=True):
        torch.testing.assert_close(ours.dense(), theirs, rtol=1e-4, atol=1e-4)


class EditedLayer(OneTensor):
    """A layer writes into the keys that it joined for its own attention; the stack gets them as they were."""

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        x = self.embed(tokens)
        new = self.qkv[0](x).view(*x.shape[:2], 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        keys, values = new[1] * 1, new[2] * 1
        parts = torch.stack([torch.stack([keys, values])])
        if cache is not None:
            keys, values = torch.cat([cache[0, 0], keys], -2), torch.cat([cache[0, 1], values], -2)
            keys[..., :1, :] = 0
        out = F.scaled_dot_product_attention(new[0], keys, values)
        x = x + torch.tanh(out.transpose(1, 2).reshape(x.shape))
        return self.head(x), parts if cache is None else torch.cat([cache, parts], -2)


def test_keys_that_a_layer_writes_to_are_not_those_of_the_stack() -> None:
    torch.manual_seed(2)
    model = EditedLayer()
    expected, dense = generate(model)
    configure(on_materialize="silent")
    tokens, cache = generate(paged_inductor.page(model, inner="eager"))
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(cache.dense() if isinstance(cache, PagedStack) else cache, dense, rtol=1e-4, atol=1e-4)


class ReadWhole(OneTensor):
    """It also reads the whole stack: copied out for that, and right."""

    def forward(self, tokens: Tensor, cache: Any = None) -> tuple[Tensor, Any]:
        logits, joined = super().forward(tokens, cache)
        return logits if cache is None else logits + cache.mean(), joined


def test_a_stack_that_is_read_whole() -> None:
    torch.manual_seed(2)
    model = ReadWhole()
    expected, _ = generate(model)
    configure(on_materialize="silent")
    tokens, cache = generate(paged_inductor.page(model, inner="eager"))
    assert torch.equal(tokens, expected)
    assert isinstance(cache, PagedStack)


def test_another_graph_that_writes_into_the_stack_reaches_the_pages() -> None:
    torch.manual_seed(2)
    model = OneTensor()

    @torch.compile(backend="paged_inductor", options={"inner": "eager"})
    def halve(cache: Tensor) -> Tensor:
        cache[1, 0].mul_(0.5)
        return cache.sum()

    configure(on_materialize="silent")
    results = []
    for step in (model, paged_inductor.page(same_weights(model), inner="eager")):
        _, cache = generate(step)
        with torch.no_grad():
            total = halve(cache)
            logits, _ = step(torch.tensor([[1], [2], [3]]), cache)
        results.append((total, logits))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def same_weights(model: nn.Module) -> nn.Module:
    copy = OneTensor()
    copy.load_state_dict(model.state_dict())
    return copy
