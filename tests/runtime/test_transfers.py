"""What others do while blocks are copied is respected, whatever the copy is for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest import mock

import pytest
import torch

from paged_inductor import configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, View
from paged_inductor.runtime.swap import SwapSpace
from paged_inductor.runtime.tenants import entered
from paged_inductor.runtime.tiers import HostTier, Part

SITES = (SiteSpec(2, 8, torch.float32, torch.device("cpu")),)


class World:
    """Caches of three blocks, each full of a number. host: how many blocks the host tier takes."""

    def __init__(self, host: int) -> None:
        self.runtime = Manager()
        self.group: CacheGroup = self.runtime.group(SITES, 16)
        size = self.group.block_bytes
        configure(kv_budget=100 * size, swap_host=host * size, swap_disk=2**30)
        self.caches: dict[float, View] = {}

    def make(self, value: float) -> None:
        view = self.runtime.create(self.group, 1, 48, str(value)).view
        with self.runtime.using(view):
            self.write(view, value)
        self.caches[value] = view

    def write(self, view: View, value: float) -> None:
        for block in view.rows[0].blocks:
            self.group.arenas[0][block] = value

    def change(self, value: float, new: float) -> None:
        """A step overwrites a cache."""
        self.caches[new] = self.caches.pop(value)
        with self.runtime.using(self.caches[new]):
            self.write(self.caches[new], new)

    def replace(self, value: float, new: float) -> None:
        """A cache is dropped, and another one gets its blocks."""
        del self.caches[value]
        self.make(new)

    def out(self, *kept: float, wanted: int = 3) -> int:
        rows = [self.caches[value].rows[0] for value in kept]
        with self.runtime.locked():
            return self.runtime.swap.out(self.group, wanted, rows)

    def check(self) -> None:
        self.runtime.check_integrity()
        for value, view in self.caches.items():
            with self.runtime.using(view):
                assert all((self.group.arenas[0][block] == value).all() for block in view.rows[0].blocks)
        self.runtime.check_integrity()


@pytest.fixture
def world() -> Iterator[Callable[[int], World]]:
    yield World
    reset_config()


@contextmanager
def during(number: int, late: bool, action: Callable[[], object]) -> Iterator[list[int]]:
    """Call `action` when the books are given up for the `number`-th time, after the copy if `late`. Yields a count."""
    original = SwapSpace._unlocked
    count = [0]

    @contextmanager
    def unlocked(self: SwapSpace) -> Iterator[None]:
        count[0] += 1
        mine = count[0] == number
        with original(self):
            if mine and not late:
                action()
            try:
                yield
            finally:
                if mine and late:
                    action()

    with mock.patch.object(SwapSpace, "_unlocked", unlocked):
        yield count


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("action", ["change", "replace"])
@pytest.mark.parametrize("number", [1, 2])
def test_on_the_way_out_while_older_ones_make_room(
    world: Callable[[int], World], number: int, action: str, late: bool
) -> None:
    """1 goes from host memory to disk, so that 2 can go to host memory."""
    here = world(3)
    here.make(1)
    here.make(2)
    assert here.out(2) == 3
    with during(number, late, lambda: getattr(here, action)(2, 3)) as count:
        assert here.out() == 3  # 3 itself goes then, unless it is new
    assert count[0] >= 2
    here.check()


@pytest.mark.parametrize("late", [False, True])
def test_on_the_way_out_when_the_first_tier_is_full(world: Callable[[int], World], late: bool) -> None:
    """Two of three blocks fit: while the three are on their way to a full disk, they are replaced."""
    here = world(2)
    here.make(2)
    with (
        mock.patch("os.pwrite", side_effect=OSError),
        during(1, late, lambda: here.replace(2, 3)),
    ):
        assert here.out() == 1
    here.check()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_on_the_way_back(world: Callable[[int], World], tier: str, late: bool) -> None:
    """Who reads 1 keeps it; 2 is dropped and its blocks are used again."""
    here = world(100 if tier == "host" else 0)
    here.make(1)
    here.make(2)
    assert here.out(wanted=6) == 6
    with during(1, late, lambda: here.replace(2, 3)), here.runtime.using(here.caches[1]):
        here.runtime.check_integrity()
    here.check()


@pytest.mark.parametrize("late", [False, True])
def test_older_ones_come_back_while_they_make_room(world: Callable[[int], World], late: bool) -> None:
    here = world(3)
    here.make(1)
    here.make(2)
    assert here.out(2) == 3
    with during(1, late, lambda: here.change(1, 4)):
        assert here.out() in (3, 6)
    here.check()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_begins_meanwhile_keeps_its_blocks(world: Callable[[int], World], number: int, late: bool) -> None:
    """It began while room was made, or while its blocks were copied, and still runs."""
    here = world(3)
    here.make(1)
    here.make(2)
    assert here.out(2) == 3
    view = here.caches[2]
    with during(number, late, lambda: here.runtime.begin([view])):
        assert here.out() == 0
    assert all(block > 0 for block in view.rows[0].blocks)
    here.write(view, 2)
    here.runtime.end([view])
    here.check()


def test_what_no_tier_takes_is_looked_for_again(world: Callable[[int], World]) -> None:
    """Between two attempts the blocks were given to a running step."""
    here = world(2)
    here.make(2)
    view = here.caches[2]
    with mock.patch("os.pwrite", side_effect=OSError), during(1, True, lambda: here.runtime.begin([view])):
        assert here.out() == 0
    here.runtime.end([view])
    here.check()


def test_a_group_that_is_made_meanwhile(world: Callable[[int], World]) -> None:
    """While one group's blocks leave for another group's sake."""
    here = world(100)
    here.make(1)
    here.make(2)
    other = here.runtime.group((SiteSpec(4, 8, torch.float32, torch.device("cpu")),), 16)
    third = (SiteSpec(1, 8, torch.float32, torch.device("cpu")),)
    configure(kv_budget=9 * here.group.block_bytes)
    with during(1, False, lambda: here.runtime.group(third, 16)) as count:
        made = here.runtime.create(other, 1, 48, "large").view
    assert count[0] >= 1
    del made
    here.check()


@pytest.mark.parametrize("late", [False, True])
def test_a_quota_waits_for_what_is_on_its_way(world: Callable[[int], World], late: bool) -> None:
    """The tenant's only cold cache leaves, for another thread's sake, when the tenant needs a block."""
    here = world(100)
    token = entered.set("small")
    try:
        here.make(1)
        here.make(2)
        here.runtime.tenants.named("small").limit = 6 * here.group.block_bytes
        made: list[View] = []
        failed: list[BaseException] = []

        def need() -> None:
            entered.set("small")
            try:
                made.append(here.runtime.append(here.caches[2], 1).view)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=need)

        def begin() -> None:
            thread.start()
            thread.join(0.1)

        with during(1, late, begin):
            here.out(2)
        thread.join(10)
        assert made and not failed
    finally:
        entered.reset(token)
    made.clear()
    here.check()


def test_books_that_are_rebuilt_keep_no_pins_of_the_dead(world: Callable[[int], World]) -> None:
    here = world(100)
    here.make(1)
    with suppress(KeyboardInterrupt), here.runtime.locked():
        view = here.runtime._derive(here.caches[1], here.caches[1].rows, (48,), 48)
        here.group.pin(view)
        del view  # it dies while the books are held, and the holder is interrupted
        raise KeyboardInterrupt
    assert here.group.pins == {}
    here.check()


def test_swapped_blocks_that_a_buffer_gives_up_are_forgotten(world: Callable[[int], World]) -> None:
    """Without the death of any view."""
    here = world(100)
    view = here.runtime.create_static(here.group, 1, 64, "buffer")
    here.runtime.extend(view, 48)
    with here.runtime.using(view):
        pass
    with here.runtime.locked():
        assert here.runtime.swap.out(here.group, 3, ()) == 3
    here.runtime.truncate(view, 0)
    here.runtime.check_integrity()
    assert here.runtime.swap.storage.used() == {"host": 0, "disk": 0}


def test_spare_buffers_and_extents_are_within_the_limit() -> None:
    """Buffers that do not fit the next extent give way to it."""
    tier = HostTier(100)
    small = [tier.make([part], 1) for part in [Part((10,), torch.uint8, print)] * 8]
    for extent in small:
        extent.close()
    assert sum(buffer.nbytes for buffer in tier._spare) == 80
    tier.make([Part((90,), torch.uint8, print)], 1)
    assert tier.used + sum(buffer.nbytes for buffer in tier._spare) <= 100
