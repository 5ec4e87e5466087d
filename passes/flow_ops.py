"""The operations through which values flow position by position (see `flow`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from .flow import TOKENS, Flow, Flows, NotShared, digest, handles, reshaped
from .tensors import expr, is_tensor

__all__: list[str] = []

_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "truediv", "div", "true_divide", "floordiv", "floor_divide", "pow", "neg", "abs"),
    *(
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "square",
        "sin",
        "cos",
        "tanh",
        "sigmoid",
        "erf",
        "sign",
        "remainder",
    ),
    *("relu", "relu6", "silu", "gelu", "mish", "elu", "leaky_relu", "softplus", "hardtanh", "hardswish", "logsigmoid"),
    *("clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul"),
    *("lt", "le", "gt", "ge", "eq", "ne", "and_", "or_", "logical_and", "logical_or", "logical_not", "invert", "mod"),
)
_CASTS = (
    *("to", "type", "float", "half", "bfloat16", "double", "long", "int", "bool", "type_as", "contiguous", "clone"),
    *("detach", "cpu"),
)


def _dim(dim: object, count: int) -> int:
    if not isinstance(dim, int):
        raise NotShared("a dimension is not a number")
    return dim % count


def _dims(given: Any, count: int) -> list[int]:
    dims = range(count) if given is None else given if isinstance(given, Sequence) else [given]
    return [_dim(dim, count) for dim in dims]


def _kept(flow: Flow, labels: Sequence[str]) -> Flow:
    return replace(flow, labels=tuple(labels))


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
    moved = _moved_index(flows, name, args) if not kwargs else None
    if moved is not None:
        return moved
    given = [*args, *(kwargs[key] for key in sorted(kwargs))]
    tensors = [item for item in given if is_tensor(item)]
    facts = [*sorted(kwargs), *("t" if is_tensor(item) else flows.scalar(item) for item in given)]
    operands = [flows.resolved(flows.of(tensor)) for tensor in tensors]
    return flows.made(node, name, operands, _broadcast(flows, node, tensors), *facts)


def _moved_index(flows: Flows, name: str, args: Sequence[Any]) -> Flow | None:
    """An index along the tokens plus or minus an integer, which may be a length."""
    if name not in ("add", "sub") or len(args) != 2:
        return None
    index, by = args if is_tensor(args[0]) else args[::-1]
    if is_tensor(by) or not is_tensor(index) or (name == "sub" and index is not args[0]):
        return None
    flow = flows.of(index)
    if isinstance(by, Node):
        by = by.meta.get("example_value")
    if flow.offset is None or isinstance(by, bool) or not isinstance(by, int | torch.SymInt):
        return None
    return replace(flow, offset=sympy.expand(flow.offset + (1 if name == "add" else -1) * flows.expr(by)))


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


@handles("mean", "sum", "amax", "amin", "var", "std", "norm", "softmax", "log_softmax")
def _reduce(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.resolved(flows.of(x))
    count = len(flow.labels)
    name = str(getattr(node.target, "__name__", node.target))
    if name == "norm":  # norm(p, dim)
        dims = _dims(kwargs.get("dim", args[1] if len(args) > 1 else None), count)
    else:
        dims = _dims(kwargs.get("dim", args[0] if args else None), count)
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
            if at + 2 <= len(flow.labels) and flows.sizes(tensor)[-at - 2] != 1:
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
    return _rows(flows, node, weight, ids)


def _rows(flows: Flows, node: Node, weight: Node, ids: Node) -> Flow:
    index = flows.resolved(flows.of(ids))
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


# -- other shapes of the same --------------------------------------------------------------------------------


@handles("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze")
def _view(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    if node.target == "view" and args and isinstance(args[0], torch.dtype):
        raise NotShared(f"{node.name} reads bits as another type")
    before, after = flows.sizes(x), flows.sizes(node)
    labels = reshaped(before, flow.labels, after, flows.num_rows, flows.num_tokens)
    return _kept(flow, labels)


@handles("transpose", "swapaxes")
def _transpose(flows: Flows, node: Node, x: Node, a: int, b: int) -> Flow:
    flow = flows.of(x)
    labels = list(flow.labels)
    a, b = _dim(a, len(labels)), _dim(b, len(labels))
    labels[a], labels[b] = labels[b], labels[a]
    return _kept(flow, labels)


@handles("permute")
def _permute(flows: Flows, node: Node, x: Node, *dims: Any) -> Flow:
    flow = flows.of(x)
    order = dims[0] if len(dims) == 1 and isinstance(dims[0], Sequence) else dims
    return _kept(flow, [flow.labels[_dim(dim, len(flow.labels))] for dim in order])


@handles("t")
def _t(flows: Flows, node: Node, x: Node) -> Flow:
    flow = flows.of(x)
    return _kept(flow, flow.labels[::-1])


@handles("expand", "expand_as", "broadcast_to")
def _expand(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> Flow:
    flow = flows.of(x)
    after = flows.sizes(node)
    return _kept(flow, flows.labelled(after, [""] * (len(after) - len(flow.labels)) + list(flow.labels)))


@handles("repeat_interleave")
def _repeat(flows: Flows, node: Node, x: Node, repeats: Any, dim: int | None = None, **kwargs: Any) -> Flow:
    flow = flows.resolved(flows.of(x))
    if is_tensor(repeats) or dim is None or flow.labels[dim]:
        raise NotShared(f"{node.name} repeats tokens")
    return flows.made(node, "repeat_interleave", [flow], flow.labels, _dim(dim, len(flow.labels)) - len(flow.labels))


@handles("getitem")
def _getitem(flows: Flows, node: Node, x: Any, index: Any) -> Any:
    value = flows.values.get(x)
    if isinstance(value, NotShared):
        raise value
    if isinstance(value, tuple):
        return value[index]
    flow = flows.of(x)
    if is_tensor(index):
        return _rows(flows, node, x, index)
    items = list(index) if isinstance(index, tuple) else [index]
    taken = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(flow.labels) - taken)
    else:
        items += [slice(None)] * (len(flow.labels) - taken)
    labels, facts, dim = [], [], 0
    for item in items:
        if item is None:
            labels.append("")
            continue
        label, size = flow.labels[dim], flows.sizes(x)[dim]
        dim += 1
        if isinstance(item, slice) and _whole(flows, item, size):
            labels.append(label)
        elif label or not isinstance(item, slice | int) or isinstance(item, bool):
            raise NotShared(f"{node.name} picks some of the positions")
        else:
            facts.append((dim - 1 - len(flow.labels), _bounds(flows, item)))
            labels += [""] * isinstance(item, slice)
    if not facts:
        return _kept(flow, labels)
    return flows.made(node, "getitem", [flows.resolved(flow)], labels, *facts)


def _whole(flows: Flows, item: slice, size: int) -> bool:
    if item.step not in (None, 1) or item.start not in (None, 0):
        return False
    stop = item.stop.meta.get("example_value") if isinstance(item.stop, Node) else item.stop
    return stop is None or (isinstance(stop, int | torch.SymInt) and flows.size(stop) == size)


def _bounds(flows: Flows, item: slice | int) -> object:
    if isinstance(item, int):
        return item
    return tuple(flows.scalar(bound) for bound in (item.start, item.stop, item.step))


@handles("split", "chunk", "unbind")
def _split(flows: Flows, node: Node, x: Node, *args: Any, **kwargs: Any) -> tuple[Flow, ...]:
    flow = flows.resolved(flows.of(x))
    name = str(getattr(node.target, "__name__", node.target))
    place = args[-1:] if name == "unbind" else args[1:2]
    dim = _dim(kwargs.get("dim", place[0] if place else 0), len(flow.labels))
    if flow.labels[dim]:
        raise NotShared(f"{node.name} picks some of the positions")
    parts = []
    for i, part in enumerate(node.meta["example_value"]):
        labels = [label for d, label in enumerate(flow.labels) if name != "unbind" or d != dim]
        sizes = tuple(map(flows.size, part.shape))
        how = digest(name, dim - len(flow.labels), i, sizes[dim] if name != "unbind" else 0, flow.digest)
        parts.append(Flow(flows.labelled(sizes, labels), how, flow.varies))
    return tuple(parts)


@handles("cat", "concat", "concatenate", "stack")
def _cat(flows: Flows, node: Node, tensors: Sequence[Node], dim: int = 0, axis: int | None = None) -> Flow:
    stacks = getattr(node.target, "__name__", "") == "stack"
    parts = [part for part in tensors if flows.sizes(part) != (0,)]
    operands = [flows.resolved(flows.of(part)) for part in parts]
    if len(operands) == 1 and not stacks:
        return operands[0]
    where = _dim(dim if axis is None else axis, len(flows.sizes(node)))
    labels = [list(flow.labels) for flow in operands]
    if stacks:
        for own in labels:
            own.insert(where, "")
    if any(own[where] for own in labels):
        raise NotShared(f"{node.name} joins tokens to others")
    if any(own != labels[0] for own in labels):
        raise NotShared(f"{node.name} joins tokens with a tensor of the call's length")
    return flows.made(node, "cat", operands, labels[0], where - len(flows.sizes(node)))
