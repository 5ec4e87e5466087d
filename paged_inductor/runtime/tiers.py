"""Tiers of memory below the arenas: where the tokens of swapped blocks are kept.

A tier keeps *extents*: the contents of some blocks, one tensor per cached tensor of their group. An extent is made
while the manager's lock is held, and filled and read without it, one layer after the other. Buffers are used again and
again: memory that is new to the process costs several times the copy into it.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import is_out_of_memory

__all__ = ["Extent", "HostTier", "Part", "Target", "Tier", "TierFull", "memory_of", "runs", "shaped"]


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


class Target(NamedTuple):
    """Where one site's blocks come back to. arena: of the site, [num_blocks, ...], contiguous. put: writes contents
    [n, *shape], in the order of memory, into the blocks that come back."""

    arena: Tensor
    put: Callable[[Tensor], object]


class Extent(ABC):
    """Room in a tier for the contents of some blocks, in the arenas' storage order. parts: of each site; their `fill`
    is not to be used."""

    def __init__(self, tier: Tier, size: int, parts: Sequence[Part]) -> None:
        self.tier = tier
        self.size = size
        self.parts = parts

    def fill(self, parts: Sequence[Part]) -> None:
        """Store the blocks' contents, one site after the other. Raises `TierFull`."""
        try:
            self._fill(parts)
        except (OSError, MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not (is_out_of_memory(error) or "start new thread" in str(error)):
                raise
            raise self.tier.refused(error) from error
        self.tier.refusal = ""

    @abstractmethod
    def _fill(self, parts: Sequence[Part]) -> None: ...

    @abstractmethod
    def read(self, places: Sequence[int]) -> Generator[Tensor, None, None]:
        """The contents of blocks `places` (ascending) of each site in turn, [len(places), ...] on the CPU, valid until
        the next. Raises `SwapError`. Several threads may read at the same time."""

    def restore(
        self,
        places: Sequence[int],
        blocks: Sequence[int],
        targets: Sequence[Target],
        landed: Callable[[int], object],
    ) -> None:
        """Copy the contents of `places` (ascending) into `blocks` of each site's target. `landed` is called with the
        number of each site that is complete, perhaps by another thread; what it raises ends the copy. Raises
        `SwapError`; anything may be in the blocks then. Nobody writes there any more when this has ended, however it
        ends."""
        with closing(self.read(places)) as contents:
            for i, (target, values) in enumerate(zip(targets, contents)):
                target.put(values)
                landed(i)

    def close(self) -> None:
        """Give the tier its bytes back. Obligation: the caller holds the manager's lock, and nobody reads."""
        self.tier.used -= self.size


class Tier(ABC):
    """limit, used: bytes. name: for people. refusal: what the system said when it gave no more room within the limit;
    empty once it has given some again."""

    name: str

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.refusal = ""

    def refused(self, error: Exception) -> TierFull:
        """What to raise when the system gave no room; `refusal` keeps why."""
        self.refusal = str(error)
        return TierFull(self.refusal)

    def make(self, parts: Sequence[Part], count: int, pinned: bool = False) -> Extent:
        """Room for `count` blocks, in pinned memory if that serves. Raises `TierFull`.

        Obligation: the caller holds the manager's lock.
        """
        size = sum(part.size(count) for part in parts)
        if self.used + size > self.limit:
            raise TierFull
        try:
            extent = self._make([part._replace(fill=_used) for part in parts], count, size, pinned)
        except (OSError, MemoryError, RuntimeError) as error:
            raise self.refused(error) from error
        self.used += size
        return extent

    @abstractmethod
    def _make(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent: ...


class _HostExtent(Extent):
    def __init__(self, tier: HostTier, size: int, buffers: list[Tensor], parts: Sequence[Part], count: int) -> None:
        super().__init__(tier, size, parts)
        self._buffers = buffers
        self._tensors = [shaped(buffer, part, count) for buffer, part in zip(buffers, parts)]

    def _fill(self, parts: Sequence[Part]) -> None:
        for part, tensor in zip(parts, self._tensors):
            part.fill(tensor)

    def read(self, places: Sequence[int]) -> Generator[Tensor, None, None]:
        at: slice | list[int] = list(places)
        if len(runs(places)) == 1:
            at = slice(places[0], places[-1] + 1)
        for tensor in self._tensors:
            yield tensor[at]

    def close(self) -> None:
        super().close()
        self.tier.take_back(self._buffers)  # type: ignore[attr-defined]


class HostTier(Tier):
    """Host memory: pinned where it serves a device, so that copies need not wait for the processor."""

    name = "host"

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self._spare: list[Tensor] = []

    def _make(self, parts: Sequence[Part], count: int, size: int, pinned: bool) -> Extent:
        buffers: list[Tensor] = []
        try:
            for part in parts:
                buffers.append(self._buffer(part.size(count), pinned))
            self._trim(size)
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
        self._trim(0)

    def _trim(self, more: int) -> None:
        """Give spare buffers up until `more` bytes fit beside what is left of them."""
        size = sum(buffer.nbytes for buffer in self._spare)
        while self._spare and self.used + more + size > self.limit:
            size -= self._spare.pop(0).nbytes


def _used(values: Tensor) -> None:
    """In the place of a `fill`: an extent that kept it would keep the arenas alive."""


def shaped(buffer: Tensor, part: Part, count: int) -> Tensor:
    """The front of a buffer of bytes, as `count` blocks of a part."""
    return buffer[: part.size(count)].view(part.dtype).view(count, *part.shape)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor. Valid for as long as the tensor is."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """(first, stop) positions in `places` of every run of consecutive places."""
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    return list(zip([0, *cuts], [*cuts, len(places)]))
