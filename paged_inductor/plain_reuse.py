"""Prompts of hand-written models: what of them is cached is not computed again, where that is proven to be the same.

Such a model is a function of tokens and of a cache, a plain structure of tensors, which it returns longer. It tells
nobody what is what, so it is observed: which argument is the tokens (the proof of sharing says that), in which one its
caches come back, and what it returns. Then a prompt may be split: the model gets handles of what is found, and the
tokens behind. That is done only if the graph of whole prompts returns, besides the cache, what its last positions alone
decide, and if the graph that goes on is proven to compute it in the same way.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._errors import PagedInductorError
from .plain_caches import Results, Structure, returned, structure_of
from .prompts import Known, Observer, borrow, policy
from .runtime import Lent, manager
from .sharer import Argument, Loan, StalePrefix
from .tensor import PagedTensor

__all__ = ["PlainReuse"]

_PLAIN = (type(None), bool, int, float, str)
_ARGUMENTS = (Tensor, *_PLAIN)
_MOST_FAILURES = 3  # then a model is left alone
_DEPTH = 3  # of containers in which changes are noticed
_MOST_OBSERVED = 8  # calls in a row of which nothing was learned; then, too


class _Whole(NamedTuple):
    """A call with a whole prompt, as it was observed. arguments: those that are no tensors, and where tensors are."""

    known: Known
    results: Results
    arguments: Mapping[Argument, object]


class PlainReuse:
    """The cached prompts of one model."""

    def __init__(self, module: nn.Module, signature: inspect.Signature) -> None:
        """signature: of the model's `forward`."""
        self._module = module
        self._parameters = list(signature.parameters.values())
        self._whole: _Whole | None = None
        self._cache: tuple[Argument, str, Structure] | None = None  # the argument, by position or keyword, and its name
        self._fruitless = 0
        self._failed: Counter[bytes] = Counter()  # how often others did not go on in the way of graphs of these

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`function(*args, **kwargs)`, without computing what is cached of the prompt."""
        if torch.is_grad_enabled() or not policy().shares:
            return function(*args, **kwargs)
        given: dict[Argument, Any] = dict(enumerate(args))
        given.update(kwargs)
        whole = self._whole
        if whole is not None and self._cache is None:
            self._cache = self._argument(whole, given)
        if self._goes_on(given):
            return function(*args, **kwargs)
        if whole is not None and self._cache is not None and whole.arguments == self._arguments(given):
            found = self._borrow(whole, given)
            if found is not None:
                done = self._go_on(function, whole, self._cache, given, *found)
                if done is not None:
                    return done[0]
                self._failed[whole.known.sharer.sharing.digest] += 1
                self._whole = None
        if self._fruitless >= _MOST_OBSERVED:
            return function(*args, **kwargs)
        return self._observe(function, args, kwargs, given)

    def _goes_on(self, given: Mapping[Argument, Any]) -> bool:
        """Whether a call is given a cache."""
        if self._cache is None:
            return any(isinstance(each, PagedTensor) or not isinstance(each, _ARGUMENTS) for each in given.values())
        place, name, _ = self._cache
        return given.get(place, given.get(name)) is not None

    def _argument(self, whole: _Whole, given: Mapping[Argument, Any]) -> tuple[Argument, str, Structure] | None:
        """Where a call is given what the model returned before."""
        handles = [leaf for leaf in whole.results.leaves if isinstance(leaf, tuple)]
        for place, value in given.items():
            structure = structure_of(value, handles, whole.known.groups) if value is not None else None
            if structure is not None:
                return place, self._name(place), structure
        return None

    def _name(self, place: Argument) -> str:
        """The keyword of an argument; '' if it has none."""
        if isinstance(place, str):
            return place
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
        known = place < len(self._parameters) and self._parameters[place].kind not in kinds
        return self._parameters[place].name if known else ""

    def _arguments(self, given: Mapping[Argument, Any]) -> dict[Argument, object]:
        """What of the arguments must be the same for results to be; the cache is not among them."""
        own = self._cache[:2] if self._cache is not None else ()
        return {
            place: "a tensor" if isinstance(value, Tensor) else (type(value), value)
            for place, value in given.items()
            if value is not None and place not in own
        }

    def _borrow(self, whole: _Whole, given: Mapping[Argument, Any]) -> tuple[Lent, Loan] | None:
        sharer = whole.known.sharer
        ids = given[sharer.arguments[sharer.sharing.ids]]  # type: ignore[index]
        if not sharer.admits(ids.shape):
            return None
        all_kept = [None] * len(whole.known.groups)
        return borrow(whole.known, given.get, sharer.sharing.last, all_kept, sharer.sharing.results)

    def _go_on(
        self,
        function: Callable[..., Any],
        whole: _Whole,
        cache: tuple[Argument, str, Structure],
        given: Mapping[Argument, Any],
        lent: Lent,
        loan: Loan,
    ) -> tuple[Any] | None:
        """The result of a call that goes on from a loan; None if it is not proven to be that of the whole prompt."""
        sharer, length = whole.known.sharer, lent.length
        along = (sharer.sharing.ids, *sharer.sharing.positions, *sharer.sharing.others)
        rest = {
            **given,
            **{place: given[place][..., length:] for name in along if (place := sharer.arguments[name]) is not None},
        }
        place, name, structure = cache
        rest[place if place in given or not name else name] = structure.filled(lent.views)
        positional = [rest[i] for i in range(sum(isinstance(place, int) for place in rest))]
        try:
            with loan:
                result = function(*positional, **{key: value for key, value in rest.items() if isinstance(key, str)})
        except StalePrefix:
            return None
        except PagedInductorError:
            raise
        except Exception:
            return None
        proven = loan.confirmed and returned(result, loan.outputs, loan.views) == whole.results
        if not proven:
            return None
        lent.used(manager())
        return (result,)

    def _observe(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[Argument, Any]
    ) -> Any:
        """Call with a whole prompt, and see what the model does."""
        self._fruitless += 1
        before = _state(self._module)
        with Observer.watching() as observer:
            result = function(*args, **kwargs)
        known = observer.known
        if known is None or not self._understood(known, given) or _state(self._module) != before:
            return result
        results = returned(result, observer.outputs, observer.views)
        if results is not None and {leaf[0] for leaf in results.leaves if isinstance(leaf, tuple)} == set(
            range(len(known.groups))
        ):
            self._whole = _Whole(known, results, self._arguments(given))
            self._fruitless = 0
        return result

    def _understood(self, known: Known, given: Mapping[Argument, Any]) -> bool:
        """Whether the graph's results are decided by the last positions, and each tensor's part in them is known."""
        sharer, sharing = known.sharer, known.sharer.sharing
        names = (sharing.ids, *sharing.positions, *sharing.others, *([sharing.mask] if sharing.mask else ()))
        places = {sharer.arguments[name] for name in names}
        tensors = {place for place, value in given.items() if isinstance(value, Tensor)}
        rest = [value for place, value in given.items() if place not in tensors]
        plain = all(isinstance(value, _PLAIN) for value in rest)
        return bool(sharing.results) and self._failed[sharing.digest] < _MOST_FAILURES and plain and places == tensors


class _Same(NamedTuple):
    """Values that equal themselves only, as long as they are: one, and those in it."""

    values: tuple[Any, ...]

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, _Same) and len(self.values) == len(other.values)
        return same and all(a is b for a, b in zip(self.values, other.values))  # type: ignore[attr-defined]


def _state(module: nn.Module) -> dict[tuple[str, str], _Same]:
    """What a call may change that is no result: the attributes of a module's parts."""
    return {
        (path, name): _Same(tuple(_inside(value, _DEPTH)))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
    }


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """A value, and what its containers and objects hold, down to a depth."""
    yield value
    if depth and not isinstance(value, nn.Module | Tensor | type | str | bytes) and not callable(value):
        parts: Iterable[Any] = ()
        if isinstance(value, Mapping):
            parts = (*value.keys(), *value.values())
        elif isinstance(value, list | tuple | set | frozenset | deque):
            parts = value
        elif hasattr(value, "__dict__"):
            parts = vars(value).values()
        for part in list(parts):
            yield from _inside(part, depth - 1)
