"""Which prefix decode shares: what block tables have in common, if it is worth a pass of its own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_inductor.runtime.shared_prefix import NoSharing, PrefixSharing, common_blocks

TABLES = st.lists(st.lists(st.integers(1, 3), max_size=5), min_size=1, max_size=4)


@given(tables=TABLES, prefix=st.lists(st.integers(1, 9), max_size=4))
def test_common_blocks_are_those_that_all_tables_begin_with(tables: list[list[int]], prefix: list[int]) -> None:
    tables = [prefix + table for table in tables]
    shared = common_blocks(tables)
    assert all(table[:shared] == tables[0][:shared] for table in tables)
    longer = {tuple(table[: shared + 1]) for table in tables}
    assert len(longer) > 1 or min(map(len, tables)) == shared


def tables(rows: int, shared: int, own: int) -> list[list[int]]:
    return [[*range(1, shared + 1), *range(1000 * (row + 1), 1000 * (row + 1) + own)] for row in range(rows)]


def test_sharing_follows_what_it_saves() -> None:
    rule = PrefixSharing(pass_bytes=1000)
    long = tables(rows=4, shared=10, own=2)
    assert rule.tokens(long, [180] * 4, 16, token_bytes=10) == 160
    assert rule.tokens(long, [180] * 4, 16, token_bytes=2) == 0  # 3 * 160 * 2 bytes
    assert rule.tokens(tables(4, 1, 20), [330] * 4, 16, token_bytes=10) == 0  # 3 * 16 * 10 bytes
    assert rule.tokens(long[:1], [180], 16, token_bytes=1000) == 0
    assert rule.tokens(tables(4, 0, 12), [180] * 4, 16, token_bytes=1000) == 0


def test_only_blocks_that_every_row_has_full_are_shared() -> None:
    assert PrefixSharing(pass_bytes=1).tokens(tables(3, 10, 0), [160, 160, 155], 16, token_bytes=10) == 144
    assert PrefixSharing(pass_bytes=1).tokens(tables(3, 10, 0), [160, 160, 9], 16, token_bytes=10) == 0


def test_no_sharing_is_a_class() -> None:
    assert NoSharing().tokens(tables(16, 500, 1), [8001] * 16, 16, token_bytes=4096) == 0
    assert PrefixSharing().tokens(tables(16, 500, 1), [8001] * 16, 16, token_bytes=4096) == 8000
