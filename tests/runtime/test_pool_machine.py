"""The block pool against a plain model: a dict of owners."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_inductor.runtime.pool import ZERO_BLOCK, BlockPool, OutOfBlocks
from paged_inductor.runtime.transfer import Transfer


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool()
        self.capacity = 1
        self.owners: dict[int, int] = {}

    def block(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.owners)))

    any_used = precondition(lambda self: bool(self.owners))

    @rule()
    def allocate(self) -> None:
        if len(self.owners) == self.capacity - 1:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate()
            return
        block = self.pool.allocate()
        assert block != ZERO_BLOCK
        assert block not in self.owners
        assert 0 < block < self.capacity
        self.owners[block] = 1

    @any_used
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = self.block(data)
        self.pool.retain(block)
        self.owners[block] += 1

    @any_used
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = self.block(data)
        self.pool.release(block)
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]

    @any_used
    @rule(data=st.data())
    def warmest_first(self, data: st.DataObject) -> None:
        """The block freed last is handed out next."""
        block = self.block(data)
        for _ in range(self.owners.pop(block)):
            self.pool.release(block)
        assert self.pool.allocate() == block
        self.owners[block] = 1

    @rule(more=st.integers(0, 9))
    def grow(self, more: int) -> None:
        self.capacity += more
        self.pool.grow(self.capacity)

    @rule()
    def shrink(self) -> None:
        self.capacity = max(self.owners, default=0) + 1
        assert self.pool.shrink() == self.capacity

    @precondition(lambda self: self.capacity > 1)
    @rule(data=st.data())
    def claim(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.integers(1, self.capacity - 1), max_size=6))
        self.pool.claim(blocks)
        for block in blocks:
            self.owners[block] = self.owners.get(block, 0) + 1

    @invariant()
    def books_balance(self) -> None:
        pool = self.pool
        assert pool.check() == []
        assert pool.capacity == self.capacity
        assert pool.num_used == len(self.owners)
        assert pool.num_free == self.capacity - 1 - len(self.owners)
        assert all(pool.refcount(block) == self.owners.get(block, 0) for block in range(1, self.capacity))


TestPoolMachine = PoolMachine.TestCase


def test_new_ids_come_lowest_first() -> None:
    pool = BlockPool()
    pool.grow(5)
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.release(ZERO_BLOCK), "the zero page is free or has 0 owners"),
        (lambda pool: (pool.release(1), pool.release(1)), "block 1 has -1 owners"),
        (lambda pool: pool.retain(2), "block 2 has 1 owners and is free"),
        (lambda pool: (pool.release(1), pool.retain(1), pool.release(1)), "the free list holds 1 block(s) twice"),
    ],
)
def test_check_finds_damage(damage: object, message: str) -> None:
    """The check can fail: each kind of damage is named."""
    pool = BlockPool()
    pool.grow(3)
    assert pool.allocate() == 1
    assert pool.check() == []
    damage(pool)  # type: ignore[operator]
    assert message in "; ".join(pool.check())


def test_a_freed_block_is_no_longer_on_its_way_out() -> None:
    """Else its next owner's tokens would be taken for those that were copied."""
    pool = BlockPool()
    pool.grow(4)
    first, second = pool.allocate(), pool.allocate()
    transfer = Transfer(leaving={first, second})
    pool.transfers.add(transfer)
    pool.release(first)
    assert transfer.leaving == {second}
