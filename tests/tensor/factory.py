"""Handles with known values, made without a compiled model."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_inductor.runtime import SiteSpec, View, manager
from paged_inductor.tensor import PagedTensor
from paged_inductor.tensor.append import store
from paged_inductor.tensor.handle import plain

__all__ = ["as_bhsd", "paged_like", "sequence_dim", "view_of"]


def sequence_dim(axes: str) -> int:
    return axes.index("S")


def as_bhsd(value: Tensor, axes: str) -> Tensor:
    return value.permute([axes.index(axis) for axis in "BHSD"])


def paged_like(
    *dense: Tensor,
    axes: str = "BHSD",
    block_size: int = 16,
    label: str = "test",
    stored_as: torch.dtype | None = None,
) -> list[PagedTensor]:
    """One handle per dense tensor, with its values, as the cached tensors of one cache group share a view.

    Every other tensor (the keys) is stored with transposed blocks, as compiled graphs do on the CPU.
    """
    values = [as_bhsd(value, axes) for value in dense]
    sites = tuple(
        SiteSpec(v.shape[1], v.shape[3], v.dtype, v.device, i % 2 == 0 and stored_as is None, stored_as)
        for i, v in enumerate(values)
    )
    count = values[0].shape[2]
    step = manager().create(manager().group(sites, block_size), values[0].shape[0], count, label)
    for site, value in enumerate(values):
        store(step, site, value, count)
    return [PagedTensor(step.view, plain(site, axes)) for site in range(len(dense))]


def view_of(handle: torch.Tensor) -> View:
    assert isinstance(handle, PagedTensor)
    return handle._view
