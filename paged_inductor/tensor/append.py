"""`torch.cat` on handles: along the sequence it appends, along the batch it merges rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..runtime import StepViews, View, manager
from . import derive
from .handle import HANDLERS, PagedTensor, handles
from .materialize import dense_copy, step_plan
from .structure import _is_plain

__all__ = ["store"]

aten = torch.ops.aten


@handles(aten.cat.default)
def cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Sequence: old tokens stay where they are, the new ones are written behind them. Batch: rows are merged.

    Along the batch, caches of unequal lengths may be joined: shorter rows become virtually left padded.
    """
    first = tensors[0]
    parts = [part for part in tensors if isinstance(part, PagedTensor) or part.numel() or part.dim() != 1]
    if isinstance(first, PagedTensor) and _is_plain(first):
        axis = first._form.axes[dim]
        rest = parts[1:]
        if not rest:
            return PagedTensor(derive.fork(first._view, first._form.site), first._form)
        if axis == "S" and not first._view.static and not any(isinstance(part, PagedTensor) for part in rest):
            new = rest[0] if len(rest) == 1 else torch.cat(rest, dim)
            if _fits(first, new, dim):
                return _append(first, new)
        alike = [part for part in parts if isinstance(part, PagedTensor) and part._form is first._form]
        if axis == "B" and len(alike) == len(parts):
            if derive.can_merge([part._view for part in alike]):
                view = derive.merge([part._view for part in alike], [part._form.site for part in alike])
                return PagedTensor(view, first._form)
            if not any(part._view.static for part in alike):
                return torch.cat(_padded(alike, str(func)), dim)
    return HANDLERS[None](func, tensors, dim)


def _padded(handles: Sequence[PagedTensor], name: str) -> list[Tensor]:
    """Dense copies of one length: shorter ones left padded by zeros."""
    length = max(handle._view.length for handle in handles)
    tokens = handles[0]._form.axes.index("S")
    result = []
    for handle in handles:
        value = dense_copy(handle, name)
        size = [*value.shape]
        size[tokens] = length - size[tokens]
        result.append(torch.cat([value.new_zeros(size), value], tokens))
    return result


def _fits(handle: PagedTensor, new: Tensor, dim: int) -> bool:
    """Whether `new` can follow the handle's tokens in its pages; else torch's own rules apply to dense copies."""
    wanted, got = list(handle.shape), list(new.shape)
    if len(got) != len(wanted) or new.dtype != handle.dtype or new.device != handle.device or new.requires_grad:
        return False
    wanted[dim] = got[dim] = 0
    return wanted == got


def _append(handle: PagedTensor, new: Tensor) -> PagedTensor:
    form = handle._form
    count = new.shape[form.axes.index("S")]
    if count == 0:
        return PagedTensor(derive.fork(handle._view, form.site), form)
    step = derive.append_view(handle._view, form.site, count)
    store(step, form.site, _as_bhsd(new, form.axes), count)
    return PagedTensor(step.view, form)


def _as_bhsd(value: Tensor, axes: str) -> Tensor:
    return value.permute([axes.index(axis) for axis in "BHSD"])


def store(step: StepViews, site: int, new: Tensor, count: int) -> None:
    """Write new [B, H, count, D] as the last `count` tokens of every row of a step's view."""
    view: View = step.view
    group = view.group
    with torch.no_grad(), manager().using(view):
        ops.execute_copies(group.arenas, step.copies)
        ops.cache_write(group.arenas[site], new, step_plan(view, count))
    derive.filled(view, site)
