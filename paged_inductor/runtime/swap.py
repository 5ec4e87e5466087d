"""Swapping: blocks that no running step reads move to other tiers of memory, and come back when they are used.

A swapped block has a negative id, in the rows as in the pool. Handles and views do not change: a step that uses a view
brings its blocks back first.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence, Set
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from .._config import config
from .._errors import SwapError
from .counters import Counters
from .group import CacheGroup, SiteSpec
from .memory import free_bytes
from .pool import Account
from .table import Row
from .tiers import DiskTier, Extent, HostTier, Part, Tier, TierFull

__all__ = ["SwapSpace", "missing"]


class _Piece(NamedTuple):
    extent: Extent
    place: int


def missing(rows: Iterable[Row]) -> list[int]:
    """The swapped blocks of some rows, each once."""
    return list(dict.fromkeys(block for row in rows if row.away for block in row.blocks if block < 0))


class SwapSpace:
    """Where the tokens of swapped blocks are. Obligation for every method: the caller holds the manager's lock."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._ids = count(1)
        self._pieces: dict[int, _Piece] = {}
        self._blocks: dict[Extent, set[int]] = {}  # oldest first
        self._host, self._disk = HostTier(0), DiskTier(0, tempfile.gettempdir())
        self._spare: int | None = None  # host memory to use for other devices, unless an option says

    # -- out -------------------------------------------------------------------------------------------------

    def out(self, group: CacheGroup, wanted: int, kept: Iterable[Row], payer: Account | None = None) -> int:
        """Swap out at least `wanted` blocks of a group, coldest caches first; returns how many, 0 if none can be.

        kept: rows that stay. payer: only blocks that this account pays for. Those of running steps stay.
        """
        blocks = self._coldest(group, wanted, kept, payer)
        while blocks:
            start = time.perf_counter()
            extent = self._store(group, blocks)
            if extent is not None:
                self._move(group, blocks, extent)
                self._counters.swaps_out += len(blocks)
                self._counters.swap_bytes_out += extent.size
                self._counters.swap_seconds_out += time.perf_counter() - start
                return len(blocks)
            blocks = blocks[: len(blocks) // 2]  # what is left of the tiers may hold some of them
        return 0

    def _coldest(self, group: CacheGroup, wanted: int, kept: Iterable[Row], payer: Account | None) -> list[int]:
        """Blocks in the order in which they should go: by priority, then by how long ago a step used them."""
        stay = group.pinned_blocks() | {block for row in kept for block in row.blocks}
        heat: dict[int, tuple[int, int]] = {}
        for holding in group.holdings.values():
            value = (holding.tenant.priority, holding.used)
            for row in set(holding.rows):
                for block in row.blocks:
                    if block > 0 and block not in stay and value > heat.get(block, (-(2**62), 0)):
                        heat[block] = value
        order = sorted(heat, key=heat.__getitem__)
        if payer is not None:
            order = [block for block in order if group.pool.payer(block) is payer]
        stop = wanted
        while 0 < stop < len(order) and heat[order[stop]] == heat[order[stop - 1]]:  # a cache goes as a whole
            stop += 1
        return order[:stop]

    def _store(self, group: CacheGroup, blocks: Sequence[int]) -> Extent | None:
        """Copy blocks to the first tier that takes them; older ones make room in host memory by going to disk."""
        on_cpu = group.sites[0].device.type == "cpu"
        tiers = self._available(on_cpu)
        if not tiers:
            return None
        index = torch.tensor(blocks, device=group.sites[0].device)
        parts = [_part(site, arena, index) for site, arena in zip(group.sites, group.arenas)]
        size = sum(part.size(len(blocks)) for part in parts)
        for i, tier in enumerate(tiers):
            if tier.used + size > tier.limit:
                self._demote(tier, size, tiers[i + 1 :])
            try:
                return tier.store(parts, len(blocks), pinned=not on_cpu)
            except TierFull:
                continue
        return None

    def _available(self, on_cpu: bool) -> list[Tier]:
        """The tiers for caches of a kind of device, fastest first, with the limits now in force."""
        options = config()
        limit = options.swap_host
        if limit is None and not on_cpu:
            if self._spare is None:
                self._spare = free_bytes(torch.device("cpu")) // 2
            limit = self._spare
        self._host.limit, self._disk.limit = limit or 0, options.swap_disk
        self._disk.folder = options.swap_dir or tempfile.gettempdir()
        return [tier for tier in (self._host, self._disk) if tier.limit]

    def _demote(self, tier: Tier, size: int, lower: Sequence[Tier]) -> None:
        """Make room in a tier: its oldest extents move to the next."""
        for extent in [extent for extent in self._blocks if extent.tier is tier]:
            if tier.used + size <= tier.limit or not lower:
                return
            ids = sorted(self._blocks[extent], key=lambda block: self._pieces[block].place)
            places = [self._pieces[block].place for block in ids]
            contents = [extent.read(site, places) for site in range(extent.sites)]  # host memory: views of it
            parts = [Part(tuple(value.shape[1:]), value.dtype, partial(_copy, value)) for value in contents]
            try:
                moved = lower[0].store(parts, len(places))
            except TierFull:
                return
            self._register(ids, moved)
            self._close(extent)

    def _move(self, group: CacheGroup, blocks: Sequence[int], extent: Extent) -> None:
        """Let the rows see swapped blocks in the place of those that were stored."""
        renamed = {block: -next(self._ids) for block in blocks}
        self._register(list(renamed.values()), extent)
        group.rename(renamed)
        for block, swapped in renamed.items():
            group.pool.swap_out(block, swapped)

    # -- back ------------------------------------------------------------------------------------------------

    def back(self, group: CacheGroup, ids: Sequence[int]) -> None:
        """Bring swapped blocks back into the arenas.

        Raises `OutOfBlocks` or `OverQuota` if there is no room, `SwapError` if their tokens cannot be read; they stay
        swapped then.
        """
        if not ids:
            return
        start = time.perf_counter()
        renamed: dict[int, int] = {}
        pool = group.pool
        try:
            for swapped in ids:
                renamed[swapped] = pool.reserve_for(swapped)
            size = self._read(group, renamed)
        except BaseException as error:
            for block in renamed.values():
                pool.release(block)
            if isinstance(error, SwapError):
                raise SwapError(
                    f"{len(ids)} swapped block(s) of a cache could not be brought back: {error}. That cache is lost: "
                    "drop it and compute it again; all others are intact"
                ) from error
            raise
        group.rename(renamed)
        for swapped, block in renamed.items():
            pool.swap_in(swapped, block)
            self._forget(swapped)
        self._counters.swaps_in += len(ids)
        self._counters.swap_bytes_in += size
        self._counters.swap_seconds_in += time.perf_counter() - start

    def _read(self, group: CacheGroup, renamed: dict[int, int]) -> int:
        """Copy the contents of swapped blocks into those that take their places, layer by layer."""
        by_extent: dict[Extent, list[tuple[int, int]]] = {}
        for swapped, block in renamed.items():
            extent, place = self._pieces[swapped]
            by_extent.setdefault(extent, []).append((place, block))
        size = 0
        for extent, pairs in by_extent.items():
            pairs.sort()
            places, blocks = [place for place, _ in pairs], [block for _, block in pairs]
            index = torch.tensor(blocks, device=group.sites[0].device)
            for i, (site, arena) in enumerate(zip(group.sites, group.arenas)):
                values = extent.read(i, places)
                size += values.nbytes
                site.put(arena, index, values)
        return size

    # -- books -----------------------------------------------------------------------------------------------

    def _register(self, ids: Sequence[int], extent: Extent) -> None:
        self._blocks[extent] = set(ids)
        for place, swapped in enumerate(ids):
            self._pieces[swapped] = _Piece(extent, place)

    def _forget(self, swapped: int) -> None:
        extent, _ = self._pieces.pop(swapped)
        blocks = self._blocks[extent]
        blocks.discard(swapped)
        if not blocks:
            self._close(extent)

    def _close(self, extent: Extent) -> None:
        del self._blocks[extent]
        extent.close()

    def forget_dropped(self, group: CacheGroup) -> None:
        """Forget the swapped blocks that no row of a group has any more."""
        dropped = group.pool.dropped
        while dropped:
            self._forget(dropped.pop())

    def reconcile(self, alive: Set[int]) -> None:
        """Keep the swapped blocks that are `alive`, and nothing else: after the books were rebuilt."""
        self._pieces = {swapped: piece for swapped, piece in self._pieces.items() if swapped in alive}
        kept: dict[Extent, set[int]] = {extent: set() for extent in self._blocks}
        for swapped, (extent, _) in self._pieces.items():
            kept.setdefault(extent, set()).add(swapped)
        for extent, blocks in kept.items():
            if not blocks:
                extent.close()
        self._blocks = {extent: blocks for extent, blocks in kept.items() if blocks}
        for tier in (self._host, self._disk):
            tier.used = sum(extent.size for extent in self._blocks if extent.tier is tier)

    def used(self) -> dict[str, int]:
        """Bytes in each tier."""
        return {tier.name: tier.used for tier in (self._host, self._disk)}

    def check(self, groups: Iterable[CacheGroup]) -> list[str]:
        """Inconsistencies between the swapped blocks of all groups and what is stored, as sentences."""
        known = sum(group.pool.num_swapped for group in groups)
        faults = []
        if known != len(self._pieces):
            faults.append(f"{known} blocks are swapped, but {len(self._pieces)} are stored")
        for tier in (self._host, self._disk):
            size = sum(extent.size for extent in self._blocks if extent.tier is tier)
            if size != tier.used:
                faults.append(f"the {tier.name} tier holds {size} B of extents, but counts {tier.used}")
        return faults


def _part(site: SiteSpec, arena: Tensor, index: Tensor) -> Part:
    stored = site.stored(arena)

    def gather(values: Tensor) -> None:
        with torch.no_grad():
            if stored.device == values.device:
                torch.index_select(stored, 0, index, out=values)
            else:
                values.copy_(stored.index_select(0, index))

    return Part(tuple(stored.shape[1:]), stored.dtype, gather)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
