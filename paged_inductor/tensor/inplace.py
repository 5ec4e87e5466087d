"""In-place writes: into the pages, copied first where anyone else sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import ops
from .._errors import UnsupportedInputError
from ..runtime import View, manager
from . import derive
from .handle import PagedTensor, apply_step, handles
from .materialize import dense_copy, step_plan

__all__ = ["reserve", "write_back"]

aten = torch.ops.aten


def write_back(func: Any, mutated: Sequence[PagedTensor], args: Any, kwargs: Any) -> Any:
    """Carry out an in-place operator on a dense copy, and write the result into the pages."""
    handle = mutated[0]
    if len(mutated) != 1 or (args and args[0] is not handle and kwargs.get("out") is not handle):
        raise UnsupportedInputError(
            f"{func} writes to {len(mutated)} PagedTensors at once, which is not supported: "
            "write to one at a time, or to dense copies from tensor.dense()"
        )
    _require_writable(handle, func)
    name = str(func)
    base = _base(handle)
    whole = dense_copy(base, name)
    target = whole
    for step in handle._form.steps:
        target = apply_step(target, step)

    def substitute(value: PagedTensor) -> Tensor:
        return target if value is handle else dense_copy(value, name)

    dense_args, dense_kwargs = tree_map_only(PagedTensor, substitute, (args, kwargs))
    func(*dense_args, **dense_kwargs)
    write_tokens(base, 0, whole)
    return handle


def _base(handle: PagedTensor) -> PagedTensor:
    return PagedTensor(handle._view, handle._form._replace(steps=())) if handle._form.steps else handle


def _require_writable(handle: PagedTensor, func: Any) -> None:
    if handle._form.repeats != 1 or derive.expanded(handle._view):
        raise UnsupportedInputError(
            f"{func} would write to an expanded PagedTensor of shape {list(handle.shape)}, where several elements "
            "share one place: write to the tensor that was expanded, or to a dense copy from tensor.dense()"
        )


def write_tokens(handle: PagedTensor, first: int, values: Tensor) -> None:
    """Overwrite logical positions `first ..` of a handle (without steps) by `values`, laid out as the handle.

    Positions in a row's virtual padding have no memory: values for them are dropped.
    """
    view, form = handle._view, handle._form
    if "R" in form.axes:
        values = values.squeeze(form.axes.index("R"))
    axes = form.axes.replace("R", "")
    values = values.permute([axes.index(axis) for axis in "BHSD"])
    count = values.shape[2]
    if count == 0 or not view.rows:
        return
    if view.static:
        count = _written_count(view, first, values)
        values = values[:, :, :count]
        if count == 0:
            return
        reserve(view, first, first + count)
    else:
        own_pages(view, first, first + count)
    try:
        _write(view, form.site, first, count, values)
    finally:
        derive.written(view)


def _written_count(view: View, first: int, values: Tensor) -> int:
    """How many of the values must be stored in a static view: zeros behind its extent take no memory."""
    inside = max(0, view.extent - first)
    used = values[:, :, inside:].ne(0).any(3).any(1).any(0).nonzero()
    return min(values.shape[2], inside) if not len(used) else inside + int(used[-1]) + 1


def reserve(view: View, first: int, stop: int, complete: bool = False) -> None:
    """Let a static view own the blocks of positions `first .. stop-1`, and of all before. What was never written is
    zeroed, apart from those positions where `complete`: the caller writes them in all sites of the group."""
    extent, group = view.extent, view.group
    own_pages(view, first, min(stop, extent))
    if stop <= extent:
        return
    copies = manager().extend(view, stop)
    try:
        with torch.no_grad(), manager().using(view):
            ops.execute_copies(group.arenas, copies)
            blank = (first if complete else stop) - extent
            if blank > 0:
                plan = step_plan(view, blank)
                plan = plan._replace(seq_lens=torch.full_like(plan.seq_lens, extent + blank))
                for site, arena in zip(group.sites, group.arenas):
                    zeros = torch.zeros((), dtype=site.dtype, device=site.device)
                    ops.cache_write(arena, zeros.expand(len(view.rows), site.heads, blank, site.head_dim), plan)
    except BaseException:
        manager().truncate(view, extent)
        raise


def _zero(view: View, site: int) -> None:
    """Zero one site of a static view; when all were, the view gives its blocks back."""
    if view.extent:
        own_pages(view, 0, view.extent)
        spec = view.group.sites[site]
        zeros = torch.zeros((), dtype=spec.dtype, device=spec.device)
        _write(view, site, 0, view.extent, zeros.expand(len(view.rows), spec.heads, view.extent, spec.head_dim))
    derive.written(view)
    view.zeroed.add(site)
    if len(view.zeroed) == len(view.group.sites):
        manager().truncate(view, 0)


def _write(view: View, site: int, first: int, count: int, values: Tensor) -> None:
    group = view.group
    view.zeroed.discard(site)
    arena = group.arenas
    with torch.no_grad(), manager().using(view):
        plan = step_plan(view, count)
        if not view.ragged:
            lens = torch.full_like(plan.seq_lens, first + count)
            ops.cache_write(arena[site], values, plan._replace(seq_lens=lens))
            return
        for i, pad in enumerate(view.pads):
            skip = max(0, pad - first)
            if skip >= count:
                continue
            lens = plan.seq_lens.new_full((1,), first + count - pad)
            row_plan = plan._replace(block_table=plan.block_table[i : i + 1], seq_lens=lens, new_tokens=count - skip)
            ops.cache_write(arena[site], values[i : i + 1, :, skip:], row_plan)


def own_pages(view: View, first: int, stop: int) -> None:
    """Make the blocks of logical positions `first .. stop-1` private to `view` and its aliases."""
    group = view.group

    def own() -> None:
        tasks = []
        for members, pad in zip(derive.places(view), view.pads):
            if stop > max(pad, first):
                tasks.append((members, max(0, first - pad), stop - pad))
        prepared = manager().unshare(group, tasks, view.label)
        if prepared is not None:
            step, moves = prepared
            with manager().using(step.view):
                ops.execute_copies(group.arenas, step.copies)
            manager().rebind(group, step.view, moves)

    derive.allocating(own)


@handles(aten.zero_.default)
def zero_(func: Any, handle: PagedTensor) -> Any:
    return fill_(aten.fill_.Scalar, handle, 0)


@handles(aten.fill_.Scalar)
def fill_(func: Any, handle: PagedTensor, value: Any) -> Any:
    _require_writable(handle, func)
    shape = _base(handle).shape
    if handle._form.steps:
        return write_back(func, [handle], (handle, value), {})
    if handle._view.static and value == 0:
        _zero(handle._view, handle._form.site)
        return handle
    write_tokens(handle, 0, torch.full((), value, dtype=handle.dtype, device=handle.device).expand(shape))
    return handle


@handles(aten.copy_.default)
def copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Into a whole cache, or into a range of its sequence."""
    if isinstance(source, PagedTensor):
        source = dense_copy(source, str(func))
    if not isinstance(target, PagedTensor):
        return target.copy_(source, non_blocking)
    _require_writable(target, func)
    span = _sequence_range(target)
    if span is None:
        return write_back(func, [target], (target, source, non_blocking), {})
    first, axes = span
    base = _base(target)
    values = source.to(device=target.device, dtype=target.dtype).expand(target.shape)
    write_tokens(base, first, values.permute([axes.index(axis) for axis in base._form.axes]))
    return target


def _sequence_range(handle: PagedTensor) -> tuple[int, str] | None:
    """(first position, order of the dimensions) if a handle shows a range of its base's sequence, else None."""
    axes = handle._form.axes
    first, stop = 0, handle._view.length
    for func, args, kwargs, item in handle._form.steps:
        if kwargs or item is not None or not args:
            return None
        if func is aten.permute.default:
            axes = "".join(axes[dim] for dim in args[0])
            continue
        if func is not aten.slice.Tensor:
            return None
        dim, start, end, stride = args + (0, None, None, 1)[len(args) :]
        if axes[dim] != "S" or stride != 1:
            return None
        begin, limit, _ = slice(start, end).indices(stop - first)
        first, stop = first + begin, first + max(begin, limit)
    return first, axes


@handles(aten.index_copy_.default)
def index_copy_(func: Any, handle: PagedTensor, dim: int, index: Tensor, source: Tensor) -> Any:
    wanted = [*handle.shape]
    wanted[dim] = index.numel()
    fits = list(source.shape) == wanted and source.dtype == handle.dtype and source.device == handle.device
    if handle._form.steps or handle._form.axes[dim] != "S" or isinstance(source, PagedTensor) or not fits:
        return write_back(func, [handle], (handle, dim, index, source), {})
    _require_writable(handle, func)
    return _scatter(handle, dim, index.reshape(-1).tolist(), source)


@handles(aten.index_put_.default, aten._index_put_impl_.default)
def index_put_(
    func: Any, handle: PagedTensor, indices: Any, values: Tensor, accumulate: bool = False, *rest: Any
) -> Any:
    """`cache[:, :, positions] = values`."""
    given = [(dim, item) for dim, item in enumerate(indices) if item is not None]
    simple = len(given) == 1 and given[0][1].dim() == 1 and given[0][1].dtype != torch.bool
    form = handle._form
    fits = not isinstance(values, PagedTensor) and values.dtype == handle.dtype
    if accumulate or form.steps or not simple or form.axes[given[0][0]] != "S" or not fits:
        return write_back(func, [handle], (handle, indices, values, accumulate, *rest), {})
    _require_writable(handle, func)
    dim, index = given[0]
    shape = [*handle.shape]
    shape[dim] = index.numel()
    return _scatter(handle, dim, index.tolist(), values.expand(shape))


def _scatter(handle: PagedTensor, dim: int, positions: list[int], values: Tensor) -> PagedTensor:
    size = handle.shape[dim]
    for position in positions:
        if not -size <= position < size:
            raise IndexError(f"position {position} is out of range for a cache of {size} tokens")
    positions = [position % size for position in positions]
    start = 0
    for i in range(1, len(positions) + 1):  # runs of consecutive positions are one write each
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            write_tokens(handle, positions[start], values.narrow(dim, start, i - start))
            start = i
    return handle
