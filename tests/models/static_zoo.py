"""Small decoders in the manner of well-known code bases that write their caches in place, and of some that do neither
that nor grow them by plain `cat`. Each form has the cache, the attention and the step of the loop that its name says.

`generate(form, model, step, turns, n)` is the loop. Weights are large and untied, so that a wrong cache changes the
tokens. `model.caches()` are K and V of each layer as they are now, where the model holds them.
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
    """make: the model's class. feed(model, step): how the loop calls `step` for tokens that stand at a position.
    layout: of the caches, "" if the model holds none between calls.
    """

    name: str
    make: type[buffers.Decoder]
    feed: Callable[[Any, Callable[..., Any]], buffers.Feed]
    layout: str = ""


FORMS = (
    StaticForm("gpt-fast", buffers.BufferDecoder, buffers.feed_running_position, "BHSD"),
    StaticForm("meta-llama", others.SliceDecoder, others.feed_start, "BSHD"),
    StaticForm("litgpt", buffers.IndexCopyDecoder, buffers.feed_positions, "BHSD"),
    StaticForm("litgpt-cropped", buffers.IndexCopyDecoder, buffers.feed_positions_and_length, "BHSD"),
    StaticForm("torchtune", buffers.CountingDecoder, buffers.feed_mask_rows, "BHSD"),
    StaticForm("functional-index-copy", others.FunctionalDecoder, others.feed_caches),
    StaticForm("stacked-cat", others.StackedDecoder, others.feed_stacked),
    StaticForm("nanogpt", others.PlainDecoder, others.feed_everything),
)


def generate(
    form: StaticForm, model: Any, step: Callable[..., Any], turns: Sequence[Tensor], new_tokens: int
) -> Tensor:
    """Greedy decoding: each of `turns` [B, S] is fed as a whole, then `new_tokens` follow one by one.

    `model.start` was called; `step` is the model, or its compiled form. Returns all tokens [B, S].
    """
    feed = form.feed(model, step)
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
