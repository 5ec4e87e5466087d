"""What a model's prompts become, as far as it was observed, and views of what of a prompt is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from .runtime import CacheGroup, Lent, Policy, View, lend, manager
from .sharer import Loan, Sharer, learner, registering
from .token_names import group_root, row_tokens, with_windows

__all__ = ["Known", "Observer", "borrow", "policy"]


class Known(NamedTuple):
    """How prompts become caches. weights: among the arguments of `sharer`'s graph. groups: of the caches."""

    sharer: Sharer
    weights: Mapping[int, Tensor]
    groups: Sequence[CacheGroup]


class Observer:
    """Remembers the last step that began new caches: what it filled, and what else it returned."""

    known: Known | None = None
    views: Sequence[View] = ()
    outputs: Sequence[Any] = ()

    def learn(self, sharer: Sharer, args: Sequence[Any], views: Sequence[View], outputs: Sequence[Any]) -> None:
        """See `Learner`."""
        self.known = Known(sharer, sharer.weights.tensors(args), [view.group for view in views])
        self.views, self.outputs = views, outputs

    @classmethod
    @contextmanager
    def watching(cls) -> Iterator[Observer]:
        """One that sees what this thread's steps do in a block of code."""
        observer = cls()
        token = learner.set(observer)
        try:
            yield observer
        finally:
            learner.reset(token)


def policy() -> Policy:
    """Whose blocks the code that runs here and now may share."""
    return Policy.of(manager().tenants.current(), registering.get() is not None)


def borrow(
    known: Known,
    value: Callable[[Any], Any],
    behind: int,
    kept: Sequence[int | None],
    results: bytes | None = None,
    buffer: int | None = None,
) -> tuple[Lent, Loan] | None:
    """Views of what is cached of a prompt, but for its last `behind` tokens, and their loan; None if nothing is, or a
    call is not understood.

    value: tells an argument of the call; None if it is not given, or of None. kept: how many of the last tokens the
    model's cache has of each group; None for all. results: see `Loan`. buffer: how many positions the model's cache
    has, if it is static.
    """
    sharer, sharing = known.sharer, known.sharer.sharing
    ids, *along = (value(sharer.arguments[name]) for name in (sharing.ids, *sharing.positions, *sharing.others))
    if sharing.whole or ids is None or any(each is None for each in along):
        return None
    length = ids.shape[1]
    if buffer is not None and length > buffer:
        return None
    rules = policy()
    sharer.weights.look(known.weights)
    root = sharer.root(known.weights, rules.salt)
    mask = value(sharer.arguments[sharing.mask]) if sharing.mask else None
    count = len(sharing.positions)
    prompts = row_tokens(ids, along[:count], along[count:], mask, 0, static=buffer is not None)
    if root is None or prompts is None:
        return None
    windows = sharer.prompt_windows(length)
    roots = [group_root(root, place) for place in sharing.order]
    prompts = [with_windows(prompt, windows) for prompt in prompts]
    lent = lend(manager(), known.groups, roots, kept, prompts, length - behind, rules, "a cached prompt", buffer)
    return None if lent is None else (lent, Loan(lent.views, windows, results))
