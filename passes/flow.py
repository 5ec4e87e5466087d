"""Where values come from: for each tensor of a graph, which dimension runs along the tokens, and that position t of it
depends on nothing behind position t, on no other row of the batch, and on no length.

A `Flow` says so of one tensor; the handlers in `flow_ops` make the flow of a node from those of its operands, and raise
`NotShared` where they cannot. Sizes are compared as integers in which every symbol has a prime number of its own: equal
numbers are equal expressions, but for coincidences that no program hits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import Node

from .tensors import expr

__all__ = [
    "HANDLERS",
    "Flow",
    "Flows",
    "NotShared",
    "axes",
    "digest",
    "dim_index",
    "feature_sizes",
    "handles",
    "made_name",
    "reshaped",
]

BATCH, TOKENS, MERGED = "B", "S", "BS"


class NotShared(Exception):
    """Why the tokens alone do not say what a value is, for people."""


@dataclass(frozen=True)
class Flow:
    """What is known of a tensor.

    labels: of each dimension: BATCH, TOKENS, MERGED (both, rows outermost), or "" (features, or size 1). digest: equal
    for values that are computed in the same way, whatever the lengths. varies: it depends on inputs that come with the
    tokens. offset: it holds integers, the index along the tokens of this call plus this. last: it was picked from so
    many last positions of the call; 0 if it was not.
    """

    labels: tuple[str, ...]
    digest: bytes
    varies: bool = False
    offset: sympy.Expr | None = None
    last: int = 0


Handler = Callable[..., Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorator: registers handler(flows, node, *args, **kwargs) for operations, whether functions or methods."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def digest(*parts: object) -> bytes:
    """A hash of parts, which are told apart."""
    texts = [part if isinstance(part, bytes) else repr(part).encode() for part in parts]
    return sha256(b"".join(len(text).to_bytes(4, "little") + text for text in texts)).digest()


@dataclass
class Flows:
    """The flows of a graph's nodes. batch, tokens: the sizes of a call: rows, and new tokens per row. past: how many
    tokens the caches held before. equal: symbols that are known to equal an expression. values, operands: of nodes:
    their flows, and what these come from. written: nodes that write in place, which are understood. counters: symbols
    of integer inputs. assumed: for the flow of each node (None: of those looked at from outside), what must be as the
    fields "zeros" and "totals" of `Sharing` say. current: the node whose flow is being found."""

    batch: int | torch.SymInt
    tokens: int | torch.SymInt
    past: sympy.Expr
    equal: Mapping[sympy.Symbol, sympy.Expr]
    values: dict[Node, Any] = field(default_factory=dict)
    operands: dict[Node, list[Node]] = field(default_factory=dict)
    written: set[Node] = field(default_factory=set)
    counters: frozenset[sympy.Symbol] = frozenset()
    assumed: dict[Node | None, set[tuple[str, sympy.Expr]]] = field(default_factory=dict)
    current: Node | None = None
    _primes: dict[sympy.Symbol, int] = field(default_factory=dict)
    _numbers: dict[sympy.Expr, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_rows, self.num_tokens = self.size(self.batch), self.size(self.tokens)

    def of(self, node: object) -> Flow:
        """The flow of a tensor node; raises `NotShared`."""
        value = self.values.get(node) if isinstance(node, Node) else None  # type: ignore[call-overload]
        if isinstance(value, NotShared):
            raise value
        if not isinstance(value, Flow):
            raise NotShared(f"{node} is no tensor that is understood")
        return value

    def compute(self, node: Node) -> None:
        """Find the flow of a node whose operands' flows are known."""
        self.operands.setdefault(node, node.all_input_nodes)
        if node in self.values or not isinstance(node.meta.get("example_value"), torch.Tensor | tuple | list):
            return
        name = made_name(node)
        handler = HANDLERS.get(name)
        try:
            if handler is None:
                raise NotShared(f"{name or node.op} at {node.name} may mix positions")
            self.values[node] = handler(self, node, *node.args, **node.kwargs)
        except NotShared as reason:
            self.values[node] = reason
        except (TypeError, ValueError, IndexError, AttributeError):
            self.values[node] = NotShared(f"the arguments of {node.name} are not understood")

    def expr(self, size: int | torch.SymInt) -> sympy.Expr:
        """A size as an expression in which equal symbols are one."""
        return sympy.expand(expr(size).xreplace(dict(self.equal)))

    def size(self, size: int | torch.SymInt) -> int:
        """A size as a number: symbols are primes."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        value = size.node.expr
        known = self._numbers.get(value)
        if known is None:
            plain = self.expr(size)
            for symbol in sorted(plain.free_symbols, key=str):
                self._primes.setdefault(symbol, int(sympy.nextprime(10**6 * (len(self._primes) + 1))))
            known = self._numbers[value] = int(plain.xreplace(self._primes))
        return known

    def sizes(self, node: Node) -> tuple[int, ...]:
        """The sizes of a tensor node's dimensions, as numbers."""
        return tuple(map(self.size, node.meta["example_value"].shape))

    def labelled(self, sizes: Sequence[int], labels: Sequence[str]) -> tuple[str, ...]:
        """`labels`, without those of dimensions of size 1; raises if one occurs twice."""
        found = tuple("" if size == 1 else label for size, label in zip(sizes, labels, strict=True))
        kinds = [kind for label in found for kind in label]
        if len(set(kinds)) != len(kinds):
            raise NotShared("two of its dimensions run along the tokens")
        return found

    def scalar(self, value: object) -> object:
        """A number among a node's arguments, which must not be a length."""
        if isinstance(value, Node):
            value = value.meta.get("example_value")
        if isinstance(value, torch.SymInt) and not value.node.expr.free_symbols:
            return int(value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotShared("a length enters its values")
        return value

    def resolved(self, flow: Flow) -> Flow:
        """A flow whose values will be used as they are: an index is counted from the row's first token on."""
        if flow.offset is None:
            return flow
        if self.num_tokens != 1 and not any(flow.labels):  # the same for all new tokens
            if flow.offset.is_Integer:
                return replace(flow, offset=None, digest=digest("constant", int(flow.offset)))
            raise NotShared("the call's first position enters its values")
        relative, before = sympy.expand(flow.offset - self.past), self.past
        if not relative.is_Integer:
            if not any(flow.labels) and flow.offset.is_Integer:
                return replace(flow, offset=None, digest=digest("constant", int(flow.offset)))
            relative, before = flow.offset.as_coeff_Add()
            if not self.known_at_calls(before):
                raise NotShared("positions are counted from the call's first token on")
        if before != 0:
            self.assume("totals", before)
        return replace(flow, offset=None, digest=digest("position", int(relative)))

    def assume(self, kind: str, size: sympy.Expr) -> None:
        """The current node's flow is right if `size` is what the field `kind` of `Sharing` says."""
        self.assumed.setdefault(self.current, set()).add((kind, size))

    def known_at_calls(self, size: sympy.Expr) -> bool:
        """Whether an expression is one of numbers that the caller passes, at least of one."""
        return bool(size.free_symbols) and size.free_symbols <= self.counters

    def made(self, node: Node, name: str, operands: Sequence[Flow], labels: Sequence[str], *facts: object) -> Flow:
        """The flow of a node with these labels, computed from `operands`; facts: what else says how."""
        sizes = self.sizes(node)
        found = self.labelled(sizes, labels)
        dtype = node.meta["example_value"].dtype
        last = max((flow.last for flow in operands), default=0)
        if last and any(TOKENS in label for label in found):
            raise NotShared(f"{node.name} depends on what picks some of the positions")
        how = digest(name, dtype, feature_sizes(sizes, found), *facts, *(flow.digest for flow in operands))
        return Flow(found, how, any(flow.varies for flow in operands), last=last)


def made_name(node: Node) -> str:
    """The name of the operation that makes a node, function or method; '' if it is of another kind."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


def feature_sizes(sizes: Sequence[int], labels: Sequence[str]) -> tuple[int, ...]:
    """The sizes that do not depend on how many tokens or rows there are."""
    return tuple(size for size, label in zip(sizes, labels) if not label and size != 1)


def reshaped(before: Sequence[int], labels: Sequence[str], after: Sequence[int], rows: int, tokens: int) -> list[str]:
    """The labels of a tensor of sizes `before` that is viewed with sizes `after`."""
    result = [""] * len(after)
    left = [(size, label) for size, label in zip(before, labels) if size != 1]
    right = [i for i, size in enumerate(after) if size != 1]
    while left or right:
        inside, outside = [left.pop(0)] if left else [], [right.pop(0)] if right else []
        while (a := prod(size for size, _ in inside)) != (b := prod(after[i] for i in outside)):
            if (a < b and not left) or (a > b and not right):
                raise NotShared("a reshape is not understood")
            if a < b:
                inside.append(left.pop(0))
            else:
                outside.append(right.pop(0))
        kinds = [label for _, label in inside]
        if not any(kinds):
            continue
        if len(inside) == len(outside) == 1:
            result[outside[0]] = kinds[0]
        elif kinds == [BATCH, TOKENS] and len(outside) == 1:
            result[outside[0]] = MERGED
        elif kinds == [MERGED] and [after[i] for i in outside] == [rows, tokens]:
            result[outside[0]], result[outside[1]] = BATCH, TOKENS
        else:
            raise NotShared("a reshape mixes tokens with features")
    return result


def dim_index(dim: object, count: int) -> int:
    """A dimension of a tensor of `count`, counted from the front."""
    if not isinstance(dim, int):
        raise NotShared("a dimension is not a number")
    return dim % count


def axes(given: Any, count: int) -> list[int]:
    """The dimensions that a reduction is given; None means all."""
    dims = range(count) if given is None else given if isinstance(given, Sequence) else [given]
    return [dim_index(dim, count) for dim in dims]
