"""Dense copies of handles, and the fallback for operations that have no paged meaning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only

from .. import ops
from .._callers import users_stacklevel
from .._config import config
from .._errors import MaterializationError
from ..runtime import View, manager
from .base import Handle
from .handle import HANDLERS, Form, PagedTensor, Step, apply_step, handles

__all__ = ["copy_out", "dense_copy", "mutated", "stand_in", "step_plan", "views_of", "visible_tokens"]

aten = torch.ops.aten


def step_plan(view: View, new_tokens: int = 0, decodes: bool = False) -> ops.StepPlan:
    """The plan of an operation on `view` whose last `new_tokens` tokens are to be written.

    decodes: with the work list of decode.
    """
    schedule = manager().schedule(view)
    sizes = (schedule.num_chunks, schedule.row_chunks) if decodes else ()
    length = view.extent if view.static else view.length
    return ops.plan_step(schedule.block_table, schedule.seq_lens, length, new_tokens, view.group.block_size, *sizes)


def copy_out(view: View, form: Form) -> Tensor:
    """The values of a handle as a dense tensor of its shape (uncounted; a fresh tensor unless a step aliases it)."""
    if view.static and view.extent == 0:
        spec = view.group.sites[form.site]
        size = (len(view.rows), spec.heads, view.length, spec.head_dim)
        return _shown(torch.zeros(size, dtype=spec.dtype, device=spec.device), form)
    with torch.no_grad(), manager().using(view):
        dtype = view.group.sites[form.site].dtype
        value = ops.gather(view.group.arenas[form.site], step_plan(view), dtype)
        if view.static:
            value = F.pad(value, (0, 0, 0, view.length - view.extent))
    return _shown(value, form)


def _shown(value: Tensor, form: Form) -> Tensor:
    """A dense [B, H, S, D] tensor, as a handle of this form would show it."""
    axes = form.axes
    if "R" in axes or "h" in axes:
        value = value.unsqueeze(2).expand(-1, -1, form.repeats, -1, -1)  # B H R S D
        if "h" in axes:
            value = value.flatten(1, 2)
    order = "BHRSD" if "R" in axes else "BhSD" if "h" in axes else "BHSD"
    value = value.permute([order.index(axis) for axis in axes]).contiguous()
    for step in form.steps:
        value = apply_step(value, step)
    return value


def visible_tokens(handle: PagedTensor) -> Tensor:
    """Bool, of the handle's shape: False in the rows' virtual left padding."""
    view = handle._view
    spec = view.group.sites[handle._form.site]
    pad = torch.tensor(view.pads, device=spec.device)
    token = torch.arange(view.length, device=spec.device) >= pad[:, None]
    return _shown(token[:, None, :, None].expand(-1, spec.heads, -1, spec.head_dim), handle._form)


def dense_copy(handle: PagedTensor, name: str) -> Tensor:
    """The values of a handle, copied for the operation `name`: counted, and reported as `on_materialize` says."""
    policy = config().on_materialize
    if policy == "error":
        raise MaterializationError(
            f"{name} on a PagedTensor of shape {list(handle.shape)} needs a dense copy of its pages, which "
            'on_materialize="error" forbids: avoid the operation, or configure(on_materialize="warn")'
        )
    if manager().count_materialization(name) == 1 and policy == "warn":
        warnings.warn(
            f"paged_inductor: {name} copied a cache of shape {list(handle.shape)} into a dense tensor. This is correct "
            "but costs memory and time; it is said once per operation and counted in stats().materializations.",
            stacklevel=users_stacklevel(),
        )
    return copy_out(handle._view, handle._form)


def views_of(func: Any) -> bool:
    """Whether an operator's results are views of its first argument."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def stand_in(handle: PagedTensor) -> Tensor:
    """A tensor without values that has a handle's sizes and strides."""
    return torch.empty_strided(handle.shape, handle.stride(), dtype=handle.dtype, device="meta")


def lazy_view(func: Any, handle: PagedTensor, *args: Any, **kwargs: Any) -> Any:
    """A view operation with no paged form is put off, so that writes through its result still reach the pages."""
    result = func(stand_in(handle), *args, **kwargs)
    form = handle._form
    if not form.steps and not handle.is_contiguous() and 0 not in handle.stride():
        order = sorted(range(handle.dim()), key=handle.stride, reverse=True)
        back: Step = (aten.permute.default, ([order.index(dim) for dim in range(handle.dim())],), {}, None)
        form = form._replace(axes="".join(form.axes[dim] for dim in order), steps=(back,))

    def extended(item: int | None, like: Tensor) -> PagedTensor:
        step: Step = (func, args, kwargs, item)
        return PagedTensor(handle._view, form._replace(steps=(*form.steps, step)), like)

    return extended(None, result) if isinstance(result, Tensor) else [extended(i, r) for i, r in enumerate(result)]


def fallback(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator without a meaning of its own: taken apart if torch defines it by others, put off if it makes a view,
    written back if it writes in place, else carried out on dense copies."""
    parts = func.decompose(*args, **kwargs)  # in inference mode they arrive whole
    if parts is not NotImplemented:
        return parts
    if args and isinstance(args[0], PagedTensor) and views_of(func):
        return lazy_view(func, *args, **kwargs)
    written = mutated(func, args, kwargs)
    if written:
        from .inplace import write_back

        return write_back(func, written, args, kwargs)
    name = str(func)
    flat_args, flat_kwargs = tree_map_only(PagedTensor, lambda h: dense_copy(h, name), (args, kwargs))
    return func(*flat_args, **flat_kwargs)


HANDLERS[None] = fallback


def mutated(func: Any, args: Iterable[Any], kwargs: dict[str, Any], kind: type[Handle] = PagedTensor) -> list[Any]:
    """The handles (of one kind) that an operator writes to."""
    found: list[Any] = []
    arguments = func._schema.arguments
    for argument, value in zip(arguments, args):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, kind)]
    for argument in arguments:
        if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
            found += [leaf for leaf in tree_flatten(kwargs[argument.name])[0] if isinstance(leaf, kind)]
    return found


@handles("dense")
def dense(handle: PagedTensor) -> Tensor:
    """What `PagedTensor.dense()` returns."""
    manager().count_materialization("dense")
    return copy_out(handle._view, handle._form)
