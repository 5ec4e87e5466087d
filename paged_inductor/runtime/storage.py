"""What is stored where: the extents of all swapped blocks, and room for more in the tiers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from .._config import config
from .disk import DiskTier
from .group import CacheGroup
from .memory import free_bytes
from .numa import Nodes
from .tiers import Extent, HostTier, Part, Tier, TierFull
from .transfer import Transfer

__all__ = ["Piece", "Storage"]

Moving = Callable[[CacheGroup, Transfer], AbstractContextManager[None]]


class Piece(NamedTuple):
    """Where a swapped block's tokens are."""

    extent: Extent
    place: int


class Storage:
    """Where the tokens of swapped blocks are. Obligation for every method: the caller holds the manager's lock.

    An extent that a transfer uses stays open until that has ended, even if none of its blocks is needed any more.
    """

    def __init__(self, groups: Collection[CacheGroup], nodes: Nodes | None = None) -> None:
        """groups: a live view of all groups. nodes: of a host that has several memory nodes."""
        self._groups = groups
        self._nodes = nodes
        self._ids = count(1)
        self._pieces: dict[int, Piece] = {}
        self._blocks: dict[Extent, set[int]] = {}  # oldest first
        self._host, self._disk = HostTier(0), DiskTier(0, tempfile.gettempdir())
        self._spare: int | None = None  # host memory to use for other devices, unless an option says

    # -- room ------------------------------------------------------------------------------------------------

    def rooms(self, group: CacheGroup, parts: Sequence[Part], count: int, moving: Moving) -> Iterator[Extent]:
        """Empty extents for `count` blocks of a group, in the first tier that takes them, then in the next, until the
        caller is content with one; it calls `add` or `close` for each. Older ones make room by going down."""
        on_cpu = group.sites[0].device.type == "cpu"
        tiers = self._available(on_cpu)
        size = sum(part.size(count) for part in parts)
        for i, tier in enumerate(tiers):
            if tier.used + size > tier.limit:
                self._demote(group, tier, size, tiers[i + 1 :], moving)
            try:
                with self._near(group.sites[0].device):
                    extent = tier.make(parts, count, pinned=not on_cpu)
            except TierFull:
                continue
            self._blocks[extent] = set()
            yield extent

    def refusals(self) -> str:
        """What the system said of the tiers in which it gives no more room, though their limits allow it."""
        tiers = [tier for tier in (self._host, self._disk) if tier.limit and tier.refusal]
        return "; ".join(f"{tier.name}: {tier.refusal}" for tier in tiers)

    def _near(self, device: torch.device) -> AbstractContextManager[None]:
        """Inside, memory that is taken at once, as pinned memory is, lies next to a GPU."""
        if self._nodes is None or device.type != "cuda":
            return nullcontext()
        return self._nodes.near(self._nodes.next_to(device))

    def _available(self, on_cpu: bool) -> list[Tier]:
        """The tiers for caches of a kind of device, fastest first, with the limits now in force."""
        options = config()
        limit = options.swap_host
        if limit is None and not on_cpu:
            if self._spare is None:
                self._spare = free_bytes(torch.device("cpu")) // 2
            limit = self._spare
        self._host.limit, self._disk.limit = limit or 0, options.swap_disk
        folder = options.swap_dir or tempfile.gettempdir()
        if folder != self._disk.folder:
            self._disk.folder, self._disk.refusal = folder, ""
        return [tier for tier in (self._host, self._disk) if tier.limit]

    def _demote(self, group: CacheGroup, tier: Tier, size: int, lower: Sequence[Tier], moving: Moving) -> None:
        """Make room in a tier: its oldest extents move to the next."""
        for extent in [extent for extent in self._blocks if extent.tier is tier]:
            if tier.used + size <= tier.limit or not lower:
                return
            ids = sorted(self._blocks.get(extent, ()), key=lambda block: self._pieces[block].place)
            if not ids or self._in_use(extent):
                continue
            contents = extent.read([self._pieces[block].place for block in ids])
            parts = [part._replace(fill=partial(_copy_next, contents)) for part in extent.parts]
            try:
                moved = lower[0].make(parts, len(ids))
            except TierFull:
                return
            self._blocks[moved] = set()
            try:
                with moving(group, Transfer(extents=(extent, moved))), closing(contents):
                    moved.fill(parts)
            except TierFull:
                self.close(moved)
                return
            self.add(moved, {block: place for place, block in enumerate(ids) if self._is_in(block, extent)})
            self._blocks[extent].difference_update(ids)
            self.close_unused()

    def _is_in(self, swapped: int, extent: Extent) -> bool:
        return swapped in self._pieces and self._pieces[swapped].extent is extent

    # -- books -----------------------------------------------------------------------------------------------

    def new_id(self) -> int:
        """The id of one more swapped block."""
        return -next(self._ids)

    def piece(self, swapped: int) -> Piece:
        """Where a swapped block's tokens are."""
        return self._pieces[swapped]

    def add(self, extent: Extent, places: Mapping[int, int]) -> None:
        """An extent has been filled: swapped block -> place in it."""
        for swapped, place in places.items():
            self._pieces[swapped] = Piece(extent, place)
        self._blocks[extent].update(places)

    def close(self, extent: Extent) -> None:
        """Close an extent without blocks."""
        del self._blocks[extent]
        extent.close()

    def close_unused(self) -> None:
        """Close the extents whose blocks nobody needs and which no transfer uses."""
        for extent in [extent for extent, blocks in self._blocks.items() if not blocks]:
            if not self._in_use(extent):
                self.close(extent)

    def _in_use(self, extent: Extent) -> bool:
        return any(extent in transfer.extents for group in self._groups for transfer in group.pool.transfers)

    def forget(self, swapped: Iterable[int]) -> None:
        """The tokens of some swapped blocks are needed no more."""
        for block in swapped:
            self._blocks[self._pieces.pop(block).extent].discard(block)
        self.close_unused()

    def reconcile(self, alive: Set[int]) -> None:
        """Keep the swapped blocks that are `alive`, and nothing else: after the books were rebuilt."""
        self._pieces = {swapped: piece for swapped, piece in self._pieces.items() if swapped in alive}
        kept: dict[Extent, set[int]] = {extent: set() for extent in self._blocks}
        for swapped, (extent, _) in self._pieces.items():
            kept.setdefault(extent, set()).add(swapped)
        self._blocks = kept
        self.close_unused()
        for tier in (self._host, self._disk):
            tier.used = self._stored(tier)

    def _stored(self, tier: Tier) -> int:
        return sum(extent.size for extent in self._blocks if extent.tier is tier)

    def used(self) -> dict[str, int]:
        """Bytes in each tier."""
        return {tier.name: tier.used for tier in (self._host, self._disk)}

    def check(self) -> list[str]:
        """Inconsistencies between the swapped blocks of all groups and what is stored, as sentences."""
        known = sum(group.pool.num_swapped for group in self._groups)
        faults = []
        if known != len(self._pieces):
            faults.append(f"{known} blocks are swapped, but {len(self._pieces)} are stored")
        for tier in (self._host, self._disk):
            size = self._stored(tier)
            if size != tier.used:
                faults.append(f"the {tier.name} tier holds {size} B of extents, but counts {tier.used}")
        return faults


def _copy_next(contents: Iterator[Tensor], target: Tensor) -> None:
    target.copy_(next(contents))
