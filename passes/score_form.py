"""The normal form of attention scores: softmax(cap(scale * q @ k^T) + bias), whatever the order people write it in.

`ScoreForm.follow` is called with one operation after the other from the product to the softmax, and keeps what they
amount to. What it cannot express it refuses, with a reason.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .mask_values import HUGE
from .products import Product
from .tensors import argument, hint, is_call, is_tensor, same_size, shape

__all__ = ["MASKED", "BiasStep", "ScoreForm", "is_conversion", "number"]

MASKED = -1e4  # scores that are replaced by less than this count as masked: their weights vanish beside any other's

_ADD = (operator.add, operator.iadd, torch.add)
_SUB = (operator.sub, operator.isub, torch.sub, torch.subtract)
_MUL = (operator.mul, operator.imul, torch.mul, torch.multiply)
_DIV = (operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide)
_METHODS = {"add": _ADD, "sub": _SUB, "subtract": _SUB, "mul": _MUL, "multiply": _MUL, "div": _DIV, "divide": _DIV}
_VIEWS = ("view", "reshape", "flatten", "unflatten")
_FILLS = ("masked_fill", "masked_fill_")


@dataclass(frozen=True)
class BiasStep:
    """One operation on what is added to the capped scores.

    kind: "add" or "sub" (a tensor), "mul" (value), "hide" (where the bool tensor is true, the score becomes value),
    "show" (where it is false), "floor" (no less than value). lead: how many dimensions the scores had before the last
    two, which `tensor` is broadcast to; groups: (H_kv, G) where these were [B, H_kv, G].
    """

    kind: str
    tensor: Node | None = None
    value: float = 0.0
    lead: int = 2
    groups: tuple[int, ...] = ()


@dataclass
class ScoreForm:
    """scale, softcap and sinks are those of `ops.attention`; bias: in order. query_factors: (tensor, divides), all of
    them constant along the keys. lead: dimensions of the scores before the last two, now; heads: of the queries, as
    far as they were seen. fault: why the operations cannot be expressed, or ''."""

    product: Product
    scale: float = 1.0
    softcap: float | None = None
    query_factors: list[tuple[Node, bool]] = field(default_factory=list)
    bias: list[BiasStep] = field(default_factory=list)
    sink: Node | None = None  # as concatenated
    sink_first: bool = False
    lead: int = 2
    heads: set[int] = field(default_factory=set)
    fault: str = ""
    shifted: bool = False  # a row's maximum was subtracted: softmax does not see it, but a cap or a sink does
    _inner: float = 1.0  # what scaled the scores before they were capped
    _capped: float | None = None  # what has scaled them since, if they were

    def __post_init__(self) -> None:
        product = self.product
        self.scale, self.lead = float(product.alpha), product.lead
        self.see_heads(product.node)
        if product.bias is not None and product.beta != 0:
            self._add(product.node, product.bias, "add")
            self.bias += [BiasStep("mul", value=product.beta)] if product.beta != 1 else []

    def see_heads(self, node: Node) -> None:
        """Note the number of query heads that scores or weights are laid out for."""
        sizes = shape(node)
        if self.lead > 1:
            self.heads.add(hint(sizes[1]) * (hint(sizes[2]) if self.lead == 3 else 1))

    def follow(self, node: Node, scores: Node) -> str:
        """Take in `node`, which reads `scores`; returns why it cannot be expressed, or ''."""
        if is_conversion(node):
            return ""
        if is_call(node, (torch.reshape, torch.flatten, torch.unflatten), _VIEWS):
            return self.regroup(node)
        if self.sink is not None:
            return f"{node.name} changes the scores after a sink has joined them"
        if is_call(node, (torch.cat, torch.concat, torch.concatenate)):
            return self._join_sink(node, scores)
        if not all(map(same_size, shape(node), shape(scores))) or len(shape(node)) != len(shape(scores)):
            return f"{node.name} changes the shape of the scores"
        if is_call(node, (torch.tanh,), ("tanh", "tanh_")):
            return self._cap(node)
        if is_call(node, (torch.masked_fill,), _FILLS) and argument(node, 0, "input") is scores:
            return self._replace("hide", node, argument(node, 1, "mask"), argument(node, 2, "value"))
        if is_call(node, (torch.where,), ("where",)):
            return self._where(node, scores)
        if is_call(node, (torch.max, torch.maximum, torch.clamp), ("max", "maximum", "clamp", "clamp_min")):
            return self._floor(node)
        return self._arithmetic(node, scores)

    def regroup(self, node: Node) -> str:
        """Take in a view that groups batch and heads differently."""
        before, after = shape(node.args[0]), shape(node)
        if len(after) not in (3, 4, 5) or not all(map(same_size, before[-2:], after[-2:])):
            return f"{node.name} reshapes more than batch and heads"
        if len(after) > 3 and len(before) > 3 and not same_size(before[0], after[0]):
            return f"{node.name} mixes batch and heads"
        self.lead = len(after) - 2
        self.see_heads(node)
        return ""

    def _arithmetic(self, node: Node, scores: Node) -> str:
        kinds = _METHODS.get(str(node.target).rstrip("_")) if node.op == "call_method" else (node.target,)
        if kinds is None or len(node.args) != 2 or node.kwargs:
            return f"{node.name} ({node.target}) changes the scores in a way that is not understood"
        kind = kinds[0]
        first = node.args[0] is scores
        other = node.args[1 if first else 0]
        if other is scores:
            return f"{node.name} combines the scores with themselves"
        if kind in _ADD or (kind in _SUB and first):
            return self._add(node, other, "add" if kind in _ADD else "sub")
        if kind in _MUL or (kind in _DIV and first):
            return self._multiply(node, other, kind in _DIV)
        return f"{node.name} ({node.target}) changes the scores in a way that is not understood"

    def _add(self, node: Node, other: object, kind: str) -> str:
        if not is_tensor(other):
            return f"{node.name} adds something that is no tensor of numbers"
        if any(step.value > HUGE for step in self.bias if step.kind in ("hide", "show")):
            return f"{node.name} adds to scores that were replaced by a finite number"
        self.bias.append(BiasStep(kind, other, 0.0, self.lead, self._groups(node)))
        return ""

    def _groups(self, node: Node) -> tuple[int, ...]:
        return tuple(map(hint, shape(node)[1:3])) if self.lead == 3 else ()

    def _multiply(self, node: Node, other: object, divides: bool) -> str:
        factor = number(other)
        if factor is not None and (factor == 0 or not abs(factor) < float("inf")):
            return f"{node.name} scales the scores by {factor}"
        if factor is None:
            return self._multiply_tensor(node, other, divides)
        factor = 1 / factor if divides else factor
        if self.bias:
            if factor < 0 or any(step.kind in ("hide", "show", "floor") for step in self.bias):
                return f"{node.name} scales the scores after they were masked"
            self.bias.append(BiasStep("mul", value=factor))
        if self._capped is not None:
            self._set_cap(self._capped * factor)
        else:
            self.scale *= factor
        return ""

    def _multiply_tensor(self, node: Node, other: object, divides: bool) -> str:
        if not is_tensor(other) or self.bias or self._capped is not None or self.lead != self.product.lead:
            return f"{node.name} scales the scores by something other than a number"
        sizes = shape(other)
        if sizes and not same_size(sizes[-1], 1):
            return f"{node.name} scales the scores differently for each key"
        self.query_factors.append((other, divides))
        return ""

    def _cap(self, node: Node) -> str:
        if self._capped is not None or self.bias or self.shifted:
            return f"{node.name} bounds scores that are biased, bounded or shifted before"
        self._inner = self.scale
        self._set_cap(1.0)
        return ""

    def _set_cap(self, factor: float) -> None:
        """factor * tanh(inner * x) is what a soft cap of |factor| makes of the scores inner * factor * x."""
        self._capped = factor
        self.softcap, self.scale = abs(factor), self._inner * factor

    def _where(self, node: Node, scores: Node) -> str:
        condition, yes, no = (argument(node, i, name) for i, name in enumerate(("condition", "input", "other")))
        if node.op == "call_method":
            condition, yes = argument(node, 1, "condition"), node.args[0]
        if yes is scores:
            return self._replace("show", node, condition, no)
        return self._replace("hide", node, condition, yes)

    def _replace(self, kind: str, node: Node, mask: object, by: object) -> str:
        value = number(by)
        if not is_tensor(mask) or mask.meta["example_value"].dtype != torch.bool:
            return f"{node.name} masks the scores by something that is no bool tensor"
        if value is None or value > MASKED:
            return f"{node.name} replaces masked scores by {by}, which does not hide them"
        finite = {step.value for step in self.bias if step.kind in ("hide", "show")} | {value}
        if len(finite - {-math.inf}) > 1:
            return f"{node.name} replaces masked scores by another number than before"
        self.bias.append(BiasStep(kind, mask, value, self.lead, self._groups(node)))
        return ""

    def _floor(self, node: Node) -> str:
        value = number(argument(node, 1, "min", node.kwargs.get("other")))
        if value is None or value > HUGE or len(node.args) > 2 or node.kwargs.keys() - {"min", "other"}:
            return f"{node.name} bounds the scores in a way that is not understood"
        self.bias.append(BiasStep("floor", value=value))
        return ""

    def _join_sink(self, node: Node, scores: Node) -> str:
        parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", 0)
        others = [part for part in parts if part is not scores]
        last = len(shape(scores)) - 1
        if len(parts) != 2 or len(others) != 1 or dim not in (-1, last) or not is_tensor(others[0]):
            return f"{node.name} joins the scores with something other than one sink"
        if self.shifted:
            return f"{node.name} joins a sink with scores that are shifted before"
        if not same_size(shape(others[0])[-1], 1):
            return f"{node.name} joins the scores with more than one sink"
        self.sink, self.sink_first = others[0], parts[1] is scores
        return ""


def number(value: object) -> float | None:
    """A Python number, or what a node that makes a constant of no dimensions holds; None for anything else."""
    if isinstance(value, Node) and is_tensor(value) and not shape(value):
        if is_call(value, (torch.full,)):
            value = argument(value, 1, "fill_value")
        elif is_call(value, (torch.tensor, torch.scalar_tensor)):
            value = argument(value, 0, "data", value.kwargs.get("s"))
    return float(value) if isinstance(value, int | float) else None


def is_conversion(node: Node) -> bool:
    """Whether `node` leaves values as they are but for their float dtype and their place in memory."""
    names = ("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone", "detach")
    if not is_call(node, (torch.clone, torch.detach), names):
        return False
    before, after = node.args[0].meta["example_value"], node.meta["example_value"]  # type: ignore[union-attr]
    return isinstance(after, torch.Tensor) and after.is_floating_point() and before.device == after.device
