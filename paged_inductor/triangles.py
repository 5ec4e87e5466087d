"""Mask buffers: graph inputs whose content is a lower triangle, which the mask prover may rely on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

__all__ = ["Triangles", "triangle"]

_LARGEST = 2**27  # elements: a mask of 11,585 positions


def triangle(value: Any) -> float | None:
    """What a tensor [..., n, n] holds above its diagonal, if it is a lower triangle.

    Of ones and zeros (or True and False): 0. Of zeros and one negative number, as masks that are added: that number.
    None if it is no triangle, or nobody could tell whether it stays one.
    """
    if not isinstance(value, Tensor) or type(value) is not Tensor or value.dim() < 2 or value.is_inference():
        return None
    if not value.untyped_storage().resizable():  # shared with numpy, say, whose writes nobody would notice
        return None
    size = value.shape[-1]
    if size < 2 or value.shape[-2] != size or value.numel() != size * size or value.numel() > _LARGEST:
        return None
    flat = value.reshape(size, size)
    corner, above, below = (flat[i, j].item() for i, j in ((0, 0), (0, 1), (1, 0)))
    if (corner, above, below) == (1, 0, 1):
        number = 0.0
    elif (corner, below) == (0, 0) and above < 0 and value.dtype.is_floating_point:
        number = float(above)
    else:
        return None
    inside = torch.ones_like(flat, dtype=torch.bool).tril()
    wanted = inside.to(value.dtype) if number == 0 else torch.zeros_like(flat).masked_fill(~inside, number)
    return number if torch.equal(flat, wanted) and not math.isnan(number) else None


class Triangles:
    """The triangular inputs of one graph. `hold` proves at every call that they are what they were at capture."""

    def __init__(self, placeholders: Sequence[Node], examples: Sequence[Any]) -> None:
        found = [(i, node.name, triangle(x)) for i, (node, x) in enumerate(zip(placeholders, examples))]
        self.numbers = {name: number for _, name, number in found if number is not None}
        self._positions = [(i, number) for i, _, number in found if number is not None]
        self._seen = {i: (examples[i], _state(examples[i])) for i, _ in self._positions}

    def hold(self, args: Sequence[Any]) -> bool:
        """Whether the inputs are the same triangles."""
        for i, number in self._positions:
            value = args[i]
            if value.is_inference():
                return False
            known, state = self._seen[i]
            if value is known and _state(value) == state:
                continue
            if triangle(value) != number:
                return False
            self._seen[i] = (value, _state(value))
        return True


def _state(value: Tensor) -> tuple[int, int]:
    """What changes when a tensor's content does, as far as torch keeps account of it."""
    return value._version, value.data_ptr()
