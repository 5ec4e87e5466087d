"""The disk as a tier of memory.

An extent is a file without a name (it is unlinked as soon as it is open), so that a process that dies, however it dies,
leaves nothing behind. Every block is read back with its checksum: a changed or shortened file is an error, never a
token. Files are read by `preadv` and not mapped: a file that was cut off would kill the process that had mapped it.

A layer is on its way to the disk while the processor gathers and sums up the next one. On the way back a thread reads
one layer after the other straight into arenas in host memory, and the checksums follow it; when it has read all, it
helps with them. One thread reads: the system reads ahead for whoever reads a file in its order.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, NamedTuple

import torch
from torch import Tensor

from .._errors import SwapError
from .insist import insist
from .tiers import Extent, Part, Target, Tier, memory_of, runs, shaped

__all__ = ["DiskTier"]

_MOST_PIECES = os.sysconf("SC_IOV_MAX")  # of memory that one call reads into


class _Span(NamedTuple):
    """Consecutive places of a file, and the memory they go to."""

    places: range
    memory: list[memoryview]


class _DiskExtent(Extent):
    def __init__(self, tier: DiskTier, size: int, parts: Sequence[Part], count: int) -> None:
        super().__init__(tier, size, parts)
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - open for as long as the extent lives
            dir=tier.folder, prefix="paged_inductor_", buffering=0
        )
        self._count = count
        self._offsets = [0]
        for part in parts:
            self._offsets.append(self._offsets[-1] + part.size(count))
        # of each site: the checksum of its first n blocks at n, so that any run of blocks is checked at once
        self._sums: list[list[int]] = []

    def _fill(self, parts: Sequence[Part]) -> None:
        largest = max(part.size(self._count) for part in parts)
        written: list[Future[None]] = []
        with self.tier.staging(largest) as buffers, ThreadPoolExecutor(1) as writer, _released(written):  # type: ignore[attr-defined]
            for i, part in enumerate(parts):
                if len(written) == len(buffers):
                    written.pop(0).result()
                values = shaped(buffers[i % len(buffers)], part, self._count)
                part.fill(values)
                data, piece = memory_of(values), part.size(1)
                sums = [0]
                for at in range(0, len(data), piece):
                    sums.append(zlib.crc32(data[at : at + piece], sums[-1]))
                self._sums.append(sums)
                written.append(writer.submit(self._write, data, self._offsets[i]))
            while written:
                written.pop(0).result()

    def _write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[count:], offset + count

    def read(self, places: Sequence[int]) -> Generator[Tensor, None, None]:
        count = len(places)
        largest = max(part.size(count) for part in self.parts)
        coming: list[Future[None]] = []
        with self.tier.staging(largest) as buffers, ThreadPoolExecutor(1) as reader, _released(coming):  # type: ignore[attr-defined]
            tensors = [shaped(buffers[i % len(buffers)], part, count) for i, part in enumerate(self.parts)]
            spans = [self._spans(places, range(count), tensor) for tensor in tensors]
            coming.append(reader.submit(self._read, 0, spans[0]))
            for i, values in enumerate(tensors):
                coming.pop().result()
                if i + 1 < len(tensors):
                    coming.append(reader.submit(self._read, i + 1, spans[i + 1]))
                self._check(i, spans[i])
                yield values

    def restore(
        self,
        places: Sequence[int],
        blocks: Sequence[int],
        targets: Sequence[Target],
        landed: Callable[[int], object],
    ) -> None:
        if targets[0].arena.device.type != "cpu":
            return super().restore(places, blocks, targets, landed)
        spans = [self._spans(places, blocks, target.arena) for target in targets]
        reads: list[Future[None]] = []
        unchecked = iter(range(len(spans)))  # two threads take from it

        def check() -> None:
            for i in unchecked:
                reads[i].result()
                self._check(i, spans[i])
                landed(i)

        helper = ThreadPoolExecutor(1)
        try:
            reads += [helper.submit(self._read, i, spans[i]) for i in range(len(spans))]
            reads.append(helper.submit(check))
            check()
            reads[-1].result()
        finally:
            try:
                insist(lambda: helper.shutdown(cancel_futures=True))  # the blocks may be others' as soon as this ended
            finally:
                reads.clear()  # one that failed keeps its exception, and that the frames of all callers

    def _spans(self, places: Sequence[int], rows: Sequence[int], tensor: Tensor) -> list[_Span]:
        """Where contents of `places` go: to `rows` of a contiguous tensor."""
        memory, size = memory_of(tensor), tensor[0].nbytes
        spans = []
        for start, stop in runs(places):
            pieces = [
                memory[rows[start + first] * size : (rows[start + last - 1] + 1) * size]
                for first, last in runs(rows[start:stop])
            ]
            spans.append(_Span(range(places[start], places[stop - 1] + 1), pieces))
        return spans

    def _read(self, site: int, spans: Sequence[_Span]) -> None:
        for span in spans:
            at = self._offsets[site] + span.places.start * self.parts[site].size(1)
            rest = span.memory
            while rest:
                try:
                    count = os.preadv(self._file.fileno(), rest[:_MOST_PIECES], at)
                except OSError as error:
                    raise SwapError(f"the disk gave an error: {error}") from error
                if count == 0:
                    missing = sum(len(piece) for piece in rest)
                    raise SwapError(f"the swap file ends {missing} bytes too early: it was cut off")
                rest, at = _behind(rest, count), at + count

    def _check(self, site: int, spans: Sequence[_Span]) -> None:
        sums = self._sums[site]
        for places, memory in spans:
            found = sums[places.start]
            for piece in memory:
                found = zlib.crc32(piece, found)
            if found != sums[places.stop]:
                raise SwapError(
                    f"blocks {places.start} to {places.stop - 1} of a swap file were changed on disk: "
                    "their checksum is wrong"
                )

    def close(self) -> None:
        super().close()
        self.tier.discard(self._file)  # type: ignore[attr-defined]


class DiskTier(Tier):
    """Files in `folder`, without names."""

    name = "disk"

    def __init__(self, limit: int, folder: str) -> None:
        super().__init__(limit)
        self.folder = folder
        self._spare: list[list[Tensor]] = []
        self._closer = ThreadPoolExecutor(1, "paged_inductor_close")

    @contextmanager
    def staging(self, size: int) -> Iterator[list[Tensor]]:
        """Two buffers of at least `size` bytes for what is on its way."""
        try:
            buffers = self._spare.pop()  # atomic, like append: transfers of other threads use others
        except IndexError:
            buffers = []
        if not buffers or buffers[0].nbytes < size:
            buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        try:
            yield buffers
        finally:
            if not self._spare:
                self._spare.append(buffers)

    def discard(self, file: IO[bytes]) -> None:
        """Close a file soon: the system takes its time (0.1 s for each GiB) to free what is in one without a name."""
        try:
            self._closer.submit(file.close)
        except RuntimeError:  # no thread can be started any more
            file.close()

    def _make(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent:
        return _DiskExtent(self, size, parts, count)


def _behind(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """What follows the first `count` bytes of some pieces of memory."""
    for i, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[i + 1 :]]
        count -= len(piece)
    return []


@contextmanager
def _released(futures: list[Future[None]]) -> Iterator[None]:
    """Forget futures at the end: one that failed keeps its exception, and that the frames of all callers."""
    try:
        yield
    finally:
        futures.clear()
