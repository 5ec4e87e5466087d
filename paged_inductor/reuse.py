"""Prompts of paged models: what of them is cached is not computed again.

A call that begins a cache of transformers' kind with a prompt, and wants the logits of its last positions only, as
`generate` does, gets handles of the tokens that are found, and computes the rest. The cache may be an empty one that
the caller made, or one that the model makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .prompts import Known, Observer, borrow, policy
from .runtime import manager
from .sharer import StalePrefix
from .transformers_caches import (
    NEUTRAL,
    WITH_TOKENS,
    EmptyCache,
    Layers,
    kept_tokens,
    layers_of,
    logits_only,
    returned,
)

__all__ = ["Reuse"]

_CACHE_KEYWORDS = ("cache", "past_key_values")  # today's name, and that of older versions


class _Form(NamedTuple):
    """What prompts become that are passed in one way. layers: of a cache."""

    known: Known
    layers: Layers


_Passed = tuple[bool | str, ...]
"""Whether a call's cache is static, and which tensors are passed."""


class Reuse:
    """The cached prompts of one model of transformers' kind. It learns from the first call how its prompts become
    caches."""

    def __init__(self, signature: inspect.Signature) -> None:
        """signature: of the model's `forward`, which takes `logits_to_keep`."""
        self._forms: dict[_Passed, _Form] = {}
        self._made: dict[object, EmptyCache] = {}  # caches that the model makes by itself, by `use_cache`
        names = signature.parameters
        self._names = tuple(names)
        self._cache_keyword = next((name for name in _CACHE_KEYWORDS if name in names), "")

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, without computing what is cached of the prompt."""
        if args and len(args) <= len(self._names) and kwargs.keys().isdisjoint(self._names[: len(args)]):
            args, kwargs = (), {**dict(zip(self._names, args)), **kwargs}  # one graph, however ids are passed
        if args or not policy().shares:
            return function(*args, **kwargs)
        begun = self._begun(kwargs)
        if begun is None:
            return function(**kwargs)
        cache, kwargs = begun
        static = cache is not None and cache.buffer is not None
        form: _Passed = (static, *sorted(name for name, value in kwargs.items() if isinstance(value, Tensor)))
        seen = self._forms.get(form)
        if seen is None or cache is None or not cache.fits(seen.layers):
            return self._observe(function, kwargs, cache, form)
        kept = kept_tokens(seen.layers, len(seen.known.groups))
        found = borrow(seen.known, kwargs.get, kwargs["logits_to_keep"], kept, buffer=cache.buffer)
        if found is None:
            return self._observe(function, kwargs, cache, form)
        lent, loan = found
        try:
            cache.fill(seen.layers, lent)
            with loan:
                result = function(**_rest(kwargs, lent.length))
            if loan.confirmed and logits_only(result):  # other outputs would lack the cached positions
                lent.used(manager())
                return result
        except StalePrefix:
            pass
        except BaseException:
            cache.restore()
            raise
        cache.restore()
        return self._observe(function, kwargs, cache, form)  # the model computes in another way than it did

    def _begun(self, kwargs: dict[str, Any]) -> tuple[EmptyCache | None, dict[str, Any]] | None:
        """The cache that a call begins with a prompt of which only the last positions' logits are wanted, and its
        arguments, of which that is one; no cache if the model is to make one, of a kind that is not known yet. None if
        the call is any other one."""
        ids, keep = kwargs.get("input_ids"), kwargs.get("logits_to_keep")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or torch.is_grad_enabled():
            return None
        if not isinstance(keep, int) or isinstance(keep, bool) or not 0 < keep < ids.shape[1]:
            return None
        caches = {name: found for name, value in kwargs.items() if (found := EmptyCache.of(value)) is not None}
        for name, value in kwargs.items():
            if value is None or value is False or name in caches:
                continue
            if name not in NEUTRAL or (name in WITH_TOKENS and value.shape[-1] != ids.shape[1]):
                return None
        mask = kwargs.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and (mask.shape == ids.shape or mask.dim() == 4)):
            return None
        if len(caches) == 1:
            return next(iter(caches.values())), kwargs
        if caches or not self._cache_keyword or kwargs.get("use_cache") is False:
            return None
        made = self._made.get(kwargs.get("use_cache"))
        if made is None:
            return None, kwargs
        cache = made.another()
        return cache, {**kwargs, self._cache_keyword: cache.value}

    def _observe(
        self, function: Callable[..., Any], kwargs: dict[str, Any], cache: EmptyCache | None, form: _Passed
    ) -> Any:
        """Call, and see where the caches that were begun ended up."""
        with Observer.watching() as observer:
            result = function(**kwargs)
        value = returned(result) if cache is None else cache.value
        layers = layers_of(value, observer.views)
        if layers is not None and observer.known is not None and self._by_keyword(observer.known):
            seen = self._forms.get(form)
            if seen is None or not seen.known.sharer.knows_more_than(observer.known.sharer):
                self._forms[form] = _Form(observer.known, layers)
            if cache is None:
                self._made[kwargs.get("use_cache")] = EmptyCache.like(value)
        return result

    @staticmethod
    def _by_keyword(known: Known) -> bool:
        """Whether the tokens that matter are those that `_begun` looks at."""
        arguments, sharing = known.sharer.arguments, known.sharer.sharing
        mask = arguments[sharing.mask] if sharing.mask else "attention_mask"
        along = [arguments[name] for name in (*sharing.positions, *sharing.others)]
        named = arguments[sharing.ids] == "input_ids" and mask == "attention_mask"
        return named and all(argument in WITH_TOKENS for argument in along)


def _rest(kwargs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arguments for what comes behind the first `length` tokens."""
    rest = {
        name: value[..., length:] if name in WITH_TOKENS and value is not None else value
        for name, value in kwargs.items()
    }
    if (mask := rest.get("attention_mask")) is not None and mask.dim() == 4:  # of each token on its own
        rest["attention_mask"] = mask[:, :, length:]
    return rest
