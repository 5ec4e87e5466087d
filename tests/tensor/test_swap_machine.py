"""The tensor machine with swapping: caches go to host memory and to disk, and come back, in the middle of everything;
and everything happens in another thread while blocks are on their way."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from paged_inductor import configure, trim
from paged_inductor.runtime import manager
from paged_inductor.runtime.swap import SwapSpace

from .test_tensor_machine import FORKS, MAX_CACHES, WRITES, TensorMachine, choose

PLENTY = 2**30
ACTIONS = ["create", "append", "fork", "crop", "write", "write", "drop", "drop", "out", "back", "interrupted"]
seeds = st.integers(0, 2**32)


@contextmanager
def meanwhile(action: Callable[[], object], late: bool) -> Iterator[None]:
    """Call `action` in another thread, once, while the first transfer is under way: before its copy or, if `late`,
    after it. It has 50 ms, and goes on beside the transfer if it waits for its end."""
    original = SwapSpace._unlocked
    threads: list[threading.Thread] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as failure:
            failures.append(failure)

    @contextmanager
    def unlocked(self: SwapSpace) -> Iterator[None]:
        first = not threads
        thread = threading.Thread(target=work)
        threads.append(thread)
        with original(self):
            if late:
                yield
            if first:
                thread.start()
                thread.join(0.05)
            if not late:
                yield

    with mock.patch.object(SwapSpace, "_unlocked", unlocked):
        yield
    for thread in threads[:1]:
        thread.join()
    if failures:
        raise failures[0]


class SwapMachine(TensorMachine):
    """Swapping changes nothing that a handle shows, whatever the tier and whatever goes wrong on the way out."""

    def __init__(self) -> None:
        super().__init__()
        configure(swap_host=0, swap_disk=PLENTY)

    def out(self, wanted: int) -> int:
        runtime = manager()
        with runtime.locked():
            return sum(runtime.swap.out(group, wanted, ()) for group in runtime.groups)

    @rule(wanted=st.integers(1, 30), host=st.sampled_from([0, 4000, PLENTY]))
    def swap_out(self, wanted: int, host: int) -> None:
        configure(swap_host=host)
        before = manager().counters.swaps_out
        moved = self.out(wanted)
        assert manager().counters.swaps_out == before + moved

    @rule(wanted=st.integers(1, 30))
    def swap_out_to_a_full_disk(self, wanted: int) -> None:
        configure(swap_host=0)
        full = OSError(errno.ENOSPC, "No space left on device")
        with mock.patch.object(os, "pwrite", side_effect=full):
            assert self.out(wanted) == 0

    @rule(wanted=st.integers(1, 30))
    def swap_out_where_no_tier_is(self, wanted: int) -> None:
        configure(swap_host=0, swap_disk=0)
        assert self.out(wanted) == 0
        configure(swap_disk=PLENTY)

    def anything(self, random: Random) -> None:
        """Some of the other operations."""
        with torch.inference_mode(self.inference):
            for _ in range(random.randint(1, 3)):
                self.one(random, random.choice(ACTIONS))
        manager().check_integrity()

    def one(self, random: Random, action: str) -> None:
        if len(self.caches) < MAX_CACHES and (action == "create" or not self.caches):
            self.create(1, random.randint(1, 40))
        elif len(self.caches) < MAX_CACHES or action not in ("create", "append", "fork", "crop"):
            if action == "append":
                self.append(random, random.randint(1, 20), random.random() < 0.5)
            elif action == "fork":
                self.fork(random, random.choice(sorted(FORKS)))
            elif action == "crop":
                self.crop(random, random.random())
            elif action == "write":
                self.write(random, random.choice(WRITES))
            elif action == "drop":
                self.drop(random, True)
            elif action == "out":
                self.out(random.randint(1, 30))
            elif action == "back":
                self.back(random)
            else:
                self.interrupted()

    def back(self, random: Random) -> None:
        view = choose(random, list(self.pick(random).values())).paged._view
        with manager().using(view):
            assert all(block > 0 for row in view.rows for block in row.blocks)

    @staticmethod
    def interrupted() -> None:
        """Ctrl-C in the middle of a change of the books: they are built anew."""
        try:
            with manager().locked():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass

    @rule(wanted=st.integers(1, 30), host=st.sampled_from([0, 4000, PLENTY]), seed=seeds, late=st.booleans())
    def swap_out_meanwhile(self, wanted: int, host: int, seed: int, late: bool) -> None:
        configure(swap_host=host)
        with meanwhile(lambda: self.anything(Random(seed)), late):
            self.out(wanted)

    @precondition(lambda self: 0 < len(self.caches) < MAX_CACHES)
    @rule(seed=seeds, host=st.booleans(), late=st.booleans())
    def swap_in_meanwhile(self, seed: int, host: bool, late: bool) -> None:
        configure(swap_host=PLENTY if host else 0)
        self.out(1000)
        with meanwhile(lambda: self.anything(Random(seed)), late):
            self.back(Random(seed + 1))

    @rule()
    def compact(self) -> None:
        trim()
        for group in manager().groups:
            assert group.pool.num_used == group.pool.capacity - 1


TestSwapMachine = SwapMachine.TestCase
