"""What of a prompt is found: against a search that tries every length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paged_inductor.runtime.names import BlockName, RowNames
from paged_inductor.runtime.prefix_index import PrefixIndex
from paged_inductor.runtime.search import Search, Tokens

SIZE, ROOT = 4, bytes(32)
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=22)


def entered(index: PrefixIndex, ids: list[int], positions: set[int], first: int) -> None:
    """Enter some blocks of a text, and its tail if it is among them."""
    names = RowNames(ROOT).extended(ids, {}, (), SIZE)
    tail = names.extended([9] * (SIZE - len(names.tail)), {}, (), SIZE) if names.tail else names
    for j in positions:
        if j < len(tail.digests) and index.find(("s",), tail.digests[j]) is None:
            parent = tail.digests[j - 1] if j else ROOT
            index.add(first + j, BlockName("s", tail.digests[j], parent, tail.keys[j], 0))


@given(
    cached=st.lists(st.tuples(TEXTS, st.sets(st.integers(0, 5))), max_size=4),
    ids=TEXTS,
    kept=st.one_of(st.none(), st.integers(1, 12)),
    limit=st.integers(0, 22),
)
def test_the_longest_beginning_whose_kept_tokens_are_there_is_found(
    cached: list[tuple[list[int], set[int]]], ids: list[int], kept: int | None, limit: int
) -> None:
    index = PrefixIndex()
    held: dict[int, list[int]] = {}
    for n, (text, positions) in enumerate(cached):
        entered(index, text, positions, 1 + 10 * n)
        held.update((1 + 10 * n + j, [*text, 9, 9, 9][: (j + 1) * SIZE]) for j in positions)
    limit = min(limit, len(ids))
    begins = {(len(text) - 1) // SIZE: [] for text in held.values()}
    for block, text in held.items():
        if block in index:
            begins[(len(text) - 1) // SIZE].append(text)

    def there(j: int, stop: int) -> bool:
        return any(text[:stop] == ids[:stop] for text in begins.get(j, ()))

    def whole(length: int) -> bool:
        first = 0 if kept is None else max(0, length - kept) // SIZE
        return all(there(j, min(length, (j + 1) * SIZE)) for j in range(first, -(-length // SIZE)))

    search = Search(index, ("s",), ROOT, Tokens(ids), SIZE, kept)
    length = search.longest(limit)
    assert length == max(n for n in range(limit + 1) if whole(n))
    assert search.longest(length) == length
    skipped, blocks = search.blocks(length)
    assert skipped == (0 if kept is None else max(0, length - kept) // SIZE)
    for j, block in enumerate(blocks, skipped):
        stop = min(length, (j + 1) * SIZE)
        assert held[block][:stop] == ids[:stop]
    assert search.names(length) == RowNames(ROOT).extended(ids[:length], {}, (), SIZE)


def test_names_of_a_part_are_those_that_were_there_before_a_window_hid_anything() -> None:
    windows = (None, 6, 9)
    marks = {6: b"w1", 9: b"w2"}
    known = RowNames(ROOT).extended(range(6), {}, (), SIZE)
    known = known.extended(range(6, 12), {at - 6: mark for at, mark in marks.items()}, (), SIZE, windows)
    search = Search(PrefixIndex(), (), ROOT, Tokens(range(12), marks, (), windows), SIZE, 5)
    for length in range(13):
        names = known.first(length, SIZE)
        assert names == search.names(length)
        assert names.windows == ((None, 6, 9) if length > 9 else (None, 6, None) if length > 6 else ())
