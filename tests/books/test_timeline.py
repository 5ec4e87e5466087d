"""`timeline()`: what is sampled, where the knee is, and what is written."""

from __future__ import annotations

import gc
import json
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import paged_inductor
from paged_inductor import ConfigurationError, KVBudgetExceeded, MissingExtraError, Timeline, timeline
from paged_inductor.runtime import Manager, SiteSpec
from paged_inductor.timeline import _MOST, Sample

from ..models.zoo import Decoder, Form, generate

SITE = SiteSpec(2, 8, torch.float32, torch.device("cpu"))
EMPTY = Sample(0.0, 0, 0, 0, 0, 0, 0, 0, 0)


def recording(points: list[tuple[int, int]], budget: int | None = 100) -> Timeline:
    """A timeline of (bytes in use, sequences), a second each."""
    made = Timeline(1.0)
    made.bytes_budget = budget
    made.samples = [replace(EMPTY, seconds=float(i), bytes_used=b, sequences=n) for i, (b, n) in enumerate(points)]
    return made


def knee(points: list[tuple[int, int]], **options: float) -> tuple[float, int] | None:
    found = recording(points).knee(**options)
    return None if found is None else (found.seconds, found.sequences)


def test_the_knee_is_where_memory_is_full_and_concurrency_grows_no_more() -> None:
    ramp = [(10 * n, n) for n in range(10)]
    assert knee([*ramp, (99, 10), (97, 10), (98, 9), (95, 10), (40, 4)]) == (10.0, 10)
    assert knee([(92, 3), (99, 6), (99, 6)]) == (1.0, 6)  # shorter sequences took the place of longer ones
    assert knee([(20, 16), (60, 16), (95, 16), (99, 15)]) == (2.0, 16)  # all at once: they grew until it was full


def test_there_is_no_knee_while_memory_suffices() -> None:
    assert knee([(10 * n, n) for n in range(9)]) is None
    assert knee([(95, 0)]) is None
    assert knee([]) is None
    assert recording([(99, 3)], budget=None).knee() is None
    assert knee([(60, 2), (70, 3), (70, 2)], full=0.65) == (1.0, 3)


def test_a_real_run_under_a_small_budget(tmp_path: Path) -> None:
    gc.collect()
    paged_inductor.reset()
    assert paged_inductor.stats().blocks_used == 0
    torch.manual_seed(0)
    model = paged_inductor.page(Decoder(Form()), inner="eager", label="knee")
    generate(model, torch.randint(0, 61, (1, 5)), 2)
    paged_inductor.trim()
    block = 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, head dim, bytes
    paged_inductor.configure(kv_budget=12 * block)
    held = []

    def fill() -> None:
        while True:  # sequences of 40 tokens: three blocks each
            held.append(generate(model, torch.randint(0, 61, (1, 36)), 4)[1])
            record.sample()

    with timeline(interval=0.005) as record, pytest.raises(KVBudgetExceeded):
        fill()
    assert len(held) == 4
    found = record.knee()
    assert found is not None and found.sequences == 4
    assert (found.blocks_used, found.bytes_used, record.bytes_budget) == (12, 12 * block, 12 * block)
    assert record.samples[0].sequences == 0
    assert record.samples[-1].running_steps == 0
    times = [sample.seconds for sample in record.samples]
    assert times == sorted(times)
    record.plot(tmp_path / "knee.svg")
    paged_inductor.reset()


def test_samples_say_what_stats_say(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Manager()
    for module in ("timeline", "monitor"):
        monkeypatch.setattr(sys.modules[f"paged_inductor.{module}"], "manager", lambda: own)
    group = own.group((SITE,), 16)
    view = own.create(group, 3, 20, "three").view
    with own.using(view):
        sample, now = Timeline(1.0).sample(), paged_inductor.stats()
    assert sample.blocks_used == now.blocks_used == 6
    assert sample.blocks_free == now.blocks_free
    assert sample.bytes_used == now.bytes_used
    assert sample.bytes_reserved == now.bytes_reserved
    assert sample.sequences == now.sequences == 3
    assert sample.running_steps == now.running_steps == 1
    paged_inductor.configure(swap_host="1MiB")
    with own.locked():
        own.swap.out(group, 2, view.rows[1:])
    assert Timeline(1.0).sample().sequences == 2
    now = paged_inductor.stats()
    assert (now.sequences, now.swapped_blocks, now.blocks_used, now.tokens) == (3, 2, 4, 60)
    assert now.utilization == 40 / 64
    assert now.tenants["default"].swapped_blocks == 2
    assert now.swaps_out == 2 and now.swap_bytes_out == 2 * group.block_bytes and now.swap_seconds_out > 0
    own.check_integrity()
    paged_inductor.configure(swap_host=None)


def test_it_samples_by_itself_and_stops() -> None:
    record = timeline(interval=0.001)
    assert repr(record) == "<Timeline without samples>"
    with record:
        while len(record.samples) < 5:
            threading.Event().wait(0.001)
    count = len(record.samples)
    assert repr(record).startswith(f"<Timeline of {count} samples in 0.")
    threading.Event().wait(0.02)
    assert len(record.samples) == count
    assert not any(thread.name == "paged_inductor.timeline" for thread in threading.enumerate())


def test_long_recordings_are_thinned_out() -> None:
    record = recording([(0, 0)] * _MOST)
    record.sample()
    assert len(record.samples) == _MOST // 2 + 1
    assert record.interval == 2.0


def test_saved_and_loaded(tmp_path: Path) -> None:
    made = recording([(10, 1), (95, 3), (95, 2)])
    made.save(tmp_path / "timeline.json")
    found = json.loads((tmp_path / "timeline.json").read_text())
    assert found == made.as_dict()
    assert found["samples"]["sequences"] == [1, 3, 2]
    assert found["knee"]["sequences"] == 3
    again = Timeline.load(tmp_path / "timeline.json")
    assert again.samples == made.samples and again.as_dict() == made.as_dict()
    recording([]).save(tmp_path / "empty.json")
    assert Timeline.load(tmp_path / "empty.json").samples == []
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ConfigurationError, match=r"other.json is not a timeline"):
        Timeline.load(tmp_path / "other.json")


def test_the_picture_marks_the_knee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda self, handles, labels, **_: texts.extend(labels))
    recording([(2**20 * 9 * n, n) for n in range(12)], 2**20 * 100).plot(tmp_path / "a.png")
    assert set(texts) == {"reserved", "used", "active sequences", "samples", "budget", "knee: 11 sequences"}
    texts.clear()
    recording([]).plot(tmp_path / "b.png")
    assert not any("knee" in text for text in texts)
    assert all((tmp_path / name).stat().st_size > 0 for name in ("a.png", "b.png"))


def test_bad_intervals_and_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for interval in (0, -1, "x", float("nan")):
        with pytest.raises(ConfigurationError, match="positive number of seconds"):
            timeline(interval)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paged-inductor\[plot\]'"):
        recording([]).plot(tmp_path / "x.png")
