"""flex_attention as attention written by hand: its score and mask functions become operations on index tensors."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .emit import Emitter
from .mask_program import FUNCTIONS, METHODS
from .symbols import UnknownSize
from .tensors import hint, is_call, is_tensor, shape

__all__ = ["Lowered", "NotLowered", "is_flex_attention", "lower"]

NO_BLOCKS = 1 << 30  # the block size of a block mask that hides nothing
_ELEMENTWISE = (operator.pow, torch.pow, torch.exp, torch.log, torch.sqrt, torch.tanh, torch.clamp, operator.truediv)
_CREATED = ("new_ones", "new_zeros", "new_full")


class NotLowered(Exception):
    """Why a flex_attention cannot be written by hand."""


@dataclass
class Lowered:
    """A flex_attention, and the same attention written by hand, which has taken its place.

    scores: the product of queries and keys. inserted: the nodes that were added, in order; others may share them.
    """

    flex: Node
    result: Node
    scores: Node
    output: Node
    inserted: list[Node]

    def undo(self) -> Node:
        """Put the flex_attention back; returns its node. Those that were lowered later go first."""
        self.output.replace_all_uses_with(self.result)
        _erase(self.inserted)
        return self.flex

    def commit(self, mask: Node | None) -> None:
        """Remove the flex_attention, and what was added for nothing; `mask` stays."""
        _erase([self.flex, self.result])
        _erase([node for node in self.inserted if node is not mask])


def _erase(nodes: list[Node]) -> None:
    for node in reversed(nodes):
        if not node._erased and not node.users:
            node.graph.erase_node(node)


def is_flex_attention(node: Node) -> bool:
    """Whether `node` calls flex_attention."""
    return is_call(node, (torch.ops.higher_order.flex_attention,))


def lower(gm: GraphModule, flex: Node, known: dict[str, Node] | None = None) -> Lowered:
    """Write `flex` by hand, in its place. Raises `NotLowered` and leaves the graph as it was.

    known: what was inserted for others, and holds the same values here: layers share their masks.
    """
    used = [user for user in flex.users if user.users]
    if len(used) != 1 or not is_call(used[0], (operator.getitem,)) or used[0].args[1] != 0:
        raise NotLowered("its log-sum-exp or its maximum is read, too")
    for user in [user for user in flex.users if not user.users]:
        gm.graph.erase_node(user)
    emit = Emitter(gm.graph, flex, known)
    try:
        scores, output = _write(gm, flex, emit)
    except (NotLowered, UnknownSize) as reason:
        _erase(emit.inserted)
        raise NotLowered(str(reason)) from None
    output.meta = {**used[0].meta, **output.meta}
    used[0].replace_all_uses_with(output)
    return Lowered(flex, used[0], scores, output, emit.inserted)


def _write(gm: GraphModule, flex: Node, emit: Emitter) -> tuple[Node, Node]:
    query, key, value, score_mod, block_mask, scale, _, score_args, mask_args = flex.args
    assert isinstance(query, Node) and isinstance(key, Node) and isinstance(value, Node)
    heads, groups = hint(shape(query)[1]), hint(shape(key)[1])
    grouped = (groups, heads // groups)
    rows = emit.method("unflatten", query, 1, grouped)
    columns = emit.method("transpose", emit.method("unsqueeze", key, 2), -2, -1)
    product = emit(torch.matmul, rows, columns)
    scores = emit(operator.mul, emit.method("flatten", product, 1, 2), scale)
    index = _indices(emit, query, key)
    scores = _inline(gm, score_mod, emit, [scores, *index, *score_args])
    visible = _visible(gm, block_mask, mask_args, emit, index)
    if visible is not None:
        scores = emit(torch.where, visible, scores, float("-inf"))
    weights = emit.method("unflatten", emit(F.softmax, scores, dim=-1), 1, grouped)
    if weights.meta["example_value"].dtype != value.meta["example_value"].dtype:
        weights = emit.method("to", weights, value.meta["example_value"].dtype)
    output = emit(torch.matmul, weights, emit.method("unsqueeze", value, 2))
    return product, emit.method("flatten", output, 1, 2)


def _indices(emit: Emitter, query: Node, key: Node) -> list[Node]:
    """Index tensors of batch, head, query and key, each along its own of four dimensions."""
    result = []
    for dim, size in enumerate((*shape(query)[:3], shape(key)[2])):
        index = emit(torch.arange, emit.size(size), dtype=torch.int64, device=emit.device(query))
        result.append(emit.method("view", index, *(-1 if dim == other else 1 for other in range(4))))
    return result


def _visible(
    gm: GraphModule, block_mask: tuple[object, ...], others: tuple[object, ...], emit: Emitter, index: list[Node]
) -> Node | None:
    """Which keys the block mask shows: those of full blocks, and in listed blocks those that its function shows."""
    partial_count, partial_index, full_count, full_index = block_mask[2:6]
    q_size, kv_size, function = block_mask[-3:]
    if not (isinstance(q_size, int) and isinstance(kv_size, int)):
        raise NotLowered("the block size of its mask varies")
    visible = _inline(gm, function, emit, [*index, *others])
    whole = q_size >= NO_BLOCKS and kv_size >= NO_BLOCKS
    if whole:
        return None if is_call(visible, (), ("new_ones",)) else visible
    at = [emit(operator.floordiv, x, size) for x, size in zip(index[2:], (q_size, kv_size))]
    visible = emit(operator.and_, visible, _listed(emit, partial_count, partial_index, at))
    if full_count is not None:
        visible = emit(operator.or_, visible, _listed(emit, full_count, full_index, at))
    return visible


def _listed(emit: Emitter, count: object, index: object, at: list[Node]) -> Node:
    """Bool [B, H, Q, S]: whether the block of a query and a key is among the first `count` [B, H, R] of `index`
    [B, H, R, C]. at: the blocks' rows and columns."""
    position = emit(operator.sub, emit.method("cumsum", emit(torch.ones_like, index), -1), 1)
    real = emit(operator.lt, position, emit.method("unsqueeze", count, -1))
    equal = emit(operator.eq, emit.method("unsqueeze", index, -1), emit.method("unsqueeze", position, -2))
    listed = emit.method("any", emit(operator.and_, equal, emit.method("unsqueeze", real, -1)), -2)  # [B, H, R, C]
    row, column = (emit.method("view", x, *shape_) for x, shape_ in zip(at, ((-1, 1), (1, -1))))
    return emit(operator.getitem, listed, (slice(None), slice(None), row, column))


def _inline(gm: GraphModule, function: object, emit: Emitter, arguments: list[object]) -> Node:
    """The operations of a function of scalars, on tensors that are broadcast to each other; returns its result."""
    body = getattr(gm, str(function.target)) if isinstance(function, Node) and function.op == "get_attr" else None
    if not isinstance(body, GraphModule):
        raise NotLowered("its score or mask function is not a graph")
    values: dict[Node, Any] = {}
    given = iter(arguments)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        if node.op == "output":
            (result,) = torch.fx.map_arg(node.args, lambda n: values[n])
            result = result[0] if isinstance(result, tuple) else result
            if not isinstance(result, Node):
                raise NotLowered("its score or mask function gives a constant")
            return result
        _check(node)
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        values[node] = (
            emit.method(node.target, *args, **kwargs)
            if node.op == "call_method"
            else emit(node.target, *args, **kwargs)
        )
    raise NotLowered("its score or mask function gives nothing")


def _check(node: Node) -> None:
    """Raise unless a node on scalars means the same, element by element, on tensors that are broadcast."""
    value = node.meta.get("example_value")
    known = node.target in (METHODS if node.op == "call_method" else FUNCTIONS)
    elementwise = known or node.target in _ELEMENTWISE or node.target in _CREATED
    scalar = not isinstance(value, torch.Tensor) or value.dim() == 0
    moved = [n for n in node.all_input_nodes if is_tensor(n) and len(shape(n))]  # buffers, which only indexing reads
    indexed = is_call(node, (operator.getitem,))
    if not elementwise or not scalar or node.op not in ("call_function", "call_method") or (moved and not indexed):
        raise NotLowered(f"{node.name} ({node.target}) in its score or mask function is not understood")
