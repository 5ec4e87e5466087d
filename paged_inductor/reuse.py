"""Prompts of paged models: what of them is cached is not computed again.

A call that begins a cache of transformers' kind with a prompt, and wants the logits of its last positions only, as
`generate` does, gets handles of the tokens that are found, and computes the rest. The cache may be an empty one that
the caller made, or one that the model makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dynamic_caches
from .dynamic_caches import NEUTRAL, WITH_TOKENS, EmptyCache, Layers
from .runtime import CacheGroup, Policy, View, lend, manager
from .sharing import Loan, Sharer, StalePrefix, group_root, learner, loans, registering, row_tokens

__all__ = ["Reuse"]

_CACHE_KEYWORDS = ("cache", "past_key_values")  # today's name, and that of older versions


class _Known(NamedTuple):
    """How a model's prompts become caches. weights: among the arguments of `sharer`'s graph. layers: of a cache."""

    sharer: Sharer
    weights: Mapping[int, Tensor]
    groups: Sequence[CacheGroup]
    layers: Layers


class _Observer:
    """Remembers the last step that began new caches."""

    seen: tuple[Sharer, Mapping[int, Tensor], Sequence[View]] | None = None

    def learn(self, sharer: Sharer, args: Sequence[Any], views: Sequence[View]) -> None:
        """See `Learner`."""
        self.seen = sharer, sharer.weights.tensors(args), views


class Reuse:
    """The cached prompts of one model. It learns from the first call how the model's prompts become caches."""

    def __init__(self, signature: inspect.Signature) -> None:
        """signature: of the model's `forward`."""
        self._known: dict[tuple[str, ...], _Known] = {}  # by which tensors are passed
        self._made: dict[object, EmptyCache] = {}  # caches that the model makes by itself, by `use_cache`
        names = signature.parameters
        self._names = tuple(names) if "logits_to_keep" in names else ()
        self._cache_keyword = next((name for name in _CACHE_KEYWORDS if name in names), "")

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, without computing what is cached of the prompt."""
        if args and len(args) <= len(self._names) and kwargs.keys().isdisjoint(self._names[: len(args)]):
            args, kwargs = (), {**dict(zip(self._names, args)), **kwargs}  # one graph, however ids are passed
        if args or not Policy.of(manager().tenants.current(), registering.get() is not None).shares:
            return function(*args, **kwargs)
        begun = self._begun(kwargs)
        if begun is None:
            return function(**kwargs)
        cache, kwargs = begun
        form = tuple(sorted(name for name, value in kwargs.items() if isinstance(value, Tensor)))
        known = self._known.get(form)
        if known is None or cache is None or not cache.has_room_for(len(known.layers)):
            return self._observe(function, kwargs, cache, form)
        views = self._borrow(known, kwargs)
        if views is None:
            return self._observe(function, kwargs, cache, form)
        loan = Loan()
        loans.update(dict.fromkeys(views, loan))
        try:
            cache.fill(known.layers, views)
            result = function(**_rest(kwargs, views[0].length))
            if loan.confirmed:
                return result
        except StalePrefix:
            pass
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
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
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
        self, function: Callable[..., Any], kwargs: dict[str, Any], cache: EmptyCache | None, form: tuple[str, ...]
    ) -> Any:
        """Call, and see where the caches that were begun ended up."""
        observer = _Observer()
        token = learner.set(observer)
        try:
            result = function(**kwargs)
        finally:
            learner.reset(token)
        if observer.seen is not None:
            sharer, weights, views = observer.seen
            value = dynamic_caches.returned(result) if cache is None else cache.value
            layers = dynamic_caches.layers_of(value, views)
            if layers is not None:
                self._known[form] = _Known(sharer, weights, [view.group for view in views], layers)
                if cache is None:
                    self._made[kwargs.get("use_cache")] = EmptyCache.like(value)
        return result

    @staticmethod
    def _borrow(known: _Known, kwargs: dict[str, Any]) -> list[View] | None:
        """Views of what is cached of a prompt, or None."""
        sharer = known.sharer
        sharing = sharer.sharing
        names = {name: sharer.keywords[name] for name in (sharing.ids, *sharing.positions, *sharing.others)}
        if (
            sharing.whole
            or names[sharing.ids] != "input_ids"
            or any(kwargs.get(keyword) is None for keyword in names.values())
        ):
            return None
        ids: Tensor = kwargs["input_ids"]
        policy = Policy.of(manager().tenants.current(), registering.get() is not None)
        root = sharer.root(known.weights, policy.salt)
        positions = [kwargs[names[name]] for name in sharing.positions]
        prompts = row_tokens(
            ids, positions, [kwargs[names[name]] for name in sharing.others], kwargs.get("attention_mask"), 0
        )
        if root is None or prompts is None:
            return None
        longest = ids.shape[1] - kwargs["logits_to_keep"]
        roots = [group_root(root, g) for g in range(len(known.groups))]
        return lend(manager(), known.groups, roots, prompts, longest, policy, "a cached prompt")


def _rest(kwargs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The arguments for what comes behind the first `length` tokens."""
    return {
        name: value[..., length:] if name in WITH_TOKENS and value is not None else value
        for name, value in kwargs.items()
    }
