"""Turns: a thread that has begun some steps while others wait for memory lets them go first, and its caches go out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from paged_inductor import configure
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, View
from paged_inductor.runtime.line import Turn
from paged_inductor.runtime.tenants import entered
from paged_inductor.runtime.waiters import TURN

SITES = (SiteSpec(2, 8, torch.float32, torch.device("cpu")),)
MORE = TURN + 3


Scope = Callable[[], AbstractContextManager[None]]


class Steps:
    """A thread goes on with a cache: `MORE` steps, while somebody who came first waits in the line."""

    def __init__(self, runtime: Manager, scope: Scope, outer: bool = False) -> None:
        self.runtime, self.scope, self.outer = runtime, scope, outer
        self.group: CacheGroup = runtime.group(SITES, 16)
        self.cold, self.view = (self.used(label) for label in ("cold", "view"))
        self.before: Callable[[], object] = lambda: None
        self.began = 0
        self.thread = threading.Thread(target=self.work)
        with runtime.locked():
            self.first: Turn = runtime._budget.waiters._line.join(0)

    def used(self, label: str) -> View:
        view = self.runtime.create(self.group, 1, 1, label).view
        with self.runtime.using(view):
            return view

    def work(self) -> None:
        self.before()
        with self.runtime.using(self.view) if self.outer else nullcontext():
            for _ in range(MORE):
                with self.scope():
                    self.view = self.runtime.append(self.view, 1).view
                    with self.runtime.using(self.view):
                        self.began += 1

    def go_on(self) -> int:
        """How many steps it begins until it waits."""
        self.thread.start()
        self.thread.join(0.2)
        return self.began

    def end(self) -> None:
        """The other one waits no more."""
        with self.runtime.locked():
            self.runtime._budget.waiters._line.leave(self.first)
        self.thread.join(10)
        assert self.began == MORE
        assert len(self.runtime._budget.waiters) == 0


def test_after_its_turn_a_thread_waits_and_its_cache_goes_first(runtime: Manager) -> None:
    configure(swap_host="1GiB")
    steps = Steps(runtime, runtime.preemptible)
    assert steps.go_on() == TURN
    with runtime.locked():
        assert runtime.swap.out(steps.group, 1, ()) == 1
    assert steps.view.rows[0].blocks[0] < 0  # though it was used last
    assert steps.cold.rows[0].blocks[0] > 0
    steps.end()
    assert steps.view.rows[0].blocks[0] > 0


def test_a_turn_is_worth_the_way_back(runtime: Manager) -> None:
    steps = Steps(runtime, runtime.preemptible)
    steps.before = lambda: runtime._budget.waiters.came_back(1e9)
    assert steps.go_on() == MORE
    steps.end()


def test_who_could_not_begin_anew_goes_on(runtime: Manager) -> None:
    steps = Steps(runtime, nullcontext)
    assert steps.go_on() == MORE
    steps.end()


def test_who_holds_what_others_need_goes_on(runtime: Manager) -> None:
    steps = Steps(runtime, runtime.preemptible, outer=True)
    assert steps.go_on() == MORE
    steps.end()


def test_a_higher_priority_goes_on(runtime: Manager) -> None:
    runtime.tenants.named("high").priority = 1000
    steps = Steps(runtime, runtime.preemptible)
    steps.before = lambda: entered.set("high")
    assert steps.go_on() == MORE
    steps.end()


def test_without_others_there_are_no_turns(runtime: Manager) -> None:
    steps = Steps(runtime, runtime.preemptible)
    with runtime.locked():
        runtime._budget.waiters._line.leave(steps.first)
    steps.go_on()
    steps.end()


def test_of_those_who_wait_the_last_goes_first(runtime: Manager) -> None:
    """It has the longest time to wait."""
    configure(swap_host="1GiB")
    group = runtime.group(SITES, 16)
    views = []
    for label in ("runs", "waits", "waits behind it"):
        views.append(runtime.create(group, 1, 1, label).view)
        with runtime.using(views[-1]):
            pass
    waiters = runtime._budget.waiters
    with runtime.locked():
        first = waiters._line.join(9)

    def wait(view: View) -> None:
        with runtime.locked():
            waiters.wait(0, lambda when: group.mark_used(view.rows, when), AssertionError)
            waiters.leave()

    for view in views[1:]:
        thread = threading.Thread(target=wait, args=(view,))
        thread.start()
        thread.join()
    with runtime.locked():
        waiters._line.leave(first)
    gone = []
    for _ in views:
        with runtime.locked():
            runtime.swap.out(group, 1, ())
        gone.append([view.rows[0].blocks[0] < 0 for view in views])
    assert gone == [[False, False, True], [False, True, True], [True, True, True]]
