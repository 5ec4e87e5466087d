"""The disk tier on its own: whatever is read back is what was written, or an error."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from paged_inductor import SwapError
from paged_inductor.runtime.disk import DiskTier
from paged_inductor.runtime.tiers import Extent, Part, Target, TierFull

SHAPES, STORED, ROWS = ((2, 16, 4), (2, 4, 16), (3,)), 6, 9
PLACES, BLOCKS = [0, 1, 3, 4, 5], [7, 2, 3, 4, 8]
WAYS = [Extent.restore, None]  # through buffers, as for another device, and straight into the arenas


@pytest.fixture
def tier(tmp_path: Any) -> Iterator[DiskTier]:
    tier = DiskTier(2**20, str(tmp_path))
    yield tier
    tier._closer.shutdown()


def filled(tier: DiskTier) -> tuple[Extent, list[Tensor]]:
    """An extent and what was stored in it."""
    contents = [torch.randn(STORED, *shape) for shape in SHAPES]
    parts = [Part(values.shape[1:], values.dtype, lambda t, values=values: t.copy_(values)) for values in contents]
    extent = tier.make(parts, STORED)
    extent.fill(parts)
    return extent, contents


def restored(extent: Extent, way: Any, places: list[int] = PLACES, blocks: list[int] = BLOCKS) -> list[Tensor]:
    """Arenas of zeros after some blocks came back."""
    arenas = [torch.zeros(ROWS, *shape) for shape in SHAPES]
    index = torch.tensor(blocks)
    targets = [Target(arena, lambda values, arena=arena: arena.index_copy_(0, index, values)) for arena in arenas]
    landed: list[int] = []
    (way or type(extent).restore)(extent, places, blocks, targets, landed.append)
    assert sorted(landed) == [*range(len(SHAPES))]
    return arenas


def check(arenas: list[Tensor], contents: list[Tensor]) -> None:
    for arena, values in zip(arenas, contents, strict=True):
        expected = torch.zeros_like(arena)
        expected[BLOCKS] = values[PLACES]
        assert torch.equal(arena, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("most", [1, 2, 1024])
def test_blocks_come_back_wherever_they_lie(tier: DiskTier, way: Any, most: int) -> None:
    extent, contents = filled(tier)
    with mock.patch("paged_inductor.runtime.disk._MOST_PIECES", most):
        check(restored(extent, way), contents)


@pytest.mark.parametrize("way", WAYS)
def test_a_call_may_read_or_write_less_than_it_was_asked_to(tier: DiskTier, way: Any) -> None:
    read, write = os.preadv, os.pwrite
    with mock.patch.object(os, "pwrite", lambda file, data, at: write(file, data[:100], at)):
        extent, contents = filled(tier)
    with mock.patch.object(os, "preadv", lambda file, pieces, at: read(file, [pieces[0][:100]], at)):
        check(restored(extent, way), contents)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("site", range(len(SHAPES)))
@pytest.mark.parametrize("place", range(STORED))
def test_every_bit_is_checked_and_only_of_blocks_that_come_back(
    tier: DiskTier, way: Any, site: int, place: int
) -> None:
    extent, contents = filled(tier)
    size = contents[site][0].nbytes
    file, at = extent._file.fileno(), extent._offsets[site] + place * size  # type: ignore[attr-defined]
    for byte in (0, size // 2, size - 1):
        before = os.pread(file, 1, at + byte)
        os.pwrite(file, bytes([before[0] ^ 0x10]), at + byte)
        if place in PLACES:
            with pytest.raises(SwapError, match="changed on disk"):
                restored(extent, way)
        else:
            check(restored(extent, way), contents)
        os.pwrite(file, before, at + byte)
    check(restored(extent, way), contents)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", range(STORED - 1))
def test_blocks_in_each_others_places(tier: DiskTier, way: Any, first: int) -> None:
    extent, contents = filled(tier)
    file, size = extent._file.fileno(), contents[0][0].nbytes  # type: ignore[attr-defined]
    one, other = (os.pread(file, size, place * size) for place in (first, first + 1))
    os.pwrite(file, other + one, first * size)
    with pytest.raises(SwapError, match="changed on disk"):
        restored(extent, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_ends_early(tier: DiskTier, way: Any) -> None:
    extent, _ = filled(tier)
    os.ftruncate(extent._file.fileno(), extent.size - 1)  # type: ignore[attr-defined]
    with pytest.raises(SwapError, match="1 bytes too early"):
        restored(extent, way)


@pytest.mark.parametrize("error", [SwapError, KeyboardInterrupt])
def test_nobody_writes_into_blocks_that_were_given_back(tier: DiskTier, error: type[BaseException]) -> None:
    """A read is under way when another layer turns out to be wrong, or the user gives up: its end is waited for."""
    extent, _ = filled(tier)
    reading, goes_on, read = threading.Event(), threading.Event(), os.preadv
    ended = []

    def slow(file: int, pieces: list[memoryview], at: int) -> int:
        if at >= extent._offsets[1]:  # type: ignore[attr-defined]
            reading.set()
            goes_on.wait()
        count = read(file, pieces, at)
        ended.append(at)
        return count

    def fails(*args: Any) -> None:
        reading.wait()
        threading.Thread(target=lambda: (thread.join(0.05), goes_on.set())).start()
        raise error

    def work() -> None:
        with suppress(error):
            restored(extent, None)
        ended.append("restore")

    with mock.patch.object(os, "preadv", slow), mock.patch.object(type(extent), "_check", fails):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert ended[-1] == "restore"
    assert len(ended) > 2  # the read that was under way, and none behind it
    assert all(at < extent._offsets[2] for at in ended[:-1])  # type: ignore[attr-defined]


def test_files_are_closed_by_another_thread_or_by_this_one(tier: DiskTier) -> None:
    extent, _ = filled(tier)
    extent.close()
    tier._closer.shutdown()
    assert extent._file.closed  # type: ignore[attr-defined]
    assert tier.used == 0
    extent, _ = filled(tier)
    extent.close()
    assert extent._file.closed  # type: ignore[attr-defined]


def test_the_limit(tier: DiskTier) -> None:
    tier.limit = 1000
    with pytest.raises(TierFull):
        filled(tier)
    assert tier.used == 0
