"""The line of steps that wait for memory: whose turn it is."""

from __future__ import annotations

import time
from itertools import count

__all__ = ["Line", "Turn"]

AGEING_SECONDS = 0.5
"""A waiting step gains one priority in this time, so that it goes first in the end, whoever else comes."""


class Turn:
    """A step's place in the line."""

    __slots__ = ("number", "priority", "since")

    def __init__(self, priority: int, number: int) -> None:
        self.priority = priority
        self.number = number
        self.since = time.monotonic()


class Line:
    """Waiting steps. Highest priority first, raised by how long they have waited; then first come, first served."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, priority: int) -> Turn:
        """A place in the line."""
        turn = Turn(priority, next(self._numbers))
        self._turns.append(turn)
        return turn

    def leave(self, turn: Turn) -> None:
        """Give a place up, if it was not given up before."""
        if turn in self._turns:
            self._turns.remove(turn)

    def first(self, turn: Turn | None) -> bool:
        """Whether it is this step's turn. None: a step that has not joined, whose turn it is if nobody waits."""
        if not self._turns:
            return True
        now = time.monotonic()
        ahead = max(self._turns, key=lambda t: (t.priority + (now - t.since) / AGEING_SECONDS, -t.number))
        return ahead is turn
