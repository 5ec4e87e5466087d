"""Predicates over integers, and a refuter for them.

A predicate is in negation normal form: `Leq(e)` means the integer expression e is <= 0, `Leaf` is a boolean
nothing is known about, `And`/`Or` combine them. `refute` is the only source of truth in the mask prover: it
answers True only when no assignment of integers and leaves satisfies all predicates. It relaxes (reals for
integers, a fresh variable for every non-linear term, leaves free), so True is always right and False means
"not proven".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, lcm

import sympy
from torch.utils._sympy.functions import FloorDiv

MAX_ROWS = 300  # Fourier-Motzkin gives up (not proven) beyond this many inequalities
MAX_BRANCHES = 200  # and the case analysis beyond this many cases


@dataclass(frozen=True)
class Unknown:
    """A value that is not understood. Equal keys mean equal values; `deps` are the index symbols it may vary with."""

    key: tuple[object, ...]
    deps: frozenset[sympy.Symbol] = field(compare=False)
    why: str = field(compare=False)


@dataclass(frozen=True)
class Leq:
    """expr <= 0, for an integer-valued expr."""

    expr: sympy.Expr


@dataclass(frozen=True)
class Leaf:
    """An unknown boolean, or its negation."""

    unknown: Unknown
    positive: bool = True


@dataclass(frozen=True)
class And:
    """All of `args` hold. Without any: true."""

    args: tuple[Pred, ...]


@dataclass(frozen=True)
class Or:
    """One of `args` holds. Without any: false."""

    args: tuple[Pred, ...]


Pred = Leq | Leaf | And | Or
TRUE, FALSE = And(()), Or(())


def leq(expr: sympy.Expr) -> Pred:
    """The predicate expr <= 0, folded when expr is a number."""
    expr = sympy.expand(expr)
    if expr.is_number:
        return TRUE if expr <= 0 else FALSE
    return Leq(expr)


def conj(*preds: Pred) -> Pred:
    """All of `preds`, simplified."""
    return _joined(And, preds, FALSE)


def disj(*preds: Pred) -> Pred:
    """One of `preds`, simplified."""
    return _joined(Or, preds, TRUE)


def _joined(kind: type[And | Or], preds: Iterable[Pred], decisive: Pred) -> Pred:
    """decisive: the predicate that decides about the whole; one that is joined to its own negation does, too."""
    args: dict[Pred, None] = {}
    for p in preds:
        args.update(dict.fromkeys(p.args if isinstance(p, kind) else (p,)))
    if decisive in args or any(negate(p) in args for p in args if isinstance(p, Leq | Leaf)):
        return decisive
    return next(iter(args)) if len(args) == 1 else kind(tuple(args))


@lru_cache(maxsize=4096)
def negate(p: Pred) -> Pred:
    """The opposite of `p`, in negation normal form again."""
    if isinstance(p, Leq):
        return leq(1 - p.expr)  # integers: not (e <= 0) is e >= 1
    if isinstance(p, Leaf):
        return Leaf(p.unknown, not p.positive)
    return (disj if isinstance(p, And) else conj)(*map(negate, p.args))


def atoms(p: Pred) -> Iterable[Leq | Leaf]:
    """Every atom of p, in order, with repetitions."""
    if isinstance(p, Leq | Leaf):
        yield p
    else:
        for arg in p.args:
            yield from atoms(arg)


@lru_cache(maxsize=4096)
def linear(expr: sympy.Expr) -> tuple[dict[sympy.Expr, int], int]:
    """expr as integer coefficients of its monomials and a constant, scaled by a positive number if need be."""
    terms = dict(sympy.expand(expr).as_coefficients_dict())
    scale = lcm(*(int(sympy.denom(c)) for c in terms.values())) if terms else 1
    const = int(terms.pop(sympy.S.One, 0) * scale)
    return {t: int(c * scale) for t, c in terms.items() if c != 0}, const


def _facts(term: sympy.Expr) -> Iterable[sympy.Expr]:
    """What is known of one monomial, each as expr <= 0. Sizes are only ever assumed to be non-negative."""
    if term.is_nonnegative:
        yield -term
    if isinstance(term, FloorDiv) and term.args[1].is_Integer and term.args[1] > 0:
        base, divisor = term.args
        yield divisor * term - base
        yield base - divisor * term - divisor + 1


@lru_cache(maxsize=8192)
def infeasible(exprs: frozenset[sympy.Expr]) -> bool:
    """True only if no integers make every expr <= 0."""
    index: dict[sympy.Basic, int] = {}
    todo, rows = list(exprs), set()
    systems = []
    while todo:
        coefs, const = linear(todo.pop())
        systems.append((coefs, const))
        for term in coefs:
            if term not in index:
                index[term] = len(index)
                todo.extend(_facts(term))
    for coefs, const in systems:
        row = [0] * len(index)
        for term, coef in coefs.items():
            row[index[term]] = coef
        rows.add((tuple(row), const))
    return _fourier_motzkin(rows, len(index))


def _tightened(rows: Iterable[tuple[tuple[int, ...], int]]) -> dict[tuple[int, ...], int] | None:
    """Rows divided by their gcd with the constant rounded up (exact for integers); None for a contradiction."""
    kept: dict[tuple[int, ...], int] = {}
    for row, const in rows:
        g = gcd(*row)
        if g == 0:
            if const > 0:
                return None
            continue
        key, bound = tuple(c // g for c in row), -(-const // g)
        kept[key] = max(bound, kept.get(key, bound))
    return kept


def _fourier_motzkin(rows: Iterable[tuple[tuple[int, ...], int]], n: int) -> bool:
    system = _tightened(rows)
    left = set(range(n))
    while system is not None and left:
        if len(system) > MAX_ROWS:
            return False

        def cost(v: int, rows: dict[tuple[int, ...], int] = system) -> int:
            return sum(r[v] > 0 for r in rows) * sum(r[v] < 0 for r in rows)

        var = min(left, key=cost)
        left.remove(var)
        pos = [r for r in system.items() if r[0][var] > 0]
        neg = [r for r in system.items() if r[0][var] < 0]
        rest = [r for r in system.items() if r[0][var] == 0]
        for p, pc in pos:
            for m, mc in neg:
                a, b = -m[var], p[var]
                rest.append((tuple(a * x + b * y for x, y in zip(p, m, strict=True)), a * pc + b * mc))
        system = _tightened(rest)
    return system is None


def refute(preds: Sequence[Pred], domain: Iterable[sympy.Expr] = ()) -> bool:
    """True only if no integers in the domain (each expr <= 0) and no leaves satisfy every predicate."""
    branches = 0

    def closed(todo: list[Pred], exprs: frozenset[sympy.Expr], leaves: frozenset[Leaf]) -> bool:
        nonlocal branches
        branches += 1
        if branches > MAX_BRANCHES:
            return False
        ors: list[Or] = []
        while todo:
            p = todo.pop()
            if isinstance(p, Leq):
                exprs |= {p.expr}
            elif isinstance(p, Leaf):
                leaves |= {p}
                if negate(p) in leaves:
                    return True
            elif isinstance(p, And):
                todo.extend(p.args)
            else:
                ors.append(p)
        if infeasible(exprs):
            return True
        if not ors:
            return False
        ors.sort(key=lambda o: len(o.args))
        return all(closed([arg, *ors[1:]], exprs, leaves) for arg in ors[0].args)

    return closed(list(preds), frozenset(domain), frozenset())
