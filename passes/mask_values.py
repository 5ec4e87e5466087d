"""Values of one mask element: a predicate (bool tensors) or guarded numbers (all others), with torch's arithmetic.

A number is a sympy integer expression over sizes and indices, a Python float (an exact constant of the dtype
that is no small integer), LOW, or Unknown. Whatever cannot be computed exactly raises NotUnderstood.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from itertools import product
from typing import TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min

from .mask_logic import FALSE, TRUE, Leaf, Pred, Unknown, conj, disj, leq, negate

# No size, index or position reaches this; so int64 arithmetic with small coefficients cannot wrap around.
MAX_SIZE = 2**40
# A finite mask value counts as "masked" only from here down: added to any score that is itself far from
# overflow it vanishes exactly in the softmax. float16's minimum (-65504) is within reach of real scores, so
# it never counts.
HUGE = torch.finfo(torch.bfloat16).min
MAX_CASES = 24


class _Low:
    """A constant known only to be <= HUGE: finite, or -inf where the dtype cannot hold it."""

    def __repr__(self) -> str:
        return "LOW"


LOW = _Low()
Num: TypeAlias = sympy.Expr | float | _Low | Unknown
Cases: TypeAlias = tuple[tuple[Pred, Num], ...]  # exclusive and exhaustive guards
Value: TypeAlias = Pred | Cases
Sizes: TypeAlias = Mapping[sympy.Symbol, sympy.Expr]  # index symbol -> its exclusive upper bound


class NotUnderstood(Exception):
    """The reason why a value cannot be computed, for people."""


_EXACT_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def exact_range(dtype: torch.dtype) -> tuple[int, int]:
    """The integers that dtype holds exactly, without gaps."""
    if dtype in _EXACT_BITS:
        return -(2 ** _EXACT_BITS[dtype]), 2 ** _EXACT_BITS[dtype]
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        raise NotUnderstood(f"arithmetic in {dtype}")
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def interval(expr: sympy.Expr, sizes: Sizes) -> tuple[int, int]:
    """Integers lo <= expr <= hi for all indices in range and all sizes up to MAX_SIZE."""
    lo = hi = 0
    for term, coef in sympy.expand(expr).as_coefficients_dict().items():
        if not coef.is_Integer:
            raise NotUnderstood(f"non-integer coefficient in {expr}")
        top = 1
        for base, power in term.as_powers_dict().items() if term != 1 else ():
            if not (power.is_Integer and power > 0):
                raise NotUnderstood(f"power in {expr}")
            top *= _top(base, sizes) ** int(power)
        bottom = top if term == 1 else (0 if term.is_nonnegative else -top)
        lo += int(coef) * (bottom if coef > 0 else top)
        hi += int(coef) * (top if coef > 0 else bottom)
    return lo, hi


def _top(base: sympy.Expr, sizes: Sizes) -> int:
    if base in sizes:
        return max(int(sizes[base]) - 1, 0) if sizes[base].is_Integer else MAX_SIZE
    if base.is_Symbol:
        return MAX_SIZE
    if isinstance(base, FloorDiv):
        return max(map(abs, interval(base.args[0], sizes))) + 1
    if isinstance(base, Max | Min):
        return max(abs(end) for arg in base.args for end in interval(arg, sizes))
    raise NotUnderstood(f"the range of {base}")


def fits(expr: sympy.Expr, dtype: torch.dtype, sizes: Sizes) -> bool:
    """Whether `dtype` holds every value of `expr` exactly."""
    lo, hi = exact_range(dtype)
    a, b = interval(expr, sizes)
    return lo <= a and b <= hi


def constant(value: float, dtype: torch.dtype = torch.float64) -> Num:
    """A float that dtype holds; small integers become sympy's, so that they mix with sizes."""
    if math.isnan(value):
        raise NotUnderstood("a NaN in the mask")
    if math.isfinite(value) and value == int(value) and abs(value) <= exact_range(dtype)[1]:
        return sympy.Integer(int(value))
    return float(value)


def cast(num: Num, dtype: torch.dtype, sizes: Sizes) -> Num:
    """num as dtype holds it; raises when it would be wrapped, rounded or truncated."""
    if isinstance(num, Unknown):
        return Unknown(("cast", dtype, num.key), num.deps, num.why)
    if isinstance(num, sympy.Expr):
        if fits(num, dtype, sizes):
            return num
        if not (num.is_Integer and dtype.is_floating_point):
            raise NotUnderstood(f"{num} may overflow {dtype}")
        num = float(int(num))
    if not dtype.is_floating_point:
        raise NotUnderstood(f"{num} converted to {dtype}")
    if num is LOW:
        return LOW
    held = torch.tensor(num, dtype=torch.float64).to(dtype).item()
    if held == num:
        return constant(held, dtype)
    if num <= HUGE:
        return LOW  # compilers may keep the wider value, eager rounds to the minimum or -inf
    raise NotUnderstood(f"{num} is rounded in {dtype}")


_PYTHON: dict[str, Callable] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne")
}


def arithmetic(op: str, a: Num, b: Num, dtype: torch.dtype, sizes: Sizes) -> Num:
    """a op b ("add", "sub", "mul", "floor_divide", "remainder"), both of dtype already, neither Unknown."""
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        if op in ("floor_divide", "remainder"):
            if dtype.is_floating_point or not (b.is_Integer and b > 0):
                raise NotUnderstood(f"{op} by {b} in {dtype}")
            quotient = FloorDiv(a, b)
            return quotient if op == "floor_divide" else sympy.expand(a - b * quotient)
        result = sympy.expand(_PYTHON[op](a, b))
        if fits(result, dtype, sizes):
            return result
        if not (a.is_Integer and b.is_Integer and dtype.is_floating_point):
            raise NotUnderstood(f"{result} may overflow {dtype}")
    if op in ("floor_divide", "remainder"):
        raise NotUnderstood(f"{op} of {a} and {b}")
    if a is LOW or b is LOW:
        return _low(op, a, b)
    for x, y, swapped in ((a, b, False), (b, a, True)):
        # an unknown finite integer beside an infinity; multiplication would need its sign
        if isinstance(x, sympy.Expr) and not x.is_Integer:
            if op == "mul" or not math.isinf(y):
                raise NotUnderstood(f"{op} of {a} and {b}")
            return y if op == "add" or swapped else -y
    fn = getattr(torch, op)
    return constant(fn(torch.tensor(float(a), dtype=dtype), torch.tensor(float(b), dtype=dtype)).item(), dtype)


def _low(op: str, a: Num, b: Num) -> Num:
    """LOW plus zero, or plus another masked constant; everything else depends on which LOW it is."""
    if op == "add" and b is LOW:
        a, b = b, a
    masked = b is LOW or (isinstance(b, float) and b <= HUGE)
    if a is LOW and op in ("add", "sub") and (b == 0 or (op == "add" and masked)):
        return -math.inf if b == -math.inf else LOW
    raise NotUnderstood(f"{op} of {a} and {b}")


def compare(op: str, a: Num, b: Num) -> Pred:
    """The predicate a op b; neither is Unknown and both have the dtype in which torch compares."""
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        d = a - b
        if op in ("eq", "ne"):
            equal = conj(leq(d), leq(-d))
            return equal if op == "eq" else negate(equal)
        return {"le": leq(d), "lt": leq(d + 1), "ge": leq(-d), "gt": leq(1 - d)}[op]

    def stand_in(x: Num, other: Num) -> float:
        if x is LOW and (isinstance(other, sympy.Expr) or (isinstance(other, float) and other > HUGE)):
            return -math.inf  # same order as the real constant, for any number above HUGE
        if isinstance(x, sympy.Expr) and (x.is_Integer or other is LOW or math.isinf(other)):
            return float(x) if x.is_Integer else 0.0  # any finite integer compares alike with an infinity
        if isinstance(x, float):
            return x
        raise NotUnderstood(f"{a} compared with {b}")

    return TRUE if _PYTHON[op](stand_in(a, b), stand_in(b, a)) else FALSE


def as_cases(value: Value) -> Cases:
    """A bool as 0 and 1; numbers as they are."""
    if isinstance(value, tuple):
        return value
    return merged([(value, sympy.S.One), (negate(value), sympy.S.Zero)])


def as_pred(value: Value) -> Pred:
    """value != 0."""
    if not isinstance(value, tuple):
        return value
    parts = []
    for guard, num in value:
        if isinstance(num, Unknown):
            truth: Pred = Leaf(Unknown(("bool", num.key), num.deps, num.why))
        else:
            truth = TRUE if num is LOW else compare("ne", num, sympy.S.Zero)
        parts.append(conj(guard, truth))
    return disj(*parts)


def merged(cases: list[tuple[Pred, Num]]) -> Cases:
    """Drops impossible cases and joins those of equal value; raises when too many are left."""
    by_value: dict[Num, Pred] = {}
    for guard, num in cases:
        if guard != FALSE:
            by_value[num] = disj(by_value[num], guard) if num in by_value else guard
    if len(by_value) > MAX_CASES:
        raise NotUnderstood(f"more than {MAX_CASES} cases")
    return tuple((guard, num) for num, guard in by_value.items())


def lift(fn: Callable[..., Cases], operands: list[Cases], key: tuple[object, ...]) -> Cases:
    """fn over every combination of cases. A combination with an Unknown in it, or one that fn does not
    understand, becomes an Unknown of its own under key."""
    out: list[tuple[Pred, Num]] = []
    for i, combination in enumerate(product(*operands)):
        guard = conj(*(g for g, _ in combination))
        if guard == FALSE:
            continue
        nums = [n for _, n in combination]
        lost = [n for n in nums if isinstance(n, Unknown)]
        try:
            if not lost:
                out += [(conj(guard, g), n) for g, n in fn(*nums)]
                continue
            why = lost[0].why
        except NotUnderstood as error:
            why = str(error)
        deps = {s for n in nums for s in (n.deps if isinstance(n, Unknown) else getattr(n, "free_symbols", ()))}
        out.append((guard, Unknown((*key, i), frozenset(deps), why)))
    return merged(out)
