"""What a compiled graph does for shared prefixes: it says which tokens its rows hold, as `ProveSharing` proved."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from torch.fx import Node

from .passes import Sharing
from .passes.tensors import source_name
from .runtime import Policy, RowNames, Tokens, View, manager, matter_within, settle
from .sizes import shape_check, size_reader
from .token_names import Windows, group_root, marked, row_tokens, window_marks
from .weights import Weights

if TYPE_CHECKING:
    from .group_plan import GroupPlan
    from .step import Step

__all__ = [
    "Argument",
    "Learner",
    "Loan",
    "Registration",
    "Sharer",
    "StalePrefix",
    "learner",
    "loans",
    "registering",
]


Argument = str | int
"""An argument of a compiled function, by keyword or by position."""


class StalePrefix(Exception):
    """A view that was lent does not hold what this graph would have computed; never seen by users."""


class Loan:
    """A view of a prefix that a prompt is about to go on from.

    lent: the views, which the graph that goes on from them finds it by within a `with` block. windows: of the whole
    prompt, see `RowNames`. results: of the graph of whole prompts, if what it returns is wanted (see `Sharing`).
    confirmed: the graph that went on would have computed the prefix in the same way. outputs, views: what it returns,
    and the views that it filled.
    """

    def __init__(self, lent: Sequence[View], windows: Windows, results: bytes | None = None) -> None:
        self.lent = lent
        self.windows = windows
        self.results = results
        self.confirmed = False
        self.outputs: Sequence[Any] = ()
        self.views: Sequence[View] = ()

    def __enter__(self) -> Loan:
        loans.update(dict.fromkeys(self.lent, self))
        return self

    def __exit__(self, *error: object) -> None:
        for view in self.lent:
            loans.pop(view, None)  # a static view goes on to live


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


class Named(NamedTuple):
    """What the names of a step's tokens begin with, how many tokens were there before, the windows of all, and whether
    the step starts new caches."""

    root: bytes
    old: int
    windows: Windows
    starts: bool


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
        self.arguments = {name: _argument(captured[at]) for name, at in position.items()}
        self._zeros = [size_reader(size, captured) for size in sharing.zeros]
        self._totals = [size_reader(size, captured) for size in sharing.totals]
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

    def begin(self, args: Sequence[Any], plans: Sequence[GroupPlan], steps: Sequence[Step]) -> Named | None:
        """Steps, one of each group, are about to be made; None if they will share nothing."""
        lead = steps[0].view
        count = plans[0].count(args)
        starts = steps[0].extent == count if plans[0].static is not None else not plans[0].inputs
        if starts and not self.sharing.starts:
            return None
        alone = not starts or len(lead.rows) == 1 or count < lead.group.block_size
        if alone and lead.tenant.share == "none" and registering.get() is None:
            return None
        firsts = [None if step.extent is None else step.extent - count for step in steps]
        found = self._before(args, plans, [step.view for step in steps], firsts, count, count)
        if found is None:
            return None
        root = self.root(args, lead.tenant.salt)
        return None if root is None else Named(root, *found, starts)

    def _before(
        self,
        args: Sequence[Any],
        plans: Sequence[GroupPlan],
        views: Sequence[View],
        firsts: Sequence[int | None],
        held: int,
        count: int,
    ) -> tuple[int, Windows] | None:
        """How many tokens were there before a step of `count` new ones, and the windows of all; None if rows start
        later, or the graph does not do what was proven of it. firsts: the first positions that are written, of static
        views. held: how many of the new ones others have already."""
        totals, shown = set(), {}
        for plan, view, first, place in zip(plans, views, firsts, self.sharing.order):
            if first is not None:
                if plan.static is None or not plan.static.complete or (first and not plan.inputs):
                    return None
                if any(row.skipped or seen != view.extent for row, seen in zip(view.rows, view.lengths)):
                    return None  # it slid
                totals.add(first)
                shown[place] = first
            else:
                rows = zip(view.rows, view.lengths)
                totals |= {row.skipped * view.group.block_size + seen - held for row, seen in rows}
                shown[place] = view.length - held
        if len(totals) != 1:
            return None
        old = totals.pop()
        if any(read(args) != 0 for read in self._zeros) or any(read(args) != old for read in self._totals):
            return None
        if any(length > old for length in shown.values()):
            return None
        windows = self._windows(old, shown, count)
        return None if windows is None else (old, windows)

    def _windows(self, old: int, shown: Mapping[int, int], count: int) -> Windows | None:
        """The windows of a step, some of which come from a cache that shows its last tokens only; None if these are
        not the same for all new tokens. shown: of the old tokens, by the place of the group."""
        windows: list[int | None] = []
        for group, window in self.sharing.windows:
            most = shown[group] + 1
            if most <= old and (window is None or window > most):
                if count != 1:
                    return None
                window = most
            windows.append(window)
        return matter_within(windows, old + count)

    def knows_more_than(self, other: Sharer) -> bool:
        """Whether another graph computes in the same way, but is for prompts that its windows hide nothing of."""
        mine, others = (sum(w is not None for _, w in each.sharing.windows) for each in (self, other))
        return self.sharing.digest == other.sharing.digest and mine > others

    def prompt_windows(self, length: int) -> Windows:
        """The windows of a prompt that is computed as a whole."""
        return matter_within([window for _, window in self.sharing.windows], length)

    def finish(
        self,
        args: Sequence[Any],
        plans: Sequence[GroupPlan],
        views: Sequence[View],
        named: Named,
        outputs: Sequence[Any],
    ) -> None:
        """The step succeeded: name what it stored, and share it. named: from `begin`. outputs: what the graph returns
        besides caches."""
        registration = registering.get()
        policy = Policy.of(views[0].tenant, registration is not None)
        full = named.old // views[0].group.block_size
        if (named.old + plans[0].count(args)) // views[0].group.block_size > full:
            self.weights.look(args)  # a block will be known
        if self.root(args, views[0].tenant.salt) != named.root:  # the weights were written to meanwhile
            return
        if not named.starts and all(row.names is None for view in views for row in view.rows):
            return
        tokens = self._tokens(args, named.old, plans[0].static is not None)
        if tokens is None:
            return
        for place, view in zip(self.sharing.order, views):
            names = self._extended(tokens, named._replace(root=group_root(named.root, place)), view)
            settle(manager(), view, names, policy)
            if registration is not None:
                lengths = (len(known.digests) * view.group.block_size for known in names if known)
                registration.tokens = max(registration.tokens, *lengths, 0)
        if named.starts and policy.shares and (who := learner.get()) is not None:
            who.learn(self, args, views, outputs)

    def _tokens(self, args: Sequence[Any], old: int, static: bool) -> list[Tokens] | None:
        """The new tokens of each row, the first of which is token `old`."""
        mask = args[self._mask] if self._mask is not None else None
        along = [args[i] for i in self._positions], [args[i] for i in self._others]
        return row_tokens(args[self._ids], *along, mask, old, static)

    def _extended(self, new: Sequence[Tokens], named: Named, view: View) -> list[RowNames | None]:
        """The names of all tokens of each row, of which the first `named.old` should be known."""
        size = view.group.block_size
        root, old, windows, starts = named
        names: list[RowNames | None] = []
        for row, tokens in zip(view.rows, new):
            known = RowNames(root) if starts else row.names
            hidden = tuple(at for at in tokens.hidden if at < old)
            if known is None or known.root != root or known.length(size) != old or hidden != known.hidden:
                names.append(None)
                continue
            marks = window_marks(known.windows, windows, old)
            if marks is None:
                names.append(None)
                continue
            later = [at for at in tokens.hidden if at >= old]
            deviations = marked(tokens.deviations, marks, old)
            names.append(known.extended(tokens.ids, deviations, later, size, windows))
        return names

    def confirm(self, args: Sequence[Any], plans: Sequence[GroupPlan], views: Sequence[View], loan: Loan) -> bool:
        """Whether this graph would have computed these views' tokens in the same way, and results as wanted."""
        if loan.results is not None and loan.results != self.sharing.results:
            return False
        firsts = [None if plan.static is None else plan.static.first(args) for plan in plans]
        if any(first is not None and first != view.extent for first, view in zip(firsts, views)):
            return False
        before = self._before(args, plans, views, firsts, 0, plans[0].count(args))
        if before is None or before[1] != loan.windows:
            return False
        self.weights.look(args)
        root = self.root(args, manager().tenants.current().salt)
        return root is not None and all(
            row.names is not None and row.names.root == group_root(root, place)
            for place, view in zip(self.sharing.order, views)
            for row in view.rows
        )


def _argument(node: Node) -> Argument | None:
    """The argument of the compiled function that an input is, by keyword or by position; None if it is none."""
    match = re.fullmatch(r"L\['(?:kwargs'\]\['(\w+)'|args'\]\[(\d+))\]", source_name(node))
    if match is None:
        return None
    return match.group(1) or int(match.group(2))
