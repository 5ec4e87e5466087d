"""Loops in the manner of well-known code bases: the tokens and the caches of the eager model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import paged_inductor

from .static_zoo import FORMS, StaticForm, generate, loop

MAX_LENGTH = 96


def paged(model: Any) -> Callable[..., Any]:
    return paged_inductor.page(model, inner="eager")


def compiled(model: Any) -> Callable[..., Any]:
    return torch.compile(model, backend="paged_inductor", options={"inner": "eager"})


def turns(*lengths: int, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randint(0, 61, (batch, length)) for length in lengths]


def run(
    form: StaticForm, model: Any, step: Any, prompts: list[torch.Tensor], new_tokens: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.start(prompts[0].shape[0], MAX_LENGTH)
    feed = form.feed(model, step)
    return loop(feed, prompts, new_tokens), feed.caches()


@pytest.mark.parametrize("enter", [paged, compiled])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_two_turns_give_the_eager_tokens_and_caches(form: StaticForm, enter: Any) -> None:
    torch.manual_seed(3)
    model = form.make()
    prompts = turns(7, 5)
    expected, dense = run(form, model, model, prompts, 40)
    tokens, caches = run(form, model, enter(model), prompts, 40)
    assert torch.equal(tokens, expected)
    assert len(caches) == len(dense)
    for ours, theirs in zip(caches, dense):
        values = ours.dense() if isinstance(ours, paged_inductor.PagedTensor | paged_inductor.PagedStack) else ours
        torch.testing.assert_close(values, theirs, rtol=1e-4, atol=1e-4)


# torchtune's position is reset with its cache only.
@pytest.mark.parametrize("form", [form for form in FORMS if form.name != "torchtune"], ids=lambda form: form.name)
def test_buffers_are_used_again_for_other_sequences(form: StaticForm) -> None:
    """The second prompt overwrites a longer one's tokens; what lies beyond must not be seen."""
    torch.manual_seed(4)
    model = form.make()
    first, second = turns(30, 5)
    model.start(2, MAX_LENGTH)
    expected = [generate(form, model, model, [prompt], 12) for prompt in (first, second)]
    step = paged(model)
    model.start(2, MAX_LENGTH)
    assert torch.equal(generate(form, model, step, [first], 12), expected[0])
    assert torch.equal(generate(form, model, step, [second], 12), expected[1])


# The other buffers are written in all rows.
SLICE_THE_BATCH = ("meta-llama", "litgpt", "litgpt-cropped")


@pytest.mark.parametrize("form", [form for form in FORMS if form.name in SLICE_THE_BATCH], ids=lambda form: form.name)
def test_one_row_of_a_larger_buffer(form: StaticForm) -> None:
    torch.manual_seed(5)
    model = form.make()
    prompts = turns(7, batch=1)
    model.start(3, MAX_LENGTH)
    expected = generate(form, model, model, prompts, 12)
    model.start(3, MAX_LENGTH)
    assert torch.equal(generate(form, model, paged(model), prompts, 12), expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_the_models_would_notice_a_wrong_cache(form: StaticForm) -> None:
    """Tokens vary, and the oldest token still moves the logits of the last step."""
    torch.manual_seed(3)
    model = form.make()
    prompts = turns(7)
    tokens, _ = run(form, model, model, prompts, 40)
    assert all(row[7:].unique().numel() >= 6 for row in tokens)
    other = tokens.clone()
    other[:, 0] = (other[:, 0] + 1) % 61
    logits = []
    for sequence in (tokens, other):
        model.start(2, MAX_LENGTH)
        feed = form.feed(model, model)
        with torch.no_grad():
            feed(sequence[:, :-1], 0)
            logits.append(feed(sequence[:, -1:], sequence.shape[1] - 1)[:, -1])
    assert not torch.allclose(*logits, atol=1e-3)
