"""Tiers of memory below the arenas: where the tokens of swapped blocks are kept.

A tier stores *extents*: the contents of some blocks, one tensor per cached tensor of their group. Buffers are used
again and again: memory that is new to the process costs several times the copy into it. On disk, an extent is
a file without a name (it is unlinked as soon as it is open), so that a process that dies, however it dies, leaves
nothing behind. Every piece is read back with its checksum: a changed or shortened file is an error, never a token.
Files are read by `preadv` and not mapped: a file that was cut off would kill the process that had mapped it.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .._errors import SwapError

__all__ = ["DiskTier", "Extent", "HostTier", "Part", "Tier", "TierFull", "memory_of"]


class TierFull(Exception):
    """An extent does not fit: the tier's limit is reached, or the system gave no more memory or disk."""


class Part(NamedTuple):
    """One site's share of an extent: the shape and dtype of a block in memory, and how to write the blocks' contents
    into a CPU tensor [n, *shape]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[Tensor], object]

    def size(self, count: int) -> int:
        """Bytes of `count` blocks."""
        return count * prod(self.shape) * self.dtype.itemsize


class Extent(ABC):
    """What a tier keeps of some blocks: for each of `sites` sites, their contents in the arena's storage order."""

    def __init__(self, tier: Tier, size: int, sites: int) -> None:
        self.tier = tier
        self.size = size
        self.sites = sites

    @abstractmethod
    def read(self, site: int, places: Sequence[int]) -> Tensor:
        """The contents of blocks `places` (ascending) of one site, [len(places), ...] on the CPU, valid until the next
        read. Raises `SwapError`."""

    def close(self) -> None:
        """Give the tier its bytes back."""
        self.tier.used -= self.size


class Tier(ABC):
    """limit, used: bytes. name: for people."""

    name: str

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def store(self, parts: Sequence[Part], count: int, pinned: bool = False) -> Extent:
        """Keep the contents of `count` blocks, in pinned memory if that serves. Raises `TierFull` with nothing kept."""
        size = sum(part.size(count) for part in parts)
        if self.used + size > self.limit:
            raise TierFull
        try:
            extent = self._store(parts, count, size, pinned)
        except (OSError, MemoryError, torch.OutOfMemoryError) as error:
            raise TierFull(str(error)) from error
        self.used += size
        return extent

    @abstractmethod
    def _store(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent: ...


class _HostExtent(Extent):
    def __init__(self, tier: HostTier, size: int, buffers: list[Tensor], parts: Sequence[Part], count: int) -> None:
        super().__init__(tier, size, len(parts))
        self._buffers = buffers
        self._tensors = [_shaped(buffer, part, count) for buffer, part in zip(buffers, parts)]

    def read(self, site: int, places: Sequence[int]) -> Tensor:
        whole = self._tensors[site]
        runs = _runs(places)
        return whole[places[0] : places[-1] + 1] if len(runs) == 1 else whole[list(places)]

    def close(self) -> None:
        super().close()
        self.tier.take_back(self._buffers)  # type: ignore[attr-defined]


class HostTier(Tier):
    """Host memory: pinned where it serves a device, so that copies need not wait for the processor."""

    name = "host"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._spare: list[Tensor] = []

    def _store(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent:
        buffers: list[Tensor] = []
        try:
            for part in parts:
                buffers.append(self._buffer(part.size(count), pinned))
                part.fill(_shaped(buffers[-1], part, count))
        except BaseException:
            self.take_back(buffers)
            raise
        return _HostExtent(self, size, buffers, parts, count)

    def _buffer(self, size: int, pinned: bool) -> Tensor:
        """Bytes of memory: those of an extent that is gone, if they fit without much waste."""
        fitting = [b for b in self._spare if size <= b.nbytes <= 2 * size and b.is_pinned() == pinned]
        if not fitting:
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        best = min(fitting, key=lambda buffer: buffer.nbytes)
        self._spare = [buffer for buffer in self._spare if buffer is not best]
        return best

    def take_back(self, buffers: Sequence[Tensor]) -> None:
        """Keep buffers for later, as far as the limit allows."""
        self._spare += buffers
        size = sum(buffer.nbytes for buffer in self._spare)
        while self._spare and self.used + size > self.limit:
            size -= self._spare.pop(0).nbytes


class _DiskExtent(Extent):
    def __init__(self, tier: DiskTier, size: int, parts: Sequence[Part]) -> None:
        super().__init__(tier, size, len(parts))
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - open for as long as the extent lives
            dir=tier.folder, prefix="paged_inductor_", buffering=0
        )
        self._parts = parts = [part._replace(fill=_nothing) for part in parts]
        self._offsets: list[int] = []
        self._sums: list[list[int]] = []  # of each site's blocks

    def append(self, values: Tensor) -> None:
        """Write the next site's blocks behind the others'."""
        data, offset = memory_of(values), os.lseek(self._file.fileno(), 0, os.SEEK_END)
        piece = values.nbytes // len(values)
        self._offsets.append(offset)
        self._sums.append([zlib.crc32(data[i : i + piece]) for i in range(0, values.nbytes, piece)])
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def read(self, site: int, places: Sequence[int]) -> Tensor:
        part, offset = self._parts[site], self._offsets[site]
        result = self.tier.staging(part, len(places))  # type: ignore[attr-defined]
        data = memory_of(result)
        piece = part.size(1)
        for i, stop in _runs(places):
            rest, at = data[i * piece : stop * piece], offset + places[i] * piece
            while rest:
                try:
                    count = os.preadv(self._file.fileno(), [rest], at)
                except OSError as error:
                    raise SwapError(f"the disk gave an error: {error}") from error
                if count == 0:
                    raise SwapError(f"the swap file ends {len(rest)} bytes too early: it was cut off")
                rest, at = rest[count:], at + count
        for i, place in enumerate(places):
            if zlib.crc32(data[i * piece : (i + 1) * piece]) != self._sums[site][place]:
                raise SwapError(f"block {place} of a swap file was changed on disk: its checksum is wrong")
        return result

    def discard(self) -> None:
        """Close the file of an extent that was not stored."""
        self._file.close()

    def close(self) -> None:
        super().close()
        self.discard()


class DiskTier(Tier):
    """Files in `folder`, without names."""

    name = "disk"

    def __init__(self, limit: int, folder: str) -> None:
        super().__init__(limit)
        self.folder = folder
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def staging(self, part: Part, count: int) -> Tensor:
        """Memory for `count` blocks of one site on their way; the same at every call."""
        if part.size(count) > self._buffer.nbytes:
            self._buffer = torch.empty(part.size(count), dtype=torch.uint8)
        return _shaped(self._buffer, part, count)

    def _store(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent:
        extent = _DiskExtent(self, size, parts)
        try:
            for part in parts:
                values = self.staging(part, count)
                part.fill(values)
                extent.append(values)
        except BaseException:
            extent.discard()
            raise
        return extent


def _nothing(values: Tensor) -> None:
    """In the place of a `fill` that has been used: it would keep the arenas alive."""


def _shaped(buffer: Tensor, part: Part, count: int) -> Tensor:
    """The front of a buffer of bytes, as the blocks of a part."""
    return buffer[: part.size(count)].view(part.dtype).view(count, *part.shape)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Valid for as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, stop) positions in `places` of every run of consecutive places."""
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(places)]))
