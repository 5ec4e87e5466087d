"""Hypothesis strategies: what `fuzz` draws, for tests of your own, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._errors import missing_extra
from .loops import Crop, Drop, Feed, Fork, Greedy, Loop, Reorder, Repeat

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["batches", "import_hypothesis", "loops", "prompts"]


def import_hypothesis() -> Any:
    """The library, imported only where it is needed. Raises `MissingExtraError` if it is not installed."""
    try:
        import hypothesis
    except ImportError as error:
        raise missing_extra("paged_inductor.testing", "Hypothesis", "testing") from error
    import hypothesis.strategies

    return hypothesis


def prompts(vocab_size: int, max_length: int = 24) -> SearchStrategy[tuple[int, ...]]:
    """Token ids of one prompt: 1 to `max_length` of them, each from 0 to vocab_size - 1."""
    st = import_hypothesis().strategies
    return st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=max_length).map(tuple)


def batches(
    vocab_size: int, max_batch: int = 3, max_length: int = 24, padded: bool = True
) -> SearchStrategy[tuple[tuple[int, ...], ...]]:
    """1 to `max_batch` prompts: of any lengths, to be padded on the left, or of one length if not `padded`."""
    st = import_hypothesis().strategies

    def of_size(rows: int) -> Any:
        if padded:
            return st.lists(prompts(vocab_size, max_length), min_size=rows, max_size=rows).map(tuple)
        return st.integers(1, max_length).flatmap(lambda length: of_length(rows, length))

    def of_length(rows: int, length: int) -> Any:
        prompt = st.lists(st.integers(0, vocab_size - 1), min_size=length, max_size=length).map(tuple)
        return st.lists(prompt, min_size=rows, max_size=rows).map(tuple)

    return st.integers(1, max_batch).flatmap(of_size)  # else most batches would have one row


def loops(
    vocab_size: int,
    max_batch: int = 3,
    max_length: int = 24,
    padded: bool = True,
    max_new_tokens: int = 8,
    max_operations: int = 6,
) -> SearchStrategy[Loop]:
    """A batch of prompts and 1 to `max_operations` operations on its cache, of up to `max_new_tokens` steps each."""
    st = import_hypothesis().strategies
    branch = st.integers(0, 2)
    operation = st.one_of(
        st.builds(Greedy, branch, st.integers(1, max_new_tokens)),
        st.builds(Feed, branch, prompts(vocab_size, max_new_tokens)),
        st.builds(Reorder, branch, st.lists(st.integers(0, max_batch - 1), min_size=2, max_size=6).map(tuple)),
        st.builds(Repeat, branch, st.integers(2, 3)),
        st.builds(Crop, branch, st.integers(1, max_length)),
        st.builds(Fork, branch),
        st.builds(Drop, branch),
    )
    operations = st.lists(operation, min_size=min(1, max_operations), max_size=max_operations).map(tuple)
    return st.builds(Loop, batches(vocab_size, max_batch, max_length, padded), operations)
