"""How much two tensors that should hold the same values differ, and how much they may."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "Difference", "difference"]

TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Allowed differences by dtype, as a share of the dense tensor's largest absolute value. Two orders of one sum round
differently, and layers and steps pass the rounding on; what paging can get wrong is of the values' own size."""

_SMALLEST_SCALE = 1e-3  # values that are all smaller than this are compared as if the largest were this


class Difference(NamedTuple):
    """Where two tensors differ most.

    largest: the absolute difference (inf if only one of the values is finite, or the shapes differ). index: its place.
    allowed: the largest difference that would have passed. note: both values there, or both shapes.
    """

    largest: float
    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index
    allowed: float
    note: str


def difference(paged: Tensor, dense: Tensor, tolerance: float | None = None) -> Difference | None:
    """Where `paged` differs from `dense` beyond the tolerance, or None. NaNs in the same places are equal.

    tolerance: a share of the largest finite absolute value of `dense`; None for its dtype's entry of `TOLERANCES`.
    Tensors that are not floating point must be equal.
    """
    if paged.shape != dense.shape:
        return Difference(float("inf"), (), 0.0, f"shapes {list(paged.shape)} and {list(dense.shape)}")
    if not dense.numel():
        return None
    if tolerance is None:
        tolerance = TOLERANCES.get(dense.dtype, 0.0)
    left, right = paged.detach().double(), dense.detach().double()
    finite = right.isfinite()
    scale = float(right.where(finite, 0.0).abs().max())
    allowed = tolerance * max(scale, _SMALLEST_SCALE) if dense.is_floating_point() else 0.0
    apart = (left - right).abs().nan_to_num(nan=float("inf"))
    apart[(left == right) | (left.isnan() & right.isnan())] = 0.0
    largest, place = apart.flatten().max(0)
    if float(largest) <= allowed:
        return None
    index = tuple(int(i) for i in torch.unravel_index(place, apart.shape))
    note = f"{float(left[index]):.6g} and {float(right[index]):.6g}"
    return Difference(float(largest), index, allowed, note)
