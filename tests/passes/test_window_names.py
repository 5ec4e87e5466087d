"""Of which tokens a step says what they are, if attention sees windows, or a cache shows its last tokens only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import paged_inductor
from tests.passes.test_sharing import VOCAB, Decoder

WINDOW = 8


def window(model: Decoder, seen: int, count: int, extra: Any) -> Tensor:
    keys, queries = torch.arange(seen + count), torch.arange(seen, seen + count)[:, None]
    return (keys <= queries) & (keys > queries - WINDOW)


def whole(model: Decoder, seen: int, count: int, extra: Any) -> Tensor:
    return torch.arange(seen + count) <= torch.arange(seen, seen + count)[:, None]


def prompts_only(model: Decoder, seen: int, count: int, extra: Any) -> Tensor:
    return window(model, seen, count, extra) if count > 1 else whole(model, seen, count, extra)


def steps_only(model: Decoder, seen: int, count: int, extra: Any) -> Tensor:
    return whole(model, seen, count, extra) if count > 1 else window(model, seen, count, extra)


def places(model: Decoder, ids: Tensor, seen: int) -> Tensor:
    return model.embed(ids) + model.embed(torch.arange(seen, seen + ids.shape[1]))


def known(prompt: int, steps: int, cut: int | None = None, **parts: Any) -> list[int]:
    """How many tokens of a row are known after a prompt, and after each step. cut: of the last tokens, how many the
    caller keeps."""
    model = Decoder(**parts)
    paged_inductor.page(model, inner="eager")
    ids = torch.arange(prompt + steps).view(1, -1) % VOCAB
    past, found = None, []
    with torch.no_grad(), paged_inductor.tenant("windows", share="tenant"):
        for first, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + steps))]:
            _, past = model(ids[:, first:stop], past)
            names = past[0][0]._view.rows[0].names
            found.append(names.length(16) if names else 0)
            if cut is not None:
                past = [tuple(each[:, :, -cut:] for each in layer) for layer in past]
    return found


@pytest.mark.parametrize("prompt", [5, 20])
def test_a_window_may_be_longer_than_what_is_there(prompt: int) -> None:
    assert known(prompt, 6, mask=window) == list(range(prompt, prompt + 7))


@pytest.mark.parametrize("mask", [prompts_only, steps_only])
def test_nothing_is_known_of_tokens_that_see_more_or_less_than_those_before(mask: Any) -> None:
    assert known(20, 3, mask=mask) == [20] * 4
    if mask is steps_only:  # nothing was hidden before
        assert known(5, 6, mask=mask) == list(range(5, 12))
    else:  # after token 8, nothing is hidden that a window of prompts would hide
        assert known(5, 6, mask=mask) == list(range(5, 12))


def test_what_a_cache_shows_is_a_window() -> None:
    assert known(WINDOW - 1, 5, cut=WINDOW - 1) == list(range(7, 13))
    assert known(WINDOW - 1, 5, cut=WINDOW - 1, mask=window) == list(range(7, 13))
    assert known(20, 3, cut=WINDOW - 1, mask=window) == list(range(20, 24))
    assert known(20, 3, cut=WINDOW - 1) == [20] * 4  # its prompt saw all
    assert known(7, 4, cut=5, mask=window) == [7] * 5  # the cache shows less than the attention saw before


def test_positions_counted_from_what_a_cache_shows_are_not_those_of_the_tokens() -> None:
    assert known(WINDOW - 1, 5, cut=WINDOW - 1, embed=places) == [7, 8, 8, 8, 8, 8]
    assert known(20, 3, embed=places) == [20, 21, 22, 23]
