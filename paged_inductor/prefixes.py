"""`register_prefix(...)`: a prompt that many will begin with is computed once, for all of them; `forget_prefixes()`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._config import config
from ._errors import PrefixError
from .runtime import manager
from .sharer import Registration, registering

__all__ = ["forget_prefixes", "register_prefix"]


def forget_prefixes() -> None:
    """Find no cached prefix of any tenant again, registered ones included: for weights that were written to in a way
    that PyTorch does not count, such as a few elements through `weight.data`. Caches that live go on as they are."""
    manager().forget_prefixes()


def register_prefix(
    model: Callable[..., Any],
    tokens: Tensor | Sequence[int] | Mapping[str, Any] | str,
    *,
    tokenizer: Any = None,
    **kwargs: Any,
) -> int:
    """Compute the keys and values of `tokens`, such as a system prompt, and keep them for all tenants of the same salt
    whose `share` is "system", "tenant" or "global". Returns how many tokens are kept: whole blocks only.

    model: paged by `page`, or compiled with this backend. It is called as its users' prompts will be: by
    `model.generate` for one token, if it has that, else as `model(ids, **kwargs)` with `ids` of shape [1, n]. tokens:
    of one sequence: the ids, what a tokenizer made of a text, or a text, of which `tokenizer` (called, or its `encode`)
    makes the ids. They stay until memory is short and no other cached block is left, or until `reset()`; registering
    them again keeps them, too.

    What is found are ids, not words: those registered must be the first ones of the users' prompts. So a text gets the
    special tokens that `tokenizer(text)` adds, as prompts do that are made by `tokenizer(prompt)`; of prompts that
    `tokenizer.apply_chat_template` makes, pass the ids that it gives for the system message alone. Tokens that the
    prompts go on with in another way, such as an end-of-text mark or half a word, cost nothing but themselves.

    Raises `PrefixError` if nothing could be kept (`explain(model)` says why), or for a text without a tokenizer.
    """
    ids = _ids_of_one(tokens, tokenizer)
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
    if not registration.tokens and ids.shape[1] < (size := config().block_size):
        raise PrefixError(
            f"none of these {ids.shape[1]} tokens can be kept: they do not fill a block of {size} tokens; register "
            f"at least {size}"
        )
    if not registration.tokens:
        raise PrefixError(
            f"none of these {ids.shape[1]} tokens can be kept: the model is not paged, or its keys and values do not "
            "depend on the tokens alone; explain(model) says which"
        )
    return registration.tokens


def _ids_of_one(tokens: Any, tokenizer: Any) -> Tensor:
    """The ids [1, n] of one sequence."""
    if isinstance(tokens, str):
        if tokenizer is None:
            raise PrefixError(
                "register_prefix() got text, and no tokenizer that makes ids of it: pass tokenizer=..., the one that "
                "makes the users' prompts, or the ids themselves"
            )
        tokens = tokenizer(tokens) if callable(tokenizer) else tokenizer.encode(tokens)
    if isinstance(tokens, Mapping):
        tokens = tokens["input_ids"]
    ids = torch.as_tensor(getattr(tokens, "ids", tokens))  # an Encoding of the package tokenizers has `ids`
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or ids.is_floating_point():
        raise PrefixError(
            f"register_prefix() takes the ids of one sequence, but got a tensor of shape {list(ids.shape)}"
        )
    return ids
