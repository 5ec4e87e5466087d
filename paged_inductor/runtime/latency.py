"""How long steps take: histograms of fixed size, recorded in less than a microsecond a step."""

from __future__ import annotations

import threading
from itertools import accumulate
from math import ceil
from typing import NamedTuple

__all__ = ["Histogram", "Latencies", "Steps"]

_FINE = 3  # 2**3 buckets an octave: a quantile is at most an eighth too high
_PER_OCTAVE = 1 << _FINE
_OCTAVES = 45  # up to 2**(_OCTAVES + 2) ns: 39 hours
_BUCKETS = (_OCTAVES + 1) * _PER_OCTAVE
_BOUNDS = [(exponent - _FINE) * _PER_OCTAVE + _PER_OCTAVE - 1 for exponent in range(15, 36)]  # 2**exponent ns


def _upper(bucket: int) -> int:
    """The first time, in nanoseconds, that is too long for a bucket."""
    if bucket < _PER_OCTAVE:
        return bucket + 1
    shift = (bucket >> _FINE) - 1
    return ((bucket & (_PER_OCTAVE - 1)) + _PER_OCTAVE + 1) << shift


class Histogram:
    """Counts of times in buckets whose bounds grow by an eighth at most. Thread-safe."""

    __slots__ = ("_counts", "_lock", "_total")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._lock = threading.Lock()
        self._total = 0

    def record(self, nanoseconds: int) -> None:
        """Count one time."""
        shift = nanoseconds.bit_length() - 1 - _FINE
        bucket = (shift << _FINE) + (nanoseconds >> shift) if shift > 0 else max(0, nanoseconds)
        with self._lock:
            self._counts[bucket if bucket < _BUCKETS else -1] += 1
            self._total += nanoseconds

    @property
    def count(self) -> int:
        """How many times were recorded."""
        with self._lock:
            return sum(self._counts)

    @property
    def total(self) -> float:
        """Sum of all times, in seconds."""
        return self._total / 1e9

    def quantile(self, share: float) -> float:
        """The time, in seconds, that `share` of the recorded ones do not exceed, rounded up to its bucket's end; 0.0 if
        there are none."""
        with self._lock:
            sums = list(accumulate(self._counts))
        if not sums[-1]:
            return 0.0
        rank = max(1, ceil(share * sums[-1]))
        return _upper(next(i for i, reached in enumerate(sums) if reached >= rank)) / 1e9

    def buckets(self) -> list[tuple[float, int]]:
        """(upper bound in seconds, how many times are below it), at powers of two from 33 us to 34 s."""
        with self._lock:
            sums = list(accumulate(self._counts))
        return [(_upper(i) / 1e9, sums[i]) for i in _BOUNDS]


class Steps(NamedTuple):
    """Steps that belong together. program: its label. tenant: its name. phase: "decode" of steps of one token a row,
    "prefill" of all others."""

    program: str
    tenant: str
    phase: str

    @classmethod
    def of(cls, program: str, tenant: str, new_tokens: int) -> Steps:
        """Those of so many tokens a row."""
        return cls(program, tenant, "decode" if new_tokens == 1 else "prefill")


class Latencies:
    """A histogram of each kind of steps."""

    def __init__(self) -> None:
        self._histograms: dict[Steps, Histogram] = {}

    def record(self, steps: Steps, nanoseconds: int) -> None:
        """Count one step."""
        histogram = self._histograms.get(steps)
        if histogram is None:
            histogram = self._histograms.setdefault(steps, Histogram())
        histogram.record(nanoseconds)

    def all(self) -> dict[Steps, Histogram]:
        """Every histogram, in order."""
        return dict(sorted(self._histograms.items()))
