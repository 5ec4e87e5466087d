"""Handlers of the operations that only move mask values: views, indexing, concatenation."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

from .mask_logic import leq
from .mask_ops import choose
from .mask_program import INDICES, At, Index, Program, SymTensor, broadcast, handles, same
from .mask_values import NotUnderstood, Unknown, Value


def _checked(out: SymTensor, shape: Sequence[sympy.Expr]) -> None:
    if len(shape) != len(out.shape) or not all(map(same, shape, out.shape)):
        raise NotUnderstood(f"shape {tuple(out.shape)} where {tuple(shape)} was expected")


def _axis(dim: object, ndim: int) -> int:
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise NotUnderstood(f"dimension {dim}")
    return dim % ndim


@handles(
    (torch.reshape, torch.unsqueeze, torch.squeeze, torch.flatten, torch.unflatten),
    ("view", "reshape", "view_as", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten"),
)
def _unit_reshape(program: Program, out: SymTensor, x: object, *_: object, **__: object) -> At:
    """All of these keep row-major order; they are understood when they add or drop dimensions of size 1."""
    source = program.tensor(x)
    wide = [i for i, size in enumerate(source.shape) if size != 1]
    kept = [i for i, size in enumerate(out.shape) if size != 1]
    if source.dtype != out.dtype or len(wide) != len(kept):
        raise NotUnderstood("a view that is no insertion or removal of unit dimensions")
    if not all(same(source.shape[i], out.shape[j]) for i, j in zip(wide, kept, strict=True)):
        raise NotUnderstood("a view that mixes dimensions")
    origin = dict(zip(wide, kept, strict=True))
    return lambda index: source.at(
        tuple(index[origin[i]] if i in origin else sympy.S.Zero for i in range(len(source.shape)))
    )


@handles((torch.broadcast_to,), ("expand", "expand_as", "broadcast_to", "repeat"))
def _expand(program: Program, out: SymTensor, x: object, *_: object, **__: object) -> At:
    """For repeat too: a dimension of size 1, or one repeated once, which is all that broadcast lets through."""
    source = program.tensor(x)
    return lambda index: source.at(broadcast(index, out.shape, source))


def _permuted(out: SymTensor, source: SymTensor, order: Sequence[int]) -> At:
    _checked(out, [source.shape[d] for d in order])
    return lambda index: source.at(tuple(index[order.index(d)] for d in range(len(order))))


@handles((torch.permute,), ("permute",))
def _permute(program: Program, out: SymTensor, x: object, *dims: object) -> At:
    source = program.tensor(x)
    flat = dims[0] if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims
    return _permuted(out, source, [_axis(d, len(source.shape)) for d in flat])


@handles((torch.transpose, torch.swapaxes), ("transpose", "swapaxes"))
def _transpose(program: Program, out: SymTensor, x: object, dim0: object, dim1: object) -> At:
    source = program.tensor(x)
    order = list(range(len(source.shape)))
    a, b = _axis(dim0, len(order)), _axis(dim1, len(order))
    order[a], order[b] = order[b], order[a]
    return _permuted(out, source, order)


@handles((torch.t,), ("t",))
def _t(program: Program, out: SymTensor, x: object) -> At:
    return _transpose(program, out, x, 0, -1) if len(out.shape) == 2 else _expand(program, out, x)


@handles((builtins.getattr,))
def _getattr(program: Program, out: SymTensor, x: object, name: str) -> At:
    if name not in ("T", "mT") or len(out.shape) != 2:
        raise NotUnderstood(f"attribute {name}")
    return _transpose(program, out, x, 0, 1)


def _start(program: Program, start: object, size: sympy.Expr) -> sympy.Expr:
    """The first index a slice reads. (A stop only shortens the result, whose shape is known.)"""
    if start is None:
        return sympy.S.Zero
    first = program.integer(start)
    if program.nonnegative(first):
        return first  # beyond the end: nothing is read
    if first.is_negative and program.nonnegative(size + first):
        return sympy.expand(size + first)
    if first.is_negative and program.nonnegative(-size - first):
        return sympy.S.Zero
    raise NotUnderstood(f"the sign of slice start {first}")


def _position(program: Program, where: sympy.Expr, size: sympy.Expr) -> sympy.Expr:
    """A single index, counted from the front."""
    if program.nonnegative(where):
        return where
    if program.nonnegative(-where - 1):
        return sympy.expand(size + where)
    raise NotUnderstood(f"the sign of index {where}")


def _is_index_tensor(item: object) -> bool:
    return isinstance(item, Node) and isinstance(item.meta.get("example_value"), torch.Tensor)


def _spread(items: tuple[object, ...], ndim: int) -> list[object]:
    """items with an Ellipsis (or the end) written out as whole slices."""
    if sum(item is Ellipsis for item in items) > 1:
        raise NotUnderstood("two ellipses")
    whole = [slice(None)] * (ndim - sum(item is not None and item is not Ellipsis for item in items))
    at = next((i for i, item in enumerate(items) if item is Ellipsis), len(items))
    return [*items[:at], *whole, *items[at + 1 :]]


@handles((operator.getitem,), ("__getitem__",))
def _getitem(program: Program, out: SymTensor, x: object, item: object) -> At:
    source = program.tensor(x)
    # One entry per dimension of the source: (start, step, output position), a fixed index, or an index tensor.
    plan: list[tuple[sympy.Expr, int, int] | sympy.Expr | SymTensor] = []
    axes: list[SymTensor | int | None] = []  # dimensions before advanced indexing: kept source dim, new, or indexed
    for entry in _spread(item if isinstance(item, tuple) else (item,), len(source.shape)):
        if entry is None:
            axes.append(None)
            continue
        size = source.shape[len(plan)]
        if isinstance(entry, slice):
            step = 1 if entry.step is None else entry.step
            if not isinstance(step, int) or step < 1:
                raise NotUnderstood("slice step")
            axes.append(len(plan))
            plan.append((_start(program, entry.start, size), step, -1))
        elif _is_index_tensor(entry):
            tensor = program.tensor(entry)
            if tensor.dtype not in (torch.int64, torch.int32):
                raise NotUnderstood(f"index of dtype {tensor.dtype}")
            if tensor.shape:  # torch selects with a 0-d index as with a number
                axes.append(tensor)
            plan.append(tensor)
        else:
            plan.append(_position(program, program.integer(entry), size))
    tensors = [a for a in axes if isinstance(a, SymTensor)]
    if tensors and any(isinstance(p, SymTensor) and not p.shape for p in plan):
        raise NotUnderstood("an index of no dimensions beside others")
    rank = max((len(t.shape) for t in tensors), default=0)
    where = [i for i, a in enumerate(axes) if isinstance(a, SymTensor)]
    # Neighbouring index tensors leave their common dimensions in place, others put them first.
    first = 0 if not where or where[-1] - where[0] != len(where) - 1 else where[0]
    kept = [a for a in axes if not isinstance(a, SymTensor)]
    if len(kept) + rank != len(out.shape):
        raise NotUnderstood("the result of an index has other dimensions than expected")
    for i, a in enumerate(kept):
        if a is not None:
            start, step, _ = plan[a]  # type: ignore[misc]
            plan[a] = (start, step, i if i < first else i + rank)
    common = out.shape[first : first + rank]

    def at(index: Index) -> Value:
        picked = index[first : first + rank]
        place: list[sympy.Expr] = []
        lost: Unknown | None = None
        deps: set[sympy.Symbol] = set()
        for entry, size in zip(plan, source.shape, strict=True):
            if isinstance(entry, tuple):
                start, step, position = entry
                place.append(sympy.expand(start + step * index[position]))
            elif isinstance(entry, SymTensor):
                cases = entry.cases(broadcast(picked, common, entry), torch.int64, program.sizes)
                if len(cases) != 1 or isinstance(cases[0][1], Unknown):
                    lost = next((n for _, n in cases if isinstance(n, Unknown)), None)
                    if lost is None:
                        raise NotUnderstood("an index that depends on a condition")
                    deps |= lost.deps | {s for i in picked for s in i.free_symbols}
                else:
                    place.append(_position(program, cases[0][1], size))  # type: ignore[arg-type]
            else:
                place.append(entry)
        if lost is None:
            return source.at(tuple(place))
        deps |= {s for p in place for s in p.free_symbols}
        return program.unknown(out, index, deps & INDICES, f"{source.name} looked up by {lost.why}")

    return at


@handles((torch.narrow,), ("narrow",))
def _narrow(program: Program, out: SymTensor, x: object, dim: object, start: object, length: object) -> At:
    ndim = len(program.tensor(x).shape)
    item: list[object] = [slice(None)] * ndim
    item[_axis(dim, ndim)] = slice(start, None)
    return _getitem(program, out, x, tuple(item))


@handles((torch.select,), ("select",))
def _select(program: Program, out: SymTensor, x: object, dim: object, index: object) -> At:
    return _getitem(program, out, x, (slice(None),) * _axis(dim, len(out.shape) + 1) + (index,))


@handles((torch.index_select,), ("index_select",))
def _index_select(program: Program, out: SymTensor, x: object, dim: object, index: object) -> At:
    return _getitem(program, out, x, (slice(None),) * _axis(dim, len(out.shape)) + (index,))


@handles((torch.cat, torch.concat, torch.concatenate))
def _cat(program: Program, out: SymTensor, tensors: object, dim: object = 0) -> At:
    if not isinstance(tensors, list | tuple):
        raise NotUnderstood("cat of something that is no list")
    parts, axis = [program.tensor(t) for t in tensors], _axis(dim, len(out.shape))
    if any(len(p.shape) != len(out.shape) for p in parts):
        raise NotUnderstood("cat with an empty one-dimensional tensor")

    def piece(parts: list[SymTensor], index: Index) -> SymTensor:
        """A tensor of no dimensions that reads the right part."""

        def at(_: Index) -> Value:
            head, rest = parts[0], parts[1:]
            if not rest:
                return head.cases(index, out.dtype, program.sizes) if out.dtype != torch.bool else head.at(index)
            size = head.shape[axis]
            shifted = (*index[:axis], sympy.expand(index[axis] - size), *index[axis + 1 :])
            here = leq(index[axis] + 1 - size)
            return choose(program, out, here, head, index, piece(rest, shifted), ())

        return SymTensor(out.name, (), out.dtype, at)

    return lambda index: piece(parts, index).at(())


@handles((torch.hstack,))
def _hstack(program: Program, out: SymTensor, tensors: object) -> At:
    return _cat(program, out, tensors, 0 if len(out.shape) == 1 else 1)
