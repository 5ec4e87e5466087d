"""PagedStack: handles of several layers, or of K and V, as one tensor, such as [L, 2, B, H, S, D].

Models that keep one tensor for all layers index it by integers to find a layer's K and V. The dimensions in front of a
cache's own are called *leading*: an operation that leaves them alone is carried out on every handle, one that picks
among them picks handles, and any other gets a dense copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .base import Handle
from .handle import PagedTensor
from .materialize import dense_copy, mutated

__all__ = ["PagedStack", "joined", "parts"]

aten = torch.ops.aten
Meaning = Callable[..., Any]
_MEANINGS: dict[Any, Meaning] = {}


class PagedStack(Handle):
    """Handles of one shape as one tensor: `handles[i]` is at the i-th place of the leading dimensions `lead`.

    Reads and writes through it, and through parts of it, reach the handles' pages. The one exception: the result of a
    view operation that mixes leading dimensions with others (such as a transposition of layers and batch) is a copy.
    """

    handles: tuple[PagedTensor, ...]
    lead: tuple[int, ...]

    @staticmethod
    def __new__(cls, handles: Sequence[PagedTensor], lead: Sequence[int]) -> PagedStack:
        """Obligation: prod(lead) handles, at least one, of one shape, dtype and device."""
        first = handles[0]
        size = (*lead, *first.shape)
        self = Tensor._make_wrapper_subclass(cls, size, dtype=first.dtype, device=first.device)
        self.handles = tuple(handles)
        self.lead = tuple(lead)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _MEANINGS.get(func, _fallback)(func, *args, **(kwargs or {}))

    def dense(self) -> Tensor:
        return joined([handle.dense() for handle in self.handles], self.lead)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = ", ".join(map(str, self.shape))
        facts = f"shape=[{shape}], dtype={self.dtype}, device={self.device}"
        return f"PagedStack({facts},\n{self.dense()})"


def parts(value: Tensor, lead: int) -> Sequence[Tensor]:
    """The caches behind the `lead` leading dimensions of a stack, row-major: handles, or views of a dense tensor."""
    return value.handles if isinstance(value, PagedStack) else value.flatten(0, lead - 1).unbind()


def joined(values: Sequence[Tensor], lead: Sequence[int]) -> Tensor:
    """Dense tensors as one, behind the leading dimensions `lead`."""
    return torch.stack(list(values)).unflatten(0, list(lead))


def _stacked(handles: Sequence[Any], lead: Sequence[int]) -> Any:
    """The handles as one; the only one, if no leading dimension is left; a dense tensor, if there are none."""
    if not lead:
        return aten.alias.default(handles[0])
    if not all(isinstance(handle, PagedTensor) for handle in handles):
        return joined(handles, lead)
    return PagedStack(handles, lead)


def _places(lead: Sequence[int]) -> Tensor:
    """The number of the handle at each place: leading dimensions are indexed by torch's own rules."""
    return torch.arange(prod(lead)).view(list(lead))


def _picked(stack: PagedStack, places: Tensor) -> Any:
    if places.numel() == 0:
        first = stack.handles[0]
        return torch.empty((*places.shape, *first.shape), dtype=first.dtype, device=first.device)
    return _stacked([stack.handles[i] for i in places.flatten().tolist()], places.shape)


def _meaning(*operators: Any) -> Callable[[Meaning], Meaning]:
    def register(function: Meaning) -> Meaning:
        for operator in operators:
            _MEANINGS[operator] = function
        return function

    return register


def _axis(stack: PagedStack, dim: int, extra: int = 0) -> int:
    """A dimension of the handles as they see it; negative if it is a leading one."""
    return dim % (stack.dim() + extra) - len(stack.lead)


def _every(func: Any, stack: PagedStack, *args: Any, **kwargs: Any) -> Any:
    """Carried out on every handle."""
    return _stacked([func(handle, *args, **kwargs) for handle in stack.handles], stack.lead)


@_meaning(aten.alias.default, aten.detach.default, aten.lift_fresh.default, aten.clone.default, aten.zero_.default)
def _each(func: Any, stack: PagedStack, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return _fallback(func, stack, *args, **kwargs)
    result = _every(func, stack, *args, **kwargs)
    return stack if func is aten.zero_.default else result


@_meaning(aten.select.int, aten.slice.Tensor, aten.narrow.default)
def _along(func: Any, stack: PagedStack, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
    axis = _axis(stack, dim)
    if axis < 0:
        return _picked(stack, func(_places(stack.lead), dim % stack.dim(), *args, **kwargs))
    return _every(func, stack, axis, *args, **kwargs)


@_meaning(aten.index_select.default)
def _index_select(func: Any, stack: PagedStack, dim: int, index: Tensor) -> Any:
    if _axis(stack, dim) < 0:  # a copy: two results must not be one handle
        picked = func(_places(stack.lead), dim % stack.dim(), index.cpu())
        return aten.clone.default(_picked(stack, picked))
    return _along(func, stack, dim, index)


@_meaning(aten.unbind.int)
def _unbind(func: Any, stack: PagedStack, dim: int = 0) -> Any:
    return [_along(aten.select.int, stack, dim, i) for i in range(stack.shape[dim])]


@_meaning(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, stack: PagedStack, sizes: Any, dim: int = 0) -> Any:
    pieces = func(torch.arange(stack.shape[dim]), sizes, 0)
    starts = [sum(len(piece) for piece in pieces[:i]) for i in range(len(pieces))]
    return [_along(aten.slice.Tensor, stack, dim, at, at + len(piece)) for at, piece in zip(starts, pieces)]


@_meaning(aten.transpose.int)
def _transpose(func: Any, stack: PagedStack, dim0: int, dim1: int) -> Any:
    axes = (_axis(stack, dim0), _axis(stack, dim1))
    if max(axes) < 0:
        return _picked(stack, func(_places(stack.lead), dim0 % stack.dim(), dim1 % stack.dim()))
    if min(axes) < 0:
        return _fallback(func, stack, dim0, dim1)
    return _every(func, stack, *axes)


@_meaning(aten.permute.default)
def _permute(func: Any, stack: PagedStack, dims: Sequence[int]) -> Any:
    lead = len(stack.lead)
    order = [dim % stack.dim() for dim in dims]
    if sorted(order[:lead]) != list(range(lead)):
        return _fallback(func, stack, dims)
    own = [dim - lead for dim in order[lead:]]
    return _picked(_every(func, stack, own), func(_places(stack.lead), order[:lead]))


@_meaning(aten.unsqueeze.default)
def _unsqueeze(func: Any, stack: PagedStack, dim: int) -> Any:
    axis = _axis(stack, dim, extra=1)
    lead = len(stack.lead)
    return _every(func, stack, axis) if axis >= 0 else _picked(stack, func(_places(stack.lead), axis + lead))


@_meaning(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(func: Any, stack: PagedStack, dims: int | Sequence[int] | None = None) -> Any:
    lead, given = len(stack.lead), range(stack.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    chosen = [dim % stack.dim() for dim in given]
    own = _every(aten.squeeze.dims, stack, [dim - lead for dim in chosen if dim >= lead])
    return _picked(own, aten.squeeze.dims(_places(stack.lead), [dim for dim in chosen if dim < lead]))


@_meaning(aten.expand.default)
def _expand(func: Any, stack: PagedStack, size: Sequence[int], **kwargs: Any) -> Any:
    rank = stack.handles[0].dim()
    return _picked(_every(func, stack, size[-rank:]), func(_places(stack.lead), size[:-rank]))


@_meaning(aten.view.default, aten._unsafe_view.default)
def _view(func: Any, stack: PagedStack, size: Sequence[int]) -> Any:
    """Other leading dimensions for the same handles, or handles of another shape."""
    first, lead = stack.handles[0], len(stack.lead)
    shape = torch.empty(stack.shape, device="meta").view(size).shape
    rest = shape[: len(shape) - first.dim()]
    if shape[len(rest) :] == first.shape and prod(rest) == len(stack.handles):
        return _picked(stack, _places(stack.lead).view(rest))
    if shape[:lead] == stack.lead and first.is_contiguous():
        return _every(func, stack, shape[lead:])
    return _fallback(func, stack, size)


@_meaning(aten.index.Tensor)
def _index(func: Any, stack: PagedStack, indices: list[Tensor | None]) -> Any:
    lead = len(stack.lead)
    if any(item is not None for item in indices[:lead]):
        return _fallback(func, stack, indices)
    return _every(func, stack, indices[lead:])


@_meaning(aten.cat.default)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Along a dimension of the handles: each is joined to its own part of the others."""
    stack = next(part for part in tensors if isinstance(part, PagedStack))
    axis, lead = _axis(stack, dim), len(stack.lead)
    if axis < 0 or any(part.dim() != stack.dim() or part.shape[:lead] != stack.shape[:lead] for part in tensors):
        return _fallback(func, tensors, dim)
    columns = (parts(part, lead) for part in tensors)
    return _stacked([func(list(own), axis) for own in zip(*columns)], stack.lead)


@_meaning(aten.copy_.default)
def _copy(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, PagedStack):
        return func(target, _dense(source, str(func)), non_blocking)
    values = source.expand(target.shape) if not isinstance(source, PagedStack) else _dense(source, str(func))
    for handle, value in zip(target.handles, values.flatten(0, len(target.lead) - 1)):
        func(handle, value, non_blocking)
    return target


def _dense(value: Tensor, name: str) -> Tensor:
    if not isinstance(value, PagedStack):
        return value
    return joined([dense_copy(handle, name) for handle in value.handles], value.lead)


def _fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """On dense copies, with what was written in place written back."""
    decomposed = func.decompose(*args, **kwargs)
    if decomposed is not NotImplemented:
        return decomposed
    name = str(func)
    written = mutated(func, args, kwargs, PagedStack)
    copies = {id(value): _dense(value, name) for value in written}

    def copied(value: PagedStack) -> Tensor:
        return copies[id(value)] if id(value) in copies else _dense(value, name)

    dense_args, dense_kwargs = tree_map_only(PagedStack, copied, (args, kwargs))
    result = func(*dense_args, **dense_kwargs)
    for value in written:
        _copy(aten.copy_.default, value, copies[id(value)])
        if result is copies[id(value)]:
            result = value
    return result
