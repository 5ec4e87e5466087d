"""Compile a callable with this backend, apart from everybody else's compilations of the same code."""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from .backend import paged_inductor

__all__ = ["compile_paged"]

# A model sees more variants than Dynamo's default of 8 admits: prefill, first step, later steps and chat turns, each
# with and without a mask, each first static and then dynamic. Beyond the limit Dynamo would run eagerly, un-paged.
RECOMPILE_LIMIT = 64
_numbers = itertools.count()


def _entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of its own code and name that calls `function`. Dynamo keys compilations by code object: models whose
    forwards share code (one class, or one decorator around all of them) must not use up each other's limit. What it
    takes for a variable, it keys by a function's place and name: what differs between models does not vary in one."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = call.__code__.replace(co_name=f"{getattr(function, '__name__', 'call')}_{next(_numbers)}")
    return types.FunctionType(code, globals(), code.co_name, None, call.__closure__)


def compile_paged(
    function: Callable[..., Any], options: Mapping[str, Any], owner: Hashable = None
) -> Callable[..., Any]:
    """`torch.compile(function)` with this backend and `options`. owner: for whom the graphs are reported."""
    backend = functools.partial(paged_inductor, options=dict(options), owner=owner)
    backend.pages_kv = True  # type: ignore[attr-defined]
    entry = _entry(function)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return torch.compile(entry, backend=backend, recompile_limit=RECOMPILE_LIMIT)  # type: ignore[call-overload]
    compiled = torch.compile(entry, backend=backend)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return compiled(*args, **kwargs)

    return call
