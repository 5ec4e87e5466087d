"""Steps that begin while their swapped blocks are on their way."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from paged_inductor import KVBudgetExceeded, configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import View
from paged_inductor.runtime.arrival import Arrival
from paged_inductor.runtime.disk import _DiskExtent

from .test_transfers import World


@pytest.fixture
def world() -> Iterator[Callable[[int], World]]:
    yield World
    reset_config()


@contextmanager
def running(here: World, view: View) -> Iterator[Arrival]:
    """A step with `view`, whose blocks are on their way."""
    here.runtime.begin([view], [view])
    try:
        arrival = here.runtime.arrival(view)
        assert arrival is not None
        yield arrival
        here.runtime.complete([view])
    finally:
        here.runtime.end([view])


@contextmanager
def gated(free: int = 0) -> Iterator[threading.Event]:
    """Files' contents are not proven before the gate is open, but for the first `free` layers that are read."""
    gate = threading.Event()
    original, count = _DiskExtent._check, itertools.count()

    def check(self: _DiskExtent, site: int, spans: Any) -> None:
        assert next(count) < free or gate.wait(60)
        original(self, site, spans)

    with mock.patch.object(_DiskExtent, "_check", check):
        yield gate


def test_the_books_while_blocks_are_on_their_way(world: Callable[[int], World]) -> None:
    """Everybody but the step sees them swapped. The step's own tables have the blocks that they will be in."""
    here = world(0)
    here.make(1)
    assert here.out() == 3
    view = here.runtime.append(here.caches[1], 4, later=True).view
    with gated() as gate, running(here, view) as arrival:
        here.runtime.check_integrity()
        assert all(block < 0 for block in here.caches[1].rows[0].blocks[:3])
        table = here.runtime.schedule(view).block_table[0, :4].tolist()
        assert table == [*arrival.blocks.values(), view.rows[0].blocks[3]]
        gate.set()
        arrival.wait([0])
        assert all((here.group.arenas[0][block] == 1).all() for block in table[:3])
    assert view.rows[0].blocks == table
    assert here.runtime.counters.swaps_in == 3
    assert here.runtime.swap.storage.used() == {"host": 0, "disk": 0}
    here.check()


def test_a_step_within_the_step_has_everything_brought_back(world: Callable[[int], World]) -> None:
    here = world(0)
    here.make(1)
    assert here.out() == 3
    view = here.caches[1]
    with running(here, view) as arrival:
        with here.runtime.using(view):
            assert here.runtime.arrival(view) is None
            assert all(block > 0 for block in view.rows[0].blocks)
        arrival.wait([0])
    here.check()


def test_a_site_has_arrived_when_the_last_extent_has(world: Callable[[int], World]) -> None:
    """A cache of which a part was used later, and left later."""
    here = world(0)
    here.make(1)
    view = here.caches[1]
    fork = here.runtime.append(here.runtime.derive(view, view.rows, (16,), 16), 16).view
    with here.runtime.using(fork):  # the first block, and one of its own
        pass
    assert [here.out(wanted=1), here.out(wanted=1)] == [2, 2]
    with gated(free=1) as gate, running(here, view) as arrival:
        waiting = threading.Thread(target=arrival.wait, args=([0],))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        gate.set()
        waiting.join()
        assert all((here.group.arenas[0][block] == 1).all() for block in arrival.blocks.values())
    here.check()


def test_others_that_used_the_cache_have_gone(world: Callable[[int], World]) -> None:
    here = world(0)
    here.make(1)
    view = here.runtime.append(here.caches[1], 4).view
    with here.runtime.using(view):
        pass
    assert here.out(wanted=4) == 4
    crop = here.runtime.derive(view, view.rows, (16,), 16)
    with gated() as gate, running(here, crop):
        del view
        here.caches.clear()
        here.runtime.check_integrity()
        gate.set()
    assert len(crop.rows[0].blocks) == 1
    assert here.group.pool.num_used == 1
    here.caches[1] = crop
    here.check()


def test_no_room_for_what_would_come_back(world: Callable[[int], World]) -> None:
    """It is said before the step begins, and nothing has changed."""
    here = world(0)
    here.make(1)
    assert here.out() == 3
    here.make(2)
    configure(kv_budget=5 * here.group.block_bytes, swap_disk=0)
    with here.runtime.using(here.caches[2]), pytest.raises(KVBudgetExceeded):
        here.runtime.append(here.caches[1], 1, later=True)
    assert here.group.pool.num_swapped == 3
    configure(kv_budget=100 * here.group.block_bytes)
    here.check()
