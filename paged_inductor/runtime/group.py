"""Cache groups: the arenas behind a block pool, one per cached tensor of the layers whose lengths move together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch

from .numa import Nodes, touch
from .order import StreamOrder
from .policy import Policy
from .pool import BlockPool
from .sanitizer import Sanitizer
from .site import SiteSpec
from .table import Row, check_rows, register, unregister
from .tails import keep_tail
from .tenants import Tenant
from .view import Holding, Pin, View

__all__ = ["CacheGroup"]


class CacheGroup:
    """A block pool and its arenas: block id `b` is slot `b` of every site's arena.

    Not thread-safe by itself: except for `bury`, the caller holds the manager's lock. While `active` steps run,
    arenas are neither replaced nor moved.
    """

    def __init__(
        self,
        sites: tuple[SiteSpec, ...],
        block_size: int,
        on_death: Callable[[], None],
        nodes: Nodes | None = None,
    ) -> None:
        """nodes: of a host that has several. The arenas on the CPU will be on one of them, `node`."""
        self._nodes = nodes if sites[0].device.type == "cpu" else None
        self.node = None if self._nodes is None else self._nodes.home()
        self.sites = sites
        self.block_size = block_size
        self.token_bytes = sum(site.token_bytes for site in sites)
        self.block_bytes = block_size * self.token_bytes
        self.pool = BlockPool(self.block_bytes)
        self.order = StreamOrder(sites[0].device) if sites[0].device.type == "cuda" else None
        self.arenas = [self._new_arena(site, 1) for site in sites]
        self.follow()
        self.holdings: dict[int, Holding] = {}
        self.pins: dict[int, Pin] = {}
        self.epoch = 0  # counts the occasions on which blocks moved
        self.resizing = False
        self.sanitizer: Sanitizer | None = None
        self._graveyard: deque[int] = deque()
        self._on_death = on_death

    def sanitize(self, on: bool) -> None:
        """Watch the blocks from now on, or no longer."""
        if on != (self.sanitizer is not None):
            self.sanitizer = self.pool.watcher = Sanitizer(self) if on else None

    def _new_arena(self, site: SiteSpec, num_blocks: int) -> torch.Tensor:
        """An arena on the group's node, if it has one."""
        if self._nodes is None or self.node is None:
            return site.new_arena(num_blocks, self.block_size)
        with self._nodes.near(self.node):
            arena = site.new_arena(num_blocks, self.block_size)
            touch(arena)
        return arena

    def bury(self, serial: int) -> None:
        """A view died. Callable from any thread at any moment, also inside the lock: it only enqueues."""
        self._graveyard.append(serial)
        self._on_death()

    def drain(self) -> None:
        """Release what dead views held; blocks that are known stay as cached."""
        graveyard = self._graveyard
        while graveyard:
            serial = graveyard.popleft()
            self.pins.pop(serial, None)
            holding = self.holdings.pop(serial, None)
            if holding is not None:  # None: its making was interrupted
                policy = Policy.of(holding.tenant)
                for row, length in zip(holding.rows, holding.lengths):
                    keep_tail(row, length, self.pool, policy, self.block_size)
                    unregister(row, length, self.pool, self.block_size)

    def forget_names(self) -> None:
        """Nothing is known of any block's tokens any more."""
        self.pool.forget_names()
        for row in self.live_rows():
            row.names = None

    @property
    def active(self) -> int:
        """How often running steps use the group's views, and transfers its arenas."""
        return sum(len(pin.steps) for pin in self.pins.values()) + len(self.pool.transfers)

    @property
    def has_dead(self) -> bool:
        """Whether `drain` has something to release."""
        return bool(self._graveyard)

    # -- work on the device ----------------------------------------------------------------------------------

    def follow(self) -> None:
        """Let what this thread launches come after all that was launched on the group's blocks before."""
        if self.order is not None:
            self.order.follow()

    def launched(self) -> None:
        """Let what others launch come after all that this thread has launched."""
        if self.order is not None:
            self.order.launched()

    def live_rows(self) -> list[Row]:
        """Distinct rows of all views whose blocks are not released yet."""
        return list({id(row): row for holding in self.holdings.values() for row in holding.rows}.values())

    # -- blocks that move ------------------------------------------------------------------------------------

    def pin(self, view: View, sources: Iterable[int] = ()) -> None:
        """Keep the blocks of a view that was made for a step, and those to be copied for it, until the step ends."""
        pin = self.pins.setdefault(view.serial, Pin(threading.get_ident()))
        pin.sources |= frozenset(sources)
        for transfer in self.pool.transfers:
            transfer.leaving.difference_update(pin.sources, *(row.blocks for row in view.rows))

    def unpin(self, view: View) -> None:
        """Undo `pin` for a view that no step uses."""
        pin = self.pins.get(view.serial)
        if pin is not None and not pin.steps:
            del self.pins[view.serial]

    def pinned_blocks(self) -> set[int]:
        """Blocks that must stay where they are."""
        found: set[int] = set()
        for serial, pin in self.pins.items():
            found |= pin.sources
            if serial in self.holdings:
                found.update(block for row in self.holdings[serial].rows for block in row.blocks)
        for transfer in self.pool.transfers:
            found |= transfer.leaving
            found.update(block for row in transfer.rows for block in row.blocks)
        return found

    def mark_used(self, rows: Iterable[Row], when: int) -> None:
        """Let the caches that any of `rows` belong to count as used at `when`, for what is swapped out first."""
        wanted = set(rows)
        for holding in self.holdings.values():
            if not wanted.isdisjoint(holding.rows):
                holding.used = when

    def rename(self, renamed: Mapping[int, int]) -> None:
        """Let every row see other blocks in the place of those in `renamed`; tables made before are stale then."""
        self.epoch += 1
        for row in self.live_rows():
            before = row.blocks[:]
            row.blocks[:] = [renamed.get(block, block) for block in before]
            row.away = any(block < 0 for block in row.blocks)
            if self.sanitizer is not None:
                self.sanitizer.renamed(row, before, renamed)

    def compact_and_shrink(self) -> int:
        """Move the last blocks into the first free ones, and give the arenas' ends back; returns the blocks given back.

        Pinned blocks stay. Obligation: `active == 0`.
        """
        self.follow()
        pinned = self.pinned_blocks()
        used = {block for row in self.live_rows() for block in row.blocks if block > 0} - pinned
        moves: list[tuple[int, int]] = []
        for source, target in zip(sorted(used, reverse=True), self.pool.holes()):
            if target > source:
                break
            moves.append((source, target))
        if moves:
            sources, targets = (torch.tensor(ids, device=self.sites[0].device) for ids in zip(*moves))
            for site, arena in zip(self.sites, self.arenas):
                site.put(arena, targets, site.stored(arena).index_select(0, sources))
            self.rename(dict(moves))
            for source, target in moves:
                self.pool.move(source, target)
        return self.shrink()

    def relength(self, view: View, rows: tuple[Row, ...], lengths: tuple[int, ...]) -> None:
        """Let a static view see `lengths` tokens of `rows`, which must be registered already."""
        before = zip(view.rows, view.lengths)
        view.rows, view.lengths, view.schedule = rows, lengths, None
        holding = self.holdings[view.serial]
        holding.rows, holding.lengths = rows, lengths
        if self.sanitizer is not None:
            self.sanitizer.stamp(rows)
        for row, seen in before:
            unregister(row, seen, self.pool, self.block_size)

    def rebind(self, view: View, position: int, row: Row) -> None:
        """Let batch row `position` of `view` see the tokens of `row`; the row it saw stays registered for it."""
        register(row, view.lengths[position])
        view.rows = (*view.rows[:position], row, *view.rows[position + 1 :])
        self.holdings[view.serial].rows = view.rows
        view.schedule = None
        if self.sanitizer is not None:
            self.sanitizer.stamp((row,))

    def resize(self, num_blocks: int) -> None:
        """Replace the arenas by ones of `num_blocks` blocks, one site at a time; the pool's ids must fit both.

        Obligation: `active == 0`.
        """
        self.follow()
        if self.order is not None:
            self.order.keep(self.arenas)
        before = list(self.arenas)
        try:
            for i, site in enumerate(self.sites):
                old = self.arenas[i]
                keep = min(old.shape[0], num_blocks)
                new = self._new_arena(site, num_blocks)
                with torch.inference_mode(False), torch.no_grad():
                    new[:keep].copy_(old[:keep])
                self.arenas[i] = new
                before[i] = new[: old.shape[0]] if num_blocks > old.shape[0] else old
                del old
        except BaseException:
            self.arenas = before  # the same number of blocks as before; what was replaced already stays so
            raise

    def grow(self, capacity: int) -> None:
        """Have `capacity` blocks in the arenas and in the pool. Obligation: `active == 0`."""
        before = self.pool.capacity
        self.resize(capacity)
        self.pool.grow(capacity)
        if self.sanitizer is not None:
            self.sanitizer.poison(range(before, capacity))

    def shrink(self) -> int:
        """Give back the free blocks at the arenas' end; returns the number of blocks given back."""
        before = self.pool.capacity
        after = self.pool.shrink()
        if after < before:
            self.resize(after)
        return before - after

    def reconcile(self) -> None:
        """Rebuild lengths, reference counts and the free list from the views' holdings and the arenas.

        For recovery when an asynchronous exception (KeyboardInterrupt) struck between two updates of the books. The
        accounts' totals are wrong afterwards: the caller adds up the charges of all pools. This thread's transfers are
        over, but for those that its step ends; others' go on.
        """
        while self._graveyard:
            serial = self._graveyard.popleft()
            self.pins.pop(serial, None)
            self.holdings.pop(serial, None)
        rows = self.live_rows()
        for row in rows:
            row.live = {}
        for holding in self.holdings.values():
            for row, length in zip(holding.rows, holding.lengths):
                register(row, length)
        for row in rows:
            row.length = max(row.live)
            keep = -(-row.length // self.block_size)
            del row.blocks[keep:]
            row.away = any(block < 0 for block in row.blocks)
            if row.stamps is not None:
                del row.stamps[keep:]
        pool = BlockPool(self.block_bytes)
        pool.watcher = self.sanitizer
        pool.grow(min(arena.shape[0] for arena in self.arenas))
        for tenant, blocks in self._blocks_by_tenant().items():
            pool.account = tenant
            pool.claim(blocks)
        for transfer in self.pool.transfers:
            if transfer.thread != threading.get_ident() or transfer.arrival is not None:
                pool.transfers.add(transfer)
                transfer.leaving.intersection_update([b for b in transfer.leaving if pool.refcount(b)])
                for block in transfer.coming:
                    pool.account = self.pool.payer(block) or pool.account
                    pool.claim([block])
        self.pool = pool

    def _blocks_by_tenant(self) -> dict[Tenant, list[int]]:
        """The blocks of every live row, with the tenant of the oldest view that sees it."""
        found: dict[Tenant, list[int]] = {}
        seen: set[int] = set()
        for _, holding in sorted(self.holdings.items()):
            for row in holding.rows:
                if id(row) not in seen:
                    seen.add(id(row))
                    found.setdefault(holding.tenant, []).extend(row.blocks)
        return found

    def check(self) -> list[str]:
        """Inconsistencies of this group's books, as sentences (empty when sound)."""
        faults = self.pool.check() + check_rows(self.live_rows(), self.pool, self.block_size)
        for arena in self.arenas:
            if arena.shape[0] != self.pool.capacity:
                faults.append(f"an arena has {arena.shape[0]} blocks, the pool {self.pool.capacity}")
        return faults
