"""The operations through which values flow position by position (see `flow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from .flow import TOKENS, Flow, Flows, NotShared, axes, handles, made_name
from .tensors import expr, is_tensor

__all__ = ["looked_up"]

_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "truediv", "div", "true_divide", "floordiv", "floor_divide", "pow"),
    *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square", "sin", "cos", "tanh", "sigmoid"),
    *("erf", "sign", "remainder", "relu", "relu6", "silu", "gelu", "mish", "elu", "leaky_relu", "softplus"),
    *("hardtanh", "hardswish", "logsigmoid", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum"),
    *("where", "masked_fill", "lerp", "addcmul", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "logical_and"),
    *("logical_or", "logical_not", "invert", "mod"),
)
_CASTS = (
    *("to", "type", "float", "half", "bfloat16", "double", "long", "int", "bool", "type_as", "contiguous"),
    *("clone", "detach", "cpu"),
)


# -- element by element --------------------------------------------------------------------------------------


def _broadcast(flows: Flows, node: Node, tensors: Sequence[Node]) -> list[str]:
    sizes = flows.sizes(node)
    labels = [""] * len(sizes)
    for at in range(1, len(sizes) + 1):
        found, plain = set(), False
        for tensor in tensors:
            own = flows.of(tensor).labels
            if at <= len(own) and flows.sizes(tensor)[-at] != 1:
                found.add(own[-at])
                plain |= not own[-at]
        if len(found) > 1:
            raise NotShared(
                f"{node.name} joins tokens with a tensor of the call's length" if plain else f"{node.name} mixes rows"
            )
        labels[-at] = found.pop() if found else ""
    return labels


@handles(*_ELEMENTWISE)
def _elementwise(flows: Flows, node: Node, *args: Any, **kwargs: Any) -> Flow:
    name = getattr(node.target, "__name__", str(node.target))
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        raise NotShared(f"{node.name} writes in place")
    moved = _moved_index(flows, node, name, args) if not kwargs else None
    if moved is not None:
        return moved
    given = [*args, *(kwargs[key] for key in sorted(kwargs))]
    tensors = [item for item in given if is_tensor(item)]
    facts = [*sorted(kwargs), *("t" if is_tensor(item) else flows.scalar(item) for item in given)]
    operands = [flows.resolved(flows.of(tensor)) for tensor in tensors]
    return flows.made(node, name, operands, _broadcast(flows, node, tensors), *facts)


def _moved_index(flows: Flows, node: Node, name: str, args: Sequence[Any]) -> Flow | None:
    """An index along the tokens plus or minus an integer, which may be a length, or a counter."""
    if name not in ("add", "sub") or len(args) != 2:
        return None
    index, by = args if is_tensor(args[0]) else args[::-1]
    if is_tensor(by):
        return _counted_on(flows, name, node, flows.of(index), flows.of(by))
    if not is_tensor(index) or (name == "sub" and index is not args[0]):
        return None
    flow = flows.of(index)
    if isinstance(by, Node):
        by = by.meta.get("example_value")
    if flow.offset is None or isinstance(by, bool) or not isinstance(by, int | torch.SymInt):
        return None
    return replace(flow, offset=sympy.expand(flow.offset + (1 if name == "add" else -1) * flows.expr(by)))


def _counted_on(flows: Flows, name: str, node: Node, a: Flow, b: Flow) -> Flow | None:
    """The sum of an index along the tokens and of a counter, which is the same for all of them."""
    if a.offset is None or b.offset is None or name != "add" or not any(not any(each.labels) for each in (a, b)):
        return None
    labels = [""] * len(flows.sizes(node))
    if along := [each.labels for each in (a, b) if any(each.labels)]:
        labels[-len(along[0]) :] = along[0]
    return Flow(flows.labelled(flows.sizes(node), labels), b"", offset=sympy.expand(a.offset + b.offset))


_FRESH = {
    *_ELEMENTWISE,
    "linear",
    "addmm",
    "matmul",
    "mm",
    "bmm",
    "embedding",
    "softmax",
    "sum",
    "mean",
    "layer_norm",
} | {
    *("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
}
_IN_PLACE = ("iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_")


@handles(*_IN_PLACE)
def _in_place(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    """A write into a tensor that shares its memory with no other: whoever reads `x` later sees the result."""
    if kwargs or not _own(x) or any(user is not node and not _fresh(user) and user < node for user in x.users):
        raise NotShared(f"{node.name} writes in place")
    found = _elementwise(flows, node, x, *args)
    flows.values[x] = found
    flows.operands[x] = [*flows.operands[x], node]
    flows.written.add(node)
    return found


def _fresh(node: Node) -> bool:
    """Whether a node's result has memory of its own."""
    return made_name(node) in _FRESH and not node.kwargs.get("inplace") and not any(a is True for a in node.args)


def _own(x: Node) -> bool:
    """Whether a tensor has memory of its own, or is one of several that an operation made."""
    if made_name(x) == "getitem" and isinstance(x.args[0], Node):
        parts = [user.args[1] for user in x.args[0].users]
        return made_name(x.args[0]) == "topk" and parts.count(x.args[1]) == 1
    return _fresh(x)


@handles(*_CASTS)
def _cast(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    dtype = node.meta["example_value"].dtype
    if dtype == x.meta["example_value"].dtype:
        return flow
    if flow.offset is not None and dtype in (torch.int32, torch.int64):
        return flow
    return flows.made(node, "cast", [flows.resolved(flow)], flow.labels)


@handles("dropout")
def _dropout(flows: Flows, node: Node, x: Node, p: float = 0.5, training: bool = True, inplace: bool = False) -> Flow:
    if (training and p) or inplace:
        raise NotShared(f"{node.name} is random")
    return flows.of(x)


# -- over features -------------------------------------------------------------------------------------------


@handles("mean", "sum", "amax", "amin", "argmax", "argmin", "var", "std", "norm", "softmax", "log_softmax")
def _reduce(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.resolved(flows.of(x))
    count = len(flow.labels)
    name = str(getattr(node.target, "__name__", node.target))
    if name == "norm":  # norm(p, dim)
        dims = axes(kwargs.get("dim", args[1] if len(args) > 1 else None), count)
    else:
        dims = axes(kwargs.get("dim", args[0] if args else None), count)
    if any(flow.labels[dim] for dim in dims):
        raise NotShared(f"{node.name} joins all positions, or all rows")
    kept = len(flows.sizes(node)) == count
    labels = [label for dim, label in enumerate(flow.labels) if kept or dim not in dims]
    places = [dim - count for dim in dims]
    others = [flows.scalar(kwargs[key]) for key in sorted(kwargs) if key not in ("dim", "dtype", "_stacklevel")]
    first = [flows.scalar(args[0])] if name == "norm" and args else []
    return flows.made(node, name, [flow], labels, places, *others, *first)


@handles("layer_norm", "rms_norm")
def _norm(flows: Flows, node: Node, x: Node, shape: Sequence[int], *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    if any(flow.labels[len(flow.labels) - len(shape) :]):
        raise NotShared(f"{node.name} joins all positions")
    given = [*args, *(kwargs[key] for key in sorted(kwargs))]
    operands = [flow, *(_constant(flows, item) for item in given if is_tensor(item))]
    facts = [flows.scalar(item) for item in given if not is_tensor(item)]
    return flows.made(node, str(getattr(node.target, "__name__", "")), operands, flow.labels, *facts)


def _constant(flows: Flows, node: Node) -> Flow:
    flow = flows.resolved(flows.of(node))
    if flow.varies or any(flow.labels):
        raise NotShared(f"{node.name} depends on the tokens where weights were expected")
    return flow


# -- products ------------------------------------------------------------------------------------------------


@handles("linear")
def _linear(flows: Flows, node: Node, x: Node, weight: Node, bias: Node | None = None) -> Flow:
    flow = flows.resolved(flows.of(x))
    if flow.labels[-1]:
        raise NotShared(f"{node.name} joins all positions")
    operands = [flow, *(_constant(flows, item) for item in (weight, bias) if item is not None)]
    return flows.made(node, "linear", operands, [*flow.labels[:-1], ""])


@handles("addmm")
def _addmm(flows: Flows, node: Node, bias: Node, x: Node, weight: Node, **kwargs: Any) -> Flow:
    flow = flows.resolved(flows.of(x))
    if kwargs or flow.labels[-1]:
        raise NotShared(f"{node.name} joins all positions")
    operands = [flow, _constant(flows, weight), _constant(flows, bias)]
    return flows.made(node, "addmm", operands, [*flow.labels[:-1], ""])


@handles("matmul", "mm", "bmm")
def _matmul(flows: Flows, node: Node, x: Node, y: Node) -> Flow:
    a, b = flows.resolved(flows.of(x)), flows.resolved(flows.of(y))
    if len(a.labels) < 2 or len(b.labels) < 2 or a.labels[-1] or b.labels[-2]:
        raise NotShared(f"{node.name} joins all positions")
    labels = [""] * (len(flows.sizes(node)) - 2)
    for at in range(1, len(labels) + 1):
        found = set()
        for flow, tensor in ((a, x), (b, y)):
            if at + 2 > len(flow.labels) or flows.sizes(tensor)[-at - 2] == 1:
                continue
            if tensor.meta["example_value"].stride(-at - 2) != 0:  # else it was expanded: equal for all rows
                found.add(flow.labels[-at - 2])
        if len(found) > 1:
            raise NotShared(f"{node.name} mixes rows or positions")
        labels[-at] = found.pop() if found else ""
    return flows.made(node, "matmul", [a, b], [*labels, a.labels[-2], b.labels[-1]])


# -- look-ups ------------------------------------------------------------------------------------------------


@handles("embedding")
def _embedding(flows: Flows, node: Node, ids: Node, weight: Node, *args: Any, **kwargs: Any) -> Flow:
    if any(flows.scalar(item) for item in (*args[1:2], kwargs.get("max_norm"))):  # it rescales the weights in place
        raise NotShared(f"{node.name} has a max_norm")
    return looked_up(flows, node, weight, flows.of(ids))


@handles("index_select")
def _index_select(flows: Flows, node: Node, x: Node, dim: int, index: Node) -> Flow:
    if dim != 0:
        raise NotShared(f"{node.name} picks some of the features")
    return looked_up(flows, node, x, flows.of(index))


def looked_up(flows: Flows, node: Node, weight: Node, ids: Flow) -> Flow:
    """Rows of a weight, by index."""
    index = flows.resolved(ids)
    rest = len(flows.sizes(weight)) - 1
    return flows.made(node, "embedding", [_constant(flows, weight), index], [*index.labels, *[""] * rest])


@handles("arange")
def _arange(flows: Flows, node: Node, *args: Any, **kwargs: Any) -> Flow:
    first: Any = kwargs.get("start", args[0] if len(args) > 1 else 0)
    step = kwargs.get("step", args[2] if len(args) > 2 else 1)
    first = first.meta["example_value"] if isinstance(first, Node) else first
    (size,) = flows.sizes(node)
    if step == 1 and size in (flows.num_tokens, 1) and isinstance(first, int | torch.SymInt):
        labels = flows.labelled((size,), (TOKENS,))
        return Flow(labels, b"", offset=flows.expr(first))
    if any(isinstance(item, Node) or expr_varies(item) for item in (*args, *kwargs.values())):
        raise NotShared(f"{node.name} counts something else than the new tokens")
    return flows.made(node, "arange", [], [""], *args, *(kwargs.get(key) for key in ("start", "end", "step")))


def expr_varies(item: object) -> bool:
    """Whether an argument is a length."""
    return isinstance(item, torch.SymInt) and bool(expr(item).free_symbols)


@handles("tensor", "zeros", "ones", "full")
def _made(flows: Flows, node: Node, *args: Any, **kwargs: Any) -> Flow:
    sizes = flows.sizes(node)
    if any(isinstance(item, Node) for item in node.all_input_nodes) or any(expr_varies(s) for s in _shape(node)):
        raise NotShared(f"{node.name} has the call's length")
    return flows.made(node, str(getattr(node.target, "__name__", "")), [], [""] * len(sizes), *args)


def _shape(node: Node) -> Sequence[Any]:
    return node.meta["example_value"].shape
