"""What Ctrl-C must not stop is done all the same, and the interruption is not lost."""

from __future__ import annotations

import threading

import pytest

from paged_inductor.runtime.counters import Counters
from paged_inductor.runtime.insist import insist
from paged_inductor.runtime.swap import SwapSpace


@pytest.mark.parametrize("times", [0, 1, 3])
def test_it_is_done_and_the_last_interruption_raised(times: int) -> None:
    done: list[str] = []
    left = [f"interruption {n}" for n in range(times)]

    def action() -> None:
        if left:
            raise KeyboardInterrupt(left.pop(0))
        done.append("done")

    if times:
        with pytest.raises(KeyboardInterrupt, match=f"interruption {times - 1}"):
            insist(action)
    else:
        insist(action)
    assert done == ["done"]


@pytest.mark.parametrize("before", [False, True], ids=["after the lock was taken", "before"])
def test_the_books_are_held_once_whenever_the_wait_for_them_is_interrupted(before: bool) -> None:
    lock = threading.RLock()
    idle = threading.Condition(lock)
    left = [True]

    def acquire() -> None:
        interrupted = left.pop() if left else False
        if interrupted and before:
            raise KeyboardInterrupt
        lock.acquire()
        if interrupted:
            raise KeyboardInterrupt

    idle.acquire = acquire  # type: ignore[method-assign, assignment]
    space = SwapSpace([], idle, Counters())
    with lock:
        with pytest.raises(KeyboardInterrupt), space._unlocked():
            assert not lock._is_owned()  # type: ignore[attr-defined]
        assert lock._is_owned()  # type: ignore[attr-defined]
    assert not lock._is_owned()  # type: ignore[attr-defined]
