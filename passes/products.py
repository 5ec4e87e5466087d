"""Products of batched matrices, in the ways that people write them: matmul, bmm, baddbmm, einsum.

A canonical product is [*lead, M, C] @ [*lead, C, N] -> [*lead, M, N], where *lead is [B * H], [B, H] or [B, H_kv, G].
"""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .tensors import argument, is_call, is_tensor, shape

__all__ = ["Product", "output_product", "score_product"]

_MATMUL = (torch.matmul, operator.matmul, torch.bmm)


@dataclass(frozen=True)
class Product:
    """One product of the graph.

    left: permuted by left_order it is [*lead, M, C]. right, right_dims: which canonical dimension each of its own is:
    a position in *lead, "C" or "N". out_order: which canonical dimension [*lead, M, N] each of the result's own is.
    bias: what a baddbmm adds, times beta, to the product times alpha.
    """

    node: Node
    lead: int
    left: Node
    left_order: tuple[int, ...]
    right: Node
    right_dims: tuple[int | str, ...]
    out_order: tuple[int, ...]
    bias: Node | None = None
    alpha: float = 1.0
    beta: float = 1.0

    @property
    def moves_left(self) -> bool:
        """Whether `left` must be permuted."""
        return self.left_order != tuple(range(len(self.left_order)))

    def right_axes(self, contracted: str, free: str) -> list[str]:
        """The axes that `right` must have, where C is called `contracted` and N is called `free`."""
        lead: tuple[str, ...] = ("BH",) if self.lead == 1 else ("B", "H", "R")
        names = {"C": contracted, "N": free}
        return [lead[dim] if isinstance(dim, int) else names[dim] for dim in self.right_dims]


def score_product(node: Node) -> Product | None:
    """`node` as a product whose result is [*lead, M, N]; None if it is something else."""
    if is_call(node, (torch.functional.einsum, torch.einsum)):
        return _einsum(node, None)
    if is_call(node, (torch.baddbmm,), ("baddbmm",)):
        return _baddbmm(node)
    return _plain(node)


def output_product(node: Node, weights: Node) -> Product | None:
    """`node` as a product with `weights` [*lead, M, C] on its left; None if it is something else."""
    if is_call(node, (torch.functional.einsum, torch.einsum)):
        return _einsum(node, weights)
    product = _plain(node)
    return product if product is not None and product.left is weights and product.right is not weights else None


def _plain(node: Node) -> Product | None:
    if not is_call(node, _MATMUL, ("matmul", "bmm", "__matmul__")) or node.kwargs.get("out_dtype"):
        return None
    left = argument(node, 0, "input")
    right = argument(node, 1, "mat2", node.kwargs.get("other", node.kwargs.get("tensor2")))
    return _batched(node, left, right)


def _baddbmm(node: Node) -> Product | None:
    bias = argument(node, 0, "input")
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if not is_tensor(bias) or not all(isinstance(factor, int | float) for factor in (alpha, beta)):
        return None
    return _batched(node, argument(node, 1, "batch1"), argument(node, 2, "batch2"), bias, alpha, beta)


def _batched(node: Node, left: Node, right: Node, *rest: object) -> Product | None:
    if not is_tensor(node) or not is_tensor(left) or not is_tensor(right):
        return None
    ndim = len(shape(left))
    if ndim not in (3, 4, 5) or len(shape(right)) != ndim:
        return None
    order = tuple(range(ndim))
    dims = (*range(ndim - 2), "C", "N")
    return Product(node, ndim - 2, left, order, right, dims, order, *rest)


def _einsum(node: Node, weights: Node | None) -> Product | None:
    """weights: the left operand, whose own order of dimensions is canonical; None: the result's order is."""
    operands = node.args[1:] if len(node.args) == 3 else argument(node, 1, "operands")
    if not isinstance(node.args[0], str) or not isinstance(operands, list | tuple) or len(operands) != 2:
        return None
    if not all(map(is_tensor, operands)) or not is_tensor(node):
        return None
    labels = _labels(node.args[0], [*operands, node])
    if labels is None:
        return None
    first, second, out = labels
    shared = [x for x in first if x in second and x not in out]
    own = ([x for x in first if x not in second], [x for x in second if x not in first])
    if len(shared) != 1 or not all(own):
        return None
    if weights is not None:
        swap = operands[0] is not weights
        if (operands[1] is weights) != swap:
            return None
    else:
        swap = out[-1] in own[0]
    (left, a), (right, b) = [(operands[1], second), (operands[0], first)][:: 1 if swap else -1]
    lead, free = (a[:-2], a[-2]) if weights is not None else (out[:-2], out[-2])
    canonical = [*lead, free, *own[0 if swap else 1]]
    if sorted(a) != sorted([*lead, free, *shared]) or sorted(out) != sorted(canonical) or free in b:
        return None
    if len(lead) not in (2, 3) or (weights is not None and a[-1] != shared[0]):
        return None
    names = {**{x: i for i, x in enumerate(lead)}, shared[0]: "C", canonical[-1]: "N"}
    order = tuple(a.index(x) for x in [*lead, free, *shared])
    out_order = tuple(canonical.index(x) for x in out)
    if weights is None and out_order != tuple(range(len(out))):
        return None
    return Product(node, len(lead), left, order, right, tuple(names[x] for x in b), out_order)


def _labels(equation: str, tensors: Sequence[Node]) -> list[str] | None:
    """One letter per dimension of both operands and the result; None where a letter occurs twice in one of them."""
    sides = equation.replace(" ", "").split("->")
    if len(sides) != 2 or sides[0].count(",") != 1:
        return None
    unused = [x for x in string.ascii_letters if x not in equation]
    written = []
    for text, tensor in zip([*sides[0].split(","), sides[1]], tensors):
        spare = len(shape(tensor)) - len(text.replace("...", ""))
        text = text.replace("...", "".join(unused[:spare][::-1]))  # an ellipsis is aligned at its end
        if len(text) != len(shape(tensor)) or len(set(text)) != len(text):
            return None
        written.append(text)
    return written
