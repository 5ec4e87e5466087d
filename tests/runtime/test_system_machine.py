"""Tenants, shared prefixes, forks, swapping and faults together: no token is lost, changed, or seen by who must not.

Every cached number says which prompt it belongs to: it is made of all tokens up to its own.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged_inductor import KVBudgetExceeded, SwapError, configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import (
    CacheGroup,
    Manager,
    Policy,
    RowNames,
    SiteSpec,
    StepViews,
    Tokens,
    View,
    lend,
    settle,
)
from paged_inductor.runtime.tenants import entered

CPU = torch.device("cpu")
SITES = [
    (SiteSpec(2, 8, torch.float32, CPU, True), SiteSpec(2, 8, torch.float32, CPU)),
    (SiteSpec(1, 8, torch.float32, CPU),),
]
KEPT = (None, 11)  # how many of the last tokens a cache shows of each group
SHARES = {"a": "none", "b": "none", "c": "system", "d": "tenant", "e": "tenant", "f": "global", "g": "global"}
SIZE, BLOCKS, MAX_CACHES, MAX_TOKENS = 8, 40, 8, 60
some = st.randoms(use_true_random=False)
texts = st.lists(st.integers(0, 1), min_size=1, max_size=20)


@dataclass
class Cache:
    """A conversation: its views, one of each group, and the tokens of its rows, which are all the same."""

    tenant: str
    views: list[View]
    ids: list[int]
    registered: int = 0


class SystemMachine(RuleBasedStateMachine):
    """Caches of seven tenants under one budget. Any operation may find memory short; then nothing has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Manager()
        self.groups: list[CacheGroup] = [self.runtime.group(sites, SIZE) for sites in SITES]
        self.caches: list[Cache] = []
        self.numbers: dict[tuple[int, ...], int] = {}
        self.system: list[list[int]] = []
        for name, share in SHARES.items():
            self.runtime.tenants.named(name).share = share
        self.sizes = sum(group.block_bytes for group in self.groups)

    @initialize(host=st.sampled_from([0, 5000, 2**30]), disk=st.booleans())
    def begin(self, host: int, disk: bool) -> None:
        configure(kv_budget=BLOCKS * self.sizes, swap_host=host, swap_disk=2**30 if disk else 0)

    # -- helpers ---------------------------------------------------------------------------------------------

    @contextmanager
    def acting(self, tenant: str) -> Iterator[None]:
        token = entered.set(tenant)
        try:
            yield
        finally:
            entered.reset(token)

    def pick(self, random: Random) -> Cache:
        return self.caches[random.randrange(len(self.caches))]

    def number(self, ids: list[int], at: int) -> int:
        return self.numbers.setdefault(tuple(ids[: at + 1]), len(self.numbers) + 1)

    def policy(self, tenant: str, registering: bool = False) -> Policy:
        return Policy.of(self.runtime.tenants.named(tenant), registering)

    @staticmethod
    def root(g: int) -> bytes:
        return sha256(bytes([g])).digest()

    def fill(self, view: View, step: StepViews, ids: list[int], old: int) -> None:
        """What a model does: write the new tokens of all sites, each when its old ones have arrived, which it sees."""
        for arena in view.group.arenas:
            for source, target in step.copies:
                arena[target] = arena[source]
        arrival = self.runtime.arrival(view)
        table = self.runtime.schedule(view).block_table.tolist()
        for s, arena in enumerate(view.group.arenas):
            if arrival is not None:
                arrival.wait([s])
            for row, blocks in zip(view.rows, table):
                for at in range(row.skipped * SIZE, len(ids)):
                    slot = arena[blocks[at // SIZE - row.skipped], :, at % SIZE]
                    if at >= old:
                        slot.fill_(self.number(ids, at) + s / 4)
                    assert (slot == self.number(ids, at) + s / 4).all()

    def right(self, cache: Cache) -> None:
        """All tokens of a cache that is in place and shown."""
        stop = len(cache.ids)
        for view in cache.views:
            for row, seen in zip(view.rows, view.lengths):
                assert seen == stop - row.skipped * SIZE
                for s, arena in enumerate(view.group.arenas):
                    shown = arena[row.blocks].transpose(1, 2).flatten(0, 1)[seen - view.length : seen]
                    wanted = [self.number(cache.ids, at) + s / 4 for at in range(stop - view.length, stop)]
                    assert torch.equal(shown, torch.tensor(wanted)[:, None, None].expand_as(shown))

    def grown(self, cache: Cache, ids: list[int], batch: int, registering: bool = False, later: bool = False) -> Cache:
        """A step: `cache`, whose views may be none, with more tokens. As a compiled program does it. later: the step
        may begin before swapped blocks are back."""
        longer = [*cache.ids, *ids]
        views: list[View] = []
        steps: list[StepViews] = []
        for g, group in enumerate(self.groups):
            if cache.views:
                steps.append(self.runtime.append(cache.views[g], len(ids), later))
            else:
                steps.append(self.runtime.create(group, batch, len(ids), "prompt"))
            views.append(steps[-1].view)
        self.runtime.begin(views, views if later else ())
        try:
            for view, step in zip(views, steps):
                self.fill(view, step, longer, len(cache.ids))
            self.runtime.complete(views)
        finally:
            self.runtime.end(views)
        policy = self.policy(cache.tenant, registering)
        for g, view in enumerate(views):
            names = []
            for row in view.rows:
                known = row.names if cache.ids else RowNames(self.root(g))
                if known is not None and known.length(SIZE) == len(cache.ids):
                    names.append(known.extended(ids, {}, (), SIZE))
                else:
                    names.append(None)
            settle(self.runtime, view, names, policy)
            kept = KEPT[g]
            if kept is not None and view.length > kept:
                views[g] = self.runtime.suffix(view, kept)
        return Cache(cache.tenant, views, longer)

    room = precondition(lambda self: len(self.caches) < MAX_CACHES)
    some_cache = precondition(lambda self: bool(self.caches))

    # -- steps -----------------------------------------------------------------------------------------------

    @room
    @rule(tenant=st.sampled_from(sorted(SHARES)), ids=texts, more=texts, batch=st.integers(1, 2))
    def prompt(self, tenant: str, ids: list[int], more: list[int], batch: int) -> None:
        ids = ids + more
        with self.acting(tenant):
            policy, start = self.policy(tenant), Cache(tenant, [], [])
            try:
                if policy.shares:
                    roots = [self.root(g) for g in range(len(self.groups))]
                    prompts = [Tokens(ids)] * batch
                    lent = lend(self.runtime, self.groups, roots, KEPT, prompts, len(ids) - 1, policy, "lent")
                    if lent is not None:
                        start = Cache(tenant, list(lent.views), ids[: lent.length])
                self.caches.append(self.grown(start, ids[len(start.ids) :], batch))
            except KVBudgetExceeded:
                pass

    @rule(ids=texts, more=texts)
    def register(self, ids: list[int], more: list[int]) -> None:
        with self.acting("c"):
            try:
                self.grown(Cache("c", [], []), ids + more, 1, registering=True)
            except KVBudgetExceeded:
                return
        self.system.append(ids + more)

    @some_cache
    @rule(random=some, ids=texts, keep=st.booleans(), later=st.booleans())
    def step(self, random: Random, ids: list[int], keep: bool, later: bool) -> None:
        cache = self.pick(random)
        if len(cache.ids) > MAX_TOKENS:
            return
        with self.acting(cache.tenant):
            try:
                longer = self.grown(cache, ids, 1, later=later)
            except (KVBudgetExceeded, SwapError) as error:
                self.lost(cache, error)
                return
        if not keep or len(self.caches) >= MAX_CACHES:
            self.caches = [other for other in self.caches if other is not cache]
        self.caches.append(longer)

    def lost(self, cache: Cache, error: Exception) -> None:
        """A cache whose swapped tokens were damaged is given up; one that found no room is not."""
        if isinstance(error, SwapError):
            assert self.damaged
            self.caches = [other for other in self.caches if other is not cache]

    damaged = False

    @some_cache
    @room
    @rule(random=some, where=st.floats(0, 1))
    def crop(self, random: Random, where: float) -> None:
        cache = self.pick(random)
        length = int(where * len(cache.ids))
        less = len(cache.ids) - length
        if any(view.length < less for view in cache.views):  # a window has lost these tokens
            return
        with self.acting(cache.tenant):
            views = [
                self.runtime.derive(view, view.rows, [seen - less for seen in view.lengths], view.length - less)
                for view in cache.views
            ]
        self.caches.append(Cache(cache.tenant, views, cache.ids[:length]))

    @some_cache
    @rule(random=some)
    def drop(self, random: Random) -> None:
        cache = self.pick(random)
        self.caches = [other for other in self.caches if other is not cache]

    @some_cache
    @rule(random=some)
    def use(self, random: Random) -> None:
        cache = self.pick(random)
        try:
            with self.runtime.using(*cache.views):
                self.right(cache)
        except (KVBudgetExceeded, SwapError) as error:
            self.lost(cache, error)

    # -- memory ----------------------------------------------------------------------------------------------

    @rule(wanted=st.integers(1, 30))
    def swap_out(self, wanted: int) -> None:
        with self.runtime.locked():
            for group in self.groups:
                self.runtime.swap.out(group, wanted, ())

    @rule(blocks=st.integers(10, 2 * BLOCKS))
    def budget(self, blocks: int) -> None:
        configure(kv_budget=blocks * self.sizes)

    @rule(tenant=st.sampled_from(sorted(SHARES)), blocks=st.integers(4, 30), priority=st.integers(-1, 1))
    def settings(self, tenant: str, blocks: int, priority: int) -> None:
        who = self.runtime.tenants.named(tenant)
        who.limit, who.priority = max(who.used, blocks * self.sizes), priority

    @rule()
    def trim(self) -> None:
        self.runtime.trim()

    # -- faults ----------------------------------------------------------------------------------------------

    @rule(wanted=st.integers(1, 30))
    def full_disk(self, wanted: int) -> None:
        with mock.patch.object(os, "pwrite", side_effect=OSError(errno.ENOSPC, "full")):
            self.swap_out(wanted)

    @precondition(lambda self: self.runtime.swap.storage.used()["disk"])
    @rule(random=some, cut=st.booleans())
    def damage(self, random: Random, cut: bool) -> None:
        """A swap file is cut off, or one of its bytes is changed."""
        extents = [extent for extent in self.runtime.swap.storage._blocks if extent.tier.name == "disk"]
        if not extents:  # its last cache was collected meanwhile
            return
        extent: Any = extents[random.randrange(len(extents))]
        number, at = extent._file.fileno(), random.randrange(extent.size)
        if cut:
            os.ftruncate(number, at)
        else:
            os.pwrite(number, bytes([os.pread(number, 1, at)[0] ^ 1] if os.pread(number, 1, at) else [1]), at)
        self.damaged = True

    @some_cache
    @rule(random=some, ids=texts, kind=st.sampled_from(["growth", "step", "locked"]), later=st.booleans())
    def fail(self, random: Random, ids: list[int], kind: str, later: bool) -> None:
        """No memory for a larger arena, a model that raises, Ctrl-C in the middle of an entry: nothing has changed."""
        cache = self.pick(random)
        faults: dict[str, tuple[Any, str, type[BaseException]]] = {
            "growth": (CacheGroup, "resize", MemoryError),
            "step": (self, "fill", RuntimeError),
            "locked": (Manager, "_pin", KeyboardInterrupt),
        }
        where, name, fault = faults[kind]

        def struck(*args: Any) -> None:
            raise fault

        with self.acting(cache.tenant), mock.patch.object(where, name, struck):
            try:
                self.grown(cache, ids, 1, later=later)
            except (MemoryError, RuntimeError, KeyboardInterrupt, KVBudgetExceeded, SwapError) as error:
                self.lost(cache, error)

    # -- what holds ------------------------------------------------------------------------------------------

    @invariant()
    def sound(self) -> None:
        self.runtime._ahead._executor.submit(lambda: None).result()  # nothing moves while we look
        self.runtime.check_integrity()
        for tenant in self.runtime.tenants.all():
            assert tenant.used <= tenant.limit
        for cache in self.caches:
            if not any(row.away for view in cache.views for row in view.rows):
                self.right(cache)

    @invariant()
    def nobody_sees_another_tenants_blocks(self) -> None:
        owners: dict[tuple[int, int], list[tuple[Cache, int]]] = {}
        for cache in self.caches:
            for g, view in enumerate(cache.views):
                for row in view.rows:
                    seen = len(cache.ids) - row.skipped * SIZE
                    for j, block in enumerate(row.blocks[: -(-seen // SIZE)], row.skipped):
                        owners.setdefault((g, block), []).append((cache, j))
        for (first, j), *others in owners.values():
            for other, _ in others:
                together = first.tenant == other.tenant or SHARES[first.tenant] == SHARES[other.tenant] == "global"
                start = first.ids[: (j + 1) * SIZE]
                assert together or any(text[: len(start)] == start for text in self.system)

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            configure(kv_budget=2**30)
            for tenant in self.runtime.tenants.all():
                tenant.limit = float("inf")
            while self.caches:
                self.use_last()
            self.runtime._ahead._executor.shutdown()
            self.runtime.check_integrity()
            assert all(group.pool.num_used == group.pool.num_swapped == 0 for group in self.groups)
            assert self.runtime.swap.storage.used() == {"host": 0, "disk": 0}
        reset_config()

    def use_last(self) -> None:
        cache = self.caches.pop()
        try:
            with self.runtime.using(*cache.views):
                self.right(cache)
        except SwapError:
            assert self.damaged


TestSystemMachine = SystemMachine.TestCase


def test_the_machine_notices_a_wrong_token() -> None:
    machine = SystemMachine()
    machine.begin(0, False)
    machine.prompt("d", [0, 1] * 8, [1], 1)
    machine.sound()
    machine.groups[1].arenas[0][machine.caches[0].views[1].rows[0].blocks[1], 0, 3] += 1
    with pytest.raises(AssertionError):
        machine.sound()
    machine.runtime._ahead._executor.shutdown()
    machine.caches.clear()
    reset_config()
