"""Views of a fresh manager against plain lists of tokens: what a view shows never changes behind its back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from random import Random
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_inductor import KVBudgetExceeded, configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, StepViews, View
from paged_inductor.runtime.pool import BlockPool
from paged_inductor.runtime.unshare import Place

MAX_VIEWS, MAX_ROWS, MAX_TOKENS, BLOCKS = 8, 4, 60, 40
SITES = (SiteSpec(1, 1, torch.float64, torch.device("cpu")), SiteSpec(1, 1, torch.float64, torch.device("cpu"), True))
some = st.randoms(use_true_random=False)
Tokens = list[list[int]]


def write(view: View, i: int, first: int, tokens: list[int], site: int) -> None:
    group = view.group
    for position, token in enumerate(tokens, first):
        block = view.rows[i].blocks[position // group.block_size]
        group.arenas[site][block, 0, position % group.block_size, 0] = token


def read(view: View, i: int, site: int) -> list[int]:
    group = view.group
    blocks = view.rows[i].blocks[: -(-view.lengths[i] // group.block_size)]
    return group.arenas[site][blocks, 0, :, 0].flatten()[: view.lengths[i]].long().tolist()


def execute(step: StepViews) -> None:
    for arena in step.view.group.arenas:
        for source, destination in step.copies:
            arena[destination] = arena[source]


@contextmanager
def interrupted(after: int) -> Iterator[None]:
    """KeyboardInterrupt at the `after`-th update of the pool from now on, as if Ctrl-C struck there.

    In a finalizer Python only reports it; whoever keeps the report would keep our frames, and with them views.
    """
    updates = count()

    def wrap(name: str) -> object:
        original = getattr(BlockPool, name)

        def update(self: BlockPool, *args: int) -> object:
            if next(updates) == after:
                raise KeyboardInterrupt
            return original(self, *args)

        return mock.patch.object(BlockPool, name, update)

    def forget(report: object) -> None:
        pass

    silent = mock.patch.object(sys, "unraisablehook", forget)
    with silent, wrap("allocate"), wrap("retain"), wrap("release"):  # type: ignore[attr-defined]
        yield


class ManagerMachine(RuleBasedStateMachine):
    """`views` pairs each live view with the tokens that each of its rows must show, in both sites."""

    @initialize(block_size=st.sampled_from([8, 16]))
    def begin(self, block_size: int) -> None:
        self.manager = Manager()
        self.group: CacheGroup = self.manager.group(SITES, block_size)
        self.views: list[tuple[View, Tokens]] = []
        self.kept: list[BaseException] = []
        self.token = count(1)
        configure(kv_budget=BLOCKS * self.group.block_bytes)

    def pick(self, random: Random) -> tuple[View, Tokens]:
        return self.views[random.randrange(len(self.views))]

    def fresh(self, batch: int, length: int) -> Tokens:
        return [[next(self.token) for _ in range(length)] for _ in range(batch)]

    def fill(self, step: StepViews, old: Tokens, new: Tokens) -> None:
        execute(step)
        for i, (before, tokens) in enumerate(zip(old, new)):
            for site in range(len(SITES)):
                write(step.view, i, len(before), tokens, site)
        self.views.append((step.view, [before + tokens for before, tokens in zip(old, new)]))

    room = precondition(lambda self: 0 < len(self.views) < MAX_VIEWS)
    any_view = precondition(lambda self: bool(self.views))

    @precondition(lambda self: len(self.views) < MAX_VIEWS)
    @rule(batch=st.integers(1, MAX_ROWS), length=st.integers(0, 40))
    def create(self, batch: int, length: int) -> None:
        try:
            step = self.manager.create(self.group, batch, length, "created")
        except KVBudgetExceeded:
            assert batch * -(-length // self.group.block_size) > BLOCKS - self.group.pool.num_used
            return
        self.fill(step, [[] for _ in range(batch)], self.fresh(batch, length))

    @room
    @rule(random=some, length=st.integers(1, 20), replace=st.booleans())
    def append(self, random: Random, length: int, replace: bool) -> None:
        view, tokens = self.pick(random)
        if view.length > MAX_TOKENS:
            return
        used = self.group.pool.num_used
        try:
            step = self.manager.append(view, length)
        except KVBudgetExceeded:
            assert self.group.pool.num_used == used
            return
        self.fill(step, tokens, self.fresh(len(tokens), length))
        if replace:
            self.views = [other for other in self.views if other[0] is not view]

    @room
    @rule(random=some, kind=st.sampled_from(["fork", "crop", "select", "merge"]))
    def derive(self, random: Random, kind: str) -> None:
        view, tokens = self.pick(random)
        rows, lengths, length = list(view.rows), list(view.lengths), view.length
        if kind == "crop":
            cut = random.randint(0, length)
            lengths = [max(0, seen - cut) for seen in lengths]
            length -= cut
        elif kind == "select":
            picked = [random.randrange(len(rows)) for _ in range(random.randint(0, MAX_ROWS) if rows else 0)]
            rows, lengths, tokens = ([x[i] for i in picked] for x in (rows, lengths, tokens))
        elif kind == "merge":
            other, more = self.pick(random)
            if len(rows) + len(other.rows) > MAX_ROWS:
                return
            rows, lengths, tokens = rows + list(other.rows), lengths + list(other.lengths), tokens + more
            length = max(length, other.length)
        derived = self.manager.derive(view, rows, lengths, length)
        self.views.append((derived, [row[:seen] for row, seen in zip(tokens, lengths)]))

    @any_view
    @rule(random=some, site=st.integers(0, 1))
    def overwrite(self, random: Random, site: int) -> None:
        """In place: this view changes, all others keep what they show."""
        view, tokens = self.pick(random)
        copy = self.manager.derive(view, view.rows, view.lengths, view.length)
        places: list[tuple[list[Place], int, int]] = []
        for i, row in enumerate(tokens):
            if row:
                first = random.randrange(len(row))
                places.append(([(copy, i)], first, random.randint(first + 1, len(row))))
        try:
            prepared = self.manager.unshare(self.group, places, "own")
        except KVBudgetExceeded:
            return
        if prepared is not None:
            step, moves = prepared
            execute(step)
            self.manager.rebind(self.group, step.view, moves)
            del step, moves
        del prepared
        shown = [list(row) for row in tokens]
        for ((_, i),), first, stop in places:
            new = [next(self.token) for _ in range(first, stop)]
            for at in range(len(SITES)):  # one site after the other, as layers do it
                write(copy, i, first, new, (site + at) % len(SITES))
            shown[i][first:stop] = new
        self.views = [(copy, shown) if other is view else (other, old) for other, old in self.views]
        assert self.manager.unshare(self.group, places, "own") is None  # who owns its blocks copies nothing

    @any_view
    @rule(
        random=some,
        length=st.integers(1, 30),
        kind=st.sampled_from(["append", "unshare", "create"]),
        keep=st.booleans(),
    )
    def abandon(self, random: Random, length: int, kind: str, keep: bool) -> None:
        """A step that fails between its allocation and its end."""
        view, tokens = self.pick(random)
        used = self.group.pool.num_used
        step: StepViews | None = None
        try:
            if kind == "append":
                step = self.manager.append(view, length)
            elif kind == "create":
                step = self.manager.create(self.group, 2, length, "abandoned")
            else:
                places = [([(view, i)], 0, len(row)) for i, row in enumerate(tokens) if row]
                prepared = self.manager.unshare(self.group, places, "own")
                step = prepared[0] if prepared else StepViews(view, [])
                prepared = None
            execute(step)
            raise RuntimeError("in mid-step")
        except RuntimeError as error:
            if keep:
                self.kept.append(error)  # its traceback keeps the step alive, which must disturb nobody
                return
        except KVBudgetExceeded:
            pass
        step = None
        assert self.group.pool.num_used == used

    @any_view
    @rule(
        random=some, after=st.integers(0, 12), kind=st.sampled_from(["append", "derive", "unshare", "drop", "locked"])
    )
    def interrupt(self, random: Random, after: int, kind: str) -> None:
        """Ctrl-C between two updates of the books."""
        view, tokens = self.pick(random)
        before = len(self.views)
        try:
            with interrupted(after):
                if kind == "append":
                    self.manager.append(view, 20)
                elif kind == "derive":
                    self.manager.derive(view, view.rows, view.lengths, view.length)
                elif kind == "unshare":
                    places = [([(view, i)], 0, len(row)) for i, row in enumerate(tokens) if row]
                    prepared = self.manager.unshare(self.group, places, "own")
                    if prepared is not None:
                        execute(prepared[0])
                        self.manager.rebind(self.group, prepared[0].view, prepared[1])
                        prepared = None
                elif kind == "drop":
                    if before > 1:
                        self.views = [other for other in self.views if other[0] is not view]
                    del view
                    self.manager.check_integrity()
                else:
                    with self.manager.locked():
                        view.rows[0].live[view.lengths[0]] += 1
                        raise KeyboardInterrupt
        except (KeyboardInterrupt, KVBudgetExceeded, IndexError):
            pass

    @any_view
    @rule(random=some)
    def drop(self, random: Random) -> None:
        view, _ = self.pick(random)
        self.views = [other for other in self.views if other[0] is not view]

    @rule()
    def trim(self) -> None:
        self.manager.trim()

    @rule()
    def forget(self) -> None:
        self.kept.clear()

    @any_view
    @rule(random=some)
    def schedule(self, random: Random) -> None:
        """The kernels' tensors say what the rows say, also when they were carried over from an older view."""
        view, _ = self.pick(random)
        schedule = self.manager.schedule(view)
        assert schedule.seq_lens.tolist() == list(view.lengths)
        size = self.group.block_size
        for entries, row, seen in zip(schedule.block_table.tolist(), view.rows, view.lengths):
            blocks = row.blocks[: -(-seen // size)]
            assert entries[: len(blocks)] == blocks

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        assert self.group.pool.num_used <= BLOCKS
        for view, tokens in self.views:
            assert [len(row) for row in tokens] == list(view.lengths)
            for site in range(len(SITES)):
                assert [read(view, i, site) for i in range(len(tokens))] == tokens

    def teardown(self) -> None:
        reset_config()
        if sys.exc_info()[0] is not None or not hasattr(self, "manager"):
            return
        self.views.clear()
        self.kept.clear()
        self.manager.check_integrity()
        assert self.group.pool.num_used == 0
        assert self.manager.trim() >= 0
        assert self.group.pool.capacity == 1


TestManagerMachine = ManagerMachine.TestCase


def test_integrity_check_can_fail() -> None:
    manager = Manager()
    group = manager.group(SITES, 8)
    view = manager.create(group, 1, 9, "kept").view
    group.pool.retain(view.rows[0].blocks[0])
    with pytest.raises(Exception, match=r"is in 1 row\(s\) but has 2 owners"):
        manager.check_integrity()
