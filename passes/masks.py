"""The mask prover: what an attention mask means, as kernel parameters, or why it must be passed on as a tensor.

The mask's subgraph is read over symbols (b, h, q, k) as a predicate "key k is visible to query q"
(mask_program). The causal and window bounds that occur in it are candidates; each claim in a MaskSpec is then
proven over all integers in range by refuting its opposite (mask_logic). Nothing is sampled, and a proof that
does not succeed is never replaced by an assumption: the mask tensor is passed on.

Assumed: sizes are integers >= 0; no size, offset or position reaches 2**40; indexing stays in bounds, as
eager code would raise; scores are finite and far from the float range's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import Node

from . import mask_arithmetic, mask_index  # noqa: F401  (they register their handlers)
from .mask_effects import Writers
from .mask_logic import TRUE, And, Leaf, Leq, Pred, Unknown, atoms, conj, disj, leq, linear, negate, refute
from .mask_program import INDICES, At, B, H, K, Program, Q, same
from .mask_values import HUGE, LOW, NotUnderstood

__all__ = ["MaskSpec", "prove_mask"]


@dataclass(frozen=True)
class MaskSpec:
    """What is proven of a mask. Query q of [0, q_len) sees key k of [0, kv_len) if and only if

    k <= q + causal_offset          (when causal_offset is not None; it may be negative)
    k > q + causal_offset - window  (when window is not None; then causal_offset is not None either)
    and `tensor`, the mask node that must still be applied, lets it (when tensor is not None).

    With a tensor the bounds are implied by it: applying them as well changes nothing, it only allows
    skipping. `tensor` is always the whole mask. padding: the mask is exactly these bounds and a vector over
    (b, k) that is not known at compile time. proof: for people. columns: the graph input [B, first_column + kv_len] of
    which that vector is exactly the elements that are not zero, from column `first_column` on, or None.
    """

    causal_offset: sympy.Expr | None
    window: sympy.Expr | int | None
    padding: bool
    tensor: Node | None
    proof: str
    columns: Node | None = None
    first_column: sympy.Expr = sympy.S.Zero


def prove_mask(
    mask: Node | None,
    is_causal: bool,
    q_len: int | torch.SymInt,
    kv_len: int | torch.SymInt,
    equal: Mapping[sympy.Symbol, sympy.Expr] | None = None,
    known: Mapping[Node, At] | None = None,
) -> MaskSpec:
    """Interpret the mask of one scaled_dot_product_attention call.

    mask: its attn_mask node, of a graph whose nodes carry Dynamo's fake tensors in meta["example_value"], or
    None. is_causal: SDPA's flag, aligned to the top left. q_len, kv_len: sizes of the query and key
    sequences. equal: symbols that the caller knows to equal an expression (K's and V's lengths of one cache).
    known: what some nodes hold, whatever the graph says of them.
    The graph is not changed; no guard is added. Never raises for a mask it does not understand.
    """
    program = Program(equal or {}, known or {})
    q_size, kv_size = program.size(q_len), program.size(kv_len)
    program.sizes = {s: n for s, n in ((Q, q_size), (K, kv_size)) if n != 1}
    if mask is None and not is_causal:
        return MaskSpec(None, None, False, None, "none")
    if mask is None:
        if refute([leq(_index(Q, q_size) - _index(K, kv_size) + 1)], program.domain):
            return MaskSpec(None, None, False, None, "every key visible")
        return MaskSpec(sympy.S.Zero, None, False, None, "causal, offset 0")
    try:
        if is_causal:
            raise NotUnderstood("is_causal together with a mask")
        visible, form = _read(mask, program, q_size, kv_size)
        writer = Writers(mask.graph).spoils(program.visited, mask)
        if writer is not None:
            raise NotUnderstood(f"{writer.name} may change it in place")
        return _specify(mask, visible, form, program, kv_size)
    except NotUnderstood as error:
        return MaskSpec(None, None, False, mask, f"passed on: {error}")
    except RecursionError:
        return MaskSpec(None, None, False, mask, "passed on: the expression is too deep")


@dataclass(frozen=True)
class _Form:
    """How the mask says no. soft: by a finite number, which equals -inf only in rows with a visible key.
    bias: what is added to visible scores other than 0, for people ("" if nothing is)."""

    soft: bool = False
    bias: str = ""


def _index(symbol: sympy.Symbol, size: sympy.Expr) -> sympy.Expr:
    return sympy.S.Zero if size == 1 else symbol


def _read(mask: Node, program: Program, q_size: sympy.Expr, kv_size: sympy.Expr) -> tuple[Pred, _Form]:
    """When element (b, h, q, k) of the mask lets the key be seen."""
    tensor = program.tensor(mask)
    symbols, index = (B, H, Q, K)[4 - len(tensor.shape) :], []
    if not 1 <= len(tensor.shape) <= 4:
        raise NotUnderstood(f"a mask of {len(tensor.shape)} dimensions")
    for symbol, size in zip(symbols, tensor.shape, strict=True):
        wanted = {Q: q_size, K: kv_size}.get(symbol, size)
        if size != 1 and not same(size, wanted):
            raise NotUnderstood(f"mask size {size} is not known to equal {wanted}")
        index.append(_index(symbol, size))
        if size != 1:
            program.sizes = {**program.sizes, symbol: size}
    value = tensor.at(tuple(index))
    if tensor.dtype == torch.bool:
        assert not isinstance(value, tuple)
        return value, _Form()
    if not tensor.dtype.is_floating_point or not isinstance(value, tuple):
        raise NotUnderstood(f"a mask of dtype {tensor.dtype}")
    visible: list[Pred] = []
    form = _Form()
    for guard, number in value:
        if number is LOW or (isinstance(number, float) and number <= HUGE):
            form = replace(form, soft=form.soft or number != -math.inf)
            continue
        visible.append(guard)
        if number != 0:
            form = replace(form, bias=number.why if isinstance(number, Unknown) else f"constant {number}")
    return disj(*visible), form


@dataclass(frozen=True)
class _Bounds:
    """q + lower <= k <= q + upper, as far as proven."""

    lower: sympy.Expr | None
    upper: sympy.Expr | None

    def pred(self) -> Pred:
        return conj(
            TRUE if self.lower is None else leq(Q + self.lower - K),
            TRUE if self.upper is None else leq(K - Q - self.upper),
        )


def _specify(mask: Node, visible: Pred, form: _Form, program: Program, kv_size: sympy.Expr) -> MaskSpec:
    """The strongest MaskSpec that is proven of `visible`."""
    # Symbols of dimensions of size 1 still occur in candidate bounds; they are zero.
    domain = program.domain + [s for s in (Q, K) if s not in program.sizes]
    if refute([negate(visible)], domain) and not form.bias:
        return MaskSpec(None, None, False, None, "every key visible")
    bounds = _implied(visible, domain)
    exact = refute([bounds.pred(), negate(visible)], domain)
    factors = [p for p in (visible.args if isinstance(visible, And) else (visible,)) if _unknowns(p)]
    padding = bool(factors) and not exact and all(map(_is_padding, factors))
    padding = padding and refute([bounds.pred(), *factors, negate(visible)], domain)
    if form.bias:
        reason = f"float bias from {form.bias}"
    elif exact:
        reason = ""
    elif padding:
        reason = "padding vector"
    elif unknown := next(iter(_unknowns(visible)), None):
        reason = unknown.why
    else:
        reason = "not a causal or window pattern"
    if form.soft and not (exact and not form.bias and _rows_see_a_key(bounds, program, kv_size)):
        # softmax over a row of equal finite minima is uniform over all keys, also those beyond the bounds
        why = reason or "a row may be fully masked by a finite minimum"
        return MaskSpec(None, None, False, mask, f"passed on: {why}")
    spec, shape = _spec_of(bounds, domain, kv_size)
    if not reason:
        return replace(spec, proof=shape)
    proof = f"passed on: {reason}" + (f" ({shape})" if spec.causal_offset is not None else "")
    padding = padding and not form.bias
    columns, first = (_columns(factors, mask) if padding else None) or (None, sympy.S.Zero)
    return replace(spec, padding=padding, tensor=mask, proof=proof, columns=columns, first_column=first)


def _columns(factors: Sequence[Pred], mask: Node) -> tuple[Node, sympy.Expr] | None:
    """The graph input whose elements [b, first + k] the factors are, as truth values, and first; None if they are
    anything else."""
    names, starts = set(), set()
    for factor in factors:
        if not isinstance(factor, Leaf) or not factor.positive:
            return None
        key = factor.unknown.key
        while key[0] in ("bool", "cast"):
            key = key[-1]  # type: ignore[assignment]
        if len(key) != 2 or len(index := key[1]) != 2 or index[0] not in (B, sympy.S.Zero):  # type: ignore[arg-type]
            return None
        names.add(key[0])
        starts.add(sympy.expand(index[1] - K))  # type: ignore[index]
    inputs = [node for node in mask.graph.find_nodes(op="placeholder") if node.name in names]
    if len(names) != 1 or len(inputs) != 1 or len(starts) != 1 or (first := starts.pop()).free_symbols & INDICES:
        return None
    return inputs[0], first


def _implied(visible: Pred, domain: Sequence[sympy.Expr]) -> _Bounds:
    """The tightest bounds among those that occur in the predicate and that it implies."""
    lowers: dict[sympy.Expr, None] = {}
    uppers: dict[sympy.Expr, None] = {}
    for atom in atoms(visible):
        if not isinstance(atom, Leq):
            continue
        for literal in (atom, negate(atom)):
            coefs, const = linear(literal.expr) if isinstance(literal, Leq) else ({}, 0)
            side = coefs.get(K, 0)
            # k - q - c <= 0 or q - k + d <= 0; with one query q is zero and does not occur
            if abs(side) != 1 or coefs.get(Q, 0) not in ((-side,) if Q not in domain else (0, -side)):
                continue
            rest = const + sum(c * t for t, c in coefs.items() if t not in (Q, K))
            if not sympy.sympify(rest).free_symbols & INDICES:
                (uppers if side > 0 else lowers)[sympy.sympify(-rest if side > 0 else rest)] = None
    upper = [c for c in uppers if refute([visible, leq(Q + c + 1 - K)], domain)]
    lower = [d for d in lowers if refute([visible, leq(K - Q - d + 1)], domain)]
    return _Bounds(_extreme(lower, domain, -1), _extreme(upper, domain, 1))


def _extreme(bounds: list[sympy.Expr], domain: Sequence[sympy.Expr], sign: int) -> sympy.Expr | None:
    """The least (sign 1) or greatest (sign -1) bound if one is proven to be, else any."""
    for c in bounds:
        if all(refute([leq(sign * (other - c) + 1)], domain) for other in bounds if other != c):
            return c
    return bounds[0] if bounds else None


def _unknowns(pred: Pred) -> list[Unknown]:
    return [a.unknown for a in atoms(pred) if isinstance(a, Leaf)]


def _is_padding(factor: Pred) -> bool:
    """Whether it varies with b and k alone."""
    varies: set[sympy.Basic] = set()
    for atom in atoms(factor):
        varies |= atom.unknown.deps if isinstance(atom, Leaf) else atom.expr.free_symbols
    return not varies & {H, Q}


def _rows_see_a_key(bounds: _Bounds, program: Program, kv_size: sympy.Expr) -> bool:
    """Whether every query has a visible key under exactly these bounds, if there are keys at all."""
    rows = [1 - kv_size] + ([Q + 1 - program.sizes[Q]] if Q in program.sizes else [Q])
    lower, upper = bounds.lower, bounds.upper
    needs = []  # the opposites: bounds that leave [0, kv_len) or cross each other
    if upper is not None:
        needs.append(leq(Q + upper + 1))
    if lower is not None:
        needs.append(leq(kv_size - Q - lower))
    if lower is not None and upper is not None:
        needs.append(leq(upper - lower + 1))
    return all(refute([need], rows) for need in needs)


def _spec_of(bounds: _Bounds, domain: Sequence[sympy.Expr], kv_size: sympy.Expr) -> tuple[MaskSpec, str]:
    """Bounds as offset and window, without those that every key in range meets."""
    lower, upper = bounds.lower, bounds.upper
    if lower is not None and refute([leq(K - Q - lower + 1)], domain):
        lower = None
    if lower is None and upper is not None and refute([leq(Q + upper + 1 - K)], domain):
        upper = None
    if lower is not None and upper is None:
        upper = kv_size - 1  # lets every key through; a window is counted from the causal bound
    if upper is None:
        return MaskSpec(None, None, False, None, ""), "every key visible"
    if lower is None:
        return MaskSpec(sympy.expand(upper), None, False, None, ""), f"causal, offset {sympy.expand(upper)}"
    window = sympy.expand(upper - lower + 1)
    spec = MaskSpec(sympy.expand(upper), int(window) if window.is_Integer else window, False, None, "")
    return spec, f"causal, offset {spec.causal_offset}, window {window}"
