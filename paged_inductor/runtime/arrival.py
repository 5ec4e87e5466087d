"""Swapped blocks on their way back: all at once, or layer by layer while the step that needs them runs already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._errors import SwapError
from .counters import Counters
from .insist import insist
from .site import SiteSpec
from .table import Row
from .tiers import Extent, Target
from .transfer import Transfer

if TYPE_CHECKING:
    from .group import CacheGroup
    from .storage import Storage

__all__ = ["Arrival", "Return", "finish_kernels", "missing"]


def missing(rows: Sequence[Row]) -> list[int]:
    """The swapped blocks of some rows, each once."""
    return list(dict.fromkeys(block for row in rows if row.away for block in row.blocks if block < 0))


class Return:
    """The swapped blocks of some rows, and those that will be in their places.

    Obligation for every method but `copy`: the caller holds the manager's lock. `transfer` says what is under way; it
    is the caller's to register. Either `accept` or `refuse` ends it.
    """

    def __init__(self, group: CacheGroup, storage: Storage, rows: Sequence[Row]) -> None:
        """Reserves blocks. Raises `OutOfBlocks` or `OverQuota`, with nothing changed."""
        self.group = group
        self._storage = storage
        by_extent: dict[Extent, list[int]] = {}
        for swapped in missing(rows):
            by_extent.setdefault(storage.piece(swapped).extent, []).append(swapped)
        for members in by_extent.values():
            members.sort(key=lambda swapped: storage.piece(swapped).place)
        blocks = group.pool.reserve([swapped for members in by_extent.values() for swapped in members])
        self.blocks = blocks
        self._tasks = [
            (extent, [storage.piece(swapped).place for swapped in members], [blocks[s] for s in members])
            for extent, members in by_extent.items()
        ]
        self._size = 0
        self.transfer = Transfer(tuple(by_extent), rows, coming={block: swapped for swapped, block in blocks.items()})

    def copy(self, landed: Callable[[int], object] = lambda site: None) -> None:
        """Copy the contents, site by site, one extent after the other. landed: called whenever a site's contents of an
        extent are in place and proven right, perhaps by another thread; what it raises ends the copy. Raises
        `SwapError`. Nobody writes into the blocks any more when this has ended, however it ends."""
        try:
            for task in self._tasks:
                self._size += _read(self.group, *task, landed)
        except SwapError as error:
            raise SwapError(
                f"{len(self.blocks)} swapped block(s) of a cache could not be brought back: {error}. That cache is "
                "lost: drop it and compute it again; all others are intact"
            ) from error

    def accept(self, counters: Counters, seconds: float) -> int:
        """Let the rows see the new blocks; returns how many came back. seconds: what it took."""
        group = self.group
        arrived = {swapped: block for swapped, block in self.blocks.items() if group.pool.refcount(swapped)}
        group.rename(arrived)
        for swapped, block in self.blocks.items():
            if swapped in arrived:
                group.pool.swap_in(swapped, block)
            else:  # its last owner has gone
                group.pool.release(block)
        self._storage.forget(arrived)
        counters.swaps_in += len(arrived)
        counters.swap_bytes_in += self._size
        counters.swap_seconds_in += seconds
        return len(arrived)

    def refuse(self) -> None:
        """Give the new blocks back: the rows' stay swapped."""
        for block in self.blocks.values():
            self.group.pool.release(block)
        self._storage.close_unused()


class _Stopped(Exception):
    """Nobody waits for the rest of an arrival any more."""


class Arrival(Return):
    """A return whose contents a thread of its own copies, while the step that needs them runs.

    The rows keep their swapped blocks, so that everybody else waits for its end; only the step's own tables have the
    new ones, and it reads a site when `wait` has returned. Not thread-safe: the step's thread calls it.
    """

    def __init__(self, group: CacheGroup, storage: Storage, rows: Sequence[Row]) -> None:
        super().__init__(group, storage, rows)
        self.transfer.arrival = self
        self._began = time.perf_counter()
        self.seconds = 0.0
        self._left = [len(self._tasks)] * len(group.sites)  # extents from which contents have yet to come
        self._over = self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._executor = ThreadPoolExecutor(1, "paged_inductor_arrival")

    def start(self) -> None:
        """Begin to copy."""
        self._executor.submit(self._run)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.copy(self._landed)
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error, error = error, None
            self._over = True
            self.seconds = time.perf_counter() - self._began
            self._changed.notify_all()

    def _landed(self, site: int) -> None:
        with self._changed:
            self._left[site] -= 1
            self._changed.notify_all()
            if self._stopped:
                raise _Stopped

    def wait(self, sites: Sequence[int]) -> None:
        """Wait until the contents of some sites are in place. Raises what the copy was ended by, as `copy`."""
        if self._over and self._error is None:
            return
        with self._changed:
            while not self._over and any(self._left[site] for site in sites):
                self._changed.wait()
            if any(self._left[site] for site in sites):
                self._raise()

    def _raise(self) -> None:
        error = self._error
        assert error is not None
        try:
            raise error
        finally:
            del error  # the traceback knows this frame

    def join(self) -> None:
        """Wait until everything is in place. Raises as `wait`; nobody writes into the blocks any more if it did."""
        with self._changed:
            while not self._over:
                self._changed.wait()
            if self._error is not None:
                self._raise()

    def stop(self) -> None:
        """Have nobody write into the blocks any more, also if interrupted: the rest of the copy is left out."""
        self._stopped = True
        insist(lambda: self._executor.shutdown(cancel_futures=True))

    @property
    def failed(self) -> bool:
        """Whether something is not in place and, once the thread has ended, never will be."""
        return not self._over or self._error is not None

    def forget_error(self) -> None:
        """Drop what the copy was ended by: it keeps the frames of all callers."""
        self._error = None


def _read(
    group: CacheGroup,
    extent: Extent,
    places: Sequence[int],
    blocks: Sequence[int],
    landed: Callable[[int], object],
) -> int:
    """Copy the contents of an extent's places into blocks, layer by layer; returns the bytes."""
    index = torch.tensor(blocks, device=group.sites[0].device)
    finish_kernels(index.device)
    targets = [_target(site, arena, index) for site, arena in zip(group.sites, group.arenas)]
    extent.restore(places, blocks, targets, landed)
    finish_kernels(index.device)  # what contents came through is used again
    return sum(part.size(len(places)) for part in extent.parts)


def finish_kernels(device: torch.device) -> None:
    """Wait for what was launched: other streams may still read or write blocks that no step holds any more."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _target(site: SiteSpec, arena: Tensor, index: Tensor) -> Target:
    return Target(site.stored(arena), lambda values: site.put(arena, index, values))
