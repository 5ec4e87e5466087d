"""`mode="reduce-overhead"` with static caches: no launch depends on where a step writes. See `test_replay`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import paged_inductor
from paged_inductor import PagedTensor, positions, stats

from . import static_zoo
from .replaying import MODE, addresses, changes
from .small_transformers import small
from .static_zoo import StaticForm

pytestmark = pytest.mark.usefixtures("kernels_serve")

BUFFERS = [form for form in static_zoo.FORMS if form.layout or form.name.startswith("functional")]
ROUNDING = {"rtol": 2e-3, "atol": 2e-3}  # the zoo's weights are large


def integers(calls: Sequence[tuple[Any, ...]]) -> set[tuple[int, ...]]:
    return {tuple(value for value in inputs if isinstance(value, int)) for inputs in calls}


@pytest.mark.parametrize("form", BUFFERS, ids=lambda form: form.name)
def test_two_turns_of_many_steps(form: StaticForm, calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(1)
    model = form.make()
    turns = [torch.randint(0, 61, (2, 5)), torch.randint(0, 61, (2, 4))]
    model.start(2, 64)
    expected = static_zoo.generate(form, model, model, turns, 20)
    model.start(2, 64)
    growths = stats().arena_growths
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    tokens = static_zoo.generate(form, model, step, turns, 20)
    growths = stats().arena_growths - growths
    assert torch.equal(tokens, expected)
    assert len(calls) == 40 and stats().dense_fallbacks == 0
    assert len(integers(calls)) <= 1 + growths  # no position among them
    shapes = [[value.shape for value in inputs if isinstance(value, Tensor)] for inputs in calls]
    assert changes(shapes) <= growths
    arenas = [addresses(inputs, lambda value: value.dim() == 4 and value.is_floating_point()) for inputs in calls]
    assert changes(arenas) <= growths
    assert stats().graph_recordings <= 1 + growths


def assert_alike(name: str, loop: Callable[[Any, Any], list[Tensor]]) -> None:
    """What `loop(model, forward)` gives with a form's model is the same with the model's steps replayed."""
    torch.manual_seed(2)
    model = next(form for form in BUFFERS if form.name == name).make()
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    with torch.no_grad():
        for got, want in zip(loop(model, step), loop(model, model), strict=True):
            torch.testing.assert_close(got, want, **ROUNDING)


def test_positions_go_back(calls: list[tuple[Any, ...]]) -> None:
    """As when drafted tokens are refused: what was written behind stays in memory, and unseen."""
    tokens = torch.randint(0, 61, (2, 30))

    def loop(model: Any, forward: Any) -> list[Tensor]:
        model.start(2, 32)
        out = [forward(tokens[:, :12], torch.arange(12))]
        for at in (12, 13, 14, 13, 14, 15, 16, 6, 7, 8, 9):
            out.append(forward(tokens[:, at + 5 : at + 6], torch.arange(at, at + 1)))
        return out

    assert_alike("gpt-fast", loop)
    assert len(calls) == 11 and stats().dense_fallbacks == 0
    assert stats().graph_recordings <= 1 + stats().arena_growths


def test_several_tokens_a_step(calls: list[tuple[Any, ...]]) -> None:
    tokens = torch.randint(0, 61, (2, 30))

    def loop(model: Any, forward: Any) -> list[Tensor]:
        model.start(2, 32)
        return [forward(tokens[:, at : at + 3], torch.arange(at, at + 3)) for at in range(0, 30, 3)]

    assert_alike("litgpt", loop)
    assert len(calls) == 9 and stats().graph_recordings <= 1 + stats().arena_growths


class Padded(torch.nn.Module):
    """Meta's form, for a padded batch: the caller's mask is as long as what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(61, 32), torch.nn.Linear(32, 61)
        self.register_buffer("angles", torch.randn(64, 16))
        self.cache = [torch.zeros(2, 2, 64, 16), torch.zeros(2, 2, 64, 16)]

    def forward(self, tokens: Tensor, start: int, padding: Tensor) -> Tensor:
        x = self.embed(tokens).view(*tokens.shape, 2, 16).transpose(1, 2)
        stop = start + tokens.shape[1]
        turned = x * self.angles[start:stop].cos()
        self.cache[0][:, :, start:stop] = turned
        self.cache[1][:, :, start:stop] = x
        k, v = self.cache[0][:, :, :stop], self.cache[1][:, :, :stop]
        seen = torch.ones(stop, stop, dtype=torch.bool).tril()[start:] & padding[:, None, None, :]
        out = torch.nn.functional.scaled_dot_product_attention(turned, k, v, seen)
        return self.head(out.transpose(1, 2).flatten(2))


def test_a_mask_as_long_as_what_was_written(calls: list[tuple[Any, ...]]) -> None:
    torch.manual_seed(3)
    model = Padded()
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[0, :3] = False
    tokens = torch.randint(0, 61, (2, 40))
    step = torch.compile(model, backend="paged_inductor", options=MODE)

    def loop(forward: Any) -> list[Tensor]:
        model.cache = [torch.zeros_like(torch.empty(2, 2, 64, 16)) for _ in range(2)]
        out = [forward(tokens[:, :7], 0, padding[:, :7])]
        return out + [forward(tokens[:, at : at + 1], at, padding[:, : at + 1]) for at in range(7, 30)]

    with torch.no_grad():
        for got, want in zip(loop(step), loop(model), strict=True):
            torch.testing.assert_close(got[:, -1], want[:, -1], rtol=1e-4, atol=1e-4)
    assert len(calls) >= 22 and stats().dense_fallbacks == 0
    assert len(integers(calls)) <= 1 + stats().arena_growths


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
def test_a_static_cache_of_transformers(kind: str, padded: bool, calls: list[tuple[Any, ...]]) -> None:
    """Full buffers, buffers that slide once they are full, and both in one model."""
    from transformers import StaticCache

    model = small(kind, **({} if kind == "llama" else {"sliding_window": 12}))
    prompt = torch.randint(3, 97, (2, 7))
    mask = torch.ones_like(prompt)
    mask[1, : 3 * padded] = 0
    options = {"attention_mask": mask, "do_sample": False, "min_new_tokens": 24, "max_new_tokens": 24}
    caches = [StaticCache(config=model.config, max_cache_len=40) for _ in range(2)]
    expected = model.generate(prompt, past_key_values=caches[0], **options)
    growths = stats().arena_growths
    tokens = paged_inductor.page(model, **MODE).generate(prompt, past_key_values=caches[1], **options)
    assert torch.equal(tokens, expected)
    assert isinstance(caches[1].layers[0].keys, PagedTensor)
    assert len(calls) == 23 and stats().dense_fallbacks == 0
    assert stats().graph_recordings <= 2 + stats().arena_growths - growths  # while windows fill up, and then


class Rolling(torch.nn.Module):
    """Writes at a position, or pushes out the oldest token; attends to all that the mask shows."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v = torch.zeros(2, 2, 8, 16), torch.zeros(2, 2, 8, 16)

    def forward(self, x: Tensor, at: Tensor, mask: Tensor | None, rolls: bool) -> Tensor:
        for cache, new in ((self.k, x.cos()), (self.v, x.sin())):
            if rolls:
                moved = cache.roll(-1, 2)
                moved[:, :, -1:] = new
                cache.copy_(moved)
            else:
                cache.index_copy_(2, at, new)
        if mask is None and not rolls:
            mask = torch.arange(8) <= at[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, self.k, self.v, mask)


@pytest.mark.parametrize("given", [False, True])
def test_a_buffer_that_rolled_is_written_in_its_midst(given: bool, calls: list[tuple[Any, ...]]) -> None:
    """Its rows hold tokens that it does not show any more: positions count from the first that it does."""
    torch.manual_seed(4)
    model, own = Rolling(), Rolling()
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    mask[..., 4] = False
    with torch.no_grad():
        for at in (0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, 2, 3, -1, 5):
            x = torch.randn(2, 2, 1, 16)
            so_far = torch.arange(8).view(1, 1, 1, 8) <= at
            hides = None if not given else mask if at == -1 or len(calls) > 8 else so_far
            got, want = (f(x, torch.tensor([at]), hides, at == -1) for f in (step, own))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.k, own.k)
    assert len(calls) >= 13 and stats().dense_fallbacks == 0


class Marked(torch.nn.Module):
    """Positions are a tensor, and how much of the buffers is read a number; marks what was written."""

    def __init__(self, marks: bool) -> None:
        super().__init__()
        self.k, self.v = torch.zeros(2, 2, 16, 16), torch.zeros(2, 2, 16, 16)
        self.seen = torch.zeros(16, dtype=torch.bool)
        self.marks = marks

    def forward(self, x: Tensor, at: Tensor, stop: int) -> Tensor:
        self.k.index_copy_(2, at, x.cos())
        self.v.index_copy_(2, at, x.sin())
        if self.marks:
            self.seen[at] = True
            return torch.nn.functional.scaled_dot_product_attention(x, self.k, self.v, self.seen[None])
        return torch.nn.functional.scaled_dot_product_attention(x, self.k[:, :, :stop], self.v[:, :, :stop])


@pytest.mark.parametrize("marks", [False, True])
def test_positions_in_tensors(marks: bool, calls: list[tuple[Any, ...]]) -> None:
    """Without a mask, one is made; a mask that the step writes to stays in place, and nothing else has to."""
    torch.manual_seed(5)
    model, own = Marked(marks), Marked(marks)
    step = torch.compile(model, backend="paged_inductor", options=MODE)
    with torch.no_grad():
        for at in (range(5), *(range(i, i + 1) for i in (5, 6, 7, 8, 9, 6, 7, 10, 11))):
            x = torch.randn(2, 2, len(at), 16)
            got, want = (f(x, torch.tensor(at), at.stop) for f in (step, own))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(model.seen, own.seen)
    assert len(calls) >= 8 and stats().graph_recordings <= 1 + stats().arena_growths


def counted(x: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The counter is an argument, and moved on here."""
    at = torch.arange(x.shape[2]) + seen
    seen.add_(x.shape[2])
    k.index_copy_(2, at, x.cos())
    v.index_copy_(2, at, x.sin())
    mask = torch.arange(k.shape[2]) <= at[:, None]
    return torch.nn.functional.scaled_dot_product_attention(x, k, v, mask)


def test_a_counter_is_read_once_and_stays_in_place(
    calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device, where a read waits. Another cache has another counter: a recording of its own."""
    reads: list[int] = []
    read = positions._Counter.__call__

    def counting(self: Any, args: Sequence[Any]) -> int:
        evaluate = self._evaluate
        self._evaluate = lambda args: reads.append(1) or evaluate(args)
        try:
            return read(self, args)
        finally:
            self._evaluate = evaluate

    monkeypatch.setattr(positions, "_reads_wait", lambda device: True)
    monkeypatch.setattr(positions._Counter, "__call__", counting)
    step = torch.compile(counted, backend="paged_inductor", options=MODE)
    recordings = []
    for _ in range(2):
        caches = [[torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16), torch.tensor(0)] for _ in range(2)]
        reads.clear()
        with torch.no_grad():
            for count in (5, *[1] * 12):
                x = torch.randn(1, 2, count, 16)
                got, want = step(x, *caches[0]), counted(x, *caches[1])
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        assert len(reads) <= 3  # the first call of each graph
        recordings.append(stats().graph_recordings)
    assert recordings[1] > recordings[0] <= 2


def test_a_step_that_inductor_compiles() -> None:
    """On the CPU it makes no recording of it; the graph is the one that it would record."""
    step = torch.compile(counted, backend="paged_inductor", options={"mode": "reduce-overhead"})
    caches = [[torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16), torch.tensor(0)] for _ in range(2)]
    with torch.no_grad():
        for count in (5, *[1] * 6):
            x = torch.randn(1, 2, count, 16)
            got, want = step(x, *caches[0]), counted(x, *caches[1])
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert int(caches[0][2]) == 11 and isinstance(caches[0][0], PagedTensor) and stats().dense_fallbacks == 0


def test_counters_are_static_for_inductor() -> None:
    """Else Inductor would not record a step that moves one on."""
    from paged_inductor import backend

    marked: list[str] = []
    keep = backend.keep_in_place

    def kept(state: Any) -> None:
        keep(state)
        marked.extend(
            node.name
            for node in state.placeholders
            if node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") and node in state.captured
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "keep_in_place", kept)
        step = torch.compile(counted, backend="paged_inductor", options=MODE)
        cache = [torch.zeros(1, 2, 32, 16), torch.zeros(1, 2, 32, 16), torch.tensor(0)]
        with torch.no_grad():
            for count in (5, 1, 1):
                step(torch.randn(1, 2, count, 16), *cache)
    assert marked == ["l_seen_"]
