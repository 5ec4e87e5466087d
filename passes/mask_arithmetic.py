"""Handlers of arithmetic and comparisons on mask values (see mask_program)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import sympy
import torch

from .mask_logic import TRUE, conj, disj, negate
from .mask_ops import logic
from .mask_program import At, Index, Program, SymTensor, broadcast, handles
from .mask_values import Cases, NotUnderstood, Num, Value, arithmetic, compare, lift, merged


def _promoted(*operands: SymTensor) -> torch.dtype:
    """The dtype torch computes in: dimensions and Python scalars matter, so ask torch with empty stand-ins."""
    stand_ins = []
    for x in operands:
        if x.scalar:
            stand_ins.append({torch.bool: True, torch.int64: 1}.get(x.dtype, 1.0))
        else:
            stand_ins.append(torch.empty((0,) * len(x.shape), dtype=x.dtype, device="meta"))
    return torch.result_type(*stand_ins)


def _elementwise(
    program: Program, out: SymTensor, fn: Callable[..., Cases], operands: list[SymTensor], dtype: torch.dtype
) -> At:
    """fn over the operands' numbers, converted to dtype first."""

    def at(index: Index) -> Value:
        cases = [x.cases(broadcast(index, out.shape, x), dtype, program.sizes) for x in operands]
        return lift(fn, cases, (out.name, index))

    return at


def _binary(op: str, program: Program, out: SymTensor, a: object, b: object, alpha: object = 1) -> At:
    x, y = program.tensor(a), program.tensor(b)
    if alpha != 1:
        raise NotUnderstood(f"{op} with alpha")
    if out.dtype == torch.bool:  # torch: or, and; the rest is an error or not worth it
        if op not in ("add", "mul"):
            raise NotUnderstood(f"{op} of booleans")
        return logic(disj if op == "add" else conj, program, out, a, b)
    return _elementwise(
        program,
        out,
        lambda p, q: ((TRUE, arithmetic(op, p, q, out.dtype, program.sizes)),),
        [x, y],
        out.dtype,
    )


for _name in ("add", "sub", "mul", "floor_divide", "remainder"):
    _python = getattr(operator, {"floor_divide": "floordiv", "remainder": "mod"}.get(_name, _name))
    handles((_python, getattr(torch, _name)), (_name,))(partial(_binary, _name))
handles((torch.subtract,), ("subtract",))(partial(_binary, "sub"))
handles((torch.multiply,), ("multiply",))(partial(_binary, "mul"))


@handles((torch.rsub,), ("rsub",))
def _rsub(program: Program, out: SymTensor, a: object, b: object) -> At:
    return _binary("sub", program, out, b, a)


@handles((operator.neg, torch.neg), ("neg",))
def _neg(program: Program, out: SymTensor, x: object) -> At:
    return _binary("mul", program, out, x, -1)


def _compare(op: str, program: Program, out: SymTensor, a: object, b: object) -> At:
    x, y = program.tensor(a), program.tensor(b)

    def fn(p: Num, q: Num) -> Cases:
        truth = compare(op, p, q)
        return merged([(truth, sympy.S.One), (negate(truth), sympy.S.Zero)])

    return _elementwise(program, out, fn, [x, y], _compute_dtype(x, y))


def _compute_dtype(x: SymTensor, y: SymTensor) -> torch.dtype:
    dtype = _promoted(x, y)
    return torch.int64 if dtype == torch.bool else dtype  # booleans compare as 0 and 1


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    # Dynamo records some operators of some torch versions as calls of the special method
    handles((getattr(operator, _name), getattr(torch, _name)), (_name, f"__{_name}__"))(partial(_compare, _name))
for _name, _op in (("less", "lt"), ("less_equal", "le"), ("greater", "gt"), ("greater_equal", "ge")):
    handles((getattr(torch, _name),), (_name,))(partial(_compare, _op))


def _pick(op: str, program: Program, out: SymTensor, a: object, b: object) -> At:
    """The operand that compares as op says: le for the minimum, ge for the maximum."""

    def fn(p: Num, q: Num) -> Cases:
        first = compare(op, p, q)
        return merged([(first, p), (negate(first), q)])

    return _elementwise(program, out, fn, [program.tensor(a), program.tensor(b)], out.dtype)


handles((torch.minimum,), ("minimum",))(partial(_pick, "le"))
handles((torch.maximum,), ("maximum",))(partial(_pick, "ge"))


@handles((operator.abs, torch.abs, abs), ("abs", "__abs__"))
def _abs(program: Program, out: SymTensor, x: object) -> At:
    def fn(p: Num) -> Cases:
        positive = compare("ge", p, sympy.S.Zero)
        minus = arithmetic("mul", p, sympy.S.NegativeOne, out.dtype, program.sizes)
        return merged([(positive, p), (negate(positive), minus)])

    return _elementwise(program, out, fn, [program.tensor(x)], out.dtype)
