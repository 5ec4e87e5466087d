"""Swapping: blocks that no running step reads move to other tiers of memory, and come back when they are used.

A swapped block has a negative id, in the rows as in the pool. Handles and views do not change: a step that uses a view
brings its blocks back first.

The lock is given up while blocks are copied, one layer after the other, so that other threads' steps go on. What they
change meanwhile is respected: a block on its way out that a step is about to use, or that was freed, stays where it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .arrival import Arrival, Return, finish_kernels, missing
from .counters import Counters
from .group import CacheGroup
from .insist import insist
from .numa import Nodes
from .pool import Account
from .site import SiteSpec
from .storage import Storage
from .table import Row
from .tiers import Extent, Part, TierFull
from .transfer import Transfer

__all__ = ["SwapSpace"]


class SwapSpace:
    """Moves blocks between the arenas and the storage. Obligation for every method: the caller holds the manager's
    lock; `out`, `back` and `await_back` give it up while blocks are copied."""

    def __init__(
        self, groups: Collection[CacheGroup], idle: threading.Condition, counters: Counters, nodes: Nodes | None = None
    ) -> None:
        """groups: a live view of all groups. idle: of the manager's lock; notified when a transfer ends. nodes: of a
        host that has several memory nodes."""
        self._counters = counters
        self._idle = idle
        self.storage = Storage(groups, nodes)
        self.used = False  # whether anything was ever swapped out

    @contextmanager
    def _registered(self, group: CacheGroup, transfer: Transfer) -> Iterator[None]:
        """Inside, the group's arenas stay where they are, and others respect what the transfer says."""
        try:
            group.pool.transfers.add(transfer)
            yield
        finally:
            group.pool.transfers.discard(transfer)
            self._idle.notify_all()

    @contextmanager
    def _moving(self, group: CacheGroup, transfer: Transfer) -> Iterator[None]:
        """`_registered`, and the books are free for others."""
        with self._registered(group, transfer), self._unlocked():
            yield

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        try:
            self._idle.release()
            yield
        finally:
            insist(self._hold)  # also after Ctrl-C callers must find it held

    def _hold(self) -> None:
        if not self._idle._is_owned():  # type: ignore[attr-defined]
            self._idle.acquire()

    # -- out -------------------------------------------------------------------------------------------------

    def out(
        self,
        group: CacheGroup,
        wanted: int,
        kept: Iterable[Row],
        payer: Account | None = None,
        highest: float = float("inf"),
    ) -> int:
        """Swap out at least `wanted` blocks of a group, coldest caches first; returns how many, 0 if none can be.

        kept: rows that stay. payer: only blocks that this account pays for. highest: caches of higher priorities stay,
        as do those of running steps.
        """
        kept = list(kept)
        most: int | None = None
        while blocks := self._coldest(group, wanted, kept, payer, highest)[:most]:
            start = time.perf_counter()
            stored = self._store(group, blocks)
            if stored is None:
                most = len(blocks) // 2  # what is left of the tiers may hold some of them
                continue
            extent, places = stored
            self._move(group, places, extent)
            self._counters.swap_seconds_out += time.perf_counter() - start
            if places:  # else others used all of them meanwhile
                self._counters.swaps_out += len(places)
                self._counters.swap_bytes_out += extent.size
                return len(places)
        return 0

    @staticmethod
    def _coldest(
        group: CacheGroup, wanted: int, kept: Iterable[Row], payer: Account | None, highest: float
    ) -> list[int]:
        """Blocks in the order in which they should go: by priority, then by how long ago a step used them."""
        stay = group.pinned_blocks() | {block for row in kept for block in row.blocks}
        heat: dict[int, tuple[int, int]] = {}
        for holding in group.holdings.values():
            value = (holding.tenant.priority, holding.used)
            for row in set(holding.rows):
                for block in row.blocks:
                    if block > 0 and block not in stay and value > heat.get(block, (-(2**62), 0)):
                        heat[block] = value
        order = sorted((block for block in heat if heat[block][0] <= highest), key=heat.__getitem__)
        if payer is not None:
            order = [block for block in order if group.pool.payer(block) is payer]
        stop = wanted
        while 0 < stop < len(order) and heat[order[stop]] == heat[order[stop - 1]]:  # a cache goes as a whole
            stop += 1
        return order[:stop]

    def _store(self, group: CacheGroup, blocks: Iterable[int]) -> tuple[Extent, dict[int, int]] | None:
        """Copy blocks to the first tier that takes them: the extent, and the places of those that nobody used since."""
        order = sorted(blocks)  # memory is read faster in its order
        index = torch.tensor(order, device=group.sites[0].device)
        parts = [_part(site, arena, index) for site, arena in zip(group.sites, group.arenas)]
        transfer = Transfer(leaving=set(order))
        with self._registered(group, transfer):  # already while room is made, for which the books are given up, too
            for extent in self.storage.rooms(group, parts, len(order), self._moving):
                transfer.extents = (extent,)
                try:
                    with self._unlocked():
                        finish_kernels(index.device)
                        extent.fill(parts)
                except TierFull:
                    transfer.extents = ()
                    self.storage.close(extent)
                    continue
                refcount = group.pool.refcount  # a cached block has no owners
                return extent, {b: i for i, b in enumerate(order) if b in transfer.leaving and refcount(b)}
        return None

    def _move(self, group: CacheGroup, places: Mapping[int, int], extent: Extent) -> None:
        """Let the rows see swapped blocks in the place of those that were stored."""
        self.used = True
        renamed = {block: self.storage.new_id() for block in places}
        self.storage.add(extent, {renamed[block]: place for block, place in places.items()})
        group.rename(renamed)
        for block, swapped in reversed(renamed.items()):  # the lowest is handed out first then
            group.pool.swap_out(block, swapped)
        self.storage.close_unused()

    # -- back ------------------------------------------------------------------------------------------------

    @staticmethod
    def coming(group: CacheGroup, rows: Sequence[Row]) -> bool:
        """Whether another thread is bringing back what rows lack."""
        transfers = group.pool.transfers
        return bool(transfers) and not {
            swapped for transfer in transfers for swapped in transfer.coming.values()
        }.isdisjoint(missing(rows))

    def back(self, group: CacheGroup, rows: Sequence[Row]) -> int:
        """Bring the swapped blocks of `rows` back into the arenas; returns how many.

        Raises `OutOfBlocks` or `OverQuota` if there is no room, `SwapError` if their tokens cannot be read; they stay
        swapped then. Obligation: not `coming`.
        """
        if not missing(rows):
            return 0
        start = time.perf_counter()
        coming = Return(group, self.storage, rows)
        try:
            with self._moving(group, coming.transfer):
                coming.copy()
        except BaseException:
            coming.refuse()
            raise
        return coming.accept(self._counters, time.perf_counter() - start)

    def begin_back(self, group: CacheGroup, rows: Sequence[Row]) -> None:
        """Have the swapped blocks of `rows` brought back while this thread's step runs, which ends it by `end_back`.

        Raises as `back`, but for `SwapError`. Obligation: there are some, and none is `coming`.
        """
        arrival = Arrival(group, self.storage, rows)
        group.pool.transfers.add(arrival.transfer)
        arrival.start()

    @staticmethod
    def arrival(group: CacheGroup, rows: Sequence[Row]) -> Arrival | None:
        """What brings back blocks of `rows` while this thread's step runs; None if nothing does. Needs no lock."""
        if not group.pool.transfers:
            return None
        me, lacking = threading.get_ident(), set(missing(rows))
        for transfer in tuple(group.pool.transfers):
            arrival = transfer.arrival
            if arrival is None or transfer.thread != me:
                continue
            if transfer.rows is rows or not lacking.isdisjoint(arrival.blocks):
                return arrival
        return None

    def end_back(self, arrival: Arrival) -> None:
        """Let everybody see what has arrived if that is all, else nothing. Obligation: the arrival has ended, or was
        stopped."""
        group, transfer = arrival.group, arrival.transfer
        failed = arrival.failed
        transfer.arrival = None  # from here on an interruption ends it, see `CacheGroup.reconcile`
        group.pool.transfers.discard(transfer)
        self._idle.notify_all()
        arrival.forget_error()
        if failed:
            arrival.refuse()
        else:
            arrival.accept(self._counters, arrival.seconds)

    def await_back(self, arrival: Arrival) -> None:
        """Wait for an arrival of this thread, and end it. Raises as `back`."""
        with self._unlocked():
            arrival.join()
        self.end_back(arrival)

    def forget_dropped(self, group: CacheGroup) -> None:
        """Forget the swapped blocks that no row of a group has any more."""
        self.storage.forget(group.pool.dropped)
        group.pool.dropped.clear()


def _part(site: SiteSpec, arena: Tensor, index: Tensor) -> Part:
    stored = site.stored(arena)

    def gather(values: Tensor) -> None:
        with torch.no_grad():
            if stored.device == values.device:
                torch.index_select(stored, 0, index, out=values)
            else:
                values.copy_(stored.index_select(0, index))

    return Part(tuple(stored.shape[1:]), stored.dtype, gather)
