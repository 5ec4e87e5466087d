"""The disk as a tier of memory.

An extent is a file without a name (it is unlinked as soon as it is open), so that a process that dies, however it dies,
leaves nothing behind. Every block is read back with its checksum: a changed or shortened file is an error, never a
token. Files are read by `preadv` and not mapped: a file that was cut off would kill the process that had mapped it.

A layer is on its way to the disk, or from it, while the processor gathers and sums up the next one.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from .._errors import SwapError
from .tiers import Extent, Part, Tier, memory_of, runs, shaped

__all__ = ["DiskTier"]


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
        self._sums: list[list[int]] = []  # of each site's blocks

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
                self._sums.append([zlib.crc32(data[at : at + piece]) for at in range(0, len(data), piece)])
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
            coming.append(reader.submit(self._read, 0, places, buffers[0]))
            for i, part in enumerate(self.parts):
                coming.pop().result()
                if i + 1 < len(self.parts):
                    coming.append(reader.submit(self._read, i + 1, places, buffers[(i + 1) % len(buffers)]))
                values = shaped(buffers[i % len(buffers)], part, count)
                self._check(i, places, memory_of(values))
                yield values

    def _read(self, site: int, places: Sequence[int], buffer: Tensor) -> None:
        piece, offset = self.parts[site].size(1), self._offsets[site]
        data = memory_of(buffer)
        for i, stop in runs(places):
            rest, at = data[i * piece : stop * piece], offset + places[i] * piece
            while rest:
                try:
                    count = os.preadv(self._file.fileno(), [rest], at)
                except OSError as error:
                    raise SwapError(f"the disk gave an error: {error}") from error
                if count == 0:
                    raise SwapError(f"the swap file ends {len(rest)} bytes too early: it was cut off")
                rest, at = rest[count:], at + count

    def _check(self, site: int, places: Sequence[int], data: memoryview) -> None:
        piece, sums = self.parts[site].size(1), self._sums[site]
        for i, place in enumerate(places):
            if zlib.crc32(data[i * piece : (i + 1) * piece]) != sums[place]:
                raise SwapError(f"block {place} of a swap file was changed on disk: its checksum is wrong")

    def close(self) -> None:
        super().close()
        self._file.close()


class DiskTier(Tier):
    """Files in `folder`, without names."""

    name = "disk"

    def __init__(self, limit: int, folder: str) -> None:
        super().__init__(limit)
        self.folder = folder
        self._spare: list[list[Tensor]] = []

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

    def _make(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent:
        return _DiskExtent(self, size, parts, count)


@contextmanager
def _released(futures: list[Future[None]]) -> Iterator[None]:
    """Forget futures at the end: one that failed keeps its exception, and that the frames of all callers."""
    try:
        yield
    finally:
        futures.clear()
