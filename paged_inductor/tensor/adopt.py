"""Dense buffers become handles, in place: whoever holds a buffer holds pages from then on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime import SiteSpec, manager
from .handle import PagedTensor, plain

__all__ = ["Buffer", "adopt", "refusal"]


class Buffer(NamedTuple):
    """A dense buffer [B, H, max_len, D] in the order `axes`, and how its tokens are to be stored."""

    value: Tensor
    axes: str
    spec: SiteSpec


def refusal(value: Tensor) -> str:
    """Why a tensor cannot become a handle, or ''."""
    if isinstance(value, PagedTensor):
        return "it is a handle already"
    if value.requires_grad or value._base is not None:
        return "it needs gradients or is a view of another tensor"
    if not value.untyped_storage().resizable():
        return "its memory is shared with something other than torch, such as a numpy array"
    if torch._C._storage_Use_Count(value.untyped_storage()._cdata) > 2:  # type: ignore[attr-defined]
        return "another tensor shares its memory"  # one user is the tensor, the other our look at its storage
    if value._use_count() != 1:  # type: ignore[attr-defined]
        return "torch holds it elsewhere"
    return ""


def adopt(buffers: Sequence[Buffer], block_size: int, label: str) -> None:
    """Turn buffers of one cache, with equal batches and lengths, into handles on one static view.

    Every reference to a buffer, wherever it is kept, is a reference to its handle afterwards, and its dense memory is
    free. Positions behind the last one that is not zero take no pages. Obligation: `refusal` finds nothing.
    """
    first = buffers[0]
    batch, length = (first.value.shape[first.axes.index(axis)] for axis in "BS")
    group = manager().group(tuple(buffer.spec for buffer in buffers), block_size)
    view = manager().create_static(group, batch, length, label)
    for site, buffer in enumerate(buffers):
        handle = PagedTensor(view, plain(site, buffer.axes))
        with torch.no_grad():
            handle.copy_(buffer.value)
        _swap(buffer.value, handle)


def _swap(a: Tensor, b: Tensor) -> None:
    """Exchange what two tensor objects are. torch.utils.swap_tensors does the same, but refuses tensors that have weak
    references, which torch.compile's guards hold; they go on pointing to the object, and notice its new type."""
    own = dict(a.__dict__)
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)  # type: ignore[attr-defined]
    a.__dict__.update(own)  # what torch and users noted on it
