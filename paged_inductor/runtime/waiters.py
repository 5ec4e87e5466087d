"""Steps that wait for memory: who waits, who goes first, and who has to give back what it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from .counters import Counters
from .group import CacheGroup
from .line import Line, Turn

__all__ = ["Preempted", "Waiters"]

PATIENCE = 0.05  # seconds after which a waiting step looks again, whether or not it was told to
TURN = 8  # steps that a thread begins while others wait, until it waits for them
WORTH = 4  # times as long as its blocks took to come back, a turn lasts at least
BEGINNING = 2.0  # seconds that a step may take from the making of its views to its beginning


class Preempted(Exception):
    """A step must give back what it holds and begin anew, so that others that wait for memory can go on."""


class _Thread(threading.local):
    """The current thread. restartable: it is prepared for `Preempted`. impatient: it is preempted where it would have
    to wait. turn: of one that waits. steps: begun in its turn while others waited. until: so long its turn lasts at
    least, by `time.monotonic`."""

    restartable = False
    impatient = False
    turn: Turn | None = None
    steps = 0
    until = 0.0


class Waiters:
    """The steps that wait for memory. Obligation for every method but `preemptible` and `impatient`: the caller holds
    the manager's lock, which is given up while it waits."""

    def __init__(self, groups: Collection[CacheGroup], idle: threading.Condition, counters: Counters) -> None:
        """groups: a live view of all groups. idle: of the manager's lock; notified when steps or transfers end."""
        self._groups = groups
        self._idle = idle
        self._counters = counters
        self._line = Line()
        self._thread = _Thread()

    def __len__(self) -> int:
        return len(self._line)

    # -- the current thread ----------------------------------------------------------------------------------

    @contextmanager
    def preemptible(self) -> Iterator[None]:
        """Inside, this thread is prepared for `Preempted`, and keeps its turn when it is; else it waits with whatever
        it holds."""
        before = self._thread.restartable
        self._thread.restartable = True
        try:
            yield
        finally:
            self._thread.restartable = before
            if not before and self._thread.turn is not None:
                with self._idle:
                    self.leave()

    @contextmanager
    def impatient(self) -> Iterator[None]:
        """Inside, this thread is preempted where it would have to wait: others need what it holds to end."""
        before = self._thread.impatient
        self._thread.impatient = True
        try:
            yield
        finally:
            self._thread.impatient = before

    @property
    def restartable(self) -> bool:
        """Whether this thread is prepared for `Preempted`."""
        return self._thread.restartable

    # -- waiting ---------------------------------------------------------------------------------------------

    def must_wait(self) -> bool:
        """Whether it is another step's turn. Who has views for a step already goes on, to give them back soon."""
        return not self._line.first(self._thread.turn) and not self._pins()[0]

    def had_its_turn(self) -> bool:
        """Whether this thread has begun so many steps while others waited that its next one waits for them, though it
        may have all it needs. Not a thread that holds what others need, nor one that cannot begin anew."""
        thread = self._thread
        if not thread.restartable or thread.impatient or thread.steps < TURN:
            return False
        if thread.turn is None and time.monotonic() < thread.until:
            return False
        me = threading.get_ident()
        return not any(me in pin.steps for group in self._groups for pin in group.pins.values())

    def began(self) -> None:
        """This thread begins a step. If it waited for it, its next turn begins."""
        if self._thread.turn is not None:
            self._thread.steps = 0
            self.leave()
        if len(self._line):
            self._thread.steps += 1

    def came_back(self, seconds: float) -> None:
        """It took so long to bring this thread's blocks back: its turn shall be worth that."""
        self._thread.until = time.monotonic() + WORTH * seconds

    def wait(self, priority: int, cool: Callable[[int], object], exceeded: Callable[[], Exception]) -> None:
        """Wait for other steps to end. Raises `exceeded()` if there is nothing to wait for, or `Preempted`.

        cool: is told when the caches of this step count as used the last time: before those of steps that do not wait,
        and of those that wait, the last goes first.
        """
        own, others = self._pins()
        if not others and self._line.first(self._thread.turn):
            raise exceeded()
        joins = self._thread.turn is None
        if joins:
            turn = self._thread.turn = self._line.join(priority)
            cool(-turn.number)
        if own and self._thread.restartable:
            self._counters.preempted_steps += 1
            raise Preempted
        if self._thread.impatient:
            raise Preempted
        if joins:  # it may be first: of a high priority
            return
        try:
            self._idle.wait(PATIENCE)
        except BaseException:  # interrupted: the caller may not know of its turn, and all others would wait for it
            self.leave()
            raise

    def others_transfer(self) -> bool:
        """Whether another thread copies blocks."""
        return bool(self._transferring() - {threading.get_ident()})

    def _transferring(self) -> set[int]:
        return {transfer.thread for group in self._groups for transfer in group.pool.transfers}

    def wait_for_others(self) -> None:
        """Let other steps or transfers go on for a moment."""
        self._idle.wait(PATIENCE)

    def leave(self) -> None:
        """This thread waits no more."""
        turn = self._thread.turn
        if turn is not None:
            self._thread.turn = None
            self._line.leave(turn)
            self._idle.notify_all()

    def _pins(self) -> tuple[bool, bool]:
        """Whether this thread has views for a step that has not begun, and whether others' steps run or begin, or
        their transfers are under way."""
        me, now = threading.get_ident(), time.monotonic()
        pins = [pin for group in self._groups for pin in group.pins.values()]
        fresh = [pin for pin in pins if not pin.steps]
        own = any(pin.maker == me for pin in fresh)
        others = any(pin.maker != me and now - pin.since < BEGINNING for pin in fresh)
        busy = {thread for pin in pins for thread in pin.steps} | self._transferring()
        return own, others or bool(busy - {me})
