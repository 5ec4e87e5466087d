"""From an attention's K or V back to the cache: transposes and the many spellings of repeating KV heads."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod

import torch
from torch.fx import Node

from .tensors import argument, hint, is_call, same_size, shape

__all__ = ["MERGED", "TILED", "Heads", "moves_heads", "trace_heads"]

REPEAT = "R"  # the broadcast axis that repeating KV heads passes through
MERGED = "HR"  # KV heads times repeats, each KV head's copies next to each other
TILED = "RH"  # repeats times KV heads: all heads in a row, again and again
MERGES = (MERGED, TILED, "BH", "BHR")  # what may become one dimension
LONGEST_PATH = 50  # of nodes between a cache and its attention

_MUL = (operator.mul, torch.mul, torch.multiply)
_DIV = (operator.truediv, torch.div, torch.divide, torch.true_divide)


class Heads:
    """How the dimensions of an attention's K or V came from a cache.

    axes: by dimension; "HR" and "RH" are repeated heads, "BH" and "BHR" heads merged with the batch. repeats: of each.
    scale: what the values were multiplied with. converted: which node made a wider float of them, for people, or "".
    """

    def __init__(self, axes: str) -> None:
        self.axes: list[str] = list(axes)
        self.repeats = 1
        self.scale = 1.0
        self.converted = ""


def trace_heads(
    node: Node, is_site: Callable[[Node], bool], site_axes: Callable[[Node], str]
) -> tuple[Node, Heads] | str:
    """Follow `node` back to a cache; returns the cache's node and the path's meaning, or why there is none.

    Only operations that move or repeat whole heads are followed, and those that scale or widen all of their values.
    """
    path: list[Node] = []
    while not is_site(node):
        if node.op == "placeholder":
            return f"{node.name} does not come from a cache: it is a dense input of the graph (after a graph break?)"
        if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], Node):
            return f"{node.name} does not come from a cache"
        if len(path) == LONGEST_PATH:
            return f"{path[0].name} does not come from a cache"
        path.append(node)
        node = node.args[0]
    heads = Heads(site_axes(node))
    for step in reversed(path):
        fault = _follow(step, heads)
        if fault:
            return fault
    return node, heads


def _follow(node: Node, heads: Heads) -> str:
    """Apply one operation to `heads`; returns why it cannot be followed, or ''."""
    for matches, apply in _RULES:
        if matches(node):
            return _convert(node, heads) or apply(node, heads)
    return f"{node.name} ({node.target}) between cache and attention is not understood"


def moves_heads(node: Node) -> bool:
    """Whether `node` is one of the operations that `trace_heads` follows; none of them has an effect."""
    return any(matches(node) for matches, _ in _RULES)


def _no_change(node: Node, heads: Heads) -> str:
    return ""


def _convert(node: Node, heads: Heads) -> str:
    source = node.args[0]
    before, after = source.meta["example_value"], node.meta["example_value"]  # type: ignore[union-attr]
    if before.dtype == after.dtype and before.device == after.device:
        return ""
    text = f"{node.name} converts the cache to {after.dtype} on {after.device}"
    if before.device != after.device or torch.promote_types(before.dtype, after.dtype) != after.dtype:
        return text
    heads.converted = text
    return ""


def _scale(node: Node, heads: Heads) -> str:
    factor = float(node.args[1])  # type: ignore[arg-type]
    heads.scale *= factor if is_call(node, _MUL, ("mul", "multiply")) else 1 / factor
    return ""


def _is_scaled(node: Node) -> bool:
    number = len(node.args) == 2 and isinstance(node.args[1], int | float) and node.args[1] != 0 and not node.kwargs
    return number and is_call(node, (*_MUL, *_DIV), ("mul", "multiply", "div", "divide"))


def _turn(node: Node, heads: Heads) -> str:
    heads.axes[-2], heads.axes[-1] = heads.axes[-1], heads.axes[-2]
    return ""


def _swap(node: Node, heads: Heads) -> str:
    a = argument(node, 1, "dim0", node.kwargs.get("axis0"))
    b = argument(node, 2, "dim1", node.kwargs.get("axis1"))
    heads.axes[a], heads.axes[b] = heads.axes[b], heads.axes[a]
    return ""


def _permute(node: Node, heads: Heads) -> str:
    dims = node.args[1] if len(node.args) == 2 else node.args[1:]
    dims = node.kwargs.get("dims", dims)
    heads.axes = [heads.axes[dim] for dim in dims]  # type: ignore[union-attr]
    return ""


def _index(node: Node, heads: Heads) -> str:
    items = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    if any(item is not None and item is not Ellipsis and item != slice(None) for item in items):
        return f"{node.name} takes a part of the cache"
    axes: list[str] = []
    source = iter(heads.axes)
    rest = len(heads.axes) - sum(isinstance(item, slice) for item in items)
    for item in items:
        if item is None:
            axes.append(REPEAT)
        elif item is Ellipsis:
            axes += [next(source) for _ in range(rest)]
        else:
            axes.append(next(source))
    heads.axes = axes + list(source)
    return "" if heads.axes.count(REPEAT) <= 1 else f"{node.name} adds more than one dimension"


def _unsqueeze(node: Node, heads: Heads) -> str:
    dim = argument(node, 1, "dim")
    heads.axes.insert(dim if dim >= 0 else dim + len(heads.axes) + 1, REPEAT)
    return "" if heads.axes.count(REPEAT) == 1 else f"{node.name} adds more than one dimension"


def _expand(node: Node, heads: Heads) -> str:
    before, after = shape(node.args[0]), shape(node)  # type: ignore[arg-type]
    if len(before) != len(after):
        return f"{node.name} adds dimensions by expand"
    for axis, old, new in zip(heads.axes, before, after):
        if same_size(old, new):
            continue
        if axis != REPEAT or not isinstance(new, int):
            return f"{node.name} broadcasts the cache along {axis}"
        heads.repeats *= new
    return ""


def _reshape(node: Node, heads: Heads) -> str:
    """Only a merge of heads, with their repeats or with the batch, is understood, or no change at all."""
    before, after = shape(node.args[0]), shape(node)  # type: ignore[arg-type]
    count = len(before) - len(after) + 1  # of dimensions that become one
    for merge in MERGES if count > 1 else ():
        for at in range(len(after)):
            sizes = [*before[:at], prod(before[at : at + count]), *before[at + count :]]
            if "".join(heads.axes[at : at + count]) == merge and all(map(same_size, sizes, after)):
                heads.axes = [*heads.axes[:at], merge, *heads.axes[at + count :]]
                return ""
    if count == 1 and all(same_size(a, b) for a, b in zip(before, after)):
        return ""
    return f"{node.name} reshapes the cache in a way that is not a merge of heads"


def _repeat(node: Node, heads: Heads) -> str:
    """`x.repeat(1, n, 1, 1)`: all heads, n times."""
    counts = node.args[1] if isinstance(node.args[1], (list, tuple)) else node.args[1:]
    repeated = [dim for dim, count in enumerate(counts) if count != 1]
    if len(counts) != len(heads.axes) or any(heads.axes[dim] != "H" for dim in repeated):
        return f"{node.name} repeats something other than heads"
    for dim in repeated:
        times: object = counts[dim]
        if not isinstance(times, int):
            return f"{node.name} repeats heads a number of times that is not known"
        heads.axes[dim] = TILED
        heads.repeats *= times
    return ""


def _repeat_interleave(node: Node, heads: Heads) -> str:
    repeats, dim = argument(node, 1, "repeats"), argument(node, 2, "dim")
    if not isinstance(repeats, int) or dim is None or heads.axes[dim] != "H":
        return f"{node.name} repeats something other than heads"
    heads.axes[dim] = MERGED
    heads.repeats *= repeats
    return "" if hint(shape(node)[dim]) else f"{node.name} has no heads"


_RULES: list[tuple[Callable[[Node], bool], Callable[[Node, Heads], str]]] = [
    (lambda n: is_call(n, (torch.clone,), ("contiguous", "clone", "detach")), _no_change),
    (lambda n: is_call(n, (), ("to", "type_as", "float", "half", "bfloat16", "type")), _convert),
    (_is_scaled, _scale),
    (lambda n: is_call(n, (getattr,)) and n.args[1] == "mT", _turn),
    (lambda n: is_call(n, (torch.transpose, torch.swapaxes), ("transpose", "swapaxes", "swapdims")), _swap),
    (lambda n: is_call(n, (torch.permute,), ("permute",)), _permute),
    (lambda n: is_call(n, (operator.getitem,)), _index),
    (lambda n: is_call(n, (torch.unsqueeze,), ("unsqueeze",)), _unsqueeze),
    (lambda n: is_call(n, (), ("expand", "expand_as")), _expand),
    (lambda n: is_call(n, (torch.reshape, torch.flatten), ("reshape", "view", "flatten")), _reshape),
    (lambda n: is_call(n, (), ("repeat",)), _repeat),
    (lambda n: is_call(n, (torch.repeat_interleave,), ("repeat_interleave",)), _repeat_interleave),
]
