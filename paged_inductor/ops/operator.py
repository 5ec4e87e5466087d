"""Custom operators as plain kernels: called once or more for every layer of every step, they must cost little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["operator"]


def operator(fake: Callable[..., Any], mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: make `torch.ops.paged_inductor.{function's name}` of a function, and return it. A leading underscore,
    of what is called by other functions of its module only, is not part of the operator's name.

    fake: makes the result from tensors without values. mutates: the arguments that are written to. Unlike those of
    `torch.library.custom_op`, it has no layers for autograd, which take 10 us of every call, and so no gradients, and
    no error that says so. Obligation: it is called where none are recorded.
    """

    def register(function: Callable[..., Any]) -> Any:
        short = function.__name__.removeprefix("_")
        name = f"paged_inductor::{short}"
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(name, "default", function)
        torch.library.register_fake(name, fake)
        return getattr(torch.ops.paged_inductor, short)

    return register
