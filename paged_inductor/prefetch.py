"""`prefetch(cache)`: a cache that will be used soon comes back from host memory or disk while others are used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ._errors import UnsupportedInputError
from .runtime import View, manager
from .tensor import PagedStack, PagedTensor

__all__ = ["prefetch"]


def prefetch(cache: Any) -> None:
    """Say that a cache will be used soon: its swapped tokens are brought back by another thread.

    It is a hint: nothing is brought back at the expense of running steps or of those that wait for memory, and a step
    that comes too early brings its tokens back itself. Loops that use several caches in turn need no hint: who followed
    a cache the last time is fetched when that cache is used again.

    cache: a paged tensor, tuples, lists and dicts of them, or an object, as a cache of transformers, whose attributes
    are such. Raises `UnsupportedInputError` if no paged tensor is in it.
    """
    views = list(dict.fromkeys(_views(cache, set())))
    if not views:
        raise UnsupportedInputError(
            f"prefetch() takes a cache with paged tensors in it, but got {type(cache).__name__} without any: pass what "
            "a paged model returned (explain(model) says what was paged)"
        )
    manager().prefetch(views)


def _views(value: Any, seen: set[int]) -> Iterator[View]:
    if isinstance(value, PagedTensor):
        yield value._view
        return
    if isinstance(value, PagedStack):
        value = value.handles
    if isinstance(value, torch.Tensor | str | bytes | int | float | type(None)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inner = value
    else:
        inner = getattr(value, "__dict__", {}).values()
    for each in list(inner):
        yield from _views(each, seen)
