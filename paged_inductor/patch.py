"""`page(model)`: the one-line patch. The model's forward runs compiled, with its KV caches on pages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import reports
from ._errors import PatchError
from .backend import BackendOptions
from .compiling import compile_paged
from .hooks import Hooks
from .passes import GraphReport
from .plain_reuse import PlainReuse
from .reuse import Reuse

__all__ = ["PagedForward", "is_paged", "page", "unpage"]


class PagedForward:
    """Stands in for a module's `forward`: same signature, compiled on first use.

    It keeps the module, not its bound method, so that a deep copy of the module runs the copy's own weights; and it
    hides itself from an enclosing torch.compile, so that a loop which compiles the model itself still gets pages.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        self._module = module
        self._options = options
        self._owner = object()
        functools.update_wrapper(self, type(module).forward)
        self.__signature__ = inspect.signature(module.forward)
        self._compiled: tuple[Any, Callable[..., Any]] | None = None  # with the hooks that it calls
        self._hooks = Hooks(module)
        signature = self.__signature__
        begins = "logits_to_keep" in signature.parameters
        self._reuse = Reuse(signature) if begins else PlainReuse(module, signature)

    @property
    def options(self) -> dict[str, Any]:
        """A copy of what `page` was given."""
        return dict(self._options)

    @property
    def reports(self) -> list[GraphReport]:
        """Of the graphs that were compiled for this module since it was paged."""
        return reports.published(self._owner)

    def forget_reports(self) -> None:
        """Drop `reports`."""
        reports.forget(self._owner)

    @torch.compiler.disable  # with all that it calls: a compiler around it traces none of it; its own still works
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hooks = self._hooks.now()
        compiled = self._compiled
        if compiled is None or compiled[0] != hooks:
            forward = type(self._module).forward.__get__(self._module)
            compiled = self._compiled = hooks, compile_paged(forward, self._options, self._owner)
        call = compiled[1]
        if self._options.get("verify") or hooks:  # these would not see what of a prompt is cached
            return call(*args, **kwargs)
        return self._reuse.call(call, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedForward:
        module = memo.get(id(self._module))
        if module is None:  # copied by itself, not as a part of its module
            return PagedForward(self._module, dict(self._options))
        return PagedForward(module, dict(self._options))

    def __reduce__(self) -> Any:
        return PagedForward, (self._module, self._options)


def is_paged(model: nn.Module) -> bool:
    """Whether `page` is in force on this module."""
    return isinstance(model.__dict__.get("forward"), PagedForward)


def page(model: nn.Module, **options: Any) -> nn.Module:
    """Keep the KV caches of `model` in pages from now on. Returns the same model.

    options: those of the backend (see `BackendOptions`): inner="inductor" | "aot_eager" | "eager", inductor={...},
    label="...", verify=True to check every step against a dense one. Nothing else changes: `model(...)` and loops
    around it, such as `model.generate`, stay as they are.
    Calls that need gradients run un-paged. Hooks that are registered on the model's parts, or removed, have it compiled
    anew; while there are some, prompts are computed as a whole. `unpage` undoes it.

    Raises `PatchError` if `model` is no nn.Module, has its forward replaced by someone else, or is paged already;
    `ConfigurationError` for an unknown option.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(
            f"page() takes a torch.nn.Module, but got {type(model).__name__}: for a plain function, use "
            'torch.compile(function, backend="paged_inductor")'
        )
    if is_paged(model):
        raise PatchError(
            f"this {type(model).__name__} is paged already: call unpage(model) first to page it with other options"
        )
    if "forward" in model.__dict__:
        raise PatchError(
            f"the forward of this {type(model).__name__} was replaced by {model.__dict__['forward']!r}: undo that, "
            "or page the module whose class defines forward"
        )
    options.setdefault("label", type(model).__name__)
    BackendOptions(options, None)
    model.forward = PagedForward(model, options)
    return model


def unpage(model: nn.Module) -> nn.Module:
    """Undo `page`. Returns the same model; caches made meanwhile stay valid, what `explain` knew is dropped.

    Raises `PatchError` if the model is not paged.
    """
    if not isinstance(model, nn.Module) or not is_paged(model):
        raise PatchError(f"this {type(model).__name__} is not paged: unpage() takes a model that page() returned")
    model.forward.forget_reports()  # type: ignore[attr-defined]
    del model.forward
    return model
