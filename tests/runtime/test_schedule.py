"""Tables on a device, updated in place: the same entries as on the host, at the same address until the table grows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_inductor.runtime import Manager, Schedule, SiteSpec

SITES = (SiteSpec(1, 8, torch.float32, torch.device("cpu")),)


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plays the device: its tensors do not share memory with the host's arrays."""
    monkeypatch.setattr(Schedule, "_on_host", False)


@given(
    first=st.integers(1, 40), batch=st.integers(1, 3), counts=st.lists(st.integers(1, 30), max_size=12), data=st.data()
)
def test_a_device_sees_what_the_host_knows(first: int, batch: int, counts: list[int], data: st.DataObject) -> None:
    manager = Manager()
    group = manager.group(SITES, 8)
    view = manager.create(group, batch, first, "test").view
    kept = []  # older views, which make rows fork
    places = set()
    for count in counts:
        if data.draw(st.booleans()):
            kept.append(view)
        manager.schedule(view)
        before = view
        view = manager.append(view, count).view
        schedule = manager.schedule(view)
        assert before.schedule is None and view.schedule is schedule
        places.add((schedule.block_table.data_ptr(), schedule.seq_lens.data_ptr(), schedule.block_table.shape[1]))
        assert schedule.seq_lens.tolist() == list(view.lengths)
        for entries, row, seen in zip(schedule.block_table.tolist(), view.rows, view.lengths):
            blocks = row.blocks[: -(-seen // 8)]
            assert entries == blocks + [0] * (len(entries) - len(blocks))
    widths = {width for _, _, width in places}
    assert len(places) == len(widths)
    assert all(width & (width - 1) == 0 for width in widths)


def test_buffers_made_in_inference_mode_are_updated_outside() -> None:
    manager = Manager()
    view = manager.create(manager.group(SITES, 8), 1, 8, "test").view
    with torch.inference_mode():
        manager.schedule(view)
    view = manager.append(view, 1).view
    assert manager.schedule(view).seq_lens.tolist() == [9]
