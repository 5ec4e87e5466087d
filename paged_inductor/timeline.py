"""`timeline()`: memory in use and active sequences, sampled while a block of code runs, as data and as a picture."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, astuple, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ._amounts import size
from ._errors import ConfigurationError, missing_extra
from .runtime import manager
from .runtime.census import sequences

__all__ = ["Sample", "Timeline", "timeline"]

_VERSION = 1
_MOST = 20_000  # samples that are kept: a long recording is thinned out


@dataclass(frozen=True)
class Sample:
    """The books at one moment, `seconds` after the recording began.

    bytes_used, bytes_reserved: of the blocks that hold tokens, and of all arenas. blocks_used, blocks_free,
    blocks_cached, blocks_swapped: by state. sequences: live rows that are not swapped out. running_steps: steps under
    way.
    """

    seconds: float
    bytes_used: int
    bytes_reserved: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    blocks_swapped: int
    sequences: int
    running_steps: int


class Timeline:
    """A recording; use it as a context manager. What was sampled stays readable afterwards.

    samples: in the order of time. bytes_budget: what the arenas may take, as known last; None if never decided.
    """

    def __init__(self, interval: float) -> None:
        self.samples: list[Sample] = []
        self.bytes_budget: int | None = None
        self.interval = interval
        self._began = time.perf_counter()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        if not self.samples:
            return "<Timeline without samples>"
        most = size(max(sample.bytes_used for sample in self.samples))
        count = max(sample.sequences for sample in self.samples)
        seconds = self.samples[-1].seconds
        return f"<Timeline of {len(self.samples)} samples in {seconds:.1f} s: up to {most}, {count} sequences>"

    def __enter__(self) -> Timeline:
        self.samples.clear()
        self._ended.clear()
        self._began = time.perf_counter()
        self._thread = threading.Thread(target=self._record, name="paged_inductor.timeline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        self.sample()

    def _record(self) -> None:
        while True:
            self.sample()
            if self._ended.wait(self.interval):
                return

    def sample(self) -> Sample:
        """Take a sample now, beside those that are taken at every interval. Costs microseconds."""
        runtime = manager()
        with runtime.locked():
            groups = runtime.groups
            pools = [group.pool for group in groups]
            taken = Sample(
                seconds=time.perf_counter() - self._began,
                bytes_used=sum(group.pool.num_used * group.block_bytes for group in groups),
                bytes_reserved=sum(group.pool.capacity * group.block_bytes for group in groups),
                blocks_used=sum(pool.num_used for pool in pools),
                blocks_free=sum(pool.num_free for pool in pools),
                blocks_cached=sum(pool.num_cached for pool in pools),
                blocks_swapped=sum(pool.num_swapped for pool in pools),
                sequences=sequences(groups, resident=True),
                running_steps=runtime.running_steps,
            )
            self.bytes_budget = runtime.budget_bytes
            self.samples.append(taken)
            if len(self.samples) > _MOST:
                del self.samples[1::2]
                self.interval *= 2
        return taken

    def knee(self, full: float = 0.9) -> Sample | None:
        """Where memory is full and concurrency no longer grows: the first sample that uses at least the share `full` of
        the budget and after which there are never more sequences. None if there is none: memory was not what limited
        the sequences.
        """
        if self.bytes_budget is None:
            return None
        found, most = None, 0
        for sample in reversed(self.samples):
            most = max(most, sample.sequences)
            if sample.bytes_used >= full * self.bytes_budget and sample.sequences == most > 0:
                found = sample
        return found

    def as_dict(self) -> dict[str, Any]:
        """Everything, for tools: the columns under "samples", and the knee, if there is one."""
        knee = self.knee()
        names = [field.name for field in fields(Sample)]
        columns = list(zip(*map(astuple, self.samples))) or [()] * len(names)
        return {
            "version": _VERSION,
            "interval": self.interval,
            "bytes_budget": self.bytes_budget,
            "samples": {name: list(column) for name, column in zip(names, columns)},
            "knee": None if knee is None else asdict(knee),
        }

    def save(self, path: str | PathLike[str]) -> None:
        """Write `as_dict()` to a JSON file."""
        Path(path).write_text(json.dumps(self.as_dict()))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Timeline:
        """What `save` wrote. Raises `ConfigurationError` for another file."""
        try:
            found = json.loads(Path(path).read_text())
            recording = cls(found["interval"])
            recording.bytes_budget = found["bytes_budget"]
            recording.samples = [Sample(*row) for row in zip(*(found["samples"][f.name] for f in fields(Sample)))]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} is not a timeline that Timeline.save() wrote: {error!r}") from error
        return recording

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw memory in use against time and against active sequences, with the knee marked, into an image file.

        Raises `MissingExtraError` without matplotlib.
        """
        _draw(self, path)


def timeline(interval: float = 0.05) -> Timeline:
    """A context manager that samples the books every `interval` seconds, in a thread of its own.

    Raises `ConfigurationError` for an interval that is not positive.
    """
    if not isinstance(interval, int | float) or not interval > 0:
        raise ConfigurationError(f"interval={interval!r} is not allowed: give a positive number of seconds")
    return Timeline(float(interval))


def _draw(recording: Timeline, path: str | PathLike[str]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("Timeline.plot()", "matplotlib", "plot") from error
    samples, knee = recording.samples, recording.knee()
    seconds = [sample.seconds for sample in samples]
    used = [sample.bytes_used / 2**20 for sample in samples]
    count = [sample.sequences for sample in samples]
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    by_time, by_count = figure.subplots(1, 2)
    by_time.plot(seconds, [sample.bytes_reserved / 2**20 for sample in samples], color="#b8c1d1", label="reserved")
    by_time.plot(seconds, used, color="#2e6e9e", label="used")
    by_time.set(xlabel="seconds", ylabel="MiB")
    beside = by_time.twinx()
    beside.step(seconds, count, where="post", color="#e0a526", label="active sequences")
    beside.set(ylabel="active sequences", ylim=(0, None))
    by_count.scatter(count, used, s=14, color="#2e6e9e", alpha=0.5, label="samples")
    by_count.set(xlabel="active sequences", ylabel="MiB in use")
    for panel in (by_time, by_count):
        if recording.bytes_budget is not None and max(used, default=0) > 0.3 * recording.bytes_budget / 2**20:
            panel.axhline(recording.bytes_budget / 2**20, color="#c94f4f", linestyle="--", linewidth=1, label="budget")
        panel.set_ylim(0, None)
    if knee is not None:
        text = f"knee: {knee.sequences} sequences"
        by_time.axvline(knee.seconds, color="#c94f4f", linewidth=1, label=text)
        by_count.plot([knee.sequences], [knee.bytes_used / 2**20], "o", mfc="none", mec="#c94f4f", ms=12, label=text)
    figure.legend(*_handles(by_time, beside, by_count), loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def _handles(*panels: Any) -> tuple[list[Any], list[str]]:
    """Legend entries of several panels, each label once."""
    found: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
