"""Static caches where things go wrong, or not as they mostly do: nothing is lost, nothing leaks."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paged_inductor
from paged_inductor import ops
from paged_inductor.tensor.adopt import refusal

from .static_zoo import FORMS, generate

LENGTH = 64
GPT_FAST = FORMS[0]


def paged(model: Any) -> Any:
    return paged_inductor.page(model, inner="eager")


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def caches(model: Any) -> list[Tensor]:
    return [x.dense() if isinstance(x, paged_inductor.PagedTensor) else x.clone() for x in model.caches()]


def prepared() -> tuple[Any, Any]:
    """A model and its twin after a prompt of 7 and one step: paged, and compiled for steps; and dense."""
    torch.manual_seed(0)
    model = GPT_FAST.make()
    model.start(2, LENGTH)
    twin = copy.deepcopy(model)
    paged(model)
    with torch.no_grad():
        for positions in (torch.arange(7), torch.tensor([7]), torch.tensor([8])):
            tokens = torch.ones(2, len(positions), dtype=torch.long)
            close(model(tokens, positions), twin(tokens, positions))
    return model, twin


@torch.no_grad()
def test_a_step_that_fails_leaves_the_positions_unwritten() -> None:
    model, twin = prepared()
    before, used = caches(model), paged_inductor.stats().blocks_used
    token = torch.ones(2, 1, dtype=torch.long)
    fault = mock.patch.object(ops.dispatch.formulas, "cache_write", side_effect=KeyboardInterrupt)
    with fault, pytest.raises(KeyboardInterrupt):
        model(token, torch.tensor([16]))
    assert all(map(torch.equal, caches(model), before))
    assert paged_inductor.stats().blocks_used == used
    paged_inductor.check_integrity()
    close(model(token, torch.tensor([9])), twin(token, torch.tensor([9])))


@torch.no_grad()
@pytest.mark.parametrize("positions", [[3, 4], [30, 31], [20, 9], [5, 5], [62, 63]])
def test_positions_behind_a_gap_before_the_end_and_scattered(positions: list[int]) -> None:
    model, twin = prepared()
    tokens = torch.tensor([[1, 2], [3, 4]])
    where = torch.tensor(positions)
    close(model(tokens, where), twin(tokens, where))
    for ours, theirs in zip(caches(model), twin.caches()):
        close(ours, theirs)
    after = torch.tensor([40])
    close(model(tokens[:, :1], after), twin(tokens[:, :1], after))
    paged_inductor.check_integrity()


@torch.no_grad()
def test_a_position_beyond_the_buffer_raises_as_torch_does() -> None:
    model, twin = prepared()
    before = caches(model)
    with pytest.raises(IndexError):
        model(torch.ones(2, 1, dtype=torch.long), torch.tensor([LENGTH]))
    assert all(map(torch.equal, caches(model), before))
    close(
        model(torch.ones(2, 1, dtype=torch.long), torch.tensor([9])),
        twin(torch.ones(2, 1, dtype=torch.long), torch.tensor([9])),
    )


@torch.no_grad()
def test_one_layer_ahead_of_the_others_runs_on_its_own_positions() -> None:
    """torchtune counts in every layer: where the counters differ, so do the positions."""
    form = next(form for form in FORMS if form.name == "torchtune")
    torch.manual_seed(0)
    model = form.make()
    model.start(2, LENGTH)
    twin = copy.deepcopy(model)
    paged(model)
    outs = []
    for each in (model, twin):
        feed = form.feed(each, each)
        feed(torch.ones(2, 5, dtype=torch.long), 0)
        feed(torch.ones(2, 1, dtype=torch.long), 5)
        for name, buffer in each.layers[1].named_buffers():
            if "pos" in name:
                buffer.add_(2)
        outs.append(feed(torch.ones(2, 1, dtype=torch.long), 6))
    close(*outs)
    for ours, theirs in zip(caches(model), twin.caches()):
        close(ours, theirs)


@torch.no_grad()
@pytest.mark.parametrize("change", ["in place", "another", "and back"])
def test_a_mask_buffer_that_changes_is_obeyed(change: str) -> None:
    """The proof that gpt-fast's mask is causal relies on the buffer's content."""
    model, twin = prepared()
    assert {site.mask for site in paged_inductor.explain(model).sites} == {"causal, offset start_0"}
    tokens = torch.tensor([[1], [3]])
    for each in (model, twin):
        mask = each.causal_mask.clone() if change == "another" else each.causal_mask
        mask[:, 2:5] = False
        each.causal_mask = mask
    close(model(tokens, torch.tensor([9])), twin(tokens, torch.tensor([9])))
    if change == "and back":
        for each in (model, twin):
            each.causal_mask.fill_(1).tril_()
    close(model(tokens, torch.tensor([10])), twin(tokens, torch.tensor([10])))


class Scratch(nn.Module):
    """A buffer that nobody keeps, one that is only partly returned, and attention on both."""

    def forward(self, q: Tensor, k: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        buffer, kept = (torch.zeros(2, 2, 16, 8).index_copy_(2, at, k) for _ in range(2))
        out = F.scaled_dot_product_attention(q, buffer, buffer)
        return out + F.scaled_dot_product_attention(q, kept, kept), kept[:, :, :4]


@torch.no_grad()
def test_buffers_that_nobody_keeps_are_left_alone() -> None:
    q, k = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8)
    module = Scratch()
    step = torch.compile(module, backend="paged_inductor", options={"inner": "eager"})
    for ours, theirs in zip(step(q, k, torch.arange(3)), module(q, k, torch.arange(3))):
        close(ours + 0, theirs)


def test_calls_that_need_gradients_still_write_to_the_pages() -> None:
    model, twin = prepared()
    tokens, position = torch.ones(2, 1, dtype=torch.long), torch.tensor([9])
    for each in (model, twin):
        each.head.weight.requires_grad_(True)
    ours, theirs = model(tokens, position), twin(tokens, position)
    close(ours, theirs)
    ours.sum().backward()
    theirs.sum().backward()
    close(model.head.weight.grad, twin.head.weight.grad)
    for mine, other in zip(caches(model), twin.caches()):
        close(mine, other.detach())


def test_memory_that_others_share_is_not_taken() -> None:
    buffer = torch.zeros(2, 2, 8, 4)
    assert refusal(buffer) == ""
    array = buffer.numpy()
    assert "numpy" in refusal(buffer)
    assert array.sum() == 0
    whole = torch.zeros(2, 2, 8, 4)
    part = whole[:1]
    assert "view" in refusal(part)
    assert "shares its memory" in refusal(whole)


@torch.no_grad()
def test_an_adopted_model_can_be_unpaged_and_goes_on() -> None:
    torch.manual_seed(0)
    model = GPT_FAST.make()
    model.start(2, LENGTH)
    expected = generate(GPT_FAST, model, model, [torch.ones(2, 5, dtype=torch.long)], 12)
    model.start(2, LENGTH)
    feed = GPT_FAST.feed(model, paged(model))
    logits = feed(torch.ones(2, 5, dtype=torch.long), 0)
    found = []
    for i in range(12):
        if i == 4:
            paged_inductor.unpage(model)
        found.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = feed(found[-1], 5 + i)
    assert torch.equal(torch.cat(found, 1), expected[:, 5:])
