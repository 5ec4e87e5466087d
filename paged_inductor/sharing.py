"""What a compiled graph does for shared prefixes: it says which tokens its rows hold, as `ProveSharing` proved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from hashlib import sha256
from struct import pack
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.fx import Node

from .passes import Sharing
from .passes.tensors import source_name
from .runtime import Policy, RowNames, Tokens, View, manager, settle
from .sizes import shape_check
from .weights import Weights

if TYPE_CHECKING:
    from .group_plan import GroupPlan

__all__ = [
    "Learner",
    "Loan",
    "Registration",
    "Sharer",
    "StalePrefix",
    "group_root",
    "learner",
    "loans",
    "registering",
    "row_tokens",
]


class StalePrefix(Exception):
    """A view that was lent does not hold what this graph would have computed; never seen by users."""


class Loan:
    """A view of a prefix that a prompt is about to go on from.

    results: of the graph of whole prompts, if what it returns is wanted (see `Sharing`). confirmed: the graph that went
    on would have computed the prefix in the same way, and what it returns. outputs, views: that, and the views that it
    filled.
    """

    def __init__(self, results: bytes | None = None) -> None:
        self.results = results
        self.confirmed = False
        self.outputs: Sequence[Any] = ()
        self.views: Sequence[View] = ()

    @classmethod
    def of(cls, views: Sequence[View], results: bytes | None = None) -> Loan:
        """One that the graph which goes on from `views` will find."""
        loan = cls(results)
        loans.update(dict.fromkeys(views, loan))
        return loan


class Registration:
    """A prefix being registered. tokens: how many are."""

    tokens = 0


class Learner(Protocol):
    """Who wants to know of steps that began new caches."""

    def learn(self, sharer: Sharer, args: Sequence[Any], views: Sequence[View], outputs: Sequence[Any]) -> None:
        """`sharer`'s graph was called with `args`, filled `views`, one of each group, and returned `outputs`, too."""


loans: WeakKeyDictionary[View, Loan] = WeakKeyDictionary()
learner: ContextVar[Learner | None] = ContextVar("paged_inductor_learner", default=None)
registering: ContextVar[Registration | None] = ContextVar("paged_inductor_registering", default=None)
"""Set if the prefixes computed here are to be found by all tenants that share "system"."""


class Sharer:
    """The names of the tokens that one graph's steps store."""

    def __init__(self, sharing: Sharing, captured: Sequence[Node]) -> None:
        """captured: the graph's inputs, in order."""
        position = {node.name: i for i, node in enumerate(captured)}
        self.sharing = sharing
        self._ids = position[sharing.ids]
        self._positions = [position[name] for name in sharing.positions]
        self._others = [position[name] for name in sharing.others]
        self._mask = position[sharing.mask] if sharing.mask else None
        self._whole = [position[name] for name in sharing.whole]
        self.weights = Weights({name: position[name] for name in sharing.weights})
        self.places = {name: _place(captured[at]) for name, at in position.items()}
        self.admits = shape_check(captured[self._ids].meta["example_value"].shape)

    def root(self, args: Sequence[Any] | Mapping[int, Any], salt: bytes) -> bytes | None:
        """What all names begin with: the weights, and how they are used; None if the weights have no identity."""
        weights = self.weights.digest(args)
        if weights is None:
            return None
        whole = [(args[i].dtype, args[i].tolist()) for i in self._whole]
        forgotten = manager().prefixes_forgotten
        facts = (self.sharing.digest, weights, forgotten, salt, len(self._others), whole)
        return sha256(repr(facts).encode()).digest()

    def begin(self, args: Sequence[Any], plans: Sequence[GroupPlan], views: Sequence[View]) -> bytes | None:
        """A step is about to fill `views`: what all names of its tokens begin with; None if it will share nothing."""
        starts = not plans[0].inputs
        lead = views[0]
        if starts and not self.sharing.starts:
            return None
        alone = not starts or len(lead.rows) == 1 or lead.length < lead.group.block_size
        if alone and lead.tenant.share == "none" and registering.get() is None:
            return None
        if any(set(view.lengths) != {view.length} for view in views):  # rows that start later, or windows
            return None
        return self.root(args, lead.tenant.salt)

    def finish(
        self,
        args: Sequence[Any],
        plans: Sequence[GroupPlan],
        views: Sequence[View],
        root: bytes,
        outputs: Sequence[Any],
    ) -> None:
        """The step succeeded: name what it stored, and share it. root: from `begin`. outputs: what the graph returns
        besides caches."""
        registration = registering.get()
        policy = Policy.of(views[0].tenant, registration is not None)
        if self.root(args, views[0].tenant.salt) != root:  # the weights were written to meanwhile
            return
        starts = not plans[0].inputs
        if not starts and all(row.names is None for view in views for row in view.rows):
            return
        old = views[0].length - plans[0].count(args)
        tokens = self._tokens(args, old)
        if tokens is None:
            return
        for g, view in enumerate(views):
            names = self._extended(tokens, group_root(root, g), view, old, starts)
            settle(manager(), view, names, policy)
            if registration is not None:
                lengths = (len(known.digests) * view.group.block_size for known in names if known)
                registration.tokens = max(registration.tokens, *lengths, 0)
        if starts and policy.shares and (who := learner.get()) is not None:
            who.learn(self, args, views, outputs)

    def _tokens(self, args: Sequence[Any], old: int) -> list[Tokens] | None:
        """The new tokens of each row, the first of which is token `old`."""
        mask = args[self._mask] if self._mask is not None else None
        return row_tokens(
            args[self._ids], [args[i] for i in self._positions], [args[i] for i in self._others], mask, old
        )

    def _extended(
        self, new: Sequence[Tokens], root: bytes, view: View, old: int, starts: bool
    ) -> list[RowNames | None]:
        """The names of all tokens of each row, of which the first `old` should be known."""
        size = view.group.block_size
        names: list[RowNames | None] = []
        for row, tokens in zip(view.rows, new):
            known = RowNames(root) if starts else row.names
            hidden = tuple(at for at in tokens.hidden if at < old)
            if known is None or known.root != root or known.length(size) != old or hidden != known.hidden:
                names.append(None)
                continue
            later = [at for at in tokens.hidden if at >= old]
            names.append(known.extended(tokens.ids, tokens.deviations, later, size))
        return names

    def confirm(self, args: Sequence[Any], views: Sequence[View], results: bytes | None) -> bool:
        """Whether this graph would have computed these views' tokens in the same way, and results as wanted."""
        if results is not None and results != self.sharing.results:
            return False
        root = self.root(args, manager().tenants.current().salt)
        return root is not None and all(
            row.names is not None and row.names.root == group_root(root, g)
            for g, view in enumerate(views)
            for row in view.rows
        )


def group_root(root: bytes, g: int) -> bytes:
    """What names of blocks in the `g`-th group of a graph begin with: groups of equal layers have one pool."""
    return root if g == 0 else sha256(root + g.to_bytes(4, "little")).digest()


def row_tokens(
    ids: Tensor, positions: Sequence[Tensor], others: Sequence[Tensor], mask: Tensor | None, old: int
) -> list[Tokens] | None:
    """The tokens of each row of `ids` [B, S], of which the first is token `old` of its row; None if the mask
    [B or 1, old + S] is of another size, or not made of ones and zeros. positions, others: [B or 1, S] or [S]."""
    rows = ids.tolist()
    count = ids.shape[1]
    usual = list(range(old, old + count))
    found: list[dict[int, bytes]] = [{} for _ in rows]
    for n, values in enumerate(positions):
        for deviations, own in zip(found, _by_row(values, len(rows))):
            if own != usual:
                for at, (value, expected) in enumerate(zip(own, usual)):
                    if value != expected:
                        deviations[at] = deviations.get(at, b"") + pack("<cBq", b"p", n, value - expected)
    for n, values in enumerate(others):
        for deviations, own in zip(found, _by_row(values, len(rows))):
            for at, value in enumerate(own):
                deviations[at] = deviations.get(at, b"") + pack("<cBq", b"o", n, int(value))
    hidden: list[list[int]] = [[] for _ in rows]
    if mask is not None:
        if mask.dim() != 2 or mask.shape[1] != old + count:
            return None
        shown = mask == 1
        if not bool(shown.all()):
            if bool((mask[~shown] != 0).any()):
                return None
            for at, row in enumerate(shown.tolist() * (len(rows) if mask.shape[0] == 1 else 1)):
                hidden[at] = [k for k, seen in enumerate(row) if not seen]
                for k in hidden[at]:
                    if k >= old:
                        found[at][k - old] = found[at].get(k - old, b"") + b"h"
    return [Tokens(*each) for each in zip(rows, found, hidden)]


def _by_row(values: Tensor, count: int) -> list[list[Any]]:
    rows = values.tolist()
    if values.dim() == 1:
        rows = [rows]
    return rows if len(rows) == count else rows * count


def _place(node: Node) -> str | int | None:
    """The argument of the compiled function that an input is, by keyword or by position; None if it is none."""
    match = re.fullmatch(r"L\['(?:kwargs'\]\['(\w+)'|args'\]\[(\d+))\]", source_name(node))
    if match is None:
        return None
    return match.group(1) or int(match.group(2))
