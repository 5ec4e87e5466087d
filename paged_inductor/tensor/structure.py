"""Operations on shapes, rows and lengths: none of them touches a token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..runtime import View
from . import derive
from .handle import HANDLERS, PagedTensor, axes_size, handles, plain
from .materialize import stand_in

__all__: list[str] = []

aten = torch.ops.aten


def _is_growing(handle: PagedTensor) -> bool:
    """Whether a handle is plain, and no buffer that is written in place: parts of a buffer must see later writes."""
    return _is_plain(handle) and not handle._view.static


def _is_plain(handle: PagedTensor) -> bool:
    """Whether a handle shows its whole view as models keep it, in some order of the four axes."""
    form = handle._form
    return not form.steps and len(form.axes) == 4 and "h" not in form.axes


def _with_axes(handle: PagedTensor, axes: str, repeats: int, like: Tensor | None = None) -> PagedTensor:
    form = handle._form
    if repeats == 1 and len(axes) == 4 and "h" not in axes:
        return PagedTensor(handle._view, plain(form.site, axes), like)
    return PagedTensor(handle._view, form._replace(axes=axes, repeats=repeats), like)


def _give_up(func: Any, *args: Any, **kwargs: Any) -> Any:
    return HANDLERS[None](func, *args, **kwargs)


@handles(aten.alias.default, aten.detach.default, aten.lift_fresh.default)
def alias(func: Any, handle: PagedTensor) -> PagedTensor:
    return PagedTensor(handle._view, handle._form, handle)


@handles(aten.clone.default)
def clone(func: Any, handle: PagedTensor, **kwargs: Any) -> PagedTensor:
    """A fork: tokens are shared until one side is written to."""
    if handle._form.steps:
        return _give_up(func, handle, **kwargs)
    like = None if handle.is_contiguous() else func(stand_in(handle), **kwargs)
    return PagedTensor(derive.fork(handle._view, handle._form.site), handle._form, like)


@handles(aten.transpose.int)
def transpose(func: Any, handle: PagedTensor, dim0: int, dim1: int) -> PagedTensor:
    form = handle._form
    if form.steps:
        return _give_up(func, handle, dim0, dim1)
    axes = list(form.axes)
    axes[dim0], axes[dim1] = axes[dim1], axes[dim0]
    return _with_axes(handle, "".join(axes), form.repeats, func(stand_in(handle), dim0, dim1))


@handles(aten.permute.default)
def permute(func: Any, handle: PagedTensor, dims: list[int]) -> PagedTensor:
    form = handle._form
    if form.steps:
        return _give_up(func, handle, dims)
    axes = "".join(form.axes[dim] for dim in dims)
    return _with_axes(handle, axes, form.repeats, func(stand_in(handle), dims))


@handles(aten.unsqueeze.default)
def unsqueeze(func: Any, handle: PagedTensor, dim: int) -> PagedTensor:
    form = handle._form
    if not _is_plain(handle):
        return _give_up(func, handle, dim)
    at = dim if dim >= 0 else dim + 5
    return _with_axes(handle, form.axes[:at] + "R" + form.axes[at:], 1, func(stand_in(handle), dim))


@handles(aten.squeeze.dim)
def squeeze(func: Any, handle: PagedTensor, dim: int) -> PagedTensor:
    form = handle._form
    if form.steps or form.axes[dim] != "R" or form.repeats != 1:
        return _give_up(func, handle, dim)
    return _with_axes(handle, form.axes.replace("R", ""), 1, func(stand_in(handle), dim))


@handles(aten.expand.default)
def expand(func: Any, handle: PagedTensor, size: list[int], **kwargs: Any) -> PagedTensor:
    form = handle._form
    current = tuple(handle.shape)
    if form.steps or len(size) != len(current):
        return _give_up(func, handle, size, **kwargs)
    wanted = tuple(old if new == -1 else new for old, new in zip(current, size))
    changed = [i for i in range(len(wanted)) if wanted[i] != current[i]]
    if not changed:
        return alias(func, handle)
    if changed == [form.axes.find("R")]:
        return _with_axes(handle, form.axes, wanted[changed[0]], func(stand_in(handle), size))
    if changed == [form.axes.index("B")] and current[changed[0]] == 1 and not handle._view.static:
        rows = [0] * wanted[changed[0]]
        return PagedTensor(derive.select(handle._view, form.site, rows, alias=True), form)
    return _give_up(func, handle, size, **kwargs)


@handles(aten.view.default, aten._unsafe_view.default)
def view(func: Any, handle: PagedTensor, size: list[int], *args: Any) -> PagedTensor:
    """No change, or the merge of a broadcast dimension into the heads or into the batch before it."""
    form = handle._form
    if not form.steps:
        wanted = _infer(size, handle.numel())
        if wanted == tuple(handle.shape):
            return alias(func, handle)
        if "R" in form.axes and handle.is_contiguous():
            axes = form.axes.replace("R", "")
            if form.repeats == 1:
                if wanted == axes_size(handle._view, form._replace(axes=axes)):
                    return _with_axes(handle, axes, 1)
            elif "HR" in form.axes:
                axes = form.axes.replace("HR", "h")
                if wanted == axes_size(handle._view, form._replace(axes=axes)):
                    return _with_axes(handle, axes, form.repeats)
            elif "BR" in form.axes and wanted == _repeated_size(handle, axes):
                rows = [i for i in range(len(handle._view.rows)) for _ in range(form.repeats)]
                return PagedTensor(derive.select(handle._view, form.site, rows, alias=False), plain(form.site, axes))
    return _give_up(func, handle, size, *args)


def _repeated_size(handle: PagedTensor, axes: str) -> tuple[int, ...]:
    """Sizes in the order of `axes`, with the broadcast dimension merged into the batch."""
    size = axes_size(handle._view, plain(handle._form.site, axes))
    return tuple(n * handle._form.repeats if axis == "B" else n for axis, n in zip(axes, size))


def _infer(size: list[int], numel: int) -> tuple[int, ...]:
    known = 1
    for item in size:
        known *= item if item != -1 else 1
    return tuple(numel // known if item == -1 and known else item for item in size)


def _ordered(handle: PagedTensor, view: View) -> PagedTensor:
    """A handle on `view`, its dimensions stored in the order of `handle`'s (without the gaps that torch would leave:
    compiled graphs are specialised to strides, and one more graph for every crop would cost more than it is worth)."""
    if handle.is_contiguous():
        return PagedTensor(view, handle._form)
    size = axes_size(view, handle._form)
    order = sorted(range(len(size)), key=handle.stride, reverse=True)
    like = torch.empty([size[dim] for dim in order], device="meta")
    return PagedTensor(view, handle._form, like.permute([order.index(dim) for dim in range(len(size))]))


@handles(aten.slice.Tensor)
def slice_(
    func: Any, handle: PagedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> PagedTensor:
    """A slice of the sequence crops at either end; a slice of the batch selects rows."""
    form = handle._form
    if _is_growing(handle):
        axis, size = form.axes[dim], handle.shape[dim]
        begin, stop, stride = slice(start, end, step).indices(size)
        if axis == "S" and stride == 1:
            kept = derive.crop(handle._view, form.site, max(stop, 0))
            if begin == 0:
                return _ordered(handle, kept)
            like = func(stand_in(handle), dim, begin, max(begin, stop))
            return PagedTensor(derive.suffix(kept, form.site, like.shape[dim]), form, like)
        if axis == "B":
            rows = range(begin, stop, stride)
            if len(rows) == size and stride == 1:
                return alias(func, handle)
            return _ordered(handle, derive.select(handle._view, form.site, rows, alias=True))
        if len(range(begin, stop, stride)) == size and stride == 1:
            return alias(func, handle)
    return _give_up(func, handle, dim, start, end, step)


@handles(aten.narrow.default)
def narrow(func: Any, handle: PagedTensor, dim: int, start: int, length: int) -> PagedTensor:
    begin = int(start) + (handle.shape[dim] if start < 0 else 0)
    return slice_(aten.slice.Tensor, handle, dim, begin, begin + length)


@handles(aten.split.Tensor)
def split(func: Any, handle: PagedTensor, size: int, dim: int = 0) -> Any:
    total = handle.shape[dim]
    return split_with_sizes(func, handle, [min(size, total - at) for at in range(0, total, size)] if size else [0], dim)


@handles(aten.split_with_sizes.default)
def split_with_sizes(func: Any, handle: PagedTensor, sizes: list[int], dim: int = 0) -> Any:
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [slice_(aten.slice.Tensor, handle, dim, a, b) for a, b in pairwise(bounds)]


@handles(aten.index_select.default)
def index_select(func: Any, handle: PagedTensor, dim: int, index: Tensor) -> PagedTensor:
    """On the batch: a fork of each chosen row. Beam search lives here."""
    form = handle._form
    if _is_plain(handle) and form.axes[dim] == "B":
        rows = _checked_rows(index, handle.shape[dim])
        return PagedTensor(derive.select(handle._view, form.site, rows, alias=False), form)
    return _give_up(func, handle, dim, index)


@handles(aten.index.Tensor)
def index(func: Any, handle: PagedTensor, indices: list[Tensor | None]) -> PagedTensor:
    form = handle._form
    given = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    if _is_plain(handle) and len(given) == 1:
        dim, item = given[0]
        if form.axes[dim] == "B" and item.dim() == 1:
            if item.dtype == torch.bool:
                item = item.nonzero().flatten()
            return index_select(aten.index_select.default, handle, dim, item)
    return _give_up(func, handle, indices)


def _checked_rows(index: Tensor, size: int) -> list[int]:
    rows = [row + size if row < 0 else row for row in index.tolist()]
    for row in rows:
        if not 0 <= row < size:
            raise IndexError(f"batch index {row} is out of range for a cache of {size} rows")
    return rows
