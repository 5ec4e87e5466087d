"""A linear layer applied to one row, as a formula that reads the weights at memory speed."""

from __future__ import annotations

from torch import Tensor

from .decode import stored

__all__ = ["single_row_linear"]


def single_row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` for x [1, ..., 1, K], weight [N, K]; sums in float32, result in x's dtype.

    Each output is one dot product of two contiguous vectors. Inductor vectorises that as it stands, while a matrix
    library treats a matrix of one row as a general product (docs/performance.md has the figures).
    """
    row = stored(x.reshape(-1).float())  # what produced x must not be repeated for each of the N outputs
    out = (weight.float() * row).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[0])
