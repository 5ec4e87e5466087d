"""Names of blocks, and the index of them: books that balance, and blocks that hold what their names say."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paged_inductor.runtime.names import BlockName, RowNames, child_digest, decode_key, encode_key
from paged_inductor.runtime.policy import Policy
from paged_inductor.runtime.pool import Account, BlockPool, OutOfBlocks, OverQuota
from paged_inductor.runtime.prefix_index import PrefixIndex
from paged_inductor.runtime.table import Row, register, unregister
from paged_inductor.runtime.tails import keep_tail
from paged_inductor.runtime.tenants import Tenant

SIZE = 4
IDS = st.integers(0, 2)
DEVIATIONS = st.dictionaries(st.integers(0, 11), st.binary(min_size=1, max_size=3))


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20), deviations=DEVIATIONS)
def test_a_key_says_what_it_was_made_of(ids: list[int], deviations: dict[int, bytes]) -> None:
    assert decode_key(encode_key(ids, deviations), len(ids)) == (ids, deviations)


def test_a_digest_is_a_chain_of_sha256() -> None:
    root = bytes(32)
    first = sha256(root + (7).to_bytes(8, "little")).digest()
    names = RowNames(root).extended([7, 300], {}, (), 1)
    assert names.digests == (first, sha256(first + (300).to_bytes(8, "little")).digest())


TOKENS = st.lists(st.tuples(IDS, st.one_of(st.none(), st.binary(min_size=1, max_size=2))), min_size=1, max_size=SIZE)


@given(TOKENS, TOKENS)
def test_the_common_beginning_counts_what_else_is_given(one: list[Any], other: list[Any]) -> None:
    (ids, deviations), (wanted, also) = (
        ([token for token, _ in each], {at: v for at, (_, v) in enumerate(each) if v is not None})
        for each in (one, other)
    )
    key = encode_key(ids, deviations)
    index = PrefixIndex()
    index.add(1, BlockName("s", child_digest(b"r", key), b"r", key, 0, len(ids) if len(ids) < SIZE else 0))
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    assert index.find_partly(("s",), b"r", wanted, also, SIZE) == ((1, same) if same else None)


@given(st.lists(st.tuples(IDS, st.one_of(st.none(), st.binary(min_size=1, max_size=2))), max_size=14), st.data())
def test_names_do_not_depend_on_how_tokens_came(tokens: list[tuple[int, bytes | None]], data: st.DataObject) -> None:
    """In one call or in several, or as a part of more."""

    def extended(names: RowNames, part: list[tuple[int, bytes | None]]) -> RowNames:
        deviations = {at: value for at, (_, value) in enumerate(part) if value is not None}
        at = names.length(SIZE)
        return names.extended([token for token, _ in part], deviations, [at + i for i in deviations], SIZE)

    whole = extended(RowNames(b"r"), tokens)
    cut = data.draw(st.integers(0, len(tokens)))
    assert extended(extended(RowNames(b"r"), tokens[:cut]), tokens[cut:]) == whole
    assert whole.first(cut, SIZE) == extended(RowNames(b"r"), tokens[:cut])
    assert whole.length(SIZE) == len(tokens)


class IndexMachine(RuleBasedStateMachine):
    """A pool whose blocks are named after their contents, by owners in two scopes with salts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool()
        self.pool.grow(9)
        self.accounts = {"a": Account(), "b": Account(5)}
        self.common = Account()
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}  # of named blocks
        self.rows: list[list[int]] = []

    def chain(self, who: str, tokens: list[int]) -> list[tuple[bytes, BlockName]]:
        names, parent = [], who.encode()
        for token in tokens:
            key = encode_key([token] * SIZE, {})
            digest = child_digest(parent, key)
            names.append((digest, BlockName(who, digest, parent, key, 0 if who == "a" else 1)))
            parent = digest
        return names

    @rule(who=st.sampled_from("ab"), tokens=st.lists(IDS, min_size=1, max_size=4))
    def store(self, who: str, tokens: list[int]) -> None:
        """A row of blocks, shared where they exist, as far as there is room."""
        self.pool.account = self.accounts[who]
        row: list[int] = []
        for i, (digest, name) in enumerate(self.chain(who, tokens)):
            block = self.pool.index.find((who,), digest)
            try:
                if block is not None:
                    self.pool.share(block, self.common)
                    assert self.contents[block] == (who, tuple(tokens[: i + 1]))
                else:
                    if not self.pool.num_free and self.pool.evict(1):
                        self.contents = {b: c for b, c in self.contents.items() if b in self.pool.index}
                    block = self.pool.allocate()
                    assert block not in self.contents
                    self.pool.index.add(block, name)
                    self.contents[block] = (who, tuple(tokens[: i + 1]))
            except OutOfBlocks:
                break
            row.append(block)
        if row:
            self.rows.append(row)

    any_row = precondition(lambda self: bool(self.rows))

    @any_row
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        for block in reversed(self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))):
            self.pool.release(block)

    @any_row
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({block for row in self.rows for block in row})))
        self.pool.index.forget(block)
        self.contents.pop(block, None)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_names()
        self.contents.clear()
        assert self.pool.num_cached == 0

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        before = self.pool.num_cached
        assert self.pool.evict(count) == min(count, before)
        self.contents = {block: what for block, what in self.contents.items() if block in self.pool.index}

    @invariant()
    def books_balance(self) -> None:
        assert self.pool.check() == []
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_used == pool.capacity - 1
        assert len(pool.index) == len(self.contents)
        held = {block for row in self.rows for block in row}
        assert pool.num_used == len(held)
        for block in held:
            assert pool.refcount(block) == sum(row.count(block) for row in self.rows)
        assert sum(account.used for account in (*self.accounts.values(), self.common)) == len(held)
        assert self.accounts["b"].used <= 5

    @invariant()
    def salts_separate(self) -> None:
        owners = [{self.contents[b][0] for b in row if b in self.contents} for row in self.rows]
        assert all(len(found) <= 1 for found in owners)


TestIndex = IndexMachine.TestCase


def named(pool: BlockPool, parent: bytes, token: int, priority: float = 0) -> tuple[int, bytes]:
    key = encode_key([token] * SIZE, {})
    digest = child_digest(parent, key)
    block = pool.allocate()
    pool.index.add(block, BlockName("s", digest, parent, key, priority))
    return block, digest


def test_eviction_goes_by_priority_then_by_use_and_takes_leaves_first() -> None:
    pool = BlockPool()
    pool.grow(9)
    dear, _ = named(pool, b"x", 0, priority=1)
    parent, digest = named(pool, b"r", 1)
    child, _ = named(pool, digest, 2)
    other, _ = named(pool, b"q", 3)
    for block in (dear, parent, other, child):  # the parent is older than its child
        pool.release(block)
    assert list(pool.index.cached()) == [parent, other, child, dear]
    assert [pool.index.evict() for _ in range(5)] == [other, child, parent, dear, None]


def test_a_cached_block_comes_back_and_is_the_last_to_go() -> None:
    pool = BlockPool()
    pool.grow(9)
    first, digest = named(pool, b"r", 1)
    second, _ = named(pool, b"r", 2)
    pool.release(first)
    pool.release(second)
    assert (pool.num_cached, pool.num_used) == (2, 0)
    found = pool.index.find(("s",), digest)
    assert found == first
    pool.share(first, Account())
    assert (pool.num_cached, pool.num_used, pool.refcount(first)) == (1, 1, 1)
    pool.release(first)
    assert list(pool.index.cached()) == [second, first]


def test_who_shares_pays_once() -> None:
    pool = BlockPool(10)
    pool.grow(9)
    mine, yours, common = Account(), Account(), Account()
    pool.account = mine
    block, _ = named(pool, b"r", 1)
    pool.account = yours
    pool.share(block, common)
    assert (mine.used, yours.used, common.used) == (0, 0, 10)
    pool.release(block)
    pool.release(block)
    assert (mine.used, yours.used, common.used, pool.num_cached) == (0, 0, 0, 1)
    yours.limit = 9
    with pytest.raises(OverQuota):
        pool.share(block, common)
    assert (pool.num_cached, yours.used) == (1, 0)


def test_a_block_that_begins_like_the_wanted_one_is_found() -> None:
    index = PrefixIndex()
    for block, ids in ((1, [5, 6, 7, 8]), (2, [5, 6, 9, 9]), (3, [1, 1, 1, 1])):
        key = encode_key(ids, {})
        index.add(block, BlockName("s", child_digest(b"r", key), b"r", key, 0))
    assert index.find_partly(("s",), b"r", [5, 6, 9], {}, SIZE) == (2, 3)
    assert index.find_partly(("s",), b"r", [5, 6, 7, 8], {}, SIZE) == (1, 4)
    assert index.find_partly(("s",), b"r", [2, 6], {}, SIZE) is None
    assert index.find_partly(("t",), b"r", [5, 6], {}, SIZE) is None
    assert index.find_partly(("s",), b"q", [5, 6], {}, SIZE) is None


def dropped(pool: BlockPool, ids: list[int], share: str = "tenant", name: str = "tails") -> Row:
    """A row of these tokens whose full blocks have names, after its only view was dropped."""
    tenant = Tenant(name)
    tenant.share = share
    policy = Policy.of(tenant)
    row = Row([pool.allocate() for _ in range(-(-len(ids) // SIZE))], len(ids))
    row.names = RowNames(b"r").extended(ids, {}, (), SIZE)
    parent = b"r"
    for block, digest, key in zip(row.blocks, row.names.digests, row.names.keys):
        if pool.index.find(policy.scopes, digest) is None and policy.own is not None:
            pool.index.add(block, BlockName(policy.own, digest, parent, key, policy.priority))
        parent = digest
    register(row, len(ids))
    keep_tail(row, len(ids), pool, policy, SIZE)
    unregister(row, len(ids), pool, SIZE)
    assert pool.check() == []
    return row


def test_the_tail_of_a_dropped_row_is_found_by_its_first_tokens_and_goes_first() -> None:
    pool = BlockPool()
    pool.grow(20)
    scope, digest = ("tenant", "tails"), RowNames(b"r").extended([1, 2, 3, 4], {}, (), SIZE).digests[0]
    dropped(pool, [1, 2, 3, 4, 5, 6])
    assert pool.num_cached == 2
    found = pool.index.find_partly((scope,), digest, [5, 6, 7], {}, SIZE)
    assert found is not None and found[1] == 2
    assert pool.index.find_partly((scope,), digest, [5, 9], {}, SIZE) == (found[0], 1)
    dropped(pool, [1, 2, 3, 4, 5])  # nothing new
    assert pool.num_cached == 2
    dropped(pool, [1, 2, 3, 4, 5, 6, 7])  # more than was known
    assert pool.index.find_partly((scope,), digest, [5, 6, 7, 8], {}, SIZE)[1] == 3  # type: ignore[index]
    pool.index.raise_priority(found[0], 9)
    tails = [block for block in pool.index.cached() if pool.index.name(block).tail]
    assert len(tails) == 2 and [pool.index.evict() for _ in range(2)] == tails
    assert pool.num_cached == 1


@pytest.mark.parametrize("share", ["none", "system"])
def test_tails_of_who_does_not_share_are_not_kept(share: str) -> None:
    pool = BlockPool()
    pool.grow(9)
    dropped(pool, [1, 2, 3, 4, 5, 6], share)
    assert (pool.num_cached, pool.num_used, pool.num_free) == (0, 0, 8)


def test_only_known_tokens_of_a_tail_that_nobody_else_sees_are_kept() -> None:
    pool = BlockPool()
    pool.grow(9)
    tenant = Tenant("tails")
    tenant.share = "tenant"
    policy = Policy.of(tenant)

    def kept(row: Row, length: int) -> int:
        keep_tail(row, length, pool, policy, SIZE)
        unregister(row, length, pool, SIZE)
        return pool.num_cached

    row = Row([pool.allocate()], 3)
    row.names = RowNames(b"r").extended([1, 2], {}, (), SIZE)  # the third one is not known
    for length in (2, 3):
        register(row, length)
    assert kept(row, 3) == 0  # a view of two is there
    register(row, 2)
    assert kept(row, 2) == 0  # and another
    assert kept(row, 2) == 1
    assert pool.index.find_partly(policy.scopes, b"r", [1, 2, 3], {}, SIZE) == (1, 2)

    row = Row([pool.allocate()], 2)
    row.names = RowNames(b"q").extended([1, 2], {1: b"p"}, (), SIZE)
    register(row, 2)
    assert kept(row, 2) == 2
    for also, same in (({1: b"p"}, 2), ({}, 1), ({1: b"q"}, 1), ({0: b"p", 1: b"p"}, 0), ({1: b"p", 2: b"p"}, 2)):
        assert (pool.index.find_partly(policy.scopes, b"q", [1, 2, 3], also, SIZE) or (0, 0))[1] == same
    row = Row([pool.allocate(), pool.allocate()], 6)
    row.names = RowNames(b"q").extended([1, 2, 3, 4, 5, 6], {}, (), SIZE)
    register(row, 6)
    assert kept(row, 6) == 2  # its parent has no name: nobody would find it
    assert pool.check() == []


def test_what_a_block_held_keeps_its_name_when_it_moves_and_loses_it_when_it_is_swapped_out() -> None:
    pool = BlockPool()
    pool.grow(9)
    spare = pool.allocate()
    block, digest = named(pool, b"r", 1)
    pool.release(spare)
    pool.move(block, spare)
    assert pool.index.find(("s",), digest) == spare
    assert pool.check() == []
    pool.swap_out(spare, -1)
    assert pool.index.find(("s",), digest) is None
    assert pool.check() == []


def test_cached_blocks_at_the_end_go_when_the_pool_shrinks() -> None:
    pool = BlockPool()
    pool.grow(4)
    blocks = [named(pool, bytes([i]), i) for i in range(3)]
    for block, _ in blocks[1:]:
        pool.release(block)
    assert pool.shrink() == 2
    assert [pool.index.find(("s",), digest) for _, digest in blocks] == [1, None, None]
    assert pool.check() == []
