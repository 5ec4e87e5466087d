"""Handlers of the operations that make or combine mask values. Each returns `at` for its node (see mask_program)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import sympy
import torch
import torch.nn.functional as F

from .mask_logic import FALSE, TRUE, Pred, conj, disj, leq, negate
from .mask_program import At, Index, Program, SymTensor, broadcast, handles
from .mask_values import NotUnderstood, Value, as_pred, cast, merged


def _choose(program: Program, out: SymTensor, when: SymTensor, yes: SymTensor, no: SymTensor) -> At:
    if when.dtype != torch.bool:
        raise NotUnderstood(f"condition of dtype {when.dtype}")

    def at(index: Index) -> Value:
        c = as_pred(when.at(broadcast(index, out.shape, when)))
        return choose(program, out, c, yes, broadcast(index, out.shape, yes), no, broadcast(index, out.shape, no))

    return at


def choose(
    program: Program, out: SymTensor, c: Pred, yes: SymTensor, yes_at: Index, no: SymTensor, no_at: Index
) -> Value:
    """yes[yes_at] where c holds, else no[no_at], in out's dtype. The branch not taken is never relied on."""
    if out.dtype == torch.bool:
        y = as_pred(yes.at(yes_at)) if c != FALSE else FALSE
        n = as_pred(no.at(no_at)) if c != TRUE else FALSE
        return disj(conj(c, y), conj(negate(c), n))
    y_cases = yes.cases(yes_at, out.dtype, program.sizes) if c != FALSE else ()
    n_cases = no.cases(no_at, out.dtype, program.sizes) if c != TRUE else ()
    return merged([(conj(c, g), v) for g, v in y_cases] + [(conj(negate(c), g), v) for g, v in n_cases])


# --- creation --------------------------------------------------------------------------------------


@handles((torch.arange,))
def _arange(program: Program, out: SymTensor, *args: object, **kwargs: object) -> At:
    if not args:
        raise NotUnderstood("torch.arange called by keyword")
    bounds = [*args, *(kwargs.pop(k) for k in ("end", "step") if k in kwargs)]
    if kwargs or len(bounds) > 3:
        raise NotUnderstood("arguments of torch.arange")
    numbers = [_integral(program.number(x)) for x in bounds]
    start, step = (numbers[0] if len(numbers) > 1 else sympy.S.Zero), (numbers[2] if len(numbers) > 2 else 1)
    return lambda index: ((TRUE, cast(sympy.expand(start + step * index[0]), out.dtype, program.sizes)),)


def _integral(number: sympy.Expr | float | bool) -> sympy.Expr:
    if isinstance(number, float) and number == int(number):
        return sympy.Integer(int(number))
    if not isinstance(number, sympy.Expr):
        raise NotUnderstood(f"{number} where an integer was expected")
    return number


def _filled(program: Program, out: SymTensor, value: object) -> At:
    x = program.tensor(value)
    if x.shape:
        raise NotUnderstood("filled with a tensor")
    return lambda _: x.cases((), out.dtype, program.sizes)


@handles((torch.ones, torch.ones_like), ("new_ones",))
def _ones(program: Program, out: SymTensor, *_: object, **size: object) -> At:
    return _filled(program, out, 1)


@handles((torch.zeros, torch.zeros_like), ("new_zeros",))
def _zeros(program: Program, out: SymTensor, *_: object, **size: object) -> At:
    return _filled(program, out, 0)


@handles((torch.full, torch.full_like), ("new_full",))
def _full(program: Program, out: SymTensor, *args: object, **kwargs: object) -> At:
    if "fill_value" not in kwargs and len(args) < 2:
        raise NotUnderstood("torch.full without a value")
    return _filled(program, out, kwargs["fill_value"] if "fill_value" in kwargs else args[-1])


@handles((torch.tensor, torch.scalar_tensor))
def _scalar(program: Program, out: SymTensor, data: object) -> At:
    if isinstance(data, list | tuple):
        raise NotUnderstood("a tensor of literals")
    return _filled(program, out, data)


# --- conversions -----------------------------------------------------------------------------------


@handles(
    (torch.clone, torch.detach),
    (
        *("to", "type", "type_as", "bool", "float", "double", "half", "bfloat16", "long", "int", "short"),
        *("cpu", "cuda", "clone", "contiguous", "detach"),
    ),
)
def _convert(program: Program, out: SymTensor, x: object, *_: object) -> At:
    source = program.tensor(x)
    return lambda index: source.cases(broadcast(index, out.shape, source), out.dtype, program.sizes)


# --- logic -----------------------------------------------------------------------------------------


def logic(combine: Callable[..., Pred], program: Program, out: SymTensor, *args: object) -> At:
    """combine over the operands as booleans."""
    operands = [program.tensor(a) for a in args]
    return lambda index: combine(*(as_pred(x.at(broadcast(index, out.shape, x))) for x in operands))


def _bitwise(combine: Callable[..., Pred], program: Program, out: SymTensor, *args: object) -> At:
    if out.dtype != torch.bool:
        raise NotUnderstood(f"bit operation on {out.dtype}")
    return logic(combine, program, out, *args)


def _xor(p: Pred, q: Pred) -> Pred:
    return disj(conj(p, negate(q)), conj(negate(p), q))


for _combine, _python, _name in (
    (conj, operator.and_, "and"),
    (disj, operator.or_, "or"),
    (_xor, operator.xor, "xor"),
    (negate, operator.invert, "not"),
):
    handles((getattr(torch, f"logical_{_name}"),), (f"logical_{_name}",))(partial(logic, _combine))
    handles((_python, getattr(torch, f"bitwise_{_name}")), (f"bitwise_{_name}",))(partial(_bitwise, _combine))


# --- selection -------------------------------------------------------------------------------------


@handles((torch.where,))
def _where(program: Program, out: SymTensor, condition: object, input: object, other: object) -> At:
    return _choose(program, out, program.tensor(condition), program.tensor(input), program.tensor(other))


@handles((torch.masked_fill,), ("masked_fill",))
def _masked_fill(program: Program, out: SymTensor, x: object, mask: object, value: object) -> At:
    return _choose(program, out, program.tensor(mask), program.tensor(value), program.tensor(x))


@handles((), ("where",))
def _where_method(program: Program, out: SymTensor, x: object, condition: object, other: object) -> At:
    return _where(program, out, condition, x, other)


def _triangle(upper: bool, program: Program, out: SymTensor, input: object, diagonal: object = 0) -> At:
    x, d, zero = program.tensor(input), program.integer(diagonal), program.tensor(0)

    def at(index: Index) -> Value:
        above = index[-1] - index[-2] - d  # tril keeps column - row <= diagonal
        return choose(program, out, leq(-above if upper else above), x, index, zero, ())

    return at


handles((torch.tril,), ("tril",))(partial(_triangle, False))
handles((torch.triu,), ("triu",))(partial(_triangle, True))


@handles((F.pad, torch._C._nn.pad))
def _pad(program: Program, out: SymTensor, input: object, pad: object, mode: str = "constant", value: object = 0) -> At:
    x, fill = program.tensor(input), program.tensor(0 if value is None else value)
    if mode != "constant" or not isinstance(pad, list | tuple):
        raise NotUnderstood("padding other than with a constant")
    before = [program.integer(p) for p in pad[::2]]

    def at(index: Index) -> Value:
        source, inside = list(index), []
        for i, amount in enumerate(before):
            d = len(index) - 1 - i
            source[d] = sympy.expand(index[d] - amount)
            inside += [leq(-source[d]), leq(source[d] + 1 - x.shape[d])]
        return choose(program, out, conj(*inside), x, tuple(source), fill, ())

    return at
