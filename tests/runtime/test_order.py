"""Work on one group's blocks from several streams, with streams that only note who waits for whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_inductor.runtime import CacheGroup, Manager, Schedule, SiteSpec, View
from paged_inductor.runtime.order import StreamOrder
from paged_inductor.runtime.sanitizer import Sanitizer

CPU = torch.device("cpu")
ACTIONS = ("begin", "end", "drop", "trim", "read", "join", "tables", "tables")


class Stream:
    """A stream as a vector clock: how much of every stream's work comes before what it is given next."""

    def __init__(self) -> None:
        self.behind: Counter[Stream] = Counter()
        self.waits = 0

    def wait_stream(self, other: Stream) -> None:
        self.behind |= other.behind
        self.waits += 1

    def launch(self) -> None:
        self.behind[self] += 1

    def is_behind(self, work: Counter[Stream]) -> bool:
        return work <= self.behind


class Device:
    """One group on several streams. finished: the work of steps that have ended, and of what no step does."""

    def __init__(self, num_streams: int) -> None:
        self.streams = [Stream() for _ in range(num_streams)]
        self.current = self.streams[0]
        self.finished: Counter[Stream] = Counter()
        self.ordered = True
        self.filled: dict[Schedule, Counter[Stream]] = {}  # the launch that filled a schedule's tensors
        self.runtime = Manager()
        sites = (SiteSpec(1, 4, torch.float32, CPU),) * 2
        self.group = self.runtime.group(sites, 4)
        self.group.order = StreamOrder(CPU)

    def launch(self) -> None:
        """Work of the current stream on blocks: behind all that has ended."""
        self.ordered &= self.current.is_behind(self.finished)  # views die where nothing can be raised
        self.current.launch()

    def filling(self) -> Any:
        """A patch: a schedule that is made launches its copies."""
        make = Schedule.__init__

        def made(schedule: Schedule, *args: Any) -> None:
            make(schedule, *args)
            self.current.launch()
            self.filled[schedule] = Counter({self.current: self.current.behind[self.current]})

        return mock.patch.object(Schedule, "__init__", made)

    def read_tables(self, view: View) -> None:
        """A kernel of the current stream that a step launches, and that reads the view's tables."""
        schedule = self.runtime.schedule(view)
        self.ordered &= self.current.is_behind(self.filled[schedule])
        self.launch()

    def outside_of_steps(self, owner: Any, name: str) -> Any:
        """A patch: a method that launches something itself, in the end."""
        method: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any) -> Any:
            result = method(*args)
            self.launch()
            self.finished |= self.current.behind
            return result

        return mock.patch.object(owner, name, watched)


@settings(max_examples=500)
@given(
    st.integers(1, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS), st.integers(0, 9)), min_size=20, max_size=60),
)
def test_work_comes_after_all_that_has_ended(
    num_streams: int, sanitized: bool, actions: list[tuple[int, str, int]]
) -> None:
    device = Device(num_streams)

    def current_stream(_: torch.device) -> Stream:
        return device.current

    with (
        mock.patch("torch.accelerator.current_stream", current_stream),
        mock.patch("torch.Tensor.record_stream"),
    ):
        runtime, group = device.runtime, device.group
        runtime.sanitize(sanitized)
        views: list[View] = []
        running: list[tuple[View, Stream]] = []

        def begin(number: int) -> None:
            old = views[number % len(views)] if views and number else None
            made = runtime.append(old, 3) if old is not None else runtime.create(group, 2, 3, "test")
            runtime.begin([made.view])
            running.append((made.view, device.current))

        def end(number: int) -> None:
            view, device.current = running.pop(number % len(running))
            device.current.launch()
            runtime.end([view])
            device.finished |= device.current.behind
            views.append(view)

        with (
            device.outside_of_steps(CacheGroup, "resize"),
            device.outside_of_steps(SiteSpec, "put"),
            device.outside_of_steps(Schedule, "advance"),
            device.outside_of_steps(Sanitizer, "poison"),
            device.filling(),
        ):
            for stream, action, number in actions:
                device.current = device.streams[stream % num_streams]
                if action == "begin" and (not running or group.pool.num_free > 8):  # arenas grow between steps
                    begin(number)
                elif action == "end" and running:
                    end(number)
                elif action == "drop" and views:
                    del views[number % len(views)]
                elif action == "trim" and not running:
                    runtime.trim()
                elif action == "read" and views:
                    with runtime.using(views[0]):
                        device.read_tables(views[0])
                    device.finished |= device.current.behind
                elif action == "join" and (running or views):  # a second step on a view, perhaps a running one
                    views_now = [view for view, _ in running] + views
                    view = views_now[number % len(views_now)]
                    runtime.begin([view])
                    running.append((view, device.current))
                    del view, views_now
                elif action == "tables" and running:
                    device.current = running[number % len(running)][1]
                    device.read_tables(running[number % len(running)][0])
            while running:
                end(0)
            views.clear()
        assert device.ordered
        assert num_streams > 1 or device.streams[0].waits == 0


def test_two_steps_on_one_view_begin_before_its_tables_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(2)
    monkeypatch.setattr("torch.accelerator.current_stream", lambda _: device.current)
    with mock.patch("torch.Tensor.record_stream") as kept, device.filling():
        view = device.runtime.create(device.group, 2, 3, "test").view
        for work in (device.runtime.begin, lambda views: device.read_tables(*views), device.runtime.end):
            for stream in device.streams:
                device.current = stream
                work([view])
        assert device.ordered
        assert kept.call_count == 4  # both tables, for both streams
        del view


def test_one_stream_waits_for_nobody_and_keeps_nothing() -> None:
    stream, tensor = Stream(), mock.Mock()
    order = StreamOrder(CPU)
    with mock.patch("torch.accelerator.current_stream", return_value=stream):
        for _ in range(3):
            order.follow()
            order.launched()
            order.keep([tensor])
    assert (stream.waits, order.several, tensor.record_stream.call_count) == (0, False, 0)


def test_streams_wait_once_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = Stream(), Stream(), Stream()
    order, tensor = StreamOrder(CPU), mock.Mock()
    for stream in (first, second, third, third, first):
        monkeypatch.setattr("torch.accelerator.current_stream", lambda _, stream=stream: stream)
        order.follow()
        order.launched()
    assert [stream.waits for stream in (first, second, third)] == [1, 1, 1]
    order.keep([tensor])
    tensor.record_stream.assert_called_once_with(first)
