"""Attention written by hand: from the product of queries and keys over the softmax to the product with the values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from .products import Product, output_product, score_product
from .score_form import ScoreForm, is_conversion
from .tensors import argument, is_call, is_tensor, same_size, shape

__all__ = ["HandWritten", "follow_scores"]

_SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax)
_SUBTRACT = (operator.sub, operator.isub, torch.sub, torch.subtract)
_LONGEST = 60  # operations from one product to the other


@dataclass
class HandWritten:
    """One attention written by hand, as far as it is understood.

    scores: the product of queries and keys, and what happens to it up to the softmax. output: the product with the
    values. chain: all its nodes, in the graph's order. fault: why it cannot be one operation, or ''.
    """

    scores: ScoreForm
    output: Product
    chain: list[Node]
    fault: str

    @property
    def summary(self) -> str:
        """What it is, for people."""
        parts = [f"softcap {self.scores.softcap:g}"] if self.scores.softcap is not None else []
        parts += ["sinks"] if self.scores.sink is not None else []
        return "by hand" + (": " + ", ".join(parts) if parts else "")


def follow_scores(node: Node, is_key: Callable[[Product], bool]) -> HandWritten | None:
    """What `node` starts, if it is the product of queries and keys of an attention; None if it is anything else.

    is_key: whether the right operand of a product is a cache of keys. If it is, what is not understood on the way to
    the product with the values becomes a fault; if it is not, whatever is not understood is no attention.
    """
    product = score_product(node)
    if product is None:
        return None
    walk = _Walk(product)
    lenient = None
    while not walk.done:
        fault = walk.step()
        if walk.lost:
            return None
        if fault:
            lenient = is_key(product) if lenient is None else lenient
            if not lenient:
                return None
            walk.fault = walk.fault or fault
    assert walk.output is not None
    return HandWritten(walk.scores, walk.output, walk.chain, walk.fault)


class _Walk:
    """A walk over the readers of one product. `step` takes in the next one."""

    def __init__(self, product: Product) -> None:
        self.scores = ScoreForm(product)
        self.chain = [product.node]
        self.output: Product | None = None
        self.fault = ""
        self.lost = False
        self._normalized = False  # past the softmax
        self._dropped = False  # past the cut that drops the sink's weight

    @property
    def done(self) -> bool:
        return self.lost or self.output is not None

    def step(self) -> str:
        """Go on to the next reader; returns why it is not understood, or ''. It may leave the walk `lost` or `done`."""
        node = self.chain[-1]
        following, fault = self._reader(node)
        self.lost = following is None or not is_tensor(following) or len(self.chain) > _LONGEST
        if self.lost:
            return ""
        assert following is not None
        self.chain.append(following)
        own = self._weigh(following, node) if self._normalized else self._score(following, node)
        fault = fault or own
        if fault and len(shape(following)) < 3:
            self.lost = True
        return fault

    def _reader(self, node: Node) -> tuple[Node | None, str]:
        """Who reads `node` next, beside the maximum that is subtracted from it; and who else does, as a fault."""
        readers = [user for user in node.users if user.op != "output"]
        for user in readers:
            maximum = _subtracted_maximum(user, node)
            if maximum and set(readers) == {user, maximum[0]}:
                self.chain += maximum
                return user, ""
        others = [user for user in node.users if user is not (readers[0] if readers else None)]
        what = "weights" if self._normalized else "scores"
        return (readers[0] if readers else None), f"{others[0].name} reads the {what}, too" if others else ""

    def _score(self, node: Node, scores: Node) -> str:
        if is_call(node, _SOFTMAX, ("softmax",)):
            self._normalized = True
            dim = argument(node, 1, "dim")
            return "" if dim in (-1, len(shape(node)) - 1) else f"{node.name} is a softmax over another dimension"
        if _subtracted_maximum(node, scores):
            self.scores.shifted = True
            return ""
        if score_product(node) is not None or is_call(node, (F.linear,)):
            self.lost = True
        return self.scores.follow(node, scores)

    def _weigh(self, node: Node, weights: Node) -> str:
        product = output_product(node, weights)
        if product is not None:
            self.output = product
            if self.scores.sink is not None and not self._dropped:
                return "the weight of its sink is never dropped"
            return "" if product.lead == self.scores.lead else f"{node.name} reads other heads than there are"
        if is_conversion(node) or _no_dropout(node):
            return ""
        if is_call(node, (torch.reshape, torch.flatten, torch.unflatten), ("view", "reshape", "flatten", "unflatten")):
            return self.scores.regroup(node)
        if self._drops_sink(node):
            self._dropped = True
            return ""
        if is_call(node, (torch.nan_to_num,), ("nan_to_num",)) and len(node.args) == 1 and not node.kwargs:
            return ""
        if score_product(node) is not None:
            self.lost = True
        return f"{node.name} changes the weights in a way that is not understood"

    def _drops_sink(self, node: Node) -> bool:
        if self.scores.sink is None or self._dropped or not is_call(node, (operator.getitem,)):
            return False
        items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        *lead, last = items
        if not isinstance(last, slice) or last.step is not None or any(x not in (Ellipsis, slice(None)) for x in lead):
            return False
        if Ellipsis not in lead and len(items) != len(shape(node)):
            return False
        if not same_size(shape(node)[-1], shape(self.scores.product.node)[-1]):
            return False
        return (last.start == 1) if self.scores.sink_first else last.start in (None, 0)


def _no_dropout(node: Node) -> bool:
    if not is_call(node, (F.dropout, torch.dropout)):
        return False
    p, training = argument(node, 1, "p", 0.5), argument(node, 2, "training", argument(node, 2, "train", True))
    return p == 0 or training is False


def _subtracted_maximum(node: Node, scores: Node) -> list[Node]:
    """The nodes that compute the maximum over the keys which `node` subtracts from `scores`; [] if it does not."""
    if (
        not is_call(node, _SUBTRACT, ("sub", "sub_"))
        or len(node.args) != 2
        or node.kwargs
        or node.args[0] is not scores
    ):
        return []
    found: list[Node] = []
    source = node.args[1]
    while isinstance(source, Node) and len(source.users) == 1:
        found.insert(0, source)
        if is_call(source, (torch.max, torch.amax), ("max", "amax")):
            dims = (-1, len(shape(scores)) - 1)
            right = argument(source, 1, "dim") in dims and argument(source, 2, "keepdim", False) is True
            return found if right and source.args[0] is scores else []
        if not is_call(source, (operator.getitem, getattr, torch.detach), ("detach",)):
            return []
        if is_call(source, (operator.getitem, getattr)) and source.args[1] not in (0, "values"):
            return []
        source = source.args[0]
    return []
