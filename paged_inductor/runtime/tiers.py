"""Tiers of memory below the arenas: where the tokens of swapped blocks are kept.

A tier stores *extents*: the contents of some blocks, one tensor per cached tensor of their group. On disk, an extent is
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
from collections.abc import Sequence

import torch
from torch import Tensor

from .._errors import SwapError

__all__ = ["DiskTier", "Extent", "HostTier", "Tier", "TierFull", "memory_of"]


class TierFull(Exception):
    """An extent does not fit: the tier's limit is reached, or the system gave no more memory or disk."""


class Extent(ABC):
    """What a tier keeps of some blocks: for each site, a tensor [n, ...] in the arena's storage order."""

    def __init__(self, tier: Tier, size: int, sites: int) -> None:
        self.tier = tier
        self.size = size
        self.sites = sites

    @abstractmethod
    def read(self, site: int, places: Sequence[int]) -> Tensor:
        """The contents of blocks `places` of one site, [len(places), ...] on the CPU. Raises `SwapError`."""

    def close(self) -> None:
        """Give the tier its bytes back."""
        self.tier.used -= self.size


class Tier(ABC):
    """limit, used: bytes. name: for people."""

    name: str

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def store(self, tensors: Sequence[Tensor]) -> Extent:
        """Keep `tensors` (one per site, on the CPU). Raises `TierFull` with nothing kept."""
        size = sum(tensor.nbytes for tensor in tensors)
        if self.used + size > self.limit:
            raise TierFull
        try:
            extent = self._store(tensors, size)
        except (OSError, MemoryError) as error:
            raise TierFull(str(error)) from error
        self.used += size
        return extent

    @abstractmethod
    def _store(self, tensors: Sequence[Tensor], size: int) -> Extent: ...


class _HostExtent(Extent):
    def __init__(self, tier: Tier, size: int, tensors: Sequence[Tensor]) -> None:
        super().__init__(tier, size, len(tensors))
        self.tensors = list(tensors)

    def read(self, site: int, places: Sequence[int]) -> Tensor:
        whole = self.tensors[site]
        return whole if list(places) == list(range(len(whole))) else whole[list(places)]

    def close(self) -> None:
        super().close()
        self.tensors.clear()


class HostTier(Tier):
    """Host memory: pinned where it serves a device, so that copies need not wait for the processor."""

    name = "host"

    def _store(self, tensors: Sequence[Tensor], size: int) -> Extent:
        return _HostExtent(self, size, tensors)


class _DiskExtent(Extent):
    def __init__(self, tier: Tier, size: int, sites: int, folder: str) -> None:
        super().__init__(tier, size, sites)
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - open for as long as the extent lives
            dir=folder, prefix="paged_inductor_", buffering=0
        )
        self._pieces: list[tuple[int, torch.Size, torch.dtype, list[int]]] = []  # offset, shape, dtype, checksums

    def write(self, tensors: Sequence[Tensor]) -> None:
        offset = 0
        for tensor in tensors:
            tensor = tensor.contiguous()
            data = memory_of(tensor)
            piece = tensor.nbytes // len(tensor)
            sums = [zlib.crc32(data[i : i + piece]) for i in range(0, tensor.nbytes, piece)]
            self._pieces.append((offset, tensor.shape, tensor.dtype, sums))
            while data:
                written = os.pwrite(self._file.fileno(), data, offset)
                data, offset = data[written:], offset + written

    def read(self, site: int, places: Sequence[int]) -> Tensor:
        offset, shape, dtype, sums = self._pieces[site]
        result = torch.empty((len(places), *shape[1:]), dtype=dtype)
        data = memory_of(result)
        piece = result.nbytes // len(places)
        for i, stop in _runs(places):
            part, at = data[i * piece : stop * piece], offset + places[i] * piece
            while part:
                try:
                    count = os.preadv(self._file.fileno(), [part], at)
                except OSError as error:
                    raise SwapError(f"the disk gave an error: {error}") from error
                if count == 0:
                    raise SwapError(f"the swap file ends {len(part)} bytes too early: it was cut off")
                part, at = part[count:], at + count
        for i, place in enumerate(places):
            if zlib.crc32(data[i * piece : (i + 1) * piece]) != sums[place]:
                raise SwapError(f"block {place} of a swap file was changed on disk: its checksum is wrong")
        return result

    def close(self) -> None:
        super().close()
        self._file.close()


class DiskTier(Tier):
    """Files in `folder`, without names."""

    name = "disk"

    def __init__(self, limit: int, folder: str) -> None:
        super().__init__(limit)
        self.folder = folder

    def _store(self, tensors: Sequence[Tensor], size: int) -> Extent:
        extent = _DiskExtent(self, size, len(tensors), self.folder)
        try:
            extent.write(tensors)
        except BaseException:
            extent._file.close()
            raise
        return extent


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Valid for as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, stop) positions in `places` of every run of consecutive places."""
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(places)]))
