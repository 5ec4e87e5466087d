"""Steps that wait for memory: whose turn it is, and that nobody waits with what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

from paged_inductor import KVBudgetExceeded, configure
from paged_inductor.runtime import CacheGroup, Manager, Preempted, SiteSpec, View
from paged_inductor.runtime.line import AGEING_SECONDS, Line

SITES = [(SiteSpec(heads, 8, torch.float32, torch.device("cpu")),) for heads in (2, 4)]
BLOCK = 16 * 2 * 8 * 4


def test_highest_priority_then_first_come() -> None:
    line = Line()
    assert line.first(None)
    low, high, later = line.join(0), line.join(2), line.join(2)
    assert [line.first(turn) for turn in (low, high, later, None)] == [False, True, False, False]
    line.leave(high)
    assert line.first(later)
    line.leave(later)
    assert line.first(low)


def test_who_waits_long_goes_before_higher_priorities() -> None:
    line = Line()
    low = line.join(0)
    low.since -= 5 * AGEING_SECONDS
    high = line.join(4)
    assert line.first(low)
    low.since += 2 * AGEING_SECONDS
    assert line.first(high)


def running_elsewhere(runtime: Manager, view: View) -> threading.Event:
    """Another thread's step with `view`, until the event is set."""
    began, end = threading.Event(), threading.Event()

    def work() -> None:
        with runtime.using(view):
            began.set()
            end.wait(10)

    threading.Thread(target=work, daemon=True).start()
    assert began.wait(10)
    return end


def test_a_step_waits_for_a_running_one(runtime: Manager) -> None:
    configure(kv_budget=4 * BLOCK, swap_host="1GiB")
    group = runtime.group(SITES[0], 16)
    other = runtime.create(group, 1, 64, "other").view
    end = running_elsewhere(runtime, other)
    made: list[View] = []
    waiting = threading.Thread(target=lambda: made.append(runtime.create(group, 1, 64, "mine").view))
    waiting.start()
    time.sleep(0.1)
    assert not made  # all of the budget is in use
    end.set()
    waiting.join(10)
    assert [block > 0 for block in made[0].rows[0].blocks] == [True] * 4
    assert all(block < 0 for block in other.rows[0].blocks)


def test_alone_it_fails_at_once(runtime: Manager) -> None:
    configure(kv_budget=4 * BLOCK, swap_host="1GiB")
    group = runtime.group(SITES[0], 16)
    with pytest.raises(KVBudgetExceeded):
        runtime.create(group, 1, 65, "too long")
    with runtime.using(runtime.create(group, 1, 64, "used").view), pytest.raises(KVBudgetExceeded):
        runtime.create(group, 1, 16, "while this thread's own step runs")


def preempted(runtime: Manager) -> tuple[CacheGroup, CacheGroup, threading.Event]:
    """This thread made a view of a small group, would have had to wait for another's step to get room in a large one,
    and has given the view back: the groups, and what ends that step. Obligation: it is `preemptible`."""
    configure(kv_budget=8 * BLOCK, swap_host="1GiB")
    small, large = (runtime.group(sites, 16) for sites in SITES)
    end = running_elsewhere(runtime, runtime.create(large, 1, 48, "other").view)
    first = runtime.create(small, 1, 16, "mine").view
    with pytest.raises(Preempted):
        runtime.create(large, 1, 32, "mine, too")
    del first
    return small, large, end


def test_a_step_that_holds_blocks_is_preempted(runtime: Manager) -> None:
    with runtime.preemptible():
        _, large, end = preempted(runtime)
        assert runtime.counters.preempted_steps == 1
        end.set()
        runtime.wait_for_others()
        second = runtime.create(large, 1, 32, "mine, too").view
        assert len(second.rows[0].blocks) == 2


def test_a_preempted_step_keeps_its_turn(runtime: Manager) -> None:
    with runtime.preemptible():
        small, large, end = preempted(runtime)
        made: list[View] = []
        later = threading.Thread(target=lambda: made.append(runtime.create(small, 1, 16, "later").view))
        later.start()
        time.sleep(0.1)
        assert not made  # there is room, but this thread came first
        end.set()
        mine = runtime.create(large, 1, 16, "mine").view
        with runtime.using(mine):
            later.join(10)
            assert made


def test_swapped_blocks_come_back_before_a_step_and_stay_while_it_runs(runtime: Manager) -> None:
    configure(kv_budget=4 * BLOCK, swap_host="1GiB")
    group = runtime.group(SITES[0], 16)
    view = runtime.create(group, 1, 40, "a").view
    with runtime.using(view):
        pass
    with runtime.locked():
        assert runtime.swap.out(group, 10, ()) == 3
    with runtime.using(view):
        assert all(block > 0 for block in view.rows[0].blocks)
        table = runtime.schedule(view).block_table
        with runtime.locked():
            assert runtime.swap.out(group, 10, ()) == 0
    assert table[0, :3].tolist() == view.rows[0].blocks


def test_interrupted_while_waiting_for_memory_it_leaves_the_line(runtime: Manager) -> None:
    configure(kv_budget=3 * BLOCK)
    group = runtime.group(SITES[0], 16)
    held = runtime.create(group, 1, 40, "held").view
    end = running_elsewhere(runtime, held)
    with (
        mock.patch.object(runtime._idle, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        runtime.create(group, 1, 1, "interrupted")
    end.set()
    del held
    assert len(runtime._budget.waiters) == 0


@pytest.mark.parametrize("name", ["_collect", "_leave"])
def test_interrupted_where_it_begins_or_ends_a_step_runs_no_more(runtime: Manager, name: str) -> None:
    group = runtime.group(SITES[0], 16)
    view = runtime.create(group, 1, 40, "view").view
    original = getattr(runtime, name)
    for call in range(1, 4):
        left = iter(range(call))

        def struck(*args: Any, left: Iterator[int] = left, last: int = call - 1, **kwargs: Any) -> None:
            if next(left, None) == last:
                raise KeyboardInterrupt
            original(*args, **kwargs)

        with mock.patch.object(runtime, name, struck), suppress(KeyboardInterrupt), runtime.using(view):
            pass
        assert (group.active, runtime.running_steps, group.pins) == (0, 0, {})
