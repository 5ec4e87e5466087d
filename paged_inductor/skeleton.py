"""A cache object without its tensors, as a file keeps it: a pickle that only names of a short list may appear in."""

from __future__ import annotations

import io
import pickle
from typing import IO, Any

import torch
from torch import Tensor

from ._errors import SavedCacheError
from .runtime import View
from .tensor import PagedStack, PagedTensor
from .tensor.handle import plain

__all__ = ["SkeletonReader", "SkeletonWriter"]

_ALLOWED = {
    ("builtins", name)
    for name in ("object", "list", "dict", "tuple", "set", "frozenset", "slice", "complex", "bytearray")
} | {
    ("collections", "OrderedDict"),
    ("collections", "defaultdict"),
    ("copyreg", "_reconstructor"),
    ("torch", "device"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
}
_ALLOWED_MODULES = ("transformers.cache_utils",)


class SkeletonWriter(pickle.Pickler):
    """Pickles a cache object, with references in the places of its tensors.

    groups: for each cache group, the views that are referred to. handles: (group, view, site, axes) of each paged
    tensor. stacks: the handles of each `PagedStack`, and its leading sizes. tensors: the dense ones.
    """

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=4)
        self.groups: list[list[View]] = []
        self.handles: list[tuple[int, int, int, str]] = []
        self.stacks: list[tuple[list[int], list[int]]] = []
        self.tensors: list[Tensor] = []

    def skeleton(self, cache: Any) -> bytes:
        """The pickle. Raises `SavedCacheError` for what cannot be pickled."""
        try:
            self.dump(cache)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise SavedCacheError(f"this {type(cache).__name__} cannot be saved: {error}; pass its tensors") from error
        return self._buffer.getvalue()

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        if isinstance(value, PagedStack):
            self.stacks.append(([self._handle(handle) for handle in value.handles], list(value.lead)))
            return ("stack", len(self.stacks) - 1)
        if isinstance(value, PagedTensor) and value._form is plain(value._form.site, value._form.axes):
            return ("handle", self._handle(value))
        if isinstance(value, Tensor):
            self.tensors.append(value.dense() if isinstance(value, PagedTensor) else value.detach())
            return ("tensor", len(self.tensors) - 1)
        return None

    def _handle(self, handle: PagedTensor) -> int:
        view = handle._view
        group = next((g for g, views in enumerate(self.groups) if views[0].group is view.group), len(self.groups))
        if group == len(self.groups):
            self.groups.append([])
        views = self.groups[group]
        if not any(view is other for other in views):
            views.append(view)
        number = next(v for v, other in enumerate(views) if other is view)
        self.handles.append((group, number, handle._form.site, handle._form.axes))
        return len(self.handles) - 1


class SkeletonReader(pickle.Unpickler):
    """Makes the cache object again. Only names that are allowed are looked up: a file runs no code of its own."""

    def __init__(self, file: IO[bytes], made: dict[str, list[Any]], allowed: set[tuple[str, str]], path: Any) -> None:
        super().__init__(file)
        self._made = made
        self._allowed = allowed
        self._path = path

    def persistent_load(self, reference: tuple[str, int]) -> Any:
        kind, number = reference
        return self._made[kind][number]

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED | self._allowed:
            return super().find_class(module, name)
        if module in _ALLOWED_MODULES and name.isidentifier():
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # not what the module has imported
                return found
        raise SavedCacheError(
            f"{self._path} holds a {module}.{name}, which is not loaded from files unless you say so: "
            f"load(path, allow=[{name}]) if you trust the file"
        )
