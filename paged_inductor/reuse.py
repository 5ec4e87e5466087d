"""Prompts of paged models: what of them is cached is not computed again.

A call that begins a cache of transformers' kind with a prompt, and wants the logits of its last positions only, as
`generate` does, gets handles of the tokens that are found, and computes the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .runtime import CacheGroup, Policy, View, lend, manager
from .sharing import Loan, Sharer, StalePrefix, learner, loans, registering, row_tokens
from .tensor import PagedTensor
from .tensor.handle import Form, plain

__all__ = ["Reuse"]

_ALONG = ("input_ids", "position_ids", "cache_position")  # what comes with each token of the prompt
_NEUTRAL = {"use_cache", "return_dict", "logits_to_keep", "attention_mask", *_ALONG}


class _Known(NamedTuple):
    """How a model's prompts become caches. weights: among the arguments of `sharer`'s graph. layers: of a cache object:
    the number of the group, and the forms of keys and values."""

    sharer: Sharer
    weights: Mapping[int, Tensor]
    groups: Sequence[CacheGroup]
    layers: Sequence[tuple[int, Form, Form]]


class _Observer:
    """Remembers the last step that began new caches."""

    seen: tuple[Sharer, Mapping[int, Tensor], Sequence[View]] | None = None

    def learn(self, sharer: Sharer, args: Sequence[Any], views: Sequence[View]) -> None:
        """See `Learner`."""
        self.seen = sharer, sharer.weights.tensors(args), views


class Reuse:
    """The cached prompts of one model. It learns from the first call how the model's prompts become caches."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, without computing what is cached of the prompt."""
        if not Policy.of(manager().tenants.current(), registering.get() is not None).shares:
            return function(*args, **kwargs)
        cache = _empty_cache(args, kwargs)
        if cache is None:
            return function(*args, **kwargs)
        known = self._known
        views = self._borrow(known, kwargs) if known is not None and len(known.layers) == len(cache.layers) else None
        if known is None or views is None:
            return self._observe(function, kwargs, cache)
        before = [dict(vars(layer)) for layer in cache.layers]
        loan = Loan()
        loans.update(dict.fromkeys(views, loan))
        try:
            result = function(**self._rest(known, kwargs, cache, views))
            if loan.confirmed:
                return result
        except StalePrefix:
            pass
        for layer, state in zip(cache.layers, before):
            vars(layer).clear()
            vars(layer).update(state)
        return self._observe(function, kwargs, cache)  # the model computes in another way than it did

    def _observe(self, function: Callable[..., Any], kwargs: dict[str, Any], cache: Any) -> Any:
        """Call, and see where the caches that were begun ended up."""
        observer = _Observer()
        token = learner.set(observer)
        try:
            result = function(**kwargs)
        finally:
            learner.reset(token)
        if observer.seen is not None:
            sharer, weights, views = observer.seen
            layers = [_layer(layer, views) for layer in cache.layers]
            if None not in layers:
                self._known = _Known(sharer, weights, [view.group for view in views], layers)  # type: ignore[arg-type]
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
        return lend(manager(), known.groups, root, prompts, longest, policy, "a cached prompt")

    @staticmethod
    def _rest(known: _Known, kwargs: dict[str, Any], cache: Any, views: Sequence[View]) -> dict[str, Any]:
        """The arguments for what is not cached; `cache` gets handles of what is."""
        for layer, (group, keys, values) in zip(cache.layers, known.layers):
            keys_handle, values_handle = PagedTensor(views[group], keys), PagedTensor(views[group], values)
            layer.lazy_initialization(keys_handle, values_handle)
            layer.keys, layer.values = keys_handle, values_handle
        length = views[0].length
        return {
            name: value[..., length:] if name in _ALONG and value is not None else value
            for name, value in kwargs.items()
        }


def _empty_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The cache object of a call that begins it with a prompt of which only the last positions' logits are wanted; None
    if the call is any other one."""
    ids, keep = kwargs.get("input_ids"), kwargs.get("logits_to_keep")
    if args or not isinstance(ids, Tensor) or ids.dim() != 2 or torch.is_grad_enabled():
        return None
    if not isinstance(keep, int) or isinstance(keep, bool) or not 0 < keep < ids.shape[1]:
        return None
    caches = [value for value in kwargs.values() if _is_empty_cache(value)]
    if len(caches) != 1:
        return None
    for name, value in kwargs.items():
        if value is None or value is False or value is caches[0]:
            continue
        if name not in _NEUTRAL or (name in _ALONG and value.shape[-1] != ids.shape[1]):
            return None
    mask = kwargs.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return None
    return caches[0]


def _is_empty_cache(value: Any) -> bool:
    """Whether it is a cache of transformers whose layers all grow by concatenation, and are empty."""
    layers = getattr(value, "layers", None)
    if not isinstance(layers, list) or not layers:
        return False
    return all(type(layer).__name__ == "DynamicLayer" and not layer.is_initialized for layer in layers)


def _layer(layer: Any, views: Sequence[View]) -> tuple[int, Form, Form] | None:
    """The group of a layer's handles, and their forms; None if they show anything but one of `views`."""
    pair = layer.keys, layer.values
    if not all(isinstance(handle, PagedTensor) and handle._form is plain(*handle._form[:2]) for handle in pair):
        return None
    for i, view in enumerate(views):
        if all(handle._view is view for handle in pair):
            return i, pair[0]._form, pair[1]._form
    return None
