"""PagedTensor: a torch.Tensor whose tokens live in pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ..runtime import View
from .base import Handle

__all__ = ["HANDLERS", "Form", "PagedTensor", "Step", "apply_step", "axes_size", "handles", "plain"]

Step = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]
"""A view operation put off: the operation, its arguments behind the tensor, and which of its results is meant."""


class Form(NamedTuple):
    """How a handle shows its view.

    site: which of the cache group's arenas holds the values. axes: the dimensions' names: B, H, S, D, and R (a
    broadcast dimension, `repeats` long) or h (heads, each repeated `repeats` times). steps: view operations on top
    that were not carried out.
    """

    site: int
    axes: str = "BHSD"
    repeats: int = 1
    steps: tuple[Step, ...] = ()


def plain(site: int, axes: str = "BHSD") -> Form:
    """The form of a cache as models keep it. One object per value: programs compare forms by identity."""
    return _plain(site, axes)


@cache
def _plain(site: int, axes: str) -> Form:
    return Form(site, axes)


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""What an operator means on handles: `HANDLERS[op](op, *args, **kwargs)`. `HANDLERS[None]` serves all others, and
`HANDLERS["dense"](handle)` copies out."""


def handles(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: this function is what the operators mean on PagedTensors."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for operator in operators:
            HANDLERS[operator] = function
        return function

    return register


class PagedTensor(Handle):
    """A handle onto pages, with the logical shape that the program expects, such as [B, H, S, D].

    It carries a view (the batch's block tables and lengths) and a form (which site's values, and the order of its
    dimensions); it has no storage of its own. What reads a handle in any other way than a cache is used gets a dense
    copy. Made by compiled graphs and by operations on other handles; users do not construct it.
    """

    _view: View
    _form: Form

    @staticmethod
    def __new__(cls, view: View, form: Form, like: Tensor | None = None) -> PagedTensor:
        """`like` has the sizes and strides to show, if they are not those of a contiguous tensor without steps.

        Torch decides by the strides what is a view and what is a copy (`reshape`, `contiguous`).
        """
        spec = view.group.sites[form.site]
        strides = None
        if like is not None:
            size, strides = tuple(like.shape), like.stride()
        elif form.axes == "BHSD":  # nearly all handles: the fast way
            size = (len(view.rows), spec.heads, view.length, spec.head_dim)
        else:
            size = axes_size(view, form)
        self = Tensor._make_wrapper_subclass(cls, size, strides, dtype=spec.dtype, device=spec.device)
        self._view = view
        self._form = form
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = HANDLERS.get(func) or HANDLERS[None]
        return handler(func, *args, **(kwargs or {}))

    def dense(self) -> Tensor:
        """A dense copy of the values. It is what was asked for: counted as "dense", but never warned of or refused."""
        return HANDLERS["dense"](self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        shape = ", ".join(map(str, self.shape))
        blocks = len({block for row in self._view.rows for block in row.blocks})
        facts = f"shape=[{shape}], dtype={self.dtype}, device={self.device}, blocks={blocks}"
        return f"PagedTensor({facts},\n{self.dense()})"


def axes_size(view: View, form: Form) -> tuple[int, ...]:
    """Sizes of a form's dimensions, before its steps."""
    spec = view.group.sites[form.site]
    sizes = {
        "B": len(view.rows),
        "H": spec.heads,
        "S": view.length,
        "D": spec.head_dim,
        "R": form.repeats,
        "h": spec.heads * form.repeats,
    }
    return tuple(sizes[axis] for axis in form.axes)


def apply_step(value: Tensor, step: Step) -> Tensor:
    """Carry out a view operation that was put off."""
    func, args, kwargs, item = step
    result = func(value, *args, **kwargs)
    return result if item is None else result[item]
