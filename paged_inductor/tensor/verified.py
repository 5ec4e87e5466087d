"""Handles that carry the dense tensor they stand for: `verify=True`.

Every operation on such a handle has its paged meaning, and is also carried out on the dense tensor (the *shadow*) by
torch's own rules, aliases and in-place writes included. The shadow is never read from pages, so what the pages say can
be checked against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from .._errors import VerificationError
from ..difference import difference
from ..runtime import View
from .attend import FUSED, AttentionCall
from .handle import Form, PagedTensor
from .materialize import copy_out, mutated, visible_tokens

__all__ = ["Shadow", "VerifiedTensor", "promote"]

aten = torch.ops.aten

_ATTENTION = {aten.scaled_dot_product_attention.default, *FUSED}
_BY_STRIDES = {aten.view.default, aten._unsafe_view.default, aten.as_strided.default}


@dataclass(frozen=True)
class Shadow:
    """The dense tensor beside a handle.

    values: of the handle's shape. layer, what: what it is, for people ("model.layers.0.self_attn", "stored keys").
    step: compiled steps that its cache has seen. tolerance: see `difference`.
    """

    values: Tensor
    layer: str
    what: str
    step: int
    tolerance: float | None


class VerifiedTensor(PagedTensor):
    """A handle with a shadow. Raises `VerificationError` where a value read from its pages is not the shadow's."""

    _shadow: Shadow

    @staticmethod
    def __new__(cls, view: View, form: Form, like: Tensor | None, shadow: Shadow) -> VerifiedTensor:
        self = PagedTensor.__new__(cls, view, form, like)
        self._shadow = shadow  # type: ignore[attr-defined]
        return self  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _beside(func, args, kwargs or {})

    def dense(self) -> Tensor:
        self.check(self._shadow.what)
        return super().dense()

    def check(self, what: str) -> None:
        """Compare the pages with the shadow; raises `VerificationError` if they differ."""
        self.require(copy_out(self._view, self._form), self._shadow.values, what)

    def require(self, paged: Tensor, dense: Tensor, what: str) -> None:
        """Raise `VerificationError` if two values made from this handle differ."""
        shadow = self._shadow
        fault = difference(paged, dense, shadow.tolerance)
        if fault is not None:
            raise VerificationError(self._view.label, 0, shadow.step, shadow.layer, what, *fault)


def promote(handle: PagedTensor, tolerance: float | None) -> VerifiedTensor:
    """Give a handle that has no shadow (made before verifying began, or from a dense buffer) the values in its pages:
    the only time that they are believed. It is the same object afterwards, for whoever holds it."""
    if not isinstance(handle, VerifiedTensor):
        with torch.inference_mode(False):
            values = copy_out(handle._view, handle._form)
        handle.__class__ = VerifiedTensor
        handle._shadow = Shadow(values, f"cache tensor {handle._form.site}", "stored tokens", 0, tolerance)  # type: ignore[attr-defined]
    return handle  # type: ignore[return-value]


def _beside(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation's paged meaning, and the same on the shadows."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, VerifiedTensor)]
    plain = {id(handle): PagedTensor(handle._view, handle._form, handle) for handle in given}
    paged_args, paged_kwargs = tree_map_only(VerifiedTensor, lambda handle: plain[id(handle)], (args, kwargs))
    written = mutated(func, args, kwargs)
    seeded = bool(written) and torch.Tag.nondeterministic_seeded in func.tags
    with torch.random.fork_rng() if seeded else nullcontext():
        result = PagedTensor.__torch_dispatch__(func, (), paged_args, paged_kwargs)
    leaves, spec = tree_flatten(result)
    if not written and not any(isinstance(leaf, PagedTensor) for leaf in leaves):
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            _check_values(func, args, kwargs, given, leaves[0])
        return result
    with torch.inference_mode(False), torch.no_grad():
        shadows = tree_leaves(_on_shadows(func, args, kwargs, leaves[0]))
    for handle in written:
        _clear_padding(handle)
    named = max(given, key=lambda handle: handle._shadow.step)._shadow
    back = {id(plain[id(handle)]): handle for handle in given}
    results = []
    for leaf, values in zip(leaves, shadows):
        if id(leaf) in back:  # written in place and returned
            leaf = back[id(leaf)]
        elif isinstance(leaf, PagedTensor):
            leaf = _with_shadow(leaf, named, values)
        results.append(leaf)
    return tree_unflatten(results, spec)


def _with_shadow(handle: PagedTensor, named: Shadow, values: Tensor) -> VerifiedTensor:
    if values.shape != handle.shape:
        note = f"shapes {list(handle.shape)} and {list(values.shape)}"
        raise VerificationError(handle._view.label, 0, named.step, named.layer, "shape", math.inf, (), 0.0, note)
    return VerifiedTensor(handle._view, handle._form, handle, replace(named, values=values))


def _on_shadows(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    def shadow(handle: PagedTensor) -> Tensor:
        values = promote(handle, None)._shadow.values
        if func in _BY_STRIDES and not _views_as(func, values, handle, args[1:]):
            values = torch.empty_strided(handle.shape, handle.stride(), dtype=handle.dtype).copy_(values)
        return values

    dense_args, dense_kwargs = tree_map_only(PagedTensor, shadow, (args, kwargs))
    if func is aten.cat.default and isinstance(result, PagedTensor):
        dim = dense_args[1] if len(dense_args) > 1 else dense_kwargs.get("dim", 0)
        if dim % result.dim() == result._form.axes.find("B"):
            dense_args = ([_padded(part, result) for part in dense_args[0]], *dense_args[1:])
    return func(*dense_args, **dense_kwargs)


def _views_as(func: Any, values: Tensor, handle: PagedTensor, args: Sequence[Any]) -> bool:
    """Whether an operation on strides makes of a shadow what it makes of the handle: the handle's crop has no gaps, the
    shadow's has. A copy without gaps would not see later writes."""
    if func is aten.as_strided.default:
        return values.stride() == handle.stride()
    try:
        func(torch.empty_strided(values.shape, values.stride(), device="meta"), *args)
    except RuntimeError:
        return False
    return True


def _padded(part: Tensor, result: PagedTensor) -> Tensor:
    """A part of a merge along the batch, with zeros in front of its sequence up to the result's length."""
    axes = result._form.axes
    missing = result._view.length - part.shape[axes.index("S")] if part.dim() == 4 else 0
    return F.pad(part, (0,) * 2 * (3 - axes.index("S")) + (missing, 0)) if missing else part


def _clear_padding(handle: PagedTensor) -> None:
    """Virtual padding reads as zeros whatever is written there."""
    if isinstance(handle, VerifiedTensor) and handle._view.ragged:
        visible = visible_tokens(handle)
        with torch.inference_mode(False), torch.no_grad():
            handle._shadow.values.masked_fill_(~visible, 0.0)


def _check_values(func: Any, args: Any, kwargs: dict[str, Any], given: list[VerifiedTensor], result: Tensor) -> None:
    """A dense result: what it was computed from must be right, and of an attention the result itself."""
    for handle in given:
        handle.check(handle._shadow.what)
    if func not in _ATTENTION:
        return
    call = AttentionCall.of(func, args, kwargs)
    if call.dropout_p:
        return
    call = call.without_padding()

    def dense_side(value: Any) -> Any:
        return promote(value, None)._shadow.values if isinstance(value, PagedTensor) else value

    query, key, value = dense_side(call.query), dense_side(call.key), dense_side(call.value)
    grouped = query.shape[1] > key.shape[1]  # fewer broadcast
    with torch.no_grad():
        dense = F.scaled_dot_product_attention(
            query,
            key,
            value,
            dense_side(call.attn_mask),
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=grouped,
        )
    given[0].require(result, dense, "output")
