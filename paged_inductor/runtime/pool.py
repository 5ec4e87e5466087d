"""The block pool: free list, reference counts and accounts of physical blocks, in plain Python.

A *block* is a fixed number of token slots; what a block's bytes mean (which layers, K or V) is the business of
the arenas. Block 0 is the *zero page*: it is never allocated, never written and stands for "nothing here". A negative
id is a *swapped* block: its tokens are in another tier of memory (see `swap`), and it has owners as any block. A block
that loses its last owner but has a name in the `index` is *cached*: neither free nor used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from .prefix_index import PrefixIndex
from .transfer import Transfer

__all__ = ["ZERO_BLOCK", "Account", "BlockPool", "OutOfBlocks", "OverQuota", "Watcher"]

ZERO_BLOCK = 0


class OutOfBlocks(Exception):
    """No free block is left. The caller grows the arenas, evicts, or reports `KVBudgetExceeded`."""


class OverQuota(OutOfBlocks):
    """An account's limit is reached. The caller swaps some of its blocks out, or reports `QuotaExceeded`."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account


class Account:
    """Bytes of physical blocks that somebody pays for. limit: what `used` never exceeds."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: float = float("inf")) -> None:
        self.used = 0
        self.limit = limit


class Watcher(Protocol):
    """Is told when blocks are freed: the sanitizer."""

    def freed(self, block: int) -> None:
        """A block has just lost its last owner."""

    def freed_twice(self, block: int) -> None:
        """A block without owners is about to be released. Raises."""


class BlockPool:
    """Allocator of block ids `1 .. capacity-1` with reference counts.

    Whoever allocates a block pays for it, for as long as it has owners: `account` is charged `block_bytes`.
    What a step calls for each block (`allocate`, `retain`, `release`, `share`) is O(1); what concerns all of them is
    linear.
    Not thread-safe by itself: the caller holds the manager's lock.
    """

    __slots__ = (
        "_free",
        "_payers",
        "_refs",
        "_swapped",
        "account",
        "block_bytes",
        "dropped",
        "index",
        "transfers",
        "watcher",
    )

    def __init__(self, block_bytes: int = 1) -> None:
        self._refs: list[int] = [1]  # the zero page holds itself
        self._payers: list[Account | None] = [None]
        self._free: list[int] = []  # a stack: the block freed last is the warmest in the processor's caches
        self._swapped: dict[int, tuple[int, Account]] = {}  # owners of a swapped block, and who pays when it is back
        self.block_bytes = block_bytes
        self.account = Account()
        self.index = PrefixIndex()
        self.watcher: Watcher | None = None
        self.dropped: list[int] = []  # swapped blocks without owners, for the swap space to forget
        self.transfers: set[Transfer] = set()  # copies of blocks that are under way

    @property
    def capacity(self) -> int:
        """Blocks that exist, the zero page included (the arenas' first dimension)."""
        return len(self._refs)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out before the pool has to grow."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Allocated blocks, the zero page not counted."""
        return len(self._refs) - 1 - len(self._free) - self.index.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks without owners whose tokens are kept, because they have names; `evict` makes them free."""
        return self.index.num_cached

    @property
    def num_swapped(self) -> int:
        """Blocks whose tokens are in another tier."""
        return len(self._swapped)

    def allocate(self) -> int:
        """A free block with reference count 1, charged to `account`.

        Raises `OutOfBlocks` if there is none, `OverQuota` if the account may hold no more; nothing has changed then.
        """
        account = self.account
        if account.used + self.block_bytes > account.limit:
            raise OverQuota(account)
        if not self._free:
            raise OutOfBlocks
        block = self._free.pop()
        self._refs[block] = 1
        self._payers[block] = account
        account.used += self.block_bytes
        return block

    def retain(self, block: int) -> None:
        """Add an owner to an allocated or swapped block."""
        if block < 0:
            refs, payer = self._swapped[block]
            self._swapped[block] = (refs + 1, payer)
        else:
            self._refs[block] += 1

    def release(self, block: int) -> None:
        """Drop an owner; the last one returns the block to the free list, caches it if it has a name, or forgets a
        swapped one."""
        if block < 0:
            self._release_swapped(block)
            return
        refs = self._refs[block] - 1
        if refs < 0 and self.watcher is not None:
            self.watcher.freed_twice(block)
        self._refs[block] = refs
        if refs == 0:
            if self.index.park(block):
                self._charge(block, None)
            else:
                self._put_back(block)

    def _put_back(self, block: int) -> None:
        """A block has no owners any more, and nobody pays for it."""
        self._free.append(block)
        self._charge(block, None)
        for transfer in self.transfers:
            transfer.leaving.discard(block)
        if self.watcher is not None:
            self.watcher.freed(block)

    def share(self, block: int, common: Account) -> None:
        """Add an owner, on behalf of `account`, to a named block. It pays if nobody does; if another account does,
        `common` will from now on.

        Raises `OverQuota`, with nothing changed, if a cached block is one too many for `account`.
        """
        payer = self._payers[block]
        if payer is None:
            if self.account.used + self.block_bytes > self.account.limit:
                raise OverQuota(self.account)
            self.index.unpark(block)
            self._charge(block, self.account)
        elif payer is not self.account and payer is not common:
            self._charge(block, common)
        self._refs[block] += 1

    def evict(self, count: int) -> int:
        """Make up to `count` cached blocks free; returns how many."""
        for done in range(count):
            block = self.index.evict()
            if block is None:
                return done
            self._put_back(block)
        return count

    def evict_behind(self, count: int) -> None:
        """Make `count` cached blocks free that windows left behind."""
        for _ in range(count):
            self._put_back(self.index.evict_behind())

    def forget_names(self) -> None:
        """No block has a name any more; the cached ones are free."""
        self.evict(self.num_cached)
        self.index = PrefixIndex()

    def _release_swapped(self, block: int) -> None:
        refs, payer = self._swapped[block]
        if refs > 1:
            self._swapped[block] = (refs - 1, payer)
        else:
            del self._swapped[block]
            self.dropped.append(block)

    def refcount(self, block: int) -> int:
        """Owners of a block; 0 if it is free."""
        if block < 0:
            return self._swapped[block][0] if block in self._swapped else 0
        return self._refs[block]

    def payer(self, block: int) -> Account | None:
        """Who pays for a block: None if it is free; of a swapped one, who will pay when it is back."""
        if block < 0:
            return self._swapped[block][1]
        return self._payers[block]

    def _charge(self, block: int, account: Account | None) -> None:
        before = self._payers[block]
        if before is not None:
            before.used -= self.block_bytes
        if account is not None:
            account.used += self.block_bytes
        self._payers[block] = account

    # -- swapping --------------------------------------------------------------------------------------------

    def swap_out(self, block: int, swapped: int) -> None:
        """Give an allocated block's owners to the new negative id `swapped`; the block is free."""
        payer = self._payers[block]
        assert payer is not None
        self._swapped[swapped] = (self._refs[block], payer)
        self.index.forget(block)
        self._refs[block] = 0
        self._put_back(block)

    def reserve(self, swapped: Iterable[int]) -> dict[int, int]:
        """Blocks for the tokens of swapped ones, each charged to who paid for that: swapped -> block, in the same order
        as far as one account pays. Raises as `allocate`, with nothing changed."""
        by_payer: dict[Account, list[int]] = {}
        for each in swapped:
            by_payer.setdefault(self._swapped[each][1], []).append(each)
        current = self.account
        result: dict[int, int] = {}
        taken: list[int] = []
        try:
            for self.account, members in by_payer.items():
                first = len(taken)
                for _ in members:
                    taken.append(self.allocate())
                result.update(zip(members, sorted(taken[first:])))
        except BaseException:
            for block in taken:
                self.release(block)
            raise
        finally:
            self.account = current
        return result

    def swap_in(self, swapped: int, block: int) -> None:
        """Give a swapped block's owners to `block`, from `reserve`."""
        self._refs[block] = self._swapped.pop(swapped)[0]

    def move(self, source: int, target: int) -> None:
        """Give an allocated block's owners and its payer to a free one."""
        self._free.remove(target)
        self._free.append(source)
        self._refs[target], self._refs[source] = self._refs[source], 0
        self._payers[target], self._payers[source] = self._payers[source], None
        self.index.move(source, target)
        if self.watcher is not None:
            self.watcher.freed(source)

    def holes(self) -> list[int]:
        """The free blocks, lowest first."""
        return sorted(self._free)

    # -- size ------------------------------------------------------------------------------------------------

    def grow(self, capacity: int) -> None:
        """Add ids up to `capacity - 1`. The lowest new id is handed out first."""
        old = len(self._refs)
        self._refs.extend([0] * (capacity - old))
        self._payers.extend([None] * (capacity - old))
        self._free[:0] = range(capacity - 1, old - 1, -1)

    def shrink(self) -> int:
        """Drop the free ids at the end of the range; returns the new capacity."""
        capacity = len(self._refs)
        while capacity > 1 and self._refs[capacity - 1] == 0:
            capacity -= 1
        for block in [block for block in self.index.cached() if block >= capacity]:
            self.index.unpark(block)
            self.index.forget(block)
        if capacity < len(self._refs):
            del self._refs[capacity:]
            del self._payers[capacity:]
            self._free = [block for block in self._free if block < capacity]
        return capacity

    def claim(self, blocks: Iterable[int]) -> None:
        """Count one owner per occurrence in `blocks`, free or not (used to rebuild a pool from its tables).

        `account` pays for those that nobody paid for."""
        for block in blocks:
            if block < 0:
                refs, payer = self._swapped.get(block, (0, self.account))
                self._swapped[block] = (refs + 1, payer)
                continue
            self._refs[block] += 1
            if self._payers[block] is None:
                self._charge(block, self.account)
        self._free = [block for block in self._free if not self._refs[block]]

    def charges(self) -> dict[Account, int]:
        """Bytes that each account pays for in this pool."""
        total: dict[Account, int] = {}
        for payer in self._payers:
            if payer is not None:
                total[payer] = total.get(payer, 0) + self.block_bytes
        return total

    def swapped_by(self) -> dict[Account, int]:
        """Swapped blocks that each account will pay for when they are back."""
        count: dict[Account, int] = {}
        for _, payer in self._swapped.values():
            count[payer] = count.get(payer, 0) + 1
        return count

    def check(self) -> list[str]:
        """Inconsistencies of the free list and the counts, as sentences (empty when sound)."""
        faults = self.index.check()
        free, cached = set(self._free), set(self.index.cached())
        if free & cached:
            faults.append(f"{len(free & cached)} block(s) are both free and cached")
        if len(free) != len(self._free):
            faults.append(f"the free list holds {len(self._free) - len(free)} block(s) twice")
        if ZERO_BLOCK in free or self._refs[ZERO_BLOCK] != 1:
            faults.append(f"the zero page is free or has {self._refs[ZERO_BLOCK]} owners, not 1")
        for block, refs in enumerate(self._refs):
            if refs < 0 or (refs == 0) != (block in free or block in cached):
                faults.append(f"block {block} has {refs} owners and is {'' if block in free else 'not '}free")
            if block in self.index and refs == 0 and block not in cached:
                faults.append(f"block {block} has a name and no owner, and is not cached")
            if block != ZERO_BLOCK and (self._payers[block] is None) != (refs == 0):
                faults.append(f"block {block} has {refs} owners and {'no' if refs else 'a'} payer")
        return faults
