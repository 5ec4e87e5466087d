"""Small decoders in the manner of well-known code bases that write their caches in place, and of some that do neither
that nor grow them by plain `cat`. Each form has the cache, the attention and the step of the loop that its name says.

`generate(form, model, step, turns, n)` is the loop. Weights are large and untied, so that a wrong cache changes the
tokens. `feed.caches()` are K and V of each layer as they are now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import static_buffers as buffers
from . import static_others as others


@dataclass(frozen=True)
class StaticForm:
    """make: the model. feed: the step of its loop. layout: of the caches, "" if the model holds none between calls."""

    name: str
    make: type[buffers.Decoder]
    feed: type[buffers.Feed]
    layout: str = ""


FORMS = (
    StaticForm("gpt-fast", buffers.BufferDecoder, buffers.RunningPosition, "BHSD"),
    StaticForm("meta-llama", others.SliceDecoder, others.Start, "BSHD"),
    StaticForm("litgpt", buffers.IndexCopyDecoder, buffers.Positions, "BHSD"),
    StaticForm("litgpt-cropped", buffers.IndexCopyDecoder, buffers.PositionsAndLength, "BHSD"),
    StaticForm("torchtune", buffers.CountingDecoder, buffers.MaskRows, "BHSD"),
    StaticForm("functional-index-copy", others.FunctionalDecoder, others.CachesInAndOut),
    StaticForm("stacked-cat", others.StackedDecoder, others.StackedInAndOut),
    StaticForm("nanogpt", others.PlainDecoder, others.Everything),
)


def generate(
    form: StaticForm, model: Any, step: Callable[..., Any], turns: Sequence[Tensor], new_tokens: int
) -> Tensor:
    """`loop` with a new feed: `model.start` was called; `step` is the model, or its compiled form."""
    return loop(form.feed(model, step), turns, new_tokens)


def loop(feed: buffers.Feed, turns: Sequence[Tensor], new_tokens: int) -> Tensor:
    """Greedy decoding: each of `turns` [B, S] is fed as a whole, then `new_tokens` follow one by one.

    Returns all tokens [B, S].
    """
    seen, tokens = 0, turns[0][:, :0]
    with torch.no_grad():
        for turn in turns:
            logits = feed(turn, seen)
            tokens, seen = torch.cat([tokens, turn], 1), seen + turn.shape[1]
            for _ in range(new_tokens):
                token = logits[:, -1].argmax(-1, keepdim=True)
                logits = feed(token, seen)
                tokens, seen = torch.cat([tokens, token], 1), seen + 1
    return tokens
