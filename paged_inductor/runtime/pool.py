"""The block pool: free list and reference counts of physical blocks, in plain Python.

A *block* is a fixed number of token slots; what a block's bytes mean (which layers, K or V) is the business of
the arenas. Block 0 is the *zero page*: it is never allocated, never written and stands for "nothing here".
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["ZERO_BLOCK", "BlockPool", "OutOfBlocks"]

ZERO_BLOCK = 0


class OutOfBlocks(Exception):
    """No free block is left. The caller grows the arenas, evicts, or reports `KVBudgetExceeded`."""


class BlockPool:
    """Allocator of block ids `1 .. capacity-1` with reference counts.

    Every method is O(1) except `grow`, `shrink` (linear in the ids added or removed) and `check` (linear).
    Not thread-safe by itself: the caller holds the manager's lock.
    """

    __slots__ = ("_free", "_refs")

    def __init__(self) -> None:
        self._refs: list[int] = [1]  # the zero page holds itself
        self._free: list[int] = []  # a stack: the block freed last is the warmest in the processor's caches

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
        return len(self._refs) - 1 - len(self._free)

    def allocate(self) -> int:
        """A free block with reference count 1. Raises `OutOfBlocks` and changes nothing if there is none."""
        if not self._free:
            raise OutOfBlocks
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """Add an owner to an allocated block."""
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Drop an owner; the last one returns the block to the free list."""
        refs = self._refs[block] - 1
        self._refs[block] = refs
        if refs == 0:
            self._free.append(block)

    def refcount(self, block: int) -> int:
        """Owners of a block; 0 if it is free."""
        return self._refs[block]

    def grow(self, capacity: int) -> None:
        """Add ids up to `capacity - 1`. The lowest new id is handed out first."""
        old = len(self._refs)
        self._refs.extend([0] * (capacity - old))
        self._free[:0] = range(capacity - 1, old - 1, -1)

    def shrink(self) -> int:
        """Drop the free ids at the end of the range; returns the new capacity."""
        capacity = len(self._refs)
        while capacity > 1 and self._refs[capacity - 1] == 0:
            capacity -= 1
        if capacity < len(self._refs):
            del self._refs[capacity:]
            self._free = [block for block in self._free if block < capacity]
        return capacity

    def claim(self, blocks: Iterable[int]) -> None:
        """Count one owner per occurrence in `blocks`, free or not (used to rebuild a pool from its tables)."""
        for block in blocks:
            self._refs[block] += 1
        self._free = [block for block in self._free if not self._refs[block]]

    def check(self) -> list[str]:
        """Inconsistencies of the free list and the counts, as sentences (empty when sound)."""
        faults = []
        free = set(self._free)
        if len(free) != len(self._free):
            faults.append(f"the free list holds {len(self._free) - len(free)} block(s) twice")
        if ZERO_BLOCK in free or self._refs[ZERO_BLOCK] != 1:
            faults.append(f"the zero page is free or has {self._refs[ZERO_BLOCK]} owners, not 1")
        for block, refs in enumerate(self._refs):
            if refs < 0 or (refs == 0) != (block in free):
                faults.append(f"block {block} has {refs} owners and is {'' if block in free else 'not '}free")
        return faults
