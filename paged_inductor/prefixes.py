"""`register_prefix(...)`: a prompt that many will begin with is computed once, for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._errors import PrefixError
from .sharing import Registration, registering

__all__ = ["register_prefix"]


def register_prefix(model: Callable[..., Any], tokens: Tensor | Sequence[int], **kwargs: Any) -> int:
    """Compute the keys and values of `tokens`, such as a system prompt, and keep them for all tenants of the same salt
    whose `share` is "system", "tenant" or "global". Returns how many tokens are kept: whole blocks only.

    model: paged by `page`, or compiled with this backend. It is called as its users' prompts will be: by
    `model.generate` for one token, if it has that, else as `model(ids, **kwargs)` with `ids` of shape [1, n]. tokens:
    the ids, of one sequence. They stay until memory is short and no other cached block is left, or until `reset()`;
    registering them again keeps them, too.

    Raises `PrefixError` if nothing could be kept; `explain(model)` says why.
    """
    if isinstance(tokens, str):
        raise PrefixError("register_prefix() takes token ids, but got text: pass tokenizer(text).input_ids")
    ids = torch.as_tensor(tokens)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.is_floating_point():
        raise PrefixError(
            f"register_prefix() takes the ids of one sequence, but got a tensor of shape {list(ids.shape)}"
        )
    registration = Registration()
    token = registering.set(registration)
    try:
        with torch.no_grad():
            generate = getattr(model, "generate", None)
            if callable(generate):
                generate(ids, max_new_tokens=1, do_sample=False, num_beams=1, **kwargs)
            else:
                model(ids, **kwargs)
    finally:
        registering.reset(token)
    if not registration.tokens:
        raise PrefixError(
            f"none of these {ids.shape[1]} tokens can be kept: the model is not paged, the tokens do not fill a block, "
            "or its keys and values do not depend on the tokens alone; explain(model) says which"
        )
    return registration.tokens
